"""Every kind is read where neither torch nor numpy nor safetensors is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exactly import saved
from samples import KINDS

from dsdformat.convert import Kind

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in {"torch", "numpy", "ml_dtypes", "safetensors", "pickle", "_pickle"}:
            raise ImportError(f"{name} is blocked")

for name in [name for name in sys.modules if "pickle" in name]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocked())
from dsdformat.convert import convert, open_foreign
from dsdformat.convert.opening import open_origin
from dsdformat.boxes import whole
from dsdformat.plan.load_plan import Wanted
import dsdformat

answers = []
for path, out in zip(sys.argv[1::2], sys.argv[2::2]):
    with open_foreign(path) as foreign:
        data = {name: bytes(tensor.read()).hex() for name, tensor in foreign}
        with dsdformat.create(out) as writer:
            writer.add(foreign.state())
    for each in (path, out):  # many boxes at once, of a foreign checkpoint and of ours
        reader = open_origin(each)
        wanted = [Wanted(entry.index, whole(entry.shape)) for entry in reader]
        buffers = [bytearray(entry.nbytes) for entry in reader]
        reader.read_boxes(wanted, buffers)
        assert [buffer.hex() for buffer in buffers] == list(data.values()), (each, data)
        assert list(reader.tree()) and [len(one.content_digest()) for one in reader] == [64]
        reader.close()
    answers.append(data)
    for to in ("safetensors", "huggingface", "npz", "torch", "dcp"):
        options = {"weights_only": False} if to == "torch" else {}
        convert(out, out + "-" + to, to=to, **options)
        with open_foreign(out + "-" + to) as foreign:
            again = {name: bytes(tensor.read()).hex() for name, tensor in foreign}
        assert again == data, to
print(json.dumps(answers))
"""


def test_every_kind_is_read_and_written_with_the_core_alone(tmp_path):
    kinds = [kind for kind in KINDS if kind is not Kind.DSD]
    paths = [KINDS[kind](tmp_path / kind.name) for kind in kinds]
    paths.append(saved({"w": torch.arange(6.0).reshape(2, 3).t()}, tmp_path / "t.pt"))
    args = [str(arg) for path in paths for arg in (path, f"{path}-out")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *plain, transposed = json.loads(done.stdout)
    assert plain == [{"w": "0000803f" * 2}] * len(kinds)
    expected = torch.arange(6.0).reshape(2, 3).t().contiguous().numpy().tobytes()
    assert bytes.fromhex(transposed["w"]) == expected


@pytest.mark.parametrize("name", ["torch", "numpy", "safetensors", "pickle"])
def test_importing_the_readers_loads_none_of(name, run_python):
    source = f"import sys, dsdformat.convert; sys.exit({name!r} in sys.modules)"
    done = run_python(source)
    assert done.returncode == 0, (name, done.stderr)
