"""Tests on several ranks: `@pytest.mark.ranks(n)` runs a test's body on n of them.

All tests of a module that want as many ranks run in one launch, one after another; the test
asserts what came of its own part. `ranks(n)(function, …)` is a launch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch")

from tests.ranks.launching import (
    GROUP_TIMEOUT_S,
    LIMIT_S,
    Call,
    Launch,
    Launcher,
    Outcome,
    RanksFailedError,
)

FOLDER = Path(__file__).resolve().parent
_OUTCOMES = pytest.StashKey[dict[str, Outcome]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks(n): the body runs on n ranks, in one launch with others of the module"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ranks") or "launcher" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.dist)
        if item.get_closest_marker("dist") and FOLDER not in item.path.parents:
            # `tools/test` collects no others for the run on ranks.
            raise pytest.UsageError(f"{item.nodeid} starts ranks, so it belongs into {FOLDER}")


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def ranks(launcher: Launcher, tmp_path: Path) -> Callable[..., Any]:
    """`ranks(n)(function, *args)` gives the list of what each of n ranks returned.

    Ranks in `killed` are those that the function kills with SIGKILL; they give None.
    """

    def ranks(
        world_size: int,
        *,
        limit_s: float = LIMIT_S,
        group_timeout_s: float = GROUP_TIMEOUT_S,
        killed: Iterable[int] = (),
    ) -> Callable[..., list[Any]]:
        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
            call = Call(function.__module__, function.__name__, args, kwargs)
            folder = tmp_path / f"launch{len(list(tmp_path.iterdir()))}"
            dead = frozenset(killed)
            launch = Launch((call,), world_size, folder, limit_s, group_timeout_s, dead)
            (outcome,) = launcher.run(launch)
            return list(_values(outcome))

        return run

    return ranks


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    known = pyfuncitem.session.stash.setdefault(_OUTCOMES, {})
    if pyfuncitem.nodeid not in known:
        _run_alike(pyfuncitem, marker.args, known)
    _values(known[pyfuncitem.nodeid])
    return True


@pytest.fixture(autouse=True)
def _launcher_of_marked(request: pytest.FixtureRequest) -> None:
    """Have the launcher and a folder there for tests whose body runs on ranks."""
    if request.node.get_closest_marker("ranks"):
        request.getfixturevalue("launcher")
        request.getfixturevalue("tmp_path_factory")


def _run_alike(item: pytest.Function, args: Any, known: dict[str, Outcome]) -> None:
    """Run the bodies of this and of all other tests of the module that want as many ranks."""
    alike = [
        other
        for other in item.session.items
        if isinstance(other, pytest.Function)
        and other.module is item.module
        and (marker := other.get_closest_marker("ranks")) is not None
        and marker.args == args
        and not any(other.iter_markers("skip"))
        and other.nodeid not in known
    ]
    launcher: Launcher = item._request.getfixturevalue("launcher")
    folders: pytest.TempPathFactory = item._request.getfixturevalue("tmp_path_factory")

    def launches(calls: Sequence[Call]) -> Launch:
        return Launch(tuple(calls), args[0], folders.mktemp("ranks"))

    calls = [_call_of(other) for other in alike]
    for other, outcome in zip(alike, launcher.run_all(launches, calls), strict=True):
        known[other.nodeid] = outcome


def _call_of(item: pytest.Function) -> Call:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return Call(item.module.__name__, item.originalname, kwargs=dict(params))


def _values(outcome: Outcome) -> tuple[Any, ...]:
    if outcome.skipped is not None:
        pytest.skip(outcome.skipped)
    if outcome.failure is not None:
        pytest.fail(outcome.failure, pytrace=False)
    return outcome.values


__all__ = ["RanksFailedError"]
