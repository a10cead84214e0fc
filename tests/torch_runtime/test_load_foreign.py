"""Checkpoints of others, loaded as ours are: in place, compared first, with the same options."""

from __future__ import annotations

import copy
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import dsdformat
import dsdformat.torch as dsd
from dsdformat.boxes import Box
from dsdformat.convert import open_foreign
from dsdformat.convert.reading import ForeignReader
from dsdformat.errors import (
    ArgumentError,
    ConvertError,
    EntryNotFoundError,
    MismatchError,
    NotACheckpointError,
)
from dsdformat.plan.load_plan import Wanted
from tests.ranks.shards import DTYPES, noise
from tests.torch_runtime.exact import assert_same, assert_same_tensor


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    groups = [{"params": [*model[2].parameters()], "lr": 0.5}, {"params": model[:2].parameters()}]
    return model, torch.optim.AdamW(groups, lr=0.1, amsgrad=True)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model, optimizer = make()
    for _ in range(2):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


def as_file(state: dict[str, Any], folder: Path) -> Path:
    save_file(state, folder / "any-name.safetensors", {"format": "pt"})
    return folder / "any-name.safetensors"


def as_folder(state: dict[str, Any], folder: Path) -> Path:
    path = folder / "hf"
    path.mkdir()
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def as_shards(state: dict[str, Any], folder: Path) -> Path:
    path = folder / "hf-shards"
    path.mkdir()
    names = list(state)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: state[name] for name in some}, path / file)
    weight_map = {name: file for file, some in files.items() for name in some}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def as_zip(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "zip.pt")
    return folder / "zip.pt"


def as_stream(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "stream.pt", _use_new_zipfile_serialization=False)
    return folder / "stream.pt"


def as_dcp(state: dict[str, Any], folder: Path) -> Path:
    writer = FileSystemWriter(folder / "dcp", sync_files=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer)
    return folder / "dcp"


def as_npz(state: dict[str, Any], folder: Path) -> Path:
    np.savez(folder / "any.npz", **{name: one.numpy() for name, one in state.items()})
    return folder / "any.npz"


def as_small_npz(state: dict[str, Any], folder: Path) -> Path:
    arrays = {name: one.numpy() for name, one in state.items()}
    np.savez_compressed(folder / "any.npz", **arrays)
    return folder / "any.npz"


FORMS: dict[str, Callable[[dict[str, Any], Path], Path]] = {
    "safetensors": as_file,
    "folder": as_folder,
    "folder of shards": as_shards,
    "torch zip": as_zip,
    "torch stream": as_stream,
    "DCP": as_dcp,
    "npz": as_npz,
    "deflated npz": as_small_npz,
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@every_form
def test_a_state_dict_is_loaded_into_the_only_module_of_a_state(form, tmp_path):
    model, _ = trained()
    path = form(model.state_dict(), tmp_path)
    other, optimizer = make()
    weight = other[0].weight
    rest = dsd.load(path, {"model": other, "optimizer": optimizer}, select="model")
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert other[0].weight is weight
    assert rest == {}
    assert not rest.report


@every_form
def test_a_model_on_meta_gets_its_content_from_any_form(form, tmp_path):
    model, _ = trained()
    path = form(model.state_dict(), tmp_path)
    with torch.device("meta"):
        other, _ = make()
    dsd.load(path, {"nets": {"net": other}}, device="cpu")
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    with torch.device("meta"):
        half = make()[0].bfloat16()
    dsd.load(path, {"model": half}, device="cpu", dtype=torch.bfloat16)
    assert_same_tensor(half[0].weight.detach(), model[0].weight.detach().bfloat16())


@every_form
def test_what_does_not_fit_is_told_before_anything_is_changed(form, tmp_path):
    state = dict(trained()[0].state_dict())
    state["2.weight"] = state["2.weight"][:2].clone()
    state["more"] = state.pop("0.bias")
    path = form(state, tmp_path)
    other, _ = make()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": other})
    report = caught.value.report
    assert report.missing == ["model/0.bias"]
    assert report.unexpected == ["model/more"]
    assert [found.name for found in report.mismatched] == ["model/2.weight"]
    assert_same(dict(other.state_dict()), dict(before))
    report = dsd.load(path, {"model": other}, strict=False).report
    assert report.missing == ["model/0.bias"]
    assert_same_tensor(other[0].weight.detach(), state["0.weight"])


@every_form
def test_names_are_those_of_the_file_where_they_are_renamed(form, tmp_path):
    model, _ = trained()
    state = {f"net.{name}": one for name, one in model.state_dict().items()}
    path = form(state, tmp_path)
    for rename in ([("net.", "")], [("net.", "model/")], lambda name: name.removeprefix("net.")):
        other, _ = make()
        dsd.load(path, {"model": other}, rename=rename)
        assert_same(dict(other.state_dict()), dict(model.state_dict()))
    with pytest.raises(EntryNotFoundError, match="nothing in the checkpoint is called"):
        dsd.load(path, {"model": make()[0]}, rename=[("nets.", "")])


@every_form
def test_without_a_state_there_are_plain_nested_values(form, tmp_path):
    state = dict(trained()[0].state_dict())
    path = form(state, tmp_path)
    found = dsd.load(path, select=["0.*", "2.bias"])
    assert sorted(found) == ["0.bias", "0.weight", "2.bias"]
    for name, one in found.items():
        assert_same_tensor(torch.as_tensor(one), state[name])


@pytest.mark.parametrize("form", [as_file, as_shards, as_zip])
def test_maps_are_made_where_bytes_lie_packed_in_the_file(form, tmp_path):
    state = {"w": torch.randn(64, 3), "t": torch.randn(8, 4), "empty": torch.empty(0, 3)}
    path = form(state, tmp_path)
    kept = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    found = dsd.load(path, mmap=True, verify=False)
    assert_same(dict(sorted(found.items())), dict(sorted(state.items())))
    found["w"].zero_()  # copy on write
    assert {p: p.read_bytes() for p in kept} == kept


# Which root key


def test_a_state_dict_for_one_of_several_modules_is_asked_which(tmp_path):
    model, _ = trained()
    path = as_file(model.state_dict(), tmp_path)
    state = {"g": make()[0], "d": make()[0]}
    with pytest.raises(MismatchError, match="the state has several: g, d") as caught:
        dsd.load(path, state)
    assert caught.value.hint == "say which one it is, as in rename=[('', 'g/')]"
    dsd.load(path, state, rename=[("", "g/")], select="g")
    assert_same(dict(state["g"].state_dict()), dict(model.state_dict()))


def test_a_name_that_the_state_has_at_its_root_decides(tmp_path):
    path = as_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path)
    state = {"a": torch.zeros(2), "model": nn.Linear(2, 2)}
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, state)
    assert caught.value.report.unexpected == ["b"]
    dsd.load(path, {"a": state["a"], "b": torch.zeros(3)})
    assert state["a"].tolist() == [1, 1]


def test_the_names_of_a_general_checkpoint_are_a_hint(tmp_path):
    model, optimizer = trained()
    general = {"model_state_dict": model.state_dict(), "epoch": 3, "args": {"lr": 0.1}}
    path = as_zip({**general, "optimizer_state_dict": optimizer.state_dict()}, tmp_path)
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": make()[0]})
    assert "model_state_dict" in caught.value.hint
    assert "rename=[('model_state_dict/', 'model/'), …]" in caught.value.hint


def test_a_tensor_alone_has_the_key_value(tmp_path):
    torch.save(torch.arange(3), tmp_path / "one.pt")
    assert dsd.load(tmp_path / "one.pt")["value"].tolist() == [0, 1, 2]
    into = torch.zeros(3, dtype=torch.int64)
    dsd.load(tmp_path / "one.pt", {"value": into})
    assert into.tolist() == [0, 1, 2]


# Optimizers


def general(tmp_path: Path, form: Callable[[dict[str, Any], Path], Path] = as_zip) -> Path:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return form({**state, "scheduler": scheduler.state_dict(), "epoch": 7}, tmp_path)


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("form", [as_zip, as_stream, as_dcp])
def test_a_training_goes_on_from_a_general_checkpoint(form, stepped, tmp_path):
    path = general(tmp_path, form)
    model, optimizer = trained()
    other, fresh = trained() if stepped else make()
    scheduler = torch.optim.lr_scheduler.StepLR(fresh, 3)
    state = {"model": other, "optimizer": fresh, "scheduler": scheduler}
    assert dsd.load(path, state) == {"epoch": 7}
    assert scheduler.step_size == 10
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # adds initial_lr
    assert_same(fresh.state_dict(), optimizer.state_dict())
    for net, one in ((model, optimizer), (other, fresh)):
        torch.manual_seed(5)
        one.zero_grad()
        net(torch.randn(4, 5)).square().sum().backward()
        one.step()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_the_order_of_the_live_groups_says_which_parameter_a_number_is(tmp_path):
    path = general(tmp_path)
    other, _ = make()
    turned = torch.optim.AdamW(
        [{"params": other[:2].parameters()}, {"params": [*other[2].parameters()]}], amsgrad=True
    )
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": other, "optimizer": turned}, select=["model", "optimizer"])
    (found,) = caught.value.report.mismatched
    assert found.name == "optimizer"
    assert found.stored == "groups of 2, 4 parameters by number"
    assert found.wanted == "groups of 4, 2 parameters"
    assert not turned.state


def test_names_that_torch_kept_beside_the_numbers_decide_whatever_the_order(tmp_path):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = torch.optim.AdamW(list(model.named_parameters()), lr=0.25)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    path = as_zip({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    other = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    turned = torch.optim.AdamW(reversed(list(other.parameters())))
    dsd.load(path, {"model": other, "optimizer": turned})
    for mine, one in zip(other.parameters(), model.parameters(), strict=True):
        assert_same(turned.state[mine], optimizer.state[one])
    assert turned.param_groups[0]["lr"] == 0.25


def test_a_flat_model_takes_the_numbers_of_the_parameters_in_it(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    path = as_zip({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    flat = dsd.FlattenParams(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    fresh = torch.optim.AdamW(flat.parameters())
    dsd.load(path, {"model": flat, "optimizer": fresh})
    wanted = torch.cat([optimizer.state[one]["exp_avg"].flatten() for one in model.parameters()])
    assert torch.equal(fresh.state[flat.flat_param]["exp_avg"], wanted)


def test_an_optimizers_state_dict_that_was_saved_as_a_value_is_loaded_into_one(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer.state_dict()})
    other, fresh = make()
    dsd.load(tmp_path / "c", {"model": other, "optimizer": fresh})
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_several_optimizers_are_loaded_from_a_list_of_states(tmp_path):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    def pair(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        one = torch.optim.AdamW(model[0].parameters(), lr=0.1)
        return [one, torch.optim.SGD(model[1].parameters(), lr=0.2, momentum=0.9)]

    optimizers = pair(model)
    model(torch.randn(2, 3)).sum().backward()
    for one in optimizers:
        one.step()
    states = [one.state_dict() for one in optimizers]
    path = as_zip({"model": model.state_dict(), "optimizers": states}, tmp_path)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    fresh = pair(other)
    dsd.load(path, {"model": other, "optimizers": fresh})
    assert_same([one.state_dict() for one in fresh], states)
    path = as_zip({"model": model.state_dict(), "optimizers": [*states, states[0]]}, tmp_path)
    with pytest.raises(MismatchError, match="3 states in the checkpoint, 2 optimizers wanted"):
        dsd.load(path, {"model": other, "optimizers": fresh})


def test_a_checkpoint_of_lightning_is_loaded_with_its_names(tmp_path):
    model, optimizer = trained()
    state = {f"net.{name}": one for name, one in model.state_dict().items()}
    lightning = {
        "epoch": 2,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": state,
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
    }
    path = as_zip(lightning, tmp_path)
    other, fresh = make()
    rename = [("state_dict/net.", "model/"), ("optimizer_states", "optimizer")]
    rest = dsd.load(path, {"model": other, "optimizer": fresh}, rename=rename)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert rest["epoch"] == 2


def odd(state: dict[str, Any], kind: str) -> Any:
    """A state of an optimizer with something in it that none has."""
    groups = state["param_groups"]
    if kind == "a number twice":
        groups[0]["params"] = [0, 0]
    elif kind == "a number that no list has":
        state["state"][99] = {"step": torch.tensor(1.0)}
    elif kind == "true for a number":
        groups[0]["params"] = [True, False]
    elif kind == "params are a dict":
        groups[0]["params"] = {0: 1}
    elif kind == "a group is a list":
        groups[0] = [1, 2]
    elif kind == "no groups":
        state["param_groups"] = []
    elif kind == "a state that is a number":
        state["state"][0] = 5
    elif kind == "names that are numbers":
        groups[0]["param_names"] = 7
    elif kind == "names beside numbers":
        state["state"]["0.weight"] = state["state"].pop(2)
    elif kind == "states of other shapes":
        state["state"][0], state["state"][2] = state["state"][2], state["state"][0]
    elif kind == "an empty list of states":
        return []
    return state


ODD = (
    *("a number twice", "true for a number", "params are a dict", "a group is a list"),
    *("no groups", "a state that is a number", "names beside numbers", "states of other shapes"),
    "an empty list of states",
)


@pytest.mark.parametrize("kind", ODD)
def test_a_malformed_state_of_an_optimizer_is_one_of_our_errors_and_changes_nothing(kind, tmp_path):
    model, optimizer = trained()
    state = odd(copy.deepcopy(optimizer.state_dict()), kind)
    path = as_zip({"model": model.state_dict(), "optimizer": state}, tmp_path)
    other, fresh = make()
    before = copy.deepcopy((dict(other.state_dict()), fresh.state_dict()))
    with pytest.raises(dsdformat.DsdError):
        dsd.load(path, {"model": other, "optimizer": fresh})
    assert_same((dict(other.state_dict()), fresh.state_dict()), before)


@pytest.mark.parametrize("kind", ["a number that no list has", "names that are numbers"])
def test_what_says_nothing_of_parameters_is_no_fault(kind, tmp_path):
    model, optimizer = trained()
    state = odd(copy.deepcopy(optimizer.state_dict()), kind)
    path = as_zip({"model": model.state_dict(), "optimizer": state}, tmp_path)
    other, fresh = make()
    dsd.load(path, {"model": other, "optimizer": fresh})
    assert torch.equal(
        fresh.state[other[2].weight]["exp_avg"], optimizer.state[model[2].weight]["exp_avg"]
    )


# Several files


def test_files_of_a_model_and_of_its_optimizer_are_loaded_in_one_call(tmp_path):
    model, optimizer = trained()
    paths = {"model": as_file(model.state_dict(), tmp_path)}
    paths["optimizer"] = as_zip(optimizer.state_dict(), tmp_path)
    other, fresh = make()
    assert dsd.load(paths, {"model": other, "optimizer": fresh}) == {}
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert sorted(dsd.load(paths)) == ["model", "optimizer"]


@pytest.mark.parametrize("paths", [{}, {1: "x"}])
def test_a_mapping_that_names_no_paths_is_refused(paths):
    with pytest.raises(ArgumentError, match="a mapping of paths has strings as keys"):
        dsd.load(paths)


def test_a_checkpoint_of_ours_among_several_is_told(tmp_path):
    dsd.save(tmp_path / "ours", {"a": torch.ones(2)})
    with pytest.raises(ConvertError, match="is a checkpoint of ours"):
        dsd.load({"model": tmp_path / "ours"})


# Digests, checksums, damage


@every_form
def test_a_root_digest_is_refused_for_what_has_none(form, tmp_path):
    path = form({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(ArgumentError, match="a foreign one has none"):
        dsd.load(path, digest="0" * 64)


@every_form
def test_a_key_that_must_have_signed_is_refused_for_what_has_no_signatures(form, tmp_path):
    path = form({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(ArgumentError, match="a foreign one has no signatures"):
        dsd.load(path, pubkey="0" * 64)


@pytest.mark.parametrize("form", [as_zip, as_dcp])
def test_damage_that_a_checksum_tells_is_found_before_anything_is_changed(form, tmp_path):
    state = {"w": torch.arange(3000.0).view(60, 50)}
    path = form(state, tmp_path)
    for file in [path] if path.is_file() else list(path.glob("*.distcp")):
        data = bytearray(file.read_bytes())
        data[data.index(state["w"].numpy().tobytes()) + 4001] ^= 16
        file.write_bytes(data)
    into = {"w": torch.zeros(60, 50)}
    for read in (lambda: dsd.load(path, into), lambda: dsd.load(path)):
        with pytest.raises(ConvertError) as caught:
            read()
        assert caught.value.code == "foreign_checksum"
    assert not into["w"].any()
    assert (dsd.load(path, verify=False)["w"] != state["w"]).sum() == 1


def test_an_item_of_dcp_that_is_another_is_found_before_anything_is_changed(tmp_path):
    path = as_dcp({"a": torch.ones(4), "b": torch.ones(3, 2)}, tmp_path)
    (file,) = path.glob("*.distcp")
    data = file.read_bytes()
    second = data.index(b"PK\x03\x04", data.index(b"PK\x05\x06"))  # the next zip file begins
    file.write_bytes(data[:second] + bytes(len(data) - second))
    into = {"a": torch.zeros(4), "b": torch.zeros(3, 2)}
    with pytest.raises(ConvertError):
        dsd.load(path, into, verify=False)
    assert not into["a"].any()
    assert not into["b"].any()


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a/../../x", "C:\\x", "", "."])
def test_an_index_that_leads_out_of_its_folder_is_refused_and_changes_nothing(file, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    text = json.dumps({"weight_map": {"w": file}})
    (folder / "model.safetensors.index.json").write_text(text)
    into = torch.zeros(2)
    with pytest.raises(ConvertError) as caught:
        dsd.load(folder, {"w": into})
    assert caught.value.code == "foreign_path"
    assert not into.any()


class Ours:
    """A class that no file may name."""


def test_objects_are_refused_or_left_out_as_is_asked_for(tmp_path):
    torch.save({"w": torch.ones(2), "args": Ours()}, tmp_path / "c.pt")
    with pytest.raises(ConvertError, match="Ours") as caught:
        dsd.load(tmp_path / "c.pt", {"w": torch.zeros(2)})
    assert caught.value.code == "unknown_global"
    into = torch.zeros(2)
    assert dsd.load(tmp_path / "c.pt", {"w": into}, unknown="drop") == {}
    assert into.tolist() == [1, 1]
    assert "name" in dsd.load(tmp_path / "c.pt", unknown="record")["args"]


def test_a_checkpoint_of_ours_without_its_manifest_is_not_taken_for_a_model_folder(tmp_path):
    model, optimizer = trained()
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    (tmp_path / "c" / "manifest.dsd").unlink()
    with pytest.raises(NotACheckpointError) as caught:
        dsd.load(tmp_path / "c", {"model": model})
    assert caught.value.code == "no_manifest"
    (tmp_path / "c" / "optimizer.safetensors").unlink()  # a model folder as it stands
    assert sorted(dsd.load(tmp_path / "c")) == sorted(model.state_dict())


@pytest.mark.parametrize("content", [b"", b"hello world", b"\x80\x02}."])
def test_what_is_no_checkpoint_is_refused(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ConvertError):
        dsd.load(tmp_path / "x", {"a": torch.zeros(1)})
    with pytest.raises(NotACheckpointError):
        dsd.load(tmp_path, {"a": torch.zeros(1)})
    with pytest.raises(dsdformat.DsdError):
        dsd.load(tmp_path / "nothing", {"a": torch.zeros(1)})


def test_a_registry_builds_the_model_of_a_foreign_file_from_a_recipe(tmp_path):
    model, _ = trained()
    path = as_shards(model.state_dict(), tmp_path)
    registry = {"net": lambda: make()[0]}
    built = dsd.load_model(path, registry, recipe=dsd.Recipe("net"))
    assert_same(dict(built.state_dict()), dict(model.state_dict()))
    with pytest.raises(EntryNotFoundError):
        dsd.load_model(path, registry)


def _is_saved(dtype: torch.dtype) -> bool:
    """Whether `torch.save` takes a dtype."""
    return "int" not in str(dtype) or int(str(dtype).partition("int")[2]) % 8 == 0


# Boxes, of tensors that lie in files in every way


def laid_out() -> dict[str, torch.Tensor]:
    whole = torch.arange(240.0).view(4, 6, 10)
    return {
        "plain": whole.clone(),
        "turned": whole.permute(2, 0, 1).clone(memory_format=torch.preserve_format),
        "slice": whole[:, 1:4, ::2],
        "expanded": torch.arange(5.0)[None, :, None].expand(4, 5, 3),
        "conjugate": torch.view_as_complex(torch.randn(3, 4, 5, 2)).conj(),
        "flat": torch.arange(7),
        "none": torch.tensor(2.5),
    }


@pytest.fixture(scope="module")
def laid(tmp_path_factory) -> tuple[ForeignReader, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("laid") / "laid.pt"
    state = laid_out()
    torch.save(state, path)
    return ForeignReader(open_foreign(path), threads=1), state


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_box_is_read_into_any_strides(laid, data):
    reader, state = laid
    entries = list(reader)
    wanted, into, expected = [], [], []
    for _ in range(data.draw(st.integers(1, 4))):
        entry = data.draw(st.sampled_from(entries))
        offset = tuple(data.draw(st.integers(0, size - 1)) for size in entry.shape)
        shape = tuple(
            data.draw(st.integers(1, size - at))
            for size, at in zip(entry.shape, offset, strict=True)
        )
        order = data.draw(st.permutations(range(len(shape))))
        tensor = state[entry.name]
        buffer = torch.zeros([shape[dim] for dim in order], dtype=tensor.dtype)
        view = buffer.permute([order.index(dim) for dim in range(len(shape))])
        strides = tuple(step * tensor.itemsize for step in view.stride())
        wanted.append(Wanted(entry.index, Box(offset, shape), strides))
        into.append((buffer, view))
        expected.append(
            tensor[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))]
        )
    buffers = [memoryview(buffer.view(-1).view(torch.uint8).numpy()) for buffer, _ in into]
    plan = reader.read_boxes(wanted, buffers)
    assert plan.read_nbytes >= 0
    for (_, view), tensor in zip(into, expected, strict=True):
        assert torch.equal(view, tensor.resolve_conj())


@pytest.mark.parametrize("dtype", [one for one in DTYPES if _is_saved(one)], ids=str)
@pytest.mark.parametrize("form", [as_zip, as_stream], ids=["zip", "stream"])
def test_every_dtype_comes_back_bit_for_bit(form, dtype, tmp_path):
    state = {"a": noise((3, 5), dtype), "b": noise((), dtype, 1), "c": noise((0, 2), dtype)}
    path = form(state, tmp_path)
    assert_same(dsd.load(path), state)


def test_a_deflated_archive_that_torch_never_writes_is_refused(tmp_path):
    torch.save({"w": torch.ones(100)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(ConvertError) as caught:
        dsd.load(tmp_path / "b.pt", {"w": torch.zeros(100)})
    assert caught.value.code == "archive_compressed"
