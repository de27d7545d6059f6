from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from morecl.errors import InputError
from morecl.task import TaskData, read_task


def folder_of(root: Path, classes: dict[str, int]) -> Path:
    for kind, (name, count) in enumerate(classes.items()):
        (root / name / "deep").mkdir(parents=True)
        for k, image in enumerate(tiny.pictures(kind, count)):
            Image.fromarray(image).save(root / name / ("deep" if k == 0 else "") / f"{k}.png")
        (root / name / "notes.txt").write_text("no image")
        (root / name / ".hidden.png").write_text("no image")
    return root


def test_columns_are_counted_over_all_tasks() -> None:
    task = TaskData(index=1, images=tiny.pictures(0, 3), targets=torch.tensor([1, 0, 1]), classes=2, first_column=4)
    assert task.columns.tolist() == [5, 4, 5]


def test_a_folder_has_its_labels_in_its_names(tmp_path: Path) -> None:
    root = folder_of(tmp_path, {"dog": 2, "cat": 3})
    array, names = read_task(root, None, 8)
    assert names == ["cat"] * 3 + ["dog"] * 2 and array.shape == (5, 8, 8, 3)
    assert sorted(image.tobytes() for image in array[3:]) == sorted(image.tobytes() for image in tiny.pictures(0, 2))
    learner = tiny.create("ncm")
    learner.learn_task(str(root))
    assert learner.classes == ["cat", "dog"]


def test_of_a_folder_that_is_split_the_training_images_are_learned(tmp_path: Path) -> None:
    folder_of(tmp_path / "train", {"cat": 2})
    folder_of(tmp_path / "test", {"cat": 3})
    assert read_task(tmp_path, None, 8)[1] == ["cat", "cat"]


def test_a_folder_without_classes_is_refused(tmp_path: Path) -> None:
    Image.fromarray(tiny.pictures(0, 1)[0]).save(tmp_path / "alone.png")
    with pytest.raises(InputError, match="has no class folders"):
        read_task(tmp_path, None, 8)


def test_images_may_come_from_a_generator() -> None:
    array, names = read_task((image for image in tiny.pictures(0, 3)), np.array([1, 2, 1]), 8)
    assert np.array_equal(array, tiny.pictures(0, 3)) and names == [1, 2, 1]
