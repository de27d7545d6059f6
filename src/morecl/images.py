"""Images with NumPy and Pillow only: arrays, PIL images and paths become uint8 arrays."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from morecl.files import there_or_at_home
from morecl.pictures import AnyImages, Pictures
from morecl.pictures import ImageArray as ImageArray

BEHIND = (128, 128, 128, 255)  # what is seen through transparent parts: grey, so that neither black nor white vanishes
STRIP = 32  # of an image longer than this many times its width, only the middle is scaled
CHANNELS = (1, 3, 4)  # grey, RGB, RGBA: an array with such a last dimension looks like H x W x channels


class DepthError(ValueError):
    """An image of more than 8 bits per channel."""


class ListedError(ValueError):
    """An item of a list that is no usable image. The message begins with its place; the cause says what is wrong."""


def open_image(path: str | Path, sized: Callable[[int], object] = lambda pixels: None) -> Image.Image:
    """The image in ``path``, upright and in RGB. Pillow's exceptions are passed on.

    ``sized`` is told the number of pixels before they are decoded.
    """
    path = there_or_at_home(path)
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # to open a named pipe would wait for ever
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with Image.open(path) as file:
        sized(file.width * file.height)
        ImageOps.exif_transpose(file, in_place=True)  # without a copy, which takes 4 bytes per pixel
        return colour(file)


def why_unreadable(error: Exception) -> str:
    """Why an image cannot be read, in a few words and without its path, from what opening it raised."""
    cause = error.__cause__ if isinstance(error, ListedError) else error  # Pillow's own causes say less
    if isinstance(cause, Image.DecompressionBombError):
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # above it Pillow refuses, above half of it it only warns
        return f"more than {limit // 10**6} million pixels"
    if isinstance(cause, UnidentifiedImageError):
        return "not an image, or of an unknown kind"
    if isinstance(cause, FileNotFoundError):
        return "does not exist"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    text = str(cause).removeprefix("image 0").lstrip(": ")
    if text == "Truncated File Read":  # of a JPEG's head; Pillow says it so of all other parts
        return "image file is truncated"
    return text or type(cause).__name__


def colour(image: Image.Image) -> Image.Image:
    """``image`` in RGB, transparent parts grey. More than 8 bits per channel are refused: Pillow would cut them off."""
    if image.mode == "F" or image.mode.startswith("I"):
        raise DepthError(f"mode {image.mode}: only 8 bits per channel are supported")
    if image.has_transparency_data:  # the colours behind it are anything, often none of the picture
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, BEHIND), above)
    return image.convert("RGB")


def square(image: Image.Image, side: int) -> ImageArray:
    """Resize the shorter side to ``side`` (bicubic) and crop the centre: (side, side, 3).

    This is the first half of every backbone's evaluation transform, so :class:`morecl.nn.preprocess.Preprocess` has
    nothing left to resize.
    """
    if (box := middle(*image.size)) != (0, 0, *image.size):  # to crop is to copy
        image = image.crop(box)
    width, height = image.size
    short = min(width, height)
    image = image.resize((side * width // short, side * height // short), Image.Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return np.asarray(image.crop((left, top, left + side, top + side)))


def to_side(images: ImageArray, side: int) -> ImageArray:
    """Apply :func:`square` to each image: (N, H, W, 3) -> (N, side, side, 3)."""
    if images.shape[1:3] == (side, side):
        return images
    return np.stack([square(Image.fromarray(image), side) for image in images])


def middle(width: int, height: int) -> tuple[int, int, int, int]:
    """The box (left, top, right, bottom) that is scaled: the whole image, or the middle of a very long strip.

    Scaling a whole strip could take gigabytes: 1 x 60,000 pixels would become 224 x 13,440,000.
    """
    longest = STRIP * min(width, height)
    left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
    return left, top, width - left, height - top


def as_images(images: Any, side: int) -> AnyImages:
    """:func:`as_array`, but :class:`Pictures` stay what they are and are not read."""
    return images if isinstance(images, Pictures) else as_array(images, side)


def as_array(images: Any, side: int) -> ImageArray:
    """``images`` as uint8 (N, H, W, 3).

    - An array (N, H, W, 3), NumPy or torch, is returned as is, without a copy; a second call costs nothing.
    - A stack of grey images, (N, H, W) or (N, H, W, 1), is repeated to three channels. A three-dimensional array whose
      last dimension is 1, 3 or 4 is refused, because it looks like one image H x W x channels; a stack of grey images
      that narrow must be passed as (N, H, W, 1).
    - A list may mix PIL images and paths, which are turned upright as their EXIF data say, and arrays (H, W, 3) or
      (H, W). Images larger than ``side``, or all of them if their sizes differ, are brought to ``side`` x ``side`` by
      :func:`square`.

    Raises:
        TypeError: not uint8, or not images at all.
        ValueError: wrong shape, empty image, unreadable or too large file, more than 8 bits per channel.
    """
    if hasattr(images, "detach"):
        images = images.detach().cpu().numpy()
    if isinstance(images, Pictures):
        return images[:]
    if isinstance(images, np.ndarray):
        return _stack(images)
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
    """``image`` as an array, squared if larger than ``side``: a list of photos would take gigabytes."""
    return square(image, side) if min(image.size) > side else np.asarray(image)


def _open(image: Any, index: int) -> Image.Image:
    """One item of a list as a PIL image in RGB; ``index`` is its place in the list, for error messages."""
    if isinstance(image, str | Path):
        try:
            return open_image(image)
        except FileNotFoundError as error:
            raise ListedError(f"image {index}: {image} does not exist") from error
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
            raise ListedError(f"image {index}: {image} cannot be read as an image ({error})") from error
    if isinstance(image, Image.Image):
        try:
            return colour(ImageOps.exif_transpose(image))
        except ValueError as error:
            raise ListedError(f"image {index}: {error}") from error
    if hasattr(image, "detach"):
        image = image.detach().cpu().numpy()
    if isinstance(image, np.ndarray):
        return Image.fromarray(_single(image, f"image {index}"))
    raise TypeError(f"image {index} is a {type(image).__name__}; expected a PIL image, a path or a uint8 array")


def _stack(array: NDArray[Any]) -> ImageArray:
    """Many images, (N, H, W), (N, H, W, 1) or (N, H, W, 3) -> (N, H, W, 3)."""
    _check_uint8(array, "images")
    if array.ndim == 3 and array.shape[2] in CHANNELS:
        raise ValueError(
            f"images has shape {array.shape}, which looks like one image H x W x {array.shape[2]}; pass one image as "
            "images[None] or in a list, a stack of grey images N x H x W as images[..., None]"
        )
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4:
        raise ValueError(f"images must have shape (N, H, W, 3) or (N, H, W), got {array.shape}")
    _check_channels(array, "images", "(N, H, W, 3) or (N, H, W)", array.shape)
    return _three_channels(array)


def _single(array: NDArray[Any], name: str) -> ImageArray:
    """One image, (H, W), (H, W, 1) or (H, W, 3) -> (H, W, 3)."""
    _check_uint8(array, name)
    image = array[..., None] if array.ndim == 2 else array
    if image.ndim != 3:
        raise ValueError(f"{name} must have shape (H, W, 3) or (H, W), got {array.shape}")
    _check_channels(image[None], name, "(H, W, 3) or (H, W)", array.shape)
    return _three_channels(image)


def _check_uint8(array: NDArray[Any], name: str) -> None:
    if array.dtype == np.uint8:
        return
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise ValueError(f"{name} must be uint8, got {array.dtype}; it holds NaN")
    raise TypeError(f"{name} must be uint8, got {array.dtype}; scale to 0..255 and use .astype('uint8')")


def _check_channels(array: NDArray[Any], name: str, expected: str, shape: tuple[int, ...]) -> None:
    """Check H, W and C of (N, H, W, C); ``shape`` is what the user passed."""
    _, height, width, channels = array.shape
    if channels == 4:
        raise ValueError(f"{name} has 4 channels, shape {shape}; drop the fourth (alpha) with [..., :3]")
    if channels not in (1, 3):
        hint = "; move the channels last" if height in CHANNELS else ""
        raise ValueError(f"{name} must have shape {expected}, got {shape}{hint}")
    if min(height, width) < 1:
        raise ValueError(f"{name} has an empty side: {shape}")


def _three_channels(array: NDArray[np.uint8]) -> ImageArray:
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array
