"""A checkpoint of ours goes through the face that converters know without a change."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from exactly import digest_of

import dsdformat
import dsdformat.numpy
import dsdformat.torch as dsd
from dsdformat.convert import Kind, find_kind, open_any, open_foreign
from dsdformat.format.manifest import Mesh
from dsdformat.sources import TensorSource


def rich_state():
    table = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    return {
        "model": OrderedDict(
            a=table, tied=table, turned=table.t(), empty=torch.empty(0, 3), scalar=torch.tensor(7)
        ),
        "fp8": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "array": np.arange(5),
        "last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "sparse": torch.eye(3).to_sparse(),
        "values": {"dtype": torch.bfloat16, "size": torch.Size([1, 2]), "one": np.float32(1.5)},
        "more": [(1, 2.0, None), {"x"}, b"raw", {3: "three"}],
    }


def test_a_checkpoint_of_ours_is_the_same_when_it_is_written_again(tmp_path):
    root = dsd.save(tmp_path / "a", rich_state())
    assert find_kind(tmp_path / "a") is Kind.DSD
    with open_any(tmp_path / "a") as opened:
        assert opened.kind is Kind.DSD
        assert digest_of(opened, tmp_path / "b") == root
        opened.verify()


def test_any_box_is_read_as_it_is_from_a_foreign_file(tmp_path):
    weight = torch.arange(60, dtype=torch.int16).reshape(5, 12)
    dsd.save(tmp_path / "a", {"w": weight})
    torch.save({"w": weight}, tmp_path / "b.pt")
    box = dsdformat.Box((1, 3), (3, 5))
    expected = weight[1:4, 3:8].contiguous().numpy().tobytes()
    for name in ("a", "b.pt"):
        with open_any(tmp_path / name) as opened:
            assert [one for one, _ in opened] == ["w"]
            assert bytes(opened.read("w", box)) == expected


def test_tied_names_are_paths_of_one_tensor(tmp_path):
    dsd.save(tmp_path / "a", rich_state())
    with open_any(tmp_path / "a") as opened:
        tensor = opened.tensor("model/tied")
        assert opened.paths(tensor) == [("model", "a"), ("model", "tied")]


def test_what_several_ranks_wrote_becomes_whole_tensors_of_one(tmp_path):
    rows = np.arange(12, dtype=np.int32).reshape(6, 2)
    layout = (Mesh(("fsdp",), (2,), (0, 1)), ("shard(0)",))
    writer = dsdformat.create(tmp_path / "a", world_size=2)
    other = dsdformat.Writer.join(writer.staging, rank=1, world_size=2)
    for one, first in ((writer, 0), (other, 3)):
        box = dsdformat.Box((first, 0), (3, 2))
        data = rows[first : first + 3]
        one.add({"w": TensorSource("int32", (6, 2), [(box, data)], layout=layout)})
    writer.commit([other.finish()])
    with open_any(tmp_path / "a") as opened:
        root = digest_of(opened, tmp_path / "b")
    assert root == dsdformat.numpy.save(tmp_path / "c", {"w": rows})


def test_a_damaged_block_is_told_while_it_is_converted(tmp_path):
    dsd.save(tmp_path / "a", {"w": torch.ones(4096)})
    path: Path = tmp_path / "a" / "data.safetensors"
    path = path if path.exists() else next((tmp_path / "a").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with open_any(tmp_path / "a") as opened:
        with pytest.raises(dsdformat.ChecksumError) as caught:
            digest_of(opened, tmp_path / "b")
        assert caught.value.code == "checksum_mismatch"
        with pytest.raises(dsdformat.ChecksumError):
            opened.verify()
    assert not (tmp_path / "b").exists()


def test_only_the_call_for_any_kind_opens_ours(tmp_path):
    dsd.save(tmp_path / "a", {"w": torch.ones(2)})
    with pytest.raises(dsdformat.ConvertError) as caught:
        open_foreign(tmp_path / "a")
    assert caught.value.code == "unsupported_kind"
    assert "open_any" in caught.value.hint
