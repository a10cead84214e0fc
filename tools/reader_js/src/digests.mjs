// BLAKE3, and the content digest of a tensor from a stream of its bytes.

import { createBLAKE3 } from 'hash-wasm';
import { encode } from './msgpack.mjs';

export const DIGEST_NBYTES = 32;
export const LEAF_NBYTES = 4_194_304;

let hasher;

/** Must be awaited once before `digest` is called: the hash is a WebAssembly module. */
export async function readyDigests() {
  hasher ??= await createBLAKE3();
}

/** The 32-byte BLAKE3 hash of `bytes`. */
export function digest(bytes) {
  hasher.init();
  hasher.update(bytes);
  return hasher.digest('binary');
}

// Making a hasher takes milliseconds, so those that are done with wait here for the next stream.
const idle = [];

/** BLAKE3 of bytes that come in pieces; several streams may be under way at once. */
export async function createStreamDigest() {
  const own = idle.pop() ?? await createBLAKE3();
  own.init();
  return {
    update: (bytes) => own.update(bytes),
    /** The digest; the stream begins again. */
    finish() {
      const result = own.digest('binary');
      own.init();
      return result;
    },
    /** To be called once, when the stream is not used any more. */
    release: () => idle.push(own),
  };
}

/** Cuts a stream of bytes into leaves of 4 MiB and keeps their digests. */
export class LeafDigests {
  static async create() {
    return new LeafDigests(await createStreamDigest());
  }

  constructor(stream) {
    this.stream = stream;
    this.filled = 0;
    this.leaves = [];
  }

  update(bytes) {
    let at = 0;
    while (at < bytes.length) {
      const n = Math.min(LEAF_NBYTES - this.filled, bytes.length - at);
      this.stream.update(bytes.subarray(at, at + n));
      this.filled += n;
      at += n;
      if (this.filled === LEAF_NBYTES) this.#closeLeaf();
    }
  }

  #closeLeaf() {
    this.leaves.push(this.stream.finish());
    this.filled = 0;
  }

  /** The leaves; ends the use of this object. */
  finish() {
    if (this.filled > 0) this.#closeLeaf();
    this.stream.release();
    return this.leaves;
  }
}

/** `shape` holds BigInts, `leaves` 32-byte digests. */
export function contentDigest(dtypeName, shape, leaves) {
  const joined = new Uint8Array(leaves.length * DIGEST_NBYTES);
  leaves.forEach((leaf, i) => joined.set(leaf, i * DIGEST_NBYTES));
  return digest(encode(['dsd-content-1', dtypeName, [...shape], joined]));
}
