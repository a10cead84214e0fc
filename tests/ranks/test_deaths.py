"""A rank that fails, or is killed, while ranks save or load: what others are told, what is left."""

from __future__ import annotations

import errno
import functools
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import Shard, distribute_tensor

import dsdformat
import dsdformat.torch as dsd
from dsdformat import Checkpoint
from dsdformat.errors import (
    DistributedError,
    EntryNotFoundError,
    MismatchError,
    StorageError,
    UnsupportedValueError,
)
from dsdformat.storage.host_gate import HostGate
from dsdformat.storage.local import LocalStorage
from dsdformat.storage.mailbox import Mailbox
from dsdformat.storage.target import FileSink, JoinedTarget, LocalTarget
from dsdformat.torch import background, contact, save_together, shared_reads
from dsdformat.torch.block_memory import BlockMemory
from dsdformat.torch.comm import Comm
from dsdformat.torch.loading import Loading
from dsdformat.writer import PartWriter
from tests.ranks.launching import Call, Launch
from tests.ranks.layouts import everywhere, mesh_of
from tests.ranks.test_save_load import shared

GROUP_TIMEOUT_S = 60.0  # nobody waits for it
SOON_S = 15.0
PATIENCE_S, LOOK_S = 1.0, 0.1  # for others that notice it too


def state_of(number: int) -> dict[str, Any]:
    """Whole tensors and one of each rank's own, so that each has something to write and read."""
    own = {"mine": torch.full((1000,), distributed.get_rank())}
    large = torch.full((1000, 10), float(number))
    return {"a": large, "own": dsd.PerRank(own), "step": number, "kept": {"n": 1}}


def be_quick() -> None:
    contact._PATIENCE_S, contact._LOOK_S = PATIENCE_S, LOOK_S


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """An object of a state that kills the process that looks at it."""

    def state_dict(self) -> dict[str, Any]:
        die()
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@contextmanager
def dying(owner: Any, method: str, *, after: bool = False) -> Iterator[None]:
    """Be killed when a method is called, or once it has done its work."""
    kept = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        if after:
            kept(*args, **kwargs)
        die()

    with mock.patch.object(owner, method, call):
        yield


WRITING: dict[str, Callable[[], Any]] = {
    "writing": lambda: dying(FileSink, "write_at"),
    "written": lambda: dying(FileSink, "close", after=True),
    "committing": lambda: dying(LocalTarget, "commit"),
    "committed": lambda: dying(LocalTarget, "commit", after=True),
}


def save_and_die(path: str, phase: str, dead: int) -> str:
    """Save twice; be killed in the second save, or return what this rank is told."""
    be_quick()
    dsd.save(path, state_of(1))
    state = state_of(2)
    is_dead = distributed.get_rank() == dead
    if is_dead and phase == "looking":
        state["kept"] = Deadly()
    started = time.monotonic()
    with WRITING[phase]() if is_dead and phase in WRITING else mock.MagicMock():
        try:
            dsd.save(path, state, overwrite=True)
        except DistributedError as error:
            assert time.monotonic() - started < SOON_S
            return str(error)
    return "nothing"


def load_and_die(path: str, phase: str, dead: int) -> str:
    """Load; be killed, or return what this rank is told."""
    be_quick()
    dsd.save(path, state_of(1))
    state: dict[str, Any] = {"a": torch.zeros(1000, 10), "own": dsd.PerRank(None), "step": None}
    is_dead = distributed.get_rank() == dead
    if is_dead and phase == "looking":
        state["kept"] = Deadly()
    if phase == "passing-on-to-some" and distributed.get_rank() == 3:
        del state["a"]
    started = time.monotonic()
    deadly = {
        "reading": lambda: mock.patch.object(LocalStorage, "read_into", _dying_at_data),
        "passing-on": lambda: mock.patch("dsdformat.torch.shared_reads.pass_on", die),
        "passing-on-to-some": lambda: mock.patch("dsdformat.torch.shared_reads.pass_on", die),
    }
    with deadly[phase]() if is_dead and phase in deadly else mock.MagicMock():
        try:
            dsd.load(path, state, strict=False)
        except DistributedError as error:
            assert time.monotonic() - started < SOON_S
            return str(error)
    return "nothing"


def load_columns_and_die(path: str, phase: str, dead: int) -> str:
    """Load columns of what was saved by rows; be killed, or return what this rank is told."""
    be_quick()
    whole = torch.arange(40_000.0).view(200, 200)
    rank, mesh = distributed.get_rank(), mesh_of((distributed.get_world_size(),))
    dsd.save(path, {"w": distribute_tensor(whole, mesh, [Shard(0)])})
    deadly = {
        "reading-blocks": lambda: mock.patch.object(BlockMemory, "_read", die),
        "taking-blocks": lambda: mock.patch.object(BlockMemory, "_take", die),
        "at-the-gate": lambda: dying(HostGate, "tell", after=True),
        "behind-the-gate": lambda: dying(HostGate, "close"),
    }
    started = time.monotonic()
    with deadly[phase]() if rank == dead else mock.MagicMock():
        try:
            dsd.load(path, {"w": distribute_tensor(torch.zeros(200, 200), mesh, [Shard(1)])})
        except DistributedError as error:
            assert time.monotonic() - started < SOON_S
            return str(error)
    return "nothing"


_read_into = LocalStorage.read_into


def _dying_at_data(self: LocalStorage, label: str, byte_offset: int, into: memoryview) -> int:
    if label != "manifest.dsd":
        die()
    return _read_into(self, label, byte_offset, into)


def told(launcher: Any, folder: Path, function: str, args: Any, world_size: int) -> list[Any]:
    """Run a call in which a rank dies; return what each of the others says, and None for it."""
    call = Call(__name__, function, args)
    launch = Launch((call,), world_size, folder, limit_s=40, group_timeout_s=GROUP_TIMEOUT_S)
    (outcome,) = launcher.run(launch)
    assert "killed by SIGKILL" in (outcome.failure or "")
    rows = []
    for rank in range(world_size):
        raw = (folder / f"rank{rank}").read_bytes()
        rows.append(pickle.loads(raw) if raw else None)
    return [row and row[1] for row in rows]


# A pair of ranks for each phase, all in one launch: which of the pair dies, where, and whether the
# new checkpoint is there then. With those of the launches above, all phases of a save, of one in
# the background and of a load, in their order.
Phase = tuple[Callable[[], Any], int, bool]
SAVE_PHASES: dict[str, Phase] = {
    "capturing": (lambda: dying(save_together, "named_leaves"), 1, False),
    "captured": (lambda: dying(save_together, "mergeable"), 0, False),
    "begun": (lambda: dying(LocalTarget, "__init__", after=True), 0, False),
    "joined": (lambda: dying(JoinedTarget, "__init__", after=True), 1, False),
    "planned": (lambda: dying(PartWriter, "plan", after=True), 1, False),
    "flushing": (lambda: dying(FileSink, "close"), 1, False),
    "telling-chunks": (lambda: dying(Comm, "collect"), 1, False),
    "waiting": (lambda: dying(Comm, "collect", after=True), 1, True),
}
BACKGROUND_PHASES: dict[str, Phase] = {
    "apart-copied": (lambda: dying(background, "stage", after=True), 0, False),
    "apart-joined": (lambda: dying(Mailbox, "__init__", after=True), 1, False),
    "apart-telling": (lambda: dying(Mailbox, "leave"), 1, False),
    "apart-told": (lambda: dying(Mailbox, "leave", after=True), 1, True),
    "apart-committing": (lambda: dying(LocalTarget, "commit"), 0, False),
    "apart-committed": (lambda: dying(LocalTarget, "commit", after=True), 0, True),
}
LOAD_PHASES: dict[str, Phase] = {
    "agreeing-to-load": (lambda: dying(Comm, "check_told"), 0, False),
    "opening": (lambda: dying(LocalStorage, "__init__", after=True), 1, False),
    "comparing": (lambda: dying(Loading, "check"), 0, False),
    "made": (lambda: dying(Loading, "prepare", after=True), 1, False),
    "finding-others": (lambda: dying(shared_reads, "alike_among"), 0, False),
    "sharing-out": (lambda: dying(shared_reads, "read"), 1, False),
    "read": (lambda: dying(shared_reads, "mark_changed"), 0, False),
    "ending": (lambda: dying(Checkpoint, "close"), 0, False),
    "placing": (lambda: dying(Loading, "run"), 1, False),
}
PHASES = {**SAVE_PHASES, **BACKGROUND_PHASES, **LOAD_PHASES}


def die_in_pairs(folder: str) -> str | None:
    """Be one of a pair, one of which dies in a phase; return what the other is told."""
    be_quick()
    rank = distributed.get_rank()
    pairs = [distributed.new_group([2 * one, 2 * one + 1]) for one in range(len(PHASES))]
    phase, group = list(PHASES)[rank // 2], pairs[rank // 2]
    dead, (kill, index, _) = rank % 2 == PHASES[phase][1], PHASES[phase]
    path = f"{folder}/{phase}/ck"
    dsd.save(path, state_of(1), group=group)
    if phase in LOAD_PHASES:
        state = {"a": torch.zeros(1000, 10), "own": dsd.PerRank(None), "step": None}
        call = functools.partial(dsd.load, path, state, strict=False, group=group)
    else:
        apart = phase in BACKGROUND_PHASES
        call = functools.partial(
            dsd.save, path, state_of(2), overwrite=True, group=group, background=apart
        )
    started, error = time.monotonic(), None
    with kill() if dead else mock.MagicMock():
        try:
            found = call()
            if phase in BACKGROUND_PHASES:
                found.wait()
        except DistributedError as caught:
            error = caught
    assert time.monotonic() - started < SOON_S
    assert not dead
    lost = 2 * (rank // 2) + index
    if error is not None:
        assert list(error.failures) == [lost]
        assert f"lost contact with rank {lost}:" in str(error) or f"on rank {lost}: " in str(error)
    return None if error is None else error.code


def leftovers(folder: Path) -> list[Path]:
    return [one for one in folder.iterdir() if "partial" in one.name or "replaced" in one.name]


@pytest.mark.parametrize(
    ("phase", "dead", "world_size"),
    [
        ("looking", 1, 2),
        ("writing", 1, 4),
        ("writing", 0, 2),
        ("written", 1, 2),
        ("committing", 0, 4),
        ("committed", 0, 2),
    ],
)
def test_a_rank_that_is_killed_leaves_a_whole_checkpoint_and_others_are_told(
    launcher, tmp_path, phase, dead, world_size
):
    path = tmp_path / "saved" / "ck"
    path.parent.mkdir()
    rows = told(launcher, tmp_path / "launch", "save_and_die", (str(path), phase, dead), world_size)
    for rank, said in enumerate(rows):
        named = f"rank {rank} has lost contact with rank {dead}: "
        assert (said is None) if rank == dead else said.startswith(named)
    assert dsdformat.verify(path).ok
    assert dsd.load(path)["step"] == (2 if phase == "committed" else 1)
    assert len(leftovers(path.parent)) == (dead == 0 and phase != "committed")
    dsd.save(path, {"step": 3}, overwrite=True)
    assert dsd.load(path) == {"step": 3}
    assert leftovers(path.parent) == []


def test_a_rank_that_is_killed_in_any_phase_is_named_to_the_other_and_nothing_is_lost(
    ranks, tmp_path
):
    killed = [2 * pair + dead for pair, (_, dead, _) in enumerate(PHASES.values())]
    run = ranks(2 * len(PHASES), killed=killed, group_timeout_s=20)
    said = run(die_in_pairs, str(tmp_path / "saved"))
    codes = {
        phase: said[2 * pair + 1 - dead]
        for pair, (phase, (_, dead, _)) in enumerate(PHASES.items())
    }
    otherwise = dict.fromkeys(BACKGROUND_PHASES, "rank_failed") | {
        "apart-copied": "ranks_absent",  # in the call, where ranks still talk to each other
        "apart-joined": "ranks_absent",
        "apart-told": None,  # its part is there
        "ending": None,  # nobody waits for it any more
    }
    assert codes == dict.fromkeys(PHASES, "ranks_absent") | otherwise
    for phase, (_, _, committed) in PHASES.items():
        path = tmp_path / "saved" / phase / "ck"
        assert dsdformat.verify(path).ok, phase
        assert dsd.load(path)["step"] == 1 + committed, phase
        dsd.save(path, {"step": 3}, overwrite=True)
        assert os.listdir(path.parent) == ["ck"], phase


@pytest.mark.parametrize(
    ("phase", "dead", "world_size"),
    [("looking", 1, 2), ("reading", 0, 2), ("passing-on", 2, 4), ("passing-on-to-some", 1, 4)],
)
def test_a_rank_that_is_killed_while_it_loads_is_missed_by_others(
    launcher, tmp_path, phase, dead, world_size
):
    path = tmp_path / "ck"
    rows = told(launcher, tmp_path / "launch", "load_and_die", (str(path), phase, dead), world_size)
    for rank, said in enumerate(rows):
        named = f"rank {rank} has lost contact with rank {dead}: "
        assert (said is None) if rank == dead else said.startswith(named)
    assert dsdformat.verify(path).ok


@pytest.mark.parametrize(
    ("phase", "dead"),
    [("reading-blocks", 1), ("taking-blocks", 0), ("at-the-gate", 1), ("behind-the-gate", 2)],
)
def test_a_rank_that_is_killed_while_others_take_blocks_of_it_is_missed_by_them(
    launcher, tmp_path, phase, dead
):
    args = (str(tmp_path / "ck"), phase, dead)
    rows = told(launcher, tmp_path / "launch", "load_columns_and_die", args, 3)
    for rank, said in enumerate(rows):
        named = f"rank {rank} has lost contact with rank {dead}: "
        assert (said is None) if rank == dead else said.startswith(named), (rank, said)


# Failures of ranks that go on


def full_disk(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_entry(self: LocalStorage, label: str, byte_offset: int, into: memoryview) -> int:
    if label == "manifest.dsd":
        return _read_into(self, label, byte_offset, into)
    raise StorageError("the file cannot be read: Input/output error")


def failing(what: str) -> Any:
    if what == "full-disk":
        return mock.patch("os.pwritev", full_disk)
    return mock.patch.object(LocalStorage, "read_into", no_entry)


# One rank fails: all raise that, with its cause (B148).


@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks_that_fail", [(0,), (1,), (1, 2)], ids=str)
def test_a_full_disk_on_some_ranks_is_one_error_on_all(ranks_that_fail):
    path = shared("full")
    first = dsd.save(path, state_of(1), overwrite=True)
    fails = distributed.get_rank() in ranks_that_fail
    with (
        pytest.raises(DistributedError, match="No space left on device") as caught,
        failing("full-disk") if fails else mock.MagicMock(),
    ):
        dsd.save(path, state_of(2), overwrite=True)
    assert list(caught.value.failures) == list(ranks_that_fail)
    assert all(isinstance(one, StorageError) for one in caught.value.failures.values())
    assert len(set(everywhere(str(caught.value)))) == 1
    assert dsdformat.open(path).root == first
    assert leftovers(Path(path).parent) == []
    distributed.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("share_reads", [True, False], ids=["shared", "by-itself"])
def test_a_file_that_one_rank_cannot_read_is_one_error_on_all(share_reads):
    path = shared(f"unreadable-{share_reads}")
    dsd.save(path, state_of(1))
    state = {"a": torch.zeros(1000, 10), "own": dsd.PerRank(None), "step": None}
    with (
        pytest.raises(DistributedError, match=r"on rank 1: .*cannot be read") as caught,
        failing("bad-file") if distributed.get_rank() == 1 else mock.MagicMock(),
    ):
        dsd.load(path, state, share_reads=share_reads)
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.failures[1], StorageError)
    assert len(set(everywhere(str(caught.value)))) == 1


def misfit(what: str) -> tuple[dict[str, Any], dict[str, Any], type[Exception]]:
    """A state, how else to load it, and what is wrong with it."""
    fits: dict[str, Any] = {"a": torch.zeros(1000, 10), "own": dsd.PerRank(None), "step": None}
    if what == "shape":
        return {**fits, "a": torch.zeros(9)}, {}, MismatchError
    if what == "dtype":
        return {**fits, "a": torch.zeros(1000, 10, dtype=torch.int32)}, {}, MismatchError
    if what == "missing":
        return {**fits, "b": torch.zeros(1)}, {}, MismatchError
    if what == "kind":
        return {**fits, "a": {"b": torch.zeros(1)}}, {}, MismatchError
    assert what == "selected"
    return fits, {"select": "nothing*"}, EntryNotFoundError


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["shape", "dtype", "missing", "kind", "selected"])
def test_a_template_that_differs_on_one_rank_is_one_error_and_changes_nothing(what):
    path = shared(f"template-{what}")
    dsd.save(path, state_of(1))
    state, options, kind = misfit(what)
    if distributed.get_rank() == 0:
        state, options = misfit("selected")[0], {}
    with pytest.raises(DistributedError, match="on rank 1") as caught:
        dsd.load(path, state, **options)
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.failures[1], kind)
    assert len(set(everywhere(str(caught.value)))) == 1
    assert all(not one.any() for one in state.values() if isinstance(one, torch.Tensor))


@pytest.mark.ranks(2)
def test_what_one_rank_has_as_a_tensor_and_another_as_a_dict_is_one_error():
    path = shared("structure")
    state: dict[str, Any] = {"a": torch.ones(3)}
    if distributed.get_rank() == 1:
        state = {"a": {"b": torch.ones(3)}}
    with pytest.raises(DistributedError) as caught:
        dsd.save(path, state)
    assert "a" in str(caught.value)
    assert len(set(everywhere(str(caught.value)))) == 1
    assert not Path(path).exists()


@pytest.mark.ranks(2)
def test_what_both_ranks_cannot_store_is_told_for_each():
    rank = distributed.get_rank()
    with pytest.raises(DistributedError) as caught:
        dsd.save(shared("both"), {f"own{rank}": dsd.PerRank(lambda: None)})
    assert list(caught.value.failures) == [0, 1]
    assert all(isinstance(one, UnsupportedValueError) for one in caught.value.failures.values())
    assert len(set(everywhere(str(caught.value)))) == 1
