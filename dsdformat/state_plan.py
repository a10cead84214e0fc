"""A state as a writer stores it: its tree, its tensors, and the chunks that are to be written.

Pure. What follows is what takes time where there are many small tensors, so nothing is made for
each of them where neighbours come as a run, and little elsewhere: a name is rendered when somebody
asks for it, and no box is checked twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dsdformat.chunks import Chunks
from dsdformat.errors import ArgumentError, shorten
from dsdformat.format.codecs import CODECS, PLANES, RAW, ZSTD
from dsdformat.format.dtypes import DTYPES, Dtype
from dsdformat.format.manifest import Mesh
from dsdformat.format.paths import emit_name
from dsdformat.format.values import Encoded, Leaf, TensorRef, encode, encoded_key
from dsdformat.parts import TensorColumns
from dsdformat.sources import (
    Reference,
    RunAdapter,
    RunMember,
    SourceRun,
    TensorSource,
    source_of,
)

__all__ = ["Codec", "StatePlan", "plan_state"]

# A codec's name, or a function from a tensor's display name to one.
Codec = str | Callable[[str], str]

_TENSORS = (TensorSource, Reference, RunMember)
_CODEC_NUMBERS = {name: number for number, name in CODECS.items()}


class StatePlan(NamedTuple):
    """What a writer stores.

    Attributes:
        tree: Encoded.
        tensors: In the order of the tree.
        chunks: Of them.
    """

    tree: Any
    tensors: TensorColumns
    chunks: Chunks


def plan_state(
    state: Mapping[str, Any], *, codec: Codec, world_size: int, adapt: Leaf | None = None
) -> StatePlan:
    """Encode a state, number its tensors, and list the chunks to write.

    Args:
        state: Nested values of the format, with a `TensorSource` or a `Reference` at each tensor.
        codec: For sources that name none.
        world_size: Number of writers.
        adapt: Turns anything else into one of these; a `RunAdapter` some at once.

    Raises:
        UnsupportedValueError: something cannot be stored.
        ArgumentError: a codec, or a mesh, that is none.
    """
    planner = _Planner(codec, world_size, adapt)
    tree = encode(state, leaf=planner.leaf, neighbours=planner.neighbours)
    return StatePlan(tree, planner.tensors, planner.chunks)


def _no_runs(values: Sequence[Any]) -> Iterator[tuple[int, None]]:
    yield len(values), None


class _Planner:
    """Collects the tensors of a state while it is encoded."""

    def __init__(self, codec: Codec, world_size: int, adapt: Leaf | None) -> None:
        self.tensors = TensorColumns()
        self.chunks = Chunks()
        self._codec = codec
        self._world_size = world_size
        self._adapt = adapt
        self._runs = adapt.runs if isinstance(adapt, RunAdapter) else _no_runs
        self._numbers: dict[int, int] = {}  # by the id of a source; of a run that of its first
        self._sources: list[TensorSource | SourceRun] = []
        self._meshes: dict[int, tuple[Mesh, bool]] = {}
        self._codecs: dict[tuple[str, str], int] = {}  # those that were looked at

    def leaf(self, value: Any, path: Sequence[Any]) -> Any:
        """Return a reference to the tensor that a value is, or what `adapt` makes of it."""
        if not isinstance(value, _TENSORS):
            value = NotImplemented if self._adapt is None else self._adapt(value, path)
            if not isinstance(value, _TENSORS):
                return value
        source = value if type(value) is TensorSource else source_of(value)
        if isinstance(source, RunMember):
            number = self._numbers[id(source.run)] + source.index
        elif id(source) in self._numbers:
            number = self._numbers[id(source)]
        else:
            number = self._number(source)
            self._add(source, number, path)
        if isinstance(value, RunMember) or not value.attributes:
            return Encoded(["tensor", number])  # as a reference without hints is encoded
        return TensorRef(number, tuple(value.attributes.items()))

    def neighbours(
        self,
        steps: Sequence[Any],
        values: Sequence[Any],
        path: Sequence[Any],
        one: Callable[[Any, Any], Any],
    ) -> list[Any]:
        """Encode what a container holds: runs of tensors at once, the others one by one."""
        encoded: list[Any] = []
        for count, run in self._runs(values):
            at, end = len(encoded), len(encoded) + count
            if run is None:
                encoded += map(one, steps[at:end], values[at:end])
            else:
                first = self._add_run(run, steps[at:end], tuple(path))
                encoded += [["tensor", number] for number in range(first, first + count)]
        return encoded

    def _number(self, source: TensorSource | SourceRun) -> int:
        """Number what comes next; it stays alive, so that no other source gets its id."""
        self._sources.append(source)
        number = self._numbers[id(source)] = len(self.tensors)
        return number

    def _add_run(self, run: SourceRun, steps: Sequence[Any], parent: tuple[Any, ...]) -> int:
        """Add a run of tensors; return the number of the first."""
        first = self._number(run)
        self.tensors.dtypes += run.dtypes
        self.tensors.shapes += run.shapes
        if callable(self._codec):
            codecs = [
                self._codec_number(None, DTYPES[name], (*parent, step))
                for name, step in zip(run.dtypes, steps, strict=True)
            ]
        else:
            known = {name: self._codec_number(None, DTYPES[name], ()) for name in set(run.dtypes)}
            codecs = list(map(known.__getitem__, run.dtypes))
        self.chunks.add_run(first, parent, steps, run, codecs)
        return first

    def _add(self, source: TensorSource, number: int, path: Sequence[Any]) -> None:
        if source.layout is not None:
            if self._is_beyond(source.layout[0]):
                raise ArgumentError(
                    f"{emit_name(path, encoded_key)}: the mesh has ranks beyond the "
                    f"{self._world_size} that write",
                    code="bad_argument",
                )
            self.tensors.layouts[number] = source.layout
        row, shape, chunks = source.row, source.shape, source.chunks
        self.tensors.dtypes.append(source.dtype)
        self.tensors.shapes.append(shape)
        empty = 0 in shape
        if len(chunks) > 1:
            chunks = sorted(chunks, key=lambda chunk: chunk[0].offset)
        for box, data in chunks:
            if 0 in box.shape and not (empty and box.shape == shape):
                continue
            codec = RAW if empty else self._codec_number(source.codec, row, path)
            self.chunks.add(number, path, row, shape, box, codec, data)

    def _is_beyond(self, mesh: Mesh) -> bool:
        """Whether a mesh has ranks that do not write; each object is looked at once."""
        if id(mesh) not in self._meshes:
            beyond = any(not 0 <= rank < self._world_size for rank in mesh.ranks)
            self._meshes[id(mesh)] = mesh, beyond
        return self._meshes[id(mesh)][1]

    def _codec_number(self, choice: Any, row: Dtype, path: Sequence[Any]) -> int:
        """Return the number of a source's codec, or of the writer's choice if that is None."""
        if choice is None:
            codec = self._codec
            choice = codec(emit_name(path, encoded_key)) if callable(codec) else codec
        known = self._codecs.get((choice, row.name)) if type(choice) is str else None
        if known is None:
            known = self._codecs[choice, row.name] = self._checked_codec(choice, row)
        return known

    def _checked_codec(self, choice: Any, row: Dtype) -> int:
        if not isinstance(choice, str) or choice not in _CODEC_NUMBERS:
            raise ArgumentError(
                f"{shorten(choice)} is not a codec",
                code="bad_argument",
                hint="choose one of " + ", ".join(_CODEC_NUMBERS),
            )
        number = _CODEC_NUMBERS[choice]
        # One plane of a one-byte dtype is the block itself.
        return ZSTD if number == PLANES and row.itemsize == 1 else number
