"""A file of torch that is going to be written: checked and counted first, then streamed.

The pickle is made twice. The first time nothing is kept but its length and which storages it
names, so that what cannot be written is refused before anything is, and memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsdformat.convert.archive_writing import ALIGNMENT, ArchiveWriter
from dsdformat.convert.outputs import Meter
from dsdformat.convert.pickles.emitting import Emitter
from dsdformat.convert.torch_emitting import StorageTable, Stored, TorchEmitter
from dsdformat.convert.torch_stream import MAGIC, VERSION
from dsdformat.convert.torch_zip import PICKLE_NAME
from dsdformat.errors import UnsupportedValueError
from dsdformat.limits import PICKLE_NBYTES_MAX

__all__ = ["Sink", "TorchPlan"]

Path = tuple[Any, ...]
# Takes the bytes of a file, in order.
Sink = Callable[[Any], Any]

_FOLDER = "archive"
_SYSTEM = {
    "protocol_version": VERSION,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


@dataclass(frozen=True)
class TorchPlan:
    """A state that torch can load, and what its file needs.

    Attributes:
        tree: The state.
        attributes: What Python keeps on ordered dicts beside their items, by path.
        weights_only: Whether `torch.load(weights_only=True)` reads it.
        path: Where the tree lies in the whole, for messages.
        pickle_nbytes: Length of the pickle.
        storages: In the order of the pickle.
    """

    tree: Any
    attributes: Mapping[Path, Any]
    weights_only: bool
    path: Path
    pickle_nbytes: int
    storages: tuple[Stored, ...]

    @staticmethod
    def of(
        tree: Any,
        *,
        attributes: Mapping[Path, Any] | None = None,
        weights_only: bool = True,
        path: Path = (),
        legacy: bool = False,
    ) -> TorchPlan:
        """Check a state, and count; `legacy` for the stream form.

        Raises:
            UnsupportedValueError: `unsupported_value` or `unsupported_dtype`, with its place.
        """
        counted, table = [0], StorageTable()

        def count(piece: Any) -> None:
            counted[0] += len(piece)

        emitter = Emitter(count)
        options: dict[str, Any] = {
            "weights_only": weights_only,
            "attributes": attributes,
            "legacy": legacy,
        }
        TorchEmitter(emitter, table, read_data=False, **options).write(tree, path)
        emitter.end()
        if counted[0] > PICKLE_NBYTES_MAX:
            raise UnsupportedValueError(
                f"values and arrays of numpy of {counted[0]} bytes in one pickle",
                hint="store large arrays as tensors",
            )
        storages = tuple(table.stored.values())
        return TorchPlan(tree, attributes or {}, weights_only, path, counted[0], storages)

    @property
    def nbytes(self) -> int:
        """Length of all storages."""
        return sum(stored.tensor.nbytes for stored in self.storages)

    def write_zip(self, sink: Sink, meter: Meter) -> None:
        """Write the file in the zip form, in the order and with the records of torch.

        Memory: 16 MiB, and what reading the tensors needs.
        """
        archive = ArchiveWriter(sink)
        self.write_share(archive, meter)
        archive.end()

    def write_share(
        self, archive: ArchiveWriter, meter: Meter, *, part: int = 0, of: int = 1
    ) -> None:
        """Write a run of the storages of the zip form, and leave room for the others.

        Args:
            archive: A file that has nothing yet; `end` is left to the caller.
            meter: Counts what is written.
            part, of: Which of so many runs, of about equal length; the first has all else too.
        """
        pieces: list[Any] = []
        small = {".format_version": b"1", ".storage_alignment": str(ALIGNMENT).encode()}
        if part == 0:
            self._write_pickle(pieces.append)
        heads = [(PICKLE_NAME, self.pickle_nbytes, pieces)]
        heads += [(name, len(data), [data]) for name, data in small.items()]
        heads.append(("byteorder", 6, [b"little"]))
        for name, nbytes, blocks in heads:
            _add(archive, name, nbytes, blocks if part == 0 else None)
        for stored, own in zip(self.storages, self._shares(part, of), strict=True):
            data = _metered(stored, meter) if own else None
            _add(archive, f"data/{stored.key}", stored.tensor.nbytes, data)
        _add(archive, "version", 2, [b"3\n"] if part == 0 else None)

    def share_nbytes(self, part: int, of: int) -> int:
        """Return how many bytes of storages a run has."""
        rows = zip(self.storages, self._shares(part, of), strict=True)
        return sum(stored.tensor.nbytes for stored, own in rows if own)

    def _shares(self, part: int, of: int) -> Iterator[bool]:
        """Yield of each storage whether it is one of a run."""
        total, done = max(self.nbytes, 1), 0
        for stored in self.storages:
            yield min(of - 1, done * of // total) == part
            done += stored.tensor.nbytes

    def write_stream(self, sink: Sink, meter: Meter) -> None:
        """Write the file in the stream form, which every torch reads.

        Memory: as `write_zip`.
        """
        for value in (MAGIC, VERSION, _SYSTEM):
            _write_plain(value, sink)
        self._write_pickle(sink, legacy=True)
        _write_plain([stored.key for stored in self.storages], sink)
        for stored in self.storages:
            sink(stored.numel.to_bytes(8, "little"))
            for block in _metered(stored, meter):
                sink(block)

    def _write_pickle(self, sink: Sink, *, legacy: bool = False) -> None:
        emitter = Emitter(sink)
        writer = TorchEmitter(
            emitter,
            StorageTable(),
            weights_only=self.weights_only,
            attributes=self.attributes,
            legacy=legacy,
        )
        writer.write(self.tree, self.path)
        emitter.end()


def _add(archive: ArchiveWriter, name: str, nbytes: int, blocks: Iterable[Any] | None) -> None:
    """Write an entry, or leave room for it."""
    if blocks is None:
        archive.leave(f"{_FOLDER}/{name}", nbytes)
    else:
        archive.add(f"{_FOLDER}/{name}", nbytes, blocks)


def _metered(stored: Stored, meter: Meter) -> Iterator[memoryview]:
    for block in stored.blocks():
        yield block
        meter.add(len(block))


def _write_plain(value: Any, sink: Sink) -> None:
    emitter = Emitter(sink)
    TorchEmitter(emitter, StorageTable(), weights_only=True).write(value)
    emitter.end()
