from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import morecl
from morecl.errors import InputError
from morecl.images import to_side
from morecl.methods import tools
from morecl.methods.joint import Joint
from morecl.pictures import InMemory, Pictures
from tiny import images_of, learner_of, resumes, teach


def test_trains_on_everything_seen_starting_from_the_pretrained_state(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(Joint)
    fresh = {key: value.clone() for key, value in learner.model.state_dict().items() if not key.startswith("head")}
    original, columns, starts = tools.fit, [], []

    def spy(loss: Any, batches: Any, *args: Any, **kwargs: Any) -> None:
        starts.append({key: value.clone() for key, value in learner.model.state_dict().items()})
        columns.append([])

        def watched(epoch: int) -> Any:
            for batch in batches(epoch):
                columns[-1].append(batch[1])
                yield batch

        original(loss, watched, *args, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    teach(learner, (0, 1), (2, 3))
    assert torch.cat(columns[0]).bincount().tolist() == [8, 8]
    assert torch.cat(columns[1]).bincount().tolist() == [8, 8, 8, 8]
    for start in starts:
        assert all(torch.equal(start[key], value) for key, value in fresh.items())
    assert starts[1]["head.weight"].shape[0] == 4 and not starts[1]["head.bias"].any()
    learned = learner.model.state_dict()
    assert any(not torch.equal(learned[key], value) for key, value in fresh.items() if key.startswith("adapters"))


def test_starts_anew_whatever_was_learned_before() -> None:
    """Its second step does not depend on how the first one was trained."""
    a, b = teach(learner_of(Joint), (0, 1)), teach(learner_of(Joint), (0, 1))
    with torch.no_grad():
        for parameter in b.model.parameters():
            parameter.add_(1.0)
    x, _ = images_of(0, 3)
    assert np.array_equal(teach(a, (2, 3)).scores(x), teach(b, (2, 3)).scores(x))


def test_keeps_every_image_with_its_label() -> None:
    learner = teach(learner_of(Joint), (0, 1), (2, 3))
    x = np.concatenate([images_of(0, 1)[0], images_of(2, 3)[0]])
    assert np.array_equal(learner.memory.images, x)
    assert learner.memory.labels == [c for c in range(4) for _ in range(8)]


def test_resumed_equals_uninterrupted() -> None:
    assert resumes(lambda: learner_of(Joint))


class Counting(InMemory):
    """Counts the images that are read."""

    read_so_far, most_at_once = 0, 0

    def read(self, rows: Any, out: Any) -> None:
        self.read_so_far += len(rows)
        self.most_at_once = max(self.most_at_once, len(rows))
        super().read(rows, out)


def tasks_on_disk() -> tuple[Counting, list[tuple[Pictures, list[int]]]]:
    """Three tasks of 16 images, as rows of one source, as those of a folder are."""
    parts = [images_of(*classes) for classes in ((0, 1), (2, 3), (4, 5))]
    source = Counting(np.concatenate([x for x, _ in parts]))
    return source, [(Pictures(source, np.arange(16 * k, 16 * k + 16)), y) for k, (_, y) in enumerate(parts)]


@pytest.fixture
def nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything but the first task is too much for memory; tokens are not cached; chunks of five images."""
    monkeypatch.setattr("morecl.pictures.HELD_BYTES", 16 * 8 * 8 * 3)
    monkeypatch.setattr("morecl.pictures.CHUNK_BYTES", 5 * 8 * 8 * 3)
    monkeypatch.setattr("morecl.nn.tokens.CPU_CACHE_BYTES", 0)


def taught(*, saved_in: Path | None = None) -> Joint:
    """Three tasks; with ``saved_in``, saved and loaded after each, and the folder replaced, as a resumed run does."""
    learner: Any = learner_of(Joint)
    for number, (x, y) in enumerate(tasks_on_disk()[1]):
        learner.learn_task(x, y)
        if saved_in:
            learner.save(saved_in / str(number))
            learner = morecl.load(saved_in / str(number))
            if number:
                shutil.rmtree(saved_in / str(number - 1))  # the learner holds images of the one before
    return learner


def weights(learner: Joint) -> dict[str, np.ndarray]:
    return {key: value.numpy() for key, value in learner.model.state_dict().items()}


def test_images_on_disk_stay_there(nothing_held: None) -> None:
    learner = learner_of(Joint)
    source, tasks = tasks_on_disk()
    for x, y in tasks:
        learner.learn_task(x, y)
    assert learner.memory.unread is not None and "memory.images" not in learner.state()
    first, others = learner.memory.images._source.parts
    assert isinstance(first, np.ndarray) and others._source is source, "rows of one source, not a nest of them"
    assert source.most_at_once <= 16, "never more than a task was read at once"
    assert np.array_equal(learner.memory.images[:], np.concatenate([x[:] for x, _ in tasks]))
    assert learner.buffer_entries() == 48 * 8 * 8 * 3


def test_trained_on_the_same_images_from_memory_it_is_the_same(
    nothing_held: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = weights(taught())
    monkeypatch.setattr("morecl.pictures.HELD_BYTES", 1 << 20)
    held = taught()
    assert held.memory.unread is None
    assert all(np.array_equal(value, unread[key]) for key, value in weights(held).items())


def test_saved_and_loaded_equals_uninterrupted(nothing_held: None, tmp_path: Path) -> None:
    straight, resumed = taught(), taught(saved_in=tmp_path)
    assert all(np.array_equal(value, weights(resumed)[key]) for key, value in weights(straight).items())
    assert resumed.memory.unread is not None
    assert np.array_equal(resumed.memory.images[:], straight.memory.images[:])
    assert resumed.memory.labels == straight.memory.labels
    moved = (tmp_path / "2").rename(tmp_path / "moved")
    assert np.array_equal(morecl.load(moved).scores(images_of(0, 5)[0]), straight.scores(images_of(0, 5)[0]))


def test_a_file_with_images_from_disk_is_what_safetensors_writes(
    nothing_held: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught().save(tmp_path / "unread")
    monkeypatch.setattr("morecl.pictures.HELD_BYTES", 1 << 20)
    taught().save(tmp_path / "held")
    one, other = (load_file(tmp_path / name / "state.safetensors") for name in ("unread", "held"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], value) and one[key].dtype == value.dtype for key, value in other.items())
    assert one["memory.images"].shape == (48, 8, 8, 3)
    with (tmp_path / "unread" / "state.safetensors").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0


def test_a_learner_goes_back_to_images_on_disk(nothing_held: None) -> None:
    learner = learner_of(Joint)
    _, tasks = tasks_on_disk()
    for x, y in tasks[:2]:
        learner.learn_task(x, y)
    before, images = learner.snapshot(), learner.memory.images[:]
    learner.learn_task(*tasks[2])
    learner.go_back(before)
    assert learner.memory.unread is not None and np.array_equal(learner.memory.images[:], images)
    assert learner.task_sizes == [2, 2] and len(learner.memory) == 32


def test_a_failed_task_leaves_the_images_of_before(nothing_held: None, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(Joint)
    _, tasks = tasks_on_disk()
    for x, y in tasks[:2]:
        learner.learn_task(x, y)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tools, "fit", interrupt)
        learner.learn_task(*tasks[2])
    assert learner.memory.images.shape == (32, 8, 8, 3) and len(learner.memory.columns) == 32
    learner.learn_task(*tasks[2])
    assert all(np.array_equal(value, weights(learner)[key]) for key, value in weights(taught()).items())


def test_arrays_of_the_caller_are_copied_and_other_sizes_resized(nothing_held: None) -> None:
    learner = learner_of(Joint)
    x, y = images_of(0, 1, 2)
    given = x.copy()
    learner.learn_task(given, y)
    given[:] = 0
    assert learner.memory.unread is not None and np.array_equal(learner.memory.images[:], x)
    large = np.random.default_rng(0).integers(0, 256, (8, 20, 24, 3)).astype(np.uint8)
    learner.learn_task(Pictures(InMemory(large)), [7] * 8)
    side = learner.backbone.input.resize
    expected = np.concatenate([to_side(x, side), to_side(large, side)])
    assert np.array_equal(learner.memory.images[:], expected)


def test_a_saved_file_that_is_written_to_is_noticed(nothing_held: None, tmp_path: Path) -> None:
    learner = taught(saved_in=tmp_path)
    with (tmp_path / "2" / "state.safetensors").open("rb+") as file:
        file.truncate(1000)
    with pytest.raises(InputError, match=r"state\.safetensors was changed"):
        learner.memory.images[:]
