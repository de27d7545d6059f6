from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tiny
from morecl.catalogue import SHIPPED
from morecl.methods import tools
from morecl.methods.base import TaskData
from morecl.methods.pass_ import Pass, rotated
from morecl.training import Batch

FIRST, SECOND = tiny.task([0, 1], ["a", "b"], 6), tiny.task([2, 3, 4], ["c", "d", "e"], 6)


def learner(**changes: object) -> Pass:
    settings = {k: v for k, v in tiny.SETTINGS.items() if k in Pass.Config.model_fields}
    return Pass(Pass.Config.parse(settings | {"epochs": 1} | changes))


@pytest.fixture(scope="module")
def taught() -> Pass:
    one = learner()
    one.learn_task(*FIRST)
    return one


def test_rotated_images() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    turned = rotated(image)
    assert turned.shape == (4, 2, 2, 3)
    assert turned[1, 0, 0].tolist() == image[0, 0, 1].tolist()  # a quarter turn to the left: top right -> top left
    assert turned[2, 0, 0].tolist() == image[0, 1, 1].tolist()
    assert turned[3, 0, 0].tolist() == image[0, 1, 0].tolist()


def test_four_rotations_are_four_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Batch] = []

    def spy(loss: Any, batches: Any, *args: Any, **kwargs: Any) -> None:
        seen.extend(batches(0))

    monkeypatch.setattr(tools, "fit", spy)
    one = learner(batch_size=6)
    one.learn_task(*FIRST)
    assert one.head.weight.shape[0] == 8
    x, y = seen[0]
    assert len(x) == len(y) == 24  # six images in four positions
    kinds = one.prepare(FIRST[0])
    every = {r: one.prepare(np.rot90(FIRST[0], r, axes=(1, 2))) for r in range(4)}
    for token, target in zip(x, y.tolist(), strict=True):
        same = [i for i in range(len(kinds)) if torch.equal(every[target % 4].range(i, i + 1)[0], token)]
        assert [["a", "b"].index(FIRST[1][i]) for i in same] == [target // 4]


def test_prototypes_and_radius(taught: Pass) -> None:
    one = learner()
    variances: list[float] = []
    for images, labels in (FIRST, SECOND):
        one.learn_task(images, labels)
        z = one.features(images).astype(np.float64)
        for label in dict.fromkeys(labels):
            own = z[[name == label for name in labels]]
            assert np.allclose(one.prototypes.means[one.classes.index(label)].numpy(), own.mean(0), atol=1e-5)
            variances.append(float(np.trace(np.cov(own.T, bias=True))) / z.shape[1])
        assert float(one.prototypes.variance) == pytest.approx(np.mean(variances), rel=1e-4)


def test_augmented_prototypes_lie_around_the_means(taught: Pass) -> None:
    task = TaskData(1, SECOND[0], torch.zeros(18, dtype=torch.int64), 3, 2)
    draw = torch.Generator().manual_seed(0)
    drawn = [taught._augmented(task, draw) for _ in range(200)]
    z, columns = torch.cat([z for z, _ in drawn]).double(), torch.cat([c for _, c in drawn])
    assert set(columns.tolist()) == {0, 4}
    noise = z - taught.prototypes.means[columns // 4]
    assert float(noise.std()) == pytest.approx(float(taught.prototypes.variance) ** 0.5, rel=0.02)
    assert float(noise.mean().abs()) < 0.02 * float(noise.std())


@pytest.mark.parametrize("unit", ["length", "square"])
def test_the_loss_has_three_terms(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked out by hand from what the loop is given."""
    one = learner(temperature=0.5, proto_weight=0.3, kd_weight=2.0, kd_unit=unit)
    one.learn_task(*FIRST)
    before = torch.from_numpy(one.features(rotated(SECOND[0])))
    tokens = one.prepare(rotated(SECOND[0])).range(0, 72).flatten(1)
    seen: list[tuple[float, float]] = []
    fit = tools.fit

    def spy(loss: Any, batches: Any, *args: Any, **kwargs: Any) -> None:
        def checked(x: torch.Tensor, y: torch.Tensor, old: torch.Tensor, z: torch.Tensor, c: torch.Tensor) -> Any:
            value = loss(x, y, old, z, c)
            with torch.no_grad():
                told = float(loss(x, y, old + 1, z, c))  # else the features have hardly moved
                features = one._features(x)
                log_p, log_q = ((one.head(each) / 0.5).log_softmax(1) for each in (features, z))
            then = before[torch.cdist(x.flatten(1), tokens).argmin(1)] + 1
            moved = (features - then).square().mean() / before.square().mean() ** (1 if unit == "square" else 0.5)
            own, prototypes = (-log.gather(1, k[:, None]).mean() for log, k in ((log_p, y), (log_q, c)))
            seen.append((told, float(own + 0.3 * prototypes + 2.0 * moved)))
            return value

        fit(checked, batches, *args, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    one.learn_task(*SECOND)
    assert len(seen) == 3 and abs(float(before.square().mean()) - 1) > 0.01
    for value, expected in seen:
        assert value == pytest.approx(expected, rel=1e-4)


def test_augmented_prototypes_train_the_head() -> None:
    """With them the old classes go on being recognised at their own prototypes."""
    losses = []
    for weight in (0.0, 10.0):
        one = learner(proto_weight=weight)
        one.learn_task(*FIRST)
        one.learn_task(*SECOND)
        logits = one.head(one.prototypes.means[:2].float()).detach()
        losses.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor([0, 4]))))
    assert losses[1] < losses[0]


def test_features_are_held_by_distillation() -> None:
    moved = []
    for weight in (0.0, 10.0):
        one = learner(kd_weight=weight, proto_weight=0.0, epochs=2, backbone=SHIPPED)
        one.learn_task(*FIRST)
        before = one.features(SECOND[0])
        one.learn_task(*SECOND)
        moved.append(float(np.linalg.norm(one.features(SECOND[0]) - before)))
    assert moved[1] < 0.7 * moved[0]


def test_no_image_is_stored(taught: Pass) -> None:
    assert len(taught.memory) == 0
    assert all(value.dtype != torch.uint8 for key, value in taught.state().items() if value.numel())


def test_the_unturned_outputs_answer(taught: Pass) -> None:
    before = taught.scores(FIRST[0])
    bias = taught.head.bias.detach().clone()
    with torch.no_grad():
        taught.head.bias[[1, 2, 3, 5, 6, 7]] += 100
        assert np.array_equal(taught.scores(FIRST[0]), before)
        taught.head.bias.copy_(bias)
    assert before.shape == (12, 2)


def test_images_that_are_not_square_can_be_learned() -> None:
    one = learner()
    images = np.random.default_rng(0).integers(0, 256, (8, 6, 10, 3), dtype=np.uint8)
    one.learn_task(images, [0, 1] * 4)
    assert one.scores(images).shape == (8, 2)
