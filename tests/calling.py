"""Calls the command line in this process."""

from __future__ import annotations

import sys
import warnings

import pytest

from morecl import cli


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of ``morecl ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["morecl", *map(str, arguments)])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)
