"""Command line of the fuzz program.

    tools/fuzz run [--seconds N] [TARGET...]   go on from the corpus, a piece of each target in turn
    tools/fuzz smoke                           a fixed number of inputs of a fixed seed, as CI does
    tools/fuzz replay FILE...                  read inputs that were saved, and say what comes out
    tools/fuzz totals [--readme]               how many inputs there were; into README.md

Say `.venv/bin/python tools/fuzz` for `tools/fuzz`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fuzz.engine import Finding, Run, attempt, limits
from fuzz.guided import can_guide, run_guided
from fuzz.peer import Peer, find_node
from fuzz.targets import TARGETS, Target, choose_targets
from fuzz.totals import Store

__all__ = ["feed_target", "main"]

_ROOT = Path(__file__).resolve().parent.parent.parent
_STORE = _ROOT / ".fuzz"
_README = Path(__file__).with_name("README.md")
_BEGIN, _END = "<!-- totals -->", "<!-- /totals -->"
SMOKE_SEED = 8


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    code: int = options.command(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="go on from the corpus")
    run.add_argument("targets", nargs="*", metavar="TARGET")
    run.add_argument("--seconds", type=float, default=60, help="in all (default 60)")
    run.add_argument("--piece", type=float, default=10, help="of one target at a time (default 10)")
    run.add_argument("--folder", type=Path, default=_STORE, help="of corpus, findings and totals")
    run.add_argument("--guided", action="store_true", help="let atheris choose, by coverage")
    run.add_argument("--no-peer", action="store_true", help="without the JavaScript reader")
    run.set_defaults(command=_run)
    smoke = commands.add_parser("smoke", help="a fixed number of inputs of a fixed seed")
    smoke.add_argument("targets", nargs="*", metavar="TARGET")
    smoke.add_argument("--here", action="store_true", help="in this process, one after another")
    smoke.set_defaults(command=_smoke)
    replay = commands.add_parser("replay", help="read saved inputs")
    replay.add_argument("target", metavar="TARGET")
    replay.add_argument("files", nargs="+", type=Path, metavar="FILE")
    replay.set_defaults(command=_replay)
    totals = commands.add_parser("totals", help="how many inputs there were")
    totals.add_argument("--folder", type=Path, default=_STORE)
    totals.add_argument("--readme", action="store_true", help="into README.md too")
    totals.set_defaults(command=_totals)
    return parser


# Runs


def feed_target(
    target: Target,
    seed: int | str,
    corpus: list[bytes],
    *,
    node: str | None = None,
    count: int | None = None,
    seconds: float | None = None,
) -> tuple[Run, Peer | None]:
    """Feed one target, with the JavaScript reader beside it if there is a node."""
    run = Run(target, seed, corpus)
    if node is None or not target.peer:
        run.feed(count=count, seconds=seconds)
        return run, None
    with Peer(target, node) as peer:
        run.feed(count=count, seconds=seconds, tell=peer.tell)
    run.findings |= peer.findings
    return run, peer


def _run(options: argparse.Namespace) -> int:
    store, end, found = Store(options.folder), time.monotonic() + options.seconds, 0
    node = None if options.no_peer else find_node()
    if options.guided and not can_guide():
        print("atheris is not installed\n\nhint: pip install 'dsdformat[fuzz]'", file=sys.stderr)
        return 2
    targets = choose_targets(options.targets)
    while time.monotonic() < end:
        for target in targets:
            seconds = min(options.piece, end - time.monotonic())
            if seconds <= 0:
                break
            if options.guided:
                found += run_guided(target, store, seconds)
            else:
                found += _run_piece(target, store, seconds, node)
    print(*_table(store), sep="\n")
    return 1 if found else 0


def _run_piece(target: Target, store: Store, seconds: float, node: str | None) -> int:
    """Feed a target for a while, from its seeds and what was kept, with numbers not used before."""
    pieces = store.totals().get(target.name, {}).get("pieces", 0)
    corpus = [*target.seeds(), *store.corpus(target.name)]
    run, peer = feed_target(target, f"run {pieces}", corpus, node=node, seconds=seconds)
    store.keep(target.name, run.fresh)
    read = {"peer": peer.read, "renamed": peer.renamed, "excused": peer.excused} if peer else {}
    store.count(target.name, pieces=1, inputs=run.fed, **read)
    print(f"{target.name}: {run.fed} inputs, {len(run.fresh)} new, {len(run.findings)} findings")
    for finding in run.findings.values():
        print(f"  {finding.kind}: {finding.save(store.findings)}", flush=True)
    return len(run.findings)


# The smoke run


def _smoke(options: argparse.Namespace) -> int:
    targets = choose_targets(options.targets)
    if options.here:
        return max(_smoke_target(target) for target in targets)
    if find_node() is None:
        print("without node, the JavaScript reader is not asked", file=sys.stderr)
        if os.environ.get("CI") == "true":
            return 1
    # The longest first, and each in a process of its own: sets of strings have one order then.
    targets.sort(key=lambda target: not target.name.startswith(("folder", "manifest", "torch")))
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent), "smoke", "--here"]

    def start(target: Target) -> int:
        return subprocess.run([*command, target.name], env=environment, check=False).returncode

    with concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        return max(pool.map(start, targets))


def _smoke_target(target: Target) -> int:
    start = time.process_time()
    run, peer = feed_target(
        target, SMOKE_SEED, target.seeds(), node=find_node(), count=target.smoke
    )
    beside = f", {peer.read} by both readers" if peer else ""
    spent = time.process_time() - start
    print(f"{target.name}: {run.fed} inputs{beside}, {len(run.findings)} findings, {spent:.0f} s")
    for finding in run.findings.values():
        _show(finding)
    return 1 if run.findings else 0


def _show(finding: Finding) -> None:
    print(f"{finding.target}: {finding.kind}\n{finding.text}\n{finding.data.hex()}")


# Saved inputs, and totals


def _replay(options: argparse.Namespace) -> int:
    (target,) = choose_targets([options.target])
    node, status = find_node(), 0
    with contextlib.ExitStack() as stack:
        renew = stack.enter_context(limits())
        peer = stack.enter_context(Peer(target, node)) if node and target.peer else None
        target.seeds()
        renew()
        for file in options.files:
            data = file.read_bytes()
            outcome = attempt(target, data)
            print(f"{file}: {', '.join(outcome.codes) or 'accepted'}")
            if outcome.finding is not None:
                _show(outcome.finding)
                status = 1
            if peer is not None:
                peer.tell(data, outcome)
                peer.flush()
        for finding in peer.findings.values() if peer else ():
            _show(finding)
            status = 1
    return status


def _totals(options: argparse.Namespace) -> int:
    table = "\n".join(_table(Store(options.folder)))
    print(table)
    if options.readme:
        before, rest = _README.read_text("utf-8").split(_BEGIN)
        after = rest.split(_END)[1]
        _README.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{after}", "utf-8")
    return 0


def _table(store: Store) -> Iterator[str]:
    """Yield the lines of a table of how many inputs there were."""
    totals = store.totals()
    yield "| target | reads | inputs | of these by coverage | by both readers |"
    yield "|---|---|---|---|---|"
    sums = [0, 0, 0]
    for target in TARGETS:
        row = totals.get(target.name, {})
        numbers = [row.get("inputs", 0), row.get("guided", 0), row.get("peer", 0)]
        sums = [a + b for a, b in zip(sums, numbers, strict=True)]
        yield f"| {target.name} | {target.what} | " + " | ".join(f"{n:,}" for n in numbers) + " |"
    yield "| all | | " + " | ".join(f"{n:,}" for n in sums) + " |"
