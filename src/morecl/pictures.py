"""Single pictures, with Pillow alone: opened, made square. Nothing here needs torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

ImageArray = NDArray[np.uint8]
STRIP = 32  # times as long as wide: of a longer strip only the middle is scaled


def open_image(path: str | Path) -> Image.Image:
    """Upright, RGB. Whatever Pillow raises is left to the caller."""
    with Image.open(path) as file:
        return colour(ImageOps.exif_transpose(file))


def colour(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        raise ValueError(f"mode {image.mode}: only 8 bits a channel are understood")
    return image.convert("RGB")


def square(image: Image.Image, side: int) -> ImageArray:
    """The shorter side resized to ``side`` (bicubic), the centre cut out: (side, side, 3).

    The first half of every backbone's evaluation transform, so what follows (:class:`morecl.images.Preprocess`) finds
    the resize already done.
    """
    image = image.crop(middle(*image.size))
    width, height = image.size
    short = min(width, height)
    image = image.resize((side * width // short, side * height // short), Image.Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return np.asarray(image.crop((left, top, left + side, top + side)))


def to_side(images: ImageArray, side: int) -> ImageArray:
    """Every image of (N, H, W, 3) brought to (side, side) as :func:`square` does."""
    if images.shape[1:3] == (side, side):
        return images
    return np.stack([square(Image.fromarray(image), side) for image in images])


def middle(width: int, height: int) -> tuple[int, int, int, int]:
    """What the centre square is cut from (left, top, right, bottom): the whole image, but for the ends of a strip.

    A strip scaled as a whole would take gigabytes: one of 1 x 60,000 pixels becomes 224 x 13,440,000.
    """
    longest = STRIP * min(width, height)
    left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
    return left, top, width - left, height - top
