"""The saves that are stopped at each of their steps, and what must hold after.

Each goes to `c`, or to a folder deeper down, beside nothing or in the place of a checkpoint that
says `old`. A new way to save is a function here, and a row of SAVES.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dsdformat
from dsdformat import TensorSource
from dsdformat.writer import Writer

NOISE = bytes(range(256)) * 20
TEXT = b"abcdefgh" * 640


def save_one(path: Path, word: str, **options: Any) -> None:
    """Save one data file."""
    with dsdformat.create(path, user={"word": word}, threads=1, **options) as writer:
        writer.add({"model": {"w": TensorSource.of("uint8", (len(NOISE),), NOISE)}})


def save_sections(path: Path, word: str, **options: Any) -> None:
    """Save two data files, one of them compressed, and a side file, in blocks and threads."""
    options = {"threads": 2, "block_nbytes": 4096, "user": {"word": word}, **options}
    with dsdformat.create(path, **options) as writer:
        writer.add_file("config.json", b"{}")
        writer.add({"model": {"w": TensorSource.of("uint8", (len(NOISE),), NOISE)}})
        text = TensorSource.of("uint8", (len(TEXT),), TEXT, codec="zstd")
        writer.add({"optimizer": {"m": text}, "step": 3})


def save_converted(path: Path, word: str, **options: Any) -> None:
    """Save as a converter does: from functions that give the bytes when the writer gets there."""

    def lazy(data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    with dsdformat.create(path, user={"word": word}, threads=1, **options) as writer:
        for name, data in (("a", NOISE), ("b", TEXT)):
            source = TensorSource.of("uint8", (len(data),), lambda data=data: lazy(data))
            writer.add({"model": {name: source}})


def save_two_writers(path: Path, word: str, **options: Any) -> None:
    """Save from two writers, the second of which has joined the first."""
    with dsdformat.create(
        path, user={"word": word}, threads=1, world_size=2, **options
    ) as coordinator:
        joined = Writer.join(coordinator.staging, rank=1, world_size=2, threads=1)
        for writer, name in ((coordinator, "a"), (joined, "b")):
            writer.add({"model": {name: TensorSource.of("uint8", (len(NOISE),), NOISE)}})
        coordinator.write()
        coordinator.commit([joined.finish()])


@dataclass(frozen=True, slots=True)
class Save:
    """A way to save.

    Attributes:
        run: Saves to a path, with a word to know it by.
        path: Where to, relative to the root.
        replaces: Whether an old checkpoint is there before.
        can_exchange: Whether the system exchanges two names in one step.
    """

    name: str
    run: Callable[..., None]
    path: str = "c"
    replaces: bool = False
    can_exchange: bool = True

    def __str__(self) -> str:
        return self.name

    def prepare(self, root: Path) -> None:
        """Make what is there before."""
        root.mkdir(exist_ok=True)
        if self.replaces:
            save_one(root / self.path, "old")

    def save(self, root: Path, word: str = "new") -> None:
        self.run(root / self.path, word, overwrite=self.replaces)


SAVES = (
    Save("new", save_one),
    Save("new-in-new-folders", save_one, path="runs/one/c"),
    Save("new-of-sections", save_sections),
    Save("new-of-two-writers", save_two_writers),
    Save("replace", save_one, replaces=True),
    Save("replace-by-renames", save_one, replaces=True, can_exchange=False),
    Save("replace-with-sections", save_sections, replaces=True),
    Save("replace-with-converted", save_converted, replaces=True),
    Save("replace-from-two-writers", save_two_writers, replaces=True),
    Save(
        "replace-from-two-writers-by-renames", save_two_writers, replaces=True, can_exchange=False
    ),
)


def word_of(path: Path) -> str | None:
    """What the checkpoint at a path says, after every byte was checked; None if there is none."""
    report = dsdformat.verify(path, threads=1)
    if [problem.code for problem in report.problems] == ["no_manifest"]:
        return None
    report.raise_if_bad()
    assert report.unlisted == ()
    with dsdformat.open(path, threads=1) as checkpoint:
        return checkpoint.user["word"]


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def faults_after(root: Path, save: Save, *, committed: bool = False) -> list[str]:
    """Look at what a stopped save left, save again, and say what is wrong; [] if all is well.

    Args:
        root: Where the save was.
        save: Which one.
        committed: Whether it had returned, so that the new checkpoint must be there.
    """
    path, faults = root / save.path, []
    allowed = ["new"] if committed else ["new", "old" if save.replaces else None]
    try:
        found = word_of(path)
        if found not in allowed:
            faults.append(f"there is {found}, not one of {allowed}")
        dsdformat.create(path.parent / "other").abort()  # a save to another name
        dsdformat.create(path, overwrite=True).abort()  # one that ends before it has written
        if word_of(path) != found:
            faults.append(f"a save that was given up made {word_of(path)} of {found}")
        save_one(path, "next", overwrite=True)
        if word_of(path) != "next":
            faults.append(f"the next save gave {word_of(path)}")
        if names_in(path.parent) != [path.name]:
            faults.append(f"left over: {names_in(path.parent)}")
    except Exception as error:
        faults.append(repr(error))
    return faults
