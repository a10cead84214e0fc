"""Commands that write, in what they have in common: nothing half-made, nothing lost, bounded."""

from __future__ import annotations

import os
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import dsdformat
import dsdformat.numpy
from dsdformat import TensorSource
from dsdformat.convert import open_any
from dsdformat.convert.own import StoredTensor

COMMANDS = {
    "cp": ["cp", "step-10", "new"],
    "extract": ["extract", "step-10", "new", "--select", "*"],
    "merge": ["merge", "step-10", "more", "new"],
    "rename": ["rename", "step-10", "new", "--map", "step=steps"],
    "cast": ["cast", "step-10", "new", "--dtype", "float16"],
}


@pytest.fixture(autouse=True)
def more(step10):
    """Another checkpoint, `more`, in the current folder."""
    dsdformat.numpy.save("more", {"more": np.ones(3)}, user={"run": "demo"})


@pytest.fixture(params=COMMANDS.values(), ids=COMMANDS)
def command(request):
    return request.param


def hidden():
    return [name for name in os.listdir() if name.startswith(".")]


def test_what_is_written_is_told_and_is_a_good_checkpoint(dsd, command):
    result = dsd(*command)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("new\n  root ")
    assert dsd("verify", "new").code == 0
    assert dsdformat.open("new").root in result.out
    document = dsd(*command, "--json", "--overwrite").json
    assert (document["destination"], document["root"]) == ("new", dsdformat.open("new").root)
    assert document["nbytes"] > 0


# `convert` says what it wrote in its own way, and so is not one of `COMMANDS`.
PROVEN = {**COMMANDS, "convert": ["convert", "step-10", "new"]}


@pytest.mark.parametrize("name", PROVEN)
def test_who_asks_for_a_key_gets_nothing_made_of_what_it_has_not_signed(dsd, name):
    pytest.importorskip("cryptography", reason="signatures need it")
    mine, other = bytes(32), bytes([1]) * 32
    (public,) = {dsdformat.sign(path, mine) for path in ("step-10", "more")}
    stranger = dsdformat.sign("more", other)
    refused = dsd(*PROVEN[name], "--pubkey", stranger)
    assert (refused.code, refused.out, Path("new").exists()) == (1, "", False)
    assert refused.err.startswith("error[not_signed]: ")
    assert dsd(*PROVEN[name], "--pubkey", public).code == 0
    assert dsd("verify", "new").code == 0


@pytest.mark.parametrize("name", [name for name in PROVEN if name != "merge"])
def test_who_asks_for_a_digest_gets_nothing_made_of_another_checkpoint(dsd, name):
    refused = dsd(*PROVEN[name], "--digest", "0" * 64)
    assert (refused.code, Path("new").exists()) == (1, False)
    assert refused.err.startswith("error[digest_mismatch]: ")
    assert dsd(*PROVEN[name], "--digest", dsdformat.open("step-10").root).code == 0


@pytest.mark.parametrize("option", ["--digest", "--pubkey"])
@pytest.mark.parametrize("name", ["convert", "extract"])
def test_what_has_neither_digest_nor_signature_is_not_taken_for_it(dsd, name, option):
    np.savez("a.npz", a=np.ones(1))
    words = [{"step-10": "a.npz"}.get(word, word) for word in PROVEN[name]]
    refused = dsd(*words, option, "0" * 64)
    assert (refused.code, Path("new").exists()) == (2, False)
    assert "hint: save what was loaded as a checkpoint of ours" in refused.err


def test_a_checkpoint_that_is_there_stays_unless_it_is_to_be_replaced(dsd, command):
    dsdformat.numpy.save("new", {"old": 1})
    result = dsd(*command)
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith("error[already_exists]: ")
    assert "--overwrite" in result.err
    assert dsdformat.numpy.load("new") == {"old": 1}
    assert dsd(*command, "--overwrite").code == 0
    assert "old" not in dsdformat.numpy.load("new")


def test_a_folder_of_other_files_is_never_replaced(dsd, command):
    Path("new").mkdir()
    Path("new/thesis.tex").write_text("x")
    assert dsd(*command, "--overwrite").code == 3
    assert os.listdir("new") == ["thesis.tex"]


def test_an_interrupt_ends_with_130_and_leaves_nothing(dsd, command, monkeypatch):
    def interrupt(self, byte_offset, pieces):
        raise KeyboardInterrupt

    monkeypatch.setattr("dsdformat.storage.target.FileSink.write_at", interrupt)
    result = dsd(*command)
    assert (result.code, result.out, result.err) == (130, "", "")
    assert not Path("new").exists()
    assert hidden() == []


def test_damage_of_the_source_is_told_with_its_place_and_nothing_is_made(dsd, command, damage):
    damage("step-10/model.safetensors", -1)
    result = dsd(*command)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error[checksum_mismatch]: ")
    assert "model/norm.weight (model.safetensors, bytes 4144..4148)" in result.err
    assert not Path("new").exists()
    assert hidden() == []


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("cp", "merge")])
def test_a_checkpoint_can_be_rewritten_in_its_own_place(dsd, name):
    arguments = [{"new": "step-10"}.get(one, one) for one in COMMANDS[name]]
    before = dsdformat.numpy.load("step-10")["optimizer"]["state"]["embed.weight"]["exp_avg"]
    assert dsd(*arguments, "--overwrite").code == 0
    assert dsd("verify", "step-10").code == 0
    after = dsdformat.numpy.load("step-10")["optimizer"]["state"]["embed.weight"]["exp_avg"]
    assert (before.dtype, before.tolist()) == (after.dtype, after.tolist())


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "cp"])
def test_a_dry_run_lists_what_would_be_written_and_writes_nothing(dsd, name):
    result = dsd(*COMMANDS[name], "--dry-run")
    assert (result.code, result.err) == (0, "note: nothing was written to new\n")
    assert result.out.startswith("name ")
    assert dsd(*COMMANDS[name], "--dry-run", "--json").json["root"] is None
    assert not Path("new").exists()


@pytest.mark.parametrize("name", ["extract", "rename", "cast"])
def test_chunks_codecs_blocks_user_metadata_and_side_files_are_kept(dsd, name):
    data = np.arange(4096, dtype=np.float32)
    boxes = [(dsdformat.Box((at,), (2048,)), data[at : at + 2048]) for at in (0, 2048)]
    with dsdformat.create("step-10", overwrite=True, block_nbytes=4096, user={"k": "v"}) as writer:
        writer.add_file("config.json", b"{}")
        writer.add({"model": {"w": TensorSource("float32", (4096,), boxes, codec="zstd")}})
        writer.add({"step": 1})
    assert dsd(*COMMANDS[name]).code == 0
    with dsdformat.open("new") as new:
        assert (new.user, new.block_nbytes, dict(new.side_files)) == (
            {"k": "v"},
            4096,
            {"config.json": 2},
        )
        chunks = new.tensor("model/w").chunks
        assert [(chunk.box.offset, chunk.codec) for chunk in chunks] == [
            ((0,), "zstd"),
            ((2048,), "zstd"),
        ]


def test_tensors_are_streamed_in_pieces(dsd):
    with dsdformat.create("large", threads=1) as writer:
        writer.add({"w": TensorSource.of("float32", (12, 1 << 20), np.ones((12, 1 << 20), "f4"))})
    tracemalloc.start()
    assert dsd("cast", "large", "new", "--dtype", "bfloat16").code == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 44 * 2**20  # of 48 MiB and 24 MiB
    assert dsdformat.numpy.load("new")["w"].sum(dtype="f8") == 12 << 20


def test_transformed_trees_compose_without_a_file_in_between():
    from dsdformat.convert import cast, extract, merge, rename, write

    with open_any("step-10") as one, open_any("more") as two:
        tree = extract(one.tree, "model")
        tree = rename(tree, {"model/norm.weight": "model/last.weight"})
        tree = cast(merge([tree, two.tree]), "float64").tree
        write(tree, "new")
        assert isinstance(one.tensor("model/norm.weight"), StoredTensor)
    state = dsdformat.numpy.load("new")
    assert state["model"]["last.weight"].tolist() == [1, -2]
    assert state["model"]["embed.weight"].dtype == np.float64
    assert state["model"]["head.weight"] is state["model"]["embed.weight"]
    assert state["more"].tolist() == [1, 1, 1]


INTERRUPTED = """
import os, signal, sys
from dsdformat.cli.main import main
from dsdformat.storage.target import FileSink

def write_at(self, byte_offset, pieces, write=FileSink.write_at):
    os.kill(os.getpid(), signal.SIGINT)
    write(self, byte_offset, pieces)

FileSink.write_at = write_at
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_ends_a_process_with_130_and_leaves_nothing(run_python):
    here = Path.cwd()
    done = run_python(INTERRUPTED, "cast", here / "step-10", here / "new", "--dtype", "float16")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert sorted(os.listdir()) == ["more", "step-10"]


@pytest.mark.parametrize(("name", "doing"), [("cp", "copying"), ("cast", "casting")])
def test_a_bar_is_shown_on_a_terminal_and_wiped(run_in_terminal, name, doing):
    here = Path.cwd()
    places = {name: str(here / name) for name in ("step-10", "new")}
    shown = run_in_terminal(*(places.get(word, word) for word in COMMANDS[name]))
    assert f"\x1b[2K{doing} " in shown
    bar, _, printed = re.sub(r"\x1b\[[0-9;?]*m", "", shown).rpartition("\x1b[2K")
    assert "━━━" in bar
    assert "━" not in printed
    assert (here / "new").exists()
