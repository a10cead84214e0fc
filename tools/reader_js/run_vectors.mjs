#!/usr/bin/env node
// run_vectors <vectors-dir>: compare this reader with every case. Exit 1 if one differs.

import { execFileSync } from 'node:child_process';
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Checkpoint, DsdError, toHex, verify } from './index.mjs';
import { NodeStorage } from './src/storage_node.mjs';
import { encode } from './src/msgpack.mjs';
import { toPlain } from './src/values.mjs';

const SETUP = {
  symlink: (path, { target }) => symlinkSync(target, path),
  mkdir: (path) => mkdirSync(path),
  fifo: (path) => execFileSync('mkfifo', [path]),
  remove: (path) => rmSync(path, { recursive: true, force: true }),
};

/** Call `use` with the case's checkpoint folder, changed as its setup says. */
async function withCheckpoint(folder, setup, use) {
  const original = join(folder, 'checkpoint');
  if (setup === undefined || setup.length === 0) return use(original);
  const temporary = mkdtempSync(join(tmpdir(), 'dsd-vector-'));
  const copy = join(temporary, 'checkpoint');
  try {
    cpSync(original, copy, { recursive: true });
    for (const step of setup) SETUP[step.op](join(copy, step.label), step);
    return await use(copy);
  } finally {
    rmSync(temporary, { recursive: true, force: true });
  }
}

async function withStorage(folder, use) {
  const storage = new NodeStorage(folder);
  try {
    return await use(storage);
  } finally {
    await storage.close();
  }
}

const describeProblem = ({ code, message, ...place }) => `${code}: ${message} ${JSON.stringify(place)}`;

/** What differs in a case that must be refused, as lines. */
async function checkInvalid(storage, { options, expect }) {
  const { problems } = await verify(storage, options);
  if (problems.length === 0) return [`expected ${expect.code}, got no problem`];
  return problems.filter(({ code }) => code !== expect.code)
    .map((problem) => `expected ${expect.code}, got ${describeProblem(problem)}`);
}

/** What differs in a case that must be accepted, as lines. */
async function checkValid(storage, { options, expect }) {
  const { problems } = await verify(storage, options);
  if (problems.length > 0) return problems.map(describeProblem);
  const checkpoint = await Checkpoint.open(storage, options);
  const differences = [];
  const compare = (what, got, expected) => {
    const [a, b] = [JSON.stringify(got), JSON.stringify(expected)];
    if (a !== b) differences.push(`${what}: got ${a}, expected ${b}`);
  };
  compare('root', checkpoint.root, expect.root);
  compare('features', checkpoint.features, expect.features);
  compare('user', Object.entries(Object.fromEntries(checkpoint.user)).sort(), Object.entries(expect.user).sort());
  const { tensors } = checkpoint;
  compare('number of tensors', tensors.length, expect.tensors.length);
  const digests = await checkpoint.contentDigests();
  compare('state', toHex(digests.state), expect.state);
  checkEncoding(checkpoint, compare);
  for (const [i, expected] of expect.tensors.entries()) {
    if (i < tensors.length) await checkTensor(checkpoint, tensors[i], digests.tensors[i], expected, compare);
  }
  return differences;
}

// Section 8: encoding what was decoded gives the same bytes. Shows that the typed values lose nothing.
function checkEncoding(checkpoint, compare) {
  const { plainBody } = checkpoint.manifest;
  compare('tree encoded again', toHex(encode(toPlain(checkpoint.tree))), toHex(encode(plainBody.get('tree'))));
}

async function checkTensor(checkpoint, row, content, expected, compare) {
  const { path, dtype, shape, chunks, name } = row;
  const at = `tensor ${name}`;
  // JSON.parse has rounded what exceeds 2^53, so ours is rounded alike.
  compare(`${at} path`, path.map((part) => (typeof part === 'bigint' ? Number(part) : part)), expected.path);
  compare(`${at} shape`, shape.map(Number), expected.shape);
  compare(`${at} dtype`, dtype, expected.dtype);
  compare(`${at} chunks`, chunks, expected.chunks);
  compare(`${at} content`, toHex(content), expected.content);
  if (expected.data === undefined) return;
  const bytes = await checkpoint.read(path);
  compare(`${at} data`, toHex(bytes), expected.data);
  await checkBoxes(checkpoint, { path, shape, bytes }, (what, got, want) => compare(`${at} ${what}`, got, want));
}

// Single elements from the middle and the end: any box must agree with the whole.
async function checkBoxes(checkpoint, { path, shape, bytes }, compare) {
  if (shape.includes(0n)) return;
  const count = Number(shape.reduce((a, b) => a * b, 1n));
  const itemsize = bytes.length / count;
  for (const element of new Set([0, Math.floor(count / 2), count - 1])) {
    let rest = BigInt(element);
    const offset = shape.map(() => 0n);
    for (let d = shape.length - 1; d >= 0; d--) [offset[d], rest] = [rest % shape[d], rest / shape[d]];
    const got = await checkpoint.read(path, { offset, shape: shape.map(() => 1n) });
    compare(`element ${element}`, toHex(got), toHex(bytes.subarray(element * itemsize, (element + 1) * itemsize)));
  }
}

async function runCase(folder, check) {
  const given = JSON.parse(readFileSync(join(folder, 'case.json'), 'utf8'));
  try {
    return await withCheckpoint(folder, given.setup, (path) => withStorage(path, (storage) => check(storage, given)));
  } catch (error) {
    if (error instanceof DsdError) return [`threw ${error.message}`];
    return [`crashed: ${error.stack}`];
  }
}

async function runFolder(vectors, kind, check) {
  const root = join(vectors, kind);
  const names = existsSync(root) ? readdirSync(root).sort() : [];
  let failed = 0;
  for (const name of names) {
    const differences = await runCase(join(root, name), check);
    failed += differences.length > 0 ? 1 : 0;
    for (const line of differences) console.log(`${kind}/${name}: ${line.slice(0, 600)}`);
  }
  return { count: names.length, failed };
}

const [vectors] = process.argv.slice(2);
if (vectors === undefined) {
  console.error('usage: node run_vectors.mjs <vectors-dir>');
  process.exit(2);
}
const valid = await runFolder(vectors, 'valid', checkValid);
const invalid = await runFolder(vectors, 'invalid', checkInvalid);
const failed = valid.failed + invalid.failed;
console.log(`${valid.count} valid and ${invalid.count} invalid cases, ${failed} failed`);
process.exitCode = failed > 0 || valid.count + invalid.count === 0 ? 1 : 0;
