"""The folder, and manifests that end too early or too late (sections 5 and 6)."""

from collections.abc import Iterator

from vectors.builder import PAGE_NBYTES, build
from vectors.cases import Case, invalid
from vectors.hooks import fifo, mkdir, rename, symlink, without
from vectors.samples import one

HEAD_FIXED = 40
SECTION_ROW = 24
PAGE_ROW = 36
MANIFEST = "manifest.dsd"
BACKUP = "manifest.dsd.bak"

IRREGULAR = (
    ("symlink", symlink(MANIFEST, BACKUP), "a link to a good one beside it"),
    ("symlink-dangling", symlink(MANIFEST, "nowhere"), "a link to nothing"),
    ("fifo", fifo(MANIFEST), "a pipe, and a reader that opened it would wait for ever"),
    ("folder", mkdir(MANIFEST), "a folder"),
)


# What lies in the place of the folder, after it was removed.
NO_FOLDER = (
    ("missing", [], "There is no such folder."),
    ("link-to-nothing", symlink("", "nowhere"), "The folder is a link to nothing."),
    ("pipe", fifo(""), "A pipe lies in the place of the folder."),
)


def cases() -> Iterator[Case]:
    yield from missing_cases()
    yield from cut_cases()
    yield from append_cases()


def missing_cases() -> Iterator[Case]:
    code, gone = "no_manifest", {"op": "remove", "label": ""}
    for name, instead, note in NO_FOLDER:
        yield invalid(f"folder-{name}", "R-5.1", code, note, one(), setup=[gone, *instead])
    note = "A folder of data files alone."
    yield invalid("manifest-missing", "R-5.1", code, note, one(), files=without(MANIFEST))
    for name, setup, what in IRREGULAR:
        note = f"The manifest is {what}."
        away = rename(MANIFEST, BACKUP)
        yield invalid(
            f"manifest-{name}", "R-5.4", "not_regular_file", note, one(), files=away, setup=setup
        )


def cut_cases() -> Iterator[Case]:
    whole = build(one()).files[MANIFEST]
    pages = HEAD_FIXED + 7 * SECTION_ROW
    head = int.from_bytes(whole[12:16], "little")
    places = (
        ("empty", 0, "has no bytes"),
        ("in-magic", 7, "ends inside the magic"),
        ("after-magic", 8, "is the magic alone"),
        ("in-major", 9, "ends inside the major version"),
        ("after-major", 10, "ends behind the major version"),
        ("in-fixed-part", HEAD_FIXED - 1, "ends in the last byte of the fixed part"),
        ("after-fixed-part", HEAD_FIXED, "is the fixed part alone"),
        ("in-section-rows", HEAD_FIXED + SECTION_ROW + 6, "ends inside a section row"),
        ("after-section-rows", pages, "ends before the page rows"),
        ("in-page-rows", pages + PAGE_ROW + 14, "ends inside a page row"),
        ("before-seal", head - 32, "ends before the seal"),
        ("in-seal", head - 1, "ends inside the seal"),
        ("after-head", head, "is the head alone"),
        ("in-first-page", head + 1, "ends inside the body's page"),
        ("in-last-page", len(whole) - 1, "lacks its last byte"),
    )
    for name, nbytes, what in places:
        rule, code = ("R-6.1", "bad_magic") if nbytes < 8 else ("R-6.3", "truncated")
        note = f"The manifest {what}."
        yield invalid(
            f"cut-{name}", rule, code, note, one(), manifest=lambda data, n=nbytes: data[:n]
        )


def append_cases() -> Iterator[Case]:
    for name, added, what in (
        ("byte", lambda _: b"\0", "A zero byte follows"),
        ("manifest", lambda data: data, "A second manifest follows"),
        ("page", lambda _: bytes(PAGE_NBYTES), "64 KiB follow"),
    ):
        note = f"{what} the last page."
        yield invalid(
            f"append-{name}",
            "R-6.7",
            "trailing_bytes",
            note,
            one(),
            manifest=lambda data, added=added: data + added(data),
        )
