"""Keys of dicts and elements of sets (R-11.3 to R-11.6)."""

from collections.abc import Iterator

from vectors.cases import Case, invalid
from vectors.invalid.tree import TENSOR, after_tensor, raw, shown
from vectors.wire import members

NAN = float("nan")

# Equal encodings, which are also not ascending, and keys that are equal all the same.
SAME: tuple[tuple[str, list[object]], ...] = (
    ("set", ["set", 1, 1]),
    ("frozenset", ["frozenset", "a", "a"]),
    ("dict", ["dict", [1, "x"], [1, "y"]]),
    ("counter", ["counter", ["a", 1], ["a", 1]]),
    ("set-others-between", ["set", 1, 2, 1]),
)
EQUAL: tuple[tuple[str, list[object]], ...] = (
    ("odict", ["odict", ["k", 1], ["z", 2], ["k", 3]]),
    ("true-and-1", ["dict", [1, "x"], [True, "y"]]),
    ("false-and-0", members("set", 0, False)),
    ("1-and-1.0", ["dict", [1, "x"], [1.0, "y"]]),
    ("true-and-1.0", members("set", True, 1.0)),
    ("1-and-complex", members("set", 1, ["complex", 1.0, 0.0])),
    ("1-and-complex-negative-zero", members("set", 1, ["complex", 1.0, -0.0])),
    ("zeros", members("set", 0.0, -0.0)),
    ("complex-zeros", members("set", ["complex", 0.0, 1.0], ["complex", -0.0, 1.0])),
    ("2-64-and-float", members("set", ["int", b"\0" * 8 + b"\x01"], 2.0**64)),
    ("2-53-and-float", members("set", 1 << 53, 2.0**53)),
    ("tuples", members("set", ["tuple", 1, "a"], ["tuple", True, "a"])),
    ("frozensets", members("set", members("frozenset", 1, 2), members("frozenset", 1.0, 2))),
    (
        "nested",
        members(
            "set",
            ["tuple", members("frozenset", 0.0)],
            ["tuple", members("frozenset", -0.0)],
        ),
    ),
    (
        "frozensets-in-two-orders",
        members("set", members("frozenset", 1, 2.0), members("frozenset", 1.0, 2)),
    ),
)

# What may not be a key or an element.
NO_KEYS: tuple[tuple[str, list[object]], ...] = (
    ("list", ["dict", [["list", 1], 1]]),
    ("map", ["dict", [{"a": 1}, 1]]),
    ("set", ["set", ["set"]]),
    ("tuple-of-list", ["set", ["tuple", ["list"]]]),
    ("size", ["set", ["size", 1]]),
    ("datetime", ["set", ["date", 2026, 1, 1]]),
    ("path", ["odict", [["path", "posix", "/"], 1]]),
    ("name", ["set", ["name", "torch.dtype", "x"]]),
    ("scalar", ["set", ["scalar", "int8", b"\1"]]),
    ("nan", ["dict", [NAN, 1]]),
    ("nan-in-set", ["set", NAN]),
    ("nan-in-tuple", ["set", ["tuple", NAN]]),
    ("nan-complex", ["set", ["complex", NAN, 0.0]]),
    ("nan-complex-imaginary", ["odict", [["complex", 0.0, NAN], 1]]),
    ("nan-in-frozenset", ["frozenset", ["frozenset", NAN]]),
    ("list-in-odict", ["odict", [["list"], 1]]),
    ("map-before-a-map", ["list", ["set", {"a": 1}], {"b": 2}]),
    ("list-before-a-list", ["list", ["set", ["tuple", ["list"]]], ["list", 1]]),
)

# The tensor is met elsewhere, so that only its place in a key is at fault.
TENSORS: tuple[tuple[str, list[object]], ...] = (
    ("set", ["set", TENSOR]),
    ("frozenset", ["frozenset", ["tuple", TENSOR]]),
    ("key", ["dict", [TENSOR, 1]]),
    ("odict-key", ["odict", [["tuple", TENSOR], 1]]),
)


def cases() -> Iterator[Case]:
    for rules, rows in (("R-11.3 R-11.5", SAME), ("R-11.5", EQUAL)):
        for name, value in rows:
            note = f"Two keys are equal: `{shown(value)}`."
            yield invalid(f"key-twice-{name}", rules, "duplicate_key", note, raw(value))
    for name, value in NO_KEYS:
        note = f"A key or element may not be one: `{shown(value)}`."
        yield invalid(f"key-{name}", "R-11.4", "bad_value", note, raw(value))
    for name, value in TENSORS:
        note = f"A tensor is part of a key or an element: `{shown(value)}`."
        yield invalid(f"tensor-in-{name}", "R-11.6", "bad_value", note, after_tensor(value))
