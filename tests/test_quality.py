"""The repository itself: linted, formatted, typed, no long files, recipes that load, no paths of anyone's machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from morecl.data import load_recipe, recipe_names
from morecl.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 420  # lines of a source file; about 400, with some room
TEXT = {".py", ".toml", ".md", ".json", ".html", ".yml", ".yaml", ".txt", ".cfg", ""}


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=lambda c: " ".join(c)
)
def test_checks_are_clean(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_source_files_are_short_enough_to_read() -> None:
    package = ROOT / "src" / "morecl"
    files = [path for path in package.rglob("*.py") if package / "nn" / "kernels" not in path.parents]
    longer = {p.relative_to(package).as_posix() for p in files if len(p.read_text().splitlines()) > LONGEST}
    assert not longer, f"over {LONGEST} lines: {sorted(longer)}"


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_load_and_their_settings_are_known(name: str) -> None:
    recipe = load_recipe(name)
    known = set().union(*(method.Config.model_fields for method in METHODS.values()))
    for _, method, table in recipe.tables():
        assert method is None or method in METHODS
        assert table.keys() <= (METHODS[method].Config.model_fields.keys() if method else known)
    for method, cls in METHODS.items():
        for included in (False, True):
            of_recipe = recipe.settings_for(method, included=included)
            settings = {key: value for key, value in of_recipe.items() if key in cls.Config.model_fields}
            config = cls.Config.parse(settings)
            assert all(getattr(config, key) == value for key, value in settings.items())


def test_the_methods_pages_have_the_numbers_of_the_records() -> None:
    command = [sys.executable, "docs/method_numbers.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"run docs/method_numbers.py; out of date: {done.stdout}{done.stderr}"


def test_the_back_updates_table_is_that_of_its_record() -> None:
    record = json.loads((ROOT / "results" / "back-update-held-out.json").read_text())
    rows = [stream["own share, rate"].values() for stream in record["streams"].values()]
    for cells in zip(*rows, strict=True):
        line = " | ".join(f"{c['aca']:.1f} / {c['iauc']:.1f}, {c['earlier']:.0f} %" for c in cells)
        assert line in (ROOT / "docs" / "methods" / "more.md").read_text()


def sources() -> Iterator[Path]:
    for folder in ("src", "tests", "docs", "results", "benchmarks", ".ci", ".github"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file())
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.name != ".git")  # a worktree's


def test_no_file_mentions_a_machine() -> None:
    """No absolute path of someone's home, workspace or mount: it exists on no other machine."""
    machine = re.compile(r"(?<![\w.~/-])/(?:work|home|root|Users|mnt|workspace)/\w")
    found = []
    for path in sources():
        if path.suffix not in TEXT or {"__pycache__", ".mypy_cache"} & set(path.parts) or ".egg-info" in str(path):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if machine.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
