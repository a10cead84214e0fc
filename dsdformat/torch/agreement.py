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
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encode, encoded_key
from dsdformat.torch.buffers import bytes_of, digest_of
from dsdformat.torch.comm import Comm
from dsdformat.torch.composites import find_kind
from dsdformat.torch.introspect import is_array
from dsdformat.torch.sampling import sample_digest_of_array, sample_digests
from dsdformat.torch.sharding import held_view, is_spread, is_tensor, local_of, sharding_of
from dsdformat.torch.sources import Adapter
from dsdformat.torch.stored import leaves

__all__ = ["Holders", "check_replicas", "find_holders"]

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
    plain: Mapping[str, Any],
    own: Sequence[Path],
    buffers: Collection[Path] = (),
    *,
    sample: bool = True,
) -> Holders:
    """Compare values and counters of all ranks, and find who has what.

    Args:
        comm: The ranks that save together.
        plain: A captured state.
        own: Where each rank has something of its own.
        buffers: Where buffers of modules are. Ranks may have others, as those of batch norms are
            under DDP, which takes what rank 0 has.
        sample: Whether to compare a few elements of all other tensors that are not spread.

    Raises:
        RankDisagreementError: `ranks_disagree`, on every rank, with a name and two values.
        DistributedError: `rank_failed`: a value that cannot be stored.

    Ranks: collective over the group.
    """
    rows: dict[str, list[Any]] = {}
    firsts = {emit_name(path, encoded_key) for path in buffers}
    with comm.together("save"):
        rows = _rows(plain, own, buffers, sample=sample)
    sums = comm.gather_values(digest(emit(encode(list(rows.items())))))
    if all(one == sums[0] for one in sums):
        return Holders(comm.world_size, None, firsts)
    alike = [sums.index(one) for one in sums]  # one of those that have the same tells it
    told = comm.gather_values(rows if alike[comm.rank] == comm.rank else None)
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
    return Holders(comm.world_size, table, firsts)


def _rows(
    plain: Mapping[str, Any], own: Sequence[Path], buffers: Collection[Path], *, sample: bool
) -> dict[str, list[Any]]:
    """Return by name what must be equal on ranks, and how it is shown to people."""
    found = [(path, leaf) for path, leaf in leaves(plain) if not is_spread(leaf)]
    known = set(buffers)
    taken = [
        (path, leaf)
        for path, leaf in found
        if sample and path not in known and not _is_own(path, own) and _has_elements(leaf)
    ]
    sums = sample_digests([leaf for _, leaf in taken])
    samples = {path: one for (path, _), one in zip(taken, sums, strict=True)}
    rows = {}
    for path, leaf in found:
        row: list[Any] = [b"", ""]
        if not _is_own(path, own):
            row = _row(leaf, samples.get(path, b""), is_buffer=path in known, sample_arrays=sample)
        rows[emit_name(path, encoded_key)] = row
    return rows


def _is_own(path: Path, own: Sequence[Path]) -> bool:
    return any(path[: len(place)] == place for place in own)


def _has_elements(leaf: Any) -> bool:
    return (
        is_tensor(leaf)
        and leaf.layout == torch.strided
        and find_kind(leaf) is None
        and leaf.numel() > 1
    )


def _row(leaf: Any, sample: bytes, *, is_buffer: bool, sample_arrays: bool) -> list[Any]:
    if is_tensor(leaf):
        form = [str(leaf.dtype), list(leaf.shape)]
        counts = not is_buffer and leaf.numel() == 1 and leaf.layout == torch.strided
        raw = bytes(bytes_of(leaf.detach().cpu().contiguous())) if counts else sample
        return [emit(encode([*form, raw])), _shown(leaf, raw, counts=counts)]
    if is_array(leaf):
        sampled = sample_arrays and not leaf.dtype.hasobject
        raw = sample_digest_of_array(leaf) if sampled else b""
        return [emit(encode([str(leaf.dtype), list(leaf.shape), raw])), _shown(leaf, raw)]
    raw = emit(encode({"value": leaf}, leaf=Adapter()))
    return [raw if len(raw) <= 64 else digest(raw), repr(leaf)[:_SHOWN]]


def _shown(leaf: Any, raw: bytes, *, counts: bool = False) -> str:
    form = f"{leaf.dtype} {list(leaf.shape)}"
    if counts:
        return f"{form} of {leaf.item()}"
    return f"{form} {_SAMPLED} {raw.hex()[:8]}…" if raw else form


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
