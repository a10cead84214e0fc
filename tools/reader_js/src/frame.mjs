// The manifest's frame (section 6) and the list of sections (section 7): stage 1 of section 18.
// Pure: it is given bytes and the file's length, and throws the first problem.

import { compareText, equalBytes, toHex, viewOf } from './bytes.mjs';
import { digest, DIGEST_NBYTES } from './digests.mjs';
import { DsdError } from './errors.mjs';
import { FEATURES } from './registry.mjs';

export const FIXED_NBYTES = 40;
export const PAGE_NBYTES = 65_536;
export const SECTION_NAMES = ['body', 'tensors', 'shapes', 'chunks', 'boxes', 'digests', 'frames'];

const MAGIC = Uint8Array.of(0x89, 0x44, 0x53, 0x44, 0x0d, 0x0a, 0x1a, 0x0a);
const MAJOR = 1;
const SECTION_ROW_NBYTES = 24;
const PAGE_ROW_NBYTES = 36;
const MIN_HEAD_NBYTES = 72;
const MAX_HEAD_NBYTES = 64 * 1024 * 1024;
const FURTHER_NAME = /^[a-z][a-z0-9_-]{0,7}$/;
const IGNORABLE = 1;
const MAX_BODY_NBYTES = 1n << 30n;
// This reader's own limit (R-17.1 allows one): a section is held in one buffer.
const MAX_SECTION_NBYTES = 1n << 31n;

const latin1 = new TextDecoder('latin1');

const badHead = (message) => new DsdError('bad_head', message);
const badSections = (message) => new DsdError('bad_sections', message);

/**
 * from the first 40 bytes of the file (or all, if it is shorter).
 * @param {Uint8Array} start
 * @param {bigint} fileNbytes
 */
export function parseFixedPart(start, fileNbytes) {
  if (!equalBytes(start.subarray(0, 8), MAGIC)) {
    throw new DsdError('bad_magic', 'the manifest does not begin with the magic of dsd');
  }
  const view = viewOf(start);
  const major = start.length < 10 ? MAJOR : view.getUint16(8, true);
  if (major !== MAJOR) {
    throw new DsdError('unknown_major', `the manifest has format version ${major}; this reader reads version ${MAJOR}`);
  }
  if (start.length < FIXED_NBYTES) throw cutShort(FIXED_NBYTES, fileNbytes);
  const fixed = {
    headNbytes: view.getUint32(12, true),
    manifestNbytes: view.getBigUint64(16, true),
    featuresNbytes: view.getUint32(24, true),
    sectionCount: view.getUint32(28, true),
    pageCount: view.getUint32(32, true),
    reserved: view.getUint32(36, true),
  };
  checkLengths(fixed, fileNbytes);
  return fixed;
}

function cutShort(expected, fileNbytes) {
  return new DsdError('truncated', `the manifest has ${fileNbytes} bytes and must have at least ${expected}`);
}

function checkLengths({ headNbytes, manifestNbytes }, fileNbytes) {
  if (fileNbytes < BigInt(headNbytes)) throw cutShort(headNbytes, fileNbytes);
  if (fileNbytes < manifestNbytes) throw cutShort(manifestNbytes, fileNbytes);
  if (headNbytes < MIN_HEAD_NBYTES || headNbytes > MAX_HEAD_NBYTES) {
    throw badHead(`head_nbytes is ${headNbytes}, not from ${MIN_HEAD_NBYTES} to ${MAX_HEAD_NBYTES}`);
  }
}

/**
 * The rest of stage 1, from the whole head.
 * @returns {{root: string, features: string[], sections: object[]}}
 */
export function parseHead(head, fixed, fileNbytes, expectedRoot) {
  const seal = checkSeal(head);
  checkCounts(fixed);
  const sections = parseSectionRows(head, fixed);
  const rows = parsePageRows(head, fixed);
  checkManifestLength(fixed, rows, fileNbytes);
  placePages(sections, rows, fixed.headNbytes);
  const features = parseFeatures(featureBytes(head, fixed));
  checkFeatures(features);
  const root = toHex(seal);
  checkRoot(root, expectedRoot);
  checkSections(sections);
  return { root, features, sections };
}

function checkSeal(head) {
  const end = head.length - DIGEST_NBYTES;
  const seal = head.slice(end);
  if (!equalBytes(digest(head.subarray(0, end)), seal)) {
    throw new DsdError('seal_mismatch', 'the head does not have the digest that seals it');
  }
  return seal;
}

function checkCounts({ headNbytes, featuresNbytes, sectionCount, pageCount, reserved }) {
  const sum = FIXED_NBYTES + SECTION_ROW_NBYTES * sectionCount + PAGE_ROW_NBYTES * pageCount
    + featuresNbytes + DIGEST_NBYTES;
  if (sum !== headNbytes) throw badHead(`the head's parts have ${sum} bytes, head_nbytes is ${headNbytes}`);
  if (reserved !== 0) throw badHead('reserved is not zero');
}

function parseSectionRows(head, { sectionCount, pageCount }) {
  const view = viewOf(head);
  const sections = [];
  let pages = 0;
  for (let i = 0; i < sectionCount; i++) {
    const at = FIXED_NBYTES + SECTION_ROW_NBYTES * i;
    const section = {
      name: latin1.decode(head.subarray(at, at + 8)).replace(/\0+$/, ''),
      flags: view.getUint32(at + 8, true),
      pageCount: view.getUint32(at + 12, true),
      nbytes: view.getBigUint64(at + 16, true),
    };
    const expected = (section.nbytes + BigInt(PAGE_NBYTES - 1)) / BigInt(PAGE_NBYTES);
    if (BigInt(section.pageCount) !== expected) {
      throw badHead(`section ${i} of ${section.nbytes} bytes has ${section.pageCount} pages, not ${expected}`);
    }
    pages += section.pageCount;
    sections.push(section);
  }
  if (pages !== pageCount) throw badHead(`the sections have ${pages} pages, page_count is ${pageCount}`);
  return sections;
}

function parsePageRows(head, { sectionCount, pageCount }) {
  const view = viewOf(head);
  const first = FIXED_NBYTES + SECTION_ROW_NBYTES * sectionCount;
  const rows = [];
  for (let i = 0; i < pageCount; i++) {
    const at = first + PAGE_ROW_NBYTES * i;
    rows.push({
      storedNbytes: view.getUint32(at, true),
      digest: head.subarray(at + 4, at + PAGE_ROW_NBYTES),
    });
  }
  return rows;
}

//
function checkManifestLength({ headNbytes, manifestNbytes }, rows, fileNbytes) {
  const sum = rows.reduce((total, row) => total + row.storedNbytes, headNbytes);
  if (BigInt(sum) !== manifestNbytes) {
    throw badHead(`head and pages have ${sum} bytes, manifest_nbytes is ${manifestNbytes}`);
  }
  if (fileNbytes > manifestNbytes) {
    throw new DsdError('trailing_bytes', `${fileNbytes - manifestNbytes} bytes follow the manifest's end`);
  }
}

// and where each page lies.
function placePages(sections, rows, headNbytes) {
  let next = 0;
  let byteOffset = headNbytes;
  for (const section of sections) {
    section.pages = rows.slice(next, next + section.pageCount);
    next += section.pageCount;
    section.pages.forEach((page, i) => {
      const left = section.nbytes - BigInt(i) * BigInt(PAGE_NBYTES);
      page.nbytes = left < BigInt(PAGE_NBYTES) ? Number(left) : PAGE_NBYTES;
      page.number = i;
      page.byteOffset = byteOffset;
      byteOffset += page.storedNbytes;
      if (page.storedNbytes < 1 || page.storedNbytes > page.nbytes) {
        throw badHead(`a page of ${page.nbytes} bytes is stored in ${page.storedNbytes}`);
      }
    });
  }
}

function featureBytes(head, { featuresNbytes }) {
  const end = head.length - DIGEST_NBYTES;
  return head.subarray(end - featuresNbytes, end);
}

//
function parseFeatures(bytes) {
  if (bytes.length === 0) return [];
  const names = latin1.decode(bytes).split('\n');
  if (names.pop() !== '') throw badHead('the last feature name does not end');
  names.forEach((name, i) => {
    if (!/^[a-z][a-z0-9-]{0,31}$/.test(name)) throw badHead('a feature name is malformed');
    if (i > 0 && compareText(names[i - 1], name) >= 0) throw badHead('feature names are out of order');
  });
  return names;
}

//
function checkFeatures(names) {
  const unknown = names.filter((name) => !FEATURES.has(name));
  if (unknown.length > 0) {
    throw new DsdError('unknown_feature', `features that this reader does not know are needed: ${unknown.join(', ')}`);
  }
}

//
function checkRoot(root, expected) {
  if (expected !== undefined && expected !== root) {
    throw new DsdError('digest_mismatch', `the root digest is ${root}, expected ${expected}`);
  }
}

//
function checkSections(sections) {
  SECTION_NAMES.forEach((name, i) => checkOwnSection(sections[i], name));
  const further = sections.slice(SECTION_NAMES.length);
  for (const { name, flags } of further) {
    if (!FURTHER_NAME.test(name)) throw badSections(`a section name is malformed: ${JSON.stringify(name)}`);
    if ((flags & ~IGNORABLE) !== 0) throw badSections(`section ${name} has unknown flags ${flags}`);
  }
  if (new Set(sections.map((section) => section.name)).size < sections.length) {
    throw badSections('a section name occurs twice');
  }
  const unknown = further.find(({ flags }) => flags !== IGNORABLE);
  if (unknown !== undefined) {
    throw new DsdError('unknown_section', `the section ${unknown.name} is not known and may not be ignored`);
  }
  checkSectionLimits(sections);
}

function checkOwnSection(section, name) {
  if (section === undefined || section.name !== name) throw badSections(`the section ${name} is not in its place`);
  if (section.flags !== 0) throw badSections(`the section ${name} has the flags ${section.flags}`);
}

function checkSectionLimits(sections) {
  for (const { name, nbytes } of sections.slice(0, SECTION_NAMES.length)) {
    const most = name === 'body' ? MAX_BODY_NBYTES : MAX_SECTION_NBYTES;
    if (nbytes > most) throw new DsdError('limit_exceeded', `section ${name} has ${nbytes} bytes, more than ${most}`);
  }
}
