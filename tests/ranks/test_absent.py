"""A rank that does not come, or hangs, or is slow, or runs out of disk, while others save or load.

Each test makes a group of its own with a short time-out, so that what breaks is that group alone,
and all of them run in one launch.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import Shard, distribute_tensor

import dsdformat
import dsdformat.torch as dsd
from dsdformat.errors import DistributedError, StorageError
from dsdformat.storage.local import LocalStorage
from dsdformat.storage.target import FileSink
from dsdformat.torch import contact
from dsdformat.torch.block_memory import BlockMemory
from tests.ranks.layouts import everywhere, mesh_of
from tests.ranks.test_deaths import leftovers
from tests.ranks.test_save_load import shared

TIMEOUT_S = PATIENCE_S = 2.0
SOON_S = 15.0
ABSENT = 1


def state_of(number: int) -> dict[str, Any]:
    """A stage of a model, a tensor of each rank's own, and one that all have."""
    rank = distributed.get_rank()
    own = {"mine": torch.full((5000,), float(rank + number))}
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(512, 512)})
    return {"model": model, "own": dsd.PerRank(own), "same": torch.ones(3000), "step": number}


def impatient() -> Any:
    """A group whose collectives wait for some seconds alone."""
    return distributed.new_group(timeout=timedelta(seconds=TIMEOUT_S))


def save(path: str, group: Any) -> Any:
    return dsd.save(path, state_of(2), overwrite=True, group=group)


def load(path: str, group: Any) -> Any:
    return dsd.load(path, {**state_of(0), "own": dsd.PerRank(None), "step": None}, group=group)


def save_in_background(path: str, group: Any) -> Any:
    return dsd.save(path, state_of(2), overwrite=True, group=group, background=True)


def save_apart(path: str, group: Any) -> Any:
    return save_in_background(path, group).wait()


def export(path: str, group: Any) -> Any:
    return dsd.export_safetensors(f"{path}-files", state_of(2)["model"], group=group)


def told(call: Callable[[], Any]) -> DistributedError:
    """What this rank is told when it has lost contact."""
    with (
        mock.patch.object(contact, "_PATIENCE_S", PATIENCE_S),
        pytest.raises(DistributedError) as caught,
    ):
        call()
    assert caught.value.code == "ranks_absent"
    assert f"rank {distributed.get_rank()} has lost contact with" in str(caught.value)
    return caught.value


def check_named(call: Callable[[], Any]) -> None:
    """Others are told, soon, which rank does not answer."""
    started = time.monotonic()
    error = told(call)
    assert time.monotonic() - started < SOON_S
    assert list(error.failures) == [ABSENT]
    assert f"has lost contact with rank {ABSENT}: " in str(error)


def check_whole(path: str, first: str) -> None:
    """Nothing half-made is seen, what was there is whole, and the next save works."""
    distributed.barrier()
    assert dsdformat.verify(path, digest=first).ok
    assert not os.path.lexists(f"{path}-files")
    distributed.barrier()
    dsd.save(path, state_of(3), overwrite=True)
    assert leftovers(Path(path).parent) == []
    assert dsd.load(path, {"step": None}, strict=False)["step"] == 3
    distributed.barrier()


CALLS = [save, load, save_in_background, export]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_rank_that_never_comes_is_named_on_all_others(call):
    path = shared(f"never-{call.__name__}")
    first, group = dsd.save(path, state_of(1)), impatient()
    if distributed.get_rank() != ABSENT:
        check_named(lambda: call(path, group))
    check_whole(path, first)


@contextmanager
def hanging(owner: type, method: str, until: Callable[[], object]) -> Iterator[None]:
    """Hang in a method, as a disk does that does not answer."""
    kept = getattr(owner, method)

    def call(*args: Any, **options: Any) -> Any:
        until()
        return kept(*args, **options)

    with mock.patch.object(owner, method, call):
        yield


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("call", "owner", "method"),
    [(save, FileSink, "write_at"), (load, LocalStorage, "read_into")],
    ids=["save", "load"],
)
def test_a_rank_that_hangs_is_named_and_is_told_itself_when_it_goes_on(call, owner, method):
    path = shared(f"hangs-{call.__name__}")
    first, group = dsd.save(path, state_of(1)), impatient()
    given_up = [Path(f"{path}-given-up-by-{rank}") for rank in range(3) if rank != ABSENT]

    def until() -> None:
        while not all(one.exists() for one in given_up):
            time.sleep(0.01)

    if distributed.get_rank() == ABSENT:
        with hanging(owner, method, until):
            told(lambda: call(path, group))
    else:
        check_named(lambda: call(path, group))
        Path(f"{path}-given-up-by-{distributed.get_rank()}").touch()
    check_whole(path, first)


@pytest.mark.ranks(3)
def test_a_rank_that_hangs_where_others_wait_for_its_blocks_is_named():
    path, group = shared("hangs-at-the-gate"), impatient()
    mesh = mesh_of((3,))
    whole = torch.arange(40_000.0).view(200, 200)
    first = dsd.save(path, {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": 1})
    mine = {"w": distribute_tensor(torch.zeros(200, 200), mesh, [Shard(1)])}
    given_up = [Path(f"{path}-given-up-by-{rank}") for rank in range(3) if rank != ABSENT]

    def until() -> None:
        while not all(one.exists() for one in given_up):
            time.sleep(0.01)

    def call() -> Any:
        return dsd.load(path, mine, strict=False, group=group)

    if distributed.get_rank() == ABSENT:
        with hanging(BlockMemory, "_read", until):
            told(call)
    else:
        check_named(call)
        Path(f"{path}-given-up-by-{distributed.get_rank()}").touch()
    check_whole(path, first)


@pytest.mark.ranks(3)
def test_a_rank_that_is_slow_is_waited_for():
    """Longer than ranks wait between two looks at each other, and not as long as the time-out."""
    path = shared("slow")

    def wait() -> None:
        time.sleep(1.5)

    def slow(owner: type, method: str) -> Any:
        return (
            hanging(owner, method, wait) if distributed.get_rank() == ABSENT else mock.MagicMock()
        )

    with slow(FileSink, "close"):
        dsd.save(path, state_of(1))
        first = dsd.save(path, state_of(2), overwrite=True, background=True).wait()
    assert everywhere(first) == [first] * 3
    with slow(LocalStorage, "nbytes"):
        loaded = load(path, None)
    assert loaded["step"] == 2
    assert torch.equal(loaded["own"]["mine"], torch.full((5000,), distributed.get_rank() + 2.0))


class Quota:
    """A disk of which this process may fill so many bytes more; a word has its room already."""

    def __init__(self, nbytes: int) -> None:
        self.left, self.pwritev = nbytes, os.pwritev

    def __call__(self, fd: int, pieces: Any, byte_offset: int) -> int:
        if "/draft-" in os.readlink(f"/proc/self/fd/{fd}"):
            return self.pwritev(fd, pieces, byte_offset)
        data = b"".join(pieces)[: self.left]
        if not data:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        self.left -= len(data)
        return self.pwritev(fd, [data], byte_offset)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("call", [save, save_apart, export], ids=lambda call: call.__name__)
def test_a_rank_whose_quota_is_used_up_is_one_error_on_all(call):
    path = shared(f"quota-{call.__name__}")
    first = dsd.save(path, state_of(1))
    short = distributed.get_rank() == ABSENT
    with (
        mock.patch("os.pwritev", Quota(5000)) if short else mock.MagicMock(),
        pytest.raises(DistributedError, match=f"failed on rank {ABSENT}: .*quota") as caught,
    ):
        call(path, None)
    assert list(caught.value.failures) == [ABSENT]
    assert isinstance(caught.value.failures[ABSENT], StorageError)
    assert len(set(everywhere(str(caught.value)))) == 1
    check_whole(path, first)
