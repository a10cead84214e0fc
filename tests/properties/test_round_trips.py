"""Any state of the format's values and any arrays come back as they were."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sameness import assert_same, native
from strategies import arrays, key_values, np_scalars, plain_values, root_states

import dsdformat
import dsdformat.numpy
from dsdformat.format.codecs import CODECS
from dsdformat.format.decoding import Hooks, decode_tree
from dsdformat.format.packing import emit, parse
from dsdformat.format.values import TensorRef, encode

codecs = st.sampled_from(sorted(CODECS.values()))


def save_and_load(state: Any, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        dsdformat.numpy.save(path, state, threads=1, **options)
        assert dsdformat.verify(path, threads=1).problems == ()
        return dsdformat.numpy.load(path, threads=1)


@given(root_states(), codecs)
def test_a_state_comes_back_with_all_its_types_and_bits(state, codec):
    assert_same(state, save_and_load(state, codec=codec))


@settings(max_examples=300)
@given(plain_values)
def test_a_plain_value_comes_back_with_its_type_and_bits(value):
    assert_same({"value": value}, _through_bytes({"value": value}))


@settings(max_examples=300)
@given(key_values, st.booleans())
def test_a_key_comes_back_with_its_type_and_bits(key, in_set):
    state = {"value": {key} if in_set else {key: 1}}
    assert_same(state, _through_bytes(state))


@settings(max_examples=200)
@given(st.lists(arrays(max_side=7), min_size=1, max_size=6), codecs)
def test_arrays_of_any_dtype_shape_and_strides_come_back_bit_for_bit(values, codec):
    state = {"model": {f"w{index}": value for index, value in enumerate(values)}}
    assert_same(state, save_and_load(state, codec=codec))


@given(arrays())
def test_a_loaded_array_is_packed_and_writable(array):
    loaded = save_and_load({"w": array})["w"]
    assert loaded.flags.c_contiguous
    assert loaded.flags.writeable


@given(st.lists(np_scalars(), max_size=5))
def test_numpy_scalars_come_back_with_their_dtype_and_bits(scalars):
    assert_same({"scalars": scalars}, save_and_load({"scalars": scalars}))


@settings(max_examples=200)
@given(root_states(with_arrays=False))
@example({"a": {1: {2.5: {None: {(): {frozenset(): b""}}}}}})
def test_writing_what_was_read_of_a_tree_gives_the_same_bytes(state):
    encoded = encode(state, leaf=_numpy_leaf)
    body = emit(encoded)
    assert emit(parse(body)) == body
    tree = decode_tree(parse(body), HOOKS)
    assert tree.problems == []
    assert emit(encode(tree.root, leaf=_numpy_leaf)) == body


@given(root_states())
def test_equal_states_have_equal_checkpoints_whatever_the_order_of_their_dicts(state):
    with tempfile.TemporaryDirectory() as folder:
        first = dsdformat.numpy.save(Path(folder) / "a", state, threads=1)
        second = dsdformat.numpy.save(Path(folder) / "b", _reordered(state), threads=2)
        assert first == second


@given(root_states(), root_states())
def test_the_content_digest_depends_on_the_values_alone(state, other):
    with tempfile.TemporaryDirectory() as folder:
        digests = [
            _content_digest(Path(folder) / name, value, codec)
            for name, value, codec in [
                ("a", state, "raw"),
                ("b", state, "zstd"),
                ("c", state, "planes+zstd"),
                ("d", other, "raw"),
            ]
        ]
    assert digests[0] == digests[1] == digests[2]
    assert (digests[3] == digests[0]) == _is_same(state, _reordered(other))


@pytest.mark.parametrize("depth", [1, 50, 120])
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_deep_states_come_back(kind, depth):
    value: Any = np.arange(3)
    for _ in range(depth):
        value = {"k": value} if kind is dict else kind([value])
    state = {"root": value}
    assert_same(state, save_and_load(state))


def _content_digest(path: Path, state: Any, codec: str) -> str:
    dsdformat.numpy.save(path, state, codec=codec, threads=1)
    with dsdformat.open(path, threads=1) as checkpoint:
        return checkpoint.content_digest()


def _is_same(a: Any, b: Any) -> bool:
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True


def _numpy_leaf(value: Any, path: Any) -> Any:
    if isinstance(value, np.dtype):
        return dsdformat.Named("numpy.dtype", dsdformat.numpy._name(value, path))
    if isinstance(value, np.generic):
        return dsdformat.numpy._scalar(value, path)
    return NotImplemented


HOOKS = Hooks(
    named=dsdformat.numpy.named_of,
    scalar=dsdformat.numpy._hooks([]).scalar,
    tensor=lambda ref: TensorRef(ref.index, ref.attributes),
)


def _through_bytes(state: Any) -> Any:
    """Encode and decode without a folder: quick enough for many examples."""
    tree = decode_tree(parse(emit(encode(state, leaf=_numpy_leaf))), HOOKS)
    assert tree.problems == []
    return tree.root


@functools.singledispatch
def _reordered(value: Any) -> Any:
    """A state that is equal, in which each plain dict was filled in the opposite order."""
    return value


@_reordered.register(dict)
def _(value: dict[Any, Any]) -> Any:
    pairs = [(key, _reordered(item)) for key, item in value.items()]
    if type(value) is OrderedDict:
        return OrderedDict(pairs)
    mixed = dict(reversed(pairs))
    if type(value) is defaultdict:
        return defaultdict(None, mixed)
    return Counter(mixed) if type(value) is Counter else mixed


@_reordered.register(list)
@_reordered.register(tuple)
def _(value: Any) -> Any:
    items = [_reordered(item) for item in value]
    return items if type(value) is list else type(value)(items)


@_reordered.register(deque)
def _(value: deque[Any]) -> Any:
    return deque(map(_reordered, value), value.maxlen)


@_reordered.register(np.ndarray)
def _(value: Any) -> Any:
    """A copy in another layout: neither strides nor byte order are part of a state."""
    return np.array(value, dtype=native(value.dtype), order="F")
