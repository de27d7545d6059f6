"""The kinds of ViT that can take adapters, each one of timm's classes.

To add one, write ``families/NAME.py`` with a :class:`Family`, and add it here and to ``tests/family_members.py``; the
contract tests then run on it.
"""

from __future__ import annotations

from torch import nn

from morecl.errors import InputError
from morecl.nn.families.base import Family, ViT
from morecl.nn.families.beit import Beit
from morecl.nn.families.eva import Eva
from morecl.nn.families.plain import Plain

__all__ = ["FAMILIES", "Family", "ViT", "family_of", "refusal"]

FAMILIES: tuple[Family, ...] = (Plain(), Eva(), Beit())
_BY_CLASS = {family.network: family for family in FAMILIES}


def refusal(network: nn.Module) -> str | None:
    """Why ``network`` cannot take adapters, to be read after its name; ``None`` if it can."""
    family = _BY_CLASS.get(type(network))
    if family is not None:
        return family.refusal(network)
    classes = ", ".join(kind.__name__ for kind in _BY_CLASS)
    return (
        f"is a {type(network).__name__}, which cannot take adapters: they are made for ViTs, after the attention and "
        f"the MLP of each block (timm's {classes}). `morecl list backbones` shows those that can"
    )


def family_of(vit: ViT) -> Family:
    """The family of ``vit``. Raises :class:`InputError` if it cannot take adapters."""
    if reason := refusal(vit):
        raise InputError(f"the backbone {reason}")
    return _BY_CLASS[type(vit)]
