"""Flat shards of fairscale's FSDP, one file for each rank, become parameters by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsdformat
import dsdformat.torch as dsd
from dsdformat.convert import Kind, convert, find_kind, open_any, open_foreign
from tests.torch_runtime.exact import assert_same
from tests.torch_runtime.test_flatten_fairscale import Instance, rand, shards, tower, truth

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.complex128]


def files(
    folder: Path, instances: list[Instance], world: int, *buffers: dict[str, Any], **more: Any
) -> list[Path]:
    """Save what each rank has, as training scripts do."""
    folder.mkdir()
    paths = []
    both = zip(*shards(instances, world, *buffers), strict=True)
    for rank, (weights, metadata) in enumerate(both):
        path = folder / f"checkpoint_1_100-shard{rank}.pt"
        torch.save({"model": weights, "shard_metadata": metadata, **more}, path)
        paths.append(path)
    return paths


@WORLDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_files_of_all_ranks_become_the_parameters(tmp_path, world, dtype):
    instances = tower(dtype)
    buffers = {"mean": rand(6), "count": torch.tensor(5)}
    paths = files(tmp_path / "in", instances, world, buffers, step=3)
    converted = convert(paths, tmp_path / "ours", to="dsd", verify=True)
    assert converted.findings == ()
    loaded = dsd.load(tmp_path / "ours")
    assert_same(loaded["model"], {**truth(instances), **buffers})
    assert set(loaded) == {"model", "step"}
    assert loaded["model"]["c.deep.out.weight"] is loaded["model"]["c.deep.embed.weight"]


@WORLDS
def test_a_folder_is_recognized_and_read_in_the_order_of_the_ranks(tmp_path, world):
    instances = tower()
    files(tmp_path / "in", instances, world)
    (tmp_path / "in" / "config.json").write_text("{}")
    assert find_kind(tmp_path / "in") is Kind.FLAT_SHARDS
    with open_any(tmp_path / "in") as opened:
        assert opened.kind is Kind.FLAT_SHARDS
    convert(tmp_path / "in", tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt")["model"], truth(instances))


def test_ten_ranks_are_not_in_the_order_of_letters(tmp_path):
    one = Instance("", {"w": torch.arange(110.0).reshape(11, 10)})
    files(tmp_path / "in", [one], 11)
    with open_foreign(tmp_path / "in") as opened:
        assert bytes(opened.read("model/w")) == one.tensors["w"].numpy().tobytes()
        box = dsdformat.Box((2, 3), (5, 4))
        wanted = one.tensors["w"][2:7, 3:7].contiguous().numpy().tobytes()
        assert bytes(opened.read("model/w", box)) == wanted


def test_shards_that_are_not_contiguous_are_read(tmp_path):
    one = Instance("", {"a": rand(3, 4), "b": rand(5)})
    weights, metadata = shards([one], 2)
    for state in weights:
        wide = torch.zeros(len(state["flat_param_0"]), 3)
        wide[:, 1] = state["flat_param_0"]
        state["flat_param_0"] = wide[:, 1]
    for rank in range(2):
        state = {"w": weights[rank], "m": metadata[rank]}
        torch.save(state, tmp_path / f"{rank}.pt")
    convert([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "ours", to="dsd")
    assert_same(dsd.load(tmp_path / "ours")["w"], truth([one]))


def test_one_file_of_one_rank_is_unflattened_when_it_is_converted(tmp_path):
    instances = tower()
    (path,) = files(tmp_path / "in", instances, 1)
    with open_foreign(path) as opened:
        assert "a.flat_param_0" in opened.tree["model"]
    convert(path, tmp_path / "ours", to="dsd")
    assert_same(dsd.load(tmp_path / "ours")["model"], truth(instances))


def test_one_file_of_several_ranks_is_refused(tmp_path):
    path, _ = files(tmp_path / "in", tower(), 2)
    with pytest.raises(dsdformat.ConvertError, match="files of all ranks") as caught:
        convert(path, tmp_path / "ours", to="dsd")
    assert caught.value.code == "flat_shards"
    assert not (tmp_path / "ours").exists()


def test_a_flat_parameter_without_metadata_is_refused_or_kept_as_it_is(tmp_path):
    torch.save({"_flat_param": torch.ones(10), "epoch": 1}, tmp_path / "local.pt")
    with pytest.raises(dsdformat.ConvertError, match="_flat_param is of a flat") as caught:
        convert(tmp_path / "local.pt", tmp_path / "ours", to="dsd")
    assert caught.value.code == "flat_shards"
    convert(tmp_path / "local.pt", tmp_path / "ours", to="dsd", unknown="record")
    assert torch.equal(dsd.load(tmp_path / "ours")["_flat_param"], torch.ones(10))


def test_optimizers_of_flat_parameters_are_refused(tmp_path):
    state = {"a._flat_param": {"exp_avg": torch.ones(10)}}
    groups = [{"params": ["a._flat_param"], "lr": 0.1}]
    torch.save({"state": state, "param_groups": groups}, tmp_path / "local.pt")
    with pytest.raises(dsdformat.ConvertError) as caught:
        convert(tmp_path / "local.pt", tmp_path / "ours", to="dsd")
    assert caught.value.code == "flat_shards"


def optimizers(instances: list[Instance], weights: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What AdamW of each rank's flat parameters keeps: twice and four times what they hold."""
    kept = []
    for one in weights:
        state = {
            number: {
                "step": torch.tensor(3.0),
                "exp_avg": flat * 2,
                "exp_avg_sq": flat * 4,
                "count": 3,
            }
            for number, flat in enumerate(one.values())
        }
        group = {"lr": 0.5, "betas": (0.75, 0.5), "params": list(range(len(one)))}
        kept.append({"state": state, "param_groups": [group]})
    return kept


def with_optimizers(
    folder: Path, instances: list[Instance], world: int, change: Any = None
) -> list[Path]:
    weights, metadata = shards(instances, world)
    kept = optimizers(instances, weights)
    if change is not None:
        change(kept)
    paths = []
    for rank, parts in enumerate(zip(weights, metadata, kept, strict=True)):
        paths.append(folder / f"rank{rank}.pt")
        torch.save(dict(zip(("model", "meta", "optimizer"), parts, strict=True)), paths[-1])
    return paths


@WORLDS
@pytest.mark.parametrize("flat", [True, False, [["weight"], ["bias"]]], ids=str)
def test_what_optimizers_keep_for_flat_parameters_becomes_that_of_the_parameters(
    tmp_path, world, flat
):
    instances = tower(flat=flat)
    paths = with_optimizers(tmp_path, instances, world)
    assert convert(paths, tmp_path / "ours", to="dsd").findings == ()
    optimizer = dsd.load(tmp_path / "ours")["optimizer"]
    own = {one.full(name): value for one in instances for name, value in one.tensors.items()}
    assert set(optimizer["state"]) == set(own)
    for name, value in own.items():
        kept = optimizer["state"][name]
        assert_same(kept["exp_avg"], value * 2)
        assert_same(kept["exp_avg_sq"], value * 4)
        assert_same(kept["step"], torch.tensor(3.0))
        assert kept["count"] == 3
    (group,) = optimizer["param_groups"].values()
    assert group["betas"] == (0.75, 0.5)


def change_state(key: str, value: Any, rank: int = -1) -> Any:
    return lambda kept: kept[rank]["state"][0].update({key: value})


def add_group(kept: list[dict[str, Any]]) -> None:
    for one in kept:
        group = one["param_groups"][0]
        one["param_groups"].append({**group, "params": [group["params"].pop()]})


NOT_FLAT: dict[str, tuple[Any, str]] = {
    "rows": (change_state("exp_avg", torch.ones(2)), "not kept for each element"),
    "another step": (change_state("step", torch.tensor(4.0)), "differs on the ranks"),
    "another count": (change_state("count", 4), "differs on the ranks"),
    "more on one": (change_state("more", 1), "keeps other things"),
    "another dtype": (
        lambda kept: kept[1]["state"][0].update(exp_avg=kept[1]["state"][0]["exp_avg"].double()),
        "different dtypes",
    ),
    "not on one": (lambda kept: kept[1]["state"].pop(0), "other groups, or other parameters"),
    "groups": (add_group, "several groups"),
    "another lr": (lambda kept: kept[1]["param_groups"][0].update(lr=1.0), "other groups"),
    "frozen ones": (
        lambda kept: [one["param_groups"][0]["params"].pop() for one in kept],
        "has 2 parameters, the weights 3 flat ones",
    ),
}


@pytest.mark.parametrize("case", NOT_FLAT)
def test_what_is_not_kept_for_each_element_of_flat_parameters_is_refused(tmp_path, case):
    change, reason = NOT_FLAT[case]
    paths = with_optimizers(tmp_path, tower(), 2, change)
    with pytest.raises(dsdformat.ConvertError, match=reason) as caught:
        convert(paths, tmp_path / "ours", to="dsd")
    assert caught.value.code == "flat_shards"
    assert not (tmp_path / "ours").exists()
    converted = convert(paths, tmp_path / "ours", to="dsd", unknown="drop")
    assert [one.path for one in converted.findings] == [("optimizer",)]
    assert set(dsd.load(tmp_path / "ours")) == {"model"}


def test_values_that_differ_on_the_ranks_are_refused_or_left_out(tmp_path):
    instances = tower()
    weights, metadata = shards(instances, 2)
    paths = [tmp_path / "0.pt", tmp_path / "1.pt"]
    for rank, path in enumerate(paths):
        state = {"weights": weights[rank], "meta": metadata[rank], "epoch": 1, "rank": rank}
        state["optimizer"] = {"exp_avg": torch.full((4,), float(rank))}
        torch.save(state, path)
    with pytest.raises(dsdformat.ConvertError) as caught:
        convert(paths, tmp_path / "ours", to="dsd")
    assert caught.value.code == "flat_shards"
    assert "$.optimizer" in str(caught.value)
    converted = convert(paths, tmp_path / "ours", to="dsd", unknown="drop")
    assert [one.path for one in converted.findings] == [("rank",), ("optimizer",)]
    assert set(dsd.load(tmp_path / "ours")) == {"weights", "epoch"}


def test_experts_of_other_ranks_are_not_lost_in_silence(tmp_path):
    expert = Instance("expert", {"w": rand(5, 4)}, alone=True)
    paths = files(tmp_path / "in", [Instance("", {"gate": rand(4, 4)}), expert], 2)
    with pytest.raises(dsdformat.ConvertError, match="rank 0"):
        convert(paths, tmp_path / "ours", to="dsd")
    converted = convert(paths, tmp_path / "ours", to="dsd", unknown="drop")
    assert [one.path for one in converted.findings] == [("model", "expert")]


def change_names(metadata: Any) -> None:
    part = metadata[1]["param_metadata"][1]["params"]["flat_param_0"]
    part["names"] = ["other", *part["names"][1:]]


BROKEN: dict[str, Any] = {
    "a rank too few": lambda w, m: (w.pop(), m.pop()),
    "a rank twice": lambda w, m: (w.append(w[0]), m.append(m[0])),
    "another name": lambda w, m: change_names(m),
    "no tensor": lambda w, m: w[0].update({"a.flat_param_0": 3}),
    "another dtype": lambda w, m: w[1].update({"a.flat_param_0": w[1]["a.flat_param_0"].double()}),
    "padding below zero": lambda w, m: m[0]["param_metadata"][1]["params"]["flat_param_0"].update(
        padding=-1
    ),
    "numels that lie": lambda w, m: m[0]["param_metadata"][1]["params"]["flat_param_0"].update(
        numels=[1, 2]
    ),
    "params that are none": lambda w, m: m[0]["param_metadata"][1].update(params=3),
    "huge shapes": lambda w, m: m[0]["param_metadata"][1]["params"]["flat_param_0"].update(
        shapes=[(2**62, 4), (4,)]
    ),
    "more weights": lambda w, m: w[0].update(other=torch.ones(2)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_do_not_fit_together_are_refused(tmp_path, case):
    weights, metadata = shards(tower(), 2)
    BROKEN[case](weights, metadata)
    paths = []
    for rank, (one, other) in enumerate(zip(weights, metadata, strict=True)):
        paths.append(tmp_path / f"{rank}.pt")
        torch.save({"model": one, "shard_metadata": other}, paths[-1])
    with pytest.raises(dsdformat.ConvertError) as caught:
        convert(paths, tmp_path / "ours", to="dsd")
    assert caught.value.code == "flat_shards"
    assert not (tmp_path / "ours").exists()


def test_files_whose_names_have_no_ranks_are_refused(tmp_path):
    paths = files(tmp_path / "in", tower(), 2)
    paths[1].rename(tmp_path / "in" / "checkpoint_1_100-shard5.pt")
    with pytest.raises(dsdformat.ConvertError, match="in the order of the ranks"):
        open_foreign(tmp_path / "in")


def test_other_files_of_torch_in_a_folder_are_no_shards(tmp_path):
    (tmp_path / "in").mkdir()
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "in" / "0.pt")
    with pytest.raises(dsdformat.ConvertError) as caught:
        find_kind(tmp_path / "in")
    assert caught.value.code == "unknown_kind"
