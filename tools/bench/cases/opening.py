"""How long until one tensor of a large checkpoint is there?"""

from __future__ import annotations

from functools import partial

from bench import files
from bench.case import Case, Contender, Scene, Trial
from bench.cases.loading import fixture_of, write_fixture
from bench.cases.saving import large_model
from bench.formats import FORMATS
from bench.formats.format import ReadOne

__all__ = ["OPEN_ONE"]


def arrange_read_one(read_one: ReadOne, scene: Scene) -> Trial:
    """Open a checkpoint and read the middle one of its parameters."""
    state = large_model(scene.size)
    parameters = [parameter.detach() for parameter in state.module.parameters()]
    index = len(parameters) // 2
    wanted = parameters[index].clone()
    parameters[index].fill_(1)

    def check() -> None:
        if not parameters[index].equal(wanted):
            raise ValueError(f"parameter {index} is not what was saved")
        state.check()  # and no other has changed

    return Trial(
        call=lambda: read_one(scene.fixture, state, index),
        nbytes=wanted.nbytes,
        settle=lambda: files.warm(scene.fixture),
        check=check,
    )


OPEN_ONE = Case(
    "open-one",
    "open a checkpoint of 200 tensors and read one, page cache warm",
    tuple(
        Contender(
            name,
            partial(arrange_read_one, read_one),
            needs=form.needs,
            fixture=fixture_of("large", form),
            prepare=partial(write_fixture, form, large_model),
        )
        for form in FORMATS
        for name, read_one in form.read_ones.items()
    ),
)
