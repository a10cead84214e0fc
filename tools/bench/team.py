"""The processes that make one call together: this one alone, or the ranks of a process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.memory import Usage
from bench.rows import Row

__all__ = ["Team", "Timing", "team_of"]

MIB = 1 << 20

Timing = tuple[float, float, float]  # began, returned, durable


class Team:
    """This process alone.

    Attributes:
        is_first: Whether this process does what is done once for all.
    """

    is_first = True

    def wait(self) -> None:
        """Wait until all are here."""

    def row(self, row: Row, timing: Timing, usage: Usage) -> Row:
        """Return a row with the figures of all."""
        return with_figures(row, [(timing, usage)])


class RankTeam(Team):
    """The ranks of the default process group."""

    def __init__(self, ranks: int) -> None:
        from torch import distributed

        if distributed.get_world_size() != ranks:
            raise ValueError(f"{ranks} ranks make this call, and not those that are here")
        self.is_first = distributed.get_rank() == 0

    def wait(self) -> None:
        """Wait until all are here."""
        from torch import distributed

        distributed.barrier()

    def row(self, row: Row, timing: Timing, usage: Usage) -> Row:
        """Return a row with the figures of all; equal on all ranks."""
        from torch import distributed

        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, (timing, usage))
        first, *rest = (one for _, one in found)
        columns = {
            "rank 0 MiB": first.peak_nbytes / MIB,
            "others MiB": max(one.peak_nbytes for one in rest) / MIB,
            "read / data": (first.read_nbytes + sum(one.read_nbytes for one in rest)) / row.nbytes,
        }
        return replace(with_figures(row, found), columns={**row.columns, **columns})


def team_of(ranks: int) -> Team:
    """Return the team of so many processes, of which this is one."""
    return Team() if ranks == 1 else RankTeam(ranks)


def with_figures(row: Row, found: Sequence[tuple[Timing, Usage]]) -> Row:
    """Take the time from the first one's begin to the last one's end, and the highest peaks.

    The clocks of all processes are one.
    """
    timings, usages = zip(*found, strict=True)
    began = min(one[0] for one in timings)
    returned, durable = (max(one[at] for one in timings) for at in (1, 2))
    span = (durable - began) * (os.cpu_count() or 1)
    rest = sum(one.cpu_s for one in usages[1:])
    return replace(
        row,
        call_s=returned - began,
        total_s=durable - began,
        peak_nbytes=max(one.peak_nbytes for one in usages),
        anon_nbytes=max(one.anon_nbytes for one in usages),
        file_nbytes=max(one.file_nbytes for one in usages),
        cpu_s=usages[0].cpu_s + rest,
        other=max(0.0, usages[0].other - rest / max(span, 1e-9)),
    )
