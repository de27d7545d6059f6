"""Merging the settings of a recipe with those of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from morecl.catalogue import SHIPPED
from morecl.data import Recipe
from morecl.errors import InputError, unknown_name
from morecl.methods import METHODS, method_class


def effective_settings(method: str, recipe: Recipe, given: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The recipe's settings that ``method`` has, overridden by the user's preset and those the user gave.

    A recipe's image size is meant for the shipped backbone. Any other backbone is used at its own size unless the user
    sets one.
    """
    config = method_class(method).Config
    _check_names(recipe)
    if foreign := [key for key in given if key not in config.model_fields and key in _all_settings()]:
        raise InputError(f"method {method!r} has no setting {', '.join(foreign)}; leave it out")
    included = given.get("backbone", SHIPPED) == SHIPPED
    of_recipe = recipe.settings_for(method, included=included)
    of_recipe = {key: value for key, value in of_recipe.items() if key in config.model_fields}
    if not included:
        of_recipe.pop("image_size", None)
    of_recipe = {key: value for key, value in of_recipe.items() if key not in config.preset_settings(given)}
    config.refuse_idle(method, given, of_recipe)
    return {**config.choose({**of_recipe, **given}), **given, "seed": seed}


def _check_names(recipe: Recipe) -> None:
    """Refuse settings that no method has and, in ``[methods.NAME]``, settings that NAME does not have."""
    for place, method, table in recipe.tables():
        known = set(method_class(method).Config.model_fields) if method else _all_settings()
        for key in table:
            if key not in known:
                raise unknown_name(f"setting in [{place}] of benchmark {recipe.name}", key, known)


def _all_settings() -> set[str]:
    return {key for method in METHODS.values() for key in method.Config.model_fields}
