"""The head's fixed part, rows, features and seal (section 6)."""

import struct
from collections.abc import Iterator

from vectors.builder import PAGE_NBYTES, build
from vectors.cases import Case, invalid
from vectors.declare import MAGIC, Chunk, Head, Section
from vectors.hooks import features, flip, head_plus, head_put
from vectors.invalid.folder import HEAD_FIXED, SECTION_ROW
from vectors.samples import one, tree
from vectors.wire import noise
from vectors.zstd import hand_frame_if_smaller, zeros_only

U32 = (1 << 32) - 1
U64 = (1 << 64) - 1
ZSTD_USED = one("uint8", (4096,), Chunk((0,), (4096,), 0, 1))
BOTH_USED = one("int16", (300,), Chunk((0,), (300,), 0, 2))
PAGES_USED = one(user={"text": " " * 500}, page=hand_frame_if_smaller)
IGNORED_USED = one(more_sections=[Section(b"later", bytes(500), 1)], page=zeros_only)


def shift_pages(head: Head) -> None:
    head.rows[0].pages += 1
    head.rows[1].pages -= 1


def decoded(nbytes: int):
    def hook(head: Head) -> None:
        head.rows[1].decoded_nbytes = nbytes

    return hook


def pages_max(head: Head) -> None:
    head.rows[1].pages = U32
    head.rows[1].decoded_nbytes = U32 * PAGE_NBYTES


def head_as_long_as_file(data: bytes) -> bytes:
    return data[:12] + struct.pack("<I", len(data) + 1) + data[16:]


def flip_before_seal(data: bytes) -> bytes:
    seal = int.from_bytes(data[12:16], "little") - 32
    return flip(seal - 2)(data)


FIRST_BYTES = (
    (
        "wrong",
        "The first byte of the magic is another; the seal is right.",
        {"head": head_put(magic=b"\x88DSD\r\n\x1a\n")},
    ),
    (
        "without-cr",
        "The file went through a conversion of line ends.",
        {"manifest": lambda data: data.replace(b"\r\n", b"\n")},
    ),
    (
        "of-a-zip",
        "The manifest is a zip file's beginning, as of torch.save.",
        {"manifest": lambda _: b"PK\x03\x04" + bytes(60)},
    ),
    (
        "after-a-byte",
        "A byte lies before the magic.",
        {"manifest": lambda data: b"\0" + data},
    ),
)

LENGTHS = (
    (
        "head-nbytes-0",
        "R-6.4",
        "bad_head",
        "The head says that it has 0 bytes.",
        {"head": head_put(head_nbytes=0)},
    ),
    (
        "head-nbytes-71",
        "R-6.4",
        "bad_head",
        "The head says that it has 71 bytes.",
        {"head": head_put(head_nbytes=71)},
    ),
    (
        "head-nbytes-max",
        "R-6.3",
        "truncated",
        "The head says that it has 2^32-1 bytes, more than the file has.",
        {"head": head_put(head_nbytes=U32)},
    ),
    (
        "head-nbytes-past-the-end",
        "R-6.3",
        "truncated",
        "The head says that it is one byte longer than the file.",
        {"manifest": head_as_long_as_file},
    ),
    (
        "head-nbytes-less",
        "R-6.5",
        "seal_mismatch",
        "The head says that it is a byte shorter, so the seal is looked for in the wrong place.",
        {"head": head_plus(head_nbytes=-1)},
    ),
    (
        "head-extra-byte",
        "R-6.6",
        "bad_head",
        "A byte lies between the features and the seal, and head_nbytes counts it.",
        {
            "head": head_plus(head_nbytes=1, manifest_nbytes=1),
            "head_bytes": lambda data: data + b"\0",
        },
    ),
    (
        "manifest-nbytes-more",
        "R-6.3",
        "truncated",
        "manifest_nbytes is one more than the file has.",
        {"head": head_plus(manifest_nbytes=1)},
    ),
    (
        "manifest-nbytes-max",
        "R-6.3",
        "truncated",
        "manifest_nbytes is 2^64-1.",
        {"head": head_put(manifest_nbytes=U64)},
    ),
    (
        "manifest-nbytes-and-a-byte-more",
        "R-6.7",
        "bad_head",
        "manifest_nbytes and the file are a byte longer than the pages.",
        {"head": head_plus(manifest_nbytes=1), "manifest": lambda data: data + b"\0"},
    ),
    (
        "manifest-nbytes-and-a-byte-less",
        "R-6.7",
        "bad_head",
        "manifest_nbytes and the file are a byte shorter than the pages.",
        {"head": head_plus(manifest_nbytes=-1), "manifest": lambda data: data[:-1]},
    ),
)

# What does not add up.
SUMS = (
    ("page-count-less", "page_count is one less than there is.", head_plus(page_count=-1)),
    (
        "counts-that-cancel",
        "Three section rows more, two page rows less: the head's length is right, the sum is not.",
        head_plus(section_count=3, page_count=-2),
    ),
    (
        "reserved-byte-0",
        "Byte 0 of the reserved four is 1.",
        head_put(reserved=b"\1\0\0\0"),
    ),
    (
        "reserved-byte-3",
        "Byte 3 of the reserved four is 1.",
        head_put(reserved=b"\0\0\0\1"),
    ),
    (
        "section-pages-more",
        "A section says one page more than its length needs, another one less.",
        shift_pages,
    ),
    (
        "section-decoded-more",
        "A section of one page says that it decodes to 65,537 bytes.",
        decoded(PAGE_NBYTES + 1),
    ),
    (
        "section-decoded-max",
        "A section says that it decodes to 2^64-1 bytes.",
        decoded(U64),
    ),
    (
        "section-decoded-zero",
        "A section of one page says that it decodes to nothing.",
        decoded(0),
    ),
    (
        "section-pages-max",
        "A section says 2^32-1 pages, for a length that needs as many.",
        pages_max,
    ),
)

# Names that are not as says.
FEATURE_NAMES = (
    ("unsorted", b"zstd\nplanes\n", BOTH_USED, "Two features in falling order."),
    ("twice", b"zstd\nzstd\n", ZSTD_USED, "A feature is named twice."),
    ("without-newline", b"zstd", ZSTD_USED, "The last feature's name does not end in 0A."),
    ("crlf", b"zstd\r\n", ZSTD_USED, "The name ends in 0D 0A."),
    ("empty-name", b"\nzstd\n", ZSTD_USED, "A feature has an empty name."),
    ("upper-case", b"Later\n", one(), "A feature's name has a capital letter."),
    ("leading-digit", b"2nd\n", one(), "A feature's name begins with a digit."),
    ("33-characters", b"a" * 33 + b"\n", one(), "A feature's name has 33 characters."),
    ("not-ascii", "é\n".encode(), one(), "A feature's name is not ASCII."),
    ("nul", b"zstd\0\n", ZSTD_USED, "A feature's name has a zero byte."),
)

# Features that are listed and not used, or used and not listed.
FEATURE_USES = (
    ("zstd-not-used", b"zstd\n", one(), "zstd is listed and not used."),
    ("planes-not-used", b"planes\nzstd\n", ZSTD_USED, "planes is listed and not used."),
    ("zstd-not-listed", b"", ZSTD_USED, "A chunk has codec 1, and zstd is not listed."),
    ("planes-not-listed", b"zstd\n", BOTH_USED, "A chunk has codec 2, and planes is not listed."),
    (
        "zstd-not-listed-planes",
        b"planes\n",
        BOTH_USED,
        "A chunk has codec 2, and zstd is not listed.",
    ),
    (
        "zstd-not-listed-pages",
        b"",
        PAGES_USED,
        "A page is compressed, and zstd is not listed.",
    ),
    (
        "zstd-not-listed-ignorable",
        b"",
        IGNORED_USED,
        "A page of a section that is ignored is compressed, and zstd is not listed.",
    ),
)


def cases() -> Iterator[Case]:
    yield from fixed_part_cases()
    yield from seal_cases()
    yield from feature_cases()


def fixed_part_cases() -> Iterator[Case]:
    for name, note, hooks in FIRST_BYTES:
        yield invalid(f"magic-{name}", "R-6.1", "bad_magic", note, one(), **hooks)
    for major in (0, 2, 256, 65535):
        note = f"The major version is {major}."
        change = head_put(major=major)
        yield invalid(f"major-{major}", "R-6.2", "unknown_major", note, one(), head=change)
    yield from other_major_cases()
    for name, rule, code, note, hooks in LENGTHS:
        yield invalid(name, rule, code, note, one(), **hooks)
    for field in ("features_nbytes", "section_count", "page_count"):
        name, note = field.replace("_", "-"), f"{field} is one more than there is."
        change = head_plus(**{field: 1})
        yield invalid(f"{name}-more", "R-6.6", "bad_head", note, one(), head=change)
        change, note = head_put(**{field: U32}), f"{field} is 2^32-1."
        yield invalid(f"{name}-max", "R-6.6", "bad_head", note, one(), head=change)
    for name, note, change in SUMS:
        yield invalid(name, "R-6.6", "bad_head", note, one(), head=change)


def other_major_cases() -> Iterator[Case]:
    """Version 2 in a file of which only magic and version are as this text says."""
    begin = MAGIC + struct.pack("<H", 2)
    for nbytes in (10, 20, 39, 1000):
        data = begin + noise(nbytes - len(begin), "version 2")
        note = f"Major version 2 in a file of {nbytes} bytes, which may mean anything."
        yield invalid(
            f"major-2-of-{nbytes}-bytes",
            "R-6.2",
            "unknown_major",
            note,
            one(),
            manifest=lambda _, data=data: data,
        )


def seal_cases() -> Iterator[Case]:
    whole = build(one()).files["manifest.dsd"]
    seal = int.from_bytes(whole[12:16], "little") - 32
    rule, code = "R-6.5", "seal_mismatch"
    for name, at, where in (
        ("minor", 10, "the minor version, which a reader ignores"),
        ("section-name", HEAD_FIXED, "a section's name"),
        ("decoded-nbytes", HEAD_FIXED + 16, "a section's length"),
        ("page-digest", HEAD_FIXED + 7 * SECTION_ROW + 4, "a page's digest"),
        ("seal", seal, "the seal"),
        ("seal-end", seal + 31, "the last byte of the seal"),
    ):
        note = f"One bit is flipped in {where}."
        yield invalid(f"flip-{name}", rule, code, note, one(), manifest=flip(at))
    note = "One bit is flipped in a feature's name."
    yield invalid("flip-feature", rule, code, note, ZSTD_USED, manifest=flip_before_seal)
    zeros = whole[:seal] + bytes(32) + whole[seal + 32 :]
    note = "The seal is all zero."
    yield invalid("seal-zero", rule, code, note, one(), manifest=lambda _: zeros)
    rule, code = "R-6.13", "digest_mismatch"
    note = "The caller expects another root digest."
    yield invalid("expected-digest-other", rule, code, note, one(), digest="00" * 32)
    note = "A good checkpoint with one value changed, and the root digest of the one before."
    before = build(tree(1)).root.hex()
    yield invalid("expected-digest-of-a-twin", rule, code, note, tree(2), digest=before)


def feature_cases() -> Iterator[Case]:
    for name, names, base, note in FEATURE_NAMES:
        yield invalid(f"feature-{name}", "R-6.10", "bad_head", note, base, head=features(names))
    code, note = "unknown_feature", "A feature that no reader of this version knows."
    later = features(b"later\n")
    yield invalid("feature-unknown", "R-6.11 R-16.1", code, note, one(), head=later)
    note = "An unknown feature of 32 characters beside a known one."
    longest = features(b"a" + b"-9" * 15 + b"z\nzstd\n")
    yield invalid("feature-unknown-longest", "R-6.11", code, note, ZSTD_USED, head=longest)
    for name, names, base, note in FEATURE_USES:
        code = "feature_mismatch"
        yield invalid(f"feature-{name}", "R-6.12", code, note, base, head=features(names))
