"""Where the public data sets are read from: ``NAME.npz``, torchvision's folders, or a download."""

from __future__ import annotations

import http.client
import io
import os
import pickle
import ssl
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from morecl.data.archive import images_in
from morecl.data.stream import Dataset
from morecl.errors import InputError, first_line
from morecl.files import atomic_path

Arrays = dict[str, Any]  # key -> array; images that are not in memory are Pictures
KEYS = ("x_train", "y_train", "x_test", "y_test", "classes")
DIGITS = tuple("0123456789")
TINY_IMAGENET = "tiny-imagenet-200"
TINY_IMAGENET_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_IMAGENET_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"

# What torchvision's readers raise on a damaged file, and what a download raises without a network. Other OSErrors (disk
# full, no permission) have nothing to do with the data and are passed on.
_DAMAGED = (RuntimeError, ValueError, AssertionError, TypeError, LookupError, EOFError, pickle.UnpicklingError)
_UNREACHABLE = (URLError, ConnectionError, TimeoutError, ssl.SSLError, http.client.HTTPException, RuntimeError)


@dataclass(frozen=True)
class Source:
    """One public data set.

    ``layout`` lists the paths that torchvision uses under the data root. ``read(root, download)`` returns the arrays of
    an ``.npz`` file from them, after downloading them into ``root`` if asked. ``origin`` is where a user can get them.
    """

    classes: int
    layout: tuple[str, ...]
    origin: str
    read: Callable[[Path, bool], Arrays]

    def present(self, root: Path) -> bool:
        return all((root / path).exists() for path in self.layout)


def read_npz(name: str, path: Path, classes: int, *, progress: bool = False) -> Dataset:
    """The data set in ``path``: ``x_*`` uint8 (N, H, W[, 3]), ``y_*`` integers (N,), ``classes`` the name per label.

    Many images are not held in memory (:mod:`morecl.data.archive`).
    """
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise InputError(f"{path} is not an .npz file, or only part of one; replace or delete it.")
    arrays: Arrays = {}
    key = "its list of arrays"
    try:
        with np.load(path, allow_pickle=False) as archive:
            if missing := [key for key in KEYS if key not in archive]:
                raise InputError(f"{path}: {', '.join(missing)} missing; expected the keys {', '.join(KEYS)}.")
            for key in KEYS:
                large = images_in(archive.zip, path, key, progress=progress) if key.startswith("x_") else None
                arrays[key] = archive[key] if large is None else large
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError) as error:
        raise InputError(f"{path}: {key} cannot be read ({error}); replace or delete the file.") from error
    return checked(name, arrays, path, classes)


def read_folders(name: str, source: Source, root: Path) -> Dataset:
    """The data set in torchvision's layout under ``root``."""
    where = root / source.layout[0]
    try:
        arrays = source.read(root, False)
    except InputError:
        raise
    except _DAMAGED as error:
        raise InputError(
            f"{where} is damaged or incomplete ({_reason(error)}); delete it to download it again, or replace it "
            f"with the contents of {source.origin}."
        ) from error
    return checked(name, arrays, where, source.classes)


def fetch(name: str, source: Source, root: Path, progress: bool) -> Dataset:
    """Download into a temporary folder under ``root`` (torchvision checks the files) and store it as ``NAME.npz``.

    The .npz gets its name when it is complete; if anything fails, nothing is left behind.
    """
    target = root / f"{name}.npz"
    with _made(root):
        try:
            with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".tmp", dir=root) as made, _output(progress):
                arrays = source.read(Path(made), True)
        except _UNREACHABLE as error:
            raise absent(name, source, root, f"could not be downloaded ({_reason(error)})") from error
        checked(name, arrays, target, source.classes)
        with atomic_path(target) as path, path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
    del arrays
    return read_npz(name, target, source.classes, progress=progress)  # as later runs will


def absent(name: str, source: Source, root: Path, reason: str) -> InputError:
    """The error for data that is neither on disk nor can be downloaded."""
    return InputError(
        f"data set {name!r} is not under {root} and {reason}. Put {name}.npz (arrays {', '.join(KEYS)}) or "
        f"{' and '.join(source.layout)} (from {source.origin}) there, or name the folder that has it with --data-root "
        "or MORECL_DATA."
    )


def checked(name: str, arrays: Mapping[str, Any], where: Path, classes: int) -> Dataset:
    """``arrays`` as a Dataset, or an InputError that names the file ``where`` and the wrong key."""

    def wrong(key: str, expected: str) -> InputError:
        array = arrays[key]
        return InputError(f"{where}: {key} has shape {array.shape} and type {array.dtype}; expected {expected}.")

    names = arrays["classes"]
    if names.ndim != 1 or names.dtype.kind != "U" or len(names) != classes:
        raise wrong("classes", f"the names of the {classes} classes of {name}, shape ({classes},)")
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        colour = x.ndim == 4 and x.shape[3] == 3
        if x.dtype != np.uint8 or not (x.ndim == 3 or colour) or x.nbytes == 0:
            raise wrong(f"x_{split}", "(N, H, W, 3) or (N, H, W), uint8, not empty")
        if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
            raise wrong(f"y_{split}", f"one integer for each of the {len(x)} images of x_{split}")
        if y.min() < 0 or y.max() >= classes:
            raise InputError(
                f"{where}: y_{split} holds labels from {y.min()} to {y.max()}; "
                f"{name} has {classes} classes, so labels are 0 to {classes - 1}."
            )
        if len(empty := np.setdiff1d(np.arange(classes), y)):
            raise InputError(f"{where}: y_{split} has no image of class {empty[0]} ({names[empty[0]]}).")
    if arrays["x_train"].shape[1:] != arrays["x_test"].shape[1:]:
        raise wrong("x_test", f"images of shape {arrays['x_train'].shape[1:]} as in x_train")
    return Dataset(
        name,
        arrays["x_train"],
        arrays["y_train"].astype(np.int64),
        arrays["x_test"],
        arrays["y_test"].astype(np.int64),
        tuple(str(c) for c in names),
    )


def _arrays(parts: list[tuple[Any, Any]], classes: tuple[str, ...]) -> Arrays:
    (x_train, y_train), (x_test, y_test) = ((np.asarray(x), np.asarray(y, np.int64)) for x, y in parts)
    return dict(zip(KEYS, (x_train, y_train, x_test, y_test, np.array(classes)), strict=True))


def _torchvision(kind: str, classes: tuple[str, ...] | None = None) -> Callable[[Path, bool], Arrays]:
    """A reader for torchvision's class ``kind``; ``classes`` overrides its class names."""

    def read(root: Path, download: bool) -> Arrays:
        from torchvision import datasets

        parts = [getattr(datasets, kind)(root, train=train, download=download) for train in (True, False)]
        return _arrays([(part.data, part.targets) for part in parts], classes or tuple(parts[0].classes))

    return read


def _svhn(root: Path, download: bool) -> Arrays:
    from torchvision.datasets import SVHN

    parts = [SVHN(root, split=split, download=download) for split in ("train", "test")]
    nhwc = [np.ascontiguousarray(part.data.transpose(0, 2, 3, 1)) for part in parts]  # torchvision has (N, C, H, W)
    return _arrays([(x, part.labels) for x, part in zip(nhwc, parts, strict=True)], DIGITS)


def _tinyimagenet(root: Path, download: bool) -> Arrays:
    """Labels follow the sorted wnids, training images are sorted by path, the test split is ``val``."""
    if download:
        from torchvision.datasets.utils import download_and_extract_archive

        download_and_extract_archive(TINY_IMAGENET_URL, str(root), md5=TINY_IMAGENET_MD5)
    folder = root / TINY_IMAGENET

    def rows(name: str) -> list[list[str]]:
        try:
            return [line.split("\t") for line in (folder / name).read_text(encoding="utf-8").splitlines() if line]
        except FileNotFoundError as error:
            raise InputError(f"{folder} has no {name}; unpack {TINY_IMAGENET_URL} again.") from error

    wnids = sorted(row[0] for row in rows("wnids.txt"))
    words = {row[0]: row[1] for row in rows("words.txt")}
    label = {wnid: i for i, wnid in enumerate(wnids)}
    train = [(path, label[wnid]) for wnid in wnids for path in sorted((folder / "train" / wnid / "images").iterdir())]
    test = [(folder / "val" / "images" / row[0], label[row[1]]) for row in rows("val/val_annotations.txt")]
    parts = [(np.stack([_rgb64(path) for path, _ in part]), [y for _, y in part]) for part in (train, test)]
    return _arrays(parts, tuple(words[wnid] for wnid in wnids))


def _rgb64(path: Path) -> NDArray[np.uint8]:
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"{path} cannot be read ({error}); unpack {TINY_IMAGENET_URL} again.") from error
    if pixels.shape != (64, 64, 3):
        raise InputError(f"{path} has shape {pixels.shape}; the images of Tiny-ImageNet are 64 x 64.")
    return pixels


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make ``folder`` and its parents. If the block fails, those that were made are removed where they are empty."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.rmdir()
        raise


@contextmanager
def _output(progress: bool) -> Iterator[None]:
    """torchvision always draws a progress bar: send it to stderr, or hide it."""
    target = sys.stderr if progress else io.StringIO()
    with redirect_stdout(target), redirect_stderr(target):
        yield


def _reason(error: BaseException) -> str:
    return first_line(error).rstrip(".: ")


SOURCES: Mapping[str, Source] = {
    "mnist": Source(
        10,
        (os.path.join("MNIST", "raw"),),
        "https://ossci-datasets.s3.amazonaws.com/mnist/: four unpacked *-ubyte files",
        _torchvision("MNIST", DIGITS),
    ),
    "fashionmnist": Source(
        10,
        (os.path.join("FashionMNIST", "raw"),),
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/: four unpacked *-ubyte files",
        _torchvision("FashionMNIST"),
    ),
    "cifar10": Source(
        10,
        ("cifar-10-batches-py",),
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        _torchvision("CIFAR10"),
    ),
    "cifar100": Source(
        100,
        ("cifar-100-python",),
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        _torchvision("CIFAR100"),
    ),
    "tinyimagenet": Source(200, (TINY_IMAGENET,), TINY_IMAGENET_URL, _tinyimagenet),
    "svhn": Source(
        10,
        ("train_32x32.mat", "test_32x32.mat"),
        "http://ufldl.stanford.edu/housenumbers/",
        _svhn,
    ),
}
