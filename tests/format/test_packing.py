"""msgpack: the canonical form out, and nothing but the canonical form in."""

from __future__ import annotations

import math
import random

import pytest

from dsdformat.errors import FormatError
from dsdformat.format import packing
from dsdformat.format.packing import emit, parse
from dsdformat.limits import DEPTH_MAX

GOLDEN = [
    pytest.param(None, "c0", id="nil"),
    pytest.param(False, "c2", id="false"),
    pytest.param(True, "c3", id="true"),
    pytest.param(0, "00", id="0"),
    pytest.param(127, "7f", id="127"),
    pytest.param(128, "cc80", id="128"),
    pytest.param(255, "ccff", id="255"),
    pytest.param(256, "cd0100", id="256"),
    pytest.param(65_535, "cdffff", id="65535"),
    pytest.param(65_536, "ce00010000", id="65536"),
    pytest.param(2**32 - 1, "ceffffffff", id="2**32-1"),
    pytest.param(2**32, "cf0000000100000000", id="2**32"),
    pytest.param(2**64 - 1, "cfffffffffffffffff", id="2**64-1"),
    pytest.param(-1, "ff", id="-1"),
    pytest.param(-32, "e0", id="-32"),
    pytest.param(-33, "d0df", id="-33"),
    pytest.param(-128, "d080", id="-128"),
    pytest.param(-129, "d1ff7f", id="-129"),
    pytest.param(-32_768, "d18000", id="-32768"),
    pytest.param(-32_769, "d2ffff7fff", id="-32769"),
    pytest.param(-(2**31), "d280000000", id="-2**31"),
    pytest.param(-(2**31) - 1, "d3ffffffff7fffffff", id="-2**31-1"),
    pytest.param(-(2**63), "d38000000000000000", id="-2**63"),
    pytest.param(0.5, "cb3fe0000000000000", id="0.5"),
    pytest.param(-0.0, "cb8000000000000000", id="-0.0"),
    pytest.param(math.inf, "cb7ff0000000000000", id="inf"),
    pytest.param("", "a0", id="no-text"),
    pytest.param("é", "a2c3a9", id="text"),
    pytest.param("x" * 31, "bf" + "78" * 31, id="text-31"),
    pytest.param("x" * 32, "d920" + "78" * 32, id="text-32"),
    pytest.param("x" * 255, "d9ff" + "78" * 255, id="text-255"),
    pytest.param("x" * 256, "da0100" + "78" * 256, id="text-256"),
    pytest.param("x" * 65_536, "db00010000" + "78" * 65_536, id="text-65536"),
    pytest.param(b"", "c400", id="no-bytes"),
    pytest.param(b"\x01" * 255, "c4ff" + "01" * 255, id="bytes-255"),
    pytest.param(b"\x01" * 256, "c50100" + "01" * 256, id="bytes-256"),
    pytest.param(b"\x01" * 65_536, "c600010000" + "01" * 65_536, id="bytes-65536"),
    pytest.param([], "90", id="array-0"),
    pytest.param([1] * 15, "9f" + "01" * 15, id="array-15"),
    pytest.param([1] * 16, "dc0010" + "01" * 16, id="array-16"),
    pytest.param([1] * 65_536, "dd00010000" + "01" * 65_536, id="array-65536"),
    pytest.param({}, "80", id="map-0"),
    pytest.param({"a": 1, "b": [None]}, "82a16101a16291c0", id="map-2"),
]
TEXT_16 = {f"{number:02}": number for number in range(16)}


@pytest.mark.parametrize(("value", "text"), GOLDEN)
def test_a_value_has_its_canonical_bytes(value, text):
    assert emit(value) == bytes.fromhex(text)


@pytest.mark.parametrize(("value", "text"), GOLDEN)
def test_canonical_bytes_have_their_value(value, text):
    parsed = parse(bytes.fromhex(text))
    assert (parsed, type(parsed)) == (value, type(value))


def test_a_map_of_16_keys_has_its_longer_head():
    raw = emit(TEXT_16)
    assert raw[:3] == b"\xde\x00\x10"
    assert parse(raw) == TEXT_16


def test_nan_has_one_form():
    assert emit(math.nan) == bytes.fromhex("cb7ff8000000000000")
    assert math.isnan(parse(emit(math.nan)))


# code, bytes, byte offset, path
REFUSED = [
    # Longer forms than need be.
    pytest.param("msgpack_not_canonical", "cc7f", 0, "$", id="uint8-of-127"),
    pytest.param("msgpack_not_canonical", "cd00ff", 0, "$", id="uint16-of-255"),
    pytest.param("msgpack_not_canonical", "ce0000ffff", 0, "$", id="uint32-of-65535"),
    pytest.param("msgpack_not_canonical", "cf00000000ffffffff", 0, "$", id="uint64-of-2**32-1"),
    pytest.param("msgpack_not_canonical", "d0e0", 0, "$", id="int8-of--32"),
    pytest.param("msgpack_not_canonical", "d1ff80", 0, "$", id="int16-of--128"),
    pytest.param("msgpack_not_canonical", "d2ffff8000", 0, "$", id="int32-of--32768"),
    pytest.param("msgpack_not_canonical", "d3ffffffff80000000", 0, "$", id="int64-of--2**31"),
    pytest.param("msgpack_not_canonical", "d001", 0, "$", id="signed-of-1"),
    pytest.param("msgpack_not_canonical", "d37fffffffffffffff", 0, "$", id="signed-of-2**63-1"),
    pytest.param("msgpack_not_canonical", "d901" + "78", 0, "$", id="str8-of-1"),
    pytest.param("msgpack_not_canonical", "da00ff" + "78" * 255, 0, "$", id="str16-of-255"),
    pytest.param(
        "msgpack_not_canonical", "db0000ffff" + "78" * 65_535, 0, "$", id="str32-of-65535"
    ),
    pytest.param("msgpack_not_canonical", "c500ff" + "00" * 255, 0, "$", id="bin16-of-255"),
    pytest.param(
        "msgpack_not_canonical", "c60000ffff" + "00" * 65_535, 0, "$", id="bin32-of-65535"
    ),
    pytest.param("msgpack_not_canonical", "dc000f" + "00" * 15, 0, "$", id="array16-of-15"),
    pytest.param("msgpack_not_canonical", "dd0000ffff" + "00" * 65_535, 0, "$", id="array32"),
    pytest.param("msgpack_not_canonical", "de0001a16100", 0, "$", id="map16-of-1"),
    # Forms that do not exist here.
    pytest.param("msgpack_not_canonical", "ca3f000000", 0, "$", id="float32"),
    pytest.param("msgpack_not_canonical", "cb7ff8000000000001", 0, "$", id="nan-with-payload"),
    pytest.param("msgpack_not_canonical", "cbfff8000000000000", 0, "$", id="negative-nan"),
    pytest.param("msgpack_not_canonical", "d40000", 0, "$", id="fixext"),
    pytest.param("msgpack_not_canonical", "c7000000", 0, "$", id="ext8"),
    pytest.param("msgpack_malformed", "c1", 0, "$", id="c1"),
    # Maps.
    pytest.param("duplicate_key", "82a16100a16100", 4, "$", id="key-twice"),
    pytest.param("duplicate_key", "83a16100a16200a16100", 7, "$", id="key-twice-apart"),
    pytest.param("msgpack_not_canonical", "82a16200a16100", 4, "$", id="keys-descend"),
    pytest.param("msgpack_not_canonical", "82a2616100a16100", 5, "$", id="prefix-last"),
    pytest.param("msgpack_not_canonical", "810000", 1, "$", id="key-is-a-number"),
    pytest.param("msgpack_not_canonical", "81c40161c0", 1, "$", id="key-is-bytes"),
    pytest.param("msgpack_not_canonical", "81900000", 1, "$", id="key-is-an-array"),
    # Text.
    pytest.param("msgpack_malformed", "a1ff", 1, "$", id="not-utf8"),
    pytest.param("msgpack_malformed", "a2c080", 1, "$", id="overlong"),
    pytest.param("msgpack_malformed", "a3eda080", 1, "$", id="surrogate"),
    # Lengths.
    pytest.param("msgpack_malformed", "", 0, "$", id="nothing"),
    pytest.param("msgpack_malformed", "0000", 1, "$", id="something-behind"),
    pytest.param("msgpack_malformed", "a261", 0, "$", id="text-cut"),
    pytest.param("msgpack_malformed", "cd00", 0, "$", id="number-cut"),
    pytest.param("msgpack_malformed", "cb00", 0, "$", id="float-cut"),
    pytest.param("msgpack_malformed", "c6ffffffff00", 5, "$", id="bytes-of-4-gib"),
    pytest.param("msgpack_malformed", "9200", 0, "$", id="array-cut"),
    pytest.param("msgpack_malformed", "ddffffffff00", 5, "$", id="array-of-2**32"),
    pytest.param("msgpack_malformed", "81a161", 3, "$.a", id="value-missing"),
    pytest.param("msgpack_malformed", "dfffffffff00", 5, "$", id="map-of-2**32"),
    # Places.
    pytest.param("msgpack_not_canonical", "81a161920081a162cc01", 8, "$.a[1].b", id="deep"),
    pytest.param("msgpack_malformed", "82a16100a1629200", 6, "$.b", id="array-in-a-map-cut"),
]


@pytest.mark.parametrize(("code", "text", "byte_offset", "path"), REFUSED)
def test_other_bytes_are_refused_with_their_place(code, text, byte_offset, path):
    with pytest.raises(FormatError) as error:
        parse(bytes.fromhex(text))
    problem = error.value.problems[0]
    assert (problem.code, problem.byte_offset, problem.path) == (code, byte_offset, path)


def test_the_message_tells_the_byte_and_the_path():
    with pytest.raises(FormatError, match=r"byte 8, at \$\.a\[1\]\.b"):
        parse(bytes.fromhex("81a161920081a162cc01"))


@pytest.mark.parametrize("length", range(1, 40))
def test_a_value_that_is_cut_anywhere_is_malformed(length):
    raw = emit({"a": [1, 2.5, "text", b"bytes", {"b": None}], "c": 2**40, "d": "x" * 40})
    with pytest.raises(FormatError) as error:
        parse(raw[:length])
    assert error.value.code == "msgpack_malformed"


def nested_list(depth: int, inner: object = None) -> object:
    value = [] if inner is None else [inner]
    for _ in range(depth - 1):
        value = [value]
    return value


def nested_map(depth: int) -> object:
    value: object = {}
    for _ in range(depth - 1):
        value = {"k": value}
    return value


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(nested_list, id="arrays"),
        pytest.param(nested_map, id="maps"),
        pytest.param(lambda depth: nested_list(depth - 1, ["tensor", 0]), id="a-tensor-below"),
    ],
)
def test_128_levels_are_read_and_129_are_not(value):
    assert parse(emit(value(128))) == value(128)
    with pytest.raises(FormatError) as error:
        parse(emit(value(129)))
    assert error.value.code == "limit_exceeded"


def test_a_million_levels_are_refused_without_a_stack_overflow():
    with pytest.raises(FormatError) as error:
        parse(b"\x91" * 1_000_000 + b"\xc0")
    assert error.value.code == "limit_exceeded"


@pytest.mark.parametrize("head", ["ddffffffff", "dfffffffff", "c6ffffffff", "dbffffffff"])
def test_a_length_that_lies_allocates_nothing(head, peak_nbytes):
    def attempt() -> None:
        with pytest.raises(FormatError):
            parse(bytes.fromhex(head) + bytes(100))

    assert peak_nbytes(attempt) < 100_000


@pytest.mark.parametrize("index", ["00", "7f", "cc80", "cd0100", "cfffffffffffffffff"])
def test_a_tensor_reference_parses_like_any_array(index):
    number = parse(bytes.fromhex(index))
    assert parse(bytes.fromhex("92a674656e736f72" + index)) == ["tensor", number]


def test_a_tensor_reference_with_another_element_parses_too():
    assert parse(bytes.fromhex("92a674656e736f72" + "a161")) == ["tensor", "a"]
    assert parse(bytes.fromhex("93a674656e736f72" + "0081a16100")) == ["tensor", 0, {"a": 0}]


# A map of tensors, which is read in a way of its own


def map_of_tensors() -> bytes:
    """A map as a tree has it: keys and numbers of all lengths, and other values among them."""
    keys = [f"layers.{number:03}.weight{'x' * (number % 40)}" for number in range(300)]
    keys += ["é" * 20, "z" * 255, "z" * 256]
    numbers = [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1]
    tree: dict[str, object] = {
        key: ["tensor", numbers[place % 8] if place % 3 else place]
        for place, key in enumerate(sorted(keys))
    }
    tree |= {"layers.100.y": 1.5, "layers.200.y": ["tensor", 7, {"flavour": "numpy"}]}
    return emit({"tree": dict(sorted(tree.items())), "user": {"text": "x" * 300}})


def answer(data: bytes) -> object:
    try:
        return parse(data)
    except FormatError as error:
        return error.code, error.problems[0].byte_offset, error.message


@pytest.mark.parametrize("depth", [0, DEPTH_MAX - 4, DEPTH_MAX - 3, DEPTH_MAX - 2])
def test_a_map_of_tensors_is_read_as_any_other_map(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    data = b"\x91" * depth + map_of_tensors()
    chance = random.Random(depth)
    inputs = [data, data[: len(data) // 2]]
    for _ in range(150):
        bent = bytearray(data)
        for _ in range(chance.choice([1, 1, 2])):
            bent[chance.randrange(depth, len(bent))] = chance.choice(
                [chance.randrange(256), 0x92, 0xA0, 0xBF, 0xD9, 0xCC, 0xCD, 0xCE, 0xCF]
            )
        inputs.append(bytes(bent))
    found = list(map(answer, inputs))
    with monkeypatch.context() as patch:
        patch.setattr(packing._Parser, "_read_tensors", lambda *_: None)
        assert list(map(answer, inputs)) == found
    assert isinstance(found[0], tuple) == (depth > DEPTH_MAX - 4)  # nested too deep
    assert sum(isinstance(one, tuple) for one in found) > 100
