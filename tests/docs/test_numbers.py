"""Numbers in the overview of the methods and in the results' summaries are means of the committed records."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr, ttest_rel

from morecl.catalogue import METHODS
from morecl.records import Record, read_record

ROOT = Path(__file__).resolve().parents[2]
TITLES = {method.title.partition(" ")[0]: name for name, method in METHODS.items()}


@pytest.fixture(scope="module")
def records() -> dict[str, list[Record]]:
    found = [read_record(path) for path in sorted((ROOT / "results" / "all-methods").rglob("result.json"))]
    return {name: [record for record in found if record.method == name] for name in METHODS}


def averages(records: list[Record], *metrics: str) -> list[float]:
    assert len(records) == 2
    return [mean(getattr(record.metrics, metric) for record in records) for metric in metrics]


def test_the_overview_has_the_means_of_the_records() -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.+?\]\(methods/(\w+)\.md\) \| .+? \| .+? \| ?(.*?) \| ?(.*?) \|$", text, re.MULTILINE)
    assert {name for name, *_ in rows} == METHODS.keys()
    for name, *cells in rows:
        for folder, cell in zip(("frontier", "shipped"), cells, strict=True):
            by_benchmark = [by_order(folder, name, benchmark) for benchmark in BENCHMARKS[:2]]
            complete = name != "single" and all({*found} >= {*ORDERS[folder]} for found in by_benchmark)
            assert bool(cell) == complete, (name, folder)
            if cell:
                expected = [
                    mean(getattr(found[order].metrics, metric) for found in by_benchmark for order in ORDERS[folder])
                    for metric in ("aca", "iauc")
                ]
                numbers = [float(number) for number in cell.split(" / ")]
                assert numbers == pytest.approx(expected, abs=0.051), (name, folder)


def test_the_summary_of_all_methods_has_the_means_of_the_records(records: dict[str, list[Record]]) -> None:
    text = (ROOT / "results" / "all-methods" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w+-]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert {TITLES[title] for title, *_ in rows} == {name for name in METHODS if records[name]} - {"single"}
    for title, *cells in rows:
        expected = averages(records[TITLES[title]], "aca", "aia", "iauc")
        assert [float(cell) for cell in cells] == pytest.approx(expected, abs=0.0051)


BENCHMARKS = ("cifar10-5t", "cifar100-10t", "cifar100-20t", "svhn-5t")
TINY = ("tinyimagenet-5t", "tinyimagenet-10t")
# the class orders that every method has
ORDERS = {"frontier": tuple("012"), "shipped": tuple("01234"), "tinyimagenet88": tuple("01234")}


def table(text: str, head: str) -> list[list[str]]:
    """The rows of the table whose head is ``head``, or comes right below it."""
    lines = [line for line in text.partition(head)[2].splitlines() if not line.startswith("<!--")][2:]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    assert rows
    return rows


def records_of(folder: str, title: str, benchmark: str) -> list[Record]:
    # MORE of the recipes has no back-update on Tiny-ImageNet, as in the paper
    name = "more" if title == "MORE (paper)" and benchmark in TINY else folder_of(title)
    found = map(read_record, (ROOT / "results" / folder / benchmark / name).glob("*/result.json"))
    return [record for record in found if record.class_order_name in ORDERS[folder]]


@pytest.mark.parametrize(
    ("file", "head", "folder", "metrics", "close"),
    [
        ("README.md", "<!-- table: means frontier 1 aca iauc -->\n", "frontier", ("aca", "iauc"), 0.051),
        ("README.md", "<!-- table: means shipped 1 aca iauc -->\n", "shipped", ("aca", "iauc"), 0.051),
        (
            "frontier/README.md",
            "<!-- table: spreads frontier aca aia iauc -->\n",
            "frontier",
            ("aca", "aia", "iauc"),
            0.0051,
        ),
        (
            "shipped/README.md",
            "<!-- table: spreads shipped aca aia iauc -->\n",
            "shipped",
            ("aca", "aia", "iauc"),
            0.0051,
        ),
    ],
)
def test_the_tables_of_benchmarks_have_the_means_of_the_records(
    file: str, head: str, folder: str, metrics: tuple[str, ...], close: float
) -> None:
    found = set()
    shown = {"frontier": (*BENCHMARKS[:3], *TINY), "shipped": BENCHMARKS}[folder]
    for title, *cells in table((ROOT / "results" / file).read_text(encoding="utf-8"), head):
        for benchmark, cell in zip(shown, cells, strict=True):
            own = records_of(folder, title, benchmark)
            assert bool(own) == (cell != "-"), (title, benchmark)
            assert ("†" in cell) == (0 < len({record.class_order_name for record in own}) < len(ORDERS[folder])), (
                title,
                benchmark,
            )
            if own:
                values = [[getattr(record.metrics, metric) for record in own] for metric in metrics]
                expected = [mean(numbers) for numbers in values]
                if "spreads" in head and len(own) > 1:
                    expected = [number for numbers in values for number in (mean(numbers), np.std(numbers, ddof=1))]
                numbers = [float(number) for number in re.findall(r"[\d.]+", cell)]
                assert numbers == pytest.approx(expected, abs=close), (title, benchmark)
                found.add((folder_of(title), benchmark))
    shown_folders = METHODS.keys() - {"single"} | {"more-paper", "more-authors", "more-back-update"}
    folders = [path for name in shown for path in (ROOT / "results" / folder / name).iterdir()]
    folders = [path for path in folders if path.name in shown_folders]
    wanted = {(path.name, path.parent.name) for path in folders}
    assert found == wanted | ({("more-paper", name) for name in TINY} if folder == "frontier" else set())


@pytest.mark.parametrize("file", ["README.md", "frontier/README.md", "shipped/README.md"])
def test_the_best_are_bold_and_those_equal_to_them_as_printed(file: str) -> None:
    text = (ROOT / "results" / file).read_text(encoding="utf-8")
    tables = re.findall(r"<!-- table: (?:means|spreads) .+? -->\n\|.+\n\|.+\n((?:\|.+\n)+)", text)
    assert len(tables) == (2 if file == "README.md" else 1)
    for rows in tables:
        cells = [[cell.strip() for cell in row.strip("|").split("|")[1:]] for row in rows.splitlines()]
        for column in zip(*cells, strict=True):
            for numbers in zip(*(cell.split(" / ") for cell in column if cell != "-"), strict=True):
                means = [number.partition(" ±")[0] for number in numbers]
                best = max(float(number.strip("*")) for number in means)
                assert [number.startswith("**") for number in means] == [float(n.strip("*")) == best for n in means]


def test_the_table_beside_the_authors_code_is_that_of_both_records() -> None:
    """Their numbers follow from their matrices, and the difference is tested as it says."""
    folder = ROOT / "results" / "unseen-orders"
    text = (folder / "README.md").read_text(encoding="utf-8")
    ours, theirs = [], []
    for run in json.loads((folder / "authors.json").read_text(encoding="utf-8"))["runs"]:
        name = f"order-random-seed-{run['seed']}"
        record = read_record(folder / "cifar10-5t-1k" / "more" / name / "result.json")
        assert record.class_order == run["class_order"] and record.config["preset"] is None
        per_step = [mean(row) for row in run["accuracy_matrix"]]
        assert run["aca_per_step"] == pytest.approx(per_step, abs=1e-3)
        theirs.append((per_step[-1], mean(per_step), mean(run["auc_per_step"])))
        ours.append((record.metrics.aca, record.metrics.aia, record.metrics.iauc))
        cells = [" / ".join(f"**{value:.2f}**" for value in ours[-1]), " / ".join(f"{v:.2f}" for v in theirs[-1])]
        order = ", ".join(map(str, run["class_order"]))
        assert f"| seed {run['seed']}: {order} | {cells[0]} | {cells[1]} |" in text
    assert (np.array(ours) > np.array(theirs)).all() and len(ours) == 3
    means = [np.mean(values, axis=0) for values in (ours, theirs)]
    cells = [" / ".join(f"**{value:.2f}**" for value in means[0]), " / ".join(f"{value:.2f}" for value in means[1])]
    assert f"| mean | {cells[0]} | {cells[1]} |" in text
    tests = ttest_rel(ours, theirs).pvalue
    said = [f"{change:.1f} (p = {p:.1g})" for change, p in zip(means[0] - means[1], tests, strict=True)]
    assert f"| difference, paired t-test | | {' / '.join(said)} |" in text


def test_what_the_back_update_adds_on_tiny_imagenet88() -> None:
    text = " ".join((ROOT / "results" / "tinyimagenet88" / "README.md").read_text(encoding="utf-8").split())
    folder = ROOT / "results" / "tinyimagenet88" / "tinyimagenet88-8t"

    def of(name: str, metric: str) -> list[float]:
        return [getattr(read_record(p).metrics, metric) for p in sorted((folder / name).glob("*/result.json"))]

    more, without = ({m: of(name, m) for m in ("aca", "iauc")} for name in ("more", "more-no-back-update"))
    gain = {metric: mean(more[metric]) - mean(without[metric]) for metric in more}
    p = {metric: ttest_rel(more[metric], without[metric]).pvalue for metric in more}
    assert p["aca"] < 0.001
    numbers = f"{mean(more['aca']):.1f}, {mean(without['aca']):.1f} without it, p < 0.001"
    assert (
        f"adds {gain['aca']:.1f} points of ACA ({numbers}) and {gain['iauc']:.1f} of IAUC (p = {p['iauc']:.1g};" in text
    )


def test_the_main_page_has_the_means_of_the_records() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    head = next(line for line in text.splitlines() if line.startswith("| | MORE-RP | joint training"))
    titles = [cell.strip() for cell in head.strip("|").split("|")[1:]]
    sources = {
        "CIFAR100-10T": ("frontier", "cifar100-10t"),
        "CIFAR10-5T": ("frontier", "cifar10-5t"),
        "CIFAR100-10T, [included backbone](results/shipped/README.md)": ("shipped", "cifar100-10t"),
        "SVHN-5T, included backbone": ("shipped", "svhn-5t"),
        "[88 classes of Tiny-ImageNet](results/tinyimagenet88/README.md), included backbone": (
            "tinyimagenet88",
            "tinyimagenet88-8t",
        ),
    }
    source, shown = ("", ""), set()
    for label, *cells in table(text, head):
        metric = "iauc" if label.startswith("unknown classes") else "aca"
        source = sources[label] if metric == "aca" else source
        shown.add(source)
        for title, cell in zip(titles, cells, strict=True):
            expected = mean(getattr(record.metrics, metric) for record in records_of(source[0], title, source[1]))
            assert float(cell) == pytest.approx(expected, abs=0.051), (label, title)
    assert shown == {*sources.values()}


def test_the_tables_of_rates_have_the_numbers_of_the_records() -> None:
    for folder in ("frontier-rates", "strong-rates", "shipped-rates"):
        text = (ROOT / "results" / folder / "README.md").read_text(encoding="utf-8")
        for benchmark in BENCHMARKS:
            _, there, part = text.partition(f"\n## {benchmark.upper()}\n")
            paths = sorted((ROOT / "results" / folder / benchmark).glob("*/lr-*/order-*/result.json"))
            assert bool(there) == bool(paths), (folder, benchmark)
            if not there:
                continue
            head = next(line for line in part.splitlines() if line.startswith("| rate |"))
            rates = [float(cell) for cell in head.strip("|").split("|")[1:]]
            rows = {name: cells for name, *cells in table(part, head)}
            for path in paths:
                record = read_record(path)
                (title,) = [title for title in rows if folder_of(title) == path.parts[-4]]
                cell = rows[title][rates.index(record.config["lr"])]
                found = [float(number) for number in re.findall(r"[\d.]+", cell)]
                assert found == pytest.approx([record.metrics.aca, record.metrics.aia], abs=0.0051), (folder, path)
            assert sum(cell != "" for cells in rows.values() for cell in cells) == len(paths)


def test_the_tables_are_up_to_date() -> None:
    command = [sys.executable, "docs/result_tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"run docs/result_tables.py; out of date: {done.stdout}{done.stderr}"


def paper_numbers(condition: str, metric: str, benchmark: str) -> dict[str, list[float]]:
    """The paper's numbers by title, MORE as MORE (paper)."""
    text = (ROOT / "src" / "morecl" / "assets" / "paper_tables.json").read_text(encoding="utf-8")
    found = json.loads(text)["numbers"][condition][metric][benchmark]
    return {"MORE (paper)" if name == "more" else METHODS[name].title: pair for name, pair in found.items()}


@pytest.mark.parametrize("metric", ["aca", "iauc", "auc"])
def test_the_ranks_beside_the_paper_are_those_of_the_records(metric: str) -> None:
    text = (ROOT / "results" / "shipped" / "README.md").read_text(encoding="utf-8")
    *rows, (_, *correlations) = table(text, f"<!-- table: ranks shipped {metric} -->\n")
    assert len(rows) >= 9
    for place, benchmark in enumerate(BENCHMARKS[:3]):
        theirs = paper_numbers("main", metric, benchmark)
        ours = {row[0]: mean_of("shipped", folder_of(row[0]), benchmark, metric) for row in rows}
        pairs = [(ours[row[0]], theirs[row[0]][0]) for row in rows]
        for row, pair in zip(rows, pairs, strict=True):
            found = re.findall(r"([\d.]+) \((\d+)\)", row[1 + place])
            assert [float(number) for number, _ in found] == pytest.approx(pair, abs=0.051), (row[0], benchmark)
            better = [sum(other[side] > pair[side] for other in pairs) for side in (0, 1)]
            assert [int(rank) for _, rank in found] == [count + 1 for count in better], (row[0], benchmark)
        same = spearmanr(*(rankdata(side) for side in zip(*pairs, strict=True)))
        correlation, p = re.fullmatch(r"(\S+) \(p = (\S+)\)", correlations[place]).groups()  # type: ignore[union-attr]
        assert float(correlation) == pytest.approx(same.statistic, abs=0.0051)
        assert float(p) == pytest.approx(same.pvalue, rel=0.5)


def test_the_tables_of_variants_have_the_numbers_of_the_records() -> None:
    text = (ROOT / "results" / "shipped" / "README.md").read_text(encoding="utf-8")
    folders = ["more", "more-no-coefficient", "more-authors", "more-paper", "more-paper-no-coefficient"]
    folders += ["more-no-back-update", "more-no-back-update-no-coefficient"]
    rows = table(text, "<!-- table: ablation shipped -->\n")
    for folder, (title, *cells) in zip(folders, rows, strict=True):
        for benchmark, cell in zip(BENCHMARKS[:3], cells, strict=True):
            numbers = [float(number) for number in re.findall(r"[\d.]+", cell)]
            expected = [mean_of("shipped", folder, benchmark, name) for name in ("aca", "aia", "errors_to_earlier")]
            assert numbers == pytest.approx(expected, abs=0.51), title
            assert numbers[:2] == pytest.approx(expected[:2], abs=0.051), title


@pytest.mark.parametrize("metric", ["aca", "aia"])
def test_what_half_the_memory_changes_is_that_of_the_records(metric: str) -> None:
    text = (ROOT / "results" / "shipped" / "README.md").read_text(encoding="utf-8")
    for title, *cells in table(text, f"<!-- table: halved shipped {metric} -->\n"):
        folder = folder_of(title)
        half = "more-half-memory-paper" if folder == "more-paper" else f"{folder}-half-memory"
        for benchmark, cell in zip(BENCHMARKS, cells, strict=True):
            check_change(cell, half, folder, benchmark, metric)
            if "/" in cell:
                there = [paper_numbers(name, metric, benchmark)[title][0] for name in ("half_memory", "main")]
                assert float(cell.split()[-1]) == pytest.approx(there[0] - there[1], abs=0.051), (title, benchmark)


def check_change(text: str, name: str, other: str, benchmark: str, metric: str) -> None:
    """``+1.2 (p = 0.03)`` and what follows: ``name`` minus ``other`` over all class orders."""
    pairs = [
        [getattr(by_order("shipped", folder, benchmark)[order].metrics, metric) for order in ORDERS["shipped"]]
        for folder in (name, other)
    ]
    change, p = re.match(r"([+-][\d.]+) \(p ([=<] [\d.]+)\)", text).groups()  # type: ignore[union-attr]
    assert float(change) == pytest.approx(mean(pairs[0]) - mean(pairs[1]), abs=0.051), (name, benchmark)
    found = ttest_rel(*pairs).pvalue
    assert found < 0.001 if p == "< 0.001" else float(p.split()[1]) == pytest.approx(found, rel=0.5), (name, benchmark)


def test_the_gains_of_the_back_updates_are_those_of_the_records() -> None:
    text = (ROOT / "results" / "shipped" / "README.md").read_text(encoding="utf-8")
    *rows, (label, *theirs) = table(text, "<!-- table: gains shipped -->\n")
    assert label == "in the paper" and theirs == ["- / +0.4", "- / +0.9", "+4.3 / +0.8"]  # AIA 94.23 - 93.86, ...
    assert len(rows) == 3
    for title, *cells in rows:
        for benchmark, cell in zip(BENCHMARKS[:3], cells, strict=True):
            for metric, part in zip(("aca", "aia"), cell.split(" / "), strict=True):
                check_change(part, folder_of(title), "more-no-back-update", benchmark, metric)


def test_the_parts_of_the_back_update_are_those_of_the_records() -> None:
    text = (ROOT / "results" / "shipped" / "README.md").read_text(encoding="utf-8")
    rows = table(text, "<!-- table: parts back-update-parts shipped -->\n")
    names = ["more-no-momentum", "more-from-trained", "more-balanced-draw", "more-first-features"]
    sources = [("shipped", "more-paper"), *(("back-update-parts", name) for name in names), ("shipped", "more-authors")]
    for (folder, name), (_, *cells) in zip(sources, rows, strict=True):
        for benchmark, cell in zip(("cifar100-10t", "cifar100-20t"), cells, strict=True):
            own, theirs = by_order(folder, name, benchmark), by_order("shipped", "more-paper", benchmark)
            aca, early = (mean(getattr(own[k].metrics, m) for k in "012") for m in ("aca", "errors_to_earlier"))
            assert float(cell.split(",")[0]) == pytest.approx(aca, abs=0.051), name
            assert float(cell.split(", ")[-1].rstrip(" %")) == pytest.approx(early, abs=0.51), name
            if name != "more-paper":
                pairs = [[runs[k].metrics.aca for k in "012"] for runs in (own, theirs)]
                change, p = re.findall(r"[+-]?[\d.]+", cell)[1:3]
                assert float(change) == pytest.approx(mean(pairs[0]) - mean(pairs[1]), abs=0.051), name
                assert float(p) == pytest.approx(max(0.001, ttest_rel(*pairs).pvalue), rel=0.5), name


def test_the_reductions_are_those_of_the_records() -> None:
    text = (ROOT / "results" / "shipped" / "README.md").read_text(encoding="utf-8")
    rows = table(text, "<!-- table: reductions shipped -->\n")
    assert len(rows) == 12
    for title, *cells in rows:
        for benchmark, cell in zip(BENCHMARKS, cells, strict=True):
            runs, theirs = (by_order("shipped", name, benchmark) for name in (folder_of(title), "more-paper"))
            lost, learned = [], []
            for order in ORDERS["shipped"]:
                matrix = np.array(runs[order].accuracy_matrix, dtype=float)
                lost.append(float((np.diag(matrix) - matrix[-1])[:-1].mean()))
                learned.append(float(np.diag(matrix)[:-1].mean()))
            numbers = [float(number) for number in re.findall(r"[\d.]+", cell)]
            expected = [mean(lost), float(np.std(lost, ddof=1)), mean(learned)]
            assert [*numbers[:2], numbers[-1]] == pytest.approx(expected, abs=0.051), (title, benchmark)
            if title != "MORE (paper)":
                p = ttest_rel(lost, [theirs[order].metrics.reduction_rate for order in ORDERS["shipped"]]).pvalue
                assert p < 0.001 if "p < 0.001" in cell else numbers[2] == pytest.approx(p, rel=0.5), (title, benchmark)


@pytest.mark.parametrize("folder", ["frontier", "shipped"])
def test_the_differences_are_those_of_the_records(folder: str) -> None:
    text = (ROOT / "results" / folder / "README.md").read_text(encoding="utf-8")
    (head,) = [line for line in text.splitlines() if line.startswith("| | CIFAR10-5T: ACA")]
    heads = (cell.strip().lower() for cell in head.strip("|").split("|")[1:])
    columns = [cell.replace("t-imagenet", "tinyimagenet").split(": ") for cell in heads]
    checked = 0
    for title, *cells in table(text, head):
        for (benchmark, metric), cell in zip(columns, cells, strict=True):
            if cell == "-":
                continue
            other = "more" if title == "MORE (paper)" and benchmark in TINY else folder_of(title)
            ours, theirs = (by_order(folder, name, benchmark) for name in ("morerp", other))
            pairs = [
                [getattr(runs[order].metrics, metric) for order in ORDERS[folder] if order in theirs]
                for runs in (ours, theirs)
            ]
            assert float(cell.split()[0]) == pytest.approx(mean(pairs[0]) - mean(pairs[1]), abs=0.0051), title
            p = ttest_rel(*pairs).pvalue
            assert p < 0.001 if "p < 0.001" in cell else float(cell.split()[-1][:-1]) == pytest.approx(p, rel=0.5)
            checked += 1
    assert checked > 40


def test_the_table_of_transfer_has_the_numbers_of_the_records() -> None:
    text = (ROOT / "results" / "shipped" / "README.md").read_text(encoding="utf-8")
    alone = by_order("shipped", "single", "cifar100-10t")
    rows = table(text, "<!-- table: transfer shipped cifar100-10t -->\n")
    assert [title for title, *_ in rows] == ["iCaRL", "PASS", "MORE (paper)", "DER++"]
    for title, ours, paper_s in rows:
        found: dict[str, list[float]] = {"fwt": [], "bwt": []}
        runs = by_order("shipped", folder_of(title), "cifar100-10t")
        for order in runs.keys() & alone.keys():
            record = runs[order]
            matrix = np.array(record.accuracy_matrix, dtype=float)
            own = np.diag(matrix)
            found["bwt"].append(float((matrix[-1] - own)[:-1].mean()))
            found["fwt"].append(float((own - np.diag(np.array(alone[order].til_matrix, dtype=float))).mean()))
        assert [float(number) for number in ours.split(" / ")] == pytest.approx(
            [mean(found["fwt"]), mean(found["bwt"])], abs=0.051
        ), title
        there = [paper_numbers("main", metric, "cifar100-10t")[title][0] for metric in ("fwt", "bwt")]
        assert [float(number) for number in paper_s.split(" / ")] == pytest.approx(there, abs=0.051), title


def folder_of(title: str) -> str:
    named = {"joint training": "joint", "MORE (paper)": "more-paper", "MORE (authors' code)": "more-authors"}
    named["MORE, with back-update"] = "more-back-update"
    return named.get(title) or TITLES[title]


def by_order(folder: str, name: str, benchmark: str) -> dict[str, Record]:
    paths = (ROOT / "results" / folder / benchmark / name).glob("*/result.json")
    return {record.class_order_name: record for record in map(read_record, paths)}


def mean_of(folder: str, name: str, benchmark: str, metric: str) -> float:
    runs = by_order(folder, name, benchmark)
    return mean(getattr(runs[order].metrics, metric) for order in ORDERS[folder])


def test_the_row_of_digits_has_the_numbers_of_the_records() -> None:
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    head = next(line for line in text.splitlines() if line.startswith("| | MORE-RP | joint | SLDA"))
    names = [cell.strip() for cell in head.strip("|").split("|")[1:]]
    (row,) = table(text, head)
    for titles, cell in zip(names, row[1:], strict=True):
        for title in titles.split(", "):
            path = ROOT / "results" / "smoke-digits" / TITLES.get(title, title)
            (record,) = [read_record(file) for file in path.rglob("result.json")]
            assert float(cell) == pytest.approx(record.metrics.aca, abs=0.051), title


def test_the_tables_of_unequal_tasks_have_the_numbers_of_the_records() -> None:
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    head = "| | MORE-RP | RanPAC | EEIL | MORE | SLDA |"
    rows = table(text, head)
    assert len(rows) == 3
    for name, *cells in rows:
        benchmark = name.split("`")[1]
        for title, cell in zip(head.strip("|").split("|")[1:], cells, strict=True):
            assert float(cell) == pytest.approx(aca_of("unequal-cifar100", benchmark, title), abs=0.051)

    text = (ROOT / "results" / "unequal-digits" / "README.md").read_text(encoding="utf-8")
    rows = table(text, "| | Digits-5T (`smoke-digits/`) | unequal | one by one |")
    assert len(rows) == 6
    for title, equal, unequal, single in rows:
        assert float(equal) == pytest.approx(aca_of("smoke-digits", "", title), abs=0.0051)
        assert float(unequal) == pytest.approx(aca_of("unequal-digits", "digits-unequal", title), abs=0.0051)
        assert float(single) == pytest.approx(aca_of("unequal-digits", "digits-one-by-one", title), abs=0.0051)


def aca_of(folder: str, benchmark: str, title: str) -> float:
    """The ACA of the only run of a method."""
    path = ROOT / "results" / folder / benchmark / TITLES[title.split()[0]]
    (file,) = path.rglob("result.json")
    return read_record(file).metrics.aca
