"""Reading: any box of any tensor, into any buffer, and no more of the files than need be."""

from __future__ import annotations

import array
import itertools
import math
import mmap
import random
import threading

import pytest

import dsdformat
from dsdformat import Box, Checkpoint, TensorSource
from dsdformat.errors import ArgumentError, ChecksumError, DsdError, EntryNotFoundError, FormatError
from dsdformat.format.dtypes import DTYPES
from dsdformat.storage.memory import CountingStorage, MemoryStorage

CODECS = ["raw", "zstd", "planes+zstd"]


def box_bytes(data: bytes, shape: tuple[int, ...], box: Box, itemsize: int) -> bytes:
    """The packed bytes of a box, element by element."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(o, o + s) for o, s in zip(box.offset, box.shape, strict=True)]
    places = (
        sum(a * b for a, b in zip(index, strides, strict=True))
        for index in itertools.product(*ranges)
    )
    return b"".join(data[at * itemsize : (at + 1) * itemsize] for at in places)


def cut(data: bytes, shape: tuple[int, ...], boxes: list[Box], itemsize: int):
    return [(box, box_bytes(data, shape, box, itemsize)) for box in boxes]


def grid(shape: tuple[int, ...], steps: tuple[int, ...]) -> list[Box]:
    """Cut every dim into pieces of a length; the last piece may be shorter."""
    starts = [range(0, n, step) for n, step in zip(shape, steps, strict=True)]
    return [
        Box(offset, tuple(min(s, n - o) for o, s, n in zip(offset, steps, shape, strict=True)))
        for offset in itertools.product(*starts)
    ]


# Any box

LAYOUTS = [
    pytest.param((), [Box((), ())], id="scalar"),
    pytest.param((9000,), [Box((0,), (9000,))], id="1d"),
    pytest.param((9000,), grid((9000,), (2500,)), id="1d-cut"),
    pytest.param((30, 100), [Box((0, 0), (30, 100))], id="2d"),
    pytest.param((30, 100), grid((30, 100), (7, 100)), id="2d-rows"),
    pytest.param((30, 100), grid((30, 100), (30, 33)), id="2d-columns"),
    pytest.param((12, 11, 10), grid((12, 11, 10), (5, 4, 7)), id="3d-grid"),
    pytest.param(
        (3, 3, 40),
        [
            Box((*o, 0), (*s, 40))
            for o, s in [
                ((0, 0), (1, 2)),
                ((0, 2), (2, 1)),
                ((1, 0), (2, 1)),
                ((1, 1), (1, 1)),
                ((2, 1), (1, 2)),
            ]
        ],
        id="pinwheel",
    ),
]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("shape", "boxes"), LAYOUTS)
def test_any_box_has_the_bytes_of_the_tensor(save, load, rng, shape, boxes, codec):
    data = b"".join(rng.randrange(300).to_bytes(4, "little") for _ in range(math.prod(shape)))
    source = TensorSource("int32", shape, cut(data, shape, boxes, 4), codec=codec)
    with load(save({"w": source}, block_nbytes=4096)) as checkpoint:
        assert bytes(checkpoint.read("w")) == data
        for _ in range(15):
            low = [rng.randrange(n) for n in shape]
            size = [rng.randint(0, n - o) for o, n in zip(low, shape, strict=True)]
            box = Box(tuple(low), tuple(size))
            assert bytes(checkpoint.read("w", box)) == box_bytes(data, shape, box, 4)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read_as_it_was_written(save, load, name, codec):
    itemsize = DTYPES[name].itemsize
    data = bytes(index % 251 for index in range(999 * itemsize))
    files = save({"w": TensorSource.of(name, (999,), data)}, codec=codec, block_nbytes=4096)
    with load(files) as checkpoint:
        entry = checkpoint.tensor("w")
        assert (entry.dtype, entry.shape, entry.nbytes) == (name, (999,), len(data))
        assert bytes(entry.read()) == data


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2), (2**40, 0)], ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_a_tensor_without_elements_is_read_as_nothing(save, load, problems_of, shape, codec):
    files = save({"w": TensorSource.of("float32", shape, b"")}, codec=codec)
    assert problems_of(files) == []
    with load(files) as checkpoint:
        assert bytes(checkpoint.read("w")) == b""
        assert checkpoint.tensor("w").nbytes == 0


@pytest.mark.parametrize(
    ("box", "code"),
    [
        pytest.param(Box((0, 0), (4, 5)), "box_out_of_bounds", id="too-large"),
        pytest.param(Box((4, 0), (0, 6)), "box_out_of_bounds", id="empty-but-too-wide"),
        pytest.param(Box((0,), (3,)), "box_out_of_bounds", id="fewer-dims"),
    ],
)
def test_a_box_outside_of_the_tensor_is_refused(save, load, box, code):
    with load(save({"w": TensorSource.of("uint8", (3, 5), bytes(15))})) as checkpoint:
        with pytest.raises(ArgumentError, match=r"of shape \[3, 5\]") as error:
            checkpoint.read("w", box)
        assert error.value.code == code


INDICES = [
    pytest.param(1, Box((1, 0), (1, 5)), id="int"),
    pytest.param(-1, Box((2, 0), (1, 5)), id="negative"),
    pytest.param(slice(1, 3), Box((1, 0), (2, 5)), id="slice"),
    pytest.param(slice(None), Box((0, 0), (3, 5)), id="all"),
    pytest.param((slice(None), 4), Box((0, 4), (3, 1)), id="column"),
    pytest.param((slice(-2, None), slice(1, -1)), Box((1, 1), (2, 3)), id="negative-ends"),
    pytest.param((slice(0, 99), slice(2, 1)), Box((0, 2), (3, 0)), id="clamped-and-empty"),
    pytest.param((), Box((0, 0), (3, 5)), id="nothing"),
]


@pytest.mark.parametrize(("index", "box"), INDICES)
def test_an_index_names_a_box_and_reads_it(save, load, index, box):
    data = bytes(range(15))
    with load(save({"w": TensorSource.of("uint8", (3, 5), data)})) as checkpoint:
        part = checkpoint.tensor("w")[index]
        assert (part.box, part.shape) == (box, box.shape)
        assert bytes(part.read()) == box_bytes(data, (3, 5), box, 1)


@pytest.mark.parametrize(
    ("index", "code"),
    [
        pytest.param(3, "box_out_of_bounds", id="behind"),
        pytest.param(-4, "box_out_of_bounds", id="before"),
        pytest.param((0, 0, 0), "box_out_of_bounds", id="too-many"),
        pytest.param(slice(None, None, 2), "bad_argument", id="step-2"),
        pytest.param(slice(None, None, -1), "bad_argument", id="backwards"),
    ],
)
def test_an_index_that_names_no_box_is_refused(save, load, index, code):
    with load(save({"w": TensorSource.of("uint8", (3, 5), bytes(15))})) as checkpoint:
        with pytest.raises(ArgumentError) as error:
            checkpoint.tensor("w")[index]
        assert error.value.code == code


# Into a buffer


def anonymous_map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes)


def floats(nbytes: int) -> array.array[float]:
    return array.array("f", bytes(nbytes))


def part_of_more(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes + 20))[10:-10]


def two_dims(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes)).cast("B", (nbytes // 4, 4))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("make", [bytearray, anonymous_map, floats, part_of_more, two_dims])
def test_a_read_fills_a_buffer_of_any_kind(save, load, make, codec):
    data = bytes(index % 251 for index in range(12_000))
    into = make(len(data))
    files = save({"w": TensorSource.of("float32", (3000,), data)}, codec=codec, block_nbytes=4096)
    with load(files) as checkpoint:
        view = checkpoint.read("w", into=into)
        assert bytes(view) == data
        assert bytes(memoryview(into).cast("B")) == data


def backwards(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))[::-1]


def every_other(nbytes: int) -> memoryview:
    return memoryview(bytearray(2 * nbytes))[::2]


def one_less(nbytes: int) -> bytearray:
    return bytearray(nbytes - 1)


def one_more(nbytes: int) -> bytearray:
    return bytearray(nbytes + 1)


@pytest.mark.parametrize("make", [bytes, one_less, one_more, backwards, every_other])
def test_a_buffer_that_does_not_fit_is_refused(save, load, make):
    with load(save({"w": TensorSource.of("uint8", (8,), bytes(8))})) as checkpoint:
        with pytest.raises(ArgumentError) as error:
            checkpoint.read("w", into=make(8))
        assert error.value.code == "bad_argument"


def test_what_is_no_buffer_is_refused_with_a_code(save, load):
    files = save({"w": TensorSource.of("uint8", (8,), bytes(8))})
    with load(files) as checkpoint, pytest.raises(DsdError):
        checkpoint.read("w", into=5)


def test_an_empty_buffer_of_several_dims_takes_an_empty_tensor(save, load):
    numpy = pytest.importorskip("numpy")
    with load(save({"w": TensorSource.of("float32", (0, 3), b"")})) as checkpoint:
        assert bytes(checkpoint.read("w", into=numpy.empty((0, 3), "f4"))) == b""


def test_what_was_read_stays_valid_after_the_checkpoint_is_closed(save, load):
    with load(save({"w": TensorSource.of("uint8", (3,), b"abc")})) as checkpoint:
        view = checkpoint.read("w")
    assert bytes(view) == b"abc"


# All at once


def many_sizes(rng: random.Random, count: int) -> dict[str, object]:
    sizes = [rng.choice((0, 1, 7, 64, 4096, 5000, 70_000)) for _ in range(count)]
    return {
        f"t{index:03}": TensorSource.of(
            "uint8", (n,), rng.randbytes(n), codec=rng.choice(("raw", "raw", "zstd"))
        )
        for index, n in enumerate(sizes)
    }


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    "block_nbytes",
    [
        pytest.param(
            4096,
        ),
        2**16,
        2**22,
    ],
)
def test_reading_all_tensors_at_once_gives_the_same_as_one_by_one(
    save, load, rng, threads, block_nbytes
):
    state = {"a": many_sizes(rng, 120), "b": many_sizes(rng, 30)}
    files = save(state, block_nbytes=block_nbytes)
    with load(files, threads=threads) as checkpoint:
        buffers = [bytearray(entry.nbytes) for entry in checkpoint]
        checkpoint.read_all(buffers)
        assert buffers == [bytes(entry.read()) for entry in checkpoint]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_reading_all_tensors_needs_a_buffer_for_each(save, load, count):
    files = save({name: TensorSource.of("uint8", (1,), b"a") for name in "ab"})
    said = f"{count} buffers for 2 tensors"
    with load(files) as checkpoint, pytest.raises(ArgumentError, match=said):
        checkpoint.read_all([bytearray(1)] * count)


def test_reading_all_tensors_finds_a_damaged_one_among_small_ones(save, load, rng):
    state = {f"t{index}": TensorSource.of("uint8", (64,), rng.randbytes(64)) for index in range(99)}
    files = save(state)
    with load(files) as checkpoint:
        place = checkpoint.tensor("t50").chunks[0].byte_offset
    data = bytearray(files["model.safetensors"])
    data[place + 5] ^= 1
    with load({**files, "model.safetensors": bytes(data)}) as checkpoint:
        with pytest.raises(ChecksumError) as error:
            checkpoint.read_all([bytearray(64) for _ in range(99)])
        assert (error.value.code, error.value.entry) == ("checksum_mismatch", "t50")


# Verification


@pytest.fixture
def damaged(small_files) -> dict[str, bytes]:
    """`small_files` with one bit of the last byte of `model/raw` flipped."""
    with Checkpoint(MemoryStorage(small_files)) as checkpoint:
        (chunk,) = checkpoint.tensor("model/raw").chunks
    data = bytearray(small_files[chunk.file])
    data[chunk.byte_offset + chunk.nbytes - 1] ^= 0x80
    return {**small_files, chunk.file: bytes(data)}


def test_damage_is_found_before_bytes_are_handed_out(damaged, load):
    with load(damaged) as checkpoint:
        with pytest.raises(ChecksumError, match="block 1 of chunk 0 of model/raw") as error:
            checkpoint.read("model/raw")
        problem = error.value.problems[0]
        assert (problem.code, problem.where) == ("checksum_mismatch", "model.safetensors")
        assert (problem.entry, problem.chunk, problem.block) == ("model/raw", 0, 1)
        assert problem.byte_end - problem.byte_offset == 4
        assert problem.expected != problem.actual
        assert problem.hint


def test_blocks_that_are_whole_can_be_read_beside_a_damaged_one(damaged, load, small_tensors):
    with load(damaged) as checkpoint:
        part = checkpoint.read("model/raw", Box((0,), (4096,)))
        assert bytes(part) == small_tensors["model/raw"][:4096]


def test_a_caller_may_ask_for_bytes_unverified(damaged, load, small_tensors):
    with load(damaged) as checkpoint:
        data = bytes(checkpoint.read("model/raw", verify=False))
    assert data[:-1] == small_tensors["model/raw"][:-1]
    assert data[-1] == small_tensors["model/raw"][-1] ^ 0x80


def test_a_checkpoint_may_be_opened_unverified_and_a_read_verified(damaged, load):
    with load(damaged, verify=False) as checkpoint:
        checkpoint.read("model/raw")
        with pytest.raises(ChecksumError):
            checkpoint.read("model/raw", verify=True)


def test_compressed_blocks_are_checked_before_they_are_decoded(small_files, load):
    with load(small_files) as checkpoint:
        (chunk,) = checkpoint.tensor("model/text").chunks
    data = bytearray(small_files[chunk.file])
    data[chunk.byte_offset] ^= 1
    with load({**small_files, chunk.file: bytes(data)}) as checkpoint:
        with pytest.raises(ChecksumError) as error:
            checkpoint.read("model/text")
        assert (error.value.code, error.value.block) == ("stored_checksum_mismatch", 0)
        with pytest.raises(FormatError) as error:
            checkpoint.read("model/text", verify=False)
        assert (error.value.code, error.value.entry) == ("bad_compressed_data", "model/text")


def test_a_file_of_another_length_is_found_when_it_is_first_used(small_files, load):
    short = small_files["model.safetensors"][:-1]
    with load({**small_files, "model.safetensors": short}) as checkpoint:
        checkpoint.read("optimizer/moment")
        with pytest.raises(FormatError) as error:
            checkpoint.read("model/text")
        assert (error.value.code, error.value.where) == ("file_size_mismatch", "model.safetensors")


def test_a_file_that_is_not_there_is_found_when_it_is_first_used(small_files, load):
    files = {label: data for label, data in small_files.items() if label != "model.safetensors"}
    with load(files) as checkpoint:
        checkpoint.read("optimizer/moment")
        with pytest.raises(FormatError) as error:
            checkpoint.read("model/raw")
        assert (error.value.code, error.value.where) == ("missing_file", "model.safetensors")


# spec, B136
def test_the_root_digest_that_a_caller_expects_is_compared(small_folder, tmp_path):
    with dsdformat.open(small_folder) as checkpoint:
        root = checkpoint.root
    with dsdformat.open(small_folder, digest=root.upper()) as checkpoint:
        assert checkpoint.root == root
    with pytest.raises(ChecksumError) as error:
        dsdformat.open(small_folder, digest="0" * 64)
    assert (error.value.code, error.value.actual) == ("digest_mismatch", root)


@pytest.mark.parametrize("digest", ["", "abc", "0" * 63, "g" * 64])
@pytest.mark.parametrize("call", [dsdformat.open, dsdformat.verify])
def test_a_root_digest_that_is_none_is_a_bad_argument(small_folder, call, digest):
    with pytest.raises(ArgumentError, match="64 hexadecimal digits") as error:
        call(small_folder, digest=digest)
    assert error.value.code == "bad_argument"


# Laziness


@pytest.fixture
def counted(save, rng) -> tuple[CountingStorage, bytes, Checkpoint]:
    """A matrix of 64 blocks in 4 chunks, and what its checkpoint reads after it was opened."""
    shape = (256, 1024)
    data = rng.randbytes(256 * 1024)
    state = {"w": TensorSource("uint8", shape, cut_rows(data, 64)), "x": tensor_of(5000)}
    files = save(state, block_nbytes=4096)
    storage = CountingStorage(MemoryStorage(files))
    checkpoint = Checkpoint(storage, threads=1)
    storage.reads.clear()
    return storage, data, checkpoint


def cut_rows(data: bytes, rows: int) -> list[tuple[Box, bytes]]:
    step = rows * 1024
    return [
        (Box((at // 1024, 0), (rows, 1024)), data[at : at + step])
        for at in range(0, len(data), step)
    ]


def tensor_of(nbytes: int) -> TensorSource:
    return TensorSource.of("uint8", (nbytes,), bytes(nbytes))


def data_reads(storage: CountingStorage) -> list[tuple[int, int]]:
    """List what is read of data files, behind their headers."""
    return [(at, nbytes) for label, at, nbytes in storage.reads if label != "manifest.dsd" and at]


def header_reads(storage: CountingStorage) -> list[int]:
    return [nbytes for label, at, nbytes in storage.reads if label != "manifest.dsd" and not at]


def test_opening_reads_no_data_file(counted):
    storage, _, checkpoint = counted
    assert checkpoint.names == ["w", "x"]
    assert checkpoint.tensor("w").shape == (256, 1024)
    assert data_reads(storage) == []


def test_opening_reads_the_head_and_the_first_sections_only(small_files):
    storage = CountingStorage(MemoryStorage(small_files))
    Checkpoint(storage)
    assert {label for label, _, _ in storage.reads} == {"manifest.dsd"}
    assert sum(nbytes for _, _, nbytes in storage.reads) < len(small_files["manifest.dsd"])


def test_a_box_reads_only_the_blocks_that_meet_it(counted):
    storage, data, checkpoint = counted
    box = Box((66, 10), (2, 100))  # rows 64 to 67 are the first block of the second chunk
    assert bytes(checkpoint.read("w", box)) == box_bytes(data, (256, 1024), box, 1)
    place = checkpoint.tensor("w").chunks[1].byte_offset
    assert data_reads(storage) == [(place, 4096)]


def test_a_contiguous_box_reads_from_its_first_block_to_its_last(counted):
    storage, data, checkpoint = counted
    box = Box((68, 0), (16, 1024))  # four whole blocks
    assert bytes(checkpoint.read("w", box)) == data[68 * 1024 : 84 * 1024]
    place = checkpoint.tensor("w").chunks[1].byte_offset
    assert sum(nbytes for _, nbytes in data_reads(storage)) == 4 * 4096
    assert min(at for at, _ in data_reads(storage)) == place + 4096


def test_each_block_is_read_once(counted):
    storage, _, checkpoint = counted
    checkpoint.read("w", Box((0, 3), (256, 1)))  # a column: every block, one byte of each row
    reads = data_reads(storage)
    assert len(reads) == len(set(reads)) == 64


def test_a_header_is_read_where_it_is_short_against_what_is_read(counted):
    storage, _, checkpoint = counted
    checkpoint.read("w", Box((0, 0), (124, 1024)))  # 31 blocks, and a header as long as a block
    assert header_reads(storage) == []
    checkpoint.read("w", Box((0, 0), (128, 1024)))
    assert header_reads(storage) == [4096]
    checkpoint.read("w", verify=False)
    assert header_reads(storage) == [4096]


def test_unverified_bytes_are_read_without_the_rest_of_their_blocks(counted):
    storage, data, checkpoint = counted
    box = Box((66, 10), (1, 100))
    assert bytes(checkpoint.read("w", box, verify=False)) == data[66 * 1024 + 10 :][:100]
    assert [nbytes for _, nbytes in data_reads(storage)] == [100]


@pytest.mark.parametrize("codec", ["zstd", "planes+zstd"])
def test_a_box_of_a_compressed_tensor_reads_only_its_blocks(save, codec):
    data = b"".join((at // 7).to_bytes(4, "little") for at in range(20_000))
    files = save({"w": TensorSource.of("int32", (20_000,), data)}, codec=codec, block_nbytes=4096)
    storage = CountingStorage(MemoryStorage(files))
    checkpoint = Checkpoint(storage, threads=1)
    assert bytes(checkpoint.read("w", Box((5000,), (10,)))) == data[20_000:20_040]
    stored = checkpoint.tensor("w").chunks[0].stored_nbytes
    assert 0 < sum(nbytes for _, nbytes in data_reads(storage)) < stored / 10


# Maps


def test_a_map_is_the_file_itself(small_folder, small_tensors):
    with dsdformat.open(small_folder) as checkpoint:
        view = checkpoint.tensor("model/raw").map()
    assert bytes(view) == small_tensors["model/raw"]
    assert view.readonly


def test_a_map_of_an_empty_tensor_is_empty(save, load):
    with load(save({"w": TensorSource.of("uint8", (0,), b"")})) as checkpoint:
        assert bytes(checkpoint.tensor("w").map()) == b""


def test_a_compressed_tensor_cannot_be_mapped(small_folder):
    with dsdformat.open(small_folder) as checkpoint:
        with pytest.raises(ArgumentError, match="compressed") as error:
            checkpoint.tensor("model/text").map()
        assert error.value.code == "cannot_map"


def test_a_tensor_of_several_chunks_cannot_be_mapped(save, load):
    source = TensorSource("uint8", (2,), [(Box((0,), (1,)), b"a"), (Box((1,), (1,)), b"b")])
    with load(save({"w": source})) as checkpoint:
        with pytest.raises(ArgumentError, match="2 chunks") as error:
            checkpoint.tensor("w").map()
        assert error.value.code == "cannot_map"


def test_many_maps_of_one_file_do_not_take_a_descriptor_each(tmp_path, count_descriptors):
    with dsdformat.create(tmp_path / "c") as writer:
        writer.add({f"t{n}": TensorSource.of("uint8", (9,), bytes(9)) for n in range(50)})
    before = count_descriptors()
    with dsdformat.open(tmp_path / "c") as checkpoint:
        views = [entry.map() for entry in checkpoint]
        assert count_descriptors() < before + 10
    assert all(bytes(view) == bytes(9) for view in views)


# Names


@pytest.fixture
def named(save, load):
    tied = TensorSource.of("uint8", (2,), b"ab")
    state = {
        "model": {"layers.0.weight": tied, "a/b": tensor_of(1), "c@%": tensor_of(2)},
        "tied": {"again": tied},
        "list": [tensor_of(3), {"x": tensor_of(4)}],
        "keys": {1: tensor_of(5), (2, "y"): tensor_of(6), None: 7},
        "step": 3,
    }
    with load(save(state)) as checkpoint:
        yield checkpoint


NAMES = [
    ("model/layers.0.weight", ("model", "layers.0.weight"), 2),
    ("tied/again", ("tied", "again"), 2),
    ("model/a%2Fb", ("model", "a/b"), 1),
    ("model/c%40%25", ("model", "c@%"), 2),
    ("list/@0", ("list", 0), 3),
    ("list/@1/x", ("list", 1, "x"), 4),
    ("keys/@1", ("keys", 1), 5),
    ("keys/@x93a57475706c6502a179", ("keys", (2, "y")), 6),
]


@pytest.mark.parametrize(("name", "path", "nbytes"), NAMES, ids=[name for name, _, _ in NAMES])
def test_a_tensor_is_found_by_name_and_by_path(named, name, path, nbytes):
    assert named.tensor(name).nbytes == nbytes
    assert named.tensor(path).nbytes == nbytes
    assert name in named


@pytest.mark.parametrize(
    "name",
    [
        "model/a/b",
        "model/c@%",
        "model/layers.0.weight/",
        "/list/@0",
        "list/0",
        "list/@00",
        "keys/1",
    ],
)
def test_a_name_that_is_displayed_in_another_way_is_not_there(named, name):
    assert name not in named


def test_a_key_that_equals_one_of_another_type_is_not_found_under_its_name(save, load):
    with load(save({"keys": {True: tensor_of(3)}, "numbers": {1: tensor_of(4)}})) as checkpoint:
        assert "keys/@1" not in checkpoint
        assert checkpoint.tensor("keys/@xc3").nbytes == 3
        assert "numbers/@xc3" not in checkpoint
        assert checkpoint.tensor("numbers/@1").nbytes == 4


def test_names_are_listed_in_the_order_of_the_tree(named):
    assert named.names == [
        "keys/@1",
        "keys/@x93a57475706c6502a179",
        "list/@0",
        "list/@1/x",
        "model/a%2Fb",
        "model/c%40%25",
        "model/layers.0.weight",
    ]


def test_a_tied_tensor_is_one_object_with_all_its_paths(named):
    tree = named.tree()
    assert tree["model"]["layers.0.weight"] is tree["tied"]["again"]
    assert tree["tied"]["again"].paths == [("model", "layers.0.weight"), ("tied", "again")]
    assert len(named) == 7


def test_a_name_that_is_not_there_is_an_error_with_names_spelled_alike(named):
    with pytest.raises(EntryNotFoundError, match="did you mean") as error:
        named.tensor("model/layers.0.wieght")
    assert error.value.code == "entry_not_found"
    assert error.value.close_matches[0] == "model/layers.0.weight"
    assert error.value.name == "model/layers.0.wieght"


@pytest.mark.parametrize("name", ["", "model", "step", "list", ("model",), ("keys", None)], ids=str)
def test_what_is_no_tensor_is_not_read_as_one(named, name):
    with pytest.raises(EntryNotFoundError) as error:
        named.tensor(name)
    assert error.value.code == ("entry_not_found" if name == "" else "not_a_tensor")


def test_a_path_that_is_not_there_is_an_error(named):
    with pytest.raises(EntryNotFoundError):
        named.tensor(("model", "layers.0.weight", "x"))


@pytest.mark.parametrize(
    ("name", "value"), [("step", 3), ("keys/@xc0", 7), (("keys", None), 7)], ids=str
)
def test_a_value_is_found_by_name_and_by_path(named, name, value):
    assert named.value(name) == value


def test_a_container_is_found_by_name(named):
    assert sorted(named.value("model")) == ["a/b", "c@%", "layers.0.weight"]


def test_a_tree_is_the_callers_own(named):
    named.tree()["model"].clear()
    assert len(named.tree()["model"]) == 3


def test_an_entry_says_what_it_is(named):
    assert repr(named.tensor("list/@0")) == "TensorEntry('list/@0', uint8, [3])"


def test_a_checkpoint_says_what_it_is(named):
    assert repr(named) == f"Checkpoint('memory', 7 tensors, root {named.root[:12]}…)"


# After closing


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda c: c.read("model/raw"), id="read"),
        pytest.param(lambda c: c.read_all([]), id="read-all"),
        pytest.param(lambda c: c.tensor("model/raw").map(), id="map"),
        pytest.param(lambda c: c.tensor("model/raw").content_digest(), id="content-digest"),
    ],
)
def test_a_closed_checkpoint_reads_nothing(small_folder, call):
    checkpoint = dsdformat.open(small_folder)
    checkpoint.close()
    with pytest.raises(ArgumentError) as error:
        call(checkpoint)
    assert error.value.code == "closed"


def test_a_closed_checkpoint_opens_no_file_again(small_folder, count_descriptors):
    before = count_descriptors()
    checkpoint = dsdformat.open(small_folder)
    entry = checkpoint.tensor("model/raw")
    checkpoint.close()
    with pytest.raises(ArgumentError):
        print(entry.chunks)
    assert count_descriptors() == before


def test_a_checkpoint_can_be_closed_twice(small_folder):
    checkpoint = dsdformat.open(small_folder)
    checkpoint.close()
    checkpoint.close()


def test_two_hundred_checkpoints_leave_no_descriptor_open(small_folder, count_descriptors):
    before = count_descriptors()
    for _ in range(200):
        with dsdformat.open(small_folder) as checkpoint:
            checkpoint.read("model/raw")
            checkpoint.read("optimizer/moment")
    assert count_descriptors() == before


def test_a_checkpoint_that_cannot_be_opened_leaves_no_descriptor_open(
    small_folder, count_descriptors
):
    (small_folder / "manifest.dsd").write_bytes(b"nonsense")
    before = count_descriptors()
    for _ in range(20):
        with pytest.raises(FormatError):
            dsdformat.open(small_folder)
    assert count_descriptors() == before


# Threads


@pytest.mark.parametrize("threads", [1, 4])
def test_many_threads_read_one_checkpoint(small_folder, small_tensors, threads):
    wrong: list[str] = []
    with dsdformat.open(small_folder, threads=threads) as checkpoint:

        def read(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                name = rng.choice(list(small_tensors))
                if bytes(checkpoint.read(name)) != small_tensors[name]:
                    wrong.append(name)

        workers = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert wrong == []


def test_a_large_tensor_is_read_by_several_threads(save, load, rng):
    data = rng.randbytes(3_000_000)
    files = save({"w": TensorSource.of("uint8", (3, 1_000_000), data)}, block_nbytes=2**16)
    with load(files, threads=4) as checkpoint:
        assert bytes(checkpoint.read("w")) == data


def test_damage_that_another_thread_finds_is_raised_in_the_callers(save, load, rng):
    files = save(
        {"w": TensorSource.of("uint8", (3_000_000,), bytes(3_000_000))}, block_nbytes=2**16
    )
    data = bytearray(files["model.safetensors"])
    data[2_000_000] ^= 1
    damaged = {**files, "model.safetensors": bytes(data)}
    with load(damaged, threads=4) as checkpoint, pytest.raises(ChecksumError):
        checkpoint.read("w")


@pytest.mark.parametrize("threads", [-1, -8])
def test_a_number_of_threads_that_is_none_is_refused(small_folder, threads):
    with pytest.raises(DsdError), dsdformat.open(small_folder, threads=threads) as checkpoint:
        checkpoint.read_all([bytearray(entry.nbytes) for entry in checkpoint])
