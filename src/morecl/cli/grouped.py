"""``morecl --help`` with its commands in groups, and what to do about arguments that look like options."""

from __future__ import annotations

import shlex
import sys
from itertools import groupby
from typing import Any

from typer.core import TyperGroup


class GroupedCommands(TyperGroup):
    """Lists the commands under the title that each was registered with (``rich_help_panel``), in that order.

    The arguments are click's, which some versions of typer bring along under another name.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption" and not getattr(error, "possibilities", None):
                error.message += _way_out(str(getattr(error, "option_name", "")))  # type: ignore[attr-defined]
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [self.commands[name] for name in self.list_commands(ctx)]
        room = formatter.width - 6 - max(len(str(command.name)) for command in commands)
        for title, group in groupby(commands, lambda command: str(getattr(command, "rich_help_panel", "Commands"))):
            with formatter.section(title):
                formatter.write_dl([(str(command.name), command.get_short_help_str(room)) for command in group])


def _way_out(option: str) -> str:
    """What to write if it is a file or a name. ``option``: maybe only its first letters, as `-da` of `-dash.jpg`."""
    given = shlex.quote(next((text for text in sys.argv[1:] if option and text.startswith(option)), option))
    return f". If {given} is the name of a class or a file, put -- before it: -- {given}; a file may also be ./{given}"
