from __future__ import annotations

import os
import subprocess
import sys

import pytest

from morecl.cores import usable_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system keeps no process off a core")
def test_a_pinned_process_has_only_its_own_cores() -> None:
    code = (
        "import os; from morecl.cores import usable_cores; before = usable_cores(); "
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(before, usable_cores())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(os.sched_getaffinity(0))), "1"]


@pytest.mark.parametrize(("known", "found"), [(3, 3), (None, 1)])
def test_where_the_system_does_not_say_all_cores_count(
    known: int | None, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: known)
    assert usable_cores() == found
