"""How long until an existing model holds what was saved?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import files
from bench.case import Case, Contender, Scene, Trial
from bench.cases.saving import BuildState, large_model, small_model
from bench.formats import FORMATS, Format
from bench.formats.format import Load

__all__ = ["LOAD", "LOAD_COLD", "LOAD_SMALL", "fixture_of", "write_fixture"]


def write_fixture(form: Format, build: BuildState, scene: Scene) -> None:
    """Save the state that is to be loaded."""
    form.save(scene.fixture, build(scene.size))


def fixture_of(kind: str, form: Format) -> str:
    """Name the fixture of a format; cases with equal states share it."""
    return f"{kind}/{form.name}"


def arrange_load(
    load: Load, takes: float, build: BuildState, settle: Callable[[Path], None], scene: Scene
) -> Trial:
    """Load into a state that is there already, with other contents."""
    state = build(scene.size)
    state.blank()
    return Trial(
        call=lambda: load(scene.fixture, state),
        nbytes=state.nbytes(),
        takes_nbytes=round(takes * state.nbytes()),
        settle=lambda: settle(scene.fixture),
        check=state.check,
    )


def load_contenders(
    kind: str, build: BuildState, settle: Callable[[Path], None]
) -> tuple[Contender, ...]:
    """Let each format load a state, in each of its ways."""
    return tuple(
        Contender(
            name,
            partial(arrange_load, load, form.load_takes, build, settle),
            needs=form.needs,
            fixture=fixture_of(kind, form),
            prepare=partial(write_fixture, form, build),
        )
        for form in FORMATS
        for name, load in form.loads.items()
    )


LOAD = Case(
    "load",
    "load into a model of 200 float32 tensors, page cache warm",
    load_contenders("large", large_model, files.warm),
    note="`raw` is one thread; `dsdformat` compares all bytes with their digests, no other does.",
)
LOAD_COLD = Case(
    "load-cold",
    "load into a model of 200 float32 tensors, page cache dropped",
    load_contenders("large", large_model, files.drop),
)
LOAD_SMALL = Case(
    "load-small",
    "load into a model of many tensors of 1 to 16 KiB, page cache warm",
    load_contenders("small", small_model, files.warm),
)
