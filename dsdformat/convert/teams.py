"""Several processes that make one checkpoint: what they tell each other, and what they write to.

All of them plan the same files. One of them, the coordinator, begins the files, in a folder that
all see; each then writes its share of the bytes by position; the coordinator makes the result
visible. A process alone is a team of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from dsdformat.convert.meters import Meter
from dsdformat.datafiles import end_file, write_chunks
from dsdformat.file_plans import FilePlan, share_of
from dsdformat.storage.base import Sink, Target, completed
from dsdformat.storage.target import FileTarget, JoinedTarget, LocalTarget
from dsdformat.workers import Workers

__all__ = ["ALONE", "DOING", "Team", "TeamTarget"]

DOING = "convert"


class Team(Protocol):
    """The processes; `dsdformat.torch.comm.Comm` is one."""

    rank: int
    world_size: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0."""

    def gather_values(self, value: Any) -> list[Any]:
        """Return what each rank passed. Ranks: collective."""

    def tell(self, value: Any) -> Any:
        """Return what rank 0 passed. Ranks: collective."""

    def check_agreement(self, value: Any, what: str) -> None:
        """Raise on all if ranks passed different values. Ranks: collective."""

    def together(self, doing: str) -> AbstractContextManager[object]:
        """Take a step; if it fails on some ranks, all raise. Ranks: collective."""


class _Alone:
    """A team of this process."""

    rank = 0
    world_size = 1
    is_coordinator = True

    def gather_values(self, value: Any) -> list[Any]:
        return [value]

    def tell(self, value: Any) -> Any:
        return value

    def check_agreement(self, value: Any, what: str) -> None:
        pass

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:  # noqa: ARG002
        yield


ALONE: Team = _Alone()


class TeamTarget(AbstractContextManager["TeamTarget"]):
    """What a team makes; a context manager that removes what was written if that fails.

    Attributes:
        own: The target, on the coordinator; None on the others.
        joined: Its unfinished folder, on all.
    """

    def __init__(self, team: Team, make: Callable[[], FileTarget | LocalTarget]) -> None:
        """Begin.

        Args:
            team: The processes.
            make: Makes the target; called by the coordinator.

        Ranks: collective.
        """
        self._team = team
        self.own: FileTarget | LocalTarget | None = None
        try:
            with self.together():
                if team.is_coordinator:
                    self.own = make()
            staging = team.tell(str(self.own.staging) if self.own else "")
            with self.together():
                self.joined = JoinedTarget(Path(staging))
        except BaseException:
            self.abort()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    def abort(self) -> None:
        """Remove what was written; do nothing once it is visible."""
        if self.own is not None:
            self.own.abort()

    def together(self) -> AbstractContextManager[object]:
        """Take a step; if it fails on some ranks, all raise.

        Ranks: collective; what is done within is not.
        """
        return self._team.together(DOING)

    @contextmanager
    def files(self, labels: Sequence[str]) -> Iterator[list[Sink]]:
        """Begin files, and let this rank write its share; then they are durable.

        Ranks: collective; what is done within is not. If it fails on some, all raise.
        """
        self.begin(labels)
        sinks: list[Sink] = []
        with self.together():
            try:
                for label in labels:
                    sinks.append(self.joined.join(label))
                yield sinks
                while sinks:
                    sinks.pop().close()
            finally:
                for sink in sinks:
                    sink.discard()

    def write_files(
        self,
        plans: Sequence[FilePlan],
        _target: Target,
        block_nbytes: int,
        workers: Workers,
        *,
        meter: Meter,
    ) -> None:
        """Write this rank's share of the data files of a checkpoint of ours; see `FileWriter`.

        Ranks: collective. All know then where each chunk lies.
        Memory: as `datafiles.write_files`, and the digests of all blocks.
        """
        shares = share_of(plans, self._team.rank, self._team.world_size)
        meter.total = sum(
            sum(map(plan.lengths.__getitem__, share))
            for plan, share in zip(plans, shares, strict=True)
        )
        rows = [[plan.label, plan.keys, plan.codecs] for plan in plans]
        self._team.check_agreement(rows, "what is written")
        self.begin([plan.label for plan in plans])
        with self.together():
            for plan, share in zip(plans, shares, strict=True):
                if share:
                    with self.opened(plan.label) as sink:
                        write_chunks(plan, share, sink, block_nbytes, workers)
        self._exchange(plans, shares)
        with self.together():
            for plan in plans:
                if self.own is None:
                    end_file(plan, None)
                    continue
                with self.opened(plan.label) as sink:
                    end_file(plan, sink)

    def commit(self) -> None:
        """Make the result visible, in one step.

        Ranks: collective.
        """
        with self.together():
            if self.own is not None:
                self.own.commit()

    def begin(self, labels: Sequence[str]) -> None:
        """Make files that are empty, for all ranks to open.

        Ranks: collective.
        """
        with self.together():
            if self.own is not None:
                for label in labels:
                    self.own.create(label).discard()

    def opened(self, label: str) -> AbstractContextManager[Sink]:
        """Open a file that was begun; it is durable at the end.

        Ranks: local.
        """
        return completed(self.joined.join(label))

    def _exchange(self, plans: Sequence[FilePlan], shares: Sequence[Sequence[int]]) -> None:
        """Tell the others what became of this rank's chunks, and fill in those of others."""
        own = [
            [[place, *_outcome(plan, place)] for place in share]
            for plan, share in zip(plans, shares, strict=True)
        ]
        for rows in self._team.gather_values(own):
            for plan, some in zip(plans, rows, strict=True):
                for place, *outcome in some:
                    _fill(plan, place, outcome)


def _outcome(plan: FilePlan, place: int) -> list[Any]:
    """Return what only the process knows that has written a chunk."""
    sums = [bytes(plan.digests[place]), plan.frame_digests[place]]
    return [plan.byte_offset[place], plan.stored_nbytes[place], *sums, list(plan.frames[place])]


def _fill(plan: FilePlan, place: int, outcome: list[Any]) -> None:
    plan.byte_offset[place], plan.stored_nbytes[place] = outcome[:2]
    plan.digests[place], plan.frame_digests[place], plan.frames[place] = outcome[2:]
