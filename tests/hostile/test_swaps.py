"""Files of one checkpoint in another: stale files, twins of the same size, digests made right."""

from __future__ import annotations

import itertools
import json

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


# R-10.11 (B130, B135): what other readers take for the truth.
LABEL = "model.safetensors"
ENTRY = '"w":{"dtype":"U8","shape":[5000],"data_offsets":[0,5000]}'
LIES = {
    "another dtype": ENTRY.replace("U8", "I8"),
    "another shape": ENTRY.replace("5000]", "50,100]", 1),
    "fewer bytes than the shape": ENTRY.replace(",5000]}", ",8]}"),
    "another name": ENTRY.replace('"w"', '"v"'),
    "a name twice, of equal bytes": f"{ENTRY},{ENTRY}",
    "a name twice, of other bytes": ENTRY.replace("5000", "2500") + "," + ENTRY,
    "no tensor": "",
    "metadata": f'"__metadata__":{{"format":"tf"}},{ENTRY}',
}


def with_header(files: Files, text: str) -> Files:
    header = files[LABEL][:8] + text.encode().ljust(4088)
    return {**files, LABEL: header + files[LABEL][4096:]}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_header_lies_about_is_not_read(old, lie):
    files = with_header(old, "{" + LIES[lie] + "}")
    assert problems_of(files) == [("header_mismatch", LABEL)]
    with Checkpoint(MemoryStorage(files)) as checkpoint:
        for read in (checkpoint.tensor("model/w").read, lambda: checkpoint.read_all([None] * 2)):
            with pytest.raises(ChecksumError) as error:
                read()
            assert (error.value.code, error.value.where) == ("header_mismatch", LABEL)


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_changes_nothing_that_is_read_unverified(old, lie):
    files = with_header(old, "{" + LIES[lie] + "}")
    with (
        Checkpoint(MemoryStorage(files), verify=False) as checkpoint,
        Checkpoint(MemoryStorage(old)) as honest,
    ):
        for one, two in zip(checkpoint, honest, strict=True):
            assert (one.name, one.dtype, one.shape) == (two.name, two.dtype, two.shape)
            assert one.read() == two.read()


BIG = '"big":{"dtype":"U8","shape":[65,4096],"data_offsets":[0,266240]}'
TWIN = '"twin@[0:1]":{"dtype":"U8","shape":[1],"data_offsets":[266240,266241]}'
PARTS = {
    "what is read, under another name": (BIG.replace("big", "bag"), TWIN, True),
    "what is read, of another shape": (BIG.replace("65,", "13,5,"), TWIN, True),
    "what is read, in a string": (f'"__metadata__":{{"x":{json.dumps(f",{BIG},")}}}', TWIN, True),
    "what is not read": (BIG, TWIN.replace("U8", "I8"), False),
}


@pytest.mark.parametrize("part", PARTS)
def test_where_a_part_is_read_its_entries_are_compared(part):
    first, second, noticed = PARTS[part]
    honest = build(
        Declared(
            [
                Tensor("uint8", (65, 4096), bytes(65 * 4096), [Chunk((0, 0), (65, 4096), 0)]),
                Tensor("uint8", (2,), b"ab", [Chunk((at,), (1,), 0) for at in range(2)]),
            ],
            {"model": {"big": ["tensor", 0], "twin": ["tensor", 1]}},
            files=[DataFile(LABEL, ("model",), header_multiple=4096)],
        )
    ).files
    third = TWIN.replace("0:1", "1:2").replace("266241]", "266242]").replace("[266240", "[266241")
    with Checkpoint(MemoryStorage(honest)) as checkpoint:
        checkpoint.read_all([None] * 2)
    with Checkpoint(MemoryStorage(with_header(honest, f"{{{first},{second},{third}}}"))) as lying:
        if not noticed:
            assert lying.read("model/big") == bytes(65 * 4096)
            return
        with pytest.raises(ChecksumError) as error:
            lying.read("model/big")
    assert (error.value.code, error.value.problems[0].entry) == ("header_mismatch", "model/big")


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
