"""The columns of tensors: lengths, references, shapes, boxes, codecs (sections 7 and 9)."""

from collections.abc import Callable, Iterator

from vectors.cases import Case, invalid
from vectors.declare import Checkpoint, Chunk, Section, Shape, Tensor
from vectors.hooks import Columns, body_put, column_put, column_set, no_chunks
from vectors.samples import boxes, one, tensor

U32 = (1 << 32) - 1
U64 = (1 << 64) - 1
LAYOUTS = {
    "meshes": [{"axes": ["dp"], "shape": [1], "ranks": [0]}],
    "layouts": [{"mesh": 0, "placements": ["replicate"]}],
}


def squeezed(nbytes: int = 6000, codec: int = 1) -> Checkpoint:
    """A compressed tensor of two blocks, and a raw one behind it."""
    dtype, size = ("uint8", 1) if codec == 1 else ("int16", 2)
    count = nbytes // size
    chunk = Chunk((0,), (count,), 0, codec)
    tensors = [Tensor(dtype, (count,), bytes(nbytes), [chunk]), tensor("int16", (5,))]
    return Checkpoint(tensors, {"a": ["tensor", 0], "b": ["tensor", 1]})


# Sections that are so many bytes too long, or too short.
LENGTHS = (
    (1, "tensors", (8, -16, 16)),
    (2, "shapes", (8, -8, -1)),
    (3, "chunks", (32, -32, 1)),
    (4, "boxes", (16, -8)),
    (5, "digests", (1, -16)),
    (6, "frames", (8, -1)),
)

COUNTS = (
    ("ndim-max", "A tensor has 2^32-1 dims, for which `shapes` is too short.", "ndim", U32),
    (
        "chunk-count-max",
        "A tensor has 2^32-1 chunks, for which `chunks` is too short.",
        "chunk_count",
        U32,
    ),
    (
        "chunk-count-zero",
        "A tensor has no chunks, and `chunks` has one row too many.",
        "chunk_count",
        0,
    ),
)

INDICES = (
    ("dtype", "dtype", 1, one()),
    ("dtype-max", "dtype", U32, one()),
    ("layout", "layout", 1, one()),
    ("layout-after-last", "layout", 2, one(**LAYOUTS)),
    ("layout-max", "layout", U32, one(**LAYOUTS)),
    ("file", "file", 1, one()),
    ("file-max", "file", U32, one()),
)

SHAPES: tuple[tuple[str, str, Shape, str], ...] = (
    ("dim-2-63", "uint8", (0, 1 << 63), "A dim of 2^63 beside an empty one."),
    ("dim-2-64", "uint8", (0, U64), "A dim of 2^64-1 beside an empty one."),
    ("product", "uint8", (1 << 32, 0, 1 << 31), "The product of the nonzero dims is 2^63."),
    (
        "product-itemsize",
        "float32",
        (0, 1 << 61),
        "The product is below 2^63, but not in bytes.",
    ),
    (
        "product-wraps",
        "uint16",
        (1 << 32, 0, 1 << 31),
        "The product in bytes is 2^64, which wraps to 0.",
    ),
)

# Boxes of a tensor of the shape [2, 3].
BOUNDS = (
    ("offset", (1, 0, 2, 3), "A box of the tensor's shape begins in its second row."),
    ("shape", (0, 0, 3, 3), "A box is a row larger than the tensor."),
    ("last-dim", (0, 1, 2, 3), "A box reaches over the last dim."),
    ("offset-beyond", (3, 0, 1, 3), "A box begins behind the tensor."),
    ("wraps", (U64, 0, 2, 3), "Offset 2^64-1 and shape 2 make 1 in 64-bit arithmetic."),
    ("wraps-shape", (1, 0, U64, 3), "Offset 1 and shape 2^64-1 make 0 in 64-bit arithmetic."),
    ("signed", (0, 0, 1 << 63, 3), "A shape of 2^63, which is negative as a signed number."),
)

EMPTY = (
    (
        "chunk",
        "A chunk without elements at the end of a tensor.",
        (4,),
        boxes(((0,), (4,)), ((4,), (0,))),
    ),
    (
        "chunk-in-between",
        "A chunk without elements between two others.",
        (2, 4),
        boxes(((0, 0), (1, 4)), ((0, 4), (1, 0)), ((1, 0), (1, 4))),
    ),
    (
        "tensor-two-chunks",
        "An empty tensor in two chunks.",
        (0, 4),
        boxes(((0, 0), (0, 2)), ((0, 2), (0, 2))),
    ),
    (
        "tensor-part",
        "The chunk of an empty tensor is not the whole of it.",
        (0, 4),
        [Chunk((0, 0), (0, 2))],
    ),
    (
        "tensor-codec",
        "The chunk of an empty tensor has codec 1.",
        (0, 4),
        [Chunk((0, 0), (0, 4), 0, 1)],
    ),
)


def cases() -> Iterator[Case]:
    yield from length_cases()
    yield from reference_cases()
    yield from shape_cases()
    yield from bound_cases()
    yield from empty_cases()
    yield from codec_cases()


def resized(index: int, nbytes: int) -> Callable[[list[Section]], None]:
    def hook(sections: list[Section]) -> None:
        data = sections[index].data
        sections[index].data = data + bytes(nbytes) if nbytes > 0 else data[:nbytes]

    return hook


def length_cases() -> Iterator[Case]:
    rule, code, base = "R-7.3", "bad_section_length", squeezed()
    for index, section, changes in LENGTHS:
        for nbytes in changes:
            sign, what = ("plus", "long") if nbytes > 0 else ("minus", "short")
            name = f"length-{section}-{sign}-{abs(nbytes)}"
            note = f"`{section}` is {abs(nbytes)} bytes too {what}."
            yield invalid(name, rule, code, note, base, sections=resized(index, nbytes))
    for name, note, column, value in COUNTS:
        change = column_put(column, 0, value)
        yield invalid(f"length-{name}", rule, code, note, base, columns=change)


def reference_cases() -> Iterator[Case]:
    rule, code = "R-9.1", "bad_reference"
    for name, column, value, base in INDICES:
        note = f"The column `{column}` has {value}, which is outside of its table."
        change = column_put(column, 0, value)
        yield invalid(f"index-{name}", rule, code, note, base, columns=change)
    note = "`dtypes` is empty, and a tensor has the first of them."
    none = body_put("dtypes", [])
    yield invalid("index-dtype-no-dtypes", rule, code, note, one(), body=none)


def shape_cases() -> Iterator[Case]:
    note = "A tensor of 65 dims."
    yield invalid("ndim-65", "R-9.3", "limit_exceeded", note, one("uint8", (1,) * 65))
    rule, code = "R-9.4", "shape_overflow"
    for name, dtype, shape, note in SHAPES:
        yield invalid(f"shape-{name}", rule, code, note, one(dtype, shape))

    def wrap(columns: Columns) -> None:
        columns["shapes"][:] = [1 << 32, 1 << 32]
        columns["boxes"][:] = [0, 0, 1 << 32, 1 << 32]

    note, base = "A tensor of 2^64 elements, none in 64-bit arithmetic.", one("uint8", (0, 4))
    yield invalid("shape-wraps-to-nothing", rule, code, note, base, columns=wrap)


def bound_cases() -> Iterator[Case]:
    rule, code = "R-9.5", "chunk_out_of_bounds"
    for name, box, note in BOUNDS:
        change = column_set("boxes", *box)
        yield invalid(f"bounds-{name}", rule, code, note, one(), columns=change)
    note, base = "The box of an empty tensor has an element.", one("uint8", (0, 4))
    change = column_set("boxes", 0, 0, 1, 4)
    yield invalid("bounds-empty-tensor", rule, code, note, base, columns=change)
    note, chunks = "A box without elements lies behind the tensor.", (((0,), (4,)), ((5,), (0,)))
    yield invalid("bounds-empty-box", rule, code, note, one("uint8", (4,), *boxes(*chunks)))


def empty_cases() -> Iterator[Case]:
    rule, code = "R-9.6", "empty_chunk"
    for name, note, shape, chunks in EMPTY:
        yield invalid(f"empty-{name}", rule, code, note, one("uint8", shape, *chunks))
    note, planes = "The chunk of an empty tensor of one byte an element has codec 2.", 2
    base = one("uint8", (0, 4), Chunk((0, 0), (0, 4), 0, planes))
    yield invalid("empty-tensor-codec-2", "R-9.6 R-9.11", code, note, base)
    note, change = "The chunk of an empty tensor has codec 7.", column_put("codec", 0, 7)
    base = one("uint8", (0, 4))
    yield invalid("empty-tensor-codec-7", "R-9.6 R-9.11", code, note, base, columns=change)
    yield invalid(
        "empty-tensor-no-chunks",
        rule,
        code,
        "An empty tensor without a chunk.",
        one("uint8", (0, 4)),
        chunks=no_chunks,
        columns=column_put("chunk_count", 0, 0),
    )


def codec_cases() -> Iterator[Case]:
    rule, code = "R-9.11", "unknown_codec"
    for value in (3, U32):
        note, change = f"A chunk has the codec {value}.", column_put("codec", 0, value)
        yield invalid(f"codec-{value}", rule, code, note, squeezed(), columns=change)
    note, change = "A raw chunk says that it has the codec 7.", column_put("codec", 0, 7)
    yield invalid("codec-unknown-raw", rule, code, note, one(), columns=change)
    for dtype in ("uint8", "bool", "float8_e4m3fn"):
        name = f"codec-planes-{dtype.replace('_', '-')}"
        note = f"Codec 2 on {dtype}, which has one byte."
        base = one(dtype, (300,), Chunk((0,), (300,), 0, 2))
        yield invalid(name, rule, "codec_mismatch", note, base)
