"""Build a model as its recipe says, and load it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from dsdformat.convert.opening import Paths
from dsdformat.convert.reading import ForeignReader
from dsdformat.errors import DsdError
from dsdformat.garbage import young_gc
from dsdformat.signing import Keys
from dsdformat.torch.comm import Comm
from dsdformat.torch.fitting import fitted
from dsdformat.torch.load import open_settled
from dsdformat.torch.loading import Loading
from dsdformat.torch.options import Device, LoadOptions, as_device
from dsdformat.torch.recipes import RECIPES, Recipe, build, find_recipe
from dsdformat.torch.rng import rng_state, set_rng_state
from dsdformat.torch.stored import read_tree

__all__ = ["load_model"]


def load_model(  # noqa: PLR0913
    path: Paths,
    registry: Mapping[str, Callable[..., nn.Module]],
    *,
    name: str = "model",
    recipe: Recipe | None = None,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    mmap: bool = False,
    verify: bool = True,
    digest: str | None = None,
    pubkey: Keys | None = None,
    threads: int | None = None,
) -> nn.Module:
    """Build the model that a checkpoint has a recipe of, and load it.

    The model is built on the meta device first, so that all names and shapes are compared before
    there is any memory for it. If it has buffers that no checkpoint holds, it is built once more,
    on the device, so that they have their values.

    Args:
        path: The checkpoint's folder, saved with `recipes`; or, with a `recipe`, any checkpoint
            that `load` takes.
        registry: What recipes' names mean: functions or classes that give modules. Nothing is
            ever imported by a name from the file.
        name: Root key of the model.
        recipe: What builds the model; as the checkpoint says if None.
        device: Where the model is made; the CPU if None.
        dtype: What the model's floating tensors are converted to; as it is built if None.
        mmap, verify, digest, pubkey, threads: As in `load`.

    Returns:
        The module, in training mode, as built.

    Raises:
        EntryNotFoundError: no such recipe, or the registry lacks its name.
        MismatchError: `state_mismatch`: the built model is not the one that was saved.

    Ranks: local.
    Memory: the model, and one block per thread.
    """
    target = torch.device("cpu") if device is None else as_device(device)
    options = LoadOptions.of(device=target, dtype=dtype, mmap=mmap)
    opened = open_settled(path, verify=verify, digest=digest, pubkey=pubkey, threads=threads)
    with young_gc(), contextlib.closing(opened) as origin:
        tree = read_tree(origin)
        recipe = recipe or find_recipe(tree.get(RECIPES), name, str(path))

        def compared(module: nn.Module) -> Loading:
            module = module if dtype is None else module.to(dtype)
            stored = tree
            if isinstance(origin, ForeignReader):
                stored, _ = fitted(tree, {name: module}, origin.name)
            return Loading(origin, {name: stored.get(name)}, {name: module}, options)

        module = _built(recipe, registry, torch.device("meta"))
        loading = None if module is None else compared(module)
        if loading is None or loading.plan.report.uninitialized:
            if loading is not None:
                loading.plan.report.uninitialized.clear()
                loading.plan.report.check(options.strict)
            module = _built(recipe, registry, target)
            assert module is not None
            loading = compared(module)
        loading.check()
        if isinstance(origin, ForeignReader):
            origin.prepare(loading.wanted(), verify=verify)
        loading.run(Comm.alone(), share_reads=False)
        assert module is not None
        return module


def _built(
    recipe: Recipe, registry: Mapping[str, Callable[..., nn.Module]], place: torch.device
) -> nn.Module | None:
    """Build a model on a device, without moving random streams; None if it needs no meta."""
    state = rng_state()
    try:
        with place:
            return build(recipe, registry)
    except DsdError:
        raise
    except Exception:
        if place.type != "meta":
            raise
        return None  # the constructor looks at values, which tensors on meta do not have
    finally:
        set_rng_state(state)
