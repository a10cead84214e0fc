"""New tensors and values for what a checkpoint holds: announced first, read together, then made.

Tensors of one number are one tensor, so that tied names stay tied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsdformat.errors import ArgumentError, UnsupportedValueError
from dsdformat.reader import Checkpoint
from dsdformat.torch.buffers import bytes_of, empty, memory_order, tensor_over
from dsdformat.torch.composites import put_together
from dsdformat.torch.dtypes import torch_dtype
from dsdformat.torch.moves import Move, verify_whole
from dsdformat.torch.sources import ORDER, numpy_side
from dsdformat.torch.stored import Composite, Path, Stored, find_items, is_numpy, rebuilt

__all__ = ["Builder", "Form", "array_over", "stored_dtype"]


@dataclass(frozen=True)
class Form:
    """How a new tensor is to be.

    Attributes:
        dtype: Its dtype; the stored one if None.
        device: Where it lies.
    """

    dtype: torch.dtype | None = None
    device: torch.device = torch.device("cpu")


class Builder:
    """Makes tensors for one load."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        mmap: bool,
        types: Mapping[str, type],
        form: Callable[[str], Form],
    ) -> None:
        """Begin.

        Args:
            checkpoint: What is read.
            mmap: Whether tensors are maps of the file, where they can be.
            types: Tensor subclasses that may be rebuilt, by module and qualified name.
            form: Gives the form of a tensor that has none of its own, by its display name.
        """
        self._checkpoint = checkpoint
        self._mmap = mmap
        self._types = types
        self._form = functools.cache(form)  # a caller's function is asked once for each name
        self._needed: dict[tuple[int, Form], Stored] = {}
        self._made: dict[tuple[int, Form], torch.Tensor] = {}

    def need(self, value: Any, form: Form | None = None) -> None:
        """Announce that a value, and the tensors in it, will be made."""
        if isinstance(value, Stored):
            stored_dtype(value)
            key = value.index, form or self._form(value.name)
            if ORDER in value.attributes or key not in self._needed:
                self._needed[key] = value
        for _, item in find_items(value) or ():
            self.need(item, form)

    def moves(self) -> Iterator[Move]:
        """Allocate what was announced, and list what is to be read."""
        for key, stored in self._needed.items():
            index, form = key
            dtype = form.dtype or stored_dtype(stored)
            if self._mmap and form.device.type == "cpu" and dtype == stored_dtype(stored):
                mapped = self._map(stored)
                if mapped is not None:
                    self._made[key] = mapped
                    continue
            made = empty(stored.entry.shape, dtype, form.device, stored.attributes.get(ORDER))
            self._made[key] = made
            yield Move(index, stored_dtype(stored), made)

    def make(self, value: Any, path: Path, form: Form | None = None) -> Any:
        """Make a value that was announced; containers are new, tied tensors are one."""
        if isinstance(value, Stored):
            tensor = self._made[value.index, form or self._form(value.name)]
            return array_over(tensor, value.entry.dtype) if is_numpy(value) else tensor
        items = find_items(value)
        if items is None:
            return value
        made = rebuilt(value, [(key, self.make(item, (*path, key), form)) for key, item in items])
        if isinstance(made, Composite):
            return put_together(made.kind, made.parts, self._types, path)
        return made

    def _map(self, stored: Stored) -> torch.Tensor | None:
        try:
            view = stored.entry.map(writable=True)
        except ArgumentError as error:
            if error.code == "cannot_map":
                return None
            raise
        if self._checkpoint.table.verifies:
            verify_whole(self._checkpoint, stored.index)
        dtype = stored_dtype(stored)
        if not len(view):
            return empty(stored.entry.shape, dtype)
        return tensor_over(view, dtype, stored.entry.shape)


def stored_dtype(stored: Stored) -> torch.dtype:
    """Return the dtype of a stored tensor.

    Raises:
        UnsupportedValueError: this version of torch does not have it.
    """
    dtype = torch_dtype(stored.entry.dtype)
    if dtype is None:
        raise UnsupportedValueError(
            f"{stored.name}: torch {torch.__version__} has no dtype {stored.entry.dtype}",
            code="unsupported_dtype",
            hint="leave it out with select=..., or read it with dsdformat.numpy",
        )
    return dtype


def array_over(tensor: torch.Tensor, dtype: str) -> Any:
    """Return a numpy array of this logical dtype that shares a tensor's memory."""
    order = memory_order(tensor) or list(range(tensor.ndim))
    packed = tensor.permute(order)
    array = numpy_side().array_over(bytes_of(packed), dtype, tuple(packed.shape))
    return array.transpose([order.index(dim) for dim in range(tensor.ndim)])
