"""Two ranks work once for all tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock

import parallel_work
from torchrun import torchrun


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """What both ranks of :mod:`parallel_work` left, and in ``killed.json`` how they ended: exit code, stdout, stderr.

    They run once for all workers of pytest-xdist.
    """
    base = tmp_path_factory.getbasetemp()
    out = (base if worker_id == "master" else base.parent) / "two-ranks"
    with FileLock(f"{out}.lock"):
        if not out.exists():
            out.mkdir()
            done = torchrun(parallel_work.__file__, out)
            (out / "killed.json").write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    assert (out / "killed").exists(), (out / "killed.json").read_text()
    return out


@pytest.fixture(scope="module")
def two_ranks_on_a_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks that share a card left."""
    out = tmp_path_factory.mktemp("card")
    done = torchrun(parallel_work.__file__, out, "cuda")
    assert done.returncode == 0, done.stderr
    return out
