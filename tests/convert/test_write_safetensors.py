"""What `convert` writes as safetensors, one file or a Hugging Face folder: exact, or refused."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from exactly import saved
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from samples import KINDS, trained, written

import dsdformat
import dsdformat.torch as dsd
from dsdformat.boxes import flat_boxes
from dsdformat.convert import Kind, convert, copying, find_kind, open_any
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import MIB
from dsdformat.modelfiles import TIES_KEY, FileTensor, by_use, parse_size, plan_files
from dsdformat.storage.local import LocalStorage

TORCH = [name for name in DTYPES if hasattr(torch, name)]
LACKING = {"complex32", "complex128"} | {n for n in TORCH if n.startswith(("int", "uint"))} - {
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def model(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"emb.weight": torch.randn(9, 4), "b": torch.randn(3).bfloat16(), **more}


def same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert raw(found[name]) == raw(tensor)


@pytest.mark.parametrize("dtype", sorted(set(TORCH) - LACKING))
def test_the_safetensors_library_reads_each_dtype_bit_for_bit(tmp_path, dtype):
    width = DTYPES[dtype].itemsize
    scalar = (1,) if dtype == "float4_e2m1fn_x2" else ()  # two to a byte
    shapes = {"matrix": (3, 5), "scalar": scalar, "empty": (0, 2), "long": (4096,)}
    state = {}
    for name, shape in shapes.items():
        count = int(np.prod(shape)) * width
        data = bytes(random.Random(name).choices((0, 1), k=count))
        flat = torch.frombuffer(bytearray(data or b"\0" * width), dtype=getattr(torch, dtype))
        state[name] = flat[: count // width].reshape(shape)
    dsd.save(tmp_path / "a", state)
    done = convert(tmp_path / "a", tmp_path / "b.safetensors")
    assert (done.to, done.tensors, done.files) == ("safetensors", 4, ("b.safetensors",))
    same(tmp_path / "b.safetensors", state)


@pytest.mark.parametrize("dtype", sorted(LACKING & set(TORCH)))
def test_a_dtype_that_safetensors_lacks_is_refused_with_the_name_of_the_tensor(tmp_path, dtype):
    source = dsdformat.TensorSource.of(dtype, (2,), bytes(2 * DTYPES[dtype].itemsize))
    with dsdformat.create(tmp_path / "a") as writer:
        writer.add({"w": source, "fine": source.of("int8", (1,), b"\1")})
    with pytest.raises(
        dsdformat.UnsupportedValueError, match=f"no type for {dtype}: w\n"
    ) as caught:
        convert(tmp_path / "a", tmp_path / "out" / "b.safetensors")
    assert caught.value.code == "unsupported_dtype"
    assert not (tmp_path / "out").exists()


def test_data_begin_at_a_page_and_large_tensors_lie_at_pages(tmp_path):
    state = {"a": torch.zeros(3), "b": torch.ones(2048), "c": torch.zeros(1), "d": torch.ones(1024)}
    dsd.save(tmp_path / "a", state)
    convert(tmp_path / "a", tmp_path / "b.safetensors")
    data = (tmp_path / "b.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert (8 + size) % 4096 == 0
    assert header["b"]["data_offsets"] == [0, 8192]
    assert header["d"]["data_offsets"] == [8192, 12288]
    assert header["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Kind.DSD])
def test_each_kind_becomes_safetensors_and_ours(tmp_path, kind):
    path = KINDS[kind](tmp_path / "source")
    assert convert(path, tmp_path / "a.safetensors").kind is kind
    same(tmp_path / "a.safetensors", {"w": torch.ones(2)})
    done = convert(path, tmp_path / "b")
    assert (done.to, find_kind(tmp_path / "b")) == ("dsd", Kind.DSD)
    assert torch.equal(torch.as_tensor(dsd.load(tmp_path / "b")["w"]), torch.ones(2))
    with dsdformat.open(tmp_path / "b") as checkpoint:
        assert checkpoint.root == done.root


def test_what_does_not_lie_by_rows_is_copied_exactly(tmp_path):
    """Transposed and sliced tensors of a torch file, and pieces of columns of a checkpoint."""
    table = torch.arange(3000 * 700, dtype=torch.int32).reshape(3000, 700)
    saved({"t": table.t(), "cut": table[5:2000:3, 100:], "view": table[1:3]}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    expected = {"t": table.t(), "cut": table[5:2000:3, 100:], "view": table[1:3]}
    same(tmp_path / "a.safetensors", expected)
    writer = dsdformat.create(tmp_path / "b", world_size=2)
    other = dsdformat.Writer.join(writer.staging, rank=1, world_size=2)
    for one, first, count in ((writer, 0, 333), (other, 333, 367)):
        box = dsdformat.Box((0, first), (3000, count))
        data = table[:, first : first + count].contiguous().numpy()
        one.add({"w": dsdformat.TensorSource("int32", (3000, 700), [(box, data)])})
    writer.commit([other.finish()])
    convert(tmp_path / "b", tmp_path / "b.safetensors")
    same(tmp_path / "b.safetensors", {"w": table})


# Folders


def test_a_folder_of_one_file_has_no_index_and_one_of_several_has(tmp_path):
    state = {f"layer.{n}.weight": torch.full((100,), float(n)) for n in range(5)}
    state["big"] = torch.ones(1000)
    dsd.save(tmp_path / "a", state)
    one = convert(tmp_path / "a", tmp_path / "one", to="huggingface")
    assert one.files == ("model.safetensors",)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    done = convert(tmp_path / "a", tmp_path / "many", to="huggingface", max_shard_bytes="1KB")
    names = [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert list(done.files) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_size": 6000}
    found = {}
    for name in names:
        part = load_file(tmp_path / "many" / name)
        assert {index["weight_map"][key] for key in part} == {name}
        found |= part
    assert set(index["weight_map"]) == set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("seed", range(20))
def test_files_are_those_that_huggingface_hub_would_choose(seed):
    rng = random.Random(seed)
    sizes = {f"layer{n}.weight": rng.choice((1, 5, 40, 99, 300)) for n in range(rng.randint(1, 40))}
    most = rng.choice((1, 50, 100, 1000))
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=most)
    planned = plan_files([FileTensor(n, "uint8", (size,)) for n, size in sizes.items()], {}, most)
    ours = {file.label: set(file.places) for file in planned}
    assert ours == {name: set(keys) for name, keys in split.filename_to_tensors.items()}


def test_a_folder_comes_back_as_it_was_through_a_checkpoint_of_ours(tmp_path):
    (tmp_path / "hub").mkdir()
    state = model(c=torch.arange(7))
    save_file(state, tmp_path / "hub" / "model.safetensors", {"format": "pt", "who": "me"})
    convert(tmp_path / "hub", tmp_path / "a")
    for most in (10**6, 60):
        out = tmp_path / f"out{most}"
        convert(tmp_path / "a", out, to="huggingface", max_shard_bytes=most)
        with open_any(out) as opened:
            assert opened.metadata == {"format": "pt", "who": "me"}
            assert {name: bytes(one.read()) for name, one in opened} == {
                name: raw(one) for name, one in state.items()
            }


# Ties


def tied(tmp_path: Path) -> Path:
    weight = torch.randn(5, 3)
    dsd.save(tmp_path / "a", {"emb": weight, "more": torch.ones(2), "head": weight, "last": weight})
    return tmp_path / "a"


@pytest.mark.parametrize("most", [10**6, 60])
def test_a_tied_tensor_is_written_once_and_tied_again_by_the_record(tmp_path, most):
    out = tmp_path / "out"
    convert(tied(tmp_path), out, to="huggingface", max_shard_bytes=most)
    names = {name for path in out.glob("*.safetensors") for name in load_file(path)}
    assert names == {"emb", "more"}
    assert convert(out, tmp_path / "back", to="dsd").tensors == 4
    back = dsd.load(tmp_path / "back")
    assert back["emb"].data_ptr() == back["head"].data_ptr() == back["last"].data_ptr()
    assert torch.equal(back["emb"], dsd.load(tmp_path / "a")["emb"])
    with open_any(out) as opened:
        assert TIES_KEY not in opened.metadata


def test_a_tied_tensor_is_written_under_each_name_if_asked(tmp_path):
    convert(tied(tmp_path), tmp_path / "b.safetensors", ties="duplicate")
    state = dsd.load(tmp_path / "a")
    same(tmp_path / "b.safetensors", state)
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["lm_head.weight", "model.embed_tokens.weight"], "model.embed_tokens.weight"),
        (["lm_head.weight", "transformer.wte.weight"], "transformer.wte.weight"),
        (["decoder.embed_tokens.weight", "lm_head.weight", "shared.weight"], "shared.weight"),
        (["cls.predictions.bias", "cls.predictions.decoder.bias"], "cls.predictions.bias"),
        (["b", "a"], "b"),
    ],
)
def test_of_tied_names_the_one_that_loaders_look_for_is_written(names, kept):
    assert by_use(names)[0] == kept
    assert sorted(by_use(names)) == sorted(names)


def test_a_record_of_ties_that_does_not_fit_means_nothing(tmp_path):
    record = {"head": "gone", "emb": "other", "new": "emb"}
    for text in (json.dumps(record), "[]", "{", '{"a": 1}', "null"):
        save_file(
            {"emb": torch.ones(1), "other": torch.zeros(1)}, "a.safetensors", {TIES_KEY: text}
        )
        with open_any("a.safetensors") as opened:
            names = [name for name, _ in opened]
            assert sorted(names) == (
                ["emb", "new", "other"] if text.startswith('{"h') else ["emb", "other"]
            )
            assert len(opened) == 2


# What cannot be held


@pytest.mark.parametrize("to", ["safetensors", "huggingface"])
def test_what_is_no_tensor_is_refused_with_its_place_before_anything_is_written(tmp_path, to):
    dsd.save(tmp_path / "a", {"model": model(), "step": 3, "note": "x"})
    with pytest.raises(dsdformat.UnsupportedValueError) as caught:
        convert(tmp_path / "a", tmp_path / "out", to=to)
    assert caught.value.path_in_tree == "$.model"
    assert "$.model: a section of 2, $.note: 'x', $.step: 3" in caught.value.message
    assert caught.value.hint == "choose one section, as with select='model'"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_values_are_left_out_if_asked_and_told(tmp_path):
    dsd.save(tmp_path / "a", {**model(), "step": 3, "extra": {"x": [1, 2], "y": ()}})
    with pytest.raises(dsdformat.UnsupportedValueError) as caught:
        convert(tmp_path / "a", tmp_path / "b.safetensors")
    assert caught.value.message.endswith("not $.extra: a section of 2, $.step: 3")
    done = convert(tmp_path / "a", tmp_path / "b.safetensors", drop_values=True)
    assert done.left_out == ("extra/x/@0", "extra/x/@1", "extra/y", "step")
    same(tmp_path / "b.safetensors", model())


@pytest.mark.parametrize("state", [{1: torch.ones(1)}, {"w": [torch.ones(1)]}, {}])
def test_only_a_flat_dict_of_names_is_held(tmp_path, state):
    saved(state, tmp_path / "a.pt")
    if state:
        with pytest.raises(dsdformat.UnsupportedValueError):
            convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    else:
        assert convert(tmp_path / "a.pt", tmp_path / "b.safetensors").tensors == 0
        assert load_file(tmp_path / "b.safetensors") == {}


def test_a_name_that_the_header_needs_for_itself_is_refused(tmp_path):
    dsd.save(tmp_path / "a", {"__metadata__": torch.ones(1)})
    with pytest.raises(dsdformat.UnsupportedValueError, match="called __metadata__"):
        convert(tmp_path / "a", tmp_path / "b.safetensors")


def test_names_of_any_other_kind_are_kept(tmp_path):
    names = ["", "a/b", "x@1", "%41", "é\U0001f600", 'quote"\\', "nul\0", "n" * 70_000, "@0", "/"]
    state = {name: torch.tensor([float(n)]) for n, name in enumerate(names)}
    dsd.save(tmp_path / "a", state)
    convert(tmp_path / "a", tmp_path / "b.safetensors")
    same(tmp_path / "b.safetensors", state)
    convert(tmp_path / "b.safetensors", tmp_path / "c")
    assert set(dsd.load(tmp_path / "c")) == set(names)


# Choosing


def general(tmp_path: Path) -> Path:
    saved(trained(), tmp_path / "general.pt")
    return tmp_path / "general.pt"


def test_the_branch_that_is_chosen_becomes_the_root(tmp_path):
    expected = trained()["model"]
    for number, select in enumerate(("model", "model/", "model/*", ["model/0.*", "model/[12].*"])):
        convert(general(tmp_path), tmp_path / f"{number}.safetensors", select=select)
        same(tmp_path / f"{number}.safetensors", expected)
    convert(tmp_path / "general.pt", tmp_path / "one.safetensors", select="model/0.weight")
    same(tmp_path / "one.safetensors", {"0.weight": expected["0.weight"]})


def test_branches_with_nothing_in_common_stay_where_they_are(tmp_path):
    convert(general(tmp_path), tmp_path / "a", select=["model/0.*", "epoch", "scheduler"])
    state = dsd.load(tmp_path / "a")
    assert list(state["model"]) == ["0.weight", "0.bias"]
    assert type(state["model"]) is OrderedDict
    assert state["epoch"] == 3
    assert state["scheduler"] == dsd.load(tmp_path / "a")["scheduler"]
    assert set(state) == {"model", "epoch", "scheduler"}


def test_a_glob_that_matches_nothing_is_told_with_names_alike(tmp_path):
    with pytest.raises(dsdformat.EntryNotFoundError, match="modle") as caught:
        convert(general(tmp_path), tmp_path / "a", select="modle/0.weight")
    assert "model/0.weight" in caught.value.close_matches


def test_a_part_of_a_list_is_not_chosen(tmp_path):
    dsd.save(tmp_path / "a", {"list": [torch.ones(1), 5], "w": torch.ones(2)})
    for options in ({"select": "list/@0"}, {"drop_values": True}):
        with pytest.raises(
            dsdformat.UnsupportedValueError, match=r"\$.list\[1\] would be left out"
        ):
            convert(tmp_path / "a", tmp_path / "b", **options)
    convert(tmp_path / "a", tmp_path / "b", select="list")
    assert dsd.load(tmp_path / "b")["value"][1] == 5


# Side files


def hub(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    save_file(model(), folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "merges.txt", "LICENSE", "chat_template.jinja"):
        (folder / name).write_text(name * 3)
    for name in ("modeling.py", ".hidden.json", "x.bin", "old.index.json"):
        (folder / name).write_text("no")
    (folder / "sub.json").mkdir()
    return folder


SIDES = {"config.json", "tokenizer.json", "merges.txt", "LICENSE", "chat_template.jinja"}


def test_files_beside_the_model_are_carried_along_through_ours_and_back(tmp_path):
    convert(hub(tmp_path), tmp_path / "a", with_side_files=True)
    with dsdformat.open(tmp_path / "a") as checkpoint:
        assert set(checkpoint.side_files) == SIDES
    done = convert(tmp_path / "a", tmp_path / "b", to="huggingface", with_side_files=True)
    assert set(done.files) == {"model.safetensors", *SIDES}
    for name in SIDES:
        assert (tmp_path / "b" / name).read_text() == name * 3
    convert(tmp_path / "a", tmp_path / "c", to="huggingface")
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["model.safetensors"]


def test_files_beside_one_file_are_its_side_files(tmp_path):
    source = hub(tmp_path) / "model.safetensors"
    done = convert(source, tmp_path / "b", to="huggingface", with_side_files=True)
    assert set(done.files) == {"model.safetensors", *SIDES}


def test_a_link_out_of_the_folder_is_no_side_file(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.json").write_text("secret")
    folder = hub(tmp_path)
    (folder / "extra.json").symlink_to(tmp_path / "secret" / "key.json")
    with pytest.raises(dsdformat.ConvertError) as caught:
        convert(folder, tmp_path / "b", to="huggingface", with_side_files=True)
    assert caught.value.code == "foreign_path"
    assert not (tmp_path / "b").exists()
    convert(folder, tmp_path / "b", to="huggingface")


def test_links_in_a_cache_of_models_are_followed(tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    save_file(model(), blobs / "1")
    (blobs / "2").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    (snapshot / "config.json").symlink_to("../../blobs/2")
    convert(snapshot, tmp_path / "b", to="huggingface", with_side_files=True)
    assert (tmp_path / "b" / "config.json").read_text() == "{}"
    assert not (tmp_path / "b" / "config.json").is_symlink()


def test_a_side_file_that_was_changed_is_told(tmp_path):
    convert(hub(tmp_path), tmp_path / "a", with_side_files=True)
    (tmp_path / "a" / "LICENSE").write_text("changed by a third party"[:21])
    with pytest.raises(dsdformat.ChecksumError) as caught:
        convert(tmp_path / "a", tmp_path / "b", to="huggingface", with_side_files=True)
    assert caught.value.code == "side_checksum_mismatch"


def test_one_file_has_no_room_for_others(tmp_path):
    with pytest.raises(dsdformat.DsdError, match="no room"):
        convert(hub(tmp_path), tmp_path / "b.safetensors", with_side_files=True)


# Atomic


@pytest.mark.parametrize("to", ["safetensors", "huggingface", "dsd"])
def test_what_is_there_is_replaced_only_if_asked(tmp_path, to):
    dsd.save(tmp_path / "a", model())
    dsd.save(tmp_path / "b", {"w": torch.ones(1)})
    convert(tmp_path / "a", tmp_path / "out", to=to)
    with pytest.raises(dsdformat.StorageError) as caught:
        convert(tmp_path / "b", tmp_path / "out", to=to)
    assert caught.value.code == "already_exists"
    with open_any(tmp_path / "out") as opened:
        assert len(opened) == 2
    convert(tmp_path / "b", tmp_path / "out", to=to, overwrite=True)
    with open_any(tmp_path / "out") as opened:
        assert [name for name, _ in opened] == ["w"]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "out"}


def test_a_folder_with_files_that_would_be_lost_is_never_replaced(tmp_path):
    folder = hub(tmp_path)
    dsd.save(tmp_path / "a", model())
    with pytest.raises(dsdformat.StorageError, match="holds .hidden.json, LICENSE, ") as caught:
        convert(tmp_path / "a", folder, to="huggingface", overwrite=True)
    assert caught.value.code == "not_replaceable"
    assert (folder / "modeling.py").read_text() == "no"
    with pytest.raises(dsdformat.StorageError, match="is not a file"):
        convert(tmp_path / "a", folder, to="safetensors", overwrite=True)


@pytest.mark.parametrize("to", ["safetensors", "huggingface", "dsd"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_whatever_ends_it_nothing_is_left_and_the_old_is_whole(tmp_path, to, error):
    dsd.save(tmp_path / "a", {"w": torch.ones(4_000_000)})
    dsd.save(tmp_path / "b", model())
    convert(tmp_path / "b", tmp_path / "out", to=to)

    def stop(done: int, total: int) -> None:
        raise error

    with pytest.raises(error):
        convert(tmp_path / "a", tmp_path / "new", to=to, progress=stop)
    with pytest.raises(error):
        convert(tmp_path / "a", tmp_path / "out", to=to, overwrite=True, progress=stop)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "out"}
    with open_any(tmp_path / "out") as opened:
        assert len(opened) == 2


def test_a_damaged_block_of_the_source_is_told_and_nothing_is_left(tmp_path):
    dsd.save(tmp_path / "a", {"w": torch.ones(4096)})
    (file,) = (tmp_path / "a").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(dsdformat.ChecksumError):
        convert(tmp_path / "a", tmp_path / "b.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_damaged_torch_file_is_told_if_asked(tmp_path):
    path = saved({"w": torch.arange(1000.0)}, tmp_path / "a.pt")
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(dsdformat.ConvertError) as caught:
        convert(path, tmp_path / "b.safetensors", verify=True)
    assert caught.value.code == "foreign_checksum"


def test_progress_ends_at_the_bytes_of_all_tensors(tmp_path):
    calls: list[tuple[int, int]] = []
    state = {**model(), "w": torch.ones(5_000_000)}
    dsd.save(tmp_path / "a", state)
    nbytes = 20_000_000 + 9 * 4 * 4 + 3 * 2
    for to in ("safetensors", "huggingface", "dsd"):
        calls.clear()
        done = convert(
            tmp_path / "a", tmp_path / to, to=to, progress=lambda *call: calls.append(call)
        )
        assert done.nbytes == nbytes
        assert calls[-1] == (nbytes, nbytes)
        assert len(calls) >= 3
        assert calls == sorted(calls)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "keras"}, "'keras' is no kind that is written"),
        ({"to": "dsd", "ties": "drop"}, "dsd has no option ties"),
        ({"to": "huggingface", "ties": "keep"}, "ties='keep' is neither"),
        ({"to": "huggingface", "max_shard_bytes": "5 parsecs"}, "is no number of bytes"),
        ({"to": "huggingface", "max_shard_bytes": 0}, "0 is no number of bytes"),
        ({"unknown": "perhaps"}, "is no policy"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path, options, message):
    saved(model(), tmp_path / "a.pt")
    with pytest.raises(dsdformat.ArgumentError, match=message):
        convert(tmp_path / "a.pt", tmp_path / "b", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("2 MiB", 2 * MIB), ("7", 7), (9, 9)]
)
def test_sizes_are_numbers_or_texts(text, size):

    assert parse_size(text) == size


def test_memory_is_a_few_pieces_whatever_the_size(tmp_path, monkeypatch):
    import tracemalloc

    monkeypatch.setattr("dsdformat.convert.converting._THREADS_MAX", 2)
    table = torch.zeros(64 * MIB, dtype=torch.uint8)
    dsd.save(tmp_path / "a", {"w": table})
    written({"w": table.reshape(-1, 1024)}, tmp_path / "dcp")
    for source in ("a", "dcp"):
        tracemalloc.start()
        convert(tmp_path / source, tmp_path / f"{source}.safetensors")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 28 * MIB


# Pieces


@pytest.mark.parametrize("seed", range(12))
def test_tensors_that_ranks_cut_in_any_way_are_copied_exactly(tmp_path, monkeypatch, seed):
    """Flat ranges as FSDP1 has them, rows, and columns; in pieces of a few elements."""
    monkeypatch.setattr(copying, "PIECE_NBYTES", 48)
    monkeypatch.setattr(copying, "WIDE_NBYTES", 96)
    rng, ranks = random.Random(seed), 3
    writer = dsdformat.create(tmp_path / "a", world_size=ranks)
    joined = dsdformat.Writer.join
    writers = [writer, *(joined(writer.staging, rank=r, world_size=ranks) for r in range(1, ranks))]
    state = {}
    for number in range(6):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
        whole = np.arange(number, number + int(np.prod(shape)), dtype=np.int16).reshape(shape)
        state[f"t{number}"] = torch.from_numpy(whole)
        for rank, boxes in enumerate(boxes_of(rng, shape, ranks)):
            chunks = [
                (box, whole[tuple(map(slice, box.offset, box.end))].tobytes()) for box in boxes
            ]
            source = dsdformat.TensorSource("int16", shape, chunks)
            writers[rank].add({f"t{number}": source})
    writer.commit([one.finish() for one in writers[1:]])
    for to in ("huggingface", "dsd"):
        convert(tmp_path / "a", tmp_path / to, to=to, **({} if to == "dsd" else {"ties": "drop"}))
    same(tmp_path / "huggingface" / "model.safetensors", state)
    back = dsd.load(tmp_path / "dsd")
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def boxes_of(rng: random.Random, shape: tuple[int, ...], ranks: int) -> list[list[dsdformat.Box]]:
    numel = int(np.prod(shape))
    cuts = [0, *sorted(rng.randint(0, numel) for _ in range(ranks - 1)), numel]
    dim = rng.randrange(-1, len(shape))
    if dim < 0:
        return [flat_boxes(shape, *cuts[at : at + 2]) for at in range(ranks)]
    step = -(-shape[dim] // ranks)
    parts = []
    for rank in range(ranks):
        begin, end = min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim])
        offset = tuple(begin if at == dim else 0 for at in range(len(shape)))
        part = tuple(end - begin if at == dim else size for at, size in enumerate(shape))
        parts.append([dsdformat.Box(offset, part)] if end > begin else [])
    return parts


@pytest.mark.parametrize("to", ["huggingface", "dsd"])
@pytest.mark.parametrize("dim", [0, 1])
def test_no_block_of_ours_is_read_much_more_than_once(tmp_path, monkeypatch, to, dim):
    """Though rows do not divide blocks, nor shards pieces."""
    shape, ranks = (5000, 2002), 2
    part = (2500, 2002) if dim == 0 else (5000, 1001)
    writer = dsdformat.create(tmp_path / "a", world_size=ranks)
    other = dsdformat.Writer.join(writer.staging, rank=1, world_size=ranks)
    for rank, one in enumerate((writer, other)):
        offset = (2500 * rank, 0) if dim == 0 else (0, 1001 * rank)
        data = np.full(part, rank, np.float32)
        chunk = [(dsdformat.Box(offset, part), data)]
        one.add({"w": dsdformat.TensorSource("float32", shape, chunk)})
    writer.commit([other.finish()])
    read = []
    read_into = LocalStorage.read_into

    def counted(self: LocalStorage, label: str, at: int, into: memoryview) -> int:
        read.append(len(into))
        return read_into(self, label, at, into)

    monkeypatch.setattr(LocalStorage, "read_into", counted)
    convert(tmp_path / "a", tmp_path / "out", to=to)
    assert sum(read) < 1.1 * 4 * 5000 * 2002
