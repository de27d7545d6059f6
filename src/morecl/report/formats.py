"""Reports as text: records in; Markdown, LaTeX or one HTML page out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from morecl.records import Record
from morecl.report.notes import notes
from morecl.report.paired import all_tables
from morecl.report.tables import Cell, Table


def html(records: Sequence[Record], lost: Sequence[str] = ()) -> str:
    """See :func:`morecl.report.page.html`. Imported when called: matplotlib takes half a second."""
    from morecl.report import page

    return page.html(records, lost)


def markdown(records: Sequence[Record], lost: Sequence[str] = ()) -> str:
    """All tables and notes, those on ``lost`` records first; best in bold, the paper's numbers in brackets."""
    parts = ["# Results"]
    for table in all_tables(records):
        heads = ["Method", *(f"{benchmark} {metric}" for benchmark, metric in table.heads)]
        lines = [_pipes(map(_md, heads)), _pipes(["---"] + ["---:"] * len(table.heads))]
        for row, cells in table.rows.items():
            lines.append(_pipes([_md(row.label), *(_markdown_cell(table, cell) for cell in cells)]))
        parts += [f"## {_md(table.title)}", _md(table.full_caption), "\n".join(lines)]
    found = [*lost, *notes(records)]
    if found:
        parts += ["## What to keep in mind", "\n".join(f"- {_md(note)}" for note in found)]
    return "\n\n".join(parts) + "\n"


def latex(records: Sequence[Record], lost: Sequence[str] = ()) -> str:
    """All tables as ``table`` environments (package ``booktabs``); the notes as comments at the top."""
    lines = ["% Needs \\usepackage{booktabs}.", *(f"% {_one_line(note)}" for note in (*lost, *notes(records)))]
    for table in all_tables(records):
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


DOCUMENTS: dict[str, Callable[[Sequence[Record], Sequence[str]], str]] = {"md": markdown, "latex": latex, "html": html}


def _markdown_cell(table: Table, cell: Cell | None) -> str:
    if cell is None:
        return ""
    number = f"**{cell.text()}**" if cell.best else cell.text()
    theirs = f"[{cell.paper_text()}]" if cell.paper else ""
    return " ".join(part for part in (number, table.count(cell), theirs) if part)


def _latex_cell(table: Table, cell: Cell | None) -> str:
    if cell is None:
        return ""
    number = _tex_number(cell.text("±"))
    number = f"\\textbf{{{number}}}" if cell.best else number
    theirs = f"{{\\scriptsize [{_tex_number(cell.paper_text('±'))}]}}" if cell.paper else ""
    return " ".join(part for part in (number, _tex(table.count(cell)), theirs) if part)


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_SIGNS = re.compile(r"[*`\\[\]]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word is one in Markdown, too


def _md(text: str) -> str:
    """``text`` so that Markdown shows it as it is: names of folders may hold anything."""
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(sign, entity)
    text = _one_line(text)
    return _SIGNS.sub(r"\\\g<0>", text)


_TEX = str.maketrans(
    {
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        "±": "$\\pm$",
        "†": "$\\dagger$",
        "<": "\\textless{}",
        ">": "\\textgreater{}",
        "|": "\\textbar{}",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    }
)


def _tex(text: str) -> str:
    return _one_line(text).translate(_TEX)


def _tex_number(text: str) -> str:
    """Outside a formula LaTeX prints the minus of a number as a hyphen."""
    return _tex(text).replace("-", "$-$")


def _one_line(text: str) -> str:
    """A line break in the name of a folder would end the row of a table, or a comment."""
    return " ".join(text.splitlines())
