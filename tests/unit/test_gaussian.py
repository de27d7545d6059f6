"""Covariances that cannot be inverted, and the edges of the coefficient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from morecl import gaussian
from morecl.gaussian import Gaussians


def sample(n: int, dim: int, classes: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    scale = np.linspace(0.5, 2, dim)
    return torch.from_numpy(rng.normal(size=(n, dim)) * scale).float(), torch.arange(n) % classes


def test_plenty_of_samples_give_the_plain_inverse() -> None:
    g = gaussian.estimate(*sample(200, 6), 1)
    torch.testing.assert_close(gaussian.precision(g) @ g.covariance, torch.eye(6, dtype=torch.float64))


@pytest.mark.parametrize("n", [2, 5, 11, 12])
def test_fewer_samples_than_dimensions(n: int) -> None:
    g = gaussian.estimate(*sample(n, 12), 1)
    P = gaussian.precision(g)
    eigenvalues = torch.linalg.eigvalsh(P)
    assert torch.isfinite(P).all() and eigenvalues.min() > 0
    assert eigenvalues.max() / eigenvalues.min() < 1e6
    assert gaussian.coefficient(sample(50, 12, seed=1)[0], g.means, P, 20.0).isfinite().all()


def test_shrinkage_keeps_the_trace() -> None:
    g = gaussian.estimate(*sample(5, 12), 1)
    shrunk = torch.linalg.inv(gaussian.precision(g))
    assert float(torch.trace(shrunk)) == pytest.approx(float(torch.trace(g.covariance)))


def covariance_of(*eigenvalues: float, samples: int) -> Gaussians:
    return Gaussians(torch.zeros(2, len(eigenvalues)).double(), torch.diag(torch.tensor(eigenvalues)).double(), samples)


@pytest.mark.parametrize(
    ("eigenvalues", "samples", "expected"),
    [
        ((4.0, 1.0, 1.0), 4, (6 + 36) / ((4 + 1 / 3) * 6)),  # over 1
        ((9.0, 0.0, 0.0), 4, (27 + 81) / ((4 + 1 / 3) * 54)),
        ((2.0, 2.0, 2.0), 4, math.inf),  # a multiple of the identity already
    ],
)
def test_the_amount_of_shrinkage_follows_its_formula(
    eigenvalues: tuple[float, ...], samples: int, expected: float
) -> None:
    """Of D eigenvalues with sum t and sum of squares q: ((1 - 2/D) q + t^2) / ((n + 1 - 2/D) (q - t^2 / D))."""
    g = covariance_of(*eigenvalues, samples=samples)
    r = min(1.0, expected)
    assert float(gaussian.shrinkage(g)) == pytest.approx(r)
    shrunk = [(1 - r) * value + r * sum(eigenvalues) / 3 for value in eigenvalues]
    torch.testing.assert_close(gaussian.precision(g), torch.diag(1 / torch.tensor(shrunk).double()))


def test_a_covariance_is_shrunk_only_with_fewer_free_samples_than_dimensions() -> None:
    """Two means are estimated from the samples, so five of them leave three that are free, as many as dimensions."""
    few, enough = (covariance_of(9.0, 1.0, 1.0, samples=n) for n in (4, 5))
    plain = torch.diag(torch.tensor([1 / 9, 1.0, 1.0])).double()
    assert float(gaussian.shrinkage(few)) > 0.5 and float(gaussian.shrinkage(enough)) == 0
    torch.testing.assert_close(gaussian.precision(enough), plain)
    assert float(gaussian.shrinkage(enough, shrink_below=1.01)) > 0.5
    assert float(gaussian.shrinkage(few, shrink_below=2 / 3)) == 0
    torch.testing.assert_close(gaussian.precision(few, shrink_below=2 / 3), plain)


@pytest.mark.parametrize("count", [3, 50])
def test_the_unit_of_features_is_the_unit_of_distances(count: int) -> None:
    features, targets = sample(count, 6)
    tiny = features.double() * 1e-3
    g, scaled = gaussian.estimate(features, targets, 1), gaussian.estimate(tiny, targets, 1)
    torch.testing.assert_close(gaussian.precision(scaled), 1e6 * gaussian.precision(g), rtol=1e-6, atol=0)


def test_joining_images_leaves_what_was_known_before_as_it_was() -> None:
    features, targets = sample(30, 4, classes=2)
    g = gaussian.estimate(features, targets, 2)
    counts, spread = targets.bincount(), gaussian.scatters(features, targets, g.means)
    before = [part.clone() for part in (g.means, g.covariance, counts, spread)]
    gaussian.extended(g, counts, spread, *sample(10, 4, classes=2, seed=1))
    assert all(map(torch.equal, before, (g.means, g.covariance, counts, spread)))


def test_constant_features_are_no_obstacle() -> None:
    """A dimension that never varies has no say in the distance; the others have theirs as if it were not there."""
    features, targets = sample(100, 5)
    features[:, 2] = 7.0
    g = gaussian.estimate(features, targets, 1)
    others = [0, 1, 3, 4]
    without = gaussian.estimate(features[:, others], targets, 1)
    found = gaussian.mahalanobis(features, g.means, gaussian.precision(g))
    expected = gaussian.mahalanobis(features[:, others], without.means, gaussian.precision(without))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-7), (torch.float32, 1e-3)])
def test_features_behind_a_layer_norm_are_measured_in_their_subspace(dtype: torch.dtype, rtol: float) -> None:
    """Normalised values sum to zero; leaving the last one out loses nothing, and the distance is the same.

    In float32 they do so up to rounding, which is no variance.
    """
    features = torch.nn.functional.layer_norm(sample(300, 8)[0].to(dtype), (8,))
    targets = torch.arange(300) % 2
    g, reduced = gaussian.estimate(features, targets, 2), gaussian.estimate(features[:, :-1], targets, 2)
    found = gaussian.mahalanobis(features, g.means, gaussian.precision(g))
    expected = gaussian.mahalanobis(features[:, :-1], reduced.means, torch.linalg.inv(reduced.covariance))
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-7)


def test_one_image_a_class_counts_as_euclidean() -> None:
    features, targets = sample(3, 4, classes=3)
    g = gaussian.estimate(features, targets, 3)
    assert torch.equal(gaussian.precision(g), torch.eye(4, dtype=torch.float64))
    x = sample(5, 4, seed=1)[0]
    expected = torch.cdist(x.double(), features.double())
    torch.testing.assert_close(gaussian.mahalanobis(x, g.means, gaussian.precision(g)), expected)


def test_an_image_on_a_mean_has_a_finite_coefficient() -> None:
    g = Gaussians(torch.zeros(1, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64), 100)
    assert float(gaussian.coefficient(torch.zeros(1, 3), g.means, torch.eye(3).double(), 20.0)) == pytest.approx(2e7)


def test_small_distances_far_from_the_origin_are_exact() -> None:
    """An expanded square would lose them to rounding: 1e-4 at 1e6 is below the seventh digit of 1e12."""
    means = torch.full((1, 3), 1e6, dtype=torch.float64)
    x = means + torch.tensor([[1e-4, 0, 0]], dtype=torch.float64)
    assert float(gaussian.mahalanobis(x, means, torch.eye(3).double())) == pytest.approx(1e-4, rel=1e-5)


@given(st.integers(1, 4), st.integers(0, 1000))
def test_distance_is_symmetric_and_unmoved_by_a_shift(classes: int, seed: int) -> None:
    features, targets = sample(40, 5, classes, seed)
    g = gaussian.estimate(features, targets, classes)
    P = gaussian.precision(g)
    d = gaussian.mahalanobis(g.means, g.means, P)
    torch.testing.assert_close(d, d.T)
    assert d.diagonal().max() == 0
    shifted = gaussian.estimate(features.double() + 3.0, targets, classes)
    torch.testing.assert_close(shifted.covariance, g.covariance)
    moved = gaussian.mahalanobis(features.double() + 3.0, shifted.means, P)
    torch.testing.assert_close(moved, gaussian.mahalanobis(features, g.means, P))


def test_order_of_samples_does_not_matter() -> None:
    features, targets = sample(30, 5, classes=3)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    one, other = gaussian.estimate(features, targets, 3), gaussian.estimate(features[order], targets[order], 3)
    torch.testing.assert_close(one.means, other.means)
    torch.testing.assert_close(one.covariance, other.covariance)
    assert math.isclose(one.samples, other.samples)


@pytest.mark.parametrize("at_once", [1, 7 * 5 * 3, 1000])
def test_distances_are_the_same_however_many_images_are_taken_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, targets = sample(40, 5, classes=3)
    g = gaussian.estimate(features, targets, 3)
    P = gaussian.precision(g)
    difference = features.double().numpy()[:, None] - g.means.numpy()[None]
    expected = np.sqrt(np.einsum("ncd,de,nce->nc", difference, P.numpy(), difference))
    monkeypatch.setattr(gaussian, "NUMBERS_AT_ONCE", at_once)
    np.testing.assert_allclose(gaussian.mahalanobis(features, g.means, P), expected, rtol=1e-10)
    assert gaussian.mahalanobis(features[:0], g.means, P).shape == (0, 3)
