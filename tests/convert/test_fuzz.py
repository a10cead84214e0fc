"""Random changes of real files: whatever they say, only errors of our own come out, and soon.

Seeds are fixed; a test that fails prints the seed. The checksums of what is changed are made
right where they would hide what lies behind them.
"""

from __future__ import annotations

import io
import random
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from forge import ORDERED, SIX, Tensor, call, name, pickled, plain, torch_zip
from safetensors.torch import save
from samples import VALUES, trained, written

from dsdformat import DsdError, create
from dsdformat.convert import open_foreign
from dsdformat.convert.dcp_names import DCP_RULES
from dsdformat.convert.numpy_names import NUMPY_NAMES
from dsdformat.convert.plain_names import PLAIN_NAMES

SEEDS = range(6)
ROUNDS = 20
ODD = [0, 1, 2, 5, 255, 4096, 2**16, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
OPCODES = b"()QRbcstu}]\x80\x81\x85\x86\x87\x88\x89\x8a\x8c\x8f\x90\x92\x93\x94\x95hqrj0X.NKJM"


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, put in, taken out, moved, or made a length or an opcode."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.choice(OPCODES)
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3:
            del changed[at : at + rng.randint(1, 8)]
        elif kind == 4:
            start = rng.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + rng.randint(1, 64)]
        elif kind == 5:
            width = rng.choice((1, 2, 4, 8))
            changed[at : at + width] = rng.choice(ODD).to_bytes(16, "little")[:width]
        else:
            changed = changed[:at]
    return bytes(changed)


def survive(path: Path, folder: Path) -> None:
    """Do what a user may do with a file; errors of dsdformat are fine, others are not."""
    for policy in ("refuse", "record"):
        try:
            with open_foreign(path, unknown=policy) as foreign:
                for _, tensor in foreign:
                    tensor.read()
                foreign.verify()
                with create(folder, overwrite=True, threads=1) as writer:
                    writer.add(foreign.state())
        except DsdError:
            continue


def saved_bytes(state: object, **options: object) -> bytes:
    out = io.BytesIO()
    torch.save(state, out, **options)  # type: ignore[arg-type]
    return out.getvalue()


def pickle_of(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """The pickle and the storages of a file of torch.save."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        bodies = {info.filename.split("/", 1)[1]: file.read(info) for info in file.infolist()}
    storages = {
        name.removeprefix("data/"): body for name, body in bodies.items() if name[:5] == "data/"
    }
    return bodies["data.pkl"], storages


STATE = {"train": trained(), "tensor": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)}
PLAIN = {name: VALUES[name] for name in ("ordered", "sets", "deques", "times", "keys", "sizes")}
ARRAYS = {"a": np.arange(6.0).reshape(2, 3), "s": np.float32(1), "b": np.arange(3, dtype=">i2")}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("state", [STATE, PLAIN, ARRAYS], ids=["training", "values", "arrays"])
def test_pickles_of_changed_bytes_give_our_errors_alone(tmp_path, state, protocol, seed):
    rng = random.Random(seed)
    pickle, storages = pickle_of(saved_bytes(state, pickle_protocol=protocol))
    path = tmp_path / "x.pt"
    for _ in range(ROUNDS):
        path.write_bytes(torch_zip(mutated(pickle, rng), storages))
        survive(path, tmp_path / "out")


@pytest.mark.parametrize("seed", SEEDS)
def test_zip_files_of_changed_bytes_give_our_errors_alone(tmp_path, seed):
    rng = random.Random(seed)
    data = saved_bytes({"a": torch.ones(3), "b": torch.zeros(2, 2), "c": 1})
    path = tmp_path / "x.pt"
    for _ in range(2 * ROUNDS):
        path.write_bytes(mutated(data, rng))
        survive(path, tmp_path / "out")


@pytest.mark.parametrize("seed", SEEDS)
def test_directories_of_changed_numbers_give_our_errors_alone(tmp_path, seed):
    """Only the directory and the ends are changed, and lengths stay, so that they are looked at."""
    rng = random.Random(seed)
    data = saved_bytes({"a": torch.ones(3), "b": torch.zeros(2, 2)})
    start = data.index(b"PK\x01\x02")
    path = tmp_path / "x.pt"
    for _ in range(2 * ROUNDS):
        changed = bytearray(data)
        at, width = rng.randrange(start, len(data) - 8), rng.choice((2, 4, 8))
        changed[at : at + width] = rng.choice(ODD).to_bytes(16, "little")[:width]
        path.write_bytes(changed)
        survive(path, tmp_path / "out")


@pytest.mark.parametrize("seed", SEEDS)
def test_streams_of_changed_bytes_give_our_errors_alone(tmp_path, seed):
    rng = random.Random(seed)
    state = {"a": torch.ones(3), "b": torch.zeros(2, 2), "c": [1, "x"]}
    data = saved_bytes(state, _use_new_zipfile_serialization=False)
    path = tmp_path / "x.pt"
    for _ in range(2 * ROUNDS):
        path.write_bytes(mutated(data, rng))
        survive(path, tmp_path / "out")


@pytest.fixture(scope="module")
def dcp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {"w": torch.arange(6.0).reshape(2, 3), "l": [torch.ones(1), {"x": 1}], "step": 5}
    return written(state, tmp_path_factory.mktemp("fuzz") / "dcp")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_dcp_folders_of_changed_bytes_give_our_errors_alone(tmp_path, dcp_folder, name, seed):
    rng = random.Random(seed)
    folder = tmp_path / "dcp"
    folder.mkdir()
    for file in dcp_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = (dcp_folder / name).read_bytes()
    for _ in range(ROUNDS):
        (folder / name).write_bytes(mutated(data, rng))
        survive(folder, tmp_path / "out")


def npz(compressed: bool) -> Callable[[], bytes]:
    def make() -> bytes:
        out = io.BytesIO()
        (np.savez_compressed if compressed else np.savez)(out, a=np.arange(9.0), b=np.ones((2, 3)))
        return out.getvalue()

    return make


OTHERS = {
    "safetensors": lambda: save({"a": torch.ones(3), "b": torch.zeros(2, 2)}, {"k": "v"}),
    "npz": npz(False),
    "npz-deflated": npz(True),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_of_changed_bytes_give_our_errors_alone(tmp_path, kind, seed):
    rng = random.Random(seed)
    data = OTHERS[kind]()
    path = tmp_path / "x"
    for _ in range(2 * ROUNDS):
        path.write_bytes(mutated(data, rng))
        survive(path, tmp_path / "out")


SIMPLE = [
    bytes([op]) for op in b"N\x88\x89)]}((tld\x85\x86\x87RRRb\x81\x92aesu\x8f\x90\x91Q\x94\x94\x93"
]
NAMES = [
    *PLAIN_NAMES,
    *NUMPY_NAMES,
    *DCP_RULES.calls,
    *(("torch._utils", f"_rebuild_{what}") for what in ("tensor_v2", "tensor_v3", "parameter")),
    *(("torch", what) for what in ("Size", "device", "float32", "FloatStorage", "Tensor")),
    *(("os", "system"), ("numpy", "ndarray"), ("torch._utils", "_rebuild_sparse_tensor")),
]
GOOD = [
    Tensor().opcodes(),
    ORDERED,
    *map(plain, (1, "a", (1,), [1], {"a": 1}, None, True, (1, 2, 3), "latin1")),
    b"C\x01b",
    call(name("numpy", "dtype"), "f4", False, True),
    call(name("torch", "Size"), (2, 3)),
]


def some_opcodes(rng: random.Random) -> bytes:
    """Opcodes, names, entries of the memo, and calls of known names with any arguments."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice((b"h", b"q")) + bytes([rng.randrange(6)])
    if kind == 1:
        return name(*rng.choice(NAMES))
    if kind == 2:
        return rng.choice(GOOD)
    if kind == 3:
        return call(name(*rng.choice(NAMES)), *rng.choices(GOOD, k=rng.randrange(5)))
    return rng.choice(SIMPLE)


@pytest.mark.parametrize("seed", SEEDS)
def test_opcodes_in_any_order_give_our_errors_alone(tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "x.pt"
    for _ in range(3 * ROUNDS):
        count = rng.randrange(1, 15)
        body = b"(" + b"".join(some_opcodes(rng) for _ in range(count)) + b"l"
        path.write_bytes(torch_zip(pickled(body), {"0": SIX}))
        survive(path, tmp_path / "out")


def test_the_checksums_of_the_files_hide_nothing():
    """The pickle of a forged zip file has the right checksum, whatever was changed in it."""
    pickle, storages = pickle_of(saved_bytes({"a": torch.ones(1)}))
    changed = mutated(pickle, random.Random(0))
    crc = zlib.crc32(changed).to_bytes(4, "little")
    assert crc in torch_zip(changed, storages)
