"""Foreign files as inputs: safetensors and their index, torch's files and folders, npz.

Seeds are made by torch, numpy and safetensors; reading needs none of them.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import datetime
import functools
import io
import json
import os
import pathlib
import random
import re
import shutil
import struct
import tempfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsdformat.convert.dcp_metadata import read_metadata
from dsdformat.convert.files import Bytes, Folder, MemoryBytes
from dsdformat.convert.foreign import AnyTensor, Foreign, state_of, walk_tree
from dsdformat.convert.kinds import Kind, open_folder, open_foreign
from dsdformat.convert.npz import read_npz, verify_npz
from dsdformat.convert.optimizer_naming import with_optimizers
from dsdformat.convert.safetensors import SHARDING_KEY, read_safetensors, tied
from dsdformat.convert.settling import Settled, settle
from dsdformat.convert.torch_stream import is_torch_stream, read_torch_stream
from dsdformat.convert.torch_zip import read_torch_archive
from dsdformat.errors import DsdError
from dsdformat.limits import MIB
from dsdformat.storage.memory import MemoryTarget
from dsdformat.writer import Writer
from fuzz.archives import mutated_archive
from fuzz.bytewise import NUMBERS, mutated
from fuzz.formats import Codes, Format
from fuzz.pickles import mutated_pickle
from fuzz.rules import BrokenRuleError

__all__ = [
    "FORMATS",
    "SCRATCH",
    "check_library",
    "dcp_seeds",
    "index_seeds",
    "mutated_json",
    "npz_seeds",
    "safetensors_seeds",
    "scratch",
    "scratch_parent",
    "use_settled",
    "zip_seeds",
]

SCRATCH = "DSD_FUZZ_SCRATCH"

_READ_NBYTES_MAX = MIB
_WRITTEN_ONE_OF = 8  # inputs that are accepted, of which one is converted to a checkpoint of ours


# Reading


def use(tree: Any, data: bytes) -> Codes:
    """Do with a tree what a converter does, under each policy."""
    for policy in ("record", "drop", "refuse"):
        settled = settle(tree, policy, "fuzz")  # type: ignore[arg-type]
        if policy != "drop":
            use_settled(settled.tree, data)
            _use_optimizers(settled)
    _open_file(data)
    return ()


def _use_optimizers(settled: Settled) -> None:
    """Find optimizers in a tree, and give them each form."""
    for form in ("named", "listed", "numbered"):
        opened = Foreign(Kind.TORCH_ZIP, "fuzz", settled)
        with contextlib.suppress(DsdError):
            with_optimizers(opened, form, source=opened)  # type: ignore[arg-type]


def use_settled(tree: Any, data: bytes) -> None:
    """Read the tensors of a tree, if they are small, and convert some of such trees."""
    tensors = [leaf for _, leaf in walk_tree(tree) if isinstance(leaf, AnyTensor)]
    for tensor in tensors:
        if tensor.nbytes <= _READ_NBYTES_MAX:
            tensor.is_packed()
            tensor.read()
    small = sum(tensor.nbytes for tensor in tensors) <= _READ_NBYTES_MAX
    if small and zlib.crc32(data) % _WRITTEN_ONE_OF == 0:
        writer = Writer(MemoryTarget({}), threads=1)
        writer.add(state_of(tree))
        writer.commit()


def read_safetensors_file(data: bytes) -> Codes:
    """A safetensors file: its header and its tensors; one that holds chunks, as a folder too."""
    tree, metadata = read_safetensors(MemoryBytes(data))
    if SHARDING_KEY in metadata:
        folder = scratch() / "shards"
        (folder / "shard-1.safetensors").write_bytes(data)
        with contextlib.suppress(DsdError):
            _read_path(folder, data)
    codes = use(tied(tree, [metadata])[0], data)
    check_library(data)
    return codes


def check_library(data: bytes) -> None:
    """What we accept, the library of safetensors accepts too."""
    import safetensors

    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        if "unknown variant" not in str(error):  # a type that the library does not have
            raise BrokenRuleError(f"safetensors: {error}") from error


def _open_file(data: bytes) -> None:
    """Open a file from disk as what it is found to be; of what is accepted, some."""
    if zlib.crc32(data) % _WRITTEN_ONE_OF == 1:
        path = scratch() / "single" / "file"
        path.write_bytes(data)
        with contextlib.suppress(DsdError), open_foreign(path, unknown="record") as opened:
            opened.side_files()


def read_zip(data: bytes) -> Codes:
    """A file of torch.save: archive, pickle, tensors."""
    found = read_torch_archive(MemoryBytes(data))
    with contextlib.suppress(DsdError):
        found.verify()
    return use(found.tree, data)


def read_stream(data: bytes) -> Codes:
    """A file of torch.save in its old form."""
    source = MemoryBytes(data)
    is_torch_stream(source)
    return use(read_torch_stream(source), data)


def read_arrays(data: bytes) -> Codes:
    """A file of numpy.savez."""
    source = MemoryBytes(data)
    tree = read_npz(source)
    if len(data) < MIB:
        with contextlib.suppress(DsdError):
            verify_npz(source)
    return use(tree, data)


def read_dcp(data: bytes) -> Codes:
    """The metadata of a DCP folder; where they are accepted, the folder with them."""
    read_metadata(MemoryBytes(data))
    return _read_folder(Kind.DCP, _dcp_folder(), ".metadata", data)


def read_index_file(data: bytes) -> Codes:
    """The index of a folder of safetensors files, with its files."""
    name = "model.safetensors.index.json"
    return _read_folder(Kind.SAFETENSORS_FOLDER, _model_folder(), name, data)


def _read_folder(kind: Kind, folder: Path, name: str, data: bytes) -> Codes:
    """A folder in which one file is replaced: in memory, and of some, on the disk."""
    if zlib.crc32(data) % _WRITTEN_ONE_OF == 2:
        (folder / name).write_bytes(data)
        return _read_path(folder, data)
    files = {**_contents(folder), name: data}
    opened = open_folder(kind, _MemoryFolder(files), "record")
    use_settled(opened.tree, data)
    return ()


@functools.cache
def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class _MemoryFolder(Folder):
    """A folder whose files are in memory; of others it says what a folder that is gone says."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__("/nowhere")
        self._files = files

    def names(self) -> list[str]:
        return sorted(self._files)

    def file(self, name: str) -> Bytes:
        data = self._files.get(name)
        return super().file(name) if data is None else MemoryBytes(data, name)


def _read_path(folder: Path, data: bytes) -> Codes:
    with open_foreign(folder, unknown="record") as opened:
        use_settled(opened.tree, data)
        opened.side_files()
    return ()


@functools.cache
def scratch() -> Path:
    """A folder of this process, in memory where the system has such."""
    place = Path(tempfile.mkdtemp(prefix="dsd-fuzz-", dir=scratch_parent()))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    for name in ("single", "shards"):
        (place / name).mkdir()
    return place


@functools.cache
def _dcp_folder() -> Path:
    """A DCP folder, whose metadata an input replaces."""
    _save_dcp(scratch() / "dcp")
    return scratch() / "dcp"


@functools.cache
def _model_folder() -> Path:
    """A model's folder, whose index an input replaces."""
    place = scratch() / "model"
    place.mkdir()
    for number in (1, 2):
        tensors = {f"layer.{number}.weight": ("F32", (2, 3)), f"b{number}": ("I8", (5,))}
        (place / f"model-0000{number}-of-00002.safetensors").write_bytes(_safetensors(tensors))
    return place


def scratch_parent() -> str | None:
    """Where the folder is made; a process that does not end by itself is told by SCRATCH."""
    told = os.environ.get(SCRATCH)
    return told or ("/dev/shm" if Path("/dev/shm").is_dir() else None)


# Seeds


def _safetensors(
    tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    bits = {"F4": 4, "BOOL": 8, "C64": 64}
    at = 0
    for name, (kind, shape) in tensors.items():
        count = 1
        for size in shape:
            count *= size
        width = bits.get(kind) or 8 * int("".join(filter(str.isdigit, kind.split("_")[0]))) // 8
        end = at + count * width // 8
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(256)) * (at // 256) + bytes(at % 256)


def safetensors_seeds() -> list[bytes]:
    """Files of few tensors of all types, with metadata and without, and with ties."""
    ties = {"dsdformat.ties": '{"b": "a"}', "format": "pt"}
    kinds = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32")
    more = ("F32", "C64", "F64", "I64", "U64", "F8_E8M0", "F4")
    chunk = {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}}'}
    return [
        _safetensors({}),
        _safetensors({"a": ("F32", (2, 3))}, {"format": "pt"}),
        _safetensors({"a": ("F32", ()), "b/c": ("I64", (0, 3)), "\u00e9": ("U8", (1, 1, 1))}, ties),
        _safetensors({kind.lower(): (kind, (2, 2)) for kind in (*kinds, *more)}),
        _safetensors({"w": ("F16", (4, 2))}, chunk),
    ]


def index_seeds() -> list[bytes]:
    """The right index of the folder, and one with a file that is not there."""
    _model_folder()  # before memory is limited
    files = {
        f"{name}{number}{end}": f"model-0000{number}-of-00002.safetensors"
        for number in (1, 2)
        for name, end in (("layer.", ".weight"), ("b", ""))
    }
    right = {"metadata": {"total_size": 58}, "weight_map": files}
    absent = {"weight_map": {**files, "x": "model-00003-of-00002.safetensors"}}
    return [json.dumps(one).encode() for one in (right, absent, {"weight_map": {}}, {"a": [1.5]})]


def _states() -> list[Any]:
    """States that torch.save writes: a training, values of many types, arrays."""
    import numpy as np
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    training = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    values = {
        "containers": [OrderedDict(b=1), Counter("ab"), defaultdict(list, {1: [2]}), deque([1], 3)],
        "sets": [{1, (2, 3)}, frozenset(["a"])],
        "numbers": [1 + 2j, 2**70, -1, 1e300, True, None, b"\0\xff", "\u00e9"],
        "times": [datetime.datetime(2020, 2, 29, 1, 2), datetime.timedelta(1)],
        "paths": [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("C:\\a")],
        "torch": [torch.float16, torch.Size([1, 2]), torch.device("cpu"), torch.strided],
    }
    base = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "views": [base, base[:, 1], base.permute(2, 0, 1), base[0, 0, 0]],
        "kinds": [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.complex64)],
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(2).to_sparse(),
    }
    arrays = {"a": np.arange(6.0).reshape(2, 3), "s": np.float32(1), "b": np.arange(3, dtype=">i2")}
    return [training, values, tensors, arrays, torch.ones(3)]


def _saved(state: Any, **options: Any) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(state, out, **options)
    return out.getvalue()


def zip_seeds() -> list[bytes]:
    """Files of torch.save, in two protocols."""
    return [_saved(state, pickle_protocol=protocol) for state in _states() for protocol in (2, 4)]


def stream_seeds() -> list[bytes]:
    """Files of torch.save in the old form."""
    states = _states()
    return [_saved(state, _use_new_zipfile_serialization=False) for state in states]


def _save_dcp(folder: Path, state: Any = None) -> None:
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    default = {"w": torch.arange(6.0).reshape(2, 3), "l": [torch.ones(1), {"x": 1}], "step": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(folder, sync_files=False)
        dcp.save(state or default, storage_writer=writer, no_dist=True)


def dcp_seeds() -> list[bytes]:
    """Metadata of DCP folders; the first are those of the folder that is read."""
    import torch

    found = [_without_names((_dcp_folder() / ".metadata").read_bytes())]
    more = {"a": {"b": torch.zeros(2, 2, dtype=torch.bfloat16)}, "c": [1, "x", None]}
    for state in (more, {"x": torch.ones(())}):
        with tempfile.TemporaryDirectory() as folder:
            _save_dcp(Path(folder) / "dcp", state)
            found.append(_without_names((Path(folder) / "dcp" / ".metadata").read_bytes()))
    return found


def _without_names(metadata: bytes) -> bytes:
    """Metadata without the names that torch and the system made up: they differ each time."""
    return _MADE_UP.sub(lambda found: b"0" * len(found[0]), metadata)


_MADE_UP = re.compile(
    rb"dsd-fuzz-[a-z0-9_]{8}|tmp[a-z0-9_]{8}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)


def npz_seeds() -> list[bytes]:
    """Files of numpy, stored and deflated."""
    import numpy as np

    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(3, dtype=">i2"), "c": np.bool_(1)}
    arrays["f"] = np.asfortranarray(np.ones((2, 3), np.complex64))
    found = []
    for save in (np.savez, np.savez_compressed):
        out = io.BytesIO()
        save(out, **arrays)  # type: ignore[operator]
        found.append(out.getvalue())
    return found


# Changes


def mutated_json(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """JSON with one of its parts changed, or by chance with its bytes changed."""
    if rng.random() < 0.35:
        return mutated(data, rng, others)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return mutated(data, rng, others)
    for _ in range(rng.choice((1, 1, 2))):
        value = _json_changed(value, rng)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=rng.random() < 0.5).encode(
        "utf-8", "surrogatepass"
    )


_JSON_ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 1e400, "", "a", "..", "../x", "/etc/passwd", "F32", "F4", "U8"),
    *([], {}, [0], [0, 0], [2, 3], [0, 24], "__metadata__", "\ud800", "\0", 10**30, 2**63),
    *("model-00001-of-00002.safetensors", ".metadata", "C:x", "a\\b"),
)


def _json_changed(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, (dict, list)):
        return copy.deepcopy(rng.choice(_JSON_ODD))
    holders = [value]
    for one in holders:
        children = one.values() if isinstance(one, dict) else one
        holders += [child for child in children if isinstance(child, (dict, list)) and child]
        if len(holders) > 100:
            break
    holder = rng.choice(holders)
    if not holder:
        return copy.deepcopy(rng.choice(_JSON_ODD))
    step = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    kind = rng.random()
    if kind < 0.3 and type(holder[step]) is int:
        holder[step] += rng.choice((-1, 1, 2, *NUMBERS))
    elif kind < 0.55:
        holder[step] = copy.deepcopy(rng.choice(_JSON_ODD))
    elif kind < 0.7:
        del holder[step]
    elif isinstance(holder, dict):
        holder[str(rng.choice(_JSON_ODD))] = copy.deepcopy(holder[step])
    else:
        holder.insert(step, copy.deepcopy(rng.choice(_JSON_ODD)))
    return value


def mutated_safetensors(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A safetensors file with its header changed, and the length before it right."""
    nbytes = int.from_bytes(data[:8], "little")
    if rng.random() < 0.15 or nbytes > len(data) - 8:
        return mutated(data, rng, others)
    if rng.random() < 0.1:
        return data[: 8 + nbytes] + mutated(data[8 + nbytes :], rng)
    text = mutated_json(data[8 : 8 + nbytes], rng)
    return struct.pack("<Q", len(text)) + text + data[8 + nbytes :]


def mutated_stream(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A stream with its pickles changed by opcodes: the storages behind them are one more piece."""
    return mutated_pickle(data, rng, others)


FORMATS = (
    Format(
        "safetensors",
        "a foreign safetensors file",
        read_safetensors_file,
        safetensors_seeds,
        mutated_safetensors,
        10_000,
    ),
    Format(
        "index",
        "`model.safetensors.index.json`",
        read_index_file,
        index_seeds,
        mutated_json,
        3000,
    ),
    Format(
        "torch-zip",
        "a file of `torch.save`",
        read_zip,
        zip_seeds,
        mutated_archive({"data.pkl": mutated_pickle}),
        3000,
    ),
    Format(
        "torch-stream",
        "one in the form before torch 1.6",
        read_stream,
        stream_seeds,
        mutated_stream,
        3000,
    ),
    Format("dcp", "`.metadata` of a DCP folder", read_dcp, dcp_seeds, mutated_pickle, 3000),
    Format(
        "npz",
        "a file of `numpy.savez`",
        read_arrays,
        npz_seeds,
        mutated_archive({".npy": mutated}),
        3000,
    ),
)
