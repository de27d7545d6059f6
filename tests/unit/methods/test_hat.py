from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from morecl.methods.hat import Hat

FIRST, SECOND = tiny.task([0, 1], ["a", "b"], 8), tiny.task([2, 3, 4], ["c", "d", "e"], 8)


def learner() -> Hat:
    settings = {k: v for k, v in tiny.SETTINGS.items() if k in Hat.Config.model_fields}
    return Hat(Hat.Config.parse(settings | {"epochs": 1}))


@pytest.fixture(scope="module")
def taught() -> Hat:
    one = learner()
    one.learn_task(*FIRST)
    one.learn_task(*SECOND)
    return one


def answer(one: Hat, first: list[float], second: list[float]) -> tuple[np.ndarray, np.ndarray, float]:
    """Scores, probabilities and knownness when the heads say these logits."""
    with torch.no_grad():
        for net, logits in zip(one.tasks, (first, second), strict=True):
            net.head.weight.zero_()
            net.head.bias.copy_(torch.tensor(logits))
    output = one.score([torch.zeros(1, one.network.dim)] * 2)
    return output.scores[0].numpy(), output.probabilities[0].numpy(), float(output.known[0])


def test_the_task_of_least_entropy_is_picked() -> None:
    one = learner()
    one.learn_task(*FIRST)
    one.learn_task(*SECOND)
    p, q = np.array([0.5, 0.5]), np.array([0.7, 0.2999, 0.0001])
    entropy = [-(v * np.log(v)).sum() for v in (p, q)]
    assert entropy[1] < entropy[0]
    scores, probabilities, known = answer(one, np.log(p).tolist(), np.log(q).tolist())
    assert np.allclose(probabilities, [*p, *q], atol=1e-6)
    assert scores.argmax() == 2 and known == pytest.approx(0.7)
    assert scores[2:].min() > scores[:2].max()  # all classes of the chosen task above all others
    assert scores[2:].tolist() == sorted(scores[2:], reverse=True)


def test_least_entropy_is_not_largest_probability() -> None:
    one = learner()
    one.learn_task(*SECOND)
    one.learn_task(*tiny.task([5, 6, 7], ["x", "y", "z"], 8))
    p, q = np.array([0.62, 0.19, 0.19]), np.array([0.6, 0.3999, 0.0001])
    scores, _, known = answer(one, np.log(p).tolist(), np.log(q).tolist())
    assert scores.argmax() == 3 and known == pytest.approx(0.6)


def test_heads_have_no_ood_output_and_nothing_is_replayed(taught: Hat) -> None:
    assert [net.head.out_features for net in taught.tasks] == [2, 3]
    assert len(taught.memory) == 0


def test_a_finished_task_keeps_its_features_bit_for_bit(taught: Hat) -> None:
    one = learner()
    one.learn_task(*FIRST)
    before = one.features(FIRST[0], task=0)
    adapters = {name: p.detach().clone() for name, p in one.adapters.named_parameters()}
    one.learn_task(*SECOND)
    assert np.array_equal(one.features(FIRST[0], task=0), before)
    assert any(not torch.equal(p, adapters[name]) for name, p in one.adapters.named_parameters())


def test_masks_are_hard_and_capacity_counts_them(taught: Hat) -> None:
    masks = [np.concatenate(list(taught.masks(k).values())) for k in range(2)]
    assert set(np.unique(np.concatenate(masks))) == {0.0, 1.0}
    assert taught.capacity() == pytest.approx(100 * np.maximum(*masks).mean())
