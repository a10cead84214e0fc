// Blocks of chunks: read, verified and decoded, with a small cache of the last ones.

import { equalBytes } from './bytes.mjs';
import { decodeBlock } from './codecs.mjs';
import { digest } from './digests.mjs';
import { placeOf } from './checks.mjs';
import { DsdError, withPlace } from './errors.mjs';
import { chunksByFile, deriveHeader } from './headers.mjs';
import { renderName } from './names.mjs';
import { RAW } from './registry.mjs';

const CACHE_NBYTES = 64 * 1024 * 1024;
const PIECE_NBYTES = 4 * 1024 * 1024;
const SPACE = 0x20;

export class BlockReader {
  constructor(storage, { columns, body, layout, paths }) {
    this.storage = storage;
    this.columns = columns;
    this.extents = layout.extents;
    this.order = layout.order;
    this.files = body.files;
    this.paths = paths;
    this.blockNbytes = Number(body.blockNbytes);
    this.checkedFiles = new Set();
    this.checkedHeaders = new Set();
    this.cache = new Map();
    this.cachedNbytes = 0;
  }

  /** The decoded bytes of block k of chunk c; not to be changed by the caller. */
  async read(c, k, options = {}) {
    const key = `${c} ${k}`;
    const known = this.cache.get(key);
    if (known !== undefined) return known;
    const bytes = await this.load(c, k, options);
    if (options.verify !== false) this.#keep(key, bytes);
    return bytes;
  }

  #keep(key, bytes) {
    this.cache.set(key, bytes);
    this.cachedNbytes += bytes.length;
    for (const [oldest, block] of this.cache) {
      if (this.cachedNbytes <= CACHE_NBYTES || oldest === key) break;
      this.cache.delete(oldest);
      this.cachedNbytes -= block.length;
    }
  }

  /** All blocks of a chunk in order, past the cache. */
  async* stream(c) {
    for (let k = 0; k < Number(this.extents[c].blocks); k++) yield this.load(c, k);
  }

  /** Read, verify and decode one block, section 12. */
  async load(c, k, { verify = true } = {}) {
    await this.#checkFile(this.columns.file(c));
    if (verify) await this.#checkHeader(this.columns.file(c));
    const nbytes = Math.min(this.blockNbytes, Number(this.extents[c].nbytes) - k * this.blockNbytes);
    const bytes = this.columns.codec(c) === RAW
      ? await this.#readStored(c, k * this.blockNbytes, nbytes)
      : await this.#loadCompressed(c, k, nbytes, verify);
    const expected = this.columns.digest(Number(this.columns.firstBlock(c)) + k);
    if (verify && !equalBytes(digest(bytes), expected)) {
      throw new DsdError('checksum_mismatch', 'the block does not have its digest', this.#place(c, k));
    }
    return bytes;
  }

  async #loadCompressed(c, k, nbytes, verify) {
    const { columns } = this;
    const first = Number(columns.firstFrame(c));
    const begin = columns.frameSums[first + k] - columns.frameSums[first];
    const stored = await this.#readStored(c, begin, columns.frameNbytes(first + k));
    if (verify && !equalBytes(digest(stored), columns.frameDigest(first + k))) {
      throw new DsdError('stored_checksum_mismatch', 'the stored bytes do not have their digest', this.#place(c, k));
    }
    return withPlace(this.#place(c, k), () => decodeBlock(columns.codec(c), this.extents[c].dtype, stored, nbytes));
  }

  #readStored(c, begin, nbytes) {
    return this.storage.read(this.#label(c), Number(this.columns.byteOffset(c)) + begin, nbytes);
  }

  #label(c) {
    return this.files[this.columns.file(c)].get('label');
  }

  #place(c, k) {
    const path = renderName(this.paths[this.columns.chunkTensor[c]]);
    return { label: this.#label(c), path, ...placeOf(this.columns, c), block: k };
  }

  // the file is looked at when it is first used.
  async #checkFile(f) {
    if (this.checkedFiles.has(f)) return;
    await checkFile(this.storage, this.files[f]);
    this.checkedFiles.add(f);
  }

  // all of it, as the whole manifest is there.
  async #checkHeader(f) {
    if (this.checkedHeaders.has(f)) return;
    this.chunks ??= chunksByFile(this.columns, this.files.length, this.order);
    const derived = deriveHeader(this.files[f], this.chunks[f], this.columns, this.extents, this.paths);
    await checkHeader(this.storage, this.files[f], derived);
    this.checkedHeaders.add(f);
  }
}

/** compare a data file's header with the one that the manifest implies. */
export async function checkHeader(storage, file, derived) {
  const label = file.get('label');
  const mismatch = (message) => new DsdError('header_mismatch', message, { label });
  if (derived === null) throw mismatch('the header that the manifest implies does not fit');
  let at = 0;
  for await (const bytes of pieces(storage, label, file.get('header_nbytes'))) {
    const text = derived.subarray(at, at + bytes.length);
    if (!equalBytes(bytes.subarray(0, text.length), text)) throw mismatch('not the header that the manifest implies');
    const padding = bytes.subarray(text.length);
    if (padding.some((byte) => byte !== SPACE)) throw mismatch('the header is not padded with spaces');
    at += bytes.length;
  }
}

/** The first bytes of a file, some MiB at a time. */
export async function* pieces(storage, label, nbytes) {
  for (let at = 0; at < Number(nbytes); at += PIECE_NBYTES) {
    yield storage.read(label, at, Math.min(PIECE_NBYTES, Number(nbytes) - at));
  }
}

/** for a data file or side file. */
export async function checkFile(storage, entry) {
  const label = entry.get('label');
  const { kind, nbytes } = await storage.stat(label);
  if (kind === 'missing') throw new DsdError('missing_file', 'the file is not there', { label });
  if (kind !== 'file') throw new DsdError('not_regular_file', 'not a regular file', { label });
  const expected = entry.get('nbytes');
  if (nbytes !== expected) {
    throw new DsdError('file_size_mismatch', `the file has ${nbytes} bytes, the manifest says ${expected}`, { label });
  }
}
