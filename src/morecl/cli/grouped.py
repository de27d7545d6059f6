"""``morecl --help`` with its commands in groups."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from typer.core import TyperGroup


class GroupedCommands(TyperGroup):
    """Lists the commands under the title that each was registered with (``rich_help_panel``), in that order.

    The arguments are click's, which some versions of typer bring along under another name.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [self.commands[name] for name in self.list_commands(ctx)]
        room = formatter.width - 6 - max(len(str(command.name)) for command in commands)
        for title, group in groupby(commands, lambda command: str(getattr(command, "rich_help_panel", "Commands"))):
            with formatter.section(title):
                formatter.write_dl([(str(command.name), command.get_short_help_str(room)) for command in group])
