"""Training and prediction on a CPU with linear layers by oneDNN (nn/linear.py) and by torch's own.

    python benchmarks/linear_layers.py --out benchmarks/cpu-linear.json    # two minutes, one thread

The included backbone, MORE, two tasks of random images. Seconds are those of the processor, so other processes count
little; both ways in turn, the median of the repetitions. ``differ`` is the largest difference of the scores.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import morecl  # first: it sets how OpenMP waits
from morecl.files import write_json
from morecl.nn import linear


def measured(images: int, *, own: bool) -> tuple[float, float, NDArray[Any]]:
    """Processor seconds of a task of ``images`` with as many from memory, and of predicting them; the scores."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (2 * images, 32, 32, 3)).astype(np.uint8)
    y = np.repeat(np.arange(4), images // 2)
    with linear.torchs_own(own):
        learner = morecl.create("more", epochs=1, memory_size=images, device="cpu")
        learner.learn_task(x[:images], y[:images])
        begun = time.process_time()
        learner.learn_task(x[images:], y[images:])
        learned = time.process_time()
        scores = learner.scores(x[images:])
        return learned - begun, time.process_time() - learned, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if not linear.is_faster():
        sys.exit("on this machine linear layers are torch's own: they are made for AMD's CPUs with AVX-512")
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.+)", info.read_text(encoding="utf-8") if info.exists() else "")
    torch.set_num_threads(1)
    runs = {own: [] for own in (True, False)}
    for _ in range(asked.repeats):
        for own, found in runs.items():
            found.append(measured(asked.images, own=own))
    record: dict[str, Any] = {
        "cpu": cpu.group(1) if cpu else "AMD",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": 1,
        "images": asked.images,
    }
    for name, own in (("torch", True), ("onednn", False)):
        train, predict, _ = zip(*runs[own], strict=True)
        record[name] = {"train": [round(s, 2) for s in train], "predict": [round(s, 2) for s in predict]}
        print(f"{name:7} train {statistics.median(train):6.2f} s   predict {statistics.median(predict):5.2f} s")
    scores = [runs[own][0][2] for own in (True, False)]
    record["differ"] = float(np.abs(scores[0] - scores[1]).max())
    if asked.out:
        write_json(asked.out, record)


if __name__ == "__main__":
    main()
