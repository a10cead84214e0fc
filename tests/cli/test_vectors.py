"""The vectors of the spec through every command: each ends as it should, and none with a bug."""

from __future__ import annotations

from pathlib import Path

import pytest

import dsdformat
from dsdformat.testing.vectors import find_cases

CASES = find_cases(Path(__file__).resolve().parents[2] / "spec" / "vectors")
PLAIN = {case.id: case for case in CASES if not case.spec.get("setup")}


@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_verify_reports_what_the_library_finds(dsd, case):
    path = case.folder / "checkpoint"
    digest = case.spec.get("options", {}).get("digest")
    report = dsdformat.verify(path, digest=digest)
    result = dsd("verify", path, *(["--digest", digest] if digest else []), "--json")
    assert result.code == (0 if report.ok else 1)
    assert result.json["ok"] == report.ok
    found = [problem["code"] for problem in result.json["problems"]]
    assert found == [problem.code for problem in report.problems]


@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_info_and_ls_tell_of_a_vector_or_refuse_it(dsd, case):
    path = case.folder / "checkpoint"
    for arguments in (["info", path, "--chunks"], ["ls", path, "--long", "--values"]):
        result = dsd(*arguments, "--json")
        assert result.code in ((0, 1) if "code" in case.expect else (0,))
        assert ("error" in result.json) == (result.code == 1)


GOOD = {id_: case for id_, case in PLAIN.items() if "code" not in case.expect}
ENTRIES_MAX = 20


@pytest.mark.parametrize("case", GOOD.values(), ids=GOOD)
def test_each_entry_of_a_good_vector_is_shown(dsd, case):
    path = case.folder / "checkpoint"
    listing = dsd("ls", path, "--values", "--json").json
    for row in [*listing["tensors"], *listing["values"]][:ENTRIES_MAX]:
        for form in ([], ["--json"]):
            assert dsd("show", *form, "--", path, row["name"]).code == 0


BAD = {id_: case for id_, case in PLAIN.items() if id_ not in GOOD}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_tensor_of_a_bad_vector_is_shown_or_refused(dsd, case):
    path = case.folder / "checkpoint"
    listing = dsd("ls", path, "--json").json.get("tensors", [])
    for row in listing[:ENTRIES_MAX]:
        for form in ([], ["--json"]):
            assert dsd("show", *form, "--", path, row["name"]).code in (0, 1)
