"""What spec/ says in tables: byte tables, columns, registries. Each with the line it stands on."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SPEC = Path(__file__).resolve().parents[2] / "spec"


@dataclass(frozen=True)
class Row:
    """A row of a Markdown table: its cells by the names of the head, backticks taken off."""

    line: int
    cells: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells[column]


@dataclass(frozen=True)
class ByteField:
    line: int
    name: str
    offset: int
    nbytes: int
    type: str


@dataclass(frozen=True)
class Column:
    """A column of a section: `count` names what there is one number for."""

    name: str
    type: str
    count: str

    @property
    def width(self) -> int:
        return {"u32": 4, "u64": 8, "digest": 32}[self.type]


def tables(path: Path) -> list[list[Row]]:
    """The tables of a Markdown file, without those that have no rows."""
    found: list[list[Row]] = []
    head: list[str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = _cells(line)
            found.append([])
        elif not set(line) <= set("|-: "):
            found[-1].append(Row(number, dict(zip(head, map(_bare, _cells(line)), strict=True))))
    return [table for table in found if table]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _bare(cell: str) -> str:
    return cell[1:-1] if re.fullmatch(r"`[^`]*`", cell) else cell


def marked(cell: str) -> str:
    """A cell as it was written, if it was one name in backticks."""
    return cell if "`" in cell else f"`{cell}`"


def table_with(path: Path, *columns: str) -> list[Row]:
    """The first table of a file that has these columns."""
    for table in tables(path):
        if set(columns) <= set(table[0].cells):
            return table
    raise LookupError(f"{path}: no table with the columns {columns}")


def byte_tables(path: Path) -> list[list[ByteField]]:
    """The byte tables of section 6: fixed part, section row, page row."""
    return [
        [
            ByteField(row.line, row["field"], int(row["offset"]), int(row["bytes"]), row["type"])
            for row in table
        ]
        for table in tables(path)
        if {"offset", "bytes", "field", "type"} <= set(table[0].cells)
    ]


def column_tables(path: Path) -> Iterator[tuple[Row, list[Column]]]:
    """Each row of the table of section 7, with its columns where all are simple."""
    for row in table_with(path, "section", "columns, in order"):
        text = row["columns, in order"]
        found = re.findall(r"(?:`(\w+)` )?(u32|u64|digest) × (\w+)", text)
        simple = len(found) == len(text.split(", ")) and text.startswith("`")
        yield row, [Column(*match) for match in found] if simple else []


def codes_of(path: Path, *, first_table: bool) -> dict[str, Row]:
    """The codes of registry/errors.md: those from bytes, or those from calls."""
    rows = [table for table in tables(path) if "code" in table[0].cells][0 if first_table else 1]
    return {row["code"]: row for row in rows}
