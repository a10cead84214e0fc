"""Boxes that do not tile their tensor, or lie in another order (R-9.7 to R-9.9)."""

from collections.abc import Iterator

from vectors.cases import Case, invalid
from vectors.declare import Chunk
from vectors.hooks import column_put, no_chunks
from vectors.samples import boxes, cut_guillotine, one, pinwheel

CUBE = [((i, j, k), (1, 1, 1)) for i in range(2) for j in range(2) for k in range(2)]
WHEEL = pinwheel(2)
CENTRE = ((1, 1, 0), (1, 1, 2))

HOLES = (
    ("hole-at-begin", (2, 3), boxes(((1, 0), (1, 3))), "The first row is missing."),
    ("hole-at-end", (2, 3), boxes(((0, 0), (1, 3))), "The last row is missing."),
    (
        "hole-in-between",
        (5,),
        boxes(((0,), (2,)), ((3,), (2,))),
        "The middle element is missing.",
    ),
    ("hole-of-a-corner", (2, 2, 2), boxes(*CUBE[:-1]), "One corner of a cube is missing."),
    (
        "hole-in-pinwheel",
        (3, 3, 2),
        boxes(*(box for box in WHEEL if box != CENTRE)),
        "The centre of a pinwheel is missing.",
    ),
    (
        "hole-and-overlap",
        (5,),
        boxes(((0,), (2,)), ((1,), (2,))),
        "Two boxes overlap, and hold fewer elements than the tensor.",
    ),
)

OVERLAPS = (
    (
        "overlap",
        (2, 3),
        boxes(((0, 0), (2, 3)), ((1, 0), (1, 3))),
        "The second row lies in two chunks.",
    ),
    (
        "overlap-as-many",
        (4,),
        boxes(((0,), (2,)), ((1,), (2,))),
        "An overlap and a hole: as many elements as the tensor has.",
    ),
    (
        "overlap-as-many-2d",
        (2, 2),
        boxes(((0, 0), (1, 2)), ((0, 1), (2, 1))),
        "A corner lies in two chunks, another one in none.",
    ),
    (
        "overlap-pinwheel",
        (3, 3, 2),
        boxes(*WHEEL[:-1], ((2, 0, 0), (1, 3, 2))),
        "An arm of a pinwheel is too long.",
    ),
    (
        "overlap-one-inside",
        (4, 4),
        boxes(((0, 0), (4, 4)), ((1, 1), (2, 2))),
        "A box lies inside of another one.",
    ),
)

ORDERS = (
    (
        "order-falling",
        (4,),
        boxes(((0,), (2,)), ((2,), (2,)))[::-1],
        "Two chunks are in falling order.",
    ),
    (
        "order-by-last-dim",
        (2, 2),
        [Chunk((i, j), (1, 1)) for j in range(2) for i in range(2)],
        "Chunks are in column-major order.",
    ),
    (
        "order-by-file",
        (4,),
        [Chunk((i,), (1,)) for i in (0, 2, 1, 3)],
        "Chunks are in the order in which two ranks wrote them.",
    ),
    ("twice", (4,), [Chunk((0,), (4,)), Chunk((0,), (4,))], "A chunk is there twice."),
    (
        "one-offset",
        (2, 2),
        [Chunk((0, 0), (1, 2)), Chunk((0, 0), (2, 1))],
        "Two chunks of other shapes have one offset.",
    ),
)


def cases() -> Iterator[Case]:
    none = {"chunks": no_chunks, "columns": column_put("chunk_count", 0, 0)}
    for name, shape in (("tiling-no-chunks", (2, 3)), ("tiling-no-chunks-zero-dims", ())):
        note = "A tensor without chunks."
        yield invalid(name, "R-9.9", "chunk_hole", note, one("float32", shape), **none)
    for rule, code, rows in (
        ("R-9.9", "chunk_hole", HOLES),
        ("R-9.9", "chunk_overlap", OVERLAPS),
        ("R-9.7", "chunk_order", ORDERS),
    ):
        for name, shape, chunks, note in rows:
            yield invalid(f"tiling-{name}", rule, code, note, one("uint8", shape, *chunks))
    note, twice = "The one element of a 0-d tensor is there twice.", [Chunk((), ())] * 2
    yield invalid("zero-dims-twice", "R-9.7", "chunk_order", note, one("float32", (), *twice))
    rule, code, nine = "R-9.8", "limit_exceeded", cut_guillotine(9)
    base = one("uint8", (2,) * 9, *nine)
    yield invalid("cut-dims-9", rule, code, "Nine dims are cut.", base)
    note, base = "Nine dims are cut, and an element is missing.", one("uint8", (2,) * 9, *nine[1:])
    yield invalid("cut-dims-9-hole", f"{rule} R-9.9", code, note, base)
