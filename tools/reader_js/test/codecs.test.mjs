import assert from 'node:assert/strict';
import { before, test } from 'node:test';
import { decodeBlock, decodeZstdPiece, readyCodecs } from '../src/codecs.mjs';
import { DTYPES } from '../src/registry.mjs';
import { join, someBytes } from './build.mjs';

before(readyCodecs);

const MAGIC = [0x28, 0xb5, 0x2f, 0xfd];
const code = 'bad_compressed_data';
/** A single-segment frame of one RLE block: 200 times the byte 7. */
const RLE = frame(0x20, 200, ...blockHead(200, 1, true), 7);

function frame(...bytes) {
  return Uint8Array.from([...MAGIC, ...bytes]);
}

function blockHead(size, type, isLast) {
  const head = (size << 3) | (type << 1) | Number(isLast);
  return [head & 0xff, (head >> 8) & 0xff, head >> 16];
}

test('a piece decodes', () => {
  assert.deepEqual(decodeZstdPiece(RLE, 200), new Uint8Array(200).fill(7));
});

const REFUSED = [
  ['another length than declared', RLE, 199],
  ['a byte after the frame', join([RLE, Uint8Array.of(0)]), 200],
  ['two frames', join([RLE, RLE]), 400],
  ['two frames where one is enough', join([RLE, RLE]), 200],
  ['a skippable frame before', join([Uint8Array.of(0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0), RLE]), 200],
  ['no content size', frame(0x00, 0x00, ...blockHead(200, 1, true), 7), 200],
  ['a dictionary', frame(0x21, 9, 200, ...blockHead(200, 1, true), 7), 200],
  ['a reserved bit', frame(0x28, 200, ...blockHead(200, 1, true), 7), 200],
  ['a window over 64 MiB', frame(0x40, (16 << 3) | 1, 0, 0, ...blockHead(256, 1, true), 7), 256],
  ['more bytes than declared', frame(0x20, 200, ...blockHead(200, 1, false), 7, ...blockHead(1, 1, true), 7), 200],
  ['fewer bytes than declared', frame(0x20, 201, ...blockHead(200, 1, true), 7), 201],
  ['a wrong checksum', frame(0x24, 200, ...blockHead(200, 1, true), 7, 1, 2, 3, 4), 200],
  ['garbage in a compressed block', frame(0x20, 200, ...blockHead(4, 2, true), 255, 255, 255, 255), 200],
];

for (const [name, piece, nbytes] of REFUSED) {
  test(`${name} is refused`, () => assert.throws(() => decodeZstdPiece(piece, nbytes), { code }));
}

test('a window of 64 MiB is allowed', () => {
  const piece = frame(0x40, 16 << 3, 0, 0, ...blockHead(256, 1, true), 7);
  assert.equal(decodeZstdPiece(piece, 256).length, 256);
});

test('any cut of a piece is refused', () => {
  for (let n = 0; n < RLE.length; n++) assert.throws(() => decodeZstdPiece(RLE.subarray(0, n), 200), { code });
});

/** Codec 2 as section 12 tells it, with BigInts and no cleverness; planes stay raw. */
function encodePlanes(dtype, bytes) {
  const w = dtype.planeCount;
  const [m, bits] = [bytes.length / w, BigInt(8 * w)];
  const planes = Array.from({ length: w }, () => new Uint8Array(m));
  for (let i = 0; i < m; i++) {
    let element = 0n;
    for (let j = w - 1; j >= 0; j--) element = (element << 8n) | BigInt(bytes[i * w + j]);
    if (dtype.rotate) element = BigInt.asUintN(8 * w, element << 1n) | (element >> (bits - 1n));
    for (let j = 0; j < w; j++) planes[j][i] = Number((element >> BigInt(8 * j)) & 0xffn);
  }
  const lengths = new Uint8Array(4 * w);
  for (let j = 0; j < w; j++) new DataView(lengths.buffer).setUint32(4 * j, m, true);
  return join([lengths, ...planes]);
}

for (const name of ['bfloat16', 'int16', 'float32', 'int64', 'float64', 'complex32', 'complex64', 'complex128']) {
  test(`planes of ${name} join to what was split`, () => {
    const dtype = DTYPES.get(name);
    const bytes = someBytes(16 * 37);
    assert.deepEqual(decodeBlock(2, dtype, encodePlanes(dtype, bytes), bytes.length), bytes);
  });
}

test('plane lengths that do not add up are refused', () => {
  const dtype = DTYPES.get('int16');
  const stored = encodePlanes(dtype, someBytes(64));
  const withLength = (n) => join([Uint8Array.of(n, 0, 0, 0), stored.subarray(4)]);
  for (const bad of [withLength(31), withLength(0), withLength(33), stored.subarray(0, 7)]) {
    assert.throws(() => decodeBlock(2, dtype, bad, 64), { code });
  }
});
