"""One hypothesis profile for the properties; and saves that do not wait for a disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# For the modules beside this file that are no tests.
sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile(
    "dsdformat",
    deadline=None,
    derandomize=os.environ.get("CI", "") not in ("", "false", "0"),
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("dsdformat")


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Durability is not what these tests are about, and a flush takes longer than an example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield
