// The checks of tensors, chunks and frames: stage 4 of section 18. Pure.

import {
  compareOffsets, findCutDims, findTilingFault, isInside, isWhole, MAX_CUT_DIMS,
} from './boxes.mjs';
import { chunkExtent, product, storedNbytes } from './columns.mjs';
import { addProblems, DsdError, problem } from './errors.mjs';
import { isProperPrefix, renderName } from './names.mjs';
import { CODEC_NAMES, DTYPES, PLANES, RAW, ZSTD } from './registry.mjs';
import { walkLeaves } from './values.mjs';

const MAX_NDIM = 64;
const BELOW = 1n << 63n;

/** each tensor's first path, in the order of the table. */
export function findTensorPaths(tree, tensorCount, problems) {
  const paths = [];
  for (const [path, leaf] of walkLeaves(tree)) {
    if (leaf === null || leaf.type !== 'tensor') continue;
    const { index } = leaf;
    if (index < 0n || index > BigInt(paths.length) || index >= BigInt(tensorCount)) {
      const message = `the tensor ${index} is referred to where ${paths.length} is next, of ${tensorCount}`;
      problems.push(problem('bad_tensor_reference', message, { path: renderName(path) }));
      return paths;
    }
    if (index === BigInt(paths.length)) paths.push(path);
  }
  if (paths.length < tensorCount) {
    problems.push(problem('bad_tensor_reference', `nothing refers to tensor ${paths.length} of ${tensorCount}`));
  }
  return paths;
}

/** for each tensor up to its first problem. */
export function checkTensors(columns, body, paths, problems) {
  const unknown = body.dtypes.filter((name) => !DTYPES.has(name));
  for (const name of unknown) problems.push(problem('unknown_dtype', `the dtype ${JSON.stringify(name)} is not known`));
  for (let i = 0; i < columns.tensorCount; i++) {
    const place = { tensor: i };
    if (paths[i] !== undefined) place.path = renderName(paths[i]);
    try {
      checkTensor(columns, body, i, place);
    } catch (error) {
      addProblems(problems, error);
    }
  }
}

function checkTensor(columns, body, i, place) {
  checkReferences(columns, body, i, place);
  const dtype = DTYPES.get(body.dtypes[columns.dtype(i)]);
  if (dtype === undefined) return;
  if (columns.ndim(i) > MAX_NDIM) throw new DsdError('limit_exceeded', `${columns.ndim(i)} dims`, place);
  const shape = columns.shape(i);
  checkShape(shape, dtype, place);
  const boxes = chunksOf(columns, i).map((c) => columns.box(c));
  checkBounds(boxes, shape, place);
  checkEmptiness(columns, i, boxes, shape, place);
  checkOrder(boxes, place);
  if (!shape.includes(0n)) checkTiling(boxes, shape, place);
  checkCodecs(columns, i, dtype, place);
}

export function chunksOf(columns, i) {
  return Array.from({ length: columns.chunkCountOf(i) }, (_, k) => columns.chunkStart[i] + k);
}

//
function checkReferences(columns, body, i, place) {
  const fail = (what, value, more = {}) => {
    throw new DsdError('bad_reference', `${what} ${value} is not in its table`, { ...place, ...more });
  };
  if (columns.dtype(i) >= body.dtypes.length) fail('dtype', columns.dtype(i));
  if (columns.layout(i) > body.layouts.length) fail('layout', columns.layout(i));
  chunksOf(columns, i).forEach((c, k) => {
    if (columns.file(c) >= body.files.length) fail('file', columns.file(c), { chunk: k });
  });
}

//
function checkShape(shape, dtype, place) {
  const nonzero = product(shape.filter((dim) => dim !== 0n));
  if (shape.some((dim) => dim >= BELOW) || nonzero * BigInt(dtype.itemsize) >= BELOW) {
    throw new DsdError('shape_overflow', `the shape [${shape}] of ${dtype.name} is too large`, place);
  }
}

//
function checkBounds(boxes, shape, place) {
  const k = boxes.findIndex((box) => !isInside(box, shape));
  if (k >= 0) throw new DsdError('chunk_out_of_bounds', 'the box is not inside of the tensor', { ...place, chunk: k });
}

//
function checkEmptiness(columns, i, boxes, shape, place) {
  if (!shape.includes(0n)) {
    const k = boxes.findIndex((box) => box.shape.includes(0n));
    if (k >= 0) throw new DsdError('empty_chunk', 'the chunk has no elements', { ...place, chunk: k });
    return;
  }
  const isRight = boxes.length === 1 && isWhole(boxes[0], shape) && columns.codec(columns.chunkStart[i]) === RAW;
  if (!isRight) throw new DsdError('empty_chunk', 'no elements, and not one raw chunk that is all of it', place);
}

//
function checkOrder(boxes, place) {
  for (let k = 1; k < boxes.length; k++) {
    if (compareOffsets(boxes[k - 1].offset, boxes[k].offset) >= 0) {
      throw new DsdError('chunk_order', 'chunks are not in the order of their offsets', { ...place, chunk: k });
    }
  }
}

// bounds the work of.
function checkTiling(boxes, shape, place) {
  const cutDims = findCutDims(boxes, shape);
  if (cutDims.length > MAX_CUT_DIMS) throw new DsdError('limit_exceeded', `${cutDims.length} dims are cut`, place);
  const code = findTilingFault(boxes, shape, cutDims);
  if (code !== null) throw new DsdError(code, 'the chunks do not tile the tensor', place);
}

//
function checkCodecs(columns, i, dtype, place) {
  chunksOf(columns, i).forEach((c, k) => {
    const codec = columns.codec(c);
    if (codec >= CODEC_NAMES.length) throw new DsdError('unknown_codec', `codec ${codec}`, { ...place, chunk: k });
    if (codec === PLANES && dtype.itemsize === 1) {
      throw new DsdError('codec_mismatch', `planes+zstd with ${dtype.name}`, { ...place, chunk: k });
    }
  });
}

/**
 * R-9.12, R-9.13 and R-9.15's lengths. Each chunk's extent, and the storage order.
 * @returns {{extents: object[], order: number[]}|null} null if there was a problem
 */
export function checkStorageOrder(columns, body, problems) {
  const before = problems.length;
  const extents = [];
  for (let c = 0; c < columns.chunkCount; c++) {
    extents.push(chunkExtent(columns, body, c));
    checkFrameRange(columns, c, extents[c], problems);
  }
  if (problems.length > before) return null;
  extents.forEach((extent, c) => { extent.stored = storedNbytes(columns, c, extent); });
  const order = storageOrder(columns, extents);
  checkNumbers(columns, extents, order, problems);
  if (problems.length > before) return null;
  checkFrameLengths(columns, body, extents, problems);
  return problems.length > before ? null : { extents, order };
}

const badIndex = (columns, c, message) => problem('bad_block_index', message, placeOf(columns, c));

export function placeOf(columns, c) {
  const tensor = columns.chunkTensor[c];
  return { tensor, chunk: c - columns.chunkStart[tensor] };
}

// and so that a stored length can be computed at all.
function checkFrameRange(columns, c, { blocks }, problems) {
  const first = columns.firstFrame(c);
  if (columns.codec(c) === RAW) {
    if (first !== 0n) problems.push(badIndex(columns, c, `a raw chunk has first_frame ${first}`));
  } else if (first + blocks > BigInt(columns.frameCount)) {
    problems.push(badIndex(columns, c, `frames from ${first} on are not all there`));
  }
}

function storageOrder(columns, extents) {
  const offsets = BigUint64Array.from(extents, (_, c) => columns.byteOffset(c));
  const compareBig = (a, b) => (a < b ? -1 : Number(a > b));
  return extents.map((_, c) => c).sort((a, b) => columns.file(a) - columns.file(b)
    || compareBig(offsets[a], offsets[b])
    || compareBig(extents[a].stored, extents[b].stored)
    || a - b);
}

//
function checkNumbers(columns, extents, order, problems) {
  const expect = (c, name, got, expected) => {
    if (got !== expected) problems.push(badIndex(columns, c, `${name} is ${got}, expected ${expected}`));
  };
  let [blocks, frames] = [0n, 0n];
  for (const c of order) {
    expect(c, 'first_block', columns.firstBlock(c), blocks);
    blocks += extents[c].blocks;
    if (columns.codec(c) === RAW) continue;
    expect(c, 'first_frame', columns.firstFrame(c), frames);
    frames += extents[c].blocks;
  }
  const count = (what, got, rows) => {
    if (got !== BigInt(rows)) problems.push(problem('bad_block_index', `${got} ${what}, and rows for ${rows}`));
  };
  count('blocks', blocks, columns.blockCount);
  count('frames', frames, columns.frameCount);
}

//
function checkFrameLengths(columns, body, extents, problems) {
  const blockNbytes = Number(body.blockNbytes);
  extents.forEach((extent, c) => {
    const codec = columns.codec(c);
    if (codec === RAW) return;
    const extra = codec === PLANES ? 4 * extent.dtype.planeCount : 0;
    const [first, nbytes] = [Number(columns.firstFrame(c)), Number(extent.nbytes)];
    for (let k = 0; k < Number(extent.blocks); k++) {
      const most = Math.min(blockNbytes, nbytes - k * blockNbytes) + extra;
      const stored = columns.frameNbytes(first + k);
      if (stored < 1 || stored > most) {
        problems.push({ ...badIndex(columns, c, `a stored length of ${stored}, not from 1 to ${most}`), block: k });
      }
    }
  });
}

/** for chunks. */
export function checkByteRanges(columns, body, { extents, order }, problems) {
  const fail = (f, message, place) => {
    problems.push(problem('byte_range_mismatch', message, { label: body.files[f].get('label'), ...place }));
  };
  const ends = body.files.map((file) => file.get('header_nbytes'));
  for (const c of order) {
    const f = columns.file(c);
    const begin = columns.byteOffset(c);
    if (begin >= BELOW) fail(f, `byte_offset is ${begin}`, placeOf(columns, c));
    else if (begin !== ends[f]) fail(f, `a chunk begins at ${begin}, expected ${ends[f]}`, placeOf(columns, c));
    ends[f] = begin + extents[c].stored;
  }
  body.files.forEach((file, f) => {
    if (ends[f] !== file.get('nbytes')) fail(f, `the chunks end at ${ends[f]}, the file at ${file.get('nbytes')}`);
  });
}

/** */
export function checkPrefixes(columns, body, paths, problems) {
  for (let c = 0; c < columns.chunkCount; c++) {
    const file = body.files[columns.file(c)];
    const path = paths[columns.chunkTensor[c]];
    if (isProperPrefix(file.get('prefix'), path)) continue;
    const message = `the tensor lies in a file with the prefix ${JSON.stringify(file.get('prefix'))}`;
    const place = { label: file.get('label'), path: renderName(path), ...placeOf(columns, c) };
    problems.push(problem('prefix_mismatch', message, place));
  }
}

/** */
export function checkFeatureUse(columns, frame, problems) {
  const codecs = new Set(Array.from({ length: columns.chunkCount }, (_, c) => columns.codec(c)));
  const pages = frame.sections.flatMap((section) => section.pages);
  const hasCompressedPage = pages.some((page) => page.storedNbytes < page.nbytes);
  const used = new Map([
    ['zstd', hasCompressedPage || codecs.has(ZSTD) || codecs.has(PLANES)],
    ['planes', codecs.has(PLANES)],
  ]);
  for (const [name, isUsed] of used) {
    if (isUsed === frame.features.includes(name)) continue;
    const how = isUsed ? 'used, not listed' : 'listed, not used';
    problems.push(problem('feature_mismatch', `the feature ${name} is ${how}`));
  }
}

/** R-7.5's second half: each name in `dtypes` is used. */
export function checkDtypesUsed(columns, body, problems) {
  const used = new Set(Array.from({ length: columns.tensorCount }, (_, i) => columns.dtype(i)));
  body.dtypes.forEach((name, d) => {
    if (!used.has(d)) problems.push(problem('bad_body', `no tensor has the dtype ${name}`, { where: `dtypes[${d}]` }));
  });
}
