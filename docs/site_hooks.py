"""MkDocs hooks: pages that show a file of the repository, and cleaner docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace ``<!-- include: PATH -->`` by that file; its links are relative to the root of the repository."""

    def content(match: re.Match[str]) -> str:
        return (ROOT / match[1]).read_text(encoding="utf-8").replace("](docs/", "](")

    return INCLUDE.sub(content, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things as :class:`X`; show only X."""
    return ROLE.sub("", html)
