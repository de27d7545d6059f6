"""The fast ways through finished tasks (closed neurons left out, all tasks in one pass) against the plain one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from morecl.methods.more import More
from morecl.nn.hard_attention import split
from morecl.training import equal_batches

IMAGES = tiny.pictures(0, 5, draw=1)
# the same sums in another order: float32 rounding through the blocks, nothing more
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def learner() -> More:
    learner = tiny.create("more")
    assert isinstance(learner, More)
    for k in range(3):
        learner.learn_task(*tiny.task([2 * k, 2 * k + 1], [f"{k}a", f"{k}b"], 4))
    with torch.no_grad():  # adapters that matter: a few steps leave them near the identity
        for parameter in learner.adapters.parameters():
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    learner._derived.clear()
    return learner


def plain(learner: More, task: int) -> torch.Tensor:
    net = learner.tasks[task]
    weights = learner.adapters.weights(*split(net.mask, learner.config.bottleneck))
    with torch.no_grad():
        return learner.network.trunk(learner.prepare(IMAGES).range(0, len(IMAGES)), net.norms, weights)


@pytest.mark.parametrize("task", [0, 1, 2])
def test_without_the_closed_neurons(learner: More, task: int) -> None:
    found = learner.embed(learner.prepare(IMAGES), str(task))
    torch.testing.assert_close(found, plain(learner, task), **TOLERANCE)
    assert not torch.allclose(found, plain(learner, (task + 1) % 3), **TOLERANCE)


def test_all_tasks_in_one_pass(learner: More) -> None:
    tokens = learner.prepare(IMAGES)
    assert len(tokens) * len(learner.tasks) <= learner.eval_batch_size
    for task, found in enumerate(learner.embed_all(tokens)):
        torch.testing.assert_close(found, plain(learner, task), **TOLERANCE)


def test_a_closed_neuron_has_no_say(learner: More) -> None:
    before = learner.features(IMAGES, task=1)
    m1, m2 = split(learner.tasks[1].mask, learner.config.bottleneck)
    saved = {name: value.clone() for name, value in learner.adapters.state_dict().items()}
    with torch.no_grad():
        learner.adapters.w1[m1 == 0] += 100
        learner.adapters.b2[m2 == 0] += 100
    try:
        assert np.array_equal(learner.features(IMAGES, task=1), before)
    finally:
        learner.adapters.load_state_dict(saved)


def test_learning_drops_what_was_derived() -> None:
    """Asking in the middle of a task must not leave half-learned statistics behind."""
    asked, quiet = tiny.create("more"), tiny.create("more")
    asked.learn_task(*tiny.task([0, 1], ["a", "b"], 4), lambda _: asked.predict(IMAGES))
    quiet.learn_task(*tiny.task([0, 1], ["a", "b"], 4))
    assert np.array_equal(asked.scores(IMAGES), quiet.scores(IMAGES))


@pytest.mark.parametrize(("count", "size"), [(10, 4), (8, 4), (3, 8), (1, 5)])
def test_batches_of_equal_shape_count_each_image_once(count: int, size: int) -> None:
    def draw(*, fill: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return equal_batches(count, size, torch.Generator().manual_seed(0), torch.device("cpu"), fill=fill)

    filled, ragged = draw(fill=True), draw(fill=False)
    assert {len(index) for index, _ in filled} == {size}
    for (index, weight), (own, ones) in zip(filled, ragged, strict=True):
        assert torch.equal(index[weight > 0], own)
        assert set(weight.tolist()) <= {0.0, 1.0} and set(ones.tolist()) == {1.0}
    assert sorted(torch.cat([own for own, _ in ragged]).tolist()) == list(range(count))
