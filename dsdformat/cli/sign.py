"""`dsd sign`: vouch for a checkpoint with a key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import dsdformat
from dsdformat.cli.options import Ckpt, Digest, Json
from dsdformat.cli.render import Output

__all__ = ["HELP", "sign"]

HELP = """Sign a checkpoint with an Ed25519 key.

All of it is verified first. The signature goes into manifest.dsd.sig, beside those of others, and
changes nothing else.
Whoever has the public key can then ask for it: dsd verify --pubkey, or pubkey= where it is loaded.

\b
Example:
  openssl genpkey -algorithm ed25519 -out key.pem
  openssl pkey -in key.pem -pubout -out key.pub
  dsd sign step-1000 --key key.pem
  dsd verify step-1000 --pubkey key.pub

\b
--json prints an object with checkpoint, root, pubkey.
"""


def sign(
    ctx: typer.Context,
    ckpt: Ckpt,
    key: Annotated[
        Path, typer.Option(metavar="FILE", help="The private key: a PEM file without a password.")
    ],
    digest: Digest = None,
    json: Json = False,
) -> int:
    """Verify a checkpoint, sign its root digest, and print which key did."""
    out: Output = ctx.obj
    report = dsdformat.verify(str(ckpt), digest=digest)
    report.raise_if_bad()
    public = dsdformat.sign(str(ckpt), key, digest=report.root)
    if json:
        out.document({"checkpoint": str(ckpt), "root": report.root, "pubkey": public})
    else:
        out.line(f"{ckpt}: signed", "bold")
        out.pairs([("root", report.root or ""), ("pubkey", public)])
    return 0
