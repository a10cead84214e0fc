"""Sections and their pages (sections 6 and 7)."""

import struct
from collections.abc import Iterator

from vectors import zstd
from vectors.builder import PAGE_NBYTES, build
from vectors.cases import Case, invalid
from vectors.declare import Chunk, Head, Page, Section, SectionRow
from vectors.defects import page_frames
from vectors.hooks import features, page_flip, page_stored, section_put
from vectors.samples import one, two
from vectors.wire import Raw, digest, pack

GIB = 1 << 30
NAMES = ("body", "tensors", "shapes", "chunks", "boxes", "digests", "frames")
EXTRA = Section(b"later", b"data", 1)

# Sections that are not as says.
FIRST_SEVEN = (
    ("swapped", "Two sections are in the wrong order.", lambda s: [s[0], s[2], s[1], *s[3:]]),
    ("missing", "The section `frames`, which is empty here, is missing.", lambda s: s[:-1]),
    ("none", "There are no sections.", lambda _: []),
    ("body-only", "There is only a body.", lambda s: s[:1]),
    ("extra-in-front", "An ignorable section lies before the body.", lambda s: [EXTRA, *s]),
    (
        "extra-in-between",
        "An ignorable section lies between the seven.",
        lambda s: [*s[:3], EXTRA, *s[3:]],
    ),
    ("upper-case", "A section is called `Body`.", section_put(0, name=b"Body")),
    (
        "name-not-zero-padded",
        "Bytes follow the name and its zero byte.",
        section_put(0, name=b"body\0\0\0x"),
    ),
    ("name-space-padded", "The name is padded with spaces.", section_put(0, name=b"body    ")),
    ("flags-ignorable", "One of the seven is marked as ignorable.", section_put(1, flags=1)),
    ("flags-unknown-bit", "One of the seven has an unknown flag.", section_put(1, flags=2)),
)

# Names of later sections that does not allow.
NAMES_OF_LATER = (
    ("empty", b"", "no name"),
    ("upper-case", b"Later", "a name with a capital letter"),
    ("digit", b"2nd", "a name that begins with a digit"),
    ("dash", b"-later", "a name that begins with a dash"),
    ("after-zero", b"a\0b", "a byte behind the name and its zero byte"),
    ("zero-first", b"\0later", "a zero byte before its name"),
    ("control", b"a\x01b", "a name with a control character"),
    ("newline", b"later\n", "a name that ends in a newline"),
    ("space-padded", b"later   ", "a name that is padded with spaces"),
    ("dot", b"a.b", "a name with a dot"),
    ("not-ascii", "é".encode(), "a name that is not ASCII"),
)

# Later sections that are not as says.
LATER = (
    (
        "later-unknown-bit",
        "A later section has an unknown flag beside the ignorable one.",
        lambda s: [*s, Section(b"later", b"", 3)],
    ),
    (
        "later-highest-bit",
        "A later section has the highest flag beside the ignorable one.",
        lambda s: [*s, Section(b"later", b"", 1 << 31 | 1)],
    ),
    ("twice", "A later section has a name twice.", lambda s: [*s, EXTRA, EXTRA]),
    (
        "body-twice",
        "An ignorable section is called `body` again.",
        lambda s: [*s, Section(b"body", s[0].data, 1)],
    ),
)


def cases() -> Iterator[Case]:
    yield from section_cases()
    yield from page_cases()
    yield body_over_a_gibibyte()


def section_cases() -> Iterator[Case]:
    for rule, rows in (("R-7.1", FIRST_SEVEN), ("R-7.2", LATER)):
        for name, note, change in rows:
            case_id = f"sections-{name}"
            yield invalid(case_id, rule, "bad_sections", note, one(), sections=change)
    for name, raw, what in NAMES_OF_LATER:
        base = one(more_sections=[Section(raw, b"data", 1)])
        note = f"A later section has {what}."
        yield invalid(f"sections-later-name-{name}", "R-7.2", "bad_sections", note, base)
    code = "unknown_section"
    unknown = one(more_sections=[Section(b"later", b"data")])
    note = "A section that may not be ignored."
    yield invalid("section-unknown", "R-7.2 R-16.1", code, note, unknown)
    unknown = one(more_sections=[Section(b"later", b"")])
    note = "A section without bytes that may not be ignored."
    yield invalid("section-unknown-empty", "R-7.2", code, note, unknown)


def page_cases() -> Iterator[Case]:
    base = one("uint8", (4096,), Chunk((0,), (4096,), 0, 1))
    rule, code = "R-6.9", "page_checksum_mismatch"
    for index, name in enumerate(NAMES):
        note = f"One bit is flipped in a page of `{name}`."
        yield invalid(f"page-flip-{name}", rule, code, note, base, pages=page_flip(index, 0))
    note = "One bit is flipped in the second page of the body."
    long = one(user={"t": "x" * 70_000})
    yield invalid("page-flip-second-page", rule, code, note, long, pages=page_flip(0, 1))
    note = "One bit is flipped in a section that is ignored: every byte is pinned."
    more = one(more_sections=[Section(b"later", b"data", 1)])
    yield invalid("page-flip-ignorable", rule, code, note, more, pages=page_flip(7, 0))
    for name, note, change in (
        ("zero", "A page is stored in no bytes.", lambda _: b""),
        ("more", "A page is stored in more bytes than it decodes to.", lambda data: data + b"\0"),
    ):
        pages = page_stored(1, change)
        yield invalid(f"page-stored-{name}", "R-6.8", "bad_head", note, one(), pages=pages)
    yield from compressed_page_cases()


def two_bad_pages(pages: list[list[Page]]) -> None:
    page_stored(0, lambda data: data[:-1])(pages)
    page_flip(0, 1)(pages)


def compressed_page_cases() -> Iterator[Case]:
    rules, code = "R-12.1 R-6.8", "bad_compressed_data"
    base = one(user={"text": " " * 70_000}, page=zstd.hand_frame_if_smaller)
    body = pack(build(base).body)[:PAGE_NBYTES]
    for name, (frame, what) in page_frames(body).items():
        pages = page_stored(0, lambda _, frame=frame: frame)
        note = f"A compressed page of the body: {what}"
        yield invalid(f"page-zstd-{name}", rules, code, note, base, pages=pages)
    note = "A compressed page of the body is no zstd frame, and the next has another digest."
    case_id, changed = "page-digests-before-frames", "page_checksum_mismatch"
    yield invalid(case_id, "R-6.9 R-12.1", changed, note, base, pages=two_bad_pages)
    note = "A page of `chunks` is a byte shorter than its length, and no zstd frame."
    pages = page_stored(3, lambda data: data[:-1])
    yield invalid("page-not-zstd-in-columns", rules, code, note, two(), pages=pages)
    note = "A page of a section that is ignored is a byte shorter, and no zstd frame."
    more, pages = one(more_sections=[EXTRA]), page_stored(7, lambda data: data[:-1])
    rules = "R-12.1 R-7.2"
    yield invalid("page-not-zstd-in-ignorable", rules, code, note, more, pages=pages)


def body_over_a_gibibyte() -> Case:
    """A sound body of 1 GiB and a byte, each page of zeros a frame of eleven bytes."""
    pages = gibibyte_pages()

    def put_pages(made: list[list[Page]]) -> None:
        made[0] = pages

    def put_row(head: Head) -> Head:
        head.rows[0] = SectionRow(b"body", 0, len(pages), GIB + 1)
        return features(b"zstd\n")(head)

    note = "A body of 1 GiB and a byte in 16,385 pages, nearly all of them zeros."
    base = one(extensions={"x": b""})
    return invalid(
        "body-over-a-gibibyte",
        "R-17.1",
        "limit_exceeded",
        note,
        base,
        pages=put_pages,
        head=put_row,
    )


def gibibyte_pages() -> list[Page]:
    prefix, suffix = pack(build(one(extensions={"x": Raw(b"SPLIT")})).body).split(b"SPLIT")
    count = GIB + 1 - len(prefix) - len(suffix) - 5
    first = prefix + b"\xc6" + struct.pack(">I", count)
    first += bytes(PAGE_NBYTES - len(first))
    zeros = zstd.header(PAGE_NBYTES) + zstd.rle_block(0, PAGE_NBYTES, last=True)
    # The last page is one byte, and the one before ends with the rest of the suffix.
    before_last = bytes(PAGE_NBYTES - len(suffix) + 1) + suffix[:-1]
    frames = [
        zstd.hand_frame(first),
        *[zeros] * (GIB // PAGE_NBYTES - 2),
        zstd.hand_frame(before_last),
        suffix[-1:],
    ]
    return [Page(frame, digest(frame)) for frame in frames]
