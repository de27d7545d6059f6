"""Images of a data set on the device, turned into what the network wants when they are needed, once if they fit."""

from __future__ import annotations

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
    """The part of N images' way through the network that training does not change (:meth:`AdaptedViT.prefix`): tokens
    before the first block; where the backbone is trained, the images as it wants them.

    They are computed once and kept if they fit into the budget (2 GiB on a CPU, a quarter of a GPU's memory);
    else the uint8 images stay on the device (in pinned host memory, if even they do not fit) and the tokens are
    computed for each batch anew.

    ``tokens[index]``: (B,) int64 on the device -> (B, L, D), or (B, 3, S, S).
    """

    def __init__(self, network: AdaptedViT, preprocess: Preprocess, images: ImageArray):
        device = preprocess.mean.device
        self.network, self.preprocess = network, preprocess
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
        """The tokens of images start..stop-1."""
        if self.cache is not None:
            return self.cache[start:stop]
        return self._compute(self.images[start:stop])

    @torch.no_grad()
    def _compute(self, images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        return self.network.prefix(self.preprocess(images))


def _budget(device: torch.device) -> int:
    if device.type == "cuda":
        return int(GPU_CACHE_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return CPU_CACHE_BYTES
