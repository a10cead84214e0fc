"""What an optimizer's state holds, and what comes back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compare.case import Scene, Subject, expect, expect_equal
from compare.libraries import DCP, STATE_DICTS

__all__ = ["OPTIMIZERS"]

OPTIMIZERS = Subject("Optimizers")


def two_layers() -> nn.Sequential:
    """Two layers of one parameter each: `0.weight` and `1.weight`."""
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))


def stepped(
    model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any
) -> torch.optim.Optimizer:
    """Make an optimizer of a model, and let it take a step; gradients are gone then."""
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def numbers_with_state(optimizer: torch.optim.Optimizer) -> dict[int, list[str]]:
    """Say which parameters have which state, by number."""
    return {number: sorted(entry) for number, entry in optimizer.state_dict()["state"].items()}


def check_stateless(library: Any, momentum: float, wanted: list[int]) -> None:
    """Pass the state of SGD on to another one, as a flat dict."""
    options = library.StateDictOptions(flatten_optimizer_state_dict=True)
    model, other = two_layers(), two_layers()
    source = stepped(model, torch.optim.SGD, momentum=momentum)
    target = torch.optim.SGD(other.parameters(), lr=0.1, momentum=momentum)
    state = library.get_optimizer_state_dict(model, source, options=options)
    library.set_optimizer_state_dict(other, target, state, options=options)
    expect_equal(sorted(numbers_with_state(target)), wanted, "the list of parameters with state")


@OPTIMIZERS.case(
    "SGD without momentum has no state, and none after loading",
    source="pytorch/pytorch#192225",
    pair=STATE_DICTS,
)
def stateless_stays_stateless(library: Any, _: Scene) -> None:
    check_stateless(library, 0, [])
    check_stateless(library, 0.9, [0, 1])


def check_partial(library: Any, *, flat: bool) -> None:
    """Pass on the state of an optimizer of which one parameter has had no gradient yet."""
    options = library.StateDictOptions(flatten_optimizer_state_dict=flat)
    model, other = two_layers(), two_layers()
    source, target = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, other))
    model[0](torch.ones(1, 2)).sum().backward()
    source.step()
    state = library.get_optimizer_state_dict(model, source, options=options)
    library.set_optimizer_state_dict(other, target, state, options=options)
    whole = ["exp_avg", "exp_avg_sq", "step"]
    expect_equal(numbers_with_state(target), {0: whole}, "the state")
    expect_equal(target.state[other[0].weight]["step"].item(), 1, "the step")


@OPTIMIZERS.case(
    "parameters that have had no gradient have no state yet, and the others keep theirs",
    source="pytorch/pytorch#192202",
    pair=STATE_DICTS,
)
def some_without_state(library: Any, _: Scene) -> None:
    check_partial(library, flat=False)


@OPTIMIZERS.case(
    "a flat state too says which parameters have no state yet",
    source="pytorch/pytorch#192202",
    pair=STATE_DICTS,
)
def some_without_state_flat(library: Any, _: Scene) -> None:
    check_partial(library, flat=True)


def check_frozen(library: Any, frozen: list[int], *, flat: bool) -> None:
    """Freeze layers after a step, and pass the state on to a model that is frozen alike."""
    options = library.StateDictOptions(flatten_optimizer_state_dict=flat)
    model, other = two_layers(), two_layers()
    source = stepped(model)
    target = torch.optim.AdamW(other.parameters(), lr=0.1)
    for one in (model, other):
        for number in frozen:
            one[number].requires_grad_(False)
    state = library.get_optimizer_state_dict(model, source, options=options)
    library.set_optimizer_state_dict(other, target, state, options=options)
    expect_equal(sorted(numbers_with_state(target)), [0, 1], "the list of parameters with state")
    for one, there in zip(model, other, strict=True):
        found, wanted = target.state[there.weight], source.state[one.weight]
        expect(torch.equal(found["exp_avg"], wanted["exp_avg"]), "other moments")


@OPTIMIZERS.case(
    "state of parameters that are frozen later is kept",
    source="pytorch/pytorch#192202",
    pair=STATE_DICTS,
)
def frozen_keep_state(library: Any, _: Scene) -> None:
    check_frozen(library, [0], flat=False)


@OPTIMIZERS.case(
    "a flat state too keeps that of parameters that are frozen later, be it all of them",
    source="pytorch/pytorch#192202",
    pair=STATE_DICTS,
)
def frozen_keep_state_flat(library: Any, _: Scene) -> None:
    check_frozen(library, [0], flat=True)
    check_frozen(library, [0, 1], flat=True)


@OPTIMIZERS.case(
    "reading the state of a fresh optimizer changes nothing",
    source="pytorch/pytorch#164929",
    pair=STATE_DICTS,
)
def reading_changes_nothing(library: Any, _: Scene) -> None:
    weights = []
    for reads in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if reads:
            library.get_optimizer_state_dict(model, optimizer)
        kept = {key for entry in optimizer.state.values() for key in entry}
        expect(not kept, f"the optimizer has {', '.join(sorted(kept))} now")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        weights.append(model.weight)
    expect(torch.equal(*weights), "the next step makes other weights")


@OPTIMIZERS.case(
    "gradients that are kept make no difference to the state that is read",
    source="pytorch/pytorch#140898",
    pair=STATE_DICTS,
)
def gradients_may_be_there(library: Any, _: Scene) -> None:
    names = []
    for backward in (False, True):
        model = two_layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if backward:
            model(torch.ones(1, 2)).sum().backward()
        names.append(list(library.get_optimizer_state_dict(model, optimizer)["state"]))
    expect(names[0] == names[1], f"state for {names[0]} without gradients, {names[1]} with them")


@OPTIMIZERS.case(
    "a group without parameters keeps its values, and the next step works",
    source="pytorch/pytorch#143828",
    pair=STATE_DICTS,
)
def group_without_parameters(library: Any, _: Scene) -> None:
    def make(scale: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        groups: list[dict[str, Any]] = [
            {"params": [], "lr": 0.2 * scale},
            {"params": [model.weight]},
            {"params": [model.bias], "lr": 0.3 * scale, "betas": (0.8, 0.9)},
        ]
        return model, torch.optim.AdamW(groups, lr=0.1 * scale)

    (model, source), (other, target) = make(1), make(10)
    state = library.get_optimizer_state_dict(model, source)
    library.set_optimizer_state_dict(other, target, state)
    other(torch.ones(1, 2)).sum().backward()
    target.step()
    for index, (found, wanted) in enumerate(
        zip(target.param_groups, source.param_groups, strict=True)
    ):
        for key in ("lr", "betas", "eps", "weight_decay"):
            expect_equal(found.get(key), wanted[key], f"{key} of group {index}")


@OPTIMIZERS.case(
    "what a scheduler adds to groups is restored, though a fresh optimizer lacks it",
    source="pytorch/pytorch#140900",
    pair=DCP,
)
def group_values_of_a_scheduler(library: Any, scene: Scene) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    source = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(source, 1)
    model(torch.ones(1, 2)).sum().backward()
    source.step()
    scheduler.step()
    library.save_training(scene.folder, model, source)
    target = torch.optim.AdamW(other.parameters(), lr=5)
    library.load_training(scene.folder, other, target)
    (group,) = target.param_groups
    expect_equal(round(group["lr"], 6), 0.01, "lr")
    expect_equal(group.get("initial_lr"), 0.1, "initial_lr")


@OPTIMIZERS.case(
    "float32 state of bfloat16 parameters stays float32",
    source="pytorch/pytorch#43706",
    pair=STATE_DICTS,
)
def state_keeps_its_dtype(library: Any, _: Scene) -> None:
    models = [nn.Linear(2, 2, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    source, target = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in models)
    source.state[models[0].weight] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.full((2, 2), 1 / 3),
        "exp_avg_sq": torch.full((2, 2), 1 / 7),
    }
    state = library.get_optimizer_state_dict(models[0], source)
    library.set_optimizer_state_dict(models[1], target, state)
    found = target.state[models[1].weight]["exp_avg"]
    expect_equal(found.dtype, torch.float32, "the dtype")
    expect(torch.equal(found, torch.full((2, 2), 1 / 3)), "other values")
