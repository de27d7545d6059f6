"""Files of strangers: decoded as the classifier reads them, or refused with a reason, and never at any price."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from morecl.classifier.reading import read
from morecl.serve.uploads import LONGEST_FILE_NAME, decode, formats, shown_name

PIXELS = 1_000_000


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def photo(width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8))


def png_that_claims(width: int, height: int) -> bytes:
    """A valid header, and next to no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("size", [(40, 30), (16, 16), (5, 90)])
def test_an_upload_is_read_exactly_like_a_file(tmp_path: Path, kind: str, size: tuple[int, int]) -> None:
    data = saved(photo(*size), kind)
    (tmp_path / "x").write_bytes(data)
    found = decode(data, 16, PIXELS)
    assert not isinstance(found, str)
    assert np.array_equal(found, read([tmp_path / "x"], 16).images[0])


def test_a_photo_taken_upright_is_upright() -> None:
    image = Image.new("RGB", (20, 20))
    image.paste((255, 255, 255), (0, 0, 20, 10))  # white above
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    found = decode(saved(image, "PNG", exif=exif), 20, PIXELS)
    assert not isinstance(found, str)
    assert found[:8].max() == 0 and found[12:].min() == 255


@pytest.mark.parametrize(("width", "height"), [(1001, 1000), (100_000, 100_000), (2**31 - 1, 2**31 - 1)])
def test_too_many_pixels_are_refused_before_decoding(width: int, height: int) -> None:
    reason = decode(png_that_claims(width, height), 16, PIXELS)
    assert isinstance(reason, str) and "too many pixels" in reason and "1 million" in reason


def test_at_the_limit_it_is_accepted() -> None:
    assert not isinstance(decode(saved(Image.new("L", (1000, 1000)), "PNG"), 16, PIXELS), str)


def test_what_is_no_image_is_refused_with_a_reason() -> None:
    whole = saved(photo(), "PNG")
    for data in (b"text", whole[:60], whole[:-30], b"\0" * 500, png_that_claims(10, 10), png_that_claims(0, 10)):
        reason = decode(data, 16, PIXELS)
        assert isinstance(reason, str) and reason.startswith("not an image"), data[:20]
    assert decode(b"", 16, PIXELS) == "the file is empty"


def test_an_image_of_16_bits_and_a_damaged_one_say_so() -> None:
    deep, whole = io.BytesIO(), io.BytesIO()
    Image.fromarray(np.zeros((9, 9), np.uint16)).save(deep, "PNG")
    assert "only 8 bits per channel" in str(decode(deep.getvalue(), 8, 1000))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8)).save(whole, "JPEG")
    assert decode(whole.getvalue()[:-900], 8, 10_000) == "not an image that can be read: it is damaged"


def test_formats_that_run_other_programs_or_are_rare_are_not_even_tried() -> None:
    eps = saved(photo(), "EPS")
    assert eps.startswith(b"%!PS")
    for data in (eps, saved(photo(), "TGA"), saved(photo(), "PCX"), saved(photo(), "PDF")):
        assert isinstance(decode(data, 16, PIXELS), str)
    assert not {"EPS", "WMF", "FITS", "PSD"} & {*formats()}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("cat.jpg", "cat.jpg"),
        ("../../etc/passwd", "passwd"),
        ("C:\\photos\\cat.jpg", "cat.jpg"),
        ("..", ".."),
        ("a\0b\n.png", "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}.png"),
        ("", "image"),
        (None, "image"),
        ("folder/", "image"),
        ("x" * 1000, "x" * LONGEST_FILE_NAME),
    ],
)
def test_names_are_only_shown(given: str | None, shown: str) -> None:
    assert shown_name(given) == shown
