"""The machine and the rules for plain values give what pickle gives, for any plain value."""

from __future__ import annotations

import datetime
import pathlib
import pickle
from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsdformat import ConvertError
from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.pickles.machine import parse_pickle
from dsdformat.convert.pickles.nodes import Call, Global, Pairs, Stored
from dsdformat.convert.pickles.resolving import Rules, Unknown, resolve
from dsdformat.convert.plain_names import PLAIN_NAMES

RULES = Rules(PLAIN_NAMES)
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda children: st.tuples(children, children) | st.frozensets(children, max_size=3),
    max_leaves=5,
)
ATOMS = (
    HASHABLE
    | st.integers()
    | st.complex_numbers(allow_nan=False)
    | st.datetimes()
    | st.datetimes(timezones=st.just(datetime.timezone(datetime.timedelta(hours=5))))
    | st.timedeltas()
    | st.dates()
    | st.sampled_from([pathlib.PurePosixPath("/a/b"), pathlib.Path("x"), pathlib.Path()])
)
VALUES = st.recursive(
    ATOMS,
    lambda children: (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, children, max_size=4)
        | st.dictionaries(HASHABLE, children, max_size=4).map(OrderedDict)
        | st.lists(children, max_size=4).map(deque)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


def read(data: bytes) -> Any:
    return resolve(parse_pickle(MemoryBytes(data)).root, RULES, "x")


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) for a, b in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("protocol", range(6))
@settings(deadline=None, max_examples=40)
@given(value=VALUES)
def test_a_plain_value_is_read_as_pickle_reads_it(protocol, value):
    data = pickle.dumps(value, protocol)
    try:
        found = read(data)
    except ConvertError as error:
        # Strings of protocol 0 are not on the list where they are bytes or dates.
        assert (protocol, error.code) in [(0, "pickle_opcode"), (0, "pickle_value")]  # noqa: PT017
        return
    assert same(found, pickle.loads(data))


@pytest.mark.parametrize("protocol", range(6))
def test_shared_values_stay_shared(protocol):
    inner = [1, 2]
    one, two = read(pickle.dumps([inner, inner], protocol))
    assert one is two


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 33_000])
@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_long_lists_and_large_memos_are_read(count, protocol):
    value = [(index, str(index)) for index in range(count)]
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 65_535, 65_536, 262_143, 262_144, 1_000_000])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_long_strings_are_read_across_the_ends_of_buffers(nbytes, protocol):
    value = ["é" * (nbytes // 2), bytes(nbytes), "x" * nbytes, nbytes]
    assert read(pickle.dumps(value, protocol)) == value


def test_what_a_pickle_asks_for_is_an_inert_record():
    class_ = Global("os", "system")
    parsed = parse_pickle(MemoryBytes(b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00x\x85R}K\x01Nsb."))
    root = parsed.root
    assert type(root) is Call
    assert (root.function, root.args) == (class_, ("x",))
    assert type(root.state) is Pairs
    assert root.state.flat == [1, None]
    assert (parsed.stored, parsed.end) == ([], 28)


def test_a_persistent_id_is_an_inert_record():
    parsed = parse_pickle(MemoryBytes(b"\x80\x02K\x05Q."))
    assert type(parsed.root) is Stored
    assert parsed.root.pid == 5
    found = resolve(parsed.root, RULES, "x")
    assert type(found) is Unknown


def test_a_pickle_within_other_bytes_is_read_from_its_place():
    data = b"junk" + pickle.dumps([1]) + b"more"
    parsed = parse_pickle(MemoryBytes(data), 4)
    assert (parsed.root, parsed.end) == ([1], len(data) - 4)
