"""A writer that is killed at any step of a save: what a reader sees, and what the next save does.

A child process saves and ends itself with `os._exit` at its n-th operation on the disk, so that
no handler, no `finally` and no lock survives. Spec section 15 says what must be there after.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import dsdformat
from dsdformat import FormatError, TensorSource

# Operations: write, flush, rename, exchange, and each removal of a file or folder.
CHILD = """
import os, sys
import dsdformat
from dsdformat.storage import target

path, last, exchange, overwrite = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
count = 0

def watch(owner, name):
    inner = getattr(owner, name)
    def call(*arguments, **options):
        global count
        count += 1
        if count == last:
            os._exit(9)
        return inner(*arguments, **options)
    setattr(owner, name, call)

if exchange == "no-exchange":
    target._exchange = lambda *_: False
else:
    watch(target, "_exchange")
for name in ("pwritev", "fsync", "rename", "unlink", "rmdir"):
    watch(os, name)
with dsdformat.create(path, overwrite=overwrite == "overwrite", user={"word": "new"}) as writer:
    source = dsdformat.TensorSource.of("uint8", (5000,), bytes(5000))
    writer.add({"model": {"w": source}})
print(count)
"""

# How many operations a save takes in each of the ways; one more is a save that ends.
NEW, EXCHANGE, RENAMES = 8, 11, 12
STEPS = [
    *(pytest.param(n, "exchange", "", id=f"new-{n}") for n in range(1, NEW + 1)),
    *(pytest.param(n, "exchange", "overwrite", id=f"exchange-{n}") for n in range(1, EXCHANGE + 1)),
    *(pytest.param(n, "no-exchange", "overwrite", id=f"rename-{n}") for n in range(1, RENAMES + 1)),
]


def save(path: Path, word: str, **options: object) -> None:
    with dsdformat.create(path, user={"word": word}, **options) as writer:
        writer.add({"model": {"w": TensorSource.of("uint8", (5000,), bytes(5000))}})


def word_of(path: Path) -> str | None:
    """What the checkpoint at a path says, after every byte was checked; None if there is none."""
    report = dsdformat.verify(path)
    if [problem.code for problem in report.problems] == ["no_manifest"]:
        return None
    report.raise_if_bad()
    with dsdformat.open(path) as checkpoint:
        return checkpoint.user["word"]


@pytest.mark.parametrize(
    ("exchange", "overwrite", "steps"),
    [
        ("exchange", "", NEW),
        ("exchange", "overwrite", EXCHANGE),
        ("no-exchange", "overwrite", RENAMES),
    ],
    ids=["new", "exchange", "rename"],
)
def test_a_save_has_the_steps_that_are_tried_here(tmp_path, run_python, exchange, overwrite, steps):
    if overwrite:
        save(tmp_path / "c", "old")
    done = run_python(CHILD, tmp_path / "c", 0, exchange, overwrite)
    assert (done.returncode, done.stdout.strip()) == (0, str(steps)), done.stderr
    assert word_of(tmp_path / "c") == "new"


@pytest.mark.parametrize(("step", "exchange", "overwrite"), STEPS)
def test_a_crash_leaves_the_old_or_the_new_checkpoint_and_the_next_save_cleans_up(
    tmp_path, run_python, step, exchange, overwrite
):
    if overwrite:
        save(tmp_path / "c", "old")
    done = run_python(CHILD, tmp_path / "c", step, exchange, overwrite)
    assert done.returncode == 9, done.stderr
    left = word_of(tmp_path / "c")
    assert left in (("old", "new") if overwrite else (None, "new"))
    dsdformat.create(tmp_path / "d").abort()  # a save to another name
    if left is not None:
        dsdformat.create(tmp_path / "c", overwrite=True).abort()  # one that ends before it wrote
    assert word_of(tmp_path / "c") == left
    save(tmp_path / "c", "next", overwrite=True)
    assert word_of(tmp_path / "c") == "next"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_save_that_never_ended_is_no_checkpoint_and_the_error_says_why(tmp_path, run_python):
    assert run_python(CHILD, tmp_path / "c", 4, "exchange", "").returncode == 9
    with pytest.raises(FormatError, match="not been completed") as error:
        dsdformat.open(tmp_path / "c")
    assert error.value.code == "no_manifest"
