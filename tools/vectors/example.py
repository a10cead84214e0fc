"""spec/example.md: the vector `valid/example`, byte by byte."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from vectors.builder import PAGE_NBYTES, Built, build
from vectors.cases import Case
from vectors.spectext import SPEC, ByteField, Column, byte_tables, column_tables
from vectors.wire import digest

EXAMPLE = SPEC / "example.md"
CASE_ID = "example"
BYTES_PER_LINE = 16
NOTES = {"head_nbytes": "the pages begin here", "manifest_nbytes": "length of the file"}
TEXT = SPEC / "dsd-1.md"


@dataclass(frozen=True)
class Field:
    nbytes: int
    name: str
    meaning: str = ""


def example_text(case: Case) -> str:
    built = build(case.checkpoint)
    label = case.checkpoint.files[0].label
    return TEMPLATE.format(
        tree=", ".join(f"`{name}`" for name in case.checkpoint.tree),
        root=built.root.hex(),
        manifest="\n".join(dump(built.files["manifest.dsd"], manifest_fields(built))),
        label=label,
        data_file="\n".join(dump(built.files[label], data_file_fields(built, label))),
    )


TEMPLATE = """\
# An example, byte by byte

The vector `valid/example`: a state of {tree}, of which the last two are tensors: `b` of dtype int8 and shape [3], `w` of dtype float32 and shape [2, 3]. One process wrote it, into one data file. Made by `tools/make_vectors.py --example`; it explains `dsd-1.md` and does not bind.

Its root digest is `{root}`.

Each line has the offset (hexadecimal), the bytes, the name that the text gives them, and what they say. Numbers in tables are little-endian, numbers in the body are msgpack's.

## `manifest.dsd`

```
{manifest}
```

## `{label}`

The header is derived from the manifest (section 10). This file is smaller than one that a writer makes: R-10.8 has the data begin at a multiple of 4,096.

```
{data_file}
```
"""  # noqa: E501


def dump(data: bytes, fields: Iterator[Field]) -> Iterator[str]:
    at = 0
    for field in fields:
        piece = data[at : at + field.nbytes]
        for begin in range(0, max(len(piece), 1), BYTES_PER_LINE):
            line = piece[begin : begin + BYTES_PER_LINE].hex(" ").upper()
            words = f"{field.name:<30} {field.meaning}" if begin == 0 else ""
            yield f"{at + begin:04X}  {line:<47}  {words}".rstrip()
        at += field.nbytes
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes of the example have no field")


def manifest_fields(built: Built) -> Iterator[Field]:
    data = built.files["manifest.dsd"]
    fixed, section_row, page_row = byte_tables(TEXT)
    sections = section_lengths(data)
    yield from row_fields(data, 0, "", fixed)
    at = 40
    for name in sections:
        yield from row_fields(data, at, f"row of {name}: ", section_row)
        at += 24
    for name, nbytes in sections.items():
        if nbytes:
            yield from row_fields(data, at, f"page of {name}: ", page_row)
            at += 36
    yield Field(32, "seal", "digest of all bytes before it: the root digest")
    yield from page_fields(data, sections)


def row_fields(data: bytes, at: int, prefix: str, table: list[ByteField]) -> Iterator[Field]:
    for field in table:
        piece = data[at + field.offset : at + field.offset + field.nbytes]
        shown = str(int.from_bytes(piece, "little")) if field.type != "bytes" else ""
        shown = piece.rstrip(b"\0").decode() if field.name == "name" else shown
        meaning = ", ".join(filter(None, (shown, NOTES.get(field.name))))
        yield Field(field.nbytes, prefix + field.name, meaning)


def section_lengths(data: bytes) -> dict[str, int]:
    """The sections of a manifest and their lengths, each stored as it is, in one page or none."""
    rows = [struct.unpack_from("<8sIIQ", data, 40 + 24 * index) for index in range(7)]
    if any(nbytes > PAGE_NBYTES for *_, nbytes in rows):
        raise ValueError("the example has a section of several pages")
    return {name.rstrip(b"\0").decode(): nbytes for name, _, _, nbytes in rows}


def page_fields(data: bytes, sections: dict[str, int]) -> Iterator[Field]:
    columns = {row["section"]: found for row, found in column_tables(TEXT)}
    at = int.from_bytes(data[12:16], "little")
    for name, nbytes in sections.items():
        section = data[at : at + nbytes]
        if name == "body":
            yield from body_fields(section)
        elif columns[name]:
            yield from column_fields(name, columns[name], section)
        else:
            yield from number_fields(name, section)
        at += nbytes


def column_fields(name: str, columns: list[Column], section: bytes) -> Iterator[Field]:
    """Numbers in columns of one length, as in `tensors` and `chunks`."""
    at = 0
    for column in columns:
        for index in range(len(section) // sum(column.width for column in columns)):
            number = int.from_bytes(section[at : at + column.width], "little")
            yield Field(column.width, f"{name}: {column.name}[{index}]", str(number))
            at += column.width


def number_fields(name: str, section: bytes) -> Iterator[Field]:
    """Numbers of `shapes` and `boxes`, or digests."""
    if name == "digests":
        for index in range(len(section) // 32):
            yield Field(32, f"digests[{index}]", "digest of a block")
        return
    for index, (number,) in enumerate(struct.iter_unpack("<Q", section)):
        yield Field(8, f"{name}[{index}]", str(number))


def body_fields(body: bytes) -> Iterator[Field]:
    """A field for each token of the body; names are paths."""
    rest = iter(tokens(body))
    yield from value_fields(rest, "body")


def value_fields(rest: Iterator[tuple[int, object, int]], name: str) -> Iterator[Field]:
    nbytes, value, children = next(rest)
    if value is dict:
        yield Field(nbytes, name, f"map of {children}")
        for _ in range(children):
            key_nbytes, key, _ = next(rest)
            inner = str(key) if name == "body" else f"{name}.{key}"
            yield Field(key_nbytes, "  key", f'"{key}"')
            yield from value_fields(rest, inner)
    elif value is list:
        yield Field(nbytes, name, f"array of {children}")
        for index in range(children):
            yield from value_fields(rest, f"{name}[{index}]")
    else:
        yield Field(nbytes, name, f'"{value}"' if isinstance(value, str) else str(value))


def tokens(body: bytes) -> Iterator[tuple[int, object, int]]:
    """Length, value and number of children of each token; of the few types of the example."""
    at = 0
    while at < len(body):
        mark = body[at]
        if mark < 0x80:
            token = (1, mark, 0)
        elif mark < 0x90:
            token = (1, dict, mark & 15)
        elif mark < 0xA0:
            token = (1, list, mark & 15)
        elif mark < 0xC0:
            nbytes = mark & 31
            token = (1 + nbytes, body[at + 1 : at + 1 + nbytes].decode(), 0)
        elif mark in (0xCC, 0xCD, 0xCE):
            nbytes = {0xCC: 1, 0xCD: 2, 0xCE: 4}[mark]
            token = (1 + nbytes, int.from_bytes(body[at + 1 : at + 1 + nbytes], "big"), 0)
        else:
            raise ValueError(f"the example has no token {mark:#x}")
        yield token
        at += token[0]


def data_file_fields(built: Built, label: str) -> Iterator[Field]:
    data = built.files[label]
    header_nbytes = 8 + int.from_bytes(data[:8], "little")
    text = data[8:header_nbytes].rstrip(b" ").decode()
    yield Field(8, "header_nbytes - 8", str(header_nbytes - 8))
    for piece in text.replace("},", "},\n").splitlines():
        yield Field(len(piece.encode()), "JSON", piece)
    yield Field(header_nbytes - 8 - len(text), "padding", "spaces")
    offsets = byte_offsets(built.files["manifest.dsd"])
    order = sorted(range(2), key=lambda index: offsets[index])
    ends = [*(offsets[index] for index in order[1:]), len(data)]
    for index, end in zip(order, ends, strict=True):
        block = data[offsets[index] : end]
        yield Field(len(block), f"chunk {index}", f"digest {digest(block).hex()[:16]}...")


def byte_offsets(manifest: bytes) -> tuple[int, int]:
    """The column of that name, of the example's two chunks."""
    at = int.from_bytes(manifest[12:16], "little")
    for name, nbytes in section_lengths(manifest).items():
        if name == "chunks":
            return struct.unpack_from("<2Q", manifest, at + 16)
        at += nbytes
    raise LookupError("no chunks")


def dumped_bytes(text: str) -> list[bytes]:
    """The bytes of each dump of a text, read back from its hexadecimal digits."""
    found = []
    for block in text.split("```\n")[1::2]:
        digits = "".join(line[6:53] for line in block.splitlines())
        found.append(bytes.fromhex(digits))
    return found
