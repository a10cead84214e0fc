"""Data files, their headers, and the keys of chunks: section 10."""

import json
import struct

from vectors.declare import Checkpoint, Chunk, Shape, StoredChunk, Tensor
from vectors.wire import dtypes, is_decimal, pack


def make_files(checkpoint: Checkpoint, ordered: list[StoredChunk]) -> dict[str, bytes]:
    """Make the data files, and move the byte offsets of the chunks behind the headers."""
    made = {}
    for index, declared in enumerate(checkpoint.files):
        mine = [chunk for chunk in ordered if chunk.file == index]
        header = make_header(header_text(declared.metadata, mine), declared.header_multiple)
        header = declared.header(header) if declared.header else header
        data = bytearray()
        for chunk in mine:
            end = chunk.byte_offset + len(chunk.stored)
            data.extend(bytes(max(0, end - len(data))))
            data[chunk.byte_offset : end] = chunk.stored
            chunk.byte_offset += len(header)
        made[declared.label] = header + bytes(data)
    return made


def make_header(text: bytes, multiple: int) -> bytes:
    padded = text + b" " * (-(8 + len(text)) % multiple)
    return struct.pack("<Q", len(padded)) + padded


def header_text(metadata: dict[str, str], chunks: list[StoredChunk]) -> bytes:
    entries = []
    if metadata:
        pairs = sorted(metadata.items(), key=lambda pair: pair[0].encode())
        inner = ",".join(f"{json_string(key)}:{json_string(value)}" for key, value in pairs)
        entries.append(f'"__metadata__":{{{inner}}}')
    for chunk in chunks:
        stored_as, shape = entry_type(chunk)
        dims = ",".join(map(str, shape))
        ends = f"{chunk.byte_offset},{chunk.byte_offset + len(chunk.stored)}"
        entries.append(
            f'{json_string(chunk.key)}:{{"dtype":"{stored_as}","shape":[{dims}],'
            f'"data_offsets":[{ends}]}}'
        )
    return ("{" + ",".join(entries) + "}").encode()


def entry_type(chunk: StoredChunk) -> tuple[str, Shape]:
    """The dtype and shape of a chunk in the safetensors header."""
    if chunk.codec:
        return "U8", (len(chunk.stored),)
    dtype, shape = dtypes()[chunk.tensor.dtype], chunk.chunk.shape
    if dtype.shape_rule == "s+[2]":
        shape = (*shape, 2)
    if dtype.shape_rule == "s·2":
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    return dtype.stored_as, shape


def json_string(text: str) -> str:
    """The string form of section 10, which is the one that json.dumps has."""
    return json.dumps(text, ensure_ascii=False)


def chunk_key(path: list[object], tensor: Tensor, chunk: Chunk) -> str:
    """R-10.6 and R-10.7."""
    if len(path) == 1 and isinstance(path[0], str):
        key = escape(path[0])
        if key.startswith("/"):
            key = "%2F" + key[1:]
        if key == "__metadata__":
            key = "%5F_metadata__"
    else:
        key = "/" + "/".join(map(key_part, path))
    if chunk.offset != (0,) * len(tensor.shape) or chunk.shape != tensor.shape:
        ranges = zip(chunk.offset, chunk.shape, strict=True)
        key += "@[" + ",".join(f"{begin}:{begin + size}" for begin, size in ranges) + "]"
    return key + {0: "", 1: "@zstd", 2: "@planes+zstd"}[chunk.codec]


def escape(part: str) -> str:
    return part.replace("%", "%25").replace("@", "%40")


def key_part(part: object) -> str:
    if isinstance(part, str):
        return escape(part).replace("/", "%2F")
    return f"@{part}" if is_decimal(part) else f"@x{pack(part).hex()}"
