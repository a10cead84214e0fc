"""Ask what a load would do: `preflight`. Nothing is read, and no process group is needed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsdformat.convert import Policy
from dsdformat.convert.layouts import Layouts
from dsdformat.convert.opening import Paths, open_origin
from dsdformat.convert.reading import ForeignReader
from dsdformat.errors import ArgumentError, shorten
from dsdformat.limits import MIB
from dsdformat.plan.placing_rules import Rule, check_mesh, place
from dsdformat.plan.survey import RankTable, WantedTensor, survey
from dsdformat.renaming import Path, display, renamed
from dsdformat.selection import Rename
from dsdformat.torch.fitting import fitted, modules_in
from dsdformat.torch.fqn import named_tensors
from dsdformat.torch.introspect import as_mapping
from dsdformat.torch.loading import Loading
from dsdformat.torch.optim import STATE
from dsdformat.torch.options import ByName, LoadOptions
from dsdformat.torch.per_rank import chosen
from dsdformat.torch.report import LoadReport
from dsdformat.torch.stored import Stored, leaves, names_of, read_tree

__all__ = ["Preflight", "preflight"]


@dataclass(frozen=True, eq=False)
class Preflight:
    """What a load would find, and what it would cost each rank.

    Attributes:
        report: What differs; what `load` would raise, or return with `strict=False`.
        ranks: Bytes that each rank reads and holds, of what fits.
    """

    report: LoadReport
    ranks: RankTable

    @property
    def fits(self) -> bool:
        """Whether nothing differs."""
        return not self.report

    def __str__(self) -> str:
        """Say it in a few lines."""
        ranks = self.ranks
        read, wanted = int(ranks.read_nbytes.sum()), int(ranks.wanted_nbytes.sum())
        needed = ranks.needed_nbytes
        most, peak = int(ranks.read_nbytes.max()), int(ranks.peak_nbytes.max())
        return (
            f"{ranks.tensors} tensors on {ranks.world_size} ranks, {wanted / MIB:.1f} MiB: "
            f"{read / MIB:.1f} MiB are read where {needed / MIB:.1f} MiB must be "
            f"({ranks.over_read:.3f}), at most {most / MIB:.1f} MiB by a rank, which needs at most "
            f"{peak / MIB:.1f} MiB of memory\n{self.report}"
        )


def preflight(  # noqa: PLR0913
    path: Paths,
    state: nn.Module | Mapping[str, Any],
    mesh: Mapping[str, int],
    *,
    shard: Iterable[tuple[str, int | None, str]] = (),
    strict: bool | Mapping[str, bool] = False,
    dtype: torch.dtype | ByName | None = None,
    rename: Rename | None = None,
    select: str | Iterable[str] | None = None,
    verify: bool = True,
    unknown: Policy = "refuse",
    share_reads: bool = True,
) -> Preflight:
    """Say what loading a checkpoint on a mesh would do, without ranks, memory or reading.

    Args:
        path: What `load` takes.
        state: What it would be loaded into, whole and not spread; may be on the meta device. A
            module alone is the state `{"model": module}`.
        mesh: Sizes of the mesh's axes, by name, as `{"fsdp": 4, "tp": 2}`.
        shard: How parameters are placed: (glob, dim, axis), as `("*.wq.weight", 0, "tp")`; the
            first that matches counts for its axis, and a dim of None means replicas. Without one,
            axes called `fsdp`, `shard` or `dp_shard` cut parameters by rows, as FSDP2 does, and
            all else is replicated. What an optimizer keeps for a parameter is placed as it is, if
            it has its shape.
        strict: Whether what differs is an error here, as it is in `load`.
        dtype, rename, select, verify, unknown, share_reads: As in `load`.

    Returns:
        What differs, and for each rank what it reads, holds and needs at most. Bytes of compressed
        tensors are told by the mean of each tensor.

    Raises:
        MismatchError: `state_mismatch`, if `strict`.
        ArgumentError: a mesh or a rule that is none.
        DsdError: what opening raises; see `load`.

    Ranks: local; no process group is needed.
    Memory: the tree, and 24 bytes for each rank.
    """
    axes = check_mesh(mesh)
    rules = [_rule(one, axes) for one in shard]
    options = LoadOptions.of(strict, None, dtype, rename, select)
    template = as_mapping({"model": state} if isinstance(state, nn.Module) else state)
    opened = open_origin(path, verify=verify, unknown=unknown)
    with contextlib.closing(opened) as origin:
        tree, moved = renamed(read_tree(origin), options.renames)
        if isinstance(origin, ForeignReader):
            tree, _ = fitted(tree, template, origin.name)
        tree, template, _ = chosen(tree, template, 0)
        loading = Loading(origin, tree, template, options, moved)
        loading.check()
        layouts = Layouts(origin, verify=verify)
        parameters = _parameters(template)
        wanted = list(_wanted(loading, tree, parameters, layouts, axes, rules))
        table = survey(
            axes,
            wanted,
            block_nbytes=layouts.block_nbytes,
            share_reads=share_reads,
            writers=layouts.writers(math.prod(axes.values())),
        )
        return Preflight(loading.plan.report, table)


def _rule(rule: Any, mesh: Mapping[str, int]) -> Rule:
    fits = isinstance(rule, tuple) and len(rule) == 3 and type(rule[0]) is str
    if not fits or not (rule[1] is None or type(rule[1]) is int) or rule[2] not in mesh:
        raise ArgumentError(
            f"a rule is a glob, a dim and an axis of the mesh {list(mesh)}, got {shorten(rule)}",
            code="bad_argument",
        )
    return Rule(*rule)


def _wanted(
    loading: Loading,
    tree: dict[str, Any],
    parameters: Container[str],
    layouts: Layouts,
    mesh: Mapping[str, int],
    rules: Sequence[Rule],
) -> Iterator[WantedTensor]:
    """List the tensors that will be read, each as it is stored and would be placed."""
    stored = {one.index: one for _, one in leaves(tree) if isinstance(one, Stored)}
    names = names_of(tree)
    owners = dict(_owners(loading.sections, tree))
    for index, dtype in dict(loading.plan.targets()).items():
        shape = stored[index].entry.shape
        found = next((one for one in names[index] if one in parameters), names[index][0])
        name, of = owners.get(index, (found, shape))
        by_rows = index in owners or name in parameters
        alike = shape if of == shape else ()  # statistics of rows are held by each rank
        axes = place(name, alike, mesh, rules, by_rows=by_rows)
        yield WantedTensor(layouts.of(index), shape, dtype.itemsize, axes)


def _parameters(state: Mapping[str, Any]) -> set[str]:
    """Return the display names of the parameters of modules; ranks cut no others of themselves."""
    return {
        display((*path, name))
        for path, modules in modules_in(state)
        for module in modules
        for name, tensor in named_tensors(module)
        if isinstance(tensor, nn.Parameter)
    }


def _owners(
    sections: Sequence[tuple[Path | None, Any]], tree: dict[str, Any]
) -> Iterator[tuple[int, tuple[str, tuple[int, ...] | None]]]:
    """List for each tensor of an optimizer the parameter's display name and shape, as stored."""
    shapes = {
        display(path): one.entry.shape for path, one in leaves(tree) if isinstance(one, Stored)
    }
    for module, section in sections:
        for fqn, state in section.get(STATE, {}).items():
            name = fqn if module is None else display((*module, fqn))
            for _, one in leaves(state):
                if isinstance(one, Stored):
                    # Without the parameter, what has dims counts as shaped like it.
                    yield one.index, (name, shapes.get(name, one.entry.shape))
