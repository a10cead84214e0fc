"""The tree, references to tensors, names, keys in headers (sections 10 and 11)."""

from collections.abc import Iterator

from vectors.cases import Case, valid
from vectors.declare import Checkpoint, DataFile
from vectors.samples import boxes, tensor, tree
from vectors.wire import big_int, members, pairs

REF = [["tensor", index] for index in range(12)]
ODD_NAMES = (
    *("", "\0", "a\0b", "__metadata__", "__metadata___", "%5F_metadata__"),
    *("/", "/leading", "in/side/", "%", "%2F", "@", "w@[0:1]", "w@zstd", "w@planes+zstd", "w"),
    *('"quoted"', "back\\slash", "\b\t\n\f\r", "\x01\x1f\x7f", "\u2028\u2029"),
    *("\ufeff", "\ufffe\uffff", "é", "e\u0301", "漢字", "🦙", "👩‍🚀", "\U0010ffff"),
    *(" ", " padded ", ".", "..", "../../etc/passwd", "C:\\x"),
    *("layers.0.weight", "constructor", "__proto__", "$ref", "data_offsets"),
)
USER = {
    "": "empty key",
    "note": "",
    "é": "🦙",
    "control": '\0\x1f"\\/',
    "order": "z",
    "Order": "a",
}
CONTAINERS = {
    "a": ["list", REF[0], ["tuple", REF[1], {"x": REF[2]}]],
    "b": ["deque", 9, REF[3]],
    "c": ["odict", ["z", REF[4]], [2, REF[5]]],
    "d": ["defaultdict", ["k", REF[6]]],
    "e": ["counter", ["k", REF[7]]],
}
KEYS = (
    *(0, 5, -5, 1 << 40, big_int(-(1 << 70)), 2.5, None, b"k", "@s/%"),
    ["tuple", 1, "a"],
    members("frozenset", 1),
    ["complex", 0.0, 1.0],
)
INT_KEYS = (
    *(0, -1, -33, (1 << 64) - 1, -(1 << 63)),
    *map(big_int, (1 << 64, -(1 << 63) - 1, 1 << 200)),
)
SECTIONS = {
    "model": {"layers.0.weight": REF[0]},
    "optimizer": {
        "param_groups": ["list"],
        "state": {"layers.0.weight": {"exp_avg": REF[1], "exp_avg_sq": REF[2], "step": 5}},
    },
    "rng": REF[3],
}
CLASH = {
    "": {"": REF[0], "a": REF[1]},
    "/": REF[2],
    "/a": REF[3],
    "a": {"b": REF[4]},
    "a/b": REF[5],
}
ATTRIBUTES = {
    "a": ["tensor", 0, {"flavour": "numpy"}],
    "b": ["tensor", 1, {"dim_order": ["list", 0], "later": ["tuple", 1, None]}],
    "c": ["tensor", 0, {"unknown": True}],
}
# Canonical msgpack, and nothing that a reader expects, or that section 11 allows.
ODD_ATTRIBUTES = {
    "a": ["tensor", 0, {"flavour": 7, "dim_order": "reversed"}],
    "b": ["tensor", 1, {"flavour": ["pickle", b"N."], "dim_order": ["list", 5, -5, None]}],
    "c": ["tensor", 1, {"": [], "set": ["set", 2, 1, 1], "tensor": ["tensor", 99]}],
}


def cases() -> Iterator[Case]:
    yield from root_cases()
    yield from tied_cases()
    yield from section_cases()
    yield from reference_cases()
    yield from name_cases()
    yield from clash_cases()


def small(count: int) -> list:
    return [tensor("uint8", (3,), str(index)) for index in range(count)]


def root_cases() -> Iterator[Case]:
    note = "Values only: six empty sections and no data files."
    yield valid("tree-no-tensors", "R-7.3 R-11.8", note, Checkpoint([], {"step": 1}, files=[]))
    yield valid("tree-empty", "R-11.8", "An empty root.", Checkpoint([], {}, files=[]))
    root = ["odict", ["z", REF[0]], ["a", REF[1]], ["m", 5]]
    note = "The root is an ordered dict, and tensors are numbered in its order."
    yield valid("tree-root-odict", "R-11.8 R-11.9", note, Checkpoint(small(2), root))
    note = "The root is an empty ordered dict."
    yield valid("tree-root-odict-empty", "R-11.8", note, Checkpoint([], ["odict"], files=[]))


def tied_cases() -> Iterator[Case]:
    note = "Two names of one section lead to one tensor; its key is the first name."
    root: dict[str, object] = {"head": REF[0], "lm": REF[1], "wte": REF[0]}
    yield valid("tree-tied", "R-11.9 R-13.2", note, Checkpoint(small(2), root))
    root = {
        "model": {"a": REF[0], "b": REF[1]},
        "optimizer": {"a": REF[0], "copies": ["list", REF[1], REF[1]]},
    }
    yield valid(
        "tree-tied-across-sections",
        "R-11.9 R-10.5",
        "A tensor of the model is referred to from the optimizer too, and lies with the model.",
        Checkpoint(small(2), root, files=[DataFile(prefix=("model",))]),
    )


def section_cases() -> Iterator[Case]:
    whole = ((0, 0), (2, 2))
    tensors = [
        tensor("float32", (2, 2), "m", *boxes(whole, files="0")),
        tensor("float32", (2, 2), "a", *boxes(whole, files="1")),
        tensor("float32", (2, 2), "b", *boxes(whole, files="1")),
        tensor("int64", (), "s", *boxes(((), ()), files="2")),
    ]
    files = [
        DataFile("model.safetensors", ("model",)),
        DataFile("optimizer.safetensors", ("optimizer",)),
        DataFile("state.safetensors", ()),
    ]
    note = "Model and optimizer in files of their own; keys without the prefix."
    checkpoint = Checkpoint(tensors, SECTIONS, files=files)
    yield valid("tree-sections", "R-10.5 R-10.6", note, checkpoint)
    root = {"a": {"b/c": {"@": {"w": REF[0]}}}}
    files = [DataFile(prefix=("a", "b/c", "@"))]
    note = "A prefix of three parts that leaves one part of the path."
    yield valid("tree-long-prefix", "R-10.5", note, Checkpoint(small(1), root, files=files))


def reference_cases() -> Iterator[Case]:
    rules = "R-10.6 R-11.9"
    note = "Tensors in lists, tuples, deques, ordered and other dicts."
    yield valid("tree-tensors-in-containers", rules, note, Checkpoint(small(8), CONTAINERS))
    note = "Tensors under int, float, none, bytes, tuple, frozenset and complex keys."
    checkpoint = Checkpoint(small(12), {"state": under_keys(KEYS)})
    yield valid("tree-keys-of-other-types", rules, note, checkpoint)
    note = "Tensors under integers: decimal in keys if they have 64 bits, else as they are encoded."
    checkpoint = Checkpoint(small(8), {"state": under_keys(INT_KEYS)})
    yield valid("tree-keys-int", rules, note, checkpoint)
    booleans = ["dict", [False, REF[0]], [True, REF[1]]]
    note = "Booleans are dict keys, and no integers."
    yield valid("tree-keys-bool", "R-10.6", note, Checkpoint(small(2), {"state": booleans}))
    note = "Attributes of references, known and unknown, of one tensor twice."
    yield valid("tree-attributes", "R-11.3 R-16.1", note, Checkpoint(small(2), ATTRIBUTES))
    note = "Attributes of types that nobody expects, untagged and with unknown tags: ignored."
    yield valid("tree-attributes-odd", "R-16.1 R-11.9", note, Checkpoint(small(2), ODD_ATTRIBUTES))
    many = [tensor("uint8", (), str(index)) for index in range(4100)]
    root = {f"layers.{index:04}": ["tensor", index] for index in range(4100)}
    note = "So many tensors that most sections have several pages."
    yield valid("tree-4100-tensors", "R-6.8 R-7.3 R-11.9", note, Checkpoint(many, root))


def under_keys(keys: tuple[object, ...]) -> list[object]:
    """A dict of tensors, numbered in the order of the encoded keys."""
    ordered = [key for key, _ in pairs("dict", *((key, None) for key in keys))[1:]]
    return ["dict", *([key, ref] for key, ref in zip(ordered, REF, strict=False))]


def name_cases() -> Iterator[Case]:
    names = sorted(ODD_NAMES, key=str.encode)
    tensors = [tensor("uint8", (2,), str(index)) for index in range(len(names))]
    refs = {name: ["tensor", index] for index, name in enumerate(names)}
    note = "Names that need escapes in keys or in JSON, as paths of one part."
    yield valid("names-odd", "R-10.6 R-10.4", note, Checkpoint(tensors, refs))
    note = "The same names below a key: paths of two parts."
    yield valid("names-odd-nested", "R-10.6", note, Checkpoint(tensors, {"m/%@": refs}))
    note = "The same names as one part behind a prefix."
    files = [DataFile(prefix=("__metadata__",))]
    checkpoint = Checkpoint(tensors, {"__metadata__": refs}, files=files)
    yield valid("names-odd-behind-a-prefix", "R-10.5 R-10.6", note, checkpoint)
    deep: object = REF[1]
    for _ in range(99):
        deep = {"q": deep}
    note = "A name of 10,000 bytes, and a path of 100 parts."
    root = {"n" * 10_000: REF[0], "p": deep}
    yield valid("names-long", "R-10.6", note, Checkpoint(tensors[:2], root))
    note = "User metadata with odd keys and values."
    yield valid("user-metadata", "R-7.4", note, tree(1, user=USER))


def clash_cases() -> Iterator[Case]:
    halves = boxes(((0,), (1,)), ((1,), (1,)))
    tensors = [tensor("uint8", (2,), "a", *halves), *(tensor("uint8", (1,), n) for n in ("", "z"))]
    root = {"w": REF[0], "w@[0:1]": REF[1], "w@[0:1]@zstd": REF[2]}
    note = "The first half of `w` and a whole tensor called `w@[0:1]` have keys that differ."
    yield valid("names-like-suffixes-cut", "R-10.7", note, Checkpoint(tensors, root))
    tensors = [tensor("uint8", (2,), str(index)) for index in range(6)]
    note = "Paths of several parts, and single names that look like their keys."
    yield valid("names-that-could-clash", "R-10.6", note, Checkpoint(tensors, CLASH))
