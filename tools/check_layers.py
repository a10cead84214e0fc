"""Check that each module of dsdformat imports what its layer may, executes nothing, and is small.

Reads the source with ast and imports none of it. The tables below are the whole policy:

- UNITS: which layer a module is in, and what it may import, of ours and of others.
- UNSAFE_MODULES, UNSAFE_NAMES, UNSAFE_BUILTINS: what could execute bytes from a file, start a
  program, or reach the network. No module may name them, but for what EXCEPTIONS tells.
- LOOKUPS: which modules may look up a name in a module that is no literal, and why that is safe.
- MODULE_LINES, FUNCTION_LINES: sizes, past which the source must say why.

An import counts wherever it stands: in a function and under TYPE_CHECKING too.

Run: tools/check_layers.py [ROOT]. Prints `file:line: what; what to do` for each problem, and exits
1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "dsdformat"
FRONT_DOOR = ""


@dataclass(frozen=True, slots=True)
class Unit:
    """A module or subpackage, the layer it is in, and what it may import."""

    name: str  # relative to the package
    layer: int
    reach: int  # the highest layer it imports from
    peers: tuple[str, ...] = ()  # other units of its own layer that it may import
    foreign: tuple[str, ...] = ()  # packages beside the standard library


UNITS = (
    Unit("errors", layer=0, reach=-1),
    Unit("limits", layer=0, reach=-1),
    Unit("garbage", layer=0, reach=-1),
    Unit("boxes", layer=0, reach=-1, peers=("errors",)),
    Unit("selection", layer=0, reach=-1, peers=("errors",)),
    Unit(
        "format",
        layer=1,
        reach=0,
        peers=("format.planes",),
        foreign=("msgpack", "blake3", "zstandard"),
    ),
    Unit("format.planes", layer=1, reach=0, foreign=("numpy",)),
    Unit("storage", layer=2, reach=0, peers=("storage.remote",)),
    Unit("storage.remote", layer=2, reach=0, peers=("storage",), foreign=("fsspec", "obstore")),
    Unit("plan", layer=2, reach=1, foreign=("numpy",)),
    Unit("source", layer=3, reach=2),
    Unit("sections", layer=3, reach=2),
    Unit("workers", layer=3, reach=2),
    Unit("destinations", layer=3, reach=2),
    Unit("block_faults", layer=3, reach=2),
    Unit("blocks", layer=3, reach=2, peers=("workers", "destinations", "block_faults")),
    Unit("headers", layer=3, reach=2, peers=("blocks",)),
    Unit(
        "tensors",
        layer=3,
        reach=2,
        peers=("sections", "blocks", "destinations", "headers", "workers"),
    ),
    Unit("entries", layer=3, reach=2, peers=("tensors",)),
    Unit("lookup", layer=3, reach=2, peers=("tensors", "entries")),
    Unit(
        "reader", layer=3, reach=2, peers=("source", "destinations", "tensors", "entries", "lookup")
    ),
    Unit("sources", layer=3, reach=2),
    Unit("labels", layer=3, reach=2),
    Unit("flat_layout", layer=3, reach=2),
    Unit("flat_metadata", layer=3, reach=2, peers=("flat_layout",)),
    Unit("flat_joining", layer=3, reach=2, peers=("flat_layout", "flat_metadata")),
    Unit("renaming", layer=3, reach=2),
    Unit("modelfiles", layer=3, reach=1),
    Unit("chunks", layer=3, reach=2, peers=("sources",)),
    Unit("file_plans", layer=3, reach=2, peers=("chunks",)),
    Unit("datafiles", layer=3, reach=2, peers=("file_plans", "blocks", "workers")),
    Unit("parts", layer=3, reach=2, peers=("chunks", "file_plans")),
    Unit("state_plan", layer=3, reach=2, peers=("sources", "chunks", "parts")),
    Unit(
        "part_writer",
        layer=3,
        reach=2,
        peers=(
            *("sources", "labels", "file_plans", "datafiles", "parts", "state_plan"),
            "workers",
        ),
    ),
    Unit("writer", layer=3, reach=2, peers=("file_plans", "parts", "state_plan", "part_writer")),
    Unit(
        "verify",
        layer=3,
        reach=2,
        peers=("source", "sections", "blocks", "headers", "tensors", "reader", "workers"),
    ),
    Unit("signing", layer=3, reach=2, foreign=("cryptography",)),
    Unit("folders", layer=3, reach=2, peers=("reader", "writer", "verify", "signing")),
    Unit(FRONT_DOOR, layer=4, reach=3),
    Unit("numpy", layer=4, reach=3, foreign=("numpy", "ml_dtypes")),
    # Beside torch, which loads what it reads; so it knows nothing of dsdformat.torch.
    Unit(
        "convert",
        layer=4,
        reach=3,
        peers=("numpy",),
        foreign=("torch", "numpy", "ml_dtypes", "safetensors"),
    ),
    Unit(
        "torch",
        layer=4,
        reach=3,
        peers=("numpy", "convert"),
        foreign=("torch", "numpy", "safetensors"),
    ),
    Unit("cli", layer=6, reach=5, foreign=("typer", "rich", "numpy", "ml_dtypes")),
    # Shipped for tests, so above everything: nothing in the package may lean on it.
    Unit("testing", layer=7, reach=3, foreign=("pytest", "hypothesis")),
)
TYPING_ONLY = ("typing_extensions", "_typeshed")  # known to a type checker, installed or not

UNSAFE_MODULES = (
    # They execute what they read.
    *("pickle", "_pickle", "marshal", "shelve", "dbm", "runpy"),
    *("dill", "cloudpickle", "jsonpickle", "joblib", "yaml", "ruamel"),
    *("code", "codeop", "imp", "zipimport", "pkgutil", "pydoc", "rlcompleter"),
    *("bdb", "pdb", "trace", "timeit", "profile", "cProfile", "doctest", "unittest"),
    *("ctypes", "_ctypes", "cffi", "_cffi_backend", "sqlite3", "numba"),
    # They start programs, install them, or reach the network.
    *("subprocess", "_posixsubprocess", "pty", "webbrowser", "multiprocessing", "asyncio"),
    *("pip", "ensurepip", "venv", "setuptools", "distutils", "pkg_resources"),
    *("socket", "_socket", "socketserver", "ssl", "http", "urllib", "xmlrpc", "wsgiref"),
    *("ftplib", "smtplib", "poplib", "imaplib", "nntplib", "telnetlib"),
    *("requests", "httpx", "aiohttp"),
)
UNSAFE_NAMES = (
    *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__"),
    *("builtins.breakpoint", "logging.config", "concurrent.futures.process"),
    "concurrent.futures.ProcessPoolExecutor",
    *("importlib.import_module", "importlib.__import__", "importlib.reload"),
    *("importlib.util.spec_from_file_location", "importlib.util.module_from_spec"),
    *("importlib.machinery", "importlib.metadata.entry_points"),
    "types.CodeType",
    *("os.system", "os.popen", "os.startfile", "os.fork", "os.forkpty"),
    *("os.posix_spawn", "os.posix_spawnp"),
    *(f"os.exec{kind}" for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *(f"os.spawn{kind}" for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *("torch.load", "torch.serialization.load", "torch.jit.load", "torch.export.load"),
    *("torch.hub", "torch.package", "torch.utils.cpp_extension"),
    *("torch.ops.load_library", "torch.classes.load_library"),
    # They pickle, and unpickle what another rank or file says.
    *("torch.multiprocessing", "torch.distributed.rpc"),
    *(f"torch.distributed.{kind}_object" for kind in ("all_gather", "gather")),
    *(f"torch.distributed.{kind}_object_list" for kind in ("broadcast", "scatter", "send", "recv")),
    *("torch.distributed.checkpoint.FileSystemReader", "torch.distributed.checkpoint.load"),
    *("numpy.load", "numpy.ctypeslib", "numpy.f2py"),
)
UNSAFE_BUILTINS = ("eval", "exec", "compile", "__import__", "breakpoint", "__builtins__", "globals")
EXCEPTIONS = {
    "storage.sink": ("ctypes",),  # sync_file_range, which Python does not offer
    "storage.renames": ("ctypes",),  # renameat2, likewise
}
# Modules in which a name is looked up that is no literal, as `getattr(torch, name)`. It must be
# from a table of ours, never from a file.
LOOKUPS = {
    "numpy": ("ml_dtypes",),  # the dtypes of the format
    "storage.local": ("os",),  # flags that not every system has
    "torch.dtypes": ("torch",),  # all that it has
    "torch.dcp_state": (  # three methods
        "torch.distributed.checkpoint.default_planner.DefaultSavePlanner",
    ),
    "torch.compat": ("sys.modules",),  # classes of _WRAPPERS
    "torch.install_optim": ("torch.optim.Optimizer",),  # two methods
}

MODULE_LINES = 600  # more needs the word "long" in the module's docstring
FUNCTION_LINES = 70  # more needs a comment "# long: reason" at the def
LONG_REASON = re.compile(r"#\s*long:\s*\S")


@dataclass(frozen=True, slots=True)
class Module:
    """One parsed source file."""

    name: str  # relative to the package, dotted; "" for the package itself
    file: str  # as printed in messages
    is_package: bool
    lines: list[str]
    tree: ast.Module


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name, made absolute."""

    line: int
    base: str  # the module after `import` or `from`
    name: str  # base, with what was imported from it
    typing_only: bool


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def find_problems(root: Path) -> list[Problem]:
    """Return every problem of the package under root, in the order of files and lines."""
    modules, problems = parse_package(root)
    names = {module.name for module in modules}
    for module in modules:
        unit = find_unit(module.name)
        imports = list(iter_imports(module))
        if unit is None:
            problems.append(
                Problem(module.file, 1, "is in no layer; add it to UNITS in tools/check_layers.py")
            )
        else:
            problems.extend(check_imports(module, unit, imports, names))
        problems.extend(check_safety(module, imports))
        problems.extend(check_sizes(module))
    return sorted(set(problems))


def parse_package(root: Path) -> tuple[list[Module], list[Problem]]:
    """Parse each module of the package, and tell of those that cannot be parsed."""
    modules: list[Module] = []
    problems: list[Problem] = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        parts = list(path.relative_to(root / PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        source = path.read_text(encoding="utf-8")
        try:
            tree = ast.parse(source, filename=file)
        except SyntaxError as error:
            problems.append(
                Problem(file, error.lineno or 1, f"does not parse ({error.msg}); mend it")
            )
            continue
        modules.append(Module(name, file, is_package, source.splitlines(), tree))
    return modules, problems


def find_unit(name: str) -> Unit | None:
    """Return the row of the table for a module: the one with the longest matching name."""
    rows = [
        unit
        for unit in UNITS
        if name == unit.name or (unit.name and name.startswith(f"{unit.name}."))
    ]
    return max(rows, key=lambda unit: len(unit.name), default=None)


# Imports


def iter_imports(module: Module) -> Iterator[Import]:
    """Yield every import in the module, relative ones made absolute."""
    for node, typing_only in iter_nodes(module.tree, typing_only=False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, alias.name, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(module, node)
            for alias in node.names:
                yield Import(node.lineno, base, f"{base}.{alias.name}", typing_only)


def iter_nodes(node: ast.AST, *, typing_only: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Walk the tree, telling of each node whether only a type checker sees it."""
    for child in ast.iter_child_nodes(node):
        hidden = typing_only
        if isinstance(node, ast.If) and child in node.body:
            hidden = typing_only or ast.unparse(node.test).endswith("TYPE_CHECKING")
        yield child, hidden
        yield from iter_nodes(child, typing_only=hidden)


def absolute_base(module: Module, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that a `from` import names."""
    if node.level == 0:
        return node.module or ""
    parts = [PACKAGE, *module.name.split(".")] if module.name else [PACKAGE]
    climbed = node.level - 1 if module.is_package else node.level
    parts = parts[: len(parts) - climbed]
    return ".".join([*parts, node.module] if node.module else parts)


def check_imports(
    module: Module, unit: Unit, imports: list[Import], names: set[str]
) -> Iterator[Problem]:
    """Yield a problem for each import that the module's layer may not have."""
    for found in imports:
        if found.base.split(".")[0] == PACKAGE:
            text = own_problem(unit, target_module(found, names))
        else:
            text = foreign_problem(unit, found)
        if text is not None:
            yield Problem(module.file, found.line, text)


def target_module(found: Import, names: set[str]) -> str:
    """Return which of our modules an import loads: `from a import b` loads a.b if there is one."""
    relative = found.name.removeprefix(PACKAGE).removeprefix(".")
    if relative in names or found.name == found.base:
        return relative
    return found.base.removeprefix(PACKAGE).removeprefix(".")


def own_problem(unit: Unit, target_name: str) -> str | None:
    """Return what is wrong with an import of one of our modules, or None."""
    target = find_unit(target_name)
    shown = ".".join(filter(None, (PACKAGE, target_name)))
    if target is None:
        return f"imports {shown}, which is in no layer; add it to UNITS in tools/check_layers.py"
    if target is unit or target.name in unit.peers or target.layer <= unit.reach:
        return None
    reach = f"L0 to L{unit.reach}" if unit.reach >= 0 else "no lower layer"
    may = ", ".join([reach, *unit.peers])
    return (
        f"imports {shown} (L{target.layer}) {direction(unit, target)} from L{unit.layer}, "
        f"where {title(unit)} may import {may}; "
        "move the code that needs it up, or what it needs down"
    )


def direction(unit: Unit, target: Unit) -> str:
    if target.layer > unit.layer:
        return "upward"
    return "sideways" if target.layer == unit.layer else "too far down"


def title(unit: Unit) -> str:
    return unit.name or "the front door"


def foreign_problem(unit: Unit, found: Import) -> str | None:
    """Return what is wrong with an import of somebody else's module, or None."""
    package = found.base.split(".")[0]
    if package in sys.stdlib_module_names or package in unit.foreign:
        return None
    if found.typing_only and package in TYPING_ONLY:
        return None
    may = ", ".join(["the standard library", *unit.foreign])
    return (
        f"imports {package} in L{unit.layer}, where {title(unit)} may import {may}; "
        "move the code that needs it to a module that may"
    )


# Safety


def check_safety(module: Module, imports: list[Import]) -> Iterator[Problem]:
    """Yield a problem for each name that could execute what a file holds."""
    for line, name in unsafe_names(module, imports):
        if name not in EXCEPTIONS.get(module.name, ()):
            yield Problem(
                module.file,
                line,
                f"uses {name}, which could execute a file, start a program or reach the network; "
                "do without it",
            )

    for line, name in free_lookups(module):
        if name not in LOOKUPS.get(module.name, ()):
            yield Problem(
                module.file,
                line,
                f"looks up a name in {name} that is no literal, so a file could choose it; "
                "write the names out, or add the table they are from to LOOKUPS",
            )


def free_lookups(module: Module) -> Iterator[tuple[int, str]]:
    """Yield where a name that is no literal is looked up in a module, or where that is hidden."""
    aliases = bound_names(module.tree)
    called = {id(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id == "getattr" and id(node) not in called:
            yield node.lineno, "whatever it is called with"
        elif isinstance(node, ast.Call):
            yield from free_calls(node, aliases)
        elif isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            name = dotted(node.value, aliases)
            if name == "sys.modules" or name.endswith(".__dict__"):
                yield node.lineno, name


def free_calls(node: ast.Call, aliases: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the module in which a call looks up a name that is no literal."""
    function, arguments = node.func, node.args
    if isinstance(function, ast.Name) and function.id == "getattr":
        free = len(arguments) > 1 and not isinstance(arguments[1], ast.Constant)
        base = arguments[0]
        name = dotted(base.value if isinstance(base, ast.Subscript) else base, aliases)
        if free and name:
            yield node.lineno, name
    elif isinstance(function, ast.Name) and function.id == "vars" and arguments:
        if name := dotted(arguments[0], aliases):
            yield node.lineno, name
    elif isinstance(function, ast.Attribute) and function.attr in ("get", "__getitem__"):
        name = dotted(function.value, aliases)
        free = bool(arguments) and not isinstance(arguments[0], ast.Constant)
        if free and (name == "sys.modules" or name.endswith(".__dict__")):
            yield node.lineno, name


def unsafe_names(module: Module, imports: list[Import]) -> Iterator[tuple[int, str]]:
    for found in imports:
        top = found.base.split(".")[0]
        if top in UNSAFE_MODULES:
            yield found.line, found.base
        elif (name := unsafe_part(found.name)) is not None:
            yield found.line, name
    aliases = bound_names(module.tree)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in UNSAFE_BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and dotted(node, aliases) in UNSAFE_NAMES:
            yield node.lineno, dotted(node, aliases)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not is_false(node):
            yield node.value.lineno, "allow_pickle"


def unsafe_part(name: str) -> str | None:
    """Return the unsafe name that a name is, or is inside of."""
    return next((one for one in UNSAFE_NAMES if name == one or name.startswith(f"{one}.")), None)


def bound_names(tree: ast.Module) -> dict[str, str]:
    """Return the local names that imports bind, each with the absolute name it stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """Return the absolute dotted name that an expression spells, or "" where it spells none."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, aliases)
        return f"{base}.{node.attr}" if base else ""
    return ""


def is_false(keyword: ast.keyword) -> bool:
    return isinstance(keyword.value, ast.Constant) and keyword.value.value is False


# Sizes


def check_sizes(module: Module) -> Iterator[Problem]:
    """Yield a problem for the module and each function that is long and does not say why."""
    count = len(module.lines)
    docstring = ast.get_docstring(module.tree) or ""
    if count > MODULE_LINES and not re.search(r"\blong\b", docstring, re.IGNORECASE):
        yield Problem(
            module.file,
            1,
            f"has {count} lines, more than {MODULE_LINES}; "
            "split it, or say in its docstring why it is long",
        )
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from check_function(module, node)


def check_function(
    module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Problem]:
    count = (node.end_lineno or node.lineno) - node.lineno + 1
    if count <= FUNCTION_LINES:
        return
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    places = {node.lineno, node.lineno - 1, first - 1}  # lines count from 1
    if any(LONG_REASON.search(module.lines[place - 1]) for place in places if place >= 1):
        return
    yield Problem(
        module.file,
        node.lineno,
        f"{node.name} has {count} lines, more than {FUNCTION_LINES}; "
        'split it, or put "# long: why" on the line above',
    )


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    count = sum(1 for _ in (root / PACKAGE).rglob("*.py"))
    if count == 0:
        print(f"{root}: holds no package {PACKAGE}; give the repository's root", file=sys.stderr)
        return 2
    problems = find_problems(root)
    for problem in problems:
        print(problem)
    print(f"layers: {count} modules, {len(problems) or 'no'} problem{'s' * (len(problems) != 1)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
