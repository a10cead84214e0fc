"""Tensors that are plain at first sight take a short way: it gives what the long one gives."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat.torch import place_modules, placing, sources  # noqa: E402
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
    monkeypatch.setattr(placing, "plain_addresses", lambda _: None)
    assert outcome(tmp_path / "c", {"model": Mixed(2.0, other=other)}, **options) == short


def entry(kind: str, fill: int, base: Any) -> Any:
    """A tensor of some kind; those of a base lie in memory that they share."""
    if kind in ("first", "again", "shaped", "rest"):
        part = base[8:] if kind == "rest" else base[:8]
        return part.view(2, 4) if kind == "shaped" else part
    if kind == "on meta":
        return torch.empty(3, device="meta")
    made = torch.full((2, 3), fill % 100)
    forms = {
        "turned": lambda: made.float().t(),
        "stepped": lambda: torch.full((9,), float(fill))[::2],
        "scalar": lambda: torch.tensor(float(fill)),
        "empty": lambda: torch.empty(0, 3),
        "inference": lambda: _in_inference(fill),
        "float8": lambda: made.float().to(torch.float8_e5m2),
    }
    return forms[kind]() if kind in forms else made.to(getattr(torch, kind))


def _in_inference(fill: int) -> Any:
    with torch.inference_mode():
        return torch.full((3,), float(fill))


KINDS = [
    *("float32", "float32", "bfloat16", "bool", "int64", "complex64", "float8", "float16"),
    *("first", "again", "shaped", "rest", "turned", "stepped", "scalar", "empty", "inference"),
]


def module_of(kinds: list[tuple[str, str, bool]], fill: int) -> nn.Module:
    """A module of submodules, with a parameter, a buffer or a hidden buffer of each kind."""
    base, parts, last = torch.full((20,), float(fill)), [], None
    for number, (kind, place, tied) in enumerate(kinds):
        part = nn.Module()
        tensor = last if tied and last is not None else entry(kind, fill + number, base)
        last = tensor
        if place == "parameter":
            grad = tensor.is_floating_point() and not tensor.is_inference()
            kept = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, grad)
            part.weight = kept
            last = kept
        else:
            part.register_buffer("buffer", tensor, persistent=place == "buffer")
        parts.append(part)
    return nn.ModuleList(parts)


def bits_of(module: nn.Module) -> dict[str, Any]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: (str(t.dtype), t.is_meta or t.tolist()) for name, t in named}


SPEC = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from(["parameter", "parameter", "buffer", "hidden"]),
    st.sampled_from([False, False, False, False, True]),
)
SPECS = st.lists(SPEC, max_size=8) | st.lists(SPEC, min_size=20, max_size=70)


@settings(max_examples=60, deadline=None)
@given(SPECS, st.data())
def test_any_module_is_loaded_the_same_by_either_way(specs, data):
    changed = list(specs)
    for at in data.draw(st.lists(st.integers(0, max(0, len(specs) - 1)), max_size=2)):
        if at < len(specs):
            changed[at] = (data.draw(st.sampled_from([*KINDS, "on meta"])), *specs[at][1:])
    options = data.draw(st.sampled_from([{}, {"strict": False}, {"verify": False}]))
    most = data.draw(st.sampled_from([3, 1024]))  # of those that are looked at together
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        dsd.save(path, {"model": module_of(specs, 1)})
        found = []
        for addresses in (placing.plain_addresses, lambda _: None):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(placing, "plain_addresses", addresses)
                patch.setattr(place_modules, "_RUN_MAX", most)
                module = module_of(changed, 70)
                try:
                    versions = [
                        one._version for one in module.parameters() if not one.is_inference()
                    ]
                    said = str(dsd.load(path, {"model": module}, **options).report)
                    news = [one._version for one in module.parameters() if not one.is_inference()]
                    said += str([new - old for new, old in zip(news, versions, strict=True)])
                except dsdformat.DsdError as error:
                    said = f"{error.code} {error} {getattr(error, 'report', None)}"
                found.append((said, bits_of(module)))
        assert found[0] == found[1]


def test_tensors_between_others_are_planned_in_runs(tmp_path, monkeypatch):
    kinds = ["float32"] * 300
    kinds[7] = kinds[130] = kinds[131] = kinds[299] = "turned"
    specs = [(kind, "parameter", number == 200) for number, kind in enumerate(kinds)]
    dsd.save(tmp_path / "c", {"model": module_of(specs, 1)})
    counts = []
    kept = placing.Plan.place_plain

    def place_plain(self, stored, live, name):
        done = kept(self, stored, live, name)
        counts.append(len(live) if done else 0)
        return done

    monkeypatch.setattr(placing.Plan, "place_plain", place_plain)
    module = module_of(specs, 70)
    dsd.load(tmp_path / "c", {"model": module})
    assert bits_of(module) == bits_of(module_of(specs, 1))
    assert sum(counts) > 150


def test_the_memory_of_plain_tensors_is_known_to_those_that_come_later(tmp_path):
    """Two modules, and a tensor, over one memory: each says that it gets other data."""
    base = [torch.zeros(4) for _ in range(40)]
    one = nn.ParameterList(nn.Parameter(tensor) for tensor in base)
    two = nn.ParameterList(nn.Parameter(tensor) for tensor in base)
    state = {"a": one, "b": two, "c": base[3]}
    values = {"a": 1.0, "b": 1.0, "c": 1.0}
    stored = {
        "a": nn.ParameterList(torch.full((4,), values["a"] + n) for n in range(40)),
        "b": nn.ParameterList(torch.full((4,), values["b"] + n) for n in range(40)),
        "c": torch.full((4,), 4.0),
    }
    dsd.save(tmp_path / "good", stored)
    dsd.load(tmp_path / "good", state)
    assert [tensor[0].item() for tensor in base] == [1.0 + n for n in range(40)]
    stored["b"][5] = torch.full((4,), 9.0)
    stored["c"] = torch.full((4,), 8.0)
    dsd.save(tmp_path / "bad", stored)
    with pytest.raises(dsdformat.MismatchError) as caught:
        dsd.load(tmp_path / "bad", state)
    found = [(one.name, one.what, one.stored) for one in caught.value.report.mismatched]
    assert found == [
        ("b/5", "tie", "other data than a/5"),
        ("c", "tie", "other data than a/3"),
    ]


def test_plain_tensors_know_that_they_were_changed(tmp_path):
    dsd.save(tmp_path / "c", {"model": module_of([("float32", "parameter", False)] * 20, 1)})
    module = module_of([("float32", "parameter", False)] * 20, 5)
    weight = module[3].weight
    product = (weight * weight).sum()
    dsd.load(tmp_path / "c", {"model": module})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


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
