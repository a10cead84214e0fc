// Canonical msgpack (section 8): one strict decoder, one encoder.
//
// Decoded values are plain: null, boolean, BigInt (an integer), number (a float), string,
// Uint8Array (a byte string), Array, and Map for a map. So integers are exact, 1 and 1.0 stay
// apart, and no key can reach a prototype. General msgpack libraries cannot say these things,
// nor see a repeated key or a longer form; a test compares with one where they can.

import { compareBytes, compareText, utf8, viewOf } from './bytes.mjs';
import { DsdError } from './errors.mjs';

const MAX_DEPTH = 128;
const CANONICAL_NAN = 0x7ff8000000000000n;

// ignoreBOM: without it the decoder swallows a leading U+FEFF.
const strictUtf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

/** Decode one canonical value that fills `bytes`; throws the first problem in byte order. */
export function decode(bytes) {
  const walker = new Walker(bytes);
  const value = walker.value(1);
  if (walker.at < bytes.length) walker.malformed(walker.at, 'bytes follow the value');
  return value;
}

class Walker {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = viewOf(bytes);
    this.at = 0;
  }

  fail(code, at, message) {
    throw new DsdError(code, message, { section: 'body', where: `byte ${at}` });
  }

  malformed(at, message) {
    this.fail('msgpack_malformed', at, message);
  }

  notCanonical(at, message) {
    this.fail('msgpack_not_canonical', at, message);
  }

  /** Step over n bytes, which must be there; returns where they begin. */
  take(n) {
    const begin = this.at;
    if (n > this.bytes.length - begin) this.malformed(begin, 'the value is cut short');
    this.at += n;
    return begin;
  }

  uint(width) {
    const at = this.take(width);
    if (width === 1) return this.view.getUint8(at);
    return width === 2 ? this.view.getUint16(at) : this.view.getUint32(at);
  }

  value(depth) {
    const start = this.take(1);
    const type = this.bytes[start];
    if (type < 0x80) return BigInt(type);
    if (type < 0x90) return this.map(start, type & 0x0f, depth);
    if (type < 0xa0) return this.array(start, type & 0x0f, depth);
    if (type < 0xc0) return this.string(start, type & 0x1f);
    if (type >= 0xe0) return BigInt(type - 0x100);
    return this.longForm(start, type, depth);
  }

  longForm(start, type, depth) {
    switch (type) {
      case 0xc0: return null;
      case 0xc1: return this.malformed(start, 'C1 is not a type');
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.binary(start, this.length(start, 1, 0));
      case 0xc5: return this.binary(start, this.length(start, 2, 0x100));
      case 0xc6: return this.binary(start, this.length(start, 4, 0x10000));
      case 0xca: return this.notCanonical(start, 'float 32');
      case 0xcb: return this.float(start);
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return this.unsigned(start, type - 0xcc);
      case 0xd0: case 0xd1: case 0xd2: case 0xd3: return this.signed(start, type - 0xd0);
      case 0xd9: return this.string(start, this.length(start, 1, 32));
      case 0xda: return this.string(start, this.length(start, 2, 0x100));
      case 0xdb: return this.string(start, this.length(start, 4, 0x10000));
      case 0xdc: return this.array(start, this.length(start, 2, 16), depth);
      case 0xdd: return this.array(start, this.length(start, 4, 0x10000), depth);
      case 0xde: return this.map(start, this.length(start, 2, 16), depth);
      case 0xdf: return this.map(start, this.length(start, 4, 0x10000), depth);
      default: return this.notCanonical(start, 'an extension type');
    }
  }

  length(start, width, least) {
    const length = this.uint(width);
    if (length < least) this.notCanonical(start, `a length of ${length} in ${width} bytes`);
    return length;
  }

  unsigned(start, power) {
    const width = 1 << power;
    const at = this.take(width);
    const value = width === 8 ? this.view.getBigUint64(at) : this.uintAt(at, width);
    const least = width === 1 ? 0x80n : 1n << BigInt(width * 4);
    if (value < least) this.notCanonical(start, `the integer ${value} in ${width} bytes`);
    return value;
  }

  uintAt(at, width) {
    if (width === 1) return BigInt(this.view.getUint8(at));
    return BigInt(width === 2 ? this.view.getUint16(at) : this.view.getUint32(at));
  }

  signed(start, power) {
    const width = 1 << power;
    const at = this.take(width);
    const raw = width === 8 ? this.view.getBigUint64(at) : this.uintAt(at, width);
    const value = BigInt.asIntN(width * 8, raw);
    const most = width === 1 ? -33n : -(1n << BigInt(width * 4 - 1)) - 1n;
    if (value > most) this.notCanonical(start, `the integer ${value} in ${width} bytes`);
    return value;
  }

  float(start) {
    const at = this.take(8);
    const value = this.view.getFloat64(at);
    if (Number.isNaN(value) && this.view.getBigUint64(at) !== CANONICAL_NAN) {
      this.notCanonical(start, 'another NaN than 7FF8000000000000');
    }
    return value;
  }

  binary(start, length) {
    const at = this.take(length);
    return this.bytes.subarray(at, at + length);
  }

  string(start, length) {
    const at = this.take(length);
    try {
      return strictUtf8.decode(this.bytes.subarray(at, at + length));
    } catch {
      return this.malformed(start, 'a string that is not UTF-8');
    }
  }

  // before anything is allocated.
  enter(start, least, depth) {
    if (least > this.bytes.length - this.at) this.malformed(start, 'a length that does not fit');
    if (depth > MAX_DEPTH) {
      this.fail('limit_exceeded', start, `nested deeper than ${MAX_DEPTH}`);
    }
  }

  array(start, length, depth) {
    this.enter(start, length, depth);
    const items = [];
    for (let i = 0; i < length; i++) items.push(this.value(depth + 1));
    return items;
  }

  map(start, length, depth) {
    this.enter(start, length * 2, depth);
    const entries = new Map();
    let before = null;
    for (let i = 0; i < length; i++) {
      const keyStart = this.at;
      const key = this.key();
      const keyBytes = this.bytes.subarray(keyStart, this.at);
      this.checkKey(keyStart, key, keyBytes, before, entries);
      entries.set(key, this.value(depth + 1));
      before = keyBytes;
    }
    return entries;
  }

  key() {
    const at = this.at;
    const type = this.bytes[at];
    if (type === undefined) this.malformed(at, 'the value is cut short');
    if (type === 0xc1) this.malformed(at, 'C1 is not a type');
    const isString = (type >= 0xa0 && type < 0xc0) || (type >= 0xd9 && type <= 0xdb);
    if (!isString) this.notCanonical(at, 'a map key that is not a string');
    return this.value(0);
  }

  // A key that was met is a repeated one, next to its like or not.
  checkKey(at, key, keyBytes, before, entries) {
    if (entries.has(key)) {
      this.fail('duplicate_key', at, `the key ${JSON.stringify(key)} occurs twice`);
    }
    if (before !== null && compareBytes(textOf(before), textOf(keyBytes)) >= 0) {
      this.notCanonical(at, `the key ${JSON.stringify(key)} is out of order`);
    }
  }
}

// An encoded string without its head.
function textOf(encoded) {
  const type = encoded[0];
  if (type < 0xc0) return encoded.subarray(1);
  return encoded.subarray(1 + (1 << (type - 0xd9)));
}

/** Encode a plain value in its canonical form; a Map's keys are put in order. */
export function encode(value) {
  const sink = new Sink();
  write(sink, value);
  return sink.bytes.slice(0, sink.nbytes);
}

class Sink {
  constructor() {
    this.bytes = new Uint8Array(256);
    this.view = viewOf(this.bytes);
    this.nbytes = 0;
  }

  reserve(n) {
    const begin = this.nbytes;
    this.nbytes += n;
    if (this.nbytes > this.bytes.length) {
      const grown = new Uint8Array(Math.max(this.nbytes, this.bytes.length * 2));
      grown.set(this.bytes.subarray(0, begin));
      this.bytes = grown;
      this.view = viewOf(grown);
    }
    return begin;
  }

  byte(value) {
    const at = this.reserve(1);
    this.bytes[at] = value;
  }

  append(bytes) {
    const at = this.reserve(bytes.length);
    this.bytes.set(bytes, at);
  }

  big(value, width) {
    const at = this.reserve(width);
    for (let i = width - 1, rest = BigInt.asUintN(width * 8, value); i >= 0; i--, rest >>= 8n) {
      this.bytes[at + i] = Number(rest & 0xffn);
    }
  }

  float(value) {
    const at = this.reserve(8);
    if (Number.isNaN(value)) this.view.setBigUint64(at, CANONICAL_NAN);
    else this.view.setFloat64(at, value);
  }

  /** A length: in the type byte below `fixEnd`, else after the first type that is wide enough. */
  length(length, fixBase, fixEnd, types) {
    if (length < fixEnd) return this.byte(fixBase + length);
    const width = [1, 2, 4].find((w) => types[w] !== undefined && length < 2 ** (8 * w));
    this.byte(types[width]);
    return this.big(BigInt(length), width);
  }
}

function write(sink, value) {
  if (value === null) sink.byte(0xc0);
  else if (typeof value === 'boolean') sink.byte(value ? 0xc3 : 0xc2);
  else if (typeof value === 'bigint') writeInteger(sink, value);
  else if (typeof value === 'number') writeFloat(sink, value);
  else if (typeof value === 'string') writeString(sink, value);
  else if (value instanceof Uint8Array) writeBinary(sink, value);
  else if (Array.isArray(value)) writeArray(sink, value);
  else writeMap(sink, value);
}

function writeInteger(sink, value) {
  if (value >= 0n && value < 0x80n) return sink.byte(Number(value));
  if (value < 0n && value >= -32n) return sink.byte(0x100 + Number(value));
  const fits = (w) => (value >= 0n ? value >> BigInt(8 * w) === 0n : value >= -(1n << BigInt(8 * w - 1)));
  const power = [0, 1, 2, 3].find((p) => fits(1 << p));
  sink.byte((value >= 0n ? 0xcc : 0xd0) + power);
  return sink.big(value, 1 << power);
}

function writeFloat(sink, value) {
  sink.byte(0xcb);
  sink.float(value);
}

function writeString(sink, value) {
  const bytes = utf8(value);
  sink.length(bytes.length, 0xa0, 32, { 1: 0xd9, 2: 0xda, 4: 0xdb });
  sink.append(bytes);
}

function writeBinary(sink, value) {
  sink.length(value.length, 0, 0, { 1: 0xc4, 2: 0xc5, 4: 0xc6 });
  sink.append(value);
}

function writeArray(sink, value) {
  sink.length(value.length, 0x90, 16, { 2: 0xdc, 4: 0xdd });
  for (const item of value) write(sink, item);
}

function writeMap(sink, value) {
  sink.length(value.size, 0x80, 16, { 2: 0xde, 4: 0xdf });
  for (const key of [...value.keys()].sort(compareText)) {
    writeString(sink, key);
    write(sink, value.get(key));
  }
}

