"""The JavaScript reader beside ours: both must accept an input, or both refuse it.

One node process reads inputs from a pipe, many at a time. Which code names a fault may differ
where an input has several; that is counted, and no finding.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from pathlib import Path
from types import TracebackType

from fuzz import codecs
from fuzz.engine import Finding, Outcome
from fuzz.targets import Target

__all__ = ["Peer", "find_node"]

_SCRIPT = Path(__file__).resolve().parent.parent / "reader_js" / "run_cases.mjs"
_KINDS = {"manifest": b"M", "folder": b"F", "values": b"V", "codec": b"C"}
_BATCH_NBYTES = 48 * 1024  # less than a pipe holds: writing never waits for reading
_BATCH_INPUTS = 1000
_SECONDS_MAX = 30.0  # for a batch
_DECODERS = {"bad_compressed_data", "checksum_mismatch"}


def find_node() -> str | None:
    """The path of node, if it and what the reader needs are installed."""
    node = shutil.which("node")
    return node if (_SCRIPT.parent / "node_modules").is_dir() else None


class Peer:
    """A node process that reads what ours has read. A context manager.

    Attributes:
        read: How many inputs it has read.
        renamed: How many of these both refuse, and for which they name other codes.
        excused: How many one takes and one does not, where the spec lets decoders differ.
        findings: By kind, the first input on which they do not agree.
    """

    def __init__(self, target: Target, node: str) -> None:
        self.target = target
        self.read = self.renamed = self.excused = 0
        self.findings: dict[str, Finding] = {}
        self._kind = _KINDS[target.name]
        self._node = node
        self._process = self._start()
        self._batch: list[tuple[bytes, tuple[str, ...]]] = []
        self._nbytes = 0
        self._sent: list[tuple[bytes, tuple[str, ...]]] = []

    def _start(self) -> subprocess.Popen[bytes]:
        command = [self._node, "--stack-size=900", str(_SCRIPT)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.flush()
        self._process.kill()
        self._process.communicate()

    def tell(self, data: bytes, outcome: Outcome) -> None:
        """Give it an input with what our reader says of it."""
        if outcome.finding is not None:
            return
        self._batch.append((data, outcome.codes))
        self._nbytes += len(data)
        if self._nbytes > _BATCH_NBYTES or len(self._batch) >= _BATCH_INPUTS:
            self._send()

    def flush(self) -> None:
        """Send what is left, and hear of all of it."""
        self._send()
        self._hear()

    def _send(self) -> None:
        """Send a batch, after the one before was answered: both read at the same time."""
        self._hear()
        pipe = self._process.stdin
        assert pipe is not None
        for data, _ in self._batch:
            piece = self._packed(data)
            pipe.write(self._kind + len(piece).to_bytes(4, "little") + piece)
        pipe.flush()
        self._sent, self._batch, self._nbytes = self._batch, [], 0

    def _packed(self, data: bytes) -> bytes:
        if self.target.name != "codec":
            return data
        block = codecs.unpacked(data)
        head = bytes([block.codec, codecs.number_of(block.dtype)])
        return head + block.nbytes.to_bytes(4, "little") + block.stored

    def _hear(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        watch = threading.Timer(_SECONDS_MAX, self._process.kill)
        watch.start()
        for data, ours in self._sent:
            line = pipe.readline()
            if not line:  # killed, or out of memory: the rest of the batch is lost
                self._find(data, "JavaScript: the process has ended, or took too long", "")
                self._process.communicate()
                self._process = self._start()
                break
            self._compare(data, ours, json.loads(line))
        watch.cancel()
        self._sent = []

    def _compare(self, data: bytes, ours: tuple[str, ...], theirs: list[str] | str) -> None:
        self.read += 1
        if isinstance(theirs, str):
            self._find(data, f"JavaScript: {theirs.splitlines()[0][:80]}", theirs)
            return
        codes = tuple(code for code in theirs if code not in self.target.ignored)
        if bool(codes) == bool(ours):
            self.renamed += codes != ours
        elif {*codes, *ours} <= _DECODERS and codecs.is_coded(data):
            self.excused += 1
        else:
            self._find(data, f"Python {ours}, JavaScript {codes}", "")

    def _find(self, data: bytes, kind: str, text: str) -> None:
        self.findings.setdefault(kind, Finding(self.target.name, kind, text, data))
