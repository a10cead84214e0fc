// A section's bytes from its pages: digests first, then decoding.

import { equalBytes } from './bytes.mjs';
import { decodeZstdPiece } from './codecs.mjs';
import { digest } from './digests.mjs';
import { collect, problem } from './errors.mjs';
import { MANIFEST_LABEL } from './body.mjs';

/**
 * The decoded bytes of a section; what is wrong is added to `problems`.
 * @returns {Promise<Uint8Array|null>} null if a page is bad
 */
export async function readSection(storage, section, problems) {
  const before = problems.length;
  const stored = await readStoredPages(storage, section);
  checkPageDigests(section, stored, problems);
  if (problems.length > before) return null;
  const bytes = new Uint8Array(Number(section.nbytes));
  let at = 0;
  section.pages.forEach((page, i) => {
    collect(problems, () => bytes.set(decodePage(page, stored[i]), at));
    at += page.nbytes;
  });
  return problems.length > before ? null : bytes;
}

/** Check a section whose bytes are not wanted: one page is held at a time. */
export async function checkSection(storage, section, problems) {
  for (const page of section.pages) {
    const single = { name: section.name, nbytes: BigInt(page.nbytes), pages: [page] };
    await readSection(storage, single, problems);
  }
}

async function readStoredPages(storage, { pages }) {
  if (pages.length === 0) return [];
  const begin = pages[0].byteOffset;
  const last = pages[pages.length - 1];
  const all = await storage.read(MANIFEST_LABEL, begin, last.byteOffset + last.storedNbytes - begin);
  return pages.map((page) => all.subarray(page.byteOffset - begin, page.byteOffset - begin + page.storedNbytes));
}

//
function checkPageDigests(section, stored, problems) {
  section.pages.forEach((page, i) => {
    if (equalBytes(digest(stored[i]), page.digest)) return;
    problems.push(problem('page_checksum_mismatch', 'the page does not have its digest', { section: section.name, page: i }));
  });
}

function decodePage(page, stored) {
  return page.storedNbytes === page.nbytes ? stored : decodeZstdPiece(stored, page.nbytes);
}
