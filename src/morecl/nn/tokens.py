"""Network inputs of a data set's images: computed once and cached if they fit, else for each batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from morecl.nn.network import AdaptedViT
from morecl.nn.preprocess import Preprocess
from morecl.nn.reading import ReadAhead
from morecl.pictures import AnyImages, InMemory, Pictures

CPU_CACHE_BYTES = 2 << 30
UNREAD_CACHE_BYTES = 1 << 30  # on a CPU, of images that are not in memory
GPU_CACHE_SHARE = 0.25  # of the card's memory
STEM_BATCH = 256


class Tokens:
    """Inputs of :meth:`AdaptedViT.trunk` for N images: all that can be computed before training (its ``prefix``).

    With a frozen backbone these are the tokens (N, L, D) before the first block. With a trained backbone its stem
    changes, so they are the preprocessed images (N, 3, S, S) instead.

    They are computed once and cached if they fit into the budget (2 GiB on a CPU, 1 GiB if the images are not in
    memory either; a quarter of a GPU's memory). If not, they are computed again for each batch: from the uint8 images
    on the device, or, if even these do not fit or are on disk, from images that are read ahead (:class:`ReadAhead`).

    ``tokens[index]``: index (B,) int64 on the device -> (B, L, D), or (B, 3, S, S) with a trained backbone.
    """

    _draw: torch.Generator | None = None  # of crops, see :meth:`augmented`

    def __init__(self, network: AdaptedViT, preprocess: Preprocess, images: AnyImages):
        self.network = network
        self.preprocess = preprocess
        self.device = preprocess.mean.device
        budget = _budget(self.device, images)
        self.images: Tensor | ReadAhead = _placed(images, self.device, budget)
        self.cache: Tensor | None = None
        if 0 < len(images) * network.prefix_bytes <= budget:
            self.cache = self._all()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Tensor) -> Tensor:
        if self.cache is not None:
            return self.cache.index_select(0, index)
        return self._compute(self._select(index), self._draw)

    def range(self, start: int, stop: int) -> Tensor:
        """The inputs for images start..stop-1."""
        if self.cache is not None:
            return self.cache[start:stop]
        return self._compute(self._range(start, stop))

    def take(self, rows: Tensor) -> Tokens:
        """Those of the images ``rows`` (B,) alone."""
        taken = copy.copy(self)
        taken.images = self.images.take(rows) if isinstance(self.images, ReadAhead) else self._select(rows)
        taken.cache = None if self.cache is None else self.cache.index_select(0, rows)
        return taken

    def augmented(self, draw: torch.Generator) -> Tokens:
        """The same images, of which ``tokens[index]`` gives random crops (:mod:`morecl.nn.augment`), drawn anew each
        time from ``draw``. Nothing is cached; all else is as it was."""
        other = copy.copy(self)
        other.cache, other._draw = None, draw
        return other

    def ahead(self, batches: Sequence[Tensor]) -> None:
        """Announce what will be asked for: ``tokens[index]`` for each of ``batches``, in this order.

        Images that are not on the device are then read while earlier batches are trained on. Anything else may be
        asked for in between, and nothing depends on it but time.
        """
        if self.cache is None and isinstance(self.images, ReadAhead):
            self.images.announce(batches)

    def _select(self, index: Tensor) -> Tensor:
        if isinstance(self.images, ReadAhead):
            return self.images.select(index)
        return self.images.index_select(0, index)

    def _range(self, start: int, stop: int) -> Tensor:
        return self.images.range(start, stop) if isinstance(self.images, ReadAhead) else self.images[start:stop]

    def _all(self) -> Tensor:
        """The inputs of all images, computed in parts."""
        first = self._compute(self._range(0, STEM_BATCH))
        if len(first) == len(self):
            return first
        made = first.new_empty(len(self), *first.shape[1:])
        made[:STEM_BATCH] = first
        for start in range(STEM_BATCH, len(self), STEM_BATCH):
            made[start : start + STEM_BATCH] = self._compute(self._range(start, start + STEM_BATCH))
        return made

    @torch.no_grad()
    def _compute(self, images: Tensor, draw: torch.Generator | None = None) -> Tensor:
        made = self.preprocess(images) if draw is None else self.preprocess.augmented(images, draw)
        return self.network.prefix(made)


def _placed(images: AnyImages, device: torch.device, budget: int) -> Tensor | ReadAhead:
    """The images on the device if they fit there; those on disk stay there if the device is the CPU."""
    if isinstance(images, Pictures):
        if device.type != "cuda" or images.nbytes > budget:
            return ReadAhead(images, device)
        placed = torch.empty(images.shape, dtype=torch.uint8, device=device)
        start = 0
        for part in images.chunks():
            placed[start : start + len(part)] = torch.from_numpy(part).to(device)
            start += len(part)
        return placed
    if device.type == "cuda" and images.nbytes > budget:
        return ReadAhead(Pictures(InMemory(images)), device)
    return torch.from_numpy(np.require(images, requirements=["C", "W"])).to(device)


def _budget(device: torch.device, images: AnyImages) -> int:
    if device.type == "cuda":
        return int(GPU_CACHE_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return min(UNREAD_CACHE_BYTES, CPU_CACHE_BYTES) if isinstance(images, Pictures) else CPU_CACHE_BYTES
