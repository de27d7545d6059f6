"""Ridge regression on random features: a linear classifier over all classes whose sums stay exact as classes arrive.

Features z (D,) are projected to m random features, phi(z) = relu(z R / s), with R (D, m) standard normal and s the
standard deviation of the first features added. With G = sum phi phi^T (m, m) and Q = sum phi y^T (m, C), y one-hot,

    W = (G + r I)^-1 Q,    outputs = phi(z) W.

Sums do not care in which order or in how many tasks the images came, so W is what all images at once would give, as
long as the features z of an image never change (McDonnell et al., RanPAC, NeurIPS 2023).

An image of a class that was forgotten stays in G, since all weights would change without it. If it is added again, it
is not counted in G twice; if it stood in for others, it does so again. To recognise it, a sketch of every image is
kept: ``SKETCH`` projections of its features.

Strength r and the temperature that turns outputs into probabilities are chosen by leaving out one image at a time, in
closed form: with h = w phi^T (G + r I)^-1 phi for an image of weight w, its outputs without itself in the sums are

    (phi^T W - h y) / (1 - h).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.symmetric import packed, unpacked

RELATIVE_STRENGTHS = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # in units of the mean of G's diagonal
LEAST = 1e-12  # strength in the same unit that a given one is raised to
SHARPNESS = tuple(10 ** (exponent / 20) for exponent in range(41))  # 1 to 100: what outputs are multiplied with
CHUNK = 4096  # images whose random features are held at once
LEFT_OUT = 2000  # images that are left out in turn
SKETCH = 16  # numbers kept of each image
SAME_BELOW = 1e-3  # mean squared difference of two sketches: below, they are of one picture and differ by rounding
NO_CLASS = -1  # column of an image whose class was forgotten
RANDOM_FEATURES_AT_ONCE = 2**28  # numbers, 2 GiB, up to which those of all images are held where that is faster

T = TypeVar("T")
Error = TypeVar("Error", float, tuple[float, float])


class LeftOut(NamedTuple):
    """One strength: its weights W (m, C), and the outputs (N, C) of each image left out."""

    weight: Tensor
    outputs: Tensor


class Ridge(nn.Module):
    """The sums, and the classifier that :meth:`solve` makes from them.

    ``gram`` holds the upper triangle of G, row after row, m (m + 1) / 2 numbers in float64: half of what G takes.
    ``sketches`` (N, SKETCH), ``columns`` and ``weights`` (N,) are of the images in G, if classes may be forgotten.
    """

    projection: Tensor
    scale: Tensor
    gram: Tensor
    cross: Tensor
    weight: Tensor
    sketching: Tensor
    sketches: Tensor
    columns: Tensor
    weights: Tensor
    place: Tensor
    sharpness: Tensor

    def __init__(self, dim: int, width: int, generator: torch.Generator, *, forgets: bool = False):
        """``width``: m. ``generator`` draws R on the CPU, so it is the same on every device and need not be saved.

        ``forgets``: keep the sketches that :meth:`drop` needs.
        """
        super().__init__()
        self.width, self.forgets = width, forgets
        self.register_buffer("projection", torch.randn(dim, width, generator=generator), persistent=False)
        self.register_buffer("scale", torch.zeros((), dtype=torch.float64))  # 0: nothing was added yet
        self.register_buffer("gram", torch.zeros(width * (width + 1) // 2, dtype=torch.float64))
        self.register_buffer("cross", torch.zeros(width, 0, dtype=torch.float64))
        self.register_buffer("weight", torch.zeros(width, 0))
        self.register_buffer("place", torch.tensor(len(RELATIVE_STRENGTHS) // 2))  # of the strength chosen last
        self.register_buffer("sharpness", torch.ones((), dtype=torch.float64))
        if forgets:
            self.register_buffer("sketching", torch.randn(dim, SKETCH, generator=generator), persistent=False)
            self.register_buffer("sketches", torch.zeros(0, SKETCH))
            self.register_buffer("columns", torch.zeros(0, dtype=torch.int64))
            self.register_buffer("weights", torch.zeros(0, dtype=torch.float64))

    @property
    def classes(self) -> int:
        return self.cross.shape[1]

    def grow(self, classes: int) -> None:
        """Make room for ``classes`` more."""
        self.cross = F.pad(self.cross, (0, classes))
        self.weight = F.pad(self.weight, (0, classes))

    def clear(self) -> None:
        """Forget all images; room for the classes stays."""
        for part in (self.scale, self.gram, self.cross):
            part.zero_()
        if self.forgets:
            self._keep(torch.zeros_like(self.columns, dtype=torch.bool))

    def drop(self, column: int) -> None:
        """Forget a class: it has no sum and no weights any more. Its images stay in G, so other weights stay."""
        self.columns[self.columns == column] = NO_CLASS
        self.cross[:, column] = 0
        self.weight[:, column] = 0

    def random_features(self, features: Tensor) -> Tensor:
        """phi: (N, D) -> (N, m), float32."""
        return F.relu(features.float() @ self.projection / self.scale.float())

    @torch.no_grad()
    def add(self, features: Tensor, columns: Tensor, weights: Tensor | None = None) -> None:
        """Add images to the sums: ``features`` (N, D), ``columns`` (N,) on the same device, ``weights`` (N,) or 1."""
        if not len(features):
            return
        if self.scale == 0:
            self.scale.copy_(spread(features))
        if weights is None:
            weights = torch.ones(len(features), device=features.device)
        weights = weights.double()
        former = torch.zeros_like(weights)  # what each image counts in G already, as one of no class
        if self.forgets:
            sketches = self._sketched(features)
            former = self._take_out(sketches)
            weights = torch.maximum(weights, former)  # less would leave G with negative eigenvalues, through rounding
            self.sketches = torch.cat([self.sketches, sketches])
            self.columns = torch.cat([self.columns, columns])
            self.weights = torch.cat([self.weights, weights])
        gram = unpacked(self.gram, self.width)
        parts = (part.split(CHUNK) for part in (features, columns, weights, former))
        for z, column, w, before in zip(*parts, strict=True):
            phi = self.random_features(z).double()  # (n, m)
            gram.addmm_(phi.mT, phi * (w - before)[:, None])
            self.cross.addmm_((phi * w[:, None]).mT, F.one_hot(column, self.classes).double())
        self.gram.copy_(packed(gram))

    def _sketched(self, features: Tensor) -> Tensor:
        """(N, D) -> (N, SKETCH), float32: squared differences are on average those of features, in units of s^2."""
        return features.float() @ self.sketching / (features.shape[1] ** 0.5 * self.scale.float())

    def _take_out(self, sketches: Tensor) -> Tensor:
        """Let go of forgotten images that come again, (N, SKETCH); what each of them counts in G, (N,), float64."""
        former = torch.zeros(len(sketches), dtype=torch.float64, device=sketches.device)
        forgotten = (self.columns == NO_CLASS).nonzero()[:, 0]
        kept = torch.ones_like(self.columns, dtype=torch.bool)
        for part in forgotten.split(CHUNK):
            found = [torch.cdist(self.sketches[part], some).min(1) for some in sketches.split(CHUNK)]
            nearest, chunk = torch.stack([each.values for each in found]).min(0)
            which = torch.stack([each.indices for each in found]).gather(0, chunk[None])[0] + CHUNK * chunk
            again = nearest.square() / SKETCH < SAME_BELOW
            former.index_add_(0, which[again], self.weights[part[again]])
            kept[part[again]] = False
        self._keep(kept)
        return former

    def _keep(self, kept: Tensor) -> None:
        for name in ("sketches", "columns", "weights"):
            setattr(self, name, getattr(self, name)[kept])

    @torch.no_grad()
    def solve(
        self, features: Tensor, columns: Tensor, weights: Tensor | None = None, without: Tensor | None = None
    ) -> None:
        """Make the classifier. Strength and sharpness are those that serve these images best, each left out in turn.

        The images, (N, D) and (N,), must be among those added, with the same ``weights``. None is of a class in
        ``without``, (C,) bool: such classes have been forgotten. Of more than ``LEFT_OUT`` every so-many-th is taken.
        """
        if weights is None:
            weights = torch.ones(len(features), device=features.device)
        if len(features) > LEFT_OUT:
            chosen = torch.arange(LEFT_OUT, device=features.device) * len(features) // LEFT_OUT
            features, columns, weights = features[chosen], columns[chosen], weights[chosen]
        onehot = F.one_hot(columns, self.classes).double()
        gram = unpacked(self.gram, self.width)
        unit = gram.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
        phi = self.random_features(features).double()

        def left_out(place: int) -> tuple[float, LeftOut]:
            made = self._left_out(gram, float(RELATIVE_STRENGTHS[place] * unit), phi, onehot, weights.double())
            return float((made.outputs - onehot).square().sum()), made

        place, best = descend(left_out, int(self.place), len(RELATIVE_STRENGTHS))
        self.place.fill_(place)
        self.weight.copy_(best.weight)
        outputs = best.outputs if without is None else best.outputs.masked_fill(without, -torch.inf)
        self.sharpness.fill_(best_sharpness(outputs, columns)[0])

    @torch.no_grad()
    def solve_with(self, strength: float) -> None:
        """Make the classifier with this strength r; the sharpness stays as it is.

        G has no full rank if there are fewer images than random features, and an r that is lost in the rounding of its
        diagonal (RanPAC tries 1e-8) leaves it singular. So r is at least ``LEAST`` times the mean of the diagonal.
        """
        regular = unpacked(self.gram, self.width)
        regular.diagonal().add_(max(strength, LEAST * float(regular.diagonal().mean())))
        self.weight.copy_(torch.linalg.solve(regular, self.cross))

    def _left_out(self, gram: Tensor, strength: float, phi: Tensor, onehot: Tensor, weights: Tensor) -> LeftOut:
        regular = gram.clone()
        regular.diagonal().add_(strength)
        lower = torch.linalg.cholesky(regular)
        weight = torch.cholesky_solve(self.cross, lower)
        own = weights * torch.linalg.solve_triangular(lower, phi.mT, upper=False).square().sum(0)  # h, (N,)
        outputs = (phi @ weight - own[:, None] * onehot) / (1 - own).clamp(min=1e-9)[:, None]
        return LeftOut(weight, outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Outputs of all classes: (N, D) -> (N, C), float64."""
        parts = [self.random_features(z) @ self.weight for z in features.split(CHUNK)]
        return torch.cat(parts).double() if parts else features.new_zeros(0, self.classes, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """The number of sketches comes from the state; everything else must fit.

        Models of older versions also say of which classes images have no sketch.
        """
        if (unsketched := state_dict.pop(f"{prefix}unsketched", None)) is not None and unsketched.any():
            raise ValueError(f"{prefix}sketches are missing; an older morecl did not make them")
        if self.forgets:
            make_room(self, ("sketches", "columns", "weights"), self.classes, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def spread(features: Tensor) -> Tensor:
    """The standard deviation of all numbers in ``features``, 1 if there is none: float64."""
    found = features.double().std() if features.numel() > 1 else features.new_zeros((), dtype=torch.float64)
    return torch.where(found > 0, found, torch.ones_like(found))


def make_room(
    module: nn.Module, names: Sequence[str], classes: int, state_dict: Mapping[str, Tensor], prefix: str
) -> None:
    """Give the buffers ``names`` of ``module`` a row for each of the images whose columns are in ``state_dict``.

    What else is wrong there is found when it is loaded.
    """
    columns = state_dict.get(f"{prefix}columns")
    if columns is None or columns.ndim != 1 or columns.dtype != torch.int64:
        return
    if len(columns) and not NO_CLASS <= int(columns.min()) <= int(columns.max()) < classes:
        raise ValueError(f"{prefix}columns names classes that do not exist")
    for name in names:
        own: Tensor = getattr(module, name)
        setattr(module, name, own.new_zeros(len(columns), *own.shape[1:]))


def descend(evaluate: Callable[[int], tuple[Error, T]], start: int, count: int) -> tuple[int, T]:
    """From ``start`` to the nearest place among 0..count-1 whose error is below that of its neighbours.

    ``evaluate(place)``: error and result. The squared error has one valley in the strength of a ridge, and the
    cross-entropy had one wherever it was looked at. The strength of one task is near that of the last: three
    evaluations are usual, where each is a matrix factorised.
    """
    place, (error, result) = start, evaluate(start)
    for step in (1, -1):
        moved = False
        while 0 <= place + step < count:
            other, made = evaluate(place + step)
            if other >= error:
                break
            place, error, result, moved = place + step, other, made, True
        if moved:
            break
    return place, result


def best_sharpness(outputs: Tensor, columns: Tensor) -> tuple[float, float]:
    """The value of ``SHARPNESS`` with the least cross-entropy of softmax(value * outputs), and that. (N, C), (N,)"""
    losses = [float(F.cross_entropy(value * outputs, columns)) for value in SHARPNESS]
    best = min(range(len(losses)), key=losses.__getitem__)
    return SHARPNESS[best], losses[best]


def held_out_errors(
    phi: Tensor, onehot: Tensor, other_phi: Tensor, other_onehot: Tensor, strengths: Sequence[float]
) -> list[float]:
    """Squared error on other images, (k, m) and (k, C), of the classifier of n images, (n, m) and (n, C), per strength.

    One eigendecomposition serves all strengths, of the smaller of phi phi^T and phi^T phi: in the first case
    W = phi^T (phi phi^T + r I)^-1 Y.
    """
    dual = len(phi) < phi.shape[1]
    values, vectors = torch.linalg.eigh(phi @ phi.mT if dual else phi.mT @ phi)
    left = other_phi @ (phi.mT @ vectors if dual else vectors)  # (k, n or m)
    right = vectors.mT @ (onehot if dual else phi.mT @ onehot)
    values = values.clamp(min=0)
    return [float((left @ (right / (values + r)[:, None]) - other_onehot).square().sum()) for r in strengths]


def held_out_errors_in_chunks(
    make: Callable[[Tensor], Tensor],
    features: Tensor,
    onehot: Tensor,
    others: Tensor,
    other_onehot: Tensor,
    strengths: Sequence[float],
) -> list[float]:
    """As :func:`held_out_errors` with phi = ``make(features)``, of which only ``CHUNK`` rows are held at once."""
    width = make(features[:1]).shape[1]
    gram, cross = onehot.new_zeros(width, width), onehot.new_zeros(width, onehot.shape[1])
    for z, y in zip(features.split(CHUNK), onehot.split(CHUNK), strict=True):
        phi = make(z).double()
        gram.addmm_(phi.mT, phi)
        cross.addmm_(phi.mT, y)
    values, vectors = torch.linalg.eigh(gram)
    right, values = vectors.mT @ cross, values.clamp(min=0)
    errors = [0.0] * len(strengths)
    for z, y in zip(others.split(CHUNK), other_onehot.split(CHUNK), strict=True):
        left = make(z).double() @ vectors
        for i, r in enumerate(strengths):
            errors[i] += float((left @ (right / (values + r)[:, None]) - y).square().sum())
    return errors
