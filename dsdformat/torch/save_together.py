"""Plan to save one state from several ranks: agree, and find out who writes what.

Ranks tell each other digests and chunk tables; no bytes of tensors go from one to another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from dsdformat.folders import PathLike
from dsdformat.torch.agreement import Holders, Rows, check_replicas
from dsdformat.torch.comm import Comm, fingerprint
from dsdformat.torch.per_rank import Path
from dsdformat.torch.rank_sources import RankAdapter, families_of, mesh_rows, plan_boxes
from dsdformat.torch.rank_tensors import RankTensors
from dsdformat.torch.stored import find_items, named_leaves, rebuilt
from dsdformat.torch.unfinished import Unfinished, plan
from dsdformat.writer import PartWriter

__all__ = ["plan_together"]


def plan_together(
    comm: Comm,
    path: PathLike,
    capture: Callable[[], tuple[dict[str, Any], list[Path], list[Path]]],
    *,
    same: bool | None,
    stage: Callable[[PartWriter], None] | None,
    overwrite: bool,
    user: Mapping[str, str] | None,
    **options: Any,
) -> Unfinished:
    """Plan to save what each rank captures; see `save`.

    Args:
        comm: The ranks that save.
        path: The checkpoint's folder, on storage that all of them see.
        capture: Gives a rank's plain state, and where in it are buffers of modules, and what it
            has for its own.
        same: Whether to compare the bytes of replicas first; None for a few of them.
        stage: As in `unfinished.plan`.
        overwrite, user: As in `save`.
        options: Of `dsdformat.create` that concern data.

    Ranks: collective over the group.
    """
    codec = options["codec"] if isinstance(options["codec"], str) else None
    what = [str(path), overwrite, dict(user or {}), codec, stage is not None]
    with comm.together("save") as step:
        plain, buffers, own = capture()
        leaves = named_leaves(plain)
        rows = Rows(leaves, own, buffers, sample=same is None)
        tensors = RankTensors.among(leaves)
        step.told = [fingerprint(what), rows.sum, mesh_rows(comm, tensors.once)]
    sums, sums_of_rows, meshes = zip(*step.heard, strict=True)
    comm.check_told(sums, what, "what is saved")
    holders = rows.holders(comm, sums_of_rows)
    if same:
        check_replicas(comm, [(one.name, one.tensor) for one in tensors.once])
    plain = mergeable(plain, holders)
    plans = plan_boxes(comm, tensors.once, holders, families_of(meshes))
    adapter = RankAdapter(comm, tensors, plans, holders)
    return plan(
        comm,
        path,
        plain,
        overwrite=overwrite,
        user=user,
        stage=stage,
        adapt=adapter,
        **options,
    )


def mergeable(plain: dict[str, Any], holders: Holders) -> dict[str, Any]:
    """Return a state in which ordered dicts that ranks have in part are dicts, which are united.

    So are the groups of optimizers whose parameters are on several stages of a pipeline.
    """
    if holders.is_uniform:
        return plain

    def visit(value: Any, path: Path) -> Any:
        items = find_items(value) if isinstance(value, Mapping) else None
        if not items:
            return value
        made = [(key, visit(item, (*path, key))) for key, item in items]
        if type(value) is OrderedDict:
            names = (one.name for one in named_leaves(value, path))
            if not all(map(holders.are_all, names)):
                return dict(made)
        return rebuilt(value, made)

    result: dict[str, Any] = visit(plain, ())
    return result
