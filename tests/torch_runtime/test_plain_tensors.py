"""Tensors that are plain at first sight take a short way: it gives what the long one gives."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat.torch import placing, sources  # noqa: E402
from dsdformat.torch.composites import find_kind, plain_address, refusal  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
BASE = torch.arange(60.0)
FORMS = {
    "packed": lambda dtype: torch.ones(3, 4).to(dtype),
    "scalar": lambda dtype: torch.ones(()).to(dtype),
    "empty": lambda dtype: torch.ones(0, 2).to(dtype),
    "transposed": lambda dtype: torch.ones(3, 4).to(dtype).t(),
    "expanded": lambda dtype: torch.ones(1, 4).to(dtype).expand(3, 4),
    "stepped": lambda dtype: torch.ones(9).to(dtype)[::2],
    "part": lambda dtype: torch.ones(9).to(dtype)[2:5],
    "on meta": lambda dtype: torch.ones(3, 4, device="meta").to(dtype),
    "sparse": lambda dtype: torch.eye(3).to(dtype).to_sparse(),
}
CASES = [
    pytest.param(form, dtype, id=f"{name}-{dtype}")
    for (name, form), dtype in itertools.product(FORMS.items(), DTYPES)
]


@pytest.mark.parametrize(("form", "dtype"), CASES)
def test_a_plain_tensor_is_a_packed_block_of_the_host_with_elements(form, dtype):
    tensor = form(dtype)
    kind = find_kind(tensor) is None and tensor.layout is torch.strided
    packed = kind and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
    wanted = packed and tensor.numel() > 0 and not dtype.is_complex
    assert plain_address(tensor) == (tensor.data_ptr() if wanted else 0)
    assert not wanted or refusal(tensor) is None


def test_a_tensor_without_memory_is_not_plain():
    tensor = torch.ones(8)[3:]
    tensor.untyped_storage().resize_(0)
    assert plain_address(tensor) == 0
    assert plain_address(torch.complex(BASE, BASE).conj().imag) == 0


class Mixed(nn.Module):
    """Parameters and buffers of all forms: tied, over one memory, and one by one."""

    def __init__(self, fill: float, *, other: bool = False) -> None:
        super().__init__()
        both = torch.full((24,), fill)
        self.plain = nn.Parameter(torch.full((3, 4), fill))
        self.tied = self.plain
        self.first = nn.Parameter(both[:12].view(3, 4))
        self.same = nn.Parameter(both[:12].view(3, 4))  # over the memory of `first`
        self.flat = nn.Parameter(both[:12])  # seen in another shape
        self.second = nn.Parameter(both[12:])
        self.turned = nn.Parameter(torch.full((4, 3), fill).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(int(fill)))
        self.register_buffer("small", torch.full((5,), fill, dtype=torch.bfloat16))
        self.register_buffer("twins", torch.complex(both, both))
        if other:
            self.first = nn.Parameter(torch.full((3, 4), fill + 1))
            self.second = nn.Parameter(torch.full((13,), fill))
            self.register_buffer("small", torch.full((5,), fill, dtype=torch.float16))
            self.register_buffer("new", torch.zeros(2))


def outcome(path: Path, state: Any, **options: Any) -> Any:
    try:
        report = dsd.load(path, state, **options).report
        return str(report), {k: v.tolist() for k, v in state["model"].state_dict().items()}
    except dsdformat.MismatchError as error:
        return str(error), str(error.report)


@pytest.mark.parametrize("saved_other", [False, True])
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"dtype": torch.float16}], ids=str)
def test_a_load_finds_and_reads_the_same_by_either_way(
    tmp_path, monkeypatch, saved_other, other, options
):
    dsd.save(tmp_path / "c", {"model": Mixed(1.0, other=saved_other)})
    short = outcome(tmp_path / "c", {"model": Mixed(2.0, other=other)}, **options)
    monkeypatch.setattr(placing, "plain_address", lambda _: 0)
    assert outcome(tmp_path / "c", {"model": Mixed(2.0, other=other)}, **options) == short


def trained() -> dict[str, Any]:
    """A model with an optimizer, whose state is many small dicts of tensors."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "averages": model.state_dict()}


def mixed() -> dict[str, Any]:
    array = np.arange(6.0)
    return {
        "model": Mixed(1.0),
        "other": Mixed(3.0, other=True),
        "array": array,
        "tied to it": torch.from_numpy(array),
        "whole": BASE,
        "again": BASE.view(60),
        "shaped": BASE.view(6, 10),
        "part": BASE[:12],
        "bits": BASE.view(torch.int32),
        "list": [BASE[3:], 4, BASE[3:], array[1:], torch.from_numpy(array)[1:], torch.ones(0)],
        "unlike": {1: torch.ones(2), (2, "x"): torch.ones(3), "deep": [[[torch.ones(4)]]]},
    }


def files_of(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


@pytest.mark.parametrize("options", [{}, {"codec": "planes+zstd"}, {"background": True}], ids=str)
@pytest.mark.parametrize("state", [mixed, trained])
def test_a_save_stores_the_same_in_runs_and_one_by_one(tmp_path, monkeypatch, state, options):
    made = state()

    def save(name: str) -> dict[str, bytes]:
        saved = dsd.save(tmp_path / name, made, **options)
        assert isinstance(saved, str) or saved.wait()
        return files_of(tmp_path / name)

    in_runs = save("runs")
    monkeypatch.setattr(sources.Adapter, "runs", lambda _, values: iter([(len(values), None)]))
    assert save("one by one") == in_runs
    monkeypatch.setattr(sources, "plain_address", lambda _: 0)
    assert save("closely") == in_runs


def test_a_tensor_keeps_its_memory_until_it_is_written(tmp_path, monkeypatch):
    """A function of the caller's runs between plan and write; it may give a tensor new memory."""
    state = {"a": {"x": torch.arange(3000.0), "y": torch.arange(5000.0)}, "b": BASE.to_sparse()}
    wanted = {name: tensor.clone() for name, tensor in state["a"].items()}

    def codec(name: str) -> str:
        for tensor in state["a"].values():
            tensor.data = torch.zeros(2)
        return "raw"

    dsd.save(tmp_path / "c", state, codec=codec)
    loaded = dsd.load(tmp_path / "c")["a"]
    assert all(torch.equal(loaded[name], one) for name, one in wanted.items())
