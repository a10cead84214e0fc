"""What values and tensors come back as."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch

from compare.case import Scene, Subject, WrongError, expect, expect_equal, expect_refusal
from compare.libraries import DCP, SAFETENSORS, TORCH_SAVE

__all__ = ["VALUES"]

VALUES = Subject("Values and tensors")


@VALUES.case(
    "a list that has grown comes back, though the program's own is still empty",
    source="pytorch/pytorch#137327",
    pair=DCP,
)
def lists_are_values(library: Any, scene: Scene) -> None:
    library.save(scene.folder, {"k": [{"x": 1}, {"y": 2}]})
    state = library.load(scene.folder, {"k": []})
    expect_equal(state["k"], [{"x": 1}, {"y": 2}], "the list")


@VALUES.case(
    "a target in a narrower dtype is an error that names both",
    source="pytorch/pytorch#187138",
    pair=DCP,
)
def narrower_targets(library: Any, scene: Scene) -> None:
    library.save(scene.folder, {"w": torch.randn(4, 3) * 100})
    target = torch.zeros(4, 3, dtype=torch.bfloat16)
    expect_refusal(
        lambda: library.load(scene.folder, {"w": target}),
        *("float32", "bfloat16"),
        otherwise="rounded in silence",
    )


@VALUES.case(
    "names that the program does not ask for are told, as are those that are missing",
    source="pytorch/pytorch#148252",
    pair=DCP,
)
def names_that_differ(library: Any, scene: Scene) -> None:
    library.save(scene.folder, {"a": torch.ones(2), "bb": torch.ones(2)})
    for wanted, name in ((("a", "cc"), "cc"), (("a",), "bb")):
        target = {key: torch.zeros(2) for key in wanted}
        expect_refusal(
            partial(library.load, scene.folder, target), name, otherwise=f"not told of {name}"
        )
        expect(not target["a"].any(), "changed before it was refused")


@VALUES.case(
    "scalars of numpy and random states that can be saved can be loaded",
    source="nerfstudio-project/nerfstudio#3683",
    pair=TORCH_SAVE,
)
def what_is_saved_loads(library: Any, scene: Scene) -> None:
    import numpy as np

    state: dict[str, Any] = {
        "loss": np.float64(0.25),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    library.save(scene.folder, state)
    found = library.read(scene.folder)
    expect_equal(found["loss"], 0.25, "the scalar")
    expect_equal(found["python"], state["python"], "the random state")
    np.random.set_state(found["numpy"])
    expect(np.array_equal(found["numpy"][1], state["numpy"][1]), "another random state")


@VALUES.case(
    "8-bit and 4-bit floats come back by each route that a library has",
    source="safetensors/safetensors#839",
    pair=SAFETENSORS,
)
def narrow_floats(library: Any, scene: Scene) -> None:
    bits = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    kinds = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
    tensors = {str(kind): bits.clone().view(kind) for kind in kinds}
    for route in library.ROUTES:
        name = route.__name__.replace("_", " ")
        try:
            found = route(scene.folder, tensors)
        except Exception as error:
            raise WrongError(f"{name}, {type(error).__name__}: {error}") from error
        for key, tensor in tensors.items():
            expect_equal(found[key].dtype, tensor.dtype, f"{name}, the dtype")
            expect(torch.equal(found[key].view(torch.uint8), bits), f"{name}, other bits of {key}")


@VALUES.case(
    "tensors are saved however they lie in memory: channels last, transposed, expanded, stepped",
    source="safetensors/safetensors#308",
    pair=SAFETENSORS,
)
def strided_tensors(library: Any, scene: Scene) -> None:
    tensors = {
        "channels last": torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "transposed": torch.rand(6, 8).T,
        "expanded": torch.rand(1, 3).expand(4, 3),
        "stepped": torch.rand(12)[::3],
    }
    library.save(scene.folder, tensors)
    for name, tensor in library.read(scene.folder).items():
        expect(torch.equal(tensor, tensors[name]), f"{name}: other values")


@VALUES.case(
    "tied tensors are saved once, and tied again when they are loaded",
    source="safetensors/safetensors#202",
    pair=SAFETENSORS,
)
def tied_tensors(library: Any, scene: Scene) -> None:
    weight = torch.ones(256, 256)
    library.save(scene.folder, {"embed": weight, "head": weight})
    nbytes = sum(path.stat().st_size for path in scene.folder.rglob("*") if path.is_file())
    expect(nbytes < 2 * weight.nbytes, "stored twice")
    found = library.read(scene.folder)
    expect(torch.equal(found["head"], weight), "other values")
    expect(found["head"].data_ptr() == found["embed"].data_ptr(), "two tensors")
