"""Collectives over the ranks of one group, without pickle; and none where there is no group.

Values travel in the format's own encoding, tensors as bytes: gloo refuses several dtypes, and
bytes are what is meant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import distributed

from dsdformat.errors import CODES, DistributedError, DsdError, RankDisagreementError, shorten
from dsdformat.format.decoding import decode_tree
from dsdformat.format.digests import digest
from dsdformat.format.packing import emit, parse
from dsdformat.format.values import encode

__all__ = ["Comm", "is_distributed"]

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether there is a default process group."""
    return distributed.is_available() and distributed.is_initialized()


class Comm:
    """One rank of a group.

    Attributes:
        rank: In the group.
        world_size: Number of ranks in the group.
        ranks: Their global ranks.
        device: Where tensors are that the group's backend moves.
    """

    _groups: ClassVar[dict[tuple[tuple[int, ...], int], Any]] = {}

    def __init__(self, group: Any = None) -> None:
        """Use a process group, the default one if None, or no group where there is none."""
        self.group = group
        self.device = torch.device("cpu")
        if not is_distributed():
            self.rank, self.world_size = 0, 1
            self.ranks: tuple[int, ...] = (0,)
            return
        self.rank = distributed.get_rank(group)
        self.world_size = distributed.get_world_size(group)
        self.ranks = tuple(distributed.get_process_group_ranks(group or distributed.group.WORLD))
        backend = str(distributed.get_backend(group))
        if "nccl" in backend and "gloo" not in backend:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def of_ranks(cls, ranks: Sequence[int]) -> Comm:
        """Return the group of these global ranks; made once, by the ranks in it alone.

        Ranks: collective over `ranks`, the first time.
        """
        if not is_distributed() or len(ranks) == distributed.get_world_size():
            return cls()
        key = tuple(ranks)
        default = distributed.group.WORLD
        if (key, id(default)) not in cls._groups:
            group = distributed.new_group(list(key), use_local_synchronization=True)
            cls._groups[key, id(default)] = group
        return cls(cls._groups[key, id(default)])

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
        sizes = self._gather_int(len(raw))
        buffer = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        buffer[: len(raw)] = torch.frombuffer(bytearray(raw) or bytearray(1), dtype=torch.uint8)[
            : len(raw)
        ]
        parts = [torch.empty_like(buffer, device=self.device) for _ in sizes]
        distributed.all_gather(parts, buffer.to(self.device), group=self.group)
        return [
            _decoded(bytes(part[:size].cpu().numpy()))
            for part, size in zip(parts, sizes, strict=True)
        ]

    def check_agreement(self, value: Any, what: str) -> None:
        """Check that all ranks passed an equal value.

        Raises:
            RankDisagreementError: `ranks_disagree`, on every rank, with the values.

        Ranks: collective over the group.
        """
        sums = self.gather_values(digest(emit(encode(value))))
        others = [rank for rank, one in enumerate(sums) if one != sums[0]]
        if others:
            values = self.gather_values(value)
            here, there = _first_difference(values[0], values[others[0]])
            raise RankDisagreementError(
                f"{what} differs between ranks: {shorten(here)} on rank 0, "
                f"{shorten(there)} on rank {others[0]}",
                code="ranks_disagree",
                failures={},
                hint="all ranks of the group make this call, with equal arguments",
            )

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a step on each rank; if it fails on some, raise the same error on all.

        The step makes no collective calls of its own.

        Raises:
            DistributedError: `rank_failed`, with the cause of each rank that failed. One process
                alone raises the cause itself.

        Ranks: collective over the group.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self.world_size == 1:
            if error is not None:
                raise error
            return
        failures = {
            rank: _error(row)
            for rank, row in enumerate(self.gather_values(None if error is None else _row(error)))
            if row is not None
        }
        if failures:
            if error is not None:
                failures[self.rank] = error
            raise _failed(doing, failures) from error

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of each rank; all are equally many.

        Ranks: collective over the group.
        """
        if self.world_size == 1:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self.world_size)]
        distributed.all_gather(parts, part, group=self.group)
        return parts

    def gather(self, part: torch.Tensor, to: int) -> list[torch.Tensor] | None:
        """Return the bytes of each rank on one of them; all are equally many.

        Ranks: collective over the group.
        """
        if self.world_size == 1:
            return [part]
        parts = None
        if self.rank == to:
            parts = [torch.empty_like(part) for _ in range(self.world_size)]
        distributed.gather(part, parts, dst=self.ranks[to], group=self.group)
        return parts

    def scatter(
        self, parts: Sequence[torch.Tensor] | None, into: torch.Tensor, source: int
    ) -> None:
        """Give each rank its bytes; all are equally many, and only the source has them.

        Ranks: collective over the group.
        """
        if self.world_size == 1:
            assert parts is not None
            into.copy_(parts[0])
            return
        given = list(parts) if parts is not None else None
        distributed.scatter(into, given, src=self.ranks[source], group=self.group)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give all ranks the bytes of one.

        Ranks: collective over the group.
        """
        if self.world_size > 1 and tensor.numel():
            distributed.broadcast(tensor, src=self.ranks[source], group=self.group)

    def _gather_int(self, number: int) -> list[int]:
        own = torch.tensor([number], dtype=torch.int64, device=self.device)
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        distributed.all_gather(parts, own, group=self.group)
        return [int(part.item()) for part in parts]


def run_together(comm: Comm, doing: str, step: Callable[[], T]) -> T:
    """Run a step that gives a value; see `Comm.together`."""
    results: list[T] = []
    with comm.together(doing):
        results.append(step())
    return results[0]


def _first_difference(one: Any, other: Any) -> tuple[Any, Any]:
    """Return where two lists part, or the two values."""
    if isinstance(one, list) and isinstance(other, list):
        for a, b in itertools.zip_longest(one, other):
            if a != b:
                return a, b
    return one, other


def _decoded(raw: bytes) -> Any:
    return decode_tree({"value": parse(raw)}).root["value"]


def _row(error: Exception) -> dict[str, Any]:
    known = isinstance(error, DsdError)
    return {
        "kind": type(error).__name__,
        "code": error.code if known else None,  # type: ignore[attr-defined]
        "hint": error.hint if known else None,  # type: ignore[attr-defined]
        "message": _text(error.message if known else str(error)),  # type: ignore[attr-defined]
    }


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _error(row: dict[str, Any]) -> Exception:
    """Make an error of another rank again, as far as it is one of ours."""
    kind = CODES.get(row["code"])
    if kind is None or issubclass(kind, DistributedError):
        return RuntimeError(f"{row['kind']}: {row['message']}")
    error = kind.__new__(kind)
    Exception.__init__(error, row["message"])
    error.message, error.code, error.hint = row["message"], row["code"], row["hint"]
    return error


def _failed(doing: str, failures: dict[int, Exception]) -> DistributedError:
    first = min(failures)
    lines = [f"{doing} failed on rank {first}: {failures[first]}"]
    others = [str(rank) for rank in sorted(failures) if rank != first]
    if others:
        lines.append(f"it failed on ranks {', '.join(others)} too")
    return DistributedError("\n".join(lines), code="rank_failed", failures=dict(failures))
