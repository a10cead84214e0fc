"""What a load would do, asked beforehand, and compared with what loads and plans do."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import dsdformat
import dsdformat.numpy
import dsdformat.torch as dsd
from dsdformat.convert.layouts import Layouts
from dsdformat.errors import ArgumentError, MismatchError
from dsdformat.plan.block_shares import (
    BUCKET_NBYTES,
    Block,
    Met,
    blocks_met,
    find_partial,
    is_worth_it,
)
from dsdformat.plan.load_plan import Wanted
from dsdformat.plan.mesh import Replicate, Shard, coordinate_of, local_boxes
from dsdformat.plan.placing_rules import Rule, place
from dsdformat.plan.survey import WantedTensor, survey


def make() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def trained() -> dict[str, Any]:
    state = make()
    state["model"](torch.randn(3, 64)).sum().backward()
    state["optimizer"].step()
    return state


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("preflight")
    state = trained()
    dsd.save(folder / "ours", {**state, "step": 1})
    plain = {key: one.state_dict() for key, one in state.items()}
    torch.save(plain, folder / "one.pt")
    save_file(plain["model"], folder / "model.safetensors")
    return {"ours": folder / "ours", "pt": folder / "one.pt", "st": folder / "model.safetensors"}


def on_meta() -> dict[str, Any]:
    with torch.device("meta"):
        return make()


PARAMETERS = 64 * 128 + 128 + 128 + 128 + 128 * 64 + 64
BUFFERS = 2 * 128 * 4 + 8


@pytest.mark.parametrize("form", ["ours", "pt"])
@pytest.mark.parametrize("state_of", [make, on_meta, trained], ids=["fresh", "meta", "stepped"])
def test_each_rank_holds_its_rows_of_parameters_and_their_states(paths, form, state_of):
    found = dsd.preflight(paths[form], state_of(), {"fsdp": 4})
    assert found.fits, found.report
    assert found.ranks.tensors == 6 + 3 + 3 * 6
    steps = 6 * 4
    assert found.ranks.held_nbytes.tolist() == [PARAMETERS * 3 + BUFFERS + steps] * 4
    assert found.ranks.wanted_nbytes.tolist() == found.ranks.held_nbytes.tolist()
    whole = BUFFERS + steps  # on each rank, and read by one of them
    assert found.ranks.needed_nbytes == 4 * PARAMETERS * 3 + whole
    assert int(found.ranks.read_nbytes.sum()) >= found.ranks.needed_nbytes
    alone = dsd.preflight(paths[form], state_of(), {"fsdp": 4}, share_reads=False).ranks
    assert alone.needed_nbytes == found.ranks.needed_nbytes + 3 * whole
    assert (alone.read_nbytes >= alone.wanted_nbytes).all()
    assert (found.ranks.peak_nbytes > found.ranks.held_nbytes).all()


def test_nothing_is_made_and_nothing_changed(paths):
    state = trained()
    before = {name: one.clone() for name, one in state["model"].state_dict().items()}
    dsd.preflight(paths["ours"], state, {"fsdp": 2})
    after = state["model"].state_dict()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    meta = on_meta()
    dsd.preflight(paths["ours"], meta, {"fsdp": 2})
    assert all(one.is_meta for one in meta["model"].state_dict().values())
    assert not meta["optimizer"].state


def test_rules_cut_what_an_optimizer_keeps_as_its_parameter(paths):
    rules = [("model/0.weight", 0, "tp"), ("*2.weight", -1, "tp"), ("*2.weight", None, "fsdp")]
    mesh = {"fsdp": 2, "tp": 4}
    for form in ("ours", "pt"):
        found = dsd.preflight(paths[form], on_meta(), mesh, shard=rules, verify=False)
        first, second = 64 * 128 // 8, 64 * 128 // 4
        rest = (128 + 128 + 128 + 64) // 2
        expected = (first + second + rest) * 4 * 3 + BUFFERS + 24
        assert found.ranks.held_nbytes.tolist() == [expected] * 8


def test_a_module_alone_is_the_state_of_a_model(paths):
    found = dsd.preflight(paths["st"], on_meta()["model"], {"fsdp": 2, "dp": 2})
    assert found.fits
    assert found.ranks.held_nbytes.tolist() == [PARAMETERS * 2 + BUFFERS] * 4
    assert found.ranks.over_read < 1.01


def test_what_differs_is_told_or_raised(paths):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(96), nn.Linear(128, 64), nn.ReLU())
        model.more = nn.Linear(2, 2, bias=False)
    found = dsd.preflight(paths["st"], {"model": model}, {"fsdp": 2})
    assert not found.fits
    assert found.report.missing == ["model/more.weight"]
    assert [one.name for one in found.report.mismatched] == [
        f"model/1.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    ]
    assert found.ranks.tensors == 5
    assert "model/more.weight" in str(found)
    with pytest.raises(MismatchError):
        dsd.preflight(paths["st"], {"model": model}, {"fsdp": 2}, strict=True)


def test_memory_is_that_of_the_dtype_in_the_model(paths):
    with torch.device("meta"):
        model = make()["model"].bfloat16()
    found = dsd.preflight(paths["st"], model, {"fsdp": 2}, dtype=torch.bfloat16)
    assert found.fits
    wanted, held = int(found.ranks.wanted_nbytes[0]), int(found.ranks.held_nbytes[0])
    assert (wanted - 8) == 2 * (held - 8)  # a counter of batches stays int64


@pytest.mark.parametrize(
    ("mesh", "shard", "text"),
    [
        ({"fsdp": 0}, (), "a mesh has sizes"),
        ({"fsdp": 2.0}, (), "a mesh has sizes"),
        ({"fsdp": 1 << 21}, (), "a mesh has sizes"),
        ({"fsdp": 2}, [("*", 0, "tp")], "a rule is a glob, a dim and an axis"),
        ({"fsdp": 2}, [("*", "0", "fsdp")], "a rule is a glob, a dim and an axis"),
        ({"fsdp": 2}, [("*bias", 1, "fsdp")], "has 1 dims, and the rule"),
    ],
)
def test_meshes_and_rules_that_are_none_are_refused(paths, mesh, shard, text):
    with pytest.raises(ArgumentError, match=text):
        dsd.preflight(paths["ours"], on_meta(), mesh, shard=shard)


def test_fully_sharded_rows_are_cut_after_the_other_axes_have_cut_them():
    mesh = {"fsdp": 2, "tp": 4}
    rules = [Rule("*", 0, "tp")]
    assert place("w", (8, 3), mesh, rules) == (Shard(0, 4), Shard(0))
    assert place("w", (8, 3), {"tp": 4, "fsdp": 2}, rules) == (Shard(0), Shard(0))
    assert place("w", (8, 3), mesh, [Rule("*", 1, "tp")]) == (Shard(0), Shard(1))
    assert place("w", (), mesh, rules) == (Replicate(), Replicate())
    assert place("w", (8,), mesh, by_rows=False) == (Replicate(), Replicate())


# That the numbers are those of the plans that loads make


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bytes_read_are_those_of_the_plan_of_each_rank(tmp_path_factory, data):
    shapes = st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple)
    generator = np.random.default_rng(0)
    state, tensors = {}, data.draw(st.lists(shapes, min_size=1, max_size=4))
    for number, shape in enumerate(tensors):
        state[f"t{number}"] = generator.standard_normal(shape).astype(np.float32)
    path = tmp_path_factory.mktemp("plan") / "c"
    dsdformat.numpy.save(path, state)
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    mesh = {f"axis{number}": size for number, size in enumerate(sizes)}
    verify = data.draw(st.booleans())
    with dsdformat.open(path, verify=verify) as checkpoint:
        layouts = Layouts(checkpoint, verify=verify)
        wanted, boxes = [], [[] for _ in range(math.prod(sizes))]
        once = set()
        for entry in checkpoint:
            dims = st.sampled_from([None, *range(len(entry.shape))])
            placements = tuple(
                Replicate() if (dim := data.draw(dims)) is None else Shard(dim) for _ in sizes
            )
            wanted.append(WantedTensor(layouts.of(entry.index), entry.shape, 2, placements))
            for rank, mine in enumerate(boxes):
                coordinate = coordinate_of(rank, sizes)
                pairs = local_boxes(entry.shape, sizes, placements, coordinate)
                mine.extend(Wanted(entry.index, outer) for outer, _ in pairs)
                once.update(mine)
        block = checkpoint.block_nbytes
        table = survey(mesh, wanted, block_nbytes=block, share_reads=False)
        shared = survey(mesh, wanted, block_nbytes=block)
        plans = checkpoint.plan_ranks(boxes)
        tables = [checkpoint.table.chunk_table(entry.index) for entry in checkpoint]
        each = checkpoint.plan_ranks([[one] for one in once])
    assert table.read_nbytes.tolist() == [plan.range_nbytes for plan in plans]
    assert table.wanted_nbytes.tolist() == [plan.wanted_nbytes for plan in plans]
    assert (table.held_nbytes * 2).tolist() == table.wanted_nbytes.tolist()
    assert table.needed_nbytes == sum(plan.wanted_nbytes for plan in plans)
    assert shared.wanted_nbytes.tolist() == table.wanted_nbytes.tolist()
    saved = nbytes_of_shared_blocks(tables, boxes, block) if verify else 0
    assert int(shared.read_nbytes.sum()) == sum(plan.range_nbytes for plan in each) - saved
    assert shared.needed_nbytes == sum(plan.wanted_nbytes for plan in each)


def nbytes_of_shared_blocks(tables: list[Any], boxes: list[list[Wanted]], block: int) -> int:
    """What ranks read less if they share blocks, of boxes that no other rank wants."""

    def partial_of(mine: list[Wanted]) -> dict[Block, Met]:
        found = (blocks_met(one.tensor, tables[one.tensor], one.box, block) for one in mine)
        return find_partial(itertools.chain(*found))

    wanted = sum(one.box.numel * 4 for mine in boxes for one in mine)
    extra = [met.nbytes - met.wanted_nbytes for mine in boxes for met in partial_of(mine).values()]
    if len(boxes) == 1 or not is_worth_it([(wanted, sum(extra))]):
        return 0
    holders = Counter(one for mine in boxes for one in mine)
    own = [[one for one in mine if holders[one] == 1] for mine in boxes]
    blocks = Counter(
        met._replace(wanted_nbytes=0) for mine in own for met in partial_of(mine).values()
    )
    return sum((times - 1) * met.nbytes for met, times in blocks.items())


def test_compressed_tensors_count_as_stored(tmp_path):
    state = {"zeros": np.zeros(1 << 21, np.float32)}
    dsdformat.numpy.save(tmp_path / "c", state, codec="zstd")
    with dsdformat.open(tmp_path / "c") as checkpoint:
        layouts = Layouts(checkpoint)
        one = WantedTensor(layouts.of(0), (1 << 21,), 4, (Shard(0),))
        table = survey({"fsdp": 2}, [one], block_nbytes=checkpoint.block_nbytes)
        stored = sum(chunk.stored_nbytes for chunk in checkpoint.tensor("zeros").chunks)
    assert int(table.read_nbytes.sum()) == pytest.approx(stored, abs=2)
    assert table.wanted_nbytes.tolist() == [1 << 22] * 2


def test_a_thousand_ranks_and_thousands_of_tensors_are_few_kinds(tmp_path):
    state = {f"layers.{n}.w": np.zeros((2048, 2), np.float32) for n in range(1000)}
    state |= {f"layers.{n}.b": np.zeros(2048, np.float32) for n in range(1000)}
    dsdformat.numpy.save(tmp_path / "c", {"model": state})
    with dsdformat.open(tmp_path / "c") as checkpoint:
        layouts = Layouts(checkpoint, verify=False)
        kinds = {layouts.of(entry.index).key for entry in checkpoint}
        wanted = [WantedTensor(layouts.of(e.index), e.shape, 4, (Shard(0),)) for e in checkpoint]
        table = survey({"fsdp": 1024}, wanted, block_nbytes=checkpoint.block_nbytes)
    assert len(kinds) == 2
    assert table.read_nbytes.tolist() == [1000 * 3 * 8] * 1024
    assert [len(ranks) for ranks in table.alike()] == [1024]


def test_ranks_read_in_turn_what_all_of_them_want(tmp_path):
    """The rule of `read_shares`: the largest goes to the rank that has the least to read so far."""
    shapes = {"a": (5, 100), "b": (3, 100), "c": (3, 100), "d": ()}
    dsdformat.numpy.save(tmp_path / "c", {n: np.zeros(s, np.float32) for n, s in shapes.items()})
    with dsdformat.open(tmp_path / "c") as checkpoint:
        layouts = Layouts(checkpoint, verify=False)
        wanted = [
            WantedTensor(layouts.of(entry.index), entry.shape, 4, (Replicate(), Replicate()))
            for entry in checkpoint
        ]
        table = survey({"dp": 2, "tp": 1}, wanted)
        many = survey({"dp": 2, "tp": 2}, wanted)
    assert table.read_nbytes.tolist() == [2000 + 4, 1200 + 1200]
    assert many.read_nbytes.tolist() == [2000, 1200, 1200, 4]


@pytest.mark.parametrize("share_reads", [True, False])
def test_columns_of_what_is_stored_by_rows_are_read_once_and_take_memory(tmp_path, share_reads):
    dsdformat.numpy.save(tmp_path / "c", {f"w{n}": np.zeros((4, 6), np.float32) for n in range(5)})
    with dsdformat.open(tmp_path / "c") as checkpoint:
        layouts = Layouts(checkpoint)
        columns, rows = (
            survey(
                {"tp": 3},
                [
                    WantedTensor(layouts.of(entry.index), entry.shape, 4, (Shard(dim),))
                    for entry in checkpoint
                ],
                block_nbytes=checkpoint.block_nbytes,
                share_reads=share_reads,
            )
            for dim in (1, 0)
        )
    nbytes = 4 * 6 * 4
    assert columns.wanted_nbytes.tolist() == [5 * nbytes // 3] * 3
    assert columns.needed_nbytes == rows.needed_nbytes == 5 * nbytes
    if share_reads:  # each of five blocks by one rank
        assert columns.read_nbytes.tolist() == [2 * nbytes, 2 * nbytes, nbytes]
        assert columns.over_read == 1
        assert columns.buffer_nbytes >= 5 * BUCKET_NBYTES
    else:
        assert columns.read_nbytes.tolist() == [5 * nbytes] * 3
        assert columns.buffer_nbytes < 5 * BUCKET_NBYTES
