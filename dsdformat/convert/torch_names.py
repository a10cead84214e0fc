"""Names of torch that a pickle may call, and the tensors and values they stand for.

A closed table, for whatever module the file says they come from: functions that rebuild tensors,
sizes, devices, layouts. A tensor becomes a `ForeignTensor` over its storage, once it is sure that
all of its elements are in there. Tensors of the same elements are one tensor, so that what was
tied stays tied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dsdformat.boxes import whole
from dsdformat.convert.pickles.keys import ValueFault
from dsdformat.convert.pickles.nodes import Global
from dsdformat.convert.pickles.resolving import Made, Maker, Unknown
from dsdformat.convert.storages import (
    FindStorage,
    Storage,
    StorageId,
    itemsize_of,
    parse_storage_id,
    torch_dtype_name,
)
from dsdformat.convert.tensor import ForeignTensor, Part, View, packed_strides
from dsdformat.convert.torch_constants import TORCH_CONSTANTS
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.values import Named, Size
from dsdformat.limits import AMPLIFICATION_FREE, AMPLIFICATION_MAX, INT63_MAX, NDIM_MAX

__all__ = ["COMPRESSED", "TorchNames"]

_PLAIN_TYPES = {
    ("torch", "Tensor"),
    ("torch._tensor", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
}
COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}


class TorchNames:
    """The rules of one file.

    Attributes:
        calls: What names mean; see `resolving.Rules`.
    """

    def __init__(self, find_storage: FindStorage, nbytes: int) -> None:
        """Begin.

        Args:
            find_storage: Gives the storage of an id.
            nbytes: Length of the file: all its tensors together may not be much larger.
        """
        self._find_storage = find_storage
        self._tensors: dict[str, ForeignTensor] = {}
        self._left = nbytes * AMPLIFICATION_MAX + AMPLIFICATION_FREE
        self._rebuild: dict[str, Maker] = {
            "_rebuild_tensor": _taking(4, 4, self._v1),
            "_rebuild_tensor_v2": _taking(6, 7, self._v2),
            "_rebuild_tensor_v3": _taking(7, 8, self._v3),
            "_rebuild_parameter": _taking(3, 3, _parameter),
            "_rebuild_parameter_with_state": _taking(4, 4, _parameter),
            "_rebuild_sparse_tensor": _taking(2, 2, _sparse),
            "_rebuild_device_tensor_from_cpu_tensor": _taking(4, 4, _moved),
            "_rebuild_device_tensor_from_numpy": _taking(4, 4, _moved),
            "_rebuild_xla_tensor": _taking(4, 4, _moved),
        }
        self.calls: dict[tuple[str, str], Maker] = {
            ("torch._utils", name): make for name, make in self._rebuild.items()
        }
        self.calls |= {
            ("torch._utils", name): _refused(reason) for name, reason in _NOT_READ.items()
        }
        self.calls |= {
            ("torch._tensor", "_rebuild_from_type_v2"): self._from_type,
            ("torch._tensor", "_rebuild_from_type"): self._from_type,
            **TORCH_CONSTANTS,
        }

    def stored(self, pid: Any) -> Any:
        """Return the storage that a persistent id names."""
        found = parse_storage_id(pid)
        return self._find_storage(found) if isinstance(found, StorageId) else found

    def _from_type(self, made: Made) -> Any:
        """A tensor with attributes, or of a subclass."""
        args = made.bare()
        if len(args) != 4 or type(args[2]) is not tuple or type(args[0]) is not Global:
            raise ValueFault("arguments that are no tensor's")
        function, kind, inner, state = args
        make = self._rebuild.get(function.name) if function.module == "torch._utils" else None
        plain = type(kind) is Global and (kind.module, kind.name) in _PLAIN_TYPES
        if make is None or not plain:
            name = kind.dotted if type(kind) is Global else made.name
            return Unknown(name, "a tensor of a class of its own", made)
        return _with_extra(make(Made(function.dotted, inner)), state)

    # Tensors

    def _v1(self, made: Made, storage: Any, *place: Any) -> Any:
        return self._strided(made, storage, None, place, None)

    def _v2(self, made: Made, storage: Any, *args: Any) -> Any:
        *place, requires_grad, hooks, metadata = [*args, None][:6]
        _check_flag(requires_grad)
        return _with_hooks(self._strided(made, storage, None, place, metadata), hooks)

    def _v3(self, made: Made, storage: Any, *args: Any) -> Any:
        *place, requires_grad, hooks, dtype, metadata = [*args, None][:7]
        _check_flag(requires_grad)
        name = torch_dtype_name(dtype.name) if type(dtype) is Global else None
        if name is None or dtype.module != "torch":
            raise ValueFault("a dtype that is none")
        return _with_hooks(self._strided(made, storage, name, place, metadata), hooks)

    def _strided(
        self, made: Made, storage: Any, dtype: str | None, place: Sequence[Any], bits: Any
    ) -> Any:
        """Return the tensor of these elements of a storage: the same one for the same ones."""
        if type(storage) is Unknown:
            return storage
        if type(storage) is not Storage:
            raise ValueFault("a storage that is none")
        dtype = storage.id.dtype if dtype is None else dtype
        offset, shape, strides = _checked_place(*place)
        _check_inside(storage, itemsize_of(dtype), offset, shape, strides)
        if dtype not in DTYPES:
            return Unknown(f"torch.{dtype}", "a dtype that the format does not have", made)
        conj, neg = _bits(bits)
        # As a string, whose hash nobody can foresee.
        key = repr((storage.id.key, storage.id.view, dtype, offset, shape, strides, conj, neg))
        empty = 0 in shape
        tensor = None if empty else self._tensors.get(key)
        if tensor is None:
            tensor = _tensor(storage, dtype, offset, shape, strides, (conj, neg))
            self._left -= tensor.nbytes
            if self._left < 0:
                raise ValueFault("tensors that are much larger than the file", "foreign_too_large")
            if not empty:
                self._tensors[key] = tensor
        return tensor


def _tensor(
    storage: Storage,
    dtype: str,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    bits: tuple[bool, bool],
) -> ForeignTensor:
    conj, neg = bits
    byte_offset = offset * DTYPES[dtype].itemsize
    big = storage.big and DTYPES[dtype].word > 1
    view = View(storage.source, byte_offset, strides, big, conj, neg)
    order = _memory_order(shape, strides)
    attributes = {} if order is None else {"dim_order": order}
    return ForeignTensor(dtype, shape, [Part(whole(shape), lambda: view)], attributes)


def _taking(least: int, most: int, make: Callable[..., Any]) -> Maker:
    """Return a maker for a function of so many arguments."""

    def call(made: Made) -> Any:
        args = made.bare()
        if not least <= len(args) <= most:
            raise ValueFault("another number of arguments than it takes")
        return make(made, *args)

    return call


def _parameter(_made: Made, data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> Any:
    _check_flag(requires_grad)
    if not isinstance(data, (ForeignTensor, Unknown, tuple)):
        raise ValueFault("data that are no tensor")
    return _with_extra(_with_hooks(data, hooks), state)


def _with_hooks(tensor: Any, hooks: Any) -> Any:
    return _with_extra(tensor, {"_backward_hooks": hooks} if hooks else None)


def _with_extra(tensor: Any, extra: Any) -> Any:
    """Keep what Python has on a tensor beside its data, so that it can be told."""
    if type(tensor) is not ForeignTensor or extra is None or extra == {}:
        return tensor
    if extra == {"persistent": True, "_is_buffer": True}:
        return tensor
    parts, attributes = tensor.parts, tensor.attributes
    return ForeignTensor(tensor.dtype, tensor.shape, parts, attributes, extra)


def _checked_place(
    offset: Any, size: Any, stride: Any
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    for numbers in ((offset,), size, stride):
        if type(numbers) not in (tuple, list, Size) or any(type(n) is not int for n in numbers):
            raise ValueFault("sizes or strides that are no integers")
        if any(not 0 <= n <= INT63_MAX for n in numbers):
            raise ValueFault("a negative or huge size or stride", "storage_out_of_bounds")
    if len(size) != len(stride) or len(size) > NDIM_MAX:
        raise ValueFault("not as many strides as sizes, or too many")
    return offset, tuple(size), tuple(stride)


def _check_inside(
    storage: Storage, itemsize: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    end = offset
    if 0 not in shape:
        end += 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if end * itemsize > storage.source.nbytes:
        raise ValueFault(
            f"a tensor of shape {list(shape)} and strides {list(strides)} at {offset} reaches "
            f"outside of its storage of {storage.source.nbytes} bytes",
            "storage_out_of_bounds",
        )
    nbytes = itemsize
    for n in shape:
        nbytes *= n or 1
        if nbytes > INT63_MAX:
            raise ValueFault("a tensor that is too large", "storage_out_of_bounds")


def _memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int] | None:
    """Return the order of the dims in memory, as `torch.buffers.memory_order` does."""
    plain = packed_strides(shape)
    same = (n == 1 or a == b for n, a, b in zip(shape, strides, plain, strict=True))
    if 0 in shape or all(same):
        return None
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= shape[dim]
    return order


def _check_flag(requires_grad: Any) -> None:
    if type(requires_grad) is not bool:
        raise ValueFault("a flag that is none")


def _bits(metadata: Any) -> tuple[bool, bool]:
    """Return whether the conjugate and the negative bit are set."""
    bits = {} if metadata is None else metadata
    if type(bits) is not dict or any(type(bit) is not bool for bit in bits.values()):
        raise ValueFault("bits that are none")
    if not set(bits) <= {"conj", "neg"}:
        raise ValueFault("bits that are not known")
    return bits.get("conj", False), bits.get("neg", False)


def _moved(_made: Made, data: Any, dtype: Any, device: Any, requires_grad: Any) -> Any:
    """A tensor of a device that keeps no storages, as it was on the host."""
    _check_flag(requires_grad)
    if type(device) is not str or type(dtype) is not Global:
        raise ValueFault("a dtype or device that is none")
    if type(data) is not ForeignTensor or data.dtype != torch_dtype_name(dtype.name):
        raise ValueFault("data that are no tensor of this dtype")
    attributes = {name: hint for name, hint in data.attributes.items() if name != "flavour"}
    return ForeignTensor(data.dtype, data.shape, data.parts, attributes, data.extra)


# Sparse tensors


def _sparse(made: Made, layout: Any, data: Any) -> Any:
    """The components of a sparse tensor, as spec/pytorch.md files them."""
    names: tuple[str, ...] = ("indices", "values", "size")
    if type(layout) is not Named or layout.kind != "torch.layout" or type(data) is not tuple:
        raise ValueFault("arguments that are no sparse tensor's")
    if any(type(one) is Unknown for one in data):
        return Unknown(made.name, "a sparse tensor of what is not read", made)
    if layout.name == "sparse_coo" and len(data) in (3, 4):
        coalesced = data[3] if len(data) == 4 else False
        parts = dict(zip(names, data, strict=False)) | {"coalesced": bool(coalesced)}
    elif layout.name in COMPRESSED and len(data) == 4:
        names = (*COMPRESSED[layout.name], "values", "size")
        parts = dict(zip(names, data, strict=True))
    else:
        raise ValueFault("arguments that are no sparse tensor's")
    size = parts["size"]
    if type(size) is not Size or any(
        type(part) is not ForeignTensor
        for name, part in parts.items()
        if name not in ("size", "coalesced")
    ):
        raise ValueFault("components that are no tensors")
    return Named("torch.composite", f"torch.{layout.name}"), parts


def _refused(reason: str) -> Maker:
    return lambda made: Unknown(made.name, reason, made)


_NOT_READ = {
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no data",
    "_rebuild_wrapper_subclass": "a tensor of a class of its own",
}
