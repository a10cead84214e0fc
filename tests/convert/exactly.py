"""Says whether a foreign file is read exactly: ours makes the same checkpoint of it as torch."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import torch

import dsdformat
import dsdformat.torch as dsd
from dsdformat.convert import Foreign, open_foreign


def saved(state: Any, path: Path, *, zipped: bool = True, protocol: int = 2) -> Path:
    """Save with torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    return path


def digest_of(foreign: Foreign, folder: Path) -> str:
    """Convert; return the root digest."""
    with dsdformat.create(folder, threads=1) as writer:
        writer.add(foreign.state())
        return writer.commit()


def torch_digest(state: Any, folder: Path) -> str:
    """Save with dsdformat.torch; return the root digest."""
    return dsd.save(folder, state, threads=1)


def assert_exact(path: Path, folder: Path, *, state: Any = None) -> None:
    """Compare what we convert with what torch loads, or with the state that it should load."""
    if state is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
    with open_foreign(path) as foreign:
        assert foreign.findings == ()
        ours = digest_of(foreign, folder / "ours")
    assert ours == torch_digest(state, folder / "theirs")
