"""What a path is, seen from its content, and opening it.

Each kind is recognized by what its own format demands of the first bytes, or of a folder's files,
and is then read by that kind's reader alone: what one reader refuses is never tried as another
kind. A file that could be two kinds is refused. It is long, since the two are one: some kinds are
known by what opening a file of the folder finds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dsdformat.convert.archive import MAGIC as ZIP_MAGIC
from dsdformat.convert.archive import list_names
from dsdformat.convert.dcp import METADATA_NAME, DcpFolder
from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes, Folder, read_bytes
from dsdformat.convert.flat_shards import find_flat, join_files
from dsdformat.convert.foreign import Foreign, Kind
from dsdformat.convert.npz import NPY_SUFFIX, read_npz, verify_npz
from dsdformat.convert.own import open_own
from dsdformat.convert.safetensors import (
    INDEX_SUFFIX,
    SHARDING_KEY,
    missing_files,
    read_index,
    read_indexed,
    read_safetensors,
    read_sharded,
    tied,
)
from dsdformat.convert.safetensors_header import read_header
from dsdformat.convert.settling import Policy, settle
from dsdformat.convert.sides import find_sides
from dsdformat.convert.torch_stream import is_torch_stream, read_torch_stream
from dsdformat.convert.torch_zip import PICKLE_NAME, read_torch_archive
from dsdformat.errors import (
    ArgumentError,
    ConvertError,
    DsdError,
    IncompleteError,
    printable,
    shorten,
)
from dsdformat.garbage import paused_gc
from dsdformat.limits import JSON_NBYTES_MAX, MANIFEST_LABEL
from dsdformat.signing import Keys

__all__ = ["Kind", "find_kind", "open_any", "open_folder", "open_foreign", "refuse_proof"]

PathLike = str | os.PathLike[str]
_SUFFIX = ".safetensors"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_NUMBER = re.compile(r"[0-9]+")
_INDEXES = ("model.safetensors" + INDEX_SUFFIX, "pytorch_model.bin" + INDEX_SUFFIX)
_SINGLE = "model.safetensors"
_TORCH_SINGLE = "pytorch_model.bin"
_RANK_METADATA = "__0.metadata"


# What is known by its first bytes and not read: what it is, and what to do.
_MAGICS = (
    (b"GGUF", "a GGUF file", "convert the model from its safetensors or torch files instead"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes", "save the weights with numpy.savez"),
    (b"\x93NUMPY", "a .npy file", "put the array into a .npz file with numpy.savez"),
    (b"\x1f\x8b", "a gzip file", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it first"),
)
_FILES = {
    "saved_model.pb": ("a TensorFlow SavedModel", "save the weights with numpy.savez"),
    "checkpoint": ("a TensorFlow checkpoint", "save the weights with numpy.savez"),
    "_CHECKPOINT_METADATA": ("an Orbax checkpoint", "save the weights with numpy.savez"),
    "_METADATA": ("an Orbax checkpoint", "save the weights with numpy.savez"),
    "zero_to_fp32.py": ("a DeepSpeed checkpoint", "run its zero_to_fp32.py first"),
}
_TAR_MAGIC = (257, b"ustar")
_EXPORTED = "/archive_format"  # which only torch.export writes
_READ = "files of torch.save, safetensors and .npz are read, and folders of ours and of DCP"


def find_kind(path: PathLike) -> Kind:
    """Return what a path is.

    Raises:
        ConvertError: `unknown_kind`, or `unsupported_kind` with what to do instead.
        FormatError: `missing_file` or `not_regular_file`.
        StorageError: the operating system reported an error.

    Ranks: local.
    Memory: the directory of a zip file.
    """
    if os.path.isdir(path):
        return _kind_of_folder(os.fspath(path), set(Folder(path).names()))
    folder, name = _split(path)
    try:
        return _kind_of_file(folder.file(name))
    finally:
        folder.close()


def open_foreign(path: PathLike | Sequence[PathLike], *, unknown: Policy = "refuse") -> Foreign:
    """Open a foreign checkpoint for reading, whatever its kind. Nothing in it is executed.

    Reads names and values; tensors are read when asked for.

    Args:
        path: A file, or a folder; or files that ranks have saved with fairscale's FSDP, in the
            order of the ranks.
        unknown: What to do with values of classes that are not on the closed list: `refuse` the
            file, `drop` them, or `record` their names and parts as plain values.

    Raises:
        ConvertError: its code says what is wrong; `unknown_global` for values that are refused.
        FormatError: `missing_file` or `not_regular_file`.
        StorageError: the operating system reported an error.

    Ranks: local.
    Memory: names and values, and what their pickle unfolds to; no tensor.
    """
    if unknown not in ("refuse", "drop", "record"):
        raise ArgumentError(f"unknown={shorten(unknown)} is no policy", code="bad_argument")
    if not isinstance(path, (str, os.PathLike)):
        return _open_shards(path, unknown)
    kind = find_kind(path)
    if kind is Kind.FLAT_SHARDS:
        return _open_shards(_rank_files(os.fspath(path)), unknown)
    if kind is Kind.DSD:
        raise fault(
            "unsupported_kind",
            os.fspath(path),
            "is a checkpoint of ours",
            hint="open it with dsdformat.open, or with open_any",
        )
    if os.path.isdir(path):
        folder = Folder(path)
        opened: Callable[[], Foreign] = lambda: open_folder(kind, folder, unknown)  # noqa: E731
    else:
        folder, name = _split(path)
        opened = lambda: _open_file(kind, folder, name, unknown)  # noqa: E731
    try:
        with paused_gc():
            return opened()
    except BaseException:
        folder.close()
        raise


def open_any(
    path: PathLike | Sequence[PathLike],
    *,
    unknown: Policy = "refuse",
    digest: str | None = None,
    pubkey: Keys | None = None,
) -> Foreign:
    """Open a checkpoint of any kind, ours too, for reading; see `open_foreign` and `open_own`.

    Raises:
        ArgumentError: `bad_argument`: a digest or a signature is asked of what has none.

    Ranks: local.
    """
    if isinstance(path, (str, os.PathLike)) and find_kind(path) is Kind.DSD:
        return open_own(path, digest=digest, pubkey=pubkey)
    refuse_proof(digest, pubkey)
    return open_foreign(path, unknown=unknown)


def refuse_proof(digest: str | None, pubkey: Keys | None) -> None:
    """Refuse to say of a foreign checkpoint that it is the one that was asked for.

    Raises:
        ArgumentError: `bad_argument`.
    """
    if digest is not None:
        raise ArgumentError(
            "digest is the root digest of a checkpoint of ours; a foreign one has none",
            code="bad_argument",
            hint="save what was loaded as a checkpoint of ours, and keep its digest",
        )
    if pubkey is not None:
        raise ArgumentError(
            "pubkey is a key that has signed a checkpoint of ours; a foreign one has no signatures",
            code="bad_argument",
            hint="save what was loaded as a checkpoint of ours, and sign that",
        )


def _split(path: PathLike) -> tuple[Folder, str]:
    parent, name = os.path.split(os.path.abspath(path))
    return Folder(parent), name


# Files


def _kind_of_file(source: Bytes) -> Kind:
    head = read_bytes(source, 0, min(512, source.nbytes))
    for magic, what, hint in _MAGICS:
        if head.startswith(magic):
            raise fault("unsupported_kind", source.name, f"is {what}", hint=hint)
    at, magic = _TAR_MAGIC
    if head[at : at + len(magic)] == magic:
        raise fault(
            "unsupported_kind",
            source.name,
            "is a tar file; torch.save wrote such before torch 0.1.10",
            hint="load and save it again with a torch before 2.6",
        )
    if head.startswith(ZIP_MAGIC):
        return _kind_of_zip(source)
    if _is_safetensors(source, head):
        return Kind.SAFETENSORS
    if is_torch_stream(source):
        return Kind.TORCH_STREAM
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":
        raise fault(
            "unsupported_kind",
            source.name,
            "is a pickle, and not one of torch.save",
            hint="load it where it was made, and save it with torch.save or numpy.savez",
        )
    what = "is of no kind that is known" if source.nbytes else "is empty"
    raise fault("unknown_kind", source.name, what, hint=_READ if source.nbytes else None)


def _kind_of_zip(source: Bytes) -> Kind:
    names = list_names(source)
    if names and all(name.endswith(NPY_SUFFIX) for name in names):
        return Kind.NPZ
    if any(name.endswith("/" + PICKLE_NAME) for name in names):
        return Kind.TORCH_ZIP
    if "model.weights.h5" in names:
        hint = "save the weights with numpy.savez"
        raise fault("unsupported_kind", source.name, "is a Keras model", hint=hint)
    if any(name.endswith(_EXPORTED) for name in names):
        hint = "load it with torch.export.load, and save its state_dict"
        raise fault("unsupported_kind", source.name, "is a program of torch.export", hint=hint)
    raise fault("unknown_kind", source.name, "is a zip file of no kind that is known", hint=_READ)


def _is_safetensors(source: Bytes, head: bytes) -> bool:
    nbytes = int.from_bytes(head[:8], "little")
    fits = 2 <= nbytes <= min(source.nbytes - 8, JSON_NBYTES_MAX)
    return len(head) > 8 and fits and head[8:9] == b"{"


def _open_file(kind: Kind, folder: Folder, name: str, policy: Policy) -> Foreign:
    source, close = folder.file(name), folder.close
    metadata: dict[str, str] = {}
    verify: Callable[[int, int], int] | None = None
    if kind is Kind.TORCH_ZIP:
        archive = read_torch_archive(source)
        tree, verify = archive.tree, archive.verify
    elif kind is Kind.TORCH_STREAM:
        tree = read_torch_stream(source)
    elif kind is Kind.NPZ:
        tree, verify = read_npz(source), partial(verify_npz, source)
    else:
        tree, found = read_safetensors(source)
        tree, metadata = tied(tree, [found])
    settled = settle(tree, policy, source.name)
    sides = partial(find_sides, folder)
    return Foreign(
        kind, source.name, settled, metadata=metadata, verify=verify, close=close, sides=sides
    )


# Folders


def _kind_of_folder(path: str, names: set[str]) -> Kind:
    if MANIFEST_LABEL in names:
        return Kind.DSD
    if METADATA_NAME in names:
        if names & {*_INDEXES, _SINGLE, _TORCH_SINGLE}:
            hint = "give the file that is meant, or move the others away"
            raise fault("unknown_kind", path, "is both a DCP folder and a model's", hint=hint)
        return Kind.DCP
    if _INDEXES[0] in names or _SINGLE in names:
        return Kind.SAFETENSORS_FOLDER
    if _INDEXES[1] in names or _TORCH_SINGLE in names:
        return Kind.TORCH_FOLDER
    for name, (what, hint) in _FILES.items():
        if name in names:
            raise fault("unsupported_kind", path, f"is {what}", hint=hint)
    if _RANK_METADATA in names:
        raise fault(
            "unsupported_kind",
            path,
            "is a DCP folder in which each rank has metadata of its own",
            hint="save it with use_collectives=True",
        )
    if _has_flat_shards(path, names):
        return Kind.FLAT_SHARDS
    files = sorted(name for name in names if name.endswith(_SUFFIX))
    if files and _has_shards(path, files[0]):
        return Kind.SAFETENSORS_SHARDS
    raise fault(
        "unknown_kind",
        path,
        "is a folder of no kind that is known",
        hint=f"give one of its files, such as {printable(files[0])}" if files else None,
    )


def _has_shards(path: str, file: str) -> bool:
    folder = Folder(path)
    try:
        return SHARDING_KEY in read_header(folder.file(file)).metadata
    except ConvertError:
        return False
    finally:
        folder.close()


def open_folder(kind: Kind, folder: Folder, policy: Policy) -> Foreign:
    """Open a folder as the kind that it was found to be: DCP, or a model of one or more files.

    Raises:
        ConvertError, FormatError, StorageError: as `open_foreign`.
    """
    metadata: dict[str, str] = {}
    verify: Callable[[int, int], int] | None = None
    tree: Any
    if kind is Kind.DCP:
        dcp = DcpFolder(folder)
        tree, verify = dcp.tree, dcp.verify
    elif kind is Kind.SAFETENSORS_SHARDS:
        files = [name for name in folder.names() if name.endswith(_SUFFIX)]
        tree = read_sharded(folder, files)
    else:
        torch = kind is Kind.TORCH_FOLDER
        tree, metadata = _read_model_folder(folder, torch)
    settled = settle(tree, policy, folder.name)
    return Foreign(
        kind,
        folder.name,
        settled,
        metadata=metadata,
        verify=verify,
        close=folder.close,
        sides=partial(find_sides, folder),
    )


def _read_model_folder(folder: Folder, torch: bool) -> tuple[Any, dict[str, str]]:
    """Read a model as Hugging Face lays it out: one file, or several with an index."""
    index = _INDEXES[torch]
    if index not in folder.names():
        tree, found = _read_model(folder.file(_TORCH_SINGLE if torch else _SINGLE))
        return tied(tree, [found]) if isinstance(tree, dict) else (tree, found)
    source = folder.file(index)
    weight_map = read_index(source)
    trees: dict[str, dict[str, Any]] = {}
    metadata: list[dict[str, str]] = []
    for file in dict.fromkeys(weight_map.values()):
        try:
            tree, found = _read_model(folder.file(file))
        except IncompleteError as error:
            if error.code == "missing_file":
                there = set(folder.names()) - {file}  # a link may lead nowhere
                raise missing_files(source.name, weight_map, there) from error
            raise
        if not isinstance(tree, dict):
            raise fault("index_malformed", source.name, f"{file} is no state dict")
        trees[file] = tree
        metadata.append(found)
    return tied(read_indexed(source.name, weight_map, trees), metadata)


def _read_model(source: Bytes) -> tuple[Any, dict[str, str]]:
    """Read one file of a model folder, by its content."""
    kind = _kind_of_file(source)
    if kind is Kind.SAFETENSORS:
        return read_safetensors(source)
    if kind is Kind.TORCH_STREAM:
        return read_torch_stream(source), {}
    if kind is Kind.TORCH_ZIP:
        return read_torch_archive(source).tree, {}
    raise fault("index_malformed", source.name, f"is {kind.value}")


# Flat shards of several ranks


def _has_flat_shards(path: str, names: set[str]) -> bool:
    """Whether the first of the files of torch in a folder has flat parameters and metadata."""
    first = min((name for name in names if name.endswith(_TORCH_SUFFIXES)), default=None)
    if first is None:
        return False
    try:
        with open_foreign(os.path.join(path, first), unknown="drop") as opened:
            return find_flat(opened.tree) is not None
    except DsdError:
        return False


def _rank_files(path: str) -> list[str]:
    """Return the files of torch in a folder in the order of the ranks, which their names end in."""
    ranks: dict[int, str] = {}
    names = [name for name in os.listdir(path) if name.endswith(_TORCH_SUFFIXES)]
    for name in names:
        numbers = _NUMBER.findall(os.path.splitext(name)[0])
        ranks[int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else -1] = name
    if sorted(ranks) != list(range(len(names))):
        raise fault(
            "flat_shards",
            path,
            "has files of ranks whose names do not end in the numbers from 0 on",
            hint="give the files as a list, in the order of the ranks",
        )
    return [os.path.join(path, ranks[rank]) for rank in range(len(names))]


def _open_shards(paths: Sequence[PathLike], unknown: Policy) -> Foreign:
    files: list[Foreign] = []
    try:
        for path in paths:
            files.append(open_foreign(path, unknown=unknown))
        if not files:
            raise ArgumentError("no files are given", code="bad_argument")
        return join_files(files, unknown)
    except BaseException:
        for one in files:
            one.close()
        raise
