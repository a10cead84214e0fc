"""A state as a writer stores it: its tree, its tensors, and the chunks that are to be written.

Pure. What follows is what takes time where there are many small tensors, so little is done for
each of them: a name is rendered when somebody asks for it, and no box is checked twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dsdformat.datafiles import ChunkJob
from dsdformat.errors import ArgumentError, shorten
from dsdformat.format.codecs import CODECS, PLANES, RAW, ZSTD
from dsdformat.format.dtypes import Dtype
from dsdformat.format.manifest import Mesh
from dsdformat.format.paths import emit_name
from dsdformat.format.values import Encoded, Leaf, TensorRef, encode, encoded_key
from dsdformat.parts import TensorRecord
from dsdformat.sources import Reference, TensorSource, source_of

__all__ = ["Codec", "StatePlan", "plan_state"]

# A codec's name, or a function from a tensor's display name to one.
Codec = str | Callable[[str], str]

_TENSORS = (TensorSource, Reference)
_CODEC_NUMBERS = {name: number for number, name in CODECS.items()}


class StatePlan(NamedTuple):
    """What a writer stores.

    Attributes:
        tree: Encoded.
        tensors: In the order of the tree.
        jobs: Their chunks, in the order of tensors and offsets.
    """

    tree: Any
    tensors: list[TensorRecord]
    jobs: list[ChunkJob]


def plan_state(
    state: Mapping[str, Any], *, codec: Codec, world_size: int, adapt: Leaf | None = None
) -> StatePlan:
    """Encode a state, number its tensors, and list the chunks to write.

    Args:
        state: Nested values of the format, with a `TensorSource` or a `Reference` at each tensor.
        codec: For sources that name none.
        world_size: Number of writers.
        adapt: Turns anything else into one of these.

    Raises:
        UnsupportedValueError: something cannot be stored.
        ArgumentError: a codec, or a mesh, that is none.
    """
    planner = _Planner(codec, world_size, adapt)
    tree = encode(state, leaf=planner.leaf)
    return StatePlan(tree, planner.tensors, planner.jobs)


class _Planner:
    """Collects the tensors of a state while it is encoded."""

    def __init__(self, codec: Codec, world_size: int, adapt: Leaf | None) -> None:
        self.tensors: list[TensorRecord] = []
        self.jobs: list[ChunkJob] = []
        self._codec = codec
        self._world_size = world_size
        self._adapt = adapt
        self._numbers: dict[int, int] = {}
        self._sources: list[TensorSource] = []
        self._meshes: dict[int, tuple[Mesh, bool]] = {}
        self._codecs: dict[tuple[str, str], int] = {}  # those that were looked at

    def leaf(self, value: Any, path: Sequence[Any]) -> Any:
        """Return a reference to the tensor that a value is, or what `adapt` makes of it."""
        if not isinstance(value, _TENSORS):
            value = NotImplemented if self._adapt is None else self._adapt(value, path)
            if not isinstance(value, _TENSORS):
                return value
        source = value if type(value) is TensorSource else source_of(value)
        number = self._numbers.get(id(source))
        if number is None:
            number = self._numbers[id(source)] = len(self.tensors)
            self._sources.append(source)  # alive, so that no other source gets its id
            self._add(source, number, tuple(path))
        if not value.attributes:
            return Encoded(["tensor", number])  # as a reference without hints is encoded
        return TensorRef(number, tuple(value.attributes.items()))

    def _add(self, source: TensorSource, number: int, path: tuple[Any, ...]) -> None:
        if source.layout is not None and self._is_beyond(source.layout[0]):
            raise ArgumentError(
                f"{emit_name(path, encoded_key)}: the mesh has ranks beyond the "
                f"{self._world_size} that write",
                code="bad_argument",
            )
        self.tensors.append(TensorRecord(source.dtype, source.shape, source.layout))
        row, shape, chunks = source.row, source.shape, source.chunks
        empty = 0 in shape
        if len(chunks) > 1:
            chunks = sorted(chunks, key=lambda chunk: chunk[0].offset)
        for box, data in chunks:
            if 0 in box.shape and not (empty and box.shape == shape):
                continue
            codec = RAW if empty else self._codec_number(source, row, path)
            self.jobs.append(ChunkJob(number, path, row, shape, box, codec, data))

    def _is_beyond(self, mesh: Mesh) -> bool:
        """Whether a mesh has ranks that do not write; each object is looked at once."""
        if id(mesh) not in self._meshes:
            beyond = any(not 0 <= rank < self._world_size for rank in mesh.ranks)
            self._meshes[id(mesh)] = mesh, beyond
        return self._meshes[id(mesh)][1]

    def _codec_number(self, source: TensorSource, row: Dtype, path: tuple[Any, ...]) -> int:
        choice: Any = source.codec
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
