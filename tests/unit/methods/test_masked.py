"""The fast ways through finished tasks (closed neurons left out, all tasks in one pass) against the plain one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from morecl.methods import Learner, masked, tools
from morecl.methods.hat import Hat
from morecl.methods.more import More
from morecl.nn.hard_attention import annealed_s, split
from morecl.progress import EpochDone
from morecl.scoring import CachedFeatures, Features
from morecl.training import ProtectedSGD, equal_batches

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
    weights = learner.adapters.weights().under(net.mask)
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
    learner._derived.clear()
    try:
        assert np.array_equal(learner.features(IMAGES, task=1), before)
    finally:
        learner.adapters.load_state_dict(saved)
        learner._derived.clear()


@pytest.mark.parametrize("own_pass", [1, 4, 1000])  # all networks by themselves, some, none
@pytest.mark.parametrize("batch", [1, 6, 16])
def test_each_image_under_its_own_network(
    learner: More, own_pass: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "OWN_PASS", {"cpu": own_pass})
    monkeypatch.setattr(learner, "eval_batch_size", batch)
    expected = torch.stack([plain(learner, task) for task in range(3)])
    tokens = learner.prepare(IMAGES)
    rows, networks = torch.tensor([0, 3, 1, 2, 4, 0, 3, 2]), torch.tensor([2, 0, 2, 2, 0, 0, 1, 2])
    found = learner.embed_rows(tokens, rows, networks)
    torch.testing.assert_close(found, expected[networks, rows], **TOLERANCE)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert learner.embed_rows(tokens, nothing, nothing).shape == (0, learner.network.dim)


def test_the_ways_to_ask_each_image_under_its_own_network_agree(learner: More) -> None:
    tokens = learner.prepare(IMAGES)
    networks, rows = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([3, 0, 1, 3, 4])
    expected = Learner.embed_rows(learner, tokens, rows, networks)  # one after the other
    torch.testing.assert_close(
        expected, torch.stack([plain(learner, k) for k in range(3)])[networks, rows], **TOLERANCE
    )
    torch.testing.assert_close(Features(learner, tokens).under(networks, rows), expected, **TOLERANCE)
    cached = CachedFeatures(learner, tokens)
    cached("2")
    torch.testing.assert_close(cached.under(networks, rows), expected, **TOLERANCE)


def test_shared_passes_are_large_on_a_gpu_unless_there_is_a_limit(
    learner: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert learner._shared_pass() == learner.eval_batch_size
    monkeypatch.setattr(learner, "device", torch.device("cuda"))
    monkeypatch.setattr(learner, "config", learner.config.model_copy(update={"eval_batch_size": None}))
    each = 12 * learner.network.prefix_bytes
    assert learner._shared_pass() == masked.SHARED_BYTES // each > learner.eval_batch_size
    monkeypatch.setattr(masked, "SHARED_BYTES", each)  # a network so large that one image fills it
    assert learner._shared_pass() == learner.eval_batch_size
    monkeypatch.setattr(masked, "SHARED_BYTES", 10**6 * each)
    monkeypatch.setattr(learner, "config", learner.config.model_copy(update={"eval_batch_size": 7}))
    assert learner._shared_pass() == learner.eval_batch_size


def test_networks_of_different_width_share_a_pass() -> None:
    """Of the second network's adapters only one neuron is open, so fewer are left of it than of the first."""
    wide = tiny.create("more", bottleneck=40)
    assert isinstance(wide, More)
    for k in range(2):
        wide.learn_task(*tiny.task([2 * k, 2 * k + 1], [f"{k}a", f"{k}b"], 4))
    with torch.no_grad():
        for parameter in wide.adapters.parameters():
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
        wide.tasks[0].embedding[:, :40] = 1.0
        wide.tasks[1].embedding[:, 1:40] = -1.0
    wide._derived.clear()
    assert [wide._adapters_of(net).w1.shape[1] for net in wide.tasks] == [40, 16]
    found = wide.embed_rows(wide.prepare(IMAGES), torch.tensor([0, 1, 0]), torch.tensor([1, 0, 0]))
    expected = torch.stack([plain(wide, 1)[0], plain(wide, 0)[1], plain(wide, 0)[0]])
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_networks_share_a_pass_also_where_not_all_of_them_fit(learner: More, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "FOLDED_BYTES", 0)
    learner._derived.clear()
    rows, networks = torch.tensor([0, 3, 1, 2]), torch.tensor([2, 0, 2, 2])
    expected = torch.stack([plain(learner, k) for k in range(3)])[networks, rows]
    torch.testing.assert_close(learner.embed_rows(learner.prepare(IMAGES), rows, networks), expected, **TOLERANCE)
    assert "together" not in learner._derived


def test_several_threads_may_ask_one_learner(learner: More) -> None:
    expected = learner.predict(IMAGES)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: learner.predict(IMAGES), range(30)))
    for found in answers:
        assert found.labels == expected.labels
        np.testing.assert_allclose(found.ood_score, expected.ood_score, rtol=1e-5)


def test_folded_adapters_are_kept_while_there_is_room(learner: More, monkeypatch: pytest.MonkeyPatch) -> None:
    learner._derived.clear()
    first = learner._adapters_of(learner.tasks[0])
    assert learner._adapters_of(learner.tasks[0]) is first
    monkeypatch.setattr(masked, "FOLDED_BYTES", 2 * sum(part.nbytes for part in first))
    for _ in range(2):
        for net in learner.tasks:
            found = learner._adapters_of(net)
            for ours, fresh in zip(found, learner._folded([net]), strict=True):
                assert torch.equal(ours, fresh[:, 0])
    assert list(learner._derived["folded"]) == list(learner.tasks)[:2]
    learner._derived.clear()


def test_a_network_that_still_trains_is_never_kept() -> None:
    learner = tiny.create("more", epochs=3, lr=0.1)
    assert isinstance(learner, More)
    learner.learn_task(*tiny.task([0, 1], ["a", "b"], 4))
    asked: list[bool] = []

    def compare(event: EpochDone) -> None:
        if event.stage:
            return
        tokens = learner.prepare(IMAGES)
        weights = learner.adapters.weights().under(learner.tasks[1].mask)
        with torch.no_grad():
            now = learner.network.trunk(tokens.range(0, len(IMAGES)), learner.tasks[1].norms, weights)
        torch.testing.assert_close(learner.embed(tokens, "1"), now, **TOLERANCE)
        asked.append(learner.tasks[1] in learner._derived.get("folded", {}))

    learner.learn_task(*tiny.task([2, 3], ["c", "d"], 4), compare)
    assert asked == [False] * 3
    learner.predict(IMAGES)
    learner.embed(learner.prepare(IMAGES), "1")
    assert learner.tasks[1] in learner._derived["folded"]


def test_learning_drops_what_was_derived() -> None:
    """Asking in the middle of a task must not leave half-learned statistics behind."""
    asked, quiet = tiny.create("more"), tiny.create("more")
    asked.learn_task(*tiny.task([0, 1], ["a", "b"], 4), lambda _: asked.predict(IMAGES))
    quiet.learn_task(*tiny.task([0, 1], ["a", "b"], 4))
    assert np.array_equal(asked.scores(IMAGES), quiet.scores(IMAGES))


def test_a_task_that_fails_leaves_nothing_derived_behind(learner: More) -> None:
    state = {key: value.clone() for key, value in learner.state().items()}
    one = tiny.create("more")
    one.restore(learner.classes, learner.task_sizes, state)
    before = one.scores(IMAGES[:2])

    def ask_and_fail(event: EpochDone) -> None:
        one.predict(IMAGES[:2])
        raise KeyboardInterrupt

    one._derived.clear()
    with pytest.raises(KeyboardInterrupt):
        one.learn_task(*tiny.task([6, 7], ["x", "y"], 4), ask_and_fail)
    assert np.array_equal(one.scores(IMAGES[:2]), before)


@pytest.mark.parametrize("size", [4, 2])  # three batches an epoch, fewer than a cycle has, and five
def test_attention_hardens_step_by_step(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []
    attention = masked.attention

    def spy(embedding: torch.Tensor, s: torch.Tensor, s_max: float) -> torch.Tensor:
        used.append(float(s))
        return attention(embedding, s, s_max)

    monkeypatch.setattr(masked, "attention", spy)
    tiny.create("hat", epochs=3, batch_size=size, s_max=200.0).learn_task(*tiny.task([0, 1], ["a", "b"], 5))
    steps = -(-10 // size)
    assert used == pytest.approx([annealed_s(step, steps, 3, 200.0) for step in range(3 * steps)], rel=1e-6)


def test_a_task_trains_all_that_it_owns_from_a_start_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, starts = tiny.create("hat", lr=0.02, momentum=0.5, lamb=0.3), list[dict[str, torch.Tensor]]()
    assert isinstance(learner, Hat)
    fit, regulariser = tools.fit, masked.regulariser

    def spied_fit(loss: Any, batches: Any, optimizer: ProtectedSGD, **kwargs: Any) -> None:
        starts.append({name: p.detach().clone() for name, p in learner.tasks[-1].named_parameters()})
        (group,) = optimizer.param_groups
        assert (group["lr"], group["momentum"]) == (0.02, 0.5)
        fit(loss, batches, optimizer, **kwargs)

    def spied_regulariser(a: torch.Tensor, before: torch.Tensor, lamb: float) -> torch.Tensor:
        assert lamb == 0.3
        return regulariser(a, before, lamb)

    monkeypatch.setattr(tools, "fit", spied_fit)
    monkeypatch.setattr(masked, "regulariser", spied_regulariser)
    for k in range(2):
        learner.learn_task(*tiny.task([2 * k, 2 * k + 1], [2 * k, 2 * k + 1], 8))
    for start, net in zip(starts, learner.tasks, strict=True):
        assert {"embedding", "norms.weight", "norms.bias", "head.weight", "head.bias"} == start.keys()
        assert not [name for name, p in net.named_parameters() if torch.equal(p, start[name])]
    assert not torch.equal(starts[0]["embedding"], starts[1]["embedding"])
    assert not torch.equal(starts[0]["head.weight"], starts[1]["head.weight"])


def test_embeddings_are_bounded_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound their gradient would vanish."""
    learner, bounded, fit = tiny.create("hat"), list[float](), tools.fit
    assert isinstance(learner, Hat)

    def spy(*args: Any, after_step: Callable[[], None], **kwargs: Any) -> None:
        def checked() -> None:
            learner.tasks[-1].embedding.data[0] *= 1e3
            after_step()
            bounded.append(float(learner.tasks[-1].embedding.detach().abs().max()))

        fit(*args, after_step=checked, **kwargs)

    monkeypatch.setattr(tools, "fit", spy)
    learner.learn_task(*tiny.task([0, 1], ["a", "b"], 8))
    assert bounded == [6.0, 6.0]


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
