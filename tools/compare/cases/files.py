"""What is in the files, and what becomes of those that are damaged or forged."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import torch

from compare.case import Scene, Subject, expect, expect_equal, expect_refusal, refusal_of
from compare.libraries import DCP, HF, SAFETENSORS, TORCH_SAVE

__all__ = ["FILES"]

FILES = Subject("Files")


def files_in(folder: Path) -> list[Path]:
    """List all files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def check_flip(library: Any, scene: Scene) -> None:
    """Flip one bit in the middle of a tensor's bytes, and load."""
    library.save(scene.folder, {"w": torch.ones(1000)})
    ones = b"\x00\x00\x80\x3f" * 1000
    (place,) = [path for path in files_in(scene.folder) if ones in path.read_bytes()]
    raw = bytearray(place.read_bytes())
    raw[raw.index(ones) + 2002] ^= 0x10
    place.write_bytes(raw)
    expect_refusal(
        lambda: library.read(scene.folder), *("w", place.name), otherwise="loaded in silence"
    )


@FILES.case(
    "a bit that has flipped in a safetensors file is found, with its tensor and file",
    source="safetensors/safetensors#220",
    pair=SAFETENSORS,
)
def flipped_bit(library: Any, scene: Scene) -> None:
    check_flip(library, scene)


@FILES.case(
    "a bit that has flipped in a distributed checkpoint is found, with its tensor and file",
    source="pytorch/torchtitan#4011",
    pair=DCP,
)
def flipped_bit_in_dcp(library: Any, scene: Scene) -> None:
    check_flip(library, scene)


@FILES.case(
    "a bit that has flipped in a file of torch.save is found, with its tensor and file",
    source="pytorch/pytorch#126952",
    pair=TORCH_SAVE,
)
def flipped_bit_in_torch_save(library: Any, scene: Scene) -> None:
    check_flip(library, scene)


@FILES.case(
    "equal states make equal bytes, in each process",
    source="safetensors/safetensors#584",
    pair=SAFETENSORS,
    times=3,
)
def equal_bytes(library: Any, scene: Scene) -> None:
    place = scene.folder / str(len(list(scene.folder.iterdir())))
    place.mkdir()
    labels = {f"label{number}": "x" for number in range(16)}
    library.save_labelled(place, {"w": torch.ones(3), "b": torch.zeros(2)}, labels)
    digests = {
        tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in files_in(one))
        for one in scene.folder.iterdir()
    }
    expect_equal(len(digests), 1, "the number of different files")


@FILES.case(
    "a checkpoint is not overwritten unless asked for, and then nothing of the old one stays",
    source="pytorch/pytorch#125877",
    pair=DCP,
)
def used_folders(library: Any, scene: Scene) -> None:
    library.save(scene.folder, {"w": torch.ones(2)})
    stale = files_in(scene.folder)[0].parent / "__7_0.distcp"
    stale.write_bytes(b"of a larger run")
    error = refusal_of(lambda: library.save(scene.folder, {"w": torch.zeros(2)}))
    library.overwrite(scene.folder, {"w": torch.zeros(2)})
    wrong = [] if error is not None else ["overwritten unasked"]
    wrong += ["a stale file stays"] if stale.exists() else []
    expect(not wrong, ", and ".join(wrong))


@FILES.case(
    "a file that the index names and that is gone is an error, whatever is loaded",
    source="huggingface/huggingface_hub#4725",
    pair=HF,
)
def files_that_are_gone(library: Any, scene: Scene) -> None:
    _, gone = library.save_two_files(scene.folder, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    gone.unlink()
    expect_refusal(
        lambda: library.load_first(scene.folder, {"a": torch.zeros(2)}),
        gone.name,
        otherwise="loaded in silence",
    )


@FILES.case(
    "every safetensors file of a tied model can be opened",
    source="pytorch/torchtitan#3764",
    pair=HF,
)
def files_of_a_tied_model(library: Any, scene: Scene) -> None:
    from safetensors.torch import load_file

    weight = torch.ones(4, 2)
    library.save_tied(scene.folder, {"embed": weight, "head": weight}, "head")
    files = list((scene.folder / "checkpoint").glob("*.safetensors"))
    expect(bool(files), "there are none")
    for file in files:
        error = refusal_of(lambda file=file: load_file(file))
        expect(error is None, f"{file.name}: {type(error).__name__}: {error}")


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.folder,)


@FILES.case(
    "a forged index runs no code",
    source="pytorch/pytorch#189308",
    pair=DCP,
)
def forged_index(library: Any, scene: Scene) -> None:
    library.save(scene.folder, {"w": torch.ones(2)})
    mark = scene.folder / "it ran"
    (place,) = scene.folder.rglob(library.MANIFEST)
    place.write_bytes(pickle.dumps(Hostile(mark)))
    error = refusal_of(lambda: library.load(scene.folder, {"w": torch.zeros(2)}))
    expect(not mark.exists(), "code in the file ran")
    expect(error is not None, "loaded in silence")


@FILES.case(
    "a name that a header has twice is an error",
    source="safetensors/safetensors#401",
    pair=SAFETENSORS,
)
def names_twice(library: Any, scene: Scene) -> None:
    library.save(scene.folder, {"w": torch.ones(2), "b": torch.ones(3)})
    (place,) = scene.folder.rglob("*.safetensors")
    raw = place.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    entry = f'"w":{json.dumps(json.loads(raw[8:end])["w"], separators=(",", ":"))},'
    header = raw[8:end].decode().replace("{", "{" + entry, 1)
    header = header.rstrip().ljust(end - 8)  # where there is room, nothing else moves
    place.write_bytes(len(header).to_bytes(8, "little") + header.encode() + raw[end:])
    expect_refusal(lambda: library.read(scene.folder), otherwise="loaded in silence")
