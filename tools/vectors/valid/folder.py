"""The head, sections, pages, data files, side files, provenance, the folder."""

from collections.abc import Iterator

from vectors import zstd
from vectors.builder import build
from vectors.cases import Case, valid
from vectors.declare import Checkpoint, DataFile, Section
from vectors.samples import boxes, one, ranks, tensor, tree, two
from vectors.wire import noise, pack

LATER = [
    Section(b"zz-later", noise(100), 1),
    Section(b"index", noise(70_000), 1),
    Section(b"empty", b"", 1),
    Section(b"a_9-", b"x", 1),
]
ZEROS = Section(b"later", bytes(70_000), 1)
# Canonical msgpack, and none of it a value of section 11.
EXTENSIONS = {
    "": None,
    "arrays": [[], [0, -1.5], ["no tag", {"key": [True]}]],
    "dict": ["dict", [2, None], [1, None], [1, None]],
    "nan": float("nan"),
    "pickle": ["pickle", b"\x80\x04N."],
    "tensor": ["tensor", 99],
    "tree": {"w": ["tensor", -1]},
}
METADATA = {"z": "last", "format": "pt", "": "é🦙", 'q"\\': "\n\x01\x7f\u2028"}
SPECIAL_FILES = [
    {"op": "mkdir", "label": "folder"},
    {"op": "symlink", "label": "link", "target": "/nonexistent"},
    {"op": "fifo", "label": "pipe"},
]

MESH = {"axes": ["replicate", "shard"], "shape": [2, 2], "ranks": [0, 1, 2, 3]}
OTHER_MESH = {"axes": ["pp"], "shape": [3], "ranks": [5, 1, 3]}
LAYOUTS = [
    {"mesh": 0, "placements": ["replicate", "shard(0)"]},
    {"mesh": 0, "placements": ["shard(1)", "strided_shard(0,2)"]},
    {"mesh": 1, "placements": ["replicate"]},
]


def cases() -> Iterator[Case]:
    yield example()
    yield from head_cases()
    yield from page_cases()
    yield from file_cases()
    yield from provenance_cases()
    yield from folder_cases()


def example() -> Case:
    """The one that spec/example.md explains."""
    tensors = [tensor("int8", (3,)), tensor("float32", (2, 3))]
    checkpoint = Checkpoint(tensors, {"step": 7, "b": ["tensor", 0], "w": ["tensor", 1]})
    return valid(
        "example", "R-6.6 R-7.3 R-7.4", "The checkpoint that spec/example.md explains.", checkpoint
    )


def head_cases() -> Iterator[Case]:
    rules = "R-6.1 R-6.2 R-6.3 R-6.4 R-6.5 R-6.6 R-6.7 R-6.9 R-7.1"
    yield valid("minimal", rules, "One tensor, one value, one file.", one())
    note = "A later minor version is read."
    yield valid("minor-7", "R-6.2 R-16.1", note, one(minor=7))
    note = "The last minor version is read."
    yield valid("minor-65535", "R-16.1", note, one(minor=0xFFFF))
    note = "The caller states the root digest, and it is this one."
    yield valid("expected-digest", "R-6.13", note, one(), digest="root")
    note = "Unknown sections that may be ignored: eight bytes of name, two pages, none."
    yield valid("section-ignorable", "R-7.2 R-16.1", note, one(more_sections=LATER))
    note = "A compressed section that is ignored, and the only thing that needs zstd."
    checkpoint = one(more_sections=[ZEROS], page=zstd.zeros_only)
    yield valid("section-ignorable-compressed", "R-6.12 R-7.2", note, checkpoint)


def page_cases() -> Iterator[Case]:
    long = {"text": "compressible " * 12_000}
    yield valid(
        "pages-compressed",
        "R-6.8 R-6.12 R-12.1",
        "Each page that gets shorter is one zstd frame; a body of three pages.",
        tree(1, user=long, page=zstd.smaller),
    )
    many = [tensor("uint8", (1,), str(i % 3)) for i in range(300)]
    yield valid(
        "pages-compressed-columns",
        "R-6.8 R-7.3",
        "Compressed pages of all sections but those of digests, which do not shrink.",
        Checkpoint(many, {f"t{i:03}": ["tensor", i] for i in range(300)}, page=zstd.smaller),
    )
    yield valid(
        "pages-compressed-by-hand",
        "R-6.8 R-12.1",
        "A page stored as a frame without entropy coding.",
        one(user={"text": " " * 70_000}, page=zstd.hand_frame_if_smaller),
    )
    rules, note = "R-6.6 R-6.8", "The body fills its page to the last byte."
    yield valid("body-of-one-page", rules, note, filled(65_536))
    note = "The body needs one byte of a second page."
    yield valid("body-of-one-page-and-a-byte", rules, note, filled(65_537))


def filled(nbytes: int) -> Checkpoint:
    """A checkpoint whose body has this length."""
    base = len(pack(build(one(user={"fill": "x" * 60_000})).body))
    return one(user={"fill": "x" * (60_000 + nbytes - base)})


def file_cases() -> Iterator[Case]:
    for name, rules, note, file in (
        (
            "metadata-custom",
            "R-10.4 R-10.10",
            "Custom metadata, in the order of bytes, with escapes.",
            DataFile(metadata=METADATA),
        ),
        (
            "metadata-empty",
            "R-10.4",
            "Empty metadata: the header has no __metadata__.",
            DataFile(metadata={}),
        ),
        (
            "header-unpadded",
            "R-10.4 R-10.8",
            "A header without padding, whose length is a multiple of nothing.",
            DataFile(header_multiple=1),
        ),
        (
            "header-4096",
            "R-10.8",
            "A header padded to 4,096 bytes.",
            DataFile(header_multiple=4096),
        ),
    ):
        yield valid(f"file-{name}", rules, note, one(files=[file]))
    note = "A rank that wrote no tensors: its file has a header only."
    yield valid("file-without-chunks", "R-10.2", note, two(files=ranks(2), world_size=2))
    labels = ("0", "A-b_c.D..e-", "_" + "x" * 199, "a")
    quarters = boxes(*(((i,), (1,)) for i in range(4)), files="0123")
    files = [DataFile(label) for label in labels]
    note = "Labels of one and of 200 characters, with dots and dashes."
    yield valid("file-labels", "R-5.2 R-10.1", note, one("uint8", (4,), *quarters, files=files))
    sides = {"config.json": b'{"model_type": "test"}\n', "empty.bin": b""}
    yield valid("sides", "R-7.6", "Two side files, one of them empty.", one(sides=sides))
    extensions = {"org.example": {"a": ["tuple", 1, None]}, "later": True}
    note = "Unknown extensions are ignored."
    yield valid("extensions", "R-16.1", note, one(extensions=extensions))
    note = "Extensions are checked by section 8 alone: these would be no values."
    yield valid("extensions-odd", "R-7.4 R-16.1", note, one(extensions=EXTENSIONS))


def provenance_cases() -> Iterator[Case]:
    halves = boxes(((0, 0), (2, 4)), ((2, 0), (2, 4)), files="01")
    quarters = boxes(*(((i, j), (2, 2)) for i in (0, 2) for j in (0, 2)), files="0123")
    tensors = [
        tensor("float32", (4, 4), "", *halves),
        tensor("float32", (4, 4), "b", *quarters),
        tensor("int8", (3,), "", *boxes(((0,), (3,)), files="2")),
        tensor("int8", (2,), "", *boxes(((0,), (2,)), files="3")),
    ]
    for item, layout in zip(tensors, (1, 2, 3, 0), strict=True):
        item.layout = layout
    yield valid(
        "provenance",
        "R-14.1 R-9.1",
        "Six ranks, two meshes, three layouts, a tensor without one; two ranks wrote no file.",
        Checkpoint(
            tensors,
            {name: ["tensor", index] for index, name in enumerate("abcd")},
            files=ranks(4),
            meshes=[MESH, OTHER_MESH],
            layouts=LAYOUTS,
            world_size=6,
        ),
    )
    yield valid(
        "provenance-unused",
        "R-14.1",
        "Meshes and layouts that no tensor has; a mesh without axes.",
        one(
            meshes=[{"axes": [], "shape": [], "ranks": [0]}],
            layouts=[{"mesh": 0, "placements": []}],
        ),
    )
    files = [DataFile("a.safetensors", (), 4), DataFile("b.safetensors", (), 4)]
    halves = boxes(((0,), (1,)), ((1,), (1,)), files="01")
    note = "A rank that wrote two files; ranks in no order."
    checkpoint = one("uint8", (2,), *halves, files=files, world_size=5)
    yield valid("two-files-of-one-rank", "R-10.1", note, checkpoint)


def folder_cases() -> Iterator[Case]:
    unlisted = {"README.md": b"hello\n", ".hidden": b"", "model.safetensors.bak": b"old"}
    note = "Files that the manifest does not list are ignored."
    yield valid("unlisted-files", "R-5.5", note, one(unlisted=unlisted))
    note = "A folder, a link and a pipe that the manifest does not list are ignored."
    yield valid("unlisted-special-files", "R-5.4 R-5.5", note, one(), setup=SPECIAL_FILES)
