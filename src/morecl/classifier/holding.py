"""Images held back: never trained on, kept with the model, and used for the threshold, the confidence and accuracy.

Of each class a fifth is held back, at most ``MOST`` images; a new class with fewer than ``FEWEST`` gives none. All that
are kept share a budget of bytes. When it is spent, each class keeps an equal part, drawn at random from those that it
kept so far and the new ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from morecl.images import ImageArray
from morecl.pictures import AnyImages, chunks, joined
from morecl.random import generator

SHARE = 0.2
FEWEST = 5  # images of a class below which all are trained on
MOST = 100  # held back of a class in one lesson
BUDGET = 64 * 2**20  # bytes of all held-back images together ...
AT_LEAST = 5  # ... but a class always keeps as many

Indices = NDArray[np.int64]


def choose(names: Sequence[str], seed: int, lesson: int, *, known: bool = False) -> Indices:
    """Positions of the images to hold back, sorted.

    ``known``: the classes were taught before. Those with fewer than ``FEWEST`` images then count as one class, or a
    model that gets a few images every day would be measured for ever on those of its first lesson.
    """
    classes = np.array(list(dict.fromkeys(names)))
    labels = np.array(names)
    few, chosen = np.empty(0, np.int64), np.empty(0, np.int64)

    def draw(own: Indices, number: int, most: int) -> Indices:
        order = torch.randperm(len(own), generator=generator(seed, "held back", lesson, number)).numpy()
        return own[order[: min(most, round(SHARE * len(own)))]]

    for number, name in enumerate(classes):
        own = np.flatnonzero(labels == name)
        if len(own) >= FEWEST:
            chosen = np.append(chosen, draw(own, number, MOST))
        elif known:
            few = np.append(few, own)
    return np.sort(np.append(chosen, draw(few, len(classes), len(few))))


def fingerprints(images: AnyImages) -> NDArray[np.uint64]:
    """A number per picture, the same for the same pixels: (N, H, W, 3) -> (N,)."""
    digests = [hashlib.blake2b(image.data, digest_size=8).digest() for part in chunks(images) for image in part]
    return np.frombuffer(b"".join(digests), np.uint64)


@dataclass(frozen=True)
class Seen:
    """Fingerprints of pictures (N,) and the column of each one's class (N,)."""

    prints: NDArray[np.uint64]
    columns: Indices

    @classmethod
    def nothing(cls) -> Seen:
        return cls(np.empty(0, np.uint64), np.empty(0, np.int64))

    def has(self, images: AnyImages) -> NDArray[np.bool_]:
        """Which of these pictures (N, H, W, 3) are among them: (N,)."""
        return np.isin(fingerprints(images), self.prints)

    def with_more(self, prints: NDArray[np.uint64], columns: Indices) -> Seen:
        return Seen(np.concatenate([self.prints, prints]), np.concatenate([self.columns, columns]))

    def without(self, column: int) -> Seen:
        keep = self.columns != column
        return Seen(self.prints[keep], self.columns[keep])


@dataclass(frozen=True)
class HeldBack:
    """Images (N, S, S, 3) and the column of each one's class (N,)."""

    images: ImageArray
    columns: Indices

    @classmethod
    def none(cls, side: int) -> HeldBack:
        return cls(np.empty((0, side, side, 3), np.uint8), np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.columns)

    def counts(self, classes: int) -> Indices:
        """Images of each class: (classes,)."""
        return np.bincount(self.columns, minlength=classes)

    def with_more(self, images: AnyImages, columns: Indices, draw: torch.Generator) -> HeldBack:
        """These as well, cut down to the budget."""
        together, columns = joined([self.images, images]), np.concatenate([self.columns, columns])
        each = math.prod(together.shape[1:])
        classes = np.unique(columns)
        quota = max(AT_LEAST, BUDGET // (each * max(1, len(classes))))
        kept = []
        for column in classes:
            own = np.flatnonzero(columns == column)
            order = torch.randperm(len(own), generator=draw).numpy() if len(own) > quota else np.arange(len(own))
            kept.append(own[order[:quota]])
        index = np.sort(np.concatenate([*kept, np.empty(0, np.int64)]))
        return HeldBack(together[index], columns[index])

    def without(self, column: int) -> HeldBack:
        keep = self.columns != column
        return HeldBack(self.images[keep], self.columns[keep])
