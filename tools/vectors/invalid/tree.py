"""The tree: tags, elements, forms, times, paths, references (section 11)."""

from collections.abc import Iterator

from vectors.cases import Case, invalid
from vectors.declare import Checkpoint
from vectors.hooks import body_put
from vectors.samples import tensor, tree
from vectors.wire import Raw, pack

TENSOR = ["tensor", 0]

TAGS: tuple[tuple[str, object, str], ...] = (
    ("unknown", ["object", 1], "has an unknown tag"),
    ("upper-case", ["List"], "has a tag in capitals"),
    ("pickle", ["pickle", b"\x80\x04N."], "is tagged `pickle`"),
    ("empty-array", [], "is an array without a tag"),
    ("int", [1, 2], "is an array that begins with a number"),
    ("bin", [b"list"], "has a tag that is a byte string"),
    ("array", [["list"], 1], "is an array that begins with an array"),
    ("none", [None], "is an array that begins with nil"),
    ("empty-str", [""], "has an empty tag"),
)

# Elements that are too few, too many, of other types, or out of range.
ELEMENTS: tuple[tuple[str, object], ...] = (
    ("int-arity", ["int"]),
    ("int-type", ["int", "1"]),
    ("int-empty", ["int", b""]),
    ("complex-arity", ["complex", 1.0]),
    ("complex-int", ["complex", 1, 0]),
    ("complex-more", ["complex", 1.0, 0.0, 0.0]),
    ("dict-pair-short", ["dict", [1]]),
    ("dict-pair-long", ["dict", [1, 2, 3]]),
    ("dict-pair-type", ["dict", {"k": 1}]),
    ("odict-flat", ["odict", "k", 1]),
    ("counter-pair", ["counter", "a"]),
    ("deque-arity", ["deque"]),
    ("deque-maxlen-type", ["deque", "3"]),
    ("deque-maxlen-bool", ["deque", True, 1]),
    ("deque-maxlen-negative", ["deque", -1]),
    ("deque-maxlen-2-63", ["deque", 1 << 63, 1]),
    ("deque-over-maxlen", ["deque", 2, 1, 2, 3]),
    ("size-negative", ["size", -1]),
    ("size-2-63", ["size", 1 << 63]),
    ("size-float", ["size", 2.0]),
    ("size-bool", ["size", True]),
    ("scalar-arity", ["scalar", "int8"]),
    ("scalar-short", ["scalar", "int16", b"\0"]),
    ("scalar-long", ["scalar", "int16", b"\0\0\0"]),
    ("scalar-type", ["scalar", "float64", 1.0]),
    ("scalar-dtype", ["scalar", "float33", b"\0\0\0\0"]),
    ("scalar-dtype-type", ["scalar", 4, b"\0\0\0\0"]),
    ("name-arity", ["name", "torch.dtype"]),
    ("name-kind-upper-case", ["name", "torch.Dtype", "float32"]),
    ("name-kind-empty", ["name", "", "x"]),
    ("name-kind-65-characters", ["name", "k" * 65, "x"]),
    ("name-kind-newline", ["name", "torch.dtype\n", "x"]),
    ("name-kind-digit", ["name", "9k", "x"]),
    ("name-type", ["name", "torch.dtype", 5]),
    ("tensor-arity", ["tensor"]),
    ("tensor-index-type", ["tensor", "0"]),
    ("tensor-index-float", ["tensor", 0.0]),
    ("tensor-index-bool", ["tensor", False]),
    ("tensor-attributes-type", ["tensor", 0, ["list"]]),
    ("tensor-more", ["tensor", 0, {"flavour": "numpy"}, 1]),
)

# Longer forms and wrong orders.
FORMS: tuple[tuple[str, object, str], ...] = (
    ("int-small", ["int", b"\x05"], "an integer of one byte in the long form"),
    ("int-2-64-minus-1", ["int", b"\xff" * 8 + b"\0"], "2^64-1 in the long form"),
    ("int-minus-2-63", ["int", b"\0" * 7 + b"\x80"], "-2^63 in the long form"),
    ("int-not-short", ["int", b"\0" * 8 + b"\x01\0"], "2^64 with a zero byte too much"),
    (
        "int-negative-not-short",
        ["int", b"\0" * 9 + b"\xfe\xff"],
        "a negative integer with an FF byte too much",
    ),
    ("dict-of-strings", ["dict", ["a", 1]], "a dict of string keys in the long form"),
    ("dict-empty", ["dict"], "an empty dict in the long form"),
    ("dict-unsorted", ["dict", [2, None], [1, None]], "a dict in falling order"),
    (
        "dict-by-value",
        ["dict", [-1, None], [1, None]],
        "a dict ordered by number, not by encoding",
    ),
    ("counter-unsorted", ["counter", ["b", 1], ["a", 2]], "a counter in falling order"),
    (
        "defaultdict-unsorted",
        ["defaultdict", ["b", 1], ["a", 2]],
        "a default dict in falling order",
    ),
    ("set-unsorted", ["set", 2, 1], "a set in falling order"),
    ("frozenset-unsorted", ["frozenset", "b", "a"], "a frozenset in falling order"),
    (
        "frozenset-in-set-unsorted",
        ["set", ["frozenset", 2, 1]],
        "a frozenset in a set in falling order",
    ),
)


def time(index: int, value: object) -> list[object]:
    """A date and time, one of its elements another."""
    elements = ["datetime", 2026, 11, 30, 12, 30, 15, 250, 0, None]
    return [*elements[:index], value, *elements[index + 1 :]]


TIMES: tuple[tuple[str, list[object]], ...] = (
    ("datetime-arity", time(9, None)[:-1]),
    ("datetime-more", [*time(9, None), None]),
    ("datetime-year-0", time(1, 0)),
    ("datetime-year-10000", time(1, 10_000)),
    ("datetime-month-0", time(2, 0)),
    ("datetime-month-13", time(2, 13)),
    ("datetime-day-0", time(3, 0)),
    ("datetime-day-31", time(3, 31)),
    ("datetime-hour-24", time(4, 24)),
    ("datetime-minute-60", time(5, 60)),
    ("datetime-second-60", time(6, 60)),
    ("datetime-microsecond", time(7, 1_000_000)),
    ("datetime-negative", time(7, -1)),
    ("datetime-fold-2", time(8, 2)),
    ("datetime-fold-bool", time(8, False)),
    ("datetime-offset-day", time(9, 86_400_000_000)),
    ("datetime-offset-minus-day", time(9, -86_400_000_000)),
    ("datetime-offset-str", time(9, "UTC")),
    ("datetime-float", time(6, 15.0)),
    ("date-29-february", ["date", 2026, 2, 29]),
    ("date-29-february-1900", ["date", 1900, 2, 29]),
    ("date-arity", ["date", 2026, 1]),
    ("timedelta-days", ["timedelta", 1_000_000_000, 0, 0]),
    ("timedelta-days-negative", ["timedelta", -1_000_000_000, 0, 0]),
    ("timedelta-seconds", ["timedelta", 0, 86_400, 0]),
    ("timedelta-seconds-negative", ["timedelta", 0, -1, 0]),
    ("timedelta-microseconds", ["timedelta", 0, 0, 1_000_000]),
    ("timedelta-arity", ["timedelta", 0, 0]),
)

# Paths with wrong elements, and with parts or anchors that does not allow.
PATH_ELEMENTS: tuple[tuple[str, list[object]], ...] = (
    ("arity", ["path", "posix"]),
    ("kind", ["path", "mac", "/"]),
    ("kind-type", ["path", None, "/"]),
    ("anchor-type", ["path", "posix", None]),
    ("part-type", ["path", "posix", "/", b"tmp"]),
)
PATHS = (
    ("part-empty", ["path", "posix", "/", ""]),
    ("part-dot", ["path", "pure_posix", "", "."]),
    ("part-slash", ["path", "posix", "/", "a/b"]),
    ("part-nul", ["path", "posix", "/", "a\0"]),
    ("anchor-posix", ["path", "posix", "///"]),
    ("anchor-posix-drive", ["path", "posix", "C:\\"]),
    ("windows-part-backslash", ["path", "windows", "C:\\", "a\\b"]),
    ("windows-part-colon", ["path", "pure_windows", "", "a:b"]),
    ("windows-part-slash", ["path", "windows", "", "a/b"]),
    ("windows-anchor-slash", ["path", "windows", "/"]),
    ("windows-anchor-two-letters", ["path", "windows", "CC:\\"]),
    ("windows-anchor-digit", ["path", "windows", "1:"]),
    ("windows-anchor-not-ascii", ["path", "windows", "É:"]),
    ("windows-anchor-newline", ["path", "windows", "C:\n"]),
    ("windows-anchor-share-missing", ["path", "windows", "\\\\server\\"]),
    ("windows-anchor-share-open", ["path", "windows", "\\\\server\\share"]),
    ("windows-anchor-server-dot", ["path", "windows", "\\\\.\\pipe\\"]),
    ("windows-anchor-verbatim", ["path", "windows", "\\\\?\\C:\\"]),
    ("windows-anchor-deep", ["path", "windows", "\\\\server\\share\\more\\"]),
)

A, B = ["tensor", 0], ["tensor", 1]
REFERENCES: tuple[tuple[str, dict[str, object], str], ...] = (
    ("swapped", {"a": B, "b": A}, "The first reference has the index 1."),
    (
        "gap",
        {"a": A, "b": ["tensor", 2]},
        "A reference has an index beyond the table, and a tensor is not met.",
    ),
    (
        "out-of-range",
        {"a": A, "b": B, "c": ["tensor", 2]},
        "A reference has an index beyond the table.",
    ),
    (
        "out-of-range-far",
        {"a": A, "b": B, "c": ["tensor", (1 << 64) - 1]},
        "A reference has the index 2^64-1.",
    ),
    ("negative", {"a": A, "b": B, "c": ["tensor", -1]}, "A reference has the index -1."),
    ("in-attributes", {"a": ["tensor", 0, {"b": B}]}, "A tensor is met in attributes only."),
    ("unused", {"a": A, "b": None}, "A tensor is not referred to."),
    ("none", {"a": None}, "No tensor is referred to."),
    (
        "order-of-keys",
        {"aa": A, "B": B},
        "References are in the order of letters, not of bytes.",
    ),
)


def cases() -> Iterator[Case]:
    yield from tag_cases()
    yield from value_cases()
    yield from form_cases()
    yield from reference_cases()


def shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def raw(value: object) -> Checkpoint:
    """A value that the builder's walk over the tree does not look into."""
    return tree(Raw(pack(value)))


def after_tensor(value: object) -> Checkpoint:
    """The value comes after `a`, so that it may refer to the tensor once more."""
    return Checkpoint([tensor("uint8", (3,))], {"a": TENSOR, "v": Raw(pack(value))})


def pair_of_tensors() -> Checkpoint:
    return Checkpoint([tensor("uint8", (3,), str(i)) for i in range(2)], {"a": A, "b": B})


def tag_cases() -> Iterator[Case]:
    code = "unknown_value_type"
    for name, value, what in TAGS:
        note = f"A value {what}."
        yield invalid(f"tag-{name}", "R-11.1 R-16.1", code, note, raw(value))
    note = "An unknown tag in a list in a dict."
    nested = {"a": ["list", ["array", 1]]}
    yield invalid("tag-unknown-nested", "R-11.1", code, note, tree(nested))
    note = "An unknown tag as a value of an ordered dict."
    nested = ["odict", ["k", ["slice", 0, 1, None]]]
    yield invalid("tag-unknown-in-pair", "R-11.1", code, note, tree(nested))
    note = "An unknown tag in the place of a tensor: the references after it are a later stage."
    base, hidden = pair_of_tensors(), body_put("tree", {"a": ["tensors", 0], "b": B})
    yield invalid("tag-unknown-for-a-tensor", "R-11.1 R-11.9", code, note, base, body=hidden)


def value_cases() -> Iterator[Case]:
    code = "bad_value"
    for name, value in ELEMENTS:
        note = f"A value is `{shown(value)}`."
        yield invalid(f"value-{name}", "R-11.2", code, note, after_tensor(value))
    paths = [(f"path-{name}", value, "R-11.2") for name, value in PATH_ELEMENTS]
    paths += [(f"path-{name}", value, "R-11.7") for name, value in PATHS]
    for name, value, rule in [*((name, value, "R-11.2") for name, value in TIMES), *paths]:
        note = f"A value is `{shown(value)}`."
        yield invalid(f"value-{name}", rule, code, note, raw(value))


def form_cases() -> Iterator[Case]:
    for name, value, what in FORMS:
        note = f"A value is {what}."
        yield invalid(f"form-{name}", "R-11.3", "bad_value", note, raw(value))
    base = Checkpoint([tensor("uint8", (3,))], {"w": ["tensor", 0, {}]})
    note = "A tensor has attributes, which are empty."
    yield invalid("form-attributes-empty", "R-11.3", "bad_value", note, base)


def reference_cases() -> Iterator[Case]:
    for name, root, note in REFERENCES:
        code, change, base = "bad_tensor_reference", body_put("tree", root), pair_of_tensors()
        yield invalid(f"reference-{name}", "R-11.9", code, note, base, body=change)
