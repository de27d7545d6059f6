"""Images that do not fit into memory wait on disk; nothing else differs."""

from __future__ import annotations

import os
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny
from morecl import images as image_files
from morecl.classifier import Classifier, reading
from morecl.data import decoding
from morecl.data.cache import cache_root
from morecl.errors import InputError
from morecl.pictures import Pictures

SIDE = 8


@pytest.fixture()
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "available_bytes", lambda: 1000)  # five images of 8 x 8


def photos(count: int = 15) -> tuple[list[np.ndarray], list[str]]:
    images = [image for kind in (0, 1) for image in tiny.pictures(kind, count)]
    return images, [name for name in ("ant", "bee") for _ in range(count)]


@pytest.fixture()
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{i}.png" for i in range(20)]
    for path, image in zip(made, tiny.pictures(0, 20), strict=True):
        Image.fromarray(image).save(path)
    made[3].write_bytes(b"no image")
    return made


def test_what_is_on_disk_is_what_would_be_in_memory(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    held = reading.read(files, SIDE)
    monkeypatch.setattr(reading, "available_bytes", lambda: 1000)
    spilled = reading.read(files, SIDE)
    assert isinstance(held.images, np.ndarray) and isinstance(spilled.images, Pictures)
    assert spilled.problems == held.problems and [index for index, _ in held.problems] == [3]
    assert np.array_equal(spilled.positions, held.positions) and len(held.positions) == 19
    assert np.array_equal(spilled.images[:], held.images)
    assert np.array_equal(spilled.images[[7, 2, 2, 18]], held.images[[7, 2, 2, 18]])


def test_large_images_come_one_after_the_other_and_few_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes memory while it is decoded, and a thread keeps some of that memory."""
    rng, square = np.random.default_rng(0), image_files.square
    sizes = [(40, 30), (12, 12)] * 12
    given: list[Path | Image.Image] = []
    for i, (width, height) in enumerate(sizes):
        picture = Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8))
        picture.save(tmp_path / f"{i}.png")
        given.append(tmp_path / f"{i}.png" if i % 4 < 2 else picture)
    expected = [square(image_files.open_image(tmp_path / f"{i}.png"), SIDE) for i in range(len(sizes))]
    now = {True: 0, False: 0}
    most = dict(now)
    threads: dict[bool, set[int]] = {True: set(), False: set()}
    changed = threading.Condition()
    several = True  # whether small ones are to come at once

    def watched(image: Image.Image, side: int) -> np.ndarray:
        large = image.width > 20
        with changed:
            threads[large].add(threading.get_ident())
            now[large] += 1
            most[large] = max(most[large], now[large])
            changed.notify_all()
            if several and not large:  # a busy machine may be slow to start the other thread
                assert changed.wait_for(lambda: most[False] > 1, timeout=60), "one by one"
        time.sleep(0.01)
        with changed:
            now[large] -= 1
        return square(image, side)

    for module in (decoding, image_files):
        monkeypatch.setattr(module, "square", watched)
    monkeypatch.setattr(decoding, "LARGE", 1000)
    monkeypatch.setattr(reading, "usable_cores", lambda: 64)
    found = reading.read(given, SIDE)
    assert np.array_equal(found.images, expected) and not found.problems
    assert most[True] == len(threads[True]) == 1
    assert 1 < most[False] <= len(threads[False]) <= reading.THREADS
    monkeypatch.setattr(reading, "usable_cores", lambda: 1)
    most[False], several = 0, False
    assert np.array_equal(reading.read(given, SIDE).images, expected) and most[False] == 1


def test_a_large_image_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LARGE", 100)
    Image.fromarray(tiny.pictures(0, 1)[0]).resize((64, 64)).save(tmp_path / "a.png")
    os.truncate(tmp_path / "a.png", 60)
    assert reading.read([tmp_path / "a.png"], SIDE).problems == [(0, "image file is truncated")]


def test_few_images_stay_in_memory(files: list[Path], little_memory: None) -> None:
    assert isinstance(reading.read(files[:2], SIDE).images, np.ndarray)


def test_a_lesson_from_disk_is_the_same_lesson(monkeypatch: pytest.MonkeyPatch) -> None:
    def learned() -> Classifier:
        made = Classifier(tiny.create("morerp", memory_size=20))
        images, names = photos()
        made.learn(images, names)
        made.add([*tiny.pictures(1, 15, draw=1)], ["bee"] * 15)
        return made

    in_memory = learned()
    monkeypatch.setattr(reading, "available_bytes", lambda: 1000)
    taught = []
    monkeypatch.setattr(reading, "Pictures", lambda source: (taught.append(source), Pictures(source))[1])
    from_disk = learned()
    assert len(taught) == 2
    tiny.assert_same(tiny.snapshot(from_disk.learner), tiny.snapshot(in_memory.learner))
    assert np.array_equal(from_disk.held.images, in_memory.held.images)
    assert np.array_equal(from_disk.seen.prints, in_memory.seen.prints)
    assert np.array_equal(from_disk.measured.ood_scores, in_memory.measured.ood_scores)


def test_a_part_of_what_was_read_keeps_names_and_problems(files: list[Path]) -> None:
    found = reading.read(files, SIDE)
    part = reading.Decoded([file.name for file in files], found).part([7, 3, 0])
    assert [reading.name_in(part, i) for i in range(len(part))] == ["7.png", "3.png", "0.png"]
    told: list[tuple[int, int]] = []
    images, positions, problems = reading.read(part, SIDE, lambda *numbers: told.append(numbers))
    assert positions.tolist() == [0, 2] and told == [(3, 3)]
    assert problems == [(1, found.problems[0][1])]
    assert np.array_equal(images[:], tiny.pictures(0, 20)[[7, 0]])
    assert [reading.name_in(part.part([2, 1]), i) for i in range(2)] == ["0.png", "3.png"]
    assert reading.read(part.part([2, 1]), SIDE).positions.tolist() == [0]


def test_a_lesson_of_what_was_read_is_the_same_lesson() -> None:
    images, names = photos()
    one, other = (Classifier(tiny.create("morerp", memory_size=20)) for _ in range(2))
    one.learn(images, names)
    everything = list(range(len(images)))
    other.learn(reading.Decoded.of(np.stack(images), [str(i) for i in everything]).part(everything), names)
    tiny.assert_same(tiny.snapshot(one.learner), tiny.snapshot(other.learner))
    assert np.array_equal(one.held.images, other.held.images)


def test_nothing_stays_on_disk(files: list[Path], little_memory: None) -> None:
    before = sorted(cache_root().iterdir()) if cache_root().exists() else []
    reading.read(files, SIDE)
    assert sorted(cache_root().iterdir()) == before


def test_a_disk_that_fills_up_meanwhile(
    files: list[Path], little_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reading.PixelFile, "write", full)
    with pytest.raises(InputError, match=r"20 images at 8 x 8 .*No space left on device.*MORECL_CACHE"):
        reading.read(files, SIDE)


def test_neither_memory_nor_disk(files: list[Path], little_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(reading.shutil, "disk_usage", lambda path: usage(0, 0, 2_000_000_000 - 1_500_000_000))
    with pytest.raises(InputError, match=r"20 images at 8 x 8 .* 0\.5 GB are free.*MORECL_CACHE"):
        reading.read(files, SIDE)
