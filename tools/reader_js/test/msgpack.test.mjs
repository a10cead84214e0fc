import assert from 'node:assert/strict';
import { test } from 'node:test';
import { decode as libraryDecode, encode as libraryEncode } from '@msgpack/msgpack';
import { decode, encode } from '../src/msgpack.mjs';
import { toHex } from '../src/bytes.mjs';

const bytes = (hex) => Uint8Array.from(hex.replaceAll(' ', '').match(/../g) ?? [], (pair) => parseInt(pair, 16));
const nested = (depth) => bytes('91'.repeat(depth) + 'c0');

const REFUSED = [
  ['nothing', '', 'msgpack_malformed'],
  ['a byte after the value', 'c0c0', 'msgpack_malformed'],
  ['the type C1', 'c1', 'msgpack_malformed'],
  ['a cut integer', 'cd01', 'msgpack_malformed'],
  ['an array longer than what is left', 'dd ff ff ff ff', 'msgpack_malformed'],
  ['a map of one byte an entry', '82 a1', 'msgpack_malformed'],
  ['an overlong UTF-8 form', 'a2 c0 80', 'msgpack_malformed'],
  ['a surrogate', 'a3 ed a0 80', 'msgpack_malformed'],
  ['5 as uint 8', 'cc 05', 'msgpack_not_canonical'],
  ['255 as uint 16', 'cd 00 ff', 'msgpack_not_canonical'],
  ['65535 as uint 32', 'ce 00 00 ff ff', 'msgpack_not_canonical'],
  ['2^32 - 1 as uint 64', 'cf 00 00 00 00 ff ff ff ff', 'msgpack_not_canonical'],
  ['a positive int 8', 'd0 05', 'msgpack_not_canonical'],
  ['a positive int 16', 'd1 7f ff', 'msgpack_not_canonical'],
  ['-32 as int 8', 'd0 e0', 'msgpack_not_canonical'],
  ['-128 as int 16', 'd1 ff 80', 'msgpack_not_canonical'],
  ['-32768 as int 32', 'd2 ff ff 80 00', 'msgpack_not_canonical'],
  ['-2^31 as int 64', 'd3 ff ff ff ff 80 00 00 00', 'msgpack_not_canonical'],
  ['float 32', 'ca 00 00 00 00', 'msgpack_not_canonical'],
  ['another NaN', 'cb 7f f8 00 00 00 00 00 01', 'msgpack_not_canonical'],
  ['an extension type', 'd4 01 00', 'msgpack_not_canonical'],
  ['a short str 8', 'd9 01 61', 'msgpack_not_canonical'],
  ['a short bin 16', 'c5 00 01 61', 'msgpack_not_canonical'],
  ['a short array 16', 'dc 00 01 c0', 'msgpack_not_canonical'],
  ['a short map 16', 'de 00 00', 'msgpack_not_canonical'],
  ['an integer key', '81 01 c0', 'msgpack_not_canonical'],
  ['keys out of order', '82 a1 62 c0 a1 61 c0', 'msgpack_not_canonical'],
  ['a key before its prefix', '82 a2 61 61 c0 a1 61 c0', 'msgpack_not_canonical'],
  ['a repeated key', '82 a1 61 c0 a1 61 c0', 'duplicate_key'],
  ['a repeated key, others between', '83 a1 61 c0 a1 62 c0 a1 61 c0', 'duplicate_key'],
];

for (const [name, hex, code] of REFUSED) {
  test(`${name} is refused as ${code}`, () => {
    assert.throws(() => decode(bytes(hex)), { code });
  });
}

test('nesting is allowed to 128 and refused beyond (R-8.6)', () => {
  decode(nested(128));
  assert.throws(() => decode(nested(129)), { code: 'limit_exceeded' });
});

const BOUNDARIES = [0n, 7n, 8n, 15n, 16n, 31n, 32n, 63n, 64n].map((bits) => 1n << bits)
  .flatMap((power) => [power - 1n, power, power + 1n]);
const INTEGERS = [...BOUNDARIES, ...BOUNDARIES.map((n) => -n), -31n, -32n, -33n]
  .filter((n) => n >= -(1n << 63n) && n < 1n << 64n);

test('integers of all sizes come back, as BigInts', () => {
  for (const n of INTEGERS) assert.equal(decode(encode(n)), n);
});

test('other values come back, with their types', () => {
  const value = [null, true, false, 1n, 1.0, -0.0, Infinity, NaN, '', '\ufeffx', 'é'.repeat(40), bytes('00ff'),
    new Uint8Array(300), [[]], new Map([['__proto__', 1n], ['constructor', new Map()]])];
  const back = decode(encode(value));
  assert.deepEqual(back, value);
  assert.equal(toHex(encode(back)), toHex(encode(value)));
});

test('a general library agrees on what it can tell apart', () => {
  for (const n of INTEGERS) {
    assert.equal(BigInt(libraryDecode(encode(n), { useBigInt64: true })), n);
    if (n >= -(1n << 53n) && n <= 1n << 53n) assert.equal(toHex(encode(n)), toHex(libraryEncode(Number(n))));
  }
  for (const length of [0, 15, 16, 31, 32, 255, 256, 65_535, 65_536]) {
    for (const value of ['x'.repeat(length), new Uint8Array(length), new Array(length).fill(null), 1.5]) {
      assert.equal(toHex(encode(value)), toHex(libraryEncode(value)));
    }
    const keys = Array.from({ length }, (_, i) => `k${i}`).sort();
    const entries = keys.map((key) => [key, true]);
    assert.equal(toHex(encode(new Map(entries))), toHex(libraryEncode(Object.fromEntries(entries))));
  }
});
