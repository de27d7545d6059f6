"""Starts two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc-per-node 2 ARGUMENTS``."""
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
