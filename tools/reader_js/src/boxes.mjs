// Boxes: bounds, tiling, and the runs that two boxes share. Pure. Numbers are BigInts but in runs.

import { product } from './columns.mjs';

export const MAX_CUT_DIMS = 8;

/** */
export function isInside(box, shape) {
  return shape.every((dim, d) => box.offset[d] + box.shape[d] <= dim);
}

export function isWhole(box, shape) {
  return shape.every((dim, d) => box.offset[d] === 0n && box.shape[d] === dim);
}

export function compareOffsets(a, b) {
  for (let d = 0; d < a.length; d++) {
    if (a[d] !== b[d]) return a[d] < b[d] ? -1 : 1;
  }
  return 0;
}

/** The dims that some box does not span. */
export function findCutDims(boxes, shape) {
  return shape.map((_, d) => d).filter((d) => boxes.some((box) => box.shape[d] !== shape[d]));
}

/**
 * The code of R-9.9, or null if the boxes, all in bounds and not empty, tile the shape.
 *
 * Counts signed corners: if all vanish but the tensor's own, the boxes' indicator functions add
 * up to the tensor's, so each element lies in one box.
 */
export function findTilingFault(boxes, shape, cutDims) {
  if (tiles(boxes, shape, cutDims)) return null;
  const held = boxes.reduce((sum, box) => sum + product(box.shape), 0n);
  return held >= product(shape) ? 'chunk_overlap' : 'chunk_hole';
}

function tiles(boxes, shape, cutDims) {
  const counts = new Map();
  const whole = { offset: shape.map(() => 0n), shape };
  for (const box of boxes) countCorners(counts, box, cutDims, 1);
  countCorners(counts, whole, cutDims, -1);
  return counts.size === 0;
}

function countCorners(counts, box, cutDims, weight) {
  const lows = cutDims.map((d) => box.offset[d]);
  const highs = cutDims.map((d) => box.offset[d] + box.shape[d]);
  for (let mask = 0; mask < 1 << cutDims.length; mask++) {
    let sign = weight;
    let corner = '';
    for (let k = 0; k < cutDims.length; k++) {
      const isHigh = (mask >> k) & 1;
      if (isHigh) sign = -sign;
      corner += `${isHigh ? highs[k] : lows[k]},`;
    }
    const count = (counts.get(corner) ?? 0) + sign;
    if (count === 0) counts.delete(corner);
    else counts.set(corner, count);
  }
}

/** The box that both hold, or null. */
export function intersect(a, b) {
  const offset = a.offset.map((low, d) => (low > b.offset[d] ? low : b.offset[d]));
  const shape = offset.map((low, d) => {
    const [endA, endB] = [a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]];
    return (endA < endB ? endA : endB) - low;
  });
  return shape.every((n) => n > 0n) ? { offset, shape } : null;
}

/**
 * The contiguous runs of `part` in the row-major order of `source` and of `target`, both of which
 * hold it, in rising order: [element in source, element in target, number of elements].
 */
export function* runs(part, source, target) {
  const n = part.shape.length;
  const isFull = (d, box) => part.shape[d] === box.shape[d];
  let inner = n; // Dims from here on lie in one run; the dim before may be a part.
  while (inner > 0 && isFull(inner - 1, source) && isFull(inner - 1, target)) inner--;
  const outer = Math.max(inner - 1, 0);
  const length = Number(product(part.shape.slice(outer)));
  const sourceSteps = strides(source.shape);
  const targetSteps = strides(target.shape);
  const starts = part.offset.map((low, d) => [Number(low - source.offset[d]), Number(low - target.offset[d])]);
  const counts = part.shape.slice(0, outer).map(Number);
  const index = counts.map(() => 0);
  const base = (steps, which) => starts.reduce((sum, start, d) => sum + start[which] * steps[d], 0);
  let [from, to] = [base(sourceSteps, 0), base(targetSteps, 1)];
  for (;;) {
    yield [from, to, length];
    let d = outer - 1;
    for (; d >= 0; d--) {
      from += sourceSteps[d];
      to += targetSteps[d];
      if (++index[d] < counts[d]) break;
      from -= sourceSteps[d] * counts[d];
      to -= targetSteps[d] * counts[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

function strides(shape) {
  const steps = new Array(shape.length);
  let step = 1;
  for (let d = shape.length - 1; d >= 0; d--) {
    steps[d] = step;
    step *= Number(shape[d]);
  }
  return steps;
}
