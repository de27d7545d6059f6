"""Half the memory, ablations and all classes at once: in tables of their own."""

from __future__ import annotations

import re
from typing import Any

from morecl.records import Record
from morecl.report.figures import drawings
from morecl.report.formats import html
from morecl.report.grid import arrange
from morecl.report.notes import notes
from morecl.report.paired import all_tables
from morecl.report.parts import split
from morecl.report.tables import Table, build_tables
from synthetic import make_record

METHODS = ("icarl", "eeil", "gd")
SWITCHES = [{"back_update": b, "coefficient": c} for b, c in [(True, True), (False, True), (True, False)]]


def more(switches: dict[str, bool], **changes: Any) -> Record:
    return make_record("more", "svhn-5t", config=switches, **changes)


def of_size(size: int, **changes: Any) -> list[Record]:
    return [make_record(method, "svhn-5t", config={"memory_size": size}, **changes) for method in METHODS]


def labels(table: Table) -> list[str]:
    return [row.label for row in table.rows]


def by_key(records: list[Record]) -> dict[str, Table]:
    return {table.key: table for table in build_tables(records)}


def test_half_the_memory_stands_apart() -> None:
    tables = by_key([*of_size(200), *of_size(100, level=95.0)])
    assert labels(tables["main"]) == ["iCaRL", "EEIL", "GD"]
    assert labels(tables["main-half"]) == ["iCaRL (half memory)", "EEIL (half memory)", "GD (half memory)"]
    assert tables["main-half"].title == "Accuracy, half the memory"
    assert any(cell and cell.best for cells in tables["main"].rows.values() for cell in cells)
    assert "ood-half" in tables and "cost-half" not in tables


def test_an_ablation_stands_apart_beside_its_whole_method() -> None:
    none = more({"back_update": False, "coefficient": False})
    tables = by_key([*of_size(200), *(more(switches) for switches in SWITCHES), none])
    whole = "MORE"
    assert labels(tables["main"]) == ["iCaRL", "EEIL", "GD", whole]
    shown = [whole, "MORE (no back update)", "MORE (no coefficient)", "MORE (no back update, no coefficient)"]
    for key in ("main-ablation", "ood-ablation", "errors-ablation"):
        assert labels(tables[key]) == shown


def test_an_ablation_has_the_benchmarks_where_something_was_left_out() -> None:
    elsewhere = [make_record(method, "mnist-5t") for method in (*METHODS, "more")]
    none = more({"back_update": False, "coefficient": False})
    tables = by_key([*of_size(200), *(more(switches) for switches in SWITCHES), none, *elsewhere])
    assert [name for name, _ in tables["main"].groups] == ["SVHN-5T", "MNIST-5T", "Average"]
    assert [name for name, _ in tables["main-ablation"].groups] == ["SVHN-5T"]


def test_too_few_rows_are_not_set_apart() -> None:
    two = of_size(100)[:2]
    assert [part.key for part in split(arrange([*of_size(200), *two]))[1]] == []
    alone = [more(switches) for switches in SWITCHES] + [more({"back_update": False, "coefficient": False})]
    assert [table.key for table in build_tables(alone) if table.key.startswith("main")] == ["main"]
    half_only, parts = split(arrange(of_size(100)))
    assert len(half_only) == 3 and parts == []


def test_all_classes_at_once_stand_apart_from_tasks() -> None:
    at_once = [make_record(method, "svhn-5t", tasks=1, level=95.0) for method in ("ncm", "csc")]
    tables = by_key([make_record("ncm", "svhn-5t"), make_record("csc", "svhn-5t"), *at_once])
    assert tables["main"].groups == [("SVHN-5T", 2)]
    assert tables["main-once"].heads == [("SVHN-5T in 1 task", "ACA")]
    assert tables["main-once"].title == "Accuracy, all classes in one task"
    assert [table.key for table in build_tables(at_once) if table.key.startswith("main")] == ["main"]


def test_the_best_is_sought_among_those_that_learn_in_tasks() -> None:
    seeds = range(3)
    streams = [make_record(m, "svhn-5t", n, level=v) for n in seeds for m, v in [("ncm", 50.0), ("morerp", 70.0)]]
    once = [make_record("ncm", "svhn-5t", n, tasks=1, level=99.0) for n in seeds]
    titles = [table.title for table in all_tables([*streams, *once])]
    assert "MORE-RP against the others" in titles


def test_the_page_shows_every_part_and_draws_the_main_one() -> None:
    records = [*of_size(200), *of_size(100), make_record("ncm", "svhn-5t", tasks=1)]
    page = re.sub(r"\s+", " ", html(records))
    for title in ("Accuracy, half the memory", "Accuracy, all classes in one task"):
        assert title in page
    assert {drawing.column.label for drawing in drawings(records)} == {"SVHN-5T"}
    assert not any("half" in drawing.title for drawing in drawings(records))


def test_a_note_says_what_half_the_memory_is_where_the_paper_has_none() -> None:
    told = "The paper gives no memory size for SVHN-5T; half memory is half the recipe's."
    assert told in notes([*of_size(200), *of_size(100), make_record("ncm", "svhn-5t", tasks=1)])
    assert told not in notes(of_size(200))


def test_half_the_memory_has_no_number_of_the_paper_where_that_gives_no_size() -> None:
    assert any(cell.paper for cell in by_key([make_record("derpp", "svhn-5t")])["main"].rows.popitem()[1] if cell)
    half = make_record("derpp", "svhn-5t", config={"memory_size": 100})
    assert not any(cell.paper for cell in by_key([half])["main"].rows.popitem()[1] if cell)
