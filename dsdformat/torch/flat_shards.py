"""Join what fairscale's FSDP has sharded into the state dict of the plain model: `consolidate`.

Each rank has, for every sharded parameter, one dim with padding at its end, and metadata that says
which parameters that is. Where fairscale's own decoder goes wrong, this one reads what is meant:
tied parameters of every wrapper, with the wrapper's path; ties between parameters of different
names, which are written the wrong way round; parameters that are not flat, on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from dsdformat.errors import ArgumentError, MismatchError, listed, shorten
from dsdformat.torch.flat_layout import pack
from dsdformat.torch.flat_metadata import Instance, Metadata, Part, clean_path, parse_metadata

__all__ = ["consolidate"]

Weights = Mapping[str, Any]


def consolidate(
    shard_weights: Sequence[Mapping[str, Any]],
    shard_metadata: Sequence[Mapping[str, Any]],
    *,
    strict: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the state dict of a model that fairscale's FSDP has sharded.

    Args:
        shard_weights: What `local_state_dict()` gave on each rank, in the order of the ranks.
        shard_metadata: What `local_metadata_dict()` gave on each. Neither need be trusted.
        strict: Whether parameters that the metadata lists must be in the weights, and tensors in
            the weights must be in the metadata; if not, both are left out. What only some of the
            ranks have is an error in any case.

    Returns:
        Names and tensors: parameters, with tied ones as one tensor, and the buffers of rank 0.
        Buffers that no rank has were not persistent, and are left out. The parameters of an
        instance that is not shared by the ranks, as an expert, are those of rank 0.

    Raises:
        ArgumentError: `bad_argument`: the metadata is not of this form.
        MismatchError: `state_mismatch`: the weights are not what the metadata says, or the ranks
            say different things.

    Ranks: local.
    Memory: the result; tensors of one rank alone are views of its weights.
    """
    for what, value in (("shard_weights", shard_weights), ("shard_metadata", shard_metadata)):
        if not isinstance(value, (list, tuple)) or not value:
            _bad(f"{what} is a list with something for each rank, got {shorten(value)}")
    if len(shard_weights) != len(shard_metadata):
        _bad(f"weights of {len(shard_weights)} ranks, and metadata of {len(shard_metadata)}")
    weights = [_weights(one, rank) for rank, one in enumerate(shard_weights)]
    metadata = [parse_metadata(one, f"rank {rank}") for rank, one in enumerate(shard_metadata)]
    return _Consolidation(weights, metadata, strict).run()


class _Consolidation:
    def __init__(
        self, weights: Sequence[Weights], metadata: Sequence[Metadata], strict: bool
    ) -> None:
        self.weights = weights
        self.metadata = metadata
        self.strict = strict
        self.result: dict[str, torch.Tensor] = {}
        self.declared: set[str] = set()  # names of parameters, in the weights or not
        self.used: set[str] = set()  # keys of the weights
        self.whole: dict[str, str] = {}  # keys of parameters that are not flat, and their names
        self.missing: list[str] = []

    def run(self) -> dict[str, torch.Tensor]:
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
            _differ(f"the weights lack {listed(self.missing)}", "strict=False leaves them out")
        return self.result

    def _add_part(self, instance: Instance, part: Part, place: tuple[int, int]) -> None:
        names = [instance.full(name) for name in part.layout.names]
        for name in names:
            if name in self.declared:
                _differ(f"the metadata has {shorten(name)} twice")
            self.declared.add(name)
        ranks = range(1 if instance.is_alone else len(self.weights))
        key = next((key for key in part.keys if key in self.weights[0]), part.keys[0])
        lacking = [rank for rank in ranks if key not in self.weights[rank]]
        if len(lacking) == len(ranks):
            self.missing.append(key)
            return
        if lacking:
            _differ(f"{shorten(key)} is not in the weights of rank {lacking[0]}, but of others")
        self.used.add(key)
        shards = [self._shard(rank, key, place) for rank in ranks]
        kinds = {shard.dtype for shard in shards}
        if len(kinds) > 1:
            _differ(f"{shorten(key)} has different dtypes on the ranks: {sorted(map(str, kinds))}")
        numel = sum(shard.numel() for shard in shards)
        if numel != part.layout.numel:
            _differ(
                f"{shorten(key)} has {numel} elements on {len(ranks)} ranks, and its "
                f"{len(names)} parameters, {listed(names)}, have {part.layout.numel}"
            )
        flat = shards[0] if len(shards) == 1 else pack(shards)
        self.result.update(zip(names, part.layout.cut(flat), strict=True))
        if names == [key]:
            self.whole[key] = key

    def _shard(self, rank: int, key: str, place: tuple[int, int]) -> torch.Tensor:
        """Return what a rank has of a parameter, flat and without padding."""
        padding = self.metadata[rank].instances[place[0]].parts[place[1]].padding
        flat = _plain(self.weights[rank][key], key, rank).reshape(-1)
        if padding > flat.numel():
            _differ(f"{shorten(key)} of rank {rank}: {padding} of {flat.numel()} are padding")
        return flat[: flat.numel() - padding]

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
        _differ(
            f"the metadata ties {shorten(target)} to {shorten(source)}; it should have the latter "
            "and not the former"
        )

    def _add_buffer(self, name: str) -> None:
        if name in self.declared:
            _differ(f"the metadata has {shorten(name)} as a parameter and as a buffer")
        if name in self.weights[0]:
            self.result[name] = _plain(self.weights[0][name], name, 0)
            self.used.add(name)
            return
        having = [rank for rank, one in enumerate(self.weights) if name in one]
        if having:
            _differ(f"{shorten(name)} is not in the weights of rank 0, but of rank {having[0]}")

    def _add_rest(self) -> None:
        """Find ties among parameters that are not flat, of which the metadata says nothing."""
        places = {_memory(self.weights[0][key]): name for key, name in self.whole.items()}
        unexpected = []
        for key, value in self.weights[0].items():
            if key in self.used or key in self.result:
                continue
            name = places.get(_memory(value))
            if name is not None and _is_plain(value) and value.numel():
                self.result[key] = self.result[name]
            else:
                unexpected.append(key)
        if unexpected and self.strict:
            _differ(
                f"the metadata says nothing of {listed(unexpected)}", "strict=False leaves it out"
            )


def _check_same(first: Metadata, other: Metadata, rank: int) -> None:
    """Check that two ranks describe the same model; only paddings may differ."""
    if len(first.instances) != len(other.instances):
        _differ(
            f"rank {rank} has {len(other.instances)} FSDP instances, rank 0 {len(first.instances)}"
        )
    for one, two in zip(first.instances, other.instances, strict=True):
        if (one.path, one.is_alone) != (two.path, two.is_alone):
            _differ(f"rank {rank} has an instance at {two.path!r} where rank 0 has {one.path!r}")
        if one.is_alone:
            continue
        for a, b in zip(_contents(one), _contents(two), strict=False):
            if a != b:
                _differ(f"rank {rank} has {shorten(b)} at {two.path!r}, rank 0 {shorten(a)}")
        if len(one.parts) != len(two.parts):
            _differ(f"rank {rank} has {len(two.parts)} parameters at {two.path!r}, rank 0 others")


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
            _differ(f"the weights of rank {rank} have {shorten(name)} twice")
        result[name] = one
    return result


def _plain(value: Any, key: str, rank: int) -> torch.Tensor:
    if not _is_plain(value):
        _differ(f"{shorten(key)} of rank {rank} is no plain tensor, but a {type(value).__name__}")
    tensor: torch.Tensor = value.detach()
    return tensor


def _is_plain(value: Any) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return plain and not value.is_quantized


def _memory(value: Any) -> Any:
    """Return something that is equal for tensors that are the same memory."""
    if not _is_plain(value):
        return None
    return value.data_ptr(), value.dtype, str(value.device), tuple(value.shape), value.stride()


def _bad(message: str) -> NoReturn:
    raise ArgumentError(message, code="bad_argument")


def _differ(message: str, hint: str | None = None) -> NoReturn:
    raise MismatchError(message, code="state_mismatch", hint=hint)
