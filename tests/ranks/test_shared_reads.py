"""What several ranks want is read once, and passed on; how much all of them read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import dsdformat
import dsdformat.torch as dsd
from dsdformat.errors import ChecksumError, DistributedError, RankDisagreementError
from dsdformat.storage.host_memory import HostMemory
from dsdformat.torch.alike import alike_among, find_alike, keys_to_tell
from dsdformat.torch.comm import Comm
from dsdformat.torch.common_memory import common_memory
from tests.ranks.counting import data_reads, reads, watched
from tests.ranks.layouts import everywhere, joined
from tests.ranks.shards import mesh_of
from tests.ranks.test_save_load import shared
from tests.torch_runtime.exact import assert_same

BOUND = 1.05


class Block(nn.Module):
    """Two weights of 8 MiB, which are two blocks each, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 2048)
        self.down = nn.Linear(2048, 1024)
        self.norm = nn.LayerNorm(1024)


def columns_and_rows(model: nn.Module) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh_of((distributed.get_world_size(),)), plan)


def rows_only(model: nn.Module) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": ColwiseParallel()}
    return parallelize_module(model, mesh_of((distributed.get_world_size(),)), plan)


def rows_of_columns(model: nn.Module) -> nn.Module:
    mesh = mesh_of((2, 2), ("fsdp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["fsdp"])


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": lambda model: fully_shard(model, mesh=mesh_of((distributed.get_world_size(),))),
    "hsdp": lambda model: fully_shard(model, mesh=mesh_of((2, 2), ("copies", "shards"))),
    "tp-rows": rows_only,
    "tp-columns": columns_and_rows,
    "fsdp-tp": rows_of_columns,
}


def state_of(layout: str, seed: int) -> dict[str, Any]:
    """A model, and an optimizer after one step; all elements differ with the seed."""
    torch.manual_seed(seed)
    model = WRAPS[layout](Block())
    optimizer = torch.optim.AdamW(model.parameters())
    for one in model.parameters():
        one.grad = one.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def save_layouts(paths: dict[str, str]) -> None:
    for layout, path in paths.items():
        dsd.save(path, state_of(layout, 1))


def load_layouts(jobs: list[tuple[str, str]]) -> list[list[tuple[str, int, int]]]:
    """Load each checkpoint into a layout; list what this rank reads of data."""
    found = []
    whole = {path: dsd.load(path) for _, path in jobs}
    for layout, path in jobs:
        state = state_of(layout, 2)
        with reads() as noted:
            dsd.load(path, state)
        found.append(data_reads(noted, path))
        kept = whole[path]
        model = {
            name.removeprefix("module."): one for name, one in state["model"].state_dict().items()
        }
        assert_same(joined(model), kept["model"])
        own = [joined(dict(entry)) for entry in state["optimizer"].state.values()]
        assert_same(own, [dict(kept["optimizer"]["state"][name]) for name in model])
    return found


def nbytes_of(path: str) -> int:
    with dsdformat.open(path) as checkpoint:
        return sum(one.nbytes for one in checkpoint)


def loads(*kinds: tuple[str, str]) -> list[Any]:
    return [pytest.param(*kind, id=f"{kind[0]}-to-{kind[1]}") for kind in kinds]


OF_2 = (
    *(("ddp-2", "ddp"), ("ddp-2", "fsdp2"), ("fsdp2-4", "fsdp2"), ("fsdp2-4", "ddp")),
    *(("fsdp2-4", "tp-rows"), ("fsdp2-4", "tp-columns")),
)
OF_4 = (
    *(("hsdp-4", "hsdp"), ("fsdp2-4", "hsdp")),
    *(("hsdp-4", "fsdp2"), ("ddp-2", "tp-columns"), ("fsdp2-4", "fsdp-tp")),  # parts of blocks
)


@pytest.fixture(scope="module")
def read(launcher, tmp_path_factory) -> dict[Any, Any]:
    """What each rank reads in each of the loads, and how much there is; and where sources are."""
    from tests.ranks.launching import Call, Launch

    folder = tmp_path_factory.mktemp("saved")
    paths = {name: str(folder / name) for name in ("ddp-2", "fsdp2-4", "hsdp-4")}

    def run(world_size: int, function: str, argument: Any) -> Any:
        call = Call(__name__, function, (argument,))
        (outcome,) = launcher.run(Launch((call,), world_size, tmp_path_factory.mktemp("launch")))
        assert outcome.failure is None, outcome.failure
        return outcome.values

    run(2, "save_layouts", {"ddp": paths["ddp-2"]})
    run(4, "save_layouts", {"fsdp2": paths["fsdp2-4"], "hsdp": paths["hsdp-4"]})
    found: dict[Any, Any] = dict(paths)
    for world_size, kinds in ((2, OF_2), (4, OF_4)):
        values = run(
            world_size, "load_layouts", [(target, paths[source]) for source, target in kinds]
        )
        for kind, *per_rank in zip(kinds, *values, strict=True):
            found[kind] = (per_rank, nbytes_of(paths[kind[0]]))
    return found


@pytest.mark.parametrize(("source", "target"), loads(*OF_2, *OF_4))
def test_all_ranks_together_read_little_more_than_there_is(read, source, target):
    per_rank, nbytes = read[source, target]
    total = sum(count for own in per_rank for _, _, count in own)
    print(f"{source} to {target}: {total / nbytes:.3f} of {nbytes} bytes")
    assert total <= BOUND * nbytes


@pytest.mark.parametrize(
    ("source", "target"), loads(("ddp-2", "ddp"), ("fsdp2-4", "ddp"), ("hsdp-4", "hsdp"))
)
def test_replicas_are_read_once_and_evenly(read, source, target):
    per_rank, nbytes = read[source, target]
    spans = sorted(one for own in per_rank for one in own)
    for (label, at, count), (other, begin, _) in zip(spans, spans[1:], strict=False):
        assert label != other or at + count <= begin, f"{label} at {begin} is read twice"
    assert sum(count for _, _, count in spans) == nbytes
    shares = [sum(count for _, _, count in own) for own in per_rank]
    assert max(shares) <= 1.3 * nbytes / len(shares)


@pytest.mark.parametrize(("source", "target"), loads(("ddp-2", "ddp"), ("hsdp-4", "hsdp")))
def test_a_rank_that_loads_what_it_has_saved_opens_its_own_files(read, source, target):
    per_rank, _ = read[source, target]
    for rank, own in enumerate(per_rank):
        assert {label.split("-")[1] for label, _, _ in own} == {f"{rank:05}"}


MESHES: dict[str, tuple[tuple[str, ...], list[tuple[str, int | None, str]]]] = {
    "ddp": (("copies",), []),
    "fsdp2": (("shard",), []),
    "tp-rows": (("tp",), [("*up.*", 0, "tp"), ("*down.*", 0, "tp")]),
    "tp-columns": (("tp",), [("*up.*", 0, "tp"), ("*down.weight", 1, "tp")]),
    "hsdp": (("copies", "shard"), []),
    "fsdp-tp": (("fsdp", "tp"), [("*up.*", 0, "tp"), ("*down.weight", 1, "tp")]),
}


@pytest.mark.parametrize(("source", "target"), loads(*OF_2, *OF_4))
def test_each_rank_reads_what_a_preflight_says(read, source, target):
    per_rank, _ = read[source, target]
    with torch.device("meta"):
        model = Block()
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    axes, shard = MESHES[target]
    mesh = {axes[0]: len(per_rank)} if len(axes) == 1 else dict.fromkeys(axes, 2)
    found = dsd.preflight(read[source], state, mesh, shard=shard)
    assert found.fits, found
    actual = [sum(count for _, _, count in own) for own in per_rank]
    assert found.ranks.read_nbytes.tolist() == pytest.approx(actual, rel=0.001)


def ones(device: str = "cpu") -> dict[str, Any]:
    return {"w": torch.zeros(64, 64, device=device), "n": torch.zeros(3)}


@pytest.mark.ranks(2)
def test_each_rank_reads_by_itself_if_reads_are_not_shared():
    path = shared("by-itself")
    state = {"w": torch.arange(4096.0).view(64, 64), "n": torch.ones(3)}
    dsd.save(path, state)
    counts = []
    for share_reads in (True, False):
        mine = ones()
        with reads() as noted:
            dsd.load(path, mine, share_reads=share_reads)
        assert_same(mine, state)
        counts.append(sum(n for _, _, n in data_reads(noted, path)))
    assert sum(everywhere(counts[0])) == 4 * 4096 + 12
    assert counts[1] == 4 * 4096 + 12


@pytest.mark.ranks(2)
def test_replicas_read_a_foreign_file_once():
    path = shared("foreign.safetensors")
    state = {"w": torch.arange(6e6).view(3000, 2000), "n": torch.ones(3)}
    if distributed.get_rank() == 0:
        save_file(state, path)
    distributed.barrier()
    mine = {name: torch.zeros_like(one) for name, one in state.items()}
    with reads() as noted:
        dsd.load(path, mine)
    assert_same(mine, state)
    counts = everywhere(sum(nbytes for _, _, nbytes in noted))
    assert 24_000_012 <= sum(counts) < 24_010_000
    assert max(counts) < 17 * (1 << 20)


@pytest.mark.ranks(2)
def test_ranks_must_agree_whether_reads_are_shared():
    path = shared("agree")
    dsd.save(path, {"w": torch.ones(64, 64), "n": torch.ones(3)})
    mine = ones()
    with pytest.raises(RankDisagreementError, match="share_reads=True' on rank 0"):
        dsd.load(path, mine, share_reads=distributed.get_rank() == 0)
    assert mine["w"].sum() == 0


@pytest.mark.ranks(2)
def test_ranks_that_load_different_checkpoints_are_told():
    paths = [shared("one"), shared("other")]
    for number, path in enumerate(paths):
        dsd.save(path, {"w": torch.full((64, 64), number), "n": torch.ones(3)})
    roots = [dsdformat.open(path).root for path in paths]
    mine = {"w": torch.zeros(64, 64, dtype=torch.int64), "n": torch.zeros(3)}
    with pytest.raises(RankDisagreementError, match=rf"{roots[0]}.* on rank 0, .*{roots[1]}"):
        dsd.load(paths[distributed.get_rank()], mine)
    assert mine["n"].sum() == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("share_reads", [True, False], ids=["shared", "by-itself"])
def test_what_one_rank_finds_damaged_is_an_error_on_all(share_reads):
    path = shared(f"damaged{share_reads}")
    dsd.save(path, {f"w{n}": torch.ones(64, 64) for n in range(2)})
    distributed.barrier()
    if distributed.get_rank() == 0:
        with dsdformat.open(path) as checkpoint:
            chunk = checkpoint.tensor("w1").chunks[0]
        with (Path(path) / chunk.file).open("r+b") as file:
            file.seek(chunk.byte_offset + 17)
            file.write(b"\xff")
    distributed.barrier()
    mine = {f"w{n}": torch.zeros(64, 64) for n in range(2)}
    with pytest.raises((DistributedError, ChecksumError), match="checksum mismatch.*w1") as caught:
        dsd.load(path, mine, share_reads=share_reads)
    if share_reads:  # one rank reads it
        (failed,) = caught.value.failures.values()
        assert isinstance(failed, ChecksumError)
    assert len(set(everywhere(str(caught.value)))) == 1


@pytest.mark.ranks(3)
def test_what_some_ranks_want_goes_to_those_alone():
    path = shared("some")
    rank = distributed.get_rank()
    state = {name: torch.full((300, 7), ord(name)) for name in "abcd"}
    dsd.save(path, state)
    wanted = [{"a", "b", "c"}, {"a", "b"}, {"a", "d"}][rank]
    mine = {name: torch.zeros(300, 7, dtype=torch.int64) for name in sorted(wanted)}
    with reads() as noted:
        dsd.load(path, mine, strict=False)
    assert_same(mine, {name: state[name] for name in wanted})
    each = 300 * 7 * 8
    assert sum(everywhere(sum(n for _, _, n in data_reads(noted, path)))) == 4 * each


@pytest.mark.ranks(3)
def test_what_is_converted_or_lies_otherwise_is_passed_on_as_it_is_read():
    path = shared("forms")
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(37, 41, generator=generator)
    dsd.save(path, {"a": whole, "b": whole.to(torch.float16), "c": whole.t(), "d": whole[:0]})
    mine = {
        "a": torch.zeros(37, 41, dtype=torch.bfloat16),
        "b": torch.zeros(37, 82, dtype=torch.float16)[:, ::2],
        "c": torch.zeros(37, 41).t() if distributed.get_rank() else torch.zeros(41, 37),
        "d": torch.zeros(0, 41),
    }
    versions = [one._version for one in mine.values()]
    dsd.load(path, mine, dtype={"a": torch.bfloat16})
    assert_same(mine["a"], whole.to(torch.bfloat16))
    assert_same(mine["b"].contiguous(), whole.to(torch.float16))
    assert_same(mine["c"].contiguous(), whole.t().contiguous())
    assert all(one._version > old for one, old in zip(mine.values(), versions, strict=True))


def cut(whole: torch.Tensor, dim: int, into: torch.dtype | None = None) -> Any:
    """A DTensor that is cut along a dim, with zeros if it is to be loaded as a dtype."""
    mesh = mesh_of((distributed.get_world_size(),))
    made = distribute_tensor(whole, mesh, [Shard(dim)])
    return made if into is None else torch.zeros_like(made, dtype=into)


def carried_by(way: str) -> Any:
    """Let ranks get their parts of blocks that others have read in this way."""
    if way == "memory":
        return nullcontext()
    return mock.patch("dsdformat.torch.common_memory.HostMemory", side_effect=OSError)


WAYS = pytest.mark.parametrize("way", ["memory", "messages"])


@pytest.mark.ranks(3)
@WAYS
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_columns_of_what_was_cut_by_rows_are_read_once(codec, way):
    path = shared(f"columns-{codec}-{way}")
    generator = torch.Generator().manual_seed(5)
    wholes = {
        "cast": torch.randn(37, 41, generator=generator),
        "deep": torch.randn(7, 5, 4, generator=generator),
        "half": torch.randn(300, 5, generator=generator).to(torch.bfloat16),
        "narrow": torch.randn(64, 2, generator=generator),  # one rank has no column
    }
    dsd.save(path, {name: cut(one, 0) for name, one in wholes.items()}, codec=codec)
    mine = {name: cut(one, 1, one.dtype) for name, one in wholes.items()}
    mine["cast"] = cut(wholes["cast"], 1, torch.float64)
    with reads() as noted, carried_by(way):
        dsd.load(path, mine, dtype={"cast": torch.float64})
    counts = everywhere(sum(nbytes for _, _, nbytes in data_reads(noted, path)))
    stored = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    assert sum(counts) <= stored
    for name, one in wholes.items():
        assert_same(mine[name].full_tensor(), one.to(mine[name].dtype))


@pytest.mark.ranks(3)
@WAYS
def test_a_damaged_block_that_one_rank_reads_for_all_is_an_error_on_all(way):
    path = shared(f"damaged-columns-{way}")
    whole = torch.arange(4096.0).view(64, 64)
    dsd.save(path, {"w": cut(whole, 0)})
    distributed.barrier()
    if distributed.get_rank() == 0:
        with dsdformat.open(path) as checkpoint:
            chunk = checkpoint.tensor("w").chunks[1]
        with (Path(path) / chunk.file).open("r+b") as file:
            file.seek(chunk.byte_offset + 17)
            file.write(b"\xff")
    distributed.barrier()
    with (
        carried_by(way),
        pytest.raises((DistributedError, ChecksumError), match="checksum mismatch.*of w") as caught,
    ):
        dsd.load(path, {"w": cut(whole, 1, torch.float32)})
    (failed,) = caught.value.failures.values()
    assert isinstance(failed, ChecksumError)
    assert len(set(everywhere(str(caught.value)))) == 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("missing", [(), (1,)], ids=["memory", "messages"])
def test_blocks_are_carried_in_rounds_of_a_bounded_length(missing):
    path = shared(f"rounds-{missing}")
    whole = torch.arange(60_000.0).view(300, 200)
    dsd.save(path, {f"w{n}": cut(whole + n, 0) for n in range(9)})
    mine = {f"w{n}": cut(whole, 1, torch.float32) for n in range(9)}
    sent: list[int] = []
    made: list[int] = []

    def note(_: str, args: Any) -> None:
        sent.append(args[1].nbytes)

    def make(nbytes: int) -> HostMemory:
        if distributed.get_rank() in missing:
            raise OSError
        made.append(nbytes)
        return HostMemory(nbytes)

    limit = 100_000  # a chunk has 80,000 bytes
    with (
        watched(note, ("all_to_all_single",)),
        mock.patch("dsdformat.torch.block_messages.BUCKET_NBYTES", limit),
        mock.patch("dsdformat.torch.block_memory.ROUND_NBYTES", limit),
        mock.patch("dsdformat.torch.common_memory.HostMemory", make),
    ):
        dsd.load(path, mine)
    for number in range(9):
        assert_same(mine[f"w{number}"].full_tensor(), whole + number)
    assert all(nbytes <= 2 * limit + 64_100 for nbytes in made)  # and what is in it
    assert max(sent) <= limit
    if missing:
        assert sum(sent) >= 2 / 3 * 9 * 80_000
    else:
        assert len(made) == 1
        assert sum(sent) <= 10_000


@pytest.mark.ranks(3)
def test_nothing_is_left_of_memory_that_ranks_share_but_what_they_hold():
    comm = Comm()
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(common_memory(comm, 5000 + comm.rank)) as memory:
        views = memory.views
        assert [len(view) for view in views] == [5000, 5001, 5002]
        views[comm.rank][:1] = bytes([comm.rank + 1])
        assert memory.meet(comm.rank) == [0, 1, 2]
        assert [view[0] for view in views] == [1, 2, 3]
        assert memory.meet(9) == [9, 9, 9]
    del views, memory
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strange", ["_machine", "find_memory", "HostGate"])
def test_ranks_that_do_not_all_see_each_other_share_no_memory(strange):
    comm = Comm()
    where = "storage.host_memory" if strange == "_machine" else "torch.common_memory"
    before = len(os.listdir("/proc/self/fd"))
    value = b"another" if strange == "_machine" else None
    fault = OSError if strange == "HostGate" else None
    here = mock.patch(f"dsdformat.{where}.{strange}", return_value=value, side_effect=fault)
    with here if comm.rank == 1 else nullcontext():
        assert common_memory(comm, 100) is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.ranks(3)
def test_who_has_what_is_found_in_bounded_messages():
    rank, comm = distributed.get_rank(), Comm()
    keys = [bytes([number]) * 16 for number in range(12) if number % (rank + 1) == 0]
    moved: list[int] = []
    with watched(lambda _, args: moved.append(args[1].nbytes), ("all_to_all_single",)):
        found = find_alike(comm, keys)
    for key, ranks in zip(keys, found, strict=True):
        assert ranks == tuple(one for one in range(3) if key[0] % (one + 1) == 0)
    assert len(moved) == 4
    assert sum(everywhere(sum(moved))) <= 3 * 2 * 3 * 8 + 22 * (16 + 4 + 16)
    told = comm.gather_values(keys_to_tell(comm, keys))
    assert alike_among(comm, keys, told) == found
    with mock.patch("dsdformat.torch.alike._KEYS_TOLD", 6):  # rank 0 has more
        told = comm.gather_values(keys_to_tell(comm, keys))
    assert [one is None for one in told] == [True, False, False]
    assert alike_among(comm, keys, told) == found


@pytest.mark.ranks(3)
@pytest.mark.parametrize("alone", [100, 10_000], ids=["alone", "together"])
def test_tensors_are_passed_on_in_bounded_messages(alone):
    path = shared(f"messages{alone}")
    state = {f"w{n}": torch.arange(n, 500.0 + n).view(50, 10).contiguous() for n in range(9)}
    state["large"] = torch.arange(30_000.0).view(300, 100)
    dsd.save(path, state)
    mine = {name: torch.zeros_like(one) for name, one in state.items()}
    mine["w1"] = torch.zeros(10, 50).t()  # not in one piece
    sent: list[int] = []

    def note(_: str, args: Any) -> None:
        sent.append(args[0].nbytes)

    with (
        watched(note, ("broadcast",)),
        mock.patch("dsdformat.torch.pass_on.MESSAGE_NBYTES", 4000),
        mock.patch("dsdformat.torch.pass_on._ALONE_NBYTES", alone),
    ):
        dsd.load(path, mine)
    assert_same({name: one.contiguous() for name, one in mine.items()}, state)
    assert max(sent) <= 4000
    assert sum(sent) >= 9 * 2000 + 120_000
    assert len(everywhere(sent)) == 3
