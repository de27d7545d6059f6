"""Figures as files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from PIL import Image

from morecl.errors import InputError
from morecl.report.figures import drawings
from morecl.report.render import titled, write_figures
from synthetic import make_record

RECORDS = [make_record(name, seed=seed, tasks=3) for name in ("icarl", "more") for seed in (0, 1)]


def test_figures_are_written_as_files(tmp_path: Path) -> None:
    written = write_figures(RECORDS, tmp_path)
    kinds = ("accuracy", "roc", "reduction", "errors", "time", "entries")
    names = [f"{kind}-digits-5t-in-3-tasks" for kind in kinds]
    names += [f"matrix-digits-5t-in-3-tasks-{method}" for method in ("icarl", "more")]
    assert {path.name for path in written} == {f"{name}.{suffix}" for name in names for suffix in ("svg", "png")}
    assert set(tmp_path.iterdir()) == set(written)
    for path in written:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") if path.suffix == ".png" else b"</svg>" in data


def test_figures_cannot_be_written_in_unknown_formats_or_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown figure format 'pgn'; did you mean 'png'"):
        write_figures(RECORDS, tmp_path, ["pgn"])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the figure"):
        write_figures(RECORDS, tmp_path / "file", ["svg"])


def test_figures_with_alike_names_are_not_overwritten(tmp_path: Path) -> None:
    records = [make_record(name, tasks=2) for name in ("a/b", "a|b", "a b 2")]
    written = write_figures(records, tmp_path, ["svg"])
    assert len(set(written)) == len(written) == len(list(tmp_path.iterdir())) == 9


def test_a_files_notes_lie_below_the_figure_and_inside_the_image() -> None:
    settings = ("back_update_batch_size", "distillation_temperature", "memory_batch_size", "label_smoothing")
    records = [make_record(config=dict.fromkeys(settings, n), seed=n) for n in range(4)]
    for drawing in drawings(records):
        figure, area = titled(drawing)
        below = [text for text in figure.texts if text.get_position()[1] < 0]
        assert (drawing.key == "matrix") == (not below)
        renderer = FigureCanvasAgg(figure).get_renderer()
        for text in below:
            box = text.get_window_extent(renderer)
            assert area.y0 * figure.dpi <= box.y0 and box.x1 <= area.x1 * figure.dpi, drawing.key
        if below:
            without = pixels(figure, None)
            assert np.array_equal(pixels(figure, area)[: len(without)], without), drawing.key  # no legend has moved


def pixels(figure: Figure, area: Bbox | None) -> np.ndarray:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, facecolor="white", bbox_inches=area)
    return np.asarray(Image.open(buffer))
