"""tensorizer, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.case import UnmeasurableError
from bench.formats.format import Format

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["TENSORIZER"]


def save(path: Path, state: State) -> None:
    """Save the model's state dict."""
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(path))
    try:
        serializer.write_state_dict(state.module.state_dict())
    except RuntimeError as error:
        if "Metadata overflow" not in str(error):
            raise
        raise UnmeasurableError("it has no room for the names of so many tensors") from None
    finally:
        serializer.close()


def load(path: Path, state: State) -> None:
    """Read all tensors, and copy each into its parameter."""
    from tensorizer import TensorDeserializer

    wanted = state.module.state_dict()
    with TensorDeserializer(str(path), device="cpu", lazy_load=False) as file:
        for name, parameter in wanted.items():
            parameter.copy_(file[name])


def read_one(path: Path, state: State, index: int) -> None:
    """Read one tensor, and copy it into its parameter."""
    from tensorizer import TensorDeserializer

    name = state.name(index)
    with TensorDeserializer(str(path), device="cpu", lazy_load=True) as file:
        state.module.state_dict()[name].copy_(file[name])


TENSORIZER = Format(
    name="tensorizer",
    needs=("tensorizer",),
    save=save,
    loads={"tensorizer": load},
    read_ones={"tensorizer": read_one},
    has_optimizers=False,
    save_takes=1.4,
    load_takes=1.4,
)
