"""Image files are decoded by several threads, large ones by one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from morecl.data import decoding
from morecl.data.decoding import Streamed, decode, decode_all
from morecl.images import square

SIDE = 8


@pytest.fixture()
def files(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    made = [tmp_path / f"{i:02d}.png" for i in range(24)]
    for i, path in enumerate(made):
        height, width = (30, 40) if i % 2 else (12, 12)
        Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8)).save(path)
    return made


@pytest.mark.parametrize("streamed", [False, True])
def test_large_images_of_a_folder_come_one_after_the_other(
    files: list[Path], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes memory while it is decoded, however many cores there are."""
    expected = [decode(file, SIDE) for file in files]
    threads: dict[bool, set[int]] = {True: set(), False: set()}

    def watched(image: Image.Image, side: int) -> np.ndarray:
        threads[image.width > 20].add(threading.get_ident())
        time.sleep(0.01)
        return square(image, side)

    monkeypatch.setattr(decoding, "square", watched)
    monkeypatch.setattr(decoding, "LARGE", 1000)
    monkeypatch.setattr(decoding, "usable_cores", lambda: 8)
    monkeypatch.setattr(decoding, "BLOCK_BYTES", 2 * 3 * SIDE * SIDE)
    found = np.zeros((len(files), SIDE, SIDE, 3), np.uint8)
    if streamed:
        Streamed(files, SIDE).read(np.arange(len(files)), found)
    else:
        assert not decode_all(files, SIDE, lambda start, some: np.copyto(found[start:][: len(some)], some))
    assert np.array_equal(found, expected)
    assert len(threads[True]) == 1 < len(threads[False])
    assert not threads[True] & threads[False]


def test_a_large_file_that_cannot_be_read_is_named(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LARGE", 1000)
    data = files[1].read_bytes()
    files[1].write_bytes(data[: len(data) // 2])
    assert decode_all(files, SIDE, lambda start, some: None) == {1: "image file is truncated"}
