"""What a run is made of: the recipe, the method's defaults and what the user set."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import morecl
from morecl.catalogue import SHIPPED
from morecl.data import build_stream, load_recipe
from morecl.errors import InputError
from morecl.locking import claimed
from morecl.runner import RunRequest, Watcher, effective_settings, resume, start

DIGITS = load_recipe("digits-5t")


def settings(method: str = "more", seed: int = 0, **given: Any) -> dict[str, Any]:
    return effective_settings(RunRequest(method=method, benchmark="digits-5t", seed=seed, settings=given), DIGITS)


def test_the_user_overrides_the_recipe() -> None:
    assert settings()["epochs"] == DIGITS.settings["epochs"]
    assert settings(epochs=3)["epochs"] == 3
    assert settings(seed=7)["seed"] == 7


def test_a_method_gets_only_what_it_knows_of_the_recipe() -> None:
    assert "bottleneck" not in settings("ncm")
    with pytest.raises(InputError, match="method 'ncm' has no setting bottleneck"):
        settings("ncm", bottleneck=3)


def test_what_trains_nothing_has_no_epochs() -> None:
    assert not {"epochs", "lr"} & settings("ncm").keys()
    with pytest.raises(InputError, match="'ncm' trains nothing on a frozen backbone: lr, epochs would change nothing"):
        settings("ncm", lr=0.1, epochs=3)
    trained = settings("ncm", freeze_backbone=False, epochs=3)
    assert trained["epochs"] == 3 and trained["lr"] == DIGITS.settings["lr"]


@pytest.mark.parametrize(("given", "expected"), [({}, 16), ({"backbone": SHIPPED}, 16), ({"image_size": 32}, 32)])
def test_the_recipes_image_size_is_for_the_shipped_backbone(given: dict[str, Any], expected: int) -> None:
    assert settings(**given)["image_size"] == expected


def test_another_backbone_is_used_at_its_own_size() -> None:
    assert "image_size" not in settings(backbone="deit_small_patch16_224")
    assert settings(backbone="deit_small_patch16_224", image_size=64)["image_size"] == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"epchs": 3}}, r"in \[settings\] of benchmark digits-5t 'epchs'; did you mean 'epochs'"),
        (
            {"methods": {"more": {"epchs": 3}}},
            r"in \[methods.more\] of benchmark digits-5t 'epchs'; did you mean 'epochs'",
        ),
        ({"methods": {"ncm": {"bottleneck": 3}}}, r"in \[methods.ncm\] of benchmark digits-5t 'bottleneck'"),
        ({"methods": {"mroe": {"epochs": 3}}}, "unknown method 'mroe'; did you mean 'more'"),
    ],
)
def test_misspelt_names_in_a_recipe_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        effective_settings(RunRequest(method="more", benchmark="digits-5t"), replace(DIGITS, **changes))


def test_paths_of_a_request_begin_where_it_was_made() -> None:
    asked = {"method": "more", "directory": "/there"}
    request = RunRequest(benchmark="folder:photos", settings={"backbone": "w/vit.safetensors"}, data_root="d", **asked)
    located = request.located()
    assert (located.benchmark, located.data_root) == ("folder:/there/photos", "/there/d")
    assert located.settings == {"backbone": "/there/w/vit.safetensors"}
    assert RunRequest(benchmark="own.toml", **asked).located().benchmark == "/there/own.toml"
    assert RunRequest(benchmark="folder:/here/x", **asked).located().benchmark == "folder:/here/x"
    named = RunRequest(benchmark="digits-5t", settings={"backbone": SHIPPED}, **asked)
    assert named.located() == named
    of = RunRequest(benchmark="digits-5t", settings={"backbone": "vit_tiny_patch16_224@w"}, **asked)
    assert of.located().settings == {"backbone": "vit_tiny_patch16_224@/there/w"}


def test_two_processes_do_not_run_into_one_folder(tmp_path: Path) -> None:
    request = RunRequest(method="ncm", benchmark="digits-5t", train_per_class=2, test_per_class=1)
    folder = tmp_path / "run"
    with claimed(folder), pytest.raises(InputError, match="another process is at work in"):
        start(request, folder)
    assert not list(folder.iterdir())
    start(request, folder)
    assert (folder / "result.json").is_file() and not (folder / ".lock").exists()


RECIPE = 'dataset = "digits"\ntasks = {}\ntrain_per_class = {}\ntest_per_class = 4\n'


def begun(tmp_path: Path) -> tuple[Path, Path]:
    """A run that was stopped in its second task, and its recipe."""

    def stop(index: int, *_: object) -> None:
        if index:
            raise KeyboardInterrupt

    recipe, folder = tmp_path / "own.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(5, 4))
    with pytest.raises(KeyboardInterrupt):
        start(RunRequest(method="ncm", benchmark=str(recipe)), folder, watcher=Watcher(task=stop))
    assert (folder / "checkpoint-1").is_dir()
    return folder, recipe


@pytest.mark.parametrize(("values", "other"), [((2, 4), "recipe, tasks"), ((5, 3), "recipe, data")])
def test_a_run_does_not_go_on_with_another_recipe(tmp_path: Path, values: tuple[int, int], other: str) -> None:
    folder, recipe = begun(tmp_path)
    recipe.write_text(RECIPE.format(*values))
    with pytest.raises(InputError, match=f"own.toml is not what the run in .* began with: other {other}. Put back"):
        resume(folder)
    recipe.write_text(RECIPE.format(5, 4))
    whole = start(RunRequest(method="ncm", benchmark=str(recipe)), tmp_path / "whole")
    assert resume(folder).accuracy_matrix == whole.accuracy_matrix


@pytest.mark.parametrize(("key", "value"), [("method", '"csc"'), ("seed", "7")])
def test_a_run_does_not_go_on_as_another(tmp_path: Path, key: str, value: str) -> None:
    folder, _ = begun(tmp_path)
    text = (folder / "run.json").read_text()
    was = {"method": '"ncm"', "seed": "0"}[key]
    assert text.count(f'"{key}": {was}') == 1
    (folder / "run.json").write_text(text.replace(f'"{key}": {was}', f'"{key}": {value}'))
    with pytest.raises(InputError, match=f"began with: other {key}"):
        resume(folder)


def test_what_was_measured_so_far_is_not_to_be_changed(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    file = folder / "checkpoint-1" / "progress.json"
    value = json.loads(file.read_text())
    value["steps"][0]["aca"] = 12.3
    file.write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"progress\.json is damaged: it is not as it was saved"):
        resume(folder)


def test_what_a_kill_left_half_written_is_in_nobodys_way(tmp_path: Path) -> None:
    request = RunRequest(method="ncm", benchmark="digits-5t", train_per_class=2, test_per_class=1)
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / ".run.json.x1.tmp").write_text("{")  # killed while the first file was being written
    start(request, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["model", "result.json", "run.json"]
    with pytest.raises(InputError, match="killed holds a finished run: --overwrite replaces it"):
        start(request, folder)
    folder, _ = begun(tmp_path)
    for name in (".model.x2.tmp", ".checkpoint-2.x3.tmp"):
        (folder / name).mkdir()
    (folder / ".result.json.x4.tmp").touch()
    resume(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["model", "result.json", "run.json"]


def test_a_model_of_ones_own_images_names_their_folders_and_scores_files_as_the_run_did(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    rng = np.random.default_rng(0)
    for name, colour in {
        "kiwi": (90, 140, 40),
        "apple": (200, 30, 30),
        "plum": (90, 30, 120),
        "fig": (60, 40, 80),
    }.items():
        for split, count in (("train", 6), ("test", 3)):
            (photos / split / name).mkdir(parents=True)
            for i in range(count):
                noise = rng.integers(-25, 25, (30 + i, 55, 3))
                pixels = (np.array(colour) + noise).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(photos / split / name / f"{i}.png")
    record = start(RunRequest(method="ncm", benchmark=f"folder:{photos}"), tmp_path / "run")
    assert record.data.classes == ["apple", "fig", "kiwi", "plum"]
    learner = morecl.load(tmp_path / "run" / "model")
    files = sorted(photos.glob("test/*/*.png"))
    predicted = learner.predict(files)
    right = [label == file.parent.name for label, file in zip(predicted.labels, files, strict=True)]
    assert 100 * np.mean(right) == pytest.approx(record.metrics.aca)
    side = learner.backbone.input.resize
    recipe = load_recipe(f"folder:{photos}")
    dataset = build_stream(recipe, folder_size=side).dataset
    assert record.data.fingerprint == dataset.fingerprint  # the run's images
    np.testing.assert_array_equal(learner.predict(dataset.x_test).ood_score, predicted.ood_score)
    with pytest.raises(InputError, match="at least 1 pixel, not 0"):
        build_stream(recipe, folder_size=0)
