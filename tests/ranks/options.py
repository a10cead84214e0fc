"""The options that most calls of the state dict functions are made with."""

from __future__ import annotations

import dataclasses

from dsdformat.torch.state_dict import StateDictOptions

FULL = StateDictOptions(full_state_dict=True)
HOST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = dataclasses.replace(FULL, flatten_optimizer_state_dict=True)
FLAT_HOST = dataclasses.replace(HOST, flatten_optimizer_state_dict=True)
FLAT_FROM_0 = dataclasses.replace(FROM_0, flatten_optimizer_state_dict=True)
