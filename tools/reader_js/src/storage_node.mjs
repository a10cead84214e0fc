// A checkpoint folder on disk, for Node: the only file that touches the file system.

import { constants } from 'node:fs';
import { lstat, open, readdir } from 'node:fs/promises';
import { join } from 'node:path';
import { DsdError } from './errors.mjs';

// NONBLOCK: a pipe that took a file's place in between must not hang us. NOFOLLOW: nor a link lead us away.
const OPEN_FLAGS = constants.O_RDONLY | (constants.O_NOFOLLOW ?? 0) | (constants.O_NONBLOCK ?? 0);
const MISSING = new Set(['ENOENT', 'ENOTDIR', 'ELOOP']);

export class NodeStorage {
  constructor(folder) {
    this.folder = folder;
    this.handles = new Map();
  }

  async stat(label) {
    try {
      const found = await lstat(join(this.folder, label), { bigint: true });
      return { kind: found.isFile() ? 'file' : 'other', nbytes: found.size };
    } catch (error) {
      if (MISSING.has(error.code)) return { kind: 'missing', nbytes: 0n };
      throw ioError(error, label);
    }
  }

  async read(label, byteOffset, nbytes) {
    const handle = await this.#handle(label);
    const bytes = new Uint8Array(nbytes);
    let filled = 0;
    while (filled < nbytes) {
      const { bytesRead } = await handle.read(bytes, filled, nbytes - filled, byteOffset + filled)
        .catch((error) => { throw ioError(error, label); });
      if (bytesRead === 0) throw new DsdError('io_error', `the file ends at ${byteOffset + filled}`, { label });
      filled += bytesRead;
    }
    return bytes;
  }

  #handle(label) {
    if (!this.handles.has(label)) this.handles.set(label, openRegular(join(this.folder, label), label));
    return this.handles.get(label);
  }

  async list() {
    return readdir(this.folder).catch(() => []);
  }

  async close() {
    const opened = await Promise.allSettled(this.handles.values());
    this.handles.clear();
    await Promise.all(opened.filter(({ status }) => status === 'fulfilled').map(({ value }) => value.close()));
  }
}

// the file that was opened is looked at again, as another may have taken its name.
async function openRegular(path, label) {
  const handle = await open(path, OPEN_FLAGS).catch((error) => {
    if (error.code === 'ELOOP') throw new DsdError('not_regular_file', 'a symbolic link', { label });
    throw ioError(error, label);
  });
  if ((await handle.stat()).isFile()) return handle;
  await handle.close();
  throw new DsdError('not_regular_file', 'not a regular file', { label });
}

function ioError(error, label) {
  return new DsdError('io_error', error.message, { label });
}
