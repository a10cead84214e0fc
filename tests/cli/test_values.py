"""Values as text and as JSON."""

from __future__ import annotations

import json
import math
import pathlib
import time
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, timedelta, timezone

import pytest

from dsdformat import Named, Scalar, Size
from dsdformat.cli.values import is_branch, iter_values, short_text, type_name, value_json
from dsdformat.format.values import TAGS, encode

CASES = {
    "none": (None, "None", None),
    "bool": (True, "True", True),
    "int": (-5, "-5", -5),
    "int-uint64": (2**64 - 1, "18446744073709551615", 2**64 - 1),
    "int-big": (2**64, "18446744073709551616", {"$int": "18446744073709551616"}),
    "int-huge": (1 << 20_000, "0x1" + "0" * 56 + "…", {"$int": "0x1" + "0" * 5000}),
    "float": (0.5, "0.5", 0.5),
    "nan": (math.nan, "nan", "NaN"),
    "inf": (-math.inf, "-inf", "-Infinity"),
    "complex": (1 + 0.5j, "(1+0.5j)", {"$complex": [1, 0.5]}),
    "complex-nan": (complex(0, math.nan), "nanj", {"$complex": [0, "NaN"]}),
    "str": ("a\nb", r"'a\nb'", "a\nb"),
    "bytes": (b"\0\xff", r"b'\x00\xff'", {"$bytes": "00ff"}),
    "list": ([1, [2]], "[1, [2]]", [1, [2]]),
    "tuple": ((1,), "(1,)", {"$tuple": [1]}),
    "empty-tuple": ((), "()", {"$tuple": []}),
    "dict": ({"a": 1}, "{'a': 1}", {"a": 1}),
    "dict-of-ints": ({1: "a"}, "{1: 'a'}", {"$dict": [[1, "a"]]}),
    "dict-like-a-tag": ({"$int": 1}, "{'$int': 1}", {"$dict": [["$int", 1]]}),
    "odict": (OrderedDict(b=1, a=2), "odict{'b': 1, 'a': 2}", {"$odict": [["b", 1], ["a", 2]]}),
    "counter": (Counter("aab"), "counter{'a': 2, 'b': 1}", {"$counter": [["a", 2], ["b", 1]]}),
    "defaultdict": (defaultdict(None, a=1), "defaultdict{'a': 1}", {"$defaultdict": [["a", 1]]}),
    "set": ({"bb", "a"}, "set{'a', 'bb'}", {"$set": ["a", "bb"]}),
    "frozenset": (frozenset([2, 1]), "frozenset{1, 2}", {"$frozenset": [1, 2]}),
    "deque": (deque([1], 3), "deque[1]", {"$deque": [1], "maxlen": 3}),
    "size": (Size([2, 3]), "size[2, 3]", {"$size": [2, 3]}),
    "name": (
        Named("torch.dtype", "float32"),
        "torch.dtype('float32')",
        {"$name": "float32", "kind": "torch.dtype"},
    ),
    "scalar": (
        Scalar("float32", b"\0\0\0\x3f"),
        "float32(0.5)",
        {"$scalar": "float32", "value": 0.5, "bytes": "0000003f"},
    ),
    "scalar-bfloat16": (
        Scalar("bfloat16", b"\xc0\x3f"),
        "bfloat16(1.5)",
        {"$scalar": "bfloat16", "value": 1.5, "bytes": "c03f"},
    ),
    "scalar-nan": (
        Scalar("float16", b"\0\x7e"),
        "float16(nan)",
        {"$scalar": "float16", "value": "NaN", "bytes": "007e"},
    ),
    "scalar-without-number": (
        Scalar("float8_e5m2", b"\x3c"),
        "float8_e5m2(3c)",
        {"$scalar": "float8_e5m2", "value": None, "bytes": "3c"},
    ),
    "scalar-uint64": (
        Scalar("uint64", b"\xff" * 8),
        f"uint64({2**64 - 1})",
        {"$scalar": "uint64", "value": 2**64 - 1, "bytes": "ff" * 8},
    ),
    "datetime": (
        datetime(2026, 11, 30, 12, tzinfo=UTC),
        "2026-11-30 12:00:00+00:00",
        {"$datetime": "2026-11-30T12:00:00+00:00", "fold": 0},
    ),
    "date": (date(2026, 11, 30), "2026-11-30", {"$date": "2026-11-30"}),
    "timedelta": (timedelta(1, 2, 3), "1 day, 0:00:02.000003", {"$timedelta": [1, 2, 3]}),
    "path": (
        pathlib.PurePosixPath("/data/x"),
        "/data/x",
        {"$path": "/data/x", "kind": "pure_posix"},
    ),
}


@pytest.mark.parametrize(("value", "text", "document"), CASES.values(), ids=CASES)
def test_a_value_reads_and_is_in_json(value, text, document):
    assert short_text(value) == text
    shown = json.loads(json.dumps(value_json(value), allow_nan=False))
    assert shown == document
    assert type(shown) is type(document)


def test_every_tag_of_the_format_has_its_word():
    tags = {encode(value)[0] for value, *_ in CASES.values() if type(encode(value)) is list}
    assert tags == TAGS - {"tensor"}
    for value, *_ in CASES.values():
        encoded = encode(value)
        if type(encoded) is list:
            assert type_name(value) == encoded[0]


def test_offsets_of_microseconds_are_kept():
    zone = timezone(timedelta(microseconds=1))
    value = datetime(2026, 1, 1, tzinfo=zone, fold=1)
    assert value_json(value) == {"$datetime": "2026-01-01T00:00:00+00:00:00.000001", "fold": 1}


def test_long_values_end_in_an_ellipsis():
    assert short_text("x" * 100, 10) == "'xxxxxxxx…"
    assert short_text(list(range(100)), 10) == "[0, 1, 2,…"


def test_a_vast_value_is_shortened_without_writing_it_all():
    value = {"a": list(range(10**6)), "b": "x" * 10**7}
    started = time.perf_counter()
    for _ in range(100):
        assert len(short_text(value)) == 60
    assert time.perf_counter() - started < 1


def test_branches_are_dicts_and_what_holds_them():
    assert is_branch({"a": 1})
    assert is_branch([{"a": 1}])
    assert is_branch(deque([[{"a": 1}]]))
    assert not is_branch({})
    assert not is_branch([1, (2, 3)])
    assert not is_branch({1, 2})
    assert not is_branch(Size([1]))


def test_values_are_listed_by_the_names_of_their_paths():
    tree = {"a/b": {"c@": 1}, "l": [{"x": (1, 2)}, {}], "d": {(1, True): None}}
    assert list(iter_values(tree)) == [
        ("a%2Fb/c%40", 1),
        ("l/@0/x", (1, 2)),
        ("l/@1", {}),
        ("d/@x93a57475706c6501c3", None),
    ]
