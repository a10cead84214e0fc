"""Files of one checkpoint in another: stale files, twins of the same size, digests made right."""

from __future__ import annotations

import itertools

import pytest
from vectors.builder import build
from vectors.declare import Checkpoint as Declared
from vectors.declare import Chunk, DataFile, Tensor

import dsdformat
from dsdformat import Checkpoint, ChecksumError
from dsdformat.storage.memory import MemoryStorage
from dsdformat.verify import verify_storage

Files = dict[str, bytes]
LABELS = ["manifest.dsd", "model.safetensors", "optimizer.safetensors", "config.json"]


def declared(word: str) -> Declared:
    """Two sections and a side file; the word, five letters long, is all that differs."""
    data = word.encode() * 1000
    return Declared(
        [
            Tensor("uint8", (5000,), data, [Chunk((0,), (5000,), 0)]),
            Tensor("uint8", (5000,), data[::-1], [Chunk((0,), (5000,), 1)]),
        ],
        {"model": {"w": ["tensor", 0]}, "optimizer": {"m": ["tensor", 1]}, "word": word},
        files=[
            DataFile("model.safetensors", ("model",), header_multiple=4096),
            DataFile("optimizer.safetensors", ("optimizer",), header_multiple=4096),
        ],
        sides={"config.json": f'{{"word": "{word}"}}'.encode()},
    )


@pytest.fixture(scope="module")
def old() -> Files:
    return build(declared("older")).files


@pytest.fixture(scope="module")
def new() -> Files:
    return build(declared("newer")).files


def problems_of(files: Files, **options: object) -> list[tuple[str, str | None]]:
    report = verify_storage(MemoryStorage(files), threads=1, **options)
    return [(problem.code, problem.where) for problem in report.problems]


def test_the_two_differ_in_every_file_and_have_the_same_sizes(old, new):
    assert [len(old[label]) for label in LABELS] == [len(new[label]) for label in LABELS]
    assert all(old[label] != new[label] for label in LABELS)
    assert problems_of(old) == problems_of(new) == []


# Every mixture but the two that are whole.
MIXED = [mix for mix in itertools.product("on", repeat=4) if len(set(mix)) > 1]


@pytest.mark.parametrize("mix", MIXED, ids=["".join(mix) for mix in MIXED])
def test_a_mixture_of_two_checkpoints_is_found(old, new, mix):
    files = {
        label: (old if one == "o" else new)[label] for label, one in zip(LABELS, mix, strict=True)
    }
    foreign = {label for label, one in zip(LABELS, mix, strict=True) if one != mix[0]}
    found = {where for _, where in problems_of(files)}
    # Side files are a stage before blocks, so a foreign one hides foreign data.
    assert found == ({"config.json"} if "config.json" in foreign else foreign)


@pytest.mark.parametrize("label", ["model.safetensors", "optimizer.safetensors"])
def test_a_reader_never_takes_the_bytes_of_a_stale_file(old, new, label):
    with Checkpoint(MemoryStorage({**new, label: old[label]}), threads=1) as checkpoint:
        (entry,) = [entry for entry in checkpoint if entry.chunks[0].file == label]
        with pytest.raises(ChecksumError) as error:
            entry.read()
        assert error.value.where == label


def test_two_data_files_that_changed_places_are_found(old):
    swapped = {
        **old,
        "model.safetensors": old["optimizer.safetensors"],
        "optimizer.safetensors": old["model.safetensors"],
    }
    assert {code for code, _ in problems_of(swapped)} == {"header_mismatch"}


# B130, B135: what other readers may take for the truth, and this one does not look at.
ENTRY = '"w":{"dtype":"U8","shape":[5000],"data_offsets":[0,5000]}'
LIES = {
    "another dtype": ENTRY.replace("U8", "I8"),
    "another shape": ENTRY.replace("5000]", "50,100]", 1),
    "fewer bytes than the shape": ENTRY.replace(",5000]}", ",8]}"),
    "another name": ENTRY.replace('"w"', '"v"'),
    "a name twice, of equal bytes": f"{ENTRY},{ENTRY}",
    "a name twice, of other bytes": ENTRY.replace("5000", "2500") + "," + ENTRY,
    "no tensor": "",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_found_and_changes_nothing_that_is_read(old, lie):
    label = "model.safetensors"
    text = ("{" + LIES[lie] + "}").encode()
    files = {**old, label: old[label][:8] + text.ljust(4088) + old[label][4096:]}
    assert problems_of(files) == [("header_mismatch", label)]
    with Checkpoint(MemoryStorage(files)) as checkpoint, Checkpoint(MemoryStorage(old)) as honest:
        for one, two in zip(checkpoint, honest, strict=True):
            assert (one.name, one.dtype, one.shape) == (two.name, two.dtype, two.shape)
            assert one.read() == two.read()


# B136
def test_who_rewrites_the_digests_too_is_found_by_the_root_digest_alone(old, new):
    root = Checkpoint(MemoryStorage(old)).root
    assert problems_of(new) == []
    found = verify_with_root(new, root)
    assert found == [("digest_mismatch", "manifest.dsd")]


# B136
def test_a_folder_that_was_rewritten_verifies_but_for_the_digest_that_a_caller_has(
    old, new, tmp_path
):
    root = Checkpoint(MemoryStorage(old)).root
    for label, data in new.items():
        (tmp_path / label).write_bytes(data)
    assert dsdformat.verify(tmp_path).ok
    report = dsdformat.verify(tmp_path, digest=root)
    assert [(one.code, one.where) for one in report.problems] == [
        ("digest_mismatch", "manifest.dsd")
    ]
    assert dsdformat.verify(tmp_path, digest=Checkpoint(MemoryStorage(new)).root).ok
    with pytest.raises(ChecksumError):
        dsdformat.open(tmp_path, digest=root)


def verify_with_root(files: Files, root: str) -> list[tuple[str, str | None]]:
    with pytest.raises(ChecksumError) as error:
        Checkpoint(MemoryStorage(files), digest=bytes.fromhex(root))
    return [(problem.code, problem.where) for problem in error.value.problems]
