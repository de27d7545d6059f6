"""Which of timm's models can be backbones, with their sizes; quickly, for listings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import timm
from timm.models import is_model_pretrained
from torch import nn
from torch.overrides import TorchFunctionMode

from morecl.nn.families import Family, ViT, refusal

TIMMS_OWN_TESTS = "test_"  # names of models without use


@dataclass(frozen=True)
class Available:
    """A model of timm that can be a backbone."""

    name: str
    parameters: int
    image_size: int
    has_weights: bool  # that timm can fetch


def available(family: Family) -> list[Available]:
    """The models of a family that take adapters, by name."""
    names = [name for module in family.modules for name in timm.list_models(module=module)]
    found = (_examine(name, family) for name in sorted(names) if not name.startswith(TIMMS_OWN_TESTS))
    return [model for model in found if model is not None]


def _examine(name: str, family: Family) -> Available | None:
    with ShapesOnly(), _one_block(family.network) as depths:
        try:
            vit: ViT = timm.create_model(name, num_classes=0, device="meta")
        except AssertionError:  # its blocks differ, so it cannot be built with one
            return None
    if not depths or refusal(vit):
        return None
    once, each = _count(vit), _count(vit.blocks)
    size = vit.patch_embed.img_size[0]
    return Available(name, once + (depths[0] - 1) * each, size, is_model_pretrained(name))


def _count(module: ViT) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class ShapesOnly(TorchFunctionMode):
    """Leaves out what changes tensors in place: initial values, which take most of the time and are not looked at."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name.endswith("_") and not name.endswith("__"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def _one_block(network: type[nn.Module]) -> Iterator[list[int]]:
    """Meanwhile timm builds ``network`` with one block. The depths that were asked for are put into the list."""
    build: Any = network.__init__
    usual = inspect.signature(build).parameters["depth"].default
    asked: list[int] = []

    def build_one(self: nn.Module, *args: Any, depth: int = usual, **options: Any) -> None:
        asked.append(depth)
        build(self, *args, depth=1, **options)

    network.__init__ = build_one  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        network.__init__ = build  # type: ignore[method-assign]
