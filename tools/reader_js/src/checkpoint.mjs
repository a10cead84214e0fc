// A checkpoint that was opened: its tensors, values, boxes and digests.

import { BlockReader } from './blocks.mjs';
import { intersect, isInside, isWhole, runs } from './boxes.mjs';
import { chunksOf } from './checks.mjs';
import { product } from './columns.mjs';
import { contentDigest, digest, LEAF_NBYTES, LeafDigests } from './digests.mjs';
import { DsdError } from './errors.mjs';
import { loadManifest } from './manifest.mjs';
import { renderName } from './names.mjs';
import { DTYPES } from './registry.mjs';
import { encodeState } from './values.mjs';

const SLAB_NBYTES = 32 * 1024 * 1024;
const MAX_READ_NBYTES = 1n << 31n;

export class Checkpoint {
  /**
   * Read and check the manifest: stages 1 to 4 of section 18.
   * @param {object} storage see storage_memory.mjs for what it must be able to do
   * @param {{digest?: string}} options the root digest that the caller expects
   */
  static async open(storage, options = {}) {
    const manifest = await loadManifest(storage, options);
    if (manifest.problems.length > 0) throw DsdError.fromProblems(manifest.problems);
    return new Checkpoint(storage, manifest);
  }

  constructor(storage, manifest) {
    this.storage = storage;
    this.manifest = manifest;
    this.columns = manifest.columns;
    this.blocks = new BlockReader(storage, manifest);
    this.indexes = new Map(manifest.paths.map((path, i) => [renderName(path), i]));
  }

  /** The root digest, as 64 hexadecimal digits. */
  get root() { return this.manifest.frame.root; }

  get features() { return this.manifest.frame.features; }

  /** The state, as values.mjs describes it. */
  get tree() { return this.manifest.body.tree; }

  /** User metadata: a Map of strings. */
  get user() { return this.manifest.body.user; }

  /** Each tensor's first path, in the order of the table. */
  get paths() { return this.manifest.paths; }

  /** {path, name, dtype, shape, chunks} of each tensor; shape holds BigInts. */
  get tensors() { return this.paths.map((_, i) => this.#row(i)); }

  #row(i) {
    return {
      path: this.paths[i],
      name: renderName(this.paths[i]),
      dtype: this.#dtype(i).name,
      shape: this.columns.shape(i),
      chunks: this.columns.chunkCountOf(i),
    };
  }

  #dtype(i) { return DTYPES.get(this.manifest.body.dtypes[this.columns.dtype(i)]); }

  #find(nameOrPath) {
    const name = Array.isArray(nameOrPath) ? renderName(nameOrPath) : nameOrPath;
    const i = this.indexes.get(name);
    if (i === undefined) throw new DsdError('entry_not_found', `no tensor ${JSON.stringify(name)}`);
    return i;
  }

  /**
   * One box of a tensor as packed row-major little-endian bytes. Reads the blocks that meet the
   * box, and verifies each before use.
   * @param {string|Array} nameOrPath
   * @param {{offset: Array, shape: Array}|null} box in elements, numbers or BigInts; null: all
   * @param {{verify?: boolean}} options
   */
  async read(nameOrPath, box = null, options = {}) {
    const i = this.#find(nameOrPath);
    return this.#readBox(i, toBox(box, this.columns.shape(i)), options);
  }

  async #readBox(i, box, options) {
    const { itemsize } = this.#dtype(i);
    const nbytes = product(box.shape) * BigInt(itemsize);
    if (nbytes > MAX_READ_NBYTES) {
      throw new DsdError('limit_exceeded', `a box of ${nbytes} bytes; this reader reads ${MAX_READ_NBYTES} at once`);
    }
    const out = new Uint8Array(Number(nbytes));
    if (nbytes === 0n) return out;
    for (const c of chunksOf(this.columns, i)) {
      const source = this.columns.box(c);
      const part = intersect(source, box);
      if (part !== null) await this.#copyPart(c, { part, source, target: box }, out, itemsize, options);
    }
    return out;
  }

  // Runs rise in the chunk, so each block is asked for once.
  async #copyPart(c, { part, source, target }, out, itemsize, options) {
    const { blockNbytes } = this.blocks;
    let [k, block] = [-1, null];
    for (const [from, to, count] of runs(part, source, target)) {
      let [at, into, left] = [from * itemsize, to * itemsize, count * itemsize];
      while (left > 0) {
        const wanted = Math.floor(at / blockNbytes);
        if (wanted !== k) [k, block] = [wanted, await this.blocks.read(c, wanted, options)];
        const begin = at - k * blockNbytes;
        const n = Math.min(left, block.length - begin);
        out.set(block.subarray(begin, begin + n), into);
        at += n;
        into += n;
        left -= n;
      }
    }
  }

  // from the tensor's bytes, which are read and verified.
  async #contentDigest(i) {
    const shape = this.columns.shape(i);
    return contentDigest(this.#dtype(i).name, shape, await this.#leaves(i, shape));
  }

  async #leaves(i, shape) {
    const [c] = chunksOf(this.columns, i);
    const isOneChunk = isWhole(this.columns.box(c), shape);
    if (isOneChunk && this.blocks.blockNbytes === LEAF_NBYTES) return this.#blockDigests(c);
    const leaves = await LeafDigests.create();
    const pieces = isOneChunk ? this.blocks.stream(c) : this.#slabs(i, shape);
    for await (const bytes of pieces) leaves.update(bytes);
    return leaves.finish();
  }

  // Blocks are leaves then: a block that was verified has its leaf's digest.
  async #blockDigests(c) {
    const digests = [];
    let block = Number(this.columns.firstBlock(c));
    for await (const _ of this.blocks.stream(c)) digests.push(this.columns.digest(block++));
    return digests;
  }

  /** The tensor's bytes in row-major order, some MiB at a time. */
  async* #slabs(i, shape) {
    if (shape.includes(0n)) return;
    for (const box of slabBoxes(shape, BigInt(this.#dtype(i).itemsize))) yield this.#readBox(i, box, {});
  }

  /** R-13.2, and the tensors' content digests in the order of the table. */
  async contentDigests() {
    const tensors = [];
    for (let i = 0; i < this.paths.length; i++) tensors.push(await this.#contentDigest(i));
    return { tensors, state: digest(encodeState(this.tree, (i) => tensors[i])) };
  }

  async close() {
    await this.storage.close?.();
  }
}

function toBox(box, shape) {
  if (box === null) return { offset: shape.map(() => 0n), shape };
  const isList = (list) => Array.isArray(list) && list.length === shape.length;
  if (!isList(box.offset) || !isList(box.shape)) {
    throw new DsdError('bad_argument', `a box of ${shape.length} dims is needed`);
  }
  const result = { offset: box.offset.map(BigInt), shape: box.shape.map(BigInt) };
  const isPositive = [...result.offset, ...result.shape].every((n) => n >= 0n);
  if (!isPositive || !isInside(result, shape)) {
    throw new DsdError('box_out_of_bounds', `offset [${box.offset}], shape [${box.shape}] in [${shape}]`);
  }
  return result;
}

/** Boxes of about SLAB_NBYTES that follow each other in row-major order. */
export function* slabBoxes(shape, itemsize, target = BigInt(SLAB_NBYTES)) {
  let d = 0; // The dim that is cut: dims before it are single, dims after it are whole.
  const rowNbytes = (dim) => product(shape.slice(dim + 1)) * itemsize;
  while (d < shape.length - 1 && rowNbytes(d) > target) d++;
  const step = shape.length === 0 ? 1n : target / rowNbytes(d) || 1n;
  yield* cut(0, []);

  function* cut(dim, offset) {
    const rest = shape.slice(dim + 1);
    if (shape.length === 0) yield { offset: [], shape: [] };
    for (let at = 0n; at < (shape[dim] ?? 0n); at += dim === d ? step : 1n) {
      if (dim < d) {
        yield* cut(dim + 1, [...offset, at]);
        continue;
      }
      const n = shape[dim] - at < step ? shape[dim] - at : step;
      yield { offset: [...offset, at, ...rest.map(() => 0n)], shape: [...offset.map(() => 1n), n, ...rest] };
    }
  }
}
