"""Convert checkpoints on several ranks, each a share of the bytes; needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsdformat.convert.converting import Converted, Request, convert_as
from dsdformat.convert.meters import Progress
from dsdformat.folders import PathLike
from dsdformat.torch.comm import Comm

__all__ = ["convert"]


def convert(
    src: PathLike | Sequence[PathLike],
    dst: PathLike,
    *,
    group: Any = None,
    progress: Progress | None = None,
    **options: Any,
) -> Converted:
    """Convert a checkpoint as `dsdformat.convert.convert` does, on all ranks of a group together.

    All ranks plan the same files, and each copies its share of the bytes to where they belong. The
    bytes of the result are the same for any number of ranks. It appears in one step, when it is
    complete and durable; if one rank fails, all raise, and everything is as it was.

    Args:
        src: A checkpoint of any kind, or the files of several ranks.
        dst: What to make.
        group: The process group of the ranks that convert together; the default one if None.
        progress: Called on each rank with bytes done and bytes in all of its share.
        options: The others of `dsdformat.convert.convert`, the same on all ranks. On several of
            them `to` is `dsd`, `safetensors`, `huggingface` or `torch` in the zip form. With a
            `codec`, the compressed chunks of one data file are written by one rank.

    Raises:
        As `dsdformat.convert.convert`, where all ranks fail alike.
        ArgumentError: `bad_argument`: also for a kind that several ranks cannot write.
        RankDisagreementError: `ranks_disagree`: ranks pass different arguments, or the source is
            not the same for all.
        DistributedError: `rank_failed`, on every rank, with the cause of each rank that failed.

    Ranks: collective over the group; rank 0 of it commits. All see the source and the result.
    Memory: as `dsdformat.convert.convert`, on each rank.
    """
    comm = Comm(group)
    request = Request.of(src, dst, options)
    comm.check_agreement(request.told(), "what is converted")
    return convert_as(request, comm, progress)
