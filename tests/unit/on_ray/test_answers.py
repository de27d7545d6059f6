"""How images are divided among the tasks of a cluster, with tasks that answer at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from morecl.classifier import Answer
from morecl.errors import InputError
from morecl.on_ray.answers import answers
from morecl.on_ray.cluster import Cluster
from morecl.on_ray.node import Surroundings

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")


class Tasks:
    """In Ray's place: notes what it is asked for, and answers with the name of each image."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: str | None = None):
        self.options: dict[str, Any] = {}
        self.chunks: list[Sequence[str]] = []
        self.devices: set[str | None] = set()
        self.cancelled: list[int] = []
        self.error = error
        for name in ("get", "cancel"):
            monkeypatch.setattr(ray, name, getattr(self, name))
        monkeypatch.setattr(ray, "remote", lambda **options: lambda function: self.task(options))

    def task(self, options: dict[str, Any]) -> Tasks:
        self.options = options
        return self

    def remote(
        self, model: Path, version: int, device: str, paths: list[str], around: Surroundings, top: int, accept: float
    ) -> int:
        self.chunks.append(paths)
        self.devices.add(device)
        return len(self.chunks) - 1

    def get(self, task: int) -> list[Answer]:
        if self.error == "failed":
            raise ray.exceptions.RayTaskError("f", "traceback", InputError("what the node said"))
        return [Answer(path, None, None, None, None, False, error=self.error) for path in self.chunks[task]]

    def cancel(self, task: int, force: bool) -> None:
        self.cancelled.append(task)


def asked(cluster: Cluster, paths: Sequence[str], device: str | None = None, own_batch: int | None = None) -> Any:
    learner: Any = SimpleNamespace(eval_batch_size=own_batch or 3, config=SimpleNamespace(eval_batch_size=own_batch))
    return answers(cluster, Path("model"), 1, learner, paths, device=device, top=1, accept=0.9)


def test_answers_keep_the_order_and_tasks_are_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks(monkeypatch)
    paths = [f"{number}.png" for number in range(40)]
    assert [answer.path for answer in asked(Cluster(2, 0, 1, 2), paths)] == paths
    assert [len(chunk) for chunk in tasks.chunks] == [12, 12, 12, 4]
    assert tasks.options["num_cpus"] == 2 and tasks.options["num_gpus"] == 0 and tasks.options["max_retries"] == 3
    assert tasks.devices == {"cpu"}
    assert list(asked(Cluster(1, 0, 1, 1), [])) == []


@pytest.mark.parametrize(
    ("device", "own_batch", "size", "cards"), [(None, None, 2000, 0.5), (None, 7, 28, 0.5), ("cpu", None, 12, 0)]
)
def test_chunks_fit_the_batches_of_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str | None, own_batch: int | None, size: int, cards: float
) -> None:
    tasks = Tasks(monkeypatch)
    list(asked(Cluster(1, 0.5, 1, 1), ["x"] * 2001, device, own_batch))
    assert len(tasks.chunks[0]) == size and tasks.options["num_gpus"] == cards and tasks.devices == {device}


def test_few_chunks_are_under_way_and_none_when_nobody_asks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks(monkeypatch)
    found = asked(Cluster(1, 0, 1, 2), ["x"] * 1000)
    next(found)
    assert len(tasks.chunks) == 4  # two for each task that the cluster can do at once
    found.close()
    assert tasks.cancelled == [0, 1, 2, 3]


def test_what_a_node_cannot_see_or_do_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.png").touch()
    Tasks(monkeypatch, error="does not exist")
    with pytest.raises(InputError, match=r"a node does not see .*x\.png; images have to be on storage that all nodes"):
        list(asked(Cluster(1, 0, 1, 1), [str(tmp_path / "x.png")]))
    (answer,) = asked(Cluster(1, 0, 1, 1), [str(tmp_path / "missing.png")])  # here neither: broken as ever
    assert answer.error == "does not exist"
    Tasks(monkeypatch, error="failed")
    with pytest.raises(InputError, match="what the node said"):
        list(asked(Cluster(1, 0, 1, 1), ["x"]))
