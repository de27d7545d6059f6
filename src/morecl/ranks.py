"""Which of torchrun's processes this one is, as its environment says. Needs no torch.

Ranks are counted from 0; rank 0 is the main one, which alone writes files and shows progress.
"""

from __future__ import annotations

import os
import time

COMMANDS = ("run", "resume")  # of the command line, that several processes can work on together
PATIENCE = 5.0  # seconds


def count() -> int:
    """Processes that torchrun started for one command; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """The number of this process among them."""
    return int(os.environ.get("RANK", "0")) if count() > 1 else 0


def local_rank() -> int:
    """The number of this process among those on the same machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) if count() > 1 else 0


def is_main() -> bool:
    return rank() == 0


def command(arguments: str) -> str:
    """How ``morecl ARGUMENTS`` is started as this process was: ``torchrun --nproc-per-node 2 -m morecl ...``."""
    if count() == 1:
        return f"morecl {arguments}"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(count())))
    nodes = f"--nnodes {count() // here} " if count() > here else ""
    return f"torchrun {nodes}--nproc-per-node {here} -m morecl {arguments}"


def before_error() -> str:
    """Call it before an error is shown; what to write in front of it.

    Most errors are those of all ranks. So all but the main one wait a little: if the main one fails, too, torchrun ends
    them meanwhile, and the message appears once.
    """
    if is_main():
        return ""
    time.sleep(PATIENCE)
    return f"rank {rank()}: "


def tells_of_loss() -> bool:
    """Whether this rank shows that the run was stopped. Two do: one of them may be the one that is gone."""
    return rank() <= 1
