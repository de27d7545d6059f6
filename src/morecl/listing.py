"""What there is to choose from, as ``morecl list`` shows it: rows of name and one line of description."""

from __future__ import annotations

import inspect
import sys

import timm

from morecl.data import load_recipe, recipe_names
from morecl.methods import METHODS
from morecl.nn.backbone import SHIPPED
from morecl.suite.suites import load_suite, suite_names


def listing(what: str) -> list[tuple[str, str]]:
    """Rows for ``methods``, ``benchmarks``, ``suites`` or ``backbones``."""
    return {"methods": _methods, "benchmarks": _benchmarks, "suites": _suites, "backbones": _backbones}[what]()


def _methods() -> list[tuple[str, str]]:
    return [(name, _first_line(sys.modules[method.__module__])) for name, method in METHODS.items()]


def _benchmarks() -> list[tuple[str, str]]:
    rows = []
    for name in recipe_names():
        recipe = load_recipe(name)
        rows.append((name, f"{recipe.dataset}, {recipe.tasks} tasks"))
    return [*rows, ("folder:PATH", "your own images: one sub-folder per class")]


def _suites() -> list[tuple[str, str]]:
    return [(name, load_suite(name).description) for name in suite_names()]


def _backbones() -> list[tuple[str, str]]:
    shipped = (SHIPPED, "2.7 M parameters, 32 px; ships with morecl (the default)")
    known = [*timm.list_models(module="deit"), *timm.list_models(module="vision_transformer")]
    plain = [name for name in known if name.startswith(("vit_", "deit"))]
    rest = [(name, "weights through timm") for name in plain if "distilled" not in name]
    return [shipped, ("NAME@FILE, FILE", "a checkpoint of your own, .safetensors or .pth"), *rest]


def _first_line(module: object) -> str:
    return (inspect.getdoc(module) or "").splitlines()[0]
