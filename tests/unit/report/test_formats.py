"""Markdown and LaTeX, letter by letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from morecl.report.collect import collect
from morecl.report.formats import latex, markdown
from synthetic import held_out, with_aca

RESULTS = Path(__file__).resolve().parents[3] / "results"

GOLDEN = [with_aca(70.0, "icarl", "cifar10-5t"), *(with_aca(80.0 + 2 * s, "more", "cifar10-5t", s) for s in range(2))]


GOLDEN_MARKDOWN = """\
# Results

## Accuracy

ACA: accuracy on all classes after the last task. AIA: accuracy on the classes seen so far, averaged over tasks. \
Percent, higher is better. Mean ± sample standard deviation over n runs. \
In brackets: the paper; † with its own backbone (DeiT-S/16 pre-trained on 611 ImageNet classes), not this one.

| Method | CIFAR10-5T ACA | CIFAR10-5T AIA |
| --- | ---: | ---: |
| iCaRL | 70.00 n=1 [87.55 ± 0.99†] | 75.00 n=1 [92.75 ± 1.08†] |
| MORE | **81.00 ± 1.41** n=2 [89.16 ± 0.96†] | **86.00 ± 1.41** n=2 [94.23 ± 0.82†] |
"""


GOLDEN_LATEX = r"""
\begin{table}
  \centering
  \caption{Accuracy. ACA: accuracy on all classes after the last task. AIA: accuracy on the classes seen so far, averaged over tasks. Percent, higher is better. Mean $\pm$ sample standard deviation over n runs. In brackets: the paper; $\dagger$ with its own backbone (DeiT-S/16 pre-trained on 611 ImageNet classes), not this one.}
  \label{tab:main}
  \begin{tabular}{lrr}
    \toprule
    & \multicolumn{2}{c}{CIFAR10-5T} \\
    \cmidrule(lr){2-3}
    Method & ACA & AIA \\
    \midrule
    iCaRL & 70.00 n=1 {\scriptsize [87.55$\pm$0.99$\dagger$]} & 75.00 n=1 {\scriptsize [92.75$\pm$1.08$\dagger$]} \\
    MORE & \textbf{81.00$\pm$1.41} n=2 {\scriptsize [89.16$\pm$0.96$\dagger$]} & \textbf{86.00$\pm$1.41} n=2 {\scriptsize [94.23$\pm$0.82$\dagger$]} \\
    \bottomrule
  \end{tabular}
\end{table}
"""  # noqa: E501


def test_golden_markdown() -> None:
    assert markdown(GOLDEN).startswith(GOLDEN_MARKDOWN)


def test_golden_latex() -> None:
    text = latex(GOLDEN)
    assert GOLDEN_LATEX in text
    assert text.startswith("% Needs \\usepackage{booktabs}.\n% Numbers of the paper: ")


def test_latex_rules_and_escapes() -> None:
    records = [with_aca(70.0, "my_method"), with_aca(70.0, "my_method", "folder:50%_a&b", tasks=2)]
    text = latex(records)
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-5} \cmidrule(lr){6-7}" in text
    assert r"my\_method" in text
    assert r"folder:50\%\_a\&b in 2 tasks" in text
    broken = latex([held_out(with_aca(70.0, "more", "folder:a<b>|c\nd", tasks=2))])
    assert r"folder:a\textless{}b\textgreater{}\textbar{}c d in 2 tasks" in broken
    assert "\n% Scored on held-out training images, not on the test set: folder:a<b>|c d in 2 tasks.\n" in broken


def test_signs_in_cells_of_latex_are_printed_as_such() -> None:
    means = {"icarl": 20.0, "more": 70.0, "joint": 90.0}
    text = latex([with_aca(mean + seed, method, seed=seed) for method, mean in means.items() for seed in range(3)])
    assert r"iCaRL & +50.00$\pm$0.00 p \textless{} 0.001 \\" in text
    assert r"Joint & $-$20.00$\pm$0.00 p \textless{} 0.001 \\" in text


def test_markdown_escapes_pipes() -> None:
    assert r"| a\|b | " in markdown([with_aca(70.0, "a|b")])


def test_a_name_is_neither_a_link_nor_several_lines_in_markdown() -> None:
    text = markdown([with_aca(70.0, "more", "folder:[x](y)\nz", tasks=2)])
    assert r"| Method | folder:\[x\](y) z in 2 tasks ACA |" in text


def test_without_a_row_that_has_all_benchmarks_there_is_no_average() -> None:
    text = markdown([with_aca(70.0, "more"), with_aca(70.0, "icarl", "cifar10-5t")])
    assert "Average" not in text and "Average ACA" in markdown([with_aca(70.0), with_aca(70.0, "more", "cifar10-5t")])


def test_markdown_shows_names_as_they_are() -> None:
    text = markdown([with_aca(70.0, "more", "folder:my photos <b> & *x* `y` _z_ a_b c\\d", tasks=2)])
    shown = r"folder:my photos &lt;b&gt; &amp; \*x\* \`y\` \_z\_ a_b c\\d in 2 tasks"
    assert f"| Method | {shown} ACA |" in text
    assert "<b>" not in text and "p < 0.001" not in text
    record = held_out(with_aca(70.0, "more", "folder:<b>", tasks=2))
    assert "not on the test set: folder:&lt;b&gt; in 2 tasks" in markdown([record])


@pytest.mark.parametrize("folder", sorted(path.parent for path in RESULTS.glob("*/table.md")), ids=lambda p: p.name)
def test_the_tables_in_results_are_those_of_their_records(folder: Path) -> None:
    assert (folder / "table.md").read_text(encoding="utf-8") == markdown(collect([folder]).records)
