"""What is published: the wheel holds the package and nothing else, and is the same each time.

It is built with the backend that is installed, and installed without an index: no network.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dsdformat
from tests.conftest import ROOT

pytest.importorskip("hatchling", reason="it builds the wheel")

DIST_INFO = f"dsdformat-{dsdformat.__version__}.dist-info"
CODE = re.compile(r"\.(so|pyd|dll|dylib|pyc|pyo|pth|exe|sh|bat|cmd|ps1)(\.|$)")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def build(source: Path, folder: Path, **environment: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.iterdir()
    return wheel


def sources() -> Iterator[str]:
    for path in (ROOT / "dsdformat").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), SOURCE_DATE_EPOCH="1700000000")


# What is in it


def test_the_wheel_holds_the_package_and_what_describes_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    about = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/dsdformat/LICENSE"]
    assert sorted(names) == sorted([*sources(), *(f"{DIST_INFO}/{name}" for name in about)])


def test_nothing_in_the_wheel_runs_when_it_is_installed_or_when_python_starts(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if CODE.search(name)] == []
        assert not any(".data/" in name for name in archive.namelist())
        assert all(one.external_attr >> 16 & 0o111 == 0 for one in archive.infolist())
        about = archive.read(f"{DIST_INFO}/WHEEL").decode()
        entries = archive.read(f"{DIST_INFO}/entry_points.txt").decode()
    assert "Root-Is-Purelib: true\nTag: py3-none-any\n" in about
    assert entries.split() == ["[console_scripts]", "dsd", "=", "dsdformat.cli.main:main"]


def test_nothing_of_the_project_runs_when_it_is_built():
    """All that is known of the package is written in pyproject.toml; the backend reads it."""
    found = project()
    assert found["build-system"]["build-backend"] == "hatchling.build"
    assert [re.split(r"\W", one)[0] for one in found["build-system"]["requires"]] == ["hatchling"]
    assert found["build-system"].keys() == {"build-backend", "requires"}
    assert "dynamic" not in found["project"]
    hatch = found["tool"]["hatch"]
    assert hatch.keys() == {"build"}
    assert hatch["build"].keys() == {"targets"}
    assert {key for one in hatch["build"]["targets"].values() for key in one} == {
        "packages",
        "only-include",
    }
    for name in ("setup.py", "setup.cfg", "hatch.toml", "hatch_build.py", "MANIFEST.in"):
        assert not (ROOT / name).exists()


def test_a_wheel_of_the_same_tree_elsewhere_is_the_same_to_the_byte(wheel, tmp_path):
    """With other modes, times, order of names and time zone."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in sorted([*sources(), "pyproject.toml", "README.md"], reverse=True):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
        (copy / name).chmod(0o600)
        os.utime(copy / name, (1, 1))
    again = build(copy, tmp_path / "again", SOURCE_DATE_EPOCH="1700000000", TZ="Asia/Tokyo")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_versions_and_bounds_are_told_once():
    """Each dependency has a lower bound, the same wherever it is named, and no upper one."""
    found = project()["project"]
    assert found["version"] == dsdformat.__version__
    rows = [*found["dependencies"]]
    for extra, more in found["optional-dependencies"].items():
        rows += [] if extra in ("test", "bench", "fuzz") else more  # those are not for users
    bounds: dict[str, str] = {}
    for row in rows:
        if not row.startswith("dsdformat["):
            name, bound = re.fullmatch(r"([a-z0-9_]+)>=([0-9.]+)", row).groups()
            assert bounds.setdefault(name, bound) == bound
    pins = (ROOT / "tools" / "constraints.txt").read_text("utf-8")
    pinned = dict(re.findall(r"^([A-Za-z0-9_]+)==([0-9.]+)", pins, re.MULTILINE))
    numbers = {
        name: [list(map(int, one.split("."))) for one in (bound, pinned[name])]
        for name, bound in bounds.items()
    }
    assert [name for name, (low, used) in numbers.items() if low > used] == []


# Installed


def needed(*names: str) -> set[str]:
    """Names of distributions, and of those that they need here."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = re.split(r"[^A-Za-z0-9._-]", todo.pop())[0]
        if name in found:
            continue
        try:
            rows = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another system
            continue
        found.add(name)
        todo += [row for row in rows if "extra ==" not in row]
    return found


def lend(names: set[str], folder: Path) -> None:
    """Put installed distributions into another environment, by links."""
    for name in names:
        dist = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in dist.files or () if ".." not in file.parts}
        for top in tops - {"__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(dist.locate_file(top))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it needs, without torch, numpy and all else."""
    place = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
    options = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "-q"]
    done = subprocess.run(
        [*pip, "install", *options, str(wheel)],
        env={key: text for key, text in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (packages,) = place.glob("lib/python3.*/site-packages")
    lend(needed("msgpack", "blake3"), packages)
    return place


def run(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(place / "bin" / command[0]), *command[1:]],
        cwd=place,
        env={key: text for key, text in os.environ.items() if not key.startswith("PYTHON")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


USE = """
import importlib.util, sys
import dsdformat
for name in ("torch", "numpy", "zstandard"):
    assert importlib.util.find_spec(name) is None, name
with dsdformat.create("c") as writer:
    writer.add({"step": 3})
    writer.add_tensor(["model", "w"], bytes(12), dtype="float32", shape=(3,))
assert dsdformat.verify("c").ok
with dsdformat.open("c") as checkpoint:
    assert bytes(checkpoint.read("model/w")) == bytes(12)
print(dsdformat.__version__, dsdformat.__file__)
"""


def test_the_installed_core_needs_two_packages_and_neither_torch_nor_numpy(installed):
    done = run(installed, "python", "-c", USE)
    assert done.returncode == 0, done.stderr
    version, file = done.stdout.split()
    assert version == dsdformat.__version__
    assert Path(file).is_relative_to(installed)


def test_the_installed_command_runs_and_says_what_it_lacks(installed):
    done = run(installed, "dsd", "--version")
    assert done.returncode == 2, done.stdout
    assert "dsdformat[cli]" in done.stderr
    (packages,) = installed.glob("lib/python3.*/site-packages")
    lend(needed("typer", "rich"), packages)
    done = run(installed, "dsd", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert dsdformat.__version__ in done.stdout
