"""``morecl info``, ``history``, ``undo``, ``rename``, ``forget`` and ``export``: what a model is, and small changes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from morecl.cli import options
from morecl.cli.own.common import (
    Accept,
    Model,
    check_accept,
    class_table,
    existing,
    full_disk_explained,
    kept,
    percent,
    promise_lines,
    size,
)
from morecl.cli.terminal import (
    FAILED,
    counted,
    error_line,
    exit_interrupted,
    needed_width,
    output_console,
    print_entry,
    say,
)
from morecl.errors import InputError
from morecl.interrupts import sigterm_as_interrupt

if TYPE_CHECKING:  # these import torch
    from morecl.classifier import Classifier, Info, ModelFolder
    from morecl.classifier.results import Promise
    from morecl.classifier.store import Version

CHANGES = 10  # after which the accuracy is shown; a model that learns every night has many
WHAT_WIDTH = 12  # columns of what a version changed, at least


def info(
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show a model's classes, accuracy and size."""
    store = existing(model)
    found = store.load(device="cpu").info()
    versions = store.versions()
    if as_json:
        sizes = {"version": store.bytes(versions[-1].number), "all_versions": disk_usage(store.path)}
        extra: dict[str, Any] = {"bytes": sizes, "versions": [version.model_dump() for version in versions]}
        print(json.dumps(asdict(found) | extra, indent=2, allow_nan=False))
        return
    console = output_console()
    show_info(console, found)
    shown = f"{counted(len(versions), 'version')}, {size(disk_usage(store.path))} in all; this one has "
    console.print(f"On disk: {shown}{size(store.bytes(versions[-1].number))}. See `morecl history`.", highlight=False)


def show_info(console: Console, found: Info) -> None:
    """Classes, then what holds for all of them."""
    from morecl.classifier.capacity import IS_FULL

    heads = ("task", "images learned", "remembered", "held back", "accuracy")
    table = class_table("class", *heads)
    rows = {
        each.name: [f"{n:,}" for n in (each.task, each.images, each.remembered, each.held_back)]
        + [percent(each.accuracy)]
        for each in found.classes
    }
    for name, cells in rows.items():
        table.add_row(Text(name), *cells)
    if needed_width(table) <= console.width:
        console.print(table)
    else:
        for name, cells in rows.items():
            print_entry(console, name, [f"{head} {cell}" for head, cell in zip(heads, cells, strict=True)])

    tasks, classes = counted(found.tasks, "task"), counted(len(found.classes), "class", "classes")
    say(console, f"Method {found.method}, backbone {found.backbone} at {found.image_size} px; {tasks}, {classes}.")
    say(console, f"Accuracy on held-back images: {percent(found.accuracy)}.")
    if len(found.curve) > 1:
        steps = [
            f"{percent(p['accuracy'])} ({p['action']}, {counted(p['classes'], 'class', 'classes')})"
            for p in found.curve[-CHANGES:]
        ]
        which = (
            "each change" if len(steps) == len(found.curve) else f"the last {CHANGES} of {len(found.curve):,} changes"
        )
        say(console, f"After {which}: {', '.join(steps)}.")
    for line in promise_lines(found.promise):
        say(console, line)
    if found.capacity:
        taken = found.capacity.values()
        say(
            console,
            f"Capacity: of the neurons that tasks can take for themselves, {sum(taken) / len(taken):.0f} % are taken, "
            f"{max(taken):.0f} % in the fullest layer.",
        )
        if found.tasks_left == 0:
            say(console, f"{IS_FULL[0].upper()}{IS_FULL[1:]}.")
        elif found.tasks_left is not None:
            room = "task has room" if found.tasks_left == 1 else "tasks have room"
            say(console, f"About {found.tasks_left:,} more {room}; classes taught together share a task.")


def history(model: Model) -> None:
    """List the versions of a model, the newest last."""
    store = existing(model)
    console = output_console()
    versions = store.versions()
    show_history(console, versions, [store.bytes(version.number) for version in versions])
    count = store.kept()
    newest = "Only the newest version is" if count == 1 else f"The newest {count:,} versions are"
    say(console, f"{newest} kept; `morecl learn --keep N` changes that.")
    if len(versions) > 1:
        console.print(
            f"`morecl undo {shlex.quote(str(model))}` goes back to version {versions[-2].number}.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def show_history(console: Console, versions: Sequence[Version], sizes: Sequence[int]) -> None:
    """A line per version, the newest last; ``sizes``: bytes of each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("version", "made"):
        table.add_column(head, no_wrap=True)
    table.add_column("what", overflow="fold", min_width=WHAT_WIDTH)
    for head in ("classes", "images", "accuracy", "size"):
        table.add_column(head, justify="right", no_wrap=True)
    numbers = [f"{version.number}{' (in use)' if version is versions[-1] else ''}" for version in versions]
    whats = [f"{version.action} {version.what}".strip() for version in versions]
    for number, what, version, count in zip(numbers, whats, versions, sizes, strict=True):
        cells = (f"{version.classes:,}", f"{version.images:,}", percent(version.accuracy), size(count))
        table.add_row(number, local_time(version.created), Text(what), *cells)
    if needed_width(table) <= console.width:
        console.print(table)
        return
    for number, what, version, count in zip(numbers, whats, versions, sizes, strict=True):
        counts = counted(version.classes, "class", "classes"), counted(version.images, "image")
        details = (local_time(version.created), *counts, f"accuracy {percent(version.accuracy)}", size(count))
        print_entry(console, f"version {number}: {what}", details)


def undo(model: Model) -> None:
    """Take back the last change of a model.

    The version before it is in use again; the newest one is removed.
    """
    from morecl.classifier.store import VERSIONS

    store = existing(model)
    with full_disk_explained(), store.changing():
        newest = store.versions()[-1]
        now = store.undo()
    if (left := store.path / VERSIONS / str(newest.number)).exists():
        raise InputError(f"{left} could not be removed: remove it by hand. Version {now.number} is in use")
    print(f"removed version {newest.number} ({newest.action} {newest.what}); version {now.number} is in use")


def rename(
    model: Model,
    old: Annotated[str, typer.Argument(metavar="OLD", help="Class to rename.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.", show_default=False)],
) -> None:
    """Give a class another name."""
    from morecl.classifier import changes

    with _changed(existing(model)) as (store, classifier):
        said = changes.rename(store, classifier, old, new.strip())
    print(said)


def forget(
    model: Model,
    name: Annotated[str, typer.Argument(metavar="CLASS", help="Class to forget.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Forget a class for good.

    Removes its name and images from the model's folder; the scores of all other classes stay the same. The threshold
    for "unknown" is set anew, from fewer held-back images. Older versions are removed too, because they hold the class.
    """
    from morecl.classifier import changes

    store = existing(model)
    asked_about = None if yes else _confirm_forgetting(store, name)
    with _changed(store) as (_, classifier):
        if asked_about not in (None, newest := store.versions()[-1].number):
            raise InputError(f"the model was changed meanwhile: version {newest} is in use. Nothing was forgotten")
        said = changes.forget(store, classifier, name)
    print(said)
    _show_promise(classifier.promise())


def _confirm_forgetting(store: ModelFolder, name: str) -> int:
    """Ask, about the version that is returned. Meanwhile others may change the model."""
    from morecl.classifier import changes

    versions, classifier = store.load_newest(device="cpu")
    warning = changes.end_of_unknown(classifier, name)
    if sys.stdin is None or not sys.stdin.isatty():
        found = f", and {warning}" if warning else ""
        raise InputError(f"forgetting {name!r} cannot be undone{found}; confirm it with --yes")
    if warning:
        error_line(f"{warning[0].upper()}{warning[1:]}.")
    try:
        agreed = typer.confirm(f"Forget {name!r} for good, and {changes.to_be_removed(store)} with it?")
    except typer.Abort:  # ctrl-C, or the end of the input
        exit_interrupted("nothing has changed")
    if not agreed:
        print("nothing has changed")
        raise SystemExit(FAILED)
    return versions[-1].number


def export(
    model: Model,
    out: Annotated[
        Path, typer.Argument(callback=options.expanded, metavar="OUT.onnx", help="File to write.", show_default=False)
    ],
    accept: Accept = 0.95,
) -> None:
    """Write a model as ONNX file, for use without torch.

    The file holds the whole prediction, except for resizing. Needs the extra: pip install 'morecl[export]'.
    """
    from morecl.files import check_target

    check_accept(accept)
    store = existing(model)
    check_target(out, "model.onnx", "OUT.onnx")
    classifier = store.load(device="cpu")
    classifier.export(out, accept=accept)
    _show_promise(classifier.promise(accept), "export")
    shown = f"{out}: {size(out.stat().st_size)}"
    output_console().print(shown, markup=False, highlight=False, soft_wrap=True)


def _show_promise(promise: Promise, command: str = "predict") -> None:
    console = output_console()
    for line in promise_lines(promise, command):
        say(console, line)


@contextmanager
def _changed(store: ModelFolder) -> Iterator[tuple[ModelFolder, Classifier]]:
    """The model, to be changed and committed inside."""
    before = None
    try:
        with sigterm_as_interrupt(), full_disk_explained(), store.changing():
            before = store.versions()
            yield store, store.load()
    except KeyboardInterrupt:
        exit_interrupted(escape(kept(store, before)))


def disk_usage(folder: Path) -> int:
    """Bytes of all files in ``folder``; versions may share one."""
    found = {(s.st_dev, s.st_ino): s.st_size for s in (p.stat() for p in folder.rglob("*") if p.is_file())}
    return sum(found.values())


def local_time(moment: str) -> str:
    """An ISO 8601 moment in this machine's time zone; as it is if it cannot be read."""
    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return moment
