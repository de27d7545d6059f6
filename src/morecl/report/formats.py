"""Reports: records in; Markdown, LaTeX or one HTML page out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from morecl.errors import InputError
from morecl.records import Record, read_record
from morecl.report.tables import Cell, Table, build_tables, notes

__all__ = ["FORMATS", "collect", "html", "latex", "markdown", "write_figures"]

RECORD_NAME = "result.json"


def collect(paths: Sequence[Path]) -> list[Record]:
    """Records of the files and, at any depth, of the folders given; the same record counts once."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found |= dict.fromkeys(sorted(inner.resolve() for inner in path.rglob(RECORD_NAME)))
        elif path.exists():
            found[path.resolve()] = None
        else:
            raise InputError(f"there is no file or folder {path}; give a {RECORD_NAME} or a folder that holds some")
    if not found:
        places = ", ".join(str(path) for path in paths) or "nothing"
        raise InputError(f"no {RECORD_NAME} found in {places}; a finished run leaves one in its folder")
    records: list[Record] = []
    for path in found:
        record = read_record(path)
        if record not in records:
            records.append(record)
    return records


def html(records: Sequence[Record]) -> str:
    """See :func:`morecl.report.page.html`. Imported when called: matplotlib takes half a second."""
    from morecl.report import page

    return page.html(records)


def write_figures(records: Sequence[Record], folder: Path, formats: Sequence[str] | None = None) -> list[Path]:
    """See :func:`morecl.report.figures.write_figures`."""
    from morecl.report import figures

    return figures.write_figures(records, folder, figures.FORMATS if formats is None else formats)


def markdown(records: Sequence[Record]) -> str:
    """All tables and notes; best in bold, the paper's numbers in brackets."""
    parts = ["# Results"]
    for table in build_tables(records):
        heads = ["Method", *(f"{benchmark} {metric}" for benchmark, metric in table.heads)]
        lines = [_pipes(heads), _pipes(["---"] + ["---:"] * len(table.heads))]
        for row, cells in table.rows.items():
            lines.append(_pipes([row.label, *(_markdown_cell(table, cell) for cell in cells)]))
        parts += [f"## {table.title}", table.full_caption, "\n".join(lines)]
    found = notes(records)
    if found:
        parts += ["## What to keep in mind", "\n".join(f"- {note}" for note in found)]
    return "\n\n".join(parts) + "\n"


def latex(records: Sequence[Record]) -> str:
    """All tables as ``table`` environments (package ``booktabs``); the notes as comments at the top."""
    lines = ["% Needs \\usepackage{booktabs}.", *(f"% {note}" for note in notes(records))]
    for table in build_tables(records):
        names = " & ".join(f"\\multicolumn{{{width}}}{{c}}{{{_tex(name)}}}" for name, width in table.groups)
        ends = list(itertools.accumulate((width for _, width in table.groups), initial=1))
        rules = " ".join(f"\\cmidrule(lr){{{start + 1}-{end}}}" for start, end in itertools.pairwise(ends))
        lines += [
            "",
            "\\begin{table}",
            "  \\centering",
            f"  \\caption{{{_tex(table.title)}. {_tex(table.full_caption)}}}",
            f"  \\label{{tab:{table.key}}}",
            f"  \\begin{{tabular}}{{l{'r' * len(table.heads)}}}",
            "    \\toprule",
            f"    & {names} \\\\",
            f"    {rules}",
            f"    Method & {' & '.join(_tex(metric) for _, metric in table.heads)} \\\\",
            "    \\midrule",
        ]
        for row, cells in table.rows.items():
            lines.append(f"    {' & '.join([_tex(row.label), *(_latex_cell(table, cell) for cell in cells)])} \\\\")
        lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


FORMATS: dict[str, Callable[[Sequence[Record]], str]] = {"md": markdown, "latex": latex, "html": html}


def _markdown_cell(table: Table, cell: Cell | None) -> str:
    if cell is None:
        return ""
    number = f"**{cell.text()}**" if cell.best else cell.text()
    theirs = f"[{cell.paper_text()}]" if cell.paper else ""
    return " ".join(part for part in (number, table.count(cell), theirs) if part)


def _latex_cell(table: Table, cell: Cell | None) -> str:
    if cell is None:
        return ""
    sign = "$\\pm$"
    number = cell.text(sign)
    number = f"\\textbf{{{number}}}" if cell.best else number
    theirs = f"{{\\scriptsize [{cell.paper_text(sign)}]}}" if cell.paper else ""
    return " ".join(part for part in (number, table.count(cell), theirs) if part)


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_TEX = str.maketrans(
    {
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        "±": "$\\pm$",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    }
)


def _tex(text: str) -> str:
    return text.translate(_TEX)
