// The pages of a section: digests first, then decoding.

import { equalBytes } from './bytes.mjs';
import { decodeZstdPiece } from './codecs.mjs';
import { digest } from './digests.mjs';
import { addProblems, problem, withPlace } from './errors.mjs';
import { MANIFEST_LABEL } from './body.mjs';

/** The stored bytes of each page; those that do not have their digest are added to `problems`. */
export async function readStoredPages(storage, { name, pages }, problems) {
  if (pages.length === 0) return [];
  const begin = pages[0].byteOffset;
  const last = pages[pages.length - 1];
  const all = await storage.read(MANIFEST_LABEL, begin, last.byteOffset + last.storedNbytes - begin);
  return pages.map((page) => {
    const at = page.byteOffset - begin;
    const stored = all.subarray(at, at + page.storedNbytes);
    if (!equalBytes(digest(stored), page.digest)) {
      const place = { section: name, page: page.number };
      problems.push(problem('page_checksum_mismatch', 'the page does not have its digest', place));
    }
    return stored;
  });
}

/** The section's bytes; the pages that do not decode are added to `problems`. */
export function decodePages({ name, nbytes, pages }, stored, problems) {
  const bytes = new Uint8Array(Number(nbytes));
  let at = 0;
  pages.forEach((page, i) => {
    try {
      bytes.set(withPlace({ section: name, page: page.number }, () => decodePage(page, stored[i])), at);
    } catch (error) {
      addProblems(problems, error);
    }
    at += page.nbytes;
  });
  return bytes;
}

function decodePage(page, stored) {
  return page.storedNbytes === page.nbytes ? stored : decodeZstdPiece(stored, page.nbytes);
}

/** A section page by page, for one whose bytes are not wanted. */
export function singlePages({ name, pages }) {
  return pages.map((page) => ({ name, nbytes: page.nbytes, pages: [page] }));
}
