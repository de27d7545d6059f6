"""Watch a folder and sort new images into one folder per class; what the model does not know goes to unknown/.

    morecl learn model photos
    python examples/watch_folder.py model inbox sorted          # until ctrl-C
    python examples/watch_folder.py model inbox sorted --once   # what is there now

Look through sorted/unknown/ from time to time, put the images of a new class into a folder, and teach it:
`morecl learn model new-photos`. The watcher takes up the new version by itself.
"""

from __future__ import annotations

import argparse
import shutil
import time
from contextlib import suppress
from pathlib import Path

import morecl
from morecl.classifier import ModelFolder
from morecl.data.folder import EXTENSIONS

UNKNOWN, UNREADABLE = "unknown", "unreadable"
BATCH = 64


def waiting(inbox: Path) -> dict[Path, int]:
    """The images in ``inbox`` and their sizes."""
    found: dict[Path, int] = {}
    for path in sorted(inbox.iterdir()):
        with suppress(FileNotFoundError):  # somebody took it away
            if path.suffix.lower() in EXTENSIONS and path.is_file():
                found[path] = path.stat().st_size
    return found


def folder_of(answer: morecl.classifier.Answer) -> str:
    if answer.error is not None:
        return UNREADABLE
    # A class name comes from a folder's name, but a model may have been made elsewhere: never leave the target folder.
    return UNKNOWN if answer.label is None else answer.label.replace("/", "_").replace("\\", "_").lstrip(".") or "_"


def move(path: Path, folder: Path) -> Path:
    """Move ``path`` into ``folder``; a file that is there keeps its name, the new one gets a number."""
    folder.mkdir(parents=True, exist_ok=True)
    target, number = folder / path.name, 1
    while target.exists():
        number += 1
        target = folder / f"{path.stem}-{number}{path.suffix}"
    return Path(shutil.move(path, target))  # also to another file system


def sort(classifier: morecl.Classifier, paths: list[Path], target: Path) -> None:
    for path, answer in zip(paths, classifier.predict(paths, top=1), strict=True):
        with suppress(FileNotFoundError):  # somebody took it away
            print(f"{path.name} -> {move(path, target / folder_of(answer))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("inbox", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0, help="between two looks")
    parser.add_argument("--once", action="store_true", help="sort what is there, then stop")
    given = parser.parse_args()

    model = ModelFolder(given.model)
    versions, classifier = model.load_newest()
    before: dict[Path, int] = {}
    while True:
        now = waiting(given.inbox)
        # A file that is still being copied grows: take it when its size stays the same.
        ready = [path for path, size in now.items() if given.once or before.get(path) == size]
        for start in range(0, len(ready), BATCH):
            sort(classifier, ready[start : start + BATCH], given.target)
        if given.once:
            return
        before = now
        time.sleep(given.seconds)
        if model.versions()[-1].number != versions[-1].number:
            versions, classifier = model.load_newest()
            print(f"now with version {versions[-1].number}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
    except morecl.InputError as error:
        raise SystemExit(f"error: {error}") from None
