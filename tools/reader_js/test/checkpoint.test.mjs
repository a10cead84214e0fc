import assert from 'node:assert/strict';
import { mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join as joinPath } from 'node:path';
import { test } from 'node:test';
import { Checkpoint, MemoryStorage, toHex, verify } from '../index.mjs';
import { digest } from '../src/digests.mjs';
import { SECTION_NAMES } from '../src/frame.mjs';
import { NodeStorage } from '../src/storage_node.mjs';
import { build, exampleSpec, join, someBytes } from './build.mjs';

const open = async (files, options) => Checkpoint.open(new MemoryStorage(files), options);
const codesOf = async (files, options) => {
  const { problems } = await verify(new MemoryStorage(files), options);
  return problems.map(({ code }) => code);
};

function changed(files, label, change) {
  const bytes = files.get(label).slice();
  return new Map([...files, [label, change(bytes) ?? bytes]]);
}

test('a checkpoint made by hand verifies and reads', async () => {
  const files = await build(exampleSpec());
  const report = await verify(new MemoryStorage(files));
  assert.deepEqual(report.problems, []);
  const checkpoint = await open(files, { digest: report.root });
  assert.deepEqual(checkpoint.tensors.map(({ name }) => name), ['a%2Fb', 'm/__proto__', 'm/z%40%25/@1']);
  assert.deepEqual(await checkpoint.read(['a/b']), someBytes(5000));
  const [left, right] = [someBytes(8, 2), someBytes(16, 3)];
  const rows = join([left.subarray(0, 4), right.subarray(0, 8), left.subarray(4), right.subarray(8)]);
  assert.deepEqual(await checkpoint.read('m/__proto__'), rows);
  assert.deepEqual(await checkpoint.read('m/__proto__', { offset: [1, 0], shape: [1, 2] }), rows.slice(12, 20));
  const { tensors } = await checkpoint.contentDigests();
  assert.equal(tensors.length, 3);
});

test('boxes across blocks read as slices', async () => {
  const checkpoint = await open(await build(exampleSpec()));
  for (const [begin, end] of [[0, 0], [0, 1], [4095, 4097], [4096, 5000], [17, 4999]]) {
    const got = await checkpoint.read('a%2Fb', { offset: [begin], shape: [end - begin] });
    assert.deepEqual(got, someBytes(5000).subarray(begin, end));
  }
  await assert.rejects(checkpoint.read('a%2Fb', { offset: [1], shape: [5000] }), { code: 'box_out_of_bounds' });
  await assert.rejects(checkpoint.read('a%2Fb', { offset: [-1], shape: [1] }), { code: 'box_out_of_bounds' });
  await assert.rejects(checkpoint.read('constructor'), { code: 'entry_not_found' });
});

test('only touched blocks are looked at', async () => {
  const flip = (bytes) => { bytes[bytes.length - 5040] ^= 1; };
  const files = changed(await build(exampleSpec()), 'model.safetensors', flip);
  const checkpoint = await open(files);
  await checkpoint.read('a%2Fb', { offset: [4096], shape: [10] });
  await assert.rejects(checkpoint.read('a%2Fb', { offset: [4095], shape: [1] }), { code: 'checksum_mismatch' });
  assert.equal((await checkpoint.read('a%2Fb', null, { verify: false })).length, 5000);
});

test('what a header lies about is read only if nothing is verified', async () => {
  const files = await build(exampleSpec());
  const [label] = [...files.keys()].filter((name) => name !== 'manifest.dsd');
  const lying = changed(files, label, (bytes) => { bytes[10] ^= 1; }); // a letter of the first name
  const checkpoint = await open(lying);
  await assert.rejects(checkpoint.read('a%2Fb'), { code: 'header_mismatch' });
  assert.equal((await checkpoint.read('a%2Fb', null, { verify: false })).length, 5000);
});

test('the content digest does not depend on the boxes', async () => {
  const spec = exampleSpec();
  const split = await open(await build(spec));
  const bytes = await split.read('m/__proto__');
  spec.tensors[1].chunks = [{ offset: [0, 0], shape: [2, 3], data: bytes }];
  spec.header = spec.header.replace(/,"\/m\/__proto__.*(?=,"\/m\/z)/,
    ',"/m/__proto__":{"dtype":"F32","shape":[2,3],"data_offsets":[5000,5024]}');
  const whole = await open(await build(spec));
  assert.notEqual(split.root, whole.root);
  assert.equal(toHex((await split.contentDigests()).state), toHex((await whole.contentDigests()).state));
});

test('every changed byte and every cut of a small checkpoint is noticed', async () => {
  const spec = exampleSpec();
  spec.tensors[0] = { dtype: 'uint8', shape: [3], chunks: [{ offset: [0], shape: [3], data: someBytes(3) }] };
  spec.header = '{"a/b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}'
    + ',"/m/__proto__@[0:2,0:1]":{"dtype":"F32","shape":[2,1],"data_offsets":[3,11]}'
    + ',"/m/__proto__@[0:2,1:3]":{"dtype":"F32","shape":[2,2],"data_offsets":[11,27]}'
    + ',"/m/z%40%25/@1":{"dtype":"F64","shape":[2],"data_offsets":[27,43]}}';
  const files = await build(spec);
  assert.deepEqual(await codesOf(files), []);
  for (const label of files.keys()) {
    for (let i = 0; i < files.get(label).length; i++) {
      const flipped = changed(files, label, (bytes) => { bytes[i] ^= 1 << (i % 8); });
      assert.ok((await codesOf(flipped)).length > 0, `${label}, byte ${i}`);
      const cut = changed(files, label, (bytes) => bytes.subarray(0, i));
      assert.ok((await codesOf(cut)).length > 0, `${label}, cut at ${i}`);
    }
  }
});

/** Seal again after a change, so that what lies behind the seal is looked at. */
function reseal(bytes) {
  const head = new DataView(bytes.buffer, bytes.byteOffset).getUint32(12, true);
  bytes.set(digest(bytes.subarray(0, head - 32)), head - 32);
}

test('random changes of a resealed head are refused with a code and never crash', async () => {
  const files = await build(exampleSpec());
  const headNbytes = 40 + 7 * 24;
  for (let i = 12; i < headNbytes; i++) {
    for (const value of [0, 1, 0x7f, 0xff]) {
      const codes = await codesOf(changed(files, 'manifest.dsd', (bytes) => {
        if (bytes[i] === value) bytes[i] ^= 2;
        else bytes[i] = value;
        if (i >= 16) reseal(bytes);
      }));
      assert.ok(codes.length > 0, `byte ${i} as ${value}`);
    }
  }
});

const bodyChange = (key, value) => ({ body: (plain) => new Map(plain).set(key, value) });
const bodyWithout = (key) => ({ body: (plain) => new Map([...plain].filter(([name]) => name !== key)) });
const treeChange = (...entries) => bodyChange('tree', new Map(entries));
const FAULTS = [
  ['an unknown key of the body', bodyChange('more', 1n), 'unknown_key'],
  ['a missing key', bodyWithout('user'), 'bad_body'],
  ['a block that is not a power of two', bodyChange('block_nbytes', 4097n), 'bad_body'],
  ['a dtype that no tensor has', bodyChange('dtypes', ['complex128', 'float32', 'uint8', 'zz']), 'unknown_dtype'],
  ['a root that is a list', bodyChange('tree', ['list']), 'bad_body'],
  ['a tensor that nothing refers to', treeChange(['x', ['tensor', 0n]]), 'bad_tensor_reference'],
  ['a tensor referred to before the first', treeChange(['x', ['tensor', 1n]]), 'bad_tensor_reference'],
  ['a reference below the first tensor', treeChange(['x', ['tensor', -1n]]), 'bad_tensor_reference'],
  ['a section that is missing', { manifest: { names: ['body', 'tensors'] } }, 'bad_sections'],
  ['a flag', { manifest: { flags: { body: 1 } } }, 'bad_sections'],
  ['an unknown feature', { manifest: { features: ['quantum'] } }, 'unknown_feature'],
  ['a feature that is not used', { manifest: { features: ['zstd'] } }, 'feature_mismatch'],
  ['features out of order', { manifest: { features: ['zstd', 'planes'] } }, 'bad_head'],
  ['a frame too many', { sections: (made) => ({ ...made, frames: new Uint8Array(36) }) }, 'bad_block_index'],
  ['half a frame', { sections: (made) => ({ ...made, frames: new Uint8Array(35) }) }, 'bad_section_length'],
];

for (const [name, change, code] of FAULTS) {
  test(`${name} is refused as ${code}`, async () => {
    const codes = await codesOf(await build({ ...exampleSpec(), ...change }));
    assert.deepEqual([...new Set(codes)], [code]);
  });
}

test('another root digest than expected is refused', async () => {
  assert.deepEqual(await codesOf(await build(exampleSpec()), { digest: '0'.repeat(64) }), ['digest_mismatch']);
});

test('an ignorable section is ignored, another refused', async () => {
  const withSection = async (name, flags) => codesOf(await build({
    ...exampleSpec(),
    sections: (made) => ({ ...made, [name]: Uint8Array.of(1) }),
    manifest: { names: [...SECTION_NAMES, name], flags: { [name]: flags } },
  }));
  assert.deepEqual(await withSection('x-new', 1), []);
  assert.deepEqual(await withSection('x-new', 0), ['unknown_section']);
  assert.deepEqual(await withSection('x-new', 2), ['bad_sections']);
  assert.deepEqual(await withSection('X-new', 1), ['bad_sections']);
});

test('all page digests of a stage come before its pages are decoded, and lengths after', async () => {
  const shorter = (made) => ({ ...made, tensors: made.tensors.subarray(1), x: Uint8Array.of(1) });
  const manifest = { names: [...SECTION_NAMES, 'x'], flags: { x: 1 } };
  const files = await build({ ...exampleSpec(), sections: shorter, manifest });
  assert.deepEqual(await codesOf(files), ['bad_section_length']);
  const lastPage = changed(files, 'manifest.dsd', (bytes) => { bytes[bytes.length - 1] ^= 1; });
  assert.deepEqual(await codesOf(lastPage), ['page_checksum_mismatch']);
});

test('a link to a checkpoint is one; a link in the place of its manifest is not (R-5.1, R-5.4)', async (t) => {
  const folder = mkdtempSync(joinPath(tmpdir(), 'dsd-'));
  t.after(() => rmSync(folder, { recursive: true }));
  for (const [label, bytes] of await build(exampleSpec())) writeFileSync(joinPath(folder, label), bytes);
  const codesIn = async (path) => {
    const storage = new NodeStorage(path);
    const { problems } = await verify(storage);
    await storage.close();
    return problems.map(({ code }) => code);
  };
  const link = joinPath(folder, 'link');
  symlinkSync(folder, link);
  assert.deepEqual(await codesIn(link), []);
  symlinkSync('loop', joinPath(folder, 'loop'));
  assert.deepEqual(await codesIn(joinPath(folder, 'loop')), ['no_manifest']);
  rmSync(joinPath(folder, 'manifest.dsd'));
  symlinkSync('model.safetensors', joinPath(folder, 'manifest.dsd'));
  assert.deepEqual(await codesIn(link), ['not_regular_file']);
});

test('files that are not listed are named', async () => {
  const files = await build(exampleSpec());
  files.set('notes.txt', new Uint8Array(3));
  assert.deepEqual((await verify(new MemoryStorage(files))).unlisted, ['notes.txt']);
});

test('Blobs serve as files', async () => {
  const files = await build(exampleSpec());
  const blobs = new Map([...files].map(([label, bytes]) => [label, new Blob([bytes])]));
  assert.deepEqual(await codesOf(blobs), []);
});
