"""Stand between a save and the system, count what it asks for, and let it go wrong at one step.

A step is a call that opens, writes, flushes, names, lists, locks or closes a file or a folder
under a root; what happens elsewhere is passed on unseen. Functions of `os` are exchanged, so that
`pathlib` and `shutil` are seen too. Calls that write and that no save makes today are refused, so
that none escapes when one does.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsdformat.storage import renames

REFUSED = (
    *("copy_file_range", "fdatasync", "posix_fallocate", "pwrite", "remove"),
    *("removedirs", "renames", "sendfile", "symlink", "truncate", "writev"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One call.

    Attributes:
        kind: `open` and `create` of a file or folder, `close`, `write`, `resize`, `fsync`, `mkdir`,
            `rmdir`, `unlink`, `rename`, `link`, `exchange`, `list`, `lock`.
        path, other: Relative to the root; `other` is the second name of two.
        handle: Which opening of a file it works on.
        byte_offset, data: What was written, and where; or the length that a file was given.
    """

    kind: str
    path: str
    other: str = ""
    handle: int = 0
    byte_offset: int = 0
    data: bytes = b""


# Called before each step with its number, from 1; may raise, or end the process. What it returns
# for a write is how many bytes the system takes, if not all.
Before = Callable[[int, Step], int | None]


class Steps:
    """The steps of one save.

    Attributes:
        begun: All that were asked for.
        done: Those that were carried out.
    """

    def __init__(self, root: Path, before: Before | None, *, can_exchange: bool) -> None:
        self.begun: list[Step] = []
        self.done: list[Step] = []
        self._root = os.path.realpath(root)
        self._before = before
        self._can_exchange = can_exchange
        self._handles = itertools.count(1)
        self._files: dict[int, tuple[int, str]] = {}
        self._real = {name: getattr(os, name) for name in (*CALLS, *REFUSED)}
        self._exchange, self._flock = renames.exchange, fcntl.flock

    def descriptors(self) -> list[int]:
        """List what the save has open."""
        return list(self._files)

    def open(
        self,
        path: str | os.PathLike[str],
        flags: int,
        mode: int = 0o777,
        *,
        dir_fd: int | None = None,
    ) -> int:
        name = self._inside(path, dir_fd)
        if name is None:
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)
        kind = "create" if flags & os.O_CREAT else "open"
        step = Step(kind, name, handle=next(self._handles))
        flags &= ~getattr(os, "O_DIRECT", 0)  # any part of a write can be taken then
        fd = self._take(step, self._real["open"], path, flags, mode, dir_fd=dir_fd)
        self._files[fd] = step.handle, name
        return fd

    def close(self, fd: int) -> None:
        if fd not in self._files:
            return self._real["close"](fd)
        handle, name = self._files[fd]
        try:
            self._take(Step("close", name, handle=handle), lambda: None)
        finally:  # the system closes it, whatever it reports
            self._files.pop(fd)
            self._real["close"](fd)
        return None

    def pwritev(self, fd: int, buffers: Sequence[memoryview], byte_offset: int) -> int:
        if fd not in self._files:
            return self._real["pwritev"](fd, buffers, byte_offset)
        handle, name = self._files[fd]
        data = b"".join(buffers)
        step = Step("write", name, handle=handle, byte_offset=byte_offset, data=data)
        taken = self._begin(step)
        count = self._real["pwritev"](fd, [data[:taken]], byte_offset)
        step = Step("write", name, handle=handle, byte_offset=byte_offset, data=data[:count])
        self.done.append(step)
        return count

    def write(self, fd: int, data: bytes) -> int:
        """Write at the beginning of a file, as all do that are not written by place."""
        if fd not in self._files:
            return self._real["write"](fd, data)
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
        return self.pwritev(fd, [memoryview(data)], 0)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        if fd not in self._files:
            return self._real["ftruncate"](fd, nbytes)
        handle, name = self._files[fd]
        step = Step("resize", name, handle=handle, byte_offset=nbytes)
        return self._take(step, self._real["ftruncate"], fd, nbytes)

    def fsync(self, fd: int) -> None:
        """Note a flush. Nothing is flushed: what a power cut leaves is simulated."""
        if fd in self._files:
            handle, name = self._files[fd]
            self._take(Step("fsync", name, handle=handle), lambda: None)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._named("mkdir", path, mode, dir_fd=dir_fd)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._named("unlink", path, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._named("rmdir", path, dir_fd=dir_fd)

    def scandir(self, path: Any = ".") -> Any:
        return self._named("list", path, call="scandir")

    def listdir(self, path: Any = ".") -> Any:
        return self._named("list", path, call="listdir")

    def rename(self, src: Any, dst: Any, **options: Any) -> None:
        self._named_twice("rename", src, dst, **options)

    def replace(self, src: Any, dst: Any, **options: Any) -> None:
        self._named_twice("rename", src, dst, **options)

    def link(self, src: Any, dst: Any, **options: Any) -> None:
        self._named_twice("link", src, dst, **options)

    def exchange(self, a: Path, b: Path) -> bool:
        if not self._can_exchange:
            return False
        one, other = self._inside(a, None), self._inside(b, None)
        assert one is not None
        assert other is not None
        return self._take(Step("exchange", one, other), self._exchange, a, b)

    def flock(self, fd: int, operation: int) -> None:
        if fd not in self._files:
            return self._flock(fd, operation)
        handle, name = self._files[fd]
        return self._take(Step("lock", name, handle=handle), self._flock, fd, operation)

    def refused(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            places = [self._inside(one, options.get("dir_fd")) for one in arguments[:2]]
            assert places[0] is None, f"os.{name} on {places[0]} is no step that is known here"
            return self._real[name](*arguments, **options)

        return call

    def _named(
        self, kind: str, path: Any, *rest: Any, call: str = "", dir_fd: int | None = None
    ) -> Any:
        real = self._real[call or kind]
        options = {} if dir_fd is None else {"dir_fd": dir_fd}
        name = self._inside(path, dir_fd)
        if name is None:
            return real(path, *rest, **options)
        return self._take(Step(kind, name), real, path, *rest, **options)

    def _named_twice(self, kind: str, src: Any, dst: Any, **options: Any) -> None:
        old, new = self._inside(src, None), self._inside(dst, None)
        if old is None or new is None:
            assert (old, new) == (None, None)
            self._real[kind](src, dst, **options)
        else:
            self._take(Step(kind, old, new), self._real[kind], src, dst)

    def _take(self, step: Step, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._begin(step)
        result = call(*args, **options)
        self.done.append(step)
        return result

    def _begin(self, step: Step) -> int | None:
        self.begun.append(step)
        return None if self._before is None else self._before(len(self.begun), step)

    def _inside(self, path: Any, dir_fd: int | None) -> str | None:
        """Where a path is in the root; None if it is elsewhere."""
        if isinstance(path, int):
            return self._files[path][1] if path in self._files else None
        if not isinstance(path, str | os.PathLike):
            return None
        if dir_fd is not None:
            if dir_fd not in self._files:
                return None
            return os.path.normpath(os.path.join(self._files[dir_fd][1], path))
        name = os.path.relpath(os.path.abspath(path), self._root)
        return None if name.split(os.sep)[0] == os.pardir else name


CALLS = (
    *("open", "close", "pwritev", "fsync", "mkdir", "unlink", "rmdir", "scandir", "listdir"),
    *("rename", "replace", "link", "write", "ftruncate"),
)


@contextlib.contextmanager
def watched(
    root: Path, before: Before | None = None, *, can_exchange: bool = True
) -> Iterator[Steps]:
    """See all steps under a root that are taken inside."""
    steps = Steps(root, before, can_exchange=can_exchange)
    with pytest.MonkeyPatch.context() as patch:
        for name in REFUSED:
            patch.setattr(os, name, steps.refused(name))
        for name in CALLS:
            patch.setattr(os, name, getattr(steps, name))
        patch.setattr(os, "supports_dir_fd", {*os.supports_dir_fd, os.open})
        patch.setattr(renames, "exchange", steps.exchange)
        patch.setattr(fcntl, "flock", steps.flock)
        yield steps


class DeathError(BaseException):
    """The process was killed here."""


def die(
    root: Path, number: int, save: Callable[[], object], *, can_exchange: bool = True
) -> tuple[list[Step], bool]:
    """Save in a process that is killed at a step; return the steps before, and whether it was.

    It is simulated here, so that the steps are known: each further step raises too, and so
    nothing is cleaned up. Descriptors are closed, as the system does, and locks with them.
    """

    def before(count: int, step: Step) -> None:
        if count >= number:
            raise DeathError

    with watched(root, before, can_exchange=can_exchange) as steps:
        try:
            save()
        except DeathError:
            died = True
        else:
            died = len(steps.begun) >= number
    for fd in steps.descriptors():
        os.close(fd)
    renames._sync_entry.cache_clear()
    return steps.done, died
