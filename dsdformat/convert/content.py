"""Content digests of checkpoints of any kind: equal wherever the same state lies (spec 13).

A tensor whose digest a manifest gives is not read; all others are streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dsdformat.boxes import whole
from dsdformat.convert.foreign import AnyTensor, read_range, rooted, walk_tree
from dsdformat.convert.outputs import Progress
from dsdformat.convert.own import StoredTensor
from dsdformat.format.digests import digest, tensor_content_digest
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.packing import emit
from dsdformat.format.values import Encoded, encode
from dsdformat.limits import LEAF_NBYTES

__all__ = ["content_digest", "known_digest", "tensor_digest", "tensors_of"]


def tensors_of(tree: Any) -> list[AnyTensor]:
    """List the tensors of a tree in its order, tied ones once."""
    found = {leaf.identity: leaf for _, leaf in walk_tree(tree) if isinstance(leaf, AnyTensor)}
    return list(found.values())


def known_digest(tensor: AnyTensor) -> bytes | None:
    """Return the content digest of a tensor where it is known without reading data."""
    if not isinstance(tensor, StoredTensor):
        return None
    known = tensor.entry.known_content_digest()
    return None if known is None else bytes.fromhex(known)


def tensor_digest(tensor: AnyTensor, told: Callable[[int], None] | None = None) -> bytes:
    """Return the content digest of a tensor (R-13.1).

    Args:
        tensor: Of any checkpoint.
        told: Called with the number of bytes that were read, each time some were.

    Raises:
        ChecksumError, ConvertError: what is read is damaged.

    Ranks: local.
    Memory: 4 MiB and what reading that much takes.
    """
    known = known_digest(tensor)
    if known is not None:
        return known
    return tensor_content_digest(tensor.dtype, tensor.shape, _leaves(tensor, told))


def content_digest(tree: Any, progress: Progress | None = None) -> str:
    """Return the content digest of a state, whatever its kind of file, layout and codecs.

    Args:
        tree: As `Foreign.tree`, or what a transformation made of it.
        progress: Called with bytes read and bytes to read in all.

    Raises:
        ChecksumError, ConvertError: what is read is damaged.

    Ranks: local.
    Memory: the values, and 4 MiB.
    """
    unknown = [tensor for tensor in tensors_of(tree) if known_digest(tensor) is None]
    total, done = sum(tensor.nbytes for tensor in unknown), 0
    digests: dict[int, bytes] = {}

    def told(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    def leaf(value: Any, _path: Any) -> Any:
        if not isinstance(value, AnyTensor):
            return NotImplemented
        if value.identity not in digests:
            digests[value.identity] = tensor_digest(value, told)
        return Encoded(["tensor", digests[value.identity]])

    return digest(emit(encode(rooted(tree), leaf=leaf))).hex()


def _leaves(tensor: AnyTensor, told: Callable[[int], None] | None) -> Iterator[bytes]:
    itemsize = DTYPES[tensor.dtype].itemsize
    count, step = whole(tensor.shape).numel, LEAF_NBYTES // itemsize
    buffer = memoryview(bytearray(min(step, count) * itemsize))
    for start in range(0, count, step):
        filled = read_range(tensor, start, min(start + step, count), buffer)
        yield digest(filled)
        if told is not None:
            told(len(filled))
