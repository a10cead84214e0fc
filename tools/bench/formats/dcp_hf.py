"""DCP's writer and reader of safetensors files, in a single process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import UnmeasurableError
from bench.formats.dcp import alone
from bench.formats.format import Format

if TYPE_CHECKING:
    from bench.states import State

__all__ = ["DCP_HF", "DCP_HF_CONSOLIDATED"]

NEEDS = ("torch", "safetensors", "fsspec")


def save(path: Path, state: State, **options: bool) -> None:
    """Save the model's state dict; its own fsync is off, as the bench flushes all files anyway."""
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    writer = storage().HuggingFaceStorageWriter(str(path), **options)
    writer.sync_files = False
    dcp_save(state.module.state_dict(), storage_writer=writer, **alone(dcp_save))


def load(path: Path, state: State) -> None:
    """Load into the state dict, which is the model's."""
    load_into(path, state.module.state_dict())


def read_one(path: Path, state: State, index: int) -> None:
    """Load a state dict of one tensor."""
    parameter = list(state.module.parameters())[index].detach()
    load_into(path, {state.name(index): parameter})


def load_into(path: Path, tensors: dict[str, Any]) -> None:
    """Load tensors in place."""
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    reader = storage().HuggingFaceStorageReader(str(path))
    dcp_load(tensors, storage_reader=reader, **alone(dcp_load))


def storage() -> Any:
    """Import the module; not all versions of torch have it."""
    try:
        from torch.distributed.checkpoint import hf_storage
    except ImportError as error:
        raise UnmeasurableError(f"this torch has no such storage: {error}") from None
    return hf_storage


DCP_HF = Format(
    name="dcp-hf",
    needs=NEEDS,
    save=save,
    loads={"dcp-hf": load},
    read_ones={"dcp-hf": read_one},
    has_optimizers=False,
    save_takes=3.3,
)
DCP_HF_CONSOLIDATED = Format(
    name="dcp-hf (consolidated)",
    needs=NEEDS,
    save=partial(save, save_distributed=True, enable_consolidation=True),
    loads={},  # what is consolidated is a file as any other
    has_optimizers=False,
    save_takes=4.3,
)
