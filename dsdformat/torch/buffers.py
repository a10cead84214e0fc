"""The bytes of a strided tensor, on any device: views without a copy, and bounded copies.

Tensors are moved as integers of their element's width, so that a copy never changes a bit and
works for dtypes that torch cannot compute with.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dsdformat.boxes import Box, row_boxes
from dsdformat.errors import UnsupportedValueError
from dsdformat.format.digests import Hasher
from dsdformat.limits import MIB

__all__ = [
    "OWN_CLASSES",
    "Data",
    "Scratch",
    "Slabs",
    "as_bits",
    "as_bytes",
    "box_view",
    "bytes_of",
    "bytes_of_all",
    "carrier",
    "copy_elements",
    "data_of",
    "digest_of",
    "empty",
    "is_packed",
    "memory_order",
    "memory_view",
    "overlaps_itself",
    "tensor_over",
    "typed",
]

SLAB_NBYTES = 4 * MIB
OWN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})  # those of torch that are no subclass
_CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
_OF_NUMPY = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64),
    }
)
# As what numpy sees a dtype.
_FORMS = {**{dtype: dtype for dtype in _OF_NUMPY}, torch.bfloat16: torch.int16}


def carrier(itemsize: int) -> torch.dtype:
    """Return a dtype of this width that torch can copy, and that stands for any other."""
    return _CARRIERS[itemsize]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a strided tensor as elements of the same width that torch can copy."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    bits = torch.empty(0, dtype=carrier(tensor.element_size()), device=tensor.device)
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    return bits.set_(storage, offset, tensor.shape, tensor.stride())


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether the tensor's row-major bytes lie in host memory as they are."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a packed tensor; writes to it change the tensor."""
    if sys.byteorder == "big":
        raise UnsupportedValueError(
            "tensors of big-endian machines are not supported", code="unsupported_dtype"
        )
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(bytearray())
    form = _FORMS.get(tensor.dtype)
    if form is not None and tensor.ndim <= 32:  # in a third of the time; numpy 1 has 32
        array: Any = (tensor if form is tensor.dtype else tensor.view(form)).numpy(force=True)
        return memoryview(array).cast("B")
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    start = tensor.storage_offset() * tensor.element_size()
    array = flat.set_(tensor.untyped_storage(), start, (nbytes,), (1,)).numpy()
    return memoryview(array)


class _Addresses:
    """A range of addresses, as numpy asks for one."""

    def __init__(self, begin: int, end: int, owners: Any, *, writable: bool) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (end - begin,),
            "data": (begin, not writable),
        }
        self.owners = owners


def memory_view(begin: int, end: int, owners: Any, *, writable: bool = False) -> memoryview:
    """Return one view over a range of addresses in which many tensors lie.

    A view of each of them takes longer than to write its bytes. What lies between them is not
    theirs, nor need it be there: nobody may look at it.

    Args:
        begin, end: The range.
        owners: What keeps the tensors' memory; the view keeps it.
        writable: Whether the view may be written to.
    """
    array: Any = np.asarray(_Addresses(begin, end, owners, writable=writable))
    return memoryview(array)


def bytes_of_all(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Return the memory of packed tensors that have elements; see `bytes_of`."""
    if not tensors or sys.byteorder == "big" or not all(one.is_cpu for one in tensors):
        return list(map(bytes_of, tensors))
    rows = [(one.untyped_storage(), one.data_ptr(), one.nbytes) for one in tensors]
    owners, begins, lengths = zip(*rows, strict=True)
    first, ends = min(begins), list(map(operator.add, begins, lengths))
    view = memory_view(first, max(ends), owners, writable=True)
    return [view[begin - first : end - first] for begin, end in zip(begins, ends, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Slabs:
    """The row-major bytes of a tensor that do not lie in host memory as they are.

    A call gives them, packed slab by slab.
    """

    tensor: torch.Tensor

    def __call__(self) -> Iterator[memoryview]:
        """Pack slabs of 4 MiB at most; one is held at a time."""
        return map(bytes_of, _packed_slabs(self.tensor))


Data = memoryview | Slabs


class Scratch:
    """Memory for one round after another: what is touched already takes no time to get."""

    def __init__(self, device: Any = "cpu") -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return that much of it; what it held is gone."""
        if nbytes > self._buffer.numel():
            self._buffer = self._buffer.new_empty(0)  # not both at once
            self._buffer = self._buffer.new_empty(nbytes)
        return self._buffer[:nbytes]


def data_of(tensor: torch.Tensor) -> Data:
    """Return the row-major bytes of a tensor: its memory, or what packs slabs of it.

    Memory: one slab of 4 MiB while the slabs are in use, where they are needed.
    """
    return bytes_of(tensor) if is_packed(tensor) else Slabs(tensor)


def digest_of(tensor: torch.Tensor) -> bytes:
    """Return the digest of a strided tensor's row-major bytes.

    Memory: as `data_of`.
    """
    hasher = Hasher()
    data = data_of(tensor.detach())
    for part in data() if callable(data) else (data,):
        hasher.update(part)
    return hasher.digest()


def copy_elements(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a tensor into another of its shape: bit by bit if dtypes are equal, else converted."""
    if into.dtype == source.dtype and into.layout == source.layout == torch.strided:
        as_bits(into).copy_(as_bits(source))
    else:
        into.copy_(source)


def _packed_slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    nbytes = tensor.numel() * tensor.element_size()
    for box in row_boxes(tensor.shape, nbytes, SLAB_NBYTES):
        yield as_bits(box_view(tensor, box)).cpu().contiguous()


def box_view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of one box of a tensor."""
    for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor may share memory, as those of an expanded one do."""
    if tensor.is_contiguous():
        return False
    reach = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step < reach:
                return tensor.numel() > 0
            reach += (size - 1) * step
    return False


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the order of the dims in memory, outermost first, of a dense permuted tensor.

    None for one that is row-major, and for one that is not dense.
    """
    if tensor.is_contiguous() or tensor.numel() == 0:
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= tensor.shape[dim]
    return order


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: Any = "cpu", order: Any = None
) -> torch.Tensor:
    """Allocate a tensor; its dims lie in memory in this order if one is given that fits."""
    shape = tuple(shape)
    fits = type(order) is list and set(map(type, order)) == {int}
    fits = fits and sorted(order) == list(range(len(shape)))
    carrier = _CARRIERS[dtype.itemsize]
    raw = torch.empty(
        [shape[dim] for dim in order] if fits else shape, dtype=carrier, device=device
    )
    if fits:
        raw = raw.permute([order.index(dim) for dim in range(len(shape))])
    return _retyped(raw, dtype)


def tensor_over(view: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor of these packed bytes, which it shares and keeps alive."""
    raw = torch.frombuffer(view, dtype=torch.uint8).view(carrier(dtype.itemsize))
    return _retyped(raw.view(tuple(shape)), dtype)


def typed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes, on any device, as elements."""
    view: Any = torch.empty(0, dtype=dtype, device=raw.device)
    count = raw.numel() // dtype.itemsize
    result: torch.Tensor = view.set_(
        raw.untyped_storage(), raw.storage_offset() // dtype.itemsize, (count,), (1,)
    )
    return result


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor, on any device, as its bytes."""
    view: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    width = tensor.element_size()
    start, nbytes = tensor.storage_offset() * width, tensor.numel() * width
    result: torch.Tensor = view.set_(tensor.untyped_storage(), start, (nbytes,), (1,))
    return result


def _retyped(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View elements as those of another dtype of the same width."""
    if dtype == torch.complex32:  # torch warns where it makes one, and not where it views one
        return raw.view(dtype)
    typed = torch.empty(0, dtype=dtype, device=raw.device)
    return typed.set_(raw.untyped_storage(), 0, raw.shape, raw.stride())
