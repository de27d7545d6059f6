from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from morecl.methods import eeil, tools
from morecl.methods.eeil import Eeil
from tiny import found_in, images_of, learner_of, resumes, teach


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each call of the training loop was given, batches included."""
    calls: list[dict[str, Any]] = []
    original = tools.fit

    def spy(loss: Any, batches: Any, optimizer: Any, **kwargs: Any) -> None:
        seen: list[Any] = []
        calls.append({"lr": optimizer.param_groups[0]["lr"], "batches": seen, **kwargs})

        def watched(epoch: int) -> Any:
            for batch in batches(epoch):
                seen.append(batch)
                yield batch

        original(loss, watched, optimizer, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    return calls


def counts(stage: dict[str, Any]) -> list[int]:
    return torch.cat([batch[1] for batch in stage["batches"]]).bincount().tolist()


def test_a_task_ends_with_a_balanced_stage_at_a_lower_rate(stages: list[dict[str, Any]]) -> None:
    learner = learner_of(Eeil, memory_size=8, lr=0.01, balanced_epochs=2)
    teach(learner, (0, 1))
    assert len(stages) == 1
    teach(learner, (2, 3))
    main, balanced = stages[1:]
    assert counts(main) == [4, 4, 8, 8] and main["lr"] == 0.01
    assert counts(balanced) == [8, 8, 8, 8]  # 4 of each class, two epochs
    assert balanced["lr"] == pytest.approx(0.001) and balanced["epochs"] == 2
    assert np.bincount(learner.memory.columns).tolist() == [2, 2, 2, 2]


def test_each_stage_distils_from_the_network_it_starts_with(stages: list[dict[str, Any]]) -> None:
    learner = teach(learner_of(Eeil, memory_size=8, balanced_epochs=1), (0, 1))
    x, y = images_of(2, 3)
    everything = np.concatenate([learner.memory.images, x])
    with torch.no_grad():
        old = learner.head(torch.from_numpy(learner.features(everything)))
    learner.learn_task(x, y)
    main = torch.cat([batch[2] for batch in stages[1]["batches"]])
    assert found_in(main, old).max() < 1e-4 and main.shape == (24, 2)
    temporary = torch.cat([batch[2] for batch in stages[2]["batches"]])
    assert temporary.shape == (16, 4)  # the new classes are distilled too
    assert found_in(temporary[:, :2], old).min() > 1e-4


def test_the_first_stage_distils_all_earlier_tasks_and_the_balanced_one_the_newest_too(
    stages: list[dict[str, Any]],
) -> None:
    teach(learner_of(Eeil, memory_size=12, balanced_epochs=1), (0, 1), (2,), (3, 4))
    assert [stage["batches"][0][2].shape[1] for stage in stages] == [0, 2, 3, 3, 5]  # one task, then two stages each


def test_cross_distilled_loss_is_cross_entropy_plus_one_distillation_per_task() -> None:
    learner = teach(learner_of(Eeil, memory_size=8, balanced_epochs=0, temperature=3.0), (0, 1), (2, 3))
    x, y = images_of(0, 3)
    tokens = learner.prepare(x)
    loss, (targets, _) = learner._cross_distilled(tokens, np.array(y), [2, 2])
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(16, 4))
    with torch.no_grad():
        value = float(loss(tokens[torch.arange(16)], targets, torch.from_numpy(teacher)))
        z = learner.head(torch.from_numpy(learner.features(x))).double().numpy()

    def log_softmax(a: np.ndarray) -> np.ndarray:
        return a - np.log(np.exp(a).sum(1, keepdims=True))

    expected = -log_softmax(z)[np.arange(16), y].mean()
    for f in (slice(0, 2), slice(2, 4)):
        expected -= (np.exp(log_softmax(teacher[:, f] / 3)) * log_softmax(z[:, f] / 3)).sum(1).mean()
    assert value == pytest.approx(expected, rel=1e-5)


def test_memory_is_herded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the normalised features of the task's images, those of the balanced stage as the first stage left them, those
    that are stored as the last did."""
    given: list[tuple[torch.Tensor, np.ndarray]] = []
    original = eeil.herding_order

    def spy(features: torch.Tensor, columns: np.ndarray, quota: int) -> np.ndarray:
        given.append((features, original(features, columns, quota)))
        return given[-1][1]

    monkeypatch.setattr(eeil, "herding_order", spy)
    learner = teach(learner_of(Eeil, memory_size=8, balanced_epochs=2, balanced_lr_factor=1.0), (0, 1), (2, 3))
    x, _ = images_of(2, 3)
    (_, _), (first, _), (last, order) = given
    assert np.array_equal(learner.memory.images[4:], x[order])
    z = torch.nn.functional.normalize(torch.from_numpy(learner.features(x)), dim=1)
    assert torch.allclose(last, z, atol=1e-5) and (first - z).abs().max() > 1e-3


def test_resumed_equals_uninterrupted() -> None:
    assert resumes(lambda: learner_of(Eeil, memory_size=12, balanced_epochs=1))


def test_without_a_memory_there_is_no_balanced_stage(stages: list[dict[str, Any]]) -> None:
    teach(learner_of(Eeil, memory_size=0), (0, 1), (2, 3))
    assert len(stages) == 2
