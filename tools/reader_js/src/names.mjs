// Names and keys of tensors. Pure.

import { CODEC_NAMES, RAW } from './registry.mjs';

const escape = (text) => text.replaceAll('%', '%25').replaceAll('@', '%40');
const escapeSlash = (text) => escape(text).replaceAll('/', '%2F');

function renderPart(part) {
  if (typeof part === 'string') return escapeSlash(part);
  return typeof part === 'bigint' ? `@${part}` : `@x${part.key}`;
}

/** A path's parts joined by `/`: R-10.6's second form without the leading `/`. */
export function renderName(path) {
  return path.map(renderPart).join('/');
}

/** for the path without its file's prefix. */
function renderKey(path) {
  if (path.length !== 1 || typeof path[0] !== 'string') return `/${renderName(path)}`;
  const key = escape(path[0]);
  if (key === '__metadata__') return '%5F_metadata__';
  return key.startsWith('/') ? `%2F${key.slice(1)}` : key;
}

/** */
export function renderChunkKey(path, box, isWhole, codec) {
  const ranges = box.offset.map((begin, d) => `${begin}:${begin + box.shape[d]}`);
  const boxPart = isWhole ? '' : `@[${ranges.join(',')}]`;
  return renderKey(path) + boxPart + (codec === RAW ? '' : `@${CODEC_NAMES[codec]}`);
}

/** */
export function isProperPrefix(prefix, path) {
  return prefix.length < path.length && prefix.every((part, i) => part === path[i]);
}
