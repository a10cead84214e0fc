// The public names. Runs in Node and in browsers; storage for Node is in src/storage_node.mjs.

export { Checkpoint } from './src/checkpoint.mjs';
export { verify } from './src/verifier.mjs';
export { DsdError } from './src/errors.mjs';
export { MemoryStorage } from './src/storage_memory.mjs';
export { renderName } from './src/names.mjs';
export { toHex } from './src/bytes.mjs';
