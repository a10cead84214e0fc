"""Signatures: what is written, what a reader who asks for a key accepts, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="signatures need it")
from cryptography.exceptions import InternalError
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

import dsdformat
import dsdformat.numpy
from dsdformat import ArgumentError, FormatError, SignatureError, StorageError, TensorSource
from dsdformat.cli.main import main
from dsdformat.convert.rewriting import copy
from dsdformat.storage.guards import folder_guard

LABEL = "manifest.dsd.sig"
SEED, OTHER_SEED = bytes(range(32)), bytes(range(32, 64))
# From RFC 8032's algorithm, of SEED; frozen.
PUBLIC = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"


def pem(key: Any) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def public_pem(key: Any) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


KEY = Ed25519PrivateKey.from_private_bytes(SEED)
OTHER = Ed25519PrivateKey.from_private_bytes(OTHER_SEED).public_key().public_bytes_raw()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "c", b"abcd")
    return tmp_path / "c"


def save(path: Path, data: bytes, **options: object) -> str:
    with dsdformat.create(path, **options) as writer:
        writer.add({"model": {"w": TensorSource.of("uint8", (len(data),), data)}})
    assert writer.root
    return writer.root


def code_of(path: Path, pubkey: object = PUBLIC, **options: object) -> str:
    """The code that a reader and a verifier refuse a checkpoint with; both the same."""
    with pytest.raises(SignatureError) as error:
        dsdformat.open(path, pubkey=pubkey, **options)
    assert error.value.where == LABEL
    report = dsdformat.verify(path, pubkey=pubkey, **options)
    assert [problem.code for problem in report.problems] == [error.value.code]
    return error.value.code


# What is written


def test_a_signature_is_over_the_prefix_and_the_root_digest(path):
    assert dsdformat.sign(path, SEED) == PUBLIC
    first, line, end = (path / LABEL).read_text("ascii").split("\n")
    assert (first, end) == ("dsd-signatures-1", "")
    word, public, signature = line.split(" ")
    assert (word, public) == ("ed25519", PUBLIC)
    with dsdformat.open(path) as checkpoint:
        message = b"dsd-signature-1\n" + bytes.fromhex(checkpoint.root)
    assert len(message) == 48
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
    key.verify(bytes.fromhex(signature), message)


def test_signing_changes_nothing_else_and_leaves_nothing(path):
    before = {one.name: one.read_bytes() for one in path.iterdir()}
    dsdformat.sign(path, SEED)
    after = {one.name: one.read_bytes() for one in path.iterdir()}
    del after[LABEL]
    assert after == before


def test_several_sign_in_any_order_and_again_with_equal_bytes(path):
    for seed in (SEED, OTHER_SEED, SEED):
        dsdformat.sign(path, seed)
    data = (path / LABEL).read_bytes()
    (path / LABEL).unlink()
    for seed in (OTHER_SEED, SEED):
        dsdformat.sign(path, seed)
    assert (path / LABEL).read_bytes() == data
    for key in (PUBLIC, OTHER):
        assert dsdformat.verify(path, pubkey=key).ok


def test_of_several_keys_each_must_have_signed(path):
    dsdformat.sign(path, SEED)
    dsdformat.open(path, pubkey=[PUBLIC]).close()
    for keys in ([PUBLIC, OTHER], (OTHER, PUBLIC)):
        assert code_of(path, keys) == "not_signed"
    dsdformat.sign(path, OTHER_SEED)
    dsdformat.open(path, pubkey=(OTHER, PUBLIC)).close()
    with pytest.raises(ArgumentError, match="without keys"):
        dsdformat.open(path, pubkey=[])


def test_a_signature_is_not_unlisted_and_no_side_file_may_have_its_name(path):
    dsdformat.sign(path, SEED)
    assert dsdformat.verify(path).unlisted == ()
    writer = dsdformat.create(path.parent / "d")
    for label in (LABEL, LABEL.upper()):
        with pytest.raises(ArgumentError):
            writer.add_file(label, b"")
    writer.abort()


def test_only_the_digest_that_is_expected_is_signed(path):
    with pytest.raises(FormatError) as error:
        dsdformat.sign(path, SEED, digest="0" * 64)
    assert error.value.code == "digest_mismatch"
    assert not (path / LABEL).exists()


def test_a_signature_that_cannot_be_written_leaves_the_others(path, monkeypatch):
    dsdformat.sign(path, SEED)
    data = (path / LABEL).read_bytes()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError):
        dsdformat.sign(path, OTHER_SEED)
    assert (path / LABEL).read_bytes() == data
    assert sorted(os.listdir(path)) == ["manifest.dsd", LABEL, "model.safetensors"]


# Keys


def test_keys_are_taken_as_files_contents_bytes_and_digits(path, tmp_path):
    (tmp_path / "key.pem").write_bytes(pem(KEY))
    (tmp_path / "key.pub").write_bytes(public_pem(KEY))
    for key in (tmp_path / "key.pem", str(tmp_path / "key.pem"), pem(KEY), SEED):
        (path / LABEL).unlink(missing_ok=True)
        assert dsdformat.sign(path, key) == PUBLIC
    for key in (
        *(tmp_path / "key.pub", str(tmp_path / "key.pub"), public_pem(KEY)),
        *(bytes.fromhex(PUBLIC), PUBLIC, PUBLIC.upper()),
    ):
        dsdformat.open(path, pubkey=key).close()


RSA = rsa.generate_private_key(65537, 2048)
LOCKED = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize("key", [b"", b"x" * 31, pem(RSA), public_pem(KEY), LOCKED], ids=range(5))
def test_what_is_no_private_key_is_refused(path, key):
    with pytest.raises(ArgumentError, match="private Ed25519 key") as error:
        dsdformat.sign(path, key)
    assert error.value.code == "bad_argument"
    assert not (path / LABEL).exists()


@pytest.mark.parametrize("key", [b"", b"x" * 33, public_pem(RSA), pem(KEY)], ids=range(4))
def test_what_is_no_public_key_is_refused(path, key):
    with pytest.raises(ArgumentError, match="public Ed25519 key"):
        dsdformat.open(path, pubkey=key)


@pytest.mark.parametrize("times", [1, 2])
def test_a_key_is_loaded_again_if_openssl_tells_of_another_one(path, monkeypatch, times):
    """After a key that it refuses, the next one may be met with that one's error, once."""
    dsdformat.sign(path, SEED)
    load, told = serialization.load_pem_public_key, [InternalError("", [])] * times

    def loading(data: bytes) -> Any:
        if told:
            raise told.pop()
        return load(data)

    monkeypatch.setattr(serialization, "load_pem_public_key", loading)
    if times == 1:
        dsdformat.open(path, pubkey=public_pem(KEY)).close()
    else:
        with pytest.raises(ArgumentError, match="public Ed25519 key"):
            dsdformat.open(path, pubkey=public_pem(KEY))


def test_a_key_that_is_no_key_at_all_or_not_there_is_an_error(path, tmp_path):
    with pytest.raises(ArgumentError):
        dsdformat.open(path, pubkey=7)
    with pytest.raises(StorageError):
        dsdformat.open(path, pubkey=tmp_path / "missing")


# What is refused


def test_a_checkpoint_without_a_signature_of_the_key_is_not_signed(path):
    assert code_of(path) == "not_signed"
    dsdformat.sign(path, OTHER_SEED)
    assert code_of(path) == "not_signed"


def test_a_checkpoint_that_was_made_anew_is_not_the_signed_one(path):
    """Somebody rewrites data and digests, and keeps the signature."""
    dsdformat.sign(path, SEED)
    data = (path / LABEL).read_bytes()
    save(path, b"evil", overwrite=True)
    assert not (path / LABEL).exists()
    (path / LABEL).write_bytes(data)
    assert dsdformat.verify(path).ok
    assert code_of(path) == "bad_signature"


def test_a_signature_of_something_else_is_refused(path):
    root = bytes.fromhex(dsdformat.verify(path).root or "")
    for message in (root, b"dsd-signature-1" + root, b"dsd-signature-2\n" + root):
        line = f"ed25519 {PUBLIC} {KEY.sign(message).hex()}"
        (path / LABEL).write_text(f"dsd-signatures-1\n{line}\n")
        assert code_of(path) == "bad_signature"


def test_every_bit_of_a_signature_counts(path):
    dsdformat.sign(path, SEED)
    data = (path / LABEL).read_bytes()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 7
        (path / LABEL).write_bytes(changed)
        with pytest.raises(SignatureError) as error:
            dsdformat.open(path, pubkey=PUBLIC)
        assert error.value.code in ("bad_signature", "not_signed")


def malformed(good: bytes) -> dict[str, bytes]:
    first, line, _ = good.split(b"\n")
    return {
        "empty": b"",
        "cut": good[:-1],
        "other-first-line": good.replace(b"signatures-1", b"signatures-2"),
        "empty-line": good + b"\n",
        "twice": good + line + b"\n",
        "carriage-returns": good.replace(b"\n", b"\r\n"),
        "upper-case": first + b"\n" + line.upper() + b"\n",
        "junk": good + b"junk\n",
        "other-algorithm": good + line.replace(b"ed25519", b"rsa") + b"\n",
        "not-ascii": good + b"\xff\n",
        "too-many": first
        + b"\n"
        + b"".join(b"ed25519 %064x %0128x\n" % (number, 0) for number in range(300)),
        "huge": good + b"\0" * 100_000,
    }


@pytest.mark.parametrize("kind", malformed(b"a\nb\n"))
def test_a_file_of_signatures_that_is_malformed_is_refused_as_a_whole(path, kind):
    dsdformat.sign(path, SEED)
    data = malformed((path / LABEL).read_bytes())[kind]
    (path / LABEL).write_bytes(data)
    assert code_of(path) == "bad_signature"
    with pytest.raises(SignatureError):
        dsdformat.sign(path, OTHER_SEED)
    assert (path / LABEL).read_bytes() == data
    assert dsdformat.verify(path).ok  # who asks for no key is not disturbed


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda one: os.symlink("x", one)])
def test_a_file_of_signatures_that_is_special_is_refused(path, make):
    make(path / LABEL)
    with pytest.raises(FormatError) as error:
        dsdformat.open(path, pubkey=PUBLIC)
    assert error.value.code == "not_regular_file"


def test_nothing_is_read_into_a_model_that_is_not_signed(path, monkeypatch):
    torch = pytest.importorskip("torch")
    import dsdformat.torch as dsd

    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    dsd.save(path, {"model": torch.nn.Linear(2, 2)}, overwrite=True)
    for load in (
        lambda: dsd.load(path, {"model": model}, pubkey=PUBLIC),
        lambda: dsd.load(path, pubkey=PUBLIC),
        lambda: dsd.map_parameters(path, model, pubkey=PUBLIC),
        lambda: dsd.load_model(path, registry={}, pubkey=PUBLIC),
        lambda: dsdformat.numpy.load(path, pubkey=PUBLIC),
    ):
        with pytest.raises((SignatureError, dsdformat.DistributedError), match="no signature"):
            load()
    assert torch.equal(model.weight, before)
    dsdformat.sign(path, SEED)
    dsd.load(path, {"model": model}, pubkey=PUBLIC)
    assert not torch.equal(model.weight, before)


def test_a_copy_has_the_signatures_of_the_checkpoint(path, tmp_path):
    dsdformat.sign(path, SEED)
    copy(path, tmp_path / "copy")
    assert (tmp_path / "copy" / LABEL).read_bytes() == (path / LABEL).read_bytes()
    assert dsdformat.verify(tmp_path / "copy", pubkey=PUBLIC).ok


def test_a_signed_checkpoint_is_replaced_by_a_folder_of_another_kind(path, tmp_path):
    dsdformat.sign(path, SEED)
    assert folder_guard(["model.safetensors"])(path) is None


# The command


def test_the_command_signs_and_verifies(path, tmp_path, capsys):
    (tmp_path / "key.pem").write_bytes(pem(KEY))
    (tmp_path / "key.pub").write_bytes(public_pem(KEY))
    verify = ["verify", str(path), "--pubkey", str(tmp_path / "key.pub")]
    assert main(verify) == 1
    assert "not_signed" in capsys.readouterr().out
    assert main(["sign", str(path), "--key", str(tmp_path / "key.pem")]) == 0
    assert f"pubkey  {PUBLIC}" in capsys.readouterr().out
    assert main(verify) == 0
    assert "signed   with 1 key asked for" in capsys.readouterr().out
    assert main(["verify", str(path), "--pubkey", PUBLIC]) == 0
    for keys in (
        (PUBLIC, OTHER.hex()),
        (OTHER.hex(), PUBLIC),
    ):
        options = [text for key in keys for text in ("--pubkey", key)]
        assert main(["verify", str(path), *options]) == 1
        assert f"no signature of the key {OTHER.hex()}" in " ".join(capsys.readouterr().out.split())


def test_a_key_is_refused_for_a_file_that_has_no_signatures(path, tmp_path, capsys):
    os.rename(path / "model.safetensors", tmp_path / "other.safetensors")
    assert main(["verify", str(tmp_path / "other.safetensors"), "--pubkey", PUBLIC]) == 2
    assert "is no folder of ours, and has no signature" in capsys.readouterr().err


def test_the_command_signs_nothing_that_is_damaged(path, tmp_path, capsys):
    (tmp_path / "key.pem").write_bytes(pem(KEY))
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    assert main(["sign", str(path), "--key", str(tmp_path / "key.pem")]) == 1
    assert "checksum_mismatch" in capsys.readouterr().err
    assert not (path / LABEL).exists()


def test_without_the_package_an_error_says_what_to_install(path, run_python):
    source = (
        "import sys\nsys.modules['cryptography'] = None\nimport dsdformat\n"
        f"try:\n    dsdformat.sign({str(path)!r}, bytes(32))\n"
        "except dsdformat.DependencyError as error:\n    print(error.code, error.hint)\n"
    )
    done = run_python(source)
    assert done.stdout == "missing_dependency pip install 'dsdformat[sign]'\n", done.stderr
