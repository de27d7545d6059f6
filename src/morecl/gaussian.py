"""Class means, a shared covariance and Mahalanobis distances (MORE paper, Eq. 4-6), all in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from morecl.symmetric import packed, unpacked

NULL = 1e-9  # eigenvalues below this fraction of the largest are rounding errors of features, not variance
NUMBERS_AT_ONCE = 2**22  # in the differences that are held at once, float64: 32 MiB
MIN_DISTANCE = 1e-6  # or an image equal to a class mean would have an infinite coefficient


@dataclass(frozen=True)
class Gaussians:
    """The classes of a task as Gaussians: ``means`` (C, D), one ``covariance`` (D, D), estimated from ``samples``."""

    means: Tensor
    covariance: Tensor
    samples: int


def estimate(features: Tensor, targets: Tensor, classes: int) -> Gaussians:
    """Eq. 5 and 6: the mean of each class, and the mean of the class covariances, each divided by its own n.

    Args:
        features: (N, D); targets: (N,) in 0..classes-1, every class present.
    """
    features = features.double()
    onehot = torch.nn.functional.one_hot(targets, classes).double()  # (N, C)
    counts = onehot.sum(0)  # (C,)
    means = onehot.T @ features / counts[:, None]
    centred = (features - means[targets]) / counts[targets, None].sqrt()
    return Gaussians(means, centred.T @ centred / classes, len(features))


def scatters(features: Tensor, targets: Tensor, means: Tensor) -> Tensor:
    """Of each class, sum (z - mu)(z - mu)^T, packed: (N, D), (N,), (C, D) -> (C, D (D + 1) / 2)."""
    centred = features.double() - means[targets]
    return torch.stack([packed(own.mT @ own) for own in (centred[targets == c] for c in range(len(means)))])


def extended(
    g: Gaussians, counts: Tensor, spread: Tensor, features: Tensor, targets: Tensor
) -> tuple[Gaussians, Tensor, Tensor]:
    """What :func:`estimate` gives for all images, if ``features`` (M, D) of known classes ``targets`` (M,) join them.

    Since Eq. 6 divides the scatter of each class by its own n, the shared covariance alone does not say enough:
    ``counts`` (C,) are the images of each class so far and ``spread`` (C, D (D + 1) / 2) its :func:`scatters`. A class
    without new images may have zeros there. Returns all three as they are now.
    """
    features, means, covariance = features.double(), g.means.clone(), g.covariance.clone()
    counts, spread = counts.clone(), spread.clone()
    for c in targets.unique().tolist():
        own, n = features[targets == c], int(counts[c])
        m, mean = len(own), own.mean(0)
        centred, shift = own - mean, mean - g.means[c]
        old = unpacked(spread[c], len(shift))
        new = old + centred.mT @ centred + n * m / (n + m) * torch.outer(shift, shift)
        covariance += (new / (n + m) - old / n) / len(means)
        means[c] += m / (n + m) * shift
        counts[c], spread[c] = n + m, packed(new)
    return Gaussians(means, covariance, g.samples + len(features)), counts, spread


def precision(g: Gaussians, shrink_below: float = 1.0) -> Tensor:
    """Inverse or pseudo-inverse of the covariance: (D, D), exactly symmetric.

    Features come out of a LayerNorm, whose normalised values sum to zero, so they lie in a subspace of D - 1 dimensions
    and their covariance never has full rank. With enough samples, n - C >= ``shrink_below`` D, the pseudo-inverse is
    used: it is the inverse within that subspace, where all distances are measured, and equals the inverse where one
    exists. With few samples per dimension it is a bad estimate.

    With fewer samples S has no information about many directions. It is shrunk towards a multiple of the identity,
    ``(1 - r) S + r tr(S)/D I``, by the amount r of :func:`shrinkage`. A covariance of zero (one image per class) is
    treated as the identity.
    """
    S, D = g.covariance, g.covariance.shape[0]
    trace = torch.trace(S)
    identity = torch.eye(D, dtype=S.dtype, device=S.device)
    if trace <= 0:
        return identity
    if _enough(g, shrink_below):
        inverse = torch.linalg.pinv(S, rtol=NULL, hermitian=True)
    else:
        r = shrinkage(g, shrink_below)
        inverse = torch.linalg.inv((1 - r) * S + r * trace / D * identity)
    return (inverse + inverse.mT) / 2


def shrinkage(g: Gaussians, shrink_below: float = 1.0) -> Tensor:
    """How far :func:`precision` shrinks the covariance, between 0 and 1; 0 with samples enough.

    The amount of oracle approximating shrinkage (Chen et al. 2010, Eq. 23), which needs only S and n.
    """
    S, D = g.covariance, g.covariance.shape[0]
    trace = torch.trace(S)
    if _enough(g, shrink_below):
        return torch.zeros_like(trace)
    square = (S * S).sum()
    numerator = (1 - 2 / D) * square + trace**2
    denominator = (g.samples + 1 - 2 / D) * (square - trace**2 / D)
    return (numerator / denominator).clamp(max=1.0) if denominator > 0 else torch.ones_like(trace)


def _enough(g: Gaussians, shrink_below: float) -> bool:
    return g.samples - g.means.shape[0] >= shrink_below * g.covariance.shape[0]


def mahalanobis(features: Tensor, means: Tensor, precision: Tensor) -> Tensor:
    """Distance (not squared) of each feature to each mean: (N, D), (C, D), (D, D) -> (N, C).

    sqrt((z - mu)^T P (z - mu)), computed from the differences: expanding the square would lose small distances to
    rounding. Images are processed in chunks to bound memory: the differences of all of them would be (N, C, D).
    """
    rows = max(1, NUMBERS_AT_ONCE // means.numel()) if means.numel() else 1
    parts = [features.new_empty(0, len(means), dtype=torch.float64)]
    for some in features.double().split(rows):
        difference = some[:, None, :] - means[None]  # (n, C, D)
        parts.append(((difference @ precision) * difference).sum(-1).clamp(min=0).sqrt())
    return torch.cat(parts)


def coefficient(features: Tensor, means: Tensor, precision: Tensor, c: float) -> Tensor:
    """Eq. 4: s(x) = max over the classes of c / distance(x), (N,)."""
    return c / mahalanobis(features, means, precision).amin(1).clamp(min=MIN_DISTANCE)
