"""Save and load PyTorch training states: modules, optimizers, schedulers, tensors, values.

`save` files modules under canonical FQNs and optimizers by the names of their
parameters; `load` compares everything first, then reads in place. Nothing is pickled, and nothing
that a file holds is executed or imported. On several ranks each writes and reads its own part;
`gather`, `distribute` and `broadcast` move DTensors between ranks, `convert` shares the bytes of a
conversion among them, and `state_dict` reads and sets states in any wrapping.
"""

from __future__ import annotations

from dsdformat.torch.background import Background, SaveHandle, free_staging
from dsdformat.torch.broadcast import broadcast
from dsdformat.torch.converting import convert
from dsdformat.torch.distribute import distribute
from dsdformat.torch.export import export_safetensors
from dsdformat.torch.flatten import FlattenParams, consolidate
from dsdformat.torch.gather import gather
from dsdformat.torch.load import load
from dsdformat.torch.load_model import load_model
from dsdformat.torch.mapped import map_parameters
from dsdformat.torch.per_rank import PerRank
from dsdformat.torch.preflight import Preflight, preflight
from dsdformat.torch.recipes import Recipe
from dsdformat.torch.report import Cast, Loaded, LoadReport, Mismatch
from dsdformat.torch.rng import rng_state, set_rng_state
from dsdformat.torch.save import save
from dsdformat.torch.snapshot import snapshot

__all__ = [
    "Background",
    "Cast",
    "FlattenParams",
    "LoadReport",
    "Loaded",
    "Mismatch",
    "PerRank",
    "Preflight",
    "Recipe",
    "SaveHandle",
    "broadcast",
    "consolidate",
    "convert",
    "distribute",
    "export_safetensors",
    "free_staging",
    "gather",
    "load",
    "load_model",
    "map_parameters",
    "preflight",
    "rng_state",
    "save",
    "set_rng_state",
    "snapshot",
]
