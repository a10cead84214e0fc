"""What cannot be stored is refused at save, with its place, before anything is written."""

from __future__ import annotations

import collections
import datetime
import enum
import fractions
import pathlib
import threading
import types
from typing import Any

import numpy as np
import pytest

import dsdformat.numpy
from dsdformat import Named, Scalar, Size
from dsdformat.errors import DsdError, UnsupportedValueError
from dsdformat.format.values import TensorRef

Point = collections.namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Mapping(dict):
    pass


class Secret:
    def __repr__(self) -> str:
        raise RuntimeError("no text for this")


RECORD = np.zeros(2, [("x", "f4"), ("y", "i4")])
ARRAYS = {
    "objects": np.array([{}, None], object),
    "no objects": np.array([], object),
    "text": np.array(["a", "bc"]),
    "bytes": np.array([b"a", b"bc"]),
    "datetime64": np.array(["2020-01-01"], "M8[D]"),
    "timedelta64": np.array([1], "m8[s]"),
    "long double": np.zeros(2, np.longdouble),
    "complex long double": np.zeros(2, np.clongdouble),
    "a record": RECORD,
    "raw bytes": np.zeros(2, "V3"),
    "a sub-array": np.zeros(2, [("int3", "u1", (2,))]),
    "a stand-in with another name": np.zeros(2, [("int9", "u1")]),
    "a masked array": np.ma.masked_array([1.0, 2.0], [True, False]),
    "a matrix": np.zeros((2, 2)).view(np.matrix),
    "a record array": RECORD.view(np.recarray),
}
SCALARS = {
    "np.str_": np.str_("a"),
    "np.bytes_": np.bytes_(b"a"),
    "np.datetime64": np.datetime64("2020-01-01"),
    "np.timedelta64": np.timedelta64(1, "s"),
    "np.longdouble": np.longdouble(1),
    "np.void": np.void(b"abc"),
    "a record": RECORD[0],
}
DTYPES = {
    "a text dtype": np.dtype("U3"),
    "an object dtype": np.dtype(object),
    "a record dtype": RECORD.dtype,
    "a class that stands for a dtype": np.float32,
}
OBJECTS = {
    "a function": len,
    "a lambda": lambda: None,
    "a class": Secret,
    "a module": types,
    "an object": object(),
    "a named tuple": Point(1, 2),
    "an enum": Colour.RED,
    "an int enum": Level.LOW,
    "a subclass of str": Text("a"),
    "a subclass of int": Number(3),
    "a subclass of dict": Mapping(),
    "a bytearray": bytearray(b"a"),
    "a memoryview": memoryview(b"a"),
    "a range": range(3),
    "a slice": slice(3),
    "an iterator": iter([1]),
    "a fraction": fractions.Fraction(1, 2),
    "a lock": threading.Lock(),
    "a time of day": datetime.time(1, 2),
    "a named time zone": datetime.datetime(
        2020, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(0), "X")
    ),
    "a lone surrogate": "\ud800",
    "a path with a lone surrogate": pathlib.PurePosixPath("\udcff"),
    "an object without a text": Secret(),
    "an exception": ValueError("x"),
    "NotImplemented": NotImplemented,
    "an ellipsis": ...,
    "a generator of random numbers": np.random.default_rng(0),
}
# Made by hand from the format's own classes, and outside of what it can hold.
INERT = {
    "a negative size": Size((-1,)),
    "a size of a float": Size((1.5,)),
    "a size of a bool": Size((True,)),
    "a size beyond 2**63": Size((2**63,)),
    "a kind with a space": Named("torch dtype", "bfloat16"),
    "an empty kind": Named("", "bfloat16"),
    "a name that is a number": Named("torch.dtype", 3),
    "a name with a lone surrogate": Named("torch.dtype", "\ud800"),
    "a scalar of an unknown dtype": Scalar("float31", b"1234"),
    "a scalar of too few bytes": Scalar("float32", b"123"),
    "a scalar of text": Scalar("float32", "1234"),
    "a reference to a tensor": TensorRef(0),
}
KEYS = {
    "a NaN": float("nan"),
    "a NaN in a tuple": (1, (float("nan"),)),
    "a NaN in a complex number": complex(0, float("nan")),
    "a numpy scalar": np.int64(3),
    "a numpy string": np.str_("a"),
    "an enum": Colour.RED,
    "an object": Secret,
    "a date": datetime.date(2020, 1, 1),
    "a path": pathlib.PurePosixPath("a"),
    "a lone surrogate": "\ud800",
    "a lone surrogate in a tuple": ("\ud800",),
}


def refused(tmp_path: Any, state: Any) -> UnsupportedValueError:
    with pytest.raises(UnsupportedValueError) as caught:
        dsdformat.numpy.save(tmp_path / "checkpoint", state)
    assert list(tmp_path.iterdir()) == [], "something was written"
    assert len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_an_array_that_is_no_tensor_is_refused_with_its_path(tmp_path, array):
    error = refused(tmp_path, {"a": np.zeros(3), "model": {"layer_0": [1, array]}})
    assert error.path_in_tree == "$.model.layer_0[1]"
    assert str(error).startswith(error.path_in_tree)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy has no StringDType")
def test_an_array_of_strings_of_any_length_is_refused_with_its_path(tmp_path):
    array = np.array(["a"], np.dtypes.StringDType())
    assert refused(tmp_path, {"model": array}).path_in_tree == "$.model"


@pytest.mark.parametrize("value", (SCALARS | DTYPES).values(), ids=SCALARS | DTYPES)
def test_a_numpy_value_without_a_logical_dtype_is_refused_with_its_path(tmp_path, value):
    assert refused(tmp_path, {"model": [{"x": value}]}).path_in_tree == "$.model[0].x"


@pytest.mark.parametrize("value", OBJECTS.values(), ids=OBJECTS)
def test_an_object_is_refused_with_its_path(tmp_path, value):
    state = {"a": np.zeros(3), "sched": {"lambdas": (None, {5: value})}}
    error = refused(tmp_path, state)
    assert error.path_in_tree == "$.sched.lambdas[1][5]"
    assert error.code == "unsupported_value"
    assert error.hint


@pytest.mark.parametrize("value", INERT.values(), ids=INERT)
def test_a_value_that_could_not_be_read_again_is_refused(tmp_path, value):
    with pytest.raises(DsdError):
        dsdformat.numpy.save(tmp_path / "checkpoint", {"a": value})
    assert list(tmp_path.iterdir()) == [], "something was written"


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_key_that_the_format_cannot_hold_is_refused_with_the_path_of_its_dict(tmp_path, key):
    assert refused(tmp_path, {"model": {"x": {key: 1}}}).path_in_tree.startswith("$.model.x")
    assert refused(tmp_path, {"model": {"x": {key}}}).path_in_tree.startswith("$.model.x")


def test_a_state_that_contains_itself_is_refused(tmp_path):
    state: dict[str, Any] = {"a": []}
    state["a"].append(state["a"])
    assert refused(tmp_path, state).code == "value_too_deep"


@pytest.mark.parametrize("root", [[], None, {1: 2}, {"a": 1, 2: 3}, np.zeros(3)], ids=repr)
def test_a_root_that_is_no_dict_of_strings_is_refused(tmp_path, root):
    with pytest.raises(DsdError):
        dsdformat.numpy.save(tmp_path / "checkpoint", root)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_leaves_the_old_checkpoint_as_it_was(tmp_path):
    path = tmp_path / "checkpoint"
    root = dsdformat.numpy.save(path, {"w": np.arange(3)})
    with pytest.raises(UnsupportedValueError):
        dsdformat.numpy.save(path, {"w": np.arange(4), "x": object()}, overwrite=True)
    assert [child.name for child in tmp_path.iterdir()] == ["checkpoint"]
    assert dsdformat.numpy.load(path, digest=root)["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "user",
    [{"a": "\ud800"}, {"\ud800": "a"}, {"a": 1}, {1: "a"}, {"a": None}, {"a": np.str_("b")}],
    ids=["a surrogate", "a surrogate in a key", "a number", "a number as key", "None", "np.str_"],
)
def test_user_metadata_that_is_no_text_is_refused(tmp_path, user):
    with pytest.raises(DsdError):
        dsdformat.numpy.save(tmp_path / "checkpoint", {"a": 1}, user=user)
    assert list(tmp_path.iterdir()) == []


HUGE = 10**5000  # more digits than Python turns into text


def test_an_int_with_more_digits_than_python_prints_is_a_value_and_a_key(round_trip):
    state = {"n": HUGE, "m": {HUGE: np.arange(3), -HUGE: {HUGE: -HUGE}}}
    loaded = round_trip(state)
    assert loaded["n"] == HUGE
    assert loaded["m"][HUGE].tolist() == [0, 1, 2]
    assert loaded["m"][-HUGE] == {HUGE: -HUGE}


@pytest.mark.parametrize(
    "state",
    [{"a": {HUGE: object()}}, {"a": {HUGE: np.zeros(2, object)}}, {"a": Mapping({1: HUGE})}],
    ids=["below it", "an array below it", "in what is refused"],
)
def test_a_refusal_beside_an_int_that_python_does_not_print_is_a_refusal(tmp_path, state):
    assert refused(tmp_path, state).path_in_tree.startswith("$.a")


def test_a_tensor_of_more_dims_than_this_numpy_has_is_refused_by_name(tmp_path, monkeypatch):
    """Arrays of numpy 1 have 32 at most."""
    dsdformat.numpy.save(tmp_path / "c", {"flat": np.ones(3), "deep": np.ones((1, 1, 3))})
    monkeypatch.setattr(dsdformat.numpy, "_NDIM_MAX", 2)
    with pytest.raises(UnsupportedValueError, match="deep has 3 dims, more than") as error:
        dsdformat.numpy.load(tmp_path / "c")
    assert (error.value.code, error.value.path_in_tree) == ("unsupported_value", "deep")
    assert "numpy 2" in str(error.value.hint)
