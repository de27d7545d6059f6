"""A suite, a search and predictions on a Ray cluster of two nodes on this machine, one of which dies.

One test, because it shares one cluster, which takes seconds to start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from calling import exit_code
from morecl import tune as search
from morecl.classifier import Classifier
from morecl.classifier import plan as lesson_plan
from morecl.locking import CLAIM
from morecl.on_ray import answers
from morecl.records import read_record
from morecl.run import launch
from morecl.suite.plan import load_suite, plan
from tiny import pictures

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

SUITE = """
description = "small"
seeds = [0, 1, 2, 3]
[settings]
image_size = 8
bottleneck = 4
epochs = 1
device = "cpu"

[[runs]]
methods = ["finetune"]
benchmarks = ["digits-5t"]
variant = "small"
train_per_class = 8
test_per_class = 2
"""
FAST = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@contextmanager
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A cluster and its second node."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": FAST})
    try:
        yield cluster, cluster.add_node(**NODE)
    finally:
        cluster.shutdown()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_in_the_middle(cluster: Any, node: Any, out: Path, killed: list[Path]) -> None:
    """When a run of ``node`` has a checkpoint, kill its worker and the node.

    The worker first: one that outlives its node would kill the run, which must end without that too.
    """
    raylet = node.all_processes["raylet"][0].process.pid
    while not killed:
        for claim in out.glob(f"*/*/*/{CLAIM}"):
            with suppress(OSError, ValueError):  # it may just have ended
                pid = json.loads(claim.read_text())["pid"]
                worker = parent(pid)
                begun = list(claim.parent.glob("checkpoint-*"))
                if parent(worker) != raylet or not begun or (claim.parent / "checkpoint-5").exists():
                    continue
                os.kill(pid, signal.SIGSTOP)  # not one step further
                killed.append(claim.parent)
                break
        time.sleep(0.01)
    os.kill(worker, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)
    while Path(f"/proc/{worker}").exists():
        time.sleep(0.05)
    os.kill(pid, signal.SIGCONT)


def comparable(record: Any) -> dict[str, Any]:
    return record.model_dump(exclude={"seconds", "shared"})


def small_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of two classes, and a folder of ten images, one of them broken."""
    monkeypatch.setattr(lesson_plan, "MOST_EPOCHS", 1)
    settings = {"image_size": 8, "bottleneck": 4, "projection": 40, "eval_batch_size": 2}
    classifier = Classifier.create(backbone="vit_mini_patch4_32", device="cpu", **settings)
    classifier.learn([*pictures(0, 6), *pictures(1, 6)], ["a"] * 6 + ["b"] * 6)
    classifier.save(folder / "model")
    (folder / "photos").mkdir()
    for number, array in enumerate(pictures(0, 10, draw=1)):
        Image.fromarray(array).save(folder / "photos" / f"{number}.png")
    (folder / "photos" / "4.png").write_bytes(b"no image")
    return folder


def test_a_cluster_that_loses_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, killed = tmp_path / "mine.toml", tmp_path / "out", list[Path]()
    file.write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    with two_nodes(monkeypatch) as (cluster, second):
        on_ray = ["--on", "ray", "--address", cluster.address]
        killer = threading.Thread(target=kill_in_the_middle, args=(cluster, second, out, killed), daemon=True)
        killer.start()
        assert exit_code(monkeypatch, "suite", file, "--out", out, *on_ray) == 0
        killer.join(timeout=60)
        assert killed, "no run of the second node was in the middle"
        shown = capsys.readouterr()
        assert "4 runs, 4 to do, on 2 nodes of a Ray cluster, 1 CPU each" in shown.out
        assert shown.out.count("lost ") == 1 and "died; it resumes elsewhere, try 2 of 4" in shown.out
        assert "raylet" not in shown.out
        log = killed[0].with_name(f"{killed[0].name}.log").read_text()
        assert "try 2" in log and "stopped; `morecl resume" in log and "resuming after task" in log
        for run in plan(load_suite(str(file)), out):
            here = launch.start(run.request, tmp_path / "local" / run.folder.name)
            assert comparable(read_record(run.folder / "result.json")) == comparable(here)
            assert not (run.folder / CLAIM).exists()

        tune_and_compare(tmp_path, monkeypatch, on_ray)
        capsys.readouterr()
        predict_and_compare(tmp_path, monkeypatch, on_ray, capsys)


def tune_and_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_ray: list[str]) -> None:
    settings = ["--set", "image_size=8", "--set", "bottleneck=4", "--device", "cpu"]
    command = ["tune", "digits-5t", "--method", "finetune", "--lr", "0.001", "--epochs", 1, *settings]
    command += ["--train-per-class", 4, "--validation", 0.25]
    found = []
    for place, options in (("here", []), ("ray", on_ray)):
        assert exit_code(monkeypatch, *command, "--out", tmp_path / place, *options) == 0
        text = (tmp_path / place / search.FILE).read_text()
        trials = search.Search.model_validate_json(text).trials
        found.append([trial.model_dump(exclude={"seconds"}) for trial in trials])
    assert found[0] == found[1] and found[0][0]["aca"] is not None


def predict_and_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_ray: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Chunks of two batches of two images; the broken one is named, and the others keep their order."""
    monkeypatch.setattr(answers, "BATCHES", 2)
    folder = small_model(tmp_path, monkeypatch)
    command = ["predict", folder / "model", "photos", "--json", "--device", "cpu"]
    shown = []
    for options in ([], on_ray):
        assert exit_code(monkeypatch, *command, *options) == 1
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1]
    assert len(shown[0].out.splitlines()) == 9 and "not readable: photos/4.png" in shown[0].err
