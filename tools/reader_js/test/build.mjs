// A tiny writer of checkpoints for tests. What it is not told it derives; what it is told it writes,
// so that a test can break one thing. It does no more than tests need.

import { utf8 } from '../src/bytes.mjs';
import { digest, readyDigests } from '../src/digests.mjs';
import { SECTION_NAMES } from '../src/frame.mjs';
import { encode } from '../src/msgpack.mjs';

const PAGE = 65_536;
const BLOCK_NBYTES = 4096;

function packed(width, numbers) {
  const bytes = new Uint8Array(width * numbers.length);
  const view = new DataView(bytes.buffer);
  numbers.forEach((n, i) => {
    if (width === 4) view.setUint32(4 * i, Number(n), true);
    else view.setBigUint64(8 * i, BigInt(n), true);
  });
  return bytes;
}

export function join(parts) {
  const bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}

function pieces(bytes, nbytes) {
  const count = Math.ceil(bytes.length / nbytes);
  return Array.from({ length: count }, (_, i) => bytes.subarray(i * nbytes, (i + 1) * nbytes));
}

/** The manifest's bytes from its sections' bytes, each page stored as it is. */
export function buildManifest(sections, { features = [], flags = {}, names = SECTION_NAMES } = {}) {
  const featureBytes = utf8(features.map((name) => `${name}\n`).join(''));
  const pages = names.flatMap((name) => pieces(sections[name], PAGE));
  const headNbytes = 40 + 24 * names.length + 36 * pages.length + featureBytes.length + 32;
  const manifestNbytes = pages.reduce((sum, page) => sum + page.length, headNbytes);
  const unsealed = join([
    Uint8Array.of(0x89, 0x44, 0x53, 0x44, 0x0d, 0x0a, 0x1a, 0x0a, 1, 0, 0, 0),
    packed(4, [headNbytes]), packed(8, [manifestNbytes]),
    packed(4, [featureBytes.length, names.length, pages.length, 0]),
    ...names.map((name) => join([
      utf8(name.padEnd(8, '\0')),
      packed(4, [flags[name] ?? 0, Math.ceil(sections[name].length / PAGE)]),
      packed(8, [sections[name].length]),
    ])),
    ...pages.map((page) => join([packed(4, [page.length]), digest(page)])),
    featureBytes,
  ]);
  return join([unsealed, digest(unsealed), ...pages]);
}

const same = (x) => x;

/**
 * A checkpoint of one data file, raw chunks laid one after another in the order given.
 * @param {object} spec tensors: [{dtype, shape, chunks: [{offset, shape, data}]}], tree (plain),
 *   header: the data file's JSON text, and `body`, `sections`, `manifest` to change what is made
 */
export async function build({ tensors, tree, header, body = same, sections = same, manifest = {} }) {
  await readyDigests();
  const headerBytes = utf8(header);
  const headerNbytes = 8 + headerBytes.length;
  const chunks = tensors.flatMap((tensor) => tensor.chunks);
  const dtypes = [...new Set(tensors.map(({ dtype }) => dtype))].sort();
  const file = join([packed(8, [headerBytes.length]), headerBytes, ...chunks.map(({ data }) => data)]);
  const plain = body(new Map(Object.entries({
    block_nbytes: BigInt(BLOCK_NBYTES), dtypes, extensions: new Map(), layouts: [], meshes: [], sides: [], tree,
    files: [new Map(Object.entries({
      header_nbytes: BigInt(headerNbytes), label: 'model.safetensors', metadata: new Map(),
      nbytes: BigInt(file.length), prefix: [], rank: 0n,
    }))],
    user: new Map(), world_size: 1n,
  })));
  const made = sections({ body: encode(plain), ...buildColumns(tensors, chunks, dtypes, headerNbytes) });
  return new Map([['manifest.dsd', buildManifest(made, manifest)], ['model.safetensors', file]]);
}

function buildColumns(tensors, chunks, dtypes, headerNbytes) {
  const blocks = chunks.map(({ data }) => pieces(data, BLOCK_NBYTES));
  const sums = (numbers, start) => numbers.map((_, i) => numbers.slice(0, i).reduce((a, b) => a + b, start));
  return {
    tensors: packed(4, [
      ...tensors.map(({ dtype }) => dtypes.indexOf(dtype)), ...tensors.map(({ shape }) => shape.length),
      ...tensors.map((tensor) => tensor.chunks.length), ...tensors.map(() => 0),
    ]),
    shapes: packed(8, tensors.flatMap(({ shape }) => shape)),
    chunks: join([
      packed(4, chunks.map(() => 0)), packed(4, chunks.map(() => 0)),
      packed(8, sums(chunks.map(({ data }) => data.length), headerNbytes)),
      packed(8, sums(blocks.map((list) => list.length), 0)), packed(8, chunks.map(() => 0)),
    ]),
    boxes: packed(8, chunks.flatMap(({ offset, shape }) => [...offset, ...shape])),
    digests: join(blocks.flat().map((block) => digest(block))),
    frames: new Uint8Array(0),
  };
}

/** Bytes that differ from place to place. */
export function someBytes(nbytes, seed = 1) {
  return Uint8Array.from({ length: nbytes }, (_, i) => (i * 31 + (i >> 8) * 7 + seed * 13) & 0xff);
}

/** A whole one: a 5000-byte tensor, a matrix in two boxes, a scalar, and some values. */
export function exampleSpec() {
  return {
    tensors: [
      { dtype: 'uint8', shape: [5000], chunks: [{ offset: [0], shape: [5000], data: someBytes(5000) }] },
      {
        dtype: 'float32', shape: [2, 3], chunks: [
          { offset: [0, 0], shape: [2, 1], data: someBytes(8, 2) },
          { offset: [0, 1], shape: [2, 2], data: someBytes(16, 3) },
        ],
      },
      { dtype: 'complex128', shape: [], chunks: [{ offset: [], shape: [], data: someBytes(16, 4) }] },
    ],
    tree: new Map([
      ['a/b', ['tensor', 0n]],
      ['m', new Map([['__proto__', ['tensor', 1n]], ['tied', ['tensor', 0n]], ['z@%', ['list', 1.0, ['tensor', 2n]]]])],
    ]),
    header: '{"a/b":{"dtype":"U8","shape":[5000],"data_offsets":[0,5000]}'
      + ',"/m/__proto__@[0:2,0:1]":{"dtype":"F32","shape":[2,1],"data_offsets":[5000,5008]}'
      + ',"/m/__proto__@[0:2,1:3]":{"dtype":"F32","shape":[2,2],"data_offsets":[5008,5024]}'
      + ',"/m/z%40%25/@1":{"dtype":"F64","shape":[2],"data_offsets":[5024,5040]}}   ',
  };
}
