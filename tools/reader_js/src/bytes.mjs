// Byte strings: comparison, hexadecimal, UTF-8.

const encoder = new TextEncoder();

export const utf8 = (text) => encoder.encode(text);

export function viewOf(bytes) {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** Negative, zero or positive as `a` is before, equal to or after `b`; a prefix comes first. */
export function compareBytes(a, b) {
  const n = Math.min(a.length, b.length);
  for (let i = 0; i < n; i++) {
    if (a[i] !== b[i]) return a[i] - b[i];
  }
  return a.length - b.length;
}

export function equalBytes(a, b) {
  return a.length === b.length && compareBytes(a, b) === 0;
}

/** The order of two strings' UTF-8 bytes, which is not the order of their UTF-16 units. */
export function compareText(a, b) {
  return a === b ? 0 : compareBytes(utf8(a), utf8(b));
}

export function toHex(bytes) {
  let text = '';
  for (const byte of bytes) text += byte.toString(16).padStart(2, '0');
  return text;
}
