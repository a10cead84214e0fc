"""Values of each tag, at their edges (sections 8 and 11)."""

from collections.abc import Iterator

from vectors.cases import Case, valid
from vectors.samples import tree
from vectors.wire import big_int, members, pairs

INF = float("inf")
NAN = float("nan")
POWERS = (5, 7, 8, 15, 16, 31, 32, 53, 63)
INTS = sorted(
    {
        *(
            sign * (1 << power) + step
            for power in POWERS
            for sign in (1, -1)
            for step in (-1, 0, 1)
        ),
        *(0, 1, -1, (1 << 64) - 1, (1 << 64) - 2),
    }
    - {-(1 << 63) - 1}
)
BIG_INTS = (
    *(1 << 64, (1 << 64) + 1, -(1 << 63) - 1, 1 << 200, -(1 << 200)),
    *((1 << 71) - 1, -(1 << 71), 1 << 71, -(1 << 71) - 1),
)
FLOATS = (
    *(0.0, -0.0, 1.0, INF, -INF, NAN, 5e-324, -5e-324, 0.1),
    *(2.2250738585072014e-308, 1.7976931348623157e308, 9007199254740993.0),
)
STRINGS = (*("a" * count for count in (0, 31, 32, 255, 256, 65535, 65536)), "é\0🦙\ufeff\u2028")
BLOBS = (b"", b"\x00", b"\xff" * 255, b"\x80" * 256, b"b" * 65536)
LISTS = (
    ["list"],
    ["tuple"],
    ["list", *range(14)],
    ["list", *range(15)],
    ["tuple", *[None] * 65534],
    ["tuple", *[None] * 65535],
    ["list", ["list", ["tuple"]]],
)
MAPS = {
    "empty": {},
    "fifteen": {f"k{i:02}": i for i in range(15)},
    "sixteen": {f"k{i:02}": i for i in range(16)},
    "order": {
        name: index
        for index, name in enumerate(("", "a", "aa", "b", "Z", "é", "\uffff", "🦙", "\0"))
    },
}
KEYS = (
    *(None, True, 2, -3, big_int(1 << 64), 2.5, -INF, ["complex", 0.0, 1.0], "text", b"bytes"),
    ["tuple"],
    ["tuple", 1, ["tuple", "x", None]],
    members("frozenset", 1, 2, ["tuple", 3]),
)
NEARLY_EQUAL = (
    *((1 << 53) + 1, float(1 << 53), "1", b"1", ["tuple", 1], 1, 0.5, ["complex", 0.5, 0.5]),
)
SCALARS = (
    ["scalar", "float16", b"\x00\x3c"],
    ["scalar", "bool", b"\x01"],
    ["scalar", "complex128", b"\x01" * 16],
    ["scalar", "int64", b"\xff" * 8],
    ["scalar", "float4_e2m1fn", b"\x0f"],
    ["scalar", "bfloat16", b"\xc0\x7f"],
)
NAMES = (
    ["name", "torch.dtype", "torch.bfloat16"],
    ["name", "torch.device", "cuda:0"],
    ["name", "a", ""],
    ["name", "x" + "_.9" * 21, "os.system"],
    ["name", "numpy.dtype", "<U7"],
)
TIMES = (
    ["datetime", 1, 1, 1, 0, 0, 0, 0, 0, None],
    ["datetime", 9999, 12, 31, 23, 59, 59, 999_999, 0, None],
    ["datetime", 2024, 2, 29, 12, 30, 1, 5, 1, None],
    ["datetime", 2026, 11, 30, 0, 0, 0, 0, 0, 0],
    ["datetime", 2026, 11, 30, 0, 0, 0, 0, 1, -86_399_999_999],
    ["datetime", 2000, 2, 29, 0, 0, 0, 0, 0, 86_399_999_999],
    ["datetime", 2026, 11, 30, 0, 0, 0, 0, 0, 20_700_000_000],
)
DATES = (
    ["date", 1, 1, 1],
    ["date", 9999, 12, 31],
    ["date", 2000, 2, 29],
    ["timedelta", 0, 0, 0],
    ["timedelta", -1, 86_399, 999_999],
    ["timedelta", 999_999_999, 86_399, 999_999],
    ["timedelta", -999_999_999, 0, 0],
)
PATHS = (
    ["path", "posix", ""],
    ["path", "posix", "/"],
    ["path", "pure_posix", "//", "a"],
    ["path", "posix", "", "..", "a:b", "c\\d", " "],
    ["path", "posix", "/", "tmp", "é"],
    ["path", "windows", ""],
    ["path", "pure_windows", "\\", "a"],
    ["path", "windows", "C:"],
    ["path", "windows", "z:\\", "a", ".."],
    ["path", "pure_windows", "\\\\server\\share\\", "x"],
)
SETS = (
    ["set"],
    ["frozenset"],
    members("set", *KEYS),
    members("frozenset", members("frozenset"), members("frozenset", members("frozenset"))),
)
ODICTS = (
    ["odict"],
    ["odict", ["z", 1], ["a", 2], [1, 3], [None, 4], [["tuple", 1], 5]],
)
COUNTERS = (
    ["counter"],
    pairs("counter", ("b", 2), ("a", -1), (3, 0)),
    ["defaultdict"],
    pairs("defaultdict", ("x", ["list"]), (2, ["list", 1])),
)
DEQUES = (
    ["deque", None],
    ["deque", 0],
    ["deque", 3, 1, 2, 3],
    ["deque", (1 << 63) - 1, 1],
    ["deque", None, ["deque", 2, 1]],
)
COMPLEX = (["complex", 0.0, -0.0], ["complex", -1.5, INF], ["complex", NAN, NAN])
SIZES = (["size"], ["size", 0], ["size", 3, 4, (1 << 63) - 1])

LISTED = (
    ("ints", "R-8.1", "Integers at each edge of their msgpack forms.", INTS),
    (
        "big-ints",
        "R-11.3",
        "Integers outside of 64 bits, as short as can be.",
        tuple(map(big_int, BIG_INTS)),
    ),
    (
        "floats",
        "R-8.2",
        "Negative zero, infinities, the one NaN, subnormals, the largest.",
        FLOATS,
    ),
    (
        "complex",
        "R-11.2",
        "Complex numbers with signed zeros, infinities and NaN.",
        COMPLEX,
    ),
    ("none-bool", "R-11.1", "None and the booleans.", (None, True, False)),
    (
        "strings",
        "R-8.1 R-8.5",
        "Strings at each edge of their msgpack forms; a body of several pages.",
        STRINGS,
    ),
    ("bytes", "R-8.1", "Byte strings at each edge of their msgpack forms.", BLOBS),
    (
        "lists",
        "R-8.1 R-11.1",
        "Lists and tuples, empty, nested, and at each edge of the msgpack forms.",
        LISTS,
    ),
    ("sets", "R-11.3 R-11.4", "Sets and frozensets: empty, mixed, nested.", SETS),
    (
        "odicts",
        "R-11.2 R-11.5",
        "Ordered dicts in their own order, with keys of any kind, and empty.",
        ODICTS,
    ),
    (
        "counters-defaultdicts",
        "R-11.2 R-11.3",
        "Counters and default dicts; with keys that are all strings they have no short form.",
        COUNTERS,
    ),
    ("deques", "R-11.2", "Deques without and with maxlen, empty, full.", DEQUES),
    ("sizes", "R-11.2", "Sizes: none, one, the largest dim.", SIZES),
    (
        "scalars",
        "R-11.2",
        "Array-library scalars, whose dtypes no tensor has.",
        SCALARS,
    ),
    (
        "names",
        "R-11.2 R-16.1",
        "Named constants, of known kinds and others; none is looked up.",
        NAMES,
    ),
    (
        "datetimes",
        "R-11.2",
        "Naive, with fold, with offsets up to a microsecond below a day.",
        TIMES,
    ),
    (
        "dates-timedeltas",
        "R-11.2",
        "Dates and differences of times at their edges.",
        DATES,
    ),
    ("paths", "R-11.7", "Paths of each kind with each anchor.", PATHS),
)


def cases() -> Iterator[Case]:
    for name, rules, note, listed in LISTED:
        yield valid(f"values-{name}", rules, note, tree(["list", *listed]))
    yield valid(
        "values-maps",
        "R-8.1 R-8.3 R-11.2",
        "Dicts of strings: empty, 15 and 16 keys, a key that begins another, order by UTF-8 bytes.",
        tree(MAPS),
    )
    yield valid(
        "values-dict-keys",
        "R-11.3 R-11.4 R-11.5",
        "A dict with a key of each kind.",
        tree(pairs("dict", *((key, index) for index, key in enumerate(KEYS)))),
    )
    yield valid(
        "values-dict-keys-nearly-equal",
        "R-11.5",
        "Keys that differ by less than a float64 can tell, or only by type.",
        tree(pairs("dict", *((key, index) for index, key in enumerate(NEARLY_EQUAL)))),
    )
    lists: object = None
    for _ in range(126):
        lists = ["list", lists]
    note = "The deepest nesting that is allowed: body, tree, and 126 lists."
    yield valid("values-depth-128", "R-8.6", note, tree(lists))
    maps: object = {}
    for _ in range(125):
        maps = {"": maps}
    note = "Body, tree, and 126 maps, the innermost empty."
    yield valid("values-depth-128-maps", "R-8.6", note, tree(maps))
