"""The dtype table (spec/registry/dtypes.md): logical name, itemsize, form in a safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DTYPES", "Dtype", "payload_shape"]

_AS_IS, _PAIRS, _DOUBLED = "s", "s+[2]", "s·2"


@dataclass(frozen=True, slots=True)
class Dtype:
    """One row of the registry.

    Attributes:
        name: Logical name.
        itemsize: Bytes of one element.
        stored_as: Type in the header of a safetensors file.
        shape_rule: How a box's shape is written there: `s`, `s+[2]` or `s·2`.
        rotate: Whether codec 2 rotates the sign bit down.
        word: Bytes of the integer that codec 2 splits: those of one real number.
    """

    name: str
    itemsize: int
    stored_as: str
    shape_rule: str = _AS_IS
    rotate: bool = False

    @property
    def word(self) -> int:
        """Bytes of the integer that codec 2 splits: those of one real number."""
        return self.itemsize // 2 if self.name.startswith("complex") else self.itemsize


def payload_shape(dtype: Dtype, shape: Sequence[int]) -> list[int]:
    """Return the shape that a safetensors header gives to a raw chunk of this box shape."""
    if dtype.shape_rule == _PAIRS:
        return [*shape, 2]
    if dtype.shape_rule == _DOUBLED:
        return [*shape[:-1], shape[-1] * 2] if shape else [2]
    return list(shape)


_ROWS = (
    Dtype("bool", 1, "BOOL"),
    Dtype("float16", 2, "F16", rotate=True),
    Dtype("bfloat16", 2, "BF16", rotate=True),
    Dtype("float32", 4, "F32", rotate=True),
    Dtype("float64", 8, "F64", rotate=True),
    Dtype("complex32", 4, "F16", _PAIRS, rotate=True),
    Dtype("complex64", 8, "C64", rotate=True),
    Dtype("complex128", 16, "F64", _PAIRS, rotate=True),
    *(Dtype(f"int{8 * n}", n, f"I{8 * n}") for n in (1, 2, 4, 8)),
    *(Dtype(f"uint{8 * n}", n, f"U{8 * n}") for n in (1, 2, 4, 8)),
    *(Dtype(f"int{bits}", 1, "U8") for bits in range(1, 8)),
    *(Dtype(f"uint{bits}", 1, "U8") for bits in range(1, 8)),
    Dtype("float8_e4m3fn", 1, "F8_E4M3"),
    Dtype("float8_e5m2", 1, "F8_E5M2"),
    Dtype("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    Dtype("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    Dtype("float8_e8m0fnu", 1, "F8_E8M0"),
    Dtype("float8_e3m4", 1, "U8"),
    Dtype("float8_e4m3", 1, "U8"),
    Dtype("float8_e4m3b11fnuz", 1, "U8"),
    Dtype("float6_e2m3fn", 1, "U8"),
    Dtype("float6_e3m2fn", 1, "U8"),
    Dtype("float4_e2m1fn", 1, "U8"),
    Dtype("float4_e2m1fn_x2", 1, "F4", _DOUBLED),
)

DTYPES: dict[str, Dtype] = {row.name: row for row in _ROWS}
