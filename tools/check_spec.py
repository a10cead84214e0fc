#!/usr/bin/env python3
"""Compare spec/ with itself, with its vectors, with the tests, and with the package's tables.

Run: tools/check_spec.py. Prints `file:line: what; what to do` for each problem, and exits 1 if
there is one. Imports the package only to read its tables.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vectors import spectext

ROOT = Path(__file__).resolve().parents[1]
RULE = re.compile(r"\bR-\d+\.\d+\b")
DEFINED = re.compile(r"\*\*(R-\d+\.\d+)\*\*")
RANGE = re.compile(r"R-(\d+)\.(\d+) to R-(\d+)\.(\d+)")
CODE_PLACES = (
    re.compile(r"`([a-z]+(?:_[a-z]+)+)`$"),  # at the end of a rule
    re.compile(r"\(`([a-z]+(?:_[a-z]+)+)`\)"),  # beside a part of a rule
)
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "": 1}
TABLE_NAMES = ("HEAD_FIELDS", "SECTION_FIELDS", "PAGE_FIELDS")

# Each limit of the package, and where the text says it: the first group is the number.
LIMITS = {
    "HEAD_NBYTES_MAX": r"^\| head \| ([\d,]+ \w+)",
    "BODY_NBYTES_MAX": r"^\| section `body`, decoded \| ([\d,]+ \w+)",
    "DEPTH_MAX": r"^\| nesting of the body \| ([\d,]+)",
    "NDIM_MAX": r"^\| dims of a tensor; cut dims \| ([\d,]+);",
    "CUT_DIMS_MAX": r"^\| dims of a tensor; cut dims \| [\d,]+; ([\d,]+)",
    "BLOCK_NBYTES_MIN": r"^\| `block_nbytes` \| ([\d,]+ \w+) to",
    "BLOCK_NBYTES_MAX": r"^\| `block_nbytes` \| [\d,]+ \w+ to ([\d,]+ \w+)",
    "BLOCK_NBYTES_DEFAULT": r"^\| `block_nbytes` \| int \|.*; ([\d,]+) unless",
    "PAGE_NBYTES": r"^- \*\*R-6\.8\*\* A page decodes to ([\d,]+) bytes",
    "FILE_CHUNKS_MAX": r"^\| chunks of a data file; its header \| ([\d,]+);",
    "HEADER_NBYTES_MAX": r"^\| chunks of a data file; its header \| [\d,]+; ([\d,]+ \w+)",
    "LEAF_NBYTES": r"^- \*\*R-13\.1\*\* .* in pieces of ([\d,]+) bytes",
}


@dataclass(frozen=True, order=True)
class Problem:
    file: Path
    line: int
    what: str
    todo: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {self.what}; {self.todo}"


@dataclass(frozen=True)
class Use:
    """A rule or code that is named somewhere."""

    name: str
    file: Path
    line: int


TEXT = ROOT / "spec" / "dsd-1.md"
ERRORS = ROOT / "spec" / "registry" / "errors.md"


@cache
def lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8").splitlines())


def matches(pattern: re.Pattern[str], path: Path) -> Iterator[Use]:
    for number, line in enumerate(lines(path), 1):
        for match in pattern.finditer(line):
            yield Use(match[match.lastindex or 0], path, number)


def package(module: str) -> Any:
    """Import a module of the package; its tables are compared with the text."""
    try:
        return importlib.import_module(f"dsdformat.{module}")
    except ImportError as error:
        hint = "hint: run tools/venv, and run this with .venv/bin/python"
        sys.exit(f"dsdformat.{module} cannot be imported: {error}\n\n{hint}")


# Rules


def check_rules() -> Iterator[Problem]:
    defined: dict[str, Use] = {}
    for rule in matches(DEFINED, TEXT):
        if rule.name in defined:
            first = defined[rule.name].line
            yield Problem(TEXT, rule.line, f"{rule.name} is defined twice", f"see line {first}")
        defined.setdefault(rule.name, rule)
    used = [*rules_of_vectors(), *rules_of_tests()]
    for use in [*used, *rules_of_texts()]:
        if use.name not in defined:
            todo = "name a rule that dsd-1.md defines"
            yield Problem(use.file, use.line, f"there is no rule {use.name}", todo)
    shown = {use.name for use in used}
    for name, rule in defined.items():
        if name not in shown:
            todo = "add a vector with the rule, or name it in the test that shows it"
            yield Problem(TEXT, rule.line, f"no vector and no test names {name}", todo)


def rules_of_vectors() -> Iterator[Use]:
    for case in case_files():
        for number, line in enumerate(lines(case), 1):
            if line.startswith('  "rules": '):
                yield from (Use(name, case, number) for name in RULE.findall(line))


def rules_of_tests() -> Iterator[Use]:
    folders = ((ROOT / "tests", "*.py"), (ROOT / "tools" / "reader_js" / "test", "*"))
    for folder, pattern in folders:
        for path in sorted(folder.rglob(pattern)):
            if path.is_file() and path.suffix in (".py", ".js", ".mjs", ".ts"):
                yield from matches(RULE, path)


def rules_of_texts() -> Iterator[Use]:
    """Rules that the texts refer to, those in the middle of a range included."""
    for path in sorted((ROOT / "spec").rglob("*.md")):
        yield from matches(RULE, path)
        for number, line in enumerate(lines(path), 1):
            for section, first, _, last in RANGE.findall(line):
                middle = range(int(first) + 1, int(last))
                yield from (Use(f"R-{section}.{n}", path, number) for n in middle)


# Error codes and vectors


def check_codes() -> Iterator[Problem]:
    first = spectext.codes_of(ERRORS, first_table=True)
    second = spectext.codes_of(ERRORS, first_table=False)
    used = list(codes_of_text())
    for use in used:
        if use.name not in first:
            todo = "add it to the first table of registry/errors.md"
            yield Problem(use.file, use.line, f"`{use.name}` is no registered code", todo)
    everywhere = TEXT.read_text(encoding="utf-8")
    for name, row in first.items():
        if f"`{name}`" not in everywhere:
            yield Problem(
                ERRORS, row.line, f"dsd-1.md never gives `{name}`", "say when it is given"
            )
        if name in second:
            yield Problem(ERRORS, row.line, f"`{name}` is in both tables", "keep one of them")
    yield from check_package_codes(first | second)
    yield from check_cases(first)


def codes_of_text() -> Iterator[Use]:
    for pattern in CODE_PLACES:
        yield from matches(pattern, TEXT)
    for table in spectext.tables(TEXT):
        for row in table:
            for name in re.findall(r"[a-z_]{3,}", row.cells.get("code", "")):
                yield Use(name, TEXT, row.line)


def check_package_codes(registered: dict[str, spectext.Row]) -> Iterator[Problem]:
    codes = package("errors").CODES
    yield from same_names(ERRORS, registered, codes, "dsdformat.errors.CODES")
    for name in registered.keys() & codes.keys():
        row, actual = registered[name], codes[name].__name__
        if row["class"] != actual:
            what = f"`{name}` is {row['class']} here, and {actual} in dsdformat.errors"
            yield Problem(ERRORS, row.line, what, "make them agree")


def case_files() -> list[Path]:
    return sorted((ROOT / "spec" / "vectors").glob("*/*/case.json"))


def check_cases(codes: dict[str, spectext.Row]) -> Iterator[Problem]:
    shown = set()
    for path in case_files():
        case = json.loads(path.read_text(encoding="utf-8"))
        kind, name = path.parts[-3:-1]
        if case["id"] != name:
            yield Problem(path, 2, f"the id is {case['id']}", "give it the name of its folder")
        code = case["expect"].get("code")
        if (kind == "invalid") != (code is not None):
            yield Problem(path, 1, f"a case of {kind} expects {code}", "move it, or correct it")
        if code is not None and code not in codes:
            todo = "expect a code of the first table of registry/errors.md"
            yield Problem(path, 1, f"there is no code `{code}`", todo)
        shown.add(code)
    for name, row in codes.items():
        if name not in shown:
            yield Problem(ERRORS, row.line, f"no vector expects `{name}`", "add an invalid one")


def check_threats() -> Iterator[Problem]:
    """Vectors that the table of attacks names: the last cell of its rows."""
    path = ROOT / "spec" / "threats.md"
    vectors = ROOT / "spec" / "vectors"
    for table in spectext.tables(path):
        for row in table:
            for name in re.findall(r"`([a-z0-9*./-]+)`", spectext.marked(row["vector"])):
                pattern = name if "/" in name else f"invalid/{name}"
                if not any(vectors.glob(pattern)):
                    yield Problem(path, row.line, f"there is no vector `{name}`", "correct it")


# Tables


def check_byte_tables() -> Iterator[Problem]:
    frame = package("format.frame")
    found = spectext.byte_tables(TEXT)
    if len(found) != len(TABLE_NAMES):
        yield Problem(TEXT, 1, f"{len(found)} byte tables", f"section 6 has {len(TABLE_NAMES)}")
        return
    for name, table in zip(TABLE_NAMES, found, strict=True):
        yield from check_offsets(table)
        actual = [(f.name, f.offset, f.nbytes, f.type) for f in getattr(frame, name)]
        for field, other in zip(table, actual, strict=False):
            said = (field.name, field.offset, field.nbytes, field.type)
            if said != other:
                todo = f"make it and dsdformat.format.frame.{name} agree"
                yield Problem(TEXT, field.line, f"{said} here, {other} in the package", todo)
        if len(table) != len(actual):
            what = f"{len(table)} fields here, {len(actual)} in dsdformat.format.frame.{name}"
            yield Problem(TEXT, table[-1].line, what, "make them agree")


def check_offsets(table: list[spectext.ByteField]) -> Iterator[Problem]:
    offset = 0
    for field in table:
        if field.offset != offset:
            what = f"`{field.name}` is at {field.offset}, and the one before ends at {offset}"
            yield Problem(TEXT, field.line, what, "correct the offsets")
        offset = field.offset + field.nbytes


def check_columns() -> Iterator[Problem]:
    sections = tuple(package("format.frame").SECTIONS)
    rows = list(spectext.column_tables(TEXT))
    names = ("body", *(row["section"] for row, _ in rows))
    if names != sections:
        what = f"sections are {names} here, and {sections} in dsdformat.format.frame.SECTIONS"
        yield Problem(TEXT, rows[0][0].line, what, "make them agree")
    for use in matches(re.compile(r"first seven sections MUST be (.*), in this order"), TEXT):
        if tuple(re.findall(r"`(\w+)`", use.name)) != sections:
            yield Problem(TEXT, use.line, "the rule names other sections", "make them agree")
    for row, columns in rows:
        counts = {column.count for column in columns}
        if len(counts) == 1:
            width = sum(column.width for column in columns)
            if row["length in bytes"].split()[0] != str(width):
                what = f"the columns of `{row['section']}` have {width} bytes a row"
                yield Problem(TEXT, row.line, what, "correct the columns or the length")


def check_registries() -> Iterator[Problem]:
    registry = ROOT / "spec" / "registry"
    yield from check_dtypes(registry / "dtypes.md")
    codecs = {
        int(row["number"]): row for row in spectext.table_with(registry / "codecs.md", "number")
    }
    names = {number: row["name"] for number, row in codecs.items()}
    actual = dict(package("format.codecs").CODECS)
    if names != actual:
        what = f"codecs are {names} here, and {actual} in dsdformat.format.codecs.CODECS"
        yield Problem(
            registry / "codecs.md", next(iter(codecs.values())).line, what, "make them agree"
        )
    for file, column, module, table in (
        ("features.md", "name", "format.frame", "FEATURES"),
        ("values.md", "tag", "format.values", "TAGS"),
    ):
        rows = {row[column]: row for row in spectext.table_with(registry / file, column)}
        others = getattr(package(module), table)
        yield from same_names(registry / file, rows, others, f"dsdformat.{module}.{table}")


def check_dtypes(path: Path) -> Iterator[Problem]:
    rows = {row["name"]: row for row in spectext.table_with(path, "name", "itemsize")}
    actual = package("format.dtypes").DTYPES
    yield from same_names(path, rows, actual, "dsdformat.format.dtypes.DTYPES")
    for name in rows.keys() & actual.keys():
        row, dtype = rows[name], actual[name]
        said = (int(row["itemsize"]), row["stored as"], row["shape"], row["rotate"] == "yes")
        other = (dtype.itemsize, dtype.stored_as, dtype.shape_rule, dtype.rotate)
        if said != other or dtype.name != name:
            what = f"`{name}` is {said} here, and {other} in dsdformat.format.dtypes"
            yield Problem(path, row.line, what, "make them agree")


def same_names(
    path: Path, rows: dict[str, spectext.Row], others: Iterable[str], where: str
) -> Iterator[Problem]:
    others = set(others)
    for name, row in rows.items():
        if name not in others:
            yield Problem(path, row.line, f"`{name}` is not in {where}", "add it there")
    for name in sorted(others - rows.keys()):
        yield Problem(path, 1, f"`{name}` of {where} is not here", "register it")


def check_limits() -> Iterator[Problem]:
    limits = package("limits")
    for name, pattern in LIMITS.items():
        found = list(matches(re.compile(pattern), TEXT))
        actual = getattr(limits, name, None)
        if len(found) != 1:
            what = f"the text says {name} {len(found)} times"
            yield Problem(TEXT, 1, what, "correct the text, or LIMITS in tools/check_spec.py")
        elif actual != quantity(found[0].name):
            what = f"{name} is {found[0].name} here, and {actual} in dsdformat.limits"
            yield Problem(TEXT, found[0].line, what, "make them agree")


def quantity(text: str) -> int:
    number, _, unit = text.replace(",", "").partition(" ")
    return int(number) * UNITS[unit]


# The example


def check_example() -> Iterator[Problem]:
    from vectors.collect import all_cases
    from vectors.example import CASE_ID, EXAMPLE, dumped_bytes, example_text

    todo = "run tools/make_vectors.py --example"
    text = EXAMPLE.read_text(encoding="utf-8")
    try:
        case = next(case for case in all_cases() if case.id == CASE_ID)
        expected = example_text(case)
    except (ValueError, LookupError) as error:
        yield Problem(EXAMPLE, 1, f"the example cannot be made: {error}", "correct the tables")
        return
    if text != expected:
        pairs = zip(text.splitlines(), expected.splitlines(), strict=False)
        line = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), 1)
        yield Problem(EXAMPLE, line, "the example is not what the generator makes", todo)
    folder = ROOT / "spec" / "vectors" / "valid" / CASE_ID / "checkpoint"
    files = [folder / "manifest.dsd", folder / case.checkpoint.files[0].label]
    try:
        dumps = dumped_bytes(text)
    except ValueError as error:
        yield Problem(EXAMPLE, 1, f"a dump does not parse: {error}", todo)
        return
    if dumps != [file.read_bytes() for file in files]:
        yield Problem(EXAMPLE, 1, "the bytes are not those of the vector", todo)


CHECKS = (
    check_rules,
    check_codes,
    check_threats,
    check_byte_tables,
    check_columns,
    check_registries,
    check_limits,
    check_example,
)


def main() -> int:
    problems = sorted(problem for check in CHECKS for problem in check())
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
