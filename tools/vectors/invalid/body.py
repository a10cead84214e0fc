"""The keys of the body, provenance among them (sections 7 and 14)."""

from collections.abc import Iterator

from vectors.cases import Case, invalid
from vectors.hooks import body_drop, body_put, kept
from vectors.samples import one, two
from vectors.wire import pack

TENSOR = ["tensor", 0]
MESH = {"axes": ["dp"], "shape": [2], "ranks": [0, 1]}
LAYOUT = {"mesh": 0, "placements": ["shard(0)"]}

OTHER_TYPES: tuple[tuple[str, object], ...] = (
    ("block_nbytes", "4096"),
    ("dtypes", {"float32": None}),
    ("extensions", ["list"]),
    ("files", {}),
    ("layouts", None),
    ("meshes", {}),
    ("sides", None),
    ("tree", 5),
    ("user", []),
    ("world_size", "1"),
)

BLOCK_NBYTES = (
    ("2048", 2048),
    ("4097", 4097),
    ("12288", 12_288),
    ("zero", 0),
    ("negative", -4096),
    ("128-mib", 1 << 27),
    ("2-63", 1 << 63),
    ("float", 4096.0),
)

VALUES: tuple[tuple[str, str, str, str, object], ...] = (
    (
        "dtypes-twice",
        "R-7.4 R-7.5",
        "`dtypes` has a name twice.",
        "dtypes",
        ["float32", "float32"],
    ),
    ("dtypes-not-str", "R-7.4", "`dtypes` has a number.", "dtypes", [1]),
    (
        "dtypes-unused",
        "R-7.5",
        "`dtypes` has a name that no tensor uses.",
        "dtypes",
        ["float32", "uint8"],
    ),
    ("world-size-zero", "R-7.4", "`world_size` is 0.", "world_size", 0),
    (
        "world-size-true",
        "R-7.4",
        "`world_size` is true, which is no integer here.",
        "world_size",
        True,
    ),
    ("world-size-float", "R-7.4", "`world_size` is 1.0.", "world_size", 1.0),
    ("user-value-type", "R-7.4", "A value of `user` is no string.", "user", {"epoch": 3}),
    ("tree-root-list", "R-11.8", "The root of the tree is a list.", "tree", ["list", TENSOR]),
    ("tree-root-tensor", "R-11.8", "The root of the tree is a tensor.", "tree", TENSOR),
    (
        "tree-root-dict-int-key",
        "R-11.8",
        "The root of the tree is a dict with an integer key.",
        "tree",
        ["dict", [1, TENSOR]],
    ),
    (
        "tree-root-odict-int-key",
        "R-11.8",
        "The root is an ordered dict with an integer key.",
        "tree",
        ["odict", [1, TENSOR]],
    ),
    (
        "tree-root-defaultdict",
        "R-11.8",
        "The root of the tree is a default dict.",
        "tree",
        ["defaultdict", ["w", TENSOR]],
    ),
)

UNKNOWN_DTYPES = (
    ("float33", "float33"),
    ("float32-capital", "Float32"),
    ("f32", "F32"),
    ("torch-float32", "torch.float32"),
    ("qint8", "qint8"),
    ("empty", ""),
)

# Members of a mesh, and of a layout, that does not allow; `...` takes one away.
MESHES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("axes-missing", "no axes", {"axes": ...}),
    ("axes-type", "an axis that is a number", {"axes": [0]}),
    ("axes-more", "two axes and one dim of shape", {"axes": ["dp", "tp"]}),
    ("shape-zero", "a shape of 0 and no ranks", {"shape": [0], "ranks": []}),
    ("ranks-fewer", "fewer ranks than its shape", {"ranks": [0]}),
    ("ranks-more", "more ranks than its shape", {"ranks": [0, 1, 2]}),
    ("ranks-missing", "no ranks", {"ranks": ...}),
    ("rank-twice", "a rank twice", {"ranks": [1, 1]}),
    ("rank-beyond-world", "a rank that is not below world_size", {"ranks": [0, 3]}),
    (
        "shape-huge",
        "a shape whose product is 2^64",
        {"axes": ["a", "b"], "shape": [1 << 32, 1 << 32], "ranks": []},
    ),
)
LAYOUTS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("mesh-out-of-range", "a mesh that is not there", {"mesh": 1}),
    ("mesh-missing", "no mesh", {"mesh": ...}),
    ("placements-missing", "no placements", {"placements": ...}),
    ("placements-fewer", "fewer placements than its mesh has axes", {"placements": []}),
    (
        "placements-more",
        "more placements than its mesh has axes",
        {"placements": ["replicate"] * 2},
    ),
    ("placement-partial", "the placement `partial`", {"placements": ["partial"]}),
    ("placement-negative", "the placement `shard(-1)`", {"placements": ["shard(-1)"]}),
    (
        "placement-spaces",
        "the placement `strided_shard(0, 2)`",
        {"placements": ["strided_shard(0, 2)"]},
    ),
    (
        "placement-digit-not-ascii",
        "the placement `shard(1\u0660)`",
        {"placements": ["shard(1\u0660)"]},
    ),
    ("placement-open", "the placement `shard(0`", {"placements": ["shard(0"]}),
    (
        "placement-newline",
        "the placement `replicate` and a newline",
        {"placements": ["replicate\n"]},
    ),
    ("placement-type", "a placement that is an array", {"placements": [["shard", 0]]}),
)


def cases() -> Iterator[Case]:
    yield from key_cases()
    yield from value_cases()
    yield from provenance_cases()


def key_cases() -> Iterator[Case]:
    rule, code = "R-7.4", "bad_body"
    for key, value in OTHER_TYPES:
        name = f"body-{key.replace('_', '-')}"
        note = f"The body has no `{key}`."
        yield invalid(f"{name}-missing", rule, code, note, one(), body=body_drop(key))
        note = f"`{key}` has another type."
        yield invalid(f"{name}-type", rule, code, note, one(), body=body_put(key, value))
    for name, what, value in (("an-array", "an array", []), ("nil", "nil", None)):
        packed, note = pack(value), f"The body is {what}."
        yield invalid(f"body-is-{name}", rule, code, note, one(), body_bytes=lambda _, p=packed: p)
    code, note = "unknown_key", "The body has a key that is not known."
    later = body_put("later", 1)
    yield invalid("body-unknown-key", "R-7.4 R-16.1", code, note, one(), body=later)
    note, empty = "The body has an empty key.", body_put("", None)
    yield invalid("body-unknown-key-empty", rule, code, note, one(), body=empty)


def value_cases() -> Iterator[Case]:
    code = "bad_body"
    for name, value in BLOCK_NBYTES:
        note, change = f"`block_nbytes` is {value}.", body_put("block_nbytes", value)
        yield invalid(f"body-block-nbytes-{name}", "R-7.5", code, note, one(), body=change)
    falling = body_put("dtypes", ["int16", "float32"])
    note = "`dtypes` is in falling order."
    yield invalid("body-dtypes-unsorted", "R-7.4 R-7.5", code, note, two(), body=falling)
    for name, rule, note, key, value in VALUES:
        yield invalid(f"body-{name}", rule, code, note, one(), body=body_put(key, value))
    for name, dtype in UNKNOWN_DTYPES:
        note, change = f"A tensor has the dtype `{dtype}`.", body_put("dtypes", [dtype])
        case_id = f"dtype-unknown-{name}"
        yield invalid(case_id, "R-9.2", "unknown_dtype", note, one(), body=change)


def provenance_cases() -> Iterator[Case]:
    for kind, rows in (("mesh", MESHES), ("layout", LAYOUTS)):
        for name, what, members in rows:
            mesh = kept(MESH | members) if kind == "mesh" else MESH
            layout = kept(LAYOUT | members) if kind == "layout" else LAYOUT
            base = one(meshes=[mesh], layouts=[layout], world_size=3)
            note = f"A {kind} has {what}."
            yield invalid(f"{kind}-{name}", "R-14.1", "bad_body", note, base)
    rules, code = "R-7.4 R-14.1", "unknown_key"
    base = one(meshes=[MESH | {"device": "cuda"}], world_size=3)
    note = "A mesh has a key that is not known."
    yield invalid("mesh-unknown-key", rules, code, note, base)
    base = one(meshes=[MESH], layouts=[LAYOUT | {"": None}], world_size=3)
    note = "A layout has an empty key."
    yield invalid("layout-unknown-key", rules, code, note, base)
    for table in ("layouts", "meshes", "sides"):
        note, change = f"An entry of {table} is nil.", body_put(table, [None])
        yield invalid(f"body-{table}-entry-type", "R-7.4", "bad_body", note, one(), body=change)
