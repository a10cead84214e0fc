"""Headers of data files: golden bytes, the keys of chunks, and that no two chunks share a key."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from dsdformat.boxes import Box, whole
from dsdformat.format.codecs import PLANES, RAW, ZSTD
from dsdformat.format.dtypes import DTYPES, payload_shape
from dsdformat.format.packing import emit
from dsdformat.format.paths import emit_key, emit_keys, emit_name, render_path
from dsdformat.format.payload import (
    HeaderEntry,
    chunk_key,
    emit_entries,
    emit_form,
    emit_header,
    header_json,
    header_nbytes,
    join_entries,
    size_class,
    size_classes,
)
from dsdformat.format.values import encode_key


def encoded(key: object) -> bytes:
    return emit(encode_key(key))


def entry(key: str, dtype: str, shape: tuple[int, ...], codec: int = RAW, nbytes: int = 0):
    row = DTYPES[dtype]
    return HeaderEntry(key, row, shape, codec, nbytes or math.prod(shape) * row.itemsize)


# Golden bytes


def test_a_header_has_its_bytes():
    entries = [entry("w", "float32", (2, 3)), entry("b@zstd", "int64", (9,), ZSTD, 17)]
    text = header_json(entries, {"format": "pt"})
    assert text == (
        b'{"__metadata__":{"format":"pt"},'
        b'"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"b@zstd":{"dtype":"U8","shape":[17],"data_offsets":[24,41]}}'
    )
    assert emit_header(text, 4096) == b"\xf8\x0f\x00\x00\x00\x00\x00\x00" + text.ljust(4088)


def test_a_header_of_nothing_is_an_empty_object():
    assert header_json([], {}) == b"{}"


def test_metadata_is_in_ascending_order():
    text = header_json([], {"b": "2", "a": "1", "é": "3"})
    assert text == '{"__metadata__":{"a":"1","b":"2","é":"3"}}'.encode()


def test_text_is_escaped_as_the_spec_says():
    text = header_json([entry('"\\\b\t\n\f\r\x00\x1f\x7f/é\u2028', "int8", (1,))], {})
    assert text.startswith('{"\\"\\\\\\b\\t\\n\\f\\r\\u0000\\u001f\x7f/é\u2028":{'.encode())


@pytest.mark.parametrize("name", DTYPES)
def test_a_raw_entry_has_as_many_bytes_as_its_dtype_and_shape_say(name):
    """What other loaders check: product of the shape, times the bits of the type."""
    bits = {"F4": 4, "F8": 8, "BOOL": 8}
    shape = (3, 2)
    row = json.loads(header_json([entry("w", name, shape)], {}))["w"]
    stored = row["dtype"]
    digits = "".join(filter(str.isdecimal, stored.split("_")[0]))
    width = bits.get(stored.split("_")[0]) or int(digits)
    begin, end = row["data_offsets"]
    assert math.prod(row["shape"]) * width == 8 * (end - begin)


def test_a_pair_of_four_bit_floats_doubles_the_last_dim():
    assert payload_shape(DTYPES["float4_e2m1fn_x2"], (3, 2)) == [3, 4]
    assert payload_shape(DTYPES["float4_e2m1fn_x2"], ()) == [2]


def test_a_complex_dtype_without_a_type_of_its_own_has_a_dim_of_two():
    assert payload_shape(DTYPES["complex128"], (3,)) == [3, 2]


@pytest.mark.parametrize(
    ("text_nbytes", "nbytes"),
    [(0, 4096), (4088, 4096), (4089, 8192), (8184, 8192), (8185, 12_288)],
)
def test_data_begins_at_the_next_multiple_of_4096(text_nbytes, nbytes):
    assert header_nbytes(text_nbytes) == nbytes
    assert emit_header(b"x" * text_nbytes, nbytes) is not None


def test_a_text_that_does_not_fit_gives_no_header():
    assert emit_header(b"x" * 4089, 4096) is None


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, 4096),
        (1, 1),
        (2, 2),
        (3, 1),
        (4, 4),
        (6, 2),
        (12, 4),
        (24, 8),
        (32, 16),
        (48, 16),
        (64, 64),
        (128, 64),
        (256, 256),
        (1024, 256),
        (4096, 4096),
        (4097, 1),
        (2**40, 4096),
    ],
)
def test_the_size_class_is_the_largest_that_divides_the_length(nbytes, expected):
    assert size_class(nbytes) == expected
    assert size_classes([nbytes, 0]) == [expected, 4096]


# Keys


@pytest.mark.parametrize(
    ("path", "key"),
    [
        pytest.param(("layers.0.weight",), "layers.0.weight", id="plain"),
        pytest.param(("",), "", id="empty"),
        pytest.param(("a/b",), "a/b", id="slash"),
        pytest.param(("/a",), "%2Fa", id="slash-first"),
        pytest.param(("a%b@c",), "a%25b%40c", id="percent-and-at"),
        pytest.param(("__metadata__",), "%5F_metadata__", id="metadata"),
        pytest.param(("__metadata__2",), "__metadata__2", id="nearly-metadata"),
        pytest.param(("a", "b"), "/a/b", id="nested"),
        pytest.param(("a", "__metadata__"), "/a/__metadata__", id="metadata-nested"),
        pytest.param(("a/b", "c@%"), "/a%2Fb/c%40%25", id="nested-escapes"),
        pytest.param(("a", 0), "/a/@0", id="index"),
        pytest.param((5,), "/@5", id="number-alone"),
        pytest.param(("a", -3), "/a/@-3", id="negative"),
        pytest.param(("a", 2**64 - 1), "/a/@18446744073709551615", id="largest"),
        pytest.param(("a", 2**64), "/a/@x92a3696e74c409000000000000000001", id="beyond"),
        pytest.param(("a", True), "/a/@xc3", id="bool"),
        pytest.param(("a", None), "/a/@xc0", id="none"),
        pytest.param(("a", 0.5), "/a/@xcb3fe0000000000000", id="float"),
        pytest.param(("a", (1,)), "/a/@x92a57475706c6501", id="tuple"),
        pytest.param(("a", b"\x01"), "/a/@xc40101", id="bytes"),
    ],
)
def test_a_path_has_its_key(path, key):
    assert emit_key(path, encoded) == key


@pytest.mark.parametrize(
    ("box", "codec", "key"),
    [
        pytest.param(whole((4, 6)), RAW, "w", id="whole"),
        pytest.param(Box((2, 0), (2, 6)), RAW, "w@[2:4,0:6]", id="part"),
        pytest.param(whole((4, 6)), ZSTD, "w@zstd", id="compressed"),
        pytest.param(Box((0, 3), (4, 3)), PLANES, "w@[0:4,3:6]@planes+zstd", id="both"),
    ],
)
def test_a_chunk_has_its_key(box, codec, key):
    assert chunk_key(("w",), (4, 6), box, codec) == key


ATOMS = ["", "a", "b", "/", "%", "@", "0", "-1", "[", "]", ":", ",", "2F", "25", "40", "x", "c0"]
WORDS = ["__metadata__", "%5F_metadata__", "zstd", "planes+zstd", "[0:1]", "@[0:1]", "@zstd"]
KEYS = [0, 1, -1, 2**64, True, False, None, 0.5, b"a", (1,), ("a",), (), frozenset({1})]


def odd_path(rng: random.Random) -> tuple[object, ...]:
    def part() -> object:
        if rng.random() < 0.3:
            return rng.choice(KEYS)
        return "".join(rng.choice(ATOMS + WORDS) for _ in range(rng.randrange(4)))

    return tuple(part() for _ in range(rng.randint(1, 3)))


def as_bytes(path: tuple[object, ...]) -> bytes:
    """Paths that differ have other bytes, also where their parts are equal: `1` and `True`."""
    return emit([encode_key(part) for part in path])


@pytest.mark.parametrize("seed", range(10))
def test_keys_of_tensors_in_one_container_are_those_of_their_paths(seed):
    rng = random.Random(seed)
    for _ in range(300):
        parent = odd_path(rng)[rng.randrange(3) :]
        steps = [step for _ in range(rng.randrange(4)) for step in odd_path(rng)]
        wanted = [emit_key((*parent, step), encoded) for step in steps]
        assert emit_keys(parent, steps, encoded) == wanted


@pytest.mark.parametrize("seed", range(10))
def test_a_header_by_columns_is_that_of_its_entries(seed):
    rng = random.Random(seed)
    rows = [
        entry(f"w{n}\n{'é' * n}", rng.choice(sorted(DTYPES)), (rng.randrange(9), 2))
        for n in range(rng.randrange(9))
    ]
    forms = [emit_form(one.dtype, one.shape, one.codec, one.nbytes) for one in rows]
    ends = list(itertools.accumulate((one.nbytes for one in rows), initial=0))
    entries = emit_entries([one.key for one in rows], forms, ends[:-1], ends[1:])
    assert join_entries(entries, {"a": "b"}) == header_json(rows, {"a": "b"})


@pytest.mark.parametrize("seed", range(10))
def test_no_two_chunks_of_a_file_share_a_key(seed):
    """Two chunks of one file differ in the path, in the box, or in both; never in codec alone."""
    rng = random.Random(seed)
    boxes = [whole((1,)), Box((0,), (0,)), Box((1,), (0,))]
    found: dict[str, tuple[bytes, Box]] = {}
    for _ in range(3000):
        path, box, codec = odd_path(rng), rng.choice(boxes), rng.choice((RAW, ZSTD, PLANES))
        chunk = (as_bytes(path), box)
        assert found.setdefault(chunk_key(path, (1,), box, codec), chunk) == chunk


@pytest.mark.parametrize("seed", range(10))
def test_no_two_paths_share_a_display_name(seed):
    rng = random.Random(seed)
    found: dict[str, bytes] = {}
    for _ in range(3000):
        path = odd_path(rng)
        assert found.setdefault(emit_name(path, encoded), as_bytes(path)) == as_bytes(path)


# Places in messages


@pytest.mark.parametrize(
    ("path", "text"),
    [
        pytest.param((), "$", id="root"),
        pytest.param(("model", 0, "bias"), "$.model[0].bias", id="plain"),
        pytest.param(("layers.0", "a b"), "$['layers.0']['a b']", id="quoted"),
        pytest.param((True, None, 0.5), "$[True][None][0.5]", id="other-keys"),
        pytest.param(("x" * 100 + " ",), "$['" + "x" * 78 + "…]", id="long"),
    ],
)
def test_a_path_reads_like_an_expression(path, text):
    assert render_path(path) == text
