"""The tensors of a checkpoint that is open, by index: rows, names, bytes, content digests.

What `reader` and `verify` share. Knows nothing of the user's containers: a tensor here is a number.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from dsdformat.blocks import BlockReader
from dsdformat.boxes import Box, flat_boxes, whole
from dsdformat.destinations import Destinations, destinations_of, writable_bytes
from dsdformat.errors import ArgumentError, Problem, raise_problems, shorten
from dsdformat.format.bodies import find_body_problems
from dsdformat.format.checks import (
    TensorRow,
    WholeChunks,
    check_tensor,
    find_prefix_problem,
    find_whole_chunks,
)
from dsdformat.format.codecs import RAW
from dsdformat.format.decoding import CHECK, Tree, decode_tree
from dsdformat.format.digests import DIGEST_NBYTES, digest, tensor_content_digest
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.manifest import Body, Columns, parse_body
from dsdformat.format.packing import parse
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key
from dsdformat.garbage import paused_gc
from dsdformat.headers import HeaderChecks
from dsdformat.limits import LEAF_NBYTES
from dsdformat.plan.chunk_tables import ChunkTable, find_sound_table, table_of_row
from dsdformat.plan.load_plan import BOUND, LoadPlan, LoadPlanner, Wanted, WantedBoxes
from dsdformat.sections import ManifestFile
from dsdformat.storage.base import Storage
from dsdformat.workers import Workers

__all__ = ["TensorTable", "digest_leaves"]

_CACHED_CHUNKS = 4096
_Kept = TypeVar("_Kept")


class TensorTable:
    """A checkpoint whose manifest passed stages 1 to 3 of the spec.

    Attributes:
        storage, manifest, body, columns, decoded: What was opened and decoded.
        verifies: Whether reads compare blocks with their digests, unless told.
        blocks, workers: What reads data.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        verify: bool,
        expected_root: bytes | None,
        threads: int | None,
        check_pages: bool = False,
    ) -> None:
        self.storage = storage
        self.verifies = verify
        self._closed = False
        self.manifest = ManifestFile(storage, expected_root=expected_root)
        with paused_gc():
            raw = self._parse_body()
            self.decoded: Tree = decode_tree(raw["tree"], CHECK)
        raise_problems([*find_body_problems(raw), *self.decoded.problems])
        self.body: Body = parse_body(raw)
        if check_pages:
            self.manifest.check_pages()
        met = None if self.decoded.disorder else len(self.decoded.paths)
        self.columns = Columns(self.manifest.section_nbytes(), self.manifest.read, met)
        raise_problems(list(self._reference_problems()))
        self.workers = Workers(threads)
        self.blocks = BlockReader(storage, self.body, self.columns, self.workers, self.name)
        self._headers = HeaderChecks(self)
        self._rows: _Recent[TensorRow] = _Recent()
        self._tables: _Recent[ChunkTable] = _Recent()

    def __len__(self) -> int:
        return self.columns.tensors

    def close(self) -> None:
        """Close the files; what was read, and maps, stay valid."""
        if not self._closed:
            self._closed = True
            self.workers.close()
            self.storage.close()

    def path(self, index: int) -> tuple[Any, ...]:
        """The first path that leads to a tensor."""
        return self.decoded.paths[index]

    def paths(self, index: int) -> list[tuple[Any, ...]]:
        """All paths that lead to a tensor."""
        return self.decoded.aliases.get(index, [self.decoded.paths[index]])

    def name(self, index: int) -> str:
        """The display name of a tensor."""
        return emit_name(self.decoded.paths[index], encoded_key)

    def dtype(self, index: int) -> str:
        """The logical dtype of a tensor."""
        number = self.columns.dtype[index]
        if number < len(self.body.dtypes):
            return self.body.dtypes[number]
        return self.row(index).dtype.name  # raises `bad_reference`

    def forms(self, indexes: Sequence[int]) -> tuple[list[tuple[int, ...]], list[str]]:
        """Return the shapes and the logical dtypes of some tensors."""
        names, shapes = self.body.dtypes, self.columns.shapes(indexes)
        numbers = list(map(self.columns.dtype.__getitem__, indexes))
        if max(numbers, default=0) < len(names):
            return shapes, [names[number] for number in numbers]
        return shapes, list(map(self.dtype, indexes))

    def row(self, index: int) -> TensorRow:
        """Return a tensor's row, checked (R-18.1); the last few are kept."""
        row = self._rows.get(index)
        if row is not None:
            return row
        row, problems = check_tensor(self.body, self.columns, index, self.name)
        raise_problems(problems or self._prefix_problems(index, row))
        assert row is not None
        self._rows.keep(index, row, len(row.chunks))
        return row

    def chunk_table(self, index: int) -> ChunkTable:
        """Return a tensor's chunks, checked (R-18.1), without an object for each."""
        if self.columns.chunk_count[index] == 1:
            return table_of_row(self.row(index))
        table = self._tables.get(index)
        if table is None:
            table = find_sound_table(self.body, self.columns, index, self.path(index))
            table = table or table_of_row(self.row(index))
            self._tables.keep(index, table, table.chunks)
        return table

    def plan(
        self,
        boxes: Sequence[Sequence[Wanted]],
        verify: bool | None,
        bound: float | None = BOUND,
    ) -> list[LoadPlan]:
        """Plan to read some lists of boxes, each by itself; see `Checkpoint.plan_boxes`."""
        self._check_open()
        with paused_gc():
            return self._plan(boxes, self.verifies if verify is None else verify, bound)

    def _plan(
        self, boxes: Sequence[Sequence[Wanted]], wanted: bool, bound: float | None
    ) -> list[LoadPlan]:
        planners = [LoadPlanner(self.body.block_nbytes, verify=wanted, bound=bound) for _ in boxes]
        rest: list[Iterable[tuple[int, Wanted]]] = [enumerate(some) for some in boxes]
        if len(planners) == 1:
            numbers, found, rest[0] = self._part_whole(boxes[0])
            planners[0].add_whole(numbers, found)
        lists: list[dict[int, list[tuple[int, Wanted]]]] = [{} for _ in boxes]
        for some, by_tensor in zip(rest, lists, strict=True):
            for pair in some:
                by_tensor.setdefault(pair[1].tensor, []).append(pair)
        for index in sorted(set().union(*lists)):
            if not 0 <= index < len(self):
                raise ArgumentError(f"there is no tensor {index}", code="bad_argument")
            table = self.chunk_table(index)
            for planner, by_tensor in zip(planners, lists, strict=True):
                pairs = by_tensor.get(index, [])
                for _, (_, box, _) in pairs:
                    if any(box.offset) or box.shape != table.shape:
                        self._check_inside(index, box, table.shape)
                planner.add(index, table, pairs)
        return [planner.finish() for planner in planners]

    def _part_whole(
        self, wanted: Sequence[Wanted]
    ) -> tuple[list[int], WholeChunks, list[tuple[int, Wanted]]]:
        """Part the tensors that are one raw chunk and wanted whole, once, from all others.

        So are most, and planned one by one they would take many times as long.

        Returns:
            The numbers of the wanted boxes, and their chunks; and the rest.
        """
        likely, rest = self._part_likely(wanted)
        tensors = sorted(likely)
        found = find_whole_chunks(self.body, self.columns, tensors)
        found = self._below_prefixes(found)
        if len(found.tensor) < len(tensors):  # what is wrong is said where they are looked at
            every = list(wanted)
            left = (likely[tensor] for tensor in set(tensors).difference(found.tensor))
            rest += [(number, every[number]) for number in left]
        return [likely[tensor] for tensor in found.tensor], found, rest

    def _below_prefixes(self, found: WholeChunks) -> WholeChunks:
        """Return those tensors that lie under the prefixes of their files (R-10.5)."""
        paths = list(map(self.decoded.paths.__getitem__, found.tensor))
        prefixes = [file.prefix for file in self.body.files]
        first, *others = {prefixes[file] for file in set(found.file)} or {()}
        size = len(first)
        deep = not others and min(map(len, paths), default=size + 1) > size
        if deep and {path[:size] for path in paths} <= {first}:  # as mostly
            return found
        below = [
            len(path) > len(prefix) and path[: len(prefix)] == prefix
            for path, prefix in zip(paths, map(prefixes.__getitem__, found.file), strict=True)
        ]
        return found.chosen(below)

    def _part_likely(
        self, wanted: Sequence[Wanted]
    ) -> tuple[dict[int, int], list[tuple[int, Wanted]]]:
        """Part what is wanted whole, packed and once: tensor to number of the box; and the rest."""
        count, shape = len(self), self.columns.shape
        likely: dict[int, int] = {}
        others, first = wanted, 0
        if isinstance(wanted, WantedBoxes):
            whole, known = wanted.tensors, range(count)
            apart = {one.tensor for one in wanted.others}.isdisjoint(whole)
            there = apart and whole and min(whole) in known and max(whole) in known
            if there and self.columns.shapes(whole) == list(wanted.shapes):
                others, first = wanted.others, len(whole)
                likely = dict(zip(whole, range(first), strict=True))
        times = Counter(one.tensor for one in others)
        rest = []
        for number, one in enumerate(others, first):
            index, box, strides = one
            packed = strides is None and times[index] == 1 and 0 <= index < count
            if packed and box.shape == shape(index) and not any(box.offset):
                likely[index] = number
            else:
                rest.append((number, one))
        return likely, rest

    def run(self, plan: LoadPlan, into: Sequence[Any] | Destinations) -> None:
        """Read what was planned; see `Checkpoint.read_boxes`."""
        self._check_open()
        self._carry_out(plan, destinations_of(into, plan))

    def read(self, index: int, box: Box | None, into: Any, verify: bool | None) -> memoryview:
        """Read a box; see `Checkpoint.read`."""
        self._check_open()
        if box is None:
            box = whole(self.columns.shape(index))
        (plan,) = self.plan([[Wanted(index, box)]], verify, bound=None)
        view = writable_bytes(into, plan.room[0])
        self._carry_out(plan, Destinations([view]))
        return view

    def read_all(self, into: Sequence[Any] | Mapping[int, Any], verify: bool | None) -> None:
        """Read whole tensors; see `Checkpoint.read_all`."""
        self._check_open()
        if isinstance(into, Mapping):
            items = sorted(into.items())
        elif len(into) != len(self):
            raise ArgumentError(f"{len(into)} buffers for {len(self)} tensors", code="bad_argument")
        else:
            items = list(enumerate(into))
        with paused_gc():
            tensors = [index for index, _ in items]
            wanted = WantedBoxes(tensors, list(map(self.columns.shape, tensors)))
            (plan,) = self.plan([wanted], verify)
        self.run(plan, [buffer for _, buffer in items])

    def map(self, index: int, *, writable: bool = False) -> memoryview:
        """Map a tensor; see `TensorEntry.map`."""
        self._check_open()
        row = self.row(index)
        if len(row.chunks) != 1 or row.chunks[0].codec != RAW:
            why = "it is compressed" if len(row.chunks) == 1 else f"it has {len(row.chunks)} chunks"
            raise ArgumentError(
                f"{self.name(index)} cannot be mapped: {why}",
                code="cannot_map",
                hint="read it instead",
            )
        chunk = row.chunks[0]
        # A map that is longer than its file ends the process when it is touched.
        self.blocks.check_file(chunk.file, anew=True)
        view = self.storage.map(self.body.files[chunk.file].label, writable=writable)
        if view is None:
            raise ArgumentError(f"{self.storage.name} has no maps", code="cannot_map")
        return view[chunk.byte_offset : chunk.byte_offset + chunk.nbytes]

    def content_digest(self, index: int) -> bytes:
        """Return the content digest of a tensor (R-13.1)."""
        row = self.row(index)
        return tensor_content_digest(row.dtype.name, row.shape, self._leaves(index, row))

    def known_content_digest(self, index: int) -> bytes | None:
        """Return the content digest of a tensor if the manifest alone gives it."""
        row = self.row(index)
        return self.content_digest(index) if self._knows_leaves(row) else None

    def _carry_out(self, plan: LoadPlan, into: Destinations) -> None:
        """Read what was planned; first, where it is verified, see that headers say the same."""
        if plan.verify:
            with paused_gc():
                self._headers.check(plan)
        self.blocks.run(plan, into)

    def _parse_body(self) -> dict[str, Any]:
        nbytes = self.manifest.section_nbytes()["body"]
        raw = parse(self.manifest.read("body", 0, nbytes))
        if type(raw) is not dict or "tree" not in raw:
            raise_problems(find_body_problems(raw))
        assert isinstance(raw, dict)
        return raw

    def _prefix_problems(self, index: int, row: TensorRow | None) -> list[Problem]:
        path, name = self.path(index), functools.partial(self.name, index)
        chunks = row.chunks if row is not None else ()
        found = [find_prefix_problem(self.body, path, c.file, c.number, name) for c in chunks]
        return [problem for problem in found if problem is not None]

    def _reference_problems(self) -> Iterator[Problem]:
        """What the tree and the table of dtypes refer to (R-9.2, R-11.9)."""
        for number, name in enumerate(self.body.dtypes):
            if name not in DTYPES:
                path = f"$.dtypes[{number}]"
                message = f"{path}: the dtype {shorten(name)} is not known"
                hint = "install a newer version of dsdformat"
                yield Problem("unknown_dtype", message, path=path, hint=hint)
        yield from self.decoded.disorder

    def _check_inside(self, index: int, box: Box, shape: Sequence[int]) -> None:
        if not box.fits(shape):
            raise ArgumentError(
                f"box {box} is not inside of {self.name(index)} of shape {list(shape)}",
                code="box_out_of_bounds",
            )

    def _leaves(self, index: int, row: TensorRow) -> Iterator[bytes]:
        if self._knows_leaves(row):
            count = -(-row.chunks[0].nbytes // LEAF_NBYTES)
            table = self.columns.digests(row.chunks[0].first_block, count)
            for at in range(0, len(table), DIGEST_NBYTES):
                yield table[at : at + DIGEST_NBYTES]
            return
        yield from digest_leaves(
            row.dtype.itemsize, row.shape, lambda box, into: self.read(index, box, into, True)
        )

    def _knows_leaves(self, row: TensorRow) -> bool:
        return len(row.chunks) == 1 and self.body.block_nbytes == LEAF_NBYTES

    def _check_open(self) -> None:
        if self._closed:
            raise ArgumentError(f"{self.storage.name} was closed", code="closed")


class _Recent(Generic[_Kept]):
    """What was looked up last, as long as it has no more than 4,096 chunks in all."""

    def __init__(self) -> None:
        self._found: dict[int, _Kept] = {}
        self._chunks = 0
        self._lock = threading.Lock()

    def get(self, index: int) -> _Kept | None:
        """Return what was kept of a tensor."""
        return self._found.get(index)

    def keep(self, index: int, kept: _Kept, chunks: int) -> None:
        """Keep this, and forget the rest if there is too much."""
        with self._lock:
            self._chunks += chunks
            if self._chunks > _CACHED_CHUNKS:
                self._found.clear()
                self._chunks = chunks
            self._found[index] = kept


def digest_leaves(
    itemsize: int, shape: Sequence[int], read: Callable[[Box, memoryview], Any]
) -> Iterator[bytes]:
    """Yield the digests of the leaves of a tensor (R-13.1), from its data.

    Args:
        itemsize: Bytes of an element.
        shape: Of the tensor.
        read: Puts the packed bytes of a box into a buffer.

    Memory: 4 MiB, and what reading takes.
    """
    count, step = whole(shape).numel, LEAF_NBYTES // itemsize
    for start in range(0, count, step):
        stop = min(start + step, count)
        buffer = memoryview(bytearray((stop - start) * itemsize))
        at = 0
        for box in flat_boxes(shape, start, stop):
            end = at + box.numel * itemsize
            read(box, buffer[at:end])
            at = end
        yield digest(buffer)
