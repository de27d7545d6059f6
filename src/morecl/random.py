"""Randomness without hidden state: every draw has its own generator, seeded with the seed and the draw's name.

A draw does not depend on earlier draws, so a run resumed after task 3 draws the same numbers for task 4 as an
uninterrupted run.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch


def generator(seed: int, *name: str | int) -> torch.Generator:
    """A CPU generator for the draw ``name``, e.g. ``generator(0, "epoch", task, epoch)``."""
    keys = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in name]
    state = np.random.SeedSequence(entropy=seed, spawn_key=keys).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 32 | int(state[1]))
