"""The command `dsd`: its subcommands, what becomes of errors, and the exit code.

Errors go to stderr as `error[code]: message` and, where there is one, `hint: ...`; with --json
they are also on stdout, as `{"error": {"code", "message", "hint"}}`. The codes are those of
`spec/registry/errors.md`, and two of the command: `usage`, and `internal` for a fault of its own.
Importing this module needs no extra.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsdformat import ConvertError, DsdError, FormatError, StorageError
from dsdformat.cli.hints import as_options

if TYPE_CHECKING:
    import typer

    from dsdformat.cli.render import Output

__all__ = ["main", "make_app"]

FINE, BAD, USAGE, IO, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 70, 130
PROBLEMS_SHOWN = 10

HELP = """Look at checkpoints, check, sign, compare, change and convert them.

\b
Examples:
  dsd info step-1000
  dsd ls step-1000 'model/layers.0.*'
  dsd show step-1000 'model/layers.0.weight[0:2,:4]'
  dsd verify step-1000
  dsd diff step-1000 step-2000 --stats
  dsd convert step-1000 model --to huggingface --select model

\b
Exit codes:
  0   fine
  1   the checkpoint is bad, or differs from what was expected
  2   the command was not understood, or names what is not there
  3   the system could not read
  70  a fault of dsd itself
  130 interrupted; nothing half-made is left
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: What follows its name; the process's arguments if None.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        import typer  # noqa: F401

        from dsdformat.cli.render import Output
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        return _refuse(error.name.partition(".")[0])
    # Found before anything is parsed, so that errors of parsing obey them too.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = arguments[:end]
    out = Output(sys.stdout, sys.stderr, json="--json" in options)
    kept = [option for option in options if option != "--debug"] + arguments[end:]
    code = _run(kept or ["--help"], out, debug="--debug" in options)
    try:
        out.flush()
    except OSError as error:
        return _report(out, _describe(error))
    return code


def make_app() -> typer.Typer:
    """Return the command with its subcommands."""
    import typer

    from dsdformat.cli import (
        cast,
        convert,
        cp,
        diff,
        digest,
        extract,
        info,
        ls,
        merge,
        options,
        plan,
        rename,
        show,
        sign,
        stats,
        tree,
        verify,
    )

    app = typer.Typer(
        name="dsd",
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=HELP)(options.dsd)
    app.command("info", help=info.HELP)(info.info)
    app.command("ls", help=ls.HELP)(ls.ls)
    app.command("plan", help=plan.HELP)(plan.plan)
    app.command("show", help=show.HELP)(show.show)
    app.command("tree", help=tree.HELP)(tree.tree)
    app.command("stats", help=stats.HELP)(stats.stats)
    app.command("verify", help=verify.HELP)(verify.verify)
    app.command("sign", help=sign.HELP)(sign.sign)
    app.command("digest", help=digest.HELP)(digest.digest)
    app.command("diff", help=diff.HELP)(diff.diff)
    app.command("cp", help=cp.HELP)(cp.cp)
    app.command("extract", help=extract.HELP)(extract.extract)
    app.command("merge", help=merge.HELP)(merge.merge)
    app.command("rename", help=rename.HELP)(rename.rename)
    app.command("cast", help=cast.HELP)(cast.cast)
    app.command("convert", help=convert.HELP)(convert.convert)
    return app


@functools.cache
def _command() -> Any:
    import typer

    return typer.main.get_command(make_app())


@dataclass(frozen=True, slots=True)
class _Fault:
    """An exception as a person is told of it."""

    exit_code: int
    code: str
    messages: tuple[str, ...]
    hint: str | None = None


def _run(arguments: list[str], out: Output, *, debug: bool) -> int:
    import typer

    try:
        result = _command().main(arguments, prog_name="dsd", standalone_mode=False, obj=out)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SystemExit:  # typer's way with a closed pipe
        return FINE
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        return _report(out, _describe(error))
    return result if isinstance(result, int) else FINE


def _report(out: Output, fault: _Fault) -> int:
    import typer

    out.exit_code = fault.exit_code
    with contextlib.suppress(typer.Exit):  # raised where stdout is closed
        out.error(fault.code, fault.messages, fault.hint)
    return fault.exit_code


def _describe(error: Exception) -> _Fault:
    if isinstance(error, FormatError):
        return _Fault(BAD, error.code, _problem_lines(error), error.hint)
    if isinstance(error, ConvertError):
        return _Fault(BAD, error.code, (error.message,), as_options(error.hint))
    if isinstance(error, DsdError):
        exit_code = IO if isinstance(error, StorageError) else USAGE
        return _Fault(exit_code, error.code, (error.message,), as_options(error.hint))
    if isinstance(error, OSError):
        parts = (error.filename, error.strerror) if error.strerror else (error,)
        return _Fault(IO, "io_error", (": ".join(str(part) for part in parts if part),))
    if hasattr(error, "format_message"):  # typer's, whose base is not the same in all versions
        context = getattr(error, "ctx", None)
        path = "dsd" if context is None else context.command_path
        return _Fault(USAGE, "usage", (error.format_message(),), f"{path} --help")
    message = f"{type(error).__name__}: {error}".removesuffix(": ")
    return _Fault(INTERNAL, "internal", (message,), "run it again with --debug, and report it")


def _problem_lines(error: FormatError) -> tuple[str, ...]:
    """Return a line for each problem; a message may hold a line break that a file made up."""
    count = len(error.problems) - PROBLEMS_SHOWN
    shown = [problem.message for problem in error.problems[:PROBLEMS_SHOWN]]
    return (*shown, f"and {count:,} more; dsd verify lists all") if count > 0 else tuple(shown)


def _refuse(package: str) -> int:
    message = f"dsd needs {package}, which is not installed; pip install 'dsdformat[cli]'"
    print(f"error[missing_dependency]: {message}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
