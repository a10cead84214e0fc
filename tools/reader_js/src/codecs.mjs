// Codecs (section 12): zstd pieces, and blocks of codec 1 and 2.
//
// The frame is walked here before the library sees it: the library would take several frames,
// skippable ones, and any window, and does not.

import { ZSTDDecoder } from 'zstddec';
import { viewOf } from './bytes.mjs';
import { DsdError } from './errors.mjs';
import { PLANES } from './registry.mjs';

const ZSTD_MAGIC = 0xfd2fb528;
const MAX_WINDOW = 64 * 1024 * 1024;
const MAX_ZSTD_BLOCK = 128 * 1024;
const RESERVED_BLOCK_TYPE = 3;
const RLE_BLOCK = 1;
const COMPRESSED_BLOCK = 2;

const decoder = new ZSTDDecoder();
let ready;

/** Must be awaited once before anything is decoded: the decoder is a WebAssembly module. */
export async function readyCodecs() {
  ready ??= decoder.init();
  await ready;
}

const bad = (message) => new DsdError('bad_compressed_data', message);

/** decode one zstd piece to exactly `nbytes` bytes. */
export function decodeZstdPiece(piece, nbytes) {
  checkFrame(piece, nbytes);
  const decoded = decoder.decode(piece, nbytes);
  if (decoded.length !== nbytes) throw bad(`a zstd piece does not decode to ${nbytes} bytes`);
  return decoded;
}

function checkFrame(piece, nbytes) {
  const header = parseFrameHeader(piece);
  if (header.contentNbytes !== BigInt(nbytes)) {
    throw bad(`a zstd frame declares ${header.contentNbytes} bytes, not ${nbytes}`);
  }
  if (header.window > MAX_WINDOW) throw bad(`a zstd window of ${header.window} bytes`);
  const end = walkBlocks(piece, header) + (header.hasChecksum ? 4 : 0);
  if (end !== piece.length) throw bad(`a zstd frame ends at ${end} of ${piece.length} bytes`);
}

function parseFrameHeader(piece) {
  if (piece.length < 6) throw bad('a zstd piece is cut short');
  const view = viewOf(piece);
  if (view.getUint32(0, true) !== ZSTD_MAGIC) throw bad('not a zstd frame');
  const descriptor = piece[4];
  if ((descriptor & 0x08) !== 0) throw bad('a reserved bit of the zstd frame header is set');
  const isSingle = (descriptor & 0x20) !== 0;
  const sizeFlag = descriptor >> 6;
  const sizeNbytes = sizeFlag === 0 ? Number(isSingle) : 1 << sizeFlag;
  const dictionaryNbytes = [0, 1, 2, 4][descriptor & 3];
  const windowAt = 5;
  const dictionaryAt = windowAt + (isSingle ? 0 : 1);
  const sizeAt = dictionaryAt + dictionaryNbytes;
  const end = sizeAt + sizeNbytes;
  if (end > piece.length) throw bad('a zstd frame header is cut short');
  if (sizeNbytes === 0) throw bad('a zstd frame without a content size');
  if (piece.subarray(dictionaryAt, sizeAt).some((byte) => byte !== 0)) throw bad('a zstd frame with a dictionary');
  const contentNbytes = contentSize(view, sizeAt, sizeNbytes);
  const window = isSingle ? Number(contentNbytes) : windowSize(piece[windowAt]);
  return { end, contentNbytes, window, hasChecksum: (descriptor & 0x04) !== 0 };
}

function contentSize(view, at, width) {
  if (width === 1) return BigInt(view.getUint8(at));
  if (width === 2) return BigInt(view.getUint16(at, true) + 256);
  return width === 4 ? BigInt(view.getUint32(at, true)) : view.getBigUint64(at, true);
}

function windowSize(byte) {
  const base = 2 ** (10 + (byte >> 3));
  return base + (base / 8) * (byte & 7);
}

/** Where the last block ends. */
function walkBlocks(piece, { end, window }) {
  const maxBlock = Math.min(window, MAX_ZSTD_BLOCK);
  let at = end;
  for (;;) {
    if (at + 3 > piece.length) throw bad('a zstd frame is cut short');
    const head = piece[at] | (piece[at + 1] << 8) | (piece[at + 2] << 16);
    const type = (head >> 1) & 3;
    const size = head >> 3;
    if (type === RESERVED_BLOCK_TYPE) throw bad('a reserved zstd block type');
    if (type !== COMPRESSED_BLOCK && size > maxBlock) throw bad(`a zstd block of ${size} bytes`);
    at += 3 + (type === RLE_BLOCK ? 1 : size);
    if (at > piece.length) throw bad('a zstd frame is cut short');
    if ((head & 1) !== 0) return at;
  }
}

/** The decoded bytes of a block of a compressed chunk. */
export function decodeBlock(codec, dtype, stored, nbytes) {
  if (codec === PLANES) return decodePlanes(dtype, stored, nbytes);
  return stored.length === nbytes ? stored : decodeZstdPiece(stored, nbytes);
}

function decodePlanes(dtype, stored, nbytes) {
  const w = dtype.planeCount;
  const m = nbytes / w;
  const planes = splitPlanes(stored, w, m).map((plane) => (plane.length === m ? plane : decodeZstdPiece(plane, m)));
  return dtype.rotate ? joinRotated(planes, m) : joinPlanes(planes, m);
}

//
function splitPlanes(stored, w, m) {
  if (stored.length < 4 * w) throw bad('the plane lengths are cut short');
  const view = viewOf(stored);
  const lengths = Array.from({ length: w }, (_, j) => view.getUint32(4 * j, true));
  if (lengths.some((n) => n < 1 || n > m)) throw bad(`a plane length is not from 1 to ${m}`);
  const sum = lengths.reduce((total, n) => total + n, 4 * w);
  if (sum !== stored.length) throw bad(`the planes have ${sum} bytes, the block ${stored.length}`);
  let at = 4 * w;
  return lengths.map((n) => stored.subarray(at, (at += n)));
}

function joinPlanes(planes, m) {
  const w = planes.length;
  const out = new Uint8Array(w * m);
  planes.forEach((plane, j) => {
    for (let i = 0, at = j; i < m; i++, at += w) out[at] = plane[i];
  });
  return out;
}

// Each element rotated right by one bit: the lowest bit, in plane 0, is the sign again.
function joinRotated(planes, m) {
  const w = planes.length;
  const out = new Uint8Array(w * m);
  planes.forEach((low, j) => {
    const high = planes[(j + 1) % w];
    for (let i = 0, at = j; i < m; i++, at += w) out[at] = (low[i] >> 1) | ((high[i] & 1) << 7);
  });
  return out;
}
