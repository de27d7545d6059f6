"""What a run on several cards gains: step times of 1 and 2 ranks, measured, and of more, on paper.

    python benchmarks/several_cards.py --out results/several-cards/cpu.json                 # 2 minutes on two cores
    python benchmarks/several_cards.py --device cuda --backbone deit_tiny_patch16_224 --image-size 224 --out cuda.json

Measures MORE's training step (made-up images, random weights unless the backbone is the shipped one) with 1 rank at
several batch sizes, and with 2 ranks that divide the largest; and what travels between the two, by itself. On one card,
or on a CPU, the two ranks share the machine and talk through the host's memory (gloo); with a card each, by NCCL. On a
CPU the processor time of a rank counts: others on the machine change the time on the wall.

The model: N ranks take

    t(B / N)  +  inputs of B images, which every rank puts together  +  gather of B features  +  sum of all gradients,

with t(b) from the steps measured with 1 rank (between their sizes by straight lines, never below the fastest; of a
recorded step of an H200, which is captured, never below the time to launch its kernels one by one), and for
what travels a ring's bytes over the assumed bandwidth plus the assumed latency of each of its log2(N) stages.
``--h200`` adds the model for two recorded steps of an H200 (benchmarks/h200-*-step.json).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import morecl
from morecl import parallel, ranks
from morecl.bench.common import made_up_images, place_of, wait_for
from morecl.files import write_json
from morecl.methods.base import Learner
from morecl.parallel import Group
from morecl.progress import EpochDone

HERE = Path(__file__).resolve().parent
STEPS, EPOCHS = 2, 7  # of each measurement; the first epoch does not count, of the others the fastest does
BOTTLENECK = 64
TOKENS = 197  # of an image of 224 px in patches of 16
RANKS = (1, 2, 4, 8, 16, 64, 512)
CARDS_PER_NODE = 8
# Assumed: bytes per second of each card in both directions, seconds of latency per stage, within and between machines.
WITHIN, BETWEEN = (200e9, 8e-6), (25e9, 15e-6)
# Seconds of the host per kernel where a step is not captured as a CUDA graph: 11.8 ms with DeiT-Ti for some 350 kernels
# (results/several-cards/h200.json).
LAUNCH = 33e-6


@dataclass(frozen=True)
class Cost:
    """What a step needs on one rank, in seconds: ``seconds`` for the ``sizes`` of its own part of the batch, at least
    ``floor`` if there are others, and ``inputs`` per image of the whole batch."""

    batch: int
    sizes: list[int]
    seconds: list[float]
    floor: float
    inputs: float
    gradient_bytes: int
    feature_bytes: int  # of one image

    def alone(self, images: float) -> float:
        return float(np.interp(images, self.sizes, self.seconds))

    def together(self, count: int, images: float) -> float:
        """Seconds of a step of ``images`` in all on ``count`` ranks."""
        if count == 1:
            return self.alone(images)
        own = max(self.floor, self.alone(math.ceil(images / count)))
        return own + images * self.inputs + travel(count, self.gradient_bytes, images * self.feature_bytes)


def travel(count: int, gradients: float, features: float) -> float:
    """Seconds to sum ``gradients`` and to gather ``features`` (bytes) over ``count`` ranks, as assumed above."""
    bandwidth, latency = WITHIN if count <= CARDS_PER_NODE else BETWEEN
    passes = (count - 1) / count
    return passes * (2 * gradients + features) / bandwidth + 3 * math.ceil(math.log2(count)) * latency


def modelled(cost: Cost) -> list[dict[str, Any]]:
    """Images per second on paper: the same batch divided, and a batch per rank."""
    rows = []
    for count in RANKS:
        same, grown = cost.together(count, cost.batch), cost.together(count, count * cost.batch)
        rows.append(
            {
                "ranks": count,
                "same_batch_ms": 1e3 * same,
                "same_batch_gain": cost.alone(cost.batch) / same,
                "batch_per_rank_ms": 1e3 * grown,
                "batch_per_rank_gain": count * cost.alone(cost.batch) / grown,
            }
        )
    return rows


# ---- measuring ------------------------------------------------------------------------------------------------------


def learner_for(options: argparse.Namespace, batch: int) -> Learner:
    shipped = options.backbone == "vit_mini_patch4_32"
    return morecl.create(
        "more",
        backbone=options.backbone,
        image_size=options.image_size,
        device=options.device,
        batch_size=batch,
        bottleneck=BOTTLENECK,
        epochs=EPOCHS,
        **({} if shipped else {"pretrained": False}),
    )


def step_seconds(learner: Learner) -> dict[str, float]:
    """Time of a step in the fastest epoch, by the clock on the wall and by the processor time of this rank."""
    count = STEPS * learner.config.batch_size
    ends: list[tuple[float, float]] = []

    def listen(event: EpochDone) -> None:  # the device has finished the epoch
        ends.append((time.perf_counter(), time.process_time()))

    learner.learn_task(made_up_images(count), [i % 2 for i in range(count)], listen)
    epochs = [(wall - before[0], cpu - before[1]) for before, (wall, cpu) in itertools.pairwise(ends)]
    wall, cpu = (min(times) / STEPS for times in zip(*epochs, strict=True))
    return {"wall": wall, "processor": cpu}


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        wait_for(device)
        started = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[5:])


def gradient_count(learner: Learner) -> int:
    """Numbers whose gradients are summed over ranks: adapters and norms of the newest task."""
    task = learner.tasks[-1]  # type: ignore[attr-defined]
    adapters = learner.adapters.parameters()  # type: ignore[attr-defined]
    return sum(p.numel() for p in [*adapters, *task.norms.parameters()])


def measure(options: argparse.Namespace, group: Group | None) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": {}}
    batches = (
        [options.batch] if group else [options.batch // part for part in (1, 2, 4, 8) if options.batch >= 2 * part]
    )
    for batch in batches:
        learner = learner_for(options, batch)
        if learner.captured:
            found.setdefault("captured_steps", {})[str(batch)] = step_seconds(learner)
            learner = learner_for(options, batch)
            learner.captured = False
        learner.join(group)
        found["steps"][str(batch)] = step_seconds(learner)
    found["place"] = place_of(learner)
    found["gradients"] = gradient_count(learner)
    found["dim"] = learner.network.dim
    tokens, index = learner.prepare(made_up_images(options.batch)), torch.arange(options.batch, device=learner.device)
    found["inputs_seconds_per_image"] = median_seconds(lambda: tokens[index], learner.device) / options.batch
    if group is not None:
        flat = torch.zeros(found["gradients"], device=learner.device)
        counts = [part.stop - part.start for part in (group.part(options.batch, r) for r in range(group.size))]
        features = torch.zeros(counts[group.rank], learner.network.dim, device=learner.device)
        found["sum_seconds"] = median_seconds(lambda: group.total(flat), learner.device)
        found["gather_seconds"] = median_seconds(lambda: group.gather(features, counts), learner.device)
    return found


def measured_by(count: int, arguments: list[str]) -> dict[str, Any]:
    """What ``count`` ranks measure, each with one thread on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *arguments, "--part", str(out)], check=True, env=environment)
        return json.loads(out.read_text())


# ---- the record -----------------------------------------------------------------------------------------------------


def clock(found: dict[str, Any]) -> str:
    """Which time counts: on a CPU that of the processor, which others on the machine hardly change."""
    return "processor" if found["place"]["device"].startswith("CPU") else "wall"


def cost_of(alone: dict[str, Any], batch: int) -> Cost:
    """From the steps of 1 rank."""
    steps = sorted((int(size), value[clock(alone)]) for size, value in alone["steps"].items())
    sizes, seconds = zip(*steps, strict=True)
    inputs = alone["inputs_seconds_per_image"]
    return Cost(batch, list(sizes), list(seconds), min(seconds), inputs, 4 * alone["gradients"], 4 * alone["dim"])


def h200(name: str, dim: int, depth: int) -> Cost:
    """Of a recorded step. It was captured; without that the host launches every kernel."""
    record = json.loads((HERE / f"h200-{name}-224-step.json").read_text())
    kernels = sum(group["calls"] for group in record["groups"])
    gradients = 2 * depth * (2 * BOTTLENECK * dim + BOTTLENECK + dim) + 2 * (2 * depth + 1) * dim
    images, seconds = record["images"], record["step_microseconds"] / 1e6
    inputs = 2 * TOKENS * dim * 2 / (1e9 * record["copy_gigabytes_per_second"])  # read and written, half precision
    return Cost(images, [0, images], [0.0, seconds], kernels * LAUNCH, inputs, 4 * gradients, 4 * dim)


def table(title: str, cost: Cost) -> str:
    lines = [
        f"{title}: batch {cost.batch}, {cost.gradient_bytes / 1e6:.2f} MB of gradients a step, 1 rank "
        f"{1e3 * cost.alone(cost.batch):.2f} ms, none of several ranks below {1e3 * cost.floor:.2f} ms",
        "",
        "| ranks | same batch, ms | gain | a batch per rank, ms | gain |",
        "|---|---|---|---|---|",
    ]
    for row in modelled(cost):
        lines.append(
            f"| {row['ranks']} | {row['same_batch_ms']:.2f} | {row['same_batch_gain']:.1f} | "
            f"{row['batch_per_rank_ms']:.2f} | {row['batch_per_rank_gain']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backbone", default="vit_mini_patch4_32")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--h200", action="store_true", help="add the model for the recorded steps of an H200")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        with parallel.joined() as group:
            found = measure(options, group)
        if ranks.is_main():
            write_json(options.part, found)
        return
    load = [round(value, 2) for value in os.getloadavg()]
    alone, both = (measured_by(count, sys.argv[1:]) for count in (1, 2))
    place = alone["place"]
    costs = {f"{place['backbone']} at {place['image_size']} px, {place['device']}": cost_of(alone, options.batch)}

    def whole(found: dict[str, Any]) -> float:
        return found["steps"][str(options.batch)][clock(found)]

    if options.h200:
        costs |= {"DeiT-Ti, H200": h200("deit-tiny", 192, 12), "ViT-S, H200": h200("vit-small", 384, 12)}
    record = {
        "schema": "morecl.several-cards/1",
        "batch": options.batch,
        "one_rank": alone,
        "two_ranks": both,
        "load_average": load,
        "clock": clock(alone),
        "two_ranks_gain": whole(alone) / whole(both),
        "assumed": {
            "within_a_machine_bytes_per_second": WITHIN[0],
            "within_a_machine_latency_seconds": WITHIN[1],
            "between_machines_bytes_per_second": BETWEEN[0],
            "between_machines_latency_seconds": BETWEEN[1],
            "cards_per_machine": CARDS_PER_NODE,
            "launch_seconds_per_kernel": LAUNCH,
        },
        "model": {name: {**asdict(cost), "ranks": modelled(cost)} for name, cost in costs.items()},
    }
    write_json(options.out, record)
    print(f"2 ranks: {record['two_ranks_gain']:.2f} x the speed of 1 ({record['clock']} time)")
    print("\n\n".join(table(name, cost) for name, cost in costs.items()))


if __name__ == "__main__":
    main()
