"""Numbers of the tables: means, deviations, the best, averages, forward transfer."""

from __future__ import annotations

import pytest

from morecl import presets
from morecl.records import Record
from morecl.report.grid import Row
from morecl.report.notes import notes
from morecl.report.tables import TABLE_KINDS, build_tables
from morecl.report.transfer import transfer_notes, with_fwt
from synthetic import main_table, make_record, with_aca


def test_seeds_and_orders_are_averaged_with_the_sample_deviation() -> None:
    records = [with_aca(value, seed=seed, device=f"cuda:{seed}") for seed, value in enumerate([70.0, 72.0, 77.0])]
    [[cell, _]] = main_table(records).rows.values()
    assert cell is not None
    assert (cell.mean, cell.n) == (73.0, 3)
    assert cell.std == pytest.approx(13**0.5)  # squares 9 + 1 + 16, over n - 1 = 2
    assert main_table(records).same_n == 3


def test_one_run_has_no_deviation() -> None:
    [[cell, _]] = main_table([with_aca(70.0)]).rows.values()
    assert cell is not None
    assert cell.std is None
    assert cell.text() == "70.00"


def test_the_caption_says_how_many_runs_there_were() -> None:
    def said(*numbers: tuple[str, int]) -> str:
        return main_table(
            [with_aca(70.0, name, seed=seed) for name, runs in numbers for seed in range(runs)]
        ).full_caption

    assert said(("more", 1)).endswith(" One run each.")
    assert said(("more", 2)).endswith(" Mean ± sample standard deviation over 2 runs each.")
    assert said(("more", 2), ("icarl", 3)).endswith(" Mean ± sample standard deviation over n runs.")


def test_best_is_bold_but_not_the_upper_bound() -> None:
    records = [with_aca(v, m) for m, v in {"icarl": 60.0, "more": 70.001, "derpp": 70.004, "joint": 90.0}.items()]
    best = {row.method: cells[0].best for row, cells in main_table(records).rows.items() if cells[0]}
    assert best == {"icarl": False, "derpp": True, "more": True, "joint": False}  # both print as 70.00


def test_lower_is_better_for_reduction() -> None:
    records = []
    for name, rate in {"icarl": 20.0, "more": 10.0}.items():
        record = make_record(name)
        numbers = record.metrics.model_copy(update={"reduction_rate": rate})
        records.append(record.model_copy(update={"metrics": numbers}))
    table = next(table for table in build_tables(records) if table.key == "tasks")
    place = table.heads.index(("Digits-5T", "Reduction"))
    assert {row.method: cells[place].best for row, cells in table.rows.items() if cells[place]} == {
        "icarl": False,
        "more": True,
    }


def test_the_average_needs_all_benchmarks() -> None:
    records = [
        with_aca(80.0, "more", "cifar10-5t"),
        with_aca(60.0, "more", "cifar100-10t", tasks=10, config={"memory_size": 2000}),
        with_aca(90.0, "icarl", "cifar10-5t"),
    ]
    table = main_table(records)
    place = table.heads.index(("Average", "ACA"))
    average = table.rows[Row("more")][place]
    assert average is not None
    assert average.mean == 70.0
    assert average.paper == (pytest.approx((89.16 + 70.23) / 2), None)
    assert table.rows[Row("icarl")][place] is None


def test_no_number_of_the_paper_stands_where_the_only_more_is_another() -> None:
    """A reader would take it for the paper's."""
    ours, theirs = (
        {name: with_aca(70.0, "more", name, tasks=tasks, config={**values, "back_update": True, "memory_size": size})
         for name, tasks, size in (("cifar10-5t", 5, 200), ("cifar100-10t", 10, 2000))}
        for values in (presets.MORE_DEFAULT, presets.MORE["paper"])
    )  # fmt: skip
    rivals = [
        with_aca(60.0, "gd", "cifar10-5t", config={"memory_size": 200}),
        with_aca(60.0, "gd", "cifar100-10t", tasks=10, config={"memory_size": 2000}),
    ]

    def shown(*more: Record) -> dict[str, bool]:
        table = main_table([*rivals, *more])
        return {head: bool(cell and cell.paper) for (head, metric), cell in zip(
            table.heads, table.rows[Row("gd")], strict=True) if metric == "ACA"}  # fmt: skip

    assert shown() == {"CIFAR10-5T": True, "CIFAR100-10T": True, "Average": True}
    assert shown(*ours.values()) == {"CIFAR10-5T": False, "CIFAR100-10T": False, "Average": False}
    both = shown(*ours.values(), theirs["cifar10-5t"])
    assert both == {"CIFAR10-5T": True, "CIFAR100-10T": False, "Average": False}
    assert all(shown(*ours.values(), *theirs.values()).values()) and all(shown(*theirs.values()).values())
    without = [r.model_copy(update={"config": r.config | {"back_update": False}}) for r in ours.values()]
    assert all(shown(*without).values())  # an ablation, which the paper has, too
    assert not any(shown(*ours.values(), *without).values())
    assert all(shown(*ours.values(), *theirs.values(), *without).values())


def test_forward_transfer_joins_the_single_task_model() -> None:
    records = [
        make_record("more"),
        make_record("single"),
        make_record("icarl", class_order=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]),
    ]
    more, _, icarl = with_fwt(records)
    diagonal = [row[i] for i, row in enumerate(records[0].accuracy_matrix)]
    assert more.metrics.fwt == pytest.approx(sum(value - 95 for value in diagonal if value) / 5)
    assert icarl.metrics.fwt is None  # another class order
    assert "Transfer" in [table.title for table in build_tables(records)]
    assert "Transfer" not in [table.title for table in build_tables([make_record("more")])]


def test_references_of_several_seeds_are_averaged() -> None:
    """Models of single tasks reach 95 with seed 0 and 85 with seed 1."""
    record = make_record("more")
    references = [make_record("single"), make_record("single", seed=1, level=70.0)]
    diagonal = [row[i] for i, row in enumerate(record.accuracy_matrix)]
    filled = with_fwt([record, *references])
    assert filled[0].metrics.fwt == pytest.approx(sum(value - 90 for value in diagonal if value) / 5)
    assert [each.metrics.fwt for each in filled[1:]] == [None, None]  # nothing to compare them with


def test_forward_transfer_that_a_record_has_stays() -> None:
    record = make_record("more")
    record = record.model_copy(update={"metrics": record.metrics.model_copy(update={"fwt": -1.5})})
    assert with_fwt([record, make_record("single")])[0].metrics.fwt == -1.5


def test_a_reference_on_other_images_gives_no_forward_transfer() -> None:
    single = make_record("single")
    for change in ({"fingerprint": "f" * 64}, {"scored_on": "validation"}):
        other = single.model_copy(update={"data": single.data.model_copy(update=change)})
        assert with_fwt([make_record("more"), other])[0].metrics.fwt is None


def test_a_reference_with_another_network_gives_no_forward_transfer() -> None:
    """Wider adapters, or a backbone that was trained; a method without adapters is compared with any width."""
    single = make_record("single", config={"bottleneck": 64})
    for config, compared in (
        ({"bottleneck": 64}, True),
        ({"bottleneck": 8}, False),
        ({}, True),
        ({"bottleneck": 64, "freeze_backbone": False}, False),
        ({"bottleneck": 64, "freeze_backbone": True, "pretrained": True}, True),
    ):
        filled = with_fwt([make_record("more", config=config), single])
        assert (filled[0].metrics.fwt is not None) == compared, config


def test_a_reference_that_was_trained_otherwise_is_noted() -> None:
    single = make_record("single", config={"lr": 0.1, "epochs": 20})
    like, ncm = make_record("more", config={"lr": 0.1, "epochs": 20}), make_record("ncm", config={"epochs": 5})
    other = make_record("icarl", config={"lr": 0.2, "epochs": 20})
    assert transfer_notes([like, ncm, single]) == []  # nearest class mean trains nothing
    said = (
        "Forward transfer compares with models of single tasks that were trained with another learning rate than iCaRL."
    )
    assert transfer_notes([like, other, single]) == [said]
    assert said in notes([like, other, single]) and said not in notes([like, other])


def test_references_of_several_settings_are_not_mixed() -> None:
    records = [make_record("more"), *(make_record("single", config={"epochs": n}) for n in (1, 2))]
    assert with_fwt(records)[0].metrics.fwt is None
    assert any("several settings" in note for note in notes(records))


def test_the_reference_stands_in_no_accuracy_table() -> None:
    assert Row("single") not in main_table([make_record("more"), make_record("single")]).rows


def test_a_seed_that_was_run_twice_counts_once() -> None:
    twice = [with_aca(70.0), with_aca(70.0, device="cuda")]
    [[cell, _]] = main_table(twice).rows.values()
    assert cell is not None
    assert (cell.text(), cell.n) == ("70.00", 1)
    [[cell, _]] = main_table([*twice, with_aca(74.0, seed=1)]).rows.values()
    assert cell is not None
    assert (cell.text(), cell.n) == ("72.00 ± 2.83", 2)
    thrice = [with_aca(value, device=f"cuda:{number}") for number, value in enumerate((70.0, 70.0, 73.0))]
    [[cell, _]] = main_table(thrice).rows.values()
    assert cell is not None
    assert (cell.mean, cell.n) == (71.0, 1)


def test_every_metric_is_explained_in_the_caption() -> None:
    for kind in TABLE_KINDS.values():
        for metric in kind.metrics:
            assert f"{metric.label}: {metric.meaning}.".lower() in kind.caption.lower()
            assert kind.meaning(metric.label) == metric.meaning


def test_entries_are_told_without_and_with_the_replay_buffer() -> None:
    record = make_record(entries={"backbone": 5_500_000, "heads": 20_000, "buffer": 600_000, "total": 6_120_000})
    cost = next(table for table in build_tables([record]) if table.key == "cost")
    [cells] = cost.rows.values()
    found = {metric: cell.mean for (_, metric), cell in zip(cost.heads, cells, strict=True) if cell}
    assert (found["Entries"], found["With buffer"]) == (pytest.approx(5.52), pytest.approx(6.12))


def test_seconds_are_those_of_runs_that_were_alone() -> None:
    seconds = {"train": 50.0}
    records = [
        make_record("icarl", seed=seed, device="cuda (NVIDIA H200)", shared=shared, seconds=seconds)
        for seed, shared in enumerate((False, True, None))
    ]
    cost = next(table for table in build_tables(records) if table.key == "cost")
    [cells] = cost.rows.values()
    assert cells[0] is not None and (cells[0].mean, cells[0].n) == (50.0, 1)
    cost = next(table for table in build_tables(records[1:]) if table.key == "cost")
    assert "Seconds" not in [metric for _, metric in cost.heads]
    older = make_record("icarl", device="cpu (x86_64, 2 threads)", seconds=seconds)
    cost = next(table for table in build_tables([older]) if table.key == "cost")
    assert "Seconds" in [metric for _, metric in cost.heads]
