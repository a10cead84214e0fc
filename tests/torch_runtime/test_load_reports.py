"""What `load` says when a checkpoint does not fit the state, or is damaged, or is another one."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vectors.builder import build
from vectors.samples import one

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from exact import assert_same, assert_same_tensor  # noqa: E402
from torch import nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import (  # noqa: E402
    ArgumentError,
    ChecksumError,
    DsdError,
    FormatError,
    MismatchError,
    VersionError,
)

SHOWN = 10


@pytest.fixture
def mismatch(tmp_path) -> Callable[..., MismatchError]:
    """`mismatch(saved, state)` saves, loads into another state, and gives the error."""

    def mismatch(saved: Any, state: Any, **options: Any) -> MismatchError:
        dsd.save(tmp_path / "c", saved)
        before = dsd.snapshot(state)
        with pytest.raises(MismatchError) as caught:
            dsd.load(tmp_path / "c", state, **options)
        assert_same(dsd.snapshot(state), before)
        assert caught.value.code == "state_mismatch"
        return caught.value

    return mismatch


@pytest.fixture
def report_of(tmp_path) -> Callable[..., dsd.LoadReport]:
    """`report_of(saved, state)` saves, loads what fits, and gives the report."""

    def report_of(saved: Any, state: Any, **options: Any) -> dsd.LoadReport:
        dsd.save(tmp_path / "c", saved)
        return dsd.load(tmp_path / "c", state, **{"strict": False, **options}).report

    return report_of


def ones(*names: str) -> dict[str, Any]:
    return {name: torch.ones(2) for name in names}


def zeros(*names: str) -> dict[str, Any]:
    return {name: torch.zeros(2) for name in names}


# Missing, unexpected, mismatched (B146).

CASES: dict[str, tuple[Any, Any, list[str], list[str]]] = {
    "fewer": (ones("a", "b"), zeros("a"), [], ["b"]),
    "more": (ones("a"), zeros("a", "c"), ["c"], []),
    "one for another": (ones("a", "b"), zeros("a", "c"), ["c"], ["b"]),
    "none at all": (ones("a"), zeros("b"), ["b"], ["a"]),
    "in a branch": ({"m": ones("a", "b")}, {"m": zeros("a", "c")}, ["m/c"], ["m/b"]),
    "a branch": ({"m": ones("a")}, {"n": {"x": zeros("a")}}, ["n/x/a"], ["m/a"]),
    "a model": ({"m": nn.Linear(1, 1)}, {"m": nn.Linear(1, 1, bias=False)}, [], ["m/bias"]),
    "a list": ({"l": [torch.ones(2)]}, {}, [], ["l/@0"]),
    "a value": (
        ones("a"),
        {**zeros("a"), "step": 0, "config": {"lr": 1}},
        ["step", "config/lr"],
        [],
    ),
}


@pytest.mark.parametrize(("saved", "state", "missing", "unexpected"), CASES.values(), ids=CASES)
def test_a_strict_load_lists_what_is_missing_and_what_is_unexpected(
    mismatch, saved, state, missing, unexpected
):
    error = mismatch(saved, state)
    assert (error.report.missing, error.report.unexpected) == (missing, unexpected)
    assert error.report.mismatched == []
    for name in (*missing, *unexpected):
        assert f"  {name}" in str(error)


@pytest.mark.parametrize(("saved", "state", "missing", "unexpected"), CASES.values(), ids=CASES)
def test_a_load_that_is_not_strict_lists_the_same(report_of, saved, state, missing, unexpected):
    report = report_of(saved, copy.deepcopy(state))
    assert (report.missing, report.unexpected) == (missing, unexpected)
    assert report


def test_a_load_that_is_not_strict_loads_what_fits(report_of):
    state = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(2)}
    report_of(ones("a", "b", "d"), state)
    assert_same(state, {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.zeros(2)})


def trained(*sizes: int) -> dict[str, Any]:
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, sizes[0])).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_one_report_is_of_the_model_and_of_its_optimizer(mismatch):
    report = mismatch(trained(3, 4), trained(3, 4, 2)).report
    names = ["1.weight", "1.bias"]
    wanted = [*(f"model/{name}" for name in names), *(f"optimizer/state/{name}" for name in names)]
    assert report.missing == wanted
    assert report.unexpected == []


def test_what_an_optimizer_has_too_much_is_unexpected(mismatch):
    report = mismatch(trained(3, 4, 2), trained(3, 4)).report
    assert set(report.unexpected) == {
        *("model/1.weight", "model/1.bias"),
        *("optimizer/state/1.weight", "optimizer/state/1.bias"),
    }
    assert report.missing == []


def test_the_shapes_of_an_optimizers_state_are_compared(mismatch):
    report = mismatch(trained(3, 4), trained(3, 5)).report
    found = {item.name: item for item in report.mismatched}
    assert found["model/0.weight"].what == "shape"
    entry = found["optimizer/state/0.weight/exp_avg"]
    assert entry.what == "shape"
    assert "[4, 3]" in entry.stored
    assert "[5, 3]" in entry.wanted


def test_an_optimizer_can_step_after_its_parameter_did_not_fit(report_of):
    saved, state = trained(3, 4), trained(3, 5)
    state["optimizer"].state.clear()
    report_of(saved, state)
    state["model"](torch.ones(2, 3)).sum().backward()
    state["optimizer"].step()


# What a mismatch says.

MISMATCHES: dict[str, tuple[Any, Any, str, str]] = {
    "shape": (torch.ones(2, 3), torch.ones(3, 2), "shape", r"\[2, 3\] .* \[3, 2\]"),
    "a scalar": (torch.tensor(1.0), torch.ones(1), "shape", r"\[\] .* \[1\]"),
    "none and one": (torch.ones(0), torch.ones(1), "shape", r"\[0\] .* \[1\]"),
    "dims": (torch.ones(2, 1), torch.ones(2), "shape", r"\[2, 1\] .* \[2\]"),
    "dtype": (torch.ones(2), torch.ones(2).half(), "dtype", "float32 .* float16"),
    "int and float": (torch.ones(2).int(), torch.ones(2), "dtype", "int32 .* float32"),
    "a value": (5, torch.ones(2), "kind", "5 .* a tensor"),
    "a string": ("x" * 1000, torch.ones(2), "kind", "xxx.* a tensor"),
    "None": (None, torch.ones(2), "kind", "None .* a tensor"),
    "shorter list": ([torch.ones(2)], [torch.ones(2)] * 2, "kind", "list of 1 .* 2 items"),
    "sparse": (torch.eye(2).to_sparse(), torch.ones(2, 2), "kind", "sparse_coo .* strided"),
    "strided": (torch.ones(2, 2), torch.eye(2).to_sparse(), "kind", "float32.* sparse_coo"),
    "a module": (torch.ones(2), nn.Linear(1, 1), "kind", "module"),
    "array": (np.ones(2), np.ones(3), "array", r"float64 \[2\] .* float64 \[3\]"),
}


@pytest.mark.parametrize(("saved", "live", "what", "words"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_says_what_there_is_and_what_is_wanted(mismatch, saved, live, what, words):
    error = mismatch({"m": {"w": saved}, "x": 1}, {"m": {"w": live}})
    (found,) = error.report.mismatched
    assert (found.name, found.what) == ("m/w", what)
    assert error.report.missing == error.report.unexpected == []
    assert re.search(rf"^  m/w: {what} .*{words}.* wanted$", str(error), re.MULTILINE | re.DOTALL)
    assert len(str(error)) < 1000


DICT = {"b": torch.ones(2)}
DOUBLES = {"a dict": DICT, "a value": 5.0, "a list": [torch.ones(2)], "None": None}
IN_OTHER_WORDS: dict[str, tuple[Any, Any]] = {
    "a tensor for a dict": (torch.ones(2), {"b": torch.ones(2)}),
    "a dict for a tensor": (DICT, torch.ones(2)),
    "a dict for a list": (DICT, [torch.ones(2)]),
    "a list for a dict": ([torch.ones(2)], DICT),
    "a tensor for a list": (torch.ones(2), [torch.ones(2)]),
    "a tensor for a module": (torch.ones(2), nn.Linear(1, 1)),
    "a list for a module": ([torch.ones(2)], nn.Linear(1, 1)),
    "a list for a tensor": ([torch.ones(2)], torch.ones(2)),
    "a dict for an array": (DICT, np.ones(2, np.float32)),
    "a value for an array": (5, np.ones(2, np.int64)),
    **{f"{name} for an array of doubles": (value, np.ones(2)) for name, value in DOUBLES.items()},
}


@pytest.mark.parametrize(("saved", "live"), IN_OTHER_WORDS.values(), ids=IN_OTHER_WORDS)
def test_things_of_other_kinds_are_refused(mismatch, saved, live):
    (found,) = mismatch({"w": saved}, {"w": live}).report.mismatched
    assert found.name == "w"


INTERNAL = (
    "a tensor for a dict",
    "a dict for a tensor",
    "a list for a tensor",
    "a dict for an array",
)


@pytest.mark.parametrize("case", INTERNAL)
def test_a_mismatch_speaks_of_what_people_know(mismatch, case):
    assert not re.search(
        "Stored|TensorEntry|attributes",
        str(mismatch(*({"w": one} for one in IN_OTHER_WORDS[case]))),
    )


@pytest.mark.parametrize("case", ["a tensor for a module", "a list for a module"])
def test_a_mismatch_of_kinds_says_what_was_found(mismatch, case):
    (found,) = mismatch(*({"w": one} for one in IN_OTHER_WORDS[case])).report.mismatched
    assert "something else" not in found.stored


def test_what_ties_two_names_now_and_did_not_then_is_a_mismatch(mismatch):
    tied = nn.Module()
    tied.a = nn.Parameter(torch.ones(2))
    tied.b = tied.a
    error = mismatch({"m": {"a": torch.ones(2), "b": torch.zeros(2)}}, {"m": tied})
    (found,) = error.report.mismatched
    assert (found.name, found.what) == ("m/b", "tie")
    assert "a" in found.wanted


def test_a_scheduler_that_finds_no_state_dict_is_refused_before_anything_is_changed(tmp_path):
    optimizer = torch.optim.SGD([weight := nn.Parameter(torch.zeros(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    dsd.save(tmp_path / "c", {"w": torch.ones(2), "scheduler": 5})
    with pytest.raises(DsdError, match="scheduler"):
        dsd.load(tmp_path / "c", {"w": weight, "scheduler": scheduler})
    assert_same_tensor(weight.detach(), torch.zeros(2))


class Cached(nn.Module):
    """A module with a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", torch.arange(3.0), persistent=False)


def test_what_would_stay_on_meta_is_refused_with_a_hint(tmp_path):
    dsd.save(tmp_path / "c", {"model": Cached()})
    with torch.device("meta"):
        model = Cached()
    with pytest.raises(MismatchError, match="left on the meta device: 1\n  model/cache") as caught:
        dsd.load(tmp_path / "c", {"model": model})
    assert caught.value.report.uninitialized == ["model/cache"]
    assert model.weight.is_meta
    assert "its buffers get their values" in caught.value.hint


def test_what_stays_on_meta_is_reported_where_that_is_allowed(tmp_path):
    dsd.save(tmp_path / "c", {"model": Cached()})
    with torch.device("meta"):
        model = Cached()
    report = dsd.load(tmp_path / "c", {"model": model}, strict=False).report
    assert report
    assert report.uninitialized == ["model/cache"]
    assert_same_tensor(model.weight.detach(), torch.ones(2))


def test_entries_of_an_optimizer_that_were_replaced_are_reported(report_of):
    saved, state = trained(3, 4), trained(3, 4)
    entry = state["optimizer"].state[state["model"][0].weight]
    entry["exp_avg"] = torch.zeros(4, 3, dtype=torch.bfloat16)
    report = report_of(saved, state, strict={"optimizer": False})
    assert [item.name for item in report.replaced] == ["optimizer/state/0.weight/exp_avg"]
    assert "replaced: 1" in str(report)
    assert entry["exp_avg"].dtype == torch.bfloat16
    new = state["optimizer"].state[state["model"][0].weight]["exp_avg"]
    wanted = saved["optimizer"].state[saved["model"][0].weight]["exp_avg"]
    assert_same_tensor(new, wanted)


# Names (B150).


def renamed_layers(name: str, count: int) -> dict[str, Any]:
    return {"model": {f"{name}.{i}.weight": torch.ones(1) for i in range(count)}}


def test_of_five_hundred_names_ten_are_shown_with_the_count(mismatch):
    error = mismatch(renamed_layers("layers", 500), renamed_layers("blocks", 500))
    text = str(error)
    assert "missing in the checkpoint: 500" in text
    assert "unexpected in the checkpoint: 500" in text
    assert text.count("… and 490 more") == 2
    assert len(text.splitlines()) < 30
    assert len(error.report.missing) == len(error.report.unexpected) == 500


@pytest.mark.parametrize("count", [SHOWN - 1, SHOWN, SHOWN + 1])
def test_as_many_names_are_shown_as_fit(mismatch, count):
    text = str(mismatch(ones("a"), {**zeros("a"), **zeros(*(f"w{i}" for i in range(count)))}))
    assert text.count("\n  w") == min(count, SHOWN)
    assert ("more" in text) is (count > SHOWN)


def test_of_many_mismatches_ten_are_shown_with_the_count(mismatch):
    names = [f"w{i}" for i in range(25)]
    text = str(mismatch(ones(*names), {name: torch.zeros(3) for name in names}))
    assert "different: 25" in text
    assert text.count("shape [2] in the checkpoint, [3] wanted") == SHOWN
    assert "… and 15 more" in text


NEAR: dict[str, tuple[str, str]] = {
    "typo": ("encoder.layer.0.weight", "encoder.layer.0.wieght"),
    "prefix": ("module.fc.weight", "fc.weight"),
    "plural": ("layers.0.weight", "layer.0.weight"),
    "underscore": ("self_attn.q_proj.weight", "self_attn.qproj.weight"),
}


@pytest.mark.parametrize(("stored", "wanted"), NEAR.values(), ids=NEAR)
def test_a_name_that_is_missing_comes_with_the_one_that_is_spelled_alike(mismatch, stored, wanted):
    error = mismatch({"m": ones(stored, "other")}, {"m": zeros(wanted, "other")})
    assert f"  m/{wanted} (is it m/{stored}?)" in str(error)
    assert "rename=" in error.hint
    assert error.report.missing == [f"m/{wanted}"]


def test_a_name_that_is_like_no_other_comes_alone(mismatch):
    error = mismatch({"m": ones("zzzzzz")}, {"m": zeros("b")})
    assert "is it" not in str(error)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "data parallel": nn.DataParallel,
    "data parallel inside": lambda model: nn.Sequential(nn.DataParallel(model[0]), *model[1:]),
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_names_in_an_error_are_those_of_the_model_without_its_wrappers(mismatch, wrap):
    layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    error = mismatch(
        {"model": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))}, {"model": wrap(layers)}
    )
    assert error.report.missing == ["model/2.weight", "model/2.bias"]
    assert [item.name for item in error.report.mismatched] == [
        *("model/0.weight", "model/0.bias", "model/1.weight"),
    ]
    assert not re.search("module|_orig_mod", error.message)


def test_another_model_altogether_is_refused_with_all_names(mismatch):
    error = mismatch({"model": nn.TransformerEncoderLayer(8, 2, 16)}, {"model": nn.Linear(8, 8)})
    assert error.report.missing == ["model/weight", "model/bias"]
    assert len(error.report.unexpected) == 12


def test_a_model_that_is_not_in_the_file_is_missing_by_its_key(mismatch):
    error = mismatch({"net": nn.Linear(2, 2)}, {"model": nn.Linear(2, 2)})
    assert error.report.missing == ["model"]
    assert error.report.unexpected == ["net/bias", "net/weight"]


HINTS: dict[str, tuple[Any, Any, str]] = {
    "only dtypes": (torch.ones(2), torch.zeros(2).half(), "dtype="),
    "shapes": (torch.ones(2), torch.zeros(3), "strict=False"),
}


@pytest.mark.parametrize(("saved", "live", "words"), HINTS.values(), ids=HINTS)
def test_the_hint_says_what_can_be_done(mismatch, saved, live, words):
    error = mismatch({"w": saved}, {"w": live})
    assert words in error.hint
    assert str(error).endswith(f"\n\nhint: {error.hint}")


def test_the_hint_for_what_is_unexpected_names_the_ways_out(mismatch):
    error = mismatch({"w": torch.ones(2), "ema": ones("a")}, zeros("w"))
    assert "select=" in error.hint
    assert "strict=False" in error.hint


def test_the_order_of_names_is_that_of_the_state(mismatch):
    names = ["z", "a", "m", "b"]
    assert mismatch(ones("x"), {**zeros("x"), **zeros(*names)}).report.missing == names


# Reports and errors as objects.


def test_a_load_that_fits_has_an_empty_report(report_of):
    report = report_of({"m": nn.Linear(2, 2), "step": 3}, {"m": nn.Linear(2, 2)}, strict=True)
    assert not report
    assert str(report) == "everything matches"
    assert report == dsd.LoadReport()


def test_an_error_of_load_can_be_caught_as_its_base_classes(mismatch):
    error = mismatch(ones("a"), zeros("b"))
    assert isinstance(error, ValueError)
    assert isinstance(error, DsdError)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickled": lambda value: pickle.loads(pickle.dumps(value)),
    "copied": copy.copy,
    "deeply copied": copy.deepcopy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_an_error_survives_the_way_to_another_process(mismatch, copied):
    error = mismatch({**ones("a", "b"), "c": torch.ones(3)}, zeros("a", "x", "c"))
    other = copied(error)
    assert type(other) is MismatchError
    assert (str(other), other.code, other.hint) == (str(error), error.code, error.hint)
    assert other.report == error.report
    assert other.report.mismatched[0].stored == "[3]"


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_what_load_returns_survives_the_way_to_another_process(tmp_path, copied):
    dsd.save(tmp_path / "c", {**ones("a"), "step": 3, "c": torch.ones(2).double()})
    loaded = dsd.load(tmp_path / "c", zeros("a", "c"), dtype=torch.float32)
    other = copied(loaded)
    assert type(other) is dsd.Loaded
    assert other == loaded == {"step": 3}
    assert other.report == loaded.report
    assert [cast.name for cast in other.report.casts] == ["c"]


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_an_error_about_damage_survives_the_way_to_another_process(tmp_path, copied):
    damage(tmp_path / "c")
    with pytest.raises(ChecksumError) as caught:
        dsd.load(tmp_path / "c")
    other = copied(caught.value)
    assert (str(other), other.where, other.entry) == (
        *(str(caught.value), caught.value.where, caught.value.entry),
    )


# Damage (B106).


def state_of(fill: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"v": torch.full((3,), fill), "w": torch.full((1000,), fill)},
        "optimizer": {"m": torch.full((500,), fill)},
    }


def chunk_of(path: Path, name: str) -> tuple[Path, int, int]:
    """The data file of a tensor, and where in it the tensor begins and ends."""
    with dsdformat.open(path) as checkpoint:
        (chunk,) = checkpoint.tensor(name).chunks
    return path / chunk.file, chunk.byte_offset, chunk.byte_offset + chunk.stored_nbytes


def damage(
    path: Path, name: str = "model/w", at: int = 1234, mask: int = 4, **options: Any
) -> None:
    """Save, and flip bits of one byte of a tensor."""
    dsd.save(path, state_of(), **options)
    damage_in(path, name, at, mask)


def damage_in(path: Path, name: str, at: int = 1234, mask: int = 4) -> None:
    file, start, end = chunk_of(path, name)
    data = bytearray(file.read_bytes())
    data[start + at % (end - start)] ^= mask
    file.write_bytes(data)


LOADS: dict[str, Callable[..., Any]] = {
    "new": dsd.load,
    "in place": lambda path, **options: dsd.load(path, state_of(), **options),
    "in place, strided": lambda path, **options: dsd.load(
        path, {"model": {"w": torch.zeros(2000)[::2]}}, select="model/w", **options
    ),
    "cast": lambda path, **options: dsd.load(path, dtype=torch.bfloat16, **options),
    "mapped": lambda path, **options: dsd.load(path, mmap=True, **options),
}
PLACES = {
    "first byte": ("model/w", 0, 1),
    "in the middle": ("model/w", 1234, 0x80),
    "last byte": ("model/w", -1, 0xFF),
    "a small one": ("model/v", 5, 1),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize(("name", "at", "mask"), PLACES.values(), ids=PLACES)
def test_a_flipped_bit_is_found_and_named(tmp_path, load, name, at, mask):
    if name != "model/w" and load is LOADS["in place, strided"]:
        pytest.skip("reads the other tensor")
    damage(tmp_path / "c", name, at, mask)
    file, start, end = chunk_of(tmp_path / "c", name)
    with pytest.raises(ChecksumError) as caught:
        load(tmp_path / "c")
    error = caught.value
    assert (error.code, error.where, error.entry) == ("checksum_mismatch", file.name, name)
    assert f"{name} ({file.name}, bytes {start}..{end})" in error.message
    assert error.hint


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_flipped_bit_is_not_looked_for_without_verification(tmp_path, load):
    damage(tmp_path / "c")
    load(tmp_path / "c", verify=False)


def test_what_is_loaded_without_verification_is_what_the_file_holds(tmp_path):
    damage(tmp_path / "c", at=2, mask=0x80)
    loaded = dsd.load(tmp_path / "c", verify=False)["model"]["w"]
    wanted = torch.ones(1000)
    wanted.view(torch.uint8)[2] ^= 0x80
    assert_same_tensor(loaded, wanted)


@pytest.mark.parametrize("codec", ["zstd", "planes+zstd"])
def test_a_flipped_bit_of_compressed_data_is_found(tmp_path, codec):
    damage(tmp_path / "c", codec=codec)
    with pytest.raises(FormatError, match=r"model/w \(model.safetensors"):
        dsd.load(tmp_path / "c")


def test_a_block_of_zeros_is_found(tmp_path):
    dsd.save(tmp_path / "c", {"w": torch.ones(100_000)})
    file, start, _ = chunk_of(tmp_path / "c", "w")
    data = bytearray(file.read_bytes())
    data[start + 8192 : start + 12_288] = bytes(4096)
    file.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"w \(model.safetensors, bytes"):
        dsd.load(tmp_path / "c")


def test_damage_elsewhere_does_not_keep_a_selection_from_being_loaded(tmp_path):
    damage(tmp_path / "c")
    loaded = dsd.load(tmp_path / "c", select=["optimizer", "model/v"])
    assert_same(loaded["optimizer"], state_of()["optimizer"])


def test_two_tensors_that_were_swapped_in_the_file_are_found(tmp_path):
    dsd.save(tmp_path / "c", {"a": torch.ones(1000), "b": torch.zeros(1000)})
    file, first, end = chunk_of(tmp_path / "c", "a")
    _, second, _ = chunk_of(tmp_path / "c", "b")
    data = bytearray(file.read_bytes())
    size = end - first
    data[first:end], data[second : second + size] = data[second : second + size], data[first:end]
    file.write_bytes(data)
    with pytest.raises(ChecksumError):
        dsd.load(tmp_path / "c")


def test_a_data_file_of_another_save_is_found(tmp_path):
    dsd.save(tmp_path / "old", state_of(1.0))
    dsd.save(tmp_path / "new", state_of(2.0))
    (tmp_path / "new" / "model.safetensors").write_bytes(
        (tmp_path / "old" / "model.safetensors").read_bytes()
    )
    with pytest.raises(ChecksumError, match="model.safetensors"):
        dsd.load(tmp_path / "new")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


BROKEN: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {
    "data file cut": ("model.safetensors", cut, ("file_size_mismatch",)),
    "data file longer": ("model.safetensors", longer, ("file_size_mismatch",)),
    "data file gone": ("optimizer.safetensors", Path.unlink, ("missing_file",)),
    "data file empty": ("model.safetensors", lambda p: p.write_bytes(b""), ("file_size_mismatch",)),
    "manifest cut": ("manifest.dsd", cut, ("truncated",)),
    "manifest longer": ("manifest.dsd", longer, ("trailing_bytes",)),
    "manifest gone": ("manifest.dsd", Path.unlink, ("no_manifest",)),
    "manifest empty": ("manifest.dsd", lambda p: p.write_bytes(b""), ("bad_magic",)),
    "manifest flipped": ("manifest.dsd", flip, ("seal_mismatch", "page_checksum_mismatch")),
    "manifest of text": ("manifest.dsd", lambda p: p.write_text("{}" * 99), ("bad_magic",)),
}


@pytest.mark.parametrize(("label", "break_it", "codes"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named(tmp_path, label, break_it, codes):
    dsd.save(tmp_path / "c", state_of())
    break_it(tmp_path / "c" / label)
    with pytest.raises(FormatError) as caught:
        dsd.load(tmp_path / "c")
    assert caught.value.code in codes
    assert label in str(caught.value) or "manifest" in str(caught.value)


@pytest.mark.parametrize("case", [name for name in BROKEN if name.startswith("manifest")])
def test_a_broken_manifest_changes_nothing(tmp_path, case):
    label, break_it, _ = BROKEN[case]
    dsd.save(tmp_path / "c", state_of())
    break_it(tmp_path / "c" / label)
    state = state_of(0.0)
    with pytest.raises(FormatError):
        dsd.load(tmp_path / "c", state)
    assert_same(state, state_of(0.0))


def test_a_module_can_be_loaded_again_after_a_load_that_found_damage(tmp_path):
    model = nn.Linear(30, 30)
    root = dsd.save(tmp_path / "good", {"model": model})
    dsd.save(tmp_path / "bad", {"model": model})
    damage_in(tmp_path / "bad", "model/weight")
    other = nn.Linear(30, 30)
    weight = other.weight
    with pytest.raises(ChecksumError):
        dsd.load(tmp_path / "bad", {"model": other})
    dsd.load(tmp_path / "good", {"model": other}, digest=root)
    assert other.weight is weight
    assert_same_tensor(weight.detach(), model.weight.detach())


# Files that are gone (B118).


def test_a_file_that_is_gone_is_told_with_its_tensors_though_nothing_in_it_is_wanted(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(3), "v": torch.ones(3)}}
    dsd.save(tmp_path / "c", state)
    (tmp_path / "c" / "optimizer.safetensors").unlink()
    wanted = {"model": {"w": torch.zeros(2)}}
    with pytest.raises(dsdformat.IncompleteError) as caught:
        dsd.load(tmp_path / "c", wanted, strict=False)
    assert (caught.value.code, caught.value.where) == ("missing_file", "optimizer.safetensors")
    text = "optimizer.safetensors is not there, and should have optimizer/m, optimizer/v"
    assert text in str(caught.value)
    assert wanted["model"]["w"].tolist() == [0, 0]
    dsd.load(tmp_path / "c", wanted, select="model")  # what is there is loaded by its name
    assert wanted["model"]["w"].tolist() == [1, 1]


# Versions, lies, and other checkpoints (B116, B135, B136).


@pytest.mark.parametrize("major", [0, 2, 3, 65535])
def test_another_major_version_is_refused_and_both_are_named(tmp_path, major):
    dsd.save(tmp_path / "c", state_of())
    manifest = tmp_path / "c" / "manifest.dsd"
    data = bytearray(manifest.read_bytes())
    data[8:10] = major.to_bytes(2, "little")
    manifest.write_bytes(data)
    state = state_of(0.0)
    with pytest.raises(VersionError, match=rf"made by format {major}\..*this reads 1\.") as caught:
        dsd.load(tmp_path / "c", state)
    assert caught.value.code == "unknown_major"
    assert_same(state, state_of(0.0))


def lie(what: str, value: Any) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        body[what] = value

    return change


def test_a_dtype_that_is_wider_than_the_data_is_refused(tmp_path):
    files = build(one("float32", (9000,)), body=lie("dtypes", ["float64"])).files
    assert_refused(tmp_path / "c", files)


def test_a_dtype_that_is_narrower_than_the_data_is_refused(tmp_path):
    files = build(one("float32", (9000,)), body=lie("dtypes", ["float16"])).files
    assert_refused(tmp_path / "c", files)


def test_a_shape_that_is_larger_than_the_data_is_refused(tmp_path):
    def larger(columns: Any) -> None:
        columns["shapes"][0] = 2**40
        columns["boxes"][1] = 2**40

    assert_refused(tmp_path / "c", build(one("float32", (9000,)), columns=larger).files)


def assert_refused(path: Path, files: dict[str, bytes]) -> None:
    """Neither way of loading takes it, and none allocates what it claims."""
    path.mkdir()
    for label, data in files.items():
        (path / label).write_bytes(data)
    for mmap in (False, True):
        with pytest.raises(DsdError):
            dsd.load(path, mmap=mmap)


def test_a_header_that_disagrees_with_the_manifest_is_refused_before_anything_is_loaded(tmp_path):
    """B135: ours would load the same; every other safetensors reader would not."""
    dsd.save(tmp_path / "c", state_of(1.0))
    path = tmp_path / "c" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"F32"', b'"I32"', 1))
    state = state_of(0.0)
    with pytest.raises(dsdformat.ChecksumError) as caught:
        dsd.load(tmp_path / "c", state)
    assert (caught.value.code, caught.value.where) == ("header_mismatch", "model.safetensors")
    assert_same(state, state_of(0.0))
    with pytest.raises(dsdformat.ChecksumError, match="header of model.safetensors"):
        dsd.load(tmp_path / "c")
    dsd.load(tmp_path / "c", state, verify=False)
    assert_same(state, state_of(1.0))


def test_a_checkpoint_that_was_made_anew_passes_without_a_digest_and_fails_with_it(tmp_path):
    """Digests beside the data find accidents; who rewrites both is found by the root digest."""
    root = dsd.save(tmp_path / "c", state_of(1.0))
    dsd.save(tmp_path / "c", state_of(2.0), overwrite=True)
    assert_same(dsd.load(tmp_path / "c"), state_of(2.0))
    state = state_of(0.0)
    with pytest.raises(ChecksumError, match=rf"expected root digest {root}") as caught:
        dsd.load(tmp_path / "c", state, digest=root)
    assert caught.value.code == "digest_mismatch"
    assert_same(state, state_of(0.0))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_the_digest_counts_whatever_else_is_asked_for(tmp_path, verify, mmap):
    dsd.save(tmp_path / "c", state_of())
    with pytest.raises(ChecksumError):
        dsd.load(tmp_path / "c", digest="0" * 64, verify=verify, mmap=mmap)


def test_the_digest_that_save_returned_is_taken_in_both_cases_of_letters(tmp_path):
    root = dsd.save(tmp_path / "c", state_of())
    assert_same(dsd.load(tmp_path / "c", digest=root.upper()), state_of())
    assert_same(dsd.load(tmp_path / "c", digest=root), state_of())


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "g" * 64, 5, b"0" * 64, b"0" * 32])
def test_a_digest_of_another_form_is_refused(tmp_path, digest):
    dsd.save(tmp_path / "c", state_of())
    with pytest.raises(ArgumentError, match="64 hexadecimal digits"):
        dsd.load(tmp_path / "c", digest=digest)
