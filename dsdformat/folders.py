"""Checkpoints in folders of a file system: open, create, verify, sign, and the latest of a run.

The functions that `dsdformat` offers; they join a local folder to the reader, the writer and the
verifier, which know no paths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from dsdformat.errors import (
    ArgumentError,
    FormatError,
    IncompleteError,
    NotACheckpointError,
    shorten,
)
from dsdformat.format.digests import parse_digest
from dsdformat.format.values import Leaf
from dsdformat.limits import BLOCK_NBYTES_DEFAULT, SIGNATURES_LABEL, SIGNATURES_NBYTES_MAX
from dsdformat.reader import Checkpoint
from dsdformat.signing import (
    Key,
    Keys,
    check_signed,
    emit_signatures,
    parse_signatures,
    public_keys,
    sign_root,
)
from dsdformat.storage.base import Storage
from dsdformat.storage.local import LocalStorage, find_names
from dsdformat.storage.renames import replace_file
from dsdformat.storage.target import LocalTarget
from dsdformat.verify import Progress, Report, verify_storage
from dsdformat.writer import Codec, Writer

__all__ = ["PathLike", "create", "latest", "open", "sign", "verify"]

PathLike = str | os.PathLike[str]


def open(
    path: PathLike,
    *,
    verify: bool = True,
    digest: str | None = None,
    pubkey: Keys | None = None,
    threads: int | None = None,
) -> Checkpoint:
    """Open a checkpoint for reading.

    Reads the manifest's head and body; tensors and their chunk tables are read when asked for.

    Args:
        path: The checkpoint's folder.
        verify: Whether reads compare blocks with their digests.
        digest: The root digest that the checkpoint must have, 64 hexadecimal digits.
        pubkey: An Ed25519 key that must have signed the checkpoint: a PEM file, its contents, 32
            bytes, or 64 hexadecimal digits. A list of keys, all of which must have signed it.
        threads: How many threads read; up to 8 if None.

    Raises:
        NotACheckpointError: `no_manifest` or `bad_magic`.
        FormatError: the manifest breaks the spec, or is another one than `digest` says.
        SignatureError: `not_signed` or `bad_signature`.
        StorageError: the operating system reported an error.

    Ranks: local.
    Memory: the manifest's body, and 40 bytes per tensor.
    """
    expected = _parse_digest(digest)
    signers = public_keys(pubkey)
    while True:
        storage = LocalStorage(path)
        try:
            checkpoint = Checkpoint(storage, verify=verify, digest=expected, threads=threads)
            signatures = _signatures(storage) if signers else {}
            for signer in signers:
                check_signed(bytes.fromhex(checkpoint.root), signer, signatures)
            return checkpoint
        except BaseException as error:
            storage.close()
            if not isinstance(error, IncompleteError | NotACheckpointError):
                raise
            if not storage.is_replaced():  # or its manifest was removed before it was opened
                raise


def create(
    path: PathLike,
    *,
    overwrite: bool = False,
    codec: Codec = "raw",
    user: Mapping[str, str] | None = None,
    block_nbytes: int = BLOCK_NBYTES_DEFAULT,
    world_size: int = 1,
    metadata: Mapping[str, str] | None = None,
    threads: int | None = None,
    adapt: Leaf | None = None,
) -> Writer:
    """Begin a checkpoint; it exists once the returned writer has committed.

    Args:
        path: The checkpoint's folder; parents are made.
        overwrite: Whether to replace a checkpoint that is there, once the new one is complete.
        codec: `raw`, `zstd` or `planes+zstd`, or a function from a tensor's name to one.
        user: User metadata: strings.
        block_nbytes: Unit of hashing and compression: a power of two from 4 KiB to 64 MiB.
        world_size: Number of writers; the returned one is rank 0 and the coordinator.
        metadata: `__metadata__` of the data files; `{"format": "pt"}` if None.
        threads: How many threads hash and write; up to 8 if None.
        adapt: Called for a value of a type that the format does not have, with its path; gives
            a `TensorSource`, a `Reference` to one, a value that it has, or NotImplemented to
            refuse it. One that is a `dsdformat.sources.RunAdapter` also gives many tensors at once.

    Raises:
        StorageError: `already_exists`, `not_replaceable` or `io_error`.

    Ranks: coordinator only; others call `Writer.join`.
    Memory: none; see `Writer.commit`.
    """
    target = LocalTarget(path, overwrite=overwrite)
    try:
        return Writer(
            target,
            user=user,
            codec=codec,
            block_nbytes=block_nbytes,
            world_size=world_size,
            metadata=metadata,
            threads=threads,
            adapt=adapt,
        )
    except BaseException:
        target.abort()
        raise


def verify(
    path: PathLike,
    *,
    digest: str | None = None,
    pubkey: Keys | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check every byte of a checkpoint, and report all that is wrong.

    Args:
        path: The checkpoint's folder.
        digest: The root digest that it must have. Without one, a person who rewrote the data
            and its digests goes unnoticed.
        pubkey: An Ed25519 key that must have signed the checkpoint, as in `open`.
        threads: How many threads read and hash; up to 8 if None.
        progress: Called with bytes done and bytes in all.

    Returns:
        A report; a damaged checkpoint is not an error.

    Raises:
        StorageError: the operating system reported an error.

    Ranks: local.
    Memory: one block per thread, and the chunk tables.
    """
    expected = _parse_digest(digest)
    signers = public_keys(pubkey)
    while True:
        try:
            if signers:  # before data is read that nobody vouches for
                with open(path, digest=digest, pubkey=signers) as signed:
                    expected = bytes.fromhex(signed.root)
            storage = LocalStorage(path)
        except FormatError as error:
            return Report(str(path), problems=error.problems)
        report = verify_storage(storage, expected_root=expected, threads=threads, progress=progress)
        if report.ok or not storage.is_replaced():  # or files were removed before they were read
            return report


def sign(path: PathLike, key: Key, *, digest: str | None = None) -> str:
    """Sign a checkpoint: vouch for its root digest with a key, beside other signatures.

    The signature goes into `manifest.dsd.sig`, and changes nothing else. Nothing is verified but
    the manifest: verify the checkpoint first, unless `digest` came from whoever saved it.

    Args:
        path: The checkpoint's folder.
        key: A private Ed25519 key: a PEM file without a password, its contents, or 32 bytes.
        digest: The root digest that the checkpoint must have.

    Returns:
        The public key, 64 hexadecimal digits, as `pubkey` of `open` takes it.

    Raises:
        ArgumentError: `bad_argument`: not such a key.
        FormatError: as `open`; `bad_signature` if the file of signatures is malformed.
        StorageError: the file of signatures cannot be written.

    Ranks: local; one rank signs.
    Memory: the manifest's body.
    """
    with open(path, digest=digest) as checkpoint:
        public, signature = sign_root(bytes.fromhex(checkpoint.root), key)
        storage = checkpoint.table.storage
        signatures = {**_signatures(storage), public: signature}
        replace_file(Path(storage.name) / SIGNATURES_LABEL, emit_signatures(signatures))
    return public.hex()


def _signatures(storage: Storage) -> dict[bytes, bytes]:
    """Read the file of signatures; none is checked. No file is no signature."""
    try:
        nbytes = storage.nbytes(SIGNATURES_LABEL)
    except IncompleteError:
        return {}
    data = bytearray(min(nbytes, SIGNATURES_NBYTES_MAX))
    storage.read_into(SIGNATURES_LABEL, 0, memoryview(data))
    return parse_signatures(bytes(data))


def latest(folder: PathLike, *, name: str = "*") -> Path | None:
    """Find the newest checkpoint of a run: the one of the highest step in its name.

    Names are compared by the numbers in them, one after another, so `step-1000` is newer than
    `step-999`, and `epoch=2-step=5` newer than `epoch=1-step=900`. Names without a number, hidden
    ones, and folders that hold no complete manifest are passed over. No tensor is read.

    Args:
        folder: Where the checkpoints of the run are. It may be missing, before the first save.
        name: Which names count, as a pattern: `step-*` where `best-7` lies beside.

    Returns:
        The path of the checkpoint, as `open` and `load` take it; None if there is none.

    Raises:
        FormatError: the newest one is damaged, or of a newer version of the format.
        StorageError: the operating system reported an error.

    Ranks: local; one rank finds it and tells the others, since a save may end in between.
    Memory: the names, and a manifest's body.
    """
    place = Path(folder)
    found = ((_numbers(one), one) for one in find_names(place) if fnmatchcase(one, name))
    for numbers, one in sorted(found, reverse=True):
        if not numbers:
            break
        try:
            open(place / one).close()
        except (NotACheckpointError, IncompleteError):
            continue
        return place / one
    return None


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall("[0-9]{1,18}", name)))


def _parse_digest(text: str | None) -> bytes | None:
    if text is None:
        return None
    raw = parse_digest(text) if isinstance(text, str) else None
    if raw is None:
        raise ArgumentError(
            f"a root digest is 64 hexadecimal digits, got {shorten(text)}", code="bad_argument"
        )
    return raw
