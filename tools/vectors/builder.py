"""From a declared checkpoint to its bytes, in layers, each of which a hook may change.

What lies above a hook is made from what it left behind: a broken column gets right page digests
and a right seal, so that it is the only fault.

    chunks    list[StoredChunk]   blocks as stored, their digests, byte offsets (then: headers)
    body      dict                the body in wire form
    body_bytes  bytes             the body, encoded
    columns   dict[str, list]     the columns of section 7, by name
    sections  list[Section]       names, flags, bytes
    pages     list[list[Page]]    stored pages, by section
    head      Head                the fixed part, rows, features
    head_bytes  bytes             the head without its seal
    manifest  bytes               the whole manifest
    files     dict[str, bytes]    all files of the folder

A hook gets the value, and either changes it in place or returns another.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from vectors.chunks import storage_order, store_chunks
from vectors.datafiles import make_files
from vectors.declare import Checkpoint, DataFile, Head, Page, Section, SectionRow, StoredChunk
from vectors.wire import digest, pack

PAGE_NBYTES = 65_536

Hook = Callable[[object], object]


@dataclass
class Built:
    files: dict[str, bytes]
    root: bytes
    features: list[str]
    body: dict


def build(checkpoint: Checkpoint, **hooks: Hook) -> Built:
    """Encode a checkpoint; hooks by the names of the layers."""

    def hooked(layer: str, value):
        hook = hooks.get(layer)
        changed = hook(value) if hook else None
        return value if changed is None else changed

    unknown = set(hooks) - set(LAYERS)
    if unknown:
        raise ValueError(f"no such layer: {unknown}")
    chunks = hooked("chunks", store_chunks(checkpoint))
    data_files = make_files(checkpoint, storage_order(chunks))
    body = hooked("body", make_body(checkpoint, data_files))
    body_bytes = hooked("body_bytes", pack(body))
    columns = hooked("columns", make_columns(checkpoint, chunks))
    sections = [Section(b"body", body_bytes), *column_sections(columns)]
    sections = hooked("sections", [*sections, *checkpoint.more_sections])
    pages = hooked("pages", [make_pages(section.data, checkpoint.page) for section in sections])
    features = find_features(chunks, sections, pages)
    head = hooked("head", make_head(checkpoint, sections, pages, features))
    head_bytes = hooked("head_bytes", pack_head(head))
    seal = digest(head_bytes)
    stored_pages = b"".join(page.stored for section in pages for page in section)
    manifest = hooked("manifest", head_bytes + seal + stored_pages)
    files = data_files | checkpoint.sides | checkpoint.unlisted | {"manifest.dsd": manifest}
    return Built(hooked("files", files), seal, features, body)


LAYERS = (
    "chunks",
    "body",
    "body_bytes",
    "columns",
    "sections",
    "pages",
    "head",
    "head_bytes",
    "manifest",
    "files",
)


def make_body(checkpoint: Checkpoint, data_files: dict[str, bytes]) -> dict:
    return {
        "block_nbytes": checkpoint.block_nbytes,
        "dtypes": dtypes_in_use(checkpoint),
        "extensions": checkpoint.extensions,
        "files": [file_entry(declared, data_files) for declared in checkpoint.files],
        "layouts": checkpoint.layouts,
        "meshes": checkpoint.meshes,
        "sides": [
            {"digest": digest(data), "label": label, "nbytes": len(data)}
            for label, data in sorted(checkpoint.sides.items())
        ],
        "tree": checkpoint.tree,
        "user": checkpoint.user,
        "world_size": checkpoint.world_size,
    }


def dtypes_in_use(checkpoint: Checkpoint) -> list[str]:
    return sorted({tensor.dtype for tensor in checkpoint.tensors})


def file_entry(declared: DataFile, data_files: dict[str, bytes]) -> dict:
    data = data_files[declared.label]
    return {
        "header_nbytes": 8 + int.from_bytes(data[:8], "little"),
        "label": declared.label,
        "metadata": declared.metadata,
        "nbytes": len(data),
        "prefix": list(declared.prefix),
        "rank": declared.rank,
    }


def make_columns(checkpoint: Checkpoint, chunks: list[StoredChunk]) -> dict[str, list]:
    names = dtypes_in_use(checkpoint)
    tensors = checkpoint.tensors
    ordered = storage_order(chunks)
    framed = [chunk for chunk in ordered if chunk.codec]
    first_block = first_numbers(ordered)
    first_frame = first_numbers(framed)
    blocks = [block for chunk in ordered for block in chunk.blocks]
    frames = [block for chunk in framed for block in chunk.blocks]
    return {
        "dtype": [names.index(tensor.dtype) for tensor in tensors],
        "ndim": [len(tensor.shape) for tensor in tensors],
        "chunk_count": [len(tensor.chunks) for tensor in tensors],
        "layout": [tensor.layout for tensor in tensors],
        "shapes": [dim for tensor in tensors for dim in tensor.shape],
        "file": [chunk.file for chunk in chunks],
        "codec": [chunk.codec for chunk in chunks],
        "byte_offset": [chunk.byte_offset for chunk in chunks],
        "first_block": [first_block[id(chunk)] for chunk in chunks],
        "first_frame": [first_frame.get(id(chunk), 0) for chunk in chunks],
        "boxes": [n for chunk in chunks for n in (*chunk.chunk.offset, *chunk.chunk.shape)],
        "digests": [block.digest for block in blocks],
        "stored_nbytes": [len(block.stored) for block in frames],
        "frame_digests": [block.stored_digest for block in frames],
    }


def first_numbers(chunks: list[StoredChunk]) -> dict[int, int]:
    numbers, count = {}, 0
    for chunk in chunks:
        numbers[id(chunk)] = count
        count += len(chunk.blocks)
    return numbers


def column_sections(columns: dict[str, list]) -> list[Section]:
    def numbers(kind: str, *names: str) -> bytes:
        return b"".join(struct.pack(f"<{len(columns[n])}{kind}", *columns[n]) for n in names)

    return [
        Section(b"tensors", numbers("I", "dtype", "ndim", "chunk_count", "layout")),
        Section(b"shapes", numbers("Q", "shapes")),
        Section(
            b"chunks",
            numbers("I", "file", "codec")
            + numbers("Q", "byte_offset", "first_block", "first_frame"),
        ),
        Section(b"boxes", numbers("Q", "boxes")),
        Section(b"digests", b"".join(columns["digests"])),
        Section(b"frames", numbers("I", "stored_nbytes") + b"".join(columns["frame_digests"])),
    ]


def make_pages(data: bytes, page: Callable[[bytes], bytes]) -> list[Page]:
    stored = [page(data[at : at + PAGE_NBYTES]) for at in range(0, len(data), PAGE_NBYTES)]
    return [Page(piece, digest(piece)) for piece in stored]


def find_features(
    chunks: list[StoredChunk], sections: list[Section], pages: list[list[Page]]
) -> list[str]:
    codecs = {chunk.codec for chunk in chunks}
    compressed = any(
        len(page.stored) < len(section.data[index * PAGE_NBYTES :][:PAGE_NBYTES])
        for section, rows in zip(sections, pages, strict=False)
        for index, page in enumerate(rows)
    )
    return ["planes"] * (2 in codecs) + ["zstd"] * (compressed or bool(codecs & {1, 2}))


def make_head(
    checkpoint: Checkpoint,
    sections: list[Section],
    pages: list[list[Page]],
    features: list[str],
) -> Head:
    rows = [
        SectionRow(
            section.name, section.flags, -(-len(section.data) // PAGE_NBYTES), len(section.data)
        )
        for section in sections
    ]
    page_rows = [(len(page.stored), page.digest) for rows in pages for page in rows]
    head = Head(rows, page_rows, "".join(f"{name}\n" for name in features).encode())
    head.minor = checkpoint.minor
    return add_up(head)


def add_up(head: Head) -> Head:
    """Set the counts and lengths of a head from its rows."""
    head.section_count, head.page_count = len(head.rows), len(head.pages)
    head.features_nbytes = len(head.features)
    head.head_nbytes = 72 + 24 * len(head.rows) + 36 * len(head.pages) + len(head.features)
    head.manifest_nbytes = head.head_nbytes + sum(nbytes for nbytes, _ in head.pages)
    return head


def pack_head(head: Head) -> bytes:
    """The head without its seal."""
    fixed = struct.pack(
        "<8sHHIQIII4s",
        head.magic,
        head.major,
        head.minor,
        head.head_nbytes,
        head.manifest_nbytes,
        head.features_nbytes,
        head.section_count,
        head.page_count,
        head.reserved,
    )
    rows = [
        struct.pack("<8sIIQ", row.name, row.flags, row.pages, row.decoded_nbytes)
        for row in head.rows
    ]
    pages = [struct.pack("<I32s", *page) for page in head.pages]
    return fixed + b"".join(rows) + b"".join(pages) + head.features
