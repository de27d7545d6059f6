"""From whatever the user has (arrays, PIL images, paths) to uint8 arrays, and from those to the backbone's input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from morecl.nn.backbone import InputSpec
from morecl.pictures import ImageArray, colour, middle, open_image, square


def as_array(images: Any, spec: InputSpec) -> ImageArray:
    """``images`` as uint8 (N, H, W, 3).

    An array (N, H, W, 3) or (N, H, W), NumPy or torch, is taken as it is (grey is repeated three times). A list of
    PIL images, paths or single arrays is opened one by one; those that are larger, and all if they differ in size,
    are brought to ``spec.resize`` x ``spec.resize`` as :func:`square` does.

    Raises:
        TypeError: not uint8, or not images at all.
        ValueError: wrong number of dimensions, empty image, unreadable or too large file, more than 8 bits a channel.
    """
    if isinstance(images, Tensor):
        images = images.detach().cpu().numpy()
    if isinstance(images, np.ndarray):
        return _rgb(images, "images")
    if isinstance(images, str | bytes | Path | Image.Image) or not isinstance(images, Sequence):
        raise TypeError(
            f"images must be a uint8 array (N, H, W, 3) or (N, H, W), or a list of PIL images or paths; "
            f"got {type(images).__name__}"
        )
    if not images:
        return np.empty((0, spec.resize, spec.resize, 3), np.uint8)
    opened = [_no_larger(_open(image, index), spec.resize) for index, image in enumerate(images)]
    if len({image.shape for image in opened}) > 1:
        opened = [square(Image.fromarray(image), spec.resize) for image in opened]
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
    if isinstance(image, np.ndarray | Tensor):
        array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
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


class Preprocess:
    """timm's evaluation transform for batches on the device: resize (bicubic, antialiased), centre crop, normalise.

    As PIL does it, horizontally first, then vertically, rounded to 8 bits each time; so the result equals PIL's but
    for one grey level in the rare pixel that lies between two.

    Shapes: uint8 (B, H, W, 3) -> float32 (B, 3, S, S).
    """

    def __init__(self, spec: InputSpec, device: torch.device):
        self.spec = spec
        self.mean = torch.tensor(spec.mean, device=device)[:, None, None] * 255
        self.std = torch.tensor(spec.std, device=device)[:, None, None] * 255

    def __call__(self, images: Tensor) -> Tensor:
        x = images.permute(0, 3, 1, 2).float()  # (B, 3, H, W)
        left, top, right, bottom = middle(x.shape[3], x.shape[2])
        x = x[:, :, top:bottom, left:right]
        height, width = x.shape[2:]
        if min(height, width) != self.spec.resize:
            short = min(height, width)
            size = (self.spec.resize * height // short, self.spec.resize * width // short)
            for step in ((height, size[1]), size):
                x = F.interpolate(x, step, mode="bicubic", antialias=True, align_corners=False).round().clamp(0, 255)
        top = round((x.shape[2] - self.spec.size) / 2)
        left = round((x.shape[3] - self.spec.size) / 2)
        x = x[:, :, top : top + self.spec.size, left : left + self.spec.size]
        return (x - self.mean) / self.std
