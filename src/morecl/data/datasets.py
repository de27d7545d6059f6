"""``load_dataset``: data sets by name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from morecl.data.folder import FOLDER_SIZE, files_key, find_classes, load_folder
from morecl.data.sources import DIGITS, SOURCES, absent, fetch, read_folders, read_npz
from morecl.data.stream import Dataset
from morecl.errors import InputError, unknown_name

FOLDER = "folder:"
DATASETS = ("digits", *SOURCES)


def load_dataset(
    name: str,
    data_root: Path | None = None,
    *,
    download: bool = True,
    progress: bool = False,
    folder_size: int = FOLDER_SIZE,
) -> Dataset:
    """The data set ``name``: one of ``DATASETS``, or ``folder:PATH`` (see ``morecl.data.folder``).

    Under ``resolve_data_root(data_root)``, ``NAME.npz`` is used if it exists, then torchvision's folders; otherwise the
    data set is downloaded and stored as ``NAME.npz``. Images keep the order of the file, which for CIFAR differs
    between an .npz built from image files and torchvision's batches.
    """
    check_dataset_name(name)
    if name.startswith(FOLDER):
        return load_folder(Path(name.removeprefix(FOLDER)).expanduser(), folder_size, progress=progress)
    if name == "digits":
        return _digits()
    source, root = SOURCES[name], resolve_data_root(data_root)
    npz = root / f"{name}.npz"
    if npz.exists():
        return read_npz(name, npz, source.classes, progress=progress)
    if source.present(root):
        return read_folders(name, source, root)
    if not download:
        raise absent(name, source, root, "downloading is switched off")
    return fetch(name, source, root, progress)


def data_key(name: str, data_root: Path | None = None) -> str:
    """A key that changes when files of the data set are replaced or written again; empty without any. Opens none."""
    check_dataset_name(name)
    if name.startswith(FOLDER):
        return files_key(Path(name.removeprefix(FOLDER)).expanduser())
    if name not in SOURCES:
        return ""
    root = resolve_data_root(data_root)
    npz = root / f"{name}.npz"
    places = [npz] if npz.exists() else [root / path for path in SOURCES[name].layout]
    files = sorted(file for place in places for file in (place.rglob("*") if place.is_dir() else [place]))
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(repr(facts).encode()).hexdigest() if facts else ""


def count_classes(name: str) -> int:
    """How many classes the data set ``name`` has. No image is read."""
    check_dataset_name(name)
    if name.startswith(FOLDER):
        return len(find_classes(Path(name.removeprefix(FOLDER)).expanduser()))
    return len(DIGITS) if name == "digits" else SOURCES[name].classes


def resolve_data_root(data_root: Path | None) -> Path:
    """``data_root`` if given, else the environment variable ``MORECL_DATA``, else ``~/.cache/morecl``."""
    root = Path(data_root or os.environ.get("MORECL_DATA") or Path("~/.cache/morecl")).expanduser()
    if root.exists() and not root.is_dir():
        raise InputError(f"the data root {root} is a file; name a folder with --data-root or MORECL_DATA.")
    return root


def check_dataset_name(name: str) -> None:
    if not name.startswith(FOLDER) and name not in DATASETS:
        raise unknown_name("data set", name, (*DATASETS, f"{FOLDER}PATH"))


def _digits() -> Dataset:
    """scikit-learn's 1,797 grey digits of 8 x 8 pixels, scaled from 0..16 to 0..255.

    The split is fixed: every fifth image of each class (the 5th, 10th, ...) is a test image; 1,442 train, 355 test.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8)
    y = bunch.target.astype(np.int64)
    test = np.zeros(len(y), bool)
    for label in range(10):
        test[np.flatnonzero(y == label)[4::5]] = True
    return Dataset("digits", x[~test], y[~test], x[test], y[test], DIGITS)
