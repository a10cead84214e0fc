"""Which ranks of a mesh would read blocks for others, and how much: `share_blocks`.

Pure. Ranks choose readers for each set of ranks that want some of the same blocks, by the rules of
`read_shares`. Here that is done for all sets, with blocks told by file and length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsdformat.plan.block_tally import Partial
from dsdformat.plan.read_shares import is_even, share_out_counts

__all__ = ["BlockSet", "share_blocks"]


class BlockSet(NamedTuple):
    """Blocks of tensors that are stored, cut and placed alike.

    Attributes:
        partial: Those of one of them that several ranks want in part.
        tensors: How many tensors there are.
        ratio: Stored bytes over decoded ones.
    """

    partial: Mapping[Partial, int]
    tensors: int
    ratio: float


class _Some(NamedTuple):
    """Blocks of one file, as long, that the same ranks want in part."""

    file: int
    nbytes: int
    number: int
    ratio: float

    @property
    def read_nbytes(self) -> float:
        """Bytes that are read for all of them."""
        return self.nbytes * self.number * self.ratio


def share_blocks(
    blocks: Iterable[BlockSet], world_size: int, writers: Sequence[int] | None
) -> NDArray[np.int64] | None:
    """Choose readers of blocks that several ranks want in part.

    Args:
        blocks: Those of all tensors.
        world_size: Number of ranks.
        writers: The rank that wrote each data file, if as many ranks have written.

    Returns:
        How much more each rank reads than if each read all that it wants something of; less than
        nothing for most. None if no blocks are shared. Compressed blocks of one length count as
        alike.
    """
    groups: dict[tuple[int, ...], list[_Some]] = {}
    for partial, tensors, ratio in blocks:
        for (ranks, file, nbytes), count in partial.items():
            groups.setdefault(ranks, []).append(_Some(file, nbytes, count * tensors, ratio))
    changes = np.zeros(world_size)
    for ranks, some in groups.items():
        shares = _shares(some, ranks, writers)
        changes[list(ranks)] += shares - sum(one.read_nbytes for one in some)
    return np.rint(changes).astype(np.int64) if groups else None


def _shares(
    some: Sequence[_Some], ranks: Sequence[int], writers: Sequence[int] | None
) -> NDArray[np.float64]:
    """Return what each of some ranks reads for all of them."""
    read = np.zeros(len(ranks))
    if writers is not None:
        places = {rank: place for place, rank in enumerate(ranks)}
        known = [places[writers[one.file]] for one in some if writers[one.file] in places]
        sizes = [one.nbytes * one.number for one in some]
        if len(known) == len(some) and is_even(sizes, known, len(ranks)):
            np.add.at(read, known, [one.read_nbytes for one in some])
            return read
    counts: Counter[int] = Counter()
    costs: dict[int, float] = {}
    for one in some:
        counts[one.nbytes] += one.number
        costs[one.nbytes] = costs.get(one.nbytes, 0) + one.read_nbytes
    for nbytes, taken in share_out_counts(counts, len(ranks)).items():
        read += np.array(taken) * (costs[nbytes] / counts[nbytes])
    return read
