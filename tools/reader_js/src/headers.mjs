// A data file's safetensors header, derived from the manifest (R-10.4). Pure.

import { isWhole } from './boxes.mjs';
import { compareText, utf8 } from './bytes.mjs';
import { renderChunkKey } from './names.mjs';
import { RAW, storedShape } from './registry.mjs';

/** The chunks of each data file, in storage order. */
export function chunksByFile(columns, fileCount, order) {
  const files = Array.from({ length: fileCount }, () => []);
  for (const c of order) files[columns.file(c)].push(c);
  return files;
}

/**
 * The u64 length and the JSON text, without the padding.
 * @returns {Uint8Array|null} null if the text does not fit into `header_nbytes`
 */
export function deriveHeader(file, chunks, columns, extents, paths) {
  const headerNbytes = file.get('header_nbytes');
  const members = headerMembers(file, chunks, columns, extents, paths);
  if (members === null) return null;
  const text = utf8(`{${members.join(',')}}`);
  if (BigInt(text.length) + 8n > headerNbytes) return null;
  const bytes = new Uint8Array(8 + text.length);
  new DataView(bytes.buffer).setBigUint64(0, headerNbytes - 8n, true);
  bytes.set(text, 8);
  return bytes;
}

// JSON.stringify escapes just what section 10 says, as our strings hold no lone surrogates.
const quote = (text) => JSON.stringify(text);

// Null if they are too long. That is seen before all are there: each chunk of a tensor has its whole name.
function headerMembers(file, chunks, columns, extents, paths) {
  const members = [];
  const metadata = [...file.get('metadata')].sort(([a], [b]) => compareText(a, b));
  if (metadata.length > 0) {
    members.push(`"__metadata__":{${metadata.map(([key, value]) => `${quote(key)}:${quote(value)}`).join(',')}}`);
  }
  let room = Number(file.get('header_nbytes'));
  for (const c of chunks) {
    const member = chunkMember(file, c, columns, extents[c], paths);
    room -= member.length;
    if (room < 0) return null;
    members.push(member);
  }
  return members;
}

function chunkMember(file, c, columns, extent, paths) {
  const i = columns.chunkTensor[c];
  const box = columns.box(c);
  const codec = columns.codec(c);
  const path = paths[i].slice(file.get('prefix').length);
  const key = renderChunkKey(path, box, isWhole(box, columns.shape(i)), codec);
  const type = codec === RAW ? extent.dtype.storedAs : 'U8';
  const shape = codec === RAW ? storedShape(extent.dtype, box.shape) : [extent.stored];
  const begin = columns.byteOffset(c) - file.get('header_nbytes');
  const offsets = [begin, begin + extent.stored];
  return `${quote(key)}:{"dtype":"${type}","shape":[${shape.join(',')}],"data_offsets":[${offsets.join(',')}]}`;
}
