// The tree's values (section 11): parsed from plain msgpack with every rule checked, walked, and
// encoded again. Nothing here makes an object of another library, or looks anything up by name.
//
// A value is null, boolean, BigInt, number (a float), string, Uint8Array, or a frozen object with
// a `type`: dict odict counter defaultdict {entries: [[key, value]…]}, list tuple set frozenset
// {items}, deque {maxlen, items}, complex {re, im}, size {dims}, scalar {dtype, bytes},
// name {kind, name}, datetime date timedelta {fields}, path {kind, anchor, parts},
// tensor {index, attributes}.

import { compareBytes, toHex } from './bytes.mjs';
import { problem } from './errors.mjs';
import { encode } from './msgpack.mjs';
import { DTYPES } from './registry.mjs';

const INT_MIN = -(1n << 63n);
const INT_MAX = (1n << 64n) - 1n;
const INT63_MAX = (1n << 63n) - 1n;
const DAY_MICROSECONDS = 86_400_000_000n;
const PATH_KINDS = new Set(['posix', 'windows', 'pure_posix', 'pure_windows']);
const INVALID = Object.freeze({ type: 'invalid' });

export const isInt = (x) => typeof x === 'bigint';
export const isText = (x) => typeof x === 'string';
export const isMap = (x) => x instanceof Map;
const isFloat = (x) => typeof x === 'number';
const isBytes = (x) => x instanceof Uint8Array;
const inRange = (x, low, high) => isInt(x) && x >= low && x <= high;
const isPlainInt = (x) => inRange(x, INT_MIN, INT_MAX);

/** Parse the plain value of the key `tree`; what is wrong is added to `problems`. */
export function parseTree(plain, problems) {
  return new Parser(problems).value(plain);
}

class Parser {
  constructor(problems) {
    this.problems = problems;
    this.place = ['$'];
  }

  fail(code, message) {
    this.problems.push(problem(code, message, { where: this.place.join('') }));
    return INVALID;
  }

  at(step, parse) {
    this.place.push(step);
    const result = parse();
    this.place.pop();
    return result;
  }

  value(plain) {
    if (Array.isArray(plain)) return this.tagged(plain);
    if (isMap(plain)) return this.plainDict(plain);
    return plain;
  }

  plainDict(map) {
    const entries = [];
    for (const [key, item] of map) entries.push([key, this.at(`.${key}`, () => this.value(item))]);
    return freeze('dict', { entries });
  }

  // R-11.1
  tagged(plain) {
    const [tag, ...rest] = plain;
    if (!isText(tag)) return this.fail('unknown_value_type', 'an array without a tag');
    const parse = TAGS.get(tag);
    if (parse === undefined) return this.fail('unknown_value_type', `the tag ${JSON.stringify(tag)} is not known`);
    return parse(this, rest, tag);
  }

  bad(message) {
    return this.fail('bad_value', message);
  }

  items(plain) {
    return plain.map((item, i) => this.at(`[${i}]`, () => this.value(item)));
  }
}

const freeze = (type, fields) => Object.freeze({ type, ...fields });

// What each tag's elements must be: R-11.2 and the table above it.
const TAGS = new Map([
  ['int', parseInteger],
  ['complex', parseComplex],
  ['dict', parseDict],
  ['counter', parseDict],
  ['defaultdict', parseDict],
  ['odict', parseDict],
  ['list', (parser, rest, tag) => freeze(tag, { items: parser.items(rest) })],
  ['tuple', (parser, rest, tag) => freeze(tag, { items: parser.items(rest) })],
  ['set', parseSet],
  ['frozenset', parseSet],
  ['deque', parseDeque],
  ['size', parseSize],
  ['scalar', parseScalar],
  ['name', parseName],
  ['datetime', parseDatetime],
  ['date', parseDate],
  ['timedelta', parseTimedelta],
  ['path', parsePath],
  ['tensor', parseTensor],
]);

export const TAG_NAMES = [...TAGS.keys()];

function parseInteger(parser, rest) {
  const [bytes] = rest;
  if (rest.length !== 1 || !isBytes(bytes)) return parser.bad('an int is not one byte string');
  if (!isShortest(bytes)) return parser.bad('an int is longer than it need be');
  const value = BigInt.asIntN(bytes.length * 8, unsignedOf(bytes));
  if (isPlainInt(value)) return parser.bad('an int that has a plain form');
  return value;
}

function isShortest(bytes) {
  if (bytes.length < 2) return true; // It then has a plain form, which is refused.
  const last = bytes[bytes.length - 1];
  const isNegative = (bytes[bytes.length - 2] & 0x80) !== 0;
  return !(last === 0x00 && !isNegative) && !(last === 0xff && isNegative);
}

function unsignedOf(bytes) {
  return bytes.length === 0 ? 0n : BigInt(`0x${toHex(bytes.slice().reverse())}`);
}

function parseComplex(parser, rest, tag) {
  const [re, im] = rest;
  if (rest.length !== 2 || !isFloat(re) || !isFloat(im)) return parser.bad('a complex is not two floats');
  return freeze(tag, { re, im });
}

function parseDict(parser, rest, tag) {
  const entries = [];
  for (const [i, pair] of rest.entries()) {
    if (!Array.isArray(pair) || pair.length !== 2) return parser.bad(`entry ${i} is not a key and a value`);
    const key = parser.at(`{key ${i}}`, () => parseKey(parser, pair[0]));
    entries.push([key, parser.at(`{${i}}`, () => parser.value(pair[1]))]);
  }
  if (tag === 'dict' && entries.every(([key]) => isText(key))) {
    return parser.bad('a dict of string keys is not a map'); // R-11.3
  }
  checkKeys(parser, rest.map(([key]) => key), entries.map(([key]) => key), tag !== 'odict');
  return freeze(tag, { entries });
}

function parseSet(parser, rest, tag) {
  const items = rest.map((item, i) => parser.at(`{${i}}`, () => parseKey(parser, item)));
  checkKeys(parser, rest, items, true);
  return freeze(tag, { items });
}

// R-11.4, R-11.6
function parseKey(parser, plain) {
  const before = parser.problems.length;
  const key = parser.value(plain);
  if (parser.problems.length > before) return INVALID;
  return isKeyValue(key) ? key : parser.bad('not a key value');
}

function isKeyValue(value) {
  if (isFloat(value)) return !Number.isNaN(value);
  if (value === null || typeof value !== 'object' || isBytes(value)) return true;
  if (value.type === 'complex') return !Number.isNaN(value.re) && !Number.isNaN(value.im);
  if (value.type === 'tuple') return value.items.every(isKeyValue);
  return value.type === 'frozenset'; // Its items have been checked.
}

// R-11.3 and R-11.5. A key that was met is a repeated one, also when others lie between.
function checkKeys(parser, plainKeys, keys, isSorted) {
  if (keys.length < 2 || keys.includes(INVALID)) return; // One key has no like, however deep it is.
  if (new Set(keys.map(identityOf)).size < keys.length) {
    parser.fail('duplicate_key', 'two keys are equal');
    return;
  }
  const encoded = isSorted ? plainKeys.map((key) => encode(key)) : [];
  for (let i = 1; i < encoded.length; i++) {
    if (compareBytes(encoded[i - 1], encoded[i]) >= 0) {
      parser.bad('keys are out of order');
      return;
    }
  }
}

/** A string that two key values share if and only if they are equal. */
export function identityOf(key) {
  if (key === null) return 'none';
  if (isText(key)) return `str ${key}`;
  if (isBytes(key)) return `bytes ${toHex(key)}`;
  if (typeof key !== 'object') return `number ${numberIdentity(key)}`;
  if (key.type === 'complex') return `number ${complexIdentity(key)}`;
  const parts = key.items.map(identityOf);
  if (key.type === 'frozenset') parts.sort();
  return `${key.type} ${parts.map((part) => `${part.length}:${part}`).join('')}`;
}

function numberIdentity(number) {
  if (isFloat(number)) return Number.isInteger(number) ? BigInt(number).toString(16) : `${number} float`;
  return BigInt(number).toString(16);
}

function complexIdentity({ re, im }) {
  return im === 0 ? numberIdentity(re) : `${numberIdentity(re)} + ${numberIdentity(im)}i`;
}

function parseDeque(parser, rest, tag) {
  const [maxlen, ...items] = rest;
  const isLength = maxlen === null || inRange(maxlen, BigInt(items.length), INT63_MAX);
  if (!isLength) return parser.bad('maxlen is neither nil nor an int from the number of items to 2^63-1');
  return freeze(tag, { maxlen, items: parser.items(items) });
}

function parseSize(parser, dims, tag) {
  if (!dims.every((dim) => inRange(dim, 0n, INT63_MAX))) return parser.bad('a size holds other than dims');
  return freeze(tag, { dims });
}

function parseScalar(parser, rest, tag) {
  const [name, bytes] = rest;
  const dtype = DTYPES.get(name);
  if (rest.length !== 2 || dtype === undefined || !isBytes(bytes) || bytes.length !== dtype.itemsize) {
    return parser.bad('a scalar is not a dtype and its bytes');
  }
  return freeze(tag, { dtype: name, bytes });
}

function parseName(parser, rest, tag) {
  const [kind, name] = rest;
  if (rest.length !== 2 || !isText(kind) || !isText(name) || !/^[a-z][a-z0-9_.]{0,63}$/.test(kind)) {
    return parser.bad('a name is not a kind and a name');
  }
  return freeze(tag, { kind, name });
}

function isDate([year, month, day]) {
  return inRange(year, 1n, 9999n) && inRange(month, 1n, 12n) && inRange(day, 1n, daysOf(year, month));
}

function daysOf(year, month) {
  const isLeap = (year % 4n === 0n && year % 100n !== 0n) || year % 400n === 0n;
  if (month === 2n) return isLeap ? 29n : 28n;
  return [4n, 6n, 9n, 11n].includes(month) ? 30n : 31n;
}

function parseDate(parser, fields, tag) {
  if (fields.length !== 3 || !isDate(fields)) return parser.bad('not a date');
  return freeze(tag, { fields });
}

function parseDatetime(parser, fields, tag) {
  const [, , , hour, minute, second, microsecond, fold, offset] = fields;
  const isTime = inRange(hour, 0n, 23n) && inRange(minute, 0n, 59n) && inRange(second, 0n, 59n)
    && inRange(microsecond, 0n, 999_999n) && inRange(fold, 0n, 1n)
    && (offset === null || inRange(offset, 1n - DAY_MICROSECONDS, DAY_MICROSECONDS - 1n));
  if (fields.length !== 9 || !isDate(fields) || !isTime) return parser.bad('not a date and time');
  return freeze(tag, { fields });
}

function parseTimedelta(parser, fields, tag) {
  const [days, seconds, microseconds] = fields;
  const isDelta = inRange(days, -999_999_999n, 999_999_999n) && inRange(seconds, 0n, 86_399n)
    && inRange(microseconds, 0n, 999_999n);
  if (fields.length !== 3 || !isDelta) return parser.bad('not a difference of times');
  return freeze(tag, { fields });
}

// R-11.7
function parsePath(parser, rest, tag) {
  const [kind, anchor, ...parts] = rest;
  if (!PATH_KINDS.has(kind) || !isText(anchor)) return parser.bad('a path without a kind and an anchor');
  const isWindows = kind.endsWith('windows');
  const isAnchor = isWindows ? isWindowsAnchor(anchor) : ['', '/', '//'].includes(anchor);
  if (!isAnchor) return parser.bad(`not an anchor: ${JSON.stringify(anchor)}`);
  const isPart = (part) => isText(part) && part !== '' && part !== '.' && !/[/\0]/.test(part)
    && !(isWindows && /[\\:]/.test(part));
  if (!parts.every(isPart)) return parser.bad('a path with a malformed part');
  return freeze(tag, { kind, anchor, parts });
}

function isWindowsAnchor(anchor) {
  if (/^(|\\|[A-Za-z]:\\?)$/.test(anchor)) return true;
  const share = /^\\\\([^\\/:?\0]+)\\([^\\/:?\0]+)\\$/.exec(anchor);
  return share !== null && share[1] !== '.' && share[2] !== '.';
}

// Which index it must be is R-11.9, and attributes have no rules but those of section 8.
function parseTensor(parser, rest, tag) {
  const [index, attributes] = rest;
  const isShape = rest.length === 1 || (rest.length === 2 && isMap(attributes) && attributes.size > 0);
  if (!isShape || !isInt(index)) return parser.bad('a tensor is not an index and attributes');
  return freeze(tag, { index, attributes: attributes ?? null });
}

/**
 * The tree's leaves in its order, with their paths. A part of a path is a string, a BigInt (an index,
 * or a dict key that is an integer of 64 bits), or {key} with another key's encoding in hexadecimal.
 */
export function* walkLeaves(value, path = []) {
  const children = childrenOf(value);
  if (children === null) {
    yield [path, value];
    return;
  }
  for (const [part, child] of children()) yield* walkLeaves(child, [...path, part]);
}

function childrenOf(value) {
  if (value === null || typeof value !== 'object' || isBytes(value)) return null;
  if (value.entries !== undefined) {
    return function* entries() {
      for (const [key, child] of value.entries) yield [partOf(key), child];
    };
  }
  if (!['list', 'tuple', 'deque'].includes(value.type)) return null;
  return function* items() {
    for (const [i, child] of value.items.entries()) yield [BigInt(i), child];
  };
}

function partOf(key) {
  return isText(key) || isPlainInt(key) ? key : { key: toHex(encode(toPlain(key))) };
}

/**
 * The plain msgpack value of a value.
 * @param {function} tensorToPlain what stands for a tensor reference
 */
export function toPlain(value, tensorToPlain = plainReference) {
  if (isInt(value)) return isPlainInt(value) ? value : ['int', bytesOf(value)];
  if (value === null || typeof value !== 'object' || isBytes(value)) return value;
  const inner = (child) => toPlain(child, tensorToPlain);
  const { type } = value;
  if (type === 'tensor') return tensorToPlain(value);
  if (type === 'dict' && value.entries.every(([key]) => isText(key))) {
    return new Map(value.entries.map(([key, child]) => [key, inner(child)]));
  }
  if (value.entries !== undefined) return [type, ...value.entries.map((pair) => pair.map(inner))];
  if (type === 'deque') return [type, value.maxlen, ...value.items.map(inner)];
  if (value.items !== undefined) return [type, ...value.items.map(inner)];
  return [type, ...leafElements(value)];
}

function leafElements(value) {
  switch (value.type) {
    case 'complex': return [value.re, value.im];
    case 'size': return value.dims;
    case 'scalar': return [value.dtype, value.bytes];
    case 'name': return [value.kind, value.name];
    case 'path': return [value.kind, value.anchor, ...value.parts];
    default: return value.fields;
  }
}

function plainReference({ type, index, attributes }) {
  return attributes === null ? [type, index] : [type, index, attributes];
}

function bytesOf(value) {
  const bytes = [];
  let rest = value;
  for (;;) {
    const byte = Number(rest & 0xffn);
    bytes.push(byte);
    rest >>= 8n;
    if ((rest === 0n && byte < 0x80) || (rest === -1n && byte >= 0x80)) return Uint8Array.from(bytes);
  }
}

/** R-13.2: the encoding that the state's content digest is taken of. */
export function encodeState(tree, tensorDigest) {
  return encode(toPlain(tree, ({ index }) => ['tensor', tensorDigest(Number(index))]));
}
