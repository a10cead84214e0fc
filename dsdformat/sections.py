"""The manifest of a checkpoint on a storage: its head, and pages read when they are needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

from dsdformat.errors import FormatError, Problem
from dsdformat.format.codecs import decompress_piece
from dsdformat.format.digests import DIGEST_NBYTES, digest
from dsdformat.format.frame import FIXED_NBYTES, Head, check_prefix, parse_head
from dsdformat.limits import MANIFEST_LABEL, PAGE_NBYTES
from dsdformat.storage.base import Storage

__all__ = ["ManifestFile"]

CACHED_PAGES = 8
_READ_AHEAD = 16  # pages per read, where a wider range is asked for


class ManifestFile:
    """A manifest whose head was checked; decodes ranges of its sections.

    Memory: the head, and up to 8 decoded pages (512 KiB).
    """

    def __init__(self, storage: Storage, *, expected_root: bytes | None = None) -> None:
        """Read and check the head (spec stage 1).

        Raises:
            FormatError: with the code of the first fault.
        """
        self._storage = storage
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        try:
            self.nbytes = storage.nbytes(MANIFEST_LABEL)
        except FormatError as error:
            if error.code != "missing_file":
                raise
            raise Problem(
                "no_manifest",
                f"{storage.name} has no {MANIFEST_LABEL}: not a checkpoint, or never committed",
                where=MANIFEST_LABEL,
            ).error() from None
        prefix = self._read(0, min(FIXED_NBYTES, self.nbytes))
        head = self._read(0, check_prefix(prefix, self.nbytes))
        self.head: Head = parse_head(head, self.nbytes, expected_root)

    @property
    def compressed(self) -> bool:
        """Whether some page is compressed."""
        offsets = self.head.page_offsets
        return any(
            offsets[section.first_page + page + 1] - offsets[section.first_page + page]
            < section.page_nbytes(page)
            for section in self.head.sections.values()
            for page in range(section.pages)
        )

    def section_nbytes(self) -> dict[str, int]:
        """Return the decoded length of each section."""
        return {name: section.nbytes for name, section in self.head.sections.items()}

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes `[start, stop)` of a decoded section, verified.

        Raises:
            FormatError: `page_checksum_mismatch`, `bad_compressed_data` or `truncated`.
        """
        if start >= stop:
            return b""
        first, last = start // PAGE_NBYTES, (stop - 1) // PAGE_NBYTES
        if first == last:
            page = self._page(name, first)
            base = first * PAGE_NBYTES
            return page[start - base : stop - base]
        out = bytearray(stop - start)
        for page_number, data in self._pages(name, first, last + 1):
            base = page_number * PAGE_NBYTES
            low, high = max(start, base), min(stop, base + len(data))
            out[low - start : high - start] = data[low - base : high - base]
        return bytes(out)

    def check_pages(self) -> None:
        """Verify and decode every page: first all digests, then what is compressed.

        Raises:
            FormatError: `page_checksum_mismatch` or `bad_compressed_data`.
        """
        self._verify_pages(0, len(self.head.page_offsets) - 1)
        if self.compressed:
            for name, section in self.head.sections.items():
                for _ in self._pages(name, 0, section.pages):
                    pass

    def _page(self, name: str, number: int) -> bytes:
        index = self.head.sections[name].first_page + number
        with self._lock:
            page = self._cache.get(index)
            if page is not None:
                self._cache.move_to_end(index)
                return page
        ((_, page),) = self._pages(name, number, number + 1)
        with self._lock:
            self._cache[index] = page
            while len(self._cache) > CACHED_PAGES:
                self._cache.popitem(last=False)
        return page

    def _pages(self, name: str, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        section = self.head.sections[name]
        offsets = self.head.page_offsets
        for begin in range(first, stop, _READ_AHEAD):
            end = min(begin + _READ_AHEAD, stop)
            base = offsets[section.first_page + begin]
            raw = self._read(base, offsets[section.first_page + end] - base)
            for number in range(begin, end):
                index = section.first_page + number
                stored = raw[offsets[index] - base : offsets[index + 1] - base]
                self._verify(index, stored)
                try:
                    page = self._decoded(name, number, stored, section.page_nbytes(number))
                except FormatError:
                    self._verify_pages(index + 1, section.first_page + stop)  # they come first
                    raise
                yield number, page

    def _verify_pages(self, first: int, stop: int) -> None:
        """Verify pages by their numbers in the head."""
        for index in range(first, stop):
            begin, end = self.head.page_offsets[index : index + 2]
            self._verify(index, self._read(begin, end - begin))

    def _verify(self, index: int, stored: bytes) -> None:
        at = index * DIGEST_NBYTES
        expected = self.head.page_digests[at : at + DIGEST_NBYTES]
        actual = digest(stored)
        if actual == expected:
            return
        section = next(s for s in self.head.sections.values() if index < s.first_page + s.pages)
        begin, end = self.head.page_offsets[index : index + 2]
        raise Problem(
            "page_checksum_mismatch",
            f"checksum mismatch in page {index - section.first_page} of section {section.name} "
            f"({MANIFEST_LABEL}, bytes {begin}..{end}): expected blake3 {expected.hex()[:16]}…, "
            f"got {actual.hex()[:16]}…",
            where=MANIFEST_LABEL,
            byte_offset=begin,
            byte_end=end,
            path=f"$.{section.name}",
            expected=expected.hex(),
            actual=actual.hex(),
            hint="the file was damaged after it was written; restore it from another copy",
        ).error()

    def _decoded(self, name: str, number: int, stored: bytes, nbytes: int) -> bytes:
        try:
            return decompress_piece(stored, nbytes)
        except FormatError as error:
            message = f"page {number} of section {name} ({MANIFEST_LABEL}): {error.message}"
            raise Problem(
                error.code, message, where=MANIFEST_LABEL, path=f"$.{name}"
            ).error() from None

    def _read(self, byte_offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        count = self._storage.read_into(MANIFEST_LABEL, byte_offset, memoryview(buffer))
        if count < nbytes:
            raise Problem(
                "truncated",
                f"{MANIFEST_LABEL} became shorter while it was read",
                where=MANIFEST_LABEL,
                byte_offset=byte_offset + count,
            ).error()
        return bytes(buffer)
