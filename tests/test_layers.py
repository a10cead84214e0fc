"""tools/check_layers.py: the repository passes it, and it finds each kind of violation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import check_layers
import pytest

ROOT = Path(__file__).resolve().parent.parent


def problems_of(root: Path, files: dict[str, str]) -> list[str]:
    """Lay out a package of these modules, and return what the check says of it."""
    for name, source in files.items():
        path = root / check_layers.PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source), encoding="utf-8")
    return [str(problem) for problem in check_layers.find_problems(root)]


def problem_of(root: Path, files: dict[str, str]) -> str:
    (problem,) = problems_of(root, files)
    return problem


# The repository


def test_the_repository_keeps_to_its_layers():
    assert [str(problem) for problem in check_layers.find_problems(ROOT)] == []


def test_each_row_of_the_table_imports_only_lower_layers():
    assert all(unit.reach < unit.layer for unit in check_layers.UNITS)


def test_each_peer_in_the_table_is_a_row_of_the_same_layer():
    rows = {unit.name: unit for unit in check_layers.UNITS}
    assert all(rows[peer].layer == unit.layer for unit in check_layers.UNITS for peer in unit.peers)


# Imports of our own


def test_downward_imports_are_accepted(tmp_path):
    files = {
        "__init__.py": "from dsdformat import reader\nfrom dsdformat.errors import DsdError\n",
        "errors.py": "class DsdError(Exception): ...\n",
        "boxes.py": "from dsdformat.errors import DsdError\n",
        "format/__init__.py": "",
        "format/frame.py": "from .. import boxes\nfrom . import tree\nimport msgpack\n",
        "format/tree.py": "import dsdformat.limits as limits\n",
        "limits.py": "",
        "reader.py": "import json\nfrom dsdformat.source import Source\n",
        "source.py": "from dsdformat.format import frame\n",
        "torch/__init__.py": "from dsdformat.torch.save import save\nimport torch\n",
        "torch/save.py": "import torch.distributed as dist\nfrom dsdformat.reader import x\n",
    }
    assert problems_of(tmp_path, files) == []


UPWARD = {
    "import": ("reader.py", "import dsdformat.torch", "torch (L4)"),
    "from-import": ("reader.py", "from dsdformat.torch import save", "torch (L4)"),
    "of-a-module": ("reader.py", "from dsdformat import torch", "torch (L4)"),
    "relative": ("reader.py", "from . import torch", "torch (L4)"),
    "relative-parent": ("format/frame.py", "from ..torch import save", "torch (L4)"),
    "in-a-function": ("source.py", "def f():\n    import dsdformat.torch", "torch (L4)"),
    "in-a-condition": ("source.py", "if TYPE_CHECKING:\n    import dsdformat.torch", "torch (L4)"),
    "of-testing": ("cli/main.py", "import dsdformat.testing", "testing (L7)"),
}


@pytest.mark.parametrize(("file", "source", "target"), UPWARD.values(), ids=UPWARD)
def test_an_upward_import_is_found(tmp_path, file, source, target):
    others = {"torch/__init__.py": "", "testing/__init__.py": ""}
    problem = problem_of(tmp_path, {**others, file: source})
    line = source.count("\n") + 1
    assert problem.startswith(f"dsdformat/{file}:{line}: imports dsdformat.{target} upward")
    assert "move the code that needs it up" in problem


def test_an_import_from_the_front_door_is_an_import_of_it(tmp_path):
    problem = problem_of(tmp_path, {"writer.py": "from dsdformat import __version__\n"})
    assert problem.startswith("dsdformat/writer.py:1: imports dsdformat (L4) upward from L3")


def test_a_sideways_import_that_the_table_does_not_list_is_found(tmp_path):
    problem = problem_of(tmp_path, {"limits.py": "import dsdformat.errors\n", "errors.py": ""})
    assert problem.startswith("dsdformat/limits.py:1: imports dsdformat.errors (L0) sideways")


def test_an_import_of_a_lower_layer_that_the_table_withholds_is_found(tmp_path):
    files = {"storage/local.py": "import dsdformat.format.frame\n", "format/frame.py": ""}
    problem = problem_of(tmp_path, files)
    assert problem.startswith("dsdformat/storage/local.py:1: imports dsdformat.format.frame (L1)")
    assert "storage may import L0 to L0" in problem


def test_a_module_without_a_layer_is_found(tmp_path):
    problem = problem_of(tmp_path, {"utils.py": ""})
    assert problem.startswith("dsdformat/utils.py:1: is in no layer; add it to UNITS")


def test_an_import_of_a_module_without_a_layer_is_found(tmp_path):
    problem = problem_of(tmp_path, {"cli/main.py": "import dsdformat.gone\n"})
    assert problem.startswith("dsdformat/cli/main.py:1: imports dsdformat.gone, which is in no")


# Imports of others


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("errors.py", "msgpack"),
        ("format/frame.py", "numpy"),
        ("storage/local.py", "fsspec"),
        ("plan/mesh.py", "torch"),
        ("reader.py", "numpy"),
        ("__init__.py", "numpy"),
        ("numpy.py", "torch"),
        ("torch/save.py", "rich"),
        ("convert/npz.py", "typer"),
        ("cli/main.py", "torch"),
        ("testing/vectors.py", "torch"),
    ],
)
def test_a_foreign_import_that_the_layer_may_not_have_is_found(tmp_path, file, package):
    problem = problem_of(tmp_path, {file: f"import {package}.sub\n"})
    assert problem.startswith(f"dsdformat/{file}:1: imports {package} in L")
    assert "may import the standard library" in problem


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("format/codecs.py", "zstandard"),
        ("storage/remote.py", "obstore"),
        ("plan/mesh.py", "numpy"),
        ("numpy.py", "ml_dtypes"),
        ("torch/save.py", "torch"),
        ("convert/npz.py", "numpy"),
        ("cli/main.py", "typer"),
        ("testing/vectors.py", "pytest"),
    ],
)
def test_a_foreign_import_that_the_layer_may_have_is_accepted(tmp_path, file, package):
    assert problems_of(tmp_path, {file: f"import {package}\n"}) == []


def test_a_typing_package_is_accepted_for_a_type_checker_alone(tmp_path):
    hidden = """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from typing_extensions import Buffer
        else:
            from typing_extensions import Other
    """
    problem = problem_of(tmp_path, {"boxes.py": hidden})
    assert problem.startswith("dsdformat/boxes.py:6: imports typing_extensions in L0")


# Safety


UNSAFE = {
    "pickle": ("import pickle", "pickle"),
    "from-pickle": ("from pickle import loads", "pickle"),
    "marshal-in-a-function": ("def f():\n    import marshal", "marshal"),
    "shelve": ("import shelve as s", "shelve"),
    "eval": ("eval('1')", "eval"),
    "exec-by-another-name": ("run = exec", "exec"),
    "exec-of-builtins": ("import builtins\nbuiltins.exec('1')", "builtins.exec"),
    "dunder-import": ("__import__('os')", "__import__"),
    "import-module": ("import importlib as i\ni.import_module('os')", "importlib.import_module"),
    "from-importlib": ("from importlib import import_module", "importlib.import_module"),
    "torch-load": ("import torch\ntorch.load('x')", "torch.load"),
    "torch-load-by-alias": ("import torch as t\nt.load('x')", "torch.load"),
    "from-torch": ("from torch import load", "torch.load"),
    "compile": ("compile('1', 'x', 'eval')", "compile"),
    "system": ("import os\nos.system('x')", "os.system"),
    "from-os": ("from os import execv as run", "os.execv"),
    "subprocess": ("import subprocess", "subprocess"),
    "socket": ("from socket import create_connection", "socket"),
    "download": ("import urllib.request", "urllib.request"),
    "ctypes": ("def f():\n    import ctypes", "ctypes"),
    "module-of-a-file": (
        "import importlib.util as u\nu.spec_from_file_location('x')",
        "importlib.util.spec_from_file_location",
    ),
    "hub": ("import torch\ntorch.hub.load('x')", "torch.hub"),
    "from-hub": ("from torch.hub import load", "torch.hub"),
    "jit": ("import torch\ntorch.jit.load('x')", "torch.jit.load"),
    "library": ("import torch\ntorch.ops.load_library('x')", "torch.ops.load_library"),
    "numpy-pickle": ("import numpy as np\nnp.save('x', 1, allow_pickle=True)", "allow_pickle"),
    "numpy-load": ("import numpy as np\nnp.load('x')", "numpy.load"),
    "processes": ("from multiprocessing import Pool", "multiprocessing"),
    "pool-of-processes": (
        "from concurrent.futures import ProcessPoolExecutor",
        "concurrent.futures.ProcessPoolExecutor",
    ),
    "database": ("import dbm.dumb", "dbm.dumb"),
    "installer": ("import ensurepip", "ensurepip"),
    "debugger": ("breakpoint()", "breakpoint"),
    "builtins": ("__builtins__['eval']('1')", "__builtins__"),
    "objects-of-ranks": (
        "from torch import distributed\ndistributed.all_gather_object(a, b)",
        "torch.distributed.all_gather_object",
    ),
    "metadata-of-dcp": (
        "import torch.distributed.checkpoint as dcp\ndcp.load(x)",
        "torch.distributed.checkpoint.load",
    ),
}


@pytest.mark.parametrize(("source", "name"), UNSAFE.values(), ids=UNSAFE)
def test_what_could_execute_a_file_is_found(tmp_path, source, name):
    problem = problem_of(tmp_path, {"torch/save.py": source})
    line = source.count("\n") + 1
    assert problem.startswith(f"dsdformat/torch/save.py:{line}: uses {name}, which could ")


LOOKED_UP = {
    "getattr": ("import torch\ngetattr(torch, name)", "torch"),
    "getattr-of-a-part": ("import torch\ngetattr(torch.nn, name)", "torch.nn"),
    "getattr-of-an-alias": ("from torch import nn as n\ngetattr(n, f'{a}')", "torch.nn"),
    "modules": ("import sys\nsys.modules[name]", "sys.modules"),
    "modules-get": ("import sys\nsys.modules.get(name)", "sys.modules"),
    "from-modules": ("import sys\ngetattr(sys.modules['os'], name)", "sys.modules"),
    "dict": ("import os\nos.__dict__[name]", "os.__dict__"),
    "vars": ("import os\nvars(os)", "os"),
    "getattr-by-another-name": ("look = getattr", "whatever it is called with"),
}


@pytest.mark.parametrize(("source", "name"), LOOKED_UP.values(), ids=LOOKED_UP)
def test_a_name_that_a_file_could_choose_is_found(tmp_path, source, name):
    problem = problem_of(tmp_path, {"torch/save.py": source})
    line = source.count("\n") + 1
    assert problem.startswith(f"dsdformat/torch/save.py:{line}: looks up a name in {name} ")


def test_each_table_of_names_is_still_used():
    """A row of LOOKUPS that no module needs would let one in unseen."""
    modules, _ = check_layers.parse_package(ROOT)
    found = {one.name: {name for _, name in check_layers.free_lookups(one)} for one in modules}
    used = {name: names for name, names in found.items() if names}
    assert used == {name: set(names) for name, names in check_layers.LOOKUPS.items()}


def test_an_exception_is_for_one_module_and_one_name(tmp_path):
    source = "import ctypes\nimport pickle\n"
    found = problem_of(tmp_path, {"storage/renames.py": source})
    assert found.startswith("dsdformat/storage/renames.py:2: uses pickle, ")
    for name, allowed in check_layers.EXCEPTIONS.items():
        text = (ROOT / "dsdformat" / f"{name.replace('.', '/')}.py").read_text()
        assert all(f"import {one}" in text for one in allowed)


def test_words_that_only_look_unsafe_are_accepted(tmp_path):
    source = '''
        """No pickle, no eval(), no torch.load."""
        import numpy as np
        import torch

        def load(module: torch.nn.Module) -> None:
            module.eval()
            torch.compile(module)
            re.compile("x")
            os.path.join("system")
            np.save("x", 1, allow_pickle=False)
            print("exec")
            getattr(module, "w" + "eight")
            getattr(torch, "compiler", None)
            sys.modules.get("torch")
    '''
    assert problems_of(tmp_path, {"torch/load.py": source}) == []


# Sizes


def long_function(count: int, *, above: str = "", beside: str = "") -> str:
    body = "    x = 1\n" * (count - 1)
    return f"{above}def f():{beside}\n{body}"


def test_a_module_past_the_limit_is_found(tmp_path):
    problem = problem_of(tmp_path, {"errors.py": "x = 1\n" * 601})
    assert problem.startswith("dsdformat/errors.py:1: has 601 lines, more than 600; split it")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("x = 1\n" * 600, id="at-the-limit"),
        pytest.param('"""Errors. Long: one table of all."""\n' + "x = 1\n" * 600, id="justified"),
    ],
)
def test_a_module_at_the_limit_or_justified_is_accepted(tmp_path, source):
    assert problems_of(tmp_path, {"errors.py": source}) == []


def test_a_function_past_the_limit_is_found(tmp_path):
    problem = problem_of(tmp_path, {"errors.py": "x = 1\n" + long_function(71)})
    assert problem.startswith("dsdformat/errors.py:2: f has 71 lines, more than 70; split it")


def test_a_long_function_needs_a_reason_not_a_word(tmp_path):
    problem = problem_of(tmp_path, {"errors.py": long_function(71, beside="  # long:")})
    assert "f has 71 lines" in problem


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(long_function(70), id="at-the-limit"),
        pytest.param(long_function(71, beside="  # long: a table"), id="reason-at-the-def"),
        pytest.param(long_function(71, above="# long: a table\n"), id="reason-above"),
        pytest.param(
            long_function(71, above="# long: a table\n@staticmethod\n"),
            id="reason-above-the-decorator",
        ),
    ],
)
def test_a_function_at_the_limit_or_justified_is_accepted(tmp_path, source):
    assert problems_of(tmp_path, {"errors.py": source}) == []


# The command


def run_check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, check_layers.__file__, str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_prints_each_problem_and_exits_1(tmp_path):
    problems = problems_of(tmp_path, {"errors.py": "import pickle\nimport dsdformat.boxes\n"})
    done = run_check(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [*problems, "layers: 1 modules, 2 problems"]


def test_the_command_exits_0_where_nothing_is_wrong(tmp_path):
    problems_of(tmp_path, {"errors.py": ""})
    done = run_check(tmp_path)
    assert (done.returncode, done.stdout) == (0, "layers: 1 modules, no problems\n")


def test_the_command_refuses_a_folder_without_the_package(tmp_path):
    done = run_check(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds no package dsdformat" in done.stderr


def test_a_file_that_does_not_parse_is_found(tmp_path):
    problem = problem_of(tmp_path, {"errors.py": "x = 1\ndef\n"})
    assert problem.startswith("dsdformat/errors.py:2: does not parse")
