"""From uint8 images to the backbone's input, batch by batch on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from morecl.images import middle
from morecl.nn.augment import cropped, random_boxes

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class InputSpec:
    """The backbone's input: shorter side scaled to ``resize``, centre cropped to ``size`` x ``size``, normalised."""

    size: int
    resize: int
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD


class Preprocess:
    """timm's evaluation transform for batches on the device: resize (bicubic, antialiased), centre crop, normalise.

    Like PIL it resizes horizontally, then vertically, and rounds to 8 bits after each step. The result equals PIL's
    except for a few pixels that differ by one grey level, because they lie halfway between two.

    Shapes: uint8 (B, H, W, 3) -> float32 (B, 3, S, S).
    """

    def __init__(self, spec: InputSpec, device: torch.device):
        self.spec = spec
        self.mean = torch.tensor(spec.mean, device=device)[:, None, None] * 255
        self.std = torch.tensor(spec.std, device=device)[:, None, None] * 255

    def __call__(self, images: Tensor) -> Tensor:
        x = self._resized(images)
        top = round((x.shape[2] - self.spec.size) / 2)
        left = round((x.shape[3] - self.spec.size) / 2)
        x = x[:, :, top : top + self.spec.size, left : left + self.spec.size]
        return (x - self.mean) / self.std

    def augmented(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """For training: a random crop of each image instead of its centre, half of them mirrored."""
        x = self._resized(images)
        boxes = random_boxes(len(x), x.shape[2], x.shape[3], generator)
        return (cropped(x, boxes, self.spec.size) - self.mean) / self.std

    def _resized(self, images: Tensor) -> Tensor:
        """Shorter side as in the spec: uint8 (B, H, W, 3) -> whole numbers 0..255, float32 (B, 3, h, w)."""
        x = images.permute(0, 3, 1, 2).float()  # (B, 3, H, W)
        left, top, right, bottom = middle(x.shape[3], x.shape[2])
        x = x[:, :, top:bottom, left:right]
        height, width = x.shape[2:]
        if min(height, width) != self.spec.resize:
            short = min(height, width)
            size = (self.spec.resize * height // short, self.spec.resize * width // short)
            for step in ((height, size[1]), size):
                x = F.interpolate(x, step, mode="bicubic", antialias=True, align_corners=False).round().clamp(0, 255)
        return x
