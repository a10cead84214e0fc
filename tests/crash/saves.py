"""The saves that are stopped at each of their steps, and what must hold after.

Each goes to `c`, or to a folder deeper down, beside nothing or in the place of a checkpoint that
says `old`. A new way to save is a function here, and a row of SAVES. What makes one file and no
checkpoint of ours is a row too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest

import dsdformat
from dsdformat import DistributedError, StorageError, TensorSource
from dsdformat.convert import convert, open_any
from dsdformat.convert.write_torch import SinkWriter
from dsdformat.storage import sink
from dsdformat.storage.guards import folder_guard
from dsdformat.storage.mailbox import Mailbox
from dsdformat.storage.target import FileTarget, LocalTarget
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


def save_in_background(path: Path, word: str, **options: Any) -> None:
    """Save from a thread, and wait for it."""
    import torch

    import dsdformat.torch as dsd

    state = {"model": {"w": torch.arange(5120)}, "step": 3}
    handle = dsd.save(path, state, user={"word": word}, threads=1, background=True, **options)
    try:
        handle.wait()
    finally:
        for thread in threading.enumerate():
            if thread.name == "dsdformat-save":
                thread.join()


def save_past_the_cache(path: Path, word: str, **options: Any) -> None:
    """Save in the background past the page cache, what is small and wherever it is, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "takes_direct", lambda fd: hasattr(os, "O_DIRECT"))
        patch.setattr(sink, "_DIRECT_NBYTES", PAGESIZE)
        save_in_background(path, word, **options)


class Two:
    """What a rank of two knows of both."""

    world_size, ranks = 2, (0, 1)

    def __init__(self, rank: int) -> None:
        self.rank = rank


def save_from_two_ranks_apart(path: Path, word: str, **options: Any) -> None:
    """Save from two ranks in the background: by words in a mailbox, each rank in its turn.

    Rank 1 writes, leaves its word, and is about to wait; then rank 0 does all of its part.
    """
    from dsdformat.torch import apart
    from dsdformat.torch.unfinished import Unfinished

    coordinator = dsdformat.create(path, user={"word": word}, threads=1, world_size=2, **options)
    boxes: list[Mailbox] = []
    errors: list[Exception] = []
    try:
        boxes.append(Mailbox.begin(path))
        boxes.append(Mailbox.join(str(boxes[0].folder), 1))
        joined = Writer.join(coordinator.staging, rank=1, world_size=2, threads=1)
        for writer, name in ((coordinator, "a"), (joined, "b")):
            writer.add({"model": {name: TensorSource.of("uint8", (len(NOISE),), NOISE)}})
            writer.plan()
        first = Unfinished(Two(0), coordinator, coordinator, boxes[0])
        second = Unfinished(Two(1), joined, None, boxes[1])
        turns = [first, second]

        class Turn(apart.Limit):
            def pause(self, seconds: float) -> None:
                write()

        def write() -> None:
            """Let the next rank write, if there is one."""
            try:
                if turns:
                    apart.write_apart(turns.pop(), Turn(60))
            except Exception as error:
                errors.append(error)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(apart, "_LIVES_S", 0.0)
            while turns:
                write()
    except BaseException:
        coordinator.abort()
        for box in boxes:
            box.close()
        raise
    if errors:
        raise cause_of(errors)


def cause_of(errors: list[Exception]) -> Exception:
    """Return the error of the rank that had it; others were told."""
    told = [
        one
        for error in errors
        if isinstance(error, DistributedError)
        for one in error.failures.values()
    ]
    own = [one for one in (*errors, *told) if isinstance(one, StorageError) and one.errno]
    return own[0] if own else errors[0]


@functools.cache
def source(word: str) -> Path:
    """A checkpoint that is converted, in a folder of this process."""
    path = Path(sources().name) / word
    with dsdformat.create(path, user={"word": word}, threads=1) as writer:
        said = TEXT + word.encode()
        for name, data in (("a", NOISE), ("b", said)):
            writer.add({name: TensorSource.of("uint8", (len(data),), data)})
    return path


@functools.cache
def sources() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dsdformat-crash-")


@functools.cache
def made(product: Product) -> Path:
    """What a product is before it is replaced, to be copied from a folder of this process."""
    path = Path(tempfile.mkdtemp(dir=sources().name)) / "old"
    product.save(path, "old")
    return path


def contents(root: Path) -> dict[str, bytes | None]:
    """All files under a folder with their bytes, and all folders."""
    found: dict[str, bytes | None] = {}
    for folder, folders, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        found |= {f"{inside}/{name}": None for name in folders}
        found |= {f"{inside}/{name}": Path(folder, name).read_bytes() for name in files}
    return found


def sum_of(root: Path) -> bytes:
    """A digest of all that is under a folder."""
    said = hashlib.sha256()
    for name, data in sorted(contents(root).items()):
        kind = "folder" if data is None else str(len(data))
        said.update(f"{name}\0{kind}\0".encode() + (data or b""))
    return said.digest()


# What was found in files, by their digest: the same files are verified once.
_words: dict[tuple[Save, bytes], str | None] = {}


def converting(to: str) -> Callable[..., None]:
    """Return what converts a checkpoint to a kind."""
    return lambda path, word, **options: convert(source(word), path, to=to, **options)


def export(path: Path, word: str, **options: Any) -> None:
    """Export a model from torch, as a Hugging Face folder."""
    import torch

    import dsdformat.torch as dsd

    both = {"a": NOISE, "b": TEXT + word.encode()}
    state = {
        name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in both.items()
    }
    dsd.export_safetensors(path, state, **options)


def save_file(path: Path, word: str, **options: Any) -> None:
    """Write one file as converters do, piece after piece."""
    target = FileTarget(path, **options)
    try:
        with SinkWriter(target.sink()) as file:
            for at in range(0, len(NOISE), 2000):
                file.write(NOISE[at : at + 2000])
            file.write(word.encode())
        target.commit()
    except BaseException:
        target.abort()
        raise


def word_of(path: Path) -> str | None:
    """What the checkpoint at a path says, after every byte was checked; None if there is none."""
    report = dsdformat.verify(path, threads=1)
    if [problem.code for problem in report.problems] == ["no_manifest"]:
        return None
    report.raise_if_bad()
    assert report.unlisted == ()
    with dsdformat.open(path, threads=1) as checkpoint:
        return checkpoint.user["word"]


def word_of_file(path: Path) -> str | None:
    """What the file at a path says, if it has all before; None if there is none."""
    if not path.exists():
        return None
    data = path.read_bytes()
    assert data[: len(NOISE)] == NOISE
    return data[len(NOISE) :].decode()


def word_of_converted(path: Path) -> str | None:
    """What a checkpoint of others at a path says, if it has all before; None if there is none."""
    if not path.exists():
        return None
    with open_any(path) as opened:
        opened.verify()
        found = {name: bytes(tensor.read()) for name, tensor in opened}
    assert found["a"] == NOISE
    assert found["b"].startswith(TEXT)
    return found["b"][len(TEXT) :].decode()


@dataclass(frozen=True, slots=True)
class Product:
    """What a save makes.

    Attributes:
        save: Makes one in the plainest way.
        begin: Begins to make one in the place of another.
        word_of: Says what is there, or None.
    """

    save: Callable[..., None]
    begin: Callable[[Path], Any]
    word_of: Callable[[Path], str | None]


CHECKPOINT = Product(save_one, lambda path: dsdformat.create(path, overwrite=True), word_of)
FILE = Product(save_file, lambda path: FileTarget(path, overwrite=True), word_of_file)


def converted_file(to: str) -> Product:
    return Product(converting(to), lambda path: FileTarget(path, overwrite=True), word_of_converted)


def converted_folder(to: str) -> Product:
    def begin(path: Path) -> LocalTarget:
        return LocalTarget(path, overwrite=True, guard=folder_guard(()))

    return Product(converting(to), begin, word_of_converted)


@dataclass(frozen=True, slots=True)
class Save:
    """A way to save.

    Attributes:
        run: Saves to a path, with a word to know it by.
        path: Where to, relative to the root.
        replaces: Whether an old checkpoint is there before.
        can_exchange: Whether the system exchanges two names in one step.
        product: What it makes.
        imports: What it imports; before the save, so that no process that is killed does.
    """

    name: str
    run: Callable[..., None]
    path: str = "c"
    replaces: bool = False
    can_exchange: bool = True
    product: Product = CHECKPOINT
    imports: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def prepare(self, root: Path) -> None:
        """Make what is there before."""
        for name in self.imports:
            importlib.import_module(name)
        for word in ("old", "new", "next"):
            source(word)
        root.mkdir(exist_ok=True)
        if self.replaces:
            old = made(self.product)
            (shutil.copytree if old.is_dir() else shutil.copy)(old, root / self.path)

    def save(self, root: Path, word: str = "new") -> None:
        self.run(root / self.path, word, overwrite=self.replaces)

    def save_next(self, root: Path) -> None:
        """Save once more in the plainest way, whatever is there."""
        self.product.save(root / self.path, "next", overwrite=True)

    def word_of(self, root: Path) -> str | None:
        """What is there says; None if there is nothing."""
        key = self, sum_of(root)
        if key not in _words:
            _words[key] = self.product.word_of(root / self.path)
        return _words[key]


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
    Save("file", save_file, product=FILE),
    Save("replace-file", save_file, replaces=True, product=FILE),
    Save("convert-to-dsd", converting("dsd"), replaces=True),
    *(
        Save(f"convert-to-{to}", converting(to), replaces=True, product=product(to))
        for product, kinds in (
            (converted_file, ("safetensors", "torch", "npz")),
            (converted_folder, ("huggingface", "dcp")),
        )
        for to in kinds
    ),
)
if importlib.util.find_spec("torch") is not None:
    TORCH = ("dsdformat.torch",)
    SAVES += (
        Save("new-in-background", save_in_background, imports=TORCH),
        Save("replace-in-background", save_in_background, replaces=True, imports=TORCH),
        Save("new-past-the-cache", save_past_the_cache, imports=TORCH),
        Save("replace-past-the-cache", save_past_the_cache, replaces=True, imports=TORCH),
        Save(
            "replace-from-two-ranks-apart",
            save_from_two_ranks_apart,
            replaces=True,
            imports=TORCH,
        ),
        Save(
            "export",
            export,
            replaces=True,
            product=converted_folder("huggingface"),
            imports=TORCH,
        ),
    )


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
        found = save.word_of(root)
        if found not in allowed:
            faults.append(f"there is {found}, not one of {allowed}")
        dsdformat.create(path.parent / "other").abort()  # a save to another name
        save.product.begin(path).abort()  # one that ends before it has written
        if save.word_of(root) != found:
            faults.append(f"a save that was given up made {save.word_of(root)} of {found}")
        save.save_next(root)
        if save.word_of(root) != "next":
            faults.append(f"the next save gave {save.word_of(root)}")
        if names_in(path.parent) != [path.name]:
            faults.append(f"left over: {names_in(path.parent)}")
    except Exception as error:
        faults.append(repr(error))
    return faults
