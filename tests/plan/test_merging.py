"""Parts of many writers become one: chunks in their order, trees in pieces, ties, disagreement."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from dsdformat import Box, Checkpoint, MismatchError, PartWriter, TensorSource, Writer
from dsdformat.format.manifest import ChunkRows
from dsdformat.format.packing import emit
from dsdformat.plan.chunk_merge import WriterChunks, find_gap, find_gaps, merge_rows
from dsdformat.plan.lanes import shifted
from dsdformat.plan.tree_merge import cut_tree, joined_tree, merge_pieces
from dsdformat.storage.memory import MemoryStorage, MemoryTarget
from dsdformat.verify import verify_storage

# Chunks

Row = tuple[int, int, int, int, int, tuple[int, ...]]


class Writing:
    """A writer with some chunks of some tensors, and what becomes of them."""

    def __init__(
        self,
        some: random.Random,
        index: list[int],
        counts: list[int],
        shapes: list[Any],
        offsets: Any,
    ):
        self.files = [some.randrange(100) for _ in range(some.randint(1, 3))]
        shifts = [[some.randrange(50) for _ in self.files] for _ in range(2)]
        self.rows: dict[int, list[Row]] = {}
        columns: list[list[int]] = [[] for _ in range(6)]
        for tensor, count in zip(index, counts, strict=True):
            ndim = len(shapes[tensor])
            for _ in range(count):
                file, codec = some.randrange(len(self.files)), some.choice([0, 0, 1])
                at, block = some.randrange(10**6), some.randrange(1000)
                frame = some.randrange(1000) if codec else 0
                box = (*offsets[tensor].pop(), *[1] * ndim)
                for column, value in zip(columns, (file, codec, at, block, frame), strict=False):
                    column.append(value)
                columns[5].extend(box)
                merged_frame = frame + shifts[1][file] if codec else 0
                row = (self.files[file], codec, at, block + shifts[0][file], merged_frame, box)
                self.rows.setdefault(tensor, []).append(row)
        codes = "IIQQQQ"
        made = [array(code, column) for code, column in zip(codes, columns, strict=True)]
        self.chunks = WriterChunks(
            index, array("I", counts), ChunkRows._make([0, *made]), self.files, *shifts
        )


def some_offsets(some: random.Random, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Offsets in no order, none twice."""
    found: set[tuple[int, ...]] = set()
    while len(found) < 90:
        found.add(tuple(some.randrange(size) for size in shape))
        if not shape:
            return [()] * 90
    return some.sample(sorted(found), 90)


def few_writers(some: random.Random, lists: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Writers of all kinds: of each which tensors it has, and how many chunks of them."""
    found = []
    for _ in range(some.randint(1, 9)):
        index = some.choice(lists)
        counts = [some.choice([0, 1, 1, 1, 1, 3]) for _ in index]
        found.append((index, counts if some.random() < 0.6 else [1] * len(index)))
    return found


def many_writers(some: random.Random, lists: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Writers of which many are alike, but for tensors that few of them have."""
    index = lists[0]
    forms = [[some.choice([0, 1, 1, 2]) for _ in index] for _ in range(some.randint(1, 2))]
    rare = some.sample(range(len(index)), len(index) // 2)
    found = []
    for _ in range(some.randint(16, 24)):
        counts = list(some.choice(forms))
        for at in rare:
            counts[at] = some.choice([0, 0, 0, 0, 0, 1, 2])
        found.append((index, counts))
    return found


@pytest.mark.parametrize("writers_of", [few_writers, many_writers])
@pytest.mark.parametrize("seed", range(80))
def test_chunks_are_joined_by_tensor_and_offset(seed, writers_of):
    some = random.Random(seed)
    shapes = [tuple([97] * some.randint(0, 3)) for _ in range(some.randint(1, 6))]
    offsets = [some_offsets(some, shape) for shape in shapes]
    lists = [some.sample(range(len(shapes)), some.randint(1, len(shapes))) for _ in range(3)]
    writers = [
        Writing(some, index, counts, shapes, offsets) for index, counts in writers_of(some, lists)
    ]
    counts, rows = merge_rows([writer.chunks for writer in writers], shapes)
    found, at = [], 0
    for chunk, tensor in enumerate(t for t, count in enumerate(counts) for _ in range(count)):
        width = 2 * len(shapes[tensor])
        box = tuple(rows.numbers[at : at + width])
        found.append((tensor, *(column[chunk] for column in rows[1:-1]), box))
        at += width
    expected = []
    for tensor, shape in enumerate(shapes):
        mine = [row for writer in writers for row in writer.rows.get(tensor, [])]
        mine.sort(key=lambda row: row[5][: len(shape)])
        expected += [(tensor, *row) for row in mine]
    assert at == len(rows.numbers)
    for tensor, shape in enumerate(shapes):
        ours = [row for row in found if row[0] == tensor]
        theirs = [row for row in expected if row[0] == tensor]
        assert ours == theirs if shape else sorted(ours) == sorted(theirs)


def test_numbers_of_a_column_are_shifted_together():
    for code, most in (("I", 2**32 - 1), ("Q", 2**64 - 1)):
        column = array(code, [0, most - 7, 5, most - 7, 0, 1])
        assert shifted(column, 7) == array(code, [number + 7 for number in column])
        assert shifted(array(code, [9, 7, most]), -7) == array(code, [2, 0, most - 7])
        assert shifted(array(code), 7) == array(code)
    with pytest.raises(OverflowError):
        shifted(array("I", [3, 0]), -1)


def test_gaps_are_found_in_tensors_of_one_shape_that_have_other_boxes():
    whole = [((0, 0), (1, 2)), ((1, 0), (1, 2))]
    hole, twice = [whole[0]], [whole[0], whole[0], whole[1]]
    kinds = [whole, whole, hole, twice, whole, hole]
    numbers = array("Q", [n for boxes in kinds for box in boxes for part in box for n in part])
    gaps = dict(find_gaps([(2, 2)] * 6, list(map(len, kinds)), numbers))
    assert list(gaps) == [2, 3, 5]
    assert gaps[2] == gaps[5] == "2 of 4 elements were written by no one"
    assert gaps[3] == "some elements were written more than once"


GAPS = [
    pytest.param((4,), [((0,), (4,))], None, id="whole"),
    pytest.param((4,), [((0,), (2,)), ((2,), (2,))], None, id="two"),
    pytest.param((), [((), ())], None, id="no-dims"),
    pytest.param((), [], "no writer has", id="no-dims-and-no-chunk"),
    pytest.param((), [((), ())] * 2, "more than once", id="no-dims-twice"),
    pytest.param((4,), [], "no writer has", id="none"),
    pytest.param((4,), [((1,), (3,))], "1 of 4", id="hole-before"),
    pytest.param((4,), [((0,), (1,)), ((2,), (2,))], "1 of 4", id="hole-between"),
    pytest.param((4,), [((0,), (3,))], "1 of 4", id="hole-behind"),
    pytest.param((4,), [((0,), (3,)), ((2,), (2,))], "more than once", id="overlap"),
    pytest.param((4,), [((0,), (5,))], "not inside", id="outside"),
    pytest.param((2, 0), [((0, 0), (2, 0))], None, id="empty"),
    pytest.param((2, 0), [((0, 0), (2, 0))] * 2, "several writers", id="empty-twice"),
    pytest.param(
        (2, 2), [((0, 0), (1, 2)), ((1, 0), (1, 1)), ((1, 1), (1, 1))], None, id="flat-ranges"
    ),
    pytest.param(
        (3, 3),
        [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((1, 1), (1, 1)), ((2, 1), (1, 2))],
        None,
        id="pinwheel",
    ),
]


@pytest.mark.parametrize(("shape", "boxes", "said"), GAPS)
def test_boxes_that_do_not_tile_are_told_of(shape, boxes, said):
    numbers = array("Q", [number for box in boxes for part in box for number in part])
    gap = find_gap(shape, len(boxes), numbers)
    assert gap is None if said is None else said in gap


# Trees


def big_tree(tensors: int, **more: Any) -> dict[str, Any]:
    """An encoded tree, large enough to be cut."""
    params = {f"layers.{n:04}.weight": ["tensor", n] for n in range(tensors)}
    state = {name: {"note": "x" * 40, "step": n} for n, name in enumerate(sorted(params))}
    return {"model": params, "optimizer": {"groups": {"lr": 0.1}, "state": state}, **more}


@pytest.mark.parametrize("tree", [{}, {"a": {}}, big_tree(3), big_tree(500), ["odict"]], ids=len)
def test_a_tree_that_was_cut_is_what_it_was(tree):
    assert joined_tree(cut_tree(tree)) == tree


def test_a_tree_that_is_nested_to_the_limit_can_be_carried():
    tree: Any = "x" * 5000
    for _ in range(120):
        tree = {"a": tree, "b": "y" * 5000}
    assert joined_tree(cut_tree(tree)) == tree
    emit({"extensions": {"part": {"tree": cut_tree(tree)}}})


def test_what_is_equal_is_one_group_of_all_its_writers():
    trees = [big_tree(200, rng={str(n): n}) for n in range(9)]
    merged = merge_pieces([cut_tree(tree) for tree in trees])
    assert merged.tree == big_tree(200, rng={str(n): n for n in range(9)})
    holding = [group for group in merged.groups if group.tensors]
    assert [group.writers for group in holding] == [tuple(range(9))]
    assert (merged.count, len(holding[0].tensors)) == (200, 200)


# Whole checkpoints


def write(*states: dict[str, Any], **options: Any) -> Checkpoint:
    files: dict[str, bytearray] = {}
    target = MemoryTarget(files)
    options = {"world_size": len(states), "threads": 1, "block_nbytes": 4096, **options}
    first = Writer(target, **options)
    first.add(states[0])
    parts = []
    for rank, state in enumerate(states[1:], 1):
        writer = PartWriter(target, rank=rank, **options)
        writer.add(state)
        parts.append(writer.finish())
    first.commit(parts)
    assert verify_storage(MemoryStorage(files), threads=1).problems == ()
    return Checkpoint(MemoryStorage(files), threads=1)


def row_of(rank: int, count: int, width: int = 8) -> TensorSource:
    box = Box((rank, 0), (1, width))
    return TensorSource("uint8", (count, width), [(box, bytes([rank + 1] * width))])


def all_rows(count: int, width: int = 8) -> bytes:
    return b"".join(bytes([rank + 1] * width) for rank in range(count))


def none_of(count: int, width: int = 8) -> TensorSource:
    return TensorSource("uint8", (count, width), [])


def test_many_writers_with_values_of_their_own():
    count = 12
    states = [
        {
            "model": {f"w{n:03}": row_of(rank, count) for n in range(90)},
            "rng": {f"rank{rank}": {"seed": rank, "blob": bytes([rank]) * 300}},
            "step": 5,
        }
        for rank in range(count)
    ]
    checkpoint = write(*states)
    assert [bytes(entry.read()) for entry in checkpoint] == [all_rows(count)] * 90
    rng = checkpoint.tree()["rng"]
    assert [rng[f"rank{rank}"]["seed"] for rank in range(count)] == list(range(count))


def test_tensors_of_which_some_writers_have_none_and_some_several():
    count = 10
    boxes = {0: [0, 1], 3: [2], 4: [3, 4, 5], 9: [6, 7, 8, 9]}
    states = []
    for rank in range(count):
        chunks = [(Box((at, 0), (1, 8)), bytes([at + 1] * 8)) for at in boxes.get(rank, [])]
        odd = TensorSource("uint8", (count, 8), chunks)
        states.append({"a": row_of(rank, count), "b": odd, "c": row_of(rank, count)})
    checkpoint = write(*states)
    assert [bytes(entry.read()) for entry in checkpoint] == [all_rows(count)] * 3


def test_writers_of_different_stages_have_different_tensors():
    states = [
        {"model": {f"stage{rank // 4}.w{n}": row_of(rank % 4, 4) for n in range(40)}}
        for rank in range(12)
    ]
    checkpoint = write(*states)
    assert len(checkpoint) == 120
    assert all(bytes(entry.read()) == all_rows(4) for entry in checkpoint)


def test_each_codec_and_several_files_a_writer():
    count = 4
    states = [
        {
            "b": {"w": row_of(rank, count, 5000)},
            "a": {"v": row_of(rank, count, 9000)},
            "root": row_of(rank, count, 100),
        }
        for rank in range(count)
    ]
    codecs = {"b/w": "zstd", "a/v": "raw", "root": "zstd"}
    checkpoint = write(*states, codec=codecs.get)
    widths = {"b/w": 5000, "a/v": 9000, "root": 100}
    for entry in checkpoint:
        assert bytes(entry.read()) == all_rows(count, widths[entry.name])
    assert list(checkpoint.data_files) == sorted(checkpoint.data_files)
    assert len(checkpoint.data_files) == 3 * count


def tied(rank: int, count: int) -> dict[str, Any]:
    source = row_of(rank, count)
    filler = {f"filler{n:03}": "x" * 100 for n in range(70)}
    return {"in": {"w": source, **filler}, "out": {"w": source}, "own": {str(rank): rank}}


def test_a_tensor_tied_across_pieces_of_the_tree_stays_one():
    checkpoint = write(*(tied(rank, 5) for rank in range(5)))
    assert len(checkpoint) == 1
    assert bytes(checkpoint.read("out/w")) == all_rows(5)


def test_a_tensor_tied_where_pieces_differ_stays_one():
    def state(rank: int) -> dict[str, Any]:
        source = row_of(rank, 3)
        return {"a": {"w": source, "rank": {str(rank): rank}}, "b": {"w": source}}

    checkpoint = write(*map(state, range(3)))
    assert len(checkpoint) == 1
    assert checkpoint.tree()["a"]["rank"] == {"0": 0, "1": 1, "2": 2}


def test_a_tensor_that_only_some_writers_tie_is_refused_by_name():
    def state(rank: int) -> dict[str, Any]:
        source = row_of(rank, 3)
        return {"a": source, "b": source if rank != 1 else row_of(rank, 3)}

    with pytest.raises(MismatchError, match=r"^[ab]: tied to another tensor") as caught:
        write(*map(state, range(3)))
    assert caught.value.code == "state_conflict"


DEEP = [
    pytest.param({"model": {"x": 1}}, {"model": {"x": 2}}, r"\$\.model\.x", id="values"),
    pytest.param({"model": {"x": 1}}, {"model": {"x": [1]}}, r"\$\.model\.x", id="kinds"),
    pytest.param({"model": {"x": 1}}, {"model": 5}, r"\$\.model", id="a-map-and-a-value"),
    pytest.param({"o": {"s": {"x": 1}}}, {"o": {"s": {"x": 2}}}, r"\$\.o\.s\.x", id="deeper"),
]


@pytest.mark.parametrize("size", [1, 400], ids=["small", "cut"])
@pytest.mark.parametrize(("first", "second", "path"), DEEP)
def test_a_conflict_is_told_of_with_its_path_however_trees_are_cut(first, second, path, size):
    def filled(state: Any) -> Any:
        if type(state) is not dict:
            return state
        more = {f"filler{n:03}": "y" * 50 for n in range(size % 60)} | {"z": "z" * 20 * size}
        return {key: filled(item) for key, item in state.items()} | more

    states = [filled(first)] * 3 + [filled(second)] * 2 + [{}]
    with pytest.raises(MismatchError, match=f"^{path}: writers disagree") as caught:
        write(*states)
    assert caught.value.code == "state_conflict"


def test_shapes_that_differ_on_one_of_many_writers_are_refused_by_name():
    states = [{"model": {f"w{n:02}": row_of(rank, 8) for n in range(30)}} for rank in range(8)]
    states[5]["model"]["w17"] = TensorSource("uint8", (9, 8), [])
    with pytest.raises(MismatchError, match=r"^model/w17: writers disagree: uint8\[8, 8\]"):
        write(*states)


def test_the_layout_is_that_of_the_first_writer_that_has_one():
    from dsdformat import Mesh

    layout = (Mesh(("dp",), (2,), (1, 2)), ("shard(0)",))
    states: list[dict[str, Any]] = [{"w": none_of(2)}]
    for rank in range(2):
        chunks = [(Box((rank, 0), (1, 8)), bytes([rank + 1] * 8))]
        states.append({"w": TensorSource("uint8", (2, 8), chunks, layout=layout)})
    assert write(*states).tensor("w").placements == layout
