"""Write the tables of results/*.md and results/*/README.md from the records.

python docs/result_tables.py           write
python docs/result_tables.py --check   list the pages that are out of date; exit code 1 if there are any

A table stands between two marks; the first says what it shows:

    <!-- table: means FOLDER DIGITS METRIC... -->    mean over class orders: a row a method, a column a benchmark
    <!-- table: differences FOLDER METHOD -->        METHOD minus the others, and a paired t-test over class orders
    <!-- table: rates FOLDER BENCHMARK -->           ACA / AIA on held-out images, a row a method, a column a rate
    <!-- table: variants FOLDER -->                  ACA / AIA of FOLDER/STREAM/VARIANT, a row a variant
    <!-- end of table -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from morecl.catalogue import METHODS
from morecl.records import Record, read_record
from morecl.report.paired import paired_p
from morecl.report.paper import BENCHMARKS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MARK = re.compile(r"<!-- table: (.+?) -->\n.*?<!-- end of table -->", re.DOTALL)
SHOWN = ("cifar10-5t", "cifar100-10t", "cifar100-20t", "svhn-5t")
FEWER = "†"  # marks a mean over fewer class orders than others have
TITLES = {name: method.title for name, method in METHODS.items() if name != "single"} | {
    "joint": "joint training",
    "more-paper": "MORE (paper)",
}

Runs = dict[str, dict[str, Record]]  # of a method: benchmark -> folder, which names class order and seed -> record


@cache
def runs(folder: str) -> dict[str, Runs]:
    """The records of a folder, by method; those of variants other than the paper's MORE are left out."""
    found: dict[str, Runs] = {}
    for path in sorted((RESULTS / folder).glob("*/*/order-*/result.json")):
        benchmark, method, order = path.parts[-4:-1]
        if method in TITLES:
            found.setdefault(method, {}).setdefault(benchmark, {})[order] = read_record(path)
    if not found:
        raise SystemExit(f"results/{folder} has no records")
    return found


def means(folder: str, digits: str, *metrics: str) -> list[str]:
    """Best first, by the mean over the benchmarks; a method with a benchmark missing comes after those with all."""
    found = runs(folder)
    benchmarks = [name for name in SHOWN if any(name in own for own in found.values())]
    orders = max(len(own[benchmark]) for own in found.values() for benchmark in own)

    def numbers(method: str, benchmark: str) -> list[float]:
        return [mean(value(record, metric) for record in found[method][benchmark].values()) for metric in metrics]

    def best(benchmark: str) -> list[float]:
        there = [numbers(method, benchmark) for method in found if benchmark in found[method]]
        return [max(column) for column in zip(*there, strict=True)]

    def cell(method: str, benchmark: str) -> str:
        if benchmark not in found[method]:
            return "-"
        pairs = zip(numbers(method, benchmark), best(benchmark), strict=True)
        mark = f" {FEWER}" if len(found[method][benchmark]) < orders else ""
        return " / ".join(bold(f"{number:.{digits}f}", number == top) for number, top in pairs) + mark

    def rank(method: str) -> tuple[int, float]:
        first = [numbers(method, benchmark)[0] for benchmark in found[method]]
        return -len(first), -mean(first)

    rows = [[TITLES[method], *(cell(method, name) for name in benchmarks)] for method in sorted(found, key=rank)]
    fewer = any(FEWER in cell for row in rows for cell in row)
    legend = ["", f"{FEWER} fewer than {orders} class orders."] if fewer else []
    return table(["", *(BENCHMARKS[name][0] for name in benchmarks)], rows) + legend


def differences(folder: str, method: str) -> list[str]:
    """Over the class orders that both have, at least three. Those with all benchmarks first, then by name."""
    own = runs(folder)[method]
    columns = [(benchmark, metric) for benchmark in SHOWN if benchmark in own for metric in ("aca", "iauc")]

    def cell(other: str, benchmark: str, metric: str) -> str:
        theirs = runs(folder)[other].get(benchmark, {})
        both = sorted(own[benchmark].keys() & theirs.keys())
        if len(both) < 3:
            return "-"
        found = [value(own[benchmark][order], metric) - value(theirs[order], metric) for order in both]
        p = paired_p(found)
        return f"{mean(found):+.2f} ({'p < 0.001' if p < 0.001 else f'p = {p:.1g}'})"

    rows = [[TITLES[other], *(cell(other, *column) for column in columns)] for other in runs(folder) if other != method]
    rows = sorted((row for row in rows if set(row[1:]) != {"-"}), key=lambda row: (row.count("-"), row[0]))
    return table(["", *(f"{BENCHMARKS[benchmark][0]}: {metric.upper()}" for benchmark, metric in columns)], rows)


def rates(folder: str, benchmark: str) -> list[str]:
    found: dict[str, dict[float, Record]] = {}
    for path in sorted((RESULTS / folder / benchmark).glob("*/lr-*/order-*/result.json")):
        record = read_record(path)
        tried = found.setdefault(record.method, {})
        if record.config["lr"] in tried:
            raise SystemExit(f"{path}: there is another record of this method and rate")
        tried[record.config["lr"]] = record
    columns = sorted({rate for tried in found.values() for rate in tried})
    methods = [method for method in METHODS if method in found]
    rows = [[TITLES[method], *(accuracies(found[method], rate) for rate in columns)] for method in methods]
    return table(["rate", *(f"{rate:g}" for rate in columns)], rows)


def variants(folder: str) -> list[str]:
    found: dict[str, dict[str, Record]] = {}
    for path in sorted((RESULTS / folder).glob("*/*/order-*/result.json")):
        found.setdefault(path.parts[-4], {})[path.parts[-3]] = read_record(path)
    names = {name for tried in found.values() for name in tried}
    ordered = sorted(names, key=lambda name: [float(number) for number in re.findall(r"[\d.]+", name)])
    return table(["", *found], [[name, *(accuracies(tried, name) for tried in found.values())] for name in ordered])


def accuracies(tried: Mapping[Any, Record], key: Any) -> str:
    """ACA / AIA, bold if it is the best of those tried; nothing if there is no record."""
    if key not in tried:
        return ""
    own, best = tried[key].metrics, max(record.metrics.aca for record in tried.values())
    return f"{bold(f'{own.aca:.2f}', own.aca == best)} / {own.aia:.2f}"


def value(record: Record, metric: str) -> float:
    return float(getattr(record.metrics, metric))


def bold(text: str, condition: bool) -> str:
    return f"**{text}**" if condition else text


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["|".join(["", *(f" {cell} " if cell else " " for cell in line), ""]) for line in lines]


def pages() -> Iterator[tuple[Path, str, str]]:
    """For every page: its path, its text, and the text it should have."""
    kinds: dict[str, Callable[..., list[str]]] = {
        "means": means,
        "differences": differences,
        "rates": rates,
        "variants": variants,
    }

    def written(match: re.Match[str]) -> str:
        if match[0].count("<!-- table:") > 1:
            raise SystemExit(f"{match[1]}: the end of the table is missing")
        kind, *arguments = match[1].split()
        return "\n".join([f"<!-- table: {match[1]} -->", *kinds[kind](*arguments), "<!-- end of table -->"])

    for path in sorted([*RESULTS.glob("*.md"), *RESULTS.glob("*/README.md")]):
        text = path.read_text(encoding="utf-8")
        yield path, text, MARK.sub(written, text)


def main() -> int:
    stale = [(path, wanted) for path, text, wanted in pages() if text != wanted]
    for path, wanted in stale:
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv[1:]:
            path.write_text(wanted, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
