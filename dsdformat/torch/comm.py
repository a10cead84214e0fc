"""Collectives over the ranks of one group, without pickle; and none where there is no group.

Values travel in the format's own encoding, tensors as bytes: gloo refuses several dtypes, and
bytes are what is meant. Ranks that are no process group of the user's, as those of a mesh of
several axes in one pipeline stage, talk from one to another in the default group: to make a group
would need ranks that take no part.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from dsdformat.errors import DistributedError, RankDisagreementError, shorten
from dsdformat.format.decoding import decode_tree
from dsdformat.format.digests import digest
from dsdformat.format.packing import emit, parse
from dsdformat.format.values import encode
from dsdformat.torch.compat import group_timeout
from dsdformat.torch.contact import find_silent, finish, finish_messages, wait_until
from dsdformat.torch.failures import check_rows, error_row, lost_contact

__all__ = [
    "Comm",
    "Pending",
    "Step",
    "decoded",
    "fingerprint",
    "global_rank",
    "group_order",
    "is_distributed",
]

_SIZE_NBYTES = 8
_SHORT_NBYTES = 120  # what ranks mostly tell each other is shorter, and goes in one message
# Up to so many ranks of gloo tell each other directly: an all-gather goes around in a ring, which
# wakes each of them in turn, and takes more than twice as long.
_DIRECT_RANKS = 16


def is_distributed() -> bool:
    """Whether there is a default process group."""
    return distributed.is_available() and distributed.is_initialized()


def global_rank() -> int:
    """Return the rank of this process in the default group; 0 without one."""
    return distributed.get_rank() if is_distributed() else 0


def group_order(ranks: Sequence[int]) -> Any:
    """Order groups of ranks, so that ranks of several take their turns in one order."""
    return -len(ranks), sorted(ranks)


@dataclass(slots=True)
class Step:
    """A step that ranks take together.

    Attributes:
        told: What this rank tells the others of it: a value of the format.
        heard: What each rank has told, once the step is taken on all of them.
    """

    told: Any = None
    heard: list[Any] = field(default_factory=list)


class Comm:
    """One rank of a group.

    Attributes:
        rank: In the group.
        world_size: Number of ranks in the group.
        ranks: Their global ranks.
        group: The process group; None for the default one.
        device: Where tensors are that the group's backend moves.
    """

    def __init__(self, group: Any = None) -> None:
        """Use a process group, the default one if None, or no group where there is none."""
        self.group = group
        self.device = torch.device("cpu")
        self._looks_out = False  # whether it looks for marks of others while it waits
        self._within: Comm | None = None  # the group that loses contact if this one does
        if not is_distributed():
            self.rank, self.world_size = 0, 1
            self.ranks: tuple[int, ...] = (0,)
            return
        self.rank = distributed.get_rank(group)
        self.world_size = distributed.get_world_size(group)
        self.ranks = tuple(distributed.get_process_group_ranks(group or distributed.group.WORLD))
        backend = str(distributed.get_backend(group))
        self._looks_out = "gloo" in backend  # of other backends nobody knows how they wait
        if "nccl" in backend and not self._looks_out:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def alone(cls) -> Comm:
        """Return a group of this rank only."""
        return _Some((distributed.get_rank(),)) if is_distributed() else cls()

    @classmethod
    def of_ranks(
        cls, ranks: Iterable[int], groups: Iterable[Any] = (), within: Comm | None = None
    ) -> Comm:
        """Return a group of these global ranks, this one among them.

        Args:
            ranks: In any order.
            groups: Process groups that may be those of these ranks.
            within: The group whose other ranks wait meanwhile, and are told if contact is lost.

        Ranks: local; nothing is made.
        """
        wanted = sorted(set(ranks))
        if not is_distributed() or len(wanted) == distributed.get_world_size():
            return cls()
        for group in groups:
            if sorted(distributed.get_process_group_ranks(group)) == wanted:
                return cls(group)
        return _Some(tuple(wanted), within)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0 of the group."""
        return self.rank == 0

    def gather_values(self, value: Any) -> list[Any]:
        """Return what each rank passed; values of the format.

        Ranks: collective over the group.
        """
        if self.world_size == 1:
            return [value]
        raw = emit(encode(value))
        head = len(raw).to_bytes(_SIZE_NBYTES, "little") + raw[:_SHORT_NBYTES]
        heads = self._gather_equal(head.ljust(_SIZE_NBYTES + _SHORT_NBYTES, b"\0"))
        sizes = [int.from_bytes(one[:_SIZE_NBYTES], "little") for one in heads]
        if max(sizes) <= _SHORT_NBYTES:
            pairs = zip(heads, sizes, strict=True)
            return [decoded(one[_SIZE_NBYTES : _SIZE_NBYTES + size]) for one, size in pairs]
        parts: list[Any] = [None] * self.world_size
        for rank, part in self.share(_raw_tensor(raw).to(self.device), sizes):
            parts[rank] = decoded(part.cpu().numpy().tobytes())
        return parts

    def tell(self, value: Any) -> Any:
        """Return what rank 0 passed.

        Ranks: collective over the group.
        """
        if self.world_size == 1:
            return value
        told = self.tell_bytes(emit(encode(value)) if self.is_coordinator else b"")
        return value if self.is_coordinator else decoded(told)

    def tell_bytes(self, raw: bytes) -> bytes:
        """Return the bytes that rank 0 passed.

        Ranks: collective over the group.
        """
        if self.world_size == 1:
            return raw
        size = torch.tensor([len(raw)], dtype=torch.int64, device=self.device)
        self.broadcast(size.view(torch.uint8), 0)
        buffer = self._buffer(int(size.item()))
        if self.is_coordinator and raw:
            buffer.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        self.broadcast(buffer, 0)
        return buffer.cpu().numpy().tobytes()

    def check_agreement(self, value: Any, what: str) -> None:
        """Check that all ranks passed an equal value.

        Raises:
            RankDisagreementError: `ranks_disagree`, on every rank, with the values.

        Ranks: collective over the group.
        """
        self.check_told(self.gather_values(fingerprint(value)), value, what)

    def check_told(self, sums: Sequence[bytes], value: Any, what: str) -> None:
        """As `check_agreement`, where ranks have told the `fingerprint` of the value before.

        Args:
            sums: What each rank has told.
            value, what: As there.
        """
        others = [rank for rank, one in enumerate(sums) if one != sums[0]]
        if others:
            values = self.gather_values(value if self.rank in (0, others[0]) else None)
            here, there = _first_difference(values[0], values[others[0]])
            raise RankDisagreementError(
                f"{what} differs between ranks: {shorten(here)} on rank {self.ranks[0]}, "
                f"{shorten(there)} on rank {self.ranks[others[0]]}",
                code="ranks_disagree",
                failures={},
                hint="all ranks of the group make this call, with equal arguments",
            )

    @contextmanager
    def together(
        self, doing: str, meet: Callable[[int], list[int]] | None = None
    ) -> Iterator[Step]:
        """Run a step on each rank; if it fails on some, raise the same error on all.

        The step makes no collective calls of its own. What it tells is heard by all.

        Args:
            doing: What is done.
            meet: A quicker way to tell, if the step tells a number of at least 0:
                `CommonMemory.meet`.

        Raises:
            DistributedError: `rank_failed`, with the cause of each rank that failed. Where all
                ranks failed alike, the cause itself.

        Ranks: collective over the group.
        """
        error: Exception | None = None
        step = Step()
        try:
            yield step
        except Exception as caught:
            error = caught
        if self.world_size == 1:
            if error is not None:
                raise error
            step.heard = [step.told]
            return
        told = [None if error is None else error_row(error), step.told]
        try:
            if meet is not None:
                step.heard = [one - 1 for one in meet(0 if error else step.told + 1)]
                if -1 not in step.heard:  # none has failed
                    return
            rows = self.gather_values(told)
        except DistributedError as lost:
            if error is not None:
                lost.failures[self.ranks[self.rank]] = error
                lost.add_note(f"Before that, {doing} failed on this rank: {error}")
            raise
        check_rows(doing, self.ranks, [row for row, _ in rows], (self.rank, error))
        step.heard = [told for _, told in rows]

    def exchange(
        self, buffer: torch.Tensor, sent: Sequence[int], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Send bytes to each rank, and return what each sends to this one.

        Args:
            buffer: What is sent, for one rank after another.
            sent: How many bytes of it are for each rank.
            sizes: How many bytes each rank sends to this one.

        Ranks: collective over the group.
        Memory: what is received.
        """
        into = buffer if self.world_size == 1 else self._buffer(sum(sizes))
        return self.begin_exchange(buffer, sent, sizes, into).wait()

    def begin_exchange(
        self,
        buffer: torch.Tensor,
        sent: Sequence[int],
        sizes: Sequence[int],
        into: torch.Tensor,
    ) -> Pending:
        """Begin to do as `exchange` does; what is sent must not change until it has ended.

        Args:
            buffer, sent, sizes: As in `exchange`.
            into: For what is received, as long.

        Ranks: collective over the group.
        """
        if self.world_size == 1:
            return Pending(self, [], [buffer])
        with self._in_contact():
            work = distributed.all_to_all_single(
                into, buffer, list(sizes), list(sent), group=self.group, async_op=True
            )
        return Pending(self, [work], list(torch.split(into, list(sizes))))

    def share(self, part: torch.Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Send bytes to all ranks; yield the bytes of each rank that sends any, in their order.

        Args:
            part: Of this rank.
            sizes: How many each rank sends; ranks agree on this.

        Ranks: collective over the group, all of it before the first yield or as it goes on.
        Memory: what all send.
        """
        senders = [rank for rank, size in enumerate(sizes) if size]
        if self.world_size == 1 or not senders:
            yield from ((rank, part) for rank in senders)
            return
        longest = max(sizes)
        if 4 * sum(sizes) < 3 * longest * self.world_size:  # else most of it would be padding
            for rank in senders:
                buffer = part if rank == self.rank else self._buffer(sizes[rank])
                self.broadcast(buffer, rank)
                yield rank, buffer
            return
        padded = self._buffer(longest)
        padded[: part.numel()] = part
        parts = [self._buffer(longest) for _ in sizes]
        self._all_gather(parts, padded)
        for rank in senders:
            yield rank, parts[rank][: sizes[rank]]

    def collect(self, raw: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Return what each rank passed, on rank 0; nothing on others.

        Args:
            raw: Of this rank.
            sizes: How long that of each rank is; ranks agree on this.

        Ranks: collective over the group.
        Memory: on rank 0, what all passed.
        """
        if self.world_size == 1:
            return [raw]
        own = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]
        sent = [len(raw), *[0] * (self.world_size - 1)]
        taken = sizes if self.is_coordinator else [0] * self.world_size
        parts = self.exchange(own.to(self.device), sent, taken)
        return [part.cpu().numpy().tobytes() for part in parts] if self.is_coordinator else []

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give all ranks the bytes of one.

        Ranks: collective over the group.
        """
        if self.world_size > 1 and tensor.numel():
            with self._in_contact():
                work = distributed.broadcast(
                    tensor, self.ranks[source], group=self.group, async_op=self._looks_out
                )
                self._finish([work])

    def wait_until(self, has_ended: Callable[[float], bool]) -> None:
        """Wait for what other ranks do otherwise than by the group's backend.

        Args:
            has_ended: Waits for at most so many seconds; says whether they have done it.

        Raises:
            DistributedError: `ranks_absent`: `has_ended` raises an OSError, another rank has lost
                contact, or the time-out of the group is over.

        Ranks: local.
        """
        end = time.monotonic() + group_timeout(self.group).total_seconds()

        def ended(seconds: float) -> bool:
            try:
                done = has_ended(seconds)
            except OSError as error:
                raise RuntimeError(str(error)) from error
            if not done and time.monotonic() > end:
                raise RuntimeError("the time-out of the group is over")
            return done

        with self._in_contact():
            wait_until(ended, *self._circle)

    @contextmanager
    def _in_contact(self) -> Iterator[None]:
        """Talk to other ranks; if that fails, say what it means.

        Raises:
            DistributedError: `ranks_absent`, with the ranks of which nothing is heard any more.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # each backend has kinds of its own
            own, (ranks, name) = self.ranks[self.rank], self._circle
            raise lost_contact(own, find_silent(ranks, own, name), error) from error

    @property
    def _circle(self) -> tuple[Sequence[int], str]:
        """Of whom it is asked who is silent, and a name for them."""
        circle = self._within or self
        return circle.ranks, getattr(circle.group, "group_name", "")

    def _finish(self, works: Sequence[Any]) -> None:
        """Wait for collectives that go on; None is one that does not."""
        for work in works:
            if self._looks_out:
                finish(work, *self._circle)
            elif work is not None:
                work.wait()

    def _all_gather(self, parts: list[torch.Tensor], part: torch.Tensor) -> None:
        with self._in_contact():
            work = distributed.all_gather(parts, part, group=self.group, async_op=self._looks_out)
            self._finish([work])

    def _buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _gather_equal(self, raw: bytes) -> list[bytes]:
        """Return what each rank passed, which is as long on all of them."""
        if self._looks_out and self.world_size <= _DIRECT_RANKS:
            sizes = [len(raw)] * self.world_size
            direct = self.exchange(_raw_tensor(raw * self.world_size), sizes, sizes)
            return [part.numpy().tobytes() for part in direct]
        own = _raw_tensor(raw).to(self.device)
        parts = torch.split(self._buffer(len(raw) * self.world_size), len(raw))
        self._all_gather(list(parts), own)
        return [part.cpu().numpy().tobytes() for part in parts]


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """An exchange that has begun."""

    comm: Comm
    works: Sequence[Any]
    received: Sequence[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """Wait for its end; return what each rank has sent to this one.

        Raises:
            DistributedError: `ranks_absent`.

        Ranks: local; ends when the others have sent what is for this rank.
        """
        with self.comm._in_contact():
            self.comm._finish(self.works)
        return list(self.received)


class _Some(Comm):
    """Some ranks of the default group, which talk from one to another."""

    def __init__(self, ranks: tuple[int, ...], within: Comm | None = None) -> None:
        super().__init__()
        self._within = within
        self.rank, self.world_size = ranks.index(self.ranks[self.rank]), len(ranks)
        self.ranks = ranks

    def begin_exchange(
        self,
        buffer: torch.Tensor,
        sent: Sequence[int],
        sizes: Sequence[int],
        into: torch.Tensor,
    ) -> Pending:
        parts = torch.split(buffer, list(sent))
        received = list(torch.split(into, list(sizes)))
        received[self.rank] = parts[self.rank]
        return Pending(self, self._trade(parts, received), received)

    def _trade(
        self, parts: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> Sequence[Any]:
        """Begin to send each other rank its part, and to fill what is received of them."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        steps = [
            distributed.P2POp(distributed.irecv, received[rank], self.ranks[rank])
            for rank in others
            if received[rank].numel()
        ]
        steps += [
            distributed.P2POp(distributed.isend, parts[rank], self.ranks[rank])
            for rank in others
            if parts[rank].numel()
        ]
        with self._in_contact():
            return distributed.batch_isend_irecv(steps) if steps else ()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Pass on along a binomial tree, as log2 of the group's size steps."""
        place = (self.rank - source) % self.world_size
        step = 1
        with self._in_contact():
            while step < self.world_size:
                if step <= place < 2 * step:
                    self._pass(distributed.irecv, tensor, self._at(place - step, source))
                elif place < step and place + step < self.world_size:
                    self._pass(distributed.isend, tensor, self._at(place + step, source))
                step *= 2

    def _pass(self, how: Any, tensor: torch.Tensor, rank: int) -> None:
        self._finish(distributed.batch_isend_irecv([distributed.P2POp(how, tensor, rank)]))

    def _finish(self, works: Sequence[Any]) -> None:
        """Wait for messages."""
        if self._looks_out and works:
            finish_messages(works, *self._circle)
        else:
            super()._finish(works)

    def _at(self, place: int, source: int) -> int:
        return self.ranks[(place + source) % self.world_size]

    def _all_gather(self, parts: list[torch.Tensor], part: torch.Tensor) -> None:
        parts[self.rank].copy_(part)
        Pending(self, self._trade([part] * self.world_size, parts), parts).wait()


def _first_difference(one: Any, other: Any) -> tuple[Any, Any]:
    """Return where two lists part, or the two values."""
    if isinstance(one, list) and isinstance(other, list):
        for a, b in itertools.zip_longest(one, other):
            if a != b:
                return a, b
    return one, other


def _raw_tensor(raw: bytes) -> torch.Tensor:
    """Return bytes, of which there are some, as a tensor."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def fingerprint(value: Any) -> bytes:
    """Return what tells whether ranks have an equal value."""
    return digest(emit(encode(value)))


def decoded(raw: bytes) -> Any:
    """Return the value that another rank has encoded."""
    return decode_tree({"value": parse(raw)}).root["value"]
