"""Figures as SVG and PNG: inside a page, or as files."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from morecl.errors import InputError, unknown_name
from morecl.files import atomic_path
from morecl.records import Record
from morecl.report.figures import Drawing, drawings, short_name
from morecl.report.plots import FAINT, INK, WIDE

IMAGE_TYPES = ("svg", "png")
_NOTE_LINE = 0.13  # inches


def write_figures(records: Sequence[Record], folder: Path, types: Sequence[str] = IMAGE_TYPES) -> list[Path]:
    """Write every figure into ``folder``; return the paths."""
    for name in types:
        if name not in IMAGE_TYPES:
            raise unknown_name("figure format", name, IMAGE_TYPES)
    written = []
    for drawing in drawings(records):
        figure, area = titled(drawing)
        for name in types:
            path = folder / f"{drawing.name}.{name}"
            write_figure(figure, drawing.title, path, area)
            written.append(path)
    return written


def write_figure(figure: Figure, title: str, path: Path, area: Bbox | None = None) -> None:
    """Write the ``area`` in inches, or all, of ``figure`` as the name of ``path`` says: ``.svg`` or ``.png``."""
    area = area or Bbox.from_extents(0, 0, figure.get_figwidth(), figure.get_figheight())
    data = svg(figure, title, area).encode() if check_image_type(path) == "svg" else _png(figure, area)
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write the figure {path}: {error}") from error


def check_image_type(path: Path) -> str:
    """The ending of ``path``, one of :data:`IMAGE_TYPES`."""
    ending = path.suffix.removeprefix(".")
    if ending not in IMAGE_TYPES:
        raise InputError(f"{path} is no name for a figure; end it in {' or '.join('.' + t for t in IMAGE_TYPES)}")
    return ending


def titled(drawing: Drawing) -> tuple[Figure, Bbox]:
    """The wide figure with its title above and its notes below, and the area in inches that holds all of it.

    The figure grows by the lines of a long title; the notes lie below it, where the layout leaves them alone.
    """
    figure = drawing.draw(WIDE)
    width = int(11 * figure.get_figwidth())
    title = textwrap.wrap(f"{drawing.title}, {short_name(drawing.column.label)}", width=width)
    figure.set_figheight(figure.get_figheight() + 0.17 * (len(title) - 1))
    figure.suptitle("\n".join(title), fontsize=10, color=INK, parse_math=False)
    # Lay it out now: a legend outside the axes would otherwise move to the edge of the saved area, below the notes.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for legend in figure.legends:
        legend.set_bbox_to_anchor((0, 0, 1, 1), figure.transFigure)
    notes = [line for note in drawing.notes for line in textwrap.wrap(note, width=int(1.6 * width))]
    depth = 0.06 + _NOTE_LINE * len(notes) if notes else 0.0
    for place, note in enumerate(notes):
        below = 0.06 + _NOTE_LINE * place
        y = -below / figure.get_figheight()
        figure.text(0.01, y, note, va="top", fontsize=7, color=INK, parse_math=False)
    return figure, Bbox.from_extents(0, -depth, figure.get_figwidth(), figure.get_figheight())


def svg(figure: Figure, title: str, area: Bbox | None = None) -> str:
    """The figure as SVG, the same bytes every time; with an ``area``, for a file, letters are outlines, else text."""
    options = {"svg.hashsalt": "morecl", "svg.fonttype": "path" if area else "none"}
    buffer = io.StringIO()
    with rc_context(options), warnings.catch_warnings():
        if not area:  # the browser draws the text, in whatever fonts it has
            warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        FigureCanvasSVG(figure)
        metadata = {"Date": None, "Creator": None, "Title": title}
        figure.savefig(buffer, format="svg", bbox_inches=area, metadata=metadata)
    return buffer.getvalue()


def inline_svg(figure: Figure, prefix: str) -> Markup:
    """SVG to put into a page: fills its box and takes the page's colours; ``prefix`` makes its ids unique there."""
    image = svg(figure, "")
    image = re.sub(r"<(metadata|title)>.*?</\1>", "", image[image.index("<svg") :], flags=re.DOTALL)
    head, _, rest = image.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    image = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", f"{head}>{rest}")
    return Markup(image.replace(INK, "currentColor").replace(FAINT, "var(--line)"))


def _png(figure: Figure, area: Bbox) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    metadata = {"Software": None}
    figure.savefig(buffer, format="png", dpi=200, facecolor="white", bbox_inches=area, metadata=metadata)
    return buffer.getvalue()
