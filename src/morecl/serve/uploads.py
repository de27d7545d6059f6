"""Uploaded files -> arrays. They come from strangers: only a few formats, and the size is checked before decoding.

Names of uploaded files are text to show. They are never used as a path.
"""

from __future__ import annotations

import io
from functools import cache

from PIL import Image, ImageOps, UnidentifiedImageError

from morecl.images import DepthError, ImageArray, as_array, colour, to_side

# What browsers and cameras make. Pillow knows more formats; some start other programs, many are hardly ever read.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
LONGEST_FILE_NAME = 200


@cache
def formats() -> tuple[str, ...]:
    """Those of ``FORMATS`` that this build of Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def shown_name(name: str | None) -> str:
    """The last part of a file's name, fit to be shown: printable and short."""
    last = (name or "").replace("\\", "/").rpartition("/")[2]
    text = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in last)
    return text[:LONGEST_FILE_NAME] or "image"


def decode(data: bytes, side: int, pixels: int) -> ImageArray | str:
    """The image as a square (side, side, 3), exactly as the classifier reads it from a file; or why it cannot be read.

    Args:
        pixels: more than this many are refused before anything is decoded.
    """
    if not data:
        return "the file is empty"
    try:
        with Image.open(io.BytesIO(data), formats=formats()) as image:
            width, height = image.size
            if width * height > pixels:
                return f"too many pixels: {width} x {height}; at most {pixels / 1e6:g} million are accepted"
            ImageOps.exif_transpose(image, in_place=True)
            return to_side(as_array([colour(image)], side), side)[0]
    except DepthError as error:
        return str(error)
    except UnidentifiedImageError:
        return f"not an image that can be read ({', '.join(formats())} are)"
    except MemoryError:
        return "too large to decode"
    except Image.DecompressionBombError:
        return f"too many pixels; at most {pixels / 1e6:g} million are accepted"
    except Exception:  # Pillow's decoders raise almost anything
        return "not an image that can be read: it is damaged"
