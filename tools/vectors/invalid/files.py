"""Data files and side files that are missing, no files, or of another length or content."""

from collections.abc import Iterator

from vectors.cases import Case, invalid
from vectors.hooks import edited, fifo, flip, mkdir, rename, symlink, without
from vectors.samples import one

DATA = "model.safetensors"
COPY = "copy.safetensors"
SIDE = "config.json"
SIDE_COPY = "copy.json"
WITH_SIDE = one(sides={SIDE: b'{"model_type": "test"}\n'})

IRREGULAR = (
    ("symlink", "is a link to a good copy", rename(DATA, COPY), symlink(DATA, COPY)),
    ("symlink-out", "is a link out of the folder", without(DATA), symlink(DATA, "/dev/zero")),
    ("symlink-dangling", "is a link to nothing", without(DATA), symlink(DATA, "nowhere")),
    ("fifo", "is a pipe", without(DATA), fifo(DATA)),
    ("folder", "is a folder", without(DATA), mkdir(DATA)),
)
SIDE_IRREGULAR = (
    ("symlink", "is a link to a good copy", rename(SIDE, SIDE_COPY), symlink(SIDE, SIDE_COPY)),
    ("fifo", "is a pipe", without(SIDE), fifo(SIDE)),
    ("folder", "is a folder", without(SIDE), mkdir(SIDE)),
)
SIZES = (
    ("short", "lacks its last byte", lambda data: data[:-1]),
    ("header-only", "ends behind its header", lambda data: data[:128]),
    ("empty", "has no bytes", lambda _: b""),
    ("long", "has a byte too much", lambda data: data + b"\0"),
)
SIDE_SIZES = (
    ("short", "lacks its last byte", lambda data: data[:-1]),
    ("long", "has a byte too much", lambda data: data + b"\n"),
)
SIDE_BYTES = (
    ("flip", "One bit of a side file is flipped.", flip(5)),
    (
        "other",
        "A side file has other bytes of the same length.",
        lambda data: data.replace(b"test", b"evil"),
    ),
)


def cases() -> Iterator[Case]:
    yield from data_cases()
    yield from side_cases()


def data_cases() -> Iterator[Case]:
    rule, code = "R-10.3", "missing_file"
    note = "A data file is not there."
    yield invalid("file-missing", rule, code, note, one(), files=without(DATA))
    note, capitals = "A data file has its name in capitals.", rename(DATA, DATA.upper())
    yield invalid("file-in-another-case", rule, code, note, one(), files=capitals)
    for name, what, files, setup in IRREGULAR:
        case_id, note = f"file-{name}", f"A data file {what}."
        code = "not_regular_file"
        yield invalid(case_id, "R-5.4", code, note, one(), files=files, setup=setup)
    for name, what, change in SIZES:
        case_id, note = f"file-{name}", f"A data file {what}."
        files = edited(DATA, change)
        yield invalid(case_id, rule, "file_size_mismatch", note, one(), files=files)


def side_cases() -> Iterator[Case]:
    for name, note, change in SIDE_BYTES:
        case_id, code, files = f"side-{name}", "side_checksum_mismatch", edited(SIDE, change)
        yield invalid(case_id, "R-7.6", code, note, WITH_SIDE, files=files)
    rules = "R-10.3 R-7.6"
    for name, what, change in SIDE_SIZES:
        case_id, code, note = f"side-{name}", "file_size_mismatch", f"A side file {what}."
        yield invalid(case_id, rules, code, note, WITH_SIDE, files=edited(SIDE, change))
    note = "A side file is not there."
    yield invalid("side-missing", rules, "missing_file", note, WITH_SIDE, files=without(SIDE))
    for name, what, files, setup in SIDE_IRREGULAR:
        case_id, code, note = f"side-{name}", "not_regular_file", f"A side file {what}."
        yield invalid(case_id, "R-5.4", code, note, WITH_SIDE, files=files, setup=setup)
