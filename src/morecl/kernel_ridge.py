"""Ridge regression with a Gaussian kernel: a classifier over all classes that keeps a feature vector of every image.

With features z (D,) whose standard deviation is s, the kernel is

    k(a, b) = exp(-|a - b|^2 / (D s^2)),

and with K (N, N) over the N kept images, Y (N, C) one-hot and W = diag(weights),

    A = (K + r W^-1)^-1 Y,    outputs(z) = k(z, images) A.

This is what :class:`morecl.ridge.Ridge` tends to with more and more random features, and what is kept is smaller than
its sums as long as there are fewer than some 100,000 images: 2 D bytes per image instead of 4 m^2 in all. Images can
be added at any time. s is that of the images added first; apart from it, the order in which images come, and in how
many tasks, makes no difference.

Strength r and the sharpness t of softmax(t outputs) are chosen together: those with the least cross-entropy when up to
2,000 images are left out one at a time. That is closed form; without image i in the system, its outputs are

    y_i - A_i / ((K + r W^-1)^-1)_ii.

(Not by their squared error, which hardly changes where the accuracy does: see docs/methods/morerp.md.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from morecl.random import generator
from morecl.ridge import LEFT_OUT, NO_CLASS, best_sharpness, descend, make_room, spread
from morecl.triangle import Triangle

KERNEL_STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0)  # in units of k(a, a), which is 1
EXACT = 8192  # images up to which everything is computed in float64
LIGHT = 4.0  # weight up to which float32 will do for more images
CHUNK = 4096  # images whose distances to all others are held at once
SAME_ABOVE = 0.999  # kernel of two features: above, they are of one picture and differ by rounding; k(a, a) is 1


class Solved(NamedTuple):
    """One strength: A (N, C), and the outputs (n, C) of the images that were left out in turn."""

    dual: Tensor
    outputs: Tensor


class Chosen(NamedTuple):
    """What is kept of one strength: A (N, C), and the best sharpness."""

    dual: Tensor
    sharpness: float


class Reference(NamedTuple):
    """The kept images: features (N, D) and their squared lengths (N,), float32."""

    images: Tensor
    squares: Tensor


class KernelRidge(nn.Module):
    """The kept images, and the classifier that :meth:`solve` makes from them."""

    scale: Tensor
    features: Tensor
    columns: Tensor
    weights: Tensor
    dual: Tensor
    place: Tensor
    sharpness: Tensor

    def __init__(self, dim: int, capacity: int, seed: int):
        """``capacity``: images kept at most. Beyond it each class keeps an equal part, drawn from ``seed``, and every
        image counts for as many as it stands for."""
        super().__init__()
        self.dim, self.capacity, self.seed = dim, capacity, seed
        self._made: tuple[Tensor, int, Reference] | None = None  # from which features, in which state
        self.register_buffer("scale", torch.zeros((), dtype=torch.float64))  # 0: nothing was added yet
        self.register_buffer("features", torch.zeros(0, dim, dtype=torch.float16))
        self.register_buffer("columns", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("weights", torch.zeros(0))
        self.register_buffer("dual", torch.zeros(0, 0))
        self.register_buffer("place", torch.tensor(KERNEL_STRENGTHS.index(0.1)))  # of the strength chosen last
        self.register_buffer("sharpness", torch.ones((), dtype=torch.float64))

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def classes(self) -> int:
        return self.dual.shape[1]

    def grow(self, classes: int) -> None:
        """Make room for ``classes`` more."""
        self.dual = F.pad(self.dual, (0, classes))

    def clear(self) -> None:
        """Forget all images; room for the classes stays."""
        self.scale.zero_()
        self._keep(torch.zeros(len(self), dtype=torch.bool, device=self.columns.device))

    def drop(self, column: int) -> None:
        """Forget a class: it has no outputs any more. Its images stay, as examples of none of the classes, because the
        outputs of all others would change without them."""
        self.columns[self.columns == column] = NO_CLASS
        self.dual[:, column] = 0

    @torch.no_grad()
    def add(self, features: Tensor, columns: Tensor, weights: Tensor | None = None) -> None:
        """Keep images: ``features`` (N, D), ``columns`` (N,) on the same device, ``weights`` (N,) or 1."""
        if not len(features):
            return
        if self.scale == 0:
            self.scale.copy_(spread(features))
        if weights is None:
            weights = torch.ones(len(features), device=features.device)
        scaled = (features.double() / self.scale).half()  # scaled first: half precision has a narrow range
        self._replace_forgotten(scaled.float())
        self.features = torch.cat([self.features, scaled])
        self.columns = torch.cat([self.columns, columns])
        self.weights = torch.cat([self.weights, weights.float()])
        self.dual = F.pad(self.dual, (0, 0, 0, len(features)))
        if len(self) > self.capacity:
            self._thin()

    def _replace_forgotten(self, scaled: Tensor) -> None:
        """Let go of forgotten images that come again, (N, D): no image is an example of a class and of none."""
        forgotten = (self.columns == NO_CLASS).nonzero()[:, 0]
        again = [
            (gaussian_kernel(part, scaled) > SAME_ABOVE).any(1)
            for part in self.features[forgotten].float().split(CHUNK)
        ]
        if again:
            kept = torch.ones(len(self), dtype=torch.bool, device=self.columns.device)
            kept[forgotten[torch.cat(again)]] = False
            self._keep(kept)

    def _thin(self) -> None:
        """Cut every class down to an equal share of ``capacity``; each of its images then counts the same.

        Which images stay is decided by a hash of their features, not by when they came: however often images are added
        and let go, those of a class are a random sample of all that it ever had.
        """
        order = self._hashes().argsort(stable=True)
        present = self.columns.unique()
        quota = max(1, self.capacity // len(present))
        kept = torch.zeros(len(self), dtype=torch.bool, device=self.columns.device)
        for column in present:
            own = order[self.columns[order] == column]
            if len(own) > quota:
                self.weights[own[:quota]] = self.weights[own].sum() / quota
            kept[own[:quota]] = True
        self._keep(kept)

    def _hashes(self) -> Tensor:
        """(N,), int64: as good as random, from the bits of the features and the seed alone."""
        draw = generator(self.seed, "kept features")
        factors = torch.randint(-(2**63), 2**63 - 1, (self.dim,), generator=draw).to(self.features.device)
        bits = self.features.view(torch.int16)
        return torch.cat([(part.long() * factors).sum(1) for part in bits.split(CHUNK)])

    def _keep(self, kept: Tensor) -> None:
        for name in ("features", "columns", "weights", "dual"):
            setattr(self, name, getattr(self, name)[kept])

    @torch.no_grad()
    def solve(self, without: Tensor | None = None) -> None:
        """Make the classifier from all kept images.

        ``without`` (C,) bool: classes that have been forgotten; they have no say in strength and sharpness.
        """
        count = len(self)
        heavy = bool(count) and float(self.weights.max()) > LIGHT
        dtype = torch.float64 if count <= EXACT or heavy else torch.float32
        onehot = F.one_hot(self.columns + 1, self.classes + 1)[:, 1:].to(dtype)  # a row of zeros for none of them
        draw = generator(self.seed, "left out", count)
        order = torch.randperm(count, generator=draw).to(self.columns.device)
        rows = order[self.columns[order] != NO_CLASS][:LEFT_OUT].sort().values

        def attempt(place: int) -> tuple[tuple[float, float], Chosen]:
            solved = self._solved(KERNEL_STRENGTHS[place], onehot, rows)
            if not len(rows):
                return (0.0, 0.0), Chosen(solved.dual, float(self.sharpness))
            outputs = solved.outputs if without is None else solved.outputs.masked_fill(without, -torch.inf)
            sharpness, loss = best_sharpness(outputs, self.columns[rows])
            squares = float((solved.outputs - onehot[rows]).square().sum())
            return (loss, squares), Chosen(solved.dual, sharpness)  # squares: for classes so far apart that loss is 0

        place, best = descend(attempt, int(self.place), len(KERNEL_STRENGTHS))
        self.place.fill_(place)
        self.dual = best.dual.float().contiguous()  # the layout changes the rounding of outputs
        self.sharpness.fill_(best.sharpness)

    def _solved(self, strength: float, onehot: Tensor, rows: Tensor) -> Solved:
        images = self.features.to(onehot.dtype)

        def rows_of_system(start: int, stop: int) -> Tensor:
            system = torch.cat([gaussian_kernel(part, images[:stop]) for part in images[start:stop].split(CHUNK)])
            system.diagonal(start).add_(strength / self.weights[start:stop].to(onehot.dtype))
            return system

        lower = Triangle(rows_of_system, len(self))
        dual = lower.solve(onehot)
        unit = torch.zeros(len(self), len(rows), dtype=onehot.dtype, device=onehot.device)
        unit[rows, torch.arange(len(rows), device=rows.device)] = 1
        own = lower.forward(unit).square().sum(0)  # diagonal of the inverse
        return Solved(dual, onehot[rows] - dual[rows] / own[:, None])

    def reference(self) -> Reference:
        """The part of :meth:`forward` that depends on the kept images alone; made once, until they change."""
        kept = self.features
        version = -1 if kept.is_inference() else kept._version
        if self._made is None or self._made[0] is not kept or self._made[1] != version:
            images = kept.float()
            self._made = kept, version, Reference(images, images.square().sum(1))
        return self._made[2]

    def forward(self, features: Tensor) -> Tensor:
        """Outputs of all classes: (N, D) -> (N, C), float64."""
        images, squares = self.reference()
        scaled = features.float() / self.scale.float()
        parts = [(gaussian_kernel(z, images, squares) @ self.dual).double() for z in scaled.split(CHUNK)]
        return torch.cat(parts) if parts else features.new_zeros(0, self.classes, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """The number of kept images comes from the state; everything else must fit."""
        make_room(self, ("features", "columns", "weights", "dual"), self.classes, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def gaussian_kernel(a: Tensor, b: Tensor, squares_of_b: Tensor | None = None) -> Tensor:
    """exp(-|a - b|^2 / D) of each row of ``a`` (N, D) with each of ``b`` (M, D): (N, M)."""
    squares = a.square().sum(1)[:, None] + (b.square().sum(1) if squares_of_b is None else squares_of_b)
    return torch.addmm(squares, a, b.mT, alpha=-2).clamp_(min=0).div_(-a.shape[1]).exp_()
