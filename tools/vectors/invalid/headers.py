"""Headers of data files that are not those that the manifest implies (R-10.4)."""

import json
import struct
from collections.abc import Callable, Iterator

from vectors.cases import Case, invalid
from vectors.declare import Checkpoint, DataFile
from vectors.hooks import BytesHook, edited, flip, in_file
from vectors.invalid.files import DATA
from vectors.samples import tensor

HEADER_NBYTES = 256


def with_header(change: BytesHook | None) -> Checkpoint:
    """Two tensors of one size in a file whose header is changed; all else follows the new one."""
    tensors = [tensor("float32", (2, 4)), tensor("int32", (2, 4))]
    tree = {"a": ["tensor", 0], "b": ["tensor", 1]}
    return Checkpoint(tensors, tree, files=[DataFile(header=change, header_multiple=HEADER_NBYTES)])


def text(change: Callable[[str], str]) -> BytesHook:
    """Change the JSON text, and keep the header's length."""

    def header(data: bytes) -> bytes:
        before = data[8:].rstrip(b" ").decode()
        after = change(before).encode()
        if after == before.encode() or len(after) > len(data) - 8:
            raise ValueError("the change changes nothing, or takes more than the padding")
        return data[:8] + after.ljust(len(data) - 8, b" ")

    return header


def swap(*words: tuple[str, str]) -> BytesHook:
    def change(before: str) -> str:
        for old, new in words:
            before = before.replace(old, new, 1)
        return before

    return text(change)


def extended(entry: str) -> BytesHook:
    return text(lambda before: before[:-1] + "," + entry + "}")


def reordered(*keys: str) -> BytesHook:
    def change(before: str) -> str:
        document = json.loads(before)
        return json.dumps({key: document[key] for key in keys}, separators=(",", ":"))

    return text(change)


def padded_with(filler: bytes) -> BytesHook:
    def header(data: bytes) -> bytes:
        return data.rstrip(b" ").ljust(len(data), filler)

    return header


def ending(byte: bytes) -> BytesHook:
    return lambda data: data[:-1] + byte


def length(nbytes: int) -> BytesHook:
    """Another length in the first eight bytes, which does not change the header's place."""
    return lambda data: struct.pack("<Q", nbytes) + data[8:]


TEXTS = (
    ("key", swap(('"a"', '"c"')), "a key is another one"),
    (
        "keys-swapped",
        swap(('"a"', '"?"'), ('"b"', '"a"'), ('"?"', '"b"')),
        "two keys have changed places",
    ),
    ("key-escaped", swap(('"a"', '"\\u0061"')), "a key has an escape that it does not need"),
    ("dtype", swap(("F32", "I32")), "a dtype of the same size is another one"),
    ("shape", swap(("[2,4]", "[4,2]")), "a shape is turned"),
    ("shape-flat", swap(("[2,4]", "[8]")), "a shape is flat"),
    ("offsets", swap(("[0,32]", "[0,16]")), "a tensor ends too early"),
    (
        "offsets-swapped",
        swap(("[0,32]", "[?]"), ("[32,64]", "[0,32]"), ("[?]", "[32,64]")),
        "two tensors have changed places",
    ),
    (
        "entry-more",
        extended('"x":{"dtype":"U8","shape":[0],"data_offsets":[64,64]}'),
        "an empty entry more",
    ),
    (
        "entry-less",
        text(lambda before: before.split(',"b":')[0] + "}"),
        "an entry less",
    ),
    (
        "entry-twice",
        extended('"a":{"dtype":"F32","shape":[2,4],"data_offsets":[0,32]}'),
        "an entry twice",
    ),
    (
        "entries-in-another-order",
        reordered("__metadata__", "b", "a"),
        "its entries in another order",
    ),
    ("metadata", swap(("pt", "tf")), "metadata that are not those of the manifest"),
    (
        "metadata-none",
        swap(('"__metadata__":{"format":"pt"},', "")),
        "no metadata, where the manifest has some",
    ),
    ("metadata-last", reordered("a", "b", "__metadata__"), "its metadata behind the entries"),
    ("space", swap((":", ": ")), "a space in its JSON"),
    ("space-in-front", text(lambda before: " " + before), "a space before its JSON"),
    ("number-form", swap(("[0,32]", "[0,3.2e1]")), "a number in another form"),
    ("not-json", text(lambda before: before[:-1]), "no closing brace"),
    ("padding-zero", padded_with(b"\0"), "zero bytes as padding"),
    ("padding-newline", ending(b"\n"), "a newline at the end of its padding"),
    ("padding-message", ending(b"!"), "a byte in its padding that is no space"),
)

LENGTHS = (
    ("length-less", HEADER_NBYTES - 9, "a length one less than it is"),
    ("length-more", HEADER_NBYTES - 7, "a length one more than it is"),
    ("length-zero", 0, "a length of 0"),
    ("length-max", (1 << 64) - 1, "a length of 2^64-1"),
)


def cases() -> Iterator[Case]:
    rule, code = "R-10.4", "header_mismatch"
    for name, change, what in TEXTS:
        note = f"The header of a data file has {what}."
        yield invalid(f"header-{name}", rule, code, note, with_header(change))
    for name, nbytes, what in LENGTHS:
        note = f"The header of a data file has {what}."
        base, true = with_header(length(nbytes)), in_file(header_nbytes=HEADER_NBYTES)
        yield invalid(f"header-{name}", rule, code, note, base, body=true)
    note = "The header of a data file has 2 bytes, into which its JSON does not fit."
    small = with_header(lambda _: struct.pack("<Q", 2) + b"{}")
    yield invalid("header-too-small", rule, code, note, small)
    note = "A data file begins with a length of 0 and its data."
    none = with_header(lambda _: struct.pack("<Q", 0))
    yield invalid("header-none", rule, code, note, none)
    for name, at in (("first-byte", 0), ("json", 20), ("last-byte", HEADER_NBYTES - 1)):
        note = f"One bit of the header is flipped: {name.replace('-', ' ')}."
        change = edited(DATA, flip(at))
        yield invalid(f"header-flip-{name}", rule, code, note, with_header(None), files=change)
