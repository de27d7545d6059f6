"""One thread and repeatable examples for all tests: equal inputs then give equal bits."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

torch.set_num_threads(int(os.environ.get("MORECL_TEST_THREADS", "1")))
settings.register_profile("morecl", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("morecl")
