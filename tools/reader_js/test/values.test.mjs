import assert from 'node:assert/strict';
import { test } from 'node:test';
import { encode } from '../src/msgpack.mjs';
import { toHex } from '../src/bytes.mjs';
import { identityOf, parseTree, toPlain, walkLeaves } from '../src/values.mjs';

const bin = (...numbers) => Uint8Array.from(numbers);

function codesOf(plain) {
  const problems = [];
  parseTree(plain, problems);
  return problems.map(({ code }) => code);
}

const ACCEPTED = [
  ['int', bin(0, 0, 0, 0, 0, 0, 0, 0, 1)],
  ['int', bin(255, 255, 255, 255, 255, 255, 255, 127, 255)],
  ['complex', NaN, -0.0],
  ['dict', [1n, 'x'], ['a', 1n]],
  ['odict', ['b', 1n], ['a', 2n]],
  ['counter', ['a', 1n]],
  ['defaultdict'],
  ['frozenset', 1n, ['tuple', 2n, ['frozenset']]],
  ['deque', null, 1n], ['deque', 1n, 1n], ['deque', (1n << 63n) - 1n],
  ['size', 0n, (1n << 63n) - 1n],
  ['scalar', 'bfloat16', bin(0, 0)],
  ['name', 'torch.dtype', 'float32'],
  ['datetime', 2000n, 2n, 29n, 23n, 59n, 59n, 999_999n, 1n, -86_399_999_999n],
  ['date', 9999n, 12n, 31n],
  ['timedelta', -999_999_999n, 0n, 0n],
  ['path', 'posix', '//', 'a', '..'],
  ['path', 'pure_windows', '\\\\server\\share\\', 'a'],
  ['path', 'windows', 'c:', 'a'],
  ['tensor', 0n, new Map([['future', 1n], ['odd', ['no tag', []]]])],
  ['tensor', -1n], // No value is wrong with it; refuses it where tensors are known.
];

for (const plain of ACCEPTED) {
  test(`${describe(plain)} is accepted and encodes as it was`, () => {
    const problems = [];
    const value = parseTree(plain, problems);
    assert.deepEqual(problems, []);
    assert.equal(toHex(encode(toPlain(value))), toHex(encode(plain)));
  });
}

const REFUSED = [
  [[], 'unknown_value_type'],
  [[1n], 'unknown_value_type'],
  [['lambda', 'x'], 'unknown_value_type'],
  [['list', ['what']], 'unknown_value_type'],
  [['int', bin()], 'bad_value'],
  [['int', bin(1)], 'bad_value'],
  [['int', bin(0, 0, 0, 0, 0, 0, 0, 0, 1, 0)], 'bad_value'],
  [['int', bin(255, 255, 255, 255, 255, 255, 255, 255, 0)], 'bad_value'],
  [['complex', 1n, 0.0], 'bad_value'],
  [['dict'], 'bad_value'],
  [['dict', ['a', 1n]], 'bad_value'],
  [['dict', [2n, null], [1n, null]], 'bad_value'],
  [['dict', [1n]], 'bad_value'],
  [['dict', [['list'], 1n]], 'bad_value'],
  [['dict', [['tensor', 0n], 1n]], 'bad_value'],
  [['dict', [NaN, 1n]], 'bad_value'],
  [['set', ['tuple', NaN]], 'bad_value'],
  [['set', 1n, 1.0], 'duplicate_key'],
  [['set', false, 0n], 'duplicate_key'],
  [['odict', ['a', 1n], ['b', 1n], ['a', 1n]], 'duplicate_key'],
  [['deque', 0n, 1n], 'bad_value'],
  [['deque', 1n << 63n], 'bad_value'],
  [['size', 1n << 63n], 'bad_value'],
  [['scalar', 'float31', bin(0, 0)], 'bad_value'],
  [['scalar', 'float16', bin(0)], 'bad_value'],
  [['name', 'Torch', 'x'], 'bad_value'],
  [['date', 1900n, 2n, 29n], 'bad_value'],
  [['datetime', 2000n, 1n, 1n, 24n, 0n, 0n, 0n, 0n, null], 'bad_value'],
  [['datetime', 2000n, 1n, 1n, 0n, 0n, 0n, 0n, 0n, 86_400_000_000n], 'bad_value'],
  [['timedelta', 0n, 86_400n, 0n], 'bad_value'],
  [['path', 'posix', '\\'], 'bad_value'],
  [['path', 'windows', '/'], 'bad_value'],
  [['path', 'windows', '\\\\.\\share\\'], 'bad_value'],
  [['path', 'windows', '', 'a:b'], 'bad_value'],
  [['path', 'posix', '', '.'], 'bad_value'],
  [['tensor', 0n, new Map()], 'bad_value'],
  [['tensor', true], 'bad_value'],
];

for (const [plain, code] of REFUSED) {
  test(`${describe(plain)} is refused as ${code}`, () => assert.deepEqual(codesOf(plain), [code]));
}

function describe(plain) {
  return JSON.stringify(plain, (_, x) => (typeof x === 'bigint' ? `${x}n` : x)) ?? String(plain);
}

test('keys are equal as numbers are, exactly', () => {
  const same = (a, b) => assert.equal(identityOf(a), identityOf(b));
  const differ = (a, b) => assert.notEqual(identityOf(a), identityOf(b));
  const complex = (re, im) => ({ type: 'complex', re, im });
  same(true, 1n);
  same(0.0, -0.0);
  same(complex(2, -0), 2n);
  same(2 ** 80, 1n << 80n);
  differ(2 ** 53, (1n << 53n) + 1n);
  differ('1', 1n);
  differ('61', Uint8Array.of(0x61));
  differ({ type: 'tuple', items: [] }, { type: 'frozenset', items: [] });
  same({ type: 'frozenset', items: [1n, 'a'] }, { type: 'frozenset', items: ['a', 1.0] });
});

test('leaves come depth first with the parts of their paths', () => {
  const keys = ['dict', [3n, null], [['int', bin(0, 0, 0, 0, 0, 0, 0, 0, 1)], null], [false, ['tensor', 0n]]];
  const tree = parseTree(new Map([['a', ['tuple', 1n, keys]]]), []);
  const paths = [...walkLeaves(tree)].map(([path]) => path);
  const [big, no] = [{ key: '92a3696e74c409000000000000000001' }, { key: 'c2' }];
  assert.deepEqual(paths, [['a', 0n], ['a', 1n, 3n], ['a', 1n, big], ['a', 1n, no]]);
});
