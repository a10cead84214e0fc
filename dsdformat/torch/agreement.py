"""Compare what ranks are about to save, and find out who has which tensors.

Compared are values, counters, and a few elements of each tensor that is not spread over ranks.
Ranks that have the same tell each other 32 bytes. Where some have what others do not, as pipeline
stages, they tell each other names, and what two of them have must still be equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dsdformat.errors import RankDisagreementError, listed
from dsdformat.format.digests import digest
from dsdformat.format.packing import emit
from dsdformat.format.values import encode
from dsdformat.torch.buffers import bytes_of, digest_of
from dsdformat.torch.comm import Comm
from dsdformat.torch.composites import find_kind
from dsdformat.torch.introspect import is_array
from dsdformat.torch.sampling import sample_digest_of_array, sample_digests
from dsdformat.torch.sharding import held_view, is_spread, is_tensor, local_of, sharding_of
from dsdformat.torch.sources import Adapter
from dsdformat.torch.stored import NamedLeaf

__all__ = ["Holders", "Rows", "check_replicas", "find_holders"]

Path = tuple[Any, ...]
_SHOWN = 80  # characters of a value in a message
_SAMPLED = "with elements that have the digest"


class Holders:
    """Which ranks of the group have something, by its name.

    Attributes:
        world_size: Of the group.
    """

    def __init__(
        self,
        world_size: int,
        table: Mapping[str, Sequence[int]] | None,
        firsts: Collection[str] = (),
    ) -> None:
        """Begin.

        Args:
            world_size: Of the group.
            table: Who has what; every rank has everything if there is none.
            firsts: What the first rank that has it writes, since others may have something else.
        """
        self.world_size = world_size
        self._table = table
        self._firsts = firsts

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

    def writers(self, name: str) -> Sequence[int]:
        """Return the ranks of which one may write an entry."""
        return self.of(name)[:1] if name in self._firsts else self.of(name)


def find_holders(
    comm: Comm,
    leaves: Sequence[NamedLeaf],
    own: Sequence[Path],
    buffers: Collection[Path] = (),
    *,
    sample: bool = True,
) -> Holders:
    """Compare values and counters of all ranks, and find who has what.

    Args:
        comm: The ranks that save together.
        leaves: Of a captured state.
        own: Where each rank has something of its own.
        buffers: Where buffers of modules are. Ranks may have others, as those of batch norms are
            under DDP, which takes what rank 0 has.
        sample: Whether to compare a few elements of all other tensors that are not spread.

    Raises:
        RankDisagreementError: `ranks_disagree`, on every rank, with a name and two values.
        DistributedError: `rank_failed`: a value that cannot be stored.

    Ranks: collective over the group.
    """
    with comm.together("save") as step:
        rows = Rows(leaves, own, buffers, sample=sample)
        step.told = rows.sum
    return rows.holders(comm, step.heard)


class Rows:
    """What of a captured state must be equal on all ranks that have it.

    Attributes:
        sum: Equal where all of it is.
    """

    def __init__(
        self,
        leaves: Sequence[NamedLeaf],
        own: Sequence[Path],
        buffers: Collection[Path],
        *,
        sample: bool,
    ) -> None:
        """Look at a state; arguments as of `find_holders`.

        Ranks: local.
        """
        known = set(buffers)
        self._firsts = {one.name for one in leaves if one.path in known}
        self._leaves = [one for one in leaves if not is_spread(one.leaf)]
        self._own = {one.name for one in self._leaves if _is_own(one.path, own)}
        self._samples: dict[str, bytes] = {}
        if sample:
            self._take_samples()
        self._raw = {one.name: self._raw_of(one) for one in self._leaves}
        self.sum = digest(emit([[name, raw] for name, raw in self._raw.items()]))

    def _take_samples(self) -> None:
        tensors = []
        for one in self._leaves:
            if one.name in self._own or one.name in self._firsts:
                continue
            if _has_elements(one.leaf):
                tensors.append(one)
            elif is_array(one.leaf) and not one.leaf.dtype.hasobject:
                self._samples[one.name] = sample_digest_of_array(one.leaf)
        sums = sample_digests([one.leaf for one in tensors])
        self._samples.update(zip((one.name for one in tensors), sums, strict=True))

    def _raw_of(self, one: NamedLeaf) -> bytes:
        """Return what is equal on ranks that have the same."""
        leaf = one.leaf
        if one.name in self._own:
            return b""
        if is_tensor(leaf) or is_array(leaf):
            raw = self._samples.get(one.name, b"")
            if self._counts(one):
                raw = bytes(bytes_of(leaf.detach().cpu().contiguous()))
            return emit([str(leaf.dtype), list(leaf.shape), raw])
        raw = emit(encode({"value": leaf}, leaf=Adapter()))
        return raw if len(raw) <= 64 else digest(raw)

    def _counts(self, one: NamedLeaf) -> bool:
        """Whether it is a tensor of one number, which is compared as it is."""
        leaf = one.leaf
        if one.name in self._firsts or not is_tensor(leaf):
            return False
        return bool(leaf.numel() == 1 and leaf.layout == torch.strided)

    def _text_of(self, one: NamedLeaf) -> str:
        """Return how it is shown to people."""
        leaf = one.leaf
        if one.name in self._own:
            return ""
        if not (is_tensor(leaf) or is_array(leaf)):
            return repr(leaf)[:_SHOWN]
        form = f"{leaf.dtype} {list(leaf.shape)}"
        if self._counts(one):
            return f"{form} of {leaf.item()}"
        sample = self._samples.get(one.name)
        return f"{form} {_SAMPLED} {sample.hex()[:8]}…" if sample else form

    def holders(self, comm: Comm, sums: Sequence[bytes]) -> Holders:
        """Find who has what.

        Args:
            comm: The ranks that save together.
            sums: Of all of them.

        Raises:
            RankDisagreementError: as `find_holders`.

        Ranks: collective over the group, if they have different things.
        """
        if all(one == sums[0] for one in sums):
            return Holders(comm.world_size, None, self._firsts)
        alike = [sums.index(one) for one in sums]  # one of those that have the same tells it
        with comm.together("save") as step:
            if alike[comm.rank] == comm.rank:
                step.told = {
                    one.name: [self._raw[one.name], self._text_of(one)] for one in self._leaves
                }
        told = step.heard
        table: dict[str, list[int]] = {}
        known: dict[str, tuple[int, list[Any]]] = {}
        wrong: dict[str, tuple[int, list[Any]]] = {}
        for rank, first_alike in enumerate(alike):
            for name, row in told[first_alike].items():
                table.setdefault(name, []).append(rank)
                if known.setdefault(name, (rank, row))[1][0] != row[0]:
                    wrong.setdefault(name, (rank, row))
        if wrong:
            raise _differs(comm, wrong, known)
        return Holders(comm.world_size, table, self._firsts)


def _is_own(path: Path, own: Sequence[Path]) -> bool:
    return any(path[: len(place)] == place for place in own)


def _has_elements(leaf: Any) -> bool:
    return (
        is_tensor(leaf)
        and leaf.layout == torch.strided
        and find_kind(leaf) is None
        and leaf.numel() > 1
    )


def _differs(
    comm: Comm,
    wrong: Mapping[str, tuple[int, list[Any]]],
    known: Mapping[str, tuple[int, list[Any]]],
) -> RankDisagreementError:
    name, *others = wrong
    (a, (_, here)), (b, (_, there)) = known[name], wrong[name]
    more = f"; the same is true of {listed(others)}" if others else ""
    hint = "mark what each rank has for itself with PerRank(...)"
    if _SAMPLED in here and _SAMPLED in there:
        hint += ", or give it another name on each; check_replicas=False stores that of one rank"
    return RankDisagreementError(
        f"{name} differs between ranks: {here} on rank {comm.ranks[a]}, {there} on rank "
        f"{comm.ranks[b]}{more}",
        code="ranks_disagree",
        failures={},
        hint=hint,
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
