"""scikit-learn's handwritten digits as PNG files, one sub-folder per digit."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

SIDE = 32


@cache
def _digits(seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All images (N, 8, 8) and digits (N,), shuffled: in the data set each writer's digits stand together."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    return (data.images[order] * 255 / 16).astype(np.uint8), data.target[order]


def write_digits(folder: Path, digits: Iterable[int], start: int, stop: int, seed: int = 0) -> Path:
    """Number ``start`` to ``stop`` of each digit as FOLDER/DIGIT/NUMBER.png; the same seed gives the same numbers."""
    images, labels = _digits(seed)
    for digit in digits:
        own = folder / str(digit)
        own.mkdir(parents=True, exist_ok=True)
        for number in np.flatnonzero(labels == digit)[start:stop].tolist():
            Image.fromarray(images[number]).resize((SIDE, SIDE)).save(own / f"{number}.png")
    return folder
