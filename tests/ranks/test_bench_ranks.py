"""tools/bench on ranks: each contender runs once, tiny, and its rows say what all ranks did."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.ranks.launching import ROOT
from tests.ranks.layouts import everywhere

if not sys.platform.startswith("linux"):
    pytest.skip("the bench program reads /proc", allow_module_level=True)

TINY = 0.001
CONTENDERS = ("raw", "dsdformat", "dsdformat (export)", "dsdformat (set_state_dict)")


def rows_of(folder: str, ranks: int) -> list[Any]:
    """Measure ours and the plain calls, of all cases that so many ranks take, on these ranks."""
    sys.path.insert(0, str(ROOT / "tools"))
    from bench.case import Scene
    from bench.cases import CASES
    from bench.measure import measure, prepare
    from bench.sharded import build_sharded

    @functools.cache
    def built(columns: bool) -> Any:
        return build_sharded(TINY, columns=columns)

    def build(_: Scene, *, columns: bool = False) -> Any:
        return built(columns)  # takes longest; each load leaves it as it was

    ways = [(case, one) for case in CASES for one in case.contenders if one.ranks == ranks]
    found = []
    with (
        mock.patch("bench.cases.ranks.build", build),
        mock.patch("bench.measure.WARM_UP_CALLS", 0),
        mock.patch("bench.measure.prepare", return_value=None),
    ):
        for number, (case, one) in enumerate(ways):
            if one.name not in CONTENDERS:
                continue
            place = Path(folder) / str(number)
            fixture = Path(folder) / (one.fixture or "none") / "checkpoint"
            scene = Scene(TINY, place, fixture)
            place.mkdir(exist_ok=True)
            if not everywhere(fixture.exists())[0]:
                prepare(one, scene)
            found.append(measure(case, one, scene).to_dict())
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_contenders_on_ranks_give_rows_with_sane_figures(ranks, world_size, tmp_path):
    rows, *others = ranks(world_size)(rows_of, str(tmp_path), world_size)
    assert all(len(other) == len(rows) for other in others)
    assert {row["case"] for row in rows} >= {
        "ranks-load-2-of-4" if world_size == 2 else "ranks-save"
    }
    for row in rows:
        assert 2 << 20 < row["nbytes"] < 4 << 20
        assert 0 < row["call_s"] <= row["total_s"]
        assert 0 <= row["other"] <= 1
        assert row["columns"]["rank 0 MiB"] < 256
        if row["contender"] == "dsdformat" and "load" in row["case"]:
            assert 1 <= row["columns"]["read / data"] < 1.3  # its small manifest counts too
