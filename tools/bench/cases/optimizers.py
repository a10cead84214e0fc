"""How much memory do a model and its AdamW take, to save and to load?

A fresh optimizer keeps nothing yet: saving it stores the model alone, and loading into it makes
two moments per parameter. One that has taken a step has both already, and is loaded in place.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bench import files
from bench.case import Case, Contender, Scene, Trial
from bench.cases.loading import fixture_of, write_fixture
from bench.cases.saving import save_contenders
from bench.formats import FORMATS
from bench.formats.format import Load

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["LOAD_FRESH", "LOAD_STEPPED", "SAVE_FRESH", "SAVE_STEPPED"]

PARAMETERS = 50
FORMS = tuple(form for form in FORMATS if form.has_optimizers)


def trained_model(size: float, *, stepped: bool) -> State:
    """Build 50 parameters, 256 MiB at full size, and an AdamW over them."""
    from bench.states import build_state, large_shapes

    return build_state(large_shapes(size, PARAMETERS), optimizer=True, stepped=stepped)


def arrange_load(load: Load, scene: Scene, *, stepped: bool) -> Trial:
    """Load into a model and an optimizer."""
    state = trained_model(scene.size, stepped=stepped)
    state.blank()
    model_nbytes = sum(one.nbytes for one in state.module.parameters())
    return Trial(
        call=lambda: load(scene.fixture, state),
        nbytes=3 * model_nbytes,
        made_nbytes=0 if stepped else 2 * model_nbytes,
        takes_nbytes=6 * model_nbytes,
        settle=lambda: files.warm(scene.fixture),
        check=state.check,
    )


def load_contenders(*, stepped: bool) -> tuple[Contender, ...]:
    """Let each format load the state of an optimizer that has taken a step."""
    build = partial(trained_model, stepped=True)
    return tuple(
        Contender(
            name,
            partial(arrange_load, load, stepped=stepped),
            needs=form.needs,
            fixture=fixture_of("trained", form),
            prepare=partial(write_fixture, form, build),
        )
        for form in FORMS
        for name, load in form.loads.items()
    )


SAVE_FRESH = Case(
    "optimizer-save-fresh",
    "save a model with an AdamW that has not taken a step",
    save_contenders(partial(trained_model, stepped=False), FORMS),
    note="`dcp` is given what torch's get_optimizer_state_dict makes: it fills in the moments.",
)
SAVE_STEPPED = Case(
    "optimizer-save-stepped",
    "save a model with an AdamW that has taken a step",
    save_contenders(partial(trained_model, stepped=True), FORMS),
)
LOAD_FRESH = Case(
    "optimizer-load-fresh",
    "load into a model with an AdamW that has not taken a step, page cache warm",
    load_contenders(stepped=False),
    note="The moments that loading makes are taken off the peak, but not off `anonymous`.",
)
LOAD_STEPPED = Case(
    "optimizer-load-stepped",
    "load into a model with an AdamW that has taken a step, page cache warm",
    load_contenders(stepped=True),
)
