"""Save one state from several ranks: agree, plan, write each its part, and commit once.

Ranks tell each other digests and chunk tables; no bytes of tensors go from one to another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from dsdformat import folders
from dsdformat.folders import PathLike
from dsdformat.format.paths import emit_name
from dsdformat.format.values import encoded_key
from dsdformat.torch.agreement import Holders, check_replicas, find_holders
from dsdformat.torch.comm import Comm
from dsdformat.torch.per_rank import Path
from dsdformat.torch.rank_sources import RankAdapter, arrays_of, named_tensors_of
from dsdformat.torch.stored import find_items, leaves, rebuilt
from dsdformat.writer import PartWriter, Writer

__all__ = ["save_together"]


def save_together(
    comm: Comm,
    path: PathLike,
    capture: Callable[[], tuple[dict[str, Any], list[Path], list[Path]]],
    *,
    overwrite: bool,
    user: Mapping[str, str] | None,
    same: bool | None,
    **options: Any,
) -> str:
    """Save what each rank captures; see `save`.

    Args:
        comm: The ranks that save.
        path: The checkpoint's folder, on storage that all of them see.
        capture: Gives a rank's plain state, and where in it are buffers of modules, and what it
            has for its own.
        overwrite, user: As in `save`.
        same: Whether to compare the bytes of replicas first; None for a few of them.
        options: Of `dsdformat.create` that concern data.

    Ranks: collective over the group.
    """
    known = {key: value for key, value in options.items() if isinstance(value, (str, int))}
    comm.check_agreement([str(path), overwrite, dict(user or {}), known], "what is saved")
    plain: dict[str, Any] = {}
    buffers: list[Path] = []
    own: list[Path] = []
    with comm.together("save"):
        plain, buffers, own = capture()
    holders = find_holders(comm, plain, own, buffers, sample=same is None)
    plain = mergeable(plain, holders)
    tensors = named_tensors_of(plain)
    if same:
        check_replicas(comm, tensors)
    adapter = RankAdapter(comm, tensors, holders, arrays_of(comm, plain, holders))
    return _write(comm, path, plain, overwrite=overwrite, user=user, adapt=adapter, **options)


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
        names = (emit_name(place, encoded_key) for place, _ in leaves(value, path))
        if type(value) is OrderedDict and not all(map(holders.are_all, names)):
            return dict(made)
        return rebuilt(value, made)

    result: dict[str, Any] = visit(plain, ())
    return result


def _write(
    comm: Comm,
    path: PathLike,
    plain: Mapping[str, Any],
    *,
    overwrite: bool,
    user: Mapping[str, str] | None,
    **options: Any,
) -> str:
    options["world_size"] = comm.world_size
    coordinator: Writer | None = None
    try:
        with comm.together("save"):
            if comm.is_coordinator:
                coordinator = folders.create(path, overwrite=overwrite, user=user, **options)
        staging = comm.tell(coordinator.staging if coordinator else None)
        raw = b""
        with comm.together("save"):
            raw = _write_part(comm, coordinator, staging, plain, options)
        parts = comm.collect(raw)
        root = ""
        with comm.together("save"):
            if coordinator is not None:
                root = coordinator.commit(parts[1:])
    except BaseException:
        if coordinator is not None:
            coordinator.abort()
        raise
    result: str = comm.tell(root)
    return result


def _write_part(
    comm: Comm,
    coordinator: Writer | None,
    staging: str,
    plain: Mapping[str, Any],
    options: Mapping[str, Any],
) -> bytes:
    """Write what is this rank's to write; return what the coordinator needs to know of it."""
    if coordinator is not None:
        coordinator.add(plain)
        coordinator.write()
        return b""
    writer: PartWriter = Writer.join(staging, rank=comm.rank, **options)
    writer.add(plain)
    return writer.finish()
