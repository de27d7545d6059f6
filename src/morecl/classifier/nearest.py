"""The remembered pictures that are most like an image."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from morecl.classifier.reading import Read
from morecl.methods import Learner

Near = tuple[str, NDArray[np.uint8], float]  # class, picture, cosine similarity of features


def most_like(learner: Learner, remembered: Tensor, found: Read, images: int, count: int) -> list[list[Near]]:
    """For each of so many ``images`` up to ``count`` pictures, the most similar first; none if it could not be read.

    Args:
        remembered: (M, D), the features of all pictures in the memory, of length 1.
    """
    memory = learner.memory
    labels = memory.labels
    given = torch.nn.functional.normalize(torch.from_numpy(learner.features(found.images)))
    similar = given @ remembered.mT  # (N, M)
    values, index = similar.topk(min(count, len(memory)), dim=1)
    answers: list[list[Near]] = [[] for _ in range(images)]
    for row, position in enumerate(found.positions.tolist()):
        answers[position] = [
            (str(labels[i]), memory.images[i], float(v))
            for i, v in zip(index[row].tolist(), values[row].tolist(), strict=True)
        ]
    return answers
