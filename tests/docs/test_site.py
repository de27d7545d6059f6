"""The documentation site: builds without a warning, complete, and loads nothing from other servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from morecl.catalogue import METHODS

ROOT = Path(__file__).resolve().parents[2]
# What a browser fetches by itself; links that a reader clicks are no requests.
FETCHED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_every_method_has_a_page(site: Path) -> None:
    assert {page.stem for page in (site / "methods").glob("*.html")} == METHODS.keys()


def test_pages_load_nothing_from_other_servers(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        addresses = [src or href for src, href in FETCHED.findall(page.read_text(encoding="utf-8"))]
        assert addresses
        assert not [a for a in addresses if a.startswith(("http:", "https:", "//"))], page.name


def test_the_reference_is_made_from_docstrings(site: Path) -> None:
    page = (site / "reference" / "learners.html").read_text(encoding="utf-8")
    assert "Rebuild a saved learner" in page
    assert 'id="morecl.methods.base.Learner.learn_task"' in page
    assert not re.search(r":(?:func|class|meth):<code>", page)
