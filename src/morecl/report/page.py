"""The HTML report: one page with its style and figures inside; nothing outside it is read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template

from morecl.records import Record
from morecl.report.figures import NARROW, WIDE, Drawing, drawings, inline_svg
from morecl.report.tables import Cell, Table, arrange, build_tables, columns_of, notes, stages


def html(records: Sequence[Record]) -> str:
    """The page. It follows the reader's light or dark mode and has figures for wide and for narrow windows."""
    tables = build_tables(records)
    by_benchmark: dict[str, list[Drawing]] = {}
    for drawing in drawings(records):
        by_benchmark.setdefault(drawing.column.label, []).append(drawing)
    numbers = itertools.count()
    figures = [_benchmark(name, shown, numbers) for name, shown in by_benchmark.items()]
    links = [(f"table-{table.key}", table.title) for table in tables] + [(_anchor(name), name) for name in by_benchmark]
    template = files("morecl.report").joinpath("templates/report.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        lead=escape(_lead(records)),
        cards="".join(_cards(tables, "main", "ACA", "accuracy after the last task"))
        + "".join(_cards(tables, "ood", "AUC", "detection of unknown classes")),
        links="".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name in links),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes(records)),
        tables="".join(_table(table) for table in tables),
        figures="".join(figures),
    )


def _lead(records: Sequence[Record]) -> str:
    grid = arrange(records)
    minutes = sum(sum(stages(record).values()) for record in records) / 60
    spent = f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:.1f} minutes"
    methods, benchmarks = {row.method for row in grid}, columns_of(grid)
    backbones = ", ".join(sorted({record.backbone.name for record in records}))
    counts = [(len(records), "run"), (len(methods), "method"), (len(benchmarks), "benchmark")]
    runs, of, on = (f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts)
    return f"{runs} of {of} on {on}; backbone {backbones}; {spent} of computing."


def _cards(tables: Sequence[Table], key: str, metric: str, words: str) -> Iterator[str]:
    """The best method of each benchmark by one metric."""
    for table in tables:
        for index, head in enumerate(table.heads):
            ranked = [(cell, row) for row, cells in table.rows.items() if row.competes and (cell := cells[index])]
            if table.key != key or head[1] != metric or head[0] == "Average" or not ranked:
                continue
            cell, row = max(ranked, key=lambda pair: pair[0].mean)
            theirs = f"; paper {cell.paper_text()}" if cell.paper else ""
            yield (
                f'<div class="card"><span>{escape(head[0])}</span><strong>{cell.mean:.1f}<i>%</i></strong>'
                f"<em>{escape(row.label)}</em><small>best {words} ({metric}{theirs})</small></div>"
            )


def _table(table: Table) -> str:
    names = "".join(f'<th colspan="{width}" scope="colgroup">{escape(name)}</th>' for name, width in table.groups)
    starts = {0, *itertools.accumulate(width for _, width in table.groups)}
    heads = "".join(
        f'<th scope="col"{_first(index, starts)}>{escape(metric)}</th>' for index, (_, metric) in enumerate(table.heads)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(row.label)}</th>'
        + "".join(f"<td{_first(index, starts)}>{_cell(table, cell)}</td>" for index, cell in enumerate(cells))
        + "</tr>"
        for row, cells in table.rows.items()
    )
    title = escape(table.title)
    return (
        f'<section id="table-{table.key}"><h2>{title}</h2><p>{escape(table.full_caption)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {title}"><table><thead><tr><td></td>{names}'
        f'</tr><tr><th scope="col">Method</th>{heads}</tr></thead><tbody>{body}</tbody></table></div></section>'
    )


def _first(index: int, starts: set[int]) -> str:
    return ' class="first"' if index in starts else ""


def _cell(table: Table, cell: Cell | None) -> str:
    if cell is None:
        return '<span class="none">–</span>'
    mean, _, deviation = cell.text("|").partition("|")
    number = f"<b>{mean}</b>" if cell.best else mean
    small = f'<span class="std"> ± {deviation}</span>' if deviation else ""
    count = f'<span class="std"> {table.count(cell)}</span>' if table.count(cell) else ""
    theirs = f'<span class="paper">[{cell.paper_text()}]</span>' if cell.paper else ""
    return number + small + count + theirs


def _benchmark(name: str, shown: Sequence[Drawing], numbers: Iterator[int]) -> str:
    """All figures of a benchmark; the accuracy matrices side by side at the end."""
    large = [_figure(drawing, numbers) for drawing in shown if drawing.key != "matrix"]
    small = [_figure(drawing, numbers) for drawing in shown if drawing.key == "matrix"]
    return (
        f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{"".join(large)}<h3>Accuracy matrices</h3>'
        f"<p>Row: after which task. Column: on the images of which task. Percent, the task not told.</p>"
        f'<div class="grid">{"".join(small)}</div></section>'
    )


def _figure(drawing: Drawing, numbers: Iterator[int]) -> str:
    sizes = {"": NARROW} if drawing.key == "matrix" else {"wide": WIDE, "narrow": NARROW}
    images = [
        f'<div class="drawing {size}">{inline_svg(drawing.draw(width), drawing.alt, f"f{next(numbers)}")}</div>'
        for size, width in sizes.items()
    ]
    return f"<figure><figcaption>{escape(drawing.title)}</figcaption>{''.join(images)}</figure>"


def _anchor(name: str) -> str:
    return "figures-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
