#!/usr/bin/env node
// run_cases: say of many inputs from a pipe whether this reader accepts them. For fuzzing.
//
// Standard input is a row of inputs: one byte for the kind (M, F, V or C), a u32 for the length,
// and so many bytes. Standard output has a line for each: a JSON list of the codes of what is
// wrong with it, or a string if the reader broke.
//
// M  a manifest, without its files
// F  the files of a folder: of each a byte and a u32, the lengths of label and data; label; data
// V  one value of a tree, as msgpack
// C  one block: codec, index of its dtype, u32 length when decoded; the stored bytes

import { DsdError, verify } from './index.mjs';
import { decodeBlock, readyCodecs } from './src/codecs.mjs';
import { readyDigests } from './src/digests.mjs';
import { decode } from './src/msgpack.mjs';
import { DTYPES } from './src/registry.mjs';
import { MemoryStorage } from './src/storage_memory.mjs';
import { parseTree } from './src/values.mjs';

const HEAD_NBYTES = 5;
const NAMES = [...DTYPES.keys()].sort();

async function verifyFiles(files) {
  const { problems } = await verify(new MemoryStorage(files));
  return problems.map(({ code }) => code);
}

function unpack(data) {
  const files = new Map();
  for (let at = 0; at + HEAD_NBYTES <= data.length;) {
    const [labelNbytes, nbytes] = [data[at], data.readUInt32LE(at + 1)];
    at += HEAD_NBYTES;
    const label = data.toString('latin1', at, at + labelNbytes);
    files.set(label, bytesOf(data.subarray(at + labelNbytes, at + labelNbytes + nbytes)));
    at += labelNbytes + nbytes;
  }
  return files;
}

// Plain bytes, as a storage gives them.
function bytesOf(buffer) {
  return new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.length);
}

function readValue(data) {
  const problems = [];
  parseTree(new Map([['v', decode(bytesOf(data))]]), problems);
  return problems.map(({ code }) => code);
}

function readBlock(data) {
  const dtype = DTYPES.get(NAMES[data[1]]);
  decodeBlock(data[0], dtype, bytesOf(data.subarray(6)), data.readUInt32LE(2));
  return [];
}

const READERS = {
  M: (data) => verifyFiles(new Map([['manifest.dsd', bytesOf(data)]])),
  F: (data) => verifyFiles(unpack(data)),
  V: readValue,
  C: readBlock,
};

async function codesOf(kind, data) {
  try {
    return [...new Set(await READERS[kind](data))].sort();
  } catch (error) {
    if (error instanceof DsdError) return [...new Set(error.problems.map(({ code }) => code))].sort();
    return `${error.stack ?? error}`;
  }
}

await Promise.all([readyDigests(), readyCodecs()]);
let rest = Buffer.alloc(0);
for await (const piece of process.stdin) {
  rest = Buffer.concat([rest, piece]);
  const lines = [];
  let at = 0;
  while (at + HEAD_NBYTES <= rest.length) {
    const end = at + HEAD_NBYTES + rest.readUInt32LE(at + 1);
    if (end > rest.length) break;
    const kind = String.fromCharCode(rest[at]);
    lines.push(JSON.stringify(await codesOf(kind, rest.subarray(at + HEAD_NBYTES, end))));
    at = end;
  }
  rest = rest.subarray(at);
  if (lines.length > 0) process.stdout.write(`${lines.join('\n')}\n`);
}
