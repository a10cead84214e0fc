"""Compare what ranks are about to save: values and counters, and who has which tensors.

Ranks that have the same tell each other 32 bytes. Where some have what others do not, as pipeline
stages, they tell each other names, and what two of them have must still be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dsdformat.errors import RankDisagreementError
from dsdformat.format.digests import digest
from dsdformat.format.packing import emit
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encode, encoded_key
from dsdformat.torch.buffers import bytes_of, digest_of
from dsdformat.torch.comm import Comm
from dsdformat.torch.introspect import is_array
from dsdformat.torch.sharding import held_view, is_spread, is_tensor, local_of, sharding_of
from dsdformat.torch.sources import Adapter
from dsdformat.torch.stored import leaves

__all__ = ["Holders", "check_replicas", "find_holders"]

Path = tuple[Any, ...]
_SHOWN = 80  # characters of a value in a message


class Holders:
    """Which ranks of the group have something, by its name.

    Attributes:
        world_size: Of the group.
    """

    def __init__(self, world_size: int, table: Mapping[str, Sequence[int]] | None) -> None:
        """Begin; every rank has everything if there is no table."""
        self.world_size = world_size
        self._table = table

    @property
    def is_uniform(self) -> bool:
        """Whether every rank has everything."""
        return self._table is None

    def are_all(self, name: str) -> bool:
        """Whether every rank has an entry."""
        return len(self.of(name)) == self.world_size

    def of(self, name: str) -> Sequence[int]:
        """Return the ranks that have an entry."""
        return range(self.world_size) if self._table is None else self._table.get(name, ())


def find_holders(comm: Comm, plain: Mapping[str, Any], own: Sequence[Path]) -> Holders:
    """Compare values and counters of all ranks, and find who has what.

    Args:
        comm: The ranks that save together.
        plain: A captured state.
        own: Where each rank has something of its own.

    Raises:
        RankDisagreementError: `ranks_disagree`, on every rank, with a name and two values.
        DistributedError: `rank_failed`: a value that cannot be stored.

    Ranks: collective over the group.
    """
    rows: dict[str, list[Any]] = {}
    with comm.together("save"):
        rows = {
            emit_name(path, encoded_key): _row(leaf, path, own)
            for path, leaf in leaves(plain)
            if not is_spread(leaf)
        }
    sums = comm.gather_values(digest(emit(encode(list(rows.items())))))
    if all(one == sums[0] for one in sums):
        return Holders(comm.world_size, None)
    firsts = [sums.index(one) for one in sums]  # one of those that have the same tells it
    told = comm.gather_values(rows if firsts[comm.rank] == comm.rank else None)
    table: dict[str, list[int]] = {}
    known: dict[str, tuple[int, list[Any]]] = {}
    for rank, first_alike in enumerate(firsts):
        for name, row in told[first_alike].items():
            table.setdefault(name, []).append(rank)
            first, wanted = known.setdefault(name, (rank, row))
            if row[0] != wanted[0]:
                raise _differs(comm, name, (first, wanted[1]), (rank, row[1]))
    return Holders(comm.world_size, table)


def _row(leaf: Any, path: Path, own: Sequence[Path]) -> list[Any]:
    """Return what must be equal on ranks, and how it is shown to people."""
    if any(path[: len(place)] == place for place in own):
        return [b"", ""]
    if is_tensor(leaf):
        form = [str(leaf.dtype), list(leaf.shape)]
        counts = leaf.numel() == 1 and leaf.layout == torch.strided
        raw = bytes(bytes_of(leaf.detach().cpu().contiguous())) if counts else b""
        shown = f"{form[0]} {form[1]}" + (f" of {leaf.item()}" if raw else "")
        return [emit(encode([*form, raw])), shown]
    if is_array(leaf):
        return [emit(encode([str(leaf.dtype), list(leaf.shape)])), f"{leaf.dtype} {leaf.shape}"]
    raw = emit(encode({"value": leaf}, leaf=Adapter()))
    return [raw if len(raw) <= 64 else digest(raw), repr(leaf)[:_SHOWN]]


def _differs(
    comm: Comm, name: str, one: tuple[int, str], other: tuple[int, str]
) -> RankDisagreementError:
    (a, here), (b, there) = one, other
    return RankDisagreementError(
        f"{name} differs between ranks: {here} on rank {comm.ranks[a]}, {there} on rank "
        f"{comm.ranks[b]}",
        code="ranks_disagree",
        failures={},
        hint="mark what each rank has for itself with PerRank(...)",
    )


def check_replicas(comm: Comm, tensors: Iterable[tuple[str, Any]]) -> None:
    """Check that boxes which several ranks hold have the same bytes on all of them.

    Args:
        comm: The ranks that save together.
        tensors: Names and tensors of this rank, each once.

    Raises:
        RankDisagreementError: `ranks_disagree`, with the name and the ranks that differ from the
            first that holds it.

    Ranks: collective over the group.
    Memory: 32 bytes for each box.
    """
    with comm.together("save"):
        rows = {name: digest_of(view) for name, view in _boxes(comm, tensors)}
    first: dict[str, tuple[int, bytes]] = {}
    wrong: dict[str, list[int]] = {}
    for rank, others in enumerate(comm.gather_values(rows)):
        for name, one in others.items():
            if first.setdefault(name, (rank, one))[1] != one:
                wrong.setdefault(name, []).append(comm.ranks[rank])
    if wrong:
        name, ranks = next(iter(wrong.items()))
        raise RankDisagreementError(
            f"{name} has other bytes on ranks {ranks} than on rank {comm.ranks[first[name][0]]}"
            + (f"; so have {len(wrong) - 1} more" if len(wrong) > 1 else ""),
            code="ranks_disagree",
            failures={},
            hint="replicas must be equal to be stored once",
        )


def _boxes(comm: Comm, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        if not is_spread(tensor):
            yield name, tensor
            continue
        sharding, rank = sharding_of(tensor), comm.ranks[comm.rank]
        if rank in sharding.ranks:
            for held in sharding.held(sharding.ranks.index(rank)):
                yield f"{name}{held.outer}", held_view(held, held.outer, local_of(tensor))
