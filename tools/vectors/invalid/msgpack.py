"""The body as msgpack: forms, bytes that are no msgpack, depth (section 8)."""

from collections.abc import Callable, Iterator

from vectors.cases import Case, invalid
from vectors.declare import Checkpoint
from vectors.samples import one, tree
from vectors.wire import Raw, pack

# Values in forms that are msgpack, and not canonical.
NOT_CANONICAL = (
    ("int-uint8-for-fixint", "cc05", "R-8.1"),
    ("int-uint16-for-uint8", "cd00ff", "R-8.1"),
    ("int-uint32-for-uint16", "ce0000ffff", "R-8.1"),
    ("int-uint64-for-uint32", "cf00000000ffffffff", "R-8.1"),
    ("int-int8-for-fixint", "d0ff", "R-8.1"),
    ("int-int16-for-int8", "d1ff80", "R-8.1"),
    ("int-int32-for-int16", "d2ffff8000", "R-8.1"),
    ("int-int64-for-int32", "d3ffffffff80000000", "R-8.1"),
    ("int-signed-small", "d005", "R-8.1"),
    ("int-signed-for-uint16", "d10100", "R-8.1"),
    ("int-signed-for-uint64", "d37fffffffffffffff", "R-8.1"),
    ("str-str8-for-fixstr", "d91f" + "61" * 31, "R-8.1"),
    ("str-str8-empty", "d900", "R-8.1"),
    ("str-str16-for-str8", "da0028" + "61" * 40, "R-8.1"),
    ("str-str32-for-str8", "db00000028" + "61" * 40, "R-8.1"),
    ("bin-bin16-for-bin8", "c5000101", "R-8.1"),
    ("bin-bin32-for-bin8", "c60000000101", "R-8.1"),
    ("array-array16-for-fixarray", "dc0001a46c697374", "R-8.1"),
    ("array-array32-for-fixarray", "dd00000001a46c697374", "R-8.1"),
    ("map-map16-for-fixmap", "de0000", "R-8.1"),
    ("map-map32-for-fixmap", "df00000000", "R-8.1"),
    ("key-str8-for-fixstr", "81d90161c0", "R-8.1"),
    ("float32", "ca3f800000", "R-8.2"),
    ("nan-payload", "cb7ff8000000000001", "R-8.2"),
    ("nan-negative", "cbfff8000000000000", "R-8.2"),
    ("nan-signalling", "cb7ff0000000000001", "R-8.2"),
    ("keys-unsorted", "82a162c0a161c0", "R-8.3"),
    ("keys-prefix-last", "82a26161c0a161c0", "R-8.3"),
    ("keys-by-length", "82a162c0a26161c0", "R-8.3"),
    ("keys-by-utf16", "82a4f09fa699c0a3efbfbfc0", "R-8.3"),
    ("key-int", "8101c0", "R-8.3"),
    ("key-bin", "81c40161c0", "R-8.3"),
    ("key-nil", "81c0c0", "R-8.3"),
    ("key-array", "8190c0", "R-8.3"),
    ("ext-fixext1", "d40100", "R-8.4"),
    ("ext-fixext16", "d801" + "00" * 16, "R-8.4"),
    ("ext-ext8", "c70301000000", "R-8.4"),
    ("ext-ext16", "c8000101ff", "R-8.4"),
    ("ext-ext32", "c90000000101ff", "R-8.4"),
    ("ext-timestamp32", "d6ff00000000", "R-8.4"),
    ("ext-timestamp96", "c70cff" + "00" * 12, "R-8.4"),
)

KEY_TWICE = (
    ("first", "82a161c0a161c0"),
    ("values-differ", "82a161c0a16101"),
    ("empty", "82a0c0a0c0"),
    ("of-three", "83a161c0a162c0a162c0"),
    ("others-between", "83a161c0a162c0a161c0"),
)

# Members of the body that hold a value where section 11 does not look.
UNSEEN: tuple[tuple[str, str, Callable[[Raw], dict[str, object]]], ...] = (
    ("extensions", "an extension", lambda value: {"extensions": {"x": value}}),
    (
        "attributes",
        "an attribute of a tensor",
        lambda value: {"tree": {"w": ["tensor", 0, {"x": value}]}},
    ),
)

# Values that are no msgpack.
MALFORMED = (
    ("type-c1", "c1", "R-8.5"),
    ("type-c1-in-list", "92a46c697374c1", "R-8.5"),
    ("utf8-overlong", "a2c080", "R-8.5"),
    ("utf8-overlong-slash", "a2c0af", "R-8.5"),
    ("utf8-surrogate", "a3eda080", "R-8.5"),
    ("utf8-surrogate-pair", "a6eda0beeda699", "R-8.5"),
    ("utf8-cut", "a2e282", "R-8.5"),
    ("utf8-continuation", "a180", "R-8.5"),
    ("utf8-ff", "a1ff", "R-8.5"),
    ("utf8-too-high", "a4f4908080", "R-8.5"),
    ("utf8-five-bytes", "a5f888808080", "R-8.5"),
    ("utf8-in-key", "81a1ffc0", "R-8.5"),
    ("array-length-max", "ddffffffff", "R-8.7"),
    ("map-length-max", "dfffffffff", "R-8.7"),
    ("str-length-max", "dbffffffff", "R-8.7"),
    ("bin-length-max", "c6ffffffff", "R-8.7"),
    ("array-too-long", "dcffff", "R-8.7"),
    ("str-too-long", "d9ff61", "R-8.7"),
    ("bin-too-long", "c4ff00", "R-8.7"),
)


def with_last_key(value: bytes):
    """Add a last key to the body, and a value that may be broken."""
    return lambda data: b"\x8b" + data[1:] + pack("z") + value


# Bodies that are no msgpack.
BODIES = (
    (
        "str-by-a-byte-too-long",
        "R-8.7",
        "The last string of the body ends a byte behind the body.",
        with_last_key(b"\xa5abcd"),
    ),
    (
        "map-too-long",
        "R-8.7",
        "A map says so many entries that their keys would fit, but not their values.",
        with_last_key(b"\xde\x00\x10" + b"".join(pack(chr(97 + i)) for i in range(10))),
    ),
    ("empty", "R-8.5", "The body has no bytes.", lambda _: b""),
    ("cut", "R-8.5", "The last byte of the body is missing.", lambda data: data[:-1]),
    ("cut-in-key", "R-8.5", "The body ends inside a key.", lambda data: data[:-5]),
    ("trailing-byte", "R-8.5", "A byte follows the body's map.", lambda data: data + b"\xc0"),
    ("two-bodies", "R-8.5", "A second map follows the body's map.", lambda data: data + data),
)


def cases() -> Iterator[Case]:
    yield from not_canonical_cases()
    yield from key_twice_cases()
    yield from malformed_cases()
    yield from unseen_cases()
    yield from depth_cases()


def raw(text: str) -> Checkpoint:
    """A checkpoint whose value `v` is these bytes, in hexadecimal."""
    return tree(Raw(bytes.fromhex(text)))


def shown(data: str) -> str:
    text = data if len(data) < 50 else data[:40] + "..."
    return f"A value is encoded as {text}."


def not_canonical_cases() -> Iterator[Case]:
    code = "msgpack_not_canonical"
    for name, data, rule in NOT_CANONICAL:
        yield invalid(f"msgpack-{name}", rule, code, shown(data), raw(data))
    for name, rule, note, change in (
        (
            "unsorted",
            "R-8.3",
            "The last two keys of the body are in the wrong order.",
            last_keys_swapped,
        ),
        (
            "map16",
            "R-8.1",
            "The body's map has a longer form than it needs.",
            lambda data: b"\xde\x00\x0a" + data[1:],
        ),
    ):
        yield invalid(f"msgpack-body-{name}", rule, code, note, one(), body_bytes=change)


def last_keys_swapped(data: bytes) -> bytes:
    user, size = pack("user") + b"\x80", pack("world_size") + b"\x01"
    return data.removesuffix(user + size) + size + user


def key_twice_cases() -> Iterator[Case]:
    rule, code = "R-8.3", "duplicate_key"
    for name, data in KEY_TWICE:
        note = f"A map has a key twice: {data}."
        yield invalid(f"msgpack-key-twice-{name}", rule, code, note, raw(data))
    note = "The body has `world_size` twice."

    def twice(data: bytes) -> bytes:
        return b"\x8b" + data[1:] + pack("world_size") + b"\x01"

    yield invalid("msgpack-key-twice-body", rule, code, note, one(), body_bytes=twice)
    note = "The body has `block_nbytes` at its begin and at its end."

    def again(data: bytes) -> bytes:
        return b"\x8b" + data[1:] + pack("block_nbytes") + pack(4096)

    case_id = "msgpack-key-twice-body-others-between"
    yield invalid(case_id, rule, code, note, one(), body_bytes=again)
    note = "A file's entry has its label twice."
    yield invalid("msgpack-key-twice-file", rule, code, note, one(), body=label_twice)


def label_twice(body: dict) -> None:
    entry = body["files"][0]
    doubled = [(key, entry[key]) for key in sorted(entry)]
    doubled.insert(1, ("label", "other.safetensors"))
    body["files"] = [Raw(b"\x87" + b"".join(pack(k) + pack(v) for k, v in doubled))]


def malformed_cases() -> Iterator[Case]:
    code = "msgpack_malformed"
    for name, data, rule in MALFORMED:
        yield invalid(f"msgpack-{name}", rule, code, shown(data), raw(data))
    for name, rule, note, change in BODIES:
        yield invalid(f"msgpack-{name}", rule, code, note, one(), body_bytes=change)


def unseen_cases() -> Iterator[Case]:
    """Section 8 holds everywhere in the body, also where a reader ignores what is there."""
    for where, what, members in UNSEEN:
        for name, data, rule, code in (
            ("float32", "ca3f800000", "R-8.2", "msgpack_not_canonical"),
            ("key-twice", "82a161c0a161c0", "R-8.3", "duplicate_key"),
            ("ext", "d40100", "R-8.4", "msgpack_not_canonical"),
            ("depth", "91" * 128 + "c0", "R-8.6", "limit_exceeded"),
        ):
            note = f"In {what}: {data if len(data) < 50 else '128 arrays of one element'}."
            change = body_puts(members(Raw(bytes.fromhex(data))))
            case_id = f"msgpack-{name}-in-{where}"
            yield invalid(case_id, f"{rule} R-7.4", code, note, one(), body=change)


def body_puts(members: dict[str, object]) -> Callable[[dict], None]:
    return lambda body: body.update(members)


def depth_cases() -> Iterator[Case]:
    lists: object = None
    for _ in range(127):
        lists = ["list", lists]
    maps: object = {}
    for _ in range(126):
        maps = {"": maps}
    for name, note, value in (
        ("129", "Body, tree, and 127 lists: one deeper than allowed.", lists),
        ("129-maps", "Body, tree, and 127 maps, the innermost empty.", maps),
        ("100000", "100,000 arrays of one element.", Raw(b"\x91" * 100_000 + b"\xc0")),
        ("100000-maps", "100,000 maps of one entry.", Raw(b"\x81\xa0" * 100_000 + b"\xc0")),
    ):
        yield invalid(f"depth-{name}", "R-8.6", "limit_exceeded", note, tree(value))
