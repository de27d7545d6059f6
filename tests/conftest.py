"""One thread and repeatable examples for all tests: equal inputs then give equal bits."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("morecl", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("morecl")
