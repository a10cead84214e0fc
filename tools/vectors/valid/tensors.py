"""Dtypes, shapes, chunks, blocks, the order in files."""

import struct
from collections.abc import Iterator

from vectors.cases import Case, valid
from vectors.declare import Checkpoint, Chunk, DataFile, Tensor
from vectors.samples import boxes, cut_guillotine, flat_range, one, pinwheel, ranks, tensor
from vectors.wire import dtypes

HUGE = 1 << 62
SPECIALS = (0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA00001, 1, 0x7F7FFFFF)
EMPTY = (
    ("float32", (0,)),
    ("int8", (3, 0, 2)),
    ("uint8", (0, HUGE)),
    ("complex64", (1 << 59, 0, 1)),
)


def cases() -> Iterator[Case]:
    yield from dtype_cases()
    yield from shape_cases()
    yield from chunk_cases()
    yield from odd_chunk_cases()
    yield from block_cases()
    yield from file_order_cases()


def named(*tensors: Tensor, **options) -> Checkpoint:
    """A checkpoint whose tensors are called `a`, `b` and so on."""
    tree = {chr(97 + index): ["tensor", index] for index in range(len(tensors))}
    return Checkpoint(list(tensors), tree, **options)


def dtype_cases() -> Iterator[Case]:
    rules = "R-9.1 R-9.2 R-9.10 R-9.14 R-10.4 R-13.1"
    for name in dtypes():
        tensors = [tensor(name, (3, 2)), tensor(name, ())]
        both = Checkpoint(tensors, {"matrix": ["tensor", 0], "scalar": ["tensor", 1]})
        note = f"A 3x2 and a 0-d tensor of {name}."
        yield valid(f"dtype-{name.replace('_', '-')}", rules, note, both)
    specials = Tensor("float32", (8,), struct.pack("<8I", *SPECIALS))
    note = "Zeros, infinities, NaNs with payloads, a subnormal and the largest keep their bits."
    checkpoint = Checkpoint([specials], {"w": ["tensor", 0]})
    yield valid("dtype-float32-specials", "R-9.10", note, checkpoint)
    tensors = [tensor(name, (4,)) for name in dtypes()]
    tree = {f"t{index:02}": ["tensor", index] for index in range(len(tensors))}
    note = "A tensor of each dtype of the registry, in one checkpoint."
    yield valid("dtypes-all-in-one", "R-7.5 R-9.1", note, Checkpoint(tensors, tree))


def shape_cases() -> Iterator[Case]:
    note = "A tensor without dims is tiled by one box without dims."
    yield valid("zero-dims", "R-9.9 R-9.10", note, one("float64", ()))
    yield valid("one-element", "R-9.10", "One element in three dims.", one("int64", (1, 1, 1)))
    note = "The largest number of dims, two of them cut."
    corners = [(i, *(0,) * 62, j) for i in (0, 1) for j in (0, 1)]
    chunks = boxes(*((corner, (1,) * 64) for corner in corners))
    yield valid("dims-64", "R-9.3", note, one("uint8", (2, *(1,) * 62, 2), *chunks))
    tensors = [tensor(dtype, shape) for dtype, shape in EMPTY]
    yield valid(
        "empty-tensors",
        "R-9.6 R-9.4 R-9.13",
        "Tensors without elements, other dims up to 2^62, beside one that has some.",
        Checkpoint([*tensors, tensor("int32", (2,))], {f"e{i}": ["tensor", i] for i in range(5)}),
    )
    yield valid(
        "empty-tensors-only",
        "R-9.6 R-10.2",
        "A data file whose chunks have no bytes at all.",
        Checkpoint(tensors[:2], {"x": ["tensor", 0], "y": ["tensor", 1]}),
    )


def over(count: int) -> dict[str, object]:
    """Options of a checkpoint that so many ranks wrote, a file each."""
    return {"files": ranks(count), "world_size": count}


def chunk_cases() -> Iterator[Case]:
    rules = "R-9.7 R-9.9 R-10.7"
    rows = boxes(((0, 0), (2, 3)), ((2, 0), (2, 3)), files="01")
    checkpoint = one("float32", (4, 3), *rows, **over(2))
    yield valid("chunks-dim-0", rules, "Four rows over two ranks.", checkpoint)
    columns = boxes(((0, 0), (4, 3)), ((0, 3), (4, 3)), files="01")
    note = "Columns over two ranks: no chunk is contiguous in the tensor."
    yield valid("chunks-dim-1", rules, note, one("bfloat16", (4, 6), *columns, **over(2)))
    uneven = boxes(((0, 0), (3, 2)), ((3, 0), (3, 2)), ((6, 0), (1, 2)), files="012")
    note = "Seven rows as 3, 3 and 1, over three ranks."
    yield valid("chunks-uneven", "R-9.9", note, one("int16", (7, 2), *uneven, **over(3)))
    cuts = [((0, 2), (2, 1)), ((0, 1), (1, 3)), ((0, 3), (3, 2))]  # begins and sizes by dim
    grid = [
        (tuple(begins[i] for (begins, _), i in pairs), tuple(sizes[i] for (_, sizes), i in pairs))
        for pairs in ([*zip(cuts, (n >> 2, n >> 1 & 1, n & 1), strict=True)] for n in range(8))
    ]
    note = "A 2x2x2 grid of uneven boxes in one file."
    yield valid("chunks-grid-3d", "R-9.9 R-9.8", note, one("uint16", (3, 4, 5), *boxes(*grid)))
    shape = (4, 3, 5)
    ranges = [flat_range(shape, begin, end) for begin, end in ((0, 22), (22, 53), (53, 60))]
    files = "".join(digit * len(found) for digit, found in zip("010", ranges, strict=True))
    chunks = boxes(*ranges[0], *ranges[1], *ranges[2], files=files)
    note = "Three ranges of a flat parameter over two files; one is five boxes of a 3-d tensor."
    rules = "R-9.9 R-10.7"
    yield valid("chunks-flat-ranges", rules, note, one("float32", shape, *chunks, **over(2)))


def odd_chunk_cases() -> Iterator[Case]:
    wheel = pinwheel(2)
    note = "Five boxes around a centre: a tiling that no straight cut makes."
    yield valid("chunks-pinwheel", "R-9.9", note, one("uint8", (3, 3, 2), *boxes(*wheel)))
    turned = [((b, a, 1), (h, w, 1)) for (a, b, _), (w, h, _) in wheel]
    layers = boxes(*pinwheel(1), *turned)
    note = "Two layers, each a pinwheel, one turned against the other."
    yield valid("chunks-pinwheels-3d", "R-9.9", note, one("uint8", (3, 3, 2), *layers))
    note = "Eight dims are cut, the most that is allowed."
    checkpoint = one("uint8", (2,) * 8, *cut_guillotine(8))
    yield valid("chunks-8-cut-dims", "R-9.8", note, checkpoint)
    note = "4,100 chunks of one element: sections of two pages."
    checkpoint = one("uint8", (4100,), *(Chunk((i,), (1,)) for i in range(4100)))
    yield valid("chunks-many", "R-6.8 R-7.3 R-9.9", note, checkpoint)
    rows = boxes(*(((i, 0), (1, 2)) for i in range(6)), files="210120")
    thirds = boxes(*(((i,), (1,)) for i in range(3)), files="102")
    checkpoint = named(
        tensor("int32", (6, 2), "", *rows), tensor("int8", (3,), "", *thirds), **over(3)
    )
    note = "The order in the table is not the storage order: first_block goes by storage."
    yield valid("chunks-shuffled-over-files", "R-9.13", note, checkpoint)


def block_cases() -> Iterator[Case]:
    sizes = [("float32", 3077), ("uint8", 4096), ("uint8", 4097)]
    checkpoint = named(*(tensor(dtype, (count,)) for dtype, count in sizes))
    note = "A chunk of three blocks and a bit; block_nbytes is 4096."
    yield valid("blocks-several", "R-9.10 R-9.14", note, checkpoint)
    note, checkpoint = "block_nbytes is 4,194,304.", one(block_nbytes=4_194_304)
    yield valid("blocks-default-size", "R-7.5 R-13.1", note, checkpoint)
    note, checkpoint = "block_nbytes is 67,108,864.", one(block_nbytes=67_108_864)
    yield valid("blocks-largest-size", "R-7.5", note, checkpoint)
    data = bytes(4_194_300) + b"leaf" + b"leaf!"
    large = Tensor("uint8", (len(data),), data, [Chunk((0,), (len(data),), 0, 1)])
    yield valid(
        "content-two-leaves",
        "R-13.1 R-13.2",
        "More than one leaf, compressed: the content digest does not depend on the blocks.",
        Checkpoint([large], {"w": ["tensor", 0]}, block_nbytes=1 << 20),
    )


def file_order_cases() -> Iterator[Case]:
    sizes = [("uint8", 3), ("float64", 2), ("int16", 5), ("float32", 1)]
    tensors = [tensor(dtype, (count,)) for dtype, count in sizes]
    file = DataFile(header_multiple=1, by_size_class=False)
    note = "Chunks in no order of size, behind a header without padding: R-10.8 is for writers."
    yield valid("file-unaligned", "R-10.8", note, named(*tensors, files=[file]))
    sizes = [("uint8", 3), ("float64", 512), ("int16", 5), ("float32", 64)]
    sizes += [("uint8", 0), ("uint8", 8192), ("float64", 5), ("complex128", 1), ("complex128", 3)]
    tensors = [tensor(dtype, (count,)) for dtype, count in sizes]
    note = "Chunks in falling size class behind a header padded to 4,096 bytes."
    file = DataFile(header_multiple=4096)
    yield valid("file-as-a-writer-lays-it", "R-10.8", note, named(*tensors, files=[file]))
