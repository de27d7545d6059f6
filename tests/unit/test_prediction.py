from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from morecl import prediction
from morecl.data import SkippedImagesWarning
from morecl.methods import Learner
from morecl.prediction import chunks

IMAGES = np.concatenate([tiny.pictures(kind, 10) for kind in range(4)])


@pytest.fixture(scope="module")
def learner() -> Learner:
    learner = tiny.create("more", eval_batch_size=4)
    for kinds in ([0, 1], [2, 3]):
        learner.learn_task(*tiny.task(kinds, kinds, 6))
    return learner


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "CHUNK", 8)


def files(folder: Path, count: int = 10, broken: tuple[int, ...] = ()) -> list[Path]:
    paths = [folder / f"{k}.png" for k in range(count)]
    for k, path in enumerate(paths):
        if k in broken:
            path.write_bytes(b"not an image")
        else:
            Image.fromarray(IMAGES[k]).save(path)
    return paths


@pytest.mark.parametrize(("batch", "sizes"), [(8, [8, 2]), (3, [6, 4]), (16, [10])])
def test_chunks_are_whole_batches(batch: int, sizes: list[int], small_chunks: None) -> None:
    for images in (IMAGES[:10], torch.from_numpy(IMAGES[:10]), list(IMAGES[:10]), iter(IMAGES[:10])):
        parts = list(chunks(images, batch, 8))
        assert [part.count for part in parts] == sizes and [part.first for part in parts] == [0, sizes[0]][: len(parts)]
        assert np.array_equal(np.concatenate([part.images for part in parts]), IMAGES[:10])


def test_answers_do_not_depend_on_chunks(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of the same batches are the same bits; scores are those of other numbers of rows, which may round."""
    whole = learner.predict(IMAGES), learner.scores(IMAGES), learner.features(IMAGES, task=1)
    monkeypatch.setattr(prediction, "CHUNK", 8)
    parts = learner.predict(IMAGES), learner.scores(IMAGES), learner.features(IMAGES, task=1)
    assert np.array_equal(whole[2], parts[2])
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-9)
    assert parts[0].labels == whole[0].labels and np.array_equal(parts[0].task, whole[0].task)
    np.testing.assert_allclose(parts[0].confidence, whole[0].confidence, rtol=1e-9)
    np.testing.assert_allclose(parts[0].ood_score, whole[0].ood_score, rtol=1e-9)


def test_no_more_images_are_opened_than_a_chunk_holds(learner: Learner, small_chunks: None) -> None:
    """When the network sees the last image of a chunk, the next chunk has not been asked for."""
    given, seen = 0, list[int]()

    def source() -> Iterator[np.ndarray]:
        nonlocal given
        for image in IMAGES:
            given += 1
            yield image

    prepare = learner.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "prepare", lambda images: seen.append(given) or prepare(images))
        learner.predict(source())
    assert seen == [8, 16, 24, 32, 40]


def test_a_bad_file_is_named(learner: Learner, tmp_path: Path, small_chunks: None) -> None:
    paths = files(tmp_path, broken=(9,))
    with pytest.raises(ValueError, match=rf"image 9: {paths[9]} cannot be read as an image"):
        learner.predict(paths)
    with pytest.raises(ValueError, match=r"image 8: .*does not exist"):
        learner.scores(iter([*paths[:8], tmp_path / "none.png"]))
    with pytest.raises(TypeError, match="image 8: is a int"):
        learner.predict([*paths[:8], 3])


def test_bad_files_are_skipped_if_asked(learner: Learner, tmp_path: Path, small_chunks: None) -> None:
    paths = files(tmp_path, broken=(2, 9))
    with pytest.warns(SkippedImagesWarning, match=r"2 of 10 images could not be read .*2\.png.*9\.png"):
        p = learner.predict(paths, on_error="skip")
    bad = np.isin(np.arange(10), (2, 9))
    assert [label is None for label in p.labels] == bad.tolist()
    assert np.array_equal(np.isnan(p.confidence), bad) and np.array_equal(np.isnan(p.ood_score), bad)
    assert np.array_equal(p.task == -1, bad)
    good = learner.predict([path for path, skip in zip(paths, bad, strict=True) if not skip])
    assert [label for label in p.labels if label is not None] == good.labels
    np.testing.assert_allclose(p.confidence[~bad], good.confidence, rtol=1e-4)


def test_nothing_readable_is_an_answer_too(learner: Learner, tmp_path: Path) -> None:
    with pytest.warns(SkippedImagesWarning, match="2 of 2"):
        p = learner.predict(files(tmp_path, 2, broken=(0, 1)), on_error="skip")
    assert p.labels == [None, None] and np.isnan(p.confidence).all()


@pytest.mark.parametrize("images", [5, None, "image.png", IMAGES[0, 0, 0, 0], IMAGES.astype(float)])
def test_what_is_no_images_is_refused_whatever_is_asked(learner: Learner, images: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="images"):
        learner.predict(images, on_error="skip")


def test_an_unknown_way_out_is_refused(learner: Learner) -> None:
    with pytest.raises(ValueError, match="'raise' or 'skip', not 'ignore'"):
        learner.predict(IMAGES, on_error="ignore")  # type: ignore[arg-type]
