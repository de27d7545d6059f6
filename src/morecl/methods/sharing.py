"""How images that want different networks share computations.

All of it is worked out on the host from the number of images per network. On a GPU the many small operations that it
takes would cost more than the networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUP_SIZES = (1, 2, 4, 8, 16)
GROUP_COST = 0.75  # of a group's weights, copied for each pass, in images


class Shared(NamedTuple):
    """Images for one computation: G groups of one size, each of images that want the same network.

    Images are numbered as they lie when those of network 0 come first, then those of network 1, and so on. A short
    group's last image is repeated.
    """

    networks: Tensor  # (G,), like all of it on the host
    images: Tensor  # (G, size)
    true: Tensor  # places in ``images.flatten()`` that are not repetitions


def for_passes(counts: Sequence[int], wanted: Sequence[bool], batch: int) -> Iterator[Shared]:
    """Passes of at most ``batch`` images through the networks that are ``wanted``. Groups are small: their size is a
    compromise between repeated images and copied weights.

    Args:
        counts: images of each network.
    """
    mine = [n for n, want in zip(counts, wanted, strict=True) if want and n]
    if not mine:
        return
    size = min(GROUP_SIZES, key=lambda size: sum(-(-n // size) * (size + GROUP_COST) for n in mine))
    size = min(size, batch)
    yield from _cut(counts, np.array(wanted), size, batch // size)


def for_heads(counts: Sequence[int], wanted: Sequence[bool], at_most: int) -> Iterator[Shared]:
    """The images of the networks that are ``wanted``, networks with about as many of them together: one group each,
    filled up to a power of two.

    Args:
        counts: images of each network.
        at_most: images in one computation.
    """
    sizes = np.array([power_of_two(n) for n in counts])
    for size in np.unique(sizes):
        bounded = min(int(size), at_most)
        yield from _cut(counts, (sizes == size) & wanted, bounded, at_most // bounded)


def power_of_two(count: int) -> int:
    """The least one that is not below ``count``."""
    return 1 << max(count - 1, 0).bit_length()


def _cut(counts: Sequence[int], wanted: NDArray[np.bool_], size: int, most: int) -> Iterator[Shared]:
    """Groups of ``size`` of the networks that are ``wanted``, at most ``most`` of them at once."""
    held = np.where(wanted, counts, 0)
    groups = -(-held // size)
    network = np.repeat(np.arange(len(counts)), groups)
    number = np.arange(len(network)) - np.repeat(groups.cumsum() - groups, groups)  # of a group within its network
    place = number[:, None] * size + np.arange(size)
    last = held[network][:, None] - 1
    images = (np.cumsum(counts) - counts)[network][:, None] + np.minimum(place, last)
    for start in range(0, len(network), most):
        some = slice(start, start + most)
        true = np.flatnonzero((place <= last)[some])
        yield Shared(*(torch.from_numpy(part) for part in (network[some], images[some], true)))
