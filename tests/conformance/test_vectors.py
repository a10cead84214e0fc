"""Every vector of the spec, through the verifier and through a reader that is lazy."""

from __future__ import annotations

from pathlib import Path

import pytest

import dsdformat
from dsdformat.errors import DsdError, FormatError
from dsdformat.testing.vectors import Case, find_cases, run_case

VECTORS = Path(__file__).resolve().parents[2] / "spec" / "vectors"
VALID = find_cases(VECTORS / "valid")
INVALID = find_cases(VECTORS / "invalid")


def by_id(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=case.id) for case in cases]


def test_there_are_vectors():
    assert len(VALID) > 100
    assert len(INVALID) > 500


@pytest.mark.parametrize("case", by_id(VALID))
def test_a_valid_case_is_accepted_and_says_what_it_must(case, tmp_path):
    assert run_case(case, tmp_path) == []


@pytest.mark.parametrize("case", by_id(INVALID))
def test_an_invalid_case_has_problems_of_its_code_alone(case, tmp_path):
    assert run_case(case, tmp_path) == []


# A reader that is lazy (spec, section 21)

# Codes of the stages 1 to 3, which are over when `open` returns; and limits of those stages.
OPENING = {
    *("no_manifest", "bad_magic", "unknown_major", "truncated", "bad_head", "seal_mismatch"),
    *("trailing_bytes", "unknown_feature", "digest_mismatch", "bad_sections", "unknown_section"),
    *("msgpack_malformed", "msgpack_not_canonical", "duplicate_key", "unknown_key", "bad_body"),
    *("bad_label", "duplicate_label", "unknown_value_type", "bad_value", "unknown_dtype"),
    *("bad_tensor_reference", "bad_section_length"),
}
OPENING_LIMITS = {"R-8.6", "R-17.1"}
# Rules that no single tensor breaks, and files that a reader of tensors does not open: these a
# verifier finds. A lazy reader may give bytes or a format error.
WHOLE = {"R-6.12", "R-7.5", "R-9.13", "R-10.2", "R-10.4", "R-10.5"}
SIDES = {"missing_file", "not_regular_file", "file_size_mismatch", "side_checksum_mismatch"}
IGNORED = {"page-flip-ignorable", "page-not-zstd-in-ignorable"}  # pages that a reader skips
# Of: a chunk that does not lie in the data of its file is its tensor's own fault.
OUTSIDE = {
    *("bytes-in-header", "bytes-offset-zero", "bytes-offset-max", "bytes-offset-2-63"),
    "bytes-after-end",
}


def is_found_at_open(case: Case) -> bool:
    if case.expect["code"] == "limit_exceeded":
        return case.spec["rules"][0] in OPENING_LIMITS
    return case.expect["code"] in OPENING and case.id != "body-dtypes-unused"


def is_for_a_verifier(case: Case) -> bool:
    if is_found_at_open(case) or case.id in OUTSIDE:
        return False
    side = case.id.startswith("side-") and case.expect["code"] in SIDES
    return side or case.id in IGNORED or case.spec["rules"][0] in WHOLE


AT_OPEN = [case for case in INVALID if is_found_at_open(case)]
FOR_A_VERIFIER = [case for case in INVALID if is_for_a_verifier(case)]
LATER = [case for case in INVALID if case not in AT_OPEN and case not in FOR_A_VERIFIER]


def folder_of(case: Case, scratch: Path) -> Path:
    from dsdformat.testing import vectors

    return vectors._prepare(case, scratch)


def open_case(case: Case, scratch: Path) -> dsdformat.Checkpoint:
    digest = case.spec.get("options", {}).get("digest")
    return dsdformat.open(folder_of(case, scratch), digest=digest)


@pytest.mark.parametrize("case", by_id(AT_OPEN))
def test_a_fault_of_the_first_stages_is_found_when_the_checkpoint_is_opened(case, tmp_path):
    with pytest.raises(FormatError) as error:
        open_case(case, tmp_path)
    assert error.value.code == case.expect["code"]


@pytest.mark.parametrize("case", by_id(LATER))
def test_a_fault_of_a_tensor_is_found_when_the_tensor_is_read(case, tmp_path):
    def read_all() -> None:
        with open_case(case, tmp_path) as checkpoint:
            for entry in checkpoint:
                entry.read()

    with pytest.raises(FormatError) as error:
        read_all()
    assert error.value.code == case.expect["code"]


@pytest.mark.parametrize("case", by_id(FOR_A_VERIFIER))
def test_a_fault_of_no_tensor_gives_an_error_or_does_no_harm(case, tmp_path):
    with open_case(case, tmp_path) as checkpoint:
        for entry in checkpoint:
            try:
                data = entry.read()
            except FormatError:
                continue
            assert len(data) == entry.nbytes


@pytest.mark.parametrize("case", by_id([*LATER, *FOR_A_VERIFIER]))
def test_an_entry_of_a_faulty_checkpoint_says_what_it_is_or_raises_a_format_error(case, tmp_path):
    names = ("name", "path", "paths", "dtype", "shape", "nbytes", "placements", "chunks")
    names += ("__repr__",)
    try:
        checkpoint = open_case(case, tmp_path)
    except FormatError:
        return
    with checkpoint:
        for entry in checkpoint:
            for name in names:
                try:
                    getattr(entry, name)
                except DsdError:
                    continue


@pytest.mark.parametrize("case", by_id(VALID))
def test_tensors_of_a_valid_case_are_the_same_one_by_one_and_all_at_once(case, tmp_path):
    with open_case(case, tmp_path) as checkpoint:
        buffers = [bytearray(entry.nbytes) for entry in checkpoint]
        checkpoint.read_all(buffers)
        assert [bytes(entry.read()) for entry in checkpoint] == buffers
