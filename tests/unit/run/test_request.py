"""A request: its paths are resolved once, and it is read back from ``run.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from morecl import presets
from morecl.catalogue import SHIPPED
from morecl.errors import InputError
from morecl.run import RUN, RunRequest, preset_notes, rate_notes, read_request


def test_relative_paths_start_from_the_directory_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for name in ("a", "b"):
        (there / "photos" / name).mkdir(parents=True)
    (there / "own.toml").write_text('dataset = "digits"\ntasks = 2\n')
    here.mkdir()
    monkeypatch.chdir(here)
    asked = {"method": "more", "directory": str(there)}

    settings = {"backbone": "w/vit.safetensors", "epochs": 3}
    run = RunRequest(benchmark="folder:photos", settings=settings, data_root="d", **asked).resolve()
    assert run.benchmark == run.recipe.dataset == f"folder:{there}/photos"
    assert run.data_root == there / "d"
    assert run.given == {"backbone": f"{there}/w/vit.safetensors", "epochs": 3}
    assert run.request.benchmark == "folder:photos"  # as the user said it

    assert RunRequest(benchmark="own.toml", **asked).resolve().benchmark == f"{there}/own.toml"
    assert RunRequest(benchmark=f"folder:{there}/photos", **asked).resolve().benchmark == f"folder:{there}/photos"
    named = RunRequest(benchmark="digits-5t", settings={"backbone": SHIPPED}, **asked).resolve()
    assert (named.benchmark, named.given, named.data_root) == ("digits-5t", {"backbone": SHIPPED}, None)
    file = RunRequest(benchmark="digits-5t", settings={"backbone": "vit_tiny_patch16_224@w"}, **asked).resolve()
    assert file.given == {"backbone": f"vit_tiny_patch16_224@{there}/w"}
    with pytest.raises(InputError, match=r"no recipe file .*here/own\.toml"):
        RunRequest(method="more", benchmark="own.toml").resolve()


def test_settings_are_checked_when_asked_for() -> None:
    run = RunRequest(method="more", benchmark="digits-5t", settings={"epochs": 3}, seed=4).resolve()
    run.check()
    assert (run.config.epochs, run.config.seed) == (3, 4)  # type: ignore[attr-defined]
    wrong = RunRequest(method="more", benchmark="digits-5t", settings={"epochs": 0}).resolve()
    with pytest.raises(InputError, match="epochs=0"):
        wrong.check()


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (
            "more",
            {"back_update": False, "back_update_lr": 0.1, "back_update_epochs": 2},
            "back_update_lr, back_update_epochs would change nothing with back_update=false. Leave it out, or change",
        ),
        ("more", {"coefficient": False, "c": 3}, "c would change nothing with coefficient=false"),
        ("morerp", {"coefficient": False, "c": 3}, "c would change nothing with coefficient=false"),
        ("morerp", {"projection": 50, "kept_features": 9}, "kept_features would change nothing with projection=50"),
    ],
)
def test_settings_that_change_nothing_are_refused(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunRequest(method=method, benchmark="digits-5t", settings=settings).resolve().check()
    first = next(iter(settings))
    RunRequest(method=method, benchmark="digits-5t", settings={first: settings[first]}).resolve().check()
    rest = {key: value for key, value in settings.items() if key != first}
    RunRequest(method=method, benchmark="digits-5t", settings=rest).resolve().check()


def test_each_setting_that_changes_nothing_has_its_own_cause() -> None:
    settings = {"c": 3, "coefficient": False, "projection": 50, "known_weight": 2}
    told = "c would change nothing with coefficient=false, and known_weight would change nothing with projection=50. "
    with pytest.raises(InputError, match=f"{told}Leave it out, or change coefficient or projection"):
        RunRequest(method="morerp", benchmark="digits-5t", settings=settings).resolve().check()


def test_settings_that_a_recipe_leaves_without_effect_are_refused() -> None:
    with pytest.raises(InputError, match="back_update_lr would change nothing with back_update=false"):
        RunRequest(method="more", benchmark="tinyimagenet-10t", settings={"back_update_lr": 0.1}).resolve().check()


def test_a_limit_on_test_images_that_are_not_scored_is_refused() -> None:
    asked = RunRequest(method="more", benchmark="digits-5t", validation=0.1)
    asked.resolve().check()
    with pytest.raises(InputError, match="test_per_class would change nothing with validation"):
        asked.model_copy(update={"test_per_class": 3}).resolve().check()


def test_a_preset_is_stronger_than_the_recipe_and_weaker_than_the_user(tmp_path: Path) -> None:
    run = RunRequest(method="more", benchmark="cifar10-5t-1k", settings={"preset": "paper"}).resolve()
    config = run.config.record()
    assert config["preset"] == "paper"
    assert {key: config[key] for key in presets.MORE["paper"]} == presets.MORE["paper"]
    assert (config["epochs"], config["lr"], config["memory_size"]) == (20, 0.005, 200)  # of the recipe
    own = tmp_path / "own.toml"
    own.write_text('dataset = "digits"\ntasks = 5\n[settings]\nback_update_lr = 0.5\nback_update_momentum = 0.1\n')
    given = {"preset": "paper", "back_update_momentum": 0.2}
    config = RunRequest(method="more", benchmark=str(own), settings=given).resolve().config.record()
    assert (config["back_update_lr"], config["back_update_momentum"]) == (0.01, 0.2)
    wrong = RunRequest(method="more", benchmark="digits-5t", settings={"preset": "papers"}).resolve()
    with pytest.raises(InputError, match="unknown preset 'papers'; did you mean 'paper'"):
        wrong.check()
    other = RunRequest(method="icarl", benchmark="digits-5t", settings={"preset": "paper"}).resolve()
    with pytest.raises(InputError, match="method 'icarl' has no setting preset"):
        other.check()


def test_the_plan_is_that_of_the_beginning_and_the_request_overrides_the_recipe() -> None:
    run = RunRequest(method="more", benchmark="cifar10-5t-1k", tasks=2).resolve()
    now = {
        "dataset": "cifar10",
        "classes": None,
        "folder_size": None,
        "tasks": 2,
        "train_per_class": 1000,
        "test_per_class": 400,
    }
    now |= {"settings": {"epochs": 20, "lr": 0.005, "bottleneck": 64, "memory_size": 200}}
    assert run.plan == run.current_plan == now
    begun = run.request.model_copy(update={"plan": now | {"tasks": 5}}).resolve()
    assert begun.plan["tasks"] == 5 and begun.current_plan["tasks"] == 2


def test_other_classes_are_another_plan(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('dataset = "digits"\ntasks = 2\nclasses = [0, 1, 2, 3]\n')
    request = RunRequest(method="more", benchmark=str(own))
    begun = request.model_copy(update={"plan": request.resolve().plan})
    assert begun.plan["classes"] == [0, 1, 2, 3] and not begun.resolve().recipe_changed()
    own.write_text('dataset = "digits"\ntasks = 2\nclasses = [3, 5, 8, 9]\n')
    assert begun.resolve().recipe_changed()


def test_a_benchmark_has_one_name_wherever_it_is_called_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path / "photos")
    names = {"../own.toml": "own.toml", str(tmp_path / "own.toml"): "own.toml", "digits-5t": "digits-5t"}
    names |= {f"folder:{path}": "folder:photos" for path in (".", "../photos/", str(tmp_path / "photos"))}
    for asked, name in names.items():
        assert RunRequest(method="more", benchmark=asked).benchmark_name == name
    assert RunRequest(method="more", benchmark="a/b.toml", directory="/elsewhere").benchmark_name == "b.toml"


def test_a_run_keeps_the_recipes_settings_of_its_beginning(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('dataset = "digits"\ntasks = 5\n[settings]\nepochs = 30\nlr = 0.01\n')
    request = RunRequest(method="more", benchmark=str(own), settings={"lr": 0.5})
    begun = request.model_copy(update={"plan": request.resolve().plan})
    assert begun.plan["settings"] == {"epochs": 30, "lr": 0.01} and not begun.resolve().recipe_changed()
    own.write_text(
        'dataset = "digits"\ntasks = 5\n[settings]\nepochs = 30\nlr = 0.01\n[included.settings]\nepochs = 1\n'
    )
    assert (request.resolve().config.epochs, begun.resolve().config.epochs) == (1, 30)
    assert begun.resolve().config.lr == 0.5 and begun.resolve().recipe_changed()
    older = {key: value for key, value in begun.plan.items() if key != "settings"}  # a run of an older version
    assert not begun.model_copy(update={"plan": older}).resolve().recipe_changed()


def test_sizes_of_tasks_survive_the_file_and_are_part_of_the_plan(tmp_path: Path) -> None:
    request = RunRequest(method="more", benchmark="digits-5t", tasks=[4, 1, 5])
    planned = request.model_copy(update={"plan": request.resolve().current_plan})
    (tmp_path / RUN).write_text(json.dumps(planned.model_dump(mode="json")))
    read = read_request(tmp_path)
    assert read.tasks == [4, 1, 5] and read.resolve().plan == read.resolve().current_plan
    assert read.resolve().plan["tasks"] == [4, 1, 5]
    by_recipe = RunRequest(method="more", benchmark="digits-unequal").resolve()
    assert by_recipe.plan["tasks"] == [1, 3, 1, 4, 1]
    changed = by_recipe.request.model_copy(update={"plan": by_recipe.plan | {"tasks": [1, 3, 1, 1, 4]}}).resolve()
    assert changed.plan != changed.current_plan


def test_a_request_of_an_earlier_version_can_be_read(tmp_path: Path) -> None:
    """Without ``keep_checkpoints``, which came later."""
    old = {"method": "ncm", "benchmark": "digits-5t", "settings": {}, "class_order": "0", "seed": 0, "plan": {}}
    old |= {"data_root": None, "tasks": None, "train_per_class": 6, "test_per_class": 4, "validation": None}
    (tmp_path / RUN).write_text(json.dumps(old | {"directory": "/somewhere"}))
    request = read_request(tmp_path)
    assert (request.train_per_class, request.directory, request.keep_checkpoints) == (6, "/somewhere", False)


@pytest.mark.parametrize(
    ("benchmark", "settings", "cause"),
    [
        ("digits-5t", {"preset": "paper", "back_update": False}, "back_update=false"),
        ("digits-5t", {"preset": "authors", "memory_size": 0}, "memory_size=0"),
        ("tinyimagenet-5t", {"preset": "paper"}, "back_update=false"),
        ("digits-5t", {"preset": "paper"}, None),
        ("digits-5t", {"back_update": False}, None),
    ],
)
def test_a_preset_without_a_back_update_says_what_is_left_of_it(
    benchmark: str, settings: dict[str, Any], cause: str | None
) -> None:
    run = RunRequest(method="more", benchmark=benchmark, settings=settings).resolve()
    run.check()
    name = settings.get("preset")
    wanted = f"no back-update ({cause}): preset={name} only takes epochs and rate of the recipe's [settings]"
    assert preset_notes(run) == ([wanted] if cause else [])


def test_rates_that_nobody_searched_for_are_said_by_benchmark_and_rate() -> None:
    owm = RunRequest(method="owm", benchmark="mnist-5t")
    assert rate_notes([owm.resolve()]) == [
        "no rate was searched for owm on mnist-5t with this backbone: it trains at 0.005"
    ]
    given = owm.model_copy(update={"settings": {"lr": 0.005}})
    searched = RunRequest(method="owm", benchmark="digits-5t")
    assert rate_notes([given.resolve(), searched.resolve()]) == []
    others = [RunRequest(method=name, benchmark="fashionmnist-5t") for name in ("hal", "more", "hal")]
    slower = owm.model_copy(update={"benchmark": "svhn-5t", "settings": {"freeze_backbone": False}})
    assert rate_notes(request.resolve() for request in (owm, *others, given, slower)) == [
        "no rate was searched for owm on mnist-5t with this backbone: it trains at 0.005",
        "no rate was searched for hal, more on fashionmnist-5t with this backbone: they train at 0.005",
        "no rate was searched for owm on svhn-5t with this backbone: it trains at 0.005",
    ]
