"""Reports start fast: they never load torch."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.resources import files

MODULES = sorted(
    f"morecl.report.{path.name.removesuffix('.py')}"
    for path in files("morecl.report").iterdir()
    if path.name.endswith(".py") and path.name != "__init__.py"
)


def test_reports_never_import_torch() -> None:
    assert "morecl.report.page" in MODULES
    slow = {"torch", "timm", "torchvision", "sklearn"}
    script = f"import sys, {', '.join(MODULES)}; print(sorted({slow} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"
