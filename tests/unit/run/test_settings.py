"""The settings of a run: the recipe's, overridden by the user's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from morecl.catalogue import SHIPPED
from morecl.data import Recipe, load_recipe
from morecl.errors import InputError
from morecl.run import settings as module

DIGITS = load_recipe("digits-5t")


def effective_settings(method: str, recipe: Recipe, given: dict[str, Any], seed: int) -> dict[str, Any]:
    return module.effective_settings(method, given, module.recipe_settings(method, recipe, given), seed)


def settings(method: str = "more", seed: int = 0, **given: Any) -> dict[str, Any]:
    return effective_settings(method, DIGITS, given, seed)


def test_the_user_overrides_the_recipe() -> None:
    assert settings()["epochs"] == DIGITS.settings["epochs"]
    assert settings(epochs=3)["epochs"] == 3
    assert settings(seed=7)["seed"] == 7


def test_a_method_gets_only_the_recipes_settings_that_it_has() -> None:
    assert "bottleneck" not in settings("ncm")
    with pytest.raises(InputError, match="method 'ncm' has no setting bottleneck"):
        settings("ncm", bottleneck=3)


def test_a_method_that_trains_nothing_has_no_epochs() -> None:
    assert not {"epochs", "lr"} & settings("ncm").keys()
    with pytest.raises(InputError, match="'ncm' trains nothing on a frozen backbone: lr, epochs"):
        settings("ncm", lr=0.1, epochs=3)
    trained = settings("ncm", freeze_backbone=False, epochs=3)
    assert trained["epochs"] == 3 and trained["lr"] == DIGITS.settings["lr"]


@pytest.mark.parametrize(("given", "expected"), [({}, 16), ({"backbone": SHIPPED}, 16), ({"image_size": 32}, 32)])
def test_the_recipes_image_size_is_for_the_shipped_backbone(given: dict[str, Any], expected: int) -> None:
    assert settings(**given)["image_size"] == expected


def test_another_backbone_is_used_at_its_own_size() -> None:
    assert "image_size" not in settings(backbone="deit_small_patch16_224")
    assert settings(backbone="deit_small_patch16_224", image_size=64)["image_size"] == 64


def test_only_the_included_backbone_gets_the_settings_for_it() -> None:
    recipe = replace(DIGITS, included={"settings": {"epochs": 5}, "methods": {"more": {"lr": 0.5}}})
    for given in ({}, {"backbone": SHIPPED}):
        own = effective_settings("more", recipe, given, 0)
        assert (own["epochs"], own["lr"]) == (5, 0.5)
    other = effective_settings("more", recipe, {"backbone": "deit_small_patch16_224"}, 0)
    assert (other["epochs"], other["lr"]) == (DIGITS.settings["epochs"], DIGITS.settings["lr"])
    assert effective_settings("more", recipe, {"lr": 0.1}, 0)["lr"] == 0.1


@pytest.mark.parametrize(
    "given",
    [
        {"pretrained": False},
        {"pretrained": "no"},  # as the command line gives it
        {"freeze_backbone": False},
        {"freeze_backbone": "off"},
        {"backbone": "vit_base_patch16_224"},
    ],
)
def test_a_backbone_that_is_trained_or_of_the_recipe_is_not_the_included_one(given: dict[str, Any]) -> None:
    recipe = replace(DIGITS, included={"settings": {"epochs": 5}})
    assert effective_settings("more", recipe, given, 0)["epochs"] == DIGITS.settings["epochs"]
    own = replace(recipe, settings={**DIGITS.settings, **given})
    assert effective_settings("more", own, {}, 0)["epochs"] == DIGITS.settings["epochs"]
    of_more = replace(recipe, methods={"more": given})
    assert effective_settings("more", of_more, {}, 0)["epochs"] == DIGITS.settings["epochs"]
    assert effective_settings("hat", of_more, {}, 0)["epochs"] == 5


VIT = {"backbone": "deit_small_patch16_224"}


@pytest.mark.parametrize(
    ("method", "benchmark", "given", "rate"),
    [
        ("owm", "svhn-5t", VIT, 0.005),
        ("owm", "svhn-5t", VIT | {"lr": 0.1}, None),  # the user's
        ("owm", "svhn-5t", {}, None),  # of [included.methods]
        ("owm", "svhn-5t", {"freeze_backbone": "no"}, 0.005),
        ("ncm", "svhn-5t", VIT, None),  # trains nothing
        ("ncm", "svhn-5t", {"freeze_backbone": False}, 0.005),
        ("more", "svhn-5t", VIT, 0.005),
        ("more", "svhn-5t", VIT | {"preset": "paper"}, None),  # the paper's
        ("owm", "cifar10-5t", VIT, None),  # of [methods]
        ("owm", "cifar10-5t", VIT | {"freeze_backbone": False}, 0.001),  # which are for a frozen backbone
        ("finetune", "cifar10-5t", {"pretrained": "off"}, 0.00016),
        ("owm", "tinyimagenet-5t", VIT, None),
        ("owm", "tinyimagenet-5t", {}, 0.005),  # [included.settings] overrides [methods]
        ("ranpac", "digits-5t", VIT, 0.005),  # [methods.ranpac] has other settings
    ],
)
def test_nobody_chose_a_rate_if_the_recipe_has_none_for_the_method_and_backbone(
    method: str, benchmark: str, given: dict[str, Any], rate: float | None
) -> None:
    recipe = load_recipe(benchmark)
    assert module.unsearched_rate(method, recipe, given) == rate
    assert module.unsearched_rate(method, replace(recipe, source="my.toml"), given) is None
    assert module.unsearched_rate(method, replace(recipe, dataset="folder:photos"), given) is None


def test_a_preset_has_the_epochs_and_the_rate_of_the_paper() -> None:
    recipe = load_recipe("cifar100-10t")
    for given in ({}, {"backbone": "vit_base_patch16_224"}):
        found = effective_settings("more", recipe, {**given, "preset": "paper"}, 0)
        assert (found["epochs"], found["lr"]) == (40, 0.001)
    assert effective_settings("more", recipe, {"preset": "paper", "epochs": 5}, 0)["epochs"] == 5
    fixed = replace(DIGITS, methods={"more": {"back_update": False, "lr": 0.5}})
    found = effective_settings("more", fixed, {"preset": "paper"}, 0)
    assert found["back_update"] is False and found["lr"] == DIGITS.settings["lr"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"settings": {"epchs": 3}},
            r"^benchmark digits-5t, \[settings\]: unknown setting 'epchs'; did you mean 'epochs'",
        ),
        (
            {"methods": {"more": {"epchs": 3}}},
            r"^benchmark digits-5t, \[methods.more\]: unknown setting 'epchs'; did you mean 'epochs'",
        ),
        ({"methods": {"ncm": {"bottleneck": 3}}}, r"digits-5t, \[methods.ncm\]: unknown setting 'bottleneck'"),
        ({"methods": {"mroe": {"epochs": 3}}}, r"\[methods.mroe\]: unknown method 'mroe'; did you mean 'more'"),
        ({"included": {"settings": {"epchs": 3}}}, r"digits-5t, \[included.settings\]: unknown setting 'epchs'"),
        ({"included": {"methods": {"ncm": {"bottleneck": 3}}}}, r"\[included.methods.ncm\]: unknown setting"),
        ({"included": {"settings": {"backbone": "x"}}}, r"\[included.settings\]: cannot set backbone"),
        ({"settings": {"lr": "abc"}}, r"^benchmark digits-5t, \[settings\]: bad setting: lr='abc'"),
        ({"methods": {"hat": {"lr": -1}}}, r"^benchmark digits-5t, \[methods.hat\]: bad setting: lr=-1"),
        ({"settings": {"seed": 5}}, r"^benchmark digits-5t, \[settings\]: a recipe has no seed: give it as --seed"),
        ({"source": "my.toml", "settings": {"lr": 0}}, r"^my.toml, \[settings\]: bad setting: lr=0"),
    ],
)
def test_mistakes_in_the_settings_of_a_recipe_are_placed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        effective_settings("more", replace(DIGITS, **changes), {}, 0)
