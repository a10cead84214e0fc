"""Values on their way between planners of DCP and a checkpoint, without pickle on either side.

A planner passes what a storage hands it to `torch.load`. The stream is made here, of the value
that was decoded: nothing of the file is ever unpickled, by whomever.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsdformat.format.values import Named
from dsdformat.reader import Checkpoint
from dsdformat.torch.builder import Builder, Form
from dsdformat.torch.moves import fill
from dsdformat.torch.sources import Adapter
from dsdformat.torch.stored import find_items, rebuilt

__all__ = ["ValueAdapter", "value_stream"]

_STREAM = Named("python", "io.BytesIO")
_CONTENTS, _POSITION = "contents", "position"


class ValueAdapter(Adapter):
    """Also turns `io.BytesIO`, which states for DCP often hold, into values."""

    def __call__(self, value: Any, place: Sequence[Any]) -> Any:
        if type(value) is io.BytesIO:
            return (_STREAM, {_CONTENTS: value.getvalue(), _POSITION: value.tell()})
        return super().__call__(value, place)


def value_stream(
    checkpoint: Checkpoint, value: Any, path: tuple[Any, ...], types: Mapping[str, type]
) -> io.BytesIO:
    """Return a value as `torch.save` would write it.

    Args:
        checkpoint: Whose value it is.
        value: Decoded; tensors in it are read now.
        path: Where it lies, for errors.
        types: Tensor subclasses that may be rebuilt, by module and qualified name.

    Raises:
        UnsupportedValueError: this torch lacks a dtype, or a class is not in `types`.
        ChecksumError: `checksum_mismatch`.

    Ranks: local.
    Memory: the value, and its stream.
    """
    builder = Builder(checkpoint, mmap=False, types=types, form=_as_stored, names=dict)
    builder.need(value, path)
    fill(checkpoint, list(builder.moves()))
    builder.compose()
    stream = io.BytesIO()
    torch.save(_with_streams(builder.make(value, path)), stream)
    stream.seek(0)
    return stream


def _as_stored(_name: str) -> Form:
    return Form()


def _with_streams(value: Any) -> Any:
    """Return a value with streams where `ValueAdapter` found some."""
    if type(value) is tuple and len(value) == 2 and type(value[0]) is Named:
        return _stream_of(value[1]) if value[0] == _STREAM else value
    items = find_items(value)
    if items is None:
        return value
    return rebuilt(value, [(key, _with_streams(item)) for key, item in items])


def _stream_of(parts: Any) -> Any:
    """Make a stream; what is not as a writer would write it stays as it is."""
    if type(parts) is not dict or parts.keys() != {_CONTENTS, _POSITION}:
        return (_STREAM, parts)
    contents, position = parts[_CONTENTS], parts[_POSITION]
    if type(contents) is not bytes or type(position) is not int or not 0 <= position < 2**63:
        return (_STREAM, parts)
    stream = io.BytesIO(contents)
    stream.seek(position)
    return stream
