"""Writing: sources of any form, what is refused, and that a failed save leaves nothing."""

from __future__ import annotations

import array
import json
import mmap
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dsdformat
from dsdformat import (
    ArgumentError,
    Box,
    DsdError,
    MismatchError,
    StorageError,
    TensorSource,
    UnsupportedValueError,
    Writer,
)
from dsdformat.format.manifest import Mesh
from dsdformat.limits import DEPTH_MAX
from dsdformat.storage.memory import MemoryStorage, MemoryTarget
from dsdformat.verify import verify_storage
from dsdformat.writer import PartWriter

DATA = bytes(index % 251 for index in range(20_000))


@pytest.fixture
def files() -> dict[str, bytearray]:
    """Where `writer` puts its files."""
    return {}


@pytest.fixture
def writer(files) -> Writer:
    return Writer(MemoryTarget(files), threads=1, block_nbytes=4096)


def checked(files: dict[str, bytearray]) -> dsdformat.Checkpoint:
    verify_storage(MemoryStorage(files), threads=1).raise_if_bad()
    return dsdformat.Checkpoint(MemoryStorage(files), threads=1)


# What holds the bytes


def as_memoryview(data: bytes) -> memoryview:
    return memoryview(data)


def as_map(data: bytes) -> mmap.mmap:
    made = mmap.mmap(-1, len(data))
    made.write(data)
    return made


def as_array(data: bytes) -> array.array[float]:
    return array.array("f", data)


def as_two_dims(data: bytes) -> memoryview:
    return memoryview(data).cast("B", (4, len(data) // 4))


def streamed(step: int) -> Callable[[bytes], Callable[[], Iterator[bytes]]]:
    def source(data: bytes) -> Callable[[], Iterator[bytes]]:
        return lambda: (data[at : at + step] for at in range(0, len(data), step))

    return source


def with_empty_pieces(data: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter([b"", data[:5000], b"", b"", data[5000:], b""])


def in_one_buffer_again_and_again(data: bytes) -> Callable[[], Iterator[bytearray]]:
    """A source that hands out its own buffer each time, as a copy from a device may."""

    def pieces() -> Iterator[memoryview]:
        buffer = bytearray(1000)
        for at in range(0, len(data), 1000):
            buffer[:] = data[at : at + 1000]
            yield memoryview(buffer)
            buffer[:] = bytes(1000)

    return pieces


HOLDERS = [
    pytest.param(bytes, id="bytes"),
    pytest.param(bytearray, id="bytearray"),
    as_memoryview,
    as_map,
    as_array,
    as_two_dims,
    pytest.param(streamed(1), id="bytes-one-by-one"),
    pytest.param(streamed(4095), id="pieces-of-4095"),
    pytest.param(streamed(4096), id="pieces-of-a-block"),
    pytest.param(streamed(4097), id="pieces-of-4097"),
    pytest.param(streamed(20_000), id="one-piece"),
    with_empty_pieces,
    in_one_buffer_again_and_again,
]


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes+zstd"])
@pytest.mark.parametrize("hold", HOLDERS)
def test_bytes_are_written_from_whatever_holds_them(writer, files, hold, codec):
    writer.add_tensor("w", hold(DATA), dtype="float32", shape=(5000,), codec=codec)
    writer.commit()
    with checked(files) as checkpoint:
        assert bytes(checkpoint.read("w")) == DATA


def test_a_function_may_give_a_list(writer, files):
    writer.add_tensor("w", lambda: [b"ab", b"cd"], dtype="uint8", shape=(4,))
    writer.commit()
    assert bytes(checked(files).read("w")) == b"abcd"


def test_a_function_is_called_once_and_not_before_the_commit(writer):
    calls: list[int] = []

    def source() -> list[bytes]:
        calls.append(1)
        return [b"abcd"]

    writer.add_tensor("w", source, dtype="uint8", shape=(4,))
    assert calls == []
    writer.commit()
    assert calls == [1]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("nbytes", [19_999, 20_001, 0, 4096, 30_000])
@pytest.mark.parametrize("hold", [bytes, streamed(1000)], ids=["buffer", "function"])
def test_a_wrong_number_of_bytes_is_refused(writer, files, hold, nbytes, codec):
    data = (DATA * 2)[:nbytes]
    writer.add_tensor("model.w", hold(data), dtype="float32", shape=(5000,), codec=codec)
    with pytest.raises(MismatchError, match=r"^model\.w: .*need 20000") as error:
        writer.commit()
    assert error.value.code == "data_mismatch"
    assert files == {}


@pytest.mark.parametrize("block_nbytes", [4096, 8192, 65_536, 2**22])
@pytest.mark.parametrize("hold", [bytes, streamed(777)], ids=["buffer", "function"])
def test_small_tensors_of_any_number_of_blocks_lie_side_by_side(files, hold, block_nbytes):
    """4,096 and 8,192 bytes are of one size class, and keep their order in the file."""
    writer = Writer(MemoryTarget(files), threads=1, block_nbytes=block_nbytes)
    sizes = [4096, 8192, 4096, 16_384, 4096]
    for index, nbytes in enumerate(sizes):
        data = bytes([index]) * nbytes
        writer.add_tensor(f"w{index}", hold(data), dtype="uint8", shape=(nbytes,))
    writer.commit()
    with checked(files) as checkpoint:
        for index, nbytes in enumerate(sizes):
            assert bytes(checkpoint.read(f"w{index}")) == bytes([index]) * nbytes


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(5, id="number"),
        pytest.param("text", id="text"),
        pytest.param(None, id="none"),
        pytest.param([1, 2, 3, 4], id="list"),
        pytest.param(memoryview(bytes(8))[::2], id="not-contiguous"),
        pytest.param(lambda: [1], id="function-that-gives-numbers"),
    ],
)
def test_what_holds_no_bytes_is_refused(writer, files, data):
    writer.add_tensor("model.w", data, dtype="uint8", shape=(4,))
    with pytest.raises(ArgumentError, match=r"^model\.w: ") as error:
        writer.commit()
    assert error.value.code == "bad_argument"
    assert files == {}


def test_an_error_of_a_source_is_raised_as_it_is_and_nothing_is_left(tmp_path):
    class DeviceLostError(Exception):
        pass

    def broken() -> Iterator[bytes]:
        yield DATA[:5000]
        raise DeviceLostError

    writer = dsdformat.create(tmp_path / "c", threads=2)
    writer.add_tensor("a", DATA, dtype="uint8", shape=(20_000,))
    writer.add_tensor("w", broken, dtype="uint8", shape=(20_000,))
    with pytest.raises(DeviceLostError):
        writer.commit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dtype", "shape", "kind", "code"),
    [
        pytest.param("float33", (1,), UnsupportedValueError, "unsupported_dtype", id="dtype"),
        pytest.param("torch.float32", (1,), UnsupportedValueError, "unsupported_dtype", id="torch"),
        pytest.param(
            "float32",
            (-1,),
            ArgumentError,
            "bad_argument",
            id="negative",
        ),
        pytest.param("float32", (2**63,), ArgumentError, "bad_argument", id="dim"),
        pytest.param("float32", (2**31, 2**31), ArgumentError, "bad_argument", id="product"),
        pytest.param("float32", (2**62, 2, 0), ArgumentError, "bad_argument", id="nonzero-product"),
        pytest.param("uint8", (1,) * 65, ArgumentError, "bad_argument", id="dims"),
    ],
)
def test_a_dtype_or_shape_that_the_format_does_not_have_is_refused(
    writer, dtype, shape, kind, code
):
    with pytest.raises(kind) as error:
        writer.add_tensor("w", b"", dtype=dtype, shape=shape)
    assert error.value.code == code


def test_64_dims_and_the_longest_shape_are_accepted(writer, files):
    writer.add_tensor("many", b"a", dtype="uint8", shape=(1,) * 64)
    writer.add_tensor("empty", b"", dtype="uint8", shape=(2**63 - 1, 0))
    writer.commit()
    assert checked(files).tensor("empty").shape == (2**63 - 1, 0)


# Boxes


def test_boxes_of_one_tensor_may_be_added_one_after_another(writer, files):
    for at in (8, 0, 4):
        box = Box((at,), (4,))
        writer.add_tensor("w", bytes([at] * 4), dtype="uint8", shape=(12,), box=box)
    writer.commit()
    with checked(files) as checkpoint:
        assert bytes(checkpoint.read("w")) == bytes([0] * 4 + [4] * 4 + [8] * 4)
        assert [chunk.box.offset for chunk in checkpoint.tensor("w").chunks] == [(0,), (4,), (8,)]


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        pytest.param([], "no writer has a chunk of it", id="none"),
        pytest.param([(0, 4), (8, 4)], "4 of 12 elements were written by no one", id="hole"),
        pytest.param([(0, 8), (4, 8)], "written more than once", id="overlap"),
        pytest.param([(0, 8), (0, 4)], "written more than once", id="same-begin"),
        pytest.param([(0, 12), (0, 12)], "written more than once", id="twice"),
    ],
)
def test_boxes_that_do_not_tile_the_tensor_are_refused(writer, files, boxes, said):
    chunks = [(Box((at,), (n,)), bytes(n)) for at, n in boxes]
    writer.add({"model": {"w": TensorSource("uint8", (12,), chunks)}})
    with pytest.raises(MismatchError, match=f"^model/w: .*{said}") as error:
        writer.commit()
    assert error.value.code == "chunks_incomplete"
    assert files == {}


def test_more_than_eight_cut_dims_are_refused(writer):
    shape = (2,) * 9
    corner = Box((0,) * 9, (1,) * 9)
    writer.add({"w": TensorSource("uint8", shape, [(corner, b"a")])})
    with pytest.raises(MismatchError, match="at most 8"):
        writer.commit()


def test_a_box_outside_of_the_shape_is_refused(writer):
    with pytest.raises(ArgumentError) as error:
        writer.add_tensor("w", b"abcd", dtype="uint8", shape=(4,), box=Box((1,), (4,)))
    assert error.value.code == "box_out_of_bounds"


def test_empty_boxes_of_a_tensor_are_left_out(writer, files):
    chunks = [(Box((0,), (0,)), b""), (Box((0,), (4,)), b"abcd"), (Box((4,), (0,)), b"")]
    writer.add({"w": TensorSource("uint8", (4,), chunks)})
    writer.commit()
    assert len(checked(files).tensor("w").chunks) == 1


# The state


def test_dicts_that_are_added_are_united(writer, files):
    writer.add({"a": {"x": 1}, "b": 2})
    writer.add({"a": {"y": [3]}})
    writer.add_value(("a", "z", "deep"), 4)
    writer.add_value("c/d", 5)
    writer.commit()
    assert checked(files).tree() == {
        "a": {"x": 1, "y": [3], "z": {"deep": 4}},
        "b": 2,
        "c/d": 5,
    }


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        pytest.param({"a": 1}, {"a": 1}, r"\$\.a", id="value-twice"),
        pytest.param({"a": {"b": 1}}, {"a": {"b": {"c": 1}}}, r"\$\.a\.b", id="value-and-dict"),
        pytest.param({"a": [1]}, {"a": [2]}, r"\$\.a", id="lists"),
        pytest.param({"a": {"b c": 1}}, {"a": {"b c": 2}}, r"\$\.a\['b c'\]", id="odd-key"),
    ],
)
def test_a_path_cannot_be_added_twice(writer, first, second, path):
    writer.add(first)
    with pytest.raises(MismatchError, match=f"^{path} was added twice") as error:
        writer.add(second)
    assert error.value.code == "state_conflict"


def test_one_tensor_cannot_be_added_with_two_shapes(writer):
    writer.add_tensor("w", b"ab", dtype="uint8", shape=(4,), box=Box((0,), (2,)))
    with pytest.raises(MismatchError, match="added twice"):
        writer.add_tensor("w", b"cd", dtype="uint8", shape=(2, 2), box=Box((1, 0), (1, 2)))


def test_one_source_at_two_places_is_stored_once(writer, files):
    source = writer.add_tensor(("model", "in"), DATA, dtype="uint8", shape=(20_000,))
    writer.add({"model": {"out": source}})
    writer.commit()
    with checked(files) as checkpoint:
        assert len(checkpoint) == 1
        assert checkpoint.tensor("model/in").paths == [("model", "in"), ("model", "out")]
    assert len(files["model.safetensors"]) == 4096 + 20_000


def test_equal_sources_at_two_places_are_two_tensors(writer, files):
    writer.add(
        {"a": TensorSource.of("uint8", (1,), b"x"), "b": TensorSource.of("uint8", (1,), b"x")}
    )
    writer.commit()
    assert len(checked(files)) == 2


def test_an_ordered_dict_is_a_root_too(writer, files):
    writer.add(OrderedDict([("b", 1), ("a", TensorSource.of("uint8", (1,), b"x"))]))
    writer.commit()
    assert list(checked(files).tree()) == ["b", "a"]


NO_STATES = [
    pytest.param([1], id="list"),
    pytest.param({1: 2}, id="keys-of-numbers"),
    pytest.param(OrderedDict([(1, 2)]), id="odict-of-numbers"),
    pytest.param("abc", id="text"),
    pytest.param((), id="tuple"),
    pytest.param(TensorSource.of("uint8", (1,), b"x"), id="tensor"),
    pytest.param(5, id="number"),
    pytest.param(None, id="none"),
    pytest.param(2.5, id="float"),
]


@pytest.mark.parametrize("state", NO_STATES)
def test_a_state_that_is_no_dict_of_text_is_refused(writer, state):
    with pytest.raises(ArgumentError, match="string keys") as error:
        writer.add(state)
    assert error.value.code == "bad_argument"


@pytest.mark.parametrize("path", [(), []], ids=repr)
def test_a_path_has_at_least_one_key(writer, path):
    with pytest.raises(ArgumentError, match="at least one key"):
        writer.add_value(path, 1)


def test_a_state_without_anything_is_a_checkpoint(writer, files):
    writer.commit()
    with checked(files) as checkpoint:
        assert (checkpoint.tree(), len(checkpoint), list(files)) == ({}, 0, ["manifest.dsd"])


def test_an_unsupported_value_is_refused_before_anything_is_written(tmp_path):
    calls: list[int] = []
    writer = dsdformat.create(tmp_path / "c")
    writer.add_tensor("a", lambda: calls.append(1), dtype="uint8", shape=(1,))
    writer.add({"scheduler": {"lr_lambdas": [lambda epoch: epoch]}})
    with pytest.raises(UnsupportedValueError) as error:
        writer.commit()
    assert error.value.path_in_tree == "$.scheduler.lr_lambdas[0]"
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def below(levels: int, value: object) -> dict[str, object]:
    for _ in range(levels):
        value = {"k": value}
    return value


def test_the_deepest_state_is_written_and_read(save, load, problems_of):
    """127 dicts: the body's own map is the 128th level."""
    files = save(below(DEPTH_MAX - 1, 5))
    assert problems_of(files) == []
    with load(files) as checkpoint:
        assert checkpoint.tree() == below(DEPTH_MAX - 1, 5)


def test_a_state_that_is_one_level_deeper_is_refused(writer):
    writer.add({"k": below(DEPTH_MAX - 1, {})})
    with pytest.raises(UnsupportedValueError) as error:
        writer.commit()
    assert error.value.code == "value_too_deep"


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param(DEPTH_MAX - 2, id="deepest"),
        pytest.param(
            DEPTH_MAX - 1,
            id="too-deep",
        ),
    ],
)
def test_a_tensor_at_any_depth_is_readable_or_refused(save, load, levels):
    try:
        files = save(below(levels, TensorSource.of("uint8", (1,), b"x")))
    except UnsupportedValueError:
        return
    with load(files) as checkpoint:
        assert bytes(checkpoint.read(("k",) * levels)) == b"x"


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param(DEPTH_MAX - 4, id="deepest"),
        pytest.param(
            DEPTH_MAX - 3,
            id="too-deep",
        ),
    ],
)
def test_attributes_at_any_depth_are_readable_or_refused(save, load, levels):
    source = TensorSource.of("uint8", (1,), b"x", attributes={"dim_order": [0]})
    try:
        files = save(below(levels, source))
    except UnsupportedValueError:
        return
    with load(files) as checkpoint:
        assert bytes(checkpoint.read(("k",) * levels)) == b"x"


# Codecs


def test_a_codec_may_depend_on_the_name(files):
    asked: list[str] = []

    def codec(name: str) -> str:
        asked.append(name)
        return "planes+zstd" if name.startswith("optimizer/") else "raw"

    writer = Writer(MemoryTarget(files), codec=codec, threads=1)
    writer.add_tensor(("optimizer", "m"), bytes(400), dtype="float32", shape=(100,))
    writer.add_tensor(("model", "w"), bytes(400), dtype="float32", shape=(100,))
    writer.add_tensor(("model", "z"), bytes(400), dtype="float32", shape=(100,), codec="zstd")
    writer.commit()
    with checked(files) as checkpoint:
        found = {entry.name: entry.chunks[0].codec for entry in checkpoint}
    assert found == {"optimizer/m": "planes+zstd", "model/w": "raw", "model/z": "zstd"}
    assert sorted(asked) == ["model/w", "optimizer/m"]


def test_planes_of_one_byte_are_zstd(save, load):
    files = save({"w": TensorSource.of("uint8", (9000,), bytes(9000))}, codec="planes+zstd")
    with load(files) as checkpoint:
        assert checkpoint.tensor("w").chunks[0].codec == "zstd"


@pytest.mark.parametrize("codec", ["lz4", "", "RAW", lambda name: "lz4", lambda name: None])
def test_a_codec_that_is_none_is_refused(files, codec):
    writer = Writer(MemoryTarget(files), codec=codec, threads=1)
    writer.add_tensor("w", b"a", dtype="uint8", shape=(1,))
    with pytest.raises(ArgumentError, match="choose one of raw, zstd, planes") as error:
        writer.commit()
    assert error.value.code == "bad_argument"
    assert files == {}


# B122
def test_noise_is_stored_raw_though_a_codec_is_asked_for(save, load, rng):
    noise = rng.randbytes(50_000)
    files = save({"w": TensorSource.of("uint8", (50_000,), noise)}, codec="zstd")
    with load(files) as checkpoint:
        assert checkpoint.tensor("w").chunks[0].stored_nbytes == 50_000


@pytest.mark.parametrize("codec", ["zstd", "planes+zstd"])
def test_blocks_of_many_chunks_are_compressed_together_and_lie_in_their_order(codec, rng):
    """Small ones share a task, large ones have several; threads change no byte."""
    sizes = [0, 1, 700, 2047, 2048, 2049, 30_000, 3, 600_000, 5, 9000]
    contents = {
        f"t{number:02}": (
            bytes(2 * size - size // 2 * 2) + rng.randbytes(size // 2 * 2)
            if number % 2
            else bytes(index % 5 for index in range(2 * size))
        )
        for number, size in enumerate(sizes * 3)
    }
    found = []
    for threads in (1, 3):
        files: dict[str, bytearray] = {}
        writer = Writer(MemoryTarget(files), codec=codec, threads=threads, block_nbytes=4096)
        for name, data in contents.items():
            shape = (len(data) // 2,)
            writer.add_tensor(("model", name), data, dtype="bfloat16", shape=shape)
        writer.commit()
        found.append(files)
    assert found[0] == found[1]
    with checked(found[0]) as checkpoint:
        for name, data in contents.items():
            assert checkpoint.tensor(f"model/{name}").read() == data
        places = [entry.chunks[0] for entry in checkpoint if entry.chunks[0].codec == codec]
    ends = [chunk.byte_offset + chunk.stored_nbytes for chunk in places]
    assert [chunk.byte_offset for chunk in places[1:]] == ends[:-1]


def test_raw_chunks_are_aligned_beside_compressed_ones(save, load):
    """B110: what is mapped begins at a multiple of its size class."""
    state = {
        "a": TensorSource.of("float32", (4096,), bytes(16_384), codec="zstd"),
        "b": TensorSource.of("float32", (2048,), bytes(8192)),
        "c": TensorSource.of("float64", (3,), bytes(24)),
    }
    with load(save(state)) as checkpoint:
        places = {e.name: e.chunks[0].byte_offset for e in checkpoint}
    assert (places["b"] % 4096, places["c"] % 8) == (0, 0)


# Options


@pytest.mark.parametrize("block_nbytes", [0, 1, 2048, 4095, 4097, 12_288, 2**27, -4096])
def test_a_block_size_that_the_format_does_not_have_is_refused(tmp_path, block_nbytes):
    with pytest.raises(ArgumentError, match="power of two from 4 KiB to 64 MiB"):
        dsdformat.create(tmp_path / "c", block_nbytes=block_nbytes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rank", "world_size"), [(0, 0), (1, 1), (-1, 1), (5, 4)])
def test_a_rank_that_is_none_is_refused(rank, world_size):
    with pytest.raises(ArgumentError, match=f"rank {rank} of {world_size}"):
        PartWriter(MemoryTarget({}), rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    "user",
    [{"a": 1}, {1: "a"}, {"a": None}, {"a": b"x"}, {"a": {"b": "c"}}, {"a": 10**5000}],
    ids=["number", "key", "none", "bytes", "dict", "long-number"],
)
def test_user_metadata_maps_text_to_text(tmp_path, user):
    with pytest.raises(ArgumentError, match="maps strings to strings") as error:
        dsdformat.create(tmp_path / "c", user=user)
    assert "state" in (error.value.hint or "")
    assert list(tmp_path.iterdir()) == []


def test_user_metadata_is_kept(save, load):
    user = {"": "empty", "é": "\n", "a": "x" * 1000}
    with load(save({}, user=user)) as checkpoint:
        assert checkpoint.user == user


UNSEEN_TEXT = [
    pytest.param({"user": {"a": "\ud800"}}, id="user-surrogate"),
    pytest.param({"user": {"\ud800": "a"}}, id="user-key-surrogate"),
    pytest.param({"metadata": {"a": "\ud800"}}, id="metadata-surrogate"),
    pytest.param({"metadata": {"a": 1}}, id="metadata-number"),
    pytest.param({"metadata": {1: "a"}}, id="metadata-key-number"),
]


@pytest.mark.parametrize("options", UNSEEN_TEXT)
def test_text_that_cannot_be_written_is_refused_at_the_beginning(options):
    with pytest.raises(ArgumentError):
        Writer(MemoryTarget({}), **options)


def test_metadata_goes_into_the_headers(save):
    files = save({"w": TensorSource.of("uint8", (1,), b"a")}, metadata={"b": "2", "a": "1"})
    header = json.loads(files["model.safetensors"][8:4096])
    assert header["__metadata__"] == {"a": "1", "b": "2"}


# spec
def test_metadata_is_what_other_loaders_look_for_unless_asked(save):
    files = save({"w": TensorSource.of("uint8", (1,), b"a")})
    assert json.loads(files["model.safetensors"][8:4096])["__metadata__"] == {"format": "pt"}


def test_a_data_file_is_a_safetensors_file(small_files, small_tensors):
    safetensors = pytest.importorskip("safetensors")
    entries = dict(safetensors.deserialize(small_files["model.safetensors"]))
    assert bytes(entries["raw"]["data"]) == small_tensors["model/raw"]
    assert entries["raw"]["shape"] == [4100]
    assert entries["text@zstd"]["dtype"] == "U8"


# Provenance


BAD_LAYOUTS = [
    pytest.param(Mesh(("x",), (2,), (0,)), ("replicate",), id="mesh-of-too-few-ranks"),
    pytest.param(Mesh(("x",), (1,), (5,)), ("replicate",), id="rank-beyond-the-world"),
    pytest.param(Mesh(("x",), (1,), (0,)), ("broken",), id="placement"),
    pytest.param(Mesh(("x",), (1,), (0,)), (), id="no-placement"),
]


@pytest.mark.parametrize(("mesh", "placements"), BAD_LAYOUTS)
def test_a_layout_that_a_reader_would_refuse_is_refused_at_save(writer, mesh, placements):
    def attempt() -> None:
        writer.add({"w": TensorSource.of("uint8", (1,), b"a", layout=(mesh, placements))})
        writer.commit()

    with pytest.raises(DsdError):
        attempt()


def test_a_layout_is_kept(save, load):
    layout = (Mesh(("dp", "tp"), (1, 1), (0,)), ("replicate", "strided_shard(0,2)"))
    source = TensorSource.of("uint8", (1,), b"a", layout=layout)
    with load(save({"a": source, "b": TensorSource.of("uint8", (1,), b"b")})) as checkpoint:
        assert checkpoint.tensor("a").placements == layout
        assert checkpoint.tensor("b").placements is None


# Side files


def test_a_side_file_is_kept_and_pinned_by_the_root_digest(tmp_path):
    roots = []
    for index, text in enumerate([b"{}", b"{ }"]):
        with dsdformat.create(tmp_path / str(index)) as writer:
            writer.add_file("config.json", text)
        roots.append(writer.root)
        assert (tmp_path / str(index) / "config.json").read_bytes() == text
        with dsdformat.open(tmp_path / str(index)) as checkpoint:
            assert checkpoint.side_files == {"config.json": len(text)}
    assert roots[0] != roots[1]


@pytest.mark.parametrize(
    "label",
    [
        "manifest.dsd",
        "MANIFEST.DSD",
        "a.safetensors",
        "../x",
        "a/b",
        ".hidden",
        "",
        "x" * 201,
        "a\n",
        pytest.param(
            "MODEL.SAFETENSORS",
        ),
    ],
)
def test_a_label_that_a_side_file_cannot_have_is_refused(writer, label):
    with pytest.raises(ArgumentError, match="cannot be the label"):
        writer.add_file(label, b"")


def test_two_side_files_cannot_have_one_label(writer):
    writer.add_file("config.json", b"")
    with pytest.raises(ArgumentError):
        writer.add_file("Config.json", b"")


# Files of a model that is cut over several


def test_a_model_of_several_files_has_the_index_that_loaders_look_for(monkeypatch, save, load):
    from dsdformat import part_writer as module

    plan = module.plan_files
    monkeypatch.setattr(module, "plan_files", lambda *a, **k: plan(*a, **k, chunks_max=2))
    state = {f"layers.{n}": TensorSource.of("uint8", (8,), bytes([n] * 8)) for n in range(5)}
    files = save(state)
    labels = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(files) == sorted(["manifest.dsd", "model.safetensors.index.json", *labels])
    index = json.loads(files["model.safetensors.index.json"])
    assert index["metadata"] == {"total_size": 40}
    assert index["weight_map"] == {f"layers.{n}": labels[n // 2] for n in range(5)}
    with load(files) as checkpoint:
        assert bytes(checkpoint.read("layers.4")) == bytes([4] * 8)
        assert list(checkpoint.side_files) == ["model.safetensors.index.json"]


def test_many_chunks_and_long_headers_roll_over_and_verify(monkeypatch, save, problems_of):
    from dsdformat import part_writer as module

    plan = module.plan_files
    monkeypatch.setattr(
        module, "plan_files", lambda *a, **k: plan(*a, **k, chunks_max=50, header_max=4096)
    )
    state = {
        section: {
            f"layers.{n}.{'x' * n}": TensorSource.of("uint8", (n,), bytes(n)) for n in range(90)
        }
        for section in ("model", "optimizer")
    }
    files = save(state)
    assert problems_of(files) == []
    assert len([label for label in files if label.endswith(".safetensors")]) > 4
    assert max(int.from_bytes(data[:8], "little") for data in data_files(files)) <= 4088


# B103
@pytest.mark.parametrize(
    "state",
    [
        {"notes": "x" * 5000},
        {"model": {f"w{n}": TensorSource.of("uint8", (1,), b"x") for n in range(500)}},
        {"names": {"x" * 5000: None}},
    ],
    ids=["value", "tensors", "key"],
)
def test_what_a_reader_would_refuse_for_its_size_is_not_committed(tmp_path, monkeypatch, state):
    from dsdformat import writer as module
    from dsdformat.format import frame

    path = tmp_path / "a"
    with dsdformat.create(path) as first:
        first.add({"old": 1})
    for owner in (module, frame):
        monkeypatch.setattr(owner, "BODY_NBYTES_MAX", 4096)
    writer = dsdformat.create(path, overwrite=True)
    writer.add(state)
    with pytest.raises(UnsupportedValueError, match="and readers take 4096"):
        writer.commit()
    assert [child.name for child in tmp_path.iterdir()] == ["a"]
    assert dsdformat.open(path).value("old") == 1


# B103
def test_a_body_of_the_most_bytes_that_readers_take_is_written_and_read(monkeypatch, save, load):
    from dsdformat import writer as module
    from dsdformat.format import frame

    lengths: list[int] = []
    emit = module.emit_body

    def emit_body(body: Any) -> bytes:
        raw = emit(body)
        lengths.append(len(raw))
        for owner in (module, frame):
            monkeypatch.setattr(owner, "BODY_NBYTES_MAX", len(raw))
        return raw

    monkeypatch.setattr(module, "emit_body", emit_body)
    with load(save({"notes": "x" * 5000})) as checkpoint:
        assert checkpoint.value("notes") == "x" * 5000
    assert lengths[0] > 5000


def data_files(files: dict[str, bytes]) -> list[bytes]:
    return [data for label, data in files.items() if label.endswith(".safetensors")]


# Misuse


def test_leaving_the_with_block_commits(tmp_path):
    with dsdformat.create(tmp_path / "c") as writer:
        writer.add({"a": 1})
    assert dsdformat.verify(tmp_path / "c", digest=writer.root).ok


def test_leaving_the_with_block_by_an_exception_leaves_nothing(tmp_path):
    def interrupted() -> None:
        with dsdformat.create(tmp_path / "c") as writer:
            writer.add({"a": 1})
            writer.add_file("config.json", b"")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_after_the_commit_does_not_undo_it(tmp_path):
    def interrupted() -> None:
        with dsdformat.create(tmp_path / "c") as writer:
            writer.add({"a": 1})
            writer.commit()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert dsdformat.verify(tmp_path / "c").ok
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_commit_within_the_block_is_the_only_one(tmp_path):
    with dsdformat.create(tmp_path / "c") as writer:
        root = writer.commit()
    assert writer.root == root


FINISHED = [
    pytest.param(lambda w: w.add({"b": 1}), id="add"),
    pytest.param(lambda w: w.add_value("b", 1), id="add-value"),
    pytest.param(lambda w: w.add_tensor("b", b"a", dtype="uint8", shape=(1,)), id="add-tensor"),
    pytest.param(lambda w: w.commit(), id="commit"),
    pytest.param(lambda w: w.finish(), id="finish"),
    pytest.param(
        lambda w: w.add_file("config.json", b""),
        id="add-file",
    ),
]


@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize("call", FINISHED)
def test_a_writer_that_has_ended_takes_nothing_more(tmp_path, call, end):
    writer = dsdformat.create(tmp_path / "c")
    writer.add({"a": 1})
    getattr(writer, end)()
    with pytest.raises(DsdError) as error:
        call(writer)
    assert error.value.code == "closed"
    if end == "commit":
        assert dsdformat.verify(tmp_path / "c").ok


def test_a_second_commit_does_not_forget_the_first(tmp_path):
    writer = dsdformat.create(tmp_path / "c")
    root = writer.commit()
    with pytest.raises(ArgumentError):
        writer.commit()
    assert writer.root == root


def test_a_writer_may_be_aborted_within_its_block(tmp_path):
    with dsdformat.create(tmp_path / "c") as writer:
        writer.add({"a": 1})
        writer.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["commit", "abort", "fail"])
def test_a_writer_leaves_no_thread(tmp_path, end):
    writer = dsdformat.create(tmp_path / "c", threads=3)
    for name in "abcd":
        writer.add_tensor(name, DATA, dtype="uint8", shape=(20_000,), codec="zstd")
    if end == "fail":
        writer.add_tensor("e", DATA, dtype="uint8", shape=(20_001,), codec="zstd")
        with pytest.raises(MismatchError):
            writer.commit()
    else:
        getattr(writer, end)()
    assert [one.name for one in threading.enumerate() if "dsdformat" in one.name] == []


def test_a_writer_of_a_part_that_fails_leaves_no_thread():
    writer = PartWriter(MemoryTarget({}), threads=3)
    for name, nbytes in (("a", 20_000), ("b", 20_001)):
        writer.add_tensor(name, DATA, dtype="uint8", shape=(nbytes,), codec="zstd")
    with pytest.raises(MismatchError):
        writer.finish()
    assert [one.name for one in threading.enumerate() if "dsdformat" in one.name] == []


# Without zstandard


@pytest.fixture
def no_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsdformat.format import codecs

    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(codecs, "_local", threading.local())


def test_without_zstandard_a_compressed_save_fails_and_leaves_nothing(tmp_path, no_zstandard):
    writer = dsdformat.create(tmp_path / "c", codec="zstd", threads=1)
    writer.add_tensor("w", DATA, dtype="uint8", shape=(20_000,))
    with pytest.raises(dsdformat.DependencyError, match="pip install"):
        writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_without_zstandard_a_raw_checkpoint_is_written_and_read(tmp_path, no_zstandard):
    with dsdformat.create(tmp_path / "c", threads=1) as writer:
        writer.add_tensor("w", DATA, dtype="uint8", shape=(20_000,))
    assert dsdformat.verify(tmp_path / "c", threads=1).ok


def test_a_writer_can_be_aborted_twice(tmp_path):
    writer = dsdformat.create(tmp_path / "c")
    writer.abort()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_commit_leaves_nothing_and_the_name_free(tmp_path):
    writer = dsdformat.create(tmp_path / "c")
    writer.add_tensor("w", b"abc", dtype="uint8", shape=(4,))
    with pytest.raises(MismatchError):
        writer.commit()
    assert writer.root is None
    with dsdformat.create(tmp_path / "c") as writer:
        writer.add_tensor("w", b"abcd", dtype="uint8", shape=(4,))
    assert dsdformat.verify(tmp_path / "c").ok


def test_saves_leave_no_descriptor_open(tmp_path, count_descriptors):
    before = count_descriptors()
    for number in range(20):
        with dsdformat.create(tmp_path / "c", overwrite=number > 0, threads=2) as writer:
            writer.add_tensor("w", DATA, dtype="uint8", shape=(20_000,))
        dsdformat.create(tmp_path / "d").abort()
        with pytest.raises(StorageError):
            dsdformat.create(tmp_path / "c")
    assert count_descriptors() == before


# Values of other types


class Unit:
    def __init__(self, name: str) -> None:
        self.name = name


def test_a_caller_may_adapt_values_that_the_format_does_not_have(files):
    seen: list[tuple[object, ...]] = []

    def adapt(value: object, path: tuple[object, ...]) -> object:
        seen.append(path)
        if isinstance(value, Unit):
            return {"unit": value.name}
        if isinstance(value, Path):
            return NotImplemented
        return TensorSource.of("uint8", (2,), b"ab") if value is Ellipsis else NotImplemented

    writer = Writer(MemoryTarget(files), adapt=adapt, threads=1)
    writer.add({"a": Unit("metre"), "b": [...]})
    writer.commit()
    with checked(files) as checkpoint:
        assert checkpoint.tree()["a"] == {"unit": "metre"}
        assert bytes(checkpoint.read("b/@0")) == b"ab"
    assert seen == [("a",), ("b", 0)]


def test_a_value_that_is_not_adapted_is_refused(files):
    writer = Writer(MemoryTarget(files), adapt=lambda value, path: NotImplemented, threads=1)
    writer.add({"a": [Unit("metre")]})
    with pytest.raises(UnsupportedValueError, match=r"^\$\.a\[0\]"):
        writer.commit()


def test_the_hint_names_a_dtype_table(writer):
    with pytest.raises(UnsupportedValueError, match="dtypes"):
        writer.add_tensor("w", b"", dtype="float", shape=())
