"""`dsd verify`: check every byte, and report all that is wrong."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import dsdformat
from dsdformat import ArgumentError, Problem, Report
from dsdformat.cli.escapes import fit
from dsdformat.cli.opening import is_ours, open_source
from dsdformat.cli.options import Digest, Json, Pubkey, Source
from dsdformat.cli.progress import progress_bar
from dsdformat.cli.render import (
    NAME_WIDTH,
    Output,
    format_count,
    format_pace,
    format_seconds,
    format_size,
)
from dsdformat.convert import Kind, find_kind
from dsdformat.convert.content import tensors_of

__all__ = ["HELP", "verify"]

HELP = """Check every byte of a checkpoint, and report all that is wrong.

Exits with 1 if something is. Without --digest or --pubkey, a person who rewrote the data and its
digests goes unnoticed. Of another kind of file, the checksums that it has are compared. Where it
has none, that is told, and the exit code is 1 too.

\b
Example:
  dsd verify step-1000 --digest "$(cat step-1000.root)"

\b
--json prints an object with
  checkpoint, ok, root     root: null where it could not be read
  tensors, chunks, files   how many, as far as they could be read
  nbytes                   of the data files
  seconds                  that it took
  problems                 of each: code, message, path, where, byte_offset,
                           byte_end, entry, chunk, block, expected, actual,
                           hint; null where there is no such thing
  unlisted                 files that do not belong to the checkpoint
and of another kind of file with checkpoint, ok, kind, tensors, nbytes,
seconds, and
  compared                 bytes that have checksums; if none, ok is null
"""

PROBLEMS_SHOWN = 20
UNLISTED_SHOWN = 5


def verify(
    ctx: typer.Context,
    ckpt: Source,
    digest: Digest = None,
    pubkey: Pubkey = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many threads read and hash.")
    ] = None,
    json: Json = False,
) -> int:
    """Verify a checkpoint, print the report, and return 1 if something is wrong."""
    out: Output = ctx.obj
    began = time.perf_counter()
    lost = not is_ours(ckpt) and find_kind(ckpt) is Kind.SAFETENSORS_FOLDER
    if not is_ours(ckpt) and not lost:
        return _verify_other(out, ckpt, digest, pubkey, json=json)
    report = _run(out, str(ckpt), digest=digest, pubkey=pubkey, threads=threads)
    seconds = time.perf_counter() - began
    out.exit_code = 0 if report.ok else 1
    if lost:
        out.note(f"{ckpt} can be read as {Kind.SAFETENSORS_FOLDER.value}, which has no checksums")
    if json:
        out.document(_document(str(ckpt), report, seconds))
        return out.exit_code
    if report.ok:
        _print_good(out, str(ckpt), report, seconds, len(pubkey or ()))
    else:
        _print_bad(out, str(ckpt), report)
    if report.unlisted:
        if not report.ok:
            out.line()
        out.line(f"note: {_unlisted_text(report.unlisted)}")
    return out.exit_code


def _verify_other(
    out: Output, ckpt: Path, digest: str | None, pubkey: list[str] | None, *, json: bool
) -> int:
    """Compare what there are of checksums in another kind of file; errors say what is wrong."""
    if digest is not None or pubkey is not None:
        lacks = "root digest" if digest is not None else "signature"
        raise ArgumentError(f"{ckpt} is no folder of ours, and has no {lacks}", code="bad_argument")
    with open_source(ckpt) as source:
        began = time.perf_counter()
        compared = source.verify()
        seconds = time.perf_counter() - began
        tensors = tensors_of(source.tree)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    out.exit_code = 0 if compared else 1
    if json:
        out.document(
            {
                "checkpoint": str(ckpt),
                "ok": True if compared else None,
                "kind": source.kind.value,
                "compared": compared,
                "tensors": len(tensors),
                "nbytes": nbytes,
                "seconds": round(seconds, 3),
            }
        )
        return out.exit_code
    out.line(f"{ckpt}: {'ok' if compared else 'not verified'}", "bold")
    size = f"{format_size(compared)} in {format_seconds(seconds)}" if compared else ""
    none = "" if compared else "none in this file, so that damage goes unnoticed"
    out.pairs(
        [
            ("kind", source.kind.value),
            ("tensors", f"{len(tensors):,}"),
            ("compared", size),
            ("checksums", none),
        ]
    )
    return out.exit_code


def _run(out: Output, ckpt: str, **options: Any) -> Report:
    with progress_bar(out, "verifying") as progress:
        return dsdformat.verify(ckpt, progress=progress, **options)


def _print_good(out: Output, ckpt: str, report: Report, seconds: float, keys: int) -> None:
    out.line(f"{ckpt}: ok", "bold")
    out.pairs(
        [
            ("root", report.root or ""),
            ("signed", f"with {format_count(keys, 'key')} asked for" if keys else ""),
            ("checked", _counts(report)),
            ("size", format_pace(report.nbytes, seconds)),
        ]
    )


def _counts(report: Report) -> str:
    return ", ".join(
        [
            format_count(report.tensors, "tensor"),
            format_count(report.chunks, "chunk"),
            format_count(report.files, "data file"),
        ]
    )


def _print_bad(out: Output, ckpt: str, report: Report) -> None:
    out.line(f"{ckpt}: bad, {format_count(len(report.problems), 'problem')}", "bold")
    if report.root:
        out.pairs([("root", report.root)])
    for problem in report.problems[:PROBLEMS_SHOWN]:
        out.line()
        _print_problem(out, problem)
    if len(report.problems) > PROBLEMS_SHOWN:
        out.line()
        out.line(f"and {len(report.problems) - PROBLEMS_SHOWN:,} more; --json lists all")


def _print_problem(out: Output, problem: Problem) -> None:
    out.line(problem.code, "bold")
    out.paragraph(problem.message)
    out.pairs(
        [
            ("file", _file_text(problem)),
            ("entry", _entry_text(problem)),
            ("place", problem.path or ""),
            ("expected", problem.expected or ""),
            ("actual", problem.actual or ""),
            ("hint", problem.hint or ""),
        ]
    )


def _file_text(problem: Problem) -> str:
    if problem.where is None or problem.byte_offset is None:
        return problem.where or ""
    if problem.byte_end is None:
        return f"{problem.where}, from byte {problem.byte_offset:,}"
    return f"{problem.where}, bytes {problem.byte_offset}..{problem.byte_end}"


def _entry_text(problem: Problem) -> str:
    parts = [
        fit(problem.entry or "", NAME_WIDTH),
        f"chunk {problem.chunk}" if problem.chunk is not None else "",
        f"block {problem.block}" if problem.block is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _unlisted_text(labels: tuple[str, ...]) -> str:
    shown = ", ".join(labels[:UNLISTED_SHOWN])
    more = f" and {len(labels) - UNLISTED_SHOWN:,} more" if len(labels) > UNLISTED_SHOWN else ""
    return f"not part of the checkpoint: {shown}{more}"


def _document(ckpt: str, report: Report, seconds: float) -> dict[str, Any]:
    return {
        "checkpoint": ckpt,
        "ok": report.ok,
        "root": report.root,
        "tensors": report.tensors,
        "chunks": report.chunks,
        "files": report.files,
        "nbytes": report.nbytes,
        "seconds": round(seconds, 3),
        "problems": [dataclasses.asdict(problem) for problem in report.problems],
        "unlisted": list(report.unlisted),
    }
