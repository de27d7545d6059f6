"""The methods, one file each. Adding one: write the file, name the class here; every contract test then runs on it."""

from __future__ import annotations

from typing import Any

from morecl.errors import unknown_name
from morecl.methods.agem import Agem
from morecl.methods.base import Learner, Output, Prediction
from morecl.methods.csc import Csc
from morecl.methods.derpp import Derpp
from morecl.methods.eeil import Eeil
from morecl.methods.finetune import Finetune
from morecl.methods.gd import Gd
from morecl.methods.hal import Hal
from morecl.methods.hat import Hat
from morecl.methods.icarl import Icarl
from morecl.methods.joint import Joint
from morecl.methods.more import More
from morecl.methods.ncm import Ncm
from morecl.methods.owm import Owm
from morecl.methods.pass_ import Pass
from morecl.methods.single import Single

_CLASSES: tuple[type[Learner], ...] = (
    *(More, Owm, Icarl, Agem, Eeil, Gd, Derpp, Hal, Pass, Hat),  # the paper's table
    *(Ncm, Csc),  # the frozen backbone
    *(Joint, Finetune, Single),  # bounds and reference
)
METHODS: dict[str, type[Learner]] = {method.name: method for method in _CLASSES}


def method_class(name: str) -> type[Learner]:
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def create(method: str, **settings: Any) -> Learner:
    """A new learner: ``create("more", backbone="vit_mini_patch4_32", memory_size=200, seed=0)``.

    ``settings`` are the fields of the method's ``Config``; an unknown one is an error that names the nearest, and one
    that would change nothing is an error, too.
    """
    cls = method_class(method)
    config = cls.Config.parse(settings)
    cls.Config.refuse_idle(method, settings)
    return cls(config)


__all__ = ["METHODS", "Learner", "Output", "Prediction", "create", "method_class"]
