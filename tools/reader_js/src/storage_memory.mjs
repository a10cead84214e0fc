// A checkpoint folder in memory: labels to bytes. In a browser, to Blobs or Files as well.
//
// A storage has `stat(label)` -> {kind: 'file' | 'missing' | 'other', nbytes: BigInt},
// `read(label, byteOffset, nbytes)` -> just that many bytes, `list()` -> names, and may have `close()`.

import { DsdError } from './errors.mjs';

export class MemoryStorage {
  /** @param {Map<string, Uint8Array|Blob>} files */
  constructor(files) {
    this.files = files;
  }

  async stat(label) {
    const file = this.files.get(label);
    if (file === undefined) return { kind: 'missing', nbytes: 0n };
    return { kind: 'file', nbytes: BigInt(lengthOf(file)) };
  }

  async read(label, byteOffset, nbytes) {
    const file = this.files.get(label);
    const end = byteOffset + nbytes;
    if (file === undefined || end > lengthOf(file)) {
      throw new DsdError('io_error', `bytes ${byteOffset} to ${end} are not there`, { label });
    }
    if (file instanceof Uint8Array) return file.subarray(byteOffset, end);
    return new Uint8Array(await file.slice(byteOffset, end).arrayBuffer());
  }

  async list() {
    return [...this.files.keys()];
  }
}

function lengthOf(file) {
  return file instanceof Uint8Array ? file.length : file.size;
}
