"""Checks `morecl suite --on ray` with losses: eight runs on two nodes; a worker is killed, then a node.

    python benchmarks/ray_check.py --out results/ray/check.json

About three minutes on two cores. It needs the extra `ray` and Linux (it reads /proc). Both nodes are on this machine.
The record's `failures` must be empty; the exit code says so as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import morecl
from morecl.files import write_json
from morecl.locking import CLAIM
from morecl.records import read_record

SUITE = """
description = "eight short runs"
seeds = [0, 1, 2, 3]
[settings]
image_size = 8
bottleneck = 4
epochs = 2
device = "cpu"
[[runs]]
methods = ["finetune", "more"]
benchmarks = ["digits-5t"]
variant = "short"
train_per_class = 20
test_per_class = 5
"""
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def stopped_run(out: Path, raylet: int, apart_from: list[Path]) -> tuple[Path, int, int]:
    """A run with a checkpoint on the node of ``raylet``: folder, process (it stands still now), worker."""
    while True:
        for claim in out.glob(f"*/*/*/{CLAIM}"):
            with suppress(OSError, ValueError):  # it may just have ended
                pid = json.loads(claim.read_text())["pid"]
                worker = parent(pid)
                begun = list(claim.parent.glob("checkpoint-[1-4]"))
                if parent(worker) == raylet and begun and claim.parent not in apart_from:
                    os.kill(pid, signal.SIGSTOP)
                    return claim.parent, pid, worker
        time.sleep(0.01)


def lose(what: str, kill: Callable[[int], None], out: Path, raylet: int, losses: list[dict[str, Any]]) -> None:
    """Kill the worker of a run that has begun, by ``kill(worker)``.

    The run ends with it: by SIGTERM from Linux, or killed by a worker that notices that its node is gone.
    """
    folder, pid, worker = stopped_run(out, raylet, [loss["folder"] for loss in losses])
    saved = max(path.name for path in folder.glob("checkpoint-*"))
    losses.append({"what": what, "folder": folder, "last": saved, "killed": time.monotonic()})
    kill(worker)
    while Path(f"/proc/{worker}").exists():
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def suite(folder: Path, out: str, *options: str) -> tuple[float, list[tuple[float, str]]]:
    """``morecl suite`` in a process; -> seconds, the lines that it printed and when."""
    began = time.monotonic()
    command = [sys.executable, "-m", "morecl", "suite", "short.toml", "--out", out, *options]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.stdout is not None
    printed = [(time.monotonic(), line.rstrip()) for line in done.stdout]
    assert done.wait() == 0, printed
    return round(time.monotonic() - began, 1), printed


def check(folder: Path) -> dict[str, Any]:
    from ray import __version__ as ray_version
    from ray.cluster_utils import Cluster

    (folder / "short.toml").write_text(SUITE)
    here, _ = suite(folder, "here", "--jobs", "2")
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    losses: list[dict[str, Any]] = []
    try:
        second = cluster.add_node(**NODE)
        raylet = second.all_processes["raylet"][0].process.pid

        def lose_both() -> None:
            out = folder / "there"
            lose("worker", lambda worker: os.kill(worker, signal.SIGKILL), out, raylet, losses)
            lose("node", lambda _: cluster.remove_node(second, allow_graceful=False), out, raylet, losses)

        threading.Thread(target=lose_both, daemon=True).start()
        there, printed = suite(folder, "there", "--on", "ray", "--address", cluster.address)
    finally:
        cluster.shutdown()
    failures = [] if len(losses) == 2 else ["the suite ended before a worker and a node were killed"]
    names = sorted(path.relative_to(folder / "here") for path in (folder / "here").rglob("result.json"))
    equal = 0
    for name in names:
        pair = [folder / place / name for place in ("here", "there")]
        records = [read_record(path).model_dump(exclude={"seconds", "shared"}) for path in pair if path.is_file()]
        if len(records) == 2 and records[0] == records[1]:
            equal += 1
        else:
            failures.append(f"{name} is missing or differs")
    noticed = [when for when, line in printed if "resumes elsewhere" in line]
    if len(noticed) != len(losses):
        failures.append(f"{len(noticed)} losses were noticed")
    for loss, when in zip(losses, noticed, strict=False):
        loss["seconds until noticed"] = round(when - loss.pop("killed"), 1)
        if "resuming after task" not in loss["folder"].with_name(f"{loss['folder'].name}.log").read_text():
            failures.append(f"{loss['folder']} did not resume")
    left = [str(path.relative_to(folder)) for path in (folder / "there").rglob(".*") if path.name != ".lock"]
    failures += [f"left behind: {path}" for path in left]
    return {
        "runs": len(names),
        "records equal to those made here": equal,  # in all but seconds
        "seconds here, two jobs": here,
        "seconds on two nodes, one of which dies": there,
        "losses": [{**loss, "folder": str(loss["folder"].relative_to(folder / "there"))} for loss in losses],
        "failures": failures,
        "versions": {"morecl": morecl.__version__, "ray": ray_version, "python": platform.python_version()},
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the record")
    out = parser.parse_args().out
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(morecl.__file__).parents[1])}
    with tempfile.TemporaryDirectory() as name:
        record = check(Path(name))
    write_json(out, record)
    print(json.dumps(record, indent=2))
    sys.exit(bool(record["failures"]))


if __name__ == "__main__":
    main()
