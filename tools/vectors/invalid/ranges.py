"""Block and frame numbers, byte ranges, prefixes (sections 9 and 10)."""

from collections.abc import Callable, Iterator

from vectors.cases import Case, invalid
from vectors.declare import Checkpoint, Tensor
from vectors.hooks import Columns, block_stored, column_put, column_set, in_file, moved
from vectors.invalid.tensors import U64, squeezed
from vectors.samples import boxes, compressed, one, ranks, tensor, two

SHUFFLED = one(
    "uint8", (2,), *boxes(((0,), (1,)), ((1,), (1,)), files="10"), files=ranks(2), world_size=2
)


def one_more(columns: Columns) -> None:
    columns["stored_nbytes"].append(1)
    columns["frame_digests"].append(bytes(32))


def one_less(columns: Columns) -> None:
    columns["stored_nbytes"].pop()
    columns["frame_digests"].pop()


def digest_more(columns: Columns) -> None:
    columns["digests"].append(bytes(32))


def digest_less(columns: Columns) -> None:
    columns["digests"].pop()


NUMBERS = (
    (
        "first-block-swapped",
        "R-9.13",
        "Two chunks of one block have each other's number.",
        two(),
        column_set("first_block", 1, 0),
    ),
    (
        "first-block-twice",
        "R-9.13",
        "Two chunks have one block.",
        two(),
        column_set("first_block", 0, 0),
    ),
    (
        "first-block-gap",
        "R-9.13",
        "A number of blocks is left out.",
        two(),
        column_set("first_block", 0, 2),
    ),
    (
        "first-block-max",
        "R-9.13",
        "A first block of 2^64-1.",
        two(),
        column_set("first_block", 0, U64),
    ),
    (
        "first-block-by-index",
        "R-9.13",
        "Blocks are numbered by the order of chunks, not of storage.",
        SHUFFLED,
        column_set("first_block", 0, 1),
    ),
    (
        "first-frame-raw",
        "R-9.12",
        "A raw chunk has a first frame of 1.",
        squeezed(),
        column_put("first_frame", 1, 1),
    ),
    (
        "first-frame-raw-only",
        "R-9.12",
        "A raw chunk has a first frame where no chunk is compressed.",
        one(),
        column_put("first_frame", 0, U64),
    ),
    (
        "first-frame",
        "R-9.13",
        "The first compressed chunk begins with frame 1.",
        squeezed(),
        column_put("first_frame", 0, 1),
    ),
    (
        "first-frame-max",
        "R-9.13",
        "A first frame of 2^64-1.",
        squeezed(),
        column_put("first_frame", 0, U64),
    ),
    ("digests-more", "R-9.13", "A digest too many.", two(), digest_more),
    ("digests-fewer", "R-9.13", "A digest too few.", two(), digest_less),
    ("digests-none", "R-9.13", "No digests at all.", two(), column_set("digests")),
    ("frames-more", "R-9.13", "A frame too many.", squeezed(), one_more),
    ("frames-fewer", "R-9.13", "A frame too few.", squeezed(), one_less),
    ("frames-of-raw", "R-9.13", "A frame where no chunk is compressed.", one(), one_more),
)

# Stored lengths of a block of 4,096 bytes that does not allow.
STORED = (
    ("zero", 1, 0, "A block of codec 1 is stored in no bytes."),
    ("more", 1, 4097, "A block of codec 1 is stored in more bytes than it decodes to."),
    ("zero-planes", 2, 0, "A block of codec 2 is stored in no bytes."),
    (
        "more-planes",
        2,
        4096 + 9,
        "A block of codec 2 is stored in more bytes than planes and their lengths can have.",
    ),
)

ZEROS = Checkpoint(
    [Tensor("uint8", (16,), bytes(16)), Tensor("int8", (16,), bytes(16))],
    {"a": ["tensor", 0], "b": ["tensor", 1]},
)

EMPTY_FIRST = Checkpoint(
    [tensor("uint8", (0,)), tensor("uint8", (16,))], {"a": ["tensor", 0], "b": ["tensor", 1]}
)

# Where the chunks of a file are laid, all else being made from it.
PLACES = (
    ("overlap", "Two chunks share eight bytes.", (0, 8)),
    ("shared", "Two tensors lie on one range of bytes.", (0, 0)),
    ("gap", "Eight bytes between two chunks belong to none.", (0, 24)),
    (
        "gap-in-front",
        "Eight bytes between the header and the first chunk belong to none.",
        (8, 24),
    ),
)


def shifted(by: int) -> Callable[[Columns], None]:
    return lambda columns: columns.update(byte_offset=[at + by for at in columns["byte_offset"]])


# What the column says instead of where they are.
OFFSETS = (
    ("in-header", "R-10.2", "The chunks begin inside the header.", shifted(-8)),
    ("after-end", "R-10.2", "The last chunk ends behind the file.", shifted(8)),
    (
        "offset-zero",
        "R-10.2",
        "A chunk begins at byte 0 of the file.",
        column_put("byte_offset", 0, 0),
    ),
    ("offset-2-63", "R-17.2", "A byte offset of 2^63.", column_put("byte_offset", 1, 1 << 63)),
    ("offset-max", "R-17.2", "A byte offset of 2^64-1.", column_put("byte_offset", 1, U64)),
)

PREFIXES = (
    ("other", ["model"], "is not a prefix of the tensor's path"),
    ("whole-path", ["w"], "is the tensor's whole path"),
    ("longer", ["w", "x"], "is longer than the tensor's path"),
    ("beginning-of-part", [""], "is an empty part"),
)


def cases() -> Iterator[Case]:
    yield from number_cases()
    yield from byte_range_cases()
    for name, prefix, what in PREFIXES:
        note, change = f"The prefix of a file {what}.", in_file(prefix=prefix)
        yield invalid(f"prefix-{name}", "R-10.5", "prefix_mismatch", note, one(), body=change)


def number_cases() -> Iterator[Case]:
    code = "bad_block_index"
    for name, rule, note, base, change in NUMBERS:
        yield invalid(f"blocks-{name}", rule, code, note, base, columns=change)
    note = "The second chunk begins at byte 0, and so is the first in storage order."
    change = column_put("byte_offset", 1, 0)
    yield invalid("blocks-order-by-offset", "R-9.13 R-10.2", code, note, ZEROS, columns=change)
    note = (
        "A compressed chunk, the last in storage, begins at byte 0, and so is the first in order."
    )
    change, case_id = column_put("byte_offset", 0, 0), "blocks-order-by-offset-compressed"
    yield invalid(case_id, "R-9.13 R-10.2", code, note, squeezed(), columns=change)
    for name, codec, nbytes, note in STORED:
        change = block_stored(0, lambda _, nbytes=nbytes: bytes(nbytes))
        base = squeezed(codec=codec)
        yield invalid(f"blocks-stored-{name}", "R-9.15", code, note, base, chunks=change)
    note = "A block of complex64 is stored in a byte more than four planes and their lengths have."
    base = compressed(bytes(4096), codec=2, dtype="complex64")
    change = block_stored(0, lambda _: bytes(4096 + 4 * 4 + 1))
    case_id = "blocks-stored-more-planes-complex64"
    yield invalid(case_id, "R-9.15 R-12.2", code, note, base, chunks=change)


def byte_range_cases() -> Iterator[Case]:
    code = "byte_range_mismatch"
    for name, note, offsets in PLACES:
        yield invalid(f"bytes-{name}", "R-10.2", code, note, ZEROS, chunks=moved(*offsets))
    for name, rule, note, change in OFFSETS:
        yield invalid(f"bytes-{name}", rule, code, note, ZEROS, columns=change)
    note = "A chunk without bytes lies at byte 0 of the file."
    change = column_put("byte_offset", 0, 0)
    yield invalid("bytes-empty-chunk", "R-10.2", code, note, EMPTY_FIRST, columns=change)
    note = "The file has eight bytes behind its last chunk, and the manifest says so."
    yield invalid("bytes-behind-last-chunk", "R-10.2", code, note, ZEROS, **longer(0))
    note = "A file has eight bytes and no chunks."
    base = one("uint8", (2,), files=ranks(2), world_size=2)
    yield invalid("bytes-without-chunks", "R-10.2", code, note, base, **longer(1))


def longer(index: int) -> dict[str, Callable]:
    """Eight bytes at the end of a data file, which its length counts."""
    labels: list[str] = []

    def body(body: dict) -> None:
        body["files"][index]["nbytes"] += 8
        labels.append(body["files"][index]["label"])

    def files(files: dict[str, bytes]) -> None:
        files[labels[-1]] += b"payload!"

    return {"body": body, "files": files}
