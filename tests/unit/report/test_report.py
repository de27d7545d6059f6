"""Tables, notes, figures and pages from synthetic records."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from morecl import methods
from morecl.errors import InputError
from morecl.records import Metrics, Record, write_record
from morecl.report import formats as report
from morecl.report.figures import NARROW, WIDE, Drawing, drawings, short_labels, svg, titled
from morecl.report.paper import METHODS, paper, paper_number
from morecl.report.tables import Column, Row, Table, arrange, build_tables, notes, with_fwt
from synthetic import make_record


def with_aca(value: float, *args: object, **keywords: object) -> Record:
    """A record whose metrics are known: only ACA and AIA matter."""
    aia = value if keywords.get("tasks") == 1 else value + 5
    numbers = Metrics(aca=value, aia=aia, reduction_rate=None, auc=None, iauc=None, til_accuracy=99.0)
    return make_record(*args, metrics=numbers, roc=None, **keywords)  # type: ignore[arg-type]


def main_table(records: list[Record]) -> Table:
    return next(table for table in build_tables(records) if table.key == "main")


def aca_cells(records: list[Record]) -> dict[str, object]:
    table = main_table(records)
    return {row.label: cells[0] for row, cells in table.rows.items()}


def test_seeds_and_orders_are_averaged_with_the_sample_deviation() -> None:
    records = [with_aca(value, seed=seed, device=f"cuda:{seed}") for seed, value in enumerate([70.0, 72.0, 77.0])]
    [[cell, _]] = main_table(records).rows.values()
    assert cell is not None
    assert (cell.mean, cell.n) == (73.0, 3)
    assert cell.std == pytest.approx(13**0.5)  # squares 9 + 1 + 16, over n - 1 = 2
    assert main_table(records).same_n == 3


def test_one_run_has_no_deviation() -> None:
    [[cell, _]] = main_table([with_aca(70.0)]).rows.values()
    assert cell is not None
    assert cell.std is None
    assert cell.text() == "70.00"


def test_runs_with_different_memory_are_not_averaged() -> None:
    records = [with_aca(70.0, config={"memory_size": 200}), with_aca(60.0, config={"memory_size": 50})]
    assert set(aca_cells(records)) == {"MORE (memory size 200)", "MORE (memory size 50)"}


def test_ablations_are_rows_of_their_own() -> None:
    switches = [(True, True), (False, True), (True, False), (False, False)]
    records = [with_aca(70.0, config={"method": {"coefficient": c, "back_update": b}}) for c, b in switches]
    assert list(aca_cells(records)) == [
        "MORE",
        "MORE (no back update)",
        "MORE (no coefficient)",
        "MORE (no back update, no coefficient)",
    ]


def test_an_ablation_is_named_even_where_nothing_varies() -> None:
    assert list(aca_cells([with_aca(70.0, config={"coefficient": False})])) == ["MORE (no coefficient)"]


def test_settings_of_the_paper_are_the_usual_ones_of_each_benchmark() -> None:
    settings = {"cifar10-5t": (True, 200), "tinyimagenet-5t": (False, 2000)}
    records = [
        with_aca(70.0, benchmark=name, config={"back_update": update, "memory_size": size})
        for name, (update, size) in settings.items()
    ]
    half = with_aca(60.0, benchmark="cifar10-5t", config={"back_update": True, "memory_size": 100})
    table = main_table([*records, half])
    assert [row.label for row in table.rows] == ["MORE", "MORE (half memory)"]
    assert all(table.rows[Row("more")])


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"backbone": "a"}, {"backbone": "b"}, {"MORE (backbone a", "MORE (backbone b"}),
        ({"train_images": 10}, {"train_images": 20}, {"MORE (train images 10)", "MORE (train images 20)"}),
        ({"config": {"epochs": 3}}, {"config": {"epochs": 9}}, {"MORE (epochs 3)", "MORE (epochs 9)"}),
    ],
)
def test_other_settings_split_rows(first: dict[str, object], second: dict[str, object], named: set[str]) -> None:
    labels = aca_cells([with_aca(70.0, **first), with_aca(60.0, **second)])
    assert len(labels) == 2
    assert all(any(label.startswith(name) for label in labels) for name in named)


def test_other_images_split_rows_but_for_those_that_are_held_out() -> None:
    records = [with_aca(70.0, seed=n) for n in range(2)]
    data = [records[0].data, records[1].data.model_copy(update={"fingerprint": "feedbeef" * 8})]
    records = [record.model_copy(update={"data": part}) for record, part in zip(records, data, strict=True)]
    assert any("data feedbeef" in label for label in aca_cells(records)) and len(aca_cells(records)) == 2
    held_out = [r.model_copy(update={"data": r.data.model_copy(update={"scored_on": "validation"})}) for r in records]
    assert len(aca_cells(held_out)) == 1


def test_the_same_weights_at_another_path_are_the_same_backbone() -> None:
    records = [with_aca(70.0, seed=n, config={"backbone": f"vit@/machine{n}/weights.safetensors"}) for n in range(2)]
    assert list(aca_cells(records)) == ["MORE"]


def test_a_record_that_says_nothing_of_the_backbone_had_it_frozen() -> None:
    configs = [{}, {"freeze_backbone": True}, {"freeze_backbone": False}]
    records = [with_aca(70.0, seed=n, config=config) for n, config in enumerate(configs)]
    assert set(aca_cells(records)) == {"MORE", "MORE (no freeze backbone)"}


def test_settings_without_effect_neither_split_rows_nor_are_told() -> None:
    """NCM and CSC train nothing on a frozen backbone; how they would have trained says nothing of a record."""
    assert {name for name, info in METHODS.items() if not info.trains} == {
        name for name, method in methods.METHODS.items() if not method.Config().trains
    }
    configs = [{}, {"epochs": 20, "lr": 0.1}, {"epochs": 5, "freeze_backbone": False}]
    records = [with_aca(70.0, "ncm", "cifar10-5t", seed=n, config=config) for n, config in enumerate(configs)]
    assert list(aca_cells(records[:2])) == ["NCM"]
    assert len(aca_cells(records)) == 2
    assert not any(note.startswith("Epochs") for note in notes(records[:2]))
    assert any(note.startswith("Epochs: 5") for note in notes(records))


def test_what_the_config_tells_is_not_told_twice() -> None:
    records = [with_aca(70.0, train_images=100 * n, config={"train_per_class": n}) for n in (1, 2)]
    assert set(aca_cells(records)) == {"MORE (train per class 1)", "MORE (train per class 2)"}


def test_a_benchmark_in_another_number_of_tasks_is_another_column() -> None:
    table = main_table([with_aca(70.0, "ncm", "cifar10-5t"), with_aca(80.0, "ncm", "cifar10-5t", tasks=1)])
    assert [head[0] for head in table.heads] == ["CIFAR10-5T in 1 task"] * 2 + ["CIFAR10-5T"] * 2 + ["Average"] * 2
    assert Column("folder:birds", 3).label == "folder:birds in 3 tasks"


def test_rows_stand_in_the_order_of_the_paper() -> None:
    records = [with_aca(50.0, name) for name in ("joint", "more", "zzz", "icarl", "finetune")]
    assert [row.method for row in main_table(records).rows] == ["finetune", "icarl", "zzz", "more", "joint"]


def test_best_is_bold_but_not_the_upper_bound() -> None:
    records = [with_aca(v, m) for m, v in {"icarl": 60.0, "more": 70.001, "derpp": 70.004, "joint": 90.0}.items()]
    best = {row.method: cells[0].best for row, cells in main_table(records).rows.items() if cells[0]}
    assert best == {"icarl": False, "derpp": True, "more": True, "joint": False}  # both print as 70.00


def test_lower_is_better_for_reduction() -> None:
    records = []
    for name, rate in {"icarl": 20.0, "more": 10.0}.items():
        record = make_record(name)
        numbers = record.metrics.model_copy(update={"reduction_rate": rate})
        records.append(record.model_copy(update={"metrics": numbers}))
    table = next(table for table in build_tables(records) if table.key == "tasks")
    place = table.heads.index(("Digits-5T", "Reduction"))
    assert {row.method: cells[place].best for row, cells in table.rows.items() if cells[place]} == {
        "icarl": False,
        "more": True,
    }


def test_the_average_needs_all_benchmarks() -> None:
    records = [
        with_aca(80.0, "more", "cifar10-5t"),
        with_aca(60.0, "more", "cifar100-10t", tasks=10, config={"memory_size": 2000}),
        with_aca(90.0, "icarl", "cifar10-5t"),
    ]
    table = main_table(records)
    place = table.heads.index(("Average", "ACA"))
    average = table.rows[Row("more")][place]
    assert average is not None
    assert average.mean == 70.0
    assert average.paper == (pytest.approx((89.16 + 70.23) / 2), None)
    assert table.rows[Row("icarl")][place] is None


@pytest.mark.parametrize(
    ("record", "metric", "expected"),
    [
        (make_record("more", "cifar10-5t"), "aca", (89.16, 0.96)),
        (make_record("gd", "cifar10-5t"), "aca", (89.16, 0.53)),
        (make_record("more", "cifar10-5t", config={"memory_size": 100}), "aca", (88.13, 1.16)),
        (make_record("more", "cifar10-5t", config={"memory_size": 77}), "aca", None),
        (make_record("more", "cifar10-5t", config={"coefficient": False}), "aia", (93.36, 0.79)),
        (make_record("more", "cifar10-5t", config={"back_update": False}), "aia", (93.86, 1.12)),
        (make_record("more", "cifar10-5t", config={"back_update": True}), "iauc", (88.06, 1.84)),
        (make_record("ncm", "cifar10-5t", tasks=1), "aca", (85.8, None)),
        (make_record("ncm", "cifar10-5t"), "aca", None),
        (make_record("more", "cifar10-5t-1k"), "aca", None),
        (make_record("pass", "svhn-5t"), "aca", (76.09, None)),
    ],
)
def test_numbers_of_the_paper(record: Record, metric: str, expected: tuple[float, float | None] | None) -> None:
    assert paper_number(record, metric) == expected


@pytest.mark.parametrize(
    ("condition", "averages"),
    [
        ("main", {"aca": 71.59, "aia": 80.77, "auc": 74.99, "iauc": 82.23}),
        ("half_memory", {"aca": 71.44, "aia": 79.61}),
    ],
)
def test_the_packaged_numbers_give_the_averages_that_the_paper_prints(
    condition: str, averages: dict[str, float]
) -> None:
    five = [name for name in paper()["settings"] if name != "svhn-5t"]
    for metric, printed in averages.items():
        values = [paper()["numbers"][condition][metric][name]["more"][0] for name in five]
        assert sum(values) / 5 == pytest.approx(printed, abs=0.006)


def test_forward_transfer_joins_the_single_task_model() -> None:
    records = [
        make_record("more"),
        make_record("single"),
        make_record("icarl", class_order=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]),
    ]
    more, _, icarl = with_fwt(records)
    diagonal = [row[i] for i, row in enumerate(records[0].accuracy_matrix)]
    assert more.metrics.fwt == pytest.approx(sum(value - 95 for value in diagonal if value) / 5)
    assert icarl.metrics.fwt is None  # another class order
    assert "Transfer" in [table.title for table in build_tables(records)]
    assert "Transfer" not in [table.title for table in build_tables([make_record("more")])]


def test_references_of_several_settings_are_not_mixed() -> None:
    records = [make_record("more"), *(make_record("single", config={"epochs": n}) for n in (1, 2))]
    assert with_fwt(records)[0].metrics.fwt is None
    assert any("several settings" in note for note in notes(records))


def test_the_reference_stands_in_no_accuracy_table() -> None:
    assert Row("single") not in main_table([make_record("more"), make_record("single")]).rows


def test_notes_say_what_differs_from_the_paper() -> None:
    config = {"image_size": 160, "memory_size": 200, "bottleneck": 64, "lr": 0.1}
    found = notes([make_record("more", "cifar10-5t", config=config), make_record("more", "digits-5t")])
    assert "Backbone: vit_mini_patch4_32 (paper: DeiT-S/16 pre-trained on 611 ImageNet classes)." in found
    assert "Epochs: 5 (paper: 20)." in found
    assert "Image size: 160 (paper: 224)." in found
    assert "Learning rate (the paper's is that of MORE): 0.1 (paper: 0.005)." in found
    assert "Training images: 1,000 (paper: 50,000)." in found
    assert "Runs per number: 1 (paper: 5)." in found
    assert "Not in the paper: Digits-5T." in found
    assert not any(note.startswith(("Memory size", "Bottleneck")) for note in found)  # the paper's


def test_a_note_says_which_row_has_the_papers_settings() -> None:
    records = [make_record("more", "cifar10-5t", seed=n, config={"lr": lr}) for n, lr in enumerate((0.005, 0.1))]
    assert list(aca_cells(records)) == ["MORE", "MORE (lr 0.1)"]
    told = "without a setting in brackets has the paper's values"
    assert any(told in note for note in notes(records))
    assert not any(told in note for note in notes(records[:1]) + notes(records[1:]))


def test_notes_warn_of_repeated_seeds() -> None:
    again = make_record("more", level=70.0)
    assert any("more than once" in note for note in notes([make_record("more"), again]))


def held_out(record: Record) -> Record:
    """Scored on some of its training images, of which fewer are left to train on: that needs no other words."""
    data = {"scored_on": "validation", "train_images": record.data.train_images - 1, "test_images": 1}
    return record.model_copy(update={"data": record.data.model_copy(update=data)})


def test_scores_on_held_out_images_say_so_and_are_not_ranked_with_the_others() -> None:
    """As after a search: its trials differ from the run in other ways, too."""
    trials = [held_out(with_aca(90.0 + lr, config={"lr": lr})) for lr in (0.1, 0.2)]
    records = [*trials, with_aca(70.0, config={"lr": 0.1}), with_aca(60.0, "icarl")]
    best = {row.label: cells[0].best for row, cells in main_table(records).rows.items() if cells[0]}
    assert best == {
        "iCaRL": False,
        "MORE (lr 0.1)": True,
        "MORE (lr 0.1, held-out images)": False,
        "MORE (lr 0.2, held-out images)": False,
    }
    [note] = [note for note in notes(records) if "held-out" in note]
    assert note.startswith("Rows of held-out images are scored on training images kept from training")
    assert "<strong>70.0<i>" in report.html(records) and "<strong>90" not in report.html(records)


def test_where_all_scores_are_on_held_out_images_they_are_ranked_and_a_note_says_so() -> None:
    records = [held_out(with_aca(70.0)), held_out(with_aca(60.0, "icarl"))]
    best = {row.label: cells[0].best for row, cells in main_table(records).rows.items() if cells[0]}
    assert best == {"iCaRL": False, "MORE": True}
    assert "Scored on held-out training images, not on the test set: Digits-5T." in notes(records)
    assert not any("held-out" in note for note in notes([with_aca(70.0)]))


def test_one_method_with_both_kinds_of_scores_has_two_rows() -> None:
    record = make_record("more")
    assert list(arrange([held_out(record), record])) == [Row("more"), Row("more", held_out=True)]


GOLDEN = [with_aca(70.0, "icarl", "cifar10-5t"), *(with_aca(80.0 + 2 * s, "more", "cifar10-5t", s) for s in range(2))]
GOLDEN_MARKDOWN = """\
# Results

## Accuracy

ACA: accuracy on all classes after the last task. AIA: mean over tasks of the accuracy on the classes seen so far. \
Percent, higher is better. Mean ± sample standard deviation over n runs. In brackets: the paper.

| Method | CIFAR10-5T ACA | CIFAR10-5T AIA |
| --- | ---: | ---: |
| iCaRL | 70.00 n=1 [87.55 ± 0.99] | 75.00 n=1 [92.75 ± 1.08] |
| MORE | **81.00 ± 1.41** n=2 [89.16 ± 0.96] | **86.00 ± 1.41** n=2 [94.23 ± 0.82] |
"""
GOLDEN_LATEX = r"""
\begin{table}
  \centering
  \caption{Accuracy. ACA: accuracy on all classes after the last task. AIA: mean over tasks of the accuracy on the classes seen so far. Percent, higher is better. Mean $\pm$ sample standard deviation over n runs. In brackets: the paper.}
  \label{tab:main}
  \begin{tabular}{lrr}
    \toprule
    & \multicolumn{2}{c}{CIFAR10-5T} \\
    \cmidrule(lr){2-3}
    Method & ACA & AIA \\
    \midrule
    iCaRL & 70.00 n=1 {\scriptsize [87.55$\pm$0.99]} & 75.00 n=1 {\scriptsize [92.75$\pm$1.08]} \\
    MORE & \textbf{81.00$\pm$1.41} n=2 {\scriptsize [89.16$\pm$0.96]} & \textbf{86.00$\pm$1.41} n=2 {\scriptsize [94.23$\pm$0.82]} \\
    \bottomrule
  \end{tabular}
\end{table}
"""  # noqa: E501


def test_golden_markdown() -> None:
    assert report.markdown(GOLDEN).startswith(GOLDEN_MARKDOWN)


def test_golden_latex() -> None:
    text = report.latex(GOLDEN)
    assert GOLDEN_LATEX in text
    assert text.startswith("% Needs \\usepackage{booktabs}.\n% Numbers of the paper: ")


def test_latex_rules_and_escapes() -> None:
    records = [with_aca(70.0, "my_method"), with_aca(70.0, "my_method", "folder:50%_a&b", tasks=2)]
    text = report.latex(records)
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-5} \cmidrule(lr){6-7}" in text
    assert r"my\_method" in text
    assert r"folder:50\%\_a\&b in 2 tasks" in text


def test_markdown_escapes_pipes() -> None:
    assert r"| a\|b | " in report.markdown([with_aca(70.0, "a|b")])


def test_collect_searches_folders_and_counts_a_record_once(tmp_path: Path) -> None:
    first, second = make_record(seed=0), make_record(seed=1)
    write_record(tmp_path / "a" / "b" / "result.json", first)
    write_record(tmp_path / "c" / "result.json", second)
    write_record(tmp_path / "copy" / "result.json", first)
    write_record(tmp_path / "c" / "other.json", make_record(seed=2))
    assert report.collect([tmp_path, tmp_path / "c" / "result.json"]) == [first, second]
    assert report.collect([tmp_path / "c" / "other.json"]) == [make_record(seed=2)]


def test_collect_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no result\.json found in .*empty"):
        (tmp_path / "empty").mkdir()
        report.collect([tmp_path / "empty"])
    with pytest.raises(InputError, match=r"there is no file or folder .*nowhere"):
        report.collect([tmp_path / "nowhere"])
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        report.collect([tmp_path])


RECORDS = [make_record(name, seed=seed, tasks=3) for name in ("icarl", "more") for seed in (0, 1)]


def test_page_is_self_contained_and_well_formed() -> None:
    page = report.html([*RECORDS, make_record('<b>&"', tasks=3)])
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert "@import" not in page
    assert "url(" not in re.sub(r"url\(#", "", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    images = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(images) == 5 * 2 + 3  # five figures for two widths, a matrix for each method
    for image in images:
        root = ElementTree.fromstring(image)
        assert len(root.attrib["aria-label"]) > 30
        assert set(re.findall(r"(?:href=\"|url\()#([^\")]+)", image)) <= set(ids)
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page


def test_page_shows_the_numbers() -> None:
    page = report.html(GOLDEN)
    assert '<b>81.00</b><span class="std"> ± 1.41</span>' in page
    assert '<span class="paper">[89.16 ± 0.96]</span>' in page
    assert "3 runs of 2 methods on 1 benchmark" in page


def test_figures_are_the_same_bytes_every_time() -> None:
    for first, second in zip(drawings(RECORDS), drawings(RECORDS), strict=True):
        assert svg(first.draw(WIDE), first.title) == svg(second.draw(WIDE), second.title)


def test_figures_are_written_as_files(tmp_path: Path) -> None:
    written = report.write_figures(RECORDS, tmp_path)
    kinds = ("accuracy", "roc", "errors", "time", "entries")
    names = [f"{kind}-digits-5t-in-3-tasks" for kind in kinds]
    names += [f"matrix-digits-5t-in-3-tasks-{method}" for method in ("icarl", "more")]
    assert {path.name for path in written} == {f"{name}.{suffix}" for name in names for suffix in ("svg", "png")}
    assert set(tmp_path.iterdir()) == set(written)
    for path in written:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") if path.suffix == ".png" else b"</svg>" in data


def test_figures_cannot_be_written_in_unknown_formats_or_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown figure format 'pgn'; did you mean 'png'"):
        report.write_figures(RECORDS, tmp_path, ["pgn"])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the figure"):
        report.write_figures(RECORDS, tmp_path / "file", ["svg"])


def test_fourteen_methods_are_told_apart() -> None:
    records = [make_record(name, tasks=2) for name in METHODS if name != "single"]
    figure = drawings(records)[0].draw(WIDE)
    lines = figure.axes[0].lines
    assert len(lines) == 14
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 14
    assert len({(line.get_color(), str(line._dash_pattern)) for line in lines}) == 14


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


def test_long_labels_are_shortened_to_what_tells_rows_apart() -> None:
    grid = arrange(bag())
    labels = short_labels(grid)
    assert len(set(labels.values())) == len(grid)
    assert all(len(label) <= 40 for label in labels.values())
    assert all("held-out" in labels[row] for row in grid if row.held_out)
    long = next(row for row in grid if "label smoothing 7" in row.variant)
    assert labels[long] == "MORE (label smoothing 7, …)"
    assert short_labels([Row("more", ("lr 0.1",))]) == {Row("more", ("lr 0.1",)): "MORE (lr 0.1)"}
    assert list(short_labels([Row("more", (f"{'very ' * 9}long 7",))]).values()) == ["MORE (very very very …y long 7)"]
    assert [labels[row] for row in grid if row.held_out] == [
        "iCaRL (held-out images, …)",
        "iCaRL (held-out images, …) #2",
    ]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("records", [bag(), [make_record(name) for name in METHODS]], ids=["long", "all"])
def test_nothing_in_a_figure_covers_anything_else(records: list[Record]) -> None:
    shown: list[Drawing] = [drawing for drawing in drawings(records) if drawing.key != "matrix"]
    assert len(shown) == 5
    for drawing in shown:
        for figure in (titled(drawing), drawing.draw(NARROW)):
            renderer = FigureCanvasAgg(figure).get_renderer()
            figure.draw(renderer)
            [axes] = figure.axes
            boxes = [axes.get_tightbbox(renderer), *(legend.get_window_extent(renderer) for legend in figure.legends)]
            boxes += [text.get_window_extent(renderer) for text in figure.texts]
            for one, other in itertools.combinations([box for box in boxes if box is not None], 2):
                assert not one.overlaps(other), (drawing.key, figure.get_figwidth())
            assert axes.get_window_extent(renderer).width > 0.45 * figure.bbox.width


def test_a_single_task_without_detection_still_makes_a_page() -> None:
    record = with_aca(70.0, "ncm", "digits-5t", tasks=1, auc_per_step=[])
    assert [drawing.key for drawing in drawings([record])] == ["accuracy", "time", "entries", "matrix"]
    assert "Detection" not in report.html([record])
