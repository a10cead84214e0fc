"""Write a tree as a checkpoint of ours, streamed; and copy one byte for byte.

Decides what of a checkpoint of ours is kept when a part of it, or more, is written anew: chunks,
codecs, the block size, user metadata and side files are; placements, and how many ranks wrote,
are not, for one process writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dsdformat import folders
from dsdformat.convert.casting import CastTensor
from dsdformat.convert.content import tensors_of
from dsdformat.convert.files import read_bytes
from dsdformat.convert.foreign import AnyTensor, Foreign, state_of
from dsdformat.convert.outputs import Meter, Progress
from dsdformat.convert.own import StoredTensor
from dsdformat.convert.write_dsd import counted
from dsdformat.errors import ArgumentError, MismatchError, listed, printable, shorten
from dsdformat.limits import BLOCK_NBYTES_DEFAULT, MANIFEST_LABEL, MIB, SIGNATURES_LABEL
from dsdformat.signing import Keys
from dsdformat.sources import TensorSource
from dsdformat.storage.base import Storage, completed
from dsdformat.storage.local import LocalStorage
from dsdformat.storage.target import LocalTarget
from dsdformat.verify import verify_storage

__all__ = ["copy", "united_user", "write"]

PathLike = str | os.PathLike[str]
_PIECE_NBYTES = 4 * MIB


def write(
    tree: Any,
    path: PathLike,
    *,
    like: Foreign | None = None,
    user: Mapping[str, str] | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> str:
    """Write a tree as a checkpoint of ours; it exists once all of it is written.

    Tensors of a checkpoint of ours keep their chunks and codecs.

    Args:
        tree: As `Foreign.tree`, or what transformations made of it.
        path: The checkpoint's folder; parents are made.
        like: What the tree came from: its user metadata, block size and side files are kept.
        user: User metadata, in place of that.
        overwrite: Whether to replace a checkpoint that is there, once the new one is complete.
        threads: How many threads hash and write; up to 8 if None.
        progress: Called with bytes done and bytes in all.

    Returns:
        The root digest.

    Raises:
        ChecksumError, ConvertError: what is read is damaged, or cannot be cast; nothing is made.
        StorageError: `already_exists`, or the medium failed; the target is as it was.

    Ranks: local.
    Memory: the values, and two blocks per thread.
    """
    checkpoint = like.checkpoint if like is not None else None
    kept = like.metadata if like is not None else {}
    sides = like.side_files() if checkpoint and like is not None else {}
    meter = Meter(progress)
    meter.total = sum(tensor.nbytes for tensor in tensors_of(tree))
    with folders.create(
        path,
        overwrite=overwrite,
        user=kept if user is None else user,
        block_nbytes=checkpoint.block_nbytes if checkpoint else BLOCK_NBYTES_DEFAULT,
        threads=threads,
    ) as writer:
        for label, source in sides.items():
            writer.add_file(label, read_bytes(source, 0, source.nbytes))
        writer.add(state_of(tree, lambda tensor: counted(_as_stored(tensor), meter)))
        return writer.commit()


def _as_stored(tensor: AnyTensor) -> TensorSource:
    """Return the source of a tensor: with its chunks and codec if it is ours."""
    if isinstance(tensor, (StoredTensor, CastTensor)):
        return tensor.as_stored()
    return tensor.source()


def copy(
    src: PathLike,
    dst: PathLike,
    *,
    digest: str | None = None,
    pubkey: Keys | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> str:
    """Copy a checkpoint of ours byte for byte; what was copied is verified before it exists.

    Ranks, placements, chunks and codecs stay as they are, and so does the root digest, with the
    signatures over it. Files that do not belong to the checkpoint are not copied.

    Args:
        src, dst: The folders; parents of the second are made.
        digest: The root digest that the checkpoint must have.
        pubkey: An Ed25519 key that must have signed it; see `dsdformat.open`.
        overwrite: Whether to replace a checkpoint that is there, once the copy is complete.
        threads: How many threads hash; up to 8 if None.
        progress: Called with bytes done and bytes in all: each is copied, then verified.

    Returns:
        The root digest.

    Raises:
        FormatError: the checkpoint is damaged, with the place, or not the one that was asked for;
            nothing is made.
        ArgumentError: `bad_argument`: the two are one folder.
        StorageError: `already_exists`, or the medium failed; the target is as it was.

    Ranks: local.
    Memory: one block per thread, and the chunk tables.
    """
    if os.path.realpath(src) == os.path.realpath(dst):
        raise ArgumentError(
            f"{shorten(os.fspath(dst))} is the checkpoint itself", code="bad_argument"
        )
    with folders.open(src, digest=digest, pubkey=pubkey) as checkpoint:
        labels = [MANIFEST_LABEL, *checkpoint.data_files, *checkpoint.side_files]
        storage = checkpoint.table.storage
        if SIGNATURES_LABEL in storage.labels():
            labels.append(SIGNATURES_LABEL)
        data = sum(checkpoint.data_files.values())
        total = sum(map(storage.nbytes, labels))
        target = LocalTarget(dst, overwrite=overwrite)
        try:
            done = 0
            for label in labels:
                for nbytes in _copy_file(storage, target, label):
                    done += nbytes
                    if progress is not None:
                        progress(done, total + data)
            report = verify_storage(
                LocalStorage(target.staging),
                expected_root=bytes.fromhex(checkpoint.root),
                threads=threads,
                progress=None
                if progress is None
                else lambda verified, _: progress(total + verified, total + data),
            )
            report.raise_if_bad()
            target.commit()
        except BaseException:
            target.abort()
            raise
        return checkpoint.root


def united_user(sources: Iterable[Foreign]) -> dict[str, str]:
    """Return the user metadata of several checkpoints as one.

    Raises:
        MismatchError: `state_conflict`: a key has two values.

    Ranks: local.
    """
    user: dict[str, str] = {}
    unlike: list[str] = []
    for source in sources:
        for key, value in source.metadata.items():
            if user.setdefault(key, value) != value:
                unlike.append(printable(key))
    if unlike:
        raise MismatchError(
            f"the user metadata differs in {listed(sorted(set(unlike)))}",
            code="state_conflict",
            hint="give the user metadata that the result shall have",
        )
    return user


def _copy_file(storage: Storage, target: LocalTarget, label: str) -> Iterator[int]:
    nbytes = storage.nbytes(label)
    buffer = memoryview(bytearray(min(nbytes, _PIECE_NBYTES)))
    with completed(target.create(label)) as sink:
        for at in range(0, nbytes, _PIECE_NBYTES):
            view = buffer[: min(_PIECE_NBYTES, nbytes - at)]
            count = storage.read_into(label, at, view)
            sink.write_at(at, [view[:count]])
            yield count
