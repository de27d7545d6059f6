"""MORE's equations once more, in float64 NumPy with plain loops: what the package is measured against.

Nothing here uses the package or torch. Equation numbers are the paper's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def regulariser(layers: list[Array], before: list[Array], lamb: float) -> float:
    """Eq. 12, layer by layer and unit by unit."""
    above = sum(float(a[i] * (1 - b[i])) for a, b in zip(layers, before, strict=True) for i in range(len(a)))
    below = sum(float(1 - b[i]) for b in before for i in range(len(b)))
    return lamb * above / below


def compensated_gradient(g: Array, e: Array, s: float, s_max: float) -> Array:
    """Gradient of a = sigmoid(s e) times HAT's factor, as written in HAT."""
    small = np.exp(-np.abs(s * e))
    plain = g * s * small / (1 + small) ** 2  # a (1 - a), exact where 1 - a would be rounded to 0
    return plain * s_max / s * (np.cosh(np.clip(s * e, -50, 50)) + 1) / (np.cosh(e) + 1)


def softmax(logits: Array) -> Array:
    exponent = np.exp(logits - logits.max(1, keepdims=True))
    return exponent / exponent.sum(1, keepdims=True)


def cross_entropy(logits: Array, targets: NDArray[np.int64], weights: Array) -> float:
    """Weighted mean of -log p(target)."""
    errors = [-np.log(softmax(logits)[i, t]) for i, t in enumerate(targets)]
    return float(np.dot(weights, errors) / weights.sum())


def class_statistics(features: Array, targets: NDArray[np.int64], classes: int) -> tuple[Array, Array]:
    """Eq. 5 and 6: means (C, D) and the mean of the class covariances, each divided by its n."""
    means, covariances = [], []
    for c in range(classes):
        own = features[targets == c].astype(np.float64)
        mean = own.sum(0) / len(own)
        means.append(mean)
        covariances.append(sum(np.outer(z - mean, z - mean) for z in own) / len(own))
    return np.array(means), sum(covariances) / classes


def precision(covariance: Array, samples: int, classes: int) -> Array:
    """The inverse within the directions that have variance; with too few samples, that under oracle shrinkage."""
    D = len(covariance)
    trace = np.trace(covariance)
    if trace == 0:
        return np.eye(D)
    if samples - classes >= D:
        values, vectors = np.linalg.eigh(covariance)
        kept = values > 1e-9 * values.max()
        return (vectors[:, kept] / values[kept]) @ vectors[:, kept].T
    square = np.trace(covariance @ covariance)
    above = (1 - 2 / D) * square + trace**2
    below = (samples + 1 - 2 / D) * (square - trace**2 / D)
    r = min(1.0, above / below)
    return np.linalg.inv((1 - r) * covariance + r * trace / D * np.eye(D))


def coefficient(features: Array, means: Array, P: Array, c: float) -> Array:
    """Eq. 4: the largest c / MD over the classes."""
    return np.array([max(c / np.sqrt((z - mu) @ P @ (z - mu)) for mu in means) for z in features])


def probabilities(features: Array, weight: Array, bias: Array, temperature: float) -> Array:
    """p(Y^k | x, k): the softmax over |Y^k| + 1 outputs without the last one."""
    return softmax((features @ weight.T + bias) / temperature)[:, :-1]


def back_update(
    features: Array,
    targets: NDArray[np.int64],
    weight: Array,
    bias: Array,
    *,
    lr: float,
    momentum: float,
    steps: int,
    own_share: float | None,
    relative: bool = True,
) -> tuple[Array, Array]:
    """Eq. 3 by gradient descent with momentum, all samples in each step.

    ``lr`` is ``relative`` to the mean square of the features, or absolute. With ``own_share`` the samples of the head's
    own classes weigh that much together, the others the rest.
    """
    lr = lr / np.mean(features**2) if relative else lr
    own = targets < len(bias) - 1
    count = np.full(len(targets), 1 / len(targets))
    if own_share is not None:
        count = np.where(own, own_share / own.sum(), (1 - own_share) / (~own).sum())
    v_weight, v_bias = np.zeros_like(weight), np.zeros_like(bias)
    onehot = np.eye(len(bias))[targets]
    for _ in range(steps):
        error = (softmax(features @ weight.T + bias) - onehot) * count[:, None]
        v_weight, v_bias = momentum * v_weight + error.T @ features, momentum * v_bias + error.sum(0)
        weight, bias = weight - lr * v_weight, bias - lr * v_bias
    return weight, bias
