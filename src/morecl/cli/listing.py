"""``morecl list``: the methods, benchmarks, suites and backbones to choose from.

Only the list of backbones imports torch and timm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from morecl.catalogue import GROUPS, METHODS, SHIPPED
from morecl.cli.terminal import output_console

Row = tuple[str, str]  # name, description


class Listing(StrEnum):
    methods = "methods"
    benchmarks = "benchmarks"
    suites = "suites"
    backbones = "backbones"


@dataclass(frozen=True)
class Section:
    """Rows under a heading; an empty ``title`` prints none."""

    title: str
    rows: list[Row]


def list_(what: Annotated[Listing, typer.Argument()]) -> None:
    """List the methods, benchmarks, suites or backbones."""
    found = sections(what)
    width = max(len(name) for section in found for name, _ in section.rows)
    console = output_console()
    for number, section in enumerate(found):
        if number > 0:
            console.line()
        if section.title:
            console.print(Text(f"{section.title[0].upper()}{section.title[1:]}:", style="bold"))
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(min_width=width)
        for row in section.rows:
            table.add_row(*map(Text, row))
        console.print(table)


def sections(what: Listing) -> list[Section]:
    """What ``morecl list WHAT`` shows."""
    makers: dict[Listing, Callable[[], list[Section]]] = {
        Listing.methods: _methods,
        Listing.benchmarks: _benchmarks,
        Listing.suites: _suites,
        Listing.backbones: _backbones,
    }
    return makers[what]()


def _methods() -> list[Section]:
    groups = {group: Section(title, []) for group, title in GROUPS.items()}
    for method in METHODS.values():
        groups[method.group].rows.append((method.name, method.summary))
    return list(groups.values())


def _benchmarks() -> list[Section]:
    from morecl.data import load_recipe, recipe_names

    rows = [(name, load_recipe(name).summary) for name in recipe_names()]
    return [Section("", [*rows, ("folder:PATH", "your own images: one sub-folder per class")])]


def _suites() -> list[Section]:
    from morecl.suite.plan import load_suite, suite_names

    return [Section("", [(name, load_suite(name).description) for name in suite_names()])]


def _backbones() -> list[Section]:
    import timm
    from timm.models import is_model_pretrained

    known = [*timm.list_models(module="deit"), *timm.list_models(module="vision_transformer")]
    usable = [name for name in known if name.startswith(("vit_", "deit")) and _is_usable(name)]
    weights = {True: "weights from timm", False: "no weights in timm: NAME@FILE"}
    rows = [
        (SHIPPED, "2.7 M parameters, 32 px; comes with morecl (the default)"),
        ("NAME@FILE, FILE", "your own checkpoint, .safetensors or .pth"),
        *((name, weights[is_model_pretrained(name)]) for name in usable),
    ]
    return [Section("", rows)]


def _is_usable(name: str) -> bool:
    """Whether ``load_backbone`` accepts the model: a plain ViT with pre-norm blocks.

    Builds one block on the meta device, which needs no memory.
    """
    import timm
    import torch
    from timm.models.vision_transformer import VisionTransformer

    from morecl.nn.families import refusal

    with torch.device("meta"):
        vit = timm.create_model(name, num_classes=0, depth=1)
    return type(vit) is VisionTransformer and refusal(vit) is None
