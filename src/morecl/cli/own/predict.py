"""``morecl predict``: what is on these images? One answer after the other, in bounded memory."""

from __future__ import annotations

import csv
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from io import BufferedIOBase
from itertools import chain, groupby, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from morecl.cli import cluster
from morecl.cli.options import Device
from morecl.cli.own.common import (
    Accept,
    Model,
    check_accept,
    existing,
    out_of_memory_explained,
    promise_lines,
    seconds_text,
)
from morecl.cli.own.counting import counted_off
from morecl.cli.terminal import (
    FAILED,
    counted,
    error_line,
    exit_closed_pipe,
    exit_interrupted,
    output_console,
    printable,
)
from morecl.errors import InputError
from morecl.files import there_or_at_home
from morecl.on_ray.cluster import ClusterOptions

if TYPE_CHECKING:  # these import torch
    from morecl.classifier import Answer, Classifier
    from morecl.methods import Learner

STDIN = "-"
NAME_WIDTH, OTHERS_WIDTH, PATH_WIDTH = 24, 30, 20  # columns: at most, at most, at least
OTHERS = 2  # classes that come next
TOP = 5  # classes that JSON and CSV name
CHUNK = 2**16  # bytes of stdin; far more than a path has

Writer = Callable[["Answer"], None]


def predict(
    model: Model,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Images, folders of images, or - for a list of paths on stdin.", show_default=False
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values.")] = False,
    top: Annotated[
        int | None, typer.Option(min=1, help="Classes to name for each image, in JSON and CSV. [default: 5]")
    ] = None,
    accept: Accept = 0.95,
    device: Device = None,
    on: cluster.On = None,
    address: cluster.Address = None,
    gpus_per_run: cluster.GpusPerRun = None,
    cpus_per_run: cluster.CpusPerRun = None,
) -> None:
    """Name the class of each image, or call it unknown.

    Exit code 1 if an image could not be read.
    """
    started = time.monotonic()
    if as_json and as_csv:
        raise InputError("--json or --csv, not both")
    if top is not None and not (as_json or as_csv):
        raise InputError("--top goes with --json or --csv")
    named = TOP if top is None else top
    check_accept(accept)
    ray = cluster.cluster_options(on, address, gpus_per_run, cpus_per_run, device)
    store = existing(model)
    paths = [there_or_at_home(path) for path in paths]
    check_paths(paths)
    broken = 0
    try:
        with out_of_memory_explained("use --device cpu, or close other programs"), ExitStack() as stack:
            versions, classifier = store.load_newest(device="cpu" if ray else device)
            promise = classifier.promise(accept)
            if promise.threshold is None:
                for line in promise_lines(promise):
                    error_line(line)
            if ray:
                saved, learner = (store.path, versions[-1].number), classifier.learner
                found = _answers_on_ray(ray, saved, learner, paths, device, top=named, accept=accept)
                answers: Iterable[Answer] = stack.enter_context(closing(found))
            else:
                answers = _answers(classifier, paths, top=named, accept=accept)
            if not sys.stdout.isatty():  # where they are no progress themselves
                answers = counted_off(answers, lambda: _total(paths))
            answers = _begun(answers, paths)  # every clock runs already
            if as_json:
                broken = _write_all(answers, _json_writer(sys.stdout))
            elif as_csv:
                broken = _write_all(answers, _csv_writer(sys.stdout, min(named, len(classifier.classes))))
            else:
                broken = _show_table(answers, classifier.classes, started)
    except KeyboardInterrupt:
        exit_interrupted("the answers so far are complete")
    except BrokenPipeError:  # `| head`: nobody reads on
        exit_closed_pipe()
    if broken:
        raise SystemExit(FAILED)


# ---- which images -------------------------------------------------------------------------------------------------


def check_paths(paths: Sequence[str]) -> None:
    """Raise :class:`InputError` if a path does not exist, before anything slow happens; name folders without images.

    These are no mistake: an inbox may be empty.
    """
    if paths.count(STDIN) > 1:
        raise InputError("- (a list of paths on stdin) can be given once")
    for path in paths:
        if path != STDIN and not os.path.lexists(path):
            raise InputError(f"there is no file or folder {path}")
    for path in paths:
        if path != STDIN and next(images_in(path), None) is None:
            error_line(f"{path} has no images; they are found by their extension, such as .jpg or .png")


def images_in(path: str) -> Iterator[str]:
    """The image files in a folder and its sub-folders, also linked ones, or the file itself; hidden ones are left out.

    A folder that may not be read comes last, itself: whoever opens it learns why.
    """
    from morecl.data.folder import walked

    if not os.path.isdir(path):
        yield path
        return
    lost: list[OSError] = []
    yield from walked(path, set(), lost.append)
    yield from (str(error.filename) for error in lost)


def _stdin() -> IO[bytes]:
    if sys.stdin is None:
        raise InputError("the paths are to be read from stdin, but it is closed")
    return sys.stdin.buffer


def listed(stream: IO[bytes]) -> Iterator[str]:
    """The paths on stdin, one per line, folders as the images in them.

    Once a NUL has come, paths end at NUL alone, as those of ``find -print0`` do: a name may hold the end of a line.
    """
    assert isinstance(stream, BufferedIOBase)
    end, rest = b"\n", b""
    while chunk := _read(stream):
        end = b"\0" if b"\0" in chunk else end
        *whole, rest = (rest + chunk).split(end)
        for path in whole:
            yield from _named(path, end)
    yield from _named(rest, end)


def _read(stream: BufferedIOBase) -> bytes:
    """What is there, without waiting for more."""
    try:
        return stream.read1(CHUNK)
    except OSError as error:
        raise InputError(f"the list of paths on stdin cannot be read ({error.strerror or error})") from error


def _named(path: bytes, end: bytes) -> Iterator[str]:
    text = os.fsdecode(path.removesuffix(b"\r") if end == b"\n" else path)
    if text.strip():
        yield from images_in(there_or_at_home(text))


def arriving(paths: Iterable[str], most: int) -> Iterator[list[str]]:
    """``paths`` in lists of at most ``most``, each as soon as it is there: whoever writes to stdin may take a while.

    What reading ``paths`` raises is raised here, after those before it.
    """
    waiting: queue.Queue[str | None] = queue.Queue(most)
    failed: list[Exception] = []

    def fill() -> None:
        try:
            for path in paths:
                waiting.put(path)
        except Exception as error:
            failed.append(error)
        finally:
            waiting.put(None)

    threading.Thread(target=fill, daemon=True).start()
    path = waiting.get()
    while path is not None:
        batch: list[str] = []
        while path is not None and len(batch) < most:
            batch.append(path)
            try:
                path = waiting.get_nowait()
            except queue.Empty:
                break
        else:
            yield batch
            continue
        yield batch
        path = waiting.get()
    if failed:
        raise failed[0]


def _total(paths: Sequence[str]) -> int | None:
    return None if STDIN in paths else sum(1 for path in paths for _ in images_in(path))


def _begun(answers: Iterable[Answer], paths: Sequence[str]) -> Iterator[Answer]:
    """``answers``, the first of which are computed.

    Raises:
        InputError: there are none, and a list on stdin was given. What was to write it may have failed.
    """
    remaining = iter(answers)
    first = list(islice(remaining, 1))
    if not first and STDIN in paths:
        raise InputError("the list of paths on stdin names no image")
    return chain(first, remaining)


def _answers(classifier: Classifier, paths: Sequence[str], *, top: int, accept: float) -> Iterator[Answer]:
    options: dict[str, Any] = {"top": top, "accept": accept}
    for from_stdin, group in groupby(paths, lambda path: path == STDIN):
        if from_stdin:
            for batch in arriving(listed(_stdin()), classifier.learner.eval_batch_size):
                yield from classifier.answers(batch, **options)
        else:
            yield from classifier.answers(chain.from_iterable(map(images_in, group)), **options)


def _answers_on_ray(
    options: ClusterOptions,
    model: tuple[Path, int],
    learner: Learner,
    paths: Sequence[str],
    device: str | None,
    *,
    top: int,
    accept: float,
) -> Generator[Answer]:
    from morecl.on_ray.answers import answers
    from morecl.on_ray.cluster import connected

    files = chain.from_iterable(listed(_stdin()) if path == STDIN else images_in(path) for path in paths)
    with connected(options) as ray:
        yield from answers(ray, *model, learner, files, device=device, top=top, accept=accept)


# ---- how they are shown -------------------------------------------------------------------------------------------


def _write_all(answers: Iterable[Answer], write: Writer) -> int:
    """Pass readable images' answers to ``write``, name the others; returns how many those are."""
    broken = 0
    for answer in answers:
        if answer.error is None:
            write(answer)
        else:
            broken += 1
            error_line(f"not readable: {answer.path}: {answer.error}")
    return broken


def _json_writer(stream: IO[str]) -> Writer:
    def write(answer: Answer) -> None:
        stream.write(json.dumps(answer.as_dict(), allow_nan=False) + "\n")
        stream.flush()

    return write


def _csv_writer(stream: IO[str], choices: int) -> Writer:
    table = csv.writer(stream, lineterminator="\n")
    heads = ["path", "label", "confidence", "ood_score", "threshold", "unknown", "task"]
    for place in range(1, choices + 1):
        heads += [f"top_{place}", f"top_{place}_confidence"]
    table.writerow(heads)

    def write(answer: Answer) -> None:
        found = [answer.path, answer.label, answer.confidence, answer.ood_score, answer.threshold]
        nearest = [value for choice in answer.top for value in (choice.label, choice.confidence)]
        table.writerow([*found, "true" if answer.unknown else "false", answer.task, *nearest])
        stream.flush()

    return write


def _show_table(answers: Iterable[Answer], classes: Sequence[str], started: float) -> int:
    """A line per image as it comes: answer, confidence, what else it may be, path. ``started``: the command, when."""
    console = output_console()
    images = unknown = 0
    widths = column_widths(classes, console.width)
    console.print(Text(_cells(widths, "answer", "confidence", "or", "image"), "bold"), soft_wrap=True)

    def write(answer: Answer) -> None:
        nonlocal images, unknown
        images, unknown = images + 1, unknown + answer.unknown
        room = console.width if console.is_terminal else None
        console.print(answer_line(answer, widths, room), soft_wrap=True)

    broken = _write_all(answers, write)
    words = [counted(images, "image"), f"{unknown:,} unknown"]
    words += [f"{broken:,} not readable"] if broken else []
    console.print(f"{', '.join(words)}; {seconds_text(time.monotonic() - started)}", style="dim", highlight=False)
    return broken


def column_widths(classes: Sequence[str], room: int) -> tuple[int, int]:
    """Of the answer and of what else it may be, which is left out if the terminal is narrow."""
    widest = max(map(cell_len, ("unknown", *classes)))
    name, others = min(NAME_WIDTH, widest), min(OTHERS_WIDTH, OTHERS * (widest + 6))
    fits = name + others + PATH_WIDTH + 16 <= room and len(classes) > 1
    return name, others if fits else 0


def answer_line(answer: Answer, widths: tuple[int, int], room: int | None) -> Text:
    """One line of the table; ``room``: columns of the terminal, to which the path is cut."""
    label = "unknown" if answer.label is None else answer.label
    others = answer.top if answer.unknown else answer.top[1:]
    listed = ", ".join(f"{choice.label} {100 * choice.confidence:.0f} %" for choice in others[:OTHERS])
    sure = "" if answer.unknown or answer.confidence is None else f"{100 * answer.confidence:.1f} %"
    path = printable(answer.path or "")
    if room is not None:
        path = cut_left(path, room - cell_len(_cells(widths, "", "", "", "")))
    line = Text(_cells(widths, label, sure, listed, path), no_wrap=True)
    if answer.unknown:
        line.stylize("bold yellow", 0, len(label))
    if start := widths[1]:
        begin = len(line.plain) - len(path) - 2 - start
        line.stylize("dim", begin, begin + start)
    return line


def _cells(widths: tuple[int, int], answer: str, confidence: str, others: str, path: str) -> str:
    name, rest = widths
    cells = [fitted(answer, name), f"{confidence:>10}", *([fitted(others, rest)] if rest else []), path]
    return "  ".join(cells)


def fitted(text: str, width: int) -> str:
    """``text`` in exactly ``width`` columns."""
    if cell_len(text) > width:
        text = set_cell_size(text, width - 1).rstrip() + "…"
    return set_cell_size(text, width)


def cut_left(path: str, width: int) -> str:
    """The end of ``path`` that fits into ``width`` columns, which says more than its beginning."""
    if cell_len(path) <= width:
        return path
    while path and cell_len(path) > width - 1:
        path = path[1:]
    return f"…{path}"
