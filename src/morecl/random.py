"""Randomness without hidden state: every draw has its own generator, made from the seed and the draw's name.

Nothing depends on what was drawn before, so a run that is resumed after task 3 draws for task 4 exactly what an
uninterrupted run would have drawn.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch


def generator(seed: int, *name: str | int) -> torch.Generator:
    """A CPU generator for the draw called ``name``, e.g. ``generator(0, "epoch", task, epoch)``."""
    keys = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in name]
    state = np.random.SeedSequence(entropy=seed, spawn_key=keys).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 32 | int(state[1]))
