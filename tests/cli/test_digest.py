"""`dsd digest`: digests of a checkpoint, its contents, its tensors."""

from __future__ import annotations

import numpy as np
import pytest

import dsdformat
import dsdformat.numpy


def test_the_root_digest_alone_is_printed(dsd, step10):
    with dsdformat.open(step10) as checkpoint:
        assert dsd("digest", step10).out == f"{checkpoint.root}\n"
        assert dsd("digest", step10, "--content").out == f"{checkpoint.content_digest()}\n"
        entry = checkpoint.tensor("model/norm.weight").content_digest()
    assert dsd("digest", step10, "model/norm.*").out == f"{entry}  model/norm.weight\n"
    assert dsd("verify", step10, "--digest", dsd("digest", step10).out.strip()).code == 0


def test_the_content_digest_is_that_of_any_layout(dsd, sharded, tmp_path):
    dsdformat.numpy.save(tmp_path / "whole", dsdformat.numpy.load(sharded), codec="zstd")
    one, two = (dsd("digest", path, "--json").json for path in (sharded, tmp_path / "whole"))
    assert one["root"] != two["root"]
    assert one["content"] is None
    for names in (["--content"], ["model"]):
        one, two = (dsd("digest", path, *names).out for path in (sharded, tmp_path / "whole"))
        assert one == two


def test_another_kind_of_file_has_a_content_digest_alone(dsd, tmp_path):
    state = {"a": np.arange(3), "b": np.zeros((2, 0), np.float32)}
    np.savez(tmp_path / "a.npz", **state)
    dsdformat.numpy.save(tmp_path / "a", state)
    result = dsd("digest", tmp_path / "a.npz")
    assert (result.code, result.out) == (2, "")
    assert result.err.endswith("hint: --content gives the digest of what it holds\n")
    assert dsd("digest", tmp_path / "a.npz", "--content").out == (
        dsd("digest", tmp_path / "a", "--content").out
    )
    document = dsd("digest", tmp_path / "a.npz", "a", "--json").json
    assert document["root"] is None
    (row,) = document["tensors"]
    assert (
        row["digest"] == dsd("digest", tmp_path / "a", "a", "--json").json["tensors"][0]["digest"]
    )


def test_a_name_that_is_not_there_or_no_tensor_ends_with_2(dsd, step10):
    assert dsd("digest", step10, "nothing").err.startswith("error[entry_not_found]: ")
    assert dsd("digest", step10, "step").err.startswith("error[not_a_tensor]: ")
    assert dsd("digest", step10, "step").code == 2


def test_a_file_with_an_optimizer_has_the_digest_of_what_it_becomes(dsd, tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "a.pt")
    assert dsd("convert", tmp_path / "a.pt", tmp_path / "ours").code == 0
    assert dsd("convert", tmp_path / "ours", tmp_path / "b.pt").code == 0
    with dsdformat.open(tmp_path / "ours") as checkpoint:
        digest = checkpoint.content_digest()
    for name in ("a.pt", "ours", "b.pt"):
        assert dsd("digest", tmp_path / name, "--content").out == f"{digest}\n"
