"""Who may import whom, read from the source: no cycles, methods know no runs, reports know no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = "morecl"
HEAVY = {"torch", "torchvision", "timm"}

Graph = Mapping[str, set[str]]


def module_files(source: Path) -> dict[str, Path]:
    """Name -> file of every module of the package; a package's name stands for its ``__init__.py``."""
    found = {}
    for path in sorted((source / PACKAGE).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node: ast.AST, everywhere: bool) -> Iterator[ast.AST]:
    """The nodes below ``node`` that run when the module is imported; with ``everywhere`` also those in functions."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not everywhere:
            continue
        yield child
        yield from statements(child, everywhere)


def imported(module: str, path: Path, known: Mapping[str, Path], everywhere: bool) -> set[str]:
    """The modules that ``module`` names in its import statements: full names in the package, first parts elsewhere."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), everywhere):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                names.add(inner if inner in known else base)
    return {name if name.split(".")[0] == PACKAGE else name.split(".")[0] for name in names}


@cache
def graph(source: Path = SOURCE, everywhere: bool = False) -> Graph:
    known = module_files(source)
    return {module: imported(module, path, known, everywhere) for module, path in known.items()}


def reachable(start: str, edges: Graph) -> set[str]:
    """All that importing ``start`` loads, the packages around each module included."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        parts = name.split(".")
        waiting += [".".join(parts[:end]) for end in range(1, len(parts))]
        waiting += edges.get(name, ())
    return found


def inside(package: str) -> list[str]:
    return [name for name in graph() if f"{name}.".startswith(f"{package}.")]


def find_cycle(edges: Graph) -> list[str] | None:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def runs_something(name: str) -> bool:
    return any(f"{name}.".startswith(f"{PACKAGE}.{part}.") for part in ("runner", "run", "suite", "cli"))


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert find_cycle(graph()) is None


@pytest.mark.parametrize("module", inside(f"{PACKAGE}.methods"))
def test_methods_do_not_know_runs(module: str) -> None:
    assert not [name for name in graph(everywhere=True)[module] if runs_something(name)]
    assert not [name for name in reachable(module, graph()) if runs_something(name)]


@pytest.mark.parametrize("module", inside(f"{PACKAGE}.report"))
def test_reports_do_not_know_torch(module: str) -> None:
    assert not HEAVY & graph(everywhere=True)[module]
    assert not HEAVY & reachable(module, graph())


@pytest.mark.parametrize("module", [PACKAGE, f"{PACKAGE}.catalogue", f"{PACKAGE}.config", *inside(f"{PACKAGE}.cli")])
def test_the_command_line_imports_torch_only_inside_commands(module: str) -> None:
    assert not {*HEAVY, "sklearn", "matplotlib"} & reachable(module, graph())


def test_the_graph_is_that_of_the_source(tmp_path: Path) -> None:
    """The rules above say nothing if imports are overlooked."""
    assert "torch" in reachable(f"{PACKAGE}.methods.more", graph())
    files = {
        "__init__.py": "",
        "a.py": "from morecl.b import x\nif True:\n    import morecl.c.d\n",
        "b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import numpy\n",
        "c/__init__.py": "try:\n    from . import d\nexcept ImportError:\n    raise\n",
        "c/d.py": "import torch.nn\nfrom .. import a\n",
    }
    for name, text in files.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = graph(tmp_path)
    assert found["morecl.a"] == {"morecl.b", "morecl.c.d"}
    assert found["morecl.b"] == {"typing"}
    assert graph(tmp_path, everywhere=True)["morecl.b"] == {"typing", "numpy"}
    assert found["morecl.c"] == {"morecl.c.d"}
    assert found["morecl.c.d"] == {"torch", "morecl.a"}
    assert {*(find_cycle(found) or [])} == {"morecl.a", "morecl.c.d"}
    assert reachable("morecl.c.d", found) >= {"morecl.c", "torch", "typing"}
