"""Options that several commands share, and the settings they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from morecl import files
from morecl.catalogue import METHODS
from morecl.errors import InputError, unknown_name


def expanded(path: Path | None) -> Path | None:
    """``~`` as the home folder: a shell leaves it as it is in ``--out=~/x``, or in quotes."""
    return path and files.expanded(path)


def all_expanded(paths: list[Path]) -> list[Path]:
    """As :func:`expanded`."""
    return [expanded(path) or path for path in paths]


def one_of(kind: str, names: Iterable[str]) -> Callable[[str | None], str | None]:
    """A callback that refuses any other name; typer's own message for an Enum begins with "Value error"."""
    known = tuple(map(str, names))

    def check(name: str | None) -> str | None:
        if name is not None and name not in known:
            raise unknown_name(kind, name, known)
        return name

    return check


known_method = one_of("method", METHODS)  # rejects a typo before anything slow is imported

Benchmark = Annotated[
    str, typer.Argument(help="Name, recipe file (.toml), or folder:PATH with one sub-folder per class.")
]
Method = Annotated[str, typer.Option(callback=known_method, help="See `morecl list methods`.")]
Backbone = Annotated[str | None, typer.Option(help="timm name, checkpoint file, or NAME@FILE.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; repeatable.")
]
SetForAll = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting, for every method that has it; repeatable."),
]
ClassOrder = Annotated[str, typer.Option(help="0..4 or random.")]
Tasks = Annotated[
    str | None,
    typer.Option(metavar="N|N,N,...", help="Split the classes into N tasks, or into tasks of N, N, ... classes."),
]
TrainPerClass = Annotated[int | None, typer.Option(min=1, help="Use the first N training images of each class.")]
TestPerClass = Annotated[int | None, typer.Option(min=1, help="Use the first N test images of each class.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(callback=expanded, help="Folder of the data sets. Default: $MORECL_DATA, else ~/.cache/morecl."),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, ...")]
Precision = Annotated[str | None, typer.Option(help="auto, fp32 or bf16.")]
Compile = Annotated[str | None, typer.Option("--compile", help="auto, on or off.")]


def settings_from(assignments: Sequence[str] | None, **options: Any) -> dict[str, Any]:
    """The settings given with ``--set``, and the options that were given (are not ``None``); none of them twice."""
    from morecl.config import parse_assignments

    given = {key: value for key, value in options.items() if value is not None}
    settings = parse_assignments(assignments or [])
    if twice := sorted(settings.keys() & given.keys()):
        raise InputError(f"{twice[0]} is given with --set and as --{twice[0].replace('_', '-')}; leave one out")
    return settings | given


def division(text: str) -> int | list[int]:
    """``"5"`` as five tasks, ``"4,1,5"`` as three tasks of these sizes."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise InputError(
            "--tasks wants the number of tasks, such as 5, or the number of classes of each, such as 4,1,5; "
            f"not {text!r}"
        )
    sizes = [int(part) for part in parts]
    return sizes[0] if len(sizes) == 1 else sizes
