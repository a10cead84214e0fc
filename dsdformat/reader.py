"""Read a checkpoint: names, values, tensors, boxes of tensors. Knows no array library."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dsdformat.boxes import Box
from dsdformat.destinations import Destinations
from dsdformat.entries import TensorEntry, tree_of
from dsdformat.errors import EntryNotFoundError, Problem, listed, printable, shorten
from dsdformat.format.decoding import Hooks
from dsdformat.format.digests import digest as digest_of
from dsdformat.format.frame import FORMAT_VERSION
from dsdformat.format.packing import emit
from dsdformat.format.values import Encoded, encode
from dsdformat.lookup import Lookup
from dsdformat.plan.load_plan import BOUND, LoadPlan, Wanted
from dsdformat.storage.base import Storage
from dsdformat.tensors import TensorTable

__all__ = ["Checkpoint"]


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """A checkpoint that is open for reading. A context manager; safe to use from threads.

    Attributes:
        root: The root digest, 64 hexadecimal digits: names the checkpoint, pins every byte.
        format_version: Major and minor version of the format.
        user: User metadata.
        features: Names of the features that a reader needs.
        verifies: Whether reads compare blocks with their digests.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        verify: bool = True,
        digest: bytes | None = None,
        threads: int | None = None,
        check_pages: bool = False,
    ) -> None:
        """Open the manifest: stages 1 to 3 of the spec, and the lengths of the columns.

        Args:
            storage: The folder; closed with the checkpoint.
            verify: Whether reads compare blocks with their digests.
            digest: The root digest that the checkpoint must have, or None.
            threads: How many threads read; up to 8 if None.
            check_pages: Whether to verify all pages of the manifest now.
        """
        self.table = TensorTable(
            storage,
            verify=verify,
            expected_root=digest,
            threads=threads,
            check_pages=check_pages,
        )
        head = self.table.manifest.head
        self.root = head.root.hex()
        self.format_version = (FORMAT_VERSION[0], head.minor)
        self.features = head.features
        self.verifies = verify
        self.user = dict(self.table.body.user)
        self._lookup = Lookup(self.table)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Checkpoint({self.table.storage.name!r}, {len(self)} tensors, root {self.root[:12]}…)"
        )

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[TensorEntry]:
        """List the tensors, in the order of the tree."""
        return (TensorEntry(self.table, index) for index in range(len(self)))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._lookup.index(name) is not None

    def close(self) -> None:
        """Close the files. What was read, and maps, stay valid."""
        self.table.close()

    @property
    def names(self) -> list[str]:
        """Display names of the tensors, in the order of the tree; a tied tensor has one."""
        return [self.table.name(index) for index in range(len(self))]

    @property
    def chunk_count(self) -> int:
        """Number of chunks of all tensors."""
        return self.table.columns.chunks

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote."""
        return self.table.body.world_size

    @property
    def manifest_nbytes(self) -> int:
        """Length of the manifest's file."""
        return self.table.manifest.nbytes

    @property
    def block_nbytes(self) -> int:
        """Decoded length of a block."""
        return self.table.body.block_nbytes

    @property
    def data_files(self) -> Mapping[str, int]:
        """Label and length of each data file."""
        return {file.label: file.nbytes for file in self.table.body.files}

    @property
    def side_files(self) -> Mapping[str, int]:
        """Label and length of each side file."""
        return {side.label: side.nbytes for side in self.table.body.sides}

    def tree(self, hooks: Hooks | None = None) -> Any:
        """Return the nested state, with a `TensorEntry` at each tensor.

        Tied tensors are one object. The containers are new; change them as you like.

        Args:
            hooks: What a framework makes of named constants, scalars, sizes and tensors.
        """
        return tree_of(self.table, hooks)

    def tensor(self, name: str | tuple[Any, ...]) -> TensorEntry:
        """Return one tensor by its display name or its path; any of its names if it is tied.

        Raises:
            EntryNotFoundError: `entry_not_found` or `not_a_tensor`.
        """
        if isinstance(name, str):
            index = self._lookup.index(name)
            if index is not None:
                return TensorEntry(self.table, index)
            value = self._lookup.find(name)
        else:
            value = self._lookup.find_path(tuple(name))
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
        lookup = self._lookup
        return copy.deepcopy(
            lookup.find(name) if isinstance(name, str) else lookup.find_path(tuple(name))
        )

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
        Memory: `into`, plus for each thread 512 KiB where pieces do not lie in it contiguously, or
            one block, stored and decoded, where it is compressed.
        """
        return self.tensor(name).read(box, into=into, verify=verify)

    def read_all(
        self, into: Sequence[Any] | Mapping[int, Any], *, verify: bool | None = None
    ) -> None:
        """Read tensors whole; quicker than one by one where there are many small ones.

        Args:
            into: A writable buffer for each tensor, in the order of iteration; or a mapping
                from `TensorEntry.index` to one, for some of them.
            verify: As in `read`.

        Raises:
            ArgumentError: `bad_argument` for buffers that do not fit.
            ChecksumError: `checksum_mismatch`; what the buffers hold is then undefined.

        Ranks: local.
        Memory: as `read_boxes`.
        """
        self.table.read_all(into, verify)

    def forms(self, indexes: Sequence[int]) -> tuple[list[tuple[int, ...]], list[str]]:
        """Return the global shapes and the logical dtypes of some tensors, by their indexes.

        Quicker than one by one where there are many small ones.

        Ranks: local.
        Memory: the result, or that of twice as many.
        """
        return self.table.forms(indexes)

    def plan_boxes(
        self,
        wanted: Sequence[Wanted],
        *,
        verify: bool | None = None,
        bound: float = BOUND,
    ) -> LoadPlan:
        """Plan to read some boxes of any tensors together, and say what it costs.

        Reads the chunk tables of these tensors, and no data. The plan can be carried out by
        `read_boxes`, as often as wanted.

        Args:
            wanted: The boxes; of one tensor there may be several, and they may overlap.
            verify: As in `read`.
            bound: On bytes read over bytes wanted. Small pieces of one file that have others
                between them are read together while that is kept. What verification or a codec
                needs in whole blocks is read whatever the bound.

        Raises:
            ArgumentError: `box_out_of_bounds`, or `bad_argument` for strides that do not fit.

        Ranks: local.
        Memory: 150 bytes for each chunk that meets a box, and 48 for each block of those.
        """
        return self.table.plan([wanted], verify, bound)[0]

    def plan_ranks(
        self,
        wanted: Sequence[Sequence[Wanted]],
        *,
        verify: bool | None = None,
        bound: float = BOUND,
    ) -> list[LoadPlan]:
        """Plan what each of several ranks would read; each chunk table is decoded once.

        Args:
            wanted: For each rank its boxes.
            verify, bound: As in `plan_boxes`.

        Ranks: local.
        Memory: as `plan_boxes`, for each rank.
        """
        return self.table.plan(wanted, verify, bound)

    def read_boxes(
        self,
        wanted: Sequence[Wanted] | LoadPlan,
        into: Sequence[Any] | Destinations,
        *,
        verify: bool | None = None,
    ) -> LoadPlan:
        """Read some boxes of any tensors together, each byte of the files at most once.

        Large pieces go straight from the file to where they belong, if they are contiguous
        there. A block that several boxes want some of is read and verified once.

        Args:
            wanted: The boxes, or a plan for them that this checkpoint made.
            into: For each box a writable buffer: of exactly the box's bytes; or, for one with
                strides, beginning at the first element and at least as long as they reach. Or
                `Destinations`, which make buffers when these are read into.
            verify: As in `read`; a plan has its own.

        Returns:
            The plan that was carried out, which tells how much was read.

        Raises:
            ArgumentError: `box_out_of_bounds`, or `bad_argument` for what does not fit.
            ChecksumError: `checksum_mismatch`; what the buffers hold is then undefined.

        Ranks: local.
        Memory: for each thread 1 MiB, or one block, stored and decoded, where it is compressed;
            and that of `plan_boxes`.
        """
        plan = wanted if isinstance(wanted, LoadPlan) else self.plan_boxes(wanted, verify=verify)
        self.table.run(plan, into)
        return plan

    def check_files(self) -> None:
        """Check that all data files are there, wanted or not, by one listing of the folder.

        Raises:
            IncompleteError: `missing_file`, with the files that are gone and what lay in them.

        Ranks: local.
        Memory: the list of the folder's files.
        """
        labels = [file.label for file in self.table.body.files]
        there = set(self.table.storage.labels()) if labels else set()
        gone = {number: label for number, label in enumerate(labels) if label not in there}
        if not gone:
            return
        files, rows = list(gone.values()), self.table.columns.rows
        names = [
            printable(one.name) for one in self if not gone.keys().isdisjoint(rows(one.index).file)
        ]
        verb = "is" if len(files) == 1 else "are"
        raise Problem(
            "missing_file",
            f"{self.table.storage.name}: {listed(files)} {verb} not there, and should have "
            f"{listed(names) or 'nothing'}",
            where=files[0],
            hint="restore it from another copy; what is there can be loaded with select=",
        ).error()

    def content_digest(self) -> str:
        """Return the content digest of the state: values and tensors, whatever the layout.

        Ranks: local.
        Memory: the tree, and 4 MiB.
        """

        def leaf(value: Any, _path: Any) -> Any:
            if isinstance(value, TensorEntry):
                return Encoded(["tensor", self.table.content_digest(value.index)])
            return NotImplemented

        return digest_of(emit(encode(self.tree(), leaf=leaf))).hex()
