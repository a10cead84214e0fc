"""Write safetensors: one file, or a folder of several with an index, as Hugging Face has models.

Both hold tensors by name and free strings, nothing else: a state of sections, or with values, is
refused unless the caller chose what to take of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import get_args

from dsdformat.convert.copying import Copy, copy_tensors
from dsdformat.convert.flat import flat_tensors
from dsdformat.convert.foreign import AnyTensor, Foreign
from dsdformat.convert.outputs import Job, Written, folder_guard, write_sides
from dsdformat.convert.teams import DOING, TeamTarget
from dsdformat.errors import ArgumentError, shorten
from dsdformat.modelfiles import (
    HF_METADATA,
    INDEX_LABEL,
    MAX_SHARD_NBYTES,
    TIES_KEY,
    FileTensor,
    ModelFile,
    Ties,
    by_use,
    index_json,
    parse_size,
    plan_file,
    plan_files,
)
from dsdformat.storage.base import completed
from dsdformat.storage.target import FileTarget, LocalTarget

__all__ = ["write_huggingface", "write_safetensors"]


def write_safetensors(job: Job, *, ties: Ties = "drop") -> Written:
    """Write one file.

    Args:
        job: What to write.
        ties: What becomes of further names of a tied tensor: `drop` writes it once and records
            the names in `__metadata__`, `duplicate` writes it under each.

    Raises:
        UnsupportedValueError: the file cannot hold something; nothing was written.
        StorageError: `already_exists`, `not_replaceable`, or the medium failed.

    Ranks: collective over the team.
    """
    with job.team.together(DOING):
        tensors = flat_tensors(job.opened, "a safetensors file")
        label = os.path.basename(job.path)
        plan = plan_file(_planned(tensors, ties), _metadata(job.opened), label)
    make = partial(FileTarget, job.path, overwrite=job.overwrite)
    with TeamTarget(job.team, make) as target:
        own = target.own
        label = job.team.tell(own.label if isinstance(own, FileTarget) else "")
        _write_files(job, target, [label], [plan], tensors)
        target.commit()
    return _written([plan], ())


def write_huggingface(
    job: Job, *, ties: Ties = "drop", max_shard_bytes: int | str = MAX_SHARD_NBYTES
) -> Written:
    """Write a folder: `model.safetensors`, or several files and their index.

    Args:
        job: What to write.
        ties: As in `write_safetensors`.
        max_shard_bytes: How many bytes of tensors a file holds at most, unless one alone is
            longer; a number, or text such as `5GB`.

    Raises:
        UnsupportedValueError: files cannot hold something; nothing was written.
        StorageError: `already_exists`, `not_replaceable`, or the medium failed.

    Ranks: collective over the team.
    """
    with job.team.together(DOING):
        most = parse_size(max_shard_bytes)
        tensors = flat_tensors(job.opened, "a folder of safetensors files")
        plans = plan_files(_planned(tensors, ties), _metadata(job.opened), most)
        index = index_json(plans)
        names = [plan.label for plan in plans] + ([INDEX_LABEL] if index else [])
        sides = {name: source for name, source in job.sides.items() if name not in names}
        guard = folder_guard([*names, *sides])
    make = partial(LocalTarget, job.path, overwrite=job.overwrite, guard=guard)
    with TeamTarget(job.team, make) as target:
        _write_files(job, target, [plan.label for plan in plans], plans, tensors)
        with target.together():
            if isinstance(target.own, LocalTarget):
                if index:
                    with completed(target.own.create(INDEX_LABEL)) as sink:
                        sink.write_at(0, [index])
                write_sides(target.own, sides)
        target.commit()
    return _written(plans, (*names[len(plans) :], *sides))


def _planned(tensors: Mapping[str, AnyTensor], ties: Ties) -> list[FileTensor]:
    if ties not in get_args(Ties):
        raise ArgumentError(
            f"ties={shorten(ties)} is neither 'drop' nor 'duplicate'", code="bad_argument"
        )
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor.identity, []).append(name)
    if ties == "duplicate":
        return [FileTensor(name, one.dtype, one.shape) for name, one in tensors.items()]
    planned = []
    for tied in map(by_use, names.values()):
        one = tensors[tied[0]]
        planned.append(FileTensor(tied[0], one.dtype, one.shape, tuple(tied[1:])))
    return planned


def _metadata(opened: Foreign) -> dict[str, str]:
    kept = {key: text for key, text in opened.metadata.items() if key != TIES_KEY}
    return {**HF_METADATA, **kept}


def _write_files(
    job: Job,
    target: TeamTarget,
    labels: Sequence[str],
    plans: Sequence[ModelFile],
    tensors: Mapping[str, AnyTensor],
) -> None:
    """Write this rank's share of the files, and make them durable.

    Ranks: collective.
    """
    team = job.team
    with target.files(labels) as sinks:
        if team.is_coordinator:
            for plan, sink in zip(plans, sinks, strict=True):
                sink.write_at(0, [plan.header])
        copies = [
            Copy(tensors[name], sink, byte_offset)
            for plan, sink in zip(plans, sinks, strict=True)
            for name, byte_offset in plan.places.items()
        ]
        copy_tensors(copies, job.meter, job.threads, part=team.rank, of=team.world_size)


def _written(plans: Sequence[ModelFile], more: Sequence[str]) -> Written:
    return Written(
        sum(len(plan.places) for plan in plans),
        sum(plan.nbytes - len(plan.header) for plan in plans),
        (*(plan.label for plan in plans), *more),
    )
