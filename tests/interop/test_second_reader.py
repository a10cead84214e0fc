"""States of every kind, as the JavaScript reader sees them: it shares no code with ours."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from strategies import root_states, tilings

import dsdformat
import dsdformat.numpy
from dsdformat import Box, TensorSource
from dsdformat.format.dtypes import DTYPES

pytestmark = pytest.mark.node

few = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # shrinking would start node a thousand times
)


def described(checkpoint: dsdformat.Checkpoint) -> dict[str, object]:
    return {
        "root": checkpoint.root,
        "state": checkpoint.content_digest(),
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "content": entry.content_digest(),
            }
            for entry in checkpoint
        ],
    }


@few
@given(st.lists(root_states(), min_size=20, max_size=60), st.sampled_from(["raw", "planes+zstd"]))
def test_states_of_every_kind_have_the_same_digests_there(read_in_javascript, states, codec):
    state = {f"state {index}": one for index, one in enumerate(states)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        dsdformat.numpy.save(path, state, codec=codec)
        with dsdformat.open(path) as checkpoint:
            assert read_in_javascript(path) == described(checkpoint)


@st.composite
def tensors(draw) -> tuple[str, list[Box], int, str]:
    """Dtype, tiling, seed and codec of a tensor."""
    shape = draw(st.lists(st.integers(1, 30), max_size=3).map(tuple))
    boxes = draw(tilings(shape, max_cuts=4))
    codec = draw(st.sampled_from(["raw", "zstd", "planes+zstd"]))
    return draw(st.sampled_from(sorted(DTYPES))), boxes, draw(st.integers(0, 99)), codec


def source_of(name: str, boxes: list[Box], seed: int, codec: str) -> TensorSource:
    """A tensor of numbers that are half noise, half zero."""
    shape = tuple(map(max, zip(*(box.end for box in boxes), strict=True)))
    noise = random.Random(seed).randbytes
    chunks = []
    for box in boxes:
        nbytes = box.numel * DTYPES[name].itemsize
        chunks.append((box, noise(nbytes // 2) + bytes(nbytes - nbytes // 2)))
    return TensorSource(name, shape, chunks, codec=codec)


@few
@given(st.lists(tensors(), min_size=10, max_size=20), st.sampled_from([4096, 65_536]))
def test_tensors_in_any_tiling_have_the_same_digests_there(
    read_in_javascript, chosen, block_nbytes
):
    state = {"model": {f"w{index}": source_of(*one) for index, one in enumerate(chosen)}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        with dsdformat.create(path, block_nbytes=block_nbytes) as writer:
            writer.add(state)
        assert dsdformat.verify(path).problems == ()
        with dsdformat.open(path) as checkpoint:
            assert read_in_javascript(path) == described(checkpoint)
