"""`dsd convert`: what it makes, what it says, and what it leaves when it is stopped."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dsdformat.numpy
from dsdformat.convert import Finding, copying, open_any

MIB = 2**20


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_section_becomes_a_folder_of_hugging_face(dsd, step10, tmp_path):
    done = dsd("convert", step10, "out", "--to", "huggingface", "--select", "model")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "out: a Hugging Face folder of safetensors files"
    assert lines[1:3] == ["  from     a dsdformat checkpoint", "  tensors  2"]
    assert re.fullmatch(r"  size     52 B in (\d+ ms|\d+\.\d s, [\d.]+ [KM]?i?B/s)", lines[3])
    assert lines[4] == "  files    model.safetensors"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == {"embed.weight", "norm.weight"}
    assert np.array_equal(found["embed.weight"], np.arange(12, dtype=np.float32).reshape(4, 3) / 8)


def test_all_options_of_the_kind_are_taken(dsd, step10, tmp_path):
    (tmp_path / "hub").mkdir()
    state = {f"w{n}": np.full(500, n, np.float32) for n in range(4)}
    save_file(state, tmp_path / "hub" / "model.safetensors")
    (tmp_path / "hub" / "config.json").write_text("{}")
    out = dsd("convert", "hub", "a", "--with-side-files", "--codec", "zstd", "--verify")
    assert out.code == 0
    assert "  root     " in out.out
    options = ["--max-shard-size", "5KB", "--ties", "duplicate", "--with-side-files"]
    assert dsd("convert", "a", "b", "--to", "huggingface", *options).code == 0
    assert names(tmp_path / "b") == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert dsd("convert", "b", "c.npz").code == 0
    assert np.array_equal(np.load("c.npz")["w3"], state["w3"])


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["--to", "huggingface"], "unsupported_value", "--select model"),
        (["--to", "safetensors", "--select", "optimizer/*"], "unsupported_value", "--drop-values"),
        (["--to", "keras"], "bad_argument", "choose one of dsd, safetensors, huggingface"),
        (["--ties", "drop"], "bad_argument", "it has codec"),
        (["--select", "modle"], "entry_not_found", "did you mean"),
        (["--to", "safetensors", "--with-side-files"], "bad_argument", "--to huggingface"),
    ],
)
def test_refusals_say_which_options_would_do(dsd, step10, tmp_path, arguments, code, hint):
    done = dsd("convert", step10, "out", *arguments)
    assert done.code == 2
    assert done.out == ""
    assert f"error[{code}]" in done.err
    assert hint in done.err
    assert names(tmp_path) == {step10}


def test_what_is_there_is_replaced_only_if_asked(dsd, step10, tmp_path):
    (tmp_path / "b.npz").write_text("mine")
    select = ["--select", "optimizer/state/embed.weight"]
    done = dsd("convert", step10, "b.npz", *select)
    assert done.code == 3
    assert "hint: pass --overwrite to replace it" in done.err
    assert (tmp_path / "b.npz").read_text() == "mine"
    assert dsd("convert", step10, "b.npz", *select, "--overwrite").code == 0
    assert set(np.load("b.npz").files) == {"exp_avg"}


def test_a_damaged_source_ends_with_one_and_nothing_is_left(dsd, step10, tmp_path, damage):
    damage(Path(step10) / "model.safetensors", -1)
    done = dsd("convert", step10, "out")
    assert done.code == 1
    assert "error[checksum_mismatch]" in done.err
    assert names(tmp_path) == {step10}


def test_what_is_left_out_is_said(dsd, step10):
    options = ["--select", "optimizer/state/*", "--select", "step", "--drop-values"]
    done = dsd("convert", step10, "out", *options)
    assert "  left out  step\n" in done.out


def test_json_tells_the_same(dsd, step10):
    done = dsd("convert", step10, "out", "--json")
    document = done.json
    assert document["source"] == step10
    assert document["destination"] == "out"
    assert (document["kind"], document["to"]) == ("a dsdformat checkpoint", "dsd")
    assert (document["tensors"], document["nbytes"]) == (4, 100)
    assert "manifest.dsd" in document["files"]
    with dsdformat.open("out") as checkpoint:
        assert document["root"] == checkpoint.root
    text = dsd("convert", "--help").out
    assert {key for key in document if not re.search(rf"\b{key}\b", text)} == set()
    assert dsd("convert", step10, "out", "--json").json["error"]["code"] == "already_exists"


def test_findings_have_places(dsd, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="makes the file")
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(1), "odd": Finding((), "x")}, "a.pt")
    assert "error[unknown_global]" in dsd("convert", "a.pt", "b").err
    done = dsd("convert", "a.pt", "b", "--unknown", "drop")
    assert done.code == 0
    assert done.err.startswith("note: 1 thing not kept as in the source: $.odd: dsdformat.convert")
    finding = dsd("convert", "a.pt", "c", "--unknown", "drop", "--json").json["findings"][0]
    assert finding["path"] == "$.odd"
    assert finding["name"] == "dsdformat.convert.settling.Finding"


def test_an_interruption_leaves_what_was_there(dsd, step10, tmp_path, monkeypatch):
    dsd("convert", step10, "out", "--to", "huggingface", "--select", "model")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copying, "_copy_piece", interrupted)
    options = ["--to", "huggingface", "--select", "model", "--overwrite"]
    assert dsd("convert", step10, "out", *options).code == 130
    assert dsd("convert", step10, "new.safetensors", "--select", "model").code == 130
    assert names(tmp_path) == {step10, "out"}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_progress_is_shown_in_a_terminal_alone(run_in_terminal, dsd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dsdformat.numpy.save("a", {"w": np.zeros(24 * MIB, np.uint8)})
    shown = run_in_terminal("convert", tmp_path / "a", tmp_path / "b.safetensors", width=100)
    assert "converting" in shown
    assert "MiB" in shown
    assert "b.safetensors: a safetensors file" in shown
    done = dsd("convert", "a", "c.safetensors")
    assert (done.code, done.err) == (0, "")
    with open_any("c.safetensors") as opened:
        assert [name for name, _ in opened] == ["w"]


def test_optimizers_are_named_and_values_are_allowed_by_options(dsd, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="makes the file")
    monkeypatch.chdir(tmp_path)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    torch.save({"optimizer": optimizer.state_dict(), "a": {"b"}}, "a.pt")
    done = dsd("convert", "a.pt", "b")
    assert done.code == 0
    assert (
        "the numbers of an optimizer (there is no model in the file; give their names)" in done.err
    )
    Path("names.json").write_text('["w"]')
    done = dsd("convert", "a.pt", "c", "--names", "names.json")
    assert (done.code, done.err) == (0, "")
    with open_any("c") as opened:
        assert list(opened.tree["optimizer"]["param_groups"]) == ["w"]
    torch.save({"a": frozenset([1])}, "d.pt")
    assert "hint: pass --no-weights-only to write" in dsd("convert", "d.pt", "e.pt").err
    assert dsd("convert", "d.pt", "e.pt", "--no-weights-only").code == 0
    assert dsd("convert", "c", "f", "--to", "dcp", "--max-shard-size", "1MB").code == 0
    assert names(Path("f")) == {".metadata", "__0_0.distcp"}
