"""torch's own collectives, in the shape that scenarios ask for."""

from __future__ import annotations

import torch
from torch import distributed


def broadcast(tensor: torch.Tensor) -> None:
    """Give all ranks what rank 0 has."""
    distributed.broadcast(tensor, 0)
