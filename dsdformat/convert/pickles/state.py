"""The state of the pickle machine: a stack with marks, a memo, and the place in the bytes.

Each operation refuses what would take it below its bottom, or what no pickler writes.
"""

from __future__ import annotations

from typing import Any, NoReturn

from dsdformat.convert.pickles.nodes import Stored
from dsdformat.convert.pickles.stream import ByteStream

__all__ = ["State"]


class State:
    """What the effects of opcodes change."""

    __slots__ = ("budget", "frame_end", "marks", "memo", "pids", "stack", "stream")

    def __init__(self, stream: ByteStream, memory_max: int) -> None:
        self.stream = stream
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.pids: list[Stored] = []
        self.frame_end: int | None = None
        self.budget = memory_max

    def malformed(self, message: str) -> NoReturn:
        raise self.stream.fault("pickle_malformed", message)

    def pop(self) -> Any:
        if not self.stack:
            self.malformed("the stack is empty")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack:
            self.malformed("the stack is empty")
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        """Return what lies above the last mark."""
        if not self.marks:
            self.malformed("there is no mark")
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def memoize(self, index: int) -> None:
        if index in self.memo:
            self.malformed(f"the memo has an entry {index} already")
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self.memo:
            self.malformed(f"the memo has no entry {index}")
        self.stack.append(self.memo[index])
