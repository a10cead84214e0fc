"""Read and write checkpoints of other formats. Nothing is executed or imported, no torch needed.

`open_foreign` opens what `find_kind` recognizes, and gives a `Foreign`: a nested state of values
with a `ForeignTensor` at each tensor, which reads any box of itself from where it lies. `open_any`
opens checkpoints of ours too, with the same face.

`convert` makes a checkpoint of another kind. `extract`, `merge`, `rename` and `cast` make a tree of
trees, `write` streams one into a checkpoint of ours, `copy` copies one, and `diff`,
`content_digest` and `find_summary` tell what two, or one, hold.
"""

from __future__ import annotations

from dsdformat.convert.casting import CAST_DTYPES, Cast, cast
from dsdformat.convert.comparing import Change, Difference, diff
from dsdformat.convert.content import content_digest, tensor_digest
from dsdformat.convert.converting import OUTPUTS, Converted, convert
from dsdformat.convert.foreign import AnyTensor, Foreign
from dsdformat.convert.kinds import Kind, find_kind, open_any, open_foreign
from dsdformat.convert.own import StoredTensor
from dsdformat.convert.rewriting import copy, united_user, write
from dsdformat.convert.settling import Finding, Policy
from dsdformat.convert.summary import Summary, find_histogram, find_summary
from dsdformat.convert.tensor import ForeignTensor
from dsdformat.convert.transforms import branch, extract, merge, rename, rename_rules

__all__ = [
    "CAST_DTYPES",
    "OUTPUTS",
    "AnyTensor",
    "Cast",
    "Change",
    "Converted",
    "Difference",
    "Finding",
    "Foreign",
    "ForeignTensor",
    "Kind",
    "Policy",
    "StoredTensor",
    "Summary",
    "branch",
    "cast",
    "content_digest",
    "convert",
    "copy",
    "diff",
    "extract",
    "find_histogram",
    "find_kind",
    "find_summary",
    "merge",
    "open_any",
    "open_foreign",
    "rename",
    "rename_rules",
    "tensor_digest",
    "united_user",
    "write",
]
