"""What torch's FileSystemWriter takes, and what it means here; which paths are checkpoints'."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsdformat.errors import ArgumentError, shorten

__all__ = ["check_options", "is_checkpoint_id"]

# How torch lays out its files: a rank writes one file a section here, always flushed.
_OF_NO_EFFECT = {
    "cache_staged_state_dict",
    "per_thread_copy_ahead",
    "serialization_format",
    "single_file_per_rank",
    "sync_files",
}


def check_options(options: Mapping[str, Any], threads: int | None) -> int | None:
    """Check options of torch's FileSystemWriter; return how many threads write.

    Raises:
        ArgumentError: `_extensions`, or an option that torch does not have either.
    """
    if options.get("_extensions"):
        raise ArgumentError(
            "_extensions transform streams of torch.save, and this storage writes none",
            code="bad_argument",
            hint="to compress, pass codec='zstd' or codec='planes+zstd'",
        )
    unknown = options.keys() - _OF_NO_EFFECT - {"_extensions", "thread_count"}
    if unknown:
        raise ArgumentError(
            f"a writer of checkpoints has no option {shorten(min(unknown))}", code="bad_argument"
        )
    return options.get("thread_count") if threads is None else threads


def is_checkpoint_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether this names a folder of a file system that may be written: no URL, as for torch."""
    if isinstance(checkpoint_id, Path):
        return True
    if "://" in str(checkpoint_id):
        return False
    return any(one.exists() and os.access(one, os.W_OK) for one in Path(checkpoint_id).parents)
