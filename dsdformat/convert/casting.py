"""Tensors in another dtype, cast while they are read; nothing is lost without being told.

Floats are rounded to nearest even as torch does, by way of float32 from float64 to what is
narrower. What a dtype is too narrow for is counted. Integers are cast only if each is the same
number, unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dsdformat.boxes import Box, whole
from dsdformat.convert.faults import fault
from dsdformat.convert.followers import iter_optimizers
from dsdformat.convert.foreign import AnyTensor, mapped_tree, rooted, walk_tree
from dsdformat.convert.numbers import as_array, has_numbers, need_numpy
from dsdformat.errors import ArgumentError, printable, shorten
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.values import Named
from dsdformat.renaming import display
from dsdformat.selection import Selection
from dsdformat.sources import Reference, TensorSource

__all__ = ["CAST_DTYPES", "Cast", "CastTensor", "cast"]

_FLOATS = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
_INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
CAST_DTYPES = (*_FLOATS, "complex64", "complex128", *_INTS, "bool")
_E4M3FN_MAX = 448.0  # torch puts the greatest number where this dtype has no infinity
_COMPOSITE = "torch.composite"


@dataclass(frozen=True)
class Cast:
    """A tree with tensors in another dtype.

    Attributes:
        tree: The tree.
        dtypes: The dtype that each tensor had that is cast, by its first name.
        overflows: How many finite elements became infinite, NaN or the greatest number, by name;
            known once the tensor was written.
    """

    tree: Any
    dtypes: Mapping[str, str]
    overflows: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CastTensor:
    """A tensor in another dtype; has what an `AnyTensor` has.

    Attributes:
        base: The tensor as it is.
        dtype: What it becomes.
        name: How messages call it.
        overflows: Where it is counted what is too large.
        lossy: Whether integers may become other numbers.
    """

    base: AnyTensor
    dtype: str
    name: str
    overflows: dict[str, int]
    lossy: bool = False

    def __repr__(self) -> str:
        return f"CastTensor({self.dtype}, {list(self.shape)})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.base.shape

    @property
    def nbytes(self) -> int:
        """Length of the packed bytes."""
        return whole(self.shape).numel * DTYPES[self.dtype].itemsize

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Hints that are stored with a reference: `dim_order`, `flavour`."""
        return self.base.attributes

    @property
    def identity(self) -> int:
        """What is equal for tied tensors: that of the base, as one base is cast one way."""
        return self.base.identity

    def is_packed(self) -> bool:
        """Whether each stored piece of the base is row-major as it lies."""
        return self.base.is_packed()

    def tiles(self) -> list[Box]:
        """Return the boxes that are stored of the base, each in one piece."""
        return self.base.tiles()

    def read(self, box: Box | None = None, *, into: Any = None) -> memoryview:
        """Read one box as packed row-major little-endian bytes.

        Raises:
            ConvertError: `inexact_cast`.

        Memory: the box, some times over.
        """
        data, _ = self._converted(self.base.read(box))
        if into is None:
            return data
        view = memoryview(into).cast("B") if len(data) else memoryview(bytearray())
        view[:] = data
        return view

    def source(self) -> TensorSource:
        """Return what a `Writer` stores of it, in the chunks of the base's source."""
        return self._cast(self.base.source())

    def as_stored(self) -> TensorSource:
        """Return a source with the chunks and the codec that the tensor has, if it is ours."""
        as_stored = getattr(self.base, "as_stored", self.base.source)
        return self._cast(as_stored())

    def reference(self, source: TensorSource) -> Reference:
        """Return a reference to a source of it, with the hints."""
        return Reference(source, dict(self.attributes))

    def _cast(self, source: TensorSource) -> TensorSource:
        self.overflows.pop(self.name, None)
        chunks = [
            (box, partial(self._blocks, data) if callable(data) else self._converted(data)[0])
            for box, data in source.chunks
        ]
        return replace(source, dtype=self.dtype, chunks=chunks)

    def _blocks(self, data: Callable[[], Iterable[Any]]) -> Iterator[memoryview]:
        for block in data():
            cast_block, overflow = self._converted(block)
            if overflow:
                self.overflows[self.name] = self.overflows.get(self.name, 0) + overflow
            yield cast_block

    def _converted(self, data: Any) -> tuple[memoryview, int]:
        array, overflow = _converted(
            as_array(data, self.base.dtype), self.dtype, self.name, self.base.dtype, self.lossy
        )
        np = need_numpy()
        if not array.size:
            return memoryview(b""), 0
        return memoryview(np.ascontiguousarray(array).view("uint8")), overflow


def cast(
    tree: Any,
    dtype: str,
    *,
    select: Selection | str | Iterable[str] | None = None,
    lossy: bool = False,
) -> Cast:
    """Return a tree with tensors in another dtype; they are cast while they are read.

    Args:
        tree: What to cast in.
        dtype: Logical name of a number, as `bfloat16`.
        select: Globs of names; all floats if None. What an optimizer keeps is left as it is,
            unless a glob begins with the optimizer's own name. Components of tensors that are
            stored by those, such as sparse ones, are left too.
        lossy: Whether integers may become other numbers: rounded, or cut off toward zero. What is
            out of range is refused even so.

    Raises:
        ArgumentError: not a dtype to cast to.
        EntryNotFoundError: a glob matches nothing.

    Ranks: local.
    Memory: none now; when the tensors are read, some times 4 MiB.
    """
    if dtype not in CAST_DTYPES:
        raise ArgumentError(
            f"{shorten(dtype)} is no dtype to cast to",
            code="bad_argument",
            hint="choose one of " + ", ".join(CAST_DTYPES),
        )
    if select is None and dtype not in _FLOATS:
        raise ArgumentError(
            f"floats are not cast to {dtype} without being named",
            code="bad_argument",
            hint="say what to cast, with select",
        )
    tree = rooted(tree)
    globs = [] if select is None else [select] if isinstance(select, str) else select
    wanted = _wanted(tree, globs, everything=select is None)
    cast_ = Cast(tree, {})
    tensors: dict[int, CastTensor] = {}
    names: dict[str, str] = {}
    for name, leaf in wanted:
        if leaf.dtype == dtype or leaf.identity in tensors:
            continue
        _check(name, leaf.dtype, dtype)
        tensors[leaf.identity] = CastTensor(leaf, dtype, name, cast_.overflows, lossy)
        names[name] = leaf.dtype

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, AnyTensor) or leaf.identity not in tensors:
            return leaf
        return replace(tensors[leaf.identity], base=leaf)

    return Cast(mapped_tree(tree, changed), names, cast_.overflows)


def _wanted(
    tree: Any, select: Selection | Iterable[str], *, everything: bool
) -> list[tuple[str, AnyTensor]]:
    """List the tensors to cast, with their names."""
    selection = select if isinstance(select, Selection) else Selection(select)
    globs = [] if isinstance(select, Selection) else list(select)
    optimizers = [display(path) for path, _ in iter_optimizers(tree)]
    kept = tuple(
        f"{name}/" for name in optimizers if not any(glob.startswith(name) for glob in globs)
    )
    composites = tuple(f"{display(path)}/" for path in _iter_composites(tree, ()))
    found = []
    names = []
    for path, leaf in walk_tree(tree):
        name = display(path)
        names.append(name)
        if not isinstance(leaf, AnyTensor) or name.startswith((*kept, *composites)):
            continue
        if leaf.dtype in _FLOATS if everything else name in selection:
            found.append((name, leaf))
    if not everything:
        selection.check_used(names)
    return found


def _iter_composites(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """List the tensors that are stored by their components (spec/pytorch.md)."""
    if isinstance(node, Mapping):
        for key, item in node.items():
            yield from _iter_composites(item, (*path, key))
    elif isinstance(node, (list, tuple)):
        if len(node) == 2 and type(node[0]) is Named and node[0].kind == _COMPOSITE:
            yield path
            return
        for index, item in enumerate(node):
            yield from _iter_composites(item, (*path, index))


def _check(name: str, old: str, new: str) -> None:
    if not has_numbers(old):
        raise ArgumentError(
            f"{printable(name)}: elements of {old} are no single numbers", code="bad_argument"
        )
    if old.startswith("complex") and not new.startswith("complex"):
        raise ArgumentError(
            f"{printable(name)}: complex numbers are not cast to {new}", code="bad_argument"
        )


def _converted(array: Any, dtype: str, name: str, old: str, lossy: bool) -> tuple[Any, int]:
    """Return an array as another dtype, and how many elements that is too narrow for."""
    np = need_numpy()
    with np.errstate(all="ignore"):
        if old.startswith("complex") or (old in DTYPES and _is_float(old)):
            if dtype in _INTS or dtype == "bool":
                return _to_integers(np, array, dtype, name, old, lossy), 0
            return _to_floats(np, array, dtype)
        if dtype in _INTS or dtype == "bool":
            return _between_integers(np, array, dtype, name, old, lossy), 0
        return _from_integers(np, array, dtype, name, old, lossy), 0


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _numpy_dtype(dtype: str) -> Any:
    from dsdformat.numpy import dtype_of

    return dtype_of(dtype).newbyteorder("<")


def _to_floats(np: Any, array: Any, dtype: str) -> tuple[Any, int]:
    """Round to nearest even, as torch: by way of float32 where that lies between."""
    if dtype.startswith("complex"):
        wide = array if array.dtype.kind == "c" else array.astype("float64")
        result = wide.astype(_numpy_dtype(dtype))
        return result, int((np.isfinite(wide) & ~np.isfinite(result)).sum())
    if dtype == "float64":
        return array.astype("float64"), 0
    narrow = array.astype("float32")
    result = narrow if dtype == "float32" else narrow.astype(_numpy_dtype(dtype))
    bad = ~np.isfinite(result.astype("float32"))
    overflow = int((bad & np.isfinite(array.astype("float64"))).sum()) if bad.any() else 0
    if dtype == "float8_e4m3fn" and bad.any():
        result = np.clip(narrow, -_E4M3FN_MAX, _E4M3FN_MAX).astype(result.dtype)
        overflow += int(np.isinf(array.astype("float64")).sum())
    return result, overflow


def _to_integers(np: Any, array: Any, dtype: str, name: str, old: str, lossy: bool) -> Any:
    numbers = array.astype("float64")
    if dtype == "bool":
        sound = np.ones(len(numbers), bool) if lossy else (numbers == 0) | (numbers == 1)
        _refuse_others(array, sound, dtype, name, old, lossy)
        return numbers != 0
    cut = np.trunc(numbers)
    limits = np.iinfo(dtype)
    inside = (cut >= float(limits.min)) & (cut < float(limits.max) + (limits.bits < 64))
    sound = inside if lossy else inside & (cut == numbers) & ~((cut == 0) & np.signbit(numbers))
    _refuse_others(array, sound, dtype, name, old, lossy)
    return cut.astype(dtype)


def _between_integers(np: Any, array: Any, dtype: str, name: str, old: str, lossy: bool) -> Any:
    if dtype == "bool":
        sound = np.ones(len(array), bool) if lossy else (array == 0) | (array == 1)
        _refuse_others(array, sound, dtype, name, old, lossy)
        return array != 0
    result = array.astype(dtype)
    sound = (result == array) & ((result < 0) == (array < 0))
    _refuse_others(array, sound, dtype, name, old, lossy)
    return result


def _from_integers(np: Any, array: Any, dtype: str, name: str, old: str, lossy: bool) -> Any:
    if array.dtype.kind == "b":
        array = array.astype("uint8")
    real = "float64" if dtype in ("float64", "complex128") else "float32"
    result = array.astype(real).astype(_numpy_dtype(dtype))
    back = result.astype("complex128").real
    whole_ = array.dtype.type
    limits = np.iinfo(array.dtype)
    inside = (back >= float(limits.min)) & (back < float(limits.max) + (limits.bits < 64))
    sound = inside & (np.where(inside, back, 0).astype(whole_) == array)
    _refuse_others(array, np.isfinite(back) if lossy else sound, dtype, name, old, lossy)
    return result


def _refuse_others(array: Any, sound: Any, dtype: str, name: str, old: str, lossy: bool) -> None:
    if sound.all():
        return
    value = array[~sound][0].item()
    raise fault(
        "inexact_cast",
        name,
        f"{value!r} of {old} is {'out of the range' if lossy else 'not the same number as any'} "
        f"of {dtype}",
        hint=None if lossy else "leave it out of what is selected, or ask for it with lossy=True",
    )
