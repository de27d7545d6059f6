"""What a run is made of: the recipe, the method's defaults and what the user set."""

from __future__ import annotations

from typing import Any

import pytest

from morecl.data import load_recipe
from morecl.errors import InputError
from morecl.nn.backbone import SHIPPED
from morecl.runner import RunRequest, effective_settings

DIGITS = load_recipe("digits-5t")


def settings(method: str = "more", seed: int = 0, **given: Any) -> dict[str, Any]:
    return effective_settings(RunRequest(method=method, benchmark="digits-5t", seed=seed, settings=given), DIGITS)


def test_the_user_overrides_the_recipe() -> None:
    assert settings()["epochs"] == DIGITS.settings["epochs"]
    assert settings(epochs=3)["epochs"] == 3
    assert settings(seed=7)["seed"] == 7


def test_a_method_gets_only_what_it_knows_of_the_recipe() -> None:
    assert "bottleneck" not in settings("ncm")
    assert (
        settings("ncm", bottleneck=3)["bottleneck"] == 3
    )  # what the user set is passed on, to be refused with a message


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
