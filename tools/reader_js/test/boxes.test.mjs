import assert from 'node:assert/strict';
import { test } from 'node:test';
import { findCutDims, findTilingFault, intersect, runs } from '../src/boxes.mjs';
import { slabBoxes } from '../src/checkpoint.mjs';
import { product } from '../src/columns.mjs';

let seed = 12345;
const random = (n) => {
  seed = (Math.imul(seed, 1103515245) + 12345) & 0x7fffffff;
  return (seed >> 8) % n;
};

const range = (n) => Array.from({ length: n }, (_, i) => i);
const box = (offset, shape) => ({ offset: offset.map(BigInt), shape: shape.map(BigInt) });
const fault = (boxes, shape) => {
  const dims = shape.map(BigInt);
  return findTilingFault(boxes, dims, findCutDims(boxes, dims));
};

function randomBox(shape) {
  const offset = shape.map((dim) => random(dim));
  return box(offset, shape.map((dim, d) => 1 + random(dim - offset[d])));
}

/** Cut one box of the list in two, at random. */
function cutOne(boxes) {
  const { offset, shape } = boxes.splice(random(boxes.length), 1)[0];
  const d = random(shape.length);
  const n = shape[d] > 1n ? 1n + BigInt(random(Number(shape[d]) - 1)) : shape[d];
  const put = (list, value) => list.map((x, i) => (i === d ? value : x));
  boxes.push({ offset, shape: put(shape, n) });
  if (n < shape[d]) boxes.push({ offset: put(offset, offset[d] + n), shape: put(shape, shape[d] - n) });
}

test('boxes made by cutting tile; without one there is a hole; with another an overlap', () => {
  for (let round = 0; round < 200; round++) {
    const shape = Array.from({ length: 1 + random(4) }, () => 1 + random(5));
    const boxes = [box(shape.map(() => 0), shape)];
    for (let i = 0; i < random(9); i++) cutOne(boxes);
    assert.equal(fault(boxes, shape), null);
    assert.equal(fault(boxes.slice(1), shape), 'chunk_hole');
    assert.equal(fault([...boxes, randomBox(shape)], shape), 'chunk_overlap');
  }
});

test('a box moved onto another is an overlap though the elements add up', () => {
  assert.equal(fault([box([0], [2]), box([1], [2])], [4]), 'chunk_overlap');
});

test('runs copy a part between boxes as element by element', () => {
  for (let round = 0; round < 300; round++) {
    const shape = Array.from({ length: random(5) }, () => 1 + random(4));
    const [source, target] = shape.length ? [randomBox(shape), randomBox(shape)] : [box([], []), box([], [])];
    const part = intersect(source, target);
    if (part === null) continue;
    const got = [...runs(part, source, target)].flatMap(([from, to, n]) => range(n).map((i) => [from + i, to + i]));
    assert.deepEqual(got, elementPairs(part, source, target));
  }
});

function elementPairs(part, source, target) {
  const flat = (at, { offset, shape }) => Number(at.reduce((sum, x, d) => sum * shape[d] + x - offset[d], 0n));
  return Array.from({ length: Number(product(part.shape)) }, (_, n) => {
    const at = [];
    let rest = BigInt(n);
    for (let d = part.shape.length - 1; d >= 0; d--) {
      at[d] = part.offset[d] + (rest % part.shape[d]);
      rest /= part.shape[d];
    }
    return [flat(at, source), flat(at, target)];
  });
}

test('slabs follow each other in row-major order and hold all elements', () => {
  for (const shape of [[], [1], [7], [3, 5], [2, 3, 4], [1, 1, 50]]) {
    for (const target of [1n, 8n, 24n, 1000n]) {
      const dims = shape.map(BigInt);
      const whole = box(shape.map(() => 0), shape);
      const elements = (slab) => [...runs(slab, whole, slab)].flatMap(([from, , n]) => range(n).map((i) => from + i));
      const seen = [...slabBoxes(dims, 4n, target)].flatMap(elements);
      assert.deepEqual(seen, range(Number(product(dims))));
    }
  }
});
