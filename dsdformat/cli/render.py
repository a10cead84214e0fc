"""How the commands print: aligned tables, byte sizes, JSON, errors.

Decides that data goes to stdout and all else to stderr, that nothing printed can drive a terminal,
that tables and JSON arrays are written while their rows are made, and that colour is decoration.
What is printed is the commands' matter.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import typer
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from dsdformat import DsdError
from dsdformat.cli.escapes import cells, escape, fit

__all__ = ["Column", "Output", "format_count", "format_pace", "format_seconds", "format_size"]

NAME_WIDTH = 200  # cells of a name where no terminal bounds it
MESSAGE_WIDTH = 2000
_FLEXIBLE_MIN = 16
_INDENT = _GAP = "  "
_BATCH = 2000  # rows that are aligned, and written, together


def format_size(nbytes: int) -> str:
    """Return a length in bytes for people: `512 B`, `64.0 MiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} EiB"


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 tensor`, `1,024 tensors`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_seconds(seconds: float) -> str:
    """Return a time for people: `12 ms`, `3.4 s`."""
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{max(round(seconds * 1000), 1)} ms"


def format_pace(nbytes: int, seconds: float) -> str:
    """Return how much was done in what time: `1.5 GiB in 3.4 s, 451.8 MiB/s`."""
    done = f"{format_size(nbytes)} in {format_seconds(seconds)}"
    # What takes less says how long it takes to begin.
    return f"{done}, {format_size(int(nbytes / seconds))}/s" if seconds >= 0.1 else done


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: What stands above it.
        right: Whether its cells are aligned to the right.
        flexible: Whether its cells are shortened to what a line has room for.
    """

    title: str
    right: bool = False
    flexible: bool = False


class Output:
    """Where one run of the command prints.

    Attributes:
        json: Whether errors are printed as JSON too.
        exit_code: What the run ends with if whoever reads stdout goes away.
        width: Columns of the terminal; None where stdout is none.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO, *, json: bool = False) -> None:
        self.json = json
        self.exit_code = 0
        self._stdout, self._stderr = _tolerant(stdout), _tolerant(stderr)
        self._console, self._error_console = _console(stdout), _console(stderr)
        self.width = self._console.width if self._console.is_terminal else None
        self._in_array = False

    @property
    def drawable(self) -> bool:
        """Whether stdout can show lines and blocks, which not every encoding has."""
        encoding = getattr(self._stdout, "encoding", None) or "utf-8"
        try:
            "█├".encode(encoding)
        except (LookupError, UnicodeEncodeError):
            return False
        return True

    @property
    def progress_console(self) -> Console | None:
        """Where progress can be shown: stderr, if it is a terminal that moves its cursor."""
        console = self._error_console
        return console if console.is_terminal and not console.is_dumb_terminal else None

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line of data."""
        self._write(_styled(self._console, escape(text), style) + "\n")

    def title(self, name: str) -> None:
        """Print a name above what is said of it."""
        self.line(fit(name, NAME_WIDTH), "bold")

    def note(self, text: str) -> None:
        """Tell the person something that is not data."""
        self._tell(f"{_styled(self._error_console, 'note', 'bold')}: {escape(text)}\n")

    def paragraph(self, text: str) -> None:
        """Print text, indented; on a terminal its lines end between words."""
        for line in self._wrapped(escape(fit(text, MESSAGE_WIDTH)), len(_INDENT)):
            self._write(f"{_INDENT}{line}\n")

    def pairs(self, pairs: Iterable[tuple[str, str]], width: int = 0) -> None:
        """Print labels and values, the values aligned; a label without a value is left out.

        Args:
            pairs: Labels are plain words.
            width: Of the labels, at least.
        """
        kept = [(label, escape(value)) for label, value in pairs if value]
        width = max(width, *(len(label) for label, _ in kept), 0)
        for label, value in kept:
            head = _styled(self._console, f"{label:{width}}", "dim")
            indent = len(_INDENT) + width + len(_GAP)
            lines = self._wrapped(value, indent)
            self._write(f"{_INDENT}{head}{_GAP}" + f"\n{'':{indent}}".join(lines) + "\n")

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> int:
        """Print rows in aligned columns, and return how many; nothing where there are none.

        Memory: 2,000 rows, however many there are.
        """
        count = 0
        widths = [cells(column.title) for column in columns]
        titles = [column.title for column in columns]
        for batch in filter(None, _batches(rows)):
            count += len(batch)
            table = [[escape(cell) for cell in row] for row in batch]
            widths = self._widths(columns, widths, table)
            if titles:
                self._write(_styled(self._console, _aligned(columns, widths, titles), "dim") + "\n")
                titles = []
            self._write("".join(_aligned(columns, widths, row) + "\n" for row in table))
        return count

    def first_rows(
        self, columns: Sequence[Column], rows: Iterable[Sequence[str]], count: int, most: int
    ) -> None:
        """Print a table below an empty line, and how many of `count` rows it leaves out, if any."""
        if count:
            self.line()
            self.table(columns, itertools.islice(rows, most))
        if count > most:
            self.line(f"and {count - most:,} more; --json lists all")

    def document(self, fields: Mapping[str, Any]) -> None:
        """Print one JSON object.

        Args:
            fields: What it holds. A value that is an iterator becomes an array, written while it
                is made; if making it fails, the error becomes the last field.
        """
        separator = "{\n"
        for key, value in fields.items():
            self._write(f"{separator}  {json.dumps(key)}: ")
            if isinstance(value, Iterator):
                self._array(value)
            else:
                self._write(_dumps(value, indent=2).replace("\n", "\n  "))
            separator = ",\n"
        self._write("\n}\n")

    def error(self, code: str, messages: Sequence[str], hint: str | None) -> None:
        """Print an error to stderr, and to stdout as well where JSON was asked for."""
        head = _styled(self._error_console, f"error[{escape(code)}]", "bold red")
        first, *more = (escape(fit(message, MESSAGE_WIDTH)) for message in messages)
        lines = [f"{head}: {first}", *(f"{_INDENT}{line}" for line in more)]
        if hint:
            lines += ["", f"{_styled(self._error_console, 'hint', 'bold')}: {escape(hint)}"]
        self._tell("\n".join(lines) + "\n")
        if self.json:
            fault = {"code": code, "message": "\n".join(messages), "hint": hint}
            text = _dumps({"error": fault}, indent=2)
            self._write(("\n  ]," + text[1:] if self._in_array else text) + "\n")

    def flush(self) -> None:
        """Hand everything to the system; quiet if whoever read stdout has gone.

        Raises:
            OSError: stdout cannot be written to, as on a full disk.
        """
        try:
            self._stdout.flush()
        except BrokenPipeError:
            self._silence()
        except OSError:
            self._silence()
            raise

    def _array(self, items: Iterator[Any]) -> None:
        self._write("[")
        self._in_array = True
        separator = "\n    "
        for batch in filter(None, _batches(items)):
            self._write(separator + ",\n    ".join(map(_dumps, batch)))
            separator = ",\n    "
        self._in_array = False
        self._write("\n  ]" if separator.startswith(",") else "]")

    def _widths(
        self, columns: Sequence[Column], widths: Sequence[int], table: Sequence[Sequence[str]]
    ) -> list[int]:
        """Widen columns to what a batch needs; the flexible ones share what is left of a line."""
        turned = zip(*table, strict=True)
        wide = [max(old, *map(cells, column)) for old, column in zip(widths, turned, strict=True)]
        flexible = [number for number, column in enumerate(columns) if column.flexible]
        if self.width is None:
            return [min(w, NAME_WIDTH) if n in flexible else w for n, w in enumerate(wide)]
        fixed = sum(w for number, w in enumerate(wide) if number not in flexible)
        left = self.width - fixed - len(_GAP) * (len(columns) - 1)
        flexible.sort(key=lambda number: wide[number])
        for done, number in enumerate(flexible):
            wide[number] = min(wide[number], max(_FLEXIBLE_MIN, left // (len(flexible) - done)))
            left -= wide[number]
        return wide

    def _wrapped(self, text: str, indent: int) -> list[str]:
        room = len(text) if self.width is None else max(_FLEXIBLE_MIN, self.width - indent)
        if cells(text) <= room:
            return [text]
        return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)

    def _write(self, text: str) -> None:
        try:
            self._stdout.write(text)
        except BrokenPipeError:
            self._silence()
            raise typer.Exit(self.exit_code) from None
        except OSError:
            self._silence()
            raise

    def _tell(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stderr.write(text)
            self._stderr.flush()

    def _silence(self) -> None:
        """Send what is still buffered for a stdout that fails nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stdout.fileno())
        os.close(nowhere)


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Gather items; if making one fails, those before it are still handed out."""
    batch: list[Any] = []
    try:
        for item in items:
            batch.append(item)
            if len(batch) == _BATCH:
                yield batch
                batch = []
    except DsdError:
        yield batch
        raise
    yield batch


def _aligned(columns: Sequence[Column], widths: Sequence[int], row: Sequence[str]) -> str:
    parts = []
    for column, width, text in zip(columns, widths, row, strict=True):
        shown = fit(text, width) if column.flexible else text
        space = " " * (width - cells(shown))
        parts.append(space + shown if column.right else shown + space)
    return _GAP.join(parts).rstrip()


def _dumps(value: Any, indent: int | None = None) -> str:
    # ASCII only, so that a name is safe on a terminal and whole in any locale.
    return json.dumps(value, indent=indent, allow_nan=False)


def _styled(console: Console, text: str, style: str) -> str:
    if not style or console.color_system is None or console.legacy_windows:
        return text
    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


def _console(stream: TextIO) -> Console:
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(file=stream, color_system=None if plain else "auto", highlight=False)


def _tolerant(stream: TextIO) -> TextIO:
    """Let a stream escape what its encoding lacks, instead of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return stream
