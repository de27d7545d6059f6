"""Write the section "Our numbers beside the paper's" of every docs/methods/*.md from the records in results/.

python docs/method_numbers.py           write
python docs/method_numbers.py --check   list the pages that are out of date; exit code 1 if there are any
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from morecl.records import Record
from morecl.report.collect import collect
from morecl.report.paper import BENCHMARKS, paper_number, setting

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "methods"
SOURCES = ("all-methods", "smoke-digits")  # folders of results/ with records of every method
METRICS = ("aca", "aia", "auc", "iauc")
BEGIN, END = "<!-- numbers: written by docs/method_numbers.py -->", "<!-- end of numbers -->"


def section(method: str, records: list[Record]) -> str:
    """The table of one method: our value, the paper's in brackets."""
    own = sorted((r for r in records if r.method == method), key=lambda r: list(BENCHMARKS).index(r.benchmark))
    lines = [
        BEGIN,
        "## Our numbers beside the paper's",
        "",
        "One run each, class order 0. In brackets: the MORE paper with its own backbone (DeiT-S/16 at 224 px,",
        "pre-trained without the classes of these benchmarks) and epochs, mean over five class orders. Records:",
        f"{' and '.join(f'`results/{source}/`' for source in SOURCES)}.",
        "",
        "| benchmark | backbone | epochs | lr | ACA | AIA | AUC | IAUC |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in own:
        epochs, lr = ("-" if (value := setting(record, key)) is None else f"{value:g}" for key in ("epochs", "lr"))
        backbone = f"{record.backbone.name}, {setting(record, 'image_size')} px"
        cells = [BENCHMARKS[record.benchmark][0], backbone, epochs, lr, *(_cell(record, metric) for metric in METRICS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, END])


def _cell(record: Record, metric: str) -> str:
    value, theirs = getattr(record.metrics, metric), paper_number(record, metric)
    return "-" if value is None else f"{value:.2f}" + (f" [{theirs[0]:.2f}]" if theirs else "")


def pages() -> Iterator[tuple[Path, str, str]]:
    """For every page: its path, its text, and the text it should have."""
    records = collect([ROOT / "results" / source for source in SOURCES])
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"{path}: the marks {BEGIN} and {END} are missing")
        parts = [before.strip("\n"), section(path.stem, records), after.strip("\n")]
        yield path, text, "\n\n".join(part for part in parts if part) + "\n"


def main() -> int:
    stale = [(path, wanted) for path, text, wanted in pages() if text != wanted]
    for path, wanted in stale:
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv[1:]:
            path.write_text(wanted, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
