"""A folder of anyone's images as a data set: one sub-folder a class."""

from __future__ import annotations

import hashlib
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from morecl.data.stream import Dataset
from morecl.errors import InputError
from morecl.images import open_image, square

# Pillow may not read all of them (.heic wants a plug-in); what it does not read is named, not passed over.
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
    | {".avif", ".heic", ".heif", ".jxl", ".jp2"}
)
FOLDER_SIZE = 256  # pixels; where nothing says which
TEST_SHARE = 0.2
SPLITS = ("train", "test")
_SPLIT_LIKE = frozenset({"train", "training", "test", "testing", "val", "valid", "validation"})
_NAMED_IN_WARNING = 5


class SkippedImagesWarning(UserWarning):
    """Some image files could not be read; ``Dataset.skipped`` has the whole list."""


def find_classes(path: Path) -> tuple[str, ...]:
    """The sorted class names of ``path``: of PATH/train/CLASS and PATH/test/CLASS, else of PATH/CLASS."""
    if not path.is_dir():
        raise InputError(f"there is no folder {path}.")
    names = _subfolders(path)
    if _is_split(path):
        names, in_test = (_subfolders(path / split) for split in SPLITS)
        if differing := sorted(set(names) ^ set(in_test)):
            raise InputError(
                f"{path}: train/ and test/ must have the same class folders; only one has {', '.join(differing)}."
            )
    elif set(names) & {"train", "training"} and _SPLIT_LIKE.issuperset(names):
        raise InputError(
            f"{path} has the folders {', '.join(names)}; expected train/ and test/, or one folder a class."
        )
    if len(names) < 2:
        raise InputError(
            f"{path} has {len(names)} class folder(s) ({', '.join(names) or 'none'}); at least 2 are needed, "
            "one sub-folder of images for each class."
        )
    return names


def load_folder(path: Path, size: int = FOLDER_SIZE) -> Dataset:
    """The images under ``path`` as ``size`` x ``size`` RGB: shorter side scaled (bicubic), centre cropped, as
    :func:`morecl.images.square` does it to images that are handed to a learner.

    Images are ordered by class, then by path. EXIF orientation is honoured. Without train/ and test/ about a fifth of
    each class is the test split, chosen by a hash of CLASS/FILE: adding files never moves others, save that a class
    where the hash leaves one side empty gives it the file next in line. An image that cannot be read is skipped and
    named in a SkippedImagesWarning and in ``Dataset.skipped``; files that are not images by name are ignored.
    """
    if size < 1:
        raise InputError(f"the size of a folder's images must be at least 1 pixel, not {size}.")
    classes = find_classes(path)
    automatic = not _is_split(path)
    files: list[tuple[Path, int, bool]] = []  # file, label, whether it is a test image
    for base in [path] if automatic else [path / split for split in SPLITS]:
        for label, name in enumerate(classes):
            files += [(file, label, base == path / "test") for file in _images(base / name)]
    x = np.empty((len(files), size, size, 3), np.uint8)

    def decode(i: int) -> str | None:
        try:
            x[i] = square(open_image(files[i][0]), size)
        except Exception as error:  # Pillow's decoders raise nearly anything on a damaged file
            return f"{_inside(path, files[i][0])} ({str(error) or type(error).__name__})"
        return None

    with ThreadPoolExecutor() as pool:
        problems = list(pool.map(decode, range(len(files))))
    skipped = tuple(problem for problem in problems if problem)
    if skipped:
        _warn(path, skipped, len(files))

    readable = np.array([problem is None for problem in problems], bool)
    y = np.array([label for _, label, _ in files], np.int64)
    test = np.array([in_test for _, _, in_test in files], bool)
    for label, name in enumerate(classes):
        mine = np.flatnonzero(readable & (y == label))
        if automatic and len(mine) >= 2:
            test[mine] = _chosen_for_test([_inside(path, files[i][0]) for i in mine])
        held = int(test[mine].sum())
        if held == 0 or held == len(mine):
            raise InputError(_too_few(path, name, len(mine), held, automatic, len(skipped)))
    train, test = readable & ~test, readable & test
    name = f"folder:{path.resolve().name}"
    return Dataset(name, x[train], y[train], x[test], y[test], classes, skipped, automatic)


def _is_split(path: Path) -> bool:
    return all((path / split).is_dir() for split in SPLITS)


def _subfolders(path: Path) -> tuple[str, ...]:
    return tuple(sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith((".", "__"))))


def _images(folder: Path) -> list[Path]:
    """Image files of ``folder``, however deep, sorted; hidden ones (.DS_Store, ._x.jpg, .cache/) are not images."""

    def visible(parts: Iterable[str]) -> bool:
        return not any(part.startswith(".") for part in parts)

    found = (p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
    return sorted(p for p in found if visible(p.relative_to(folder).parts))


def _inside(path: Path, file: Path) -> str:
    return file.relative_to(path).as_posix()


def _chosen_for_test(names: Sequence[str]) -> NDArray[np.bool_]:
    """For two or more files: which go to the test split. Both sides get at least one."""
    # one hash for one name on every system; a name need not be valid UTF-8
    texts = [unicodedata.normalize("NFC", name).encode("utf-8", "surrogateescape") for name in names]
    place = np.array([int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64 for text in texts])
    test = place < TEST_SHARE
    if not test.any():
        test[place.argmin()] = True
    if test.all():
        test[place.argmax()] = False
    return test


def _too_few(path: Path, name: str, readable: int, held: int, automatic: bool, skipped: int) -> str:
    unreadable = f" ({skipped} unreadable ones under {path} were skipped)" if skipped else ""
    if automatic:
        return f"{path}: class {name!r} has {readable} readable image(s); a class needs at least 2{unreadable}."
    split = "test" if held == 0 else "train"
    return f"{path / split / name} has no readable image{unreadable}; every class needs one in train/ and in test/."


def _warn(path: Path, skipped: Sequence[str], total: int) -> None:
    more = len(skipped) - _NAMED_IN_WARNING
    named = "; ".join(skipped[:_NAMED_IN_WARNING]) + (f"; and {more} more" if more > 0 else "")
    message = f"{len(skipped)} of {total} images under {path} could not be read and were skipped: {named}"
    warnings.warn(message, SkippedImagesWarning, stacklevel=3)
