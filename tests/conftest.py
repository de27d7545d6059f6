"""Settings for all tests: one thread, repeatable examples, and what happens to GPU tests without a GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from preloaded import preloaded

THREADS = os.environ.get("MORECL_TEST_THREADS", "1")
os.environ["OMP_NUM_THREADS"] = THREADS  # for the processes that tests start
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime's, also in the processes that tests start
torch.set_num_threads(int(THREADS))
if importlib.util.find_spec("hypothesis"):  # the GPU tests do without it
    from hypothesis import settings

    settings.register_profile("morecl", deadline=None, derandomize=True, max_examples=60)
    settings.load_profile("morecl")


ROOT = Path(__file__).resolve().parents[1]
SHORT = ("tests/golden/", "tests/unit/data/", "tests/unit/report/", "tests/unit/run/", "tests/unit/nn/families")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Decoded images of the tests go to a folder of their own, also from processes that tests start."""
    os.environ["MORECL_CACHE"] = str(tmp_path_factory.mktemp("decoded"))


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with ``morecl`` and ``python`` that need no seconds for their imports, see :mod:`preloaded`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with preloaded(tmp_path_factory.mktemp("commands"), environment) as path:
        yield path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests are skipped; asking for them alone (``-m gpu``, ``make test-gpu``) is an error.

    Files of short tests come last: at the end no worker waits long for the other.
    """
    items.sort(key=lambda item: any(part in item.path.as_posix() for part in SHORT))
    if torch.cuda.is_available():
        return
    if config.option.markexpr == "gpu":
        raise pytest.UsageError("no CUDA GPU found: the tests marked 'gpu' cannot run here, so none was run")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
