"""Signatures over root digests: who vouches for a checkpoint. Pure; `folders` does the files.

The text is `spec/signatures.md`. A signature is Ed25519, from the package `cryptography`, which is
imported when a key is first used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdformat.errors import ArgumentError, DependencyError, Problem, shorten
from dsdformat.limits import SIGNATURES_LABEL, SIGNATURES_MAX
from dsdformat.storage.local import storage_errors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = [
    "Key",
    "Keys",
    "check_signed",
    "emit_signatures",
    "parse_signatures",
    "public_keys",
    "sign_root",
]

# A file of a PEM key, its contents, 32 bytes, or 64 hexadecimal digits.
Key = str | os.PathLike[str] | bytes
# One, or a list of several that are all meant.
Keys = Key | Sequence[Key]

_MAGIC = "dsd-signatures-1"
_DOMAIN = b"dsd-signature-1\n"  # so that a signature of a digest means this and nothing else
_LINE = re.compile(r"ed25519 ([0-9a-f]{64}) ([0-9a-f]{128})")
_KEY_NBYTES_MAX = 65_536


def sign_root(root: bytes, key: Key) -> tuple[bytes, bytes]:
    """Return the public key of a private one, and its signature of a root digest.

    Raises:
        ArgumentError: `bad_argument`: not a private key, or one that a password protects.
        DependencyError: `missing_dependency`.
        StorageError: the file of the key cannot be read.
    """
    private = _private_key(_key_bytes(key))
    return private.public_key().public_bytes_raw(), private.sign(_DOMAIN + root)


def public_keys(keys: Keys | None) -> tuple[bytes, ...]:
    """Return the 32 bytes of each public key; none for None.

    Raises:
        ArgumentError: `bad_argument`: one is none, or the list is empty.
        DependencyError: `missing_dependency`.
        StorageError: the file of the key cannot be read.
    """
    if keys is None:
        return ()
    if not isinstance(keys, list | tuple):
        return (_public_key(keys),)
    if not keys:  # whoever passes it means that somebody must have signed
        raise ArgumentError("pubkey is a list without keys", code="bad_argument")
    return tuple(map(_public_key, keys))


def _public_key(key: Any) -> bytes:
    data = _key_bytes(key)
    if len(data) == 32:
        return data
    _require()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    loaded = _loaded(lambda: load_pem_public_key(data))
    if not isinstance(loaded, Ed25519PublicKey):
        raise _no_key("public", "openssl pkey -in key.pem -pubout -out key.pub")
    return bytes(loaded.public_bytes_raw())


def emit_signatures(signatures: Mapping[bytes, bytes]) -> bytes:
    """Return the file that holds signatures, each by its public key."""
    lines = [f"ed25519 {key.hex()} {one.hex()}" for key, one in sorted(signatures.items())]
    return "".join(f"{line}\n" for line in (_MAGIC, *lines)).encode()


def parse_signatures(data: bytes) -> dict[bytes, bytes]:
    """Read the file that holds signatures; none is checked.

    Raises:
        SignatureError: `bad_signature`: it is not as it must be.
    """
    first, *lines = data.decode("ascii", "replace").split("\n")
    matches = [_LINE.fullmatch(line) for line in lines[:-1]]
    found = {bytes.fromhex(one[1]): bytes.fromhex(one[2]) for one in matches if one is not None}
    # Of equal texts only: no line is skipped, no key is there twice, and the last line has an end.
    if first != _MAGIC or lines[-1:] != [""] or len(found) != len(lines) - 1:
        raise Problem(
            "bad_signature", f"{SIGNATURES_LABEL} is malformed", where=SIGNATURES_LABEL
        ).error()
    if len(found) > SIGNATURES_MAX:
        text = f"{SIGNATURES_LABEL} holds more than {SIGNATURES_MAX} signatures"
        raise Problem("bad_signature", text, where=SIGNATURES_LABEL).error()
    return found


def check_signed(root: bytes, key: bytes, signatures: Mapping[bytes, bytes]) -> None:
    """Check that a key has signed a root digest.

    Raises:
        SignatureError: `not_signed` or `bad_signature`.
        DependencyError: `missing_dependency`.
    """
    if key not in signatures:
        raise Problem(
            "not_signed",
            f"the checkpoint has no signature of the key {key.hex()}",
            where=SIGNATURES_LABEL,
            hint="sign it with `dsd sign`, or give the key of one who has signed it",
        ).error()
    _require()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signatures[key], _DOMAIN + root)
    except (InvalidSignature, ValueError):
        raise Problem(
            "bad_signature",
            f"the signature of the key {key.hex()} is not one of this checkpoint",
            where=SIGNATURES_LABEL,
            hint="the checkpoint was changed after it was signed; take another copy",
        ).error() from None


def _private_key(data: bytes) -> Ed25519PrivateKey:
    _require()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if len(data) == 32:
        return Ed25519PrivateKey.from_private_bytes(data)
    loaded = _loaded(lambda: load_pem_private_key(data, password=None))
    if not isinstance(loaded, Ed25519PrivateKey):
        raise _no_key("private", "openssl genpkey -algorithm ed25519 -out key.pem")
    return loaded


def _loaded(load: Callable[[], Any]) -> Any:
    """Return the key that a PEM file holds; None if it holds none that is known."""
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm

    for _ in range(2):
        try:
            return load()
        except InternalError:  # may be about what was loaded before, of which it tells once
            continue
        except (TypeError, ValueError, UnsupportedAlgorithm):
            break
    return None


def _key_bytes(key: Key) -> bytes:
    """Return the bytes of a key: 32 raw ones, or those of a PEM file."""
    if isinstance(key, bytes):
        return key
    if not isinstance(key, str | os.PathLike):
        raise ArgumentError(f"{shorten(type(key))} is no key", code="bad_argument")
    if isinstance(key, str) and re.fullmatch(r"[0-9a-fA-F]{64}", key):
        return bytes.fromhex(key)
    with storage_errors(key), Path(key).open("rb") as file:
        return file.read(_KEY_NBYTES_MAX)


def _no_key(kind: str, command: str) -> ArgumentError:
    return ArgumentError(
        f"this is no {kind} Ed25519 key, or a password protects it",
        code="bad_argument",
        hint=f"make one with `{command}`",
    )


def _require() -> None:
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError:
        raise DependencyError(
            "signatures need the package cryptography",
            code="missing_dependency",
            hint="pip install 'dsdformat[sign]'",
        ) from None
