"""What describes runs is imported without torch, which takes seconds: ``morecl list suites`` needs no network."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code",
    [
        "import morecl.run, morecl.records, morecl.evaluator, morecl.suite.run",
        "from morecl.suite.plan import load_suite, suite_names; [load_suite(name) for name in suite_names()]",
        "from morecl.run import RunRequest; RunRequest(method='more', benchmark='digits-5t').resolve()",
    ],
)
def test_no_torch(code: str) -> None:
    check = "import sys; assert not {'torch', 'timm', 'sklearn'} & sys.modules.keys()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True, env=environment, timeout=120)
