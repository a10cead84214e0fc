"""Several writers and one coordinator: what they agree on, what they may not, real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import dsdformat
from dsdformat import Box, Checkpoint, MismatchError, StorageError, TensorSource, Writer
from dsdformat.errors import DsdError
from dsdformat.format.manifest import Mesh
from dsdformat.storage.memory import MemoryStorage
from dsdformat.verify import verify_storage
from dsdformat.writer import PartWriter

Part = Callable[[PartWriter], object]


class SharedTarget:
    """A folder in memory that several writers write into."""

    name = "shared"

    def __init__(self) -> None:
        from dsdformat.storage.memory import MemoryTarget

        self.files: dict[str, bytearray] = {}
        self._inner = MemoryTarget(self.files)

    def create(self, label: str) -> Any:
        return self._inner.create(label)

    def commit(self) -> None:
        self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()


def save_together(*states: dict[str, Any], **options: Any) -> dict[str, bytearray]:
    """Write one state per rank; give the files of the checkpoint."""
    target = SharedTarget()
    count = len(states)
    coordinator = Writer(target, world_size=count, threads=1, **options)
    coordinator.add(states[0])
    parts = []
    for rank, state in enumerate(states[1:], 1):
        writer = PartWriter(target, rank=rank, world_size=count, threads=1, **options)
        writer.add(state)
        parts.append(writer.finish())
    coordinator.commit(parts)
    return target.files


def opened(files: dict[str, bytearray]) -> Checkpoint:
    verify_storage(MemoryStorage(files), threads=1).raise_if_bad()
    return Checkpoint(MemoryStorage(files), threads=1)


def shard(data: bytes, start: int, stop: int, **options: Any) -> TensorSource:
    """Rows of a tensor of one dim."""
    box = Box((start,), (stop - start,))
    return TensorSource("uint8", (len(data),), [(box, data[start:stop])], **options)


DATA = bytes(index % 251 for index in range(10_000))


def rows(rank: int, count: int) -> tuple[int, int]:
    """Uneven shares: the last ranks get less."""
    step = -(-len(DATA) // count)
    return rank * step, min(len(DATA), (rank + 1) * step)


# What they agree on


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_boxes_of_all_writers_are_one_tensor(count, codec):
    states = [{"model": {"w": shard(DATA, *rows(rank, count))}} for rank in range(count)]
    files = save_together(*states, codec=codec, block_nbytes=4096)
    with opened(files) as checkpoint:
        assert bytes(checkpoint.read("model/w")) == DATA
        assert (checkpoint.world_size, len(checkpoint.data_files)) == (count, count)


def test_the_order_of_the_parts_does_not_change_the_checkpoint():
    def save(order: Sequence[int]) -> dict[str, bytearray]:
        target = SharedTarget()
        coordinator = Writer(target, world_size=4, threads=1)
        coordinator.add({"w": shard(DATA, *rows(0, 4)), "only": {"0": 0}})
        parts = {}
        for rank in (1, 2, 3):
            writer = PartWriter(target, rank=rank, world_size=4, threads=1)
            writer.add({"w": shard(DATA, *rows(rank, 4)), "only": {str(rank): rank}})
            parts[rank] = writer.finish()
        coordinator.commit([parts[rank] for rank in order])
        return target.files

    assert save([1, 2, 3]) == save([3, 1, 2])


def test_values_of_all_writers_are_united():
    files = save_together(
        {"step": 3, "ranks": {"0": [1, 2]}, "both": (1, {"a": 2})},
        {"step": 3, "ranks": {"1": [3]}, "both": (1, {"a": 2})},
    )
    assert opened(files).tree() == {
        "step": 3,
        "ranks": {"0": [1, 2], "1": [3]},
        "both": (1, {"a": 2}),
    }


def test_tensors_within_lists_are_united_by_their_place():
    states = [{"groups": [{"p": shard(DATA, *rows(rank, 2))}, 5]} for rank in range(2)]
    with opened(save_together(*states)) as checkpoint:
        assert bytes(checkpoint.read("groups/@0/p")) == DATA


def test_a_writer_may_have_nothing():
    files = save_together({"w": shard(DATA, 0, 10_000)}, {}, {})
    assert bytes(opened(files).read("w")) == DATA


def test_the_coordinator_may_have_nothing():
    files = save_together({}, {"w": shard(DATA, 0, 10_000)})
    assert bytes(opened(files).read("w")) == DATA


def test_an_empty_tensor_is_added_by_one_writer():
    with opened(save_together({}, {"w": TensorSource.of("uint8", (0, 3), b"")}, {})) as checkpoint:
        assert len(checkpoint.tensor("w").chunks) == 1


def test_an_empty_tensor_of_several_writers_is_refused():
    """Each has written it into the header of its own file, and it has one chunk only."""
    states = [{"w": TensorSource.of("uint8", (0, 3), b"")} for _ in range(3)]
    with pytest.raises(MismatchError, match="w: empty, and added by several writers") as error:
        save_together(*states)
    assert error.value.code == "chunks_incomplete"


def test_a_tied_tensor_of_all_writers_stays_one():
    def state(rank: int) -> dict[str, Any]:
        source = shard(DATA, *rows(rank, 3))
        return {"in": source, "out": source}

    with opened(save_together(*map(state, range(3)))) as checkpoint:
        assert len(checkpoint) == 1
        assert bytes(checkpoint.read("out")) == DATA


def test_a_tensor_that_one_writer_alone_has_keeps_its_place_in_the_tree():
    files = save_together(
        {"b": TensorSource.of("uint8", (1,), b"b")}, {"a": TensorSource.of("uint8", (1,), b"a")}
    )
    with opened(files) as checkpoint:
        assert checkpoint.names == ["a", "b"]
        assert [bytes(entry.read()) for entry in checkpoint] == [b"a", b"b"]


def test_the_layout_of_a_tensor_is_kept():
    layout = (Mesh(("dp",), (2,), (0, 1)), ("shard(0)",))
    states = [{"w": shard(DATA, *rows(rank, 2), layout=layout)} for rank in range(2)]
    with opened(save_together(*states)) as checkpoint:
        assert checkpoint.tensor("w").placements == layout


# What they may not disagree on


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        pytest.param({"step": 1}, {"step": 2}, r"\$\.step", id="values"),
        pytest.param({"step": 1}, {"step": 1.0}, r"\$\.step", id="types"),
        pytest.param({"a": [1]}, {"a": [1, 2]}, r"\$\.a", id="lengths"),
        pytest.param({"a": (1,)}, {"a": [1]}, r"\$\.a", id="containers"),
        pytest.param({"a": {1: 2}}, {"a": {2: 2}}, r"\$\.a", id="keys"),
        pytest.param({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, r"\$\.a\[0\]\.b", id="deep"),
        pytest.param({"a": {"b": 1}}, {"a": 1}, r"\$\.a", id="dict-and-value"),
    ],
)
def test_values_that_differ_are_refused_with_their_path(first, second, path):
    with pytest.raises(MismatchError, match=f"^{path}: writers disagree") as error:
        save_together(first, second)
    assert error.value.code == "state_conflict"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(TensorSource.of("uint8", (9_000,), DATA[:9_000]), id="shape"),
        pytest.param(TensorSource.of("int8", (10_000,), DATA), id="dtype"),
    ],
)
def test_tensors_that_differ_are_refused_by_name(other):
    with pytest.raises(MismatchError, match="model/w.*writers disagree") as error:
        save_together({"model": {"w": shard(DATA, 0, 5000)}}, {"model": {"w": other}})
    assert error.value.code == "state_conflict"


def test_a_tensor_and_a_value_of_one_path_are_refused():
    with pytest.raises(MismatchError) as error:
        save_together({"w": shard(DATA, 0, 10_000)}, {"w": 5})
    assert error.value.code == "state_conflict"


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        pytest.param([(0, 4000), (5000, 10_000)], "1000 of 10000 elements", id="hole"),
        pytest.param([(0, 6000), (5000, 10_000)], "more than once", id="overlap"),
        pytest.param([(0, 10_000), (0, 10_000)], "more than once", id="replicas"),
    ],
)
def test_boxes_that_do_not_tile_are_refused_by_name(shares, said):
    states = [{"model": {"w": shard(DATA, *share)}} for share in shares]
    with pytest.raises(MismatchError, match=f"model/w: .*{said}") as error:
        save_together(*states)
    assert error.value.code == "chunks_incomplete"


def test_a_tensor_that_the_coordinator_does_not_have_is_named_too():
    with pytest.raises(MismatchError, match="model/w: "):
        save_together({}, {"model": {"w": shard(DATA, 0, 5000)}})


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_part_less_or_more_than_there_are_writers_is_refused(count):
    target = SharedTarget()
    coordinator = Writer(target, world_size=3, threads=1)
    coordinator.add({"a": 1})
    parts = []
    for rank in range(1, count + 1):
        writer = PartWriter(target, rank=min(rank, 2), world_size=3, threads=1)
        writer.add({f"rank {rank}": rank})
        parts.append(writer.finish())
    with pytest.raises(DsdError):
        coordinator.commit(parts)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"block_nbytes": 8192, "world_size": 2}, id="block-size"),
        pytest.param({"block_nbytes": 4096, "world_size": 3}, id="world-size"),
    ],
)
def test_a_part_that_was_made_with_other_options_is_refused(options):
    target = SharedTarget()
    coordinator = Writer(target, world_size=2, block_nbytes=4096, threads=1)
    coordinator.add({"w": shard(DATA, 0, 5000)})
    writer = PartWriter(target, rank=1, threads=1, **options)
    writer.add({"w": shard(DATA, 5000, 10_000)})
    part = writer.finish()
    with pytest.raises(DsdError):
        coordinator.commit([part])


def part_and_coordinator() -> tuple[bytes, Writer]:
    target = SharedTarget()
    coordinator = Writer(target, world_size=2, threads=1, block_nbytes=4096)
    coordinator.add({"w": shard(DATA, 0, 5000)})
    writer = PartWriter(target, rank=1, world_size=2, threads=1, block_nbytes=4096)
    writer.add({"w": shard(DATA, 5000, 10_000)})
    return writer.finish(), coordinator


DAMAGE = [
    pytest.param(lambda raw: raw[:30], id="cut-in-the-fixed-part"),
    pytest.param(lambda raw: raw[:100], id="cut-in-the-head"),
    pytest.param(lambda raw: raw[:-1], id="cut-at-the-end"),
    pytest.param(lambda raw: b"", id="nothing"),
    pytest.param(lambda raw: raw + b"x", id="a-byte-more"),
    pytest.param(lambda raw: b"\x80\x04" + raw, id="not-a-part"),
    pytest.param(lambda raw: flipped(raw, 20), id="bit-of-the-fixed-part"),
    pytest.param(lambda raw: flipped(raw, 100), id="bit-of-the-head"),
    pytest.param(lambda raw: flipped(raw, -1), id="bit-of-the-digests"),
    pytest.param(lambda raw: flipped(raw, -100), id="bit-of-the-columns"),
]


def flipped(raw: bytes, at: int) -> bytes:
    changed = bytearray(raw)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_part_that_was_damaged_on_the_way_is_refused(damage):
    part, coordinator = part_and_coordinator()
    with pytest.raises(dsdformat.FormatError):
        coordinator.commit([damage(part)])


# Real processes

RANK = """
import sys
import dsdformat
from dsdformat import Box, TensorSource, Writer

staging, rank, world_size, start, stop = sys.argv[1], *map(int, sys.argv[2:])
data = bytes(index % 251 for index in range(10_000))
writer = Writer.join(staging, rank=rank, world_size=world_size, block_nbytes=4096)
source = TensorSource("uint8", (10_000,), [(Box((start,), (stop - start,)), data[start:stop])])
writer.add({"model": {"w": source}, "step": 3, "ranks": {str(rank): rank}})
sys.stdout.buffer.write(writer.finish())
"""


def start_rank(staging: str, rank: int, count: int) -> subprocess.Popen[bytes]:
    arguments = [staging, rank, count, *rows(rank, count)]
    return subprocess.Popen(
        [sys.executable, "-c", RANK, *map(str, arguments)], stdout=subprocess.PIPE
    )


def test_three_processes_write_one_checkpoint(tmp_path):
    with dsdformat.create(tmp_path / "c", world_size=3, block_nbytes=4096) as coordinator:
        others = [start_rank(coordinator.staging, rank, 3) for rank in (1, 2)]
        coordinator.add({"model": {"w": shard(DATA, *rows(0, 3))}, "step": 3, "ranks": {"0": 0}})
        parts = [process.communicate()[0] for process in others]
        coordinator.commit(parts)
    assert dsdformat.verify(tmp_path / "c").ok
    with dsdformat.open(tmp_path / "c") as checkpoint:
        assert bytes(checkpoint.read("model/w")) == DATA
        assert checkpoint.tree()["ranks"] == {"0": 0, "1": 1, "2": 2}
        assert list(checkpoint.data_files) == [
            f"model-{rank:05}-of-00003.safetensors" for rank in range(3)
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_coordinator_that_aborts_removes_what_others_wrote(tmp_path):
    coordinator = dsdformat.create(tmp_path / "c", world_size=2)
    writer = Writer.join(coordinator.staging, rank=1, world_size=2)
    writer.add({"w": shard(DATA, 0, 10_000)})
    writer.finish()
    assert os.listdir(coordinator.staging) == ["model-00001-of-00002.safetensors"]
    coordinator.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_cannot_be_joined(tmp_path):
    with pytest.raises(StorageError, match="coordinator has ended"):
        Writer.join(tmp_path / "gone", rank=1, world_size=2)


def test_a_writer_whose_coordinator_has_ended_gets_an_error(tmp_path):
    coordinator = dsdformat.create(tmp_path / "c", world_size=2)
    writer = Writer.join(coordinator.staging, rank=1, world_size=2)
    writer.add({"w": shard(DATA, 0, 10_000)})
    coordinator.abort()
    with pytest.raises(StorageError):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_rank_get_an_error(tmp_path):
    coordinator = dsdformat.create(tmp_path / "c", world_size=2)
    for _ in range(2):
        writer = Writer.join(coordinator.staging, rank=1, world_size=2)
        writer.add({"w": shard(DATA, 0, 10_000)})
        if not os.listdir(coordinator.staging):
            writer.finish()
    with pytest.raises(StorageError, match="File exists"):
        writer.finish()
    coordinator.abort()


def test_memory_cannot_be_joined():
    writer = Writer(SharedTarget())
    with pytest.raises(dsdformat.ArgumentError, match="cannot be joined"):
        print(writer.staging)


def test_a_path_of_bytes_or_text_can_be_joined(tmp_path):
    coordinator = dsdformat.create(tmp_path / "c", world_size=2)
    assert Path(coordinator.staging).is_dir()
    Writer.join(Path(coordinator.staging), rank=1, world_size=2)
    coordinator.abort()
