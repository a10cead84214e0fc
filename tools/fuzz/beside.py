"""What lies beside weights and is read with them: flat shards, names of files, names of tensors."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.flat_shards import join_files, joined
from dsdformat.convert.foreign import Foreign, Kind
from dsdformat.convert.kinds import find_kind, open_any
from dsdformat.convert.model_meta import read_model_meta
from dsdformat.convert.optimizer_naming import with_optimizers
from dsdformat.convert.settling import settle
from dsdformat.convert.torch_zip import read_torch_archive
from dsdformat.errors import ConvertError, DsdError
from dsdformat.folders import latest
from fuzz.archives import mutated_archive
from fuzz.bytewise import mutated
from fuzz.folders import Files, folder_seeds, packed, unpacked
from fuzz.foreign import (
    dcp_seeds,
    index_seeds,
    mutated_json,
    npz_seeds,
    safetensors_seeds,
    scratch,
    use_settled,
    zip_seeds,
)
from fuzz.formats import Codes, Format
from fuzz.pickles import mutated_pickle

__all__ = ["FORMATS"]

# Flat shards


def _shard(rank: int) -> dict[str, Any]:
    """What a rank of two has: a flat parameter of two, one that is not flat, and an optimizer."""
    import torch

    flat = torch.arange(6.0)[4 * rank : 4 * rank + 4]
    flat = torch.cat([flat, torch.zeros(4 - len(flat))])
    params = {
        "flat_param_0": {
            "names": ["0.weight", "0.bias"],
            "shapes": [torch.Size([2, 2]), torch.Size([2])],
            "numels": [4, 2],
            "padding": 2 * rank,
        }
    }
    instance = {
        "fsdp_path": "layers._fsdp_wrapped_module",
        "params": params,
        "no_broadcast_optim_state": False,
        "shared_param_info": [("0.weight", "1.weight")],
    }
    old = {
        "fsdp_path": "old",
        "is_flat": True,
        "num_padded": [0],
        "param_names": ["w"],
        "param_numels": [3],
        "param_shapes": [torch.Size([3])],
    }
    old |= {} if rank == 0 else {"param_numels": [3]}
    state = {number: {"exp_avg": flat.clone(), "step": 3} for number in (0,)}
    state[1] = {"exp_avg": torch.ones(2 - rank), "step": 3}
    return {
        "model": {
            "layers.flat_param_0": flat,
            "old.flat_param": torch.ones(2 - rank),
            "mean": torch.ones(2),
        },
        "shard_metadata": {"param_metadata": [instance, old], "buffer_names": ["mean"]},
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "epoch": 3,
    }


def flat_seeds() -> list[bytes]:
    """The files of two ranks, and of the first of them alone."""
    import torch

    files = {}
    for rank in range(2):
        out = io.BytesIO()
        torch.save(_shard(rank), out)
        files[str(rank)] = out.getvalue()
    return [packed(files), packed({"0": files["0"]})]


def read_flat(data: bytes) -> Codes:
    """Files of torch.save with flat parameters, one for each rank, joined."""
    for policy in ("refuse", "record"):
        files = []
        for label, one in sorted(unpacked(data).items())[:3]:
            tree = read_torch_archive(MemoryBytes(one, label)).tree
            files.append(Foreign(Kind.TORCH_ZIP, label, settle(tree, "record", label)))
        if not files:
            return ()
        with contextlib.suppress(ConvertError):
            joined(files[0], policy)  # type: ignore[arg-type]
        opened = join_files(files, policy)  # type: ignore[arg-type]
        use_settled(opened.tree, data)
    return ()


_MUTATED_FILE = mutated_archive({"data.pkl": mutated_pickle})


def mutated_flat(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Files of ranks of which one is changed."""
    files = unpacked(data)
    if not files or rng.random() < 0.05:
        return mutated(data, rng, others)
    label = rng.choice(sorted(files))
    files[label] = _MUTATED_FILE(files[label], rng, ())
    return packed(files)


# Folders

_LABELS = (
    *("manifest.dsd", ".metadata", "__0_0.distcp", "__0.metadata", "model.safetensors"),
    *("model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("shard0.pt", "shard1.pt", "shard01.pt", "x-00001.pt", "config.json", "a.npz", "a.ckpt"),
    *("model-00001-of-00002.safetensors", "LICENSE", "tokenizer.model", ".hidden", "step-1"),
    *("step-2/manifest.dsd", "step-10/manifest.dsd", "step-\u0664/manifest.dsd", "9" * 30),
    *("epoch=1-step=5/manifest.dsd", "step-0x1", "a\\b", "C:", "\udcff", "a\nb", "\x7f", "CON"),
)


def place_seeds() -> list[bytes]:
    """Folders as each kind is laid out."""
    ours = unpacked(folder_seeds()[-1])
    model, chunks = safetensors_seeds()[1], safetensors_seeds()[-1]
    index, torch_file = index_seeds()[0], zip_seeds()[0]
    return [
        packed(files)
        for files in (
            ours,
            {f"step-{step}/manifest.dsd": ours["manifest.dsd"] for step in (1, 10)},
            {"model.safetensors": model, "config.json": b"{}"},
            {"model.safetensors.index.json": index, "model-00001-of-00002.safetensors": model},
            {".metadata": dcp_seeds()[0], "__0_0.distcp": torch_file},
            {"pytorch_model.bin": torch_file},
            {"shard0.pt": torch_file, "shard1.pt": torch_file, "a.npz": npz_seeds()[0]},
            {"shard-1.safetensors": chunks, "x": b"x"},
        )
    ]


def read_place(data: bytes) -> Codes:
    """A folder of any names and files, opened as what it is, and searched for checkpoints."""
    place = scratch() / "place"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for label, content in list(unpacked(data).items())[:12]:
        _write(place, label, content)
    with contextlib.suppress(DsdError):
        latest(place)
    find_kind(place)
    with open_any(place, unknown="drop") as opened:
        opened.side_files()
        use_settled(opened.tree, data)
    return ()


def _write(place: Path, label: str, content: bytes) -> None:
    """Write a file, a folder down at most; a name that the system does not take is left out."""
    steps = label.split("/")[-2:]
    with contextlib.suppress(OSError, ValueError):
        if not {"", ".", ".."} & set(steps):
            path = place.joinpath(*steps)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)


def mutated_place(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A folder with a file renamed, changed, put in, or taken out."""
    files: Files = unpacked(data)
    label = rng.choice(sorted(files)) if files else "a"
    content, kind = files.pop(label, b""), rng.random()
    if kind < 0.4:
        files[_renamed(label, rng)] = content
    elif kind < 0.6:
        files |= {label: content, _renamed(label, rng): content}
    elif kind < 0.75 and others:
        files |= {label: content, **unpacked(rng.choice(others))}
    elif kind < 0.95:
        files[label] = mutated(content, rng)
    return packed({name[:120]: one for name, one in files.items()})


def _renamed(label: str, rng: random.Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(_LABELS).encode("utf-8", "surrogateescape").decode("latin-1")
    return mutated(label.encode("latin-1", "replace"), rng).decode("latin-1")


# JSON of names


def meta_seeds() -> list[bytes]:
    """Names of tensors with their forms, as a list, by optimizer, and as a header is written."""
    rows = {"a": {"dtype": "F32", "shape": [2, 3]}, "b.c": {"dtype": "bfloat16", "shape": []}}
    rows["d"] = {"dtype": "F8_E4M3", "shape": [0, 2**40]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **rows}).encode()
    framed = len(header).to_bytes(8, "little") + header
    lists = [["a", "b"], {"optimizer": ["a", "b"], "x": []}, []]
    return [json.dumps(rows).encode(), framed, *(json.dumps(one).encode() for one in lists)]


_OPTIMIZER = {
    "state": {0: {"step": 1}, 1: {"step": 2}},
    "param_groups": [{"lr": 0.1, "params": [0, 1]}],
}


def read_meta(data: bytes) -> Codes:
    """Names and shapes of a model, and names for an optimizer's numbers, each as a file."""
    path = scratch() / "meta.json"
    path.write_bytes(data)
    opened = Foreign(Kind.TORCH_ZIP, "x", settle({"optimizer": _OPTIMIZER}, "record", "x"))
    with contextlib.suppress(DsdError):
        with_optimizers(opened, "named", str(path), source=opened)
    read_model_meta(path)
    return ()


def mutated_meta(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """JSON, or a header behind its length."""
    if len(data) > 9 and data[8:9] == b"{":
        text = mutated_json(data[8:], rng)
        return (len(text) + rng.choice((0, 0, 0, 0, 1, -1))).to_bytes(8, "little") + text
    return mutated_json(data, rng, others)


FORMATS = (
    Format(
        "flat", "flat shards of fairscale, a file a rank", read_flat, flat_seeds, mutated_flat, 1000
    ),
    Format("place", "names and files of a folder", read_place, place_seeds, mutated_place, 1000),
    Format("meta", "a model's names and shapes as JSON", read_meta, meta_seeds, mutated_meta, 3000),
)
