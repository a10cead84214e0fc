"""Labels, and the entries of data files and side files (sections 5, 7 and 10)."""

from collections.abc import Iterator

from vectors.cases import Case, invalid
from vectors.hooks import body_put, in_file, in_side, labelled
from vectors.samples import boxes, one, ranks

BAD_LABELS = (
    ("parent", "../x"),
    ("parent-only", ".."),
    ("absolute", "/etc/passwd"),
    ("folder", "a/b"),
    ("drive", "C:\\x"),
    ("drive-relative", "C:x"),
    ("backslash", "a\\b"),
    ("unc", "\\\\server\\share"),
    ("nul", "a\0b"),
    ("empty", ""),
    ("dot", "."),
    ("hidden", ".hidden"),
    ("dash", "-rf"),
    ("newline-at-end", "model.safetensors\n"),
    ("newline", "a\nb"),
    ("space", "a b"),
    ("201-characters", "x" * 201),
    ("not-ascii", "modèle.safetensors"),
    ("fullwidth-slash", "a\uff0fb"),
    ("digit-not-ascii", "\u0661"),
    ("tilde", "~"),
    ("percent", "%2e%2e%2fx"),
    ("stream", "model.safetensors:stream"),
    ("url", "https://example.org/x"),
)

SIDE = one(sides={"config.json": b"{}"})
TWO_SIDES = one(sides={"a.json": b"{}", "b.json": b"[]"})
TWO_FILES = one(
    "uint8", (2,), *boxes(((0,), (1,)), ((1,), (1,)), files="01"), files=ranks(2), world_size=2
)

# Labels that differ from another one in nothing but case, or not at all.
CLASHES = (
    (
        "case-clash",
        "Two data files differ in case only.",
        TWO_FILES,
        labelled("files", "A.safetensors", "a.safetensors"),
    ),
    (
        "manifest",
        "A data file is called `manifest.dsd`.",
        one(),
        in_file(label="manifest.dsd"),
    ),
    (
        "manifest-case",
        "A data file is called `MANIFEST.dsd`.",
        one(),
        in_file(label="MANIFEST.dsd"),
    ),
    (
        "side-clash",
        "A side file has the label of a data file.",
        SIDE,
        in_side(label="model.safetensors"),
    ),
    (
        "side-case-clash",
        "A side file has the label of a data file in another case.",
        SIDE,
        in_side(label="MODEL.safetensors"),
    ),
    (
        "sides-case-clash",
        "Two side files differ in case only.",
        TWO_SIDES,
        labelled("sides", "A.json", "a.json"),
    ),
)

# Members of a data file's entry that does not allow; `...` takes one away.
FILE_MEMBERS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("label-missing", "has no label", {"label": ...}),
    ("prefix-missing", "has no prefix", {"prefix": ...}),
    ("metadata-missing", "has no metadata", {"metadata": ...}),
    ("label-type", "has a label that is no string", {"label": b"model.safetensors"}),
    ("header-nbytes-type", "has a header_nbytes that is a string", {"header_nbytes": "128"}),
    ("header-nbytes-7", "has a header of 7 bytes", {"header_nbytes": 7}),
    ("header-nbytes-negative", "has a header of -1 bytes", {"header_nbytes": -1}),
    ("nbytes-less-than-header", "is shorter than its header", {"nbytes": 100}),
    ("nbytes-float", "has a length that is a float", {"nbytes": 152.0}),
    ("metadata-type", "has metadata that are an array", {"metadata": []}),
    ("metadata-value-type", "has a number as metadata", {"metadata": {"epoch": 1}}),
    ("prefix-type", "has a prefix that is a string", {"prefix": ""}),
    ("prefix-part-type", "has a prefix with a number", {"prefix": [0]}),
    ("rank-beyond-world", "was written by rank 1 of 1", {"rank": 1}),
    ("rank-negative", "was written by rank -1", {"rank": -1}),
    ("rank-bool", "was written by rank false", {"rank": False}),
)

SIDE_MEMBERS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("digest-short", "31 bytes of digest", {"digest": bytes(31)}),
    ("digest-str", "a digest in hexadecimal", {"digest": "00" * 32}),
    ("nbytes-missing", "no length", {"nbytes": ...}),
    ("nbytes-negative", "a negative length", {"nbytes": -2}),
)


def cases() -> Iterator[Case]:
    yield from label_cases()
    yield from file_cases()
    yield from side_cases()


def label_cases() -> Iterator[Case]:
    for name, label in BAD_LABELS:
        shown = ascii(label if len(label) < 40 else label[:10] + "...")
        note, change = f"A data file is called {shown}.", in_file(label=label)
        yield invalid(f"label-{name}", "R-5.2", "bad_label", note, one(), body=change)
    note, change = "A side file is called `../config.json`.", in_side(label="../config.json")
    yield invalid("label-side-parent", "R-5.2 R-7.6", "bad_label", note, SIDE, body=change)
    for name, note, base, change in CLASHES:
        yield invalid(f"label-{name}", "R-5.3", "duplicate_label", note, base, body=change)


def file_cases() -> Iterator[Case]:
    rule, code = "R-10.1", "bad_body"
    for name, what, members in FILE_MEMBERS:
        note = f"A data file {what}."
        yield invalid(f"file-{name}", rule, code, note, one(), body=in_file(**members))
    note, change = "A data file has a length of 2^63.", in_file(nbytes=1 << 63)
    yield invalid("file-nbytes-2-63", "R-17.2", code, note, one(), body=change)
    note, change = "An entry of files is a string.", body_put("files", ["model.safetensors"])
    yield invalid("body-files-entry-type", "R-7.4 R-10.1", code, note, one(), body=change)
    note = "The entries of files are in falling order."
    change = labelled("files", "b.safetensors", "a.safetensors")
    yield invalid("files-unsorted", rule, code, note, TWO_FILES, body=change)
    note, change = "A data file's entry has a key that is not known.", in_file(later=1)
    yield invalid("file-unknown-key", "R-10.1 R-7.4", "unknown_key", note, one(), body=change)


def side_cases() -> Iterator[Case]:
    for name, what, members in SIDE_MEMBERS:
        note = f"A side file's entry has {what}."
        yield invalid(f"side-{name}", "R-7.6", "bad_body", note, SIDE, body=in_side(**members))
    note, change = "A side file has a length of 2^63.", in_side(nbytes=1 << 63)
    yield invalid("side-nbytes-2-63", "R-17.2 R-7.6", "bad_body", note, SIDE, body=change)
    note = "The entries of sides are in falling order."
    change = labelled("sides", "b.json", "a.json")
    yield invalid("sides-unsorted", "R-7.4", "bad_body", note, TWO_SIDES, body=change)
    note, change = "A side file's entry has a key that is not known.", in_side(rank=0)
    yield invalid("side-unknown-key", "R-7.6 R-7.4", "unknown_key", note, SIDE, body=change)
