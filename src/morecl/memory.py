"""Replay memory: a fixed total, shared equally among the classes seen so far."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from morecl.images import ImageArray, to_side


class ReplayMemory:
    """At most ``size`` images, ``size // classes seen`` of each class, drawn at random without replacement.

    When a task has been learned its classes get their share and the older ones are cut down to theirs; a class with
    fewer images than its share keeps them all, and what it does not use stays unused, so the memory stays balanced.
    Images are kept as they came (uint8). As soon as sizes differ between tasks, all are kept at the backbone's
    resize size.
    """

    def __init__(self, size: int, classes: Sequence[Hashable], side: int):
        self.size = size
        self.images: ImageArray = np.empty((0, side, side, 3), np.uint8)
        self.columns: NDArray[np.int64] = np.empty(0, np.int64)  # position of the class in `classes`
        self._classes = classes
        self._side = side

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def labels(self) -> list[Hashable]:
        """The label of each image, as the user gave it."""
        return [self._classes[c] for c in self.columns]

    def quota(self, classes: int) -> int:
        """Images per class once ``classes`` have been seen."""
        return self.size // classes

    def update(self, images: ImageArray, columns: NDArray[np.int64], generator: torch.Generator) -> None:
        """Take in a learned task: ``images`` (N, H, W, 3) of the new classes ``columns`` (N,)."""
        quota = self.quota(int(columns.max()) + 1)
        # what is stored of a class is in random order, so its first `quota` images are a random subset
        kept = [np.flatnonzero(self.columns == c)[:quota] for c in np.unique(self.columns)]
        order = torch.randperm(len(columns), generator=generator).numpy()
        drawn = [order[columns[order] == c][:quota] for c in np.unique(columns)]
        old, new = np.concatenate([*kept, np.empty(0, np.int64)]), np.concatenate(drawn)
        self._store(self.images[old], self.columns[old], images[new], columns[new])

    def _store(
        self, old: ImageArray, old_columns: NDArray[np.int64], new: ImageArray, new_columns: NDArray[np.int64]
    ) -> None:
        if len(old) and old.shape[1:] != new.shape[1:]:
            old, new = to_side(old, self._side), to_side(new, self._side)
        self.images = np.concatenate([old, new]) if len(old) else new
        self.columns = np.concatenate([old_columns, new_columns])
