"""Write a model as a Hugging Face folder of safetensors files, from shards, without gathering it.

All ranks plan the same files from names, dtypes and shapes, and each writes what it holds of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, get_args

import torch

from dsdformat.errors import (
    ArgumentError,
    MismatchError,
    RankDisagreementError,
    UnsupportedValueError,
    listed,
    shorten,
)
from dsdformat.folders import PathLike
from dsdformat.format.digests import digest
from dsdformat.format.packing import emit
from dsdformat.format.paths import render_path
from dsdformat.format.values import encode
from dsdformat.garbage import young_gc
from dsdformat.modelfiles import (
    HF_METADATA,
    INDEX_LABEL,
    MAX_SHARD_NBYTES,
    FileTensor,
    ModelFile,
    Ties,
    by_use,
    index_json,
    parse_size,
    plan_files,
)
from dsdformat.storage.base import completed
from dsdformat.storage.guards import folder_guard
from dsdformat.storage.target import FileSink, JoinedTarget, LocalTarget
from dsdformat.torch.agreement import check_replicas as check_equal
from dsdformat.torch.agreement import find_holders
from dsdformat.torch.capture import capture_with_buffers
from dsdformat.torch.comm import Comm
from dsdformat.torch.common_files import CommonFiles, Place, Shard
from dsdformat.torch.dtypes import logical_dtype, torch_dtype
from dsdformat.torch.per_rank import Path
from dsdformat.torch.rank_sources import families_of, mesh_rows, plan_boxes
from dsdformat.torch.rank_tensors import RankTensor, has_boxes, identity_of
from dsdformat.torch.sharding import local_of
from dsdformat.torch.stored import named_leaves

__all__ = ["export_safetensors"]

_MODEL = "model"
# Of a tensor: names, dtype in the file, shape.
Row = tuple[tuple[str, ...], str, tuple[int, ...]]


# long: the options and their documentation
@young_gc()
def export_safetensors(
    path: PathLike,
    model: Any,
    *,
    max_shard_bytes: int | str = MAX_SHARD_NBYTES,
    ties: Ties = "drop",
    dtype: torch.dtype | None = None,
    files: Mapping[str, str | bytes] | None = None,
    drop_values: bool = False,
    overwrite: bool = False,
    check_replicas: bool | None = None,
    group: Any = None,
) -> tuple[str, ...]:
    """Write a model as a Hugging Face folder: whole tensors under canonical names.

    On several ranks all of them call this, with a model of which each holds its part: shards of
    DTensors and of FSDP1, stages of a pipeline, replicas. Nothing is gathered: each rank writes
    what it holds by position into the files that all share, and sends on only what lies in one
    block with bytes of other ranks. The bytes of the files are the same for any number of ranks
    and any layout. The folder appears in one step, when it is complete and durable.

    Args:
        path: The folder; parents are made.
        model: A module in any wrapping, a list of modules that are parts of one, or a state dict.
        max_shard_bytes: How many bytes of tensors a file holds at most, unless one alone is
            longer; a number, or text such as `5GB`. Several files have an index.
        ties: What becomes of further names of a tied tensor: `drop` writes it once and records
            the names in `__metadata__`, `duplicate` writes it under each.
        dtype: To convert floating-point tensors to, each piece as it is written.
        files: More files for the folder by name, as `config.json`; those of rank 0 count.
        drop_values: Whether to leave out what is no tensor, as extra state.
        overwrite: Whether to replace what is there, once the new folder is complete. A folder
            with files that are no model's, and not among the new ones, is never replaced.
        check_replicas: Whether to compare the bytes of what several ranks hold; see `save`.
        group: The process group of the ranks that write together; the default one if None.

    Returns:
        The names of the files.

    Raises:
        UnsupportedValueError: the files cannot hold something; nothing was written.
        StorageError: `already_exists`, `not_replaceable`, or the medium failed.
        RankDisagreementError: `ranks_disagree`: a tensor is not the same on all ranks.
        DistributedError: `rank_failed`, on every rank, with the cause of each rank that failed.

    Ranks: collective over the group; rank 0 of it commits. All see the folder.
    Memory: 128 MiB, and 8 MiB per thread where shards are not packed in host memory.
    """
    comm = Comm(group)
    options = [str(path), max_shard_bytes, ties, str(dtype), drop_values, overwrite]
    comm.check_agreement(options, "what is exported")
    tensors: dict[str, Any] = {}
    sides: dict[str, bytes] = {}
    buffers: list[Path] = []
    with comm.together("export"):
        plain, paths = capture_with_buffers({_MODEL: model})
        tensors = _tensors_of(plain[_MODEL], drop_values)
        buffers = [path[1:] for path in paths]
        sides = _sides(files)
    rows = _agreed(comm, tensors, dtype)
    plan = _Plan.of(rows, ties, parse_size(max_shard_bytes))
    leaves = named_leaves(tensors)
    holders = find_holders(comm, leaves, [], buffers, sample=check_replicas is None)
    named = [(row, RankTensor.of(row[0][0], one)) for row, one in _held(rows, tensors)]
    if check_replicas:
        check_equal(comm, [(one.name, one.tensor) for _, one in named])
    held = [one for _, one in named]
    families = families_of(comm.gather_values(mesh_rows(comm, held)))
    boxes = plan_boxes(comm, held, holders, families)
    numbers = {row[0]: number for number, row in enumerate(rows)}
    shards = [
        (numbers[row[0]], box, one.local)
        for (row, one), some in zip(named, boxes, strict=True)
        for box in some
    ]
    return _write(comm, path, plan, shards, sides, overwrite)


def _tensors_of(entries: Mapping[str, Any], drop_values: bool) -> dict[str, Any]:
    """Return the tensors of a state dict, or refuse what is none."""
    bad = [name for name, value in entries.items() if not has_boxes(value)]
    if bad and not drop_values:
        places = listed([f"{render_path((name,))}: {_kind_of(entries[name])}" for name in bad])
        raise UnsupportedValueError(
            f"a folder of safetensors files holds tensors alone, and not {places}",
            path_in_tree=render_path((bad[0],)),
            hint="leave out what is no plain tensor, with drop_values=True",
        )
    return {name: entries[name] for name in sorted(entries.keys() - bad)}


def _kind_of(value: Any) -> str:
    return f"a {type(value).__name__}"


def _agreed(comm: Comm, tensors: Mapping[str, Any], dtype: torch.dtype | None) -> list[Row]:
    """Return all tensors of all ranks, ordered by name; tied names belong to one.

    Ranks: collective over the group. Ranks that have the same tell it once.
    """
    own: list[list[Any]] = []
    with comm.together("export"):
        own = _rows_of(tensors, dtype)
    sums = comm.gather_values(digest(emit(encode(own))))
    told: list[Any] = [own]
    if any(one != sums[0] for one in sums):
        told = comm.gather_values(own if sums.index(sums[comm.rank]) == comm.rank else None)
    known: dict[str, tuple[int, list[Any]]] = {}
    for rank, rows in enumerate(told):
        for name, *form in rows or ():
            first, wanted = known.setdefault(name, (rank, form))
            if form[:2] != wanted[:2] or (form[3] and wanted[3] and form[2] != wanted[2]):
                raise RankDisagreementError(
                    f"{name} differs between ranks: {wanted[:3]} on rank {comm.ranks[first]}, "
                    f"{form[:3]} on rank {comm.ranks[rank]}",
                    code="ranks_disagree",
                    failures={},
                    hint="all ranks export the same model, or parts of it with names of their own",
                )
            if form[3] and not wanted[3]:
                known[name] = rank, form
    tied: dict[str, list[str]] = {}
    for name in sorted(known):
        tied.setdefault(known[name][1][2], []).append(name)
    forms = {first: known[names[0]][1] for first, names in tied.items()}
    return sorted(
        (tuple(by_use(tied[one])), form[0], tuple(form[1])) for one, form in forms.items()
    )


def _rows_of(tensors: Mapping[str, Any], dtype: torch.dtype | None) -> list[list[Any]]:
    """List name, dtype, shape, the first of the tied names, and whether this rank has elements."""
    firsts: dict[Any, str] = {}
    rows = []
    for name, tensor in tensors.items():
        first = firsts.setdefault(identity_of(tensor), name)
        form = _file_dtype(tensor.dtype, dtype)
        rows.append([name, form, list(tensor.shape), first, local_of(tensor).numel() > 0])
    return rows


def _file_dtype(own: torch.dtype, wanted: torch.dtype | None) -> str:
    """Return the name of a tensor's dtype in the file."""
    name = logical_dtype(wanted if wanted is not None and own.is_floating_point else own)
    if name is None:
        raise UnsupportedValueError(f"{wanted} cannot be stored", code="unsupported_dtype")
    return name


def _held(rows: Sequence[Row], tensors: Mapping[str, Any]) -> list[tuple[Row, Any]]:
    """Return what this rank has some of, each tensor once, in the order of all ranks."""
    found = ((row, [name for name in row[0] if name in tensors]) for row in rows)
    return [(row, tensors[names[0]]) for row, names in found if names]


@dataclass(frozen=True)
class _Plan:
    """What is written where.

    Attributes:
        files: The files.
        places: For each tensor where it lies: once, or under several names.
        dtypes: Of each in the file.
    """

    files: list[ModelFile]
    places: list[list[Place]]
    dtypes: list[torch.dtype]

    @classmethod
    def of(cls, rows: Sequence[Row], ties: Ties, most: int) -> _Plan:
        """Lay out the files.

        Raises:
            UnsupportedValueError: they cannot hold something.
        """
        if ties not in get_args(Ties):
            raise ArgumentError(
                f"ties={shorten(ties)} is neither 'drop' nor 'duplicate'", code="bad_argument"
            )
        planned = []
        for names, dtype, shape in rows:
            if ties == "drop":
                planned.append(FileTensor(names[0], dtype, shape, names[1:]))
            else:
                planned += [FileTensor(name, dtype, shape) for name in names]
        planned.sort(key=lambda one: one.name)
        files = plan_files(planned, HF_METADATA, most)
        where = {
            name: (number, byte_offset)
            for number, file in enumerate(files)
            for name, byte_offset in file.places.items()
        }
        forms = {one.name: one for one in planned}
        places = [
            [Place(*where[name], shape, forms[name].itemsize) for name in names if name in where]
            for names, _, shape in rows
        ]
        dtypes = [_torch(dtype) for _, dtype, _ in rows]
        return cls(files, places, dtypes)


def _torch(name: str) -> torch.dtype:
    dtype = torch_dtype(name)
    assert dtype is not None  # a tensor had it
    return dtype


def _sides(files: Mapping[str, str | bytes] | None) -> dict[str, bytes]:
    result = {}
    for name, data in (files or {}).items():
        plain = type(name) is str and name not in ("", ".", "..") and not set(name) & set("/\\\0")
        if not plain or name.endswith((".safetensors", INDEX_LABEL)):
            raise ArgumentError(
                f"{shorten(name)} cannot be the name of a file beside a model", code="bad_argument"
            )
        result[name] = data.encode() if isinstance(data, str) else bytes(data)
    return result


def _write(
    comm: Comm,
    path: PathLike,
    plan: _Plan,
    shards: Sequence[tuple[int, Any, torch.Tensor]],
    sides: dict[str, bytes],
    overwrite: bool,
) -> tuple[str, ...]:
    """Write the folder together, and make it visible."""
    index = index_json(plan.files)
    labels = [file.label for file in plan.files]
    others = {**sides, **({INDEX_LABEL: index} if index else {})}
    target: LocalTarget | None = None
    common: CommonFiles | None = None
    try:
        with comm.together("export"):
            if comm.is_coordinator:
                guard = folder_guard([*labels, *others])
                target = LocalTarget(path, overwrite=overwrite, guard=guard)
                _begin(target, plan.files, others)
        staging = comm.tell(str(target.staging) if target else None)
        common = _common_files(comm, plan, staging)
        heads = {number: file.header for number, file in enumerate(plan.files)}
        common.write(_shards(plan, shards), heads if comm.is_coordinator else {})
        with comm.together("export"):
            common.close()
        _check_complete(comm, plan.files, common.written)
        with comm.together("export"):
            if target is not None:
                target.commit()
    except BaseException:
        if common is not None:
            common.discard()
        if target is not None:
            target.abort()
        raise
    return tuple(comm.tell([*labels, *others]))


def _begin(target: LocalTarget, files: Sequence[ModelFile], others: Mapping[str, bytes]) -> None:
    """Make files of the right length for all ranks to write into, and write the small ones."""
    for file in files:
        sink = target.create(file.label)
        try:
            sink.resize(file.nbytes)
        finally:
            sink.discard()
    for name, data in others.items():
        with completed(target.create(name)) as small:
            small.write_at(0, [data])


def _common_files(comm: Comm, plan: _Plan, staging: str) -> CommonFiles:
    folder: JoinedTarget | None = None
    with comm.together("export"):
        folder = JoinedTarget(FilePath(staging))
    assert folder is not None

    def open_file(number: int) -> FileSink:
        return folder.join(plan.files[number].label)

    sizes = [file.nbytes for file in plan.files]
    return CommonFiles(comm, open_file, sizes, [one for some in plan.places for one in some])


def _shards(plan: _Plan, shards: Sequence[tuple[int, Any, torch.Tensor]]) -> list[Shard]:
    """Return what this rank writes: a box for each place of its tensor."""
    firsts = [0]
    for some in plan.places:
        firsts.append(firsts[-1] + len(some))
    return [
        Shard(place, held, local, plan.dtypes[number])
        for number, held, local in shards
        for place in range(firsts[number], firsts[number + 1])
    ]


def _check_complete(comm: Comm, files: Sequence[ModelFile], written: int) -> None:
    """Check that the boxes of all ranks were all bytes of the files."""
    total, wanted = sum(comm.gather_values(written)), sum(file.nbytes for file in files)
    if total != wanted:
        raise MismatchError(
            f"ranks wrote {total} bytes of {wanted}: the shards do not tile the tensors",
            code="chunks_incomplete",
        )
