"""Values of the tree: golden bytes of each tag, what is refused at save, and what in a file."""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import fractions
import math
import pathlib
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque

import pytest

from dsdformat import Named, Scalar, Size, TensorSource, UnsupportedValueError
from dsdformat.format.decoding import Hooks, decode_tree
from dsdformat.format.packing import emit, parse
from dsdformat.format.values import TAGS, TensorRef, encode
from dsdformat.limits import DEPTH_MAX

HOURS = datetime.timezone(datetime.timedelta(hours=-5, minutes=-30))

# Each value with its bytes, as the table of section 11 says.
GOLDEN = [
    pytest.param(None, "c0", id="none"),
    pytest.param(True, "c3", id="bool"),
    pytest.param("é", "a2c3a9", id="str"),
    pytest.param(b"\x01", "c40101", id="bytes"),
    pytest.param(7, "07", id="int"),
    pytest.param(2**64, "92a3696e74c409000000000000000001", id="int-2**64"),
    pytest.param(-(2**63) - 1, "92a3696e74c409ffffffffffffff7fff", id="int--2**63-1"),
    pytest.param(0.5, "cb3fe0000000000000", id="float"),
    pytest.param(1 - 2j, "93a7636f6d706c6578cb3ff0000000000000cbc000000000000000", id="complex"),
    pytest.param({}, "80", id="empty-dict"),
    pytest.param({"b": 1, "a": 2}, "82a16102a16201", id="dict-of-text"),
    pytest.param({2: "b", 1: "a"}, "93a4646963749201a1619202a162", id="dict"),
    pytest.param(OrderedDict([("b", 1), ("a", 2)]), "93a56f6469637492a1620192a16102", id="odict"),
    pytest.param(Counter({"b": 1, "a": 2}), "93a7636f756e74657292a1610292a16201", id="counter"),
    pytest.param(
        defaultdict(None, {"a": 1}), "92ab64656661756c746469637492a16101", id="defaultdict"
    ),
    pytest.param([1, "a"], "93a46c69737401a161", id="list"),
    pytest.param([], "91a46c697374", id="empty-list"),
    pytest.param((1, "a"), "93a57475706c6501a161", id="tuple"),
    pytest.param({"b", "a"}, "93a3736574a161a162", id="set"),
    pytest.param(frozenset({2, 1}), "93a966726f7a656e7365740102", id="frozenset"),
    pytest.param(deque([1], 5), "93a564657175650501", id="deque"),
    pytest.param(deque([1]), "93a56465717565c001", id="deque-without-end"),
    pytest.param(Size((2, 3)), "93a473697a650203", id="size"),
    pytest.param(
        Scalar("float16", b"\x00\x3c"), "93a67363616c6172a7666c6f61743136c402003c", id="scalar"
    ),
    pytest.param(
        Named("torch.dtype", "bfloat16"),
        "93a46e616d65ab746f7263682e6474797065a862666c6f61743136",
        id="name",
    ),
    pytest.param(
        datetime.datetime(2024, 2, 29, 23, 59, 58, 7, fold=1),
        "9aa86461746574696d65cd07e8021d173b3a0701c0",
        id="datetime",
    ),
    pytest.param(
        datetime.datetime(2024, 1, 2, tzinfo=HOURS),
        "9aa86461746574696d65cd07e801020000000000d3fffffffb63d3fa00",
        id="datetime-with-offset",
    ),
    pytest.param(datetime.date(1, 1, 1), "94a464617465010101", id="date"),
    pytest.param(
        datetime.timedelta(days=-1, seconds=86_399),
        "94a974696d6564656c7461ffce0001517f00",
        id="timedelta",
    ),
    pytest.param(
        pathlib.PurePosixPath("/a/b"), "95a470617468aa707572655f706f736978a12fa161a162", id="path"
    ),
    pytest.param(
        pathlib.PureWindowsPath("C:\\a"),
        "94a470617468ac707572655f77696e646f7773a3433a5ca161",
        id="path-windows",
    ),
]


@pytest.mark.parametrize(("value", "text"), GOLDEN)
def test_a_value_has_its_bytes(value, text):
    assert emit(encode(value)).hex() == text


@pytest.mark.parametrize(("value", "text"), GOLDEN)
def test_bytes_have_their_value_and_its_type(value, text):
    decoded = decoded_value(parse(bytes.fromhex(text)))
    assert (decoded, type(decoded)) == (value, type(value))


def test_each_tag_has_golden_bytes():
    shown = {bytes.fromhex(case.values[1])[2:] for case in GOLDEN}
    missing = {tag for tag in TAGS if not any(raw.startswith(tag.encode()) for raw in shown)}
    assert missing == {"tensor"}


def test_a_tensor_has_its_bytes():
    assert emit(encode(TensorRef(5))).hex() == "92a674656e736f7205"


def test_a_tensor_with_attributes_has_its_bytes():
    ref = TensorRef(5, (("flavour", "numpy"),))
    assert emit(encode(ref)).hex() == "93a674656e736f720581a7666c61766f7572a56e756d7079"


def decoded_value(raw: object, hooks: Hooks | None = None) -> object:
    tree = decode_tree({"v": raw}, hooks)
    assert tree.problems == []
    return tree.root["v"]


# What decoding keeps


def test_a_naive_datetime_stays_naive():
    assert decoded_value(encode(datetime.datetime(2024, 1, 2))).tzinfo is None


def test_an_offset_of_microseconds_is_kept():
    zone = datetime.timezone(datetime.timedelta(hours=23, minutes=59, microseconds=1))
    value = datetime.datetime(9999, 12, 31, tzinfo=zone)
    assert decoded_value(encode(value)).utcoffset() == zone.utcoffset(None)


def test_the_order_of_an_ordered_dict_is_kept():
    value = OrderedDict([("b", 1), ("a", 2)])
    assert list(decoded_value(encode(value))) == ["b", "a"]


def test_the_order_of_a_plain_dict_is_not_kept():
    assert list(decoded_value(encode({"b": 1, "a": 2}))) == ["a", "b"]


def test_the_factory_of_a_defaultdict_is_not_kept():
    decoded = decoded_value(encode(defaultdict(list, a=[1])))
    assert (decoded, decoded.default_factory) == ({"a": [1]}, None)


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308])
def test_a_float_is_kept_to_the_bit(value):
    decoded = decoded_value(encode(value))
    assert (decoded, math.copysign(1, decoded)) == (value, math.copysign(1, value))


@pytest.mark.parametrize("power", [63, 64, 127, 128, 1000, 100_000])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_an_integer_of_any_size_is_kept(power, sign, more):
    value = sign * 2**power + more
    assert decoded_value(encode(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({1: "a", "1": "b"}, id="number-and-text"),
        pytest.param({True: "a", None: "b", 2.5: "c", b"x": "d"}, id="kinds"),
        pytest.param({(1, (2, "a")): "a", frozenset({1, (2,)}): "b"}, id="nested-keys"),
        pytest.param({2**70: "a", -(2**70): "b", 1j: "c"}, id="long-numbers"),
        pytest.param({(): {}, ("",): []}, id="empty"),
        pytest.param([set(), frozenset(), (), [], {}, deque(), OrderedDict()], id="containers"),
        pytest.param({"": {"\0": {"/": 1}}}, id="odd-text"),
    ],
)
def test_a_nested_value_is_kept(value):
    assert decoded_value(encode(value)) == value


@pytest.mark.parametrize(
    "path",
    [
        pathlib.PurePosixPath(),
        pathlib.PurePosixPath("a b/../c"),
        pathlib.PurePosixPath("//server/x"),
        pathlib.PureWindowsPath("a\\b"),
        pathlib.PureWindowsPath("C:a"),
        pathlib.PureWindowsPath("\\a"),
        pathlib.PureWindowsPath("\\\\server\\share\\a"),
        pathlib.Path("/tmp") / "x",
    ],
    ids=repr,
)
def test_a_path_is_kept_with_its_kind(path):
    decoded = decoded_value(encode(path))
    assert (decoded, type(decoded)) == (path, type(path))


def test_hooks_make_what_a_framework_wants_of_inert_values():
    hooks = Hooks(
        named=lambda value: ("named", value.name),
        scalar=lambda value: ("scalar", value.dtype),
        size=lambda value: ("size", *value),
        tensor=lambda value: ("tensor", value.index),
    )
    state = {"a": Named("k", "n"), "b": Scalar("int8", b"1"), "c": Size((2,)), "d": TensorRef(0)}
    assert decode_tree(encode(state), hooks).root == {
        "a": ("named", "n"),
        "b": ("scalar", "int8"),
        "c": ("size", 2),
        "d": ("tensor", 0),
    }


def test_a_hook_for_tensors_without_hints_gets_all_of_these_by_their_index():
    hooks = Hooks(tensor=lambda value: value.attributes, bare=lambda index: index)
    raw = {
        "a": ["tensor", 0],
        "b": ["tensor", 1, {"flavour": "numpy"}],
        "c": ["list", ["tensor", 2], ["tensor", 0]],
        "d": ["tensor", 1],
        "e": ["tensor", 3],
    }
    tree = decode_tree(raw, hooks)
    hints = (("flavour", "numpy"),)
    assert tree.root == {"a": 0, "b": hints, "c": [2, 0], "d": 1, "e": 3}
    assert tree.paths == [("a",), ("b",), ("c", 0), ("e",)]
    assert tree.aliases == {0: [("a",), ("c", 1)], 1: [("b",), ("d",)]}
    assert not tree.problems


@pytest.mark.parametrize("index", [True, 0.0, None, "0"], ids=repr)
def test_an_index_of_another_type_is_none_though_it_is_equal(index):
    assert [one.code for one in decode_tree({"a": ["tensor", index]}).problems] == ["bad_value"]
    raw = {"a": ["tensor", 0], "b": ["tensor", index or True]}
    assert [one.code for one in decode_tree(raw).problems] == ["bad_value"]


# What cannot be stored


class Colour(enum.IntEnum):
    RED = 1


class Point(collections.namedtuple("Point", "x y")):
    pass


class Text(str):
    __slots__ = ()


class Module:
    def state_dict(self) -> dict[str, object]:
        return {}


UNSUPPORTED = [
    pytest.param(object, "builtins.object", id="object"),
    pytest.param(lambda: len, "a function", id="builtin"),
    pytest.param(lambda: lambda: 0, "a function", id="lambda"),
    pytest.param(lambda: int, "a class", id="class"),
    pytest.param(lambda: Colour.RED, "Colour", id="enum"),
    pytest.param(lambda: Point(1, 2), "Point", id="namedtuple"),
    pytest.param(lambda: Text("a"), "Text", id="subclass-of-str"),
    pytest.param(lambda: bytearray(b"a"), "bytearray", id="bytearray"),
    pytest.param(lambda: memoryview(b"a"), "memoryview", id="memoryview"),
    pytest.param(lambda: range(3), "range", id="range"),
    pytest.param(lambda: fractions.Fraction(1, 3), "Fraction", id="fraction"),
    pytest.param(lambda: datetime.time(1), "datetime.time", id="time"),
    pytest.param(lambda: "\ud800", "lone surrogates", id="surrogate"),
    pytest.param(
        lambda: datetime.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        "named time zone",
        id="zone",
    ),
    pytest.param(
        lambda: datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(), "X")),
        "named time zone",
        id="named-offset",
    ),
    pytest.param(lambda: pathlib.PurePosixPath("a\0b"), "path of this form", id="path-with-nul"),
    pytest.param(lambda: pathlib.PurePosixPath("\ud800"), "lone surrogates", id="path-surrogate"),
]


@pytest.mark.parametrize(("make", "said"), UNSUPPORTED)
def test_what_cannot_be_stored_is_refused_with_its_place(make, said):
    with pytest.raises(UnsupportedValueError) as error:
        encode({"a": [0, {"the b": make()}]})
    assert error.value.code == "unsupported_value"
    assert error.value.path_in_tree == "$.a[1]['the b']"
    assert "$.a[1]['the b']" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(math.nan, id="nan"),
        pytest.param(complex(0, math.nan), id="complex-nan"),
        pytest.param((1, (math.nan,)), id="nan-within"),
        pytest.param(Colour.RED, id="enum"),
        pytest.param(Named("k", "n"), id="name"),
        pytest.param(Size((1,)), id="size"),
        pytest.param(pathlib.PurePosixPath("a"), id="path"),
        pytest.param(datetime.date(2024, 1, 1), id="date"),
        pytest.param("\ud800", id="surrogate"),
    ],
)
@pytest.mark.parametrize("holder", ["dict", "set"])
def test_what_cannot_be_a_key_is_refused_with_the_place_of_the_container(key, holder):
    container = {key: 1} if holder == "dict" else {key}
    with pytest.raises(UnsupportedValueError, match=r"^\$\.a"):
        encode({"a": container})


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        pytest.param(Module(), "state_dict()", id="module"),
        pytest.param(Point(1, 2), "plain tuple", id="namedtuple"),
        pytest.param(object(), "build the object at load", id="object"),
    ],
)
def test_the_hint_says_what_to_store_instead(value, hint):
    with pytest.raises(UnsupportedValueError) as error:
        encode(value)
    assert hint in (error.value.hint or "")


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_a_value_whose_repr_fails_is_refused_like_any_other():
    with pytest.raises(UnsupportedValueError):
        encode({"a": Unprintable()})


def test_a_value_below_a_key_of_many_digits_is_refused_like_any_other():
    with pytest.raises(UnsupportedValueError):
        encode({"a": {10**5000: object()}})


INVALID = [
    pytest.param(Named("Torch.DType", "x"), id="name-kind"),
    pytest.param(Named("torch.dtype", "\ud800"), id="name-surrogate"),
    pytest.param(Named("torch.dtype", 5), id="name-of-a-number"),
    pytest.param(Scalar("float33", b"1234"), id="scalar-dtype"),
    pytest.param(Scalar("float32", b"123"), id="scalar-length"),
    pytest.param(Scalar("float32", bytearray(4)), id="scalar-bytearray"),
    pytest.param(Size((-1,)), id="size-negative"),
    pytest.param(Size((2**63,)), id="size-too-large"),
    pytest.param(Size((1.5,)), id="size-float"),
    pytest.param(Size((True,)), id="size-bool"),
]


@pytest.mark.parametrize("value", INVALID)
def test_an_inert_value_that_a_reader_would_refuse_is_refused_at_save(value):
    with pytest.raises(UnsupportedValueError, match=r"^\$\.a"):
        encode({"a": value})


# Depth


def test_a_list_that_contains_itself_is_refused():
    value: list[object] = []
    value.append(value)
    with pytest.raises(UnsupportedValueError) as error:
        encode({"a": value})
    assert error.value.code == "value_too_deep"


def test_a_dict_that_contains_itself_is_refused():
    value: dict[str, object] = {}
    value["a"] = value
    with pytest.raises(UnsupportedValueError) as error:
        encode(value)
    assert error.value.code == "value_too_deep"


DEEP = [
    pytest.param(None, id="none"),
    pytest.param(2**70, id="long-int"),
    pytest.param(1j, id="complex"),
    pytest.param([], id="list"),
    pytest.param({}, id="dict"),
    pytest.param({1: 2}, id="dict-of-numbers"),
    pytest.param({2**70: 2}, id="dict-of-long-numbers"),
    pytest.param({(1, 2): 2}, id="dict-of-tuples"),
    pytest.param({2**70}, id="set-of-long-numbers"),
    pytest.param({(1,)}, id="set-of-tuples"),
    pytest.param(OrderedDict(a=1), id="odict"),
    pytest.param(pathlib.PurePosixPath("a"), id="path"),
    pytest.param(Size((1,)), id="size"),
    pytest.param(Named("k", "n"), id="name"),
    pytest.param(Scalar("int8", b"1"), id="scalar"),
    pytest.param(datetime.date(2024, 1, 1), id="date"),
    pytest.param(TensorRef(0), id="tensor"),
    pytest.param(TensorRef(0, (("dim_order", [0, 1]),)), id="tensor-with-attributes"),
]
# Depths at which the encoder gives what the parser refuses.
NEAR_THE_LIMIT = [
    pytest.param(case.values[0], levels, id=f"{case.id}-{levels}")
    for case in DEEP
    for levels in range(DEPTH_MAX - 6, DEPTH_MAX + 2)
]


def below(levels: int, value: object) -> object:
    for _ in range(levels):
        value = {"k": value}
    return value


@pytest.mark.parametrize(("value", "levels"), NEAR_THE_LIMIT)
def test_what_is_accepted_at_save_is_never_too_deep_to_read(value, levels):
    with contextlib.suppress(UnsupportedValueError):
        parse(emit({"tree": encode(below(levels, value))}))


@pytest.mark.parametrize("value", DEEP)
def test_what_can_be_read_at_a_depth_is_accepted_at_save(value):
    """The limit is that of the format: whatever fits at a depth can be saved there."""
    height = height_of(encode(value))
    levels = DEPTH_MAX - 1 - height
    raw = encode(below(levels, value))
    assert decode_tree(parse(emit({"tree": raw}))["tree"]).problems == []


def height_of(raw: object) -> int:
    """How many levels of arrays and maps an encoding has."""
    if isinstance(raw, dict):
        return 1 + max(map(height_of, raw.values()), default=0)
    return 1 + max(map(height_of, raw), default=0) if isinstance(raw, list) else 0


# What a file may not say


REFUSED = [
    pytest.param(["bogus", 1], "unknown_value_type", id="tag"),
    pytest.param([], "unknown_value_type", id="no-tag"),
    pytest.param([1, 2], "unknown_value_type", id="tag-is-a-number"),
    pytest.param(["int", b"\x01"], "bad_value", id="int-with-a-plain-form"),
    pytest.param(["int", bytes(9) + b"\x00\x01\x00"], "bad_value", id="int-not-shortest"),
    pytest.param(["complex", 1.0], "bad_value", id="complex-half"),
    pytest.param(["complex", 1, 2.0], "bad_value", id="complex-int"),
    pytest.param(["dict", ["a", 1]], "bad_value", id="dict-of-text"),
    pytest.param(["dict"], "bad_value", id="dict-empty"),
    pytest.param(["dict", [2, 0], [1, 0]], "bad_value", id="dict-unsorted"),
    pytest.param(["dict", [1, 0], [1, 0]], "duplicate_key", id="dict-key-twice"),
    pytest.param(["dict", [1, 0], [True, 0]], "duplicate_key", id="dict-1-and-true"),
    pytest.param(["dict", [0.0, 0], [-0.0, 0]], "duplicate_key", id="dict-two-zeros"),
    pytest.param(["dict", [1, 0, 0]], "bad_value", id="dict-triple"),
    pytest.param(["dict", [math.nan, 0]], "bad_value", id="dict-nan"),
    pytest.param(["dict", [["list"], 0]], "bad_value", id="dict-list-key"),
    pytest.param(["dict", [["tensor", 0], 0]], "bad_value", id="dict-tensor-key"),
    pytest.param(["set", 2, 1], "bad_value", id="set-unsorted"),
    pytest.param(["set", 1, 1.0], "duplicate_key", id="set-equal"),
    pytest.param(["set", {}], "bad_value", id="set-of-maps"),
    pytest.param(["deque", 0, 1], "bad_value", id="deque-too-full"),
    pytest.param(["deque"], "bad_value", id="deque-bare"),
    pytest.param(["deque", 2**63], "bad_value", id="deque-too-long"),
    pytest.param(["size", -1], "bad_value", id="size-negative"),
    pytest.param(["size", True], "bad_value", id="size-bool"),
    pytest.param(["scalar", "float33", b"1234"], "bad_value", id="scalar-dtype"),
    pytest.param(["scalar", "float32", b"123"], "bad_value", id="scalar-short"),
    pytest.param(["name", "os.system", "id", 1], "bad_value", id="name-of-three"),
    pytest.param(["name", "OS", "id"], "bad_value", id="name-kind"),
    pytest.param(["date", 2023, 2, 29], "bad_value", id="date"),
    pytest.param(["date", 10_000, 1, 1], "bad_value", id="date-year"),
    pytest.param(["datetime", 2024, 1, 1, 0, 0, 0, 0, 2, None], "bad_value", id="fold"),
    pytest.param(["datetime", 2024, 1, 1, 0, 0, 60, 0, 0, None], "bad_value", id="leap-second"),
    pytest.param(
        ["datetime", 2024, 1, 1, 0, 0, 0, 0, 0, 86_400_000_000], "bad_value", id="offset-of-a-day"
    ),
    pytest.param(["timedelta", 0, 86_400, 0], "bad_value", id="timedelta-seconds"),
    pytest.param(["timedelta", 10**9, 0, 0], "bad_value", id="timedelta-days"),
    pytest.param(["path", "posix", "", "a/b"], "bad_value", id="path-slash"),
    pytest.param(["path", "posix", "", ".."[:1]], "bad_value", id="path-dot"),
    pytest.param(["path", "pure_windows", "", "a:b"], "bad_value", id="path-colon"),
    pytest.param(["path", "pure_windows", "\\\\?\\x\\"], "bad_value", id="path-device"),
    pytest.param(["path", "mac", "", "a"], "bad_value", id="path-kind"),
    pytest.param(["tensor"], "bad_value", id="tensor-bare"),
    pytest.param(["tensor", 0, {}], "bad_value", id="tensor-no-attributes"),
    pytest.param(["tensor", True], "bad_value", id="tensor-bool"),
]


@pytest.mark.parametrize(("raw", "code"), REFUSED)
def test_a_value_that_breaks_the_table_is_a_problem_with_its_path(raw, code):
    problems = decode_tree({"a": {"b": raw}}).problems
    assert (problems[0].code, problems[0].path) == (code, "$.tree.a.b")


@pytest.mark.parametrize("raw", [case.values[0] for case in REFUSED if case.values[0]], ids=repr)
def test_a_value_that_breaks_the_table_is_found_below_other_values(raw):
    tree = {"a": ["list", 0, ["odict", ["k", raw]]]}
    assert decode_tree(tree).problems[0].path == "$.tree.a[1].k"


def test_all_problems_of_a_tree_are_reported():
    tree = decode_tree({"a": ["bogus"], "b": ["date", 0, 0, 0], "c": ["tensor"]})
    assert [problem.path for problem in tree.problems] == ["$.tree.a", "$.tree.b", "$.tree.c"]


@pytest.mark.parametrize("index", [-1, 1, 2**63, 2**64 - 1])
def test_a_tensor_that_is_met_too_soon_is_a_problem_of_a_later_stage(index):
    tree = decode_tree({"a": {"b": ["tensor", index]}, "c": ["tensor", 0]})
    (problem,) = tree.disorder
    assert (problem.code, problem.path) == ("bad_tensor_reference", "$.tree.a.b")
    assert tree.problems == []


@pytest.mark.parametrize(
    "raw",
    [["list"], ["dict", [1, 2]], None, 5, "text", ["tensor", 0]],
    ids=repr,
)
def test_a_root_that_is_no_map_is_refused(raw):
    assert decode_tree(raw).problems[0].code == "bad_body"


def test_a_root_of_an_odict_needs_keys_of_text():
    assert decode_tree(["odict", [1, 2]]).problems[0].code == "bad_body"


def test_attributes_that_are_no_values_are_left_out():
    tree = decode_tree({"a": ["tensor", 0, {"bad": ["bogus"], "flavour": "numpy"}]})
    assert (tree.problems, tree.root["a"].attributes) == ([], (("flavour", "numpy"),))


def test_a_problem_below_a_key_of_many_digits_is_reported():
    key = encode(10**5000)
    problems = decode_tree({"a": ["dict", [key, ["bogus"]]]}).problems
    assert problems[0].code == "unknown_value_type"


def test_a_map_of_a_file_is_never_an_object_with_methods():
    assert type(decoded_value({"__class__": "os.system", "__reduce__": 1})) is dict


def test_equal_numbers_of_other_types_are_other_values_of_a_dict(save, load):
    state = {"a": {1: "int", 2.5: "float"}, "b": {True: "bool"}}
    with load(save(state)) as checkpoint:
        assert checkpoint.tree() == state
        assert [type(key) for key in checkpoint.tree()["b"]] == [bool]


def test_a_tensor_of_a_state_is_no_value_of_encode():
    source = TensorSource.of("uint8", (1,), b"a")
    with pytest.raises(UnsupportedValueError):
        encode({"a": source})


def test_keys_that_are_chosen_to_have_one_hash_are_refused_soon():
    """Python reduces integers by 2**61-1 to hash them: a set of these compares all pairs."""
    keys = [encode((number + 100) * (2**61 - 1)) for number in range(5000)]
    raw = ["set", *sorted(keys, key=emit)]
    assert [one.code for one in decode_tree({"a": raw}).problems] == ["limit_exceeded"]


def test_many_keys_of_few_hashes_are_accepted():
    state = {"a": {1 << number: number for number in range(3000)}}
    assert len({hash(key) for key in state["a"]}) == 61
    assert decode_tree(encode(state)).root == state


def test_sets_in_sets_are_looked_at_once():
    value = frozenset(range(3000))
    for _ in range(100):
        value = frozenset([value])
    assert decode_tree(encode({"a": {value}})).root == {"a": {value}}
