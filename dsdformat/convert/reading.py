"""Foreign checkpoints as a loader reads one of ours: tensors by number, many boxes at once.

What lies packed in a file, also with its dims in another order, is planned and read as raw chunks
of ours are: large ranges straight to where they belong, small ones together, in threads. All else
(inflated, big-endian, conjugated, strided data) is read by `ForeignTensor.read`.
"""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from dsdformat.blocks import BlockReader
from dsdformat.convert.entries import ForeignEntry
from dsdformat.convert.files import FileBytes, read_exactly
from dsdformat.convert.foreign import Foreign, mapped_tree, rooted, walk_tree
from dsdformat.convert.tensor import ForeignTensor
from dsdformat.destinations import Destinations, destinations_of
from dsdformat.errors import ArgumentError
from dsdformat.format.decoding import Hooks
from dsdformat.format.manifest import DataFile
from dsdformat.format.values import Named, Scalar, Size, TensorRef
from dsdformat.limits import MIB
from dsdformat.plan.load_plan import BOUND, LoadPlan, LoadPlanner, Wanted
from dsdformat.storage.base import read_each
from dsdformat.workers import Workers

__all__ = ["ForeignReader"]

_RANGE_NBYTES = 16 * MIB  # of a large read, the unit of work of a thread


class ForeignReader(AbstractContextManager["ForeignReader"]):
    """A foreign checkpoint, or several under keys, to be loaded from. A context manager.

    Safe to use from several threads.

    Attributes:
        name: How messages call it.
        verifies: False: there are no digests of blocks. See `prepare`.
    """

    verifies = False

    def __init__(
        self, foreign: Foreign | Mapping[str, Foreign], *, threads: int | None = None
    ) -> None:
        """Begin.

        Args:
            foreign: What is read, and closed with the reader. Of a mapping, each tree is under
                its key.
            threads: How many threads read; up to 8 if None.
        """
        self._workers = Workers(threads)
        self._parts = [foreign] if isinstance(foreign, Foreign) else list(foreign.values())
        self.name = ", ".join(one.name for one in self._parts)
        if isinstance(foreign, Foreign):
            self._tree = rooted(foreign.tree)
        else:
            self._tree = {key: one.tree for key, one in foreign.items()}
        self._files = _Files()
        self._numbers: dict[int, int] = {}  # id of parts -> number
        self._entries: list[ForeignEntry] = []
        for path, leaf in walk_tree(self._tree):
            if type(leaf) is ForeignTensor and id(leaf.parts) not in self._numbers:
                self._numbers[id(leaf.parts)] = len(self._entries)
                entry = ForeignEntry(len(self._entries), leaf, path, self._files.number_of)
                self._entries.append(entry)
        dtypes = list(dict.fromkeys(entry.dtype for entry in self._entries))
        numbers = {dtype: number for number, dtype in enumerate(dtypes)}
        layout = _Layout(_RANGE_NBYTES, dtypes, self._files.rows)
        tables = _NoTables([numbers[entry.dtype] for entry in self._entries])
        self._blocks = BlockReader(self._files, layout, tables, self._workers, self._name_of)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ForeignEntry]:
        """List the tensors, in the order of the tree; tied ones once."""
        return iter(self._entries)

    def close(self) -> None:
        """Close the files. What was read, and maps, stay valid."""
        self._workers.close()
        for one in self._parts:
            one.close()

    def tree(self, hooks: Hooks | None = None) -> Any:
        """Return the nested state; see `Checkpoint.tree`. The containers are new."""
        hooks = hooks or Hooks(tensor=lambda ref: self._entries[ref.index])

        def leaf(value: Any) -> Any:
            if type(value) is ForeignTensor:
                hints = tuple(sorted(value.attributes.items()))
                return hooks.tensor(TensorRef(self._numbers[id(value.parts)], hints))
            if type(value) in (set, frozenset):
                return type(value)(map(leaf, value))
            if type(value) is Named:
                return hooks.named(value)
            if type(value) is Scalar:
                return hooks.scalar(value)
            return hooks.size(value) if type(value) is Size else value

        return mapped_tree(self._tree, leaf)

    def forms(self, indexes: Sequence[int]) -> tuple[list[tuple[int, ...]], list[str]]:
        """Return the global shapes and the logical dtypes of some tensors, by their numbers."""
        some = [self._entries[index] for index in indexes]
        return [entry.shape for entry in some], [entry.dtype for entry in some]

    def prepare(
        self, wanted: Iterable[Wanted], *, verify: bool, part: int = 0, of: int = 1
    ) -> None:
        """Find what is wrong before anything is read into memory that is in use.

        Args:
            wanted: Boxes that will be; their chunks are looked at, in files that say where chunks
                begin beside the chunks themselves.
            verify: Whether to compare data with the checksums that files have, if any: of `torch.
                save` and DCP.
            part, of: Which part of these data to compare; ranks that load together share them.

        Raises:
            ConvertError: `foreign_checksum`; what `ForeignTensor.read` raises.

        Memory: 4 MiB.
        """
        for one in wanted:
            self._entries[one.tensor].check(one.box)
        if verify:
            for foreign in self._parts:
                foreign.verify(part, of)

    def plan_boxes(
        self, wanted: Sequence[Wanted], *, verify: bool | None = None, bound: float = BOUND
    ) -> LoadPlan:
        """Plan to read some boxes together; see `Checkpoint.plan_boxes`. Nothing is verified."""
        del verify
        planner = LoadPlanner(_RANGE_NBYTES, verify=False, bound=bound)
        by_tensor: dict[int, list[tuple[int, Wanted]]] = {}
        for pair in enumerate(wanted):
            by_tensor.setdefault(pair[1].tensor, []).append(pair)
        others: list[tuple[int, Wanted]] = []
        for index in sorted(by_tensor):
            if not 0 <= index < len(self):
                raise ArgumentError(f"there is no tensor {index}", code="bad_argument")
            pairs, entry = by_tensor[index], self._entries[index]
            packed = entry.packed(pairs)
            if packed is None:
                others += pairs
            else:
                planner.add(index, *packed)
        plan = planner.finish()
        for number, one in others:
            self._add_other(plan, number, one)
        return plan

    def read_boxes(
        self,
        wanted: Sequence[Wanted] | LoadPlan,
        into: Sequence[Any] | Destinations,
        *,
        verify: bool | None = None,
    ) -> LoadPlan:
        """Read some boxes together; see `Checkpoint.read_boxes`. Nothing is verified.

        Raises:
            ConvertError: `foreign_truncated`; what `ForeignTensor.read` raises.

        Memory: for each thread 1 MiB, or a window of 8 MiB for what is not packed in its file.
        """
        plan = wanted if isinstance(wanted, LoadPlan) else self.plan_boxes(wanted, verify=verify)
        views = destinations_of(into, plan)
        self._blocks.run(plan, views)
        self._workers.run(
            functools.partial(self._read_other, Wanted(*one), views[number])
            for number, one in plan.others.items()
        )
        return plan

    def _add_other(self, plan: LoadPlan, number: int, one: Wanted) -> None:
        itemsize = self._entries[one.tensor].tensor.itemsize
        nbytes = one.box.numel * itemsize
        plan.room[number] = nbytes
        if one.strides is not None:
            plan.strided.add(number)
            pairs = zip(one.box.shape, one.strides, strict=True)
            plan.room[number] = nbytes and itemsize + sum((n - 1) * by for n, by in pairs)
        plan.others[number] = one
        plan.wanted_nbytes += nbytes
        plan.range_nbytes += nbytes

    def _read_other(self, one: Wanted, into: memoryview) -> None:
        self._entries[one.tensor].tensor.read(one.box, into=into, strides=one.strides)

    def _name_of(self, index: int) -> str:
        return self._entries[index].name


class _Layout(NamedTuple):
    """What a `BlockReader` asks of a body."""

    block_nbytes: int
    dtypes: Sequence[str]
    files: Sequence[DataFile]


class _NoTables(NamedTuple):
    """What a `BlockReader` asks of columns, where nothing is verified and nothing compressed."""

    dtype: Sequence[int]

    def digests(self, first: int, count: int) -> bytes:  # noqa: ARG002
        raise AssertionError("there are no digests")

    def frame_rows(self, first: int, count: int) -> tuple[array[int], bytes]:  # noqa: ARG002
        raise AssertionError("there are no frames")


class _Files:
    """The files that tensors lie in, as a storage. They are met when chunks are looked at."""

    name = "foreign files"

    def __init__(self) -> None:
        self.rows: list[DataFile] = []
        self._files: dict[str, FileBytes] = {}
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    def number_of(self, file: FileBytes) -> int:
        """Return the number of a file."""
        with self._lock:
            number = self._numbers.setdefault(file.name, len(self.rows))
            if number == len(self.rows):
                self._files[file.name] = file
                self.rows.append(DataFile(file.name, file.nbytes, 0, (), {}))
            return number

    def labels(self) -> list[str]:
        """List the files that were met."""
        return sorted(self._files)

    def nbytes(self, label: str) -> int:
        """Return the length that a file had when it was opened."""
        return self._files[label].nbytes

    def read_into(self, label: str, byte_offset: int, into: memoryview) -> int:
        """Fill `into` from a place in a file."""
        read_exactly(self._files[label], byte_offset, into)
        return len(into)

    def read_into_many(self, label: str, byte_offset: int, into: Sequence[memoryview]) -> int:
        """Fill buffers, one after another, from a place in a file on."""
        return read_each(self, label, byte_offset, into)

    def map(self, label: str, *, writable: bool = False) -> memoryview | None:
        """Return a map of a file."""
        return self._files[label].map(writable=writable)

    def close(self) -> None:
        """Do nothing: whoever opened the files closes them."""
