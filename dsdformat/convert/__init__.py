"""Read and write checkpoints of other formats. Nothing is executed or imported, no torch needed.

`open_foreign` opens what `find_kind` recognizes, and gives a `Foreign`: a nested state of values
with a `ForeignTensor` at each tensor, which reads any box of itself from where it lies. `open_any`
opens checkpoints of ours too, with the same face.
"""

from __future__ import annotations

from dsdformat.convert.converting import OUTPUTS, Converted, convert
from dsdformat.convert.foreign import AnyTensor, Foreign
from dsdformat.convert.kinds import Kind, find_kind, open_any, open_foreign
from dsdformat.convert.own import StoredTensor
from dsdformat.convert.settling import Finding, Policy
from dsdformat.convert.tensor import ForeignTensor

__all__ = [
    "OUTPUTS",
    "AnyTensor",
    "Converted",
    "Finding",
    "Foreign",
    "ForeignTensor",
    "Kind",
    "Policy",
    "StoredTensor",
    "convert",
    "find_kind",
    "open_any",
    "open_foreign",
]
