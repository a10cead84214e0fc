"""The comparison that the properties rest on sees each difference that they are about."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, datetime, timedelta, timezone
from pathlib import PurePosixPath, PureWindowsPath

import numpy as np
import pytest
from sameness import assert_same

DIFFERENT = {
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "zero and minus zero": (0.0, -0.0),
    "complex with minus zero": (complex(0, 0.0), complex(0, -0.0)),
    "list and tuple": ([1], (1,)),
    "str and bytes": ("a", b"a"),
    "keys that are equal": ({1: 2}, {True: 2}),
    "keys in tuples": ({(1, 0.0): 2}, {(1, -0.0): 2}),
    "elements that are equal": ({1}, {1.0}),
    "set and frozenset": ({1}, frozenset({1})),
    "dict and ordered dict": ({}, OrderedDict()),
    "dict and counter": ({"a": 1}, Counter("a")),
    "the order of an ordered dict": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    "a factory": (defaultdict(None), defaultdict(list)),
    "maxlen": (deque([1], 3), deque([1], 4)),
    "one instant in two zones": (
        datetime(2020, 1, 1, 12, tzinfo=UTC),
        datetime(2020, 1, 1, 13, tzinfo=timezone(timedelta(hours=1))),
    ),
    "fold": (datetime(2020, 1, 1), datetime(2020, 1, 1, fold=1)),
    "kinds of paths": (PurePosixPath("a"), PureWindowsPath("a")),
    "paths that are equal on Windows": (PureWindowsPath("a"), PureWindowsPath("A")),
    "numpy and python": (np.float64(1), 1.0),
    "scalar and array": (np.float32(1), np.array(1, np.float32)),
    "array dtypes": (np.zeros(2, np.int32), np.zeros(2, np.float32)),
    "array shapes": (np.zeros((2, 1)), np.zeros((1, 2))),
    "array bits": (np.array([0.0]), np.array([-0.0])),
    "bits of a NaN": (
        np.array([0x7FC00000], np.uint32).view(np.float32),
        np.array([0x7FC00001], np.uint32).view(np.float32),
    ),
    "a missing key": ({"a": 1, "b": 2}, {"a": 1}),
    "deep inside": ({"a": [{"b": (1, 2)}]}, {"a": [{"b": (1, 3)}]}),
}
SAME = {
    "NaN": (float("nan"), float("nan")),
    "the order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "memory order": (np.asfortranarray(np.eye(3)), np.eye(3)),
    "byte order": (np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4")),
}


@pytest.mark.parametrize(("a", "b"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_difference_is_seen(a, b):
    with pytest.raises(AssertionError):
        assert_same({"value": a}, {"value": b})


@pytest.mark.parametrize(("a", "b"), SAME.values(), ids=SAME)
def test_what_a_checkpoint_does_not_keep_is_no_difference(a, b):
    assert_same({"value": a}, {"value": b})
