"""The methods, one file each; :mod:`morecl.catalogue` names them. A method is imported when it is first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from morecl import catalogue
from morecl.errors import InputError, unknown_name
from morecl.late import late_names

if TYPE_CHECKING:  # torch takes seconds to import
    from morecl.methods.base import Learner, Output, Prediction

__all__ = ["METHODS", "Learner", "Output", "Prediction", "create", "method_class"]


class _Methods(Mapping[str, "type[Learner]"]):
    """Name -> class, imported when it is looked up."""

    def __getitem__(self, name: str) -> type[Learner]:
        module, _, cls = catalogue.METHODS[name].location.rpartition(".")
        return getattr(importlib.import_module(f"morecl.methods.{module}"), cls)

    def __iter__(self) -> Iterator[str]:
        return iter(catalogue.METHODS)

    def __len__(self) -> int:
        return len(catalogue.METHODS)


METHODS: Mapping[str, type[Learner]] = _Methods()

__getattr__ = late_names(__name__, {"base": ("Learner", "Output", "Prediction")})


def method_class(name: str) -> type[Learner]:
    """The class of the method called ``name``."""
    if not isinstance(name, str):
        raise InputError(f"a method is chosen by its name, such as 'more', not by {name!r}")
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def create(method: str, **settings: Any) -> Learner:
    """A new learner: ``create("more", backbone="vit_mini_patch4_32", memory_size=200, seed=0)``.

    ``settings`` are the fields of the method's ``Config``. An unknown setting is an error that names the nearest known
    one; a setting without effect is an error, too.
    """
    cls = method_class(method)
    config = cls.Config.parse(settings)
    cls.Config.refuse_idle(method, settings)
    config.refuse_switched_off(settings, further=True)
    return cls(config)
