"""A folder of images as a data set: one sub-folder per class."""

from __future__ import annotations

import hashlib
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from morecl.data.stream import Dataset, Images
from morecl.errors import InputError
from morecl.images import open_image, square
from morecl.ram import available_bytes

# Pillow may not read all of them (.heic needs a plug-in); files it cannot read are named in a warning.
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
    | {".avif", ".heic", ".heif", ".jxl", ".jp2"}
)
FOLDER_SIZE = 256  # pixels, if neither the recipe nor the backbone sets a size
TEST_SHARE = 0.2
SPLITS = ("train", "test")
_SPLIT_LIKE = frozenset({"train", "training", "test", "testing", "val", "valid", "validation"})
_NAMED_IN_WARNING = 5


class SkippedImagesWarning(UserWarning):
    """Some image files could not be read; ``Dataset.skipped`` lists all of them."""


def find_classes(path: Path) -> tuple[str, ...]:
    """The sorted class names under ``path``, at least two: PATH/train/CLASS and PATH/test/CLASS, else PATH/CLASS."""
    names = _class_names(path)
    if len(names) < 2:
        raise InputError(
            f"{path} has {_counted(len(names), 'class folder')} ({', '.join(names) or 'none'}); at least 2 are needed, "
            "one sub-folder of images per class."
        )
    return names


def labelled_files(path: Path) -> tuple[list[Path], list[str]]:
    """The image files under ``path`` and the class of each, by class, then by path; one class is enough.

    Nothing is held out. If ``path`` has the folders train/ and test/, only the images in train/ are listed: those in
    test/ are meant for measuring. Files are not opened, so some may turn out to be unreadable.
    """
    names = _class_names(path)
    if not names:
        raise InputError(f"{path} has no class folders; put the images of each class into a sub-folder.")
    base = path / "train" if _is_split(path) else path
    files: list[Path] = []
    labels: list[str] = []
    for name in names:
        found = _images(base / name)
        if not found:
            raise InputError(f"{base / name} has no images; remove the folder or add images of the class.")
        files += found
        labels += [name] * len(found)
    return files, labels


def load_folder(path: Path, size: int = FOLDER_SIZE) -> Dataset:
    """The images under ``path`` as ``size`` x ``size`` RGB: shorter side scaled (bicubic), centre cropped by
    :func:`morecl.images.square`, which also prepares the images passed to a learner.

    Images are sorted by class, then by path. EXIF orientation is applied. Without train/ and test/ about a fifth of
    each class is held out as the test split. A hash of CLASS/FILE decides, so adding files does not move others; only
    if that leaves a class without a training or a test image, the file with the nearest hash fills the gap. Unreadable
    images are skipped and named in a SkippedImagesWarning and in ``Dataset.skipped``. Files without an image's
    extension are ignored.
    """
    if size < 1:
        raise InputError(f"the size of a folder's images must be at least 1 pixel, not {size}.")
    classes = find_classes(path)
    automatic = not _is_split(path)
    files: list[tuple[Path, int, bool]] = []  # file, label, whether it is a test image
    for base in [path] if automatic else [path / split for split in SPLITS]:
        for label, name in enumerate(classes):
            files += [(file, label, base == path / "test") for file in _images(base / name)]
    try:
        return _decoded(path, files, classes, size, automatic)
    except MemoryError as error:
        raise _too_large(path, len(files), size) from error


def _decoded(
    path: Path, files: list[tuple[Path, int, bool]], classes: tuple[str, ...], size: int, automatic: bool
) -> Dataset:
    """Open all ``files`` and divide them into train and test."""
    x = _allocated(path, len(files), size)

    def decode(i: int) -> str | None:
        try:
            x[i] = square(open_image(files[i][0]), size)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise almost anything on a damaged file
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


def _class_names(path: Path) -> tuple[str, ...]:
    """The sorted class names under ``path``, however few."""
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
            f"{path} has the folders {', '.join(names)}; expected train/ and test/, or one folder per class."
        )
    return names


def _allocated(path: Path, images: int, size: int) -> Images:
    """Room for all images, (N, size, size, 3), after a check that it exists: writing to memory that is not there gets
    the process killed."""
    available = available_bytes()
    if available is not None and _bytes_needed(images, size) > available:
        raise _too_large(path, images, size, available)
    return np.empty((images, size, size, 3), np.uint8)


def _bytes_needed(images: int, size: int) -> int:
    return 2 * images * size * size * 3  # all of them, and once more while train and test are cut out


def _too_large(path: Path, images: int, size: int, available: int | None = None) -> InputError:
    needed = _bytes_needed(images, size) / 1e9
    left = "" if available is None else f", {available / 1e9:.1f} GB are available"
    return InputError(
        f"{path}: {_counted(images, 'image')} at {size} x {size} pixels need {needed:.1f} GB of memory{left}. "
        "Use a smaller image_size, a backbone with smaller inputs, or fewer images."
    )


def _is_split(path: Path) -> bool:
    return all((path / split).is_dir() for split in SPLITS)


def _subfolders(path: Path) -> tuple[str, ...]:
    return tuple(sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith((".", "__"))))


def _images(folder: Path) -> list[Path]:
    """Image files in ``folder`` and its sub-folders, sorted, without hidden ones (.DS_Store, ._x.jpg, .cache/)."""

    def visible(parts: Iterable[str]) -> bool:
        return not any(part.startswith(".") for part in parts)

    found = (p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
    return sorted(p for p in found if visible(p.relative_to(folder).parts))


def _inside(path: Path, file: Path) -> str:
    return file.relative_to(path).as_posix()


def _chosen_for_test(names: Sequence[str]) -> NDArray[np.bool_]:
    """Which of two or more files go to the test split; train and test get at least one each."""
    # NFC: the same name has the same hash on every system. Names need not be valid UTF-8.
    texts = [unicodedata.normalize("NFC", name).encode("utf-8", "surrogateescape") for name in names]
    place = np.array([int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64 for text in texts])
    test = place < TEST_SHARE
    if not test.any():
        test[place.argmin()] = True
    if test.all():
        test[place.argmax()] = False
    return test


def _too_few(path: Path, name: str, readable: int, held: int, automatic: bool, skipped: int) -> str:
    unreadable = f" ({skipped} under {path} could not be read)" if skipped else ""
    if automatic:
        found = _counted(readable, "readable image")
        return f"{path}: class {name!r} has {found}{unreadable}; a class needs at least 2."
    split = "test" if held == 0 else "train"
    return f"{path / split / name} has no readable image{unreadable}; every class needs one in train/ and in test/."


def _warn(path: Path, skipped: Sequence[str], total: int) -> None:
    more = len(skipped) - _NAMED_IN_WARNING
    named = "; ".join(skipped[:_NAMED_IN_WARNING]) + (f"; and {more} more" if more > 0 else "")
    were = "was" if len(skipped) == 1 else "were"
    message = f"{len(skipped)} of {_counted(total, 'image')} under {path} could not be read and {were} skipped: {named}"
    warnings.warn(message, SkippedImagesWarning, stacklevel=4)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
