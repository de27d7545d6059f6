"""What the commands for one's own images reach on photos: folders of JPEG files, one per class, and a strong backbone.

    python benchmarks/real_photos.py PHOTOS --out results/own-images/photos.json --backbone vit_tiny_patch16_224

PHOTOS holds train/CLASS and test/CLASS, as Tiny-ImageNet's files can be sorted. The first half of the classes is taught
in three lessons of unequal size, through the same calls as ``morecl learn``; the other half is never shown until then.
Then it is taught as well, class names in alphabetical order. The record has accuracy, the share of known images called
unknown (promised: at most 5 %), the share of unknown ones caught, calibration, seconds and sizes after each lesson.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import morecl
from morecl.classifier import Evaluation
from morecl.files import write_json

MEASURED = ("accuracy", "accuracy_forced", "known_rejected", "unknown_rejected", "auc", "mean_confidence")


def lessons(names: list[str]) -> list[list[str]]:
    """Half of the classes in three lessons (a half, one class, the rest), the other half in one."""
    known, later = names[: len(names) // 2], names[len(names) // 2 :]
    middle = max(1, len(known) // 2)
    return [part for part in (known[:middle], known[middle : middle + 1], known[middle + 1 :], later) if part]


def linked(photos: Path, names: list[str], folder: Path) -> Path:
    """FOLDER/NAME -> PHOTOS/NAME for each name."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).symlink_to((photos / name).resolve(), target_is_directory=True)
    return folder


def measured(found: Evaluation) -> dict[str, Any]:
    return {name: getattr(found, name) for name in (*MEASURED, "calibration_error")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backbone", default="auto")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    names = sorted(path.name for path in (given.photos / "train").iterdir() if path.is_dir())
    settings = {} if given.image_size is None else {"image_size": given.image_size}
    classifier = morecl.Classifier.create(backbone=given.backbone, device=given.device, **settings)
    after = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number, own in enumerate(lessons(names)):
            began = time.monotonic()
            lesson = classifier.learn(linked(given.photos / "train", own, folder / f"lesson-{number}"))
            classifier.save(folder / "model", "learned")
            seconds = time.monotonic() - began
            found = measured(classifier.evaluate(given.photos / "test"))
            size = sum(path.stat().st_size for path in (folder / "model").rglob("*") if path.is_file())
            after.append({"lesson": asdict(lesson), "test": found, "seconds": seconds, "versions in bytes": size})
            print(f"lesson {number + 1} of {len(own)} classes, {seconds:.0f} s: {found}", flush=True)
        began = time.monotonic()
        files = [path for path in (given.photos / "test").rglob("*") if path.is_file()]
        answers = morecl.Classifier.open(folder / "model", device=given.device).predict(files)
        asked = time.monotonic() - began
        shutil.rmtree(folder / "model")
    info = classifier.info()
    record = {
        "classes": len(names),
        "backbone": info.backbone,
        "image size": info.image_size,
        "device": classifier.learner.device.type,
        "after each lesson": after,
        "prediction": {"images": len(answers), "seconds, model opened": asked},
        "capacity": dict(info.capacity),
        "versions": {"morecl": morecl.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    write_json(given.out, record)


if __name__ == "__main__":
    main()
