"""What is wrong with a block that was read: where it lies, and what it should have been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dsdformat.errors import FormatError, Problem, printable
from dsdformat.format.dtypes import Dtype
from dsdformat.format.manifest import DataFile

__all__ = ["Block", "BlockFaults", "cut_short"]


class Block(NamedTuple):
    """One block of one chunk, or a part of one that is raw and not verified.

    Attributes:
        tensor, chunk, number: Which one: the block counts from the beginning of the chunk.
        dtype, codec, file: Of the chunk.
        start, nbytes: Where it lies in the decoded chunk.
        byte_offset, stored_nbytes: Where its stored bytes lie in the data file.
        digest, frame: Its rows in the tables.
    """

    tensor: int
    chunk: int
    number: int
    dtype: Dtype
    codec: int
    file: int
    start: int
    nbytes: int
    byte_offset: int
    stored_nbytes: int
    digest: int
    frame: int


class BlockFaults:
    """Names the blocks of one checkpoint in errors."""

    def __init__(self, files: Sequence[DataFile], name_of: Callable[[int], str]) -> None:
        """Begin.

        Args:
            files: The data files, by number.
            name_of: Gives the display name of a tensor, by its number.
        """
        self._files = files
        self._name_of = name_of

    def mismatch(self, code: str, block: Block, expected: bytes, actual: bytes) -> FormatError:
        """Say that a block, or what is stored of it, has another digest than it should."""
        stored = "stored bytes of " if code.startswith("stored") else ""
        message = (
            f"checksum mismatch in {stored}{self._describe(block)}: "
            f"expected blake3 {expected.hex()[:16]}…, got {actual.hex()[:16]}…"
        )
        return Problem(
            code,
            message,
            expected=expected.hex(),
            actual=actual.hex(),
            hint="the file was damaged after it was written; restore it from another copy",
            **self._place(block),
        ).error()

    def undecodable(self, block: Block, error: FormatError) -> FormatError:
        """Say which block it is that cannot be decoded."""
        message = f"{self._describe(block)}: {error.message}"
        return Problem(error.code, message, **self._place(block)).error()

    def _describe(self, block: Block) -> str:
        place = self._place(block)
        return (
            f"block {block.number} of chunk {block.chunk} of {printable(place['entry'])} "
            f"({place['where']}, bytes {place['byte_offset']}..{place['byte_end']})"
        )

    def _place(self, block: Block) -> dict[str, Any]:
        return {
            "where": self._files[block.file].label,
            "byte_offset": block.byte_offset,
            "byte_end": block.byte_offset + block.stored_nbytes,
            "entry": self._name_of(block.tensor),
            "chunk": block.chunk,
            "block": block.number,
        }


def cut_short(label: str, byte_offset: int) -> FormatError:
    """Say that a data file ends before a chunk does."""
    return Problem(
        "file_size_mismatch",
        f"{label} ends at byte {byte_offset}, before the chunk does",
        where=label,
        byte_offset=byte_offset,
    ).error()
