// The body's structure: stage 3 of section 18. Pure.

import { compareText } from './bytes.mjs';
import { problem } from './errors.mjs';
import { isInt, isMap, isText, parseTree } from './values.mjs';

const LABEL = /^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$/;
const PLACEMENT = /^(replicate|shard\((0|[1-9][0-9]*)\)|strided_shard\((0|[1-9][0-9]*),(0|[1-9][0-9]*)\))$/;
const BELOW = 1n << 63n;
const MIN_BLOCK = 4096n;
const MAX_BLOCK = 67_108_864n;
export const MANIFEST_LABEL = 'manifest.dsd';

const isArrayOf = (is) => (x) => Array.isArray(x) && x.every(is);
const isTextMap = (x) => isMap(x) && [...x.values()].every(isText);
const isAny = () => true;
const isLength = (x) => isInt(x) && x >= 0n && x < BELOW;
const isDigest = (x) => x instanceof Uint8Array && x.length === 32;

const BODY_KEYS = {
  block_nbytes: isBlockNbytes,
  dtypes: isArrayOf(isText),
  extensions: isMap,
  files: isArrayOf(isAny),
  layouts: isArrayOf(isAny),
  meshes: isArrayOf(isAny),
  sides: isArrayOf(isAny),
  tree: isAny,
  user: isTextMap,
  world_size: (x) => isInt(x) && x >= 1n,
};
const FILE_KEYS = {
  header_nbytes: (x) => isLength(x) && x >= 8n,
  label: isText,
  metadata: isTextMap,
  nbytes: isLength,
  prefix: isArrayOf(isText),
  rank: (x) => isInt(x) && x >= 0n,
};
const SIDE_KEYS = { digest: isDigest, label: isText, nbytes: isLength };
const MESH_KEYS = {
  axes: isArrayOf(isText),
  shape: isArrayOf((x) => isInt(x) && x >= 1n),
  ranks: isArrayOf((x) => isInt(x) && x >= 0n),
};
const LAYOUT_KEYS = {
  mesh: (x) => isInt(x) && x >= 0n,
  placements: isArrayOf((x) => isText(x) && PLACEMENT.test(x)),
};

function isBlockNbytes(x) {
  return isInt(x) && x >= MIN_BLOCK && x <= MAX_BLOCK && (x & (x - 1n)) === 0n;
}

/**
 * Check the decoded body and give it names.
 * @returns {object|null} null if the parts that all else needs are not there
 */
export function parseBody(plain, problems) {
  const checker = new Checker(problems);
  const keys = checker.map(plain, BODY_KEYS, 'body');
  if (keys === null) return null;
  const body = {
    blockNbytes: keys.get('block_nbytes'),
    dtypes: keys.get('dtypes'),
    files: checker.entries(keys.get('files'), FILE_KEYS, 'files'),
    layouts: checker.entries(keys.get('layouts'), LAYOUT_KEYS, 'layouts'),
    meshes: checker.entries(keys.get('meshes'), MESH_KEYS, 'meshes'),
    sides: checker.entries(keys.get('sides'), SIDE_KEYS, 'sides'),
    user: keys.get('user'),
    worldSize: keys.get('world_size'),
    tree: null,
  };
  checker.ascending(body.dtypes, 'dtypes');
  checkFiles(checker, body);
  checkLabels(checker, body);
  checkProvenance(checker, body);
  if (keys.has('tree')) body.tree = parseRoot(checker, keys.get('tree'));
  return body;
}

class Checker {
  constructor(problems) {
    this.problems = problems;
  }

  fail(code, message, where) {
    this.problems.push(problem(code, message, { where }));
  }

  bad(message, where) {
    this.fail('bad_body', message, where);
  }

  /** The keys of a map that are as `spec` says; null if it is no map. */
  map(plain, spec, where) {
    if (!isMap(plain)) {
      this.bad('not a map', where);
      return null;
    }
    for (const key of plain.keys()) {
      if (!Object.hasOwn(spec, key)) this.fail('unknown_key', `the key ${JSON.stringify(key)} is not known`, where);
    }
    const good = new Map();
    for (const [key, is] of Object.entries(spec)) {
      if (!plain.has(key)) this.bad(`the key ${key} is missing`, where);
      else if (!is(plain.get(key))) this.bad(`the value of ${key} is not as it must be`, where);
      else good.set(key, plain.get(key));
    }
    return good;
  }

  /** The entries of an array of maps that are whole. */
  entries(plain, spec, where) {
    const count = Object.keys(spec).length;
    return (plain ?? [])
      .map((entry, i) => this.map(entry, spec, `${where}[${i}]`))
      .filter((entry) => entry !== null && entry.size === count);
  }

  ascending(texts, where) {
    const list = texts ?? [];
    for (let i = 1; i < list.length; i++) {
      if (compareText(list[i - 1], list[i]) >= 0) this.bad('not in strictly ascending order', `${where}[${i}]`);
    }
  }
}

//
function checkFiles(checker, { files, worldSize }) {
  files.forEach((file, i) => {
    const where = `files[${i}]`;
    if (file.get('header_nbytes') > file.get('nbytes')) checker.bad('header_nbytes exceeds nbytes', where);
    if (file.get('rank') >= worldSize) checker.bad('rank is not below world_size', where);
  });
}

function checkLabels(checker, { files, sides }) {
  const seen = new Set([MANIFEST_LABEL]);
  for (const [where, entries] of [['files', files], ['sides', sides]]) {
    entries.forEach((entry, i) => checkLabel(checker, entry.get('label'), seen, `${where}[${i}]`));
    checkLabelOrder(checker, entries, where);
  }
}

//
function checkLabel(checker, label, seen, where) {
  if (!LABEL.test(label)) checker.fail('bad_label', `not a label: ${JSON.stringify(label.slice(0, 200))}`, where);
  const folded = label.replace(/[A-Z]/g, (letter) => letter.toLowerCase());
  if (seen.has(folded)) checker.fail('duplicate_label', `the label ${label} is taken`, where);
  seen.add(folded);
}

// Equal labels are duplicate_label already.
function checkLabelOrder(checker, entries, where) {
  for (let i = 1; i < entries.length; i++) {
    const [before, label] = [entries[i - 1].get('label'), entries[i].get('label')];
    if (compareText(before, label) > 0) checker.bad('labels are not ascending', `${where}[${i}]`);
  }
}

//
function checkProvenance(checker, { meshes, layouts, worldSize }) {
  meshes.forEach((mesh, i) => {
    const [axes, shape, ranks] = ['axes', 'shape', 'ranks'].map((key) => mesh.get(key));
    const where = `meshes[${i}]`;
    if (axes.length !== shape.length) checker.bad('not one axis per dim', where);
    if (!fills(shape, BigInt(ranks.length))) checker.bad('not as many ranks as the shape says', where);
    if (new Set(ranks).size < ranks.length) checker.bad('a rank occurs twice', where);
    if (ranks.some((rank) => rank >= worldSize)) checker.bad('a rank is not below world_size', where);
  });
  layouts.forEach((layout, i) => {
    const axes = meshes[Number(layout.get('mesh'))]?.get('axes');
    const where = `layouts[${i}]`;
    if (axes === undefined) checker.bad('mesh is not an index into meshes', where);
    else if (axes.length !== layout.get('placements').length) checker.bad('not one placement per axis', where);
  });
}

//
function parseRoot(checker, plain) {
  const isOrdered = Array.isArray(plain) && plain[0] === 'odict'
    && !plain.slice(1).some((pair) => Array.isArray(pair) && pair.length === 2 && !isText(pair[0]));
  if (!isMap(plain) && !isOrdered) {
    checker.bad('the root is neither a map nor an odict of string keys', 'tree');
    return null;
  }
  return parseTree(plain, checker.problems);
}

// Whether a mesh of this shape has so many ranks; a long shape is not multiplied to its end.
function fills(shape, count) {
  let product = 1n;
  for (const size of shape) {
    product *= size;
    if (product > count) return false;
  }
  return product === count;
}
