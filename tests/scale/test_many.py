"""Many chunks, many tensors, many saves: time and memory follow what is used, not what is there."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dsdformat
import dsdformat.numpy
from dsdformat.errors import ChecksumError, UnsupportedValueError


@pytest.mark.slow
def test_three_million_chunks_open_at_once_and_are_read_when_asked_for(measure, big_folder):
    measure("make_many_chunks", big_folder)
    figures = measure("open_many_chunks", big_folder)
    assert figures["open_s"] < 2
    assert figures["open_mib"] < 64
    assert figures["one_tensor_s"] < 1
    assert figures["one_tensor_mib"] - figures["open_mib"] < 16
    assert figures["all_tensors_mib"] >= figures["one_tensor_mib"]
    assert figures["all_tensors_mib"] < 512


@pytest.mark.slow
def test_a_million_tensors_are_saved_found_and_loaded(measure, big_folder):
    figures = measure("many_tensors", big_folder, 1_000_000)
    assert figures.keys() >= {"save_s", "open_s", "find_one_s", "load_s", "verify_s"}


def test_a_state_of_many_sections_is_saved_in_as_many_files(tmp_path):
    state = {f"section {index}": {"w": np.full(4, index)} for index in range(300)}
    root = dsdformat.numpy.save(tmp_path / "checkpoint", state)
    loaded = dsdformat.numpy.load(tmp_path / "checkpoint", digest=root)
    assert all(loaded[name]["w"].tolist() == state[name]["w"].tolist() for name in state)


@pytest.mark.parametrize("codec", ["raw", "planes+zstd"])
def test_threads_that_share_a_checkpoint_read_what_one_thread_reads(tmp_path, codec):
    rng = np.random.default_rng(1)
    arrays = {f"w{n}": rng.standard_normal((n + 50, 97)).astype(np.float32) for n in range(400)}
    arrays["big"] = rng.standard_normal((3000, 700)).astype(np.float32)
    dsdformat.numpy.save(tmp_path / "checkpoint", arrays, codec=codec)
    with dsdformat.open(tmp_path / "checkpoint") as checkpoint:

        def read(seed: int) -> None:
            choose = np.random.default_rng(seed)
            for _ in range(60):
                name = "big" if choose.random() < 0.1 else f"w{choose.integers(400)}"
                rows, columns = arrays[name].shape
                a, b = sorted(choose.integers(0, rows + 1, 2))
                c, d = sorted(choose.integers(0, columns + 1, 2))
                data = checkpoint.tensor(name)[int(a) : int(b), int(c) : int(d)].read()
                assert bytes(data) == arrays[name][a:b, c:d].tobytes()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(16)))


STATE = {"model": {f"w{index}": np.arange(index * 100) for index in range(5)}, "step": 3}


def saved_and_loaded(path: str) -> None:
    dsdformat.numpy.save(path, STATE, overwrite=True, codec="zstd")
    dsdformat.numpy.load(path)
    with dsdformat.open(path) as checkpoint:
        checkpoint.read("model/w3")
    assert dsdformat.verify(path).ok


def refused(path: str) -> None:
    with contextlib.suppress(UnsupportedValueError):
        dsdformat.numpy.save(path, {**STATE, "x": object()}, overwrite=True)
    with contextlib.suppress(UnsupportedValueError):
        dsdformat.numpy.save(f"{path}-new", {**STATE, "x": object()})


def damaged(path: str) -> None:
    if not os.path.exists(path):
        dsdformat.numpy.save(path, STATE)
        with open(os.path.join(path, "model.safetensors"), "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
    with contextlib.suppress(ChecksumError):
        dsdformat.numpy.load(path)
    assert not dsdformat.verify(path).ok


ROUNDS = {"saves and loads": (saved_and_loaded, 200), "refused saves": (refused, 100)}
ROUNDS["loads of what is damaged"] = (damaged, 100)


@pytest.mark.parametrize(("once", "rounds"), ROUNDS.values(), ids=ROUNDS)
def test_rounds_leave_no_descriptors_and_no_threads(
    tmp_path, count_descriptors, monkeypatch, once, rounds
):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    path = str(tmp_path / "checkpoint")
    once(path)
    gc.collect()  # files that others have left open
    descriptors, threads = count_descriptors(), threading.active_count()
    for _ in range(rounds):
        once(path)
    assert (count_descriptors(), threading.active_count()) == (descriptors, threads)
    assert {child.name for child in tmp_path.iterdir()} <= {"checkpoint"}
