"""Quick commands import neither torch nor timm, and waiting OpenMP threads sleep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from morecl import __main__
from morecl.cli.terminal import INTERRUPTED
from morecl.records import write_record
from synthetic import make_record

MAIN = """
import json, sys
sys.argv = ["morecl", *sys.argv[1:]]
from morecl.cli import main
try:
    main()
except SystemExit as end:
    print(json.dumps([end.code, sorted(sys.modules)]), file=sys.stderr)
"""
VARIABLES = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")


def in_a_process(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=inherited | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


def modules_after(*arguments: object) -> tuple[int, set[str], str, str]:
    """Of ``morecl ARGUMENTS``: exit code, the modules it imported, stdout, stderr."""
    done = in_a_process(MAIN, *arguments)
    *err, last = done.stderr.splitlines()
    code, modules = json.loads(last)
    return code or 0, set(modules), done.stdout, "\n".join(err)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--help"], 0, "Your own images:"),
        (["--help"], 0, "Experiments:"),
        (["learn", "--help"], 0, "--minutes"),
        (["learn", "nowhere", "nothing"], 2, "there is no folder nothing"),
        (["learn", "nowhere", ".", "--method", "mroe"], 2, "did you mean 'more'?"),
        (["history", "nowhere"], 2, "there is no model in nowhere"),
        (["predict", "nowhere", "x.png"], 2, "there is no model in nowhere"),
        (["run", "--help"], 0, "--train-per-class"),
        (["--version"], 0, "morecl "),
        (["list", "methods"], 0, "MORE and the methods its paper compares with"),
        (["list", "benchmarks"], 0, "digits-5t"),
        (["list", "suites"], 0, "table-main"),
        (["run", "digits-5t", "--method", "mroe"], 2, "unknown method 'mroe'; did you mean 'more'?"),
        (
            ["tune", "digits-5t", "--method", "mroe", "--lr", "1", "--epochs", "1", "--out", "x"],
            2,
            "did you mean 'more'?",
        ),
        (["run", "digit-5t"], 2, "unknown benchmark 'digit-5t'; did you mean 'digits-5t'?"),
        (["run", "--set", "epochs"], 2, "--set wants key=value"),
    ],
)
def test_quick_commands_do_not_import_torch(arguments: list[str], code: int, expected: str) -> None:
    found, modules, out, err = modules_after(*arguments)
    assert found == code, err
    assert expected in " ".join((out + err).split())
    assert not {"torch", "timm", "sklearn", "matplotlib"} & modules


@pytest.mark.parametrize("format_", ["text", "md", "latex", "html"])
def test_reports_do_not_import_torch_and_only_figures_import_matplotlib(tmp_path: Path, format_: str) -> None:
    write_record(tmp_path / "run" / "result.json", make_record(tasks=2))
    code, modules, out, err = modules_after("report", tmp_path, "--format", format_)
    assert code == 0, err
    assert "MORE" in out
    assert not {"torch", "timm", "sklearn"} & modules
    assert ("matplotlib" in modules) == (format_ == "html")


def test_the_check_would_notice_torch() -> None:
    assert "torch" in modules_after("run", "--device", "gpu")[1]


def variables(code: str, **environment: str) -> Any:
    show = f"import json, os; {code}; print(json.dumps({{key: os.environ.get(key) for key in {VARIABLES}}}))"
    return json.loads(in_a_process(show, **environment).stdout)


@pytest.mark.parametrize("code", ["import morecl", "import morecl.cli"])
def test_waiting_threads_sleep_unless_the_user_chose_otherwise(code: str) -> None:
    nothing = dict.fromkeys(VARIABLES)
    assert variables("pass") == nothing
    assert variables(code) == nothing | {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    for name, value in (("OMP_WAIT_POLICY", "ACTIVE"), ("KMP_BLOCKTIME", "200"), ("GOMP_SPINCOUNT", "1000")):
        assert variables(code, **{name: value}) == nothing | {name: value}


def test_openmp_reads_the_policy_that_morecl_set() -> None:
    """OpenMP prints its settings when torch loads it."""
    done = in_a_process("import morecl, torch", OMP_DISPLAY_ENV="true")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr or "OMP_WAIT_POLICY='PASSIVE'" in done.stderr


def test_ctrl_c_during_imports_ends_without_a_traceback() -> None:
    code = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "morecl.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from morecl.__main__ import main
try:
    main()
except SystemExit as end:
    print(end.code)
"""
    done = in_a_process(code)
    assert (done.stdout, done.stderr) == (f"{INTERRUPTED}\n", "")


def test_the_command_is_the_one_of_the_module() -> None:
    (script,) = [entry for entry in entry_points(group="console_scripts") if entry.name == "morecl"]
    assert script.load() is __main__.main
