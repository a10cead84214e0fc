#!/usr/bin/env python3
"""Write the conformance vectors of dsd-1: spec/vectors/{valid,invalid}/<case>/.

python tools/make_vectors.py              write them all
python tools/make_vectors.py --check      make them again elsewhere, and compare
python tools/make_vectors.py --example    write spec/example.md
"""

import argparse
import filecmp
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from vectors import zstd
from vectors.cases import Case, write_case
from vectors.collect import all_cases
from vectors.example import CASE_ID, EXAMPLE, example_text
from vectors.spectext import SPEC

VECTORS = SPEC / "vectors"
KINDS = ("valid", "invalid")


def write_all(cases: list[Case], root: Path) -> None:
    for kind in KINDS:
        shutil.rmtree(root / kind, ignore_errors=True)
    for case in cases:
        write_case(case, root)


def differences(made: Path, committed: Path) -> Iterator[str]:
    """Each file that is in one of two folders only, or differs."""
    files = {
        path.relative_to(root)
        for root in (made, committed)
        for kind in KINDS
        for path in (root / kind).rglob("*")
        if path.is_file()
    }
    for path in sorted(files):
        ours, theirs = made / path, committed / path
        if not theirs.is_file():
            yield f"{theirs}: missing"
        elif not ours.is_file():
            yield f"{theirs}: no case makes this file"
        elif not filecmp.cmp(ours, theirs, shallow=False):
            yield f"{theirs}: differs from what the generator makes"


def check(cases: list[Case]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_all(cases, Path(folder))
        found = list(differences(Path(folder), VECTORS))
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print("\nhint: a released case never changes; add another one", file=sys.stderr)
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with what is there")
    parser.add_argument("--example", action="store_true", help="write spec/example.md")
    options = parser.parse_args()
    cases = all_cases()
    if options.example:
        text = example_text(next(case for case in cases if case.id == CASE_ID))
        EXAMPLE.write_text(text, encoding="utf-8", newline="\n")
        return 0
    if options.check:
        return check(cases)
    write_all(cases, VECTORS)
    zstd.freeze()
    print(f"{len(cases)} cases in {VECTORS}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
