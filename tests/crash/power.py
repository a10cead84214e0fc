"""A file system whose power is cut: what the steps of a save leave on the disk.

Nothing is durable by itself. A file's bytes are durable once the file is flushed; a name in a
folder is durable once that folder is flushed, and a flush of one says nothing of any other. What
was not flushed may be there, or not, in part or whole, in any order: each folder and each file for
itself. One thing is promised, by POSIX and by all file systems in use: a rename in a folder is
there as a whole or not at all. From one folder to another it is two changes, one of each folder.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.crash.steps import Step


@dataclass(slots=True)
class File:
    """A file: its bytes, and those that are durable."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list)  # since the last flush


@dataclass(slots=True)
class Folder:
    """A folder: its names, those that are durable, and the changes in between."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, change: dict[str, File | Folder | None]) -> None:
        _apply(self.names, change)
        self.changes.append(change)


def _apply(
    names: dict[str, File | Folder], change: dict[str, File | Folder | None]
) -> dict[str, File | Folder]:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node
    return names


class Cut:
    """What of the unflushed is there after a cut; `names` and `data` say so for folders and files.

    `lost`: nothing. `kept`: all. `some`: of each folder any of its changes, in their order; of
    each file any of its writes, or zeros in their place.
    """

    def __init__(self, names: str, data: str, seed: int = 0) -> None:
        self.names, self.data = names, data
        self._random = random.Random(seed)

    def __str__(self) -> str:
        return f"names {self.names}, data {self.data}"

    def names_of(self, folder: Folder) -> dict[str, File | Folder]:
        names = dict(folder.durable)
        for change in folder.changes:
            if self._is_kept(self.names):
                _apply(names, change)
        return names

    def bytes_of(self, file: File) -> bytes:
        data = bytearray(file.durable)
        for byte_offset, piece in file.writes:
            end = byte_offset + len(piece)
            if self.data == "some" or self._is_kept(self.data):
                data.extend(bytes(max(0, end - len(data))))
            if self._is_kept(self.data):
                data[byte_offset:end] = piece
        return bytes(data)

    def _is_kept(self, what: str) -> bool:
        return what == "kept" or (what == "some" and self._random.random() < 0.5)


class Disk:
    """The state of a file system under a root, as steps go on."""

    def __init__(self, root: Path) -> None:
        """Begin with what is there; all of it is durable."""
        self._root = _read(root)
        self._handles: dict[int, File | Folder] = {}

    def run(self, steps: Iterable[Step]) -> Disk:
        """Carry out the steps of one process, as the page cache does."""
        for _ in self.run_each(steps):
            pass
        return self

    def run_each(self, steps: Iterable[Step]) -> Iterator[int]:
        """Carry them out one by one; yield how many it were, from none to all."""
        self._handles.clear()
        yield 0
        for count, step in enumerate(steps, 1):
            self._take(step)
            yield count

    def restore(self, root: Path, cut: Cut) -> None:
        """Write what is on the disk after a cut into an empty folder."""
        _write(root, self._root, cut)

    def _take(self, step: Step) -> None:
        match step.kind:
            case "open":
                self._handles[step.handle] = self._find(step.path)
            case "create":
                folder, name = self._parent(step.path)
                assert name not in folder.names
                node = self._handles[step.handle] = File()
                folder.change({name: node})
            case "write":
                file = self._handles[step.handle]
                assert isinstance(file, File)
                end = step.byte_offset + len(step.data)
                file.data.extend(bytes(max(0, end - len(file.data))))
                file.data[step.byte_offset : end] = step.data
                file.writes.append((step.byte_offset, step.data))
            case "resize":
                file = self._handles[step.handle]
                assert isinstance(file, File)
                del file.data[step.byte_offset :]
                file.data.extend(bytes(step.byte_offset - len(file.data)))
                file.writes.append((step.byte_offset, b""))
            case "fsync":
                self._flush(self._handles[step.handle])
            case "mkdir":
                folder, name = self._parent(step.path)
                folder.change({name: Folder()})
            case "unlink" | "rmdir":
                folder, name = self._parent(step.path)
                folder.change({name: None})
            case "rename" | "exchange":
                folder, name = self._parent(step.path)
                other_folder, other = self._parent(step.other)
                if folder is other_folder:
                    behind = folder.names[other] if step.kind == "exchange" else None
                    folder.change({name: behind, other: folder.names[name]})
                else:
                    assert step.kind == "rename"
                    other_folder.change({other: folder.names[name]})
                    folder.change({name: None})
            case "link":
                folder, name = self._parent(step.path)
                other_folder, other = self._parent(step.other)
                assert other not in other_folder.names
                other_folder.change({other: folder.names[name]})
            case kind:
                assert kind in ("close", "list", "lock")

    def _flush(self, node: File | Folder) -> None:
        if isinstance(node, File):
            node.durable = bytes(node.data)
            node.writes.clear()
        else:
            node.durable = dict(node.names)
            node.changes.clear()

    def _parent(self, path: str) -> tuple[Folder, str]:
        place = PurePosixPath(path)
        folder = self._find(str(place.parent))
        assert isinstance(folder, Folder)
        return folder, place.name

    def _find(self, path: str) -> File | Folder:
        node: File | Folder = self._root
        for part in PurePosixPath(path).parts:
            assert isinstance(node, Folder)
            node = node.names[part]
        return node


def _read(folder: Path) -> Folder:
    names: dict[str, File | Folder] = {}
    for path in folder.iterdir():
        if path.is_dir():
            names[path.name] = _read(path)
        else:
            data = path.read_bytes()
            names[path.name] = File(bytearray(data), data)
    return Folder(names, dict(names))


def _write(path: Path, folder: Folder, cut: Cut) -> None:
    path.mkdir(exist_ok=True)
    for name, node in cut.names_of(folder).items():
        if isinstance(node, Folder):
            _write(path / name, node, cut)
        else:
            (path / name).write_bytes(cut.bytes_of(node))
