"""Project files agree with each other: one version, one list of Python versions, forms that GitHub accepts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import morecl

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_has_one_source(project: dict[str, Any]) -> None:
    assert project["project"]["dynamic"] == ["version"]
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "morecl.__version__"}


def test_changelog_and_citation_are_those_of_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[?([\d.]+)\]? - (\d{4}-\d{2}-\d{2})$", changelog, re.MULTILINE)
    citation = read("CITATION.cff")
    assert headings[0] == (morecl.__version__, citation["date-released"])
    assert citation["version"] == morecl.__version__
    assert [date for _, date in headings] == sorted((date for _, date in headings), reverse=True)


def test_the_workflow_tests_the_declared_python_versions(project: dict[str, Any]) -> None:
    prefix = "Programming Language :: Python :: "
    declared = [c.removeprefix(prefix) for c in project["project"]["classifiers"] if re.match(rf"{prefix}3\.", c)]
    jobs = read(".github/workflows/ci.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == declared
    assert project["project"]["requires-python"] == f">={declared[0]}"


def test_the_workflow_calls_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for job in read(".github/workflows/ci.yml")["jobs"].values():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands
        assert all(command.split()[:1] == ["make"] and command.split()[1] in targets for command in commands)


def test_pins_are_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", pin) for pin in pins)
    names = [re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower() for pin in pins]
    assert len(set(names)) == len(names)


def test_every_direct_dependency_is_pinned(project: dict[str, Any]) -> None:
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    extras = project["project"]["optional-dependencies"].values()
    wanted = [*project["project"]["dependencies"], *(requirement for extra in extras for requirement in extra)]
    names = [re.split(r"[\[<>=]", requirement)[0].lower() for requirement in wanted]
    assert [name for name in names if not re.search(rf"^{re.escape(name)}==", pinned, re.MULTILINE)] == []


@pytest.mark.parametrize("path", [form for form in FORMS if form.stem != "config"], ids=lambda path: path.stem)
def test_issue_forms_have_what_github_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    identifiers = [part["id"] for part in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(part["type"] in {"textarea", "input", "dropdown", "checkboxes", "markdown"} for part in form["body"])
    assert all(part["attributes"]["label"] for part in form["body"])


def test_pre_commit_runs_what_make_lint_runs() -> None:
    hooks = [hook for repository in read(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    assert {"ruff-check", "ruff-format", "mypy", "trailing-whitespace", "end-of-file-fixer"} <= {h["id"] for h in hooks}
