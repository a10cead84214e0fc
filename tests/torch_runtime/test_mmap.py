"""Tensors that are maps of the file: copy-on-write, verified, valid for as long as they live."""

from __future__ import annotations

import copy
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vectors.builder import build
from vectors.declare import Checkpoint as Declared
from vectors.declare import DataFile
from vectors.samples import tensor as declared

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from exact import assert_same, assert_same_tensor  # noqa: E402
from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import Box, ChecksumError, TensorSource  # noqa: E402
from dsdformat.storage.local import LocalStorage  # noqa: E402

MIB = 2**20


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """The lengths of all reads of data files from here on. Maps are not reads."""
    lengths: list[int] = []
    read_into = LocalStorage.read_into

    def read(self: Any, label: str, byte_offset: int, into: Any) -> int:
        if label != "manifest.dsd":
            lengths.append(len(into))
        return read_into(self, label, byte_offset, into)

    monkeypatch.setattr(LocalStorage, "read_into", read)
    return lengths


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    train(state)
    return state


def train(state: dict[str, Any], steps: int = 1) -> None:
    for step in range(steps):
        state["optimizer"].zero_grad()
        x = torch.linspace(-1, 1, 15).reshape(5, 3) + step
        state["model"](x).square().sum().backward()
        state["optimizer"].step()


def mixed() -> dict[str, Any]:
    """Tensors and arrays of many forms."""
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "packed": weight + 1,
        "tied": [weight, weight],
        "transposed": weight.t() + 2,
        "expanded": torch.tensor(1.5).expand(5, 2),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "odd bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.arange(5).to(torch.bfloat16),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.tensor([1 + 2j, 3j]),
        "wide complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "conj": torch.tensor([1 + 2j, 3j]).conj(),
        "array": np.arange(5.0),
        "array without dims": np.array(2.5),
        "numbers": [1, 2.5, None],
    }


@pytest.fixture
def path(tmp_path) -> Path:
    dsd.save(tmp_path / "c", mixed())
    return tmp_path / "c"


def test_maps_hold_what_reading_gives(path):
    assert_same(dsd.load(path, mmap=True), dsd.load(path))


def test_a_training_state_is_the_same_through_maps(tmp_path):
    dsd.save(tmp_path / "c", training())
    assert_same(dsd.load(tmp_path / "c", mmap=True), dsd.load(tmp_path / "c"))


def test_tied_names_are_one_map(path):
    first, second = dsd.load(path, mmap=True)["tied"]
    assert first is second


def test_a_map_without_verification_reads_no_data(path, reads):
    dsd.load(path, mmap=True, verify=False)
    assert reads == []


def test_a_map_is_read_once_for_verification(tmp_path, reads):
    dsd.save(tmp_path / "c", {"w": torch.zeros(3 * MIB, dtype=torch.uint8)})
    dsd.load(tmp_path / "c", mmap=True)
    assert 3 * MIB <= sum(reads) < 3.1 * MIB


# Verification.

BLOCKS = {"first": 0, "second": 5 * MIB, "last": 9 * MIB - 1}


def flip(path: Path, name: str, at: int) -> None:
    with dsdformat.open(path) as checkpoint:
        (chunk,) = checkpoint.tensor(name).chunks
    with (path / chunk.file).open("r+b") as file:
        file.seek(chunk.byte_offset + at)
        byte = file.read(1)[0]
        file.seek(chunk.byte_offset + at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("at", BLOCKS.values(), ids=BLOCKS)
def test_a_flipped_byte_is_found_in_any_block(tmp_path, at):
    dsd.save(tmp_path / "c", {"w": torch.zeros(9 * MIB, dtype=torch.uint8).view(9, -1)})
    flip(tmp_path / "c", "w", at)
    with pytest.raises(ChecksumError, match=r"w \(model.safetensors, bytes") as caught:
        dsd.load(tmp_path / "c", mmap=True)
    assert caught.value.block == at // (4 * MIB)


def test_a_flipped_byte_is_not_looked_for_without_verification(tmp_path):
    dsd.save(tmp_path / "c", {"w": torch.zeros(100, dtype=torch.uint8)})
    flip(tmp_path / "c", "w", 50)
    loaded = dsd.load(tmp_path / "c", mmap=True, verify=False)["w"]
    assert loaded.nonzero().tolist() == [[50]]


# Copy on write.


def write_tensor(loaded: dict[str, Any]) -> None:
    loaded["packed"].add_(100)


def write_array(loaded: dict[str, Any]) -> None:
    loaded["array"] += 100


def write_all(loaded: dict[str, Any]) -> None:
    for value in loaded.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
        elif isinstance(value, np.ndarray):
            value[...] = 0


@pytest.mark.parametrize("write", [write_tensor, write_array, write_all])
def test_what_is_written_to_a_map_never_reaches_the_file(path, write):
    with dsdformat.open(path) as checkpoint:
        root = checkpoint.root
    loaded = dsd.load(path, mmap=True)
    write(loaded)
    assert dsdformat.verify(path, digest=root).ok
    assert_same(dsd.load(path, mmap=True, digest=root), dsd.load(path))


def test_what_is_written_to_a_map_stays_in_it(path):
    loaded = dsd.load(path, mmap=True)
    loaded["packed"].fill_(7)
    assert (loaded["packed"] == 7).all()
    assert_same_tensor(loaded["transposed"], mixed()["transposed"])


def test_the_maps_of_two_loads_do_not_see_each_other(path):
    first, second = dsd.load(path, mmap=True), dsd.load(path, mmap=True)
    first["packed"].fill_(7)
    assert_same_tensor(second["packed"], mixed()["packed"])


def test_training_on_maps_leaves_the_file_and_goes_as_without(tmp_path):
    root = dsd.save(tmp_path / "c", training())

    def resumed(mmap: bool) -> dict[str, Any]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
        state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
        dsd.load(tmp_path / "c", state, mmap=mmap)
        train(state, 3)
        return dsd.snapshot(state)

    assert_same(resumed(mmap=True), resumed(mmap=False))
    assert dsdformat.verify(tmp_path / "c", digest=root).ok


def test_a_model_that_is_made_of_maps_can_be_trained(tmp_path):
    model = nn.Linear(30, 20)
    recipes = {"model": dsd.Recipe("linear", in_features=30, out_features=20)}
    root = dsd.save(tmp_path / "c", {"model": model}, recipes=recipes)
    registry = {"linear": nn.Linear}
    made = dsd.load_model(tmp_path / "c", registry, mmap=True)
    assert_same_tensor(made.weight.detach(), model.weight.detach())
    made(torch.ones(2, 30)).sum().backward()
    torch.optim.SGD(made.parameters(), lr=1.0).step()
    assert not torch.equal(made.weight, model.weight)
    assert dsdformat.verify(tmp_path / "c", digest=root).ok


USES: dict[str, Callable[[Any], Any]] = {
    "cloned": lambda w: w.clone(),
    "copied": copy.copy,
    "deeply copied": copy.deepcopy,
    "a parameter": nn.Parameter,
    "given a gradient": lambda w: w.requires_grad_(),
    "in shared memory": lambda w: w.share_memory_(),
    "an array": lambda w: torch.from_numpy(w.numpy()),
    "a part": lambda w: w[:],
    "contiguous": lambda w: w.contiguous(),
    "converted and back": lambda w: w.double().float(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_map_can_be_used_as_any_tensor(path, use):
    used = use(dsd.load(path, mmap=True)["packed"])
    assert_same_tensor(used.detach(), mixed()["packed"])


def test_a_map_drags_no_more_of_the_file_along_than_its_own_bytes(path):
    """Else a deep copy, or `torch.save`, would hold the whole file for each tensor."""
    assert dsd.load(path, mmap=True)["packed"].untyped_storage().nbytes() == 48


# How long maps live.


def test_maps_outlive_the_folder(path):
    loaded = dsd.load(path, mmap=True)
    shutil.rmtree(path)
    assert_same(loaded, {**mixed(), "conj": mixed()["conj"].resolve_conj()})


def test_one_map_is_enough_to_keep_the_file(path):
    weight = dsd.load(path, mmap=True)["packed"]
    shutil.rmtree(path)
    assert_same_tensor(weight, mixed()["packed"])


def test_what_is_loaded_is_changed_and_saved_to_its_own_path(path):
    loaded = dsd.load(path, mmap=True)
    kept = dsd.load(path, mmap=True)
    loaded["packed"].mul_(2)
    loaded["more"] = loaded["transposed"].t()
    loaded["numbers"] = [9]
    root = dsd.save(path, loaded, overwrite=True)

    assert_same(dsd.load(path, digest=root), loaded)
    assert_same(kept, {**mixed(), "conj": mixed()["conj"].resolve_conj()})
    assert_same_tensor(loaded["packed"], mixed()["packed"] * 2)


def test_maps_that_are_saved_as_they_are_give_the_same_checkpoint(path, tmp_path):
    """Those that were dense and permuted are row-major as maps, so they are left out."""
    state = {name: w for name, w in mixed().items() if name != "transposed"}
    root = dsd.save(tmp_path / "first", state)
    again = dsd.load(tmp_path / "first", mmap=True)
    assert dsd.save(tmp_path / "second", again) == root


def test_saving_maps_many_times_to_their_own_path_keeps_them_right(tmp_path):
    dsd.save(tmp_path / "c", {"w": torch.zeros(1000), "n": torch.ones(500)})
    for turn in range(1, 4):
        loaded = dsd.load(tmp_path / "c", mmap=True)
        loaded["w"] += 1
        dsd.save(tmp_path / "c", loaded, overwrite=True)
        assert_same(
            dsd.load(tmp_path / "c"), {"w": torch.full((1000,), float(turn)), "n": torch.ones(500)}
        )


def test_many_maps_take_few_descriptors(tmp_path, count_descriptors):
    dsd.save(tmp_path / "c", {"m": {f"w{i}": torch.ones(10) for i in range(300)}})
    gc.collect()  # what others left open is not to be closed meanwhile
    before = count_descriptors()
    loaded = dsd.load(tmp_path / "c", mmap=True)
    assert count_descriptors() - before <= 4
    del loaded
    assert count_descriptors() == before


# What cannot be mapped is read.


@pytest.mark.parametrize("codec", ["zstd", "planes+zstd"])
def test_compressed_tensors_are_read_instead(tmp_path, codec):
    state = {"w": torch.arange(5000.0), "v": torch.ones(3)}
    dsd.save(tmp_path / "c", state, codec=codec)
    assert_same(dsd.load(tmp_path / "c", mmap=True), state)


def test_of_a_mixed_checkpoint_the_raw_tensors_are_mapped(tmp_path, reads):
    state = {"raw": torch.arange(50_000.0), "zip": torch.zeros(50_000)}
    dsd.save(tmp_path / "c", state, codec=lambda name: "zstd" if name == "zip" else "raw")
    assert_same(dsd.load(tmp_path / "c", mmap=True, verify=False), state)
    assert sum(reads) < 10_000


@pytest.fixture
def halves(tmp_path) -> Path:
    """A tensor in two chunks, as two ranks write it."""
    data = torch.arange(12.0).reshape(4, 3)
    boxes = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    parts = [(box, data[box.offset[0] :][:2].numpy().tobytes()) for box in boxes]
    with dsdformat.create(tmp_path / "halves") as writer:
        writer.add({"w": TensorSource("float32", (4, 3), parts)})
    return tmp_path / "halves"


def test_a_tensor_of_several_chunks_is_read_instead(halves):
    assert_same(dsd.load(halves, mmap=True), {"w": torch.arange(12.0).reshape(4, 3)})


def test_what_is_cast_is_read_instead(path):
    loaded = dsd.load(path, select="packed", mmap=True, dtype=torch.bfloat16)["packed"]
    assert_same_tensor(loaded, mixed()["packed"].bfloat16())
    loaded.fill_(3)
    assert_same_tensor(dsd.load(path)["packed"], mixed()["packed"])


def test_what_goes_to_another_device_is_not_mapped(path):
    loaded = dsd.load(path, select="packed", mmap=True, device="meta")
    assert loaded["packed"].is_meta


# Maps and a state.


def test_tensors_of_the_state_are_read_into_and_stay_its_own(path):
    state = {"packed": torch.zeros(3, 4)}
    address = state["packed"].data_ptr()
    dsd.load(path, state, select="packed", mmap=True)
    assert state["packed"].data_ptr() == address
    assert_same_tensor(state["packed"], mixed()["packed"])


def test_a_leaf_that_is_none_gets_a_map(path, reads):
    loaded = dsd.load(path, {"packed": None}, select="packed", mmap=True, verify=False)
    assert reads == []
    assert_same_tensor(loaded["packed"], mixed()["packed"])


def test_a_fresh_optimizer_gets_maps(tmp_path, reads):
    state = training()
    saved = dsd.snapshot(state)
    dsd.save(tmp_path / "c", state)
    optimizer = torch.optim.Adam(state["model"].parameters())
    fresh = {"model": state["model"], "optimizer": optimizer}
    dsd.load(tmp_path / "c", fresh, select="optimizer", mmap=True, verify=False)
    assert reads == []
    assert_same(dsd.snapshot(fresh)["optimizer"], saved["optimizer"])


@pytest.mark.parametrize("where", ["materialized", "in place"])
def test_a_module_in_channels_last_keeps_its_memory_order(tmp_path, where):
    saved = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    dsd.save(tmp_path / "c", {"model": saved})
    with torch.device("meta" if where == "materialized" else "cpu"):
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    dsd.load(tmp_path / "c", {"model": model}, mmap=True)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert_same_tensor(model.weight.detach(), saved.weight.detach())


# Alignment (B110).

LENGTHS = [
    *(("uint8", n) for n in (1, 3, 7, 64, 65, 4096, 4097)),
    *(("bfloat16", n) for n in (1, 3, 5, 33)),
    *(("float32", n) for n in (1, 3, 17, 1025)),
    *(("float64", n) for n in (1, 3, 5)),
    *(("complex64", n) for n in (1, 3)),
    *(("complex128", n) for n in (1, 3)),
]


@pytest.fixture
def lengths(tmp_path) -> tuple[Path, dict[str, Any]]:
    """Tensors of odd lengths, in one file."""
    state = {
        f"{i}": torch.arange(n).to(getattr(torch, dtype)) for i, (dtype, n) in enumerate(LENGTHS)
    }
    dsd.save(tmp_path / "c", state)
    return tmp_path / "c", state


def test_each_payload_is_aligned_to_its_elements(lengths):
    path, state = lengths
    with dsdformat.open(path) as checkpoint:
        places = {entry.name: entry.chunks[0].byte_offset for entry in checkpoint}
    assert [name for name, at in places.items() if at % state[name].element_size()] == []


def test_payloads_of_whole_lines_are_aligned_to_64_bytes(lengths):
    path, _ = lengths
    with dsdformat.open(path) as checkpoint:
        whole = [entry for entry in checkpoint if entry.nbytes % 64 == 0]
        assert whole
        assert [entry.name for entry in whole if entry.chunks[0].byte_offset % 64] == []


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_tensors_of_odd_lengths_come_back(lengths, mmap):
    path, state = lengths
    assert_same(dsd.load(path, mmap=mmap), state)


def misaligned(tensors: dict[str, Any]) -> list[str]:
    return [name for name, w in tensors.items() if w.data_ptr() % w.element_size()]


@pytest.mark.parametrize(
    "mmap",
    [False, pytest.param(True)],
    ids=["read", "mapped"],
)
def test_each_new_tensor_is_aligned_to_its_elements(lengths, mmap):
    assert misaligned(dsd.load(lengths[0], mmap=mmap)) == []


USE = """
import sys, torch
import dsdformat.torch as dsd

torch.set_num_threads(1)
for name, tensor in dsd.load(sys.argv[1], mmap=True).items():
    tensor.clone()
    tensor.add_(1)
    tensor.sum()
print("alive")
"""


def test_maps_of_our_own_files_can_be_computed_with(tmp_path, run_python):
    dsd.save(tmp_path / "c", {"a": torch.ones(7).double(), "b": torch.ones(3).to(torch.complex128)})
    assert run_python(USE, tmp_path / "c").stdout == "alive\n"


FOREIGN = {
    "a": ("uint8", (3,)),
    "b": ("float32", (5,)),
    "c": ("int64", (2,)),
    "d": ("uint8", (1,)),
    "e": ("complex128", (3,)),
    "f": ("bfloat16", (7,)),
}


@pytest.fixture
def foreign(tmp_path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of another writer, which aligns nothing."""
    tensors = [declared(dtype, shape) for dtype, shape in FOREIGN.values()]
    tree = {name: ["tensor", index] for index, name in enumerate(FOREIGN)}
    file = DataFile(header_multiple=1, by_size_class=False)
    for label, data in build(Declared(tensors, tree, files=[file])).files.items():
        (tmp_path / label).write_bytes(data)
    wanted = {
        name: torch.frombuffer(bytearray(source.data), dtype=getattr(torch, source.dtype))
        for name, source in zip(FOREIGN, tensors, strict=True)
    }
    return tmp_path, wanted


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_a_file_that_aligns_nothing_comes_right(foreign, mmap):
    path, wanted = foreign
    with dsdformat.open(path) as checkpoint:
        assert any(entry.chunks[0].byte_offset % 4 for entry in checkpoint)
    assert_same(dsd.load(path, mmap=mmap), wanted)


@pytest.mark.parametrize(
    "mmap",
    [False, pytest.param(True)],
    ids=["read", "mapped"],
)
def test_new_tensors_are_aligned_whatever_the_file(foreign, mmap):
    assert misaligned(dsd.load(foreign[0], mmap=mmap)) == []


def test_maps_of_a_file_that_aligns_nothing_can_be_computed_with(foreign, run_python):
    assert run_python(USE, foreign[0]).stdout == "alive\n"
