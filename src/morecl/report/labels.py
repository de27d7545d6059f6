"""Labels for figures, which have less room than tables."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from morecl.report.grid import Row
from morecl.report.paper import method_title

LINE, LINES = 30, 2  # characters per line, lines per label
_NAME = LINE - 6  # characters of a method's name before a number


@dataclass(frozen=True)
class Labels:
    """One label per row of a figure, all different, and the sentences that complete them."""

    of: dict[Row, str]
    key: tuple[str, ...]


def figure_labels(rows: Sequence[Row]) -> Labels:
    """Name only the settings in which rows of the same method differ; number the rows whose label is still too long.

    The key says what all rows of a method share and which settings a number stands for.
    """
    shared = _shared_parts(rows)
    short = {row: _label(row, shared.get(row.method, ())) for row in rows}
    uses = Counter(short.values())
    labels: dict[Row, str] = {}
    key: list[str] = []
    for row, label in short.items():
        if wrapped(label).count("\n") >= LINES or uses[label] > 1:
            number = len(key) + 1
            name = method_title(row.method)
            labels[row] = f"{name if len(name) <= _NAME else name[: _NAME - 1] + '…'} [{number}]"
            key.append(f"[{number}] {row.label}")
        else:
            labels[row] = label
    common = [f"All rows of {method_title(method)}: {', '.join(parts)}." for method, parts in shared.items() if parts]
    return Labels(labels, (*common, *key))


def wrapped(label: str, width: int = LINE) -> str:
    """The label in lines of at most ``width`` characters."""
    return textwrap.fill(label, width, break_on_hyphens=False)


def _shared_parts(rows: Sequence[Row]) -> dict[str, tuple[str, ...]]:
    """For each method with several rows, the settings that all of them name; "held-out" is always worth naming."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row.method, []).append(row)
    return {
        method: tuple(part for part in own[0].variant if all(part in row.variant for row in own))
        for method, own in by_method.items()
        if len(own) > 1
    }


def _label(row: Row, shared: Sequence[str]) -> str:
    variant = tuple(part for part in row.variant if part not in shared)
    return Row(row.method, variant, row.held_out).label
