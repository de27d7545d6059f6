"""Which records share a row, and what the row is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from morecl import methods, presets
from morecl.data import load_recipe, recipe_names
from morecl.records import Record, read_record
from morecl.report.grid import Column, Row, arrange, columns_of, repetition_mean, repetition_values, repetitions
from morecl.report.notes import notes
from morecl.report.paper import BENCHMARKS, METHODS, paper_number, setting, settings
from synthetic import aca_cells, held_out, main_table, make_record, with_aca

RESULTS = Path(__file__).resolve().parents[3] / "results"

LATER = ("rate", "draw", "start", "features")  # settings of the back-update that older records lack


def test_runs_with_different_memory_are_not_averaged() -> None:
    records = [with_aca(70.0, config={"memory_size": 200}), with_aca(60.0, config={"memory_size": 50})]
    assert set(aca_cells(records)) == {"MORE", "MORE (memory size 50)"}  # 200 is the recipe's


def test_ablations_are_rows_of_their_own() -> None:
    switches = [(True, True), (False, True), (True, False), (False, False)]
    records = [with_aca(70.0, config={"coefficient": c, "back_update": b}) for c, b in switches]
    assert list(aca_cells(records)) == [
        "MORE",
        "MORE (no back update)",
        "MORE (no coefficient)",
        "MORE (no back update, no coefficient)",
    ]


@pytest.mark.parametrize("benchmark", ["cifar10-5t", "digits-5t"])
def test_rows_of_more_say_whose_back_update_they_have(benchmark: str) -> None:
    kinds = {
        "our back-update": presets.MORE_DEFAULT,
        "paper": presets.MORE["paper"],
        "authors' code": presets.MORE["authors"],
        "other": {**presets.MORE_DEFAULT, "back_update_lr": 0.1},
    }
    names = {"paper": "paper", "authors' code": "authors"}
    records = {
        kind: with_aca(70.0, benchmark=benchmark, config={"back_update": True, "preset": names.get(kind), **values})
        for kind, values in kinds.items()
    }
    labels = set(aca_cells(list(records.values())))
    assert {"MORE (our back-update)", "MORE (paper)", "MORE (authors' code)"} < labels and len(labels) == 4
    assert any(label.startswith("MORE (other back-update, ") and "back update lr 0.1" in label for label in labels)
    alone = {"cifar10-5t": "MORE (our back-update)", "digits-5t": "MORE"}
    assert list(aca_cells([records["our back-update"]])) == [alone[benchmark]]


def test_a_preset_that_was_changed_is_not_called_the_papers() -> None:
    config = {"preset": "paper", **presets.MORE["paper"], "back_update_momentum": 0.5}
    assert list(aca_cells([with_aca(70.0, benchmark="cifar10-5t", config=config)])) == ["MORE (other back-update)"]


def test_older_records_lack_later_settings_of_the_back_update_and_had_ours() -> None:
    old = {key: presets.MORE_DEFAULT[key] for key in presets.MORE_DEFAULT if key.split("_")[-1] not in LATER}
    assert len(old) < len(presets.MORE_DEFAULT)
    both = (old, {**presets.MORE_DEFAULT, "preset": None})
    records = [with_aca(70.0, seed=n, config=config) for n, config in enumerate(both)]
    assert list(aca_cells(records)) == ["MORE"]


def test_without_back_update_its_settings_say_nothing() -> None:
    configs = [{"back_update": False, **values} for values in (presets.MORE_DEFAULT, presets.MORE["paper"])]
    records = [with_aca(70.0, benchmark="cifar10-5t", seed=n, config=c) for n, c in enumerate(configs)]
    assert list(aca_cells(records)) == ["MORE (no back update)"]
    tiny = [with_aca(70.0, benchmark="tinyimagenet-5t", seed=n, config=c) for n, c in enumerate(configs)]
    assert list(aca_cells(tiny)) == ["MORE (paper, memory size 200)"]


def test_without_back_update_more_is_the_papers_where_the_paper_has_none() -> None:
    """On Tiny-ImageNet: the row of the paper's back-update goes on there without one."""
    usual = {"memory_size": 2000}
    none, ours, theirs = (
        with_aca(70.0, benchmark="tinyimagenet-5t", config={"back_update": on, **values, **usual})
        for on, values in ((False, presets.MORE_DEFAULT), (True, presets.MORE_DEFAULT), (True, presets.MORE["paper"]))
    )
    labels = ["MORE (our back-update)", "MORE (paper)", "MORE (paper, with back update)"]
    assert list(aca_cells([none, ours, theirs])) == labels
    elsewhere = with_aca(70.0, benchmark="cifar100-20t", config={"back_update": True, **presets.MORE["paper"], **usual})
    assert list(aca_cells([none, elsewhere])) == ["MORE (paper)"]
    told = "MORE (paper) has no back-update on T-ImageNet-5T, as in the paper."
    assert told in notes([none, elsewhere])
    assert told not in notes([ours, theirs, elsewhere])


def test_a_run_without_memory_is_named_and_has_nobodys_back_update() -> None:
    assert list(aca_cells([with_aca(70.0, "derpp", config={"memory_size": 0})])) == ["DER++ (memory size 0)"]
    for values in (presets.MORE_DEFAULT, presets.MORE["paper"]):
        record = with_aca(70.0, config={**values, "back_update": True, "memory_size": 0})
        assert list(aca_cells([record])) == ["MORE (memory size 0)"]
    other = with_aca(70.0, "derpp", benchmark="digits-unequal", config={"memory_size": 200})
    assert len(aca_cells([with_aca(60.0, "derpp", config={"memory_size": 0}), other])) == 2


def test_an_ablation_is_named_even_where_nothing_varies() -> None:
    assert list(aca_cells([with_aca(70.0, config={"coefficient": False})])) == ["MORE (no coefficient)"]


def test_settings_of_the_paper_are_the_usual_ones_of_each_benchmark() -> None:
    settings = {"cifar10-5t": (True, 200), "tinyimagenet-5t": (False, 2000)}
    records = [
        with_aca(70.0, benchmark=name, config={"back_update": update, "memory_size": size})
        for name, (update, size) in settings.items()
    ]
    half = with_aca(60.0, benchmark="cifar10-5t", config={"back_update": True, "memory_size": 100})
    table = main_table([*records, half])
    assert [row.label for row in table.rows] == ["MORE", "MORE (half memory)"]
    assert all(table.rows[Row("more")])


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"backbone": "a"}, {"backbone": "b"}, {"MORE (backbone a", "MORE (backbone b"}),
        ({"train_images": 10}, {"train_images": 20}, {"MORE (train images 10)", "MORE (train images 20)"}),
        ({"config": {"epochs": 3}}, {"config": {"epochs": 9}}, {"MORE (epochs 3)", "MORE (epochs 9)"}),
    ],
)
def test_other_settings_split_rows(first: dict[str, object], second: dict[str, object], named: set[str]) -> None:
    labels = aca_cells([with_aca(70.0, **first), with_aca(60.0, **second)])
    assert len(labels) == 2
    assert all(any(label.startswith(name) for label in labels) for name in named)


def test_other_images_split_rows_but_for_those_that_are_held_out() -> None:
    records = [with_aca(70.0, seed=n) for n in range(2)]
    data = [records[0].data, records[1].data.model_copy(update={"fingerprint": "feedbeef" * 8})]
    records = [record.model_copy(update={"data": part}) for record, part in zip(records, data, strict=True)]
    assert any("data feedbeef" in label for label in aca_cells(records)) and len(aca_cells(records)) == 2
    validated = [r.model_copy(update={"data": r.data.model_copy(update={"scored_on": "validation"})}) for r in records]
    assert len(aca_cells(validated)) == 1
    assert not any("data )" in label or "data ," in label for label in aca_cells([*records, validated[0]]))


def test_the_same_weights_at_another_path_are_the_same_backbone() -> None:
    records = [with_aca(70.0, seed=n, config={"backbone": f"vit@/machine{n}/weights.safetensors"}) for n in range(2)]
    assert list(aca_cells(records)) == ["MORE"]


def with_weights(record: Record, sha256: str, source: str = "") -> Record:
    backbone = record.backbone.model_copy(update={"sha256": sha256 * 64, "source_sha256": source * 64})
    return record.model_copy(update={"backbone": backbone})


def test_random_weights_of_several_seeds_are_one_row() -> None:
    records = [
        with_weights(with_aca(70.0 + seed, seed=seed, config={"pretrained": False}), str(seed)) for seed in range(3)
    ]
    assert list(arrange(records)) == [Row("more")]
    trained = [record.model_copy(update={"config": {**record.config, "pretrained": True}}) for record in records]
    assert len(arrange(trained)) == 3


def test_weights_that_cpus_resample_differently_are_the_same() -> None:
    """Also as those of an older record, which has the hash of the weights in use alone."""
    here, there = (with_weights(with_aca(70.0, seed=n), sha256, "f") for n, sha256 in ((0, "a"), (1, "b")))
    assert list(arrange([here, there])) == [Row("more")]
    older = with_weights(with_aca(70.0, seed=2), "a")
    assert list(arrange([here, there, older])) == [Row("more")]
    assert len(arrange([here, with_weights(there, "b", "e")])) == 2
    assert len(arrange([here, with_weights(older, "c")])) == 2


def test_held_out_images_of_other_data_split_rows_and_are_noted() -> None:
    """Their fingerprint changes with the seed, so names and classes tell."""

    def held(seed: int, name: str = "digits", *classes: str) -> Record:
        record = held_out(with_aca(70.0, seed=seed))
        return record.model_copy(
            update={"data": record.data.model_copy(update={"name": name, "classes": list(classes or "0123456789")})}
        )

    for other in (held(1, "cifar10"), held(1, "digits", *"abcdefghij")):
        assert len(arrange([held(0), other])) == 2
        assert any("Not on the same images" in note for note in notes([held(0), other]))
    older = held_out(with_aca(70.0, seed=2))  # does not name its classes
    assert not older.data.classes
    for like in ([held(0), held(1)], [held(0), older]):
        assert len(arrange(like)) == 1
        assert not any("Not on the same images" in note for note in notes(like))


@pytest.mark.parametrize("name", METHODS)
def test_older_records_have_what_learners_without_a_setting_had(name: str) -> None:
    """And defaults of settings that came later, so that nothing is called "none" that was not asked for."""
    for key, value in methods.method_class(name).Config.older.items():
        assert setting(make_record(name), key) == value, key


def test_no_record_of_the_results_has_a_setting_that_is_missing() -> None:
    found: dict[Path, list[Record]] = {}
    for path in sorted(RESULTS.rglob("result.json")):
        found.setdefault(path.relative_to(RESULTS).parts[0], []).append(read_record(path))
    for records in (*found.values(), [record for some in found.values() for record in some]):
        for row, cells in arrange(records).items():
            for key in (part.removesuffix(" none").replace(" ", "_") for part in row.variant if part.endswith(" none")):
                for record in (record for runs in cells.values() for record in runs):
                    known = settings(record)
                    assert key in known and known[key] is None, (row.label, key)


def test_the_backbones_own_image_size_is_a_number_of_pixels() -> None:
    """And the same as if it had been given."""
    found = [with_aca(70.0, seed=n, config={"image_size": size}) for n, size in enumerate([None, 32, 16])]
    sizes = [
        record.backbone.model_copy(update={"image_size": size})
        for record, size in zip(found, (32, 32, 16), strict=True)
    ]
    records = [record.model_copy(update={"backbone": backbone}) for record, backbone in zip(found, sizes, strict=True)]
    assert set(aca_cells(records)) == {"MORE (image size 32)", "MORE (image size 16)"}


def test_a_record_that_says_nothing_of_the_backbone_had_it_frozen() -> None:
    configs = [{}, {"freeze_backbone": True}, {"freeze_backbone": False}]
    records = [with_aca(70.0, seed=n, config=config) for n, config in enumerate(configs)]
    assert set(aca_cells(records)) == {"MORE", "MORE (trained backbone)"}


def test_settings_without_effect_neither_split_rows_nor_are_named() -> None:
    """NCM and CSC train nothing on a frozen backbone; how they would have trained says nothing of a record."""
    assert {name for name, info in METHODS.items() if not info.trains} == {
        name for name, method in methods.METHODS.items() if not method.Config().trains
    }
    configs = [{}, {"epochs": 20, "lr": 0.1}, {"epochs": 5, "freeze_backbone": False}]
    records = [with_aca(70.0, "ncm", "cifar10-5t", seed=n, config=config) for n, config in enumerate(configs)]
    assert list(aca_cells(records[:2])) == ["NCM"]
    assert len(aca_cells(records)) == 2
    assert not any(note.startswith("Epochs") for note in notes(records[:2]))
    assert any(note.startswith("Epochs: 5") for note in notes(records))


def test_what_the_config_says_is_not_repeated() -> None:
    records = [with_aca(70.0, train_images=100 * n, config={"train_per_class": n}) for n in (1, 2)]
    assert set(aca_cells(records)) == {"MORE (train per class 1)", "MORE (train per class 2)"}


def test_a_benchmark_in_another_number_of_tasks_is_another_column() -> None:
    table = main_table([with_aca(70.0, "ncm", "cifar10-5t"), with_aca(80.0, "ncm", "cifar10-5t", tasks=1)])
    assert [head[0] for head in table.heads] == ["CIFAR10-5T"] * 2  # one task stands apart, see test_parts.py
    table = main_table([with_aca(70.0, "ncm", "cifar10-5t"), with_aca(80.0, "ncm", "cifar10-5t", tasks=2)])
    assert [head[0] for head in table.heads] == ["CIFAR10-5T in 2 tasks"] * 2 + ["CIFAR10-5T"] * 2 + ["Average"] * 2
    assert Column("folder:birds", 3).label == "folder:birds in 3 tasks"


def test_tasks_of_unequal_size_are_another_column() -> None:
    sizes = {"cifar10-5t": [4, 1, 2, 2, 1], "digits-unequal": [1, 3, 1, 4, 1], "folder:birds": [1, 2]}
    records = [with_aca(70.0, "ncm", name, task_sizes=of, tasks=len(of)) for name, of in sizes.items()]
    records += [with_aca(80.0, "ncm", "cifar10-5t"), with_aca(60.0, "ncm", "cifar10-5t", task_sizes=[3, 2, 2, 2, 2])]
    grid = arrange(records)
    assert [(column.label, len(grid[Row("ncm")][column])) for column in columns_of(grid)] == [
        ("CIFAR10-5T", 2),  # 11 classes do not divide by 5: the first task has one more
        ("CIFAR10-5T in tasks of 4, 1, 2, 2, 1 classes", 1),
        ("Digits-unequal", 1),
        ("folder:birds in tasks of 1, 2 classes", 1),
    ]


def test_unequal_tasks_are_not_compared_with_the_papers_equal_ones() -> None:
    equal = make_record("more", "cifar10-5t")
    assert paper_number(equal, "aca") is not None
    assert paper_number(make_record("more", "cifar10-5t", task_sizes=[1, 3, 1, 4, 1]), "aca") is None


def test_the_usual_tasks_of_a_benchmark_are_its_recipes() -> None:
    for name in recipe_names():
        usual, tasks = BENCHMARKS[name][1], load_recipe(name).tasks
        assert usual == (tasks if isinstance(tasks, int) else tuple(tasks)), name


def test_rows_stand_in_the_order_of_the_paper() -> None:
    records = [with_aca(50.0, name) for name in ("joint", "more", "zzz", "icarl", "finetune")]
    assert [row.method for row in main_table(records).rows] == ["finetune", "icarl", "zzz", "more", "joint"]


def test_one_method_with_both_kinds_of_scores_has_two_rows() -> None:
    record = make_record("more")
    assert list(arrange([held_out(record), record])) == [Row("more"), Row("more", held_out=True)]


def test_the_same_seed_and_class_order_is_one_repetition() -> None:
    runs = [with_aca(70.0), with_aca(74.0, device="cuda"), with_aca(80.0, seed=1)]
    other_order = with_aca(90.0, class_order=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    assert [len(group) for group in repetitions([*runs, other_order])] == [2, 1, 1]
    assert repetition_values(runs, lambda record: record.metrics.aca) == [72.0, 80.0]
    assert repetition_mean(runs, lambda record: record.metrics.aca) == 76.0
    assert repetition_mean(runs, lambda record: record.metrics.auc) is None
