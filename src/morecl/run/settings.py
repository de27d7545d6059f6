"""Merging the settings of a recipe with those of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from morecl.catalogue import SHIPPED
from morecl.config import LearnerConfig
from morecl.data import Recipe
from morecl.data.datasets import FOLDER
from morecl.errors import InputError, placed, unknown_name
from morecl.methods import METHODS, method_class

NOT_INCLUDED = {"backbone", "pretrained", "freeze_backbone"}
CHOSEN = {"lr", "epochs"}  # in the packaged recipes, on held-out images


def recipe_settings(method: str, recipe: Recipe, given: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's settings that ``method`` has and that apply beside those the user gave.

    - What a recipe has for the included backbone was chosen for its features: it applies if that backbone is used as it
      is, pre-trained and frozen.
    - A preset is the settings of a paper, and so are epochs and rate in the recipe's ``[settings]``. So those that were
      chosen for the method do not apply.
    - A recipe's image size is meant for the shipped backbone. Any other backbone is used at its own size unless the
      user sets one.
    """
    config = method_class(method).Config
    _check(recipe, method)
    included = _included(method, recipe, given)
    of_recipe = recipe.settings_for(method, included=included and not given.get("preset"))
    if given.get("preset"):
        of_recipe |= {key: value for key, value in recipe.settings.items() if key in CHOSEN}
    kept = {key: value for key, value in of_recipe.items() if key in config.model_fields}
    if given.get("backbone", SHIPPED) != SHIPPED:
        kept.pop("image_size", None)
    return {key: value for key, value in kept.items() if key not in config.preset_settings(given)}


def effective_settings(
    method: str, given: Mapping[str, Any], of_recipe: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """The settings ``of_recipe`` (:func:`recipe_settings`), overridden by the user's preset and those the user gave."""
    config = method_class(method).Config
    if foreign := [key for key in given if key not in config.model_fields and key in _all_settings()]:
        raise InputError(f"method {method!r} has no setting {', '.join(foreign)}; leave it out")
    config.refuse_idle(method, given, of_recipe)
    return {**config.choose({**of_recipe, **given}), **given, "seed": seed}


def unsearched_rate(method: str, recipe: Recipe, given: Mapping[str, Any]) -> float | None:
    """The rate that ``method`` trains at, if nobody chose it: the user gave none, and a packaged recipe has none of the
    method's own, or has it for a pre-trained, frozen backbone, which this is not. A preset's rate is the paper's.
    """
    if recipe.source or recipe.dataset.startswith(FOLDER) or "lr" in given or given.get("preset"):
        return None
    own = recipe.has_own("lr", method, included=_included(method, recipe, given))
    if own and _as_it_is(method, recipe, given):
        return None
    return effective_settings(method, given, recipe_settings(method, recipe, given), 0).get("lr")


def check_machine(config: LearnerConfig) -> None:
    """Raise :class:`InputError` if the device, or the file with the backbone, is not on this machine."""
    if config.backbone != SHIPPED:
        from morecl.nn.backbone import require_file

        require_file(config.backbone)
    if config.device not in ("auto", "cpu"):
        from morecl.nn.device import resolve_device

        resolve_device(config.device)


def _included(method: str, recipe: Recipe, given: Mapping[str, Any]) -> bool:
    """Whether the backbone is the included one as it is."""
    used = {"backbone": SHIPPED, **_of_any_backbone(method, recipe), **given}
    return bool(used["backbone"] == SHIPPED and _as_it_is(method, recipe, given))


def _of_any_backbone(method: str, recipe: Recipe) -> Mapping[str, Any]:
    """What the recipe sets for ``method`` on every backbone."""
    return recipe.settings_for(method, included=False)


def _as_it_is(method: str, recipe: Recipe, given: Mapping[str, Any]) -> bool:
    """Whether the backbone is pre-trained and frozen."""
    used = {"pretrained": True, "freeze_backbone": True, **_of_any_backbone(method, recipe), **given}
    switches = method_class(method).Config.parse({key: used[key] for key in ("pretrained", "freeze_backbone")})
    return switches.pretrained and switches.freeze_backbone  # "off" was one, too


def _check(recipe: Recipe, asked: str) -> None:
    """Refuse settings that no method has and, in ``[methods.NAME]``, settings that NAME does not have; and bad values,
    those for all methods as far as the method that is ``asked`` for has them.
    """
    for place, method, table in recipe.tables():
        with placed(f"{recipe.where}, [{place}]"):
            config = method_class(method or asked).Config
            known = set(config.model_fields) if method else _all_settings()
            for key in table:
                if place.startswith("included") and key in NOT_INCLUDED:
                    raise InputError(f"cannot set {key}: it is for the included backbone")
                if key == "seed":
                    raise InputError("a recipe has no seed: give it as --seed")
                if key not in known:
                    raise unknown_name("setting", key, known)
            config.parse({key: value for key, value in table.items() if key in config.model_fields})


def _all_settings() -> set[str]:
    return {key for method in METHODS.values() for key in method.Config.model_fields}
