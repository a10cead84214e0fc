"""Canonical msgpack (dsd-1.md section 8), values in wire form, and digests.

Values are written as they lie in the body: `["tuple", 1, 2]`, `["tensor", 0]`. `Raw` stands for
bytes that the canonical form does not have.
"""

import math
import struct
from dataclasses import dataclass
from functools import cache

from blake3 import blake3

from vectors.spectext import SPEC, table_with

LEAF_NBYTES = 4_194_304
NAN = bytes.fromhex("7ff8000000000000")
KEYED = ("dict", "odict", "counter", "defaultdict")
INDEXED = ("list", "tuple", "deque")


@dataclass(frozen=True)
class Raw:
    """Bytes to be copied into the body as they are."""

    data: bytes


@dataclass(frozen=True)
class Dtype:
    name: str
    itemsize: int
    stored_as: str
    shape_rule: str
    rotate: bool

    @property
    def width(self) -> int:
        """Bytes of one number in codec 2: of the real type, where the dtype is complex."""
        return self.itemsize // 2 if self.name.startswith("complex") else self.itemsize


def digest(data: bytes) -> bytes:
    return blake3(data).digest()


def noise(nbytes: int, seed: str = "") -> bytes:
    """Bytes that look random and are always the same."""
    return blake3(seed.encode()).digest(length=nbytes)


@cache
def dtypes() -> dict[str, Dtype]:
    rows = table_with(SPEC / "registry" / "dtypes.md", "name", "itemsize")
    return {
        row["name"]: Dtype(
            row["name"],
            int(row["itemsize"]),
            row["stored as"],
            row["shape"],
            row["rotate"] == "yes",
        )
        for row in rows
    }


def pack(value: object) -> bytes:
    """Encode in the canonical form; maps are sorted here."""
    match value:
        case Raw():
            packed = value.data
        case None:
            packed = b"\xc0"
        case bool():
            packed = b"\xc3" if value else b"\xc2"
        case int():
            packed = pack_int(value)
        case float():
            packed = b"\xcb" + (NAN if math.isnan(value) else struct.pack(">d", value))
        case str():
            packed = _pack_str(value.encode("utf-8"))
        case bytes():
            packed = _with_length(len(value), (0xC4, 0xC5, 0xC6)) + value
        case list() | tuple():
            packed = array_head(len(value)) + b"".join(map(pack, value))
        case dict():
            pairs = sorted((pack_key(key), pack(item)) for key, item in value.items())
            packed = map_head(len(pairs)) + b"".join(_pack_str(key) + item for key, item in pairs)
        case _:
            raise TypeError(f"no wire form for {type(value)}")
    return packed


def pack_key(key: str) -> bytes:
    return key.encode("utf-8")


def pack_int(value: int) -> bytes:
    forms = (
        [("B", 0x00, 1 << 7), ("B", 0xCC, 1 << 8), ("H", 0xCD, 1 << 16), ("I", 0xCE, 1 << 32)]
        if value >= 0
        else [("b", 0x00, 1 << 5), ("b", 0xD0, 1 << 7), ("h", 0xD1, 1 << 15), ("i", 0xD2, 1 << 31)]
    )
    for form, mark, bound in forms:
        if -bound <= value < bound:
            return (bytes([mark]) if mark else b"") + struct.pack(f">{form}", value)
    return b"\xcf" + struct.pack(">Q", value) if value >= 0 else b"\xd3" + struct.pack(">q", value)


def array_head(length: int) -> bytes:
    return bytes([0x90 | length]) if length < 16 else _with_length(length, (None, 0xDC, 0xDD))


def map_head(length: int) -> bytes:
    return bytes([0x80 | length]) if length < 16 else _with_length(length, (None, 0xDE, 0xDF))


def _pack_str(data: bytes) -> bytes:
    if len(data) < 32:
        return bytes([0xA0 | len(data)]) + data
    return _with_length(len(data), (0xD9, 0xDA, 0xDB)) + data


def _with_length(length: int, marks: tuple[int | None, int, int]) -> bytes:
    for mark, form, bound in zip(marks, "BHI", (1 << 8, 1 << 16, 1 << 32), strict=True):
        if mark is not None and length < bound:
            return bytes([mark]) + struct.pack(f">{form}", length)
    raise ValueError(length)


def big_int(value: int) -> list[object]:
    """An integer outside of 64 bits, as `["int", bin]`."""
    nbytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
    return ["int", value.to_bytes(nbytes, "little", signed=True)]


def pairs(tag: str, *items: tuple[object, object]) -> list[object]:
    """A dict, counter or defaultdict, its pairs in the order of the encoded keys."""
    return [tag, *sorted(([k, v] for k, v in items), key=lambda pair: pack(pair[0]))]


def members(tag: str, *items: object) -> list[object]:
    """A set or frozenset, its elements in the order of their encodings."""
    return [tag, *sorted(items, key=pack)]


def tensor_paths(tree: object) -> list[tuple[int, list[object]]]:
    """Each reference to a tensor, in the order of the tree, with its path."""
    found: list[tuple[int, list[object]]] = []

    def walk(value: object, path: list[object]) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=pack_key):
                walk(value[key], [*path, key])
        elif isinstance(value, list):
            walk_tagged(value, path)

    def walk_tagged(value: list, path: list[object]) -> None:
        tag, *rest = value
        if tag == "tensor":
            found.append((rest[0], path))
        elif tag in KEYED:
            for key, item in rest:
                walk(item, [*path, key])
        elif tag in INDEXED:
            for index, item in enumerate(rest[1:] if tag == "deque" else rest):
                walk(item, [*path, index])

    walk(tree, [])
    return found


def is_decimal(part: object) -> bool:
    """Whether a part of a path is written in decimal: an index, or an integer key of 64 bits."""
    return isinstance(part, int) and not isinstance(part, bool)


def tensor_content(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """The content digest of a tensor, R-13.1."""
    leaves = [digest(data[at : at + LEAF_NBYTES]) for at in range(0, len(data), LEAF_NBYTES)]
    return digest(pack(["dsd-content-1", dtype, list(shape), b"".join(leaves)]))


def state_content(tree: object, contents: list[bytes]) -> bytes:
    """The content digest of a state, R-13.2."""

    def replace(value: object) -> object:
        if isinstance(value, dict):
            return {key: replace(item) for key, item in value.items()}
        if not isinstance(value, list):
            return value
        tag, *rest = value
        if tag == "tensor":
            return ["tensor", contents[rest[0]]]
        if tag in KEYED:
            return [tag, *([key, replace(item)] for key, item in rest)]
        if tag in INDEXED:
            return [tag, *map(replace, rest)]
        return value

    return digest(pack(replace(tree)))
