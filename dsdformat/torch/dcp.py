"""Storage for `torch.distributed.checkpoint` that writes and reads ordinary checkpoints.

One changed line for who uses `dcp.save`, `dcp.async_save` and `dcp.load`:

    dcp.save(state, storage_writer=DsdStorageWriter(path))
    dcp.load(state, storage_reader=DsdStorageReader(path))

This module only gathers the names. It loads `torch.distributed.checkpoint`, so nothing else of
the package imports it.
"""

from __future__ import annotations

from dsdformat.torch.dcp_reader import DsdStorageReader, FileSystemReader
from dsdformat.torch.dcp_writer import DsdStorageWriter, FileSystemWriter

__all__ = ["DsdStorageReader", "DsdStorageWriter", "FileSystemReader", "FileSystemWriter"]
