"""What `load` reads from: a checkpoint of ours, or a foreign one that is alike where it counts.

Decides what a path is, and where in a state the tree of a foreign checkpoint belongs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsdformat import folders
from dsdformat.convert import Foreign, Policy, find_kind, open_foreign
from dsdformat.convert import Kind as ForeignKind
from dsdformat.convert.reading import ForeignReader
from dsdformat.errors import ArgumentError, ConvertError, MismatchError, printable, shorten
from dsdformat.folders import PathLike
from dsdformat.limits import DEPTH_MAX, MANIFEST_LABEL
from dsdformat.torch.introspect import Kind, find_children, kind_of
from dsdformat.torch.origin import Origin
from dsdformat.torch.stored import Composite, Path, Stored, display

__all__ = ["Paths", "fitted", "open_origin"]

# A checkpoint, or foreign ones by the root keys under which their trees are.
Paths = PathLike | Mapping[str, PathLike]
_SHOWN = 5
_SUFFIX = ".safetensors"
_MODEL = {"config.json", f"model{_SUFFIX}.index.json"}  # beside which any other file may be


def open_origin(
    path: Paths,
    *,
    verify: bool = True,
    digest: str | None = None,
    threads: int | None = None,
    unknown: Policy = "refuse",
) -> Origin:
    """Open what a path is, by its content.

    Raises:
        ArgumentError: `bad_argument`: a digest is asked of what has none.
        ConvertError: it is of no kind that is known, or is not what it says.
        FormatError: see `dsdformat.open`; `no_manifest` for a folder that is nothing else.
    """
    if not isinstance(path, Mapping) and not _is_foreign(path):
        return folders.open(path, verify=verify, digest=digest, threads=threads)
    if digest is not None:
        raise ArgumentError(
            "digest is the root digest of a checkpoint of ours; a foreign one has none",
            code="bad_argument",
            hint="save what was loaded as a checkpoint of ours, and keep its digest",
        )
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
    return kind is not ForeignKind.SAFETENSORS_FOLDER or not strays or bool(_MODEL & set(names))


def fitted(
    tree: dict[str, Any], state: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], str | None]:
    """Return the tree of a foreign checkpoint with root keys of a state.

    Args:
        tree: Of `Stored` and values, renamed.
        state: What it is loaded into.
        name: How messages call the checkpoint.

    Returns:
        The tree: as it is where any of its root keys is one of the state; under the state's only
        module where it is the state dict of one; and what may help if it does not fit, or None.

    Raises:
        MismatchError: `state_mismatch`: it is a state dict, and the state has several modules.
    """
    if not tree or tree.keys() & state.keys():
        return tree, None
    places = list(_modules(state, ()))
    if not any(isinstance(value, (Stored, Composite)) for value in tree.values()):
        return tree, _rename_hint(tree, state, places)
    if len(places) > 1:
        shown = ", ".join(map(display, places[:_SHOWN]))
        raise MismatchError(
            f"{printable(name)} is the state dict of one module, and the state has several: "
            f"{printable(shown)}",
            code="state_mismatch",
            hint=f"say which one it is, as in rename=[('', '{display(places[0])}/')]",
        )
    if not places or any(type(step) is not str for step in places[0]):
        return tree, f"say where it belongs, as in rename=[('', '{next(iter(state), 'model')}/')]"
    for step in reversed(places[0]):
        tree = {step: tree}
    return tree, None


def _modules(value: Any, path: Path) -> Iterator[Path]:
    """List where a state has modules."""
    kind = kind_of(value)
    if kind in (Kind.MODULE, Kind.MODULES):
        yield path
    children = find_children(value) if kind is Kind.OTHER and len(path) < DEPTH_MAX else None
    for key, item in children or ():
        yield from _modules(item, (*path, key))


def _rename_hint(
    tree: Mapping[str, Any], state: Mapping[str, Any], places: Sequence[Path]
) -> str | None:
    """Say what to rename, where the checkpoint's root keys are others than the state's."""
    found = [key for key, value in tree.items() if isinstance(value, dict)]
    if not found or not state:
        return None
    wanted = display(places[0]) if places else next(iter(state))
    pair = f"{display((found[0],))}/", f"{wanted}/"
    keys = ", ".join(display((key,)) for key in list(tree)[:_SHOWN])
    return f"its root keys are {printable(keys)}: pass rename=[{printable(str(pair))}, …]"
