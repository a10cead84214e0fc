"""How a refusal of a foreign file reads: the file, the place in it, what is wrong, what to do."""

from __future__ import annotations

from dsdformat.errors import ConvertError, printable

__all__ = ["fault"]


def fault(code: str, where: str, message: str, *, hint: str | None = None) -> ConvertError:
    """Make the error of a file.

    Args:
        code: One of `errors.CODES` that belongs to `ConvertError`.
        where: Name of the file.
        message: What is wrong there; names from the file are `printable` already.
        hint: What to do about it.
    """
    return ConvertError(f"{printable(where)}: {message}", code=code, hint=hint, where=where)
