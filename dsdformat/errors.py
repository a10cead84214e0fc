"""All exceptions, warnings and error codes.

Decides which class a code belongs to and how a problem reads. What is a problem is decided
elsewhere: here are only names. The codes are listed, with their meaning, in
`spec/registry/errors.md`; `tools/check_spec.py` compares the two lists. It is long, for who
catches one of these finds all of them in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "CODES",
    "ArgumentError",
    "ChecksumError",
    "ConvertError",
    "DependencyError",
    "DistributedError",
    "DsdDeprecationWarning",
    "DsdError",
    "DsdPrecisionWarning",
    "DsdUnstableWarning",
    "EntryNotFoundError",
    "FormatError",
    "IncompleteError",
    "LayoutError",
    "LimitError",
    "ManifestError",
    "MismatchError",
    "NotACheckpointError",
    "Problem",
    "RankDisagreementError",
    "SignatureError",
    "StorageError",
    "TimeLimitError",
    "UnsupportedValueError",
    "VersionError",
    "listed",
    "printable",
    "raise_problems",
    "shorten",
]

MESSAGE_PROBLEMS_MAX = 10
REPR_MAX = 200


class DsdError(Exception):
    """Report that something went wrong in dsdformat; the base of all its exceptions.

    Attributes:
        code: Stable name of the fault, as listed in the spec.
        hint: What to do about it, or None.
    """

    def __init__(self, message: str, *, code: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


@dataclass(frozen=True, slots=True)
class Problem:
    """One defect of a checkpoint, with its place.

    Attributes:
        code: One of `CODES`.
        message: What failed, expected, got; one line.
        path: Place in the manifest, as `$.files[0].label`, or None.
        where: Label of the file, or None.
        byte_offset: Place in that file, in bytes, or None.
        byte_end: End of the damaged range, exclusive, or None.
        entry: Name of the tensor, or None.
        chunk: Index of the chunk in its tensor, or None.
        block: Index of the block in its chunk, or None.
        expected: Digest that the manifest states, in hexadecimal, or None.
        actual: Digest of what is there, in hexadecimal, or None.
        hint: What to do about it, or None.
    """

    code: str
    message: str
    path: str | None = None
    where: str | None = None
    byte_offset: int | None = None
    byte_end: int | None = None
    entry: str | None = None
    chunk: int | None = None
    block: int | None = None
    expected: str | None = None
    actual: str | None = None
    hint: str | None = None

    def error(self) -> FormatError:
        """Make the exception that belongs to this problem's code."""
        return _format_error([self])

    def at(self, where: str) -> Problem:
        """Name the file, where none is named yet."""
        return self if self.where else replace(self, where=where)


class FormatError(DsdError, ValueError):
    """Report bytes that break the spec.

    Attributes:
        problems: Every defect found in the stage that failed; the message shows the first ones.
        path, where, byte_offset, entry, chunk, block, expected, actual: Of the first problem.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        super().__init__(_message(problems), code=first.code, hint=first.hint)
        self.problems = tuple(problems)
        self.path = first.path
        self.where = first.where
        self.byte_offset = first.byte_offset
        self.entry = first.entry
        self.chunk = first.chunk
        self.block = first.block
        self.expected = first.expected
        self.actual = first.actual


class NotACheckpointError(FormatError):
    """Report a folder without a manifest, or a manifest without the magic."""


class IncompleteError(FormatError):
    """Report a checkpoint that was cut short, or that lacks files."""


class VersionError(FormatError):
    """Report a version or feature that this reader does not read."""


class ManifestError(FormatError):
    """Report a manifest whose contents break the spec."""


class LayoutError(FormatError):
    """Report chunks that overlap, leave holes, or lie out of bounds."""


class LimitError(FormatError):
    """Report a checkpoint that declares more than is allowed."""


class ChecksumError(FormatError):
    """Report bytes that do not have their digest."""


class SignatureError(FormatError):
    """Report a checkpoint that the expected key has not signed."""


class ArgumentError(DsdError, ValueError):
    """Report a call with an argument that is not allowed."""


class EntryNotFoundError(DsdError, KeyError):
    """Report a name that the checkpoint does not have.

    Attributes:
        name: The name asked for.
        close_matches: Names that are spelled alike.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "entry_not_found",
        name: str = "",
        close_matches: Sequence[str] = (),
    ) -> None:
        hint = "did you mean " + ", ".join(close_matches) + "?" if close_matches else None
        super().__init__(message, code=code, hint=hint)
        self.name = name
        self.close_matches = tuple(close_matches)


class MismatchError(DsdError, ValueError):
    """Report parts that should agree and do not: a file and a model, or two parts of a state.

    Attributes:
        report: What `load` found, where a checkpoint was compared with a state; else None. It
            lists what is missing, unexpected and mismatched.
    """

    def __init__(
        self, message: str, *, code: str, hint: str | None = None, report: Any = None
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.report = report


class UnsupportedValueError(DsdError, TypeError):
    """Report a value that cannot be stored without pickle.

    Attributes:
        path_in_tree: Where it lies in the state, as `$.scheduler.lr_lambdas[0]`.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "unsupported_value",
        path_in_tree: str = "$",
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.path_in_tree = path_in_tree


class StorageError(DsdError, OSError):
    """Report that the medium failed; `errno` and `__cause__` are those of the system."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "io_error",
        hint: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.errno = errno


class DependencyError(DsdError, ImportError):
    """Report that an optional package is needed and not installed."""


class DistributedError(DsdError, RuntimeError):
    """Report that some rank failed; raised alike on every rank.

    Attributes:
        failures: Exception by rank.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        failures: dict[int, BaseException],
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.failures = failures


class RankDisagreementError(DistributedError):
    """Report that ranks passed different names, shapes or paths."""


class TimeLimitError(DsdError, TimeoutError):
    """Report that something goes on for longer than the caller waits."""


class ConvertError(DsdError, ValueError):
    """Report a foreign file that cannot be converted.

    Attributes:
        where: Name of the file, or None.
        names: Dotted names in a pickle that are not on the closed list, where that is the fault.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        hint: str | None = None,
        where: str | None = None,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.where = where
        self.names = tuple(names)


class DsdDeprecationWarning(DeprecationWarning):
    """Warn that a name will go away."""


class DsdPrecisionWarning(UserWarning):
    """Tell that values are rounded to a narrower dtype, where an error would not be a drop-in."""


class DsdUnstableWarning(UserWarning):
    """Warn that a name may still change."""


# fmt: off
CODES: dict[str, type[DsdError]] = {
    "no_manifest": NotACheckpointError, "bad_magic": NotACheckpointError,
    "unknown_major": VersionError, "unknown_feature": VersionError,
    "unknown_section": VersionError,
    "truncated": IncompleteError, "missing_file": IncompleteError,
    "file_size_mismatch": IncompleteError,
    "trailing_bytes": FormatError, "bad_head": FormatError, "bad_sections": FormatError,
    "bad_compressed_data": FormatError, "not_regular_file": FormatError,
    "seal_mismatch": ChecksumError, "digest_mismatch": ChecksumError,
    "page_checksum_mismatch": ChecksumError, "header_mismatch": ChecksumError,
    "side_checksum_mismatch": ChecksumError, "stored_checksum_mismatch": ChecksumError,
    "checksum_mismatch": ChecksumError,
    "bad_section_length": ManifestError, "msgpack_malformed": ManifestError,
    "msgpack_not_canonical": ManifestError, "duplicate_key": ManifestError,
    "unknown_key": ManifestError, "bad_body": ManifestError, "bad_label": ManifestError,
    "duplicate_label": ManifestError, "unknown_value_type": ManifestError,
    "bad_value": ManifestError, "bad_tensor_reference": ManifestError,
    "bad_reference": ManifestError, "unknown_dtype": ManifestError,
    "unknown_codec": ManifestError, "codec_mismatch": ManifestError,
    "feature_mismatch": ManifestError, "prefix_mismatch": ManifestError,
    "limit_exceeded": LimitError, "shape_overflow": LimitError,
    "chunk_out_of_bounds": LayoutError, "chunk_order": LayoutError,
    "chunk_overlap": LayoutError, "chunk_hole": LayoutError, "empty_chunk": LayoutError,
    "bad_block_index": LayoutError, "byte_range_mismatch": LayoutError,
    "not_signed": SignatureError, "bad_signature": SignatureError,
    "entry_not_found": EntryNotFoundError, "not_a_tensor": EntryNotFoundError,
    "box_out_of_bounds": ArgumentError, "bad_argument": ArgumentError,
    "closed": ArgumentError, "cannot_map": ArgumentError,
    "unsupported_value": UnsupportedValueError, "value_too_deep": UnsupportedValueError,
    "unsupported_dtype": UnsupportedValueError,
    "optimizer_without_module": UnsupportedValueError,
    "state_conflict": MismatchError, "chunks_incomplete": MismatchError,
    "data_mismatch": MismatchError, "state_mismatch": MismatchError,
    "bad_components": MismatchError,
    "already_exists": StorageError, "not_replaceable": StorageError,
    "io_error": StorageError,
    "missing_dependency": DependencyError,
    "unknown_kind": ConvertError, "unsupported_kind": ConvertError,
    "foreign_truncated": ConvertError, "foreign_too_large": ConvertError,
    "foreign_path": ConvertError, "foreign_checksum": ConvertError,
    "pickle_malformed": ConvertError, "pickle_opcode": ConvertError,
    "pickle_value": ConvertError, "pickle_cycle": ConvertError, "unknown_global": ConvertError,
    "archive_malformed": ConvertError, "archive_overlap": ConvertError,
    "archive_duplicate": ConvertError, "archive_name": ConvertError,
    "archive_compressed": ConvertError,
    "storage_missing": ConvertError, "storage_mismatch": ConvertError,
    "storage_out_of_bounds": ConvertError, "stream_malformed": ConvertError,
    "header_malformed": ConvertError, "index_malformed": ConvertError,
    "dcp_metadata": ConvertError, "dcp_chunks": ConvertError, "dcp_item": ConvertError,
    "flat_shards": ConvertError,
    "inexact_cast": ConvertError,
    "rank_failed": DistributedError, "ranks_absent": DistributedError,
    "ranks_disagree": RankDisagreementError, "timed_out": TimeLimitError,
}
# fmt: on


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise the exception of the first problem, carrying all; do nothing if there is none."""
    if problems:
        raise _format_error(problems)


def shorten(value: object) -> str:
    """Render a value for a message, cut to 200 characters."""
    try:
        text = repr(value)
    except Exception:  # an object's own code, or an int that Python does not print
        text = f"<{type(value).__name__}>"
    return text if len(text) <= REPR_MAX else text[: REPR_MAX - 1] + "…"


def listed(names: Sequence[str]) -> str:
    """Join at most ten names, and say how many more there are."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def printable(text: str) -> str:
    """Return a name from a file as a message shows it: no control characters, and not long."""
    clean = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return clean if len(clean) <= REPR_MAX else clean[: REPR_MAX - 1] + "…"


def _rebuild(kind: type[DsdError], args: tuple[Any, ...], fields: dict[str, Any]) -> DsdError:
    """Make a copy of an error: its own `__init__` takes other arguments than it keeps."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


def _format_error(problems: Sequence[Problem]) -> FormatError:
    kind = CODES[problems[0].code]
    assert issubclass(kind, FormatError)
    return kind(problems)


def _message(problems: Sequence[Problem]) -> str:
    lines = [problem.message for problem in problems[:MESSAGE_PROBLEMS_MAX]]
    if len(problems) > MESSAGE_PROBLEMS_MAX:
        lines.append(f"… and {len(problems) - MESSAGE_PROBLEMS_MAX} more problems")
    return "\n".join(lines)
