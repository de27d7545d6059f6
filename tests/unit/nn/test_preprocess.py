"""The data path equals timm's evaluation transform, which works on PIL images one at a time.

Tolerance: both resize in two passes and round to 8 bits after each. PIL's weights are fixed-point numbers, so a value
halfway between two grey levels may be rounded the other way. At least 99 % of the values are equal, 99.9 % within one
level, all within two, even for noise, the hardest case.
"""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform

from morecl.catalogue import SHIPPED
from morecl.nn.backbone import load_backbone
from morecl.nn.preprocess import IMAGENET_MEAN, IMAGENET_STD, InputSpec, Preprocess

CASES = [
    # height, width, input size, crop share
    (32, 32, 224, 0.9),
    (8, 8, 32, 1.0),
    (300, 200, 224, 0.9),
    (200, 300, 224, 0.875),
    (64, 64, 64, 1.0),
    (49, 98, 32, 1.0),  # 98 * 32 / 49 must not become 63.99...
    (45, 31, 24, 0.9),
    (248, 248, 224, 0.9),
]


def smooth(height: int, width: int) -> np.ndarray:
    """A picture with soft and hard edges: (height, width, 3)."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(9 * x + c) * np.cos(7 * y - c) for c in range(3)]
    picture = 127 + 100 * np.stack(waves, -1)
    picture[height // 3 : height // 2, width // 4 : width // 2] = (250, 5, 120)
    return picture.astype(np.uint8)


def grey_levels(x: torch.Tensor, spec: InputSpec) -> np.ndarray:
    """Back from normalised values to 0..255."""
    mean, std = (torch.tensor(v)[:, None, None] for v in (spec.mean, spec.std))
    return ((x * std + mean) * 255).numpy()


@pytest.mark.parametrize(("height", "width", "size", "crop"), CASES)
@pytest.mark.parametrize("kind", ["smooth", "noise"])
def test_equals_timms_transform(height: int, width: int, size: int, crop: float, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture = smooth(height, width) if kind == "smooth" else noise
    spec = InputSpec(size, int(size / crop))
    transform = create_transform(
        (3, size, size), interpolation="bicubic", crop_pct=crop, mean=IMAGENET_MEAN, std=IMAGENET_STD
    )
    expected = grey_levels(transform(Image.fromarray(picture)), spec)
    got = grey_levels(Preprocess(spec, torch.device("cpu"))(torch.from_numpy(picture)[None])[0], spec)
    assert got.shape == expected.shape == (3, size, size)
    difference = np.abs(got - expected).round(3)
    assert (difference == 0).mean() >= 0.99
    assert (difference <= 1).mean() >= 0.999
    assert difference.max() <= 2


def test_batches_and_single_images_agree() -> None:
    spec = InputSpec(16, 18)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 32, 40, 3), dtype=np.uint8))
    preprocess = Preprocess(spec, torch.device("cpu"))
    together = preprocess(images)
    assert together.dtype == torch.float32
    for image, row in zip(images, together, strict=True):
        difference = np.abs(grey_levels(preprocess(image[None])[0], spec) - grey_levels(row, spec)).round(3)
        assert (difference == 0).mean() >= 0.99  # a batch of another size may be computed in another order
        assert difference.max() <= 1


@pytest.mark.parametrize("name", [SHIPPED, "test_vit", "vit_tiny_patch16_224.augreg_in21k"])
def test_size_and_normalisation_come_from_the_backbone(name: str) -> None:
    spec = load_backbone(name, pretrained=False).input
    if name == SHIPPED:
        assert spec == InputSpec(32, 32, IMAGENET_MEAN, IMAGENET_STD)
    else:
        cfg = timm.create_model(name).pretrained_cfg
        assert spec.size == cfg["input_size"][1]
        assert spec.resize == int(cfg["input_size"][1] / cfg["crop_pct"])
        assert (spec.mean, spec.std) == (cfg["mean"], cfg["std"])
