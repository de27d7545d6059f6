from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from morecl.distillation import class_weights
from morecl.methods import tools
from morecl.methods.gd import Gd
from tiny import found_in, images_of, learner_of, resumes, teach


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each call of the training loop was given, batches included."""
    calls: list[dict[str, Any]] = []
    original = tools.fit

    def spy(loss: Any, batches: Any, optimizer: Any, **kwargs: Any) -> None:
        seen: list[Any] = []
        calls.append({"loss": loss, "optimizer": optimizer, "batches": seen, **kwargs})

        def watched(epoch: int) -> Any:
            for batch in batches(epoch):
                seen.append(batch)
                yield batch

        original(loss, watched, optimizer, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    return calls


def gathered(stage: dict[str, Any], part: int) -> torch.Tensor:
    return torch.cat([batch[part] for batch in stage["batches"]])


def logits(learner: Gd, images: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return learner.head(torch.from_numpy(learner.features(images)))


def test_a_task_ends_with_a_balanced_stage_of_the_head_alone(stages: list[dict[str, Any]]) -> None:
    learner = teach(learner_of(Gd, memory_size=4, lr=0.01, balanced_epochs=1), (0, 1))
    assert len(stages) == 1
    x, y = images_of(2, 3)
    everything = np.concatenate([learner.memory.images, x])
    learner.learn_task(x, y)
    teacher, main, balanced = stages[1:]
    assert found_in(gathered(balanced, 0), torch.from_numpy(learner.features(everything))).max() < 1e-4
    assert gathered(main, 1).bincount().tolist() == [2, 2, 8, 8]
    assert torch.equal(gathered(main, 4), torch.ones(20, 3))  # not balanced yet
    columns, weights = gathered(balanced, 1), gathered(balanced, 4)
    total = torch.zeros(4, 3).index_add(0, columns, weights)
    assert torch.allclose(total[:, 0], torch.full((4,), 5.0))  # 20 images, 4 classes: all count alike
    assert torch.allclose(total[:2, 1], torch.tensor(2.0)) and torch.allclose(total[2:, 2], torch.tensor(8.0))
    (group,) = balanced["optimizer"].param_groups
    assert [p.shape for p in group["params"]] == [learner.head.weight.shape, learner.head.bias.shape]
    assert group["lr"] == pytest.approx(0.001) and teacher["optimizer"].param_groups[0]["lr"] == 0.01


def test_each_term_of_the_balanced_stage_weighs_its_classes_alike(stages: list[dict[str, Any]]) -> None:
    """Cross-entropy all classes, the distillation of the old network the old ones, that of the teacher the new ones."""
    learner = learner_of(Gd, memory_size=6, balanced_epochs=1)
    x, y = images_of(0, 1)
    learner.learn_task(x[:9], y[:9])  # of class 1 a single image
    x, y = images_of(2, 3)
    learner.learn_task(x[:12], y[:12])
    columns, weights = gathered(stages[-1], 1), gathered(stages[-1], 4)
    assert columns.bincount().tolist() == [3, 1, 8, 4]
    total = torch.zeros(4, 3).index_add(0, columns, weights)
    torch.testing.assert_close(total.T, torch.tensor([[4.0, 4, 4, 4], [2, 2, 8, 4], [3, 1, 6, 6]]))


def test_the_balanced_stage_moves_the_head_only() -> None:
    with_stage, without = (
        teach(learner_of(Gd, memory_size=4, balanced_epochs=epochs), (0, 1), (2, 3)).model.state_dict()
        for epochs in (3, 0)
    )
    changed = {key for key in with_stage if not torch.equal(with_stage[key], without[key])}
    assert changed == {"head.weight", "head.bias"}


def test_both_teachers_are_as_they_should_be(stages: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    learner = teach(learner_of(Gd, memory_size=8, epochs=2, lr=0.02, balanced_epochs=0), (0, 1))
    x, y = images_of(2, 3)
    everything = np.concatenate([learner.memory.images, x])
    before, tokens = logits(learner, everything), learner.prepare(everything).range(0, 24)
    said: list[torch.Tensor] = []
    original = Gd._logits

    def spy(self: Gd, tokens: Any) -> torch.Tensor:
        said.append(original(self, tokens))
        return said[-1]

    monkeypatch.setattr(Gd, "_logits", spy)
    learner.learn_task(x, y)
    main = stages[2]
    number = torch.cdist(gathered(main, 0).flatten(1), tokens.flatten(1)).argmin(1)
    # P: the network before the task, on the old classes
    assert torch.allclose(gathered(main, 2), before[number], atol=1e-4)
    # C: what its teacher says of the same image, on the new ones
    assert torch.equal(gathered(main, 3), said[1][number, 2:])
    # it knows the task's classes, is unsure about the memory's images
    columns, C = gathered(main, 1), gathered(main, 3)
    new = columns >= 2
    assert (C.argmax(1)[new] == columns[new] - 2).float().mean() > 0.9
    sure = C.softmax(1).amax(1)
    assert sure[~new].mean() < sure[new].mean()


def test_the_teacher_learns_its_classes_and_to_be_unsure_of_the_memory(stages: list[dict[str, Any]]) -> None:
    """Cross-entropy, mean over the task's images, plus that with the uniform distribution, mean over the memory's."""
    learner = teach(learner_of(Gd, memory_size=6, batch_size=30, lr=0.02, balanced_epochs=0), (0, 1))
    x, y = images_of(2, 3, 4)
    everything = learner.prepare(np.concatenate([learner.memory.images, x])).range(0, 30)
    learner.learn_task(x, y)
    (batch,) = stages[1]["batches"]
    number = torch.cdist(batch[0].flatten(1), everything.flatten(1)).argmin(1).numpy()
    assert sorted(number.tolist()) == list(range(30)) and stages[1]["stage"] == "teacher"
    with torch.no_grad():
        value = float(stages[1]["loss"](*batch))
        log_p = learner.head(learner._features(batch[0]))[:, 2:].log_softmax(1).numpy()[number.argsort()]
    expected = -log_p[np.arange(6, 30), np.array(y) - 2].mean() - log_p[:6].mean()
    assert value == pytest.approx(expected, rel=1e-5)
    own = batch[2] > 0
    two = torch.cat([own.nonzero()[:1, 0], (~own).nonzero()[:1, 0]])  # one image of each kind
    with torch.no_grad():
        value = float(stages[1]["loss"](*(part[two] for part in batch)))
    of_task, stored = log_p[number[two]]
    assert value == pytest.approx(-of_task[y[number[two[0]] - 6] - 2] - stored.mean(), rel=1e-5)


def test_the_new_network_starts_from_the_old_one_not_from_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = teach(learner_of(Gd, memory_size=8), (0, 1))
    x, _ = images_of(0, 1)
    before, start = logits(learner, x), []
    original = Gd._train

    def spy(self: Gd, *args: Any) -> None:
        start.append(logits(self, x))
        original(self, *args)

    monkeypatch.setattr(Gd, "_train", spy)
    teach(learner, (2, 3))
    # a head of four columns rounds differently from one of two
    torch.testing.assert_close(start[0][:, :2], before, rtol=1e-6, atol=1e-6)


def test_loss_is_global_distillation_over_all_old_classes() -> None:
    learner = learner_of(Gd, temperature=3.0)
    rng = np.random.default_rng(0)
    z, p, c, w = rng.normal(size=(5, 6)), rng.normal(size=(5, 4)), rng.normal(size=(5, 2)), rng.uniform(size=(5, 3))
    y = np.array([0, 5, 2, 1, 4])

    def log_softmax(a: np.ndarray) -> np.ndarray:
        return a - np.log(np.exp(a).sum(1, keepdims=True))

    def distilled(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
        return -9 * (np.exp(log_softmax(teacher / 3)) * log_softmax(student / 3)).sum(1)

    ce = -log_softmax(z)[np.arange(5), y]
    terms = np.stack([ce, 4 / 6 * distilled(z[:, :4], p), 2 / 6 * distilled(z[:, 4:], c)], 1)
    value = learner._loss(*(torch.from_numpy(a) for a in (z, y, p, c, w)))
    assert float(value) == pytest.approx((w * terms).sum(1).mean())


def test_class_weights_leave_other_classes_alone() -> None:
    weights = class_weights(torch.tensor([0, 0, 0, 1, 3, 3]), 0, 2)
    assert weights.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0, 1.0, 1.0])
    weights = class_weights(torch.tensor([0, 0, 0, 2]), 0, 3)  # of the second there is no image
    assert weights.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0])
    weights = class_weights(torch.tensor([0, 0, 0, 1, 2, 2, 2, 3]), 1, 3)  # classes before and after
    assert weights.tolist() == pytest.approx([1, 1, 1, 2, 2 / 3, 2 / 3, 2 / 3, 1])


def test_resumed_equals_uninterrupted() -> None:
    assert resumes(lambda: learner_of(Gd, memory_size=12, balanced_epochs=1))
