"""What there is to choose from, as ``morecl list`` shows it: rows of name and one line of description.

What takes seconds to import (torch, timm) is imported where it is needed: the benchmarks are read from files.
"""

from __future__ import annotations

from morecl.catalogue import METHODS
from morecl.data import load_recipe, recipe_names


def listing(what: str) -> list[tuple[str, str]]:
    """Rows for ``methods``, ``benchmarks``, ``suites`` or ``backbones``."""
    return {"methods": _methods, "benchmarks": _benchmarks, "suites": _suites, "backbones": _backbones}[what]()


def _methods() -> list[tuple[str, str]]:
    return [(method.name, method.summary) for method in METHODS.values()]


def _benchmarks() -> list[tuple[str, str]]:
    rows = []
    for name in recipe_names():
        recipe = load_recipe(name)
        rows.append((name, f"{recipe.dataset}, {recipe.tasks} tasks"))
    return [*rows, ("folder:PATH", "your own images: one sub-folder per class")]


def _suites() -> list[tuple[str, str]]:
    from morecl.suite.plan import load_suite, suite_names

    return [(name, load_suite(name).description) for name in suite_names()]


def _backbones() -> list[tuple[str, str]]:
    import timm
    from timm.models import is_model_pretrained

    from morecl.catalogue import SHIPPED

    shipped = (SHIPPED, "2.7 M parameters, 32 px; ships with morecl (the default)")
    known = [*timm.list_models(module="deit"), *timm.list_models(module="vision_transformer")]
    usable = [name for name in known if name.startswith(("vit_", "deit")) and _is_usable(name)]
    weights = {True: "weights through timm", False: "no weights in timm: NAME@FILE"}
    rest = [(name, weights[is_model_pretrained(name)]) for name in usable]
    return [shipped, ("NAME@FILE, FILE", "a checkpoint of your own, .safetensors or .pth"), *rest]


def _is_usable(name: str) -> bool:
    """Whether ``load_backbone`` takes it: a plain ViT of pre-norm blocks. One block, without memory, tells."""
    import timm
    import torch
    from timm.models.vision_transformer import VisionTransformer

    from morecl.nn.backbone import refusal

    with torch.device("meta"):
        vit = timm.create_model(name, num_classes=0, depth=1)
    return type(vit) is VisionTransformer and refusal(vit) is None
