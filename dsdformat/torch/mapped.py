"""Parameters that are maps of a checkpoint's files: `map_parameters`.

A model that is larger than memory can be run, and a small part of one be read, since pages come
from the disk when they are touched and can be dropped again. Written pages become private copies:
the checkpoint never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from dsdformat import folders
from dsdformat.errors import ArgumentError, EntryNotFoundError
from dsdformat.folders import PathLike
from dsdformat.torch.builder import Builder, Form
from dsdformat.torch.capture import module_entries
from dsdformat.torch.flatten import FlattenParams, flat_form
from dsdformat.torch.moves import fill
from dsdformat.torch.options import LoadOptions
from dsdformat.torch.place_modules import place_modules
from dsdformat.torch.placing import Plan
from dsdformat.torch.report import LoadReport
from dsdformat.torch.selection import Rename
from dsdformat.torch.stored import Stored, read_tree, renamed

__all__ = ["map_parameters"]


def map_parameters(
    path: PathLike,
    module: nn.Module,
    *,
    name: str = "model",
    trainable: bool = False,
    strict: bool | Mapping[str, bool] = True,
    rename: Rename | None = None,
    verify: bool = True,
    digest: str | None = None,
    threads: int | None = None,
) -> LoadReport:
    """Make a module's parameters and buffers maps of a checkpoint.

    They stay the objects that they are; what they held is freed. The checkpoint may be replaced or
    deleted afterwards, where the system keeps files that are open.

    Args:
        path: The checkpoint's folder.
        module: On the CPU or on meta, with the dtypes of the checkpoint. One with flat parameters
            takes a checkpoint of its `flat_state_dict()`.
        name: Root key of the model in the checkpoint.
        trainable: Whether the parameters can be trained; those that are get their own memory, a
            page at a time. If not, they are frozen: they need no gradient.
        strict, rename, digest, threads: As in `load`.
        verify: Whether to compare the data with their digests, for which all are read once.

    Returns:
        What differs, if `strict` allows that.

    Raises:
        ArgumentError: `cannot_map`: tensors are compressed or in several chunks; `bad_argument`:
            the module is on another device, or flat, and the checkpoint is not. Nothing was
            changed.
        EntryNotFoundError: the checkpoint has no such root key.
        MismatchError: `state_mismatch`, with a `report`; nothing was changed.

    Ranks: local.
    Memory: 4 MiB to verify; pages that are written to, as those of running statistics.
    """
    options = LoadOptions.of(strict, rename=rename, mmap=True)
    _check_device(module)
    with folders.open(path, verify=verify, digest=digest, threads=threads) as checkpoint:
        tree = renamed(read_tree(checkpoint), options.renames)
        if name not in tree:
            raise EntryNotFoundError(f"{path}: there is no {name!r} at the root", name=name)
        form = Form()
        builder = Builder(checkpoint, mmap=True, types={}, form=lambda _: form)
        plan = _MapPlan(builder, options)
        with flat_form(module) if _is_flat(module, tree[name]) else nullcontext():
            place_modules(plan, [module], tree[name], (name,))
            plan.report.check(options.strict)
            moves = [move for kind in plan.moves() for move in kind]
            unmapped = {move.index for move in moves if move.into.numel()} & plan.wanted
            if unmapped:
                _refuse_copies([checkpoint.names[index] for index in sorted(unmapped)])
            fill(checkpoint, moves)
            plan.map_all(trainable)
            plan.finish()
        return plan.report


class _MapPlan(Plan):
    """A plan whose tensors get maps, where others are read into.

    Attributes:
        wanted: Numbers of the tensors that are to be maps.
    """

    def __init__(self, builder: Builder, options: LoadOptions) -> None:
        super().__init__(
            builder,
            options.selection,
            dtype=options.dtype,
            device=options.device,
            strict=options.strict,
        )
        self.wanted: set[int] = set()
        self._maps: list[tuple[Stored, torch.Tensor]] = []

    def place(self, stored: Any, live: torch.Tensor, name: str, *, cast: bool = True) -> bool:
        """Plan to map a stored tensor in place of what a live one holds."""
        count = len(self._moves)
        fits = super().place(stored, live, name, cast=cast)
        if fits and type(stored) is Stored:
            self.wanted.add(stored.index)
            if len(self._moves) > count:
                self._moves.pop()
                self.builder.need(stored, Form())
            self._maps.append((stored, live))
        return fits

    def map_all(self, trainable: bool) -> None:
        """Give the live tensors their maps; those on meta get theirs in `finish`."""
        used: set[int] = set()
        for stored, live in self._maps:
            if not live.is_meta:
                content = self.builder.make(stored, (stored.name,), Form())
                # What is stored once and not tied here must not see the other's writes.
                again = stored.index in used and trainable
                live.grad = None
                live.data = content.clone() if again else content
                used.add(stored.index)
            if isinstance(live, nn.Parameter):
                live.requires_grad_(live.requires_grad and trainable)


def _check_device(module: nn.Module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type not in ("cpu", "meta"):
            raise ArgumentError(
                f"{name} is on {tensor.device}; maps of files are on the CPU",
                code="bad_argument",
                hint="move the module to the CPU or to meta first",
            )


def _is_flat(module: nn.Module, stored: Any) -> bool:
    """Whether a module is flat, as the checkpoint then has to be too."""
    wrappers = [one for one in module.modules() if isinstance(one, FlattenParams)]
    flats = {id(flat) for one in wrappers if one.is_flattened for flat in one.flat_params}
    if not flats:
        return False
    with flat_form(module):
        names = [name for _, name, value in module_entries(module) if id(value) in flats]
    lacking = [name for name in names if not isinstance(stored, dict) or name not in stored]
    if lacking:
        raise ArgumentError(
            f"{lacking[0]} is flat, and the checkpoint does not have it in one piece",
            code="bad_argument",
            hint="map the module before it is flattened (which copies it), or save its "
            "flat_state_dict() and map that",
        )
    return True


def _refuse_copies(names: list[str]) -> None:
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    raise ArgumentError(
        f"{shown} cannot be mapped: compressed, or stored in several chunks",
        code="cannot_map",
        hint="save the model from one process with codec='raw', or use load(...), which copies",
    )
