"""Models of transformers: what we export loads with `from_pretrained` and gives the same logits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dsdformat.torch as dsd
from dsdformat.convert import convert, open_any

os.environ["HF_HUB_OFFLINE"] = "1"
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")


def llama(tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def bert() -> Any:
    """Its decoder is tied to its embedding, and a bias to another."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return transformers.BertForMaskedLM(config).eval()


SAVED: dict[str, Callable[[], Any]] = {
    "llama-tied": lambda: llama(tied=True),
    "llama-untied": lambda: llama(tied=False),
    "bert": bert,
}


def check_loads(folder: Path, model: Any) -> None:
    """Load a folder as its users do, and compare every logit."""
    kind = type(model)
    again, told = kind.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("ties", ["drop", "duplicate"])
@pytest.mark.parametrize("most", ["1GB", "20KB"], ids=["one", "several"])
def test_a_llama_loads_from_what_is_exported_and_from_what_is_converted(tmp_path, tied, ties, most):
    model = llama(tied)
    files = {"config.json": model.config.to_json_string()}
    options: dict[str, Any] = {"ties": ties, "max_shard_bytes": most}
    dsd.export_safetensors(tmp_path / "a", model, files=files, **options)
    check_loads(tmp_path / "a", model)
    dsd.save(tmp_path / "b", {"model": model})
    convert(tmp_path / "b", tmp_path / "c", to="huggingface", select="model", **options)
    for path in (tmp_path / "c").iterdir():
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    names = {n for p in (tmp_path / "a").glob("*.safetensors") for n in load_file(p)}
    assert ("lm_head.weight" in names) == (not tied or ties == "duplicate")
    assert "model.embed_tokens.weight" in names


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("most", ["1GB", "20KB"], ids=["one", "several"])
def test_a_folder_of_transformers_goes_through_ours_and_back_with_its_files(tmp_path, most, kind):
    model = SAVED[kind]()
    model.save_pretrained(tmp_path / "hub", max_shard_size=most)
    convert(tmp_path / "hub", tmp_path / "a", with_side_files=True)
    done = convert(
        tmp_path / "a",
        tmp_path / "b",
        to="huggingface",
        max_shard_bytes=most,
        with_side_files=True,
    )
    names = {"config.json"} if kind == "bert" else {"config.json", "generation_config.json"}
    assert names <= set(done.files)
    with open_any(tmp_path / "hub") as there, open_any(tmp_path / "b") as here:
        assert {name: bytes(one.read()) for name, one in there} == {
            name: bytes(one.read()) for name, one in here
        }
        assert here.metadata == there.metadata
    check_loads(tmp_path / "b", model)
    index = "model.safetensors.index.json"
    assert (
        (tmp_path / "b" / index).exists() == (tmp_path / "hub" / index).exists() == (most != "1GB")
    )


def test_a_checkpoint_of_torch_becomes_a_folder_that_loads(tmp_path):
    model = llama(tied=True)
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", to="huggingface", select="model")
    (tmp_path / "b" / "config.json").write_text(model.config.to_json_string())
    check_loads(tmp_path / "b", model)


def test_the_bert_of_minilm_gives_the_same_numbers_from_our_folder(tmp_path, minilm_folder):
    load = transformers.AutoModel.from_pretrained
    model = load(minilm_folder, local_files_only=True).eval()
    ids = torch.arange(1000, 1024).reshape(2, 12)
    expected = model(ids).last_hidden_state
    done = convert(minilm_folder, tmp_path / "a", with_side_files=True)
    convert(
        tmp_path / "a",
        tmp_path / "b",
        to="huggingface",
        max_shard_bytes="40MB",
        with_side_files=True,
    )
    assert done.tensors == len(load_file(minilm_folder / "model.safetensors"))
    again = load(tmp_path / "b", local_files_only=True).eval()
    assert torch.equal(again(ids).last_hidden_state, expected)
    files = {"config.json": json.dumps(model.config.to_dict())}
    dsd.export_safetensors(tmp_path / "c", model, files=files)
    again = load(tmp_path / "c", local_files_only=True).eval()
    assert torch.equal(again(ids).last_hidden_state, expected)
    there = load_file(minilm_folder / "model.safetensors")
    here = {
        n: t
        for p in sorted((tmp_path / "b").glob("*.safetensors"))
        for n, t in load_file(p).items()
    }
    assert set(here) == set(there)
    assert all(torch.equal(here[name], there[name]) for name in there)
