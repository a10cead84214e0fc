"""What `load` asks of what it reads from: a checkpoint of ours, or a foreign one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from dsdformat.boxes import Box
from dsdformat.convert.numbers import Readable
from dsdformat.destinations import Destinations
from dsdformat.format.decoding import Hooks
from dsdformat.plan.load_plan import LoadPlan, Wanted

__all__ = ["Entry", "Origin"]


class Entry(Readable, Protocol):
    """A tensor to be loaded: a `TensorEntry`, or a `ForeignEntry`."""

    index: int

    @property
    def name(self) -> str:
        """The display name."""

    def check(self) -> None:
        """Check the chunks: that they tile it, and that data files have as much as they say."""

    def read(
        self, box: Box | None = None, *, into: Any = None, verify: bool | None = None
    ) -> memoryview:
        """Read one box as packed row-major little-endian bytes."""

    def map(self, *, writable: bool = False) -> memoryview:
        """Return the bytes in the file; `cannot_map` where there is no such thing."""

    def content_digest(self) -> str:
        """Return the content digest."""


class Origin(Protocol):
    """What is loaded from: a `Checkpoint`, or a `ForeignReader`."""

    @property
    def verifies(self) -> bool:
        """Whether reads compare data with digests."""

    def __iter__(self) -> Iterator[Entry]:
        """List the tensors by number."""

    def tree(self, hooks: Hooks | None = None) -> Any:
        """Return the nested state."""

    def forms(self, indexes: Sequence[int]) -> tuple[list[tuple[int, ...]], list[str]]:
        """Return the global shapes and the logical dtypes of some tensors, as columns."""

    def plan_boxes(self, wanted: Sequence[Wanted], *, verify: bool | None = None) -> LoadPlan:
        """Plan to read some boxes together."""

    def read_boxes(
        self,
        wanted: Sequence[Wanted] | LoadPlan,
        into: Sequence[Any] | Destinations,
        *,
        verify: bool | None = None,
    ) -> LoadPlan:
        """Read some boxes of any tensors together."""

    def close(self) -> None:
        """Close the files."""
