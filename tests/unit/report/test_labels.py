"""Labels of figures: short, all different, and completed by a key."""

from __future__ import annotations

from morecl.report.grid import Row, arrange
from morecl.report.labels import LINE, LINES, figure_labels, wrapped
from synthetic import held_out, make_record


def test_short_labels_are_those_of_the_tables() -> None:
    rows = [Row("icarl"), Row("more"), Row("derpp", ("lr 0.1",)), Row("more", ("lr 0.1",), held_out=True)]
    labels = figure_labels(rows)
    assert labels.of == {row: row.label for row in rows}
    assert labels.key == ()


def test_a_setting_that_all_rows_of_a_method_share_is_named_once() -> None:
    rows = [Row("more", ("epochs 5", f"lr {rate}", "no coefficient")) for rate in (0.1, 0.2)]
    labels = figure_labels([*rows, Row("icarl", ("epochs 5",))])
    assert list(labels.of.values()) == ["MORE (lr 0.1)", "MORE (lr 0.2)", "iCaRL (epochs 5)"]
    assert labels.key == ("All rows of MORE: epochs 5, no coefficient.",)


def test_trials_of_a_search_beside_the_run_itself_keep_full_labels() -> None:
    """As ``morecl report runs`` shows them after ``morecl tune ... --out runs/tune``."""
    trials = [
        held_out(make_record(config={"lr": lr, "epochs": epochs}))
        for lr in (0.0003, 0.001, 0.003, 0.01)
        for epochs in (2, 5)
    ]
    labels = figure_labels(list(arrange([*trials, make_record(config={"lr": 0.005, "epochs": 8})])))
    assert labels.of == {row: row.label for row in labels.of}
    assert labels.key == ()
    assert "MORE (epochs 2, lr 0.0003, held-out images)" in labels.of.values()


def test_a_label_that_is_too_long_is_a_number_with_a_key() -> None:
    settings = ("back update batch size", "distillation temperature", "memory batch size", "momentum")
    rows = [Row("more", tuple(f"{name} {n}" for name in settings)) for n in range(3)]
    labels = figure_labels([Row("icarl"), *rows])
    assert list(labels.of.values()) == ["iCaRL", "MORE [1]", "MORE [2]", "MORE [3]"]
    assert labels.key == tuple(f"[{number}] {row.label}" for number, row in enumerate(rows, start=1))


def test_no_two_labels_are_the_same_and_all_fit() -> None:
    rows = [Row("more"), Row("MORE"), Row("x" * 90), Row("x" * 91), Row("a very long name " * 9)]
    labels = list(figure_labels(rows).of.values())
    assert len(set(labels)) == len(rows)
    for label in labels:
        lines = wrapped(label).splitlines()
        assert len(lines) <= LINES and all(len(line) <= LINE for line in lines)
