"""Images of an .npz file that are too many to be held are read when they are asked for, and are the same."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from morecl.data import archive, load_dataset
from morecl.data.cache import IMAGES, entries
from morecl.data.pixels import FilePart
from morecl.errors import InputError
from morecl.pictures import InMemory, Pictures

RNG = np.random.default_rng(3)
TRAIN = RNG.integers(0, 256, (60, 6, 5, 3)).astype(np.uint8)
TEST = RNG.integers(0, 256, (20, 6, 5, 3)).astype(np.uint8)
SAVE: dict[str, Callable[..., None]] = {"stored": np.savez, "compressed": np.savez_compressed}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache. Train is too large to be held, test is not."""
    monkeypatch.setenv("MORECL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("morecl.pictures.HELD_BYTES", TEST.nbytes)
    monkeypatch.setattr(archive, "READ_BYTES", 7 * TRAIN[0].nbytes)
    return tmp_path / "cache"


def save(folder: Path, kind: str, **changes: Any) -> Path:
    path = folder / "cifar10.npz"
    names = np.array([f"class {c}" for c in range(10)])
    arrays = {"x_train": TRAIN, "y_train": np.arange(60) % 10, "x_test": TEST, "y_test": np.arange(20) % 10}
    SAVE[kind](path, **(arrays | {"classes": names} | changes))
    return path


@pytest.mark.parametrize("kind", SAVE)
def test_the_same_images_as_from_memory(
    cache: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, kind)
    data = load_dataset("cifar10", tmp_path)
    assert isinstance(data.x_train, Pictures) and isinstance(data.x_test, np.ndarray)
    index = np.array([59, 0, 1, 2, 30, 30])
    assert np.array_equal(data.x_train[:], TRAIN) and np.array_equal(data.x_train[index], TRAIN[index])
    assert np.array_equal(data.x_test, TEST)
    monkeypatch.setattr("morecl.pictures.HELD_BYTES", TRAIN.nbytes)
    held = load_dataset("cifar10", tmp_path)
    assert isinstance(held.x_train, np.ndarray) and held.fingerprint == data.fingerprint


def test_what_is_not_compressed_is_read_where_it_is(cache: Path, tmp_path: Path) -> None:
    save(tmp_path, "stored")
    data = load_dataset("cifar10", tmp_path)
    assert isinstance(data.x_train, Pictures) and isinstance(data.x_train._source, FilePart)
    assert not cache.exists()


def test_few_images_are_not_written_anywhere(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("morecl.pictures.HELD_BYTES", TRAIN.nbytes)
    save(tmp_path, "compressed")
    load_dataset("cifar10", tmp_path)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("train", "test"),
    [(TRAIN[..., 0], TEST[..., 0]), (np.asfortranarray(TRAIN), TEST)],
    ids=["grey", "in another order"],
)
def test_what_cannot_be_read_in_parts_is_held(cache: Path, tmp_path: Path, train: Any, test: Any) -> None:
    save(tmp_path, "stored", x_train=np.concatenate([train] * 3), x_test=test, y_train=np.arange(180) % 10)
    if train.ndim == 4:
        save(tmp_path, "stored", x_train=train, x_test=test)
    data = load_dataset("cifar10", tmp_path)
    assert isinstance(data.x_train, np.ndarray) and np.array_equal(data.x_train[:60], train)


def test_unpacked_once_for_an_archive_as_it_is(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[str] = []
    fill = archive.Member.fill

    def counted(self: archive.Member, *args: Any) -> Any:
        unpacked.append(self.info.filename)
        return fill(self, *args)

    monkeypatch.setattr(archive.Member, "fill", counted)
    path = save(tmp_path, "compressed")
    for _ in range(2):
        load_dataset("cifar10", tmp_path)
    assert unpacked == ["x_train.npy"]
    (entry,) = entries(cache)
    assert (entry.images, entry.side, entry.folder) == (60, 6, str(path)) and entry.name.startswith("x_train-cifar10-6")
    save(tmp_path, "compressed", x_train=TRAIN[::-1])
    os.utime(path, ns=(0, 12345))
    data = load_dataset("cifar10", tmp_path)
    assert len(unpacked) == 2 and np.array_equal(data.x_train[:], TRAIN[::-1]) and len(entries(cache)) == 1
    monkeypatch.setattr("morecl.pictures.HELD_BYTES", TEST.nbytes - 1)
    data = load_dataset("cifar10", tmp_path)
    assert unpacked[2:] == ["x_test.npy"] and len(entries(cache)) == 2
    assert np.array_equal(data.x_test[:], TEST) and np.array_equal(data.x_train[:], TRAIN[::-1])


def test_without_room_in_the_cache_they_are_held(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORECL_CACHE_GB", "0")
    save(tmp_path, "compressed")
    data = load_dataset("cifar10", tmp_path)
    assert isinstance(data.x_train, Pictures) and isinstance(data.x_train._source, InMemory)
    assert np.array_equal(data.x_train[:], TRAIN) and not cache.exists()


def flip(path: Path, where: int) -> None:
    content = bytearray(path.read_bytes())
    content[where] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("kind", SAVE)
@pytest.mark.parametrize("byte", [1000, -20], ids=["in the middle", "in the last image"])
def test_a_damaged_archive_names_file_and_key(cache: Path, tmp_path: Path, kind: str, byte: int) -> None:
    path = save(tmp_path, kind)
    with zipfile.ZipFile(path) as opened:
        info = opened.getinfo("x_train.npy")
        start = archive._offset(path, info)
    flip(path, start + byte % info.compress_size)
    with pytest.raises(InputError, match=r"cifar10\.npz: x_train cannot be read"):
        load_dataset("cifar10", tmp_path)
    assert not entries(cache)


@pytest.mark.parametrize("kind", SAVE)
def test_an_array_that_says_it_is_longer_than_it_is(cache: Path, tmp_path: Path, kind: str) -> None:
    path = save(tmp_path, kind)
    with zipfile.ZipFile(path) as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
    members["x_train.npy"] = members["x_train.npy"].replace(b"(60, 6, 5, 3)", b"(99, 6, 5, 3)")
    method = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as target:
        for name, content in members.items():
            target.writestr(name, content)
    with pytest.raises(InputError, match=r"x_train cannot be read \(it ends after 60 of 99 images"):
        load_dataset("cifar10", tmp_path)


def test_an_archive_that_changes_while_it_is_used_is_an_error(cache: Path, tmp_path: Path) -> None:
    path = save(tmp_path, "stored")
    data = load_dataset("cifar10", tmp_path)
    path.rename(tmp_path / "moved.npz")
    assert np.array_equal(data.x_train[:], TRAIN), "the file that was opened"
    os.truncate(tmp_path / "moved.npz", 500)
    with pytest.raises(InputError, match=r"cifar10\.npz was changed while images were read"):
        data.x_train[:]


def test_damage_in_the_cache_is_noticed_and_repaired_by_starting_again(cache: Path, tmp_path: Path) -> None:
    save(tmp_path, "compressed")
    data = load_dataset("cifar10", tmp_path)
    flip(entries(cache)[0].path / IMAGES, 5)
    assert np.array_equal(data.x_train[1:], TRAIN[1:])
    with pytest.raises(InputError, match=r"damaged, and .*cifar10\.npz must be unpacked again; start again"):
        data.x_train[:1]
    del data
    assert np.array_equal(load_dataset("cifar10", tmp_path).x_train[:], TRAIN)
