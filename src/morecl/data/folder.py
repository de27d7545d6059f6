"""A folder of images as a data set: one sub-folder per class."""

from __future__ import annotations

import errno
import hashlib
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from os import DirEntry
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from morecl.data.cache import NoRoomError, decoded
from morecl.data.decoding import Problems, Streamed, decode_all
from morecl.data.stream import Dataset
from morecl.errors import InputError, few
from morecl.labels import composed
from morecl.pictures import InMemory, Pictures
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
_MODEL = ("model.json", "versions")  # what a model's folder holds; see morecl.classifier.store
_NAMED_IN_WARNING = 5
HELD_BYTES, HELD_SHARE = 1 << 30, 0.25  # images held in memory if the disk is short: at most, and of what is free


class SkippedImagesWarning(UserWarning):
    """Some image files could not be read; ``Dataset.skipped`` lists all of them."""


class UnlabelledImagesWarning(UserWarning):
    """Some images lie beside the class folders and not in one of them."""


class StreamedImagesWarning(UserWarning):
    """Images are decoded whenever they are asked for, because the disk is short."""


def find_classes(path: Path) -> tuple[str, ...]:
    """The sorted class names under ``path``, at least two: PATH/train/CLASS and PATH/test/CLASS, else PATH/CLASS."""
    return tuple(_two_or_more(path)[0])


def labelled_files(path: Path, split: Literal["train", "test"] = "train") -> tuple[list[Path], list[str]]:
    """The image files under ``path`` and the class of each, by class, then by path; one class is enough.

    Nothing is held out. If ``path`` has the folders train/ and test/, only the images in ``split`` are listed. The
    classes may differ: one that is only in test/ was never taught. Files are not opened, so some may turn out to be
    unreadable. Images in no class folder are left out, and an UnlabelledImagesWarning says so.
    """
    places = [path, path / split] if _is_split(path) else [path]
    classes = _subfolders(places[1]) if len(places) > 1 else _class_folders(path)[0]
    if not classes:
        raise InputError(f"{places[-1]} has no class folders; put the images of each class into a sub-folder.")
    files: list[Path] = []
    labels: list[str] = []
    for name, folders in classes.items():
        found = _images(folders)
        if not found:
            raise InputError(f"{folders[0]} has no images; remove the folder or add images of the class.")
        files += found
        labels += [name] * len(found)
    _warn_of_unlabelled(places)
    return files, labels


def files_key(path: Path) -> str:
    """A key that changes when an image under ``path`` comes, goes, moves or is written again. Opens no file."""
    digest = hashlib.sha256()
    for folders in _class_folders(path):
        for file in _images([folder for same in folders.values() for folder in same]):
            stat = file.stat() if file.exists() else file.lstat()
            name = _inside(path, file).encode("utf-8", "surrogateescape")
            digest.update(b"%s\0%d\0%d\0" % (name, stat.st_size, stat.st_mtime_ns))
    return digest.hexdigest()


def load_folder(path: Path, size: int = FOLDER_SIZE, *, progress: bool = False) -> Dataset:
    """The images under ``path`` as ``size`` x ``size`` RGB: shorter side scaled (bicubic), centre cropped by
    :func:`morecl.images.square`, which also prepares the images passed to a learner.

    Images are sorted by class, then by path. EXIF orientation is applied. Without train/ and test/ about a fifth of
    each class is held out as the test split. A hash of CLASS/FILE decides, so adding files does not move others; only
    if that leaves a class without a training or a test image, the file with the nearest hash fills the gap. Unreadable
    images are skipped and named in a SkippedImagesWarning and in ``Dataset.skipped``. Images in no class folder are
    left out, and an UnlabelledImagesWarning says so. Files without an image's extension are ignored.

    The images are decoded once, into a cache on disk (:mod:`morecl.data.cache`), and read when they are asked for. If
    the disk is short, they are decoded whenever they are asked for, and a StreamedImagesWarning says so; few images are
    then held in memory instead.
    """
    if size < 1:
        raise InputError(f"the size of a folder's images must be at least 1 pixel, not {size}.")
    by_split = _two_or_more(path)
    classes = tuple(by_split[0])
    automatic = len(by_split) == 1
    files: list[tuple[Path, int, bool]] = []  # file, label, whether it is a test image
    for split, folders in zip(SPLITS, by_split, strict=False):  # without test/, see _divided
        for label, name in enumerate(classes):
            files += [(file, label, split == "test") for file in _images(folders[name])]
    _warn_of_unlabelled([path] if automatic else [path, *(path / split for split in SPLITS)])
    try:
        x, problems = _pictures(path, [file for file, _, _ in files], size, progress)
    except MemoryError as error:
        raise InputError(
            f"{path}: there is not enough memory to decode images to {size} x {size} pixels. Use a smaller image_size, "
            "or a backbone with smaller inputs."
        ) from error
    return _divided(path, files, classes, x, problems, automatic)


def _pictures(path: Path, files: list[Path], size: int, progress: bool) -> tuple[Pictures, Problems]:
    """The images in all ``files``, and which of them cannot be read."""
    try:
        source = decoded(path, files, size, progress=progress)
        return Pictures(source), source.problems
    except NoRoomError as error:
        reason = str(error)
    needed, available = len(files) * size * size * 3, available_bytes()
    if needed <= HELD_BYTES and (available is None or needed <= HELD_SHARE * available):
        held = np.empty((len(files), size, size, 3), np.uint8)
        problems = decode_all(files, size, lambda start, some: np.copyto(held[start:][: len(some)], some))
        return Pictures(InMemory(held)), problems
    warnings.warn(
        f"the images under {path} do not fit into the cache for decoded images ({reason}): each is decoded whenever it "
        "is needed, which is slower. Name a folder on a larger disk with MORECL_CACHE, or see `morecl cache list`.",
        StreamedImagesWarning,
        stacklevel=4,
    )
    problems = decode_all(files, size, lambda start, some: None, progress=progress)  # which of them can be read?
    return Pictures(Streamed(files, size)), problems


def _divided(
    path: Path,
    files: list[tuple[Path, int, bool]],
    classes: tuple[str, ...],
    x: Pictures,
    problems: Problems,
    automatic: bool,
) -> Dataset:
    """Divide the images that can be read into train and test."""
    skipped = tuple(f"{_inside(path, files[number][0])} ({why})" for number, why in problems.items())
    if skipped:
        _warn(path, skipped, len(files))
    readable = np.ones(len(files), bool)
    readable[list(problems)] = False
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
    return Dataset(name, x.rows(train), y[train], x.rows(test), y[test], classes, skipped)


def _two_or_more(path: Path) -> list[dict[str, list[Path]]]:
    """As :func:`_class_folders`, at least two classes."""
    found = _class_folders(path)
    if len(names := tuple(found[0])) < 2:
        raise InputError(
            f"{path} has {_counted(len(names), 'class folder')} ({', '.join(names) or 'none'}); at least 2 are needed, "
            "one sub-folder of images per class."
        )
    return found


def _class_folders(path: Path) -> list[dict[str, list[Path]]]:
    """The folders of each class under ``path``, sorted by name, however few; those in train/ and in test/, if any.

    Names that differ only in how Unicode writes their letters are one class.
    """
    if not path.is_dir():
        raise InputError(
            f"{path} is a file; name a folder with one sub-folder per class."
            if path.is_file()
            else f"there is no folder {path}."
        )
    if _is_model(path):
        raise InputError(f"{path} is a model; name a folder of images, with one sub-folder per class.")
    if _is_split(path):
        train, test = (_subfolders(path / split) for split in SPLITS)
        if differing := sorted(train.keys() ^ test.keys()):
            raise InputError(
                f"{path}: train/ and test/ must have the same class folders; only one has {', '.join(differing)}."
            )
        return [train, test]
    classes = _subfolders(path)
    if classes.keys() & {"train", "training"} and _SPLIT_LIKE.issuperset(classes):
        raise InputError(
            f"{path} has the folders {', '.join(classes)}; expected train/ and test/, or one folder per class."
        )
    return [classes]


def _is_split(path: Path) -> bool:
    return all((path / split).is_dir() for split in SPLITS)


def _is_model(path: Path) -> bool:
    return all(os.path.exists(path / name) for name in _MODEL)


def is_hidden(name: str) -> bool:
    """Whether a folder of that name is no class."""
    return name.startswith((".", "__"))


def _subfolders(path: Path) -> dict[str, list[Path]]:
    """Name -> folders, both sorted; without hidden ones and without models that were put among the photos."""
    found: dict[str, list[Path]] = {}
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not is_hidden(folder.name) and not _is_model(folder):
            if folder.name != folder.name.strip():  # in a list nobody sees how it differs from the name without
                raise InputError(
                    f"the name of the folder {str(folder)!r} begins or ends with a blank; rename the folder."
                )
            found.setdefault(composed(folder.name), []).append(folder)
    return dict(sorted(found.items()))


def _images(folders: Sequence[Path]) -> list[Path]:
    """Image files in ``folders`` and their sub-folders, sorted; see :func:`walked`."""
    read: set[str] = set()
    return sorted(Path(file) for folder in folders for file in walked(str(folder), read, _refuse))


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"{error.filename} may not be read; allow it, or remove the folder.") from error


def walked(folder: str, read: set[str], lost: Callable[[OSError], None]) -> Iterator[str]:
    """Image files in a folder and its sub-folders, without hidden ones (.DS_Store, ._x.jpg, .cache/).

    Links to folders are followed, after all other folders, so that no image that is here is named by a link; but not to
    one in which the link lies: they would lead in circles.

    Args:
        read: folders that were read, none of them again; extended in place.
        lost: called with the error if a folder may not be read.
    """
    waiting, links = [folder], deque[str]()
    while waiting or links:
        folder = waiting.pop() if waiting else links.popleft()
        real = os.path.realpath(folder)
        if real in read:
            continue
        read.add(real)
        try:
            if not os.access(folder, os.R_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
            with os.scandir(folder) as entries:
                shown = sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
        except OSError as error:
            lost(error)
            continue
        yield from (os.path.join(folder, entry.name) for entry in shown if _is_image(entry))
        inner = [entry for entry in shown if _is_folder(entry)]
        waiting += [os.path.join(folder, entry.name) for entry in reversed(inner) if not entry.is_symlink()]
        linked = [os.path.join(folder, entry.name) for entry in inner if entry.is_symlink()]
        links += [path for path in linked if not Path(real).is_relative_to(os.path.realpath(path))]


def _is_folder(entry: DirEntry[str]) -> bool:
    """Whether this is a folder, or a link to one."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()  # is_dir() fails on a link to itself


def _is_image(entry: DirEntry[str]) -> bool:
    """Whether this is an image by its name, and a file; or a link to nothing, which cannot be read and is named so."""
    if entry.name.startswith(".") or Path(entry.name).suffix.lower() not in EXTENSIONS:
        return False
    if entry.is_symlink():
        return os.path.isfile(entry.path) or not os.path.exists(entry.path)
    return entry.is_file()


def _inside(path: Path, file: Path) -> str:
    return file.relative_to(path).as_posix()


def _chosen_for_test(names: Sequence[str]) -> NDArray[np.bool_]:
    """Which of two or more files go to the test split; train and test get at least one each."""
    # NFC: the same name has the same hash on every system. Names need not be valid UTF-8.
    texts = [composed(name).encode("utf-8", "surrogateescape") for name in names]
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
    named = few(skipped, _NAMED_IN_WARNING, "; ")
    were = "was" if len(skipped) == 1 else "were"
    message = f"{len(skipped)} of {_counted(total, 'image')} under {path} could not be read and {were} skipped: {named}"
    warnings.warn(message, SkippedImagesWarning, stacklevel=4)


def _warn_of_unlabelled(folders: Sequence[Path]) -> None:
    """Warn of images that lie in ``folders`` themselves, where class folders are expected."""
    for folder in folders:
        with os.scandir(folder) as entries:
            count = sum(map(_is_image, entries))
        if count:
            lie, are = ("lies", "is") if count == 1 else ("lie", "are")
            message = f"{_counted(count, 'image')} {lie} in {folder} itself, in no class folder, and {are} left out"
            warnings.warn(message, UnlabelledImagesWarning, stacklevel=3)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
