"""DCP folders that several gloo ranks wrote: FSDP2, HSDP, and tensors in all shardings, exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsdformat import Box
from dsdformat.convert import AnyTensor, convert, open_any, open_foreign
from tests.convert import converting_ranks, saving_ranks
from tests.convert.samples import needs_forms
from tests.ranks.launching import Call, Launch, Launcher


@pytest.fixture
def saved(launcher: Launcher, tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """`saved(function, mesh)` runs it on as many ranks; gives the folder and rank 0's answer."""

    def saved(function: Any, shape: tuple[int, ...], *args: Any) -> tuple[Path, Any]:
        ranks = shape[0] if len(shape) == 1 else shape[0] * shape[1]
        folder = tmp_path / "dcp"
        call = Call(function.__module__, function.__name__, (str(folder), shape, *args))
        (outcome,) = launcher.run(Launch((call,), ranks, tmp_path / "launch"))
        if outcome.skipped is not None:
            pytest.skip(outcome.skipped)
        assert outcome.failure is None, outcome.failure
        return folder, outcome.values[0]

    return saved


def read_all(tree: Any) -> Any:
    if isinstance(tree, AnyTensor):
        return tree.dtype, tree.shape, bytes(tree.read())
    if isinstance(tree, dict):
        return {key: read_all(item) for key, item in tree.items()}
    return [read_all(item) for item in tree] if isinstance(tree, list) else tree


MESHES = {"2": (2,), "3": (3,), "4": (4,), "2x2": (2, 2)}
meshes = pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)


@meshes
def test_a_training_that_fsdp2_shards_is_read_exactly(saved, shape):
    folder, expected = saved(saving_ranks.save_fsdp2, shape)
    with open_foreign(folder) as foreign:
        foreign.verify()
        assert read_all(foreign.tree) == expected
        assert len(foreign.tensor("model/0.weight").parts) == shape[-1]


@needs_forms
def test_items_of_safetensors_of_several_ranks_are_read_exactly(saved):
    folder, expected = saved(saving_ranks.save_fsdp2, (2,), "SAFETENSORS")
    with open_foreign(folder) as foreign:
        assert read_all(foreign.tree) == expected


@meshes
def test_tensors_in_every_sharding_are_read_exactly(saved, shape):
    folder, expected = saved(saving_ranks.save_layouts, shape)
    with open_foreign(folder) as foreign:
        assert read_all(foreign.tree) == expected


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["3", "2x2"])
def test_any_box_of_a_sharded_tensor_is_read_exactly(saved, shape, rng):
    folder, expected = saved(saving_ranks.save_layouts, shape)
    with open_foreign(folder) as foreign:
        for name, tensor in foreign:
            for _ in range(10):
                offset = [rng.randint(0, n) for n in tensor.shape]
                size = [rng.randint(0, n - o) for o, n in zip(offset, tensor.shape, strict=True)]
                box = Box(tuple(offset), tuple(size))
                assert bytes(tensor.read(box)) == cut(expected[name], box), (name, box)


def cut(whole: tuple[str, tuple[int, ...], bytes], box: Box) -> bytes:
    import numpy as np

    _, shape, data = whole
    slices = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
    return np.frombuffer(data, np.float32).reshape(shape)[slices].tobytes()


def test_a_training_goes_from_dcp_to_ours_and_back_onto_any_mesh(launcher, tmp_path):
    def run(function: Any, ranks: int) -> list[Any]:
        call = Call(function.__module__, function.__name__, (str(tmp_path),))
        (outcome,) = launcher.run(Launch((call,), ranks, tmp_path / f"launch-{ranks}"))
        if outcome.skipped is not None:
            pytest.skip(outcome.skipped)
        assert outcome.failure is None, outcome.failure
        return outcome.values

    first = run(converting_ranks.both_ways, 4)
    saved = first[0]["saved"]
    assert saved["optim"]["state"]["0.weight"]["exp_avg"][1] == (7, 5)
    for answer in first:
        assert answer["ours"] == (saved, 2)
        assert answer["back"] == (saved, 2)
    for answer in run(converting_ranks.resharded, 2):
        assert answer == {"ours": (saved, 2), "back": (saved, 2), "plain": (saved, 2)}
    convert(tmp_path / "back", tmp_path / "again", to="dsd")
    with open_any(tmp_path / "ours") as one, open_any(tmp_path / "again") as other:
        assert read_all(one.tree) == read_all(other.tree)
