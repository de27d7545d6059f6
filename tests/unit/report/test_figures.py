"""Figures: what they show, that all of it can be read, and that nothing covers anything else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from morecl.records import Record
from morecl.report import plots
from morecl.report.figures import drawings
from morecl.report.paper import METHODS
from morecl.report.plots import NARROW, WIDE
from morecl.report.render import svg, titled
from synthetic import held_out, make_record, with_aca

RECORDS = [make_record(name, seed=seed, tasks=3) for name in ("icarl", "more") for seed in (0, 1)]


def test_figures_are_the_same_bytes_every_time() -> None:
    for first, second in zip(drawings(RECORDS), drawings(RECORDS), strict=True):
        assert svg(first.draw(WIDE), first.title) == svg(second.draw(WIDE), second.title)


def test_all_methods_look_different() -> None:
    records = [make_record(name, tasks=2) for name in METHODS if name != "single"]
    figure = drawings(records)[0].draw(WIDE)
    lines = figure.axes[0].lines
    assert len(lines) == len(records)
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(records)
    assert len({(line.get_color(), str(line._dash_pattern)) for line in lines}) == len(records)


@pytest.mark.parametrize("values", [[100.0] * 5, [100.0, 80.0, 60.0, 20.0, 0.0]])
def test_no_axis_goes_beyond_all_and_markers_at_its_end_are_whole(values: list[float]) -> None:
    record = make_record().model_copy(update={"aca_per_step": values})
    [axes] = drawings([record])[0].draw(WIDE).axes
    low, high = axes.get_ylim()
    assert -1 <= low < min(values) and 100 < high <= 101
    assert not any(line.get_clip_on() for line in axes.lines)


def bag() -> list[Record]:
    """Rows that differ in many settings with long names, on a benchmark with a long name; and held-out ones."""
    names = ("back_update_batch_size", "distillation_temperature", "label_smoothing", "memory_batch_size", "momentum")
    folder = "folder:/" + "long/" * 30 + "$my_{pictures"
    rows = [dict.fromkeys(names, 1) | {names[n % 5]: n} for n in range(8)]
    records = [make_record("more", folder, seed, config=config) for seed, config in enumerate(rows)]
    return [*records, *(held_out(make_record("icarl", folder, config=config)) for config in rows[:2])]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("records", [bag(), [make_record(name) for name in METHODS]], ids=["long", "all"])
def test_nothing_in_a_figure_covers_anything_else(records: list[Record]) -> None:
    shown = [drawing for drawing in drawings(records) if drawing.key != "matrix"]
    assert len(shown) == 6
    for drawing in shown:
        for figure in (titled(drawing)[0], drawing.draw(NARROW)):
            renderer = FigureCanvasAgg(figure).get_renderer()
            figure.draw(renderer)
            [axes] = figure.axes
            boxes = [axes.get_tightbbox(renderer), *(legend.get_window_extent(renderer) for legend in figure.legends)]
            boxes += [text.get_window_extent(renderer) for text in figure.texts]
            for one, other in itertools.combinations([box for box in boxes if box is not None], 2):
                assert not one.overlaps(other), (drawing.key, figure.get_figwidth())
            assert axes.get_window_extent(renderer).width > 0.45 * figure.bbox.width


def test_a_single_task_without_detection_has_no_roc_curve() -> None:
    record = with_aca(70.0, "ncm", "digits-5t", tasks=1, auc_per_step=[])
    assert [drawing.key for drawing in drawings([record])] == ["accuracy", "time", "entries", "matrix"]


def test_the_reduction_is_a_bar_to_the_mean_and_a_line_over_the_runs() -> None:
    records = [make_record("icarl", seed=seed, tasks=3, level=level) for seed, level in enumerate((60.0, 70.0, 80.0))]
    falls = [record.metrics.reduction_rate for record in records]
    assert None not in falls and len({*falls}) == 3
    drawing = next(drawing for drawing in drawings(records) if drawing.key == "reduction")
    [axes] = drawing.draw(WIDE).axes
    [bar] = axes.patches
    assert bar.get_width() == pytest.approx(np.mean(falls))
    assert sorted(axes.lines[0].get_xdata()) == pytest.approx([min(falls), max(falls)])
    assert [text.get_text() for text in axes.texts] == [f"{np.mean(falls):.1f}"]
    assert drawing.alt.endswith(f"iCaRL {np.mean(falls):.1f}.")
    assert drawing.notes == ("Bars: mean over runs; thin lines: from the smallest to the largest.",)
    [single] = [drawing for drawing in drawings(records[:1]) if drawing.key == "reduction"]
    assert single.notes == ()


def test_a_negative_reduction_stays_inside_the_axes() -> None:
    for values in ([-3.0], [-5.0, 3.0], [5.0, -3.0]):
        [axes] = plots.reduction_bars({"one": values}, NARROW).axes
        low, high = axes.get_xlim()
        assert low < min(values) and high >= max(0.0, *values)


def test_seconds_of_runs_that_shared_a_card_are_not_drawn() -> None:
    alone = make_record("icarl", device="cuda (NVIDIA H200)", shared=False)
    keys = [drawing.key for drawing in drawings([alone, make_record("more", device="cuda", shared=True)])]
    assert "time" in keys
    for shared in (True, None):
        keys = [drawing.key for drawing in drawings([make_record("more", device="cuda (NVIDIA H200)", shared=shared)])]
        assert "time" not in keys


def steps(*values: float) -> np.ndarray:
    return np.array(values)


def test_lines_far_below_the_others_do_not_stretch_the_axis() -> None:
    lines = {f"method {n}": steps(99.0, 90.0, 82.0 + n) for n in range(8)}
    assert plots.far_below(lines) == []
    low = lines | {"fine-tuning": steps(99.0, 45.0, 20.0)}
    assert plots.far_below(low) == ["fine-tuning"]
    assert plots.far_below({"one": steps(99.0, 20.0), "other": steps(99.0, 90.0)}) == []  # half of the lines
    spread = {f"method {n}": steps(99.0, 90.0 - 10 * n) for n in range(8)}
    assert plots.far_below(spread) == []


def test_a_line_that_leaves_the_axis_is_noted() -> None:
    levels = {"finetune": 20.0, "icarl": 80.0, "eeil": 82.0, "gd": 83.0, "more": 85.0}
    records = [make_record(name, level=level) for name, level in levels.items()]
    accuracy = drawings(records)[0]
    [axes] = accuracy.draw(WIDE).axes
    low, _ = axes.get_ylim()
    assert 60 < low < min(min(record.aca_per_step) for record in records[1:])
    lines = {line.get_label().split()[0]: line for line in axes.lines}
    assert [name for name, line in lines.items() if line.get_clip_on()] == ["Fine-tuning"]
    assert accuracy.notes == (f"Fine-tuning (↓) leaves the axis and falls to {min(records[0].aca_per_step):.1f} %.",)


def test_bars_far_longer_than_the_others_are_cut() -> None:
    assert plots.far_above({"a": 5.0, "b": 6.0, "c": 7.0, "joint": 154.0}) == ["joint"]
    assert plots.far_above({"a": 5.0, "b": 6.0, "c": 7.0, "joint": 14.0}) == []
    assert plots.far_above({"a": 5.0, "joint": 154.0}) == []
    assert plots.far_above({"a": 0.0, "b": 0.0, "c": 0.0, "joint": 3.0}) == []


def test_a_cut_bar_shows_its_number_and_is_noted() -> None:
    names = ("icarl", "eeil", "more", "joint")
    stored = {name: {"backbone": 5_000_000, "buffer": 150_000_000 if name == "joint" else 600_000} for name in names}
    records = [make_record(name, entries=stored[name]) for name in names]
    drawing = next(drawing for drawing in drawings(records) if drawing.key == "entries")
    [axes] = drawing.draw(WIDE).axes
    assert 5.6 < axes.get_xlim()[1] < 7
    assert [text.get_text() for text in axes.texts] == ["5.60", "5.60", "5.60", "→ 155"]
    assert drawing.notes == ("Cut off at the axis (→): Joint.",)


def test_numbers_in_a_heat_map_can_be_read_on_light_and_dark_pages() -> None:
    for value in range(101):
        text = plots.heat_text_colour(value)
        light_ink, dark_ink = ("white", "white") if text == "white" else (plots.INK, "#e8e9ec")
        assert plots.contrast(to_rgb(light_ink), plots.heat_colour(value, "#ffffff")) >= 4.5, value
        assert plots.contrast(to_rgb(dark_ink), plots.heat_colour(value, "#1c1f25")) >= 4.5, value


def test_contrast_is_that_of_wcag() -> None:
    assert plots.contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)
    assert plots.contrast(to_rgb("#777777"), (1, 1, 1)) == pytest.approx(4.48, abs=0.01)


def test_zero_in_a_heat_map_looks_like_the_page() -> None:
    assert plots.heat_colour(0, "#1c1f25") == pytest.approx(to_rgb("#1c1f25"))
    assert plots.heat_colour(100, "#1c1f25") == plots.heat_colour(100, "#ffffff")


def test_the_scale_of_a_heat_map_without_numbers_has_the_colours_of_its_cells() -> None:
    """Cells are transparent, so the scale must stand on the page, not on white, to look alike on a dark one."""
    for tasks in (10, 20):
        figure = plots.heat_map(np.full((tasks, tasks), 50.0), NARROW)
        cells = figure.axes[0].collections[0]
        assert bool(figure.axes[0].texts) == (tasks == 10) and len(figure.axes) == (1 if tasks == 10 else 2)
        if tasks == 20:
            scale = figure.axes[1]
            assert scale.patch.get_facecolor()[3] == 0
            assert scale.collections[-1].cmap is cells.cmap
            assert cells.cmap(0.5)[3] == pytest.approx(0.5)  # no step where there is no number to be read


def test_thin_parts_of_bars_have_no_outline() -> None:
    parts = {"MORE": {f"part {n}": 1.0 for n in range(8)}}
    [axes] = plots.stacked_bars(parts, "seconds", 1.0, [], WIDE).axes
    assert all(bar.get_linewidth() == 0 for bar in axes.patches)
    assert axes.patches[7].get_hatch() == "///" and axes.patches[7].get_edgecolor() == (1, 1, 1, 1)


def test_a_repeated_seed_counts_once_in_figures() -> None:
    first, again, other = make_record(level=60.0), make_record(level=70.0), make_record(seed=1, level=80.0)
    [line] = drawings([first, again, other])[0].draw(WIDE).axes[0].lines
    expected = ((first.metrics.aca + again.metrics.aca) / 2 + other.metrics.aca) / 2
    assert line.get_ydata()[-1] == pytest.approx(expected)


def test_dollar_signs_in_names_are_not_mathematics() -> None:
    record = make_record("a$\\frac$b_{", "folder:$x_{", tasks=2)
    for drawing in drawings([record]):
        assert svg(titled(drawing)[0], drawing.title)


@pytest.mark.filterwarnings("error")
def test_words_that_the_browser_draws_need_no_font_here() -> None:
    figure = Figure()
    figure.text(0.5, 0.5, "\u732b")  # a cat
    assert "\u732b" in svg(figure, "cats")
