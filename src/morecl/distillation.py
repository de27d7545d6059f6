"""Knowledge distillation and class balancing: parts of the losses of several replay methods.

A teacher's outputs are those for plain images, also where the student is trained on random crops (``augment``), so they
are the same in every epoch. They are computed once, before training, and batched with the images; the teacher itself
need not be kept.
"""

from __future__ import annotations

import torch
from torch import Tensor


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between softened outputs, -sum_c softmax(teacher / T)_c log softmax(student / T)_c. (B, C) -> (B,)

    (Hinton et al. 2015, without the factor T^2 that some methods add.)
    """
    return -((teacher / temperature).softmax(1) * (student / temperature).log_softmax(1)).sum(1)


def class_weights(columns: Tensor, first: int, last: int) -> Tensor:
    """Weights (N,) that balance the classes first..last-1: n / (classes present * n_y) for class y.

    n is the number of images of these classes, n_y that of class y. Images of other classes have weight 1.
    """
    inside = (columns >= first) & (columns < last)
    counts = torch.bincount(columns, minlength=last)
    present = counts[first:last]
    n, classes = present.sum(), (present > 0).sum()
    return torch.where(inside, n / (classes * counts[columns].float()), 1.0)
