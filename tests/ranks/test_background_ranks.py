"""Saves in the background from several ranks: they agree without collectives, or all fail."""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import dsdformat
import dsdformat.torch as dsd
from dsdformat.errors import DistributedError, DsdError, RankDisagreementError
from dsdformat.storage import mailbox
from dsdformat.storage.target import FileSink
from tests.ranks.counting import counted
from tests.ranks.layouts import OPTIMIZERS, Net, Tied, build, everywhere, train
from tests.ranks.test_save_load import shared
from tests.torch_runtime.exact import assert_same

WAIT_S = 30


def trained(layout: str) -> dict[str, Any]:
    model = build(layout, Tied if layout == "ddp" else Net)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    if layout != "tp":  # whose parts torch leaves for the user to join
        train(model, optimizer)
    rank = distributed.get_rank()
    own = dsd.PerRank({"number": rank, "stream": torch.full((3,), rank)})
    return {"model": model, "optimizer": optimizer, "own": own, "table": torch.arange(9).view(3, 3)}


def overwrite(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for one in state["model"].parameters():
            one.fill_(7)
        for kept in state["optimizer"].state.values():
            for one in kept.values():
                one.fill_(7)
    state["table"].zero_()
    state["own"].value.clear()
    del state["model"]


# What is saved


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1-full-orig", "tp", "ddp"])
def test_it_is_the_checkpoint_of_a_plain_save_and_no_rank_talks_to_another(layout):
    state = trained(layout)
    path = shared(f"plain-{layout}")
    wanted = dsd.save(path, state)
    handle = dsd.save(f"{path}-later", state, background=True)
    with counted() as calls:
        overwrite(state)
        handle.wait_staged()
        root = handle.wait()
    assert calls == []
    assert everywhere(root) == [wanted] * 2
    assert dsdformat.verify(f"{path}-later").ok
    assert not [one for one in os.listdir(Path(path).parent) if "partial" in one]


@pytest.mark.ranks(2)
def test_stages_that_have_parts_of_a_model_save_it_together():
    rank = distributed.get_rank()
    stage = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 2)})
    state = {"model": stage, "optimizer": OPTIMIZERS["adamw"](stage.parameters())}
    wanted = dsd.save(shared("stages"), state)
    assert dsd.save(shared("stages-later"), state, background=True).wait() == wanted


@pytest.mark.ranks(2)
def test_training_may_use_its_group_while_saves_follow_each_other():
    # KempnerForge#104
    one = torch.ones(1000)
    for turn in range(50):
        dsd.save(shared("rounds"), {"one": one, "turn": turn}, background=True, overwrite=True)
        if turn % 2:
            distributed.barrier()
        distributed.all_reduce(one)
    found = dsd.load(shared("rounds"), {"one": one.zero_(), "turn": None})
    assert found["turn"] == 49
    assert_same(one, torch.full((1000,), 2.0**49))


@pytest.mark.ranks(2)
def test_files_of_the_call_and_of_all_do_not_grow_with_the_number_of_tensors():
    # orbax#179
    rank, made = distributed.get_rank(), []
    kept = FileSink.__init__

    def noting(self: FileSink, path: Path, **how: Any) -> None:
        made.append((path.name, threading.current_thread() is threading.main_thread()))
        kept(self, path, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSink, "__init__", noting)
        state = {"model": {f"w{number:03}": torch.ones(3) for number in range(400)}}
        dsd.save(shared("few"), state, background=True).wait()
    labels = [f"model-{number:05}-of-00002.safetensors" for number in range(2)]
    drafts = [name for name, _ in made if name.startswith("draft-")]
    assert len(drafts) == 2  # room for a word to others, and the word, with the chunk tables
    written = [one for one in made if one[0] not in drafts]
    assert written == [(labels[rank], False), *([] if rank else [("manifest.dsd", False)])]
    assert sorted(os.listdir(shared("few"))) == ["manifest.dsd", *labels]


@pytest.mark.ranks(2)
def test_groups_of_some_ranks_save_by_themselves():
    rank = distributed.get_rank()
    groups = [distributed.new_group([0]), distributed.new_group([1])]
    handle = dsd.save(shared(f"group{rank}"), {"rank": rank}, group=groups[rank], background=True)
    roots = everywhere(handle.wait())
    assert roots[0] != roots[1]


# What is refused


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["value", "path", "exists", "foreground", "numbers"])
def test_what_can_be_refused_is_refused_by_the_call_on_every_rank(what):
    rank = distributed.get_rank()
    there = dsd.save(shared(f"there-{what}"), {"a": 1})
    state: dict[str, Any] = {"a": torch.ones(3)}
    path, background = shared(f"refused-{what}"), True
    if what == "value" and rank:
        state["f"] = dsd.PerRank(print)
    elif what == "path":
        path += str(rank)
    elif what == "exists":
        path = shared(f"there-{what}")
    elif what == "foreground":
        background = rank == 0
    elif what == "numbers":
        state["step"] = rank
    with pytest.raises(DsdError) as caught:
        dsd.save(path, state, background=background)
    assert len(set(everywhere(str(caught.value)))) == 1
    assert isinstance(caught.value, RankDisagreementError) == (
        what in ("path", "foreground", "numbers")
    )
    names = [one for one in os.listdir(Path(path).parent) if what in one]
    distributed.barrier()
    assert names == [f"there-{what}"]
    assert dsd.save(shared(f"next-{what}"), {"a": 1}, background=True).wait() == there


# What fails


def failing_disk(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    real = os.pwritev

    def pwritev(fd: int, pieces: Any, byte_offset: int) -> int:
        if "/draft-" in os.readlink(f"/proc/self/fd/{fd}"):  # the room that a word has
            return real(fd, pieces, byte_offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if distributed.get_rank() == rank:
        monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("asked", [True, False])
def test_a_failure_of_one_rank_reaches_all_handles(failing, asked):
    name = f"failing{failing}{asked}"
    first = dsd.save(shared(name), {"old": 1})
    state = trained("fsdp2")
    with pytest.MonkeyPatch.context() as monkeypatch:
        failing_disk(monkeypatch, failing)
        handle = dsd.save(shared(name), state, background=True, overwrite=True)
        assert handle._ended.wait(WAIT_S)
    told = handle.wait if asked else functools.partial(dsd.save, shared(f"{name}-next"), state)
    with pytest.raises(DistributedError, match=f"save failed on rank {failing}: .*No space") as one:
        told()
    assert list(one.value.failures) == [failing]
    assert one.value.code == "rank_failed"
    assert len(set(everywhere(str(one.value)))) == 1
    assert dsdformat.open(shared(name)).root == first
    assert [each for each in os.listdir(Path(shared(name)).parent) if name in each] == [name]
    distributed.barrier()
    second = dsd.save(shared(name), state, background=True, overwrite=True).wait()
    assert dsdformat.open(shared(name)).root == second


@pytest.mark.ranks(2)
def test_an_error_that_one_rank_asked_for_is_still_no_hang_at_the_next_save():
    path, state = shared("half-asked"), trained("fsdp2")
    with pytest.MonkeyPatch.context() as monkeypatch:
        failing_disk(monkeypatch, 1)
        handle = dsd.save(path, state, background=True)
        if distributed.get_rank() == 0:
            with pytest.raises(DistributedError):
                handle.wait()
        assert handle._ended.wait(WAIT_S)
    with pytest.raises(DistributedError, match="No space"):
        dsd.save(path, state)
    dsd.save(path, state)


# Who dies


def save_and_die(path: str, killed: int, limit: float, strangers: bool) -> str:
    """What this rank is told when one is killed while it writes."""
    rank = distributed.get_rank()
    state = trained("fsdp2")
    if rank == killed:
        FileSink.close = lambda sink: os.kill(os.getpid(), signal.SIGKILL)
    if strangers:  # as on machines of which none sees the locks of another
        mailbox._machine = f"machine {rank}".encode
    how = dsd.Background(limit=timedelta(seconds=limit))
    handle = dsd.save(path, state, overwrite=True, background=how)
    with pytest.raises(DistributedError) as caught:
        handle.wait()
    assert list(caught.value.failures) == [killed]
    return str(caught.value)


@pytest.mark.parametrize("killed", [1, 0])
@pytest.mark.parametrize("strangers", [False, True], ids=["seen", "unseen"])
def test_a_rank_that_is_killed_while_it_writes_ends_the_waits_of_the_others(
    ranks, tmp_path, killed, strangers
):
    path = tmp_path / "saved" / "c"
    first = dsd.save(path, {"old": torch.ones(3)})
    world = 2 if strangers else 3
    run = ranks(world, killed=[killed])
    told = run(save_and_die, str(path), killed, 3 if strangers else 600, strangers)
    assert told.pop(killed) is None
    why = "nothing was heard of it in 3 s" if strangers else "the process has ended"
    assert why in told[0]
    assert told[0].startswith(f"save failed on rank {killed}: ")
    assert len(set(told)) == 1
    assert dsdformat.verify(path, digest=first).ok
    dsd.save(path, {"new": torch.ones(3)}, overwrite=True, background=True).wait()
    assert os.listdir(path.parent) == ["c"]
