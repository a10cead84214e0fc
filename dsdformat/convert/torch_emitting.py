"""What tensors, arrays and constants are in a pickle of torch.

The other direction of `torch_names`, `torch_constants` and `numpy_names`. A tensor names its
storage, which the file holds beside the pickle; an array of numpy lies in the pickle itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsdformat.convert.foreign import AnyTensor
from dsdformat.convert.numpy_names import typestr_of
from dsdformat.convert.packed import packed_blocks
from dsdformat.convert.pickles.emitting import Emitter
from dsdformat.convert.plain_emitting import PlainEmitter, refuse, refuse_dtype
from dsdformat.convert.storages import storage_type_of, torch_dtype_name
from dsdformat.convert.tensor import packed_strides
from dsdformat.convert.torch_names import COMPRESSED
from dsdformat.errors import shorten
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.values import Named, Scalar
from dsdformat.limits import MIB

__all__ = ["StorageTable", "Stored", "TorchEmitter", "dim_order_of"]

Path = tuple[Any, ...]

_NUMPY_CORE = "numpy.core.multiarray"  # which every numpy has, old and new
_NOT_NUMPY = {
    *("complex32", "float4_e2m1fn_x2"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (3, 5, 6, 7)),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A storage that a file will hold: all bytes of one tensor, in the order of its memory.

    Attributes:
        key: Name of the storage.
        tensor: What it is of.
        order: In which order the dims lie; row-major if None.
    """

    key: str
    tensor: AnyTensor
    order: tuple[int, ...] | None

    @property
    def kind(self) -> str | None:
        """Its class in torch; None for one of bytes, which newer dtypes have."""
        return storage_type_of(self.tensor.dtype)

    @property
    def numel(self) -> int:
        """How many elements it has, as its class counts them."""
        itemsize = 1 if self.kind is None else DTYPES[self.tensor.dtype].itemsize
        return self.tensor.nbytes // itemsize

    def blocks(self) -> Iterable[memoryview]:
        """Yield its bytes, a few megabytes at a time."""
        return packed_blocks(self.tensor, self.order)


@dataclass
class StorageTable:
    """The storages of a file, in the order in which its pickle names them. Tied tensors are one.

    Attributes:
        stored: By the identity of the tensor.
    """

    stored: dict[int, Stored] = field(default_factory=dict)

    def find(self, tensor: AnyTensor, path: Path) -> Stored:
        """Return the storage of a tensor, which is listed the first time.

        Raises:
            UnsupportedValueError: two names of one tensor say that its memory is ordered otherwise.
        """
        order = dim_order_of(tensor)
        found = self.stored.get(tensor.identity)
        if found is None:
            found = self.stored[tensor.identity] = Stored(str(len(self.stored)), tensor, order)
        if found.order != order:
            refuse(path, "one of two tied tensors of different memory orders")
        return found


class TorchEmitter(PlainEmitter):
    """Writes values into the pickle of one file of torch."""

    def __init__(
        self,
        emitter: Emitter,
        storages: StorageTable,
        *,
        weights_only: bool,
        attributes: Mapping[Path, Any] | None = None,
        read_data: bool = True,
        legacy: bool = False,
    ) -> None:
        """Begin.

        Args:
            emitter: Takes the opcodes.
            storages: Is told the storages that tensors need.
            weights_only: Whether to refuse what `torch.load(weights_only=True)` does not read.
            attributes: What Python keeps on ordered dicts, by path; see `Foreign`.
            read_data: Whether the bytes of numpy arrays are read; zeros of the same length are
                written otherwise, so that all can be checked and counted before.
            legacy: Whether the file has the stream form.
        """
        super().__init__(emitter, weights_only=weights_only, attributes=attributes)
        self._storages = storages
        self._read_data = read_data
        self._legacy = legacy

    def write_other(self, value: Any, path: Path) -> None:
        """Write a tensor, an array or a constant."""
        if isinstance(value, AnyTensor):
            if value.attributes.get("flavour") == "numpy":
                self._array(value, path)
            else:
                self._tensor(value, path)
        elif type(value) is Named:
            self._named(value, path)
        elif type(value) is Scalar:
            self._scalar(value, path)
        else:
            super().write_other(value, path)

    def write_tuple(self, value: tuple[Any, ...], path: Path) -> None:
        """Write a tuple, or the tensor in components that it stands for."""
        kind = value[0] if len(value) == 2 else None
        if type(kind) is Named and kind.kind == "torch.composite" and type(value[1]) is dict:
            self._composite(kind.name, value[1], path)
        else:
            super().write_tuple(value, path)

    # Constants

    def _named(self, value: Named, path: Path) -> None:
        name = value.name
        if value.kind == "torch.dtype" and torch_dtype_name(name):
            self.emitter.name("torch", name)
        elif value.kind == "torch.device":
            kind, _, index = name.partition(":")
            parts = (kind, int(index)) if index.isdecimal() else (name,)
            self.call("torch", "device", parts, path)
        elif value.kind == "torch.layout":
            self._layout(name, path)
        elif value.kind == "torch.memory_format":
            self.check_full(path, "a memory format")
            self.emitter.name("torch", name)
        elif value.kind == "numpy.dtype":
            self.check_full(path, "a dtype of numpy")
            self._numpy_dtype(name, path)
        else:
            refuse(path, f"the constant {value.kind} {shorten(name)}")

    def _layout(self, name: str, path: Path) -> None:
        text = f"torch.{name.removeprefix('torch.')}"
        self.call("torch.serialization", "_get_layout", (text,), path)

    # Tensors

    def _tensor(self, tensor: AnyTensor, path: Path) -> None:
        if torch_dtype_name(tensor.dtype) is None:
            refuse_dtype(path, f"a tensor of {tensor.dtype}, which torch does not have")
        stored = self._storages.find(tensor, path)
        emitter, kind = self.emitter, stored.kind
        if kind is None and self._legacy:
            refuse_dtype(path, f"a tensor of {tensor.dtype}, which the stream form does not have")
        emitter.name("torch._utils", f"_rebuild_tensor_v{3 if kind is None else 2}")
        emitter.mark()
        self._storage(stored)
        self.write(0)
        self.write(tuple(tensor.shape))
        self.write(_strides(tensor.shape, stored.order))
        self.write(False)
        self.call("collections", "OrderedDict", (), path)
        if kind is None:
            emitter.name("torch", tensor.dtype)
        emitter.tuple()
        emitter.call()

    def _storage(self, stored: Stored) -> None:
        emitter = self.emitter
        emitter.mark()
        emitter.text("storage")
        if stored.kind is None:
            emitter.name("torch.storage", "UntypedStorage")
        else:
            emitter.name("torch", stored.kind)
        emitter.text(stored.key)
        emitter.text("cpu")
        emitter.integer(stored.numel)
        if self._legacy:
            emitter.atom(None)
        emitter.tuple()
        emitter.persist()

    def _composite(self, name: str, parts: Mapping[str, Any], path: Path) -> None:
        layout = name.removeprefix("torch.")
        keys: tuple[str, ...] = ("indices", "values", "size", "coalesced")
        if layout in COMPRESSED:
            keys = (*COMPRESSED[layout], "values", "size")
        elif layout != "sparse_coo":
            refuse(path, f"a tensor of the kind {shorten(name)}")
        if set(parts) != set(keys):
            refuse(path, f"a sparse tensor with the components {shorten(list(parts))}")
        self.emitter.name("torch._utils", "_rebuild_sparse_tensor")
        self._layout(layout, path)
        self.above_mark([parts[key] for key in keys], path)
        self.emitter.tuple()
        self.emitter.tuple(2)
        self.emitter.call()

    # Arrays and scalars of numpy

    def _array(self, tensor: AnyTensor, path: Path) -> None:
        self.check_full(path, "an array of numpy")
        emitter = self.emitter
        if emitter.recall(tensor.identity):
            return
        order = dim_order_of(tensor)
        fortran = order is not None and order == tuple(reversed(range(len(order))))
        if order is not None and not fortran:
            refuse(path, f"an array of numpy whose dims lie as {list(order)}")
        emitter.name(_NUMPY_CORE, "_reconstruct")
        emitter.name("numpy", "ndarray")
        self.write((0,))
        self.write(b"b")
        emitter.tuple(3)
        emitter.call()
        emitter.remember(tensor.identity)
        emitter.mark()
        self.write(1)
        self.write(tuple(tensor.shape))
        self._numpy_dtype(tensor.dtype, path)
        self.write(fortran)
        emitter.long_data(tensor.nbytes, self._array_blocks(tensor, order))
        emitter.tuple()
        emitter.build()

    def _array_blocks(
        self, tensor: AnyTensor, order: tuple[int, ...] | None
    ) -> Iterable[memoryview | bytes]:
        if self._read_data:
            return packed_blocks(tensor, order)
        return (bytes(min(MIB, tensor.nbytes - at)) for at in range(0, tensor.nbytes, MIB))

    def _numpy_dtype(self, dtype: str, path: Path) -> None:
        emitter, text = self.emitter, typestr_of(dtype)
        if dtype in _NOT_NUMPY:
            refuse_dtype(path, f"{dtype}, which neither numpy nor ml_dtypes has")
        emitter.name("numpy", "dtype")
        if text is None:
            emitter.name("ml_dtypes", dtype)
        else:
            emitter.text(text)
        emitter.atom(False)
        emitter.atom(True)
        emitter.tuple(3)
        emitter.call()
        itemsize = DTYPES[dtype].itemsize
        order = "<" if text is None or itemsize > 1 else "|"
        # Of a dtype that is not numpy's own, numpy sets what it is given in the one that all share.
        form = (itemsize, itemsize, 64) if text is None else (-1, -1, 0)
        self.write((3, order, None, None, None, *form))
        emitter.build()

    def _scalar(self, value: Scalar, path: Path) -> None:
        self.check_full(path, "a scalar of numpy")
        self.emitter.name(_NUMPY_CORE, "scalar")
        self._numpy_dtype(value.dtype, path)
        self.emitter.data(value.data)
        self.emitter.tuple(2)
        self.emitter.call()


def dim_order_of(tensor: AnyTensor) -> tuple[int, ...] | None:
    """Return in which order the dims of a tensor lie in memory; None for row-major.

    Attributes are hints, and may come from a file: what is no order is none.
    """
    order = tensor.attributes.get("dim_order")
    dims = list(range(len(tensor.shape)))
    if not isinstance(order, (list, tuple)) or any(type(dim) is not int for dim in order):
        return None
    return None if sorted(order) != dims or list(order) == dims else tuple(order)


def _strides(shape: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    if order is None:
        return packed_strides(shape)
    packed = packed_strides([shape[dim] for dim in order])
    return tuple(packed[order.index(dim)] for dim in range(len(shape)))
