"""What a run is made of: the recipe, the method's defaults and what the user set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from morecl.data import load_recipe
from morecl.errors import InputError
from morecl.locking import claimed
from morecl.nn.backbone import SHIPPED
from morecl.runner import RunRequest, effective_settings, start

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
