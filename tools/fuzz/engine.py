"""Feed a target from a seed alone: change an input, read it, keep what gave something new.

An input is something new if its error, without the numbers in it, was not seen before. No clock
and no coverage decides, so a seed and a number of inputs always give the same inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsdformat.errors import DsdError
from fuzz.bytewise import mutated
from fuzz.targets import Target

__all__ = ["RENEW", "Finding", "Outcome", "Run", "TooSlowError", "attempt", "limits"]

SECONDS_MAX = 2.0  # of CPU
_TICKS = 20  # of the clock, in that time
EXTRA_NBYTES_MAX = 256 * 2**20
_KEPT_MAX = 40  # inputs for each outcome
_SEEDS_CHANCE = 0.5
RENEW = 1000  # inputs after which the limit of memory counts from what is used then
_NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9a-f]{16,}|[0-9]+|'[^']*'|\"[^\"]*\"")
_SHOWN = 100


class TooSlowError(BaseException):
    """An input takes too long. No handler of errors stops it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that broke the rule.

    Attributes:
        target: Name of the target.
        kind: Type of what came out, and where it came from.
        text: The whole story, for people.
        data: The input.
    """

    target: str
    kind: str
    text: str
    data: bytes

    def save(self, folder: Path) -> Path:
        """Write the input and its story; one of each kind is enough."""
        name = hashlib.sha256(self.kind.encode()).hexdigest()[:12]
        path = folder / self.target / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.data)
            path.with_suffix(".txt").write_text(f"{self.kind}\n\n{self.text}\n")
        return path


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an input.

    Attributes:
        codes: What is wrong with it; none if it was accepted.
        feature: The same, finer: equal for inputs that took the same way.
        finding: The rule was broken.
    """

    codes: tuple[str, ...]
    feature: str
    finding: Finding | None = None


class _Clock:
    """Counts the ticks of an input, so that no timer is set for each: most take microseconds."""

    def __init__(self) -> None:
        self.runs = False
        self.ticks = 0

    def tick(self, _number: int, _frame: Any) -> None:
        """End what has taken too long: at most a tick before its time, and never after."""
        self.ticks += 1
        if self.runs and self.ticks >= _TICKS:
            self.runs = False
            raise TooSlowError(f"more than {SECONDS_MAX} s of CPU")


_CLOCK = _Clock()


def attempt(target: Target, data: bytes) -> Outcome:
    """Read an input, and see that nothing but our errors comes out, in time and in memory."""
    _CLOCK.ticks, _CLOCK.runs = 0, True
    try:
        codes = target.read(data)
        _CLOCK.runs = False
        return Outcome(codes, ",".join(codes) or "accepted")
    except DsdError as error:
        _CLOCK.runs = False
        return Outcome((error.code,), error.code + _NUMBERS.sub("", str(error)[:_SHOWN]))
    except (Exception, TooSlowError) as error:
        _CLOCK.runs = False
        kind = f"{type(error).__name__} at {_place(error)}"
        text = "".join(traceback.format_exception(error, limit=-20))
        return Outcome(("fault",), kind, Finding(target.name, kind, text, data))


def _place(error: BaseException) -> str:
    """The innermost line of ours that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "dsdformat/" in frame.filename] or frames
    last = ours[-1]
    return f"{last.filename.rsplit('dsdformat/', 1)[-1]}:{last.lineno}"


@contextlib.contextmanager
def limits() -> Iterator[Callable[[], None]]:
    """Within: an input gets so much CPU and memory. Gives what counts memory anew from now on."""
    before = signal.signal(signal.SIGPROF, _CLOCK.tick)
    signal.setitimer(signal.ITIMER_PROF, *2 * [SECONDS_MAX / _TICKS])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def renew() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + EXTRA_NBYTES_MAX
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))

    try:
        yield renew
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


@dataclass
class Run:
    """One target, fed until it has had its inputs or its time.

    Attributes:
        target: What is fed.
        seed: Decides the inputs, with the corpus.
        corpus: What inputs are made from; grows.
        fed: How many inputs were read.
        findings: By kind, the first input.
        codes: How often which codes came out.
    """

    target: Target
    seed: int | str = 0
    corpus: list[bytes] = field(default_factory=list)
    fed: int = 0
    findings: dict[str, Finding] = field(default_factory=dict)
    codes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    fresh: list[bytes] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _kept: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _given: int = 0

    def __post_init__(self) -> None:
        self._given = len(self.corpus)

    def inputs(self) -> Iterator[bytes]:
        """Yield the corpus as it is, then changes of it without end."""
        target, corpus = self.target, self.corpus
        rng = random.Random(f"{target.name} {self.seed}")
        seeds = len(corpus)
        yield from list(corpus)
        while True:
            among = seeds if rng.random() < _SEEDS_CHANCE else len(corpus)
            parent = corpus[int(rng.random() * among)]
            try:
                yield target.mutate(parent, rng, corpus)
            except RecursionError:
                yield mutated(parent, rng, corpus)

    def feed(
        self,
        *,
        count: int | None = None,
        seconds: float | None = None,
        tell: Callable[[bytes, Outcome], None] = lambda _data, _outcome: None,
    ) -> None:
        """Feed some inputs.

        Args:
            count: How many; None for as many as there is time for.
            seconds: For how long; None for as long as it takes.
            tell: Gets each input with what became of it.
        """
        end = None if seconds is None else time.monotonic() + seconds
        with limits() as renew:
            for data in self.inputs():
                if self.fed == count or (end is not None and time.monotonic() >= end):
                    break
                if self.fed % RENEW == 0:
                    renew()
                outcome = attempt(self.target, data)
                self.fed += 1
                self._note(data, outcome)
                tell(data, outcome)

    def _note(self, data: bytes, outcome: Outcome) -> None:
        self.codes[outcome.codes] += 1
        if outcome.finding is not None:
            self.findings.setdefault(outcome.finding.kind, outcome.finding)
        elif outcome.feature not in self._seen:
            self._seen.add(outcome.feature)
            if self.fed <= self._given:
                return
            self._kept[outcome.codes] += 1
            if self._kept[outcome.codes] <= _KEPT_MAX:
                self.fresh.append(data)
                self.corpus.append(data)
