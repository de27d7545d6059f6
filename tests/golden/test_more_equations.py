"""Each equation of MORE against its NumPy counterpart in :mod:`more_reference`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import more_reference as reference
from morecl import gaussian
from morecl.nn import hard_attention as hat
from morecl.nn.adapter import Adapters
from morecl.training import ProtectedSGD

RTOL = 1e-5
K, D, ADAPTERS = 5, 7, 4  # widths of m1 and m2; masks of four adapters


def random_masks(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2, width).astype(np.float64) for _ in range(ADAPTERS) for width in (K, D)]


def flat(layers: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(layers)).float()


# ---- Eq. 12 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_regulariser(seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = random_masks(seed)
    a = [rng.uniform(0, 1, len(layer)) for layer in before]
    value = hat.regulariser(flat(a), flat(before), lamb=0.75)
    assert float(value) == pytest.approx(reference.regulariser(a, before, 0.75), rel=RTOL)


def test_regulariser_gradient_is_felt_by_free_neurons_only() -> None:
    before = flat(random_masks(3))
    a = torch.full_like(before, 0.5).requires_grad_()
    hat.regulariser(a, before, lamb=0.75).backward()
    assert a.grad is not None
    free = before == 0
    assert np.allclose(a.grad[free], 0.75 / free.sum(), rtol=RTOL)
    assert (a.grad[~free] == 0).all()


def test_regulariser_when_every_neuron_is_taken() -> None:
    assert float(hat.regulariser(torch.ones(9), torch.ones(9), lamb=0.75)) == 0.0
    assert float(hat.regulariser(torch.full((9,), 0.5), 1 - torch.eye(9)[4], lamb=0.75)) == 0.375  # all but one


# ---- Eq. 8 and HAT's compensation ---------------------------------------------------------------------------------

# |s e| up to 60: beyond the clamp at 50, and small enough for a float64 to hold a (1 - a)
STRENGTHS = (1 / 500, 0.1, 1.0, 7.5, 10.0, 100.0, 500.0)
PAIRS = [(e, s) for s in STRENGTHS for e in np.linspace(-6, 6, 41) if abs(s * e) <= 60]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, RTOL), (torch.float64, 1e-12)])
def test_attention_and_compensated_gradient(dtype: torch.dtype, rtol: float) -> None:
    assert max(abs(e * s) for e, s in PAIRS) > 55
    rng = np.random.default_rng(0)
    for s in sorted({s for _, s in PAIRS}):
        e = torch.tensor([e for e, other in PAIRS if other == s], dtype=dtype, requires_grad=True)
        g = torch.from_numpy(rng.normal(size=len(e))).to(dtype)
        strength = torch.tensor(s, dtype=dtype)
        a = hat.attention(e, strength, 500.0)
        a.backward(g)
        assert e.grad is not None
        exact = e.detach().double().numpy(), float(strength)
        mask = reference.sigmoid(exact[0] * exact[1])
        np.testing.assert_allclose(a.detach().numpy(), np.maximum(mask, hat.SMALLEST), rtol=rtol)
        expected = reference.compensated_gradient(g.double().numpy(), *exact, 500.0)
        np.testing.assert_allclose(e.grad.numpy(), expected, rtol=rtol)


@pytest.mark.parametrize("se", [-5.0, -30.0, -45.0])
def test_a_neuron_that_is_as_good_as_closed_can_be_opened_again(se: float) -> None:
    """The loss reaches the embedding through mask, ReLU and both layers of an adapter, as it does without a bound."""
    rng = np.random.default_rng(0)
    h, up = rng.normal(size=(5, 7)), rng.normal(size=(5, 7))
    w1, b1, w2, b2 = (rng.normal(size=shape) for shape in ((4, 7), (4,), (7, 4), (7,)))
    e = torch.full((1, 4), se / 500, requires_grad=True)
    m1 = hat.attention(e, torch.tensor(500.0), 500.0)
    adapters = Adapters(1, 7, 4)
    for parameter, value in zip(adapters.parameters(), (w1, b1, w2, b2), strict=True):
        parameter.data.copy_(torch.from_numpy(value)[None])
    weights = adapters.weights().under(torch.cat([m1, torch.ones(1, 7)], 1))
    hidden = torch.relu(torch.from_numpy(h).float() @ weights.w1[0].T + weights.b1[0])
    ((hidden @ weights.w2[0].T + weights.b2[0]) * torch.from_numpy(up).float()).sum().backward()
    pre = h @ w1.T + b1  # m1 > 0 scales it and leaves its sign
    expected = ((up @ w2) * np.maximum(pre, 0)).sum(0)  # dL / dm1
    expected = reference.compensated_gradient(expected, np.full(4, np.float32(se / 500), float), 500.0, 500.0)
    assert e.grad is not None and np.abs(expected).min() > 1
    np.testing.assert_allclose(e.grad[0].numpy(), expected, rtol=1e-3)


def test_compensation_never_overflows() -> None:
    e = torch.linspace(-6, 6, 101, requires_grad=True)
    hat.attention(e, torch.tensor(500.0), 500.0).sum().backward()
    assert e.grad is not None
    assert torch.isfinite(e.grad).all()
    assert float(e.grad[50]) == pytest.approx(500 / 4)  # e = 0: s_max / (2 (1 + 1))


# ---- annealing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [4, 7, 23])
def test_s_is_annealed_inside_every_epoch(batches: int) -> None:
    for epoch in range(3):
        for b in range(batches):
            expected = 1 / 500 + (500 - 1 / 500) * b / batches
            assert hat.annealed_s(epoch * batches + b, batches, 3, 500.0) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("batches", "cycle"), [(1, 4), (2, 4), (3, 6)])
@pytest.mark.parametrize("epochs", [1, 3, 8])
def test_s_of_tiny_tasks_ends_almost_hard(batches: int, cycle: int, epochs: int) -> None:
    steps = batches * epochs
    values = [hat.annealed_s(step, batches, epochs, 500.0) for step in range(steps)]
    whole = [1 / 500 + (500 - 1 / 500) * b / cycle for b in range(cycle)] * steps  # enough whole cycles
    assert values == pytest.approx(whole[-steps:], rel=1e-12)


# ---- Eq. 10 and 11 ------------------------------------------------------------------------------------------------


def test_accumulated_masks() -> None:
    rng = np.random.default_rng(0)
    tasks = [rng.integers(0, 2, (ADAPTERS, K + D)).astype(np.float64) for _ in range(3)]
    expected = np.zeros((ADAPTERS, K + D))
    like = torch.from_numpy(expected)
    assert np.array_equal(hat.accumulated([], like).numpy(), expected)
    for k, mask in enumerate(tasks):
        for i in range(ADAPTERS):
            expected[i] = [max(old, new) for old, new in zip(expected[i], mask[i], strict=True)]
        now = hat.accumulated([torch.from_numpy(m) for m in tasks[: k + 1]], like)
        assert np.array_equal(now.numpy(), expected)


def test_protection() -> None:
    rng = np.random.default_rng(0)
    m1, m2 = rng.uniform(0, 1, (ADAPTERS, K)), rng.uniform(0, 1, (ADAPTERS, D))
    guards = hat.protection(torch.from_numpy(m1), torch.from_numpy(m2))
    shapes = [(ADAPTERS, K, D), (ADAPTERS, K), (ADAPTERS, D, K), (ADAPTERS, D)]
    w1, b1, w2, b2 = (guard.expand(shape).numpy() for guard, shape in zip(guards, shapes, strict=True))
    for a in range(ADAPTERS):
        for k in range(K):
            assert np.allclose(w1[a, k], 1 - m1[a, k], rtol=RTOL)  # the layer before has no mask: it counts as 1
            assert b1[a, k] == pytest.approx(1 - m1[a, k])
            for d in range(D):
                assert w2[a, d, k] == pytest.approx(1 - min(m2[a, d], m1[a, k]), rel=RTOL)
        assert np.allclose(b2[a], 1 - m2[a], rtol=RTOL)


def test_protected_update_with_momentum() -> None:
    """v <- m v + g; p <- p - lr gate v, against the same in NumPy; gates of 0 and 1 and between."""
    rng = np.random.default_rng(0)
    gate = np.array([0, 0.25, 1, 0, 1, 0.5])
    start, free = rng.normal(size=6).astype(np.float32), rng.normal(size=3).astype(np.float32)
    p, q = torch.from_numpy(start.copy()).requires_grad_(), torch.from_numpy(free.copy()).requires_grad_()
    optimizer = ProtectedSGD([p, q], lr=0.1, momentum=0.9, gates=[torch.from_numpy(gate).float()])
    expected_p, expected_q, v_p, v_q = start.astype(np.float64), free.astype(np.float64), np.zeros(6), np.zeros(3)
    for _ in range(5):
        g_p, g_q = rng.normal(size=6), rng.normal(size=3)
        p.grad, q.grad = torch.from_numpy(g_p).float(), torch.from_numpy(g_q).float()
        optimizer.step()
        v_p, v_q = 0.9 * v_p + g_p, 0.9 * v_q + g_q
        expected_p, expected_q = expected_p - 0.1 * gate * v_p, expected_q - 0.1 * v_q
    np.testing.assert_allclose(p.detach().numpy(), expected_p, rtol=RTOL)
    np.testing.assert_allclose(q.detach().numpy(), expected_q, rtol=RTOL)
    assert np.array_equal(p.detach().numpy()[gate == 0], start[gate == 0])


# ---- Eq. 4 to 6 ---------------------------------------------------------------------------------------------------


def clouds(counts: list[int], dim: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, dim) float32 of classes of unequal size, correlated, far from the origin, in mixed order."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(dim, dim))
    targets = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    centres = 30 + 3 * rng.normal(size=(len(counts), dim))
    return (centres[targets] + rng.normal(size=(len(targets), dim)) @ mix).astype(np.float32), targets


@pytest.mark.parametrize("counts", [[40, 7, 21], [30], [3, 2], [1, 1, 1]])
def test_statistics_precision_and_coefficient(counts: list[int]) -> None:
    """Enough samples (plain inverse), too few (shrunk), and one a class (identity)."""
    dim, c = 8, 20.0
    features, targets = clouds(counts, dim)
    g = gaussian.estimate(torch.from_numpy(features), torch.from_numpy(targets), len(counts))
    means, covariance = reference.class_statistics(features, targets, len(counts))
    assert g.means.dtype == g.covariance.dtype == torch.float64
    assert g.samples == sum(counts)
    np.testing.assert_allclose(g.means.numpy(), means, rtol=1e-10)
    np.testing.assert_allclose(g.covariance.numpy(), covariance, rtol=1e-10, atol=1e-10)
    P = reference.precision(covariance, sum(counts), len(counts))
    np.testing.assert_allclose(gaussian.precision(g).numpy(), P, rtol=RTOL, atol=1e-12)
    x = clouds(counts, dim, seed=1)[0]
    distance = [[np.sqrt((z - mu) @ P @ (z - mu)) for mu in means] for z in x.astype(np.float64)]
    args = torch.from_numpy(x), g.means, gaussian.precision(g)
    np.testing.assert_allclose(gaussian.mahalanobis(*args).numpy(), distance, rtol=RTOL)
    np.testing.assert_allclose(gaussian.coefficient(*args, c), reference.coefficient(x, means, P, c), rtol=RTOL)
