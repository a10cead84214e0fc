"""Pickles that want to execute something, or to take all memory or time: refused, and soon (B124).

All are read as the pickle of a file of torch.save. What they would execute makes a file, which a
fixture looks for.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable

import pytest
from forge import (
    APPEND,
    APPENDS,
    BUILD,
    COMMAND,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    MARK,
    NEWOBJ,
    ORDERED,
    PAYLOAD,
    PERSID,
    REDUCE,
    SETITEM,
    SETITEMS,
    SIX,
    STOP,
    SYSTEM,
    TUPLE,
    Tensor,
    call,
    integer,
    name,
    pickled,
    plain,
    stack_name,
    text,
    torch_stream,
    torch_zip,
)

from dsdformat import ConvertError
from dsdformat.convert import open_foreign
from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.torch_stream import read_torch_stream
from dsdformat.convert.torch_zip import read_torch_archive

ENCODE = name("_codecs", "encode")
FROMBUFFER = name("numpy._core.numeric", "_frombuffer")
F8 = call(name("numpy", "dtype"), "f8", False, True)
TUPLE1 = b"\x85"


def frame(*pieces: bytes, length: int | None = None, proto: bytes = b"\x80\x04") -> bytes:
    body = b"".join(pieces)
    return proto + b"\x95" + struct.pack("<Q", len(body) if length is None else length) + body


def member(value: bytes) -> bytes:
    """A pickle of a dict with one value."""
    return pickled(EMPTY_DICT, text("w"), value, SETITEM)


class Touch:
    def __reduce__(self):
        import os

        return os.system, (COMMAND,)


class TouchState:
    """Sets a state on what a call has made."""

    def __reduce__(self):
        return exec, (f"import os; os.system({COMMAND!r})",), {"a": 1}, iter([1]), iter([(1, 2)])


def tensor(**lies: object) -> bytes:
    return Tensor(**lies).opcodes()  # type: ignore[arg-type]


# Everything that could execute something: the name is told, and nothing is done.
CALLS: dict[str, bytes] = {
    "reduce": member(PAYLOAD),
    "reduce-of-a-stack-global": member(call(stack_name("os", "system"), COMMAND)),
    "reduce-of-a-dotted-stack-global": member(call(stack_name("torch", "os.system"), COMMAND)),
    "reduce-of-an-alias-of-a-known-name": member(
        call(stack_name("torch", "_utils._rebuild_tensor_v2"), 1)
    ),
    "reduce-of-a-part-of-a-known-name": member(
        call(stack_name("collections", "OrderedDict.__reduce__"))
    ),
    "reduce-of-a-module-with-a-blank": member(call(name("os ", "system"), COMMAND)),
    "reduce-of-posix": member(call(name("posix", "system"), COMMAND)),
    "inst": member(MARK + text(COMMAND) + b"ios\nsystem\n"),
    "obj": member(MARK + SYSTEM + text(COMMAND) + b"o"),
    "newobj": member(name("subprocess", "Popen") + plain((["touch", "canary"],)) + NEWOBJ),
    "newobj-ex": member(
        name("subprocess", "Popen")
        + EMPTY_TUPLE
        + plain({"args": COMMAND, "shell": True})
        + b"\x92"
    ),
    "build": member(call(name("torch.nn", "Module")) + plain({"__setstate__": 1}) + BUILD),
    "build-with-a-payload": member(ORDERED + plain({"__class__": PAYLOAD}) + BUILD),
    "nested-in-arguments": member(call(name("collections", "OrderedDict"), [["a", PAYLOAD]])),
    "nested-in-a-call-of-the-result": member(call(call(name("builtins", "getattr"), 1), 2)),
    "as-a-key": pickled(EMPTY_DICT, PAYLOAD, plain(1), SETITEM),
    "in-a-set": member(b"\x8f" + MARK + PAYLOAD + b"\x90"),
    "in-a-list-of-a-dict": member(plain([{"a": PAYLOAD}])),
    "as-the-root": pickled(PAYLOAD),
    "as-hooks-of-a-tensor": member(tensor(hooks=PAYLOAD)),
    "as-a-storage-type": member(tensor(kind=SYSTEM)),
    "as-a-dtype": member(
        tensor(function=name("torch._utils", "_rebuild_tensor_v3"), more=(SYSTEM,))
    ),
    "as-the-class-of-a-tensor": member(
        call(
            name("torch._tensor", "_rebuild_from_type_v2"),
            name("torch._utils", "_rebuild_tensor_v2"),
            SYSTEM,
            (COMMAND,),
            {},
        )
    ),
    "as-the-function-of-a-tensor": member(
        call(
            name("torch._tensor", "_rebuild_from_type_v2"),
            SYSTEM,
            name("torch", "Tensor"),
            (COMMAND,),
            {},
        )
    ),
    "as-a-default-factory": member(call(name("collections", "defaultdict"), PAYLOAD)),
    "eval": member(call(name("builtins", "eval"), "open('canary','w')")),
    "exec-of-python-2": member(call(name("__builtin__", "exec"), "open('canary','w')")),
    "getattr": member(call(name("builtins", "getattr"), SYSTEM, "__call__")),
    "import": member(call(name("importlib", "import_module"), "antigravity")),
    "partial": member(call(name("functools", "partial"), SYSTEM, COMMAND)),
    "torch-load": member(call(name("torch", "load"), "canary")),
    "load-from-bytes": member(call(name("torch.storage", "_load_from_bytes"), b"\x8c\x01x")),
    "pickle-loads": member(call(name("_pickle", "loads"), b"C\x01x")),
    "reconstructor": member(call(name("copyreg", "_reconstructor"), SYSTEM, SYSTEM, None)),
    "array-of-a-class": member(
        call(name("numpy._core.multiarray", "_reconstruct"), SYSTEM, (0,), b"C\x01b")
        + plain((1, (1,), None, False, []))
        + BUILD
    ),
    "numpy-dtype-of-a-class": member(call(name("numpy", "dtype"), SYSTEM, False, True)),
    "python-reduce": pickle.dumps({"w": Touch()}),
    "python-reduce-protocol-0": pickle.dumps({"w": Touch()}, 0),
    "python-reduce-protocol-5": pickle.dumps({"w": Touch()}, 5),
    "python-state-items-and-keys": pickle.dumps({"w": TouchState()}, 4),
}


def bomb(depth: int) -> bytes:
    """Pairs of the pair before, twice: 2 to the power of `depth` values."""
    pairs = (b"h" + bytes([level]) + b"\x86q" + bytes([level + 1]) for level in range(depth))
    return EMPTY_LIST + b"q\x00" + b"".join(pairs)


def tuples(depth: int) -> bytes:
    return EMPTY_TUPLE + TUPLE1 * depth


WORD = 2**64
P1, P2, P5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
P2_INVERSE = pow(P2, -1, WORD)


def colliding(count: int) -> bytes:
    """A dict of pairs of numbers that Python hashes alike: the second follows from the first."""
    keys: list[tuple[int, int]] = []
    first = 0
    while len(keys) < count:
        first += 1
        state = (P5 + first * P2) % WORD
        state = ((state << 31) | (state >> 33)) % WORD * P1 % WORD
        second = (12345 - state) * P2_INVERSE % WORD
        second -= WORD if second >= WORD // 2 else 0
        if abs(second) < 2**61 - 1 and second != -1:
            keys.append((first, second))
    assert len({hash(key) for key in keys}) == 1
    return pickled(EMPTY_DICT, MARK, *(plain(key) + plain(1) for key in keys), SETITEMS)


# Everything else that is wrong with a pickle, and the code that it is refused with.
BROKEN: dict[str, tuple[bytes, str]] = {
    "extension-registry-1": (member(b"\x82\x01"), "pickle_opcode"),
    "extension-registry-2": (member(b"\x83\x01\x00"), "pickle_opcode"),
    "extension-registry-4": (member(b"\x84\x01\x00\x00\x00"), "pickle_opcode"),
    "buffer-out-of-band": (member(b"\x97"), "pickle_opcode"),
    "persistent-id-as-text": (member(b"Pcanary\n"), "pickle_opcode"),
    "string-as-source": (member(b"S'a'\n"), "pickle_opcode"),
    "call-below-the-result": (pickled(PAYLOAD, b"0", b"N"), "pickle_opcode"),
    "call-below-a-mark": (pickled(MARK, PAYLOAD, b"1", b"N"), "pickle_opcode"),
    "value-twice": (pickled(EMPTY_LIST, b"N2", MARK, APPENDS), "pickle_opcode"),
    "unknown-opcode": (member(b"\xff"), "pickle_malformed"),
    "protocol-6": (b"\x80\x06N.", "pickle_opcode"),
    "protocol-within": (pickled(b"\x80\x02", b"N"), "pickle_malformed"),
    "empty": (b"", "pickle_malformed"),
    "no-stop": (b"\x80\x02N", "pickle_malformed"),
    "two-values": (pickled(b"N", b"N"), "pickle_malformed"),
    "no-value": (pickled(), "pickle_malformed"),
    "open-mark": (pickled(MARK, b"N"), "pickle_malformed"),
    "bytes-behind": (pickled(b"N") + b"N", "pickle_malformed"),
    "stack-underflow": (pickled(TUPLE1), "pickle_malformed"),
    "stack-underflow-of-a-call": (pickled(EMPTY_TUPLE, REDUCE), "pickle_malformed"),
    "stack-underflow-below-a-mark": (pickled(b"N", MARK, TUPLE1), "pickle_malformed"),
    "no-mark": (pickled(b"N", TUPLE), "pickle_malformed"),
    "call-without-tuple": (pickled(SYSTEM, text("x"), REDUCE), "pickle_malformed"),
    "call-without-function": (pickled(MARK, b"o"), "pickle_malformed"),
    "keywords-without-dict": (pickled(SYSTEM, EMPTY_TUPLE, b"N", b"\x92"), "pickle_malformed"),
    "append-to-a-dict": (pickled(EMPTY_DICT, b"N", APPEND), "pickle_malformed"),
    "set-in-a-list": (pickled(EMPTY_LIST, b"N", b"N", SETITEM), "pickle_malformed"),
    "add-to-a-list": (pickled(EMPTY_LIST, MARK, b"N", b"\x90"), "pickle_malformed"),
    "state-of-a-list": (pickled(EMPTY_LIST, b"N", BUILD), "pickle_malformed"),
    "state-of-a-name": (pickled(SYSTEM, b"N", BUILD), "pickle_malformed"),
    "two-states": (pickled(ORDERED, b"}", BUILD, b"}", BUILD), "pickle_malformed"),
    "key-without-value": (pickled(EMPTY_DICT, MARK, b"N", SETITEMS), "pickle_malformed"),
    "name-of-numbers": (pickled(b"K\x01", b"K\x02", b"\x93"), "pickle_malformed"),
    "name-that-is-not-utf-8": (pickled(b"c\xff\nx\n"), "pickle_malformed"),
    "name-without-end": (pickled(b"c" + b"a" * 5000), "foreign_too_large"),
    "name-of-a-megabyte": (pickled(stack_name("a" * 2**20, "b")), "foreign_too_large"),
    "text-that-is-not-utf-8": (pickled(b"X\x01\x00\x00\x00\xff"), "pickle_malformed"),
    "memo-entry-that-is-not-there": (pickled(b"h\x05"), "pickle_malformed"),
    "memo-entry-4294967295": (pickled(b"j\xff\xff\xff\xff"), "pickle_malformed"),
    "memo-entry-put-twice": (pickled(b"N", b"q\x00", b"q\x00"), "pickle_malformed"),
    "memo-of-an-empty-stack": (pickled(b"q\x00"), "pickle_malformed"),
    "memo-entry-minus-1": (pickled(b"N", b"p-1\n"), "pickle_malformed"),
    "memo-entry-of-many-digits": (pickled(b"N", b"p" + b"9" * 5000 + b"\n"), "foreign_too_large"),
    "frame-beyond-the-end": (frame(b"N."[:1], length=2**40) + STOP, "pickle_malformed"),
    "frame-of-2-to-the-64": (frame(b"N", length=2**64 - 1) + STOP, "pickle_malformed"),
    "frame-that-ends-within-an-opcode": (frame(text("abcd"), length=4) + STOP, "pickle_malformed"),
    "frame-within-a-frame": (
        frame(b"\x95" + struct.pack("<Q", 1) + b"N", length=11) + STOP,
        "pickle_malformed",
    ),
    "frame-beyond-stop": (frame(b"N", STOP, b"NNNN"), "pickle_malformed"),
    "text-of-4-gib": (pickled(b"X\xff\xff\xff\xff"), "foreign_too_large"),
    "text-of-2-to-the-63": (pickled(b"\x8d" + struct.pack("<Q", 2**63)), "foreign_too_large"),
    "bytes-of-2-to-the-64": (pickled(b"\x8e" + struct.pack("<Q", 2**64 - 1)), "foreign_too_large"),
    "bytearray-of-900-mib": (pickled(b"\x96" + struct.pack("<Q", 900 << 20)), "pickle_malformed"),
    "integer-of-2-gib": (pickled(b"\x8b" + struct.pack("<I", 2**31 - 1)), "foreign_too_large"),
    "integer-of-4-kib": (pickled(integer(2 ** (8 * 4096))), "foreign_too_large"),
    "integer-of-100000-digits": (pickled(b"L" + b"9" * 100_000 + b"L\n"), "foreign_too_large"),
    "integer-of-letters": (pickled(b"Iabc\n"), "pickle_malformed"),
    "float-of-letters": (pickled(b"Fabc\n"), "pickle_malformed"),
    "tuples-20000-deep": (pickled(tuples(20_000)), "foreign_too_large"),
    "lists-20000-deep": (pickled(EMPTY_LIST * 20_000, APPEND * 19_999), "foreign_too_large"),
    "marks-20000-deep": (pickled(MARK * 20_000), "foreign_too_large"),
    "calls-20000-deep": (
        pickled(SYSTEM, (EMPTY_TUPLE + REDUCE) * 20_000),
        "foreign_too_large",
    ),
    "laughs-of-2-to-the-60": (pickled(bomb(60)), "foreign_too_large"),
    "laughs-of-2-to-the-18": (pickled(bomb(18)), "foreign_too_large"),
    "list-in-itself": (pickled(EMPTY_LIST, b"q\x00", b"h\x00", APPEND), "pickle_cycle"),
    "dict-in-itself": (pickled(b"}q\x00", text("a"), b"h\x00", SETITEM), "pickle_cycle"),
    "tuple-in-itself": (
        pickled(EMPTY_LIST, b"q\x00", b"h\x00", TUPLE1, APPEND),
        "pickle_cycle",
    ),
    "ordered-in-itself": (pickled(ORDERED, b"q\x00", text("a"), b"h\x00", SETITEM), "pickle_cycle"),
    "key-that-is-a-list": (pickled(EMPTY_DICT, EMPTY_LIST, b"N", SETITEM), "pickle_malformed"),
    "key-that-is-a-dict": (pickled(EMPTY_DICT, EMPTY_DICT, b"N", SETITEM), "pickle_malformed"),
    "key-of-deep-tuples": (pickled(EMPTY_DICT, tuples(500), b"N", SETITEM), "pickle_malformed"),
    "key-of-shared-tuples": (
        pickled(
            EMPTY_DICT,
            EMPTY_TUPLE,
            b"".join(b"q%ch%c\x86" % (i, i) for i in range(14)),
            b"N",
            SETITEM,
        ),
        "pickle_malformed",
    ),
    "key-that-is-huge": (pickled(EMPTY_DICT, integer(2**100), b"N", SETITEM), "pickle_malformed"),
    "key-twice": (
        pickled(EMPTY_DICT, MARK, plain("a") + b"N", plain("a") + b"N", SETITEMS),
        "pickle_malformed",
    ),
    "element-twice": (pickled(MARK, b"K\x01K\x01", b"\x91"), "pickle_malformed"),
    "ordered-with-state-of-a-list": (pickled(ORDERED, EMPTY_LIST, BUILD), "pickle_value"),
    "ordered-of-a-number": (pickled(call(name("collections", "OrderedDict"), 5)), "pickle_value"),
    "counter-of-a-list": (pickled(call(name("collections", "Counter"), [1])), "pickle_value"),
    "deque-beyond-its-maxlen": (
        pickled(call(name("collections", "deque"), [1, 2], 1)),
        "pickle_value",
    ),
    "set-of-a-number": (pickled(call(name("builtins", "set"), 5)), "pickle_value"),
    "complex-of-strings": (pickled(call(name("builtins", "complex"), "1", "2")), "pickle_value"),
    "bytes-of-a-number": (pickled(call(name("builtins", "bytes"), 2**40)), "pickle_value"),
    "encode-to-another-codec": (
        pickled(call(name("_codecs", "encode"), "a", "zlib")),
        "pickle_value",
    ),
    "encode-of-no-bytes": (
        pickled(call(name("_codecs", "encode"), "\u20ac", "latin1")),
        "pickle_value",
    ),
    "day-that-does-not-exist": (
        pickled(call(name("datetime", "date"), b"C\x04\x07\xe4\x02\x1f")),
        "pickle_value",
    ),
    "timedelta-of-2-to-the-70": (
        pickled(call(name("datetime", "timedelta"), 2**70, 0, 0)),
        "pickle_value",
    ),
    "path-of-numbers": (pickled(call(name("pathlib", "PosixPath"), 1)), "pickle_value"),
    "size-of-strings": (pickled(call(name("torch", "Size"), ("a",))), "pickle_value"),
    "size-below-zero": (pickled(call(name("torch", "Size"), (-1,))), "pickle_value"),
    "device-of-a-number": (pickled(call(name("torch", "device"), 5)), "pickle_value"),
    "array-with-too-few-bytes": (
        pickled(call(FROMBUFFER, b"C\x01x", F8, (2**40,), "C")),
        "storage_mismatch",
    ),
    "array-of-2-to-the-80": (
        pickled(call(FROMBUFFER, b"C\x01x", F8, (2**40, 2**40), "C")),
        "storage_mismatch",
    ),
    "scalar-with-too-few-bytes": (
        pickled(call(name("numpy._core.multiarray", "scalar"), F8, b"C\x01x")),
        "pickle_value",
    ),
    "persistent-id-of-a-string": (pickled(text("a"), PERSID), "pickle_malformed"),
    "persistent-id-of-a-call": (pickled(PAYLOAD, PERSID), "pickle_malformed"),
}


def read_zip(data: bytes) -> object:
    return read_torch_archive(MemoryBytes(torch_zip(data, {"0": SIX}))).tree


def read_stream(data: bytes) -> object:
    return read_torch_stream(MemoryBytes(torch_stream(data, {"0": SIX})))


@pytest.mark.parametrize("case", ["reduce", "inst", "obj", "python-reduce", "nested-in-arguments"])
def test_the_payloads_work_where_pickle_reads_them(tmp_path, monkeypatch, case):
    """So that a canary that is not there says something."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    pickle.loads(CALLS[case])
    assert (elsewhere / "canary").exists()


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_is_not_known_is_refused_by_its_name(tmp_path, refused, case):
    path = tmp_path / "x.pt"
    path.write_bytes(torch_zip(CALLS[case], {"0": SIX}))
    assert refused(lambda: open_foreign(path)) in ("unknown_global", "pickle_value")


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_is_not_known_is_refused_in_the_stream_form(tmp_path, case):
    path = tmp_path / "x.pt"
    path.write_bytes(torch_stream(CALLS[case], {"0": SIX}, keys=[]))
    with pytest.raises(ConvertError):
        open_foreign(path)


@pytest.mark.parametrize("policy", ["drop", "record"])
@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_is_not_known_is_not_made_by_any_policy(tmp_path, case, policy):
    path = tmp_path / "x.pt"
    path.write_bytes(torch_zip(CALLS[case], {"0": SIX}))
    try:
        with open_foreign(path, unknown=policy) as foreign:
            foreign.state()
    except ConvertError as error:
        assert error.code == "pickle_value"  # noqa: PT017 -- it may also be read


def test_the_refusal_says_place_name_and_what_to_do(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(torch_zip(pickled(plain({"a": {"b": [1, PAYLOAD]}, "c": SYSTEM}))))
    with pytest.raises(ConvertError) as caught:
        open_foreign(path)
    error = caught.value
    assert error.code == "unknown_global"
    assert error.names == ("os.system",)
    assert error.where == str(path)
    assert str(error).splitlines() == [
        f"{path}: holds what is not read: "
        "$.a.b[1]: os.system; $.c: os.system (a class or function)",
        "",
        "hint: leave it out with unknown='drop', or keep it as plain values with unknown='record'",
    ]


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_pickle_is_refused_with_its_code(refused, case):
    data, code = BROKEN[case]
    assert refused(lambda: read_zip(data), peak=8 << 20) == code


@pytest.mark.parametrize("count", [200, 5000])
def test_keys_that_are_hashed_alike_are_refused_soon(refused, count):
    assert refused(lambda: read_zip(colliding(count)), peak=64 << 20) == "foreign_too_large"


def test_a_megabyte_of_empty_dicts_does_not_take_more_than_it_may(refused):
    from dsdformat.convert.pickles.machine import parse_pickle

    data = MemoryBytes(pickled(EMPTY_DICT * 2**20))
    code = refused(lambda: parse_pickle(data, memory_max=2**24), peak=2**25)
    assert code == "foreign_too_large"


def real_pickle() -> bytes:
    return member(tensor())


def test_every_truncation_of_a_pickle_is_refused():
    data = real_pickle()
    read_zip(data)
    for end in range(len(data)):
        with pytest.raises(ConvertError) as caught:
            read_zip(data[:end])
        assert caught.value.code == "pickle_malformed", end


@pytest.mark.parametrize("read", [read_zip, read_stream], ids=["zip", "stream"])
def test_an_object_that_contains_itself_is_dropped_with_what_it_is_in(
    tmp_path, read: Callable[[bytes], object]
):
    """As configuration objects do, whose children know their parents."""
    node = call(name("omegaconf", "DictConfig")) + b"q\x00" + plain({"_parent": b"h\x00"}) + BUILD
    path = tmp_path / "x.pt"
    path.write_bytes(torch_zip(pickled(plain({"config": node, "step": 5}))))
    with open_foreign(path, unknown="drop") as foreign:
        assert foreign.tree == {"step": 5}
    with open_foreign(path, unknown="record") as foreign:
        config = foreign.tree["config"]
    assert config == {
        "name": "omegaconf.DictConfig",
        "state": {"_parent": {"name": "a value within itself"}},
    }
