"""A data set larger than memory: how much of it is held at once, and what reading it costs.

    python benchmarks/data_beyond_memory.py path --out results/data-beyond-memory                 # 20,000 images
    python benchmarks/data_beyond_memory.py path --images 200000 --out results/data-beyond-memory  # 40 GB of disk
    python benchmarks/data_beyond_memory.py path --method joint --out results/data-beyond-memory   # 15 GB of disk
    python benchmarks/data_beyond_memory.py archive [--compressed] --out results/data-beyond-memory  # 100,000 images
    python benchmarks/data_beyond_memory.py speed --device cuda --out results/data-beyond-memory

- ``path``: made-up JPEGs of 256 px, ten tasks, MORE on the included backbone at 8 px, so that the data and not the
  network take the time. One step per epoch; statistics, memory and scores see all images. The images stay at 256 px.
  Memory is bounded as ``ulimit -v`` does it: once Python, torch and the network are loaded, the address space may grow
  by what is missing to ``--memory-gb``. The run must end; the peak is what the system reports. ``--streamed``: without
  the cache on disk. With ``--method joint`` the learner, which keeps all images, is also saved and loaded at the end.
- ``archive``: the same with a made-up tinyimagenet.npz, 64 px, noise; a tenth as many test images as training images.
- ``speed``: one task of images of 256 px, fine-tuning with ViT-Ti/16 at 224 px (random weights), images per second of
  an epoch: from an array in memory and from the cache, with tokens computed once and for each batch, and with images
  that do not fit on the device. From the cache should be at most 5 % slower. ``--device cpu`` is slow: use few images.

Of the images only ``--distinct`` are different; the others are hard links to them, which makes no difference to
reading, decoding or the cache. Each part writes OUT/PART-IMAGES[-METHOD][-streamed|-compressed|-DEVICE].json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PX = 256
CLASSES_PER_TASK = 2
TINY_PX, TINY_CLASSES = 64, 200
ROUGH = 32  # pixels of noise that are enlarged: JPEGs of some 20 kB


def write_jpegs(folder: Path, images: int, classes: int, distinct: int) -> None:
    """FOLDER/CLASS/NUMBER.jpg, as many of each class."""
    rng = np.random.default_rng(0)
    for i in range(images):
        target = folder / f"class-{i % classes:03d}" / f"{i // classes:06d}.jpg"
        if i < classes:
            target.parent.mkdir(parents=True)
        if i < distinct:
            noise = Image.fromarray(rng.integers(0, 256, (ROUGH, ROUGH, 3)).astype(np.uint8))
            noise.resize((PX, PX), Image.Resampling.BICUBIC).save(target, quality=90)
        else:
            first = i % (distinct - distinct % classes)  # of the same class
            os.link(folder / f"class-{first % classes:03d}" / f"{first // classes:06d}.jpg", target)


def write_archive(folder: Path, images: int, compressed: bool) -> None:
    """FOLDER/tinyimagenet.npz: ``images`` to learn, a tenth as many to test, as many of each class."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    counts = {"train": images, "test": images // 10}
    arrays: dict[str, Any] = {"classes": np.array([f"class {c}" for c in range(TINY_CLASSES)])}
    for split, count in counts.items():
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, TINY_PX, TINY_PX, 3), np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % TINY_CLASSES
    (np.savez_compressed if compressed else np.savez)(folder / "tinyimagenet.npz", **arrays)


def peak_bytes() -> int:
    """Of resident memory, so far."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) * 1024


def bound_memory(gigabytes: float) -> dict[str, float]:
    """Let the address space grow by no more than what is missing to ``gigabytes`` of resident memory."""
    import resource

    size, resident = (
        int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in Path("/proc/self/statm").read_text().split()[:2]
    )
    limit = size + int(gigabytes * 1e9) - resident
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return {"loaded": resident / 1e9, "may grow by": (limit - size) / 1e9}


class Stages:
    """Seconds and peak of resident memory by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 2)
        self.peak[name] = round(peak_bytes() / 1e9, 3)
        print(f"  {name}: {self.seconds[name]:,.1f} s so far, peak {self.peak[name]:.2f} GB", flush=True)


def path(photos: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The data path in this process, whose memory is bounded."""
    import torch

    import morecl
    from morecl import training
    from morecl.data import build_stream, load_recipe
    from morecl.evaluator import Evaluator
    from morecl.methods import tools

    def one_step(loss: Any, batches: Callable[[int], Any], *args: Any, **named: Any) -> None:
        training.fit(loss, lambda epoch: islice(batches(epoch), 1), *args, **named)

    tools.fit = one_step
    torch.set_num_threads(options.threads)
    settings: dict[str, Any] = {"image_size": 8, "epochs": 2, "device": "cpu", "precision": "fp32"}
    learner = morecl.create(options.method, **settings, **({} if options.method == "joint" else {"memory_size": 400}))
    bound, stages = bound_memory(options.memory_gb), Stages()
    recipe = load_recipe("tinyimagenet-10t" if options.part == "archive" else f"folder:{photos}")
    stream = None
    for name in ("open, first time", "open, again"):
        with stages(name):
            del stream
            stream = build_stream(recipe, data_root=photos, tasks=options.tasks, folder_size=PX)
    with stages("fingerprint"):
        fingerprint = stream.dataset.fingerprint
    evaluator = Evaluator(learner, stream)
    for task in stream:
        with stages("learn"):
            learner.learn_task(task.x_train, task.y_train.tolist())
        with stages("evaluate"):
            step = evaluator.after_task(task.index)
    if options.method == "joint":
        saved = photos.parent / "saved"
        with stages("save"):
            learner.save(saved)
        size = (saved / "state.safetensors").stat().st_size
        del learner, evaluator
        with stages("load"):
            morecl.load(saved)
    pixels = sum(int(x.nbytes) for x in (stream.dataset.x_train, stream.dataset.x_test))
    return {
        "train images": len(stream.dataset.y_train),
        "test images": len(stream.dataset.y_test),
        "pixels of all images, GB": round(pixels / 1e9, 3),
        **({"saved learner, GB": round(size / 1e9, 3)} if options.method == "joint" else {}),
        "memory bound, GB": options.memory_gb,
        "address space, GB": {name: round(value, 3) for name, value in bound.items()},
        "peak resident memory, GB": round(peak_bytes() / 1e9, 3),
        "peak resident memory by stage, GB": stages.peak,
        "seconds": stages.seconds,
        "threads": options.threads,
        "fingerprint": fingerprint,
        "accuracy": step.aca,
    }


def speed(photos: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Images per second of training, from memory and from the cache."""
    import torch

    import morecl
    from morecl.data import load_dataset
    from morecl.nn import tokens
    from morecl.pictures import InMemory, Pictures

    torch.set_num_threads(options.threads)
    data = load_dataset(f"folder:{photos}", folder_size=PX)
    labels = data.y_train.tolist()
    held = data.x_train[:]
    budget = {"GPU_CACHE_SHARE": 0.0, "CPU_CACHE_BYTES": 0}

    def rates(images: Any, *, cached: bool, fits: bool = True) -> list[float]:
        learner = morecl.create(
            "finetune",
            backbone=options.backbone,
            pretrained=False,
            device=options.device,
            epochs=options.epochs,
            batch_size=options.batch_size,
        )
        prepare = learner.prepare

        def prepared(images: Any) -> Any:
            made = prepare(images)
            made.cache = made.cache if cached else None
            return made

        learner.prepare = prepared  # type: ignore[method-assign]
        learner.checked_images = 0
        before = {name: getattr(tokens, name) for name in budget}
        for name, value in budget.items():
            setattr(tokens, name, before[name] if fits else value)
        found: list[float] = []
        try:
            learner.learn_task(images, labels, lambda event: found.append(event.images_per_second or 0.0))
        finally:
            for name, value in before.items():
                setattr(tokens, name, value)
        return found[1:]  # the first epoch compiles

    ways: dict[str, Callable[[], list[float]]] = {
        "tokens once, memory": lambda: rates(held, cached=True),
        "tokens once, cache": lambda: rates(data.x_train, cached=True),
        "each batch, memory": lambda: rates(held, cached=False),
        "each batch, cache": lambda: rates(data.x_train, cached=False),
        "each batch, read ahead from memory": lambda: rates(Pictures(InMemory(held)), cached=False, fits=False),
        "each batch, read ahead from the cache": lambda: rates(data.x_train, cached=False, fits=False),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(options.repeats):
        for name, way in ways.items():
            found[name] += way()
            print(f"  {repeat + 1}/{options.repeats} {name}: {np.median(found[name]):,.0f} images/s", flush=True)
    medians = {name: float(np.median(values)) for name, values in found.items()}
    pairs = [
        ("tokens once, memory", "tokens once, cache"),
        ("each batch, memory", "each batch, cache"),
        ("each batch, memory", "each batch, read ahead from the cache"),
    ]
    return {
        "train images": len(labels),
        "backbone": options.backbone,
        "batch size": options.batch_size,
        "epochs": options.epochs,
        "repeats": options.repeats,
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device,
        "images per second, median": {name: round(value, 1) for name, value in medians.items()},
        "slower, percent": {f"{b} than {a}": round(100 * (1 - medians[b] / medians[a]), 2) for a, b in pairs},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["path", "archive", "speed"])
    parser.add_argument("--images", type=int, help="default: 20000; archive: 100000; speed: 4096")
    parser.add_argument("--method", choices=["more", "joint"], default="more", help="of path and archive")
    parser.add_argument("--compressed", action="store_true", help="the archive")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--distinct", type=int, default=2000, help="images that differ")
    parser.add_argument("--memory-gb", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--streamed", action="store_true", help="without the cache on disk")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backbone", default="vit_tiny_patch16_224")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for images and cache; default: a temporary one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--photos", type=Path, help=argparse.SUPPRESS)  # made by the process that started this one
    options = parser.parse_args()
    options.images = options.images or {"path": 20_000, "archive": 100_000, "speed": 4096}[options.part]
    if options.photos:
        found = {"path": path, "archive": path, "speed": speed}[options.part](options.photos, options)
        options.out.write_text(json.dumps(found), encoding="utf-8")
        return

    from morecl import __version__
    from morecl.files import write_json

    with tempfile.TemporaryDirectory(dir=options.work, prefix="beyond-memory-") as work:
        photos, result = Path(work, "photos"), Path(work, "result.json")
        classes = CLASSES_PER_TASK * options.tasks
        started = time.perf_counter()
        if options.part == "archive":
            write_archive(photos, options.images, options.compressed)
        else:
            write_jpegs(photos, options.images, classes, min(options.distinct, options.images))
        print(f"{options.images:,} images written in {time.perf_counter() - started:.0f} s", flush=True)
        environment = {"MORECL_CACHE": str(Path(work, "cache")), "MALLOC_ARENA_MAX": "2"}
        environment |= {"MORECL_CACHE_GB": "0"} if options.streamed else {}
        command = [sys.executable, __file__, *sys.argv[1:], "--photos", str(photos), "--out", str(result)]
        started = time.perf_counter()
        if subprocess.run(command, env=os.environ | environment).returncode:
            sys.exit(f"{options.part} failed")
        found = json.loads(result.read_text())
        taken = sum(file.stat().st_size for file in Path(work, "cache").rglob("*")) if not options.streamed else 0
    kind = [options.device] if options.part == "speed" else []
    kind += [name for name in ("streamed", "compressed") if getattr(options, name)]
    method = [options.method] if options.method != "more" else []
    target = options.out / f"{'-'.join([options.part, str(options.images), *method, *kind])}.json"
    record = {
        "schema": "morecl.data_beyond_memory.v1",
        "part": options.part,
        "images": options.images,
        "distinct": options.images if options.part == "archive" else min(options.distinct, options.images),
        "tasks": 1 if options.part == "speed" else options.tasks,
        "px": TINY_PX if options.part == "archive" else PX,
        **({"method": options.method} if options.part != "speed" else {}),
        **found,
        "cache on disk, GB": round(taken / 1e9, 3),
        "whole process, seconds": round(time.perf_counter() - started, 1),
        "morecl": __version__,
        "python": platform.python_version(),
        "cpu cores": os.cpu_count(),
    }
    write_json(target, record)
    print(json.dumps(record, indent=2))
    print(f"written: {target}")


if __name__ == "__main__":
    main()
