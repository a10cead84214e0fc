"""DCP folders that lie about places, boxes or items: refused, and soon (B124).

Each starts from a folder that torch wrote, and changes one thing in the metadata or a file.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forge import COMMAND, PAYLOAD, call, name, pickled, plain, torch_zip
from samples import FORMS, needs_forms, written
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dsdformat import DsdError
from dsdformat.convert import open_foreign

WEIGHT = torch.arange(24.0).reshape(4, 6)
Change = Callable[[Metadata], None]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one tensor in two chunks, as two ranks write it, and one value."""
    root = tmp_path_factory.mktemp("honest")
    folder = root / "dcp"
    written({"a": WEIGHT[:2].clone(), "b": WEIGHT[2:].clone(), "step": 5}, folder)
    metadata = loaded(folder)
    size = torch.Size([4, 6])
    chunks = [chunk((0, 0), (2, 6)), chunk((2, 0), (2, 6))]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
    metadata.state_dict_metadata = {
        "w": tensor,
        "step": metadata.state_dict_metadata["step"],
    }
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    metadata.storage_data = {
        MetadataIndex("w", torch.Size([0, 0]), 0): places["a"],
        MetadataIndex("w", torch.Size([2, 0]), 1): places["b"],
        MetadataIndex("step"): places["step"],
    }
    metadata.planner_data = {"w": ("model", "w"), "step": ("step",)}
    store(folder, metadata)
    return folder


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def loaded(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def store(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 4))


def boxes(*pairs: tuple[tuple[int, ...], tuple[int, ...]], size: Any = (4, 6)) -> Change:
    def change(metadata: Metadata) -> None:
        tensor = metadata.state_dict_metadata["w"]
        tensor.chunks = [chunk(*pair) for pair in pairs]
        tensor.size = torch.Size(size)
        place = next(iter(metadata.storage_data.values()))
        for offsets, _ in pairs:
            index = MetadataIndex("w", torch.Size(offsets))
            metadata.storage_data.setdefault(index, place)

    return change


def place(**fields: Any) -> Change:
    def change(metadata: Metadata) -> None:
        index = next(iter(metadata.storage_data))
        old = metadata.storage_data[index]
        metadata.storage_data[index] = dataclasses.replace(old, **fields)

    return change


def field(attribute: str, value: Any) -> Change:
    return lambda metadata: setattr(metadata, attribute, value)


def paths(**paths: Any) -> Change:
    return lambda metadata: metadata.planner_data.update(paths)


def properties(**fields: Any) -> Change:
    def change(metadata: Metadata) -> None:
        for attribute, value in fields.items():
            setattr(metadata.state_dict_metadata["w"].properties, attribute, value)

    return change


def without(fqn: str) -> Change:
    def change(metadata: Metadata) -> None:
        for index in list(metadata.storage_data):
            if index.fqn == fqn:
                del metadata.storage_data[index]

    return change


def swapped(metadata: Metadata) -> None:
    """The value's item in the place of a chunk's."""
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = metadata.storage_data[MetadataIndex("step")]


class Touch:
    def __reduce__(self):
        import os

        return os.system, (COMMAND,)


HIDDEN: dict[str, Change] = {
    "planner-data": field("planner_data", Touch()),
    "storage-meta": field("storage_meta", Touch()),
    "version": field("version", Touch()),
}
EXTENSIONS = {
    "an-extension": (place(transform_descriptors=["zstd"]), "dcp_item"),
    "an-extension-that-is-none": (place(transform_descriptors=[5]), "pickle_value"),
}
if "transform_descriptors" not in inspect.signature(_StorageInfo).parameters:
    EXTENSIONS = {}  # the oldest torch has none
LIES: dict[str, tuple[Change, str]] = {
    "a-payload-as-an-entry": (field("state_dict_metadata", {"w": Touch()}), "pickle_value"),
    "a-payload-as-the-entries": (field("state_dict_metadata", Touch()), "pickle_value"),
    "a-payload-as-a-place": (field("storage_data", {MetadataIndex("w"): Touch()}), "pickle_value"),
    "a-payload-as-the-places": (field("storage_data", Touch()), "pickle_value"),
    "a-payload-as-a-path": (place(relative_path=Touch()), "pickle_value"),
    "a-payload-as-a-dtype": (properties(dtype=Touch()), "pickle_value"),
    "chunks-that-overlap": (boxes(((0, 0), (3, 6)), ((2, 0), (2, 6))), "dcp_chunks"),
    "chunks-that-are-the-same": (boxes(((0, 0), (2, 6)), ((0, 0), (2, 6))), "dcp_chunks"),
    "chunks-that-leave-a-hole": (boxes(((0, 0), (1, 6)), ((2, 0), (2, 6))), "dcp_chunks"),
    "chunks-that-overlap-and-leave-a-hole": (
        boxes(((0, 0), (2, 6)), ((1, 0), (2, 6))),
        "dcp_chunks",
    ),
    "no-chunks": (boxes(), "dcp_chunks"),
    "empty-chunks-alone": (boxes(((0, 0), (0, 6))), "dcp_chunks"),
    "a-chunk-outside-of-the-shape": (boxes(((0, 0), (4, 6)), ((4, 0), (1, 6))), "dcp_chunks"),
    "a-chunk-that-is-too-wide": (boxes(((0, 0), (4, 7))), "dcp_chunks"),
    "a-chunk-at-2-to-the-62": (boxes(((2**62, 0), (2, 6))), "dcp_chunks"),
    "a-chunk-of-2-to-the-62": (boxes(((0, 0), (2**62, 2**62))), "dcp_chunks"),
    "a-chunk-of-other-dims": (boxes(((0,), (24,))), "dcp_chunks"),
    "a-chunk-without-a-box": (boxes(((0, 0), (24,))), "dcp_chunks"),
    "a-shape-of-2-to-the-62": (boxes(((0, 0), (2, 6)), size=(2**62, 6)), "dcp_metadata"),
    "a-shape-of-100-dims": (boxes(size=(1,) * 100), "dcp_metadata"),
    "a-shape-below-zero": (boxes(size=(-4, 6)), "pickle_value"),
    "no-place-of-a-chunk": (without("w"), "dcp_metadata"),
    "no-place-of-a-value": (without("step"), "dcp_metadata"),
    "a-path-with-dots": (place(relative_path="../dcp/__0_0.distcp"), "foreign_path"),
    "a-path-of-dots": (place(relative_path=".."), "foreign_path"),
    "an-absolute-path": (place(relative_path="/etc/passwd"), "foreign_path"),
    "a-path-with-nul": (place(relative_path="a\0b"), "foreign_path"),
    "a-path-with-a-lone-surrogate": (place(relative_path="a\ud800"), "foreign_path"),
    "an-empty-path": (place(relative_path=""), "foreign_path"),
    "a-path-of-windows": (place(relative_path="c:\\x"), "foreign_path"),
    "a-path-that-is-none": (place(relative_path=5), "pickle_value"),
    "a-file-that-is-not-there": (place(relative_path="__9_9.distcp"), "missing_file"),
    "an-offset-beyond-the-file": (place(offset=2**40), "foreign_truncated"),
    "an-offset-below-zero": (place(offset=-1), "pickle_value"),
    "a-length-beyond-the-file": (place(length=2**40), "foreign_truncated"),
    "a-length-of-2-to-the-63": (place(length=2**63), "pickle_value"),
    **EXTENSIONS,
    "a-path-in-the-tree-that-is-empty": (paths(w=()), "dcp_metadata"),
    "a-path-in-the-tree-of-a-float": (paths(w=("a", 1.5)), "dcp_metadata"),
    "a-path-in-the-tree-of-a-number": (paths(w=(5,)), "dcp_metadata"),
    "a-path-in-the-tree-that-is-none": (paths(w="w"), "dcp_metadata"),
    "a-path-in-the-tree-of-1000-steps": (paths(w=("a",) * 1000), "dcp_metadata"),
    "paths-that-are-the-same": (paths(w=("a",), step=("a",)), "dcp_metadata"),
    "a-path-through-a-value": (paths(step=("a",), w=("a", "b")), "dcp_metadata"),
    "a-path-through-a-tensor": (paths(step=("a", "b"), w=("a",)), "dcp_metadata"),
    "a-list-and-a-dict-in-one-place": (paths(step=("a", 0), w=("a", "b")), "dcp_metadata"),
    "a-list-with-holes": (paths(step=("a", 0), w=("a", 2)), "dcp_metadata"),
    "a-list-of-2-to-the-60": (paths(w=("a", 2**60)), "dcp_metadata"),
    "a-list-below-zero": (paths(w=("a", -1)), "dcp_metadata"),
    "an-entry-that-is-no-string": (field("state_dict_metadata", {5: None}), "pickle_value"),
    "an-index-that-is-none": (field("storage_data", {"w": None}), "pickle_value"),
}
ITEMS: dict[str, tuple[Change, str]] = {
    "a-place-of-another-item": (swapped, "dcp_item"),
    "another-dtype": (properties(dtype=torch.int32), "dcp_item"),
    "a-wider-dtype": (properties(dtype=torch.float64), "dcp_item"),
    "another-shape": (boxes(((0, 0), (4, 6))), "dcp_item"),
    "a-length-that-is-shorter": (place(length=100), "archive_malformed"),
    "an-offset-within-the-item": (place(offset=1), "foreign_too_large"),
}


@pytest.fixture
def folder(honest: Path, tmp_path: Path) -> Path:
    shutil.copytree(honest, tmp_path / "dcp")
    return tmp_path / "dcp"


def test_the_folder_that_the_lies_start_from_is_read(folder):
    with open_foreign(folder) as foreign:
        assert foreign.tree["step"] == 5
        assert bytes(foreign.read("model/w")) == WEIGHT.numpy().tobytes()


@pytest.mark.parametrize("case", LIES)
def test_metadata_that_lie_are_refused_with_their_code(folder, refused, case):
    change, code = LIES[case]
    metadata = loaded(folder)
    change(metadata)
    store(folder, metadata)
    assert refused(lambda: open_foreign(folder)) == code


@pytest.mark.parametrize("case", ITEMS)
def test_items_that_are_not_what_the_metadata_say_are_refused_when_read(folder, refused, case):
    change, code = ITEMS[case]
    metadata = loaded(folder)
    change(metadata)
    store(folder, metadata)
    with open_foreign(folder) as foreign:
        assert refused(lambda: foreign.read("model/w")) == code


@pytest.mark.parametrize("case", HIDDEN)
def test_what_is_not_used_of_the_metadata_is_not_executed(folder, case):
    metadata = loaded(folder)
    HIDDEN[case](metadata)
    store(folder, metadata)
    with open_foreign(folder) as foreign:
        assert bytes(foreign.read(next(iter(foreign))[0])) == WEIGHT.numpy().tobytes()


METADATA: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "pickle_malformed"),
    "a-payload": (pickled(PAYLOAD), "dcp_metadata"),
    "a-payload-of-python": (pickle.dumps(Touch()), "dcp_metadata"),
    "a-dict": (pickled(plain({})), "dcp_metadata"),
    "a-name": (pickled(name("torch.distributed.checkpoint.metadata", "Metadata")), "dcp_metadata"),
    "no-state": (
        pickled(call(name("torch.distributed.checkpoint.metadata", "Metadata"))),
        "pickle_value",
    ),
    "arguments": (
        pickled(call(name("torch.distributed.checkpoint.metadata", "Metadata"), 1, 2)),
        "pickle_value",
    ),
    "a-getattr": (
        pickled(call(name("builtins", "getattr"), name("os", "path"), "system")),
        "dcp_metadata",
    ),
    "bytes-behind": (pickled(b"N") + b"x", "pickle_malformed"),
    "a-zip-file": (torch_zip(pickled(b"N")), "pickle_opcode"),
}


@pytest.mark.parametrize("case", METADATA)
def test_a_file_that_is_no_metadata_is_refused_with_its_code(folder, refused, case):
    data, code = METADATA[case]
    (folder / ".metadata").write_bytes(data)
    assert refused(lambda: open_foreign(folder)) == code


def test_every_item_of_a_value_is_read_with_the_closed_machine(folder, refused):
    """The item of a value is a file of torch.save, and may not call anything either."""
    item = torch_zip(pickled(PAYLOAD))
    (folder / "evil.distcp").write_bytes(item)
    metadata = loaded(folder)
    metadata.storage_data[MetadataIndex("step")] = _StorageInfo("evil.distcp", 0, len(item))
    store(folder, metadata)
    assert refused(lambda: open_foreign(folder)) == "unknown_global"


@pytest.mark.parametrize("data", [b"", b"x", bytes(64), pickled(PAYLOAD)], ids=range(4))
def test_an_item_of_a_value_that_is_no_file_of_torch_is_refused(folder, refused, data):
    (folder / "evil.distcp").write_bytes(data)
    metadata = loaded(folder)
    metadata.storage_data[MetadataIndex("step")] = _StorageInfo("evil.distcp", 0, len(data))
    store(folder, metadata)
    assert refused(lambda: open_foreign(folder)) == "dcp_item"


def test_many_chunks_are_checked_in_time(folder, refused):
    """Thousands of chunks of one tensor, of which two are the same."""
    count = 4000
    places = [((index, 0), (1, 6)) for index in range(count)]
    places[5] = places[4]
    metadata = loaded(folder)
    boxes(*places, size=(count, 6))(metadata)
    store(folder, metadata)
    assert refused(lambda: open_foreign(folder), peak=64 << 20) == "dcp_chunks"


@needs_forms
def test_an_item_of_safetensors_that_lacks_the_tensor_is_refused(tmp_path, refused):
    form = FORMS.SAFETENSORS
    folder = written(
        {"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "s", serialization_format=form
    )
    metadata = loaded(folder)
    metadata.state_dict_metadata["c"] = metadata.state_dict_metadata.pop("a")
    index = MetadataIndex("c", torch.Size([0]))
    metadata.storage_data[index] = metadata.storage_data[MetadataIndex("a", torch.Size([0]))]
    metadata.planner_data["c"] = ("c",)
    store(folder, metadata)
    with open_foreign(folder) as foreign:
        assert refused(lambda: foreign.read("c")) == "dcp_item"


def test_a_link_to_a_folder_or_a_pipe_is_not_read(folder):
    import os

    data = folder / "__0_0.distcp"
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(DsdError) as caught:
        open_foreign(folder)
    assert caught.value.code == "not_regular_file"
