"""Images with NumPy and Pillow alone: from whatever the user has (arrays, PIL images, paths) to uint8 arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

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

    The first half of every backbone's evaluation transform: :class:`morecl.nn.preprocess.Preprocess` then finds the
    resize already done.
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


def as_array(images: Any, side: int) -> ImageArray:
    """``images`` as uint8 (N, H, W, 3).

    An array (N, H, W, 3) or (N, H, W), NumPy or torch, is taken as it is (grey is repeated three times). A list of
    PIL images, paths or single arrays is opened one by one; those that are larger, and all if they differ in size,
    are brought to ``side`` x ``side`` as :func:`square` does.

    Raises:
        TypeError: not uint8, or not images at all.
        ValueError: wrong number of dimensions, empty image, unreadable or too large file, more than 8 bits a channel.
    """
    if hasattr(images, "detach"):
        images = images.detach().cpu().numpy()
    if isinstance(images, np.ndarray):
        return _rgb(images, "images")
    if isinstance(images, str | bytes | Path | Image.Image) or not isinstance(images, Sequence):
        raise TypeError(
            f"images must be a uint8 array (N, H, W, 3) or (N, H, W), or a list of PIL images or paths; "
            f"got {type(images).__name__}"
        )
    if not images:
        return np.empty((0, side, side, 3), np.uint8)
    opened = [_no_larger(_open(image, index), side) for index, image in enumerate(images)]
    if len({image.shape for image in opened}) > 1:
        opened = [square(Image.fromarray(image), side) for image in opened]
    return np.stack(opened)


def _no_larger(image: Image.Image, side: int) -> ImageArray:
    """The image as an array, squared if it is larger than what is left of it in the end: photos take gigabytes."""
    return square(image, side) if min(image.size) > side else np.asarray(image)


def _open(image: Any, index: int) -> Image.Image:
    if isinstance(image, str | Path):
        try:
            return open_image(image)
        except FileNotFoundError as error:
            raise ValueError(f"image {index}: {image} does not exist") from error
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
            raise ValueError(f"image {index}: {image} cannot be read as an image ({error})") from error
    if isinstance(image, Image.Image):
        try:
            return colour(image)
        except ValueError as error:
            raise ValueError(f"image {index}: {error}") from error
    if hasattr(image, "detach"):
        image = image.detach().cpu().numpy()
    if isinstance(image, np.ndarray):
        array = image
        return Image.fromarray(_rgb(array[None], f"image {index}")[0])
    raise TypeError(f"image {index} is a {type(image).__name__}; expected a PIL image, a path or a uint8 array")


def _rgb(array: NDArray[Any], what: str) -> ImageArray:
    if array.dtype != np.uint8:
        nan = array.dtype.kind == "f" and bool(np.isnan(array).any())
        hint = "; it holds NaN" if nan else "; scale to 0..255 and use .astype('uint8')"
        raise (ValueError if nan else TypeError)(f"{what} must be uint8, got {array.dtype}{hint}")
    if array.ndim == 3:
        array = np.repeat(array[..., None], 3, axis=3)
    elif array.ndim == 4 and array.shape[3] == 1:
        array = np.repeat(array, 3, axis=3)
    if array.ndim != 4 or array.shape[3] != 3:
        hint = "; move the channels last" if array.ndim == 4 and array.shape[1] in (1, 3) else ""
        raise ValueError(f"{what} must have shape (N, H, W, 3) or (N, H, W), got {array.shape}{hint}")
    if min(array.shape[1:3]) < 1:
        raise ValueError(f"{what} have an empty side: {array.shape}")
    return array
