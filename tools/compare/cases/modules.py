"""What a module's state is called, and what loading it leaves behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compare.case import Scene, Subject, expect, expect_equal
from compare.libraries import MODULES, STATE_DICTS

__all__ = ["MODULE_STATES"]

MODULE_STATES = Subject("Modules")


class Tied(nn.Module):
    """Two modules that share a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.other.weight = self.one.weight
        for module in (self.one, self.other):
            module.register_buffer("seen", torch.zeros(2))
        self.other.seen = self.one.seen


@MODULE_STATES.case(
    "a compiled model has its own names, before and after loading",
    source="pytorch/pytorch#158519",
    pair=STATE_DICTS,
)
def compiled_names(library: Any, _: Scene) -> None:
    model = torch.compile(nn.Linear(8, 8), backend="eager")
    before = library.get_model_state_dict(model)
    library.set_model_state_dict(model, before)
    after = library.get_model_state_dict(model)
    found = f"{', '.join(before)} before and {', '.join(after)} after"
    expect(list(before) == list(after) == ["weight", "bias"], found)


@MODULE_STATES.case(
    "parameters and buffers that are tied stay tied when a model on meta is loaded",
    source="pytorch/pytorch#188346",
    pair=MODULES,
)
def ties_from_meta(library: Any, scene: Scene) -> None:
    source = Tied()
    with torch.device("meta"):
        model = Tied()
    library.load_on_meta(scene.folder, source, model)
    expect(torch.equal(model.one.weight, source.one.weight), "other values")
    expect_equal(len(list(model.parameters())), 1, "the number of parameters")
    expect(model.other.seen is model.one.seen, "the buffers are two")


@MODULE_STATES.case(
    "a state that is offloaded to the host is a copy, which training does not change",
    source="pytorch/pytorch#144657",
    pair=STATE_DICTS,
)
def offloaded_is_copied(library: Any, _: Scene) -> None:
    model = nn.Linear(2, 2)
    wanted = model.weight.detach().clone()
    state = library.get_model_state_dict(model, options=library.StateDictOptions(cpu_offload=True))
    with torch.no_grad():
        model.weight.fill_(7)
    expect(torch.equal(state["weight"], wanted), "the model's later values are in the state")
