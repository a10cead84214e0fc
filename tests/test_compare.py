"""tools/compare: cases are complete, outcomes are what processes do, and the README shows them."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("the compare program stops ranks by signals", allow_module_level=True)

from compare import cli
from compare.case import HERE, Case, Library, Pair, Subject, expect_equal, expect_refusal
from compare.cases import CASES, choose_cases
from compare.runs import RIGHT, Row, join, outcome_of, run_case
from compare.tables import head_cell, markdown, shorten

ROOT = Path(__file__).resolve().parent.parent
SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+")
TABLE = re.compile(r"<!-- compare -->\n(.*?)\n<!-- /compare -->", re.DOTALL)
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


# Cases


def test_no_two_cases_have_one_name_or_ask_for_the_same():
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({case.wanted for case in CASES}) == len(CASES)


@every_case
def test_a_case_has_a_source_and_two_libraries(case):
    assert case.source == HERE or SOURCE.fullmatch(case.source)
    for library in case.pair.libraries:
        if library.is_installed():
            assert importlib.util.find_spec(library.module) is not None
    assert case.pair.ours.module.rpartition(".")[2] in ("dsd", "state_dict")
    assert case.pair.peer != case.pair.ours


@every_case
def test_a_case_is_short(case):
    lines = inspect.getsource(case.scenario).splitlines()
    assert sum(not line.startswith("@") for line in lines) <= 40
    assert len(case.wanted) <= 100


def test_globs_choose_cases():
    assert [case.name for case in choose_cases("flipped-bit")] == ["flipped-bit"]
    assert len(choose_cases("flipped-bit*,forged-index")) == 4
    assert choose_cases(None) == list(CASES)
    with pytest.raises(LookupError, match="no case is called nonsense"):
        choose_cases("nonsense")


@pytest.mark.filterwarnings("ignore")  # those of peers
@pytest.mark.parametrize("name", ["forged-index", "strided-tensors"])
def test_a_case_runs_with_both_libraries(name):
    (case,) = choose_cases(name)
    row = run_case(case)
    assert row.ours == RIGHT
    for text in (row.peer, row.ours):
        assert text == RIGHT or re.match(r"wrong: |\w+Error: ", text)


# Outcomes

SCENARIOS = """
import os, signal, time
from compare.case import expect

def fine(library, scene):
    expect(scene.folder.is_dir() and library.__name__ == "json", "another scene")

def bad(library, scene):
    expect(False, "two, not one")

def raises(library, scene):
    raise KeyError("betas")

def leaves(library, scene):
    raise SystemExit(3)

def dies(library, scene):
    os.kill(os.getpid(), signal.SIGSEGV)

def ends(library, scene):
    os.write(2, b"out of memory")
    os._exit(3)

def waits(library, scene):
    time.sleep(60)

def happens_twice(library, scene):
    place = scene.folder / "was here"
    expect(not place.exists(), "it was here before")
    place.touch()
"""


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """`outcome(name, **options)` runs a scenario of those above."""
    (tmp_path / "scenarios.py").write_text(SCENARIOS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def outcome(name: str, limit_s: float = 20, **options: int) -> str:
        def scenario() -> None: ...

        scenario.__module__, scenario.__name__ = "scenarios", name
        json_module = Library("json", "json", needs="json")
        case = Case(name, "", HERE, Pair(json_module, json_module), scenario, **options)
        return outcome_of(case, json_module, limit_s)

    return outcome


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fine", "right"),
        ("bad", "wrong: two, not one"),
        ("raises", "KeyError: 'betas'"),
        ("leaves", "SystemExit: 3"),
        ("dies", "crashes (SIGSEGV)"),
        ("ends", "exits with 3: out of memory"),
    ],
)
def test_an_outcome_is_what_the_process_did(outcome, name, text):
    assert outcome(name) == text


def test_a_scenario_that_does_not_end_hangs(outcome):
    assert outcome("waits", limit_s=0.5) == "hangs"


def test_a_case_that_runs_several_times_is_right_if_all_are(outcome):
    assert outcome("happens_twice") == "right"
    assert outcome("happens_twice", times=2) == "wrong: it was here before"


def test_ranks_have_a_group_and_the_wrong_ones_are_told(outcome):
    assert outcome("fine", ranks=2) == "right"
    assert join(["right", "hangs"]) == "rank 1: hangs"
    assert join(["hangs", "hangs"]) == "hangs"


def test_what_is_not_installed_is_no_outcome():
    absent = Library("absent", "absent", needs="no_such_module")
    case = choose_cases("forged-index")[0]
    assert outcome_of(case, absent, 1) == "no_such_module is not installed"


def test_a_refusal_has_to_say_what_is_wrong():
    def refuse() -> None:
        raise ValueError("float32 is not bfloat16")

    expect_refusal(refuse, "float32", otherwise="loaded")
    with pytest.raises(ValueError, match="is not"):
        expect_refusal(refuse, "int8", otherwise="loaded")
    with pytest.raises(Exception, match="loaded"):
        expect_refusal(lambda: None, otherwise="loaded")
    with pytest.raises(Exception, match="the step is 1, not 2"):
        expect_equal(1, 2, "the step")


# Tables


def row_of(peer: str, ours: str) -> Row:
    return Row(choose_cases("forged-index")[0], peer, ours)


def test_a_table_has_the_source_the_peer_and_both_outcomes():
    table = markdown([row_of("wrong: a | b <c>", "right")], "2.13.0")
    assert table.splitlines()[2] == (
        "| a forged index runs no code "
        "([pytorch#189308](https://github.com/pytorch/pytorch/issues/189308)) "
        "| DCP: wrong: a \\| b &lt;c> | **right** |"
    )


def test_long_outcomes_are_cut():
    assert shorten("one\n  two") == "one two"
    assert len(shorten("x" * 1000)) <= 100


def test_the_program_lists_cases_and_writes_outcomes(tmp_path, capsys, monkeypatch):
    assert cli.main(["--list"]) == 0
    output = capsys.readouterr().out
    assert all(f"    {case.name}: {case.wanted} ({case.source})" in output for case in CASES)
    monkeypatch.setattr("compare.runs.run_case", lambda case, limit_s: Row(case, "hangs", "right"))
    arguments = ["--only", "forged-index", "--markdown", "--json", str(tmp_path / "rows.json")]
    assert cli.main(arguments) == 0
    assert "| DCP: hangs | **right** |" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["case"], row["torch"], row["dsdformat"]) == ("forged-index", "hangs", "right")


def test_a_fault_of_ours_is_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr("compare.runs.run_case", lambda case, limit_s: Row(case, "right", "hangs"))
    assert cli.main(["--only", "forged-index"]) == 1
    with pytest.raises(SystemExit) as caught:
        cli.main(["--only", "nonsense"])
    assert caught.value.code == 2


def test_the_readme_has_a_row_for_each_case():
    found = TABLE.search((ROOT / "README.md").read_text("utf-8"))
    assert found is not None
    rows = [line.strip("|").split(" | ") for line in found[1].splitlines()[2:]]
    assert [row[0].strip() for row in rows] == [head_cell(case) for case in CASES]
    assert all(len(row) == 3 and row[1].strip() and row[2].strip() for row in rows)


def test_a_subject_names_cases_after_their_functions():
    subject = Subject("Made up")

    @subject.case("nothing", source=HERE, pair=CASES[0].pair, ranks=2)
    def does_nothing(library: object, scene: object) -> None: ...

    (case,) = subject.cases
    assert (case.name, case.ranks, case.times) == ("does-nothing", 2, 1)
