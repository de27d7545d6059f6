"""Random crops and mirror images for training, for a whole batch at once on the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

AREA = (0.08, 1.0)  # of a crop, as a part of the image's
RATIO = (3 / 4, 4 / 3)  # of its width to its height


def random_boxes(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """(count, 5) on the CPU: centre x and y, width and height in pixels, and 1 for a mirror image, else 0.

    Area and the logarithm of the ratio are uniform within ``AREA`` and ``RATIO``, then the place is (Szegedy et al.
    2015; torchvision's ``RandomResizedCrop``). Where torchvision would draw again because the crop is wider or higher
    than the image, it is made as wide or high as the image. Half of the images are mirrored.
    """
    area, ratio, x, y, mirror = torch.rand(5, count, generator=generator)
    area = (AREA[0] + area * (AREA[1] - AREA[0])) * height * width
    low, high = map(math.log, RATIO)
    ratio = (low + ratio * (high - low)).exp()
    w = (area * ratio).sqrt().clamp(max=width)
    h = (area / ratio).sqrt().clamp(max=height)
    return torch.stack([w / 2 + x * (width - w), h / 2 + y * (height - h), w, h, (mirror < 0.5).float()], 1)


def cropped(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """The ``boxes`` (B, 5) of ``images`` (B, 3, H, W) in 0..255, resized (bicubic): (B, 3, size, size)."""
    height, width = images.shape[2:]
    if not len(images):  # refused by affine_grid
        return images.new_empty(0, 3, size, size)
    x, y, w, h, mirror = boxes.to(images.device, non_blocking=True).unbind(1)
    zero = torch.zeros_like(x)
    across = torch.stack([w / width * (1 - 2 * mirror), zero, 2 * x / width - 1], 1)
    down = torch.stack([zero, h / height, 2 * y / height - 1], 1)
    grid = F.affine_grid(torch.stack([across, down], 1), [len(images), 3, size, size], align_corners=False)
    made = F.grid_sample(images, grid, mode="bicubic", padding_mode="border", align_corners=False)
    return made.clamp(0, 255)
