"""Network inputs of a data set's images: computed once and cached if they fit, else for each batch."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from morecl.images import ImageArray
from morecl.nn.network import AdaptedViT
from morecl.nn.preprocess import Preprocess

CPU_CACHE_BYTES = 2 << 30
GPU_CACHE_SHARE = 0.25  # of the card's memory
STEM_BATCH = 256


class Tokens:
    """Inputs of :meth:`AdaptedViT.trunk` for N images: all that can be computed before training (its ``prefix``).

    With a frozen backbone these are the tokens (N, L, D) before the first block. With a trained backbone its stem
    changes, so they are the preprocessed images (N, 3, S, S) instead.

    They are computed once and cached if they fit into the budget (2 GiB on a CPU, a quarter of a GPU's memory). If not,
    the uint8 images stay on the device (or in pinned host memory, if even they do not fit) and the inputs are computed
    again for each batch.

    ``tokens[index]``: index (B,) int64 on the device -> (B, L, D), or (B, 3, S, S) with a trained backbone.
    """

    def __init__(self, network: AdaptedViT, preprocess: Preprocess, images: ImageArray):
        device = preprocess.mean.device
        self.network = network
        self.preprocess = preprocess
        self.device = device
        host = torch.from_numpy(np.require(images, requirements=["C", "W"]))
        fits = device.type != "cuda" or host.nbytes <= _budget(device)
        self.images = host.to(device) if fits else host.pin_memory()
        needed = len(images) * network.prefix_bytes
        self.cache: Tensor | None = None
        if fits and 0 < needed <= _budget(device):
            self.cache = torch.cat([self._compute(part) for part in self.images.split(STEM_BATCH)])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Tensor) -> Tensor:
        if self.cache is not None:
            return self.cache.index_select(0, index)
        return self._compute(self.images.index_select(0, index.to(self.images.device)))

    def range(self, start: int, stop: int) -> Tensor:
        """The inputs for images start..stop-1."""
        if self.cache is not None:
            return self.cache[start:stop]
        return self._compute(self.images[start:stop])

    def take(self, rows: Tensor) -> Tokens:
        """Those of the images ``rows`` (B,) alone."""
        taken = copy.copy(self)
        taken.images = self.images.index_select(0, rows.to(self.images.device))
        taken.cache = None if self.cache is None else self.cache.index_select(0, rows)
        return taken

    @torch.no_grad()
    def _compute(self, images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        return self.network.prefix(self.preprocess(images))


def _budget(device: torch.device) -> int:
    if device.type == "cuda":
        return int(GPU_CACHE_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return CPU_CACHE_BYTES
