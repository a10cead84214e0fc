"""Use everything that reads or writes a checkpoint, and let Python report what it executes.

Run as `python -m tests.hostile.audited FOLDER`. Modules of ours are imported under an audit hook
that ends at a program that is started, a socket, or a pickle. Then each operation runs twice on
files that would execute something: the first time Python may import what it uses, and the second
time nothing may be imported, compiled or executed at all. Prints what was done, one a line.

With a second argument it does what must not be done instead, and prints what the hook saw.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import pkgutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dsdformat

# What ends the run at once, always.
NEVER = (
    *("pickle.find_class", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"),
    *("os.spawn", "os.startfile", "pty.spawn", "subprocess.Popen"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "socket.__new__"),
    *("urllib.Request", "http.client.connect", "webbrowser.open", "code.__new__"),
    *("cpython.run_command", "cpython.run_file", "cpython.run_stdin", "cpython.run_module"),
)
# What imports do, and what nothing else may.
IMPORTING = ("import", "exec", "compile", "marshal.loads", "marshal.load")


class Guard:
    """An audit hook; hooks cannot be taken out, so this one is told what to forbid."""

    def __init__(self) -> None:
        self.forbidden: tuple[str, ...] = ()
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in self.forbidden:
            self.seen.append(f"{event} {args!r}"[:300])
            raise RuntimeError(self.seen[-1])

    @contextlib.contextmanager
    def forbidding(self, *events: str) -> Any:
        before, self.forbidden = self.forbidden, events
        try:
            yield
        finally:
            self.forbidden = before
        if self.seen:  # whoever caught the exception does not hide it
            sys.exit("\n".join(self.seen))


class Bomb:
    """What a pickle would run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch canary",)


def prepare(folder: Path) -> None:
    """Make foreign files that execute something in a reader that lets them."""
    bomb = pickle.dumps({"w": torch.ones(3), "bomb": Bomb()})
    (folder / "bomb.pickle").write_bytes(bomb)
    torch.save({"w": torch.ones(3), "bomb": Bomb()}, folder / "bomb.pt")
    torch.save({"w": torch.ones(3), "step": 3}, folder / "plain.pt")
    torch.save({"w": torch.ones(3)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    np.savez(folder / "bomb.npz", w=np.array([Bomb()], dtype=object))
    np.savez(folder / "plain.npz", w=np.ones(3))
    (folder / "dcp").mkdir()
    (folder / "dcp" / ".metadata").write_bytes(bomb)
    (folder / "dcp" / "__0_0.distcp").write_bytes(bomb)
    (folder / "pickled").mkdir()
    (folder / "pickled" / "manifest.dsd").write_bytes(bomb)
    with zipfile.ZipFile(folder / "bomb.zip", "w") as archive:
        archive.writestr("x/data.pkl", bomb)
    (folder / "conftest.py").write_text("import os\nos.system('touch canary')\n")
    (folder / "os.py").write_text("raise SystemExit('imported')\n")


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except dsdformat.DsdError:
        return
    raise AssertionError("a hostile file was accepted")


def use_core(folder: Path) -> None:
    path = folder / "core"
    names = ("os.system", "builtins.eval", "conftest", "torch.load")
    values = {name: dsdformat.Named("function", name) for name in names}
    text = {"command": "os.system('touch canary')", "import": "conftest", "b": b"\x80\x04."}
    with dsdformat.create(path, overwrite=True, codec="planes+zstd") as writer:
        writer.add_file("conftest.py", b"import os\nos.system('touch canary')\n")
        writer.add({"names": values, "text": text, "os.system": {"__reduce__": (1, 2)}})
        writer.add_tensor(["model", "w"], bytes(4096), dtype="float32", shape=(1024,))
        writer.add_tensor(["model", "r"], bytes(64), dtype="int8", shape=(64,), codec="raw")
    assert dsdformat.verify(path).ok
    with dsdformat.open(path) as checkpoint:
        for entry in checkpoint:
            entry.read()
            repr(entry)
        checkpoint.tensor("model/r").map()
        checkpoint.value("names/os.system")
    for label in ("manifest.dsd", "model.safetensors"):
        damaged = folder / "core" / label
        damaged.write_bytes(damaged.read_bytes()[:-1])
        assert not dsdformat.verify(path).ok
    refused(lambda: dsdformat.open(folder / "pickled"))
    assert not dsdformat.verify(folder / "pickled").ok


def use_numpy(folder: Path) -> None:
    import dsdformat.numpy

    path = folder / "numpy"
    state = {"a": np.arange(6.0).reshape(2, 3), "b": np.float32(1)}
    dsdformat.numpy.save(path, state, overwrite=True)
    dsdformat.numpy.load(path)
    refused(lambda: dsdformat.numpy.save(folder / "no", {"o": np.array([Bomb()])}))
    refused(lambda: dsdformat.numpy.save(folder / "no", {"o": Bomb()}))


def use_torch(folder: Path) -> None:
    import dsdformat.torch as dsd

    path = folder / "torch"
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "rng": dsd.rng_state(), "step": 3}
    recipe = dsd.Recipe("linear", in_features=4, out_features=4)
    dsd.save(path, state, overwrite=True, recipes={"model": recipe})
    dsd.load(path)
    rest = dsd.load(path, {**state, "rng": None, "step": None})
    dsd.set_rng_state(rest["rng"])
    dsd.load(path, mmap=True)
    root = dsd.save(path, state, overwrite=True, recipes={"model": recipe}, background=True).wait()
    assert dsdformat.verify(path, digest=root).ok
    registry = {"linear": torch.nn.Linear}
    dsd.load_model(path, registry=registry)
    refused(lambda: dsd.load_model(path, registry={}))
    refused(lambda: dsd.save(folder / "no", {"o": Bomb()}))
    refused(lambda: dsd.load(folder / "pickled"))


def use_signed(folder: Path) -> None:
    import dsdformat.torch as dsd

    path, key = folder / "torch", bytes(range(32))
    public = dsdformat.sign(path, key)
    assert dsdformat.verify(path, pubkey=public).ok
    dsd.load(path, pubkey=public)
    refused(lambda: dsd.load(path, pubkey=bytes(32)))
    signatures = path / "manifest.dsd.sig"
    signatures.write_bytes((folder / "bomb.pickle").read_bytes())
    refused(lambda: dsd.load(path, pubkey=public))
    signatures.unlink()


def use_convert(folder: Path) -> None:
    from dsdformat.convert import convert, find_kind, open_any, open_foreign

    for name in ("plain.pt", "old.pt", "plain.npz", "torch", "numpy/model.safetensors"):
        with (
            open_any(folder / name) as foreign,
            dsdformat.create(folder / "converted", overwrite=True) as writer,
        ):
            writer.add(foreign.state())
        assert dsdformat.verify(folder / "converted").ok
    for target in ("out.pt", "out.safetensors", "out.npz"):
        convert(folder / "torch", folder / target, select="model", overwrite=True)
    for name in ("bomb.pt", "bomb.npz", "dcp", "bomb.zip", "bomb.pickle"):
        with contextlib.suppress(dsdformat.DsdError):
            find_kind(folder / name)
        refused(lambda name=name: [one.read() for _, one in open_foreign(folder / name)])
    for policy in ("drop", "record"):
        with open_foreign(folder / "bomb.pt", unknown=policy) as foreign:
            repr(foreign.tree)


def use_command(folder: Path) -> None:
    from dsdformat.cli.main import main

    path = str(folder / "torch")
    for arguments in (
        ["info", path],
        ["ls", path],
        ["show", path, "model/weight"],
        ["verify", path],
    ):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(arguments) == 0, arguments


OPERATIONS = [use_core, use_numpy, use_torch, use_signed, use_convert, use_command]

PROOFS: dict[str, Callable[[Path], object]] = {
    "pickle": lambda folder: pickle.loads((folder / "bomb.pickle").read_bytes()),
    "torch": lambda folder: torch.load(folder / "bomb.pt", weights_only=False),
    "system": lambda folder: os.system("true"),
    "program": lambda folder: subprocess.run(["true"], check=False),
    "socket": lambda folder: socket.socket(),
    "import": lambda folder: importlib.import_module("this"),
    "eval": lambda folder: eval("1"),
    "exec": lambda folder: exec("1"),
}


def import_all() -> int:
    found = pkgutil.walk_packages(dsdformat.__path__, "dsdformat.")
    names = [one.name for one in found if one.name != "dsdformat.testing.vectors"]
    for name in names:
        importlib.import_module(name)
    return len(names)


def main(folder: Path) -> None:
    guard = Guard()
    with guard.forbidding(*NEVER):
        print("imported", import_all())
        for operation in OPERATIONS:
            operation(folder)
    with guard.forbidding(*NEVER, *IMPORTING):
        for operation in OPERATIONS:
            operation(folder)
            print(operation.__name__)


def prove(folder: Path) -> None:
    guard = Guard()
    for name, proof in PROOFS.items():
        guard.forbidden = (*NEVER, *IMPORTING)
        with contextlib.suppress(RuntimeError):
            proof(folder)
        guard.forbidden = ()
        print(name, guard.seen[0].split()[0])
        guard.seen.clear()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    prepare(place)
    sys.path.insert(0, str(place))  # where an import by a name from a file would look
    os.chdir(place)
    (prove if len(sys.argv) > 2 else main)(place)
