// The columns of the manifest's sections (section 7), read in place.

import { viewOf } from './bytes.mjs';
import { DIGEST_NBYTES } from './digests.mjs';
import { problem } from './errors.mjs';
import { DTYPES, RAW } from './registry.mjs';

const TENSOR_ROW_NBYTES = 16;
const FRAME_ROW_NBYTES = 36;

/** R-7.3: the problems of the sections' lengths. `sections` maps names to bytes. */
export function findLengthProblems(sections) {
  const counts = countRows(sections.get('tensors'));
  const problems = [];
  const expect = (name, expected) => {
    const { length } = sections.get(name);
    if (BigInt(length) !== expected) {
      problems.push(problem('bad_section_length', `${length} bytes, expected ${expected}`, { section: name }));
    }
  };
  const whole = (name, row) => expect(name, BigInt(sections.get(name).length - (sections.get(name).length % row)));
  whole('tensors', TENSOR_ROW_NBYTES);
  if (problems.length > 0) return problems;
  expect('shapes', 8n * counts.dims);
  expect('chunks', 32n * counts.chunks);
  expect('boxes', 16n * counts.boxDims);
  whole('digests', DIGEST_NBYTES);
  whole('frames', FRAME_ROW_NBYTES);
  return problems;
}

function countRows(bytes) {
  const view = viewOf(bytes);
  const count = Math.floor(bytes.length / TENSOR_ROW_NBYTES);
  let [dims, chunks, boxDims] = [0n, 0n, 0n];
  for (let i = 0; i < count; i++) {
    const ndim = BigInt(view.getUint32(4 * (count + i), true));
    const chunkCount = BigInt(view.getUint32(4 * (2 * count + i), true));
    dims += ndim;
    chunks += chunkCount;
    boxDims += ndim * chunkCount;
  }
  return { dims, chunks, boxDims };
}

/** Rows of tensors, chunks, boxes, digests and frames; lengths must have been checked. */
export class Columns {
  constructor(sections) {
    this.tensors = viewOf(sections.get('tensors'));
    this.shapes = viewOf(sections.get('shapes'));
    this.chunks = viewOf(sections.get('chunks'));
    this.boxes = viewOf(sections.get('boxes'));
    this.digestBytes = sections.get('digests');
    this.frameBytes = sections.get('frames');
    this.frames = viewOf(this.frameBytes);
    this.tensorCount = this.tensors.byteLength / TENSOR_ROW_NBYTES;
    this.chunkCount = this.chunks.byteLength / 32;
    this.blockCount = this.digestBytes.length / DIGEST_NBYTES;
    this.frameCount = this.frameBytes.length / FRAME_ROW_NBYTES;
    this.#index();
  }

  // Where each tensor's shape, chunks and boxes begin; each chunk's tensor; sums of frame lengths.
  #index() {
    const n = this.tensorCount;
    this.shapeStart = new Float64Array(n + 1);
    this.chunkStart = new Float64Array(n + 1);
    this.boxStart = new Float64Array(n + 1);
    this.chunkTensor = new Uint32Array(this.chunkCount);
    for (let i = 0; i < n; i++) {
      const [ndim, count] = [this.ndim(i), this.chunkCountOf(i)];
      this.shapeStart[i + 1] = this.shapeStart[i] + ndim;
      this.chunkStart[i + 1] = this.chunkStart[i] + count;
      this.boxStart[i + 1] = this.boxStart[i] + 2 * ndim * count;
      this.chunkTensor.fill(i, this.chunkStart[i], this.chunkStart[i + 1]);
    }
    this.frameSums = new Float64Array(this.frameCount + 1);
    for (let f = 0; f < this.frameCount; f++) this.frameSums[f + 1] = this.frameSums[f] + this.frameNbytes(f);
  }

  #tensorColumn(column, i) {
    return this.tensors.getUint32(4 * (column * this.tensorCount + i), true);
  }

  dtype(i) { return this.#tensorColumn(0, i); }
  ndim(i) { return this.#tensorColumn(1, i); }
  chunkCountOf(i) { return this.#tensorColumn(2, i); }
  layout(i) { return this.#tensorColumn(3, i); }

  /** The global shape of tensor i, as BigInts. */
  shape(i) { return bigs(this.shapes, this.shapeStart[i], this.ndim(i)); }

  file(c) { return this.chunks.getUint32(4 * c, true); }
  codec(c) { return this.chunks.getUint32(4 * (this.chunkCount + c), true); }
  byteOffset(c) { return this.chunks.getBigUint64(8 * (this.chunkCount + c), true); }
  firstBlock(c) { return this.chunks.getBigUint64(8 * (2 * this.chunkCount + c), true); }
  firstFrame(c) { return this.chunks.getBigUint64(8 * (3 * this.chunkCount + c), true); }

  /** The box of chunk c: offset and shape, as BigInts. */
  box(c) {
    const i = this.chunkTensor[c];
    const ndim = this.ndim(i);
    const start = this.boxStart[i] + 2 * ndim * (c - this.chunkStart[i]);
    return { offset: bigs(this.boxes, start, ndim), shape: bigs(this.boxes, start + ndim, ndim) };
  }

  digest(block) {
    return this.digestBytes.subarray(DIGEST_NBYTES * block, DIGEST_NBYTES * (block + 1));
  }

  frameNbytes(f) { return this.frames.getUint32(4 * f, true); }

  frameDigest(f) {
    const at = 4 * this.frameCount + DIGEST_NBYTES * f;
    return this.frameBytes.subarray(at, at + DIGEST_NBYTES);
  }
}

function bigs(view, start, count) {
  const numbers = new Array(count);
  for (let i = 0; i < count; i++) numbers[i] = view.getBigUint64(8 * (start + i), true);
  return numbers;
}

export const product = (numbers) => numbers.reduce((a, b) => a * b, 1n);

/** The lengths of chunk c, for tensors that passed their checks. */
export function chunkExtent(columns, body, c) {
  const dtype = DTYPES.get(body.dtypes[columns.dtype(columns.chunkTensor[c])]);
  const nbytes = product(columns.box(c).shape) * BigInt(dtype.itemsize);
  const blocks = (nbytes + body.blockNbytes - 1n) / body.blockNbytes;
  return { dtype, nbytes, blocks };
}

/** The stored length of chunk c as a BigInt; a compressed chunk's frames must be in range. */
export function storedNbytes(columns, c, { nbytes, blocks }) {
  if (columns.codec(c) === RAW) return nbytes;
  const first = columns.firstFrame(c);
  return BigInt(columns.frameSums[Number(first + blocks)] - columns.frameSums[Number(first)]);
}
