"""What every method keeps to when the backbone is trained too, from random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import morecl
import tiny
from morecl.methods import METHODS, Learner
from morecl.methods.masked import MaskedLearner
from morecl.methods.prototypes import PrototypeLearner
from morecl.nn.backbone import fingerprint, load_backbone
from morecl.progress import EpochDone

SCRATCH: dict[str, Any] = {"backbone": "test_vit", "image_size": 32, "pretrained": False, "freeze_backbone": False}
TASKS = [tiny.task([0, 1], ["a", "b"], 4), tiny.task([2, 3, 4], ["c", "d", "e"], 4)]
TEST = np.concatenate([tiny.pictures(kind, 3, draw=1) for kind in range(5)])
PROTECTED = {name for name, cls in METHODS.items() if issubclass(cls, MaskedLearner | PrototypeLearner)}
FIRST_TASK_ONLY = PROTECTED | {"owm", "ranpac"}
FOR_EVER = PROTECTED | {"single", "ranpac"}  # the first task's network gives the same features from then on

State = dict[str, np.ndarray]


RANDOM = load_backbone("test_vit", image_size=32, pretrained=False)  # shared: only copies of it are trained


def scratch(method: str, **changes: Any) -> Learner:
    cls = METHODS[method]
    return cls(cls.Config.parse(tiny.settings_for(method, **SCRATCH | changes)), RANDOM)


def backbone(learner: Learner, task: int = 0) -> State:
    """The trained backbone; of ``task`` where each task has its own."""
    prefix = f"model.tasks.{task}.backbone." if learner.name == "single" else "model.backbone."
    state = tiny.snapshot(learner)["state"]
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def initial(learner: Learner) -> State:
    return {key: value.numpy().copy() for key, value in learner.network.new_body().state_dict().items()}


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


@dataclass(frozen=True)
class Lesson:
    """A learner after two tasks, which no test may change, and what it was after the first."""

    learner: Learner
    backbone: State
    features: np.ndarray  # of the first task's network
    folder: Path  # saved then


@pytest.fixture(scope="module", params=sorted(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def lesson(method: str, tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    learner, folder = scratch(method), tmp_path_factory.mktemp(method) / "after-one"
    learner.learn_task(*TASKS[0])
    learner.save(folder, include_backbone=False)
    seen = backbone(learner), learner.features(TEST)
    learner.learn_task(*TASKS[1])
    return Lesson(learner, *seen, folder)


def test_the_first_task_trains_all_of_it(lesson: Lesson) -> None:
    before = initial(lesson.learner)
    assert before.keys() == lesson.backbone.keys()
    assert {"patch_embed.proj.weight", "cls_token", "pos_embed", "blocks.5.mlp.fc2.bias"} <= before.keys()
    assert not [key for key in before if np.array_equal(before[key], lesson.backbone[key])]


def test_the_first_task_trains_the_norms_with_it(lesson: Lesson) -> None:
    state, fresh = tiny.snapshot(lesson.learner)["state"], lesson.learner.network.new_norms()
    for name, start in fresh.named_parameters():
        trained = next(value for key, value in state.items() if key.endswith(f"norms.{name}"))
        assert (trained != start.detach().numpy()).any(1).all()  # every one of them


def test_the_initial_weights_stay(lesson: Lesson) -> None:
    assert fingerprint(lesson.learner.backbone.vit.state_dict()) == lesson.learner.backbone.sha256


def test_which_tasks_train_it(method: str, lesson: Lesson) -> None:
    assert equal(lesson.backbone, backbone(lesson.learner)) == (method in FIRST_TASK_ONLY | {"single"})
    if method == "single":
        second = backbone(lesson.learner, task=1)
        assert not equal(second, lesson.backbone) and not equal(second, initial(lesson.learner))


def test_a_network_that_is_finished_stays_as_it_is(method: str, lesson: Lesson) -> None:
    assert np.array_equal(lesson.features, lesson.learner.features(TEST)) == (method in FOR_EVER)


def test_same_seed_same_bits(method: str, lesson: Lesson) -> None:
    before = torch.get_rng_state()
    again = scratch(method)
    for images, labels in TASKS:
        again.learn_task(images, labels)
    assert torch.equal(torch.get_rng_state(), before), "a draw was made from the global generator"
    tiny.assert_same(tiny.snapshot(lesson.learner), tiny.snapshot(again))
    assert np.array_equal(lesson.learner.scores(TEST), again.scores(TEST))


def test_saved_and_loaded_without_the_initial_backbone(lesson: Lesson, tmp_path: Path) -> None:
    lesson.learner.save(tmp_path / "saved", include_backbone=False)
    loaded = morecl.load(tmp_path / "saved")
    tiny.assert_same(tiny.snapshot(lesson.learner), tiny.snapshot(loaded))
    assert np.array_equal(loaded.scores(TEST), lesson.learner.scores(TEST))
    assert loaded.entries() == lesson.learner.entries()


@contextmanager
def breaking(learner: Learner) -> Iterator[None]:
    """Inside, a task is learned to its end and then fails."""
    learn = learner._learn

    def broken(*args: Any) -> None:
        learn(*args)
        raise RuntimeError("when all was done")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="when all was done"):
        patch.setattr(learner, "_learn", broken)
        yield


def interrupt(event: EpochDone) -> None:
    raise KeyboardInterrupt("between epochs")


def test_a_task_that_fails_leaves_the_learner_as_before(method: str, lesson: Lesson) -> None:
    """In the first task and in the second; then learning goes on as if nothing had been."""
    learner = scratch(method)
    before = tiny.snapshot(learner)
    with pytest.raises(KeyboardInterrupt, match="between epochs"):
        learner.learn_task(*TASKS[0], interrupt)
    tiny.assert_same(before, tiny.snapshot(learner))
    learner = morecl.load(lesson.folder)
    before, scores = tiny.snapshot(learner), learner.scores(TEST)
    with breaking(learner):
        learner.learn_task(*TASKS[1])
    tiny.assert_same(before, tiny.snapshot(learner))
    assert np.array_equal(scores, learner.scores(TEST))
    learner.learn_task(*TASKS[1])
    tiny.assert_same(tiny.snapshot(lesson.learner), tiny.snapshot(learner))


def test_the_backbone_is_counted_once(method: str, lesson: Lesson) -> None:
    entries, learner = lesson.learner.entries(), lesson.learner
    norms = learner.network.new_norms()
    copies = 2 if method == "single" else 1
    whole = sum(value.numel() for value in learner.backbone.state.values())
    assert entries["backbone"] == copies * (whole - norms.weight.numel() - norms.bias.numel())
    kept = sum(value.size for key, value in tiny.snapshot(learner)["state"].items() if ".backbone." in f".{key}")
    assert entries["backbone"] == kept
    sets = 2 if isinstance(learner, MaskedLearner) or method == "single" else 1  # of norms: one per task, or one
    assert entries["norms"] == norms.weight.numel() * 2 * sets


# ---- single methods -----------------------------------------------------------------------------------------------


def test_joint_starts_each_task_from_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, starts = scratch("joint"), []
    fit = learner._fit_rows

    def spy(*args: Any, **kwargs: Any) -> None:
        starts.append(backbone(learner))
        fit(*args, **kwargs)

    monkeypatch.setattr(learner, "_fit_rows", spy)
    for images, labels in TASKS:
        learner.learn_task(images, labels)
    assert len(starts) == 2 and all(equal(start, initial(learner)) for start in starts)


@pytest.mark.parametrize("method", ["more", "row", "tpl", "hat"])
@pytest.mark.parametrize("frozen", [True, False])
def test_norms_start_from_those_that_the_backbone_was_trained_with(method: str, frozen: bool) -> None:
    learner = scratch(method, freeze_backbone=frozen)
    learner.learn_task(*TASKS[0])
    trained = learner.tasks[0].norms
    learner.task_sizes.append(2)
    learner._grow(2)
    expected = learner.network.new_norms() if frozen else trained
    assert torch.equal(learner.tasks[1].norms.weight, expected.weight)
    assert torch.equal(learner.tasks[1].norms.bias, expected.bias)
    assert not torch.equal(trained.weight, learner.network.new_norms().weight)


@pytest.mark.parametrize("method", ["ncm", "csc"])
def test_prototypes_lie_behind_the_norms_that_were_trained(method: str) -> None:
    learner = scratch(method, lr=0.05)
    learner.learn_task(*TASKS[0])
    assert isinstance(learner, PrototypeLearner)
    with torch.no_grad():
        images = learner.preprocess(torch.from_numpy(TEST))
        expected, other = (learner.network.trunk(images, norms, body=learner.body) for norms in (learner.norms, None))
    np.testing.assert_allclose(learner.features(TEST), expected, rtol=1e-4, atol=1e-4)
    assert (expected - other).abs().max() > 1e-3


def test_learns_from_scratch() -> None:
    """Pictures that were not trained on, four kinds of them."""
    learner = scratch("finetune", epochs=6, lr=0.05)
    learner.learn_task(*tiny.task([0, 1, 2, 3], "abcd", 12))
    images, labels = tiny.task([0, 1, 2, 3], "abcd", 8, draw=1)
    assert np.mean([a == b for a, b in zip(learner.predict(images).labels, labels, strict=True)]) > 0.7
