"""Snapshots share nothing with what they are of; saves change nothing, and repeat exactly."""

from __future__ import annotations

import errno
import gc
import hashlib
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from exact import assert_same, assert_same_tensor  # noqa: E402
from state_kinds import STATES, Net, train, training  # noqa: E402
from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import ArgumentError, StorageError, UnsupportedValueError  # noqa: E402
from dsdformat.storage import target  # noqa: E402

# A snapshot stands for the state.


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_saving_a_snapshot_gives_the_checkpoint_of_the_state(tmp_path, make):
    state = make()
    copy = dsd.snapshot(state)
    assert dsd.save(tmp_path / "copy", copy) == dsd.save(tmp_path / "live", state)


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_snapshot_is_what_loading_gives(tmp_path, make):
    state = make()
    copy = dsd.snapshot(state)
    dsd.save(tmp_path / "c", state)
    assert_same(dsd.load(tmp_path / "c"), copy)


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_snapshot_of_a_snapshot_is_the_same(make):
    copy = dsd.snapshot(make())
    assert_same(dsd.snapshot(copy), copy)


def test_two_byte_orders_over_the_same_memory_stay_apart_in_a_snapshot():
    little = np.arange(3, dtype="<f4")
    state = {"a": little, "b": little.view(">f4")}
    assert_same(dsd.snapshot(state)["b"].astype("<f4"), state["b"].astype("<f4"))


def test_tied_tensors_are_one_in_a_snapshot():
    weight = torch.arange(12.0).view(3, 4)
    copy = dsd.snapshot({"a": weight, "l": [weight.detach()], "t": weight.t(), "u": weight.t()})
    assert copy["a"] is copy["l"][0]
    assert copy["t"] is copy["u"]
    assert copy["a"] is not copy["t"]


def test_tied_names_of_a_model_are_one_in_a_snapshot():
    copy = dsd.snapshot({"model": Net()})["model"]
    assert copy["head.weight"] is copy["embed.weight"]


def test_what_looks_the_same_and_is_not_stays_apart_in_a_snapshot():
    base = torch.zeros(4)
    copy = dsd.snapshot({"a": base[:2], "b": base[2:], "c": base[:2].clone(), "whole": base})
    copy["a"].fill_(1)
    assert [int(copy[name].sum()) for name in ("a", "b", "c", "whole")] == [2, 0, 0, 0]


def test_the_memory_order_of_dense_tensors_is_kept_in_a_snapshot():
    images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    copy = dsd.snapshot({"images": images, "t": torch.ones(3, 4).t()})
    assert copy["images"].stride() == images.stride()
    assert copy["t"].stride() == (1, 4)


def test_a_view_of_a_large_base_is_small_in_a_snapshot():
    copy = dsd.snapshot({"w": torch.zeros(1_000_000)[5:8]})
    assert copy["w"].untyped_storage().nbytes() == 12


def test_a_snapshot_holds_plain_tensors_on_the_host():
    copy = dsd.snapshot({"model": Net(), "w": nn.Parameter(torch.ones(2)), "y": leaf() * 2})
    for tensor in (*copy["model"].values(), copy["w"], copy["y"]):
        if isinstance(tensor, torch.Tensor):
            assert type(tensor) is torch.Tensor
            assert (tensor.requires_grad, tensor.grad_fn) == (False, None)
            assert tensor.device.type == "cpu"


def leaf() -> Any:
    return torch.ones(2, requires_grad=True)


# A snapshot shares nothing (B091).


def changed_tensors(value: Any) -> None:
    """Fill all tensors and arrays that a state holds with other numbers."""
    with torch.no_grad():
        if isinstance(value, torch.Tensor):
            value.view(torch.uint8).fill_(7) if value.dim() else value.fill_(7)
        elif isinstance(value, np.ndarray):
            value[...] = 7
        elif isinstance(value, nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                tensor.fill_(7)
        elif isinstance(value, torch.optim.Optimizer):
            changed_tensors(list(value.state.values()))
        elif isinstance(value, dict):
            changed_tensors(list(value.values()))
        elif isinstance(value, (list, tuple, deque)):
            for item in value:
                changed_tensors(item)


LIVE: dict[str, Callable[[], dict[str, Any]]] = {
    "a training": training,
    "a tensor": lambda: {"w": torch.ones(200_000)},
    "a small tensor": lambda: {"w": torch.ones(1)},
    "a scalar": lambda: {"w": torch.tensor(1.0)},
    "a parameter": lambda: {"w": nn.Parameter(torch.ones(3))},
    "a buffer": lambda: {"m": nn.BatchNorm1d(3)},
    "in shared memory": lambda: {"w": torch.ones(3).share_memory_()},
    "over an array": lambda: {"w": torch.from_numpy(np.ones(3))},
    "an array": lambda: {"w": np.ones(3), "l": [np.ones(2)]},
    "an array without dims": lambda: {"w": np.array(1.0)},
    "an array in fortran order": lambda: {"w": np.ones((2, 3), order="F")},
    "nested": lambda: {"a": {"b": [(torch.ones(2), {"c": torch.ones(3)})]}},
    "in a deque": lambda: {"d": deque([torch.ones(2)])},
    "a view": lambda: {"w": torch.ones(10)[2:5], "t": torch.ones(3, 4).t().contiguous()},
}


@pytest.mark.parametrize("make", LIVE.values(), ids=LIVE)
def test_weights_that_change_at_once_do_not_change_the_snapshot(tmp_path, make):
    state = make()
    root = dsd.save(tmp_path / "before", state)
    copy = dsd.snapshot(state)
    changed_tensors(state)
    assert dsd.save(tmp_path / "copy", copy) == root
    assert dsd.save(tmp_path / "after", state) != root


def test_training_on_does_not_change_the_snapshot(tmp_path):
    state = training()
    root = dsd.save(tmp_path / "before", state)
    copy = dsd.snapshot(state)
    for _ in range(3):
        train(state)
    assert dsd.save(tmp_path / "copy", copy) == root


def test_what_is_done_to_a_snapshot_does_not_change_the_state(tmp_path):
    state = training()
    root = dsd.save(tmp_path / "before", state)
    changed_tensors(dsd.snapshot(state))
    assert dsd.save(tmp_path / "after", state) == root


CONTAINERS: dict[str, Any] = {
    "list": (lambda: [1], lambda x: x.append(2)),
    "dict": (lambda: {"a": 1}, lambda x: x.update(b=2)),
    "list in a dict": (lambda: {"a": [1]}, lambda x: x["a"].append(2)),
    "list in a tuple": (lambda: ([1],), lambda x: x[0].append(2)),
    "ordered dict": (lambda: OrderedDict(a=1), lambda x: x.update(b=2)),
    "default dict": (lambda: defaultdict(list, a=[1]), lambda x: x["a"].append(2)),
    "deque": (lambda: deque([1]), lambda x: x.append(2)),
    "set": (lambda: {1}, lambda x: x.add(2)),
    "counter": (lambda: Counter("a"), lambda x: x.update("b")),
    "set in a list": (lambda: [{1}], lambda x: x[0].add(2)),
}


@pytest.mark.parametrize(("make", "change"), CONTAINERS.values(), ids=CONTAINERS)
def test_containers_that_change_at_once_do_not_change_the_snapshot(make, change):
    value = make()
    copy = dsd.snapshot({"x": value})
    change(value)
    assert value != make()
    assert copy["x"] == make()


def test_options_of_an_optimizer_that_change_at_once_do_not_change_the_snapshot():
    state = training()
    state["optimizer"].param_groups[0]["more"] = [1, 2]
    copy = dsd.snapshot(state)
    state["optimizer"].param_groups[0]["more"].append(3)
    state["optimizer"].param_groups[0]["lr"] = 99
    group = copy["optimizer"]["param_groups"]["embed.weight"]
    assert group["more"] == [1, 2]
    assert group["lr"] != 99


def test_extra_state_that_changes_at_once_does_not_change_the_snapshot():
    model = Net()
    copy = dsd.snapshot({"model": model})
    model.calls[0] = 99
    model.table.fill_(99)
    assert copy["model"]["_extra_state"]["calls"] == [0]
    assert copy["model"]["_extra_state"]["tensor"].tolist() == [1, 2]


def test_a_scheduler_that_goes_on_does_not_change_the_snapshot():
    state = training()
    copy = dsd.snapshot(state)["scheduler"]
    before = dict(copy)
    for _ in range(3):
        state["scheduler"].step()
    state["scheduler"].milestones[9] += 1
    assert copy == before


def test_a_snapshot_outlives_the_state(tmp_path):
    state = training()
    root = dsd.save(tmp_path / "c", state)
    copy = dsd.snapshot(state)
    del state
    gc.collect()
    assert dsd.save(tmp_path / "copy", copy) == root


REFUSED = {
    "meta": (lambda: {"x": torch.ones(1, device="meta")}, "meta"),
    "module on meta": (lambda: {"x": nn.Linear(1, 1, device="meta")}, "meta"),
    "lazy module": (lambda: {"x": nn.LazyLinear(3)}, "no shape yet"),
    "optimizer alone": (lambda: {"x": torch.optim.SGD([leaf()])}, "no module of the state"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_a_snapshot_refuses_what_a_save_refuses(make, words):
    with pytest.raises(UnsupportedValueError, match=words):
        dsd.snapshot(make())


# A save changes nothing.


def facts(state: dict[str, Any]) -> Any:
    """All of a training that a save could change, as values."""
    model, optimizer = state["model"], state["optimizer"]
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [t for entry in optimizer.state.values() for t in entry.values()]
    hooks = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return {
        "bits": [hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for t in tensors],
        "ids": [(id(t), t.data_ptr(), t._version, t.requires_grad, t.is_leaf) for t in tensors],
        "grads": [None if t.grad is None else (id(t.grad), t.grad.tolist()) for t in tensors],
        "training": [(m.training, sorted(m.__dict__)) for m in model.modules()],
        "hooks": [[len(getattr(m, name)) for name in hooks] for m in model.modules()],
        "backward hooks": [len(p._backward_hooks or ()) for p in model.parameters()],
        "optimizer": (sorted(optimizer.__dict__), [id(p) for p in optimizer.state]),
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "params": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        "scheduler": repr(sorted(state["scheduler"].state_dict().items())),
        "calls": list(model.calls),
    }


def generators() -> Any:
    legacy = np.random.get_state(legacy=False)
    return (torch.get_rng_state().tolist(), random.getstate(), repr(legacy))


ACTS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "save": dsd.save,
    "snapshot": lambda path, state: dsd.snapshot(state),
    "compressed save": lambda path, state: dsd.save(path, state, codec="planes+zstd"),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_save_changes_nothing_of_a_training(tmp_path, act, mode):
    state = training()
    getattr(state["model"], mode)()
    state["model"].embed.eval()
    before = facts(state), generators()
    act(tmp_path / "c", state)
    assert (facts(state), generators()) == before


def test_a_save_makes_no_entries_in_the_state_of_an_optimizer(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    dsd.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert len(optimizer.state) == 0
    assert model.weight.grad is None


def test_a_load_changes_no_generator(tmp_path):
    state = training()
    dsd.save(tmp_path / "c", state, recipes={"model": dsd.Recipe("net")})
    before = generators()
    dsd.load(tmp_path / "c")
    dsd.load(tmp_path / "c", state, strict=False)
    dsd.load_model(tmp_path / "c", {"net": Net})
    assert generators() == before


def test_the_containers_of_the_caller_stay_as_they_are(tmp_path):
    inner = {"z": torch.ones(1), "a": [1, 2]}
    state = {"b": inner, "a": (inner["a"], {3: None}), "o": OrderedDict(y=1, x=2)}
    ids = [id(inner), id(inner["a"]), id(inner["z"]), id(state["a"]), id(state["o"])]
    dsd.save(tmp_path / "c", state)
    dsd.snapshot(state)
    assert (list(state), list(inner), list(state["o"])) == (["b", "a", "o"], ["z", "a"], ["y", "x"])
    again = state["b"], state["b"]["a"], state["b"]["z"], state["a"], state["o"]
    assert [id(value) for value in again] == ids
    assert state["a"][0] is inner["a"]


def test_a_state_dict_is_asked_for_once(tmp_path):
    """It may be costly, and count."""
    asked = []

    class Loader:
        def state_dict(self) -> dict[str, Any]:
            asked.append("loader")
            return {"position": len(asked)}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    dsd.save(tmp_path / "c", {"loader": Loader()})
    assert asked == ["loader"]
    assert dsd.load(tmp_path / "c") == {"loader": {"position": 1}}


def test_a_save_keeps_nothing_alive(tmp_path):
    weight = torch.ones(1000)
    references = len(gc.get_referrers(weight))
    dsd.save(tmp_path / "c", {"w": weight})
    gc.collect()
    assert len(gc.get_referrers(weight)) == references


# Equal states are equal files (B108).

SAME_AGAIN = """
import random, sys
import torch
import dsdformat.torch as dsd

path, seed = sys.argv[1], int(sys.argv[2])

def shuffled(mapping):
    items = list(mapping.items())
    random.Random(seed).shuffle(items)
    return dict(items)

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
state = {
    "model": model,
    "ema": shuffled({f"layer{i}.weight": torch.full((i + 1,), float(i)) for i in range(30)}),
    "config": shuffled({f"option{i}": shuffled({"a": i, "b": [i]}) for i in range(16)}),
    "sets": [{f"s{i}" for i in range(16)}, frozenset(range(16))],
    "numbers": shuffled({i: i for i in range(9)}),
    "step": 3,
}
user = shuffled({f"key{i}": f"value {i}" for i in range(16)})
print(dsd.save(path, shuffled(state), user=user, threads=1 + seed % 3))
"""


def test_equal_states_give_equal_files_in_every_process_and_order(tmp_path, run_python):
    contents = []
    for seed in range(3):
        path = tmp_path / str(seed)
        result = run_python(SAME_AGAIN, path, seed, env={"PYTHONHASHSEED": str(seed)})
        assert result.returncode == 0, result.stderr
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        contents.append((result.stdout, files))
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_number_of_threads_does_not_change_the_digest(tmp_path, threads):
    state = {"w": torch.arange(3_000_000.0), "v": [torch.ones(i + 1) for i in range(20)]}
    root = dsd.save(tmp_path / "one", state)
    assert dsd.save(tmp_path / "two", state, threads=threads) == root


def test_where_a_tensor_lies_in_memory_does_not_change_the_digest(tmp_path):
    packed = torch.arange(12.0).reshape(3, 4)
    views = {"slice": torch.arange(20.0)[:12].reshape(3, 4), "copy": packed.clone()}
    roots = {dsd.save(tmp_path / name, {"w": view}) for name, view in views.items()}
    assert roots == {dsd.save(tmp_path / "packed", {"w": packed})}


OTHER: dict[str, dict[str, Any]] = {
    "a bit": {"w": torch.tensor([1.0, 2.0000002]), "n": 1},
    "a value": {"w": torch.tensor([1.0, 2.0]), "n": 2},
    "the type of a value": {"w": torch.tensor([1.0, 2.0]), "n": 1.0},
    "a bool for an int": {"w": torch.tensor([1.0, 2.0]), "n": True},
    "a name": {"v": torch.tensor([1.0, 2.0]), "n": 1},
    "a shape": {"w": torch.tensor([[1.0, 2.0]]), "n": 1},
    "a dtype": {"w": torch.tensor([1.0, 2.0]).view(torch.int32), "n": 1},
    "an array": {"w": np.array([1.0, 2.0], np.float32), "n": 1},
}


@pytest.mark.parametrize("state", OTHER.values(), ids=OTHER)
def test_a_state_that_differs_has_another_digest(tmp_path, state):
    root = dsd.save(tmp_path / "c", {"w": torch.tensor([1.0, 2.0]), "n": 1})
    assert dsd.save(tmp_path / "other", state) != root


def test_a_checkpoint_that_is_loaded_and_saved_is_the_same(tmp_path):
    root = dsd.save(tmp_path / "one", training())
    assert dsd.save(tmp_path / "two", dsd.load(tmp_path / "one")) == root


def test_a_state_that_was_loaded_in_place_is_the_same(tmp_path):
    root = dsd.save(tmp_path / "one", training())
    other = training()
    for _ in range(3):
        train(other)
    loaded = dsd.load(tmp_path / "one", other)
    other.update({key: loaded[key] for key in ("history", "step")})
    assert dsd.save(tmp_path / "two", other) == root


# Saving to a used path (B114).


def test_a_used_path_is_refused_unless_it_may_be_overwritten(tmp_path):
    root = dsd.save(tmp_path / "c", {"w": torch.ones(3)})
    with pytest.raises(StorageError, match="exists") as caught:
        dsd.save(tmp_path / "c", {"w": torch.zeros(3)})
    assert caught.value.code == "already_exists"
    assert "overwrite=True" in caught.value.hint
    assert dsdformat.verify(tmp_path / "c", digest=root).ok


def test_nothing_of_what_is_overwritten_stays(tmp_path):
    dsd.save(tmp_path / "c", {name: {"w": torch.ones(9)} for name in ("model", "optimizer", "ema")})
    (tmp_path / "c" / "model-00007-of-00008.safetensors").write_bytes(b"left over")
    root = dsd.save(tmp_path / "c", {"model": {"w": torch.zeros(3)}}, overwrite=True)
    assert sorted(file.name for file in (tmp_path / "c").iterdir()) == [
        *("manifest.dsd", "model.safetensors"),
    ]
    assert dsdformat.verify(tmp_path / "c", digest=root).unlisted == ()
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a folder of other things": lambda path: (path.mkdir(), (path / "notes.txt").write_text("x")),
    "a file": lambda path: path.write_text("x"),
    "payloads of another format": lambda path: (path.mkdir(), (path / "__7_0.distcp").touch()),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path, make, overwrite):
    make(tmp_path / "c")
    with pytest.raises(StorageError) as caught:
        dsd.save(tmp_path / "c", {"w": torch.ones(3)}, overwrite=overwrite)
    assert caught.value.code == "not_replaceable"
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "c").mkdir()
    dsd.save(tmp_path / "c", {"w": torch.ones(3)})
    assert_same(dsd.load(tmp_path / "c"), {"w": torch.ones(3)})


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_save_that_fails_midway_keeps_the_old_checkpoint(tmp_path, monkeypatch, fail_at):
    old = {"model": {"w": torch.ones(100_000)}, "optimizer": {"m": torch.ones(9)}}
    root = dsd.save(tmp_path / "c", old)
    write_at, calls = target.FileSink.write_at, []

    def failing(self: Any, *args: Any) -> None:
        calls.append(args)
        if len(calls) == fail_at:
            raise StorageError("no space left", errno=errno.ENOSPC)
        write_at(self, *args)

    monkeypatch.setattr(target.FileSink, "write_at", failing)
    new = {"model": {"w": torch.zeros(100_000)}, "optimizer": {"m": torch.zeros(9)}}
    with pytest.raises(StorageError, match="no space left"):
        dsd.save(tmp_path / "c", new, overwrite=True)
    monkeypatch.undo()
    assert_same(dsd.load(tmp_path / "c", digest=root), old)
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


BAD: list[Any] = [
    pytest.param({"codec": "zip"}, id="codec"),
    pytest.param({"codec": lambda name: "zip"}, id="codec of a function"),
    pytest.param({"codec": None}, id="codec None"),
    pytest.param({"user": {"a": 1}}, id="user value"),
    pytest.param({"user": {1: "a"}}, id="user key"),
    pytest.param({"user": "a"}, id="user string"),
    pytest.param({"threads": 0}, id="threads 0"),
    pytest.param({"threads": "2"}, id="threads string"),
    pytest.param({"recipes": {"w": "mlp"}}, id="recipe"),
    pytest.param({"recipes": {"nothing": dsd.Recipe("mlp")}}, id="recipe of nothing"),
    pytest.param({"recipes": "mlp"}, id="recipes string"),
]


@pytest.mark.parametrize("options", BAD)
def test_an_option_that_makes_no_sense_is_refused_and_nothing_is_written(tmp_path, options):
    with pytest.raises(ArgumentError):
        dsd.save(tmp_path / "c", {"w": torch.ones(3)}, **options)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_function_comes_through_and_nothing_is_written(tmp_path):
    def explode(name: str) -> str:
        raise LookupError(name)

    with pytest.raises(LookupError):
        dsd.save(tmp_path / "c", {"w": torch.ones(3)}, codec=explode)
    assert list(tmp_path.iterdir()) == []


EMPTY = {
    "no keys": {},
    "empty containers": {"a": {}, "b": [], "c": {"d": ()}},
    "a module without tensors": {"m": nn.ReLU()},
    "tensors without elements": {"w": torch.zeros(0), "v": torch.zeros(2, 0)},
}


@pytest.mark.parametrize("state", EMPTY.values(), ids=EMPTY)
def test_a_state_of_nothing_comes_back(tmp_path, state):
    dsd.save(tmp_path / "c", state)
    assert_same(dsd.load(tmp_path / "c"), dsd.snapshot(state))
    assert not dsd.load(tmp_path / "c", state).report


# In one process, again and again (B152).


def test_a_state_is_loaded_right_after_it_was_saved_three_times(tmp_path):
    state = training()
    for turn in range(3):
        train(state)
        saved = dsd.snapshot(state)
        root = dsd.save(tmp_path / "c", state, overwrite=True)
        train(state)
        assert not dsd.load(tmp_path / "c", state, digest=root).report
        assert_same(dsd.snapshot(state), saved)
        assert state["optimizer"].param_groups[0]["params"][0] is state["model"].embed.weight
        assert state["scheduler"].last_epoch == 2 + turn


def test_a_training_that_is_loaded_after_each_step_goes_as_one_that_is_not(tmp_path):
    plain, other = training(), training()
    for _ in range(4):
        train(plain)
        train(other)
        dsd.save(tmp_path / "c", other, overwrite=True)
        dsd.load(tmp_path / "c", other)
    assert_same(dsd.snapshot(other), dsd.snapshot(plain))


def test_an_error_of_one_save_does_not_stand_in_the_way_of_the_next(tmp_path):
    state: dict[str, Any] = {"w": torch.ones(3), "f": print}
    with pytest.raises(UnsupportedValueError):
        dsd.save(tmp_path / "c", state)
    del state["f"]
    dsd.save(tmp_path / "c", state)
    assert_same_tensor(dsd.load(tmp_path / "c")["w"], torch.ones(3))
