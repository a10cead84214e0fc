"""The forms that an optimizer's state has in files, and the ways from one to another.

- Numbered, as `Optimizer.state_dict` gives it: `state` by number, `param_groups` a list whose
  `params` are numbers.
- Listed, as `torch.distributed.checkpoint.state_dict` gives it: the same by FQN.
- Flattened, as that gives it with `flatten_optimizer_state_dict`: keys joined by dots.
- Named, as checkpoints of ours have it (spec/pytorch.md): groups by the FQN of their first
  parameter.

Values are moved and never changed; what has another form stays as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsdformat.convert.foreign import AnyTensor, is_mapping, rebuilt
from dsdformat.convert.plain_emitting import refuse

__all__ = [
    "flat_to_named",
    "has_lists",
    "is_flat",
    "is_named",
    "listed",
    "mapped_optimizers",
    "named",
    "named_order",
    "numbered",
    "optimizer_forms",
]

Path = tuple[Any, ...]
Optimizer = Mapping[Any, Any]

STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"
SHARED, OWN = "shared_state", "own_keys"


def mapped_optimizers(
    tree: Any, change: Callable[[Optimizer, Path], Any | None], path: Path = ()
) -> Any:
    """Return a tree with other optimizers in it.

    Args:
        tree: A state.
        change: Gives what takes the place of a dict; None to look further inside.
        path: Where the tree lies.
    """
    if is_mapping(tree):
        changed = change(tree, path)
        if changed is not None:
            return changed
        items = list(tree.items())
    elif type(tree) in (list, tuple):
        items = list(enumerate(tree))
    else:
        return tree
    made = [(step, mapped_optimizers(item, change, (*path, step))) for step, item in items]
    same = all(one is item for (_, one), (_, item) in zip(made, items, strict=True))
    return tree if same else rebuilt(tree, made)


def has_lists(tree: Optimizer, kind: type) -> bool:
    """Whether a dict is an optimizer's state with a list of groups whose `params` are such."""
    groups = tree.get(GROUPS)
    if not isinstance(tree.get(STATE), dict) or type(groups) is not list or not groups:
        return False
    return all(_has_params(group, kind) for group in groups)


def is_named(tree: Optimizer) -> bool:
    """Whether a dict is an optimizer's state as checkpoints of ours have it."""
    groups = tree.get(GROUPS)
    if not isinstance(tree.get(STATE), dict) or not isinstance(groups, dict):
        return False
    if not set(tree) <= {STATE, GROUPS, SHARED, OWN} or not groups:
        return False
    return all(_has_params(group, str) for group in groups.values())


def is_flat(tree: Optimizer) -> bool:
    """Whether a dict is an optimizer's state whose keys are joined by dots."""
    starts = {key.partition(".")[0] if type(key) is str and "." in key else "" for key in tree}
    return GROUPS in starts and starts <= {STATE, GROUPS}


def optimizer_forms(tree: Any) -> dict[Path, str]:
    """Return the forms of the optimizers in a tree, by their paths."""
    found: dict[Path, str] = {}

    def note(one: Optimizer, path: Path) -> Any | None:
        forms = {
            "named": is_named(one),
            "listed": has_lists(one, str),
            "numbered": has_lists(one, int),
            "flat": is_flat(one),
        }
        form = next((form for form, holds in forms.items() if holds), None)
        if form is not None:
            found[path] = form
        return None if form is None else one

    mapped_optimizers(tree, note)
    return found


def named(tree: Optimizer, names: Sequence[str]) -> dict[str, Any] | None:
    """Return a numbered or listed optimizer's state with names.

    Args:
        tree: The state.
        names: Of its parameters, in the order of its groups.

    Returns:
        The named form; None if what is kept for a parameter is no dict.
    """
    name_of = dict(zip(named_order(tree), names, strict=True))
    lead = names[0] if names else ""
    state: dict[str, Any] = {}
    shared: dict[Any, Any] = {}
    for key, kept in tree[STATE].items():
        if key not in name_of:
            shared[key] = kept
        elif not is_mapping(kept):
            return None
        elif kept:  # an entry that was only touched holds nothing
            state[name_of[key]] = kept
    groups: OrderedDict[Any, Any] = OrderedDict()
    for number, group in enumerate(tree[GROUPS]):
        own = [name_of[key] for key in group[PARAMS]]
        rest = {key: item for key, item in group.items() if key not in (PARAMS, PARAM_NAMES)}
        groups[own[0] if own else (lead, number)] = {PARAMS: own, **rest}
    result: dict[str, Any] = {STATE: state, GROUPS: groups}
    more = {key: item for key, item in tree.items() if key not in (STATE, GROUPS)}
    return result | _filed(SHARED, lead, shared) | _filed(OWN, lead, more)


def named_order(tree: Optimizer) -> list[Any]:
    """Return the parameters of a numbered or listed optimizer's state, in the order of groups."""
    return [name for group in tree[GROUPS] for name in group[PARAMS]]


def listed(tree: Optimizer, path: Path) -> dict[str, Any]:
    """Return a named optimizer's state in the listed form.

    Raises:
        UnsupportedValueError: it is that of several optimizers with state beside their parameters.
    """
    groups = [dict(group) for group in tree[GROUPS].values()]
    result: dict[Any, Any] = {STATE: dict(tree[STATE]), GROUPS: groups}
    result[STATE] |= _unfiled(tree, SHARED, path)
    return result | _unfiled(tree, OWN, path)


def numbered(tree: Optimizer, path: Path) -> dict[str, Any]:
    """Return a named optimizer's state in the numbered form, with the names beside the numbers.

    Raises:
        UnsupportedValueError: it has state of a parameter that is in no group; or as `listed`.
    """
    result = listed(tree, path)
    number_of = {name: number for number, name in enumerate(named_order(result))}
    shared = _unfiled(tree, SHARED, path)
    state: dict[Any, Any] = {}
    for name in sorted(tree[STATE], key=lambda name: number_of.get(name, -1)):
        if name not in number_of:
            refuse((*path, STATE, name), "the state of a parameter that is in no group")
        state[number_of[name]] = tree[STATE][name]
    result[STATE] = state | shared
    for group in result[GROUPS]:
        group[PARAM_NAMES] = group[PARAMS]
        group[PARAMS] = [number_of[name] for name in group[PARAMS]]
    return result


def flat_to_named(tree: Optimizer) -> dict[str, Any] | None:
    """Return a flattened optimizer's state in the named form.

    Parameters with the same hyperparameters are a group, since that is all the form tells.

    Returns:
        None if the keys cannot be taken apart: if what is kept for a parameter is nested.
    """
    state: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in tree.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        (state if kind == STATE else options).setdefault(name, {})[last] = value
    if not set(state) <= set(options) or "" in options:
        return None
    groups: OrderedDict[Any, Any] = OrderedDict()
    leads: dict[str, str] = {}
    for name, rest in options.items():
        lead = leads.setdefault(_told(rest), name)
        groups.setdefault(lead, {PARAMS: [], **rest})[PARAMS].append(name)
    return {STATE: state, GROUPS: groups}


def _told(options: Mapping[str, Any]) -> str:
    """Return text that is equal for equal hyperparameters."""
    return repr(
        sorted(
            (key, value.identity if isinstance(value, AnyTensor) else (type(value), value))
            for key, value in options.items()
        )
    )


def _has_params(group: Any, kind: type) -> bool:
    params = group.get(PARAMS) if isinstance(group, dict) else None
    if type(params) is not list or any(type(one) is not kind for one in params):
        return False
    return len(set(params)) == len(params)


def _filed(key: str, lead: str, kept: Mapping[Any, Any]) -> dict[str, Any]:
    return {key: {lead: dict(kept)}} if kept else {}


def _unfiled(tree: Optimizer, key: str, path: Path) -> dict[Any, Any]:
    filed = tree.get(key) or {}
    if len(filed) > 1:
        refuse((*path, key), "state that several optimizers keep for no parameter")
    return {name: item for kept in filed.values() for name, item in kept.items()}
