"""Save and load PyTorch training states: modules, optimizers, schedulers, tensors, values.

One process. `save` files modules under canonical FQNs and optimizers by the names of their
parameters; `load` compares everything first, then reads in place. Nothing is pickled, and nothing
that a file holds is executed or imported.
"""

from __future__ import annotations

from dsdformat.torch.load import load, load_model
from dsdformat.torch.recipes import Recipe
from dsdformat.torch.report import Cast, Loaded, LoadReport, Mismatch
from dsdformat.torch.rng import rng_state, set_rng_state
from dsdformat.torch.save import save
from dsdformat.torch.snapshot import snapshot

__all__ = [
    "Cast",
    "LoadReport",
    "Loaded",
    "Mismatch",
    "Recipe",
    "load",
    "load_model",
    "rng_state",
    "save",
    "set_rng_state",
    "snapshot",
]
