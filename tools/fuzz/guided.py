"""Let atheris choose the inputs: what reaches code that was not reached is kept.

It runs in a process of its own, since it instruments what it imports, and ends the process.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fuzz.totals import Store

__all__ = ["can_guide", "main", "run_guided"]

_NBYTES_MAX = 64 * 1024
_COUNTED_EACH = 64  # inputs


def can_guide() -> bool:
    """Whether atheris is installed."""
    return importlib.util.find_spec("atheris") is not None


def run_guided(target: Any, store: Store, seconds: float) -> int:
    """Run a target under atheris for a while; return how many findings there are."""
    from fuzz.foreign import (  # not above: `main` instruments what it imports
        SCRATCH,
        scratch_parent,
    )

    place = store.corpus_folder(target.name)
    with tempfile.TemporaryDirectory(dir=scratch_parent()) as folder:
        report = Path(folder) / "report"
        command = [
            *(sys.executable, "-c", "from fuzz.guided import main; main()"),
            *(target.name, str(store.folder), str(report), str(place)),
            *(f"-max_total_time={max(1, int(seconds))}", f"-max_len={_NBYTES_MAX}"),
            *("-verbosity=0", f"-artifact_prefix={folder}/", "-timeout=30", "-rss_limit_mb=4096"),
        ]
        path = os.pathsep.join(str(Path(__file__).resolve().parents[up]) for up in (1, 2))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", SCRATCH: folder}
        done = subprocess.run(command, env=environment, check=False, capture_output=True)
        lines = report.read_text().split() if report.exists() else ["0"]
    fed, found = int(lines[0]), len(lines) - 1
    store.count(target.name, inputs=fed, guided=fed)
    print(f"{target.name}: {fed} inputs by coverage, {found} findings", flush=True)
    if not fed:
        print(done.stderr.decode("utf-8", "replace")[-2000:], file=sys.stderr)
    return found


def main() -> None:
    """Run one target; the process ends in atheris."""
    import atheris

    name, folder, report, corpus, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["dsdformat"], enable_loader_override=False):
        from fuzz.engine import RENEW, attempt, limits
        from fuzz.targets import choose_targets

        (target,) = choose_targets([name])
    store, out = Store(Path(folder)), Path(report)
    seeds = target.seeds()
    place = Path(corpus)
    if not any(place.iterdir()):
        store.keep(name, seeds)
    kinds: list[str] = []
    fed = 0

    def one(data: bytes) -> None:
        nonlocal fed
        if fed % RENEW == 0:
            renew()
        outcome = attempt(target, data)
        fed += 1
        if outcome.finding is not None and outcome.finding.kind not in kinds:
            kinds.append(outcome.finding.kind)
            print(outcome.finding.kind, outcome.finding.save(store.findings), flush=True)
        if fed % _COUNTED_EACH == 0:
            out.write_text(" ".join([str(fed), *("1" * len(kinds))]))

    def change(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.2:
            return bytes(atheris.Mutate(data, most))
        return target.mutate(bytes(data), rng, seeds)[:most]

    with limits() as renew:
        atheris.Setup([sys.argv[0], corpus, *options], one, custom_mutator=change)
        atheris.Fuzz()
