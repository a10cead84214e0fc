"""Names of data files: plain, unique, and different on every rank."""

from __future__ import annotations

import itertools
import random

import pytest

from dsdformat.format.bodies import is_label
from dsdformat.labels import file_labels


@pytest.mark.parametrize(
    ("prefixes", "labels"),
    [
        pytest.param([()], ["model.safetensors"], id="root"),
        pytest.param([("model",)], ["model.safetensors"], id="model"),
        pytest.param(
            [("model",), ("optimizer",)],
            ["model.safetensors", "optimizer.safetensors"],
            id="sections",
        ),
        pytest.param(
            [(), ("model",)], ["tensors.safetensors", "model.safetensors"], id="root-and-model"
        ),
        pytest.param(
            [("model",), ("model",)],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            id="two-files",
        ),
        pytest.param([("a/b c",)], ["a_b_c.safetensors"], id="odd-characters"),
        pytest.param([("",)], ["_.safetensors"], id="empty"),
        pytest.param([("../x",)], ["_.._x.safetensors"], id="upwards"),
        pytest.param([("ñ",)], ["_.safetensors"], id="not-ascii"),
        pytest.param(
            [("A",), ("a",)], ["A.safetensors", "a-2.safetensors"], id="equal-but-for-case"
        ),
        pytest.param([("x" * 300,)], ["x" * 100 + ".safetensors"], id="long"),
    ],
)
def test_a_single_writer_names_files_by_their_section(prefixes, labels):
    assert file_labels(prefixes, 0, 1) == labels


def test_several_writers_name_files_by_rank():
    assert file_labels([("model",)], 3, 8) == ["model-00003-of-00008.safetensors"]


def test_more_files_of_a_rank_are_parts():
    assert file_labels([("model",)] * 3, 3, 8) == [
        "model-00003-of-00008.safetensors",
        "model-00003-of-00008-part2.safetensors",
        "model-00003-of-00008-part3.safetensors",
    ]


ODD = ["", ".", "..", "-x", "a", "A", "a-2", "a b", "a_b", "model", "tensors", "model-2", "ñ", "é"]


def odd_prefixes(rng: random.Random) -> list[tuple[str, ...]]:
    names = sorted({(rng.choice(ODD),) for _ in range(5)} | ({()} if rng.random() < 0.5 else set()))
    return [name for name in names for _ in range(rng.randint(1, 3))]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("world_size", [1, 4])
def test_labels_are_plain_and_unique_in_any_case(seed, world_size):
    rng = random.Random(seed)
    ranks = [file_labels(odd_prefixes(rng), rank, world_size) for rank in range(world_size)]
    labels = list(itertools.chain(*ranks))
    assert all(map(is_label, labels))
    assert len({label.lower() for label in labels}) == len(labels)


def test_a_section_named_like_a_numbered_file_gets_another_label():
    prefixes = [("a",), ("a",), ("a-00001-of-00002",)]
    labels = file_labels(prefixes, 0, 1)
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    "label",
    ["a", "_", "0", "A.b-c_d", "x" * 200, "manifest.dsd.bak"],
)
def test_a_plain_file_name_is_a_label(label):
    assert is_label(label)


# B126
@pytest.mark.parametrize(
    "label",
    [
        "",
        ".",
        "..",
        ".hidden",
        "-x",
        "a/b",
        "../x",
        "/etc/passwd",
        "a\\b",
        "C:\\x",
        "C:",
        "a\0",
        "a\n",
        "a b",
        "ñ",
        "x" * 201,
    ],
    ids=repr,
)
def test_what_leads_out_of_the_folder_is_no_label(label):
    assert not is_label(label)
