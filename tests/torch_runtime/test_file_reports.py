"""What users report of checkpoint files that one process writes and reads."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dsdformat
import dsdformat.torch as dsd
from dsdformat.convert import convert
from dsdformat.limits import MIB
from dsdformat.storage.local import LocalStorage
from tests.torch_runtime.exact import assert_same

# B113: a file is replaced under tensors that are mapped from it


def write_safetensors(path: Path, state: dict[str, Any]) -> None:
    save_file(state, path)


def export(path: Path, state: dict[str, Any]) -> None:
    model = nn.Module()
    for name, one in state.items():
        model.register_buffer(name, one)
    dsd.export_safetensors(path, model, overwrite=True)


def write_torch(path: Path, state: dict[str, Any]) -> None:
    torch.save(state, path)


KINDS: dict[str, tuple[str, Callable[[Path, dict[str, Any]], None], Callable[[Path], Any]]] = {
    "safetensors": ("m.safetensors", write_safetensors, load_file),
    "huggingface": ("m", export, lambda path: load_file(path / "model.safetensors")),
    "torch": ("m.pt", write_torch, torch.load),
    "dsd": ("m", dsd.save, dsd.load),
}


@pytest.mark.parametrize(("name", "write", "read"), KINDS.values(), ids=KINDS)
def test_a_file_is_rewritten_in_its_own_place_while_tensors_are_mapped_from_it(
    tmp_path, request, name, write, read
):
    state = {"a": torch.randn(300_000), "b": torch.arange(3)}
    path, kind = tmp_path / name, request.node.callspec.id
    write(path, state)
    mapped = dsd.load(path, mmap=True)
    convert(path, path, to=kind, overwrite=True)
    assert_same(dict(read(path)), state)
    assert_same(dict(mapped), state)
    assert [child.name for child in tmp_path.iterdir()] == [name]


def test_an_export_replaces_the_folder_that_its_model_is_mapped_from(tmp_path):
    state = {"weight": torch.randn(300, 300), "bias": torch.randn(300)}
    export(tmp_path / "hub", state)
    model = nn.Linear(300, 300)
    model.load_state_dict(dsd.load(tmp_path / "hub", mmap=True), assign=True)
    with torch.no_grad():
        model.bias += 1
    kept = model.weight
    dsd.export_safetensors(tmp_path / "hub", model, overwrite=True)
    found = load_file(tmp_path / "hub" / "model.safetensors")
    assert_same(found, {"weight": state["weight"], "bias": state["bias"] + 1})
    assert_same(kept.detach(), state["weight"])


# B122: compression


def test_what_compresses_is_small_and_what_does_not_is_raw_and_each_is_read_alone(tmp_path):
    moments = torch.zeros(64, 20_000)
    moments[5, ::50] = torch.randn(400)
    noise = torch.randint(256, (64, 20_000), dtype=torch.uint8)
    state = {"model": {"w": noise}, "optimizer": {"m": moments}}
    paths = {codec: tmp_path / codec for codec in ("raw", "zstd", "planes+zstd")}
    for codec, path in paths.items():
        dsd.save(path, state, codec=codec)
        assert_same(dsd.load(path), state)
    digests = {}
    for codec, path in paths.items():
        with dsdformat.open(path) as checkpoint:
            digests[codec] = checkpoint.content_digest()
            stored = {one.name: sum(c.stored_nbytes for c in one.chunks) for one in checkpoint}
        if codec != "raw":
            assert stored["optimizer/m"] < moments.nbytes // 20
        assert stored["model/w"] == noise.nbytes
    assert len(set(digests.values())) == 1
    (paths["zstd"] / "model.safetensors").unlink()  # nothing of it is needed for the other
    assert_same(dsd.load(paths["zstd"], select="optimizer/m")["optimizer"]["m"], moments)


# B123: reading without maps


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Byte offset, length and address of all reads of data, behind headers, from here on."""
    noted: list[tuple[int, int, int]] = []
    kept, kept_many = LocalStorage.read_into, LocalStorage.read_into_many

    def note(label: str, byte_offset: int, into: Sequence[memoryview]) -> None:
        if label != "manifest.dsd" and byte_offset:
            address = np.frombuffer(into[0], np.uint8).ctypes.data
            noted.append((byte_offset, sum(map(len, into)), address))

    def read_into(self: LocalStorage, label: str, byte_offset: int, into: memoryview) -> int:
        note(label, byte_offset, [into])
        return kept(self, label, byte_offset, into)

    def read_into_many(
        self: LocalStorage, label: str, byte_offset: int, into: Sequence[memoryview]
    ) -> int:
        note(label, byte_offset, into)
        return kept_many(self, label, byte_offset, into)

    monkeypatch.setattr(LocalStorage, "read_into", read_into)
    monkeypatch.setattr(LocalStorage, "read_into_many", read_into_many)
    return noted


def of_a_model(fill: bool) -> dict[str, torch.Tensor]:
    big = torch.arange(9 << 18, dtype=torch.int32)
    small = {f"w{number:02}": torch.full((10_000,), float(number)) for number in range(60)}
    state = {"big": big, **small}
    return state if fill else {name: torch.zeros_like(one) for name, one in state.items()}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["c", "m.safetensors"])
def test_a_load_without_maps_reads_long_runs_in_order_into_where_they_belong(
    tmp_path, reads, name, verify
):
    state, into = of_a_model(fill=True), of_a_model(fill=False)
    if name == "c":
        dsd.save(tmp_path / name, {"model": state})
    else:
        save_file(state, tmp_path / name)
    tracemalloc.start()
    dsd.load(tmp_path / name, {"model": into} if name == "c" else into, verify=verify, threads=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_same(into, state)
    begin, nbytes = into["big"].data_ptr(), into["big"].nbytes
    large = [one for one in reads if begin <= one[2] < begin + nbytes]
    assert sum(length for _, length, _ in large) == nbytes  # without a copy in between
    assert min(length for _, length, _ in large) >= MIB // 2
    others = [one for one in reads if one not in large]
    assert len(others) <= 8  # sixty small ones are read together
    places = [at for at, _, _ in reads]
    assert places == sorted(places)
    assert sum(length for _, length, _ in reads) < nbytes + 60 * 40_000 + 8192
    assert peak < 4 * MIB
