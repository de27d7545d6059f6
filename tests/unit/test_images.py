"""Arrays, PIL images and paths become uint8 (N, H, W, 3)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from morecl.images import STRIP, as_array, colour, open_image, square, to_side, why_unreadable
from morecl.nn.preprocess import InputSpec, Preprocess

SPEC = InputSpec(size=8, resize=10)
RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (3, 6, 5, 3), dtype=np.uint8)
RGBA = np.concatenate([COLOUR, COLOUR[..., :1]], -1)


def test_arrays_are_taken_as_they_are() -> None:
    assert as_array(COLOUR, SPEC.resize) is COLOUR
    assert np.array_equal(as_array(torch.from_numpy(COLOUR), SPEC.resize), COLOUR)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("pipe.png")
    monkeypatch.setattr(Image, "open", lambda path: pytest.fail(f"{path} is opened"))
    for name in ("pipe.png", "link.png"):
        with pytest.raises(ValueError, match="not a regular file") as caught:
            as_array([str(tmp_path / name)], SPEC.resize)
        assert why_unreadable(caught.value) == "not a regular file"


def test_grey_is_repeated() -> None:
    grey = COLOUR[..., 0]
    expected = np.stack([grey] * 3, -1)
    assert np.array_equal(as_array(grey, SPEC.resize), expected)
    assert np.array_equal(as_array(grey[..., None], SPEC.resize), expected)
    assert np.array_equal(as_array(list(grey), SPEC.resize), expected)


def test_one_image_needs_a_batch_dimension_or_a_list() -> None:
    """An array (6, 5, 3) was once read as six grey images."""
    for one in (COLOUR[:1], COLOUR[0][None], [COLOUR[0]], [Image.fromarray(COLOUR[0])]):
        assert np.array_equal(as_array(one, SPEC.resize), COLOUR[:1])


@pytest.mark.parametrize("width", [1, 3, 4])
def test_narrow_grey_images_are_passed_with_their_channel(width: int) -> None:
    narrow = RNG.integers(0, 256, (2, 6, width), dtype=np.uint8)
    expected = np.stack([narrow] * 3, -1)
    assert np.array_equal(as_array(narrow[..., None], SPEC.resize), expected)
    assert np.array_equal(as_array(list(narrow[..., None]), SPEC.resize), expected)


def test_three_grey_images_are_three_images() -> None:
    """Three images of H x W are not one image with its channels first."""
    assert as_array(COLOUR[..., 0], SPEC.resize).shape == (3, 6, 5, 3)


def test_lists_of_anything(tmp_path: Path) -> None:
    Image.fromarray(COLOUR[0]).save(tmp_path / "0.png")
    mixed: list[Any] = [tmp_path / "0.png", Image.fromarray(COLOUR[1]), torch.from_numpy(COLOUR[2])]
    assert np.array_equal(as_array(mixed, SPEC.resize), COLOUR)
    assert np.array_equal(as_array(tuple(str(p) for p in mixed[:1]), SPEC.resize), COLOUR[:1])
    assert as_array([], SPEC.resize).shape == (0, 10, 10, 3)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "LA"])
def test_every_kind_of_picture_becomes_colour(mode: str, tmp_path: Path) -> None:
    picture = Image.fromarray(COLOUR[0]).convert(mode)
    array = as_array([picture], SPEC.resize)
    assert array.shape == (1, 6, 5, 3) and array.dtype == np.uint8
    assert np.array_equal(array[0], np.asarray(picture.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_what_is_drawn_in_transparency_alone_is_seen(mode: str, tmp_path: Path) -> None:
    """White icons on nothing: without their transparency all are the same white square."""
    alpha = np.zeros((8, 8), np.uint8)
    alpha[:4] = 255
    drawn = np.dstack([np.full((8, 8, 3), 255, np.uint8), alpha])
    image = Image.fromarray(drawn).convert(mode if mode != "P" else "RGBA")
    if mode == "P":
        image = Image.fromarray((alpha // 255).astype(np.uint8)).convert("P")
        image.putpalette([255] * 6)
        image.info["transparency"] = 0
    image.save(tmp_path / "icon.png" if mode != "PA" else tmp_path / "icon.tif")
    seen = np.asarray(colour(image))
    assert (seen[:4] == 255).all() and (seen[4:] == 128).all()
    if mode != "PA":
        assert np.array_equal(np.asarray(open_image(tmp_path / "icon.png")), seen)
    shown = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    opaque = Image.fromarray(np.dstack([shown, np.full((8, 8), 255, np.uint8)]))
    assert np.array_equal(np.asarray(colour(opaque)), shown)


def test_photos_are_turned_as_their_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    Image.fromarray(COLOUR[0]).save(tmp_path / "turned.png", exif=exif)
    for image in (tmp_path / "turned.png", Image.open(tmp_path / "turned.png")):
        assert np.array_equal(as_array([image], SPEC.resize)[0], np.rot90(COLOUR[0], -1))


def test_sizes_that_differ_are_brought_to_one() -> None:
    sides = [(6, 5), (30, 20), (10, 10), (7, 40)]
    pictures = [Image.fromarray(RNG.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sides]
    array = as_array(pictures, SPEC.resize)
    assert array.shape == (4, 10, 10, 3)
    for picture, row in zip(pictures, array, strict=True):
        assert np.array_equal(square(picture, 10), row)
    assert np.array_equal(array[2], np.asarray(pictures[2]))


def test_large_pictures_are_not_kept_large() -> None:
    pictures = [Image.fromarray(RNG.integers(0, 256, (40, 60, 3), dtype=np.uint8)) for _ in range(2)]
    array = as_array(pictures, SPEC.resize)
    assert array.shape == (2, 10, 10, 3)
    assert np.array_equal(array[1], square(pictures[1], 10))


def test_square_keeps_the_middle() -> None:
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200
    assert (square(Image.fromarray(wide), 10) == 200).all()
    assert (square(Image.fromarray(wide.transpose(1, 0, 2)), 10) == 200).all()
    assert to_side(COLOUR, 10).shape == (3, 10, 10, 3)
    same = RNG.integers(0, 256, (2, 10, 10, 3), dtype=np.uint8)
    assert to_side(same, 10) is same


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (COLOUR.astype(np.float32) / 255, TypeError, "uint8, got float32.*0..255"),
        (np.full((2, 4, 4), np.nan), ValueError, "NaN"),
        (COLOUR.astype(bool), TypeError, "uint8"),
        (COLOUR.transpose(0, 3, 1, 2), ValueError, "channels last"),
        (COLOUR[0, 0], ValueError, r"\(N, H, W\)"),
        (COLOUR[None], ValueError, r"got \(1, 3, 6, 5, 3\)"),
        (COLOUR[:, :, :0], ValueError, "empty side"),
        (COLOUR[0], ValueError, r"\(6, 5, 3\), .* one image H x W x 3; .* images\[None\] or in a list"),
        (RGBA[0], ValueError, r"\(6, 5, 4\), .* one image H x W x 4; .* images\[None\]"),
        (torch.from_numpy(COLOUR[0, ..., :1]), ValueError, "one image H x W x 1"),
        (RGBA, ValueError, r"images has 4 channels, shape \(3, 6, 5, 4\); drop the fourth .* \[..., :3\]"),
        ([COLOUR[0], RGBA[1]], ValueError, r"image 1 has 4 channels, shape \(6, 5, 4\); drop"),
        ([COLOUR[0].transpose(2, 0, 1)], ValueError, r"image 0 must have .* got \(3, 6, 5\); move the channels last"),
        ([COLOUR], ValueError, r"image 0 must have shape \(H, W, 3\) or \(H, W\), got \(3, 6, 5, 3\)"),
        ([COLOUR[0, :0]], ValueError, r"image 0 has an empty side: \(0, 5, 3\)"),
        (["no-such-file.png"], ValueError, "image 0: no-such-file.png does not exist"),
        ([COLOUR[0], 3.5], TypeError, "image 1 is a float"),
        ([COLOUR[0], COLOUR[0].astype(float)], TypeError, "image 1 must be uint8"),
        (Image.fromarray(COLOUR[0]), TypeError, "list of PIL images"),
        ("a.png", TypeError, "got str"),
        (7, TypeError, "got int"),
    ],
)
def test_what_cannot_be_used(images: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_array(images, SPEC.resize)


def test_files_that_are_no_images(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("hello")
    good = tmp_path / "good.png"
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(good)
    (tmp_path / "half.png").write_bytes(good.read_bytes()[:4000])
    for name in ("text.png", "half.png"):
        with pytest.raises(ValueError, match=f"image 1: .*{name} cannot be read"):
            as_array([good, tmp_path / name], SPEC.resize)


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_more_than_eight_bits_are_refused_not_cut_off(mode: str, tmp_path: Path) -> None:
    picture = Image.fromarray(np.full((6, 5), 40_000, np.uint16)).convert(mode)
    with pytest.raises(ValueError, match=f"image 1: mode {mode}: only 8 bits per channel"):
        as_array([COLOUR[0], picture], SPEC.resize)
    picture.save(tmp_path / "deep.tif")
    with pytest.raises(ValueError, match=f"image 0: .*deep.tif cannot be read.*mode {mode}: only 8 bits per channel"):
        as_array([tmp_path / "deep.tif"], SPEC.resize)


def test_a_file_that_would_fill_the_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(COLOUR[0]).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match=r"image 0: .*bomb.png cannot be read as an image .*decompression bomb"):
        as_array([tmp_path / "bomb.png"], SPEC.resize)


def test_the_limit_of_pixels_is_named(tmp_path: Path) -> None:
    Image.new("1", (10_000, 17_900)).save(tmp_path / "wide.png")
    with pytest.raises(Image.DecompressionBombError) as caught:
        open_image(tmp_path / "wide.png")
    assert why_unreadable(caught.value) == "more than 178 million pixels"


def whole_then_cut(image: Image.Image, side: int) -> Any:
    """What ``square`` computes for every image that is not a strip."""
    short = min(image.size)
    image = image.resize((side * image.width // short, side * image.height // short), Image.Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return np.asarray(image.crop((left, top, left + side, top + side)))


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (7, 31), (31, 7), (64, 48), (3, 3 * STRIP), (3 * STRIP, 3)])
@pytest.mark.parametrize("side", [1, 10, 33])
def test_ordinary_images_are_scaled_as_a_whole(size: tuple[int, int], side: int) -> None:
    picture = Image.fromarray(RNG.integers(0, 256, (*size, 3), dtype=np.uint8))
    assert np.array_equal(square(picture, side), whole_then_cut(picture, side))


@pytest.mark.parametrize(("short", "long"), [(1, 200), (1, 201), (2, 334), (5, 1000)])
def test_of_a_strip_only_the_middle_is_scaled(short: int, long: int) -> None:
    """If the scale is a whole number, the result is the same as for the whole strip."""
    preprocess = Preprocess(InputSpec(10, 10, (0, 0, 0), (1, 1, 1)), torch.device("cpu"))
    strip = RNG.integers(0, 256, (short, long, 3), dtype=np.uint8)
    for pixels in (strip, strip.transpose(1, 0, 2)):
        picture = Image.fromarray(pixels)
        assert np.array_equal(square(picture, 10), whole_then_cut(picture, 10))
        shown = preprocess(torch.from_numpy(pixels[None].copy()))
        near = (shown[0].permute(1, 2, 0) * 255).round().numpy() - whole_then_cut(picture, 10)
        assert abs(near).max() <= 1


def test_a_very_long_strip_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = InputSpec(224, 224)
    strip = RNG.integers(0, 256, (1, 60_000, 3), dtype=np.uint8)
    sizes: list[tuple[int, int]] = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, *rest: sizes.append(size) or resize(self, size, *rest)
    )
    assert as_array([strip, COLOUR[0]], spec.resize).shape == (2, 224, 224, 3)
    assert max(max(size) for size in sizes) < 224 * (STRIP + 1) + 1
    assert Preprocess(spec, torch.device("cpu"))(torch.from_numpy(strip[None])).shape == (1, 3, 224, 224)
