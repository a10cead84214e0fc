"""Parameters that are maps of a checkpoint's files: `map_parameters`.

A model that is larger than memory can be run, and a small part of one be used, since pages come
from the disk when they are touched and can be dropped again. Written pages become private copies:
the checkpoint never changes. This is `load` with `mmap=True`, for a module that has memory already.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from dsdformat import folders
from dsdformat.entries import TensorEntry
from dsdformat.errors import ArgumentError, EntryNotFoundError, listed
from dsdformat.folders import PathLike
from dsdformat.signing import Keys
from dsdformat.torch.background import settle
from dsdformat.torch.flatten import FlattenParams, flat_form, without_views
from dsdformat.torch.fqn import named_tensors
from dsdformat.torch.load import load
from dsdformat.torch.placing import replace_content
from dsdformat.torch.report import LoadReport

__all__ = ["map_parameters"]


def map_parameters(
    path: PathLike,
    module: nn.Module,
    *,
    name: str = "model",
    trainable: bool = False,
    strict: bool | Mapping[str, bool] = True,
    verify: bool = True,
    digest: str | None = None,
    pubkey: Keys | None = None,
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
        trainable: Whether the parameters can be trained; those that are get memory of their own, a
            page at a time. If not, they are frozen: they need no gradient.
        strict, digest, pubkey, threads: As in `load`.
        verify: Whether to compare the data with their digests, for which all are read once.

    Returns:
        What differs, if `strict` allows that.

    Raises:
        ArgumentError: `cannot_map`: tensors are compressed or in several chunks; `bad_argument`:
            the module is on another device, or flat, and the checkpoint is not. Nothing was
            changed.
        EntryNotFoundError: the checkpoint has nothing at this root key.
        MismatchError: `state_mismatch`, with a `report`; nothing was changed.

    Ranks: local.
    Memory: 4 MiB to verify; pages that are written to, as those of running statistics.
    """
    held = _Held(module)
    how: dict[str, Any] = {"digest": digest, "pubkey": pubkey, "threads": threads}
    settle(path)
    with folders.open(path, verify=verify, **how) as checkpoint:
        entries = [entry for entry in checkpoint if entry.path[0] == name]
        stored = {entry.name for entry in entries}
        apart = [entry.name for entry in entries if _is_apart(entry)]
    if not entries:
        raise EntryNotFoundError(f"{path} has nothing at the root key {name!r}", name=name)
    _check_apart(apart)
    with without_views(module) if _is_flat(module, name, stored) else nullcontext():
        held.release()
        try:
            report = load(
                path,
                {name: module},
                strict=strict,
                select=glob.escape(name),
                mmap=True,
                verify=verify,
                **how,
            ).report
        finally:
            held.restore()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.requires_grad and trainable)
    return report


def _is_apart(entry: TensorEntry) -> bool:
    """Whether a tensor does not lie in one piece as it is, so that there is no map of it."""
    return len(entry.chunks) > 1 or any(chunk.codec != "raw" for chunk in entry.chunks)


class _Held:
    """What a module's tensors hold, until they hold something else."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        for name, tensor in named_tensors(module):
            if tensor.device.type == "cpu":
                self._tensors[id(tensor)] = (tensor, tensor.detach(), tensor.grad)
            elif not tensor.is_meta:
                raise ArgumentError(
                    f"{name} is on {tensor.device}; maps of files are on the CPU",
                    code="bad_argument",
                    hint="move the module to the CPU or to meta first",
                )

    def release(self) -> None:
        """Put the tensors on meta, where `load` gives them maps."""
        for tensor, content, _ in self._tensors.values():
            empty = torch.empty(content.shape, dtype=content.dtype, device="meta")
            replace_content(tensor, empty)

    def restore(self) -> None:
        """Give back what they held to those that were given nothing."""
        for tensor, content, grad in self._tensors.values():
            if tensor.is_meta:
                replace_content(tensor, content)
                tensor.grad = grad


def _is_flat(module: nn.Module, name: str, stored: set[str]) -> bool:
    """Whether a module is flat, as the checkpoint then has to be too."""
    wrappers = [one for one in module.modules() if isinstance(one, FlattenParams)]
    flats = {id(flat) for one in wrappers if one.is_flattened for flat in one.flat_params}
    if not flats:
        return False
    with flat_form(module):
        state = module.state_dict(keep_vars=True)
    lacking = [
        key for key, value in state.items() if id(value) in flats and not _has(stored, name, key)
    ]
    if lacking:
        raise ArgumentError(
            f"{lacking[0]} is flat, and the checkpoint does not have it in one piece",
            code="bad_argument",
            hint="map the module before it is flattened (which copies it), or save its "
            "flat_state_dict() and map that",
        )
    return True


def _has(stored: set[str], name: str, key: str) -> bool:
    return f"{name}/{key}" in stored


def _check_apart(names: list[str]) -> None:
    """Refuse tensors that cannot be mapped, if there are any."""
    if not names:
        return
    raise ArgumentError(
        f"{listed(names)} cannot be mapped: compressed, or stored in several chunks",
        code="cannot_map",
        hint="save the model from one process with codec='raw', or use load(...), which copies",
    )
