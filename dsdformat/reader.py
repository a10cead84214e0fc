"""Read a checkpoint: names, values, tensors, boxes of tensors. Knows no array library."""

from __future__ import annotations

import difflib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dsdformat.blocks import BlockReader, Request, Workers
from dsdformat.boxes import Box, flat_boxes, whole
from dsdformat.errors import ArgumentError, EntryNotFoundError, Problem, raise_problems, shorten
from dsdformat.format.checks import TensorRow, check_tensor
from dsdformat.format.codecs import CODECS, RAW
from dsdformat.format.decoding import Hooks, Tree, decode_tree
from dsdformat.format.digests import DIGEST_NBYTES, digest, tensor_content_digest
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.frame import FORMAT_VERSION
from dsdformat.format.manifest import Body, Columns, Layout, Mesh, parse_body
from dsdformat.format.packing import emit, parse
from dsdformat.format.paths import emit_name
from dsdformat.format.values import TensorRef, encode, encode_key
from dsdformat.garbage import paused_gc
from dsdformat.limits import LEAF_NBYTES
from dsdformat.sections import ManifestFile
from dsdformat.storage.base import Storage

__all__ = ["Checkpoint", "ChunkInfo", "TensorEntry", "TensorSlice"]

Index = int | slice | tuple[int | slice, ...]
_CACHED_ROWS = 256


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One chunk, as a person sees it.

    Attributes:
        box: In elements of the global shape.
        file: Label of the data file.
        byte_offset, stored_nbytes: Where it lies in the file.
        nbytes: Decoded length.
        codec: Name of the codec.
    """

    box: Box
    file: str
    byte_offset: int
    stored_nbytes: int
    nbytes: int
    codec: str


class TensorEntry:
    """A tensor of a checkpoint that is open. Reads nothing until asked."""

    def __init__(self, checkpoint: Checkpoint, index: int) -> None:
        self._checkpoint = checkpoint
        self.index = index

    def __repr__(self) -> str:
        return f"TensorEntry({self.name!r}, {self.dtype}, {list(self.shape)})"

    @property
    def name(self) -> str:
        """The display name: the parts of the path, escaped, joined by `/`."""
        return self._checkpoint._name(self.index)

    @property
    def path(self) -> tuple[Any, ...]:
        """The first path that leads to the tensor."""
        return self._checkpoint._decoded.paths[self.index]

    @property
    def paths(self) -> list[tuple[Any, ...]]:
        """All paths that lead to the tensor: several if it is tied."""
        return self._checkpoint._decoded.aliases.get(self.index, [self.path])

    @property
    def dtype(self) -> str:
        """The logical dtype, as `bfloat16`."""
        return self._checkpoint._dtype(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._checkpoint._columns.shape(self.index)

    @property
    def nbytes(self) -> int:
        """Length of the packed bytes."""
        return whole(self.shape).numel * DTYPES[self.dtype].itemsize

    @property
    def placements(self) -> tuple[Mesh, tuple[str, ...]] | None:
        """Provenance: the mesh and the placement per axis, or None if it was not sharded."""
        return self._checkpoint._placements(self.index)

    @property
    def chunks(self) -> list[ChunkInfo]:
        """The chunks, in ascending order of their offsets."""
        row, files = self._checkpoint._row(self.index), self._checkpoint._body.files
        return [
            ChunkInfo(
                c.box,
                files[c.file].label,
                c.byte_offset,
                c.stored_nbytes,
                c.nbytes,
                CODECS[c.codec],
            )
            for c in row.chunks
        ]

    def __getitem__(self, index: Index) -> TensorSlice:
        """Name a box by integers and slices of step 1. Reads nothing."""
        return TensorSlice(self, _box_of(self.shape, index))

    def read(
        self, box: Box | None = None, *, into: Any = None, verify: bool | None = None
    ) -> memoryview:
        """Read one box; see `Checkpoint.read`."""
        return self._checkpoint._read(self.index, box, into, verify)

    def map(self) -> memoryview:
        """Return the tensor's bytes in the file, without a copy and without verification.

        Pages are read when they are touched. Valid after the checkpoint is closed.

        Raises:
            ArgumentError: `cannot_map`: compressed, several chunks, or a storage without maps.

        Ranks: local.
        Memory: none of its own.
        """
        return self._checkpoint._map(self.index)

    def content_digest(self) -> str:
        """Return the content digest: the same for every layout, codec and number of ranks.

        Read from the manifest where the leaves are known, else computed from the data.

        Ranks: local.
        Memory: 4 MiB and what reading that much takes.
        """
        return self._checkpoint._content_digest(self.index).hex()


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of a tensor, not yet read."""

    entry: TensorEntry
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box; a dim that was indexed by an integer is 1."""
        return self.box.shape

    def read(self, *, into: Any = None, verify: bool | None = None) -> memoryview:
        """Read the box; see `Checkpoint.read`."""
        return self.entry.read(self.box, into=into, verify=verify)


class Checkpoint:
    """A checkpoint that is open for reading. A context manager; safe to use from threads.

    Attributes:
        root: The root digest, 64 hexadecimal digits: names the checkpoint, pins every byte.
        format_version: Major and minor version of the format.
        user: User metadata.
        features: Names of the features that a reader needs.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        verify: bool = True,
        digest: bytes | None = None,
        threads: int | None = None,
    ) -> None:
        """Open the manifest: stages 1 to 3 of the spec, and the lengths of the columns.

        Args:
            storage: The folder; closed with the checkpoint.
            verify: Whether reads compare blocks with their digests.
            digest: The root digest that the checkpoint must have, or None.
            threads: How many threads read; up to 8 if None.
        """
        self._storage = storage
        self._verify = verify
        self._closed = False
        self._manifest = ManifestFile(storage, expected_root=digest)
        head = self._manifest.head
        with paused_gc():
            self._body: Body = self._parse_body()
            self._decoded: Tree = decode_tree(self._body.tree)
        raise_problems(self._decoded.problems)
        self._columns = Columns(self._manifest.section_nbytes(), self._manifest.read)
        self._check_references()
        self._workers = Workers(threads)
        self._blocks = BlockReader(storage, self._body, self._columns, self._workers, self._name)
        self._rows: dict[int, TensorRow] = {}
        self._lock = threading.Lock()
        self.root = head.root.hex()
        self.format_version = (FORMAT_VERSION[0], head.minor)
        self.features = head.features
        self.user = dict(self._body.user)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({self._storage.name!r}, {len(self)} tensors, root {self.root[:12]}…)"

    def __len__(self) -> int:
        return self._columns.tensors

    def __iter__(self) -> Iterator[TensorEntry]:
        """List the tensors, in the order of the tree."""
        return (TensorEntry(self, index) for index in range(len(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._index_of

    def close(self) -> None:
        """Close the files. What was read, and maps, stay valid."""
        if not self._closed:
            self._closed = True
            self._workers.close()
            self._storage.close()

    @property
    def names(self) -> list[str]:
        """Display names of the tensors, in the order of the tree; a tied tensor has one."""
        return [self._name(index) for index in range(len(self))]

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote."""
        return self._body.world_size

    @property
    def manifest_nbytes(self) -> int:
        """Length of the manifest's file."""
        return self._manifest.nbytes

    @property
    def block_nbytes(self) -> int:
        """Decoded length of a block."""
        return self._body.block_nbytes

    @property
    def data_files(self) -> Mapping[str, int]:
        """Label and length of each data file."""
        return {file.label: file.nbytes for file in self._body.files}

    @property
    def side_files(self) -> Mapping[str, int]:
        """Label and length of each side file."""
        return {side.label: side.nbytes for side in self._body.sides}

    def tree(self, hooks: Hooks | None = None) -> Any:
        """Return the nested state, with a `TensorEntry` at each tensor.

        Tied tensors are one object. The containers are new; change them as you like.

        Args:
            hooks: What a framework makes of named constants, scalars, sizes and tensors.
        """
        entries: dict[int, TensorEntry] = {}

        def entry(ref: TensorRef) -> TensorEntry:
            return entries.setdefault(ref.index, TensorEntry(self, ref.index))

        with paused_gc():
            return decode_tree(self._body.tree, hooks or Hooks(tensor=entry)).root

    def tensor(self, name: str | tuple[Any, ...]) -> TensorEntry:
        """Return one tensor by its display name or its path; any of its names if it is tied.

        Raises:
            EntryNotFoundError: `entry_not_found`, `not_a_tensor` or `ambiguous_name`.
        """
        if isinstance(name, str):
            if name in self._index_of:
                index = self._index_of[name]
                if index >= 0:
                    return TensorEntry(self, index)
                raise EntryNotFoundError(
                    f"{shorten(name)} fits several paths; give the path as a tuple",
                    code="ambiguous_name",
                    name=name,
                )
            value = self._find(name, self._steps(name))
        else:
            value = self._find(name, tuple(name))
        if isinstance(value, TensorEntry):
            return value
        raise EntryNotFoundError(
            f"{shorten(name)} is not a tensor but a {type(value).__name__}",
            code="not_a_tensor",
            name=str(name),
        )

    def value(self, name: str | tuple[Any, ...]) -> Any:
        """Return what lies at a name or path: a value, a container, or a `TensorEntry`.

        Raises:
            EntryNotFoundError: `entry_not_found`.
        """
        return self._find(name, self._steps(name) if isinstance(name, str) else tuple(name))

    def read(
        self,
        name: str | tuple[Any, ...],
        box: Box | None = None,
        *,
        into: Any = None,
        verify: bool | None = None,
    ) -> memoryview:
        """Read one box of a tensor as packed row-major little-endian bytes.

        Touches only the blocks that meet the box, and verifies each before use.

        Args:
            name: Display name or path of a tensor.
            box: In elements of the global shape; the whole tensor if None.
            into: A writable buffer of exactly the box's bytes; allocated here if None.
            verify: Whether to compare blocks with their digests; as at `open` if None.

        Returns:
            A view of `into`, as bytes. Valid after the checkpoint is closed.

        Raises:
            EntryNotFoundError: no such tensor.
            ArgumentError: `box_out_of_bounds`, or `bad_argument` for a buffer that does not fit.
            ChecksumError: `checksum_mismatch`; what `into` holds is then undefined.

        Ranks: local.
        Memory: `into`, plus one block per thread where blocks do not lie in it contiguously.
        """
        return self._read(self.tensor(name).index, box, into, verify)

    def read_all(self, into: Sequence[Any], *, verify: bool | None = None) -> None:
        """Read all tensors whole; quicker than one by one where there are many small ones.

        Args:
            into: A writable buffer for each tensor, in the order of iteration.
            verify: As in `read`.

        Raises:
            ArgumentError: `bad_argument` for buffers that do not fit.
            ChecksumError: `checksum_mismatch`; what the buffers hold is then undefined.

        Ranks: local.
        Memory: one block and 1 MiB per thread, and the chunk tables.
        """
        self._check_open()
        if len(into) != len(self):
            raise ArgumentError(f"{len(into)} buffers for {len(self)} tensors", code="bad_argument")
        wanted = self._verify if verify is None else verify
        with paused_gc():
            requests = list(map(self._request, range(len(self)), into))
        self._blocks.read_many(requests, verify=wanted)

    def _request(self, index: int, into: Any) -> Request:
        row = self._row(index)
        box = whole(row.shape)
        return Request(index, row, box, _writable(into, box.numel * row.dtype.itemsize))

    def content_digest(self) -> str:
        """Return the content digest of the state: values and tensors, whatever the layout.

        Ranks: local.
        Memory: the tree, and 4 MiB.
        """

        def leaf(value: Any, _path: Any) -> Any:
            if isinstance(value, TensorEntry):
                return ["tensor", self._content_digest(value.index)]
            return NotImplemented

        return digest(emit(encode(self.tree(), leaf=leaf))).hex()

    def _parse_body(self) -> Body:
        nbytes = self._manifest.section_nbytes()["body"]
        return parse_body(parse(self._manifest.read("body", 0, nbytes)))

    def _check_references(self) -> None:
        met = len(self._decoded.paths)
        if met != self._columns.tensors:
            raise Problem(
                "bad_tensor_reference",
                f"the tree refers to {met} tensors, the table has {self._columns.tensors}",
                path="$.tree",
            ).error()

    @functools.cached_property
    def _index_of(self) -> dict[str, int]:
        table: dict[str, int] = {}
        for index, path in enumerate(self._decoded.paths):
            for one in self._decoded.aliases.get(index, [path]):
                name = emit_name(one, _key_bytes)
                table[name] = index if table.setdefault(name, index) == index else -1
        return table

    def _name(self, index: int) -> str:
        return emit_name(self._decoded.paths[index], _key_bytes)

    def _steps(self, name: str) -> tuple[Any, ...]:
        """Turn a display name of any entry into a path, by walking the tree."""
        steps: list[Any] = []
        node = self._root
        for part in name.split("/"):
            children = {_part_name(step): step for step, _ in _children(node)}
            if part not in children:
                self._not_found(name)
            steps.append(children[part])
            node = dict(_children(node))[children[part]]
        return tuple(steps)

    def _find(self, name: object, path: tuple[Any, ...]) -> Any:
        node = self._root
        for step in path:
            children = dict(_children(node))
            if step not in children:
                self._not_found(name)
            node = children[step]
        return node

    @functools.cached_property
    def _root(self) -> Any:
        return self.tree()

    def _not_found(self, name: object) -> None:
        text = name if isinstance(name, str) else "/".join(map(str, name))  # type: ignore[call-overload]
        close = difflib.get_close_matches(text, list(self._index_of)[:20_000], n=3)
        raise EntryNotFoundError(
            f"no entry {shorten(name)} in {self._storage.name}", name=text, close_matches=close
        )

    def _dtype(self, index: int) -> str:
        number = self._columns.dtype[index]
        return self._body.dtypes[number] if number < len(self._body.dtypes) else "?"

    def _placements(self, index: int) -> tuple[Mesh, tuple[str, ...]] | None:
        number = self._row(index).layout
        if number == 0:
            return None
        layout: Layout = self._body.layouts[number - 1]
        return self._body.meshes[layout.mesh], layout.placements

    def _row(self, index: int) -> TensorRow:
        """Return a tensor's row, checked (R-18.1); the last few are kept."""
        row = self._rows.get(index)
        if row is not None:
            return row
        row, problems = check_tensor(self._body, self._columns, index, self._name)
        raise_problems(problems)
        assert row is not None
        with self._lock:
            if len(self._rows) >= _CACHED_ROWS:
                self._rows.clear()
            self._rows[index] = row
        return row

    def _read(self, index: int, box: Box | None, into: Any, verify: bool | None) -> memoryview:
        self._check_open()
        row = self._row(index)
        box = whole(row.shape) if box is None else box
        if not box.fits(row.shape):
            raise ArgumentError(
                f"box {box} is not inside of {self._name(index)} of shape {list(row.shape)}",
                code="box_out_of_bounds",
            )
        nbytes = box.numel * row.dtype.itemsize
        view = _writable(into, nbytes)
        if nbytes:
            wanted = self._verify if verify is None else verify
            self._blocks.read(Request(index, row, box, view), verify=wanted)
        return view

    def _map(self, index: int) -> memoryview:
        self._check_open()
        row, name = self._row(index), self._name(index)
        if len(row.chunks) != 1 or row.chunks[0].codec != RAW:
            why = "it is compressed" if len(row.chunks) == 1 else f"it has {len(row.chunks)} chunks"
            raise ArgumentError(
                f"{name} cannot be mapped: {why}",
                code="cannot_map",
                hint="read it instead",
            )
        chunk = row.chunks[0]
        self._blocks.check_file(chunk.file)
        view = self._storage.map(self._body.files[chunk.file].label)
        if view is None:
            raise ArgumentError(f"{self._storage.name} has no maps", code="cannot_map")
        return view[chunk.byte_offset : chunk.byte_offset + chunk.nbytes]

    def _content_digest(self, index: int) -> bytes:
        row = self._row(index)
        return tensor_content_digest(row.dtype.name, row.shape, self._leaves(index, row))

    def _leaves(self, index: int, row: TensorRow) -> Iterator[bytes]:
        if len(row.chunks) == 1 and self._body.block_nbytes == LEAF_NBYTES:
            count = -(-row.chunks[0].nbytes // LEAF_NBYTES)
            table = self._columns.digests(row.chunks[0].first_block, count)
            for at in range(0, len(table), DIGEST_NBYTES):
                yield table[at : at + DIGEST_NBYTES]
            return
        itemsize = row.dtype.itemsize
        count, step = whole(row.shape).numel, LEAF_NBYTES // itemsize
        for start in range(0, count, step):
            stop = min(start + step, count)
            buffer = memoryview(bytearray((stop - start) * itemsize))
            at = 0
            for box in flat_boxes(row.shape, start, stop):
                end = at + box.numel * itemsize
                self._read(index, box, buffer[at:end], verify=True)
                at = end
            yield digest(buffer)

    def _check_open(self) -> None:
        if self._closed:
            raise ArgumentError(f"{self._storage.name} was closed", code="closed")


def _writable(into: Any, nbytes: int) -> memoryview:
    if into is None:
        return memoryview(bytearray(nbytes))
    view = memoryview(into)
    if view.readonly or not view.c_contiguous:
        raise ArgumentError("into is not writable and contiguous", code="bad_argument")
    if view.nbytes != nbytes:
        raise ArgumentError(
            f"into has {view.nbytes} bytes, the box has {nbytes}", code="bad_argument"
        )
    return view.cast("B") if view.ndim and nbytes else memoryview(into).cast("B")


def _box_of(shape: tuple[int, ...], index: Index) -> Box:
    steps = index if isinstance(index, tuple) else (index,)
    if len(steps) > len(shape):
        raise ArgumentError(f"{len(steps)} indices for {len(shape)} dims", code="box_out_of_bounds")
    offset, extent = [], []
    for dim, size in enumerate(shape):
        step = steps[dim] if dim < len(steps) else slice(None)
        if isinstance(step, slice):
            low, high, stride = step.indices(size)
            if stride != 1:
                raise ArgumentError("slices have step 1", code="bad_argument")
            offset.append(low)
            extent.append(max(0, high - low))
            continue
        if not -size <= step < size:
            raise ArgumentError(
                f"index {step} is not inside of dim {dim}, {size} long", code="box_out_of_bounds"
            )
        offset.append(step % size)
        extent.append(1)
    return Box(tuple(offset), tuple(extent))


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        return iter(node.items())
    if isinstance(node, (list, tuple)) or type(node).__name__ == "deque":
        return enumerate(node)
    return iter(())


def _part_name(step: Any) -> str:
    return emit_name((step,), _key_bytes)


def _key_bytes(key: Any) -> bytes:
    return emit(encode_key(key))
