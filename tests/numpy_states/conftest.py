"""What tests of `dsdformat.numpy` share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# For `sameness`, which says when a loaded state is the saved one.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "properties"))


@pytest.fixture
def round_trip(tmp_path: Path) -> Callable[..., Any]:
    """`round_trip(state, **options)` saves, verifies and loads."""
    import dsdformat
    import dsdformat.numpy

    def round_trip(state: Any, **options: Any) -> Any:
        path = tmp_path / "checkpoint"
        root = dsdformat.numpy.save(path, state, overwrite=True, **options)
        report = dsdformat.verify(path, digest=root)
        assert report.problems == ()
        assert report.unlisted == ()
        return dsdformat.numpy.load(path, digest=root)

    return round_trip
