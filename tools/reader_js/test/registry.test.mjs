import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { CODEC_NAMES, DTYPES, FEATURES } from '../src/registry.mjs';
import { TAG_NAMES } from '../src/values.mjs';

/** The rows of the tables of a registry page, cells without backticks. */
function rowsOf(page) {
  const text = readFileSync(new URL(`../../../spec/registry/${page}.md`, import.meta.url), 'utf8');
  return text.split('\n').filter((line) => /^\| [`0-9]/.test(line))
    .map((line) => line.split('|').slice(1, -1).map((cell) => cell.trim().replaceAll('`', '')));
}

test('dtypes are those of the registry', () => {
  const expected = rowsOf('dtypes').map(([name, itemsize, ...rest]) => {
    const [storedAs, shapeRule, rotate] = rest;
    return [name, Number(itemsize), storedAs, shapeRule, rotate === 'yes'];
  });
  const own = [...DTYPES.values()].map((d) => [d.name, d.itemsize, d.storedAs, d.shapeRule, d.rotate]).sort();
  assert.deepEqual(own, expected.sort());
});

test('codecs, features and tags are those of the registry', () => {
  assert.deepEqual(CODEC_NAMES, rowsOf('codecs').map(([, name]) => name));
  assert.deepEqual([...FEATURES].sort(), rowsOf('features').map(([name]) => name));
  assert.deepEqual([...TAG_NAMES].sort(), rowsOf('values').map(([tag]) => tag));
});
