// The verifier: all stages of section 18 for everything, and a report.

import { BlockReader, checkFile, checkHeader, pieces } from './blocks.mjs';
import { MANIFEST_LABEL } from './body.mjs';
import { equalBytes } from './bytes.mjs';
import { createStreamDigest } from './digests.mjs';
import { addProblems, DsdError } from './errors.mjs';
import { chunksByFile, deriveHeader } from './headers.mjs';
import { loadManifest } from './manifest.mjs';

/**
 * Verify a checkpoint. Faults of the checkpoint are in the report and are not thrown.
 * @param {{digest?: string}} options the root digest that the caller expects
 * @returns {Promise<{problems: object[], root: string|null, features: string[], tensorCount: number,
 *   unlisted: string[]}>} `unlisted` names the folder's files that the manifest does not list
 */
export async function verify(storage, options = {}) {
  const manifest = await loadManifest(storage, options);
  const { problems, frame, body, columns } = manifest;
  if (problems.length === 0) await verifyFiles(storage, manifest);
  if (problems.length === 0) await verifyBlocks(storage, manifest);
  return {
    problems,
    root: frame?.root ?? null,
    features: frame?.features ?? [],
    tensorCount: columns?.tensorCount ?? 0,
    unlisted: body ? await findUnlisted(storage, body) : [],
  };
}

// Stage 5
async function verifyFiles(storage, manifest) {
  const { body, columns, layout, paths, problems } = manifest;
  const chunks = chunksByFile(columns, body.files.length, layout.order);
  const add = (error) => addProblems(problems, error);
  for (const [f, file] of body.files.entries()) {
    const header = deriveHeader(file, chunks[f], columns, layout.extents, paths);
    await checkDataFile(storage, file, header).catch(add);
  }
  for (const side of body.sides) await checkSide(storage, side).catch(add);
}

async function checkDataFile(storage, file, header) {
  await checkFile(storage, file);
  await checkHeader(storage, file, header);
}

//
async function checkSide(storage, side) {
  await checkFile(storage, side);
  const label = side.get('label');
  const stream = await createStreamDigest();
  for await (const bytes of pieces(storage, label, side.get('nbytes'))) stream.update(bytes);
  const found = stream.finish();
  stream.release();
  if (!equalBytes(found, side.get('digest'))) {
    throw new DsdError('side_checksum_mismatch', 'the file does not have its digest', { label });
  }
}

// Stage 6
async function verifyBlocks(storage, manifest) {
  const blocks = new BlockReader(storage, manifest);
  blocks.checkedHeaders = new Set(manifest.body.files.keys()); // by stage 5
  for (const c of manifest.layout.order) {
    for (let k = 0; k < Number(manifest.layout.extents[c].blocks); k++) {
      await blocks.load(c, k).catch((error) => addProblems(manifest.problems, error));
    }
  }
}

//
async function findUnlisted(storage, body) {
  const labels = [...body.files, ...body.sides].map((entry) => entry.get('label'));
  const listed = new Set([MANIFEST_LABEL, ...labels]);
  return (await storage.list()).filter((name) => !listed.has(name)).sort();
}

