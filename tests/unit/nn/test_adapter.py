"""The adapters: their formula, identity at the start, masked weights, closed neurons left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from morecl.nn.adapter import Adapters, AdapterSlot, AdapterWeights
from morecl.random import generator

A, D, K = 3, 6, 40


def filled(bottleneck: int = K) -> Adapters:
    adapters = Adapters(A, D, bottleneck)
    for i, parameter in enumerate(adapters.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
    return adapters


def through(weights: AdapterWeights, place: int, h: torch.Tensor) -> np.ndarray:
    """The output of adapter ``place`` as a block computes it."""
    slot = AdapterSlot()
    for name, part in zip(AdapterWeights._fields, weights, strict=True):
        setattr(slot, name, part[place].detach())
    return slot(h).numpy()


def formula(adapters: Adapters, place: int, h: torch.Tensor, m1: np.ndarray, m2: np.ndarray) -> np.ndarray:
    """A(h) = h + m2 fc2(relu(m1 fc1(h))), float64."""
    w1, b1, w2, b2 = (p.detach().double().numpy()[place] for p in adapters.parameters())
    x = h.double().numpy()
    return x + m2 * (np.maximum(m1 * (x @ w1.T + b1), 0) @ w2.T + b2)


def random_masks(seed: int, *, hard: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    m1, m2 = rng.uniform(0, 1, (A, K)), rng.uniform(0, 1, (A, D))
    if hard:
        m1, m2 = (m1 > 0.6).astype(float), (m2 > 0.4).astype(float)
    return torch.from_numpy(m1).float(), torch.from_numpy(m2).float()


@pytest.mark.parametrize("hard", [False, True])
def test_formula(hard: bool) -> None:
    adapters, h = filled(), torch.randn(2, 4, D)
    m1, m2 = random_masks(0, hard=hard)
    for place in range(A):
        expected = formula(adapters, place, h, m1[place].double().numpy(), m2[place].double().numpy())
        got = through(adapters.weights().under(torch.cat([m1, m2], 1)), place, h)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        plain = formula(adapters, place, h, np.ones(K), np.ones(D))
        np.testing.assert_allclose(through(adapters.weights(), place, h), plain, rtol=1e-5, atol=1e-5)


def test_folded_leaves_closed_neurons_out_and_nothing_else() -> None:
    adapters, h = filled(), torch.randn(5, 4, D)
    tasks = [random_masks(seed, hard=True) for seed in range(3)]
    tasks[2] = (torch.zeros(A, K), torch.zeros(A, D))  # a task that closed everything
    together = adapters.folded(tasks)
    widest = max(int(m1.sum(1).max()) for m1, _ in tasks)
    assert widest <= together.w1.shape[2] < K
    for place in range(A):
        all_tasks = through(together, place, h.repeat(3, 1, 1)).reshape(3, 5, 4, D)
        for g, (m1, m2) in enumerate(tasks):
            expected = formula(adapters, place, h, m1[place].double().numpy(), m2[place].double().numpy())
            np.testing.assert_allclose(all_tasks[g], expected, rtol=1e-5, atol=1e-5)
            alone = AdapterWeights(*(part[:, 0] for part in adapters.folded([(m1, m2)])))
            np.testing.assert_allclose(through(alone, place, h), expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_masks_are_those_of_masked_activations() -> None:
    adapters, h = filled(), torch.randn(2, 4, D)
    masks = [m.requires_grad_() for m in random_masks(1, hard=False)]
    weights = adapters.weights().under(torch.cat(masks, 1))
    slot = AdapterSlot()
    slot.w1, slot.b1, slot.w2, slot.b2 = (part[1] for part in weights)
    got = torch.autograd.grad(slot(h).square().sum(), masks)
    m1, m2 = masks
    hidden = torch.relu(m1[1] * (h @ adapters.w1[1].T + adapters.b1[1]))
    output = h + m2[1] * (hidden @ adapters.w2[1].T + adapters.b2[1])
    expected = torch.autograd.grad(output.square().sum(), masks)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_new_adapters_are_the_identity() -> None:
    adapters = Adapters(12, 192, 8)
    adapters.initialise(generator(0, "adapters"))
    h = torch.randn(2, 5, 192)
    assert np.array_equal(through(adapters.weights(), 3, h), h.numpy())
    assert torch.equal(AdapterSlot()(h), h)
    assert 0.015 < float(adapters.w1.detach().std()) < 0.025
    assert all(not p.any() for p in (adapters.b1, adapters.w2, adapters.b2))


def test_initialisation_depends_only_on_the_generator() -> None:
    one, other = Adapters(2, 8, 4), Adapters(2, 8, 4)
    one.initialise(generator(3, "adapters"))
    other.initialise(generator(3, "adapters"))
    assert torch.equal(one.w1, other.w1)
    other.initialise(generator(4, "adapters"))
    assert not torch.equal(one.w1, other.w1)


def test_saved_keys_and_trainable_count() -> None:
    adapters = Adapters(12, 192, 64)
    assert list(adapters.state_dict()) == ["w1", "b1", "w2", "b2"]
    assert sum(p.numel() for p in adapters.parameters()) == 12 * (2 * 192 * 64 + 64 + 192)
