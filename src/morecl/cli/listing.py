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
from morecl.cli import options
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


def list_(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help=f"{', '.join(Listing)}.", callback=options.one_of("list", Listing))
    ],
) -> None:
    """List the methods, benchmarks, suites or backbones."""
    found = sections(Listing(what))
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
    from morecl.classifier.backbones import is_cached
    from morecl.nn.available import Available, available
    from morecl.nn.families import FAMILIES

    def about(model: Available) -> str:
        if not model.has_weights:
            weights = "no weights in timm: NAME@FILE"
        elif is_cached(model.name):
            weights = "weights in the local cache"
        else:
            weights = "weights from timm"
        return f"{_in_words(model.parameters)} parameters, {model.image_size} px; {weights}"

    own = [
        (SHIPPED, "2.7 M parameters, 32 px; comes with morecl (the default)"),
        ("NAME@FILE, FILE", "your own checkpoint, .safetensors or .pth"),
    ]
    models = {family.title: available(family) for family in FAMILIES}
    return [
        Section("", own),
        *(Section(title, [(model.name, about(model)) for model in found]) for title, found in models.items()),
    ]


def _in_words(count: int) -> str:
    """5717416 -> 5.7 M, 85798656 -> 86 M, 1136479232 -> 1.1 B."""
    number, unit = (count / 1e9, "B") if count >= 999.5e6 else (count / 1e6, "M")
    return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
