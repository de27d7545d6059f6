"""Which backbone a new model gets: ``auto`` takes a small strong ViT through timm, else the shipped one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from morecl.catalogue import SHIPPED
from morecl.config import LearnerConfig
from morecl.errors import InputError
from morecl.nn.backbone import Backbone, load_backbone
from morecl.nn.device import resolve_device

AUTO = "auto"


@dataclass(frozen=True)
class Candidate:
    """A backbone that ``auto`` may take."""

    name: str  # timm's
    megabytes: int  # to download


# The larger one needs a GPU: on two CPU cores it trains on some 3 images a second, the smaller one on 10.
ON_GPU = Candidate("vit_small_patch16_224.augreg_in21k_ft_in1k", 88)
ON_CPU = Candidate("vit_tiny_patch16_224.augreg_in21k_ft_in1k", 23)


def choose_backbone(spec: str, config: LearnerConfig, say: Callable[[str], None]) -> tuple[str, Backbone]:
    """The backbone ``spec`` with the size, weights and device of ``config``, and its name for the config.

    Args:
        say: told what ``auto`` takes, and what is lost if it has to take the shipped one.
    """

    def load(name: str) -> tuple[str, Backbone]:
        size, pretrained = config.image_size, config.pretrained
        return name, load_backbone(name, image_size=size, pretrained=pretrained, seed=config.seed)

    if spec != AUTO:
        return load(spec)
    wanted = ON_CPU if resolve_device(config.device).type == "cpu" else ON_GPU
    if is_cached(wanted.name):
        say(f"backbone: {wanted.name}, from the local cache")
    else:
        say(f"backbone: {wanted.name}; its weights are fetched once, {wanted.megabytes} MB")
    try:
        return load(wanted.name)
    except InputError as error:
        say(str(error))
        say(
            f"Taking the included backbone {SHIPPED} instead: it sees only 32 x 32 pixels and knows little of "
            "photos, so expect far more errors. To use another one, start a new model with --backbone NAME@FILE."
        )
    return load(SHIPPED)


def is_cached(name: str) -> bool:
    """Whether timm's weights of ``name`` are in the hub's local cache."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    cfg = timm.get_pretrained_cfg(name)
    if cfg is None or not cfg.hf_hub_id:
        return False
    files = ("model.safetensors", "pytorch_model.bin")
    return any(isinstance(try_to_load_from_cache(cfg.hf_hub_id, file), str) for file in files)
