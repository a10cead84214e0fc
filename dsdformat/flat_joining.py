"""Join the flat shards of several ranks into parameters by name, whatever the tensors are.

Each rank has, for every sharded parameter, one dim with padding at its end, and metadata that says
which parameters that is. Where fairscale's own decoder goes wrong, this one reads what is meant:
tied parameters of every wrapper, with the wrapper's path; ties between parameters of different
names, which are written the wrong way round; parameters that are not flat, on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from dsdformat.errors import ArgumentError, MismatchError, listed, shorten
from dsdformat.flat_layout import FlatLayout
from dsdformat.flat_metadata import Instance, Metadata, Part, clean_path, parse_metadata

__all__ = ["Pieces", "differ", "join_shards"]

Weights = Mapping[str, Any]


class Pieces(Protocol):
    """What joining needs to know of tensors."""

    def flat(self, value: Any, key: str, rank: int) -> Any:
        """Return a tensor of a rank's weights with one dim; raise if it is no plain one."""

    def numel(self, piece: Any) -> int:
        """Return how many elements a flat tensor has."""

    def dtype(self, piece: Any) -> str:
        """Return its dtype."""

    def head(self, piece: Any, numel: int) -> Any:
        """Return the first elements of a flat tensor."""

    def cut(self, pieces: Sequence[Any], layout: FlatLayout) -> list[Any]:
        """Return the parameters in flat tensors that lie one behind the other."""

    def whole(self, value: Any, key: str, rank: int) -> Any:
        """Return a tensor as it is; raise if it is no plain one."""

    def memory(self, value: Any) -> Any:
        """Return something that is equal for tensors that are the same memory; None for others."""


def join_shards(
    shard_weights: Sequence[Mapping[str, Any]],
    shard_metadata: Sequence[Mapping[str, Any]],
    pieces: Pieces,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Return the state dict of the model that ranks have sharded; see `torch.consolidate`.

    Raises:
        ArgumentError: `bad_argument`: the metadata is not of this form.
        MismatchError: `state_mismatch`: the weights are not what the metadata says, or the ranks
            say different things.
    """
    for what, value in (("shard_weights", shard_weights), ("shard_metadata", shard_metadata)):
        if not isinstance(value, (list, tuple)) or not value:
            _bad(f"{what} is a list with something for each rank, got {shorten(value)}")
    if len(shard_weights) != len(shard_metadata):
        _bad(f"weights of {len(shard_weights)} ranks, and metadata of {len(shard_metadata)}")
    weights = [_weights(one, rank) for rank, one in enumerate(shard_weights)]
    metadata = [parse_metadata(one, f"rank {rank}") for rank, one in enumerate(shard_metadata)]
    return _Joining(weights, metadata, pieces, strict).run()


class _Joining:
    def __init__(
        self,
        weights: Sequence[Weights],
        metadata: Sequence[Metadata],
        pieces: Pieces,
        strict: bool,
    ) -> None:
        self.weights = weights
        self.metadata = metadata
        self.pieces = pieces
        self.strict = strict
        self.result: dict[str, Any] = {}
        self.declared: set[str] = set()  # names of parameters, in the weights or not
        self.used: set[str] = set()  # keys of the weights
        self.whole: dict[str, str] = {}  # keys of parameters that are not flat, and their names
        self.missing: list[str] = []

    def run(self) -> dict[str, Any]:
        first = self.metadata[0]
        for rank, other in enumerate(self.metadata[1:], 1):
            _check_same(first, other, rank)
        for index, instance in enumerate(first.instances):
            for number, part in enumerate(instance.parts):
                self._add_part(instance, part, (index, number))
        for instance in first.instances:
            for pair in instance.shared:
                self._tie(instance, pair)
        for name in first.buffers:
            self._add_buffer(name)
        self._add_rest()
        if self.missing and self.strict:
            differ(f"the weights lack {listed(self.missing)}", "strict=False leaves them out")
        return self.result

    def _add_part(self, instance: Instance, part: Part, place: tuple[int, int]) -> None:
        names = [instance.full(name) for name in part.layout.names]
        for name in names:
            if name in self.declared:
                differ(f"the metadata has {shorten(name)} twice")
            self.declared.add(name)
        ranks = range(1 if instance.is_alone else len(self.weights))
        key = next((key for key in part.keys if key in self.weights[0]), part.keys[0])
        lacking = [rank for rank in ranks if key not in self.weights[rank]]
        if len(lacking) == len(ranks):
            self.missing.append(key)
            return
        if lacking:
            differ(f"{shorten(key)} is not in the weights of rank {lacking[0]}, but of others")
        self.used.add(key)
        shards = [self._shard(rank, key, place) for rank in ranks]
        kinds = {self.pieces.dtype(shard) for shard in shards}
        if len(kinds) > 1:
            differ(f"{shorten(key)} has different dtypes on the ranks: {sorted(kinds)}")
        numel = sum(map(self.pieces.numel, shards))
        if numel != part.layout.numel:
            differ(
                f"{shorten(key)} has {numel} elements on {len(ranks)} "
                f"{'rank' if len(ranks) == 1 else 'ranks'}, and its "
                f"{len(names)} parameters, {listed(names)}, have {part.layout.numel}"
            )
        self.result.update(zip(names, self.pieces.cut(shards, part.layout), strict=True))
        if names == [key]:
            self.whole[key] = key

    def _shard(self, rank: int, key: str, place: tuple[int, int]) -> Any:
        """Return what a rank has of a parameter, flat and without padding."""
        padding = self.metadata[rank].instances[place[0]].parts[place[1]].padding
        flat = self.pieces.flat(self.weights[rank][key], key, rank)
        numel = self.pieces.numel(flat)
        if padding > numel:
            differ(f"{shorten(key)} of rank {rank}: {padding} of {numel} are padding")
        return self.pieces.head(flat, numel - padding)

    def _tie(self, instance: Instance, pair: tuple[str, str]) -> None:
        source, target = (instance.full(name) for name in pair)
        # fairscale joins the path of each with the name of the other.
        parts = source.rpartition("."), target.rpartition(".")
        swapped = (
            f"{parts[0][0]}{parts[0][1]}{parts[1][2]}",
            f"{parts[1][0]}{parts[1][1]}{parts[0][2]}",
        )
        for one, other in (swapped, (source, target)):
            if one in self.declared and other not in self.declared:
                self.declared.add(other)
                if one in self.result:
                    self.result[other] = self.result[one]
                self.used.add(other)
                return
        differ(
            f"the metadata ties {shorten(target)} to {shorten(source)}; it should have the latter "
            "and not the former"
        )

    def _add_buffer(self, name: str) -> None:
        if name in self.declared:
            differ(f"the metadata has {shorten(name)} as a parameter and as a buffer")
        if name in self.weights[0]:
            self.result[name] = self.pieces.whole(self.weights[0][name], name, 0)
            self.used.add(name)
            return
        having = [rank for rank, one in enumerate(self.weights) if name in one]
        if having:
            differ(f"{shorten(name)} is not in the weights of rank 0, but of rank {having[0]}")

    def _add_rest(self) -> None:
        """Find ties among parameters that are not flat, of which the metadata says nothing."""
        places = {
            self.pieces.memory(self.weights[0][key]): name for key, name in self.whole.items()
        }
        unexpected = []
        for key, value in self.weights[0].items():
            if key in self.used or key in self.result:
                continue
            memory = self.pieces.memory(value)
            name = None if memory is None else places.get(memory)
            if name is not None:
                self.result[key] = self.result[name]
            else:
                unexpected.append(key)
        if unexpected and self.strict:
            differ(
                f"the metadata says nothing of {listed(unexpected)}", "strict=False leaves it out"
            )


def _check_same(first: Metadata, other: Metadata, rank: int) -> None:
    """Check that two ranks describe the same model; only paddings may differ."""
    if len(first.instances) != len(other.instances):
        differ(
            f"rank {rank} has {len(other.instances)} FSDP instances, rank 0 {len(first.instances)}"
        )
    for one, two in zip(first.instances, other.instances, strict=True):
        if (one.path, one.is_alone) != (two.path, two.is_alone):
            differ(f"rank {rank} has an instance at {two.path!r} where rank 0 has {one.path!r}")
        if one.is_alone:
            continue
        for a, b in zip(_contents(one), _contents(two), strict=False):
            if a != b:
                differ(f"rank {rank} has {shorten(b)} at {two.path!r}, rank 0 {shorten(a)}")
        if len(one.parts) != len(two.parts):
            differ(f"rank {rank} has {len(two.parts)} parameters at {two.path!r}, rank 0 others")


def _contents(instance: Instance) -> Iterator[Any]:
    for part in instance.parts:
        yield part.keys, part.layout.names, part.layout.shapes
    yield instance.shared


def _weights(value: Any, rank: int) -> Weights:
    if not isinstance(value, Mapping):
        _bad(f"the weights of rank {rank} are no mapping: {shorten(value)}")
    result: dict[str, Any] = {}
    for key, one in value.items():
        if type(key) is not str:
            _bad(f"the weights of rank {rank} have {shorten(key)}, which is no name")
        name = clean_path(key)
        if name in result:
            differ(f"the weights of rank {rank} have {shorten(name)} twice")
        result[name] = one
    return result


def differ(message: str, hint: str | None = None) -> NoReturn:
    """Refuse weights that are not what the metadata says."""
    raise MismatchError(message, code="state_mismatch", hint=hint)


def _bad(message: str) -> NoReturn:
    raise ArgumentError(message, code="bad_argument")
