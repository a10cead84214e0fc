"""Chunks, blocks, codecs and storage order: sections 9 and 12."""

import math
import struct
from collections.abc import Callable, Iterator

from vectors.datafiles import chunk_key
from vectors.declare import Block, Checkpoint, Chunk, Shape, StoredChunk, Tensor
from vectors.wire import Dtype, digest, dtypes, tensor_paths

SIZE_CLASSES = (4096, 256, 64, 16, 8, 4, 2, 1)


def store_chunks(checkpoint: Checkpoint) -> list[StoredChunk]:
    paths = first_paths(checkpoint.tree)
    stored = []
    for index, tensor in enumerate(checkpoint.tensors):
        dtype = dtypes()[tensor.dtype]
        for chunk in tensor.chunks:
            decoded = box_bytes(tensor, chunk)
            blocks = [
                store_block(decoded[at : at + checkpoint.block_nbytes], chunk, dtype)
                for at in range(0, len(decoded), checkpoint.block_nbytes)
            ]
            prefix = checkpoint.files[chunk.file].prefix
            key = chunk_key(paths[index][len(prefix) :], tensor, chunk)
            stored.append(StoredChunk(tensor, chunk, blocks, chunk.file, chunk.codec, key=key))
    for file, declared in enumerate(checkpoint.files):
        offset = 0
        for chunk in file_order(stored, file, by_size_class=declared.by_size_class):
            chunk.byte_offset = offset
            offset += len(chunk.stored)
    return stored


def first_paths(tree: object) -> dict[int, list[object]]:
    paths: dict[int, list[object]] = {}
    for index, path in tensor_paths(tree):
        paths.setdefault(index, path)
    return paths


def box_bytes(tensor: Tensor, chunk: Chunk) -> bytes:
    """The box of a chunk, row-major, out of the tensor's bytes."""
    if 0 in chunk.shape:
        return b""
    itemsize = dtypes()[tensor.dtype].itemsize
    return b"".join(
        tensor.data[at * itemsize : (at + length) * itemsize]
        for at, length in runs(tensor.shape, chunk)
    )


def runs(shape: Shape, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Begin and length, in elements, of the runs of a box along the last dim."""
    if not shape:
        yield 0, 1
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

    def walk(dim: int, at: int) -> Iterator[tuple[int, int]]:
        at += chunk.offset[dim] * strides[dim]
        if dim == len(shape) - 1:
            yield at, chunk.shape[dim]
            return
        for step in range(chunk.shape[dim]):
            yield from walk(dim + 1, at + step * strides[dim])

    yield from walk(0, 0)


def store_block(decoded: bytes, chunk: Chunk, dtype: Dtype) -> Block:
    stored = decoded
    if chunk.codec == 1:
        stored = chunk.piece(decoded)
    if chunk.codec == 2:
        stored = store_planes(decoded, dtype, chunk.piece)
    return Block(decoded, stored, digest(decoded), digest(stored))


def store_planes(decoded: bytes, dtype: Dtype, piece: Callable[[bytes], bytes]) -> bytes:
    return join_planes([piece(plane) for plane in planes(decoded, dtype)])


def planes(decoded: bytes, dtype: Dtype) -> list[bytes]:
    width = dtype.width
    numbers = [
        int.from_bytes(decoded[at : at + width], "little") for at in range(0, len(decoded), width)
    ]
    if dtype.rotate:
        top, mask = 8 * width - 1, (1 << 8 * width) - 1
        numbers = [number << 1 & mask | number >> top for number in numbers]
    turned = b"".join(number.to_bytes(width, "little") for number in numbers)
    return [turned[plane::width] for plane in range(width)]


def join_planes(pieces: list[bytes]) -> bytes:
    return struct.pack(f"<{len(pieces)}I", *map(len, pieces)) + b"".join(pieces)


def file_order(
    chunks: list[StoredChunk], file: int, *, by_size_class: bool = True
) -> list[StoredChunk]:
    """The chunks of a file in the order in which a writer lays them down (R-10.8)."""
    mine = [chunk for chunk in chunks if chunk.file == file]
    return sorted(mine, key=writer_order) if by_size_class else mine


def writer_order(chunk: StoredChunk) -> tuple[int, int]:
    if chunk.codec:
        return 0, 0
    nbytes = sum(len(block.decoded) for block in chunk.blocks)
    size = next(size for size in SIZE_CLASSES if nbytes % size == 0)
    return -size, 0 if size == SIZE_CLASSES[0] else -nbytes


def storage_order(chunks: list[StoredChunk]) -> list[StoredChunk]:
    """R-9.13; the sort is stable, so the index comes last by itself."""
    return sorted(chunks, key=lambda chunk: (chunk.file, chunk.byte_offset, len(chunk.stored)))
