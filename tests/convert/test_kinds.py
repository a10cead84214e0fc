"""What a path is, by its content alone; and what is not read says what to do instead (B132)."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from exactly import saved
from forge import Member, pickled, plain, zipped
from safetensors.torch import save, save_file
from samples import KINDS, ours

import dsdformat
from dsdformat import ConvertError, DsdError, FormatError
from dsdformat.convert import Kind, find_kind, open_foreign


def tar_of_old_torch() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        for name in ("storages", "tensors", "pickle"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    return out.getvalue()


def keras() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            file.writestr(name, b"{}")
    return out.getvalue()


def npy() -> bytes:
    out = io.BytesIO()
    np.save(out, np.zeros(3))
    return out.getvalue()


FILES: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "unknown_kind", "is empty"),
    "text": (b"hello world", "unknown_kind", "is of no kind"),
    "zeros": (bytes(4096), "unknown_kind", "is of no kind"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(64), "unsupported_kind", "a GGUF file"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(64), "unsupported_kind", "an HDF5 file"),
    "keras": (keras(), "unsupported_kind", "a Keras model"),
    "npy": (npy(), "unsupported_kind", "a .npy file"),
    "gzip": (b"\x1f\x8b\x08" + bytes(64), "unsupported_kind", "a gzip file"),
    "pickle": (pickled(plain({"a": 1})), "unsupported_kind", "is a pickle"),
    "tar": (tar_of_old_torch(), "unsupported_kind", "is a tar file"),
    "torch-export": (
        zipped([Member("e/models/model.json", b"{}"), Member("e/archive_format", b"pt2")]),
        "unsupported_kind",
        "a program of torch.export",
    ),
    "zip-of-text": (
        zipped([Member("a.txt", b"x")]),
        "unknown_kind",
        "is a zip file of no kind",
    ),
    "safetensors-and-a-zip": (
        save({"a": torch.ones(2)}) + keras(),
        "header_malformed",
        "bytes follow the last tensor",
    ),
    "a-pickle-in-safetensors": (
        # The length of the header spells the beginning of a pickle.
        b"\x80\x02}." + bytes(4) + b"{}",
        "unsupported_kind",
        "is a pickle",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_not_read_says_what_it_is(tmp_path, refused, case):
    data, code, text = FILES[case]
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    assert refused(lambda: open_foreign(path)) == code
    with pytest.raises(DsdError, match=text):
        open_foreign(path)


@pytest.mark.parametrize(
    "nbytes", [0x0280, 0x0380, 0x0480, 0x0580, 0x2E7D, 0x1F8B, 0x4B50], ids=hex
)
def test_a_safetensors_file_whose_length_spells_another_kind_is_one(tmp_path, nbytes):
    """A pickle of protocol 2 to 5, a dict of protocol 0, gzip, zip: none of them explains it."""
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    data = nbytes.to_bytes(8, "little") + text.ljust(nbytes).encode() + b"\0\0\x80\x3f" * 2
    (tmp_path / "file.pt").write_bytes(data)
    with open_foreign(tmp_path / "file.pt") as foreign:
        assert foreign.kind is Kind.SAFETENSORS
        assert bytes(foreign.read("a")) == data[-8:]


FOLDERS: dict[str, tuple[list[str], str, str]] = {
    "empty": ([], "unknown_kind", "is a folder of no kind"),
    "others": (["a.txt"], "unknown_kind", "is a folder of no kind"),
    "files-of-tensors": (["a.safetensors"], "unknown_kind", "such as a.safetensors"),
    "tensorflow": (["saved_model.pb"], "unsupported_kind", "TensorFlow"),
    "orbax": (["_METADATA", "manifest.ocdbt"], "unsupported_kind", "Orbax"),
    "deepspeed": (["zero_to_fp32.py", "latest"], "unsupported_kind", "DeepSpeed"),
    "dcp-of-ranks": (["__0.metadata", "__0_0.distcp"], "unsupported_kind", "each rank"),
    "dcp-and-a-model": ([".metadata", "model.safetensors"], "unknown_kind", "is both"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_not_read_says_what_it_is(tmp_path, case):
    names, code, text = FOLDERS[case]
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(save({"a": torch.ones(1)}))
    with pytest.raises(DsdError, match=text) as caught:
        open_foreign(folder)
    assert caught.value.code == code


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_is_found_whatever_the_name(tmp_path, kind):
    assert find_kind(KINDS[kind](tmp_path / "anything.bin")) is kind


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind is not Kind.DSD], ids=lambda kind: kind.name
)
def test_each_kind_has_one_face(tmp_path, kind):
    path = KINDS[kind](tmp_path / "anything.bin")
    with open_foreign(path) as foreign:
        assert foreign.kind is kind
        assert [(name, tensor.dtype, tensor.shape) for name, tensor in foreign] == [
            ("w", "float32", (2,))
        ]
        assert bytes(foreign.read("w", dsdformat.Box((1,), (1,)))) == b"\x00\x00\x80\x3f"
        with pytest.raises(dsdformat.EntryNotFoundError):
            foreign.read("x")
        with dsdformat.create(tmp_path / "out") as writer:
            writer.add(foreign.state())
    with dsdformat.open(tmp_path / "out") as checkpoint:
        assert bytes(checkpoint.read("w")) == b"\x00\x00\x80\x3f" * 2


def test_our_own_checkpoint_is_not_foreign(tmp_path):
    with pytest.raises(DsdError, match=r"dsdformat\.open") as caught:
        open_foreign(ours(tmp_path / "x"))
    assert caught.value.code == "unsupported_kind"


@pytest.mark.parametrize("name", ["missing", "missing/missing.pt"])
def test_a_path_that_does_not_exist_is_told(tmp_path, name):
    with pytest.raises(DsdError) as caught:
        open_foreign(tmp_path / name)
    assert caught.value.code == "missing_file"


def test_a_policy_that_is_not_known_is_refused(tmp_path):
    path = saved({"w": 1}, tmp_path / "x.pt")
    with pytest.raises(dsdformat.ArgumentError):
        open_foreign(path, unknown="ignore")


def test_files_are_closed_when_opening_fails(tmp_path, count_descriptors):
    path = tmp_path / "x.pt"
    path.write_bytes(saved({"w": 1}, path).read_bytes()[:-1])
    before = count_descriptors()
    for _ in range(5):
        with pytest.raises(DsdError):
            open_foreign(path)
    assert count_descriptors() == before


# Hugging Face folders


def indexed(folder: Path, weight_map: dict[str, str], **files: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    text = json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


ONE, TWO = {"a": torch.ones(2)}, {"b": torch.zeros(2)}


def test_a_folder_with_an_index_is_read(tmp_path):
    folder = indexed(
        tmp_path / "x", {"a": "one.safetensors", "b": "two.safetensors"}, one=ONE, two=TWO
    )
    with open_foreign(folder) as foreign:
        assert foreign.kind is Kind.SAFETENSORS_FOLDER
        assert [name for name, _ in foreign] == ["a", "b"]
        assert bytes(foreign.read("a")) == torch.ones(2).numpy().tobytes()


INDEXES: dict[str, tuple[dict[str, object], str]] = {
    "a-tensor-that-is-not-there": (
        {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
        "index_malformed",
    ),
    "a-tensor-in-another-file": (
        {"a": "two.safetensors", "b": "two.safetensors"},
        "index_malformed",
    ),
    "a-tensor-that-is-not-listed": ({"a": "one.safetensors"}, "none"),
    "a-file-that-is-not-there": (
        {"a": "one.safetensors", "b": "three.safetensors"},
        "missing_file",
    ),
    "a-file-outside": ({"a": "../one.safetensors"}, "foreign_path"),
    "a-file-of-an-absolute-path": ({"a": "/etc/passwd"}, "foreign_path"),
    "a-file-through-a-folder": ({"a": "a/../../one.safetensors"}, "foreign_path"),
    "a-file-of-windows": ({"a": "C:\\one"}, "foreign_path"),
    "a-file-with-nul": ({"a": "one\0"}, "foreign_path"),
    "a-file-with-a-lone-surrogate": ({"a": "one\ud800"}, "header_malformed"),
    "a-file-without-a-name": ({"a": ""}, "foreign_path"),
    "the-folder-itself": ({"a": "."}, "foreign_path"),
    "a-file-that-is-a-number": ({"a": 5}, "index_malformed"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_does_not_agree_with_its_files_is_refused(tmp_path, refused, case):
    """B118, B126."""
    weight_map, code = INDEXES[case]
    save_file(ONE, tmp_path / "one.safetensors")
    both = {"a": torch.ones(2), "x": torch.ones(1)} if code == "none" else ONE
    folder = indexed(tmp_path / "x", weight_map, one=both, two=TWO)
    expected = "index_malformed" if code == "none" else code
    assert refused(lambda: open_foreign(folder)) == expected


# B118
@pytest.mark.parametrize("link", [False, True], ids=["absent", "a-link-to-nothing"])
def test_files_of_an_index_that_are_not_there_are_named_with_their_tensors(tmp_path, link):
    weight_map = {"a": "one.safetensors", **{f"b{n}": f"{n % 2}.safetensors" for n in range(7)}}
    folder = indexed(tmp_path / "x", weight_map, one=ONE)
    if link:
        (folder / "0.safetensors").symlink_to(tmp_path / "gone" / "0.safetensors")
    with pytest.raises(FormatError) as caught:
        open_foreign(folder)
    assert caught.value.code == "missing_file"
    named = "0.safetensors, 1.safetensors are not there, and should have b0, b1, b2, b3, b4 and 2"
    assert named in str(caught.value)


# B118
def test_a_tensor_that_its_file_lacks_is_named(tmp_path):
    folder = indexed(tmp_path / "x", {"a": "one.safetensors", "b": "one.safetensors"}, one=ONE)
    with pytest.raises(ConvertError, match="b are in the index, and not in their files"):
        open_foreign(folder)


def test_a_folder_of_torch_files_with_an_index_is_read(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    saved(ONE, folder / "one.bin")
    saved(TWO, folder / "two.bin", zipped=False)
    text = json.dumps({"weight_map": {"a": "one.bin", "b": "two.bin"}})
    (folder / "pytorch_model.bin.index.json").write_text(text)
    with open_foreign(folder) as foreign:
        assert foreign.kind is Kind.TORCH_FOLDER
        assert bytes(foreign.read("b")) == bytes(8)


def test_a_model_of_transformers_is_read(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "x", max_shard_size="5KB")
    expected = model.state_dict()
    with open_foreign(tmp_path / "x") as foreign:
        assert {name for name, _ in foreign} == set(expected)
        for name, tensor in foreign:
            assert bytes(tensor.read()) == expected[name].numpy().tobytes()
