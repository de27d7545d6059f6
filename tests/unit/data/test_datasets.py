"""Data sets by name: digits, .npz files, torchvision's folders, downloads."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
from PIL import Image

from morecl.data import Dataset, load_dataset, resolve_data_root, sources
from morecl.errors import InputError


def made_up(classes: int = 10, train: int = 3, test: int = 2) -> dict[str, np.ndarray]:
    """Image i of a split has the value i everywhere; labels run 0, 1, ..., 0, 1, ..."""
    arrays: dict[str, np.ndarray] = {"classes": np.array([f"class {c}" for c in range(classes)])}
    for split, count in (("train", train * classes), ("test", test * classes)):
        values = np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1)
        arrays[f"x_{split}"] = np.broadcast_to(values, (count, 4, 4, 3)).copy()
        arrays[f"y_{split}"] = np.arange(count) % classes
    return arrays


def save(folder: Path, **changes: Any) -> Path:
    path = folder / "cifar10.npz"
    np.savez(path, **{key: value for key, value in (made_up() | changes).items() if value is not None})
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


# --- digits


def test_digits_are_scaled_and_split_by_class_in_a_fixed_way() -> None:
    digits = load_dataset("digits")
    assert digits.x_train.shape == (1442, 8, 8) and digits.x_test.shape == (355, 8, 8)
    assert digits.x_train.dtype == np.uint8 and digits.y_train.dtype == np.int64
    # of each class a fifth, rounded down
    assert np.bincount(digits.y_train).tolist() == [143, 146, 142, 147, 145, 146, 145, 144, 140, 144]
    assert np.bincount(digits.y_test).tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    # 0..16 -> 0..255: 16 levels of 15.9375, rounded
    assert sorted(np.unique(digits.x_train)) == [round(v * 255 / 16) for v in range(17)]
    assert digits.fingerprint == load_dataset("digits").fingerprint
    from sklearn.datasets import load_digits

    bunch = load_digits()
    fifth_zero = bunch.images[np.flatnonzero(bunch.target == 0)[4]]
    assert np.array_equal(digits.x_test[digits.y_test == 0][0], np.round(fifth_zero * 255 / 16))


# --- .npz


def test_npz_is_read_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, y_train=(np.arange(30) % 10).astype(np.uint8), wnids=np.array(["more keys do not matter"]))
    data = load_dataset("cifar10", tmp_path)
    assert data.name == "cifar10" and data.classes[3] == "class 3" and data.skipped == ()
    assert data.y_train.dtype == np.int64 and data.y_train.tolist() == [i % 10 for i in range(30)]
    assert data.x_train[:, 0, 0, 0].tolist() == list(range(30)) and data.x_test.shape == (20, 4, 4, 3)


def test_npz_of_grey_images(tmp_path: Path) -> None:
    save(tmp_path, x_train=np.zeros((30, 4, 4), np.uint8), x_test=np.zeros((20, 4, 4), np.uint8))
    assert load_dataset("cifar10", tmp_path).x_train.shape == (30, 4, 4)


def test_data_root_argument_then_environment_then_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MORECL_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_data_root(None) == tmp_path / "home" / ".cache" / "morecl"
    monkeypatch.setenv("MORECL_DATA", str(tmp_path / "env"))
    assert resolve_data_root(None) == tmp_path / "env"
    assert resolve_data_root(tmp_path / "arg") == tmp_path / "arg"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        resolve_data_root(tmp_path / "file")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"y_test": None}, "y_test missing"),
        ({"x_train": np.zeros((30, 4, 4, 3), np.float32)}, r"x_train has shape \(30, 4, 4, 3\) and type float32"),
        ({"x_train": np.zeros((30, 3, 4, 4), np.uint8)}, r"x_train has shape \(30, 3, 4, 4\)"),
        ({"x_test": np.zeros((0, 4, 4, 3), np.uint8), "y_test": np.zeros(0, int)}, "x_test .* not empty"),
        ({"x_test": np.zeros((20, 5, 5, 3), np.uint8)}, r"x_test has shape \(20, 5, 5, 3\)"),
        ({"y_train": np.arange(29) % 10}, "y_train .* each of the 30 images"),
        ({"y_train": np.arange(30) % 10 * 1.0}, "y_train .* float64"),
        ({"y_train": np.eye(30, 10, dtype=int)}, r"y_train has shape \(30, 10\)"),
        ({"y_train": np.arange(30) % 11}, "y_train holds labels from 0 to 10; cifar10 has 10 classes"),
        ({"y_test": np.arange(20) % 10 - 1}, "y_test holds labels from -1"),
        ({"y_test": np.arange(20) % 9}, r"y_test has no image of class 9 \(class 9\)"),
        ({"classes": np.array(["a", "b"])}, "classes has shape"),
        ({"classes": np.arange(10)}, "classes .* int64"),
        ({"classes": np.array([object()] * 10)}, "classes cannot be read"),  # would need unpickling
    ],
)
def test_wrong_npz_names_file_and_key(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    path = save(tmp_path, **changes)
    with pytest.raises(InputError, match=named) as caught:
        load_dataset("cifar10", tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 100, 3000, -30])
def test_truncated_npz(tmp_path: Path, keep: int) -> None:
    path = save(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"cifar10\.npz is not an \.npz file, or only part of one"):
        load_dataset("cifar10", tmp_path)


def test_npz_with_a_flipped_byte_names_the_key(tmp_path: Path) -> None:
    path = save(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(b"x_train.npy") + 300] ^= 0xFF  # inside the pixels, which come after a header of 128 bytes
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"cifar10\.npz: x_train cannot be read \(Bad CRC-32"):
        load_dataset("cifar10", tmp_path)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown data set 'cifar01'; did you mean 'cifar10'"):
        load_dataset("cifar01")


# --- torchvision's folders


def idx(array: np.ndarray) -> bytes:
    """The format of the MNIST files: magic, sizes (big endian), bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(raw: Path) -> dict[str, np.ndarray]:
    raw.mkdir(parents=True)
    arrays = made_up()
    for split, prefix in (("train", "train"), ("test", "t10k")):
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx(arrays[f"x_{split}"][..., 0]))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(arrays[f"y_{split}"]))
    return arrays


def assert_same(data: Dataset, arrays: dict[str, np.ndarray]) -> None:
    for key in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(getattr(data, key), arrays[key]), key
        assert getattr(data, key).dtype == (np.uint8 if key[0] == "x" else np.int64)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashionmnist", "FashionMNIST")])
def test_mnist_folders(tmp_path: Path, offline: None, name: str, folder: str) -> None:
    arrays = write_mnist(tmp_path / folder / "raw")
    arrays |= {"x_train": arrays["x_train"][..., 0], "x_test": arrays["x_test"][..., 0]}
    data = load_dataset(name, tmp_path)
    assert_same(data, arrays)
    assert data.classes[1] == {"mnist": "1", "fashionmnist": "Trouser"}[name]


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_damaged_mnist_folder_is_named(tmp_path: Path, offline: None, damage: str) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[:100] if damage == "truncated" else b"")
    with pytest.raises(InputError, match=r"MNIST.raw is damaged or incomplete"):
        load_dataset("mnist", tmp_path)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("name", "kind", "classes"), [("cifar10", "CIFAR10", 10), ("cifar100", "CIFAR100", 100)])
def test_cifar_folders(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, classes: int
) -> None:
    import torchvision.datasets

    cifar = getattr(torchvision.datasets, kind)
    folder = tmp_path / cifar.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)
    arrays = {"classes": np.array([f"class {c}" for c in range(classes)])}
    for split, batches in (("train", [b for b, _ in cifar.train_list]), ("test", [b for b, _ in cifar.test_list])):
        arrays[f"x_{split}"] = rng.integers(0, 256, (classes * len(batches), 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(classes * len(batches)) % classes
        for i, batch in enumerate(batches):
            part = slice(i * classes, (i + 1) * classes)
            rows = arrays[f"x_{split}"][part].transpose(0, 3, 1, 2).reshape(classes, -1)  # channels first, as on disk
            labels = "labels" if classes == 10 else "fine_labels"
            with (folder / batch).open("wb") as file:
                pickle.dump({"data": rows, labels: arrays[f"y_{split}"][part].tolist()}, file)
    with (folder / cifar.meta["filename"]).open("wb") as file:
        pickle.dump({cifar.meta["key"]: arrays["classes"].tolist()}, file)
    for attribute in ("train_list", "test_list"):
        sums = [[batch, md5(folder / batch)] for batch, _ in getattr(cifar, attribute)]
        monkeypatch.setattr(cifar, attribute, sums)
    monkeypatch.setattr(cifar, "meta", cifar.meta | {"md5": md5(folder / cifar.meta["filename"])})

    data = load_dataset(name, tmp_path)
    assert_same(data, arrays)
    assert data.classes == tuple(arrays["classes"])

    monkeypatch.undo()  # the true checksums refuse this folder
    with pytest.raises(InputError, match=f"{cifar.base_folder} is damaged or incomplete"):
        load_dataset(name, tmp_path, download=False)


def test_svhn_files(tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets
    from scipy.io import savemat

    arrays = made_up()
    sums = {}
    for split in ("train", "test"):
        arrays[f"x_{split}"][:, 0, 1, 2] = 77  # tells rows, columns and channels apart
        y = np.where(arrays[f"y_{split}"] == 0, 10, arrays[f"y_{split}"]).reshape(-1, 1)  # the file calls zero "10"
        file = tmp_path / f"{split}_32x32.mat"
        savemat(file, {"X": arrays[f"x_{split}"].transpose(1, 2, 3, 0), "y": y.astype(np.uint8)})
        sums[split] = ["", file.name, md5(file)]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", sums)
    data = load_dataset("svhn", tmp_path)
    assert_same(data, arrays)
    assert data.classes == tuple("0123456789")


def write_tinyimagenet(folder: Path) -> list[str]:
    """200 wnids (listed unsorted), one training and one test image each; the pixel value is the label."""
    wnids = [f"n{(i * 7) % 200:08d}" for i in range(200)]
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "words.txt").write_text("".join(f"{w}\tname of {w}, twice\n" for w in [*wnids, "n99999999"]))
    rows = []
    for i, wnid in enumerate(wnids):
        images = folder / "train" / wnid / "images"
        images.mkdir(parents=True)
        mode = "L" if i == 0 else "RGB"  # some of the real ones are grey
        value = int(wnid[1:])
        image = Image.new(mode, (64, 64), value if mode == "L" else (value,) * 3)
        image.save(images / f"{wnid}_0.JPEG")
        image.save(folder / "val" / "images" / f"val_{i}.JPEG")
        rows.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    return wnids


def test_tinyimagenet_folder(tmp_path: Path, offline: None) -> None:
    wnids = write_tinyimagenet(tmp_path / "tiny-imagenet-200")
    data = load_dataset("tinyimagenet", tmp_path)
    assert data.x_train.shape == data.x_test.shape == (200, 64, 64, 3)
    assert data.y_train.tolist() == list(range(200))  # sorted wnids
    assert data.y_test.tolist() == [int(w[1:]) for w in wnids]  # the order of val_annotations.txt
    assert np.abs(data.x_test[:, 5, 5, 1].astype(int) - data.y_test).max() <= 1  # JPEG
    assert data.classes[3] == "name of n00000003, twice"


@pytest.mark.parametrize("file", ["wnids.txt", "val/val_annotations.txt", "val/images/val_7.JPEG"])
def test_damaged_tinyimagenet_folder_is_named(tmp_path: Path, offline: None, file: str) -> None:
    folder = tmp_path / "tiny-imagenet-200"
    write_tinyimagenet(folder)
    (folder / file).unlink()
    with pytest.raises(InputError, match=f"tiny-imagenet-200.*{file.split('/')[-1]}"):
        load_dataset("tinyimagenet", tmp_path)


# --- downloads


@pytest.mark.parametrize("name", sources.SOURCES)
def test_offline_and_absent_says_what_to_put_where(tmp_path: Path, offline: None, name: str) -> None:
    root = tmp_path / "not" / "there"
    with pytest.raises(InputError) as caught:
        load_dataset(name, root)
    message = str(caught.value)
    assert ("\n" not in message and "no route to host" in message) or name in ("mnist", "fashionmnist")
    for part in (repr(name), str(root), f"{name}.npz", *sources.SOURCES[name].layout, "--data-root", "MORECL_DATA"):
        assert part in message
    assert list(tmp_path.iterdir()) == []
    root.parent.mkdir()
    (root.parent / "mine").touch()
    with pytest.raises(InputError):
        load_dataset(name, root)
    assert [path.name for path in root.parent.iterdir()] == ["mine"]


def test_download_switched_off_touches_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="downloading is switched off"):
        load_dataset("svhn", tmp_path / "data", download=False)
    assert not (tmp_path / "data").exists()


class Response(io.BytesIO):
    """What ``urlopen`` gives."""

    url = None

    @property
    def length(self) -> int:
        return len(self.getvalue())


@pytest.fixture
def served_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Tiny-ImageNet zip, with its checksum, is what any download gives."""
    write_tinyimagenet(tmp_path / "made" / "tiny-imagenet-200")
    archive = tmp_path / "served.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for path in sorted((tmp_path / "made").rglob("*")):
            target.write(path, path.relative_to(tmp_path / "made"))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Response(archive.read_bytes()))
    monkeypatch.setattr(sources, "TINY_IMAGENET_MD5", md5(archive))
    return archive


def test_download_is_kept_as_npz_and_nothing_else(
    tmp_path: Path, served_zip: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "data"
    first = load_dataset("tinyimagenet", root)
    assert [p.name for p in root.iterdir()] == ["tinyimagenet.npz"]
    assert capfd.readouterr() == ("", "")
    served_zip.unlink()
    assert load_dataset("tinyimagenet", root).fingerprint == first.fingerprint
    assert first.fingerprint == load_dataset("tinyimagenet", tmp_path / "made").fingerprint


def test_download_shows_progress_on_stderr_when_asked(
    tmp_path: Path, served_zip: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load_dataset("tinyimagenet", tmp_path / "data", progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "100" in err


def test_download_with_a_wrong_checksum_leaves_nothing(
    tmp_path: Path, served_zip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TINY_IMAGENET_MD5", "0" * 32)
    with pytest.raises(InputError, match=r"could not be downloaded \(File not found or corrupted\)"):
        load_dataset("tinyimagenet", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_disk_full_while_downloading_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(Response):
        def read(self, *_: Any) -> bytes:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: FullDisk())
    with pytest.raises(OSError, match="No space left") as caught:
        load_dataset("tinyimagenet", tmp_path / "data")
    assert not isinstance(caught.value, InputError) and not (tmp_path / "data").exists()


def test_disk_full_while_saving_leaves_nothing(
    tmp_path: Path, served_zip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def savez(file: io.BufferedWriter, **_: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", savez)
    with pytest.raises(OSError, match="No space left"):
        load_dataset("tinyimagenet", tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_to_write_is_an_oserror(tmp_path: Path, served_zip: Path) -> None:
    root = tmp_path / "data"
    root.mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        load_dataset("tinyimagenet", root)
    assert list(root.iterdir()) == []
