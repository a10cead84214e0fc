// Stages 1 to 4 of section 18: from a folder to a manifest that is known to be sound.

import { FIXED_NBYTES, parseFixedPart, parseHead, SECTION_NAMES } from './frame.mjs';
import { MANIFEST_LABEL, parseBody } from './body.mjs';
import {
  checkByteRanges, checkDtypesUsed, checkFeatureUse, checkPrefixes, checkStorageOrder, checkTensors,
  findTensorPaths,
} from './checks.mjs';
import { Columns, findLengthProblems } from './columns.mjs';
import { readyCodecs } from './codecs.mjs';
import { readyDigests } from './digests.mjs';
import { addProblems, DsdError } from './errors.mjs';
import { decode } from './msgpack.mjs';
import { decodePages, readStoredPages, singlePages } from './pages.mjs';

/**
 * Read and check the manifest, up to the first stage that has a problem.
 * @returns {Promise<object>} problems; and frame, plainBody (as msgpack has it), body, columns, layout, paths
 *   as far as it came
 */
export async function loadManifest(storage, { digest } = {}) {
  checkExpectedRoot(digest);
  await Promise.all([readyDigests(), readyCodecs()]);
  const manifest = { problems: [] };
  for (const stage of [loadFrame, loadBody, loadColumns]) {
    await stage(storage, manifest, digest).catch((error) => addProblems(manifest.problems, error));
    if (manifest.problems.length > 0) break;
  }
  return manifest;
}

function checkExpectedRoot(digest) {
  if (digest !== undefined && !/^[0-9a-f]{64}$/.test(digest)) {
    throw new DsdError('bad_argument', 'the expected root digest is not 64 lower-case hexadecimal digits');
  }
}

// Stage 1
async function loadFrame(storage, manifest, digest) {
  const place = { label: MANIFEST_LABEL };
  const { kind, nbytes } = await storage.stat(MANIFEST_LABEL);
  if (kind === 'missing') throw new DsdError('no_manifest', 'no manifest.dsd: not a checkpoint', place);
  if (kind !== 'file') throw new DsdError('not_regular_file', 'not a regular file', place);
  const startNbytes = nbytes < BigInt(FIXED_NBYTES) ? Number(nbytes) : FIXED_NBYTES;
  const fixed = parseFixedPart(await storage.read(MANIFEST_LABEL, 0, startNbytes), nbytes);
  const head = await storage.read(MANIFEST_LABEL, 0, fixed.headNbytes);
  manifest.frame = parseHead(head, fixed, nbytes, digest);
}

// Stages 2 and 3
async function loadBody(storage, manifest) {
  const { frame, problems } = manifest;
  const [section] = frame.sections;
  const stored = await readStoredPages(storage, section, problems);
  if (problems.length > 0) return;
  const bytes = decodePages(section, stored, problems);
  if (problems.length > 0) return;
  manifest.plainBody = decode(bytes);
  manifest.body = parseBody(manifest.plainBody, problems);
}

// Stage 4
async function loadColumns(storage, manifest) {
  const { frame, body, problems } = manifest;
  const sections = await readColumnSections(storage, frame, problems);
  if (problems.length > 0) return;
  problems.push(...findLengthProblems(sections));
  if (problems.length > 0) return;
  const columns = new Columns(sections);
  const paths = findTensorPaths(body.tree, columns.tensorCount, problems);
  checkTensors(columns, body, paths, problems);
  if (problems.length > 0) return;
  const layout = checkStorageOrder(columns, body, problems);
  if (layout !== null) checkByteRanges(columns, body, layout, problems); // It needs sound stored lengths.
  checkPrefixes(columns, body, paths, problems);
  checkFeatureUse(columns, frame, problems);
  checkDtypesUsed(columns, body, problems);
  Object.assign(manifest, { columns, paths, layout });
}

// All digests come before anything is decoded. Pages of ignored sections are read twice, and not held.
async function readColumnSections(storage, { sections }, problems) {
  const own = sections.slice(1, SECTION_NAMES.length);
  const ignored = sections.slice(SECTION_NAMES.length).flatMap(singlePages);
  const stored = [];
  for (const section of own) stored.push(await readStoredPages(storage, section, problems));
  for (const page of ignored) await readStoredPages(storage, page, problems);
  if (problems.length > 0) return null;
  for (const page of ignored) decodePages(page, await readStoredPages(storage, page, problems), problems);
  return new Map(own.map((section, i) => [section.name, decodePages(section, stored[i], problems)]));
}
