"""Conversions that ranks share: the bytes of one process, no model, and nothing half-made."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import dsdformat
import dsdformat.numpy
import dsdformat.torch as dsd
from dsdformat.convert import content_digest, convert, copying, open_any
from dsdformat.errors import DsdError
from dsdformat.limits import MIB
from dsdformat.storage.target import FileSink
from tests.ranks.test_export_ranks import contents, shared
from tests.ranks.test_peaks import peak

TO = (
    ("dsd", "", {}),
    ("dsd", "", {"codec": "planes+zstd"}),
    ("dsd", "", {"codec": lambda name: "zstd" if "exp_avg" in name else "raw"}),
    ("torch", ".pt", {}),
    ("safetensors", ".safetensors", {"select": "model"}),
    ("huggingface", "", {"select": "model", "max_shard_bytes": 3000}),
)


@functools.cache
def pair() -> Any:
    """A group of ranks 0 and 1."""
    return distributed.new_group([0, 1])


def trained(*, seed: int = 0, steps: int = 2) -> dict[str, Any]:
    """A model under FSDP2, and AdamW with two groups."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 70), nn.BatchNorm1d(70), nn.Linear(70, 3, bias=False))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    weights = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": weights, "weight_decay": 0.5}, {"params": others, "lr": 0.3}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optim": optimizer, "step": steps}


def made(path: str) -> Any:
    return contents(Path(path)) if os.path.isdir(path) else Path(path).read_bytes()


# B138


@pytest.mark.ranks(4)
def test_any_number_of_ranks_makes_the_bytes_of_one_process():
    """Of a model and AdamW that four ranks have saved, and of pieces of a few bytes too."""
    path, two, rank = shared(), pair(), distributed.get_rank()
    dsd.save(path, trained())
    for number, (to, ending, options) in enumerate(TO):
        name = f"{path}-{number}"
        if rank == 0:
            convert(path, f"{name}-1{ending}", to=to, **options)
        small = {"PIECE_NBYTES": 64, "WIDE_NBYTES": 640}
        with mock.patch.multiple(copying, **small) if number % 2 else contextlib.nullcontext():
            told = [dsd.convert(path, f"{name}-4{ending}", to=to, **options)]
            if rank < 2:
                told.append(dsd.convert(path, f"{name}-2{ending}", to=to, group=two, **options))
        distributed.barrier()
        expected = made(f"{name}-1{ending}")
        assert made(f"{name}-4{ending}") == expected
        assert made(f"{name}-2{ending}") == expected
        assert all((one.tensors, one.to) == (told[0].tensors, to) for one in told)
        assert to != "dsd" or told[0].root == dsdformat.open(f"{name}-1").root


@pytest.mark.ranks(4)
def test_a_training_comes_back_from_one_writers_files_onto_its_shards():
    """To files of one writer and to one file, back from that, and loaded on four ranks."""
    path, two, rank = shared(), pair(), distributed.get_rank()
    state = trained()
    dsd.save(path, state)
    if rank < 2:
        dsd.convert(path, f"{path}-one", to="dsd", group=two)
        dsd.convert(f"{path}-one", f"{path}.pt", group=two)
        torch.load(f"{path}.pt", weights_only=True, mmap=True)
        dsd.convert(f"{path}.pt", f"{path}-back", to="dsd", group=two)
    distributed.barrier()
    digests = set()
    for name in (path, f"{path}-one", f"{path}-back"):
        with open_any(name) as opened:
            digests.add(content_digest(opened.tree))
    assert len(digests) == 1
    again = trained(seed=1, steps=1)
    assert dsd.load(f"{path}-back", again)["step"] == 2
    check_equal(again, state)


def check_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare the shards of two trainings."""
    for found, wanted in zip(shards_of(one), shards_of(other), strict=True):
        assert torch.equal(found, wanted)


def shards_of(state: dict[str, Any]) -> list[torch.Tensor]:
    tensors = list(state["model"].state_dict().values())
    for entry in state["optim"].state_dict()["state"].values():
        tensors += [entry[key] for key in sorted(entry)]
    assert len(tensors) == 8 + 3 * 5
    return [one.to_local() if hasattr(one, "to_local") else one for one in tensors]


@pytest.mark.ranks(4)
def test_what_dcp_has_saved_becomes_the_same_from_one_process_and_from_four():
    path, state = shared(), trained()
    model, optimizer = get_state_dict(state["model"], state["optim"])
    dcp.save({"model": model, "optim": optimizer, "step": 2}, checkpoint_id=path)
    if distributed.get_rank() == 0:
        convert(path, f"{path}-1", to="dsd")
    dsd.convert(path, f"{path}-4", to="dsd")
    distributed.barrier()
    assert made(f"{path}-4") == made(f"{path}-1")
    again = trained(seed=1, steps=1)
    assert dsd.load(f"{path}-4", again)["step"] == 2
    check_equal(again, state)


@pytest.mark.ranks(4)
def test_each_rank_copies_its_part_in_a_few_blocks():
    """Of one tensor of 96 MiB and many small ones: about a quarter, and never the whole."""
    path = shared()
    state = {"w": torch.arange(24 * MIB, dtype=torch.int32).view(12, -1)}
    state |= {f"s{number}": torch.full((40,), number) for number in range(400)}
    dsd.save(path, {"model": state})
    dsd.convert(path, f"{path}-warm", to="huggingface", select="model/s*")
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    risen = peak(dsd.convert, path, f"{path}-hf", to="huggingface", progress=note, select="model")
    done, total = max(seen)
    assert done == total
    assert 16 * MIB <= total <= 32 * MIB
    assert risen < 64
    parts: list[int] = [0] * 4
    distributed.all_gather_object(parts, total)
    assert sum(parts) == 96 * MIB + 400 * 320
    if distributed.get_rank() == 0:
        shutil.rmtree(os.path.dirname(path))


@pytest.mark.ranks(4)
def test_if_one_rank_fails_all_raise_and_nothing_is_half_made():
    path, rank = shared(), distributed.get_rank()
    dsd.save(
        path, {"model": {f"w{number}": torch.full((50,), number) for number in range(8)}, "n": 3}
    )
    dsd.convert(path, f"{path}-old", to="huggingface", select="model")
    before = made(f"{path}-old")

    def attempt(dst: str, **options: Any) -> str:
        with pytest.raises(DsdError) as caught:
            dsd.convert(path, f"{path}-{dst}", **options)
        return f"{caught.value.code}: {caught.value.message}"

    def full(self: FileSink, byte_offset: int, pieces: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(FileSink, "write_at", full if rank == 1 else FileSink.write_at):
        for to in ("dsd", "huggingface", "safetensors", "torch"):
            told = attempt("new", to=to, select="model")
            assert told.startswith("rank_failed: convert failed on rank 1")
            assert "No space left" in told
        told = attempt("old", to="huggingface", select="model", overwrite=True)
        assert told.startswith("rank_failed: convert failed on rank 1")
    assert attempt("old", to="huggingface", select="model").startswith(
        "rank_failed: convert failed on rank 0: "
    )
    assert attempt("new.npz").startswith("bad_argument: an .npz file of numpy is written by one")
    assert attempt("new.pt", form="stream").startswith("bad_argument: the stream form is written")
    assert attempt("new", codec=1).startswith("bad_argument")
    assert attempt("new", select=f"mod*{rank}").startswith("ranks_disagree: what is converted")
    assert attempt("new", to="safetensors").startswith("unsupported_value")
    assert attempt("new", select="modl").startswith("entry_not_found")
    distributed.barrier()
    names = sorted(os.listdir(os.path.dirname(path)))
    assert names == [Path(path).name, f"{Path(path).name}-old"]
    assert made(f"{path}-old") == before


@pytest.mark.ranks(4)
def test_ranks_that_see_other_sources_are_told():
    path, rank = shared(), distributed.get_rank()
    own = f"{path}-source"
    if rank == 0:
        dsdformat.numpy.save(f"{path}-a", {"w": torch.zeros(3).numpy()})
        dsdformat.numpy.save(f"{path}-b", {"w": torch.ones(3).numpy()})
    distributed.barrier()
    real = "b" if rank == 2 else "a"
    with (
        mock.patch("dsdformat.convert.converting.open_any", _redirected(own, f"{path}-{real}")),
        pytest.raises(DsdError, match="what the source holds differs between ranks"),
    ):
        dsd.convert(own, f"{path}-out")
    assert not os.path.exists(f"{path}-out")


def _redirected(name: str, path: str) -> Any:
    return lambda src, **options: open_any(path if src == name else src, **options)
