"""The fenced code blocks of the documentation, and what a comment directly above one says about it.

- ``<!-- not run: REASON -->``: the block takes long, or needs something a test does not have.
- ``<!-- file: PATH -->``: the block is the content of that file.
- ``<!-- insert: PATH after TEXT -->``: the block goes below the first line of that file that contains TEXT.

Other ``python`` and ``sh`` blocks are run as printed.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"<!-- (not run|file|insert): (.+) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    page: str  # path in the repository
    line: int
    language: str
    text: str
    directive: str | None = None  # "not run", "file" or "insert"
    detail: str = ""

    @property
    def commands(self) -> list[list[str]]:
        """The calls of ``morecl`` in a shell block, split into words."""
        if self.language != "sh":
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [line for line in words if line[:1] == ["morecl"]]


def pages() -> list[str]:
    """Every Markdown file that a reader may copy commands from."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"]
    paths += [ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in paths]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        directive = _DIRECTIVE.search(before)
        kind, detail = (directive[1], directive[2]) if directive else (None, "")
        found.append(Block(page, before.count("\n") + 1, match[1], match[2], kind, detail))
    return found


def runnable(page: str) -> list[Block]:
    """What the test runs or writes, in the order of the page."""
    return [b for b in blocks(page) if b.directive in ("file", "insert") or (_is_code(b) and b.directive is None)]


def not_run() -> list[Block]:
    return [b for page in pages() for b in blocks(page) if _is_code(b) and b.directive == "not run"]


def _is_code(block: Block) -> bool:
    return block.language in ("python", "sh")
