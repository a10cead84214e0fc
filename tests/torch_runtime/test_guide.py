"""The recipes of PyTorch's guide "Saving and Loading Models", as one writes them with dsdformat.

https://pytorch.org/tutorials/beginner/saving_loading_models.html, the recipes and the notes that it
links: the docstring of a test names its section. Out of scope is the export of a program, as
TorchScript or by torch.export: a checkpoint holds no code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim import SGD, Adam, Optimizer  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402


class TheModelClass(nn.Module):
    """The guide's network, smaller, and with layers for which `train()` and `eval()` differ."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout()
        )
        self.classifier = nn.Linear(24, classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


IMAGES = torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)


def train(model: nn.Module, optimizer: Optimizer, *, steps: int, seed: int) -> list[float]:
    """Train on random images; the same seed gives the same images and the same dropout."""
    torch.manual_seed(seed)
    model.train()
    losses = []
    for _ in range(steps):
        images, labels = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
        losses.append(descend(F.cross_entropy(model(images), labels), optimizer))
    return losses


def descend(loss: Tensor, optimizer: Optimizer) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits, wherever they are."""
    alike = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    return alike and torch.equal(bits(found), bits(wanted))


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    assert [name for name in wanted if not same(found[name], wanted[name])] == []


def answers(model: nn.Module, images: Tensor = IMAGES) -> Tensor:
    with torch.no_grad():
        scores: Tensor = model.eval()(images)
    return scores


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def trained() -> tuple[TheModelClass, Adam]:
    """A model and its optimizer after some steps, so that neither is as it was made."""
    torch.manual_seed(0)
    model = TheModelClass()
    optimizer = Adam(model.parameters(), lr=0.01)
    train(model, optimizer, steps=3, seed=1)
    return model, optimizer


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="this machine has no CUDA device"
    )
    marked: Callable[..., None] = pytest.mark.gpu(skip(test))
    return marked


# 1. What is a state_dict?


def test_a_checkpoint_shows_what_the_state_dicts_of_a_model_and_an_optimizer_hold(path, trained):
    """What is a `state_dict`?"""
    model, optimizer = trained
    dsd.save(path, {"model": model, "optimizer": optimizer})

    state = dsd.load(path)
    assert_same(state["model"], model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    (group,) = state["optimizer"]["param_groups"].values()
    assert (group["lr"], group["betas"], group["params"]) == (0.01, (0.9, 0.999), names)
    weight = model.classifier.weight
    moments = state["optimizer"]["state"]["classifier.weight"]  # by name, where torch has a number
    assert_same(moments, optimizer.state[weight])


# 2. Saving & Loading Model for Inference


def test_a_model_is_saved_and_loaded_for_inference(path, trained):
    """Saving & Loading Model for Inference: Save/Load `state_dict` (Recommended)"""
    model, _ = trained
    dsd.save(path, {"model": model})

    fresh = TheModelClass()
    dsd.load(path, {"model": fresh})
    fresh.eval()
    assert_same(fresh.state_dict(), model.state_dict())
    assert same(answers(fresh), answers(model))


def test_a_state_dict_is_saved_and_loaded_as_in_the_guide(path, trained):
    """Saving & Loading Model for Inference: Save/Load `state_dict` (Recommended)"""
    model, _ = trained
    dsd.save(path, model.state_dict())

    fresh = TheModelClass()
    fresh.load_state_dict(dsd.load(path))
    assert_same(fresh.state_dict(), model.state_dict())


def test_a_snapshot_of_the_best_model_does_not_follow_the_training(path, trained):
    """Saving & Loading Model for Inference, the note on `deepcopy(model.state_dict())`"""
    model, optimizer = trained
    best, reference = dsd.snapshot({"model": model}), model.state_dict()
    weight = model.classifier.weight.detach().clone()

    train(model, optimizer, steps=1, seed=2)
    assert same(reference["classifier.weight"], model.classifier.weight)  # follows
    assert same(best["model"]["classifier.weight"], weight)
    dsd.save(path, best)
    fresh = TheModelClass()
    dsd.load(path, {"model": fresh})
    assert same(fresh.classifier.weight, weight)


def test_an_entire_model_is_built_from_a_registry_and_loaded(path):
    """Saving & Loading Model for Inference: Save/Load Entire Model"""
    model = TheModelClass(classes=7)
    dsd.save(path, {"model": model}, recipes={"model": dsd.Recipe("TheModelClass", classes=7)})

    loaded = dsd.load_model(path, registry={"TheModelClass": TheModelClass})
    loaded.eval()
    assert isinstance(loaded, TheModelClass)
    assert_same(loaded.state_dict(), model.state_dict())
    assert same(answers(loaded), answers(model))


def test_an_entire_model_is_never_imported_by_its_name(path):
    """Saving & Loading Model for Inference: Save/Load Entire Model"""
    recipe = dsd.Recipe(f"{__name__}.TheModelClass")
    dsd.save(path, {"model": TheModelClass()}, recipes={"model": recipe})

    with pytest.raises(dsdformat.DsdError, match="TheModelClass"):
        dsd.load_model(path, registry={})


# 3. Saving & Loading a General Checkpoint for Inference and/or Resuming Training


def test_training_resumes_from_a_general_checkpoint(path, trained):
    """Saving & Loading a General Checkpoint for Inference and/or Resuming Training"""
    model, optimizer = trained
    (loss,) = train(model, optimizer, steps=1, seed=2)
    dsd.save(path, {"epoch": 5, "model": model, "optimizer": optimizer, "loss": loss})

    fresh = TheModelClass()
    fresh_optimizer = Adam(fresh.parameters(), lr=0.5)
    rest = dsd.load(path, {"model": fresh, "optimizer": fresh_optimizer})
    assert rest == {"epoch": 5, "loss": loss}
    assert fresh_optimizer.param_groups[0]["lr"] == 0.01
    resumed = train(fresh, fresh_optimizer, steps=4, seed=3)
    assert resumed == train(model, optimizer, steps=4, seed=3)
    assert_same(fresh.state_dict(), model.state_dict())


def test_a_general_checkpoint_serves_for_inference(path, trained):
    """Saving & Loading a General Checkpoint for Inference and/or Resuming Training"""
    model, optimizer = trained
    dsd.save(path, {"epoch": 5, "model": model, "optimizer": optimizer, "loss": 0.25})

    fresh = TheModelClass()
    dsd.load(path, {"model": fresh}, select="model/*")  # the optimizer is not read
    assert same(answers(fresh), answers(model))


def test_saving_changes_nothing_in_a_training(path, trained):
    """Recipe: Saving and loading a general checkpoint"""
    model, optimizer = trained
    twin, twin_optimizer = deepcopy((model, optimizer))

    dsd.save(path, {"model": model, "optimizer": optimizer})
    assert train(model, optimizer, steps=3, seed=4) == train(twin, twin_optimizer, steps=3, seed=4)


# 4. Saving Multiple Models in One File


def train_gan(parts: Mapping[str, Any], *, steps: int, seed: int) -> list[float]:
    """Train both models against each other; the same seed gives the same samples."""
    torch.manual_seed(seed)
    generator, discriminator = parts["generator"], parts["discriminator"]
    losses = []
    for _ in range(steps):
        real, fake = torch.randn(4, 5) + 2, generator(torch.randn(4, 2))
        loss = discriminator(fake.detach()).mean() - discriminator(real).mean()
        losses.append(descend(loss, parts["discriminator_optimizer"]))
        loss = -discriminator(fake).mean()
        losses.append(descend(loss, parts["generator_optimizer"]))
    return losses


def make_gan() -> dict[str, Any]:
    generator, discriminator = nn.Linear(2, 5), nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    return {
        "generator": generator,
        "discriminator": discriminator,
        "generator_optimizer": Adam(generator.parameters()),
        "discriminator_optimizer": SGD(discriminator.parameters(), lr=0.1, momentum=0.9),
    }


def test_several_models_and_their_optimizers_share_a_checkpoint(path):
    """Saving Multiple Models in One File"""
    gan = make_gan()
    train_gan(gan, steps=3, seed=1)
    dsd.save(path, gan)

    fresh = make_gan()
    dsd.load(path, fresh)
    assert train_gan(fresh, steps=3, seed=2) == train_gan(gan, steps=3, seed=2)
    for name in ("generator", "discriminator"):
        assert_same(fresh[name].state_dict(), gan[name].state_dict())


# 5. Warmstarting Model Using Parameters from a Different Model


class AnotherModel(nn.Module):
    """As TheModelClass, but for its own names and its own head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = TheModelClass().features
        self.head = nn.Linear(24, 2)


def test_a_model_starts_from_the_parameters_that_fit(path, trained):
    """Warmstarting Model Using Parameters from a Different Model: `strict=False`"""
    model, _ = trained
    dsd.save(path, {"model": model})

    other = TheModelClass(classes=2)
    head = other.classifier.weight.detach().clone()
    report = dsd.load(path, {"model": other}, strict=False).report
    assert_same(other.features.state_dict(), model.features.state_dict())
    assert same(other.classifier.weight, head)
    assert sorted((bad.name, bad.what) for bad in report.mismatched) == [
        ("model/classifier.bias", "shape"),
        ("model/classifier.weight", "shape"),
    ]


def test_a_model_starts_from_renamed_parameters(path, trained):
    """Warmstarting Model Using Parameters from a Different Model: matching keys by renaming"""
    model, _ = trained
    dsd.save(path, {"model": model})

    other = AnotherModel()
    rename = [("model/features.", "model/backbone.")]
    report = dsd.load(path, {"model": other}, rename=rename, strict=False).report
    assert_same(other.backbone.state_dict(), model.features.state_dict())
    assert sorted(report.missing) == ["model/head.bias", "model/head.weight"]
    assert sorted(report.unexpected) == ["model/classifier.bias", "model/classifier.weight"]


def test_what_does_not_fit_is_refused_before_the_model_is_changed(path, trained):
    """Warmstarting Model Using Parameters from a Different Model: what `strict=True` prevents"""
    dsd.save(path, {"model": trained[0]})

    other = TheModelClass(classes=2)
    before = dsd.snapshot({"model": other})["model"]
    with pytest.raises(dsdformat.MismatchError, match=r"classifier\.weight"):
        dsd.load(path, {"model": other})
    assert_same(other.state_dict(), before)


# 6. Saving & Loading Model Across Devices


def test_a_model_on_the_cpu_is_loaded_on_the_cpu(path, trained):
    """Saving & Loading Model Across Devices; the argument `map_location`"""
    model, _ = trained
    dsd.save(path, {"model": model})

    state = dsd.load(path, device="cpu")
    assert {weight.device.type for weight in state["model"].values()} == {"cpu"}
    assert_same(state["model"], model.state_dict())


def test_a_model_without_storage_gets_it_on_the_device_that_is_asked_for(path, trained):
    """Saving & Loading Model Across Devices, from the device `meta`"""
    model, _ = trained
    dsd.save(path, {"model": model})

    with torch.device("meta"):
        fresh = TheModelClass()
    dsd.load(path, {"model": fresh}, device="cpu")
    assert_same(fresh.state_dict(), model.state_dict())
    assert same(answers(fresh), answers(model))


def test_each_name_can_have_its_device(path, trained):
    """Saving & Loading Model Across Devices; `map_location` as a function"""
    dsd.save(path, {"model": trained[0]})
    asked = set()

    def place(name: str) -> str:
        asked.add(name)
        return "cpu"

    state = dsd.load(path, device=place)
    assert asked == {f"model/{name}" for name in state["model"]}
    assert_same(state["model"], trained[0].state_dict())


def test_names_can_take_devices_in_turn(path, trained):
    """Saving & Loading Model Across Devices; `map_location` as a function"""
    dsd.save(path, {"model": trained[0]})
    devices = cycle(["cpu", "cpu:0"])  # equal devices under two names, as two GPUs would be
    state = dsd.load(path, device=lambda name: next(devices))
    assert_same(state["model"], trained[0].state_dict())


@needs_gpu
def test_a_model_saved_on_a_gpu_is_loaded_on_the_cpu(path, trained):
    """Saving & Loading Model Across Devices: Save on GPU, Load on CPU"""
    model = trained[0].to("cuda")
    dsd.save(path, {"model": model})

    fresh = TheModelClass()
    dsd.load(path, {"model": fresh})
    assert {weight.device.type for weight in fresh.state_dict().values()} == {"cpu"}
    assert_same(fresh.state_dict(), model.state_dict())


@needs_gpu
def test_training_on_a_gpu_resumes_on_a_gpu(path):
    """Saving & Loading Model Across Devices: Save on GPU, Load on GPU"""
    model = TheModelClass().to("cuda")
    optimizer = Adam(model.parameters())
    model(IMAGES.to("cuda")).sum().backward()
    optimizer.step()
    dsd.save(path, {"model": model, "optimizer": optimizer})

    fresh = TheModelClass().to("cuda")
    fresh_optimizer = Adam(fresh.parameters())
    dsd.load(path, {"model": fresh, "optimizer": fresh_optimizer})
    assert_same(fresh.state_dict(), model.state_dict())
    moments = fresh_optimizer.state[fresh.classifier.weight]
    assert moments["exp_avg"].device.type == "cuda"
    assert_same(moments, optimizer.state[model.classifier.weight])


@needs_gpu
def test_a_model_saved_on_the_cpu_is_loaded_on_a_gpu(path, trained):
    """Saving & Loading Model Across Devices: Save on CPU, Load on GPU"""
    model, _ = trained
    dsd.save(path, {"model": model})

    fresh = TheModelClass().to("cuda")
    dsd.load(path, {"model": fresh})
    loaded = dsd.load(path, device="cuda:0")["model"]
    for state in (fresh.state_dict(), loaded):
        assert {weight.device.type for weight in state.values()} == {"cuda"}
        assert_same(state, model.state_dict())


@needs_gpu
def test_names_are_divided_over_devices(path, trained):
    """Saving & Loading Model Across Devices; `map_location` as a mapping"""
    model, _ = trained
    dsd.save(path, {"model": model})

    devices = {"model/features.*": "cuda", "*": "cpu"}
    state = dsd.load(path, device=devices)["model"]
    on_the_gpu = {name for name, weight in state.items() if weight.is_cuda}
    assert on_the_gpu == {name for name in model.state_dict() if name.startswith("features.")}
    assert_same(state, model.state_dict())


# 7. Saving torch.nn.DataParallel Models


def test_a_data_parallel_model_is_saved_without_its_wrapper(path, trained):
    """Saving & Loading Model Across Devices: Saving `torch.nn.DataParallel` Models"""
    model, optimizer = trained
    parallel = nn.DataParallel(model)
    dsd.save(path, {"model": parallel, "optimizer": optimizer})

    fresh = TheModelClass()
    fresh_optimizer = Adam(fresh.parameters())
    dsd.load(path, {"model": fresh, "optimizer": fresh_optimizer})  # no `.module` at either end
    assert_same(fresh.state_dict(), model.state_dict())
    resumed = train(fresh, fresh_optimizer, steps=2, seed=5)
    assert resumed == train(parallel, optimizer, steps=2, seed=5)


def test_a_data_parallel_model_is_loaded_from_a_plain_one(path, trained):
    """Saving & Loading Model Across Devices: Saving `torch.nn.DataParallel` Models"""
    model, _ = trained
    dsd.save(path, {"model": model})

    parallel = nn.DataParallel(TheModelClass())
    dsd.load(path, {"model": parallel})
    assert_same(parallel.module.state_dict(), model.state_dict())


# Recipe: Tips for Loading an nn.Module from a Checkpoint


def test_a_state_dict_is_mapped_and_not_read(path, trained):
    """Tips for Loading an `nn.Module` from a Checkpoint: `torch.load(mmap=True)`"""
    model, _ = trained
    root = dsd.save(path, {"model": model})

    weights = dsd.load(path, mmap=True)["model"]
    assert_same(weights, model.state_dict())
    weights["classifier.weight"].zero_()  # copy on write: only this process sees it
    assert dsdformat.verify(path, digest=root).ok
    assert same(dsd.load(path)["model"]["classifier.weight"], model.classifier.weight)


def test_a_model_on_meta_takes_the_mapped_tensors(path, trained):
    """Tips for Loading an `nn.Module` from a Checkpoint: `mmap`, `meta` and `assign` together"""
    model, _ = trained
    root = dsd.save(path, {"model": model})

    with torch.device("meta"):
        fresh = TheModelClass()
    dsd.load(path, {"model": fresh}, mmap=True)
    assert_same(fresh.state_dict(), model.state_dict())
    assert all(isinstance(weight, nn.Parameter) for weight in fresh.parameters())
    train(fresh, SGD(fresh.parameters(), lr=0.1), steps=1, seed=6)
    assert not same(fresh.classifier.weight, model.classifier.weight)
    assert dsdformat.verify(path, digest=root).ok


def test_loaded_tensors_become_the_parameters_of_a_model(path, trained):
    """Tips for Loading an `nn.Module` from a Checkpoint: `load_state_dict(assign=True)`"""
    model, _ = trained
    dsd.save(path, {"model": model})

    with torch.device("meta"):
        fresh = TheModelClass()
    weights = dsd.load(path)["model"]
    fresh.load_state_dict(weights, assign=True)
    assert fresh.classifier.weight.data_ptr() == weights["classifier.weight"].data_ptr()
    assert_same(fresh.state_dict(), model.state_dict())


def test_a_model_is_loaded_in_another_dtype(path, trained):
    """`nn.Module.load_state_dict(assign=True)`, where dtypes differ: ours casts when asked to"""
    model, _ = trained
    dsd.save(path, {"model": model})

    fresh = TheModelClass().to(torch.bfloat16)
    with pytest.raises(dsdformat.MismatchError, match="bfloat16"):
        dsd.load(path, {"model": fresh})
    dsd.load(path, {"model": fresh}, dtype=torch.bfloat16)
    assert_same(fresh.state_dict(), model.to(torch.bfloat16).state_dict())


def test_an_optimizer_that_was_made_before_the_load_keeps_its_parameters(path, trained):
    """Tips for Loading an `nn.Module` from a Checkpoint, the note on optimizers and `assign`"""
    model, optimizer = trained
    dsd.save(path, {"model": model, "optimizer": optimizer})

    fresh = TheModelClass()
    fresh_optimizer = Adam(fresh.parameters())
    before = list(fresh.parameters())
    dsd.load(path, {"model": fresh, "optimizer": fresh_optimizer})
    assert all(a is b for a, b in zip(before, fresh.parameters(), strict=True))
    assert all(a is b for a, b in zip(before, fresh_optimizer.state, strict=True))


# Serialization semantics, and torch.load(weights_only=True)


def test_a_dict_of_tensors_is_saved_and_loaded(path):
    """Serialization semantics: Saving and loading tensors"""
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3, dtype=torch.int16)}
    dsd.save(path, tensors)
    assert_same(dsd.load(path), tensors)

    into = {"a": torch.zeros(2), "b": torch.zeros((), dtype=torch.int16)}
    dsd.load(path, into)
    assert_same(into, tensors)


def test_tensors_and_values_are_nested_as_one_likes(path):
    """Serialization semantics: tuples, lists and dicts of tensors"""
    pair = (torch.arange(3), [torch.tensor(True), None])
    dsd.save(path, {"run": {"pair": pair, "name": "a", "size": torch.Size([2])}})

    run = dsd.load(path)["run"]
    assert (run["name"], run["size"], type(run["pair"])) == ("a", torch.Size([2]), tuple)
    assert same(run["pair"][0], pair[0])
    assert same(run["pair"][1][0], pair[1][0])
    assert run["pair"][1][1] is None


def test_a_view_takes_the_place_of_its_own_elements_alone(path):
    """Serialization semantics: Saving and loading tensors preserves views, the note on `clone()`"""
    large = torch.arange(100_000)
    dsd.save(path, {"small": large[1:6]})

    assert same(dsd.load(path)["small"], large[1:6])
    assert sum(file.stat().st_size for file in path.iterdir()) < large.nbytes // 10


def test_a_tied_parameter_is_stored_once_and_tied_again(path):
    """Serialization semantics: Saving and loading tensors preserves views"""
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    model[1].weight = model[0].weight
    dsd.save(path, {"model": model})

    state = dsd.load(path)["model"]
    assert state["0.weight"] is state["1.weight"]
    assert same(state["0.weight"], model[0].weight)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(TheModelClass, id="a class"),
        pytest.param(lambda epoch: 0.9, id="a lambda"),
        pytest.param(partial(max, 1), id="a partial"),
        pytest.param(object(), id="an object"),
    ],
)
def test_what_only_pickle_could_store_is_refused(path, value):
    """`torch.load(weights_only=True)`: at the save here, not at the load"""
    with pytest.raises(dsdformat.UnsupportedValueError, match="extra"):
        dsd.save(path, {"model": TheModelClass(), "extra": value})
    assert list(path.parent.iterdir()) == []


UNPICKLED = """
import sys
import dsdformat.torch as dsd
found = []
sys.addaudithook(lambda event, args: event == "pickle.find_class" and found.append(args[1:]))
state = dsd.load(sys.argv[1])
print(sorted(state), found)
"""


def test_loading_unpickles_nothing(path, trained, run_python):
    """`torch.load(weights_only=True)`: nothing in a checkpoint can execute"""
    model, optimizer = trained
    dsd.save(path, {"model": model, "optimizer": optimizer, "epoch": 5})

    done = run_python(UNPICKLED, path)
    assert done.stdout == "['epoch', 'model', 'optimizer'] []\n", done.stderr
