"""The wheel: complete, nothing from the repository that does not belong in it, and usable in an empty environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import morecl

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "morecl"
RECORD = ROOT / "results" / "smoke-digits"


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of ``command``, which must succeed and must not see this checkout."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, checkout)
    for name in ("src", "tests", "results/smoke-digits"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=checkout)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment that has the wheel and sees this environment's other packages."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A folder named in a .pth file is searched last, and its own .pth files (an editable morecl) are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_both_files_carry_the_version(dist: Path) -> None:
    assert {path.name for path in dist.iterdir()} == {
        f"morecl-{morecl.__version__}.tar.gz",
        f"morecl-{morecl.__version__}-py3-none-any.whl",
    }


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert files == {path.relative_to(PACKAGE.parent).as_posix() for path in package}
    for name in ("py.typed", "assets/vit_mini_patch4_32.safetensors", "data/recipes/digits-5t.toml"):
        assert f"morecl/{name}" in files
    for folder in ("suite/suites/", "report/templates/"):
        assert any(name.startswith(f"morecl/{folder}") for name in files)


def test_the_sdist_has_the_licence_and_the_readme_but_no_tests_and_records(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/morecl/py.typed"} <= names
    assert not any(name.startswith(("results", "tests")) for name in names)


def test_the_installed_package_is_the_one_from_the_wheel(installed: Path) -> None:
    code = "import importlib.metadata, morecl; print(morecl.__file__, importlib.metadata.version('morecl'))"
    file, version = run(installed / "python", "-c", code, cwd=installed).split()
    assert Path(file).is_relative_to(installed.parent)
    assert version == morecl.__version__


def test_the_installed_command_works(installed: Path) -> None:
    command = installed / "morecl"
    assert run(command, "--version", cwd=installed) == f"morecl {morecl.__version__}\n"
    assert "out-of-distribution replay" in run(command, "list", "methods", cwd=installed)
    assert "digits-5t" in run(command, "list", "benchmarks", cwd=installed)
    table = run(command, "report", RECORD, cwd=installed)
    assert "MORE" in table
    assert "93.80" in table
    page = run(command, "report", RECORD, "--format", "html", cwd=installed)
    assert page.lstrip().lower().startswith("<!doctype html>")
