"""Open what a path is: a checkpoint of ours, or a foreign one to be read alike. No torch needed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dsdformat import folders
from dsdformat.convert.foreign import Foreign
from dsdformat.convert.kinds import Kind, find_kind, open_foreign, refuse_proof
from dsdformat.convert.reading import ForeignReader
from dsdformat.convert.settling import Policy
from dsdformat.errors import ArgumentError, ConvertError, shorten
from dsdformat.folders import PathLike
from dsdformat.limits import MANIFEST_LABEL
from dsdformat.reader import Checkpoint
from dsdformat.signing import Keys

__all__ = ["Paths", "open_origin"]

# A checkpoint, or foreign ones by the root keys under which their trees are.
Paths = PathLike | Mapping[str, PathLike]
_SUFFIX = ".safetensors"
_MODEL = {"config.json", f"model{_SUFFIX}.index.json"}  # beside which any other file may be


def open_origin(
    path: Paths,
    *,
    verify: bool = True,
    digest: str | None = None,
    pubkey: Keys | None = None,
    threads: int | None = None,
    unknown: Policy = "refuse",
) -> Checkpoint | ForeignReader:
    """Open what a path is, by its content.

    Raises:
        ArgumentError: `bad_argument`: a digest or a signature is asked of what has none.
        ConvertError: it is of no kind that is known, or is not what it says.
        FormatError: see `dsdformat.open`; `no_manifest` for a folder that is nothing else.
    """
    if not isinstance(path, Mapping) and not _is_foreign(path):
        return folders.open(path, verify=verify, digest=digest, pubkey=pubkey, threads=threads)
    refuse_proof(digest, pubkey)
    if not isinstance(path, Mapping):
        return ForeignReader(open_foreign(path, unknown=unknown), threads=threads)
    if not path or any(type(key) is not str for key in path):
        raise ArgumentError(
            f"a mapping of paths has strings as keys, got {shorten(path)}", code="bad_argument"
        )
    opened: dict[str, Foreign] = {}
    try:
        for key, one in path.items():
            opened[key] = open_foreign(one, unknown=unknown)
        return ForeignReader(opened, threads=threads)
    except BaseException:
        for foreign in opened.values():
            foreign.close()
        raise


def _is_foreign(path: PathLike) -> bool:
    """Whether a path is a foreign checkpoint; what is nothing at all counts as ours."""
    if not os.path.exists(path) or os.path.lexists(os.path.join(path, MANIFEST_LABEL)):
        return False
    if not os.path.isdir(path):
        return True
    names = os.listdir(path)
    try:
        kind = find_kind(path)
    except ConvertError as error:
        if error.code == "unknown_kind":
            return False
        raise
    # A checkpoint of ours whose manifest is gone has a model too; its other files tell.
    strays = [name for name in names if name.endswith(_SUFFIX) and name != f"model{_SUFFIX}"]
    return kind is not Kind.SAFETENSORS_FOLDER or not strays or bool(_MODEL & set(names))
