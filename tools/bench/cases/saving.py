"""How long until a model is safely on the disk?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from bench import files
from bench.case import Case, Contender, Scene, Trial
from bench.formats import FORMATS, Format

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["SAVE", "SAVE_SMALL", "arrange_save", "large_model", "save_contenders", "small_model"]

BuildState = Callable[[float], "State"]


def large_model(size: float) -> State:
    """Build 200 parameters; 1 GiB at full size."""
    from bench.states import build_state, large_shapes

    return build_state(large_shapes(size))


def small_model(size: float) -> State:
    """Build 20,000 parameters of 1 to 16 KiB at full size."""
    from bench.states import build_state, small_shapes

    return build_state(small_shapes(size))


def arrange_save(form: Format, build: BuildState, scene: Scene) -> Trial:
    """Save a state, and make it durable."""
    state = build(scene.size)
    path = scene.folder / "checkpoint"
    nbytes = state.nbytes()

    def check() -> None:
        if files.stored_nbytes(path) < nbytes:
            raise ValueError(f"{form.name} stored less than the state")

    return Trial(
        call=lambda: form.save(path, state),
        nbytes=nbytes,
        takes_nbytes=round(form.save_takes * nbytes),
        flush=None if form.is_durable else (lambda: files.flush(path)),
        check=check,
        columns=lambda: {"stored / data": files.stored_nbytes(path) / nbytes},
    )


def save_contenders(
    build: BuildState, forms: tuple[Format, ...] = FORMATS
) -> tuple[Contender, ...]:
    """Let each format save a state."""
    return tuple(
        Contender(form.name, partial(arrange_save, form, build), needs=form.needs) for form in forms
    )


NOTE = (
    "Seconds until all is on the disk: `raw`, and libraries that do not flush by themselves, are "
    "followed by an fsync of each file and folder; `call` is without it."
)
SAVE = Case(
    "save", "save a model of 200 float32 tensors, durable", save_contenders(large_model), note=NOTE
)
SAVE_SMALL = Case(
    "save-small",
    "save a model of many tensors of 1 to 16 KiB",
    save_contenders(small_model),
    note=NOTE,
)
