"""Give live optimizers a state that was made for them, as their own `load_state_dict` would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsdformat.torch.compat import exact_states, has_load_hooks
from dsdformat.torch.introspect import own_method
from dsdformat.torch.optim import GROUPS, STATE

__all__ = ["Installer", "Maker", "is_overridden", "takes_more"]

# Makes a value when everything was read.
Maker = Callable[[], Any]


class Installer:
    """Gives a live optimizer what was read for it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: dict[torch.Tensor, dict[Any, Maker] | None],
        groups: list[dict[Any, Maker]],
        shared: dict[Any, Maker],
        rest: dict[Any, Maker],
    ) -> None:
        self.optimizer = optimizer
        self.states = states
        self.groups = groups
        self.shared = shared
        self.rest = rest

    def run(self) -> None:
        states = {parameter: self._made(state) for parameter, state in self.states.items()}
        groups = [self._made(group) for group in self.groups]
        if not self.rest and not takes_more(self.optimizer):
            self._set(states, groups)
        else:
            self._hand_over(states, groups)

    def _made(self, makers: dict[Any, Maker] | None) -> dict[Any, Any]:
        return {} if makers is None else {key: make() for key, make in makers.items()}

    def _set(
        self, states: dict[torch.Tensor, dict[Any, Any]], groups: list[dict[Any, Any]]
    ) -> None:
        """Set state and groups, as `Optimizer.load_state_dict` does but for its casts."""
        live = self.optimizer.state
        for parameter, state in states.items():
            live.pop(parameter, None)
            if state:
                live[parameter] = state
        for key, make in self.shared.items():
            live[key] = make()
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(values)
        self.optimizer.__setstate__({STATE: live, GROUPS: self.optimizer.param_groups})

    def _hand_over(
        self, states: dict[torch.Tensor, dict[Any, Any]], groups: list[dict[Any, Any]]
    ) -> None:
        """Call the optimizer's own `load_state_dict`, without the casts that torch's makes."""
        entries = own_method(self.optimizer, "state_dict")()
        numbers: dict[torch.Tensor, Any] = {}
        for saved, live, values in zip(
            entries[GROUPS], self.optimizer.param_groups, groups, strict=True
        ):
            numbers.update(zip(live["params"], saved["params"], strict=True))
            saved.update(values)
        for parameter, state in states.items():
            entries[STATE].pop(numbers[parameter], None)
            if state:
                entries[STATE][numbers[parameter]] = state
        entries[STATE].update((key, make()) for key, make in self.shared.items())
        entries.update((key, make()) for key, make in self.rest.items())
        with exact_states():
            own_method(self.optimizer, "load_state_dict")(entries)
        for parameter, state in states.items():
            installed = self.optimizer.state.get(parameter)
            for key, value in state.items():
                # torch copies what can be iterated over by its type, which texts do not survive
                if type(value) in (str, bytes) and isinstance(installed, dict):
                    installed[key] = value


def is_overridden(optimizer: torch.optim.Optimizer, name: str) -> bool:
    method = getattr(own_method(optimizer, name), "__func__", None)
    return method is not getattr(torch.optim.Optimizer, name)


def takes_more(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer may do something with keys that torch's own ones do not have."""
    return is_overridden(optimizer, "load_state_dict") or has_load_hooks(optimizer)
