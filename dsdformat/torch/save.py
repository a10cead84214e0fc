"""Save a state: capture, adapt, write, commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsdformat import folders
from dsdformat.errors import ArgumentError
from dsdformat.folders import PathLike
from dsdformat.torch.capture import capture
from dsdformat.torch.recipes import RECIPES, Recipe, recipe_values
from dsdformat.torch.sources import Adapter
from dsdformat.writer import Codec

__all__ = ["save"]


def save(
    path: PathLike,
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    codec: Codec = "raw",
    user: Mapping[str, str] | None = None,
    threads: int | None = None,
    recipes: Mapping[str, Recipe] | None = None,
) -> str:
    """Save modules, optimizers, schedulers, tensors and values as one checkpoint.

    A module is filed as its state dict under canonical FQNs, an optimizer by the FQNs of its
    parameters, an object with `state_dict` and `load_state_dict` as what its `state_dict` gives.
    Tensors that are the same memory are tied: stored once, and one tensor again after loading.
    Nothing of the state is changed, neither are the states of random generators.

    Args:
        path: The checkpoint's folder; parents are made.
        state: A mapping with string keys. Its leaves, at any depth of dicts, lists and tuples,
            are modules, optimizers, objects with `state_dict` and `load_state_dict`, tensors,
            numpy arrays and the values of the format. A list of modules is one model in parts,
            a list of optimizers one optimizer in parts.
        overwrite: Whether to replace a checkpoint that is there, once the new one is complete.
        codec: `raw`, `zstd` or `planes+zstd`, or a function from a tensor's name to one.
        user: User metadata: strings.
        threads: How many threads hash and write; up to 8 if None.
        recipes: For keys of the state, how `load_model` builds the model there.

    Returns:
        The root digest.

    Raises:
        UnsupportedValueError: something cannot be stored: a function, a tensor without data, an
            optimizer whose parameters are in no module of the state. Nothing was written.
        MismatchError: `state_conflict`: parts of one model or optimizer share a name.
        StorageError: `already_exists`, or the medium failed; the target is as it was.

    Ranks: local.
    Memory: two blocks per thread; none for packed tensors in host memory.
    """
    _check_alone()
    plain = capture(state)
    if recipes:
        plain = {**plain, RECIPES: recipe_values(recipes, state)}
    with folders.create(
        path, overwrite=overwrite, codec=codec, user=user, threads=threads, adapt=Adapter()
    ) as writer:
        writer.add(plain)
        return writer.commit()


def _check_alone() -> None:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size() > 1:
        raise ArgumentError(
            f"this process is one of {distributed.get_world_size()} ranks, and saving from "
            "several ranks is not supported yet",
            code="bad_argument",
        )
