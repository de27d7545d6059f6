"""Write the tables of results/*.md and results/*/README.md from the records.

python docs/result_tables.py           write
python docs/result_tables.py --check   list the pages that are out of date; exit code 1 if there are any

A table stands between two marks; the first says what it shows:

    <!-- table: means FOLDER DIGITS METRIC... -->    mean over class orders: a row a method, a column a benchmark
    <!-- table: spreads FOLDER METRIC... -->         the same with standard deviations
    <!-- table: differences FOLDER METHOD -->        METHOD minus the others, and a paired t-test over class orders
    <!-- table: ranks FOLDER METRIC -->              ours / the paper's, each with its rank
    <!-- table: halved FOLDER METRIC -->             what half the memory changes, tested, and in the paper
    <!-- table: ablation FOLDER -->                  MORE without its parts: ACA / AIA, and errors towards earlier tasks
    <!-- table: gains FOLDER -->                     what each back-update adds to MORE without one, and in the paper
    <!-- table: parts FOLDER WHOLE -->               the paper's back-update with one part of its authors' code's
    <!-- table: transfer FOLDER BENCHMARK -->        FWT / BWT, ours and the paper's
    <!-- table: reductions FOLDER -->                what a task loses until the end, and what was learned of it
    <!-- table: rates FOLDER BENCHMARK -->           ACA / AIA on held-out images, a row a method, a column a rate
    <!-- table: beside FOLDER OTHER -->              the same for the methods that both folders have, a row a folder
    <!-- table: variants FOLDER -->                  ACA / AIA of FOLDER/STREAM/VARIANT, a row a variant
    <!-- end of table -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import rankdata, spearmanr

from morecl.catalogue import METHODS
from morecl.records import Record, read_record
from morecl.report.paired import paired_p
from morecl.report.paper import BENCHMARKS, PAPERS, back_update, paper
from morecl.report.transfer import with_fwt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MARK = re.compile(r"<!-- table: (.+?) -->\n.*?<!-- end of table -->", re.DOTALL)
SHOWN = (
    "cifar10-5t",
    "cifar100-10t",
    "cifar100-20t",
    "svhn-5t",
    "tinyimagenet-5t",
    "tinyimagenet-10t",
    "tinyimagenet88-8t",
)
FEWER = "†"  # marks a mean over fewer class orders than others have
TITLES = {name: method.title for name, method in METHODS.items() if name != "single"} | {
    "joint": "joint training",
    "more-paper": "MORE (paper)",
    "more-authors": "MORE (authors' code)",
    "more-back-update": "MORE, with back-update",
}
HALF = {"more-paper": "more-half-memory-paper"}  # folders of runs with half the memory that are not NAME-half-memory
ABLATION = {
    "more": "MORE",
    "more-no-coefficient": "without coefficient",
    "more-authors": "MORE (authors' code)",
    "more-paper": "MORE (paper)",
    "more-paper-no-coefficient": "MORE (paper) without coefficient",
    "more-no-back-update": "without back-update",
    "more-no-back-update-no-coefficient": "without either",
}
PARTS = {  # of the authors' back-update, in place of the paper's
    "more-no-momentum": "without momentum",
    "more-from-trained": "from the trained head",
    "more-balanced-draw": "even draw",
    "more-first-features": "first network's features",
}

Runs = dict[str, dict[str, Record]]  # of a method: benchmark -> folder, which names class order and seed -> record


@cache
def runs(folder: str) -> dict[str, Runs]:
    """The records of a folder, by method; those of variants other than MORE's back-updates are left out.

    Of each benchmark only the class orders that all methods have which have three or more; of the others, those of
    these that they have. A benchmark of which most methods have fewer than three is left out: it is not complete yet.
    Where the paper has no back-update, MORE without one is the paper's, too.
    """
    found = {name: dict(own) for name, own in all_runs(folder).items() if name in TITLES}
    for benchmark, records in found.get("more", {}).items():
        if "more-paper" in found and all(back_update(record) == PAPERS for record in records.values()):
            found["more-paper"].setdefault(benchmark, records)
    shared: dict[str, set[str]] = {}
    for benchmark in SHOWN:
        there = [own[benchmark].keys() for own in found.values() if benchmark in own]
        whole = [orders for orders in there if len(orders) >= 3]
        if 2 * len(whole) <= len(there):
            continue
        shared[benchmark] = set.intersection(*map(set, whole))
        if len(shared[benchmark]) < 3:
            raise SystemExit(f"results/{folder}: methods on {benchmark} share fewer than 3 class orders")
    kept: dict[str, Runs] = {}
    for name, own in found.items():
        for benchmark, orders in shared.items():
            records = {order: record for order, record in own.get(benchmark, {}).items() if order in orders}
            if records:
                kept.setdefault(name, {})[benchmark] = records
    return kept


@cache
def all_runs(folder: str) -> dict[str, Runs]:
    """The records of a folder, by method and variant."""
    found: dict[str, Runs] = {}
    for path in sorted((RESULTS / folder).glob("*/*/order-*/result.json")):
        benchmark, method, order = path.parts[-4:-1]
        found.setdefault(method, {}).setdefault(benchmark, {})[order] = read_record(path)
    if not found:
        raise SystemExit(f"results/{folder} has no records")
    return found


def means(folder: str, digits: str, *metrics: str) -> list[str]:
    """Best first, by the mean over the benchmarks; a method with a benchmark missing comes after those with all."""
    return overview(folder, int(digits), metrics, spread=False)


def spreads(folder: str, *metrics: str) -> list[str]:
    """As :func:`means`, with the standard deviation over class orders."""
    return overview(folder, 2, metrics, spread=True)


def overview(folder: str, digits: int, metrics: Sequence[str], *, spread: bool) -> list[str]:
    found = runs(folder)
    benchmarks = [name for name in SHOWN if any(name in own for own in found.values())]
    orders = max(len(own[benchmark]) for own in found.values() for benchmark in own)

    def numbers(method: str, benchmark: str) -> list[float]:
        return [mean(value(record, metric) for record in found[method][benchmark].values()) for metric in metrics]

    def best(benchmark: str) -> list[float]:
        """Of the methods that have all class orders."""
        whole = [method for method in found if len(found[method].get(benchmark, ())) == orders]
        return [max(column) for column in zip(*(numbers(method, benchmark) for method in whole), strict=True)]

    def cell(method: str, benchmark: str) -> str:
        if benchmark not in found[method]:
            return "-"
        own = found[method][benchmark].values()
        mark = f" {FEWER}" if len(own) < orders else ""
        cells = []
        for metric, number, top in zip(metrics, numbers(method, benchmark), best(benchmark), strict=True):
            around = f" ± {stdev(value(r, metric) for r in own):.{digits}f}" if spread and len(own) > 1 else ""
            shown = f"{number:.{digits}f}"
            cells.append(bold(shown, shown == f"{top:.{digits}f}") + around)  # equal as printed, equally good
        return " / ".join(cells) + mark

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
        return tested([value(own[benchmark][order], metric) - value(theirs[order], metric) for order in both], 2)

    rows = [[TITLES[other], *(cell(other, *column) for column in columns)] for other in runs(folder) if other != method]
    rows = sorted((row for row in rows if set(row[1:]) != {"-"}), key=lambda row: (row.count("-"), row[0]))
    return table(["", *(f"{BENCHMARKS[benchmark][0]}: {metric.upper()}" for benchmark, metric in columns)], rows)


def ranks(folder: str, metric: str) -> list[str]:
    """The paper's methods, MORE with the paper's back-update; below, Spearman's correlation of the two orders."""
    others = {name: own for name, own in runs(folder).items() if name not in ("more", "more-authors")}
    found = {("more" if name == "more-paper" else name): own for name, own in others.items()}
    theirs = paper()["numbers"]["main"][metric]
    measured = {benchmark for own in found.values() for benchmark in own}
    # of SVHN-5T the paper has three numbers
    benchmarks = [name for name in SHOWN if name in measured and len(theirs.get(name, ())) > 3]
    columns: dict[str, dict[str, str]] = {}
    below: list[str] = []
    for benchmark in benchmarks:
        both = [name for name in theirs[benchmark] if benchmark in found.get(name, {})]
        ours = {name: mean(value(record, metric) for record in found[name][benchmark].values()) for name in both}
        paper_s = {name: theirs[benchmark][name][0] for name in both}
        first, second = ranking(ours), ranking(paper_s)
        columns[benchmark] = {
            name: f"{ours[name]:.1f} ({first[name]}) / {paper_s[name]:.1f} ({second[name]})" for name in both
        }
        same = spearmanr([ours[name] for name in both], [paper_s[name] for name in both])
        below.append(f"{same.statistic:.2f} (p = {same.pvalue:.1g})")
    compared = {name for column in columns.values() for name in column}
    methods = sorted(compared, key=lambda name: (-theirs[benchmarks[0]][name][0], name))
    rows = [
        [TITLES["more-paper" if name == "more" else name], *(columns[b].get(name, "-") for b in benchmarks)]
        for name in methods
    ]
    heads = ["", *(BENCHMARKS[name][0] for name in benchmarks)]
    return table(heads, [*rows, ["correlation of the ranks", *below]])


def ranking(numbers: Mapping[str, float]) -> dict[str, int]:
    """1 for the highest; equal ones share the better rank."""
    places = rankdata([-number for number in numbers.values()], method="min")
    return {name: int(place) for name, place in zip(numbers, places, strict=True)}


def halved(folder: str, metric: str) -> list[str]:
    """Half the memory minus the whole, over the class orders that both have, at least three; behind it, the paper."""
    found, numbers = all_runs(folder), paper()["numbers"]
    benchmarks = [name for name in SHOWN if any(name in own for own in found.values())]

    def cell(method: str, benchmark: str) -> str:
        whole, half = (found.get(name, {}).get(benchmark, {}) for name in (method, half_of(method)))
        both = sorted(whole.keys() & half.keys())
        if len(both) < 3:
            return "-"
        own = [value(half[order], metric) - value(whole[order], metric) for order in both]
        name = {"more": None, "more-paper": "more"}.get(method, method)
        pair = [numbers[condition][metric].get(benchmark, {}).get(name) for condition in ("half_memory", "main")]
        theirs = f" / {pair[0][0] - pair[1][0]:+.1f}" if pair[0] and pair[1] else ""
        return f"{tested(own, 1)}{theirs}"

    methods = [name for name in TITLES if half_of(name) in found]
    rows = [[TITLES[name], *(cell(name, benchmark) for benchmark in benchmarks)] for name in methods]
    return table(["", *(BENCHMARKS[name][0] for name in benchmarks)], rows)


def half_of(method: str) -> str:
    return HALF.get(method, f"{method}-half-memory")


def ablation(folder: str) -> list[str]:
    """The mean over the class orders that all variants have."""
    found = {name: all_runs(folder)[name] for name in ABLATION}
    benchmarks = [name for name in SHOWN if all(name in own for own in found.values())]
    orders = {name: sorted(set.intersection(*(set(own[name]) for own in found.values()))) for name in benchmarks}

    def cell(name: str, benchmark: str) -> str:
        own = [found[name][benchmark][order] for order in orders[benchmark]]
        aca, aia, early = (mean(value(r, metric) for r in own) for metric in ("aca", "aia", "errors_to_earlier"))
        return f"{aca:.1f} / {aia:.1f}, {early:.0f} %"

    rows = [[title, *(cell(name, benchmark) for benchmark in benchmarks)] for name, title in ABLATION.items()]
    return table(["", *(BENCHMARKS[name][0] for name in benchmarks)], rows)


def gains(folder: str) -> list[str]:
    """ACA and AIA with a back-update minus those without, over the class orders that both have; below, the paper's."""
    without, numbers = all_runs(folder)["more-no-back-update"], paper()["numbers"]
    benchmarks = [name for name in SHOWN if name in without]

    def cell(name: str, benchmark: str) -> str:
        own = all_runs(folder)[name][benchmark]
        both = sorted(own.keys() & without[benchmark].keys())
        changes = ([value(own[k], m) - value(without[benchmark][k], m) for k in both] for m in ("aca", "aia"))
        return " / ".join(tested(change, 1) for change in changes)

    def theirs(benchmark: str) -> str:
        pairs = (
            [
                numbers[condition].get(metric, {}).get(benchmark, {}).get("more")
                for condition in ("main", "no_back_update")
            ]
            for metric in ("aca", "aia")
        )
        return " / ".join(f"{whole[0] - less[0]:+.1f}" if whole and less else "-" for whole, less in pairs)

    rows = [[TITLES[n], *(cell(n, name) for name in benchmarks)] for n in ("more-paper", "more-authors", "more")]
    heads = ["", *(BENCHMARKS[name][0] for name in benchmarks)]
    return table(heads, [*rows, ["in the paper", *map(theirs, benchmarks)]])


def parts(folder: str, whole: str) -> list[str]:
    """ACA, minus that of the paper's back-update, and the share of errors to earlier tasks; class orders of FOLDER."""
    found = all_runs(folder)
    benchmarks = [name for name in SHOWN if all(name in own for own in found.values())]
    orders = {name: sorted(set.intersection(*(set(own[name]) for own in found.values()))) for name in benchmarks}
    text, code = (all_runs(whole)[name] for name in ("more-paper", "more-authors"))

    def cell(own: Runs, benchmark: str) -> str:
        records = [own[benchmark][order] for order in orders[benchmark]]
        aca, early = (mean(value(record, metric) for record in records) for metric in ("aca", "errors_to_earlier"))
        minus = [value(own[benchmark][k], "aca") - value(text[benchmark][k], "aca") for k in orders[benchmark]]
        change = f", {tested(minus, 1)}" if own is not text else ""
        return f"{aca:.1f}{change}, {early:.0f} %"

    rows = {TITLES["more-paper"]: text, **{title: found[name] for name, title in PARTS.items()}}
    rows[TITLES["more-authors"]] = code
    return table(
        ["", *(BENCHMARKS[name][0] for name in benchmarks)],
        [[title, *(cell(own, name) for name in benchmarks)] for title, own in rows.items()],
    )


def reductions(folder: str) -> list[str]:
    """The reduction with its deviation / the accuracy right after learning, both over all tasks but the last.

    The methods of the paper and our other MOREs, the smallest mean first; in brackets a test against MORE (paper).
    """
    names = {"more-paper" if name == "more" else name for name in paper()["numbers"]["main"]["aca"]["cifar10-5t"]}
    found = {name: all_runs(folder)[name] for name in sorted(names | {"more", "more-authors"})}
    benchmarks = [name for name in SHOWN if all(name in own for own in found.values())]

    def reduction(name: str, benchmark: str) -> dict[str, float]:
        return {order: value(record, "reduction_rate") for order, record in found[name][benchmark].items()}

    def learned(record: Record) -> float:
        return mean(float(row[task] or 0.0) for task, row in enumerate(record.accuracy_matrix[:-1]))

    def cell(name: str, benchmark: str) -> str:
        own, other = reduction(name, benchmark), reduction("more-paper", benchmark)
        p = "" if name == "more-paper" else f" ({p_text(paired_p([own[k] - other[k] for k in own if k in other]))})"
        first = mean(map(learned, found[name][benchmark].values()))
        return f"{mean(own.values()):.1f} ± {stdev(own.values()):.1f}{p} / {first:.1f}"

    ordered = sorted(found, key=lambda name: mean(mean(reduction(name, b).values()) for b in benchmarks))
    rows = [[TITLES[name], *(cell(name, benchmark) for benchmark in benchmarks)] for name in ordered]
    return table(["", *(BENCHMARKS[name][0] for name in benchmarks)], rows)


def transfer(folder: str, benchmark: str) -> list[str]:
    """The methods of which the paper has both, its best BWT first; MORE with the paper's back-update."""
    theirs = {metric: paper()["numbers"]["main"][metric][benchmark] for metric in ("fwt", "bwt")}
    alone = all_runs(folder)["single"][benchmark]
    rows = []
    for name in sorted(theirs["bwt"], key=lambda name: -theirs["bwt"][name][0]):
        variant = "more-paper" if name == "more" else name
        own = [record for order, record in all_runs(folder)[variant][benchmark].items() if order in alone]
        found = with_fwt([*alone.values(), *own])[len(alone) :]
        ours = " / ".join(f"{mean(value(record, metric) for record in found):.1f}" for metric in theirs)
        rows.append([TITLES[variant], ours, " / ".join(f"{numbers[name][0]:.1f}" for numbers in theirs.values())])
    return table(["", "FWT / BWT", "in the paper"], rows)


def tried_rates(folder: str, benchmark: str) -> dict[str, dict[float, Record]]:
    """The records of a search by method and rate."""
    found: dict[str, dict[float, Record]] = {}
    for path in sorted((RESULTS / folder / benchmark).glob("*/lr-*/order-*/result.json")):
        record = read_record(path)
        tried = found.setdefault(path.parts[-4], {})
        if record.config["lr"] in tried:
            raise SystemExit(f"{path}: there is another record of this method and rate")
        tried[record.config["lr"]] = record
    return found


def rates(folder: str, benchmark: str) -> list[str]:
    found = tried_rates(folder, benchmark)
    columns = sorted({rate for tried in found.values() for rate in tried})
    methods = [method for method in TITLES if method in found]
    rows = [[TITLES[method], *(accuracies(found[method], rate) for rate in columns)] for method in methods]
    return table(["rate", *(f"{rate:g}" for rate in columns)], rows)


def beside(folder: str, other: str) -> list[str]:
    rows: dict[str, dict[float, Record]] = {}
    for benchmark in SHOWN:
        found = {name: tried_rates(name, benchmark) for name in (folder, other)}
        for method in (name for name in TITLES if all(name in tried for tried in found.values())):
            for name, tried in found.items():
                rows[f"{TITLES[method]}, {BENCHMARKS[benchmark][0]}, `{name}`"] = tried[method]
    columns = sorted({rate for tried in rows.values() for rate in tried})
    cells = [[label, *(accuracies(tried, rate) for rate in columns)] for label, tried in rows.items()]
    return table(["", *(f"{rate:g}" for rate in columns)], cells)


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
    return f"{bold(f'{own.aca:.2f}', f'{own.aca:.2f}' == f'{best:.2f}')} / {own.aia:.2f}"


def tested(changes: Sequence[float], digits: int) -> str:
    """Their mean, and the paired t-test against 0."""
    return f"{mean(changes):+.{digits}f} ({p_text(paired_p(changes))})"


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.1g}"


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
        "spreads": spreads,
        "differences": differences,
        "ranks": ranks,
        "halved": halved,
        "ablation": ablation,
        "gains": gains,
        "parts": parts,
        "reductions": reductions,
        "transfer": transfer,
        "rates": rates,
        "beside": beside,
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
