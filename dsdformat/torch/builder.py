"""New tensors and values for what a checkpoint holds: announced first, read together, then made.

Tensors of one number are one tensor, so that tied names stay tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsdformat.errors import ArgumentError, UnsupportedValueError
from dsdformat.format.dtypes import DTYPES
from dsdformat.limits import MIB
from dsdformat.torch.buffers import bytes_of, carrier, empty, memory_order, tensor_over
from dsdformat.torch.composites import put_together
from dsdformat.torch.dtypes import torch_dtype
from dsdformat.torch.moves import Move, can_cast, verify_whole
from dsdformat.torch.origin import Origin
from dsdformat.torch.sources import ORDER, numpy_side
from dsdformat.torch.stored import Composite, Path, Stored, find_items, is_numpy, rebuilt

__all__ = ["Builder", "Form", "array_over", "stored_dtype"]

SUBCLASS = "torch.subclass"


@dataclass(frozen=True)
class Form:
    """How a new tensor is to be.

    Attributes:
        dtype: Its dtype; the stored one if None.
        device: Where it lies.
    """

    dtype: torch.dtype | None = None
    device: torch.device = torch.device("cpu")


Key = tuple[int, Form]


class Builder:
    """Makes tensors for one load.

    Attributes:
        origin: What is read.
    """

    def __init__(
        self,
        checkpoint: Origin,
        *,
        mmap: bool,
        types: Mapping[str, type],
        form: Callable[[str], Form],
        names: Callable[[], Mapping[int, Sequence[str]]],
    ) -> None:
        """Begin.

        Args:
            checkpoint: What is read.
            mmap: Whether tensors are maps of the file, where they can be.
            types: Tensor subclasses that may be rebuilt, by module and qualified name.
            form: Gives the form of a tensor that has none of its own, by its display name; asked
                once for each name.
            names: Gives the display names of each tensor; called where a form is asked for. Of
                those of a tied one, the first counts for which that is not the usual one.
        """
        self.origin = checkpoint
        self._mmap = mmap
        self._types = types
        self._form = form
        self._names = names
        self._forms: dict[int, Form] = {}
        self._needed: dict[Key, Stored] = {}
        self._made: dict[Key, torch.Tensor] = {}
        self._arrays: dict[Key, Any] = {}
        self._composites: list[tuple[Composite, Path, Form | None]] = []
        self._composed: dict[int, torch.Tensor] = {}

    def need(self, value: Any, path: Path = (), form: Form | None = None) -> None:
        """Announce that a value, and the tensors in it, will be made.

        Raises:
            UnsupportedValueError: this torch lacks a dtype, or a class is not in `types`.
        """
        if isinstance(value, Stored):
            if not is_numpy(value):
                stored_dtype(value)
            key = self._key(value, form)
            if ORDER in value.attributes or key not in self._needed:
                self._needed[key] = value
        if isinstance(value, Composite):
            self._check_type(value, path)
            self._composites.append((value, path, form))
        for step, item in find_items(value) or ():
            self.need(item, (*path, step), form)

    def targets(self) -> Iterator[tuple[int, torch.dtype]]:
        """List the tensors that were announced, by number, and their dtypes."""
        for (index, form), stored in self._needed.items():
            yield index, form.dtype or torch_dtype(stored.entry.dtype) or _carrier_of(stored)

    def moves(self) -> Iterator[Move]:
        """Allocate what was announced, and list what is to be read."""
        for key, stored in self._needed.items():
            index, form = key
            at_rest = torch_dtype(stored.entry.dtype) or _carrier_of(stored)
            dtype = form.dtype or at_rest
            if self._mmap and form.device.type == "cpu" and dtype == at_rest:
                mapped = self._map(stored, at_rest)
                if mapped is not None:
                    self._made[key] = mapped
                    continue
            if not 0 < stored.entry.nbytes < MIB:
                stored.entry.check()  # that there is so much, before it is allocated
            made = empty(stored.entry.shape, dtype, form.device, stored.attributes.get(ORDER))
            self._made[key] = made
            yield Move.of_all(index, at_rest, made)

    def compose(self) -> None:
        """Put composite tensors together; what is wrong with their components shows here."""
        for value, path, form in self._composites:
            self.make(value, path, form)

    def make(self, value: Any, path: Path, form: Form | None = None) -> Any:
        """Make a value that was announced; containers are new, tied tensors are one."""
        if isinstance(value, Stored):
            return self._tensor(value, self._key(value, form))
        if id(value) in self._composed:
            return self._composed[id(value)]
        items = find_items(value)
        if items is None:
            return value
        made = rebuilt(value, [(key, self.make(item, (*path, key), form)) for key, item in items])
        if isinstance(made, Composite):
            made = put_together(made.kind, made.parts, self._types, path)
            self._composed[id(value)] = made
        return made

    def _tensor(self, stored: Stored, key: Key) -> Any:
        tensor = self._made[key]
        if not is_numpy(stored):
            return tensor
        if key not in self._arrays:
            self._arrays[key] = array_over(tensor, stored.entry.dtype)
        return self._arrays[key]

    def _key(self, stored: Stored, form: Form | None) -> Key:
        """Return what a tensor is made as: arrays are as stored, and in host memory."""
        if form is None:
            form = Form() if is_numpy(stored) else self._form_of(stored)
        return stored.index, form

    def _form_of(self, stored: Stored) -> Form:
        if stored.index not in self._forms:
            forms = [self._form(name) for name in self._names().get(stored.index, [stored.name])]
            form = next((one for one in forms if one != Form()), Form())
            self._forms[stored.index] = self._checked(stored, form)
        return self._forms[stored.index]

    def _checked(self, stored: Stored, form: Form) -> Form:
        """Return a form without a cast of what is no float."""
        dtype = torch_dtype(stored.entry.dtype)
        if form.dtype is None or dtype is None or not dtype.is_floating_point:
            return Form(None, form.device)
        if not can_cast(dtype, form.dtype):
            raise ArgumentError(
                f"{stored.name}: torch converts no {stored.entry.dtype} to {form.dtype}",
                code="bad_argument",
            )
        return form

    def _check_type(self, composite: Composite, path: Path) -> None:
        if composite.kind == SUBCLASS and composite.parts.get("type") not in self._types:
            put_together(composite.kind, composite.parts, self._types, path)  # says what is wrong

    def _map(self, stored: Stored, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor over a map, or None where there is none, or not at such an address."""
        try:
            view = stored.entry.map(writable=True)
        except ArgumentError as error:
            if error.code == "cannot_map":
                return None
            raise
        if not len(view):
            return empty(stored.entry.shape, dtype)
        tensor = tensor_over(view, dtype, stored.entry.shape)
        if tensor.data_ptr() % dtype.itemsize:
            return None
        if self.origin.verifies:
            verify_whole(stored.entry)
        return tensor


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


def _carrier_of(stored: Stored) -> torch.dtype:
    """Return a dtype of the same width as one that only numpy has."""
    return carrier(DTYPES[stored.entry.dtype].itemsize)
