"""Write "Our numbers beside the paper's" in every docs/methods/*.md, and the table of docs/methods.md, from records.

python docs/method_numbers.py           write
python docs/method_numbers.py --check   list the pages that are out of date; exit code 1 if there are any
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev

from result_tables import ROOT, SHOWN, TITLES, all_runs, runs, value

from morecl.records import Record, read_record
from morecl.report.paper import AUTHORS, BENCHMARKS, OURS, PAPERS, back_update, paper_number, setting
from morecl.report.tables import OTHER_BACKBONE

PAGES = ROOT / "docs" / "methods"
OVERVIEW = ROOT / "docs" / "methods.md"
BACKBONES = {"frontier": "ViT-Ti/16, 160 px", "shipped": "included, 32 px", "smoke-digits": "included, 16 px"}
COMPARED = ("cifar10-5t", "cifar100-10t")  # in the overview
METRICS = ("aca", "aia", "auc", "iauc")
BEGIN, END = "<!-- numbers: written by docs/method_numbers.py -->", "<!-- end of numbers -->"
ROW = re.compile(r"^(\| \[.+?\]\(methods/(\w+)\.md\) \| .+? \| .+? \|).*\|$", re.MULTILINE)


def section(method: str) -> str:
    """The table of one method: mean and deviation over class orders, the paper's mean in brackets."""
    lines = [
        BEGIN,
        "## Our numbers beside the paper's",
        "",
        "Mean ± standard deviation over n class orders, 5 epochs (digits: 8); `results/README.md` says how rates",
        f"were chosen. In brackets: the MORE paper ({OTHER_BACKBONE} with its own backbone, DeiT-S/16 at 224 px,",
        "pre-trained without the classes of these benchmarks, and its own epochs), mean of five class orders. Records:",
        "`results/frontier/`, `results/shipped/`, `results/smoke-digits/`.",
        "",
        f"| benchmark | backbone | {'' if method != 'more' else 'back-update | '}n | lr | ACA | AIA | AUC | IAUC |",
        f"|---|---|---|---|---|---|---|---|{'' if method != 'more' else '---|'}",
    ]
    for names, records in _runs_of(method):
        lr = setting(records[0], "lr")
        cells = [*names, str(len(records)), "-" if lr is None else f"{lr:g}", *(_cell(records, m) for m in METRICS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, END])


def _runs_of(method: str) -> Iterator[tuple[list[str], list[Record]]]:
    """Benchmark, backbone and, of MORE, whose back-update it was; and the records."""
    variants = (method,) if method != "more" else ("more", "more-authors", "more-paper", "more-back-update")
    for folder in ("frontier", "shipped"):
        of_folder = all_runs(folder) if method == "single" else runs(folder)
        for benchmark in SHOWN:
            of_variants = [[*of_folder.get(name, {}).get(benchmark, {}).values()] for name in variants]
            by_kind = {_whose(found[0]): found for found in of_variants if found}  # those of a kind are the same runs
            for whose, found in by_kind.items():
                yield [BENCHMARKS[benchmark][0], BACKBONES[folder], *whose], found
    digits = [*map(read_record, (ROOT / "results" / "smoke-digits" / method).glob("*/result.json"))]
    if digits:
        yield ["Digits-5T", BACKBONES["smoke-digits"], *_whose(digits[0])], digits


def _whose(record: Record) -> tuple[str, ...]:
    """Whose back-update a run of MORE had; nothing for another method."""
    if record.method != "more":
        return ()
    if setting(record, "back_update") is False and back_update(record) == PAPERS:
        return ("none, as in the paper",)
    return ({PAPERS: "paper", AUTHORS: "authors' code", OURS: "ours"}[back_update(record) or ""],)


def _cell(records: Sequence[Record], metric: str) -> str:
    values = [number for record in records if (number := getattr(record.metrics, metric)) is not None]
    if not values:
        return "-"
    theirs = paper_number(records[0], metric)
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}" + (f" [{theirs[0]:.2f}{OTHER_BACKBONE}]" if theirs else "")


def overview(text: str) -> str:
    """The page with the numbers of its table's last two columns, the best method of the second first."""
    found = {name: (row, _means("frontier", name), _means("shipped", name)) for row, name in ROW.findall(text)}
    last = ("finetune", "joint", "single")

    def place(name: str) -> tuple[int, float]:
        return (last.index(name) + 1 if name in last else 0), -(found[name][2] or (0.0, 0.0))[0]

    rows = ["".join([found[name][0], *map(_pair, found[name][1:])]) for name in sorted(found, key=place)]
    matches = [*ROW.finditer(text)]
    first, last_sign = matches[0].start(), matches[-1].end()
    if len(text[first:last_sign].splitlines()) != len(rows):
        raise SystemExit(f"{OVERVIEW}: a line of the table is not a method's")
    return text[:first] + "\n".join(rows) + text[last_sign:]


def _pair(numbers: tuple[float, float] | None) -> str:
    """The cell of ACA and IAUC; empty without."""
    return " |" if numbers is None else f" {numbers[0]:.1f} / {numbers[1]:.1f} |"


def _means(folder: str, method: str) -> tuple[float, float] | None:
    """ACA and IAUC, the mean over the compared benchmarks; ``None`` if a run is missing."""
    own = runs(folder).get(method, {}) if method in TITLES else {}
    if any(len(own.get(benchmark, {})) < 3 for benchmark in COMPARED):
        return None
    aca, iauc = (mean(mean(value(r, m) for r in own[b].values()) for b in COMPARED) for m in ("aca", "iauc"))
    return aca, iauc


def pages() -> Iterator[tuple[Path, str, str]]:
    """For every page: its path, its text, and the text it should have."""
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"{path}: the marks {BEGIN} and {END} are missing")
        parts = [before.strip("\n"), section(path.stem), after.strip("\n")]
        yield path, text, "\n\n".join(part for part in parts if part) + "\n"
    text = OVERVIEW.read_text(encoding="utf-8")
    yield OVERVIEW, text, overview(text)


def main() -> int:
    stale = [(path, wanted) for path, text, wanted in pages() if text != wanted]
    for path, wanted in stale:
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv[1:]:
            path.write_text(wanted, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
