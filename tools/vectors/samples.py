"""The checkpoints that cases are made from."""

import math
from collections.abc import Callable

from vectors import zstd
from vectors.declare import Checkpoint, Chunk, DataFile, Shape, Tensor
from vectors.wire import dtypes, noise

Pair = tuple[Shape, Shape]  # offset and shape of a box


def values(dtype: str, shape: Shape, seed: str = "") -> bytes:
    """Bytes of the dtype: noise, with the bits that the dtype does not have left zero."""
    data = noise(math.prod(shape) * dtypes()[dtype].itemsize, f"{dtype}{shape}{seed}")
    bits = {"bool": 1, "float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}.get(dtype)
    narrow = dtype.removeprefix("u").removeprefix("int")
    if bits is None and narrow.isdecimal() and int(narrow) < 8:
        bits = int(narrow)
    return data if bits is None else bytes(byte & (1 << bits) - 1 for byte in data)


def tensor(dtype: str, shape: Shape, seed: str = "", *chunks: Chunk) -> Tensor:
    return Tensor(dtype, shape, values(dtype, shape, seed), list(chunks))


def one(dtype: str = "float32", shape: Shape = (2, 3), *chunks: Chunk, **options) -> Checkpoint:
    """A checkpoint of one tensor, `w`, and one value."""
    return Checkpoint(
        [tensor(dtype, shape, "", *chunks)], {"step": 7, "w": ["tensor", 0]}, **options
    )


def two(**options) -> Checkpoint:
    """A checkpoint of two tensors, of different sizes, in one file."""
    tensors = [tensor("float32", (4, 8)), tensor("int16", (5,))]
    return Checkpoint(tensors, {"a": ["tensor", 0], "b": ["tensor", 1], "step": 7}, **options)


def tree(value: object, **options) -> Checkpoint:
    """A checkpoint of one tensor whose tree has one more value, `v`."""
    return Checkpoint([tensor("uint8", (3,))], {"v": value, "w": ["tensor", 0]}, **options)


def boxes(*pairs: Pair, files: str = "", codec: int = 0) -> list[Chunk]:
    """Chunks from offsets and shapes, in any order; `files` has a digit for each."""
    chunks = [
        Chunk(offset, shape, int(files[index]) if files else 0, codec)
        for index, (offset, shape) in enumerate(pairs)
    ]
    return sorted(chunks, key=lambda chunk: chunk.offset)


def ranks(count: int, prefix: tuple[str, ...] = (), stem: str = "model") -> list[DataFile]:
    """The data files of several ranks."""
    return [
        DataFile(f"{stem}-{rank:05}-of-{count:05}.safetensors", prefix, rank)
        for rank in range(count)
    ]


def compressed(
    data: bytes,
    *,
    codec: int = 1,
    dtype: str = "uint8",
    piece: Callable[[bytes], bytes] = zstd.smaller,
    **options,
) -> Checkpoint:
    """A checkpoint of one tensor of one dim, in one chunk with this codec."""
    count = len(data) // dtypes()[dtype].itemsize
    chunk = Chunk((0,), (count,), 0, codec, piece)
    return Checkpoint([Tensor(dtype, (count,), data, [chunk])], {"w": ["tensor", 0]}, **options)


def mixed(count: int, width: int) -> bytes:
    """Numbers whose highest byte takes two values, and whose other bytes are noise."""
    data = bytearray(noise(count * width, "mixed"))
    data[width - 1 :: width] = bytes(0x3E + (byte >> 7) for byte in noise(count, "mixedhigh"))
    return bytes(data)


# Ways to cut a tensor


def pinwheel(depth: int) -> list[Pair]:
    """Five boxes of a 3x3 square that no straight cut separates, with a third dim."""
    flat = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
        ((2, 1), (1, 2)),
    ]
    return [((*offset, 0), (*shape, depth)) for offset, shape in flat]


def cut_guillotine(ndim: int) -> list[Chunk]:
    """A box of 2 in each dim, cut in one dim after another: ndim + 1 chunks."""
    pairs = [
        ((0,) * dim + (1,) + (0,) * (ndim - dim - 1), (1,) * (dim + 1) + (2,) * (ndim - dim - 1))
        for dim in range(ndim)
    ]
    return boxes(*pairs, ((0,) * ndim, (1,) * ndim))


def flat_range(shape: tuple[int, int, int], begin: int, end: int) -> list[Pair]:
    """The boxes of a range of a 3-d tensor's elements: at most five."""
    _, rows, columns = shape
    plane = rows * columns
    found: list[Pair] = []
    while begin < end:
        i, rest = divmod(begin, plane)
        j, k = divmod(rest, columns)
        if rest == 0 and end - begin >= plane:
            box = ((i, 0, 0), ((end - begin) // plane, rows, columns))
        elif k == 0 and end - begin >= columns:
            box = ((i, j, 0), (1, min((end - begin) // columns, rows - j), columns))
        else:
            box = ((i, j, k), (1, 1, min(columns - k, end - begin)))
        found.append(box)
        begin += math.prod(box[1])
    return found
