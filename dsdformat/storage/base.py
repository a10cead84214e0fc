"""What a place for checkpoints must do: `Storage` to read one, `Target` to write one.

A label is the name of a file in the folder; it was checked before it comes here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Buffer", "Sink", "Storage", "Target", "all_completed", "completed", "read_each"]

Buffer = bytes | bytearray | memoryview


class Storage(Protocol):
    """A checkpoint's folder, opened for reading. Safe to use from several threads."""

    @property
    def name(self) -> str:
        """How messages call the folder."""

    def labels(self) -> list[str]:
        """List the files of the folder, in ascending order."""

    def nbytes(self, label: str) -> int:
        """Return the length of a file.

        Raises:
            FormatError: `missing_file` or `not_regular_file`.
        """

    def read_into(self, label: str, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place in a file; return how many bytes there were."""

    def read_into_many(self, label: str, byte_offset: int, into: Sequence[memoryview]) -> int:
        """Fill buffers, one after another, from a place on; return how many bytes there were.

        `read_each` does this where a storage knows nothing quicker.
        """

    def map(self, label: str, *, writable: bool = False) -> memoryview | None:
        """Return a map of a file, or None if this storage has no maps.

        One that is writable is private: what is written to it never reaches the file.
        """

    def close(self) -> None:
        """Release what is open; maps stay valid."""


def read_each(storage: Storage, label: str, byte_offset: int, into: Sequence[memoryview]) -> int:
    """Fill buffers one after another by calls of `read_into`, up to the first that is cut short."""
    done = 0
    for piece in into:
        count = storage.read_into(label, byte_offset + done, piece)
        done += count
        if count < len(piece):
            break
    return done


class Sink(Protocol):
    """A new file. Safe to write from several threads, at different places."""

    def write_at(self, byte_offset: int, pieces: Sequence[Buffer]) -> None:
        """Write pieces one after another, beginning at a place in the file."""

    def close(self) -> None:
        """Make the file durable and close it."""

    def discard(self) -> None:
        """Close the file as it is: it will be removed."""


@contextmanager
def completed(sink: Sink) -> Iterator[Sink]:
    """Write a file in this block: behind it, it is durable; after an error it is discarded."""
    try:
        yield sink
    except BaseException:
        sink.discard()
        raise
    sink.close()


@contextmanager
def all_completed(run: Callable[[Iterable[Callable[[], None]]], None]) -> Iterator[deque[Sink]]:
    """Write the files that are added in this block: behind it, all are durable; see `completed`.

    Each flush waits for the disk. At once they wait for much the same.

    Args:
        run: Carries out tasks, which may be in threads, and raises an exception of one.
    """
    sinks: deque[Sink] = deque()

    def close_one() -> None:
        sinks.popleft().close()

    try:
        yield sinks
        run([close_one] * len(sinks))
    except BaseException:
        for sink in sinks:
            sink.discard()
        raise


class Target(Protocol):
    """A place where a checkpoint is made, invisible under its name until `commit`.

    Attributes:
        past_cache: Whether large pieces of files that are begun are written past the page cache,
            if there is one, and where that is known to be done well.
    """

    past_cache: bool

    @property
    def name(self) -> str:
        """How messages call the final folder."""

    def create(self, label: str) -> Sink:
        """Begin a new file."""

    def commit(self) -> None:
        """Make the checkpoint exist, in one step; everything in it is durable after."""

    def abort(self) -> None:
        """Remove what was written. Nothing is left, and nothing is visible."""
