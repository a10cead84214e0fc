"""What ranks leave for the one that merges, changed by somebody: parts of a save, and words.

Parts come by collectives or from a folder; words lie in a folder. Whatever is in them, the
coordinator and the others get an error of ours, which says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz import manifests, parts
from fuzz.folders import packed, unpacked
from fuzz.values import emitted, parsed

from dsdformat import DsdError
from dsdformat.format.packing import emit
from dsdformat.storage.mailbox import Mailbox

Carried = dict[str, Any]


def changed(change: Callable[[Carried], object]) -> bytes:
    """Parts of two ranks, where what is carried in the first one is changed, and sealed anew."""
    files = unpacked(parts.part_seeds()[0])
    cut = manifests.cut(files["1"])
    assert cut is not None
    body = parsed(cut.sections[0].data)
    change(body["extensions"]["part"])
    cut.sections[0].data = emitted(body)
    return packed({**files, "1": manifests.joined(cut)})


def put(key: str, value: Any) -> Callable[[Carried], object]:
    return lambda carried: carried.update({key: value})


def put_piece(value: Any) -> Callable[[Carried], object]:
    return lambda carried: carried["tree"].update(optimizer=value)


DEFECTS = {
    "counts are no list": (put("counts", 3), "bad_body"),
    "counts of another file": (put("counts", [[2, 1], [0, 0]]), "bad_body"),
    "a count that is no number": (put("counts", [[2, [1]]]), "bad_body"),
    "a count that is negative": (put("counts", [[-2, 1]]), "bad_body"),
    "counts of more blocks": (put("counts", [[3, 1]]), "bad_body"),
    "layouts are no bytes": (put("layouts", []), "bad_body"),
    "layouts are no map": (put("layouts", emit([1])), "bad_body"),
    "layouts with more in them": (put("layouts", emit({"files": [], "layouts": []})), "bad_body"),
    "layouts that are malformed": (put("layouts", b"\xc1"), "msgpack_malformed"),
    "another key": (put("more", 1), "bad_body"),
    "a missing key": (lambda carried: carried.pop("tree"), "bad_body"),
    "a tree that is no piece": (put("tree", 5), "bad_body"),
    "a piece that is none": (put_piece([1]), "bad_body"),
    "a piece that is empty": (put_piece(b""), "msgpack_malformed"),
    "a piece of an empty array": (put_piece(emit([])), "unknown_value_type"),
    "a piece of no known type": (put_piece(emit(["code", 1])), "unknown_value_type"),
    "a piece of a bad value": (put_piece(emit(["odict", 1])), "bad_value"),
    "a tensor that is not there": (put_piece(emit({"tied": ["tensor", 7]})), "state_conflict"),
}


@pytest.mark.parametrize(("change", "code"), DEFECTS.values(), ids=DEFECTS)
def test_a_part_that_is_not_as_it_must_be_is_refused(change, code):
    with pytest.raises(DsdError) as caught:
        parts.read_part(changed(change))
    assert caught.value.code == code


def test_parts_as_they_are_sent_are_merged():
    assert parts.read_part(changed(lambda carried: None)) == ()


@pytest.mark.parametrize(
    ("section", "at", "code"),
    [
        pytest.param(1, 0, "bad_reference", id="a dtype"),
        pytest.param(1, 24, "bad_reference", id="a layout"),
        pytest.param(3, 0, "bad_reference", id="a data file"),
        pytest.param(3, 8, "unknown_codec", id="a codec"),
        pytest.param(3, 36, "bad_reference", id="a block"),
        pytest.param(4, 7, "shape_overflow", id="a box"),
    ],
)
def test_a_number_in_a_part_that_refers_to_nothing_is_refused(section, at, code):
    files = unpacked(parts.part_seeds()[0])
    cut = manifests.cut(files["1"])
    assert cut is not None
    data = bytearray(cut.sections[section].data)
    data[at] = 0xFF
    cut.sections[section].data = bytes(data)
    with pytest.raises(DsdError) as caught:
        parts.read_part(packed({**files, "1": manifests.joined(cut)}))
    assert caught.value.code == code


def test_a_dtype_in_a_part_that_is_not_known_is_refused():
    files = unpacked(parts.part_seeds()[0])
    cut = manifests.cut(files["1"])
    assert cut is not None
    cut.sections[0].data = cut.sections[0].data.replace(b"\xa4int8", b"\xa4int9")
    with pytest.raises(DsdError) as caught:
        parts.read_part(packed({**files, "1": manifests.joined(cut)}))
    assert caught.value.code == "unknown_dtype"


# Words


ROW = {"kind": "OSError", "code": "io_error", "hint": None, "message": "the disk is full"}
ROOT = "0a" * 32


def test_words_are_read_as_they_were_written():
    words = pytest.importorskip("dsdformat.torch.words")
    assert words.read_part_word(words.part_word(b"abc")) == b"abc"
    assert words.read_part_word(words.failed_word(ROW)) == ROW
    assert words.read_verdict(words.root_word(ROOT), 3) == ROOT
    assert words.read_verdict(words.failed_word([None, ROW, None]), 3) == [None, ROW, None]
    assert words.read_verdict(words.failed_word(ROW), 3) == [ROW, None, None]


MALFORMED = {
    "nothing": b"",
    "of no kind": b"x" + ROOT.encode(),
    "a short root": b"r" + b"0a" * 31,
    "a root of other letters": b"r" + b"\xff" * 64,
    "no msgpack": b"f\xc1",
    "no row": b"f" + emit(7),
    "a row with another field": b"f" + emit({**ROW, "more": 1}),
    "a row whose message is no text": b"f" + emit({**ROW, "message": 1}),
    "a value of no known type": b"f" + emit(["code"]),
    "rows of fewer ranks": b"f" + emit(["list", None, ROW]),
    "rows of no failure": b"f" + emit(["list", None, None, None]),
}


@pytest.mark.parametrize("word", MALFORMED.values(), ids=MALFORMED)
def test_a_word_that_is_none_is_the_failure_of_who_left_it(word):
    words = pytest.importorskip("dsdformat.torch.words")
    verdict = words.read_verdict(word, 3)
    assert verdict[1:] == [None, None]
    assert verdict[0]["kind"] == "ManifestError"
    told = words.read_part_word(word)
    assert told["kind"] == "ManifestError" if word[:1] != b"p" else told == word[1:]


def test_files_of_other_names_in_a_mailbox_are_no_words(tmp_path: Path):
    box = Mailbox.begin(tmp_path / "c")
    for name in ("word-", "word-x", "word--1", "word-\u0663", "word-" + "9" * 30, "words-1"):
        (box.folder / name).write_bytes(b"")
    box.leave(b"")
    assert box.words() == {0}
    box.close()
