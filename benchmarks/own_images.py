"""What the commands for one's own images reach on handwritten digits, with the shipped backbone on a CPU.

    python benchmarks/own_images.py --out results/own-images            # all parts, about 35 minutes on two idle cores
    python benchmarks/own_images.py story kills --out results/own-images

Parts, and what they should reach:

- ``story``: digits 0 to 4 in two tasks of 100 images per digit; most of 5 to 9 are called unknown; then they are
  taught. Three splits.
- ``few``: ten digits from 20 photos each, in one lesson: at least 80 % right.
- ``more``: one digit is taught with 10 images, then gets 50 more: its accuracy rises.
- ``promise``: at most 7 % of fresh images of known classes are called unknown at 5 %, mean of ten splits.
- ``kills``: ``morecl learn`` is killed (SIGKILL) at 50 random moments; the model loads each time and answers as before
  or as after the lesson.

Each part writes OUT/PART.json. Images are PNG files of 32 x 32 pixels from scikit-learn's digits, shuffled.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import morecl
from morecl import cli
from morecl.classifier import Evaluation, ModelFolder
from morecl.files import write_json

BACKBONE = "vit_mini_patch4_32"
SPLITS, STORIES, KILLS = 10, 3, 50
FRESH = 100  # images of each digit from this number on are never learned


def write_digits(folder: Path, digits: Iterable[int], start: int, stop: int, seed: int = 0) -> Path:
    """Number ``start`` to ``stop`` of each digit as FOLDER/DIGIT/NUMBER.png, in an order that ``seed`` draws."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    images, labels = (data.images[order] * 255 / 16).astype(np.uint8), data.target[order]
    for digit in digits:
        own = folder / str(digit)
        own.mkdir(parents=True, exist_ok=True)
        for number in np.flatnonzero(labels == digit)[start:stop].tolist():
            Image.fromarray(images[number]).resize((32, 32)).save(own / f"{number}.png")
    return folder


def new(seed: int = 0, **settings: Any) -> morecl.Classifier:
    return morecl.Classifier.create(backbone=BACKBONE, device="cpu", seed=seed, **settings)


def measured(found: Evaluation) -> dict[str, Any]:
    names = ("accuracy", "accuracy_forced", "known_rejected", "unknown_rejected", "auc", "mean_confidence")
    return {name: getattr(found, name) for name in (*names, "calibration_error")}


def story(folder: Path) -> dict[str, Any]:
    splits = []
    for seed in range(STORIES):
        own = folder / str(seed)
        classifier = new(seed)
        lessons = [
            classifier.learn(write_digits(own / "first", [0, 1, 2], 0, FRESH, seed)),
            classifier.learn(write_digits(own / "second", [3, 4], 0, FRESH, seed)),
        ]
        test = write_digits(own / "test", range(10), FRESH, 1000, seed)
        before = measured(classifier.evaluate(test))
        print(f"  split {seed}: {before['unknown_rejected']:.1f} % of unknown digits called unknown", flush=True)
        lessons.append(classifier.learn(write_digits(own / "third", range(5, 10), 0, FRESH, seed)))
        after = measured(classifier.evaluate(test))
        splits.append(
            {"lessons": [asdict(each) for each in lessons], "five to nine unknown": before, "all taught": after}
        )

    def mean(when: str) -> dict[str, float | None]:
        found = {name: [split[when][name] for split in splits] for name in splits[0][when]}
        return {name: None if None in values else float(np.mean(values)) for name, values in found.items()}

    return {"mean": {when: mean(when) for when in ("five to nine unknown", "all taught")}, "splits": splits}


def few(folder: Path) -> dict[str, Any]:
    classifier = new()
    lesson = classifier.learn(write_digits(folder / "photos", range(10), 0, 20))
    found = classifier.evaluate(write_digits(folder / "test", range(10), FRESH, 1000))
    return {"lesson": asdict(lesson), "test": measured(found)}


def more(folder: Path) -> dict[str, Any]:
    classifier = new()
    write_digits(folder / "photos", [0, 3, 5], 0, 60)
    classifier.learn(write_digits(folder / "photos", [8], 0, 10))
    test = write_digits(folder / "test", [0, 3, 5, 8], FRESH, 1000)

    def right() -> dict[str, float | None]:
        return {each.name: each.accuracy for each in classifier.evaluate(test).classes}

    before = right()
    lesson = classifier.add(write_digits(folder / "further", [8], 10, 60))
    return {"before": before, "after": right(), "lesson": asdict(lesson)}


def promise(folder: Path) -> dict[str, Any]:
    shares = []
    for seed in range(SPLITS):
        classifier = new(seed, image_size=16)  # small and short: the promise holds for any network
        classifier.learn(write_digits(folder / f"first-{seed}", [0, 1, 2], 0, 60, seed), minutes=0.1)
        classifier.learn(write_digits(folder / f"second-{seed}", [3, 4], 0, 60, seed), minutes=0.1)
        found = classifier.evaluate(write_digits(folder / f"test-{seed}", range(5), 60, 1000, seed))
        shares.append(found.known_rejected)
        print(f"  split {seed}: {found.known_rejected:.2f} % of known images called unknown", flush=True)
    return {"accept": 0.95, "held_back": 60, "called unknown": shares, "mean": float(np.mean(shares))}


def kills(folder: Path) -> dict[str, Any]:
    photos = write_digits(folder / "photos", [2, 3], 0, 40)
    asked = [str(p) for p in sorted(write_digits(folder / "asked", range(4), FRESH, FRESH + 5).rglob("*.png"))]
    start = folder / "start"
    learned = new(image_size=8)
    learned.learn(write_digits(folder / "known", [0, 1], 0, 60))
    learned.save(start)

    def said(model: Path) -> list[tuple[str | None, float | None]]:
        return [(a.label, a.ood_score) for a in morecl.Classifier.open(model).predict(asked)]

    def learning(name: str) -> tuple[int, Path]:
        model = Path(shutil.copytree(start, folder / name))
        return _in_a_process("learn", model, photos, "--minutes", 0.02), model

    began = time.monotonic()
    process, whole = learning("whole")
    _wait_for_writing(whole)
    wrote = time.monotonic()
    os.waitpid(process, 0)
    seconds, writing = time.monotonic() - began, time.monotonic() - wrote
    if len(ModelFolder(whole).versions()) != 2:
        raise SystemExit("the lesson failed")
    old = said(start)
    draw = random.Random(0)
    outcome = {"as before": 0, "as after": 0, "neither": 0}
    for number in range(KILLS):
        process, model = learning(f"killed-{number}")
        if number % 2:  # at any moment
            time.sleep(draw.uniform(0, 1.1) * seconds)
        else:  # while it writes
            _wait_for_writing(model)
            time.sleep(draw.uniform(0, 1) * writing)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        answers = said(model)
        versions = len(ModelFolder(model).versions())
        kind = "neither"
        if versions == 1 and answers == old:
            kind = "as before"
        elif versions == 2 and {label for label, _ in answers} & {"2", "3"}:
            kind = "as after"  # the speed decides on the number of epochs, so two lessons differ a little
        outcome[kind] += 1
        shutil.rmtree(model)
        print(f"  kill {number}: {kind}", flush=True)
    return {"kills": KILLS, "seconds of the lesson": seconds, "of them writing": writing, **outcome}


def _in_a_process(*arguments: object) -> int:
    """``morecl ARGUMENTS`` in a copy of this process, which spares it the imports; returns its id."""
    process = os.fork()
    if process:
        return process
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    sys.argv = ["morecl", *map(str, arguments)]
    try:
        cli.main()
    finally:
        os._exit(0)


def _wait_for_writing(model: Path) -> None:
    """Until the new version begins to be written."""
    before = time.monotonic()
    while len(list((model / "versions").iterdir())) < 2 and time.monotonic() < before + 300:
        time.sleep(0.001)


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "story": story,
    "few": few,
    "more": more,
    "promise": promise,
    "kills": kills,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    for name in given.parts or PARTS:
        print(name, flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[name](Path(folder))
        versions = {"morecl": morecl.__version__, "torch": torch.__version__, "python": platform.python_version()}
        record = {"part": name, "backbone": BACKBONE, **found, "seconds": time.monotonic() - began, **versions}
        write_json(given.out / f"{name}.json", record)
        print({key: value for key, value in record.items() if key not in ("lessons", "lesson")}, flush=True)


if __name__ == "__main__":
    main()
