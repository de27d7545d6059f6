"""The paper's numbers, as packaged."""

from __future__ import annotations

from typing import Any

import pytest

from morecl import presets
from morecl.errors import InputError
from morecl.records import Record
from morecl.report.grid import Row
from morecl.report.notes import notes
from morecl.report.paper import declared_weights, paper, paper_number, same_backbone
from synthetic import held_out, main_table, make_record

OURS = presets.MORE_DEFAULT
TINY = {**OURS, "back_update": False, "memory_size": 2000}  # the paper has no back-update there


@pytest.mark.parametrize(
    ("record", "metric", "expected"),
    [
        (make_record("more", "cifar10-5t"), "aca", (89.16, 0.96)),
        (make_record("gd", "cifar10-5t"), "aca", (89.16, 0.53)),
        (make_record("more", "cifar10-5t", config={"memory_size": 100}), "aca", (88.13, 1.16)),
        (make_record("more", "cifar10-5t", config={"memory_size": 77}), "aca", None),
        (make_record("derpp", "cifar10-5t", config={"memory_size": 0}), "aca", None),
        (make_record("more", "cifar10-5t", config={**presets.MORE["paper"], "memory_size": 0}), "aca", None),
        (make_record("more", "cifar10-5t", config={"coefficient": False}), "aia", (93.36, 0.79)),
        (make_record("more", "cifar10-5t", config={"back_update": False}), "aia", (93.86, 1.12)),
        (make_record("more", "cifar10-5t", config={"back_update": True}), "iauc", (88.06, 1.84)),
        (make_record("ncm", "cifar10-5t", tasks=1), "aca", (85.8, None)),
        (make_record("ncm", "cifar10-5t"), "aca", None),
        (make_record("more", "cifar10-5t-1k"), "aca", None),
        (make_record("pass", "svhn-5t"), "aca", (76.09, None)),
        (make_record("more", "cifar10-5t", config=dict(presets.MORE["paper"])), "aca", (89.16, 0.96)),
        (make_record("more", "cifar10-5t", config=dict(presets.MORE["authors"])), "aca", (89.16, 0.96)),
        (make_record("more", "cifar10-5t", config=dict(OURS)), "aca", None),
        (make_record("more", "cifar10-5t", config={**presets.MORE["paper"], "back_update_lr": 0.1}), "aca", None),
        (
            make_record("more", "cifar10-5t", config={**presets.MORE_DEFAULT, "back_update": False}),
            "aia",
            (93.86, 1.12),
        ),
        (make_record("more", "tinyimagenet-5t", config=TINY), "aca", (64.97, 1.28)),
        (make_record("gd", "cifar10-5t", config={"pretrained": False}), "aca", None),
        (make_record("ncm", "cifar10-5t", tasks=1, config={"pretrained": False}), "aca", None),
        (make_record("gd", "cifar10-5t", config={"freeze_backbone": False}), "aca", None),
    ],
)
def test_numbers_of_the_paper(record: Record, metric: str, expected: tuple[float, float | None] | None) -> None:
    assert paper_number(record, metric) == expected


@pytest.mark.parametrize(
    ("condition", "averages"),
    [
        ("main", {"aca": 71.59, "aia": 80.77, "auc": 74.99, "iauc": 82.23}),
        ("half_memory", {"aca": 71.44, "aia": 79.61}),
        ("pretrained_on_200_classes", {"aca": 57.8, "aia": 69.32}),
    ],
)
def test_the_packaged_numbers_give_the_averages_that_the_paper_prints(
    condition: str, averages: dict[str, float]
) -> None:
    five = [name for name in paper()["settings"] if name != "svhn-5t"]
    for metric, printed in averages.items():
        values = [paper()["numbers"][condition][metric][name]["more"][0] for name in five]
        assert sum(values) / 5 == pytest.approx(printed, abs=0.006)


def test_another_backbone_is_marked_and_the_papers_is_not() -> None:
    record = make_record("gd", "cifar10-5t", backbone="deit_small_patch16_224")
    table = main_table([record])
    cell = table.rows[Row("gd")][0]
    assert cell is not None and cell.paper_text() == "89.16 ± 0.53†" and not same_backbone(record)
    assert "† with its own backbone (DeiT-S/16 pre-trained on 611 ImageNet classes)" in table.full_caption
    with declared_weights([f"{record.backbone.sha256}=611"], [record]):
        table = main_table([record])
    cell = table.rows[Row("gd")][0]
    assert cell is not None and cell.paper_text() == "89.16 ± 0.53" and table.full_caption.endswith("the paper.")


def test_an_average_is_marked_if_one_of_its_numbers_is() -> None:
    one, other = (
        make_record("gd", name, tasks=tasks, config={"memory_size": size}, backbone="deit_small_patch16_224")
        for name, tasks, size in (("cifar10-5t", 5, 200), ("cifar100-10t", 10, 2000))
    )
    another = other.model_copy(update={"backbone": make_record(backbone="vit_tiny").backbone})

    def marks(records: list[Record]) -> list[bool]:
        with declared_weights([f"{one.backbone.sha256}=611"], records):
            table = main_table(records)
        assert ("†" in table.full_caption) == (another in records)
        [cells] = table.rows.values()
        shown = dict(zip(table.heads, cells, strict=True))
        texts = [
            cell.paper_text()
            for head in ("CIFAR10-5T", "CIFAR100-10T", "Average")
            if (cell := shown[head, "ACA"]) is not None
        ]
        assert all(texts)
        return [text.endswith("†") for text in texts]

    assert marks([one, other]) == [False, False, False]
    assert marks([one, another]) == [False, True, True]


def test_weights_trained_on_200_classes_have_numbers_of_their_own() -> None:
    record = make_record("gd", "cifar10-5t", backbone="deit_small_patch16_224")
    half = record.model_copy(update={"config": {"memory_size": 100}})
    with declared_weights([f"{record.backbone.sha256}=200"], [record]):
        assert paper_number(record, "aca") == (80.44, 0.86) and same_backbone(record)
        assert paper_number(record, "auc") is None
        assert paper_number(half, "aca") is None


def test_weights_can_be_declared_the_papers() -> None:
    records = [make_record("gd", "cifar10-5t", backbone=name) for name in ("deit_small_patch16_224", "vit_tiny")]
    start, other = (record.backbone.sha256[:8] for record in records)
    for wrong, says in (
        (f"{start}=300", "is not like"),
        (f"{start[:7]}=200", "is not like"),
        (start, "is not like"),
        ("0123456789=200", "is the start of 0 backbones among the records"),
        (f"{other}=200", "vit_tiny is not the paper's architecture"),
    ):
        with pytest.raises(InputError, match=says), declared_weights([f"{start}=200", wrong], records):
            pass
    assert not any("as declared" in note for note in notes(records))
    with declared_weights([f"{start}=200"], records):
        assert paper_number(records[0], "aca") == (80.44, 0.86) and same_backbone(records[0])
        assert paper_number(records[1], "aca") == (89.16, 0.53) and not same_backbone(records[1])
        assert f"Weights taken for the paper's, as declared: {start} (200 classes)." in notes(records)
    with declared_weights([f"{records[0].backbone.sha256.upper()}=611"], records):
        assert paper_number(records[0], "aca") == (89.16, 0.53) and same_backbone(records[0])


def test_a_declaration_holds_for_one_report() -> None:
    record = make_record("gd", "cifar10-5t", backbone="deit_small_patch16_224")
    with pytest.raises(KeyError), declared_weights([f"{record.backbone.sha256}=200"], [record]):
        raise KeyError  # a report that fails
    assert not same_backbone(record) and paper_number(record, "aca") == (89.16, 0.53)


@pytest.mark.parametrize("length", [8, 64])
def test_weights_are_declared_once(length: int) -> None:
    record = make_record("gd", "cifar10-5t", backbone="deit_small_patch16_224")
    both = [f"{record.backbone.sha256}=611", f"{record.backbone.sha256[:length]}=200"]
    says = f"--paper-weights {record.backbone.sha256[:8]} is given twice; leave one out"
    with pytest.raises(InputError, match=says), declared_weights(both, [record]):
        pass


def test_without_pre_training_the_paper_has_only_averages() -> None:
    sizes = {name: (of["tasks"], of["memory_size"]) for name, of in paper()["settings"].items() if name != "svhn-5t"}

    def records(**config: Any) -> list[Record]:
        return [
            make_record("pass", name, tasks=tasks, config={"memory_size": size, **config})
            for name, (tasks, size) in sizes.items()
        ]

    def average(runs: list[Record]) -> str:
        table = main_table(runs)
        cell = table.rows[Row("pass")][table.heads.index(("Average", "ACA"))]
        assert cell is not None
        return cell.paper_text()

    table = main_table(records(pretrained=False))
    assert [cell.paper for cell in table.rows[Row("pass")][:-2] if cell] == [None] * 10
    assert average(records(pretrained=False)) == "32.42†"
    assert average(records(pretrained=False)[:4]) == ""
    assert average(records()) == "68.25†"


def test_scores_on_held_out_images_have_no_numbers_of_the_paper() -> None:
    record = make_record("derpp", "cifar10-5t")
    assert paper_number(record, "aca") is not None
    assert paper_number(held_out(record), "aca") is None
