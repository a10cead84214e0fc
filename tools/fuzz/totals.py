"""What runs leave for the next: the corpus, findings, and how many inputs there were."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Store"]

Totals = dict[str, dict[str, int]]
_CORPUS_MAX = 3000  # files of a target


class Store:
    """A folder with `corpus/TARGET`, `findings/TARGET` and `totals.json`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def findings(self) -> Path:
        """Where findings are saved."""
        return self.folder / "findings"

    def corpus_folder(self, target: str) -> Path:
        """Where inputs of a target are kept, a file each."""
        place = self.folder / "corpus" / target
        place.mkdir(parents=True, exist_ok=True)
        return place

    def corpus(self, target: str) -> list[bytes]:
        """The inputs that were kept of a target."""
        return [path.read_bytes() for path in sorted(self.corpus_folder(target).iterdir())]

    def keep(self, target: str, inputs: Iterable[bytes]) -> None:
        """Keep inputs that gave something new."""
        place = self.corpus_folder(target)
        room = _CORPUS_MAX - sum(1 for _ in place.iterdir())
        for data in list(inputs)[: max(0, room)]:
            (place / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)

    def totals(self) -> Totals:
        """How many inputs each target has had, by who chose them."""
        path = self.folder / "totals.json"
        found: Totals = json.loads(path.read_text()) if path.exists() else {}
        return found

    def count(self, target: str, **numbers: int) -> None:
        """Add to the numbers of a target; several processes may."""
        with self._locked():
            totals = self.totals()
            row = totals.setdefault(target, {})
            for key, number in numbers.items():
                row[key] = row.get(key, 0) + number
            new = self.folder / "totals.json.new"
            new.write_text(json.dumps(totals, indent=1, sort_keys=True) + "\n")
            new.replace(self.folder / "totals.json")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
