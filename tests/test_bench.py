"""tools/bench: each contender of each case runs once, tiny, and tables say what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
if not sys.platform.startswith("linux"):
    pytest.skip("the bench program reads /proc", allow_module_level=True)

from bench import cli, files, weights
from bench.case import Case, Contender, Scene, Trial, UnmeasurableError
from bench.cases import CASES, choose_cases
from bench.child import Job
from bench.goals import GOALS, Goal, outcomes
from bench.measure import measure, prepare
from bench.memory import Meter
from bench.rows import Row, summarize
from bench.runs import Run
from bench.states import build_state
from bench.summary import summary_section
from bench.tables import case_section

TINY = 0.001
MIB = 1 << 20
ALIKE = (  # cases that differ from another in their numbers alone
    *("compress-weights-fp32", "compress-exp-avg", "decompress-weights-bf16"),
    *("decompress-exp-avg", "decompress-exp-avg-sq"),
)
PAIRS = [
    (case, contender)
    for case in CASES
    if case.name not in ALIKE
    for contender in case.contenders
    if contender.ranks == 1
]


def scene_in(folder: Path) -> Scene:
    """A scene with a folder of its own, and a place for a fixture."""
    (folder / "child").mkdir()
    return Scene(TINY, folder / "child", folder / "fixtures" / "checkpoint")


def run_in(folder: Path, lines: list[str]) -> Run:
    """A run of one repetition, that tells of it in a list."""
    return Run(folder, TINY, repetitions=1, realtime=False, tell=lines.append)


def case_of(*contenders: Contender) -> Case:
    """A case that is not in the program."""
    return Case("made-up", "a made-up case", contenders)


# Each case


@pytest.mark.parametrize(
    ("case", "contender"), PAIRS, ids=[f"{case.name}-{one.name}" for case, one in PAIRS]
)
@pytest.mark.filterwarnings("ignore")  # those of peers
def test_a_contender_gives_a_row_with_sane_figures(case, contender, tmp_path):
    if contender.missing():
        pytest.skip(f"needs {contender.missing()[0]}")
    scene = scene_in(tmp_path)
    prepare(contender, scene)
    row = measure(case, contender, scene)
    if row.skipped:
        pytest.skip(row.skipped)
    assert (row.case, row.contender) == (case.name, contender.name)
    assert 0 < row.nbytes < 2 * MIB
    assert 0 < row.call_s <= row.total_s
    assert 0 <= row.peak_nbytes < 256 * MIB
    assert 0 <= row.other <= 1
    # What is lost is a difference, and nothing at this size.
    assert all(value > 0 for name, value in row.columns.items() if name != "lost s")


def test_every_case_has_its_baseline_and_no_name_twice():
    for case in CASES:
        names = [contender.name for contender in case.contenders]
        assert case.baseline in names
        assert len(set(names)) == len(names)


def test_a_name_stands_for_its_case_or_for_all_that_begin_with_it():
    assert [case.name for case in choose_cases(["save"])] == ["save"]
    assert len(choose_cases(["optimizer"])) == 4
    assert choose_cases([]) == list(CASES)
    with pytest.raises(LookupError, match="no case nonsense"):
        choose_cases(["nonsense"])


# Runs


def test_the_program_prints_a_table_and_writes_rows(tmp_path, capsys):
    place, found = tmp_path / "place", tmp_path / "rows.json"
    place.mkdir()
    arguments = ["load", "--only", "raw", "-n", "2", "--size", str(TINY)]
    assert cli.main([*arguments, "--folder", str(place), "--json", str(found)]) == 0
    document = json.loads(found.read_text())
    assert [row["repetition"] for row in document["rows"]] == [0, 1]
    assert {row["contender"] for row in document["rows"]} == {"raw"}
    output = capsys.readouterr().out
    assert "## load: " in output
    assert "| raw | 2 | " in output
    assert list(place.iterdir()) == []


def test_a_contender_that_is_not_installed_is_left_out_with_a_reason(tmp_path):
    absent = Contender("absent", lambda scene: pytest.fail("it ran"), needs=("no_such_module",))
    (row,) = run_in(tmp_path, []).rows(case_of(absent), [absent])
    assert row.skipped == "no_such_module is not installed"


def test_a_contender_that_fails_is_told_of_and_the_others_go_on(tmp_path):
    case = choose_cases(["save"])[0]
    broken = Contender("broken", lambda scene: pytest.fail("it ran"))
    lines: list[str] = []
    rows = run_in(tmp_path, lines).rows(case, [broken, case.contender("raw")])
    assert sorted(bool(row.error) for row in rows) == [False, True]
    assert any("broken: FAILED" in line for line in lines)


def test_a_fixture_that_cannot_be_written_is_a_reason_too(tmp_path, monkeypatch):
    def left(job: Job) -> str:
        row = Row(job.case, job.contender, skipped="so many names do not fit")
        Path(job.result).write_text(json.dumps(row.to_dict()))
        return ""

    monkeypatch.setattr("bench.runs.run_child", left)
    one = Contender("one", lambda scene: pytest.fail("it ran"), prepare=lambda scene: None)
    (row,) = run_in(tmp_path, []).rows(case_of(one), [one])
    assert row.skipped == "so many names do not fit"


def test_rows_that_were_written_are_shown_again_together(tmp_path, capsys):
    for number, seconds in enumerate((1.0, 3.0)):
        rows = [row_of("raw", 1.0, case="save"), row_of("dsdformat", seconds, case="save")]
        cli.write_rows(tmp_path / f"{number}.json", {"processor": f"number {number}"}, 1.0, rows)
    paths = [str(tmp_path / f"{number}.json") for number in range(2)]
    assert cli.main(["--from", paths[0], "--from", paths[1]]) == 0
    output = capsys.readouterr().out
    assert "- processor: number 1" in output
    assert "| dsdformat | 2 | 2.000 (1.000-3.000) | 0.50 | 2.00 |" in output
    assert "Goals: 1 met, 1 MISSED, 0 not measured." in output


@pytest.mark.parametrize("way", [["tools/bench"], ["-m", "tools.bench"]])
def test_the_program_runs_as_a_folder_and_as_a_module(way):
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, *way, "--help"], capture_output=True, text=True, cwd=root, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "python tools/bench limits" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["-n", "0"], ["--size", "-1"], ["--from", "no-such-file"], ["--from", __file__]],
)
def test_wrong_usage_is_refused(arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


# Measuring


def test_what_cannot_be_measured_here_is_skipped_with_a_reason(tmp_path):
    def arrange(scene: Scene) -> Trial:
        raise UnmeasurableError("nothing is cold here")

    one = Contender("one", arrange)
    assert measure(case_of(one), one, scene_in(tmp_path)).skipped == "nothing is cold here"


def test_a_wrong_result_is_no_figure(tmp_path):
    def check() -> None:
        raise ValueError("wrong")

    one = Contender("one", lambda scene: Trial(call=lambda: None, nbytes=1, check=check))
    with pytest.raises(ValueError, match="wrong"):
        measure(case_of(one), one, scene_in(tmp_path))


def test_flushing_counts_and_what_a_call_has_to_make_is_no_overhead(tmp_path):
    made: list[bytearray] = []
    one = Contender(
        "one",
        lambda scene: Trial(
            call=lambda: made.append(bytearray(b"x") * (64 * MIB)),
            nbytes=MIB,
            made_nbytes=64 * MIB,
            flush=lambda: None,
        ),
    )
    row = measure(case_of(one), one, scene_in(tmp_path))
    assert row.call_s < row.total_s
    assert row.peak_nbytes < 32 * MIB
    assert row.anon_nbytes > 32 * MIB


def test_the_meter_sees_memory_that_is_gone_again():
    with Meter() as meter:
        data = bytearray(b"x") * (64 * MIB)
        del data
    assert 60 * MIB < meter.usage.peak_nbytes < 128 * MIB


def test_a_state_knows_a_wrong_tensor():
    state = build_state([(3, 4)] * 12, optimizer=True, stepped=True)
    assert len(state.tensors()) == 12 * 4
    state.check()
    state.tensors()[-2][0, 0] += 1
    with pytest.raises(ValueError, match="tensor 46"):
        state.check()


def test_dropped_files_are_not_cached_and_warmed_ones_are(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    files.flush(path)
    try:
        files.drop(tmp_path)
    except UnmeasurableError as error:
        pytest.skip(str(error))
    files.warm(tmp_path)
    assert files.cached_nbytes(path) == MIB


# Tables


def row_of(contender: str, seconds: float, **fields: object) -> Row:
    """A row as a repetition leaves it."""
    fields = {"case": "made-up", **fields}
    return Row(contender=contender, nbytes=10**9, call_s=seconds / 2, total_s=seconds, **fields)


ROWS = [
    *(row_of("raw", seconds) for seconds in (0.4, 0.5, 0.9)),
    *(row_of("ours", seconds, columns={"size": 0.5}) for seconds in (1.5, 1.0, 0.8)),
    Row("made-up", "absent", skipped="it is not installed"),
    Row("made-up", "broken", error="exit code 1"),
    Row("made-up", "broken", error="exit code 1"),
]


def test_ratios_are_those_of_medians():
    raw, ours = summarize(ROWS, "raw")
    assert (raw.contender, raw.ratio, raw.count) == ("raw", 1.0, 3)
    assert (ours.contender, ours.ratio, ours.total_s.most) == ("ours", 2.0, 1.5)


def test_without_a_baseline_there_are_no_ratios():
    (ours,) = summarize([row_of("ours", 1.0)], "raw")
    assert ours.ratio is None


def test_a_table_shows_medians_and_tells_of_who_is_not_in_it():
    section = case_section(case_of(), ROWS)
    assert "| ours | 3 | 1.000 (0.800-1.500) | 1.00 | 2.00 | 0.500 |" in section
    assert "| 0.500 |\n" in section
    assert "- absent: skipped, it is not installed" in section
    assert section.count("- broken: FAILED, exit code 1") == 1


# Goals and the summary


def test_goals_are_of_cases_and_contenders_that_there_are():
    for case, goals in GOALS.items():
        names = {one.name for one in choose_cases([case])[0].contenders}
        for goal in goals:
            assert {
                goal.contender,
                goal.over or goal.contender,
                goal.minus or goal.contender,
            } <= names


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal("ours", "seconds", most=2.0, over="raw"), 2.0, True),
        (Goal("ours", "seconds", most=1.9, over="raw"), 2.0, False),
        (Goal("ours", "size", least=0.6), 0.5, False),
        (Goal("ours", "peak MiB", most=64), 0.0, True),
        (Goal("ours", "seconds", most=2.0, over="absent"), None, None),
        (Goal("absent", "seconds", most=2.0), None, None),
        (Goal("ours", "seconds", most=0.5, minus="raw"), 0.5, True),
    ],
)
def test_a_goal_is_met_or_missed_or_not_measured(monkeypatch, goal, value, met):
    monkeypatch.setitem(GOALS, "made-up", (goal,))
    (outcome,) = outcomes("made-up", summarize(ROWS, "raw"))
    assert (outcome.value, outcome.met) == (value, met)


def test_the_summary_has_a_line_for_each_case_and_the_quickest_way_of_each_library():
    names = ["raw", "dsdformat", "dsdformat (unverified)", "torch.load", "torch.load (mmap)", "odd"]
    rows = [row_of(name, 1.0 + number) for number, name in enumerate(names)]
    section = summary_section([case_of()], rows)
    assert "| case | dsdformat | unverified | torch.save, torch.load |" in section
    assert "| a made-up case | 2.00 (0) | 3.00 (0) | 4.00 (0) |" in section
    assert "Goals" not in section
    assert summary_section([case_of()], [row_of("raw", 1.0)]) == ""


# Numbers that codecs are given


def test_weights_are_drawn_where_no_model_is_installed(monkeypatch):
    monkeypatch.setattr(weights, "minilm_path", lambda: None)
    drawn = weights.make_weights(0.02)
    assert (drawn.dtype, len(drawn)) == ("float32", round(150 * 384 * 384 * 0.02))
    assert 0.001 < float(drawn.std()) < 0.2
    assert (drawn == weights.make_weights(0.02)).all()


def test_moments_are_those_of_a_training():
    moments = weights.make_moments(0.001)
    assert set(moments) == {"exp_avg", "exp_avg_sq"}
    assert len(moments["exp_avg"]) == len(moments["exp_avg_sq"]) > 1000
    assert (moments["exp_avg_sq"] >= 0).all()
    assert moments["exp_avg"].min() < 0 < moments["exp_avg"].max()
