"""Code in the documentation works as printed: blocks are run page by page, the commands of the others are parsed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import typer

from doc_blocks import ROOT, Block, not_run, pages, runnable
from morecl.cli import app

# Every block that is not run, by page. A new one must be added here on purpose.
NOT_RUN = {
    "README.md": 5,
    "CONTRIBUTING.md": 2,
    "docs/tutorial.md": 2,
    "docs/howto/add-a-method.md": 1,
    "docs/howto/add-a-scoring-rule.md": 1,
    "docs/howto/backbones.md": 1,
    "docs/howto/large-data.md": 1,
    "docs/howto/many-machines.md": 2,
    "docs/howto/own-images.md": 2,
    "docs/howto/resume.md": 1,
    "docs/howto/serve.md": 4,
    "docs/howto/several-cards.md": 2,
}
COMMANDS = [(block, command) for block in not_run() for command in block.commands]


@pytest.mark.parametrize("page", [page for page in pages() if runnable(page)])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, commands: Path) -> None:
    todo = runnable(page)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "COLUMNS": "120", "PYTHONPATH": str(ROOT / "src")}
    if any(block.detail.startswith("src/") for block in todo):  # a page that changes the code gets its own copy
        shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        environment["PYTHONPATH"] = str(tmp_path / "src")
    for (language, directive), group in groupby(todo, lambda block: (block.language, block.directive)):
        several = list(group)
        if directive is not None:
            for block in several:
                write(block, tmp_path)
            continue
        program = [commands / "python", "-"] if language == "python" else ["bash", "-eu", "-"]
        script = "\n".join(block.text for block in several)
        done = subprocess.run(
            program, input=script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{page}:{several[0].line}\n{script}\n{done.stdout}\n{done.stderr}"


def write(block: Block, folder: Path) -> None:
    """Make the file that ``block`` shows, or insert the block into a file that is there."""
    name, _, anchor = block.detail.partition(" after ")
    path = folder / name
    if block.directive == "file":
        assert not path.exists(), f"{block.page}:{block.line}: {name} already exists"
        path.write_text(block.text, encoding="utf-8")
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    (place,) = [number for number, line in enumerate(lines) if anchor in line]
    path.write_text("".join([*lines[: place + 1], block.text, *lines[place + 1 :]]), encoding="utf-8")


def test_blocks_that_are_not_run_are_the_listed_ones() -> None:
    found = {page: len(list(group)) for page, group in groupby(not_run(), lambda block: block.page)}
    assert found == NOT_RUN


@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=[f"{b.page}:{b.line} {' '.join(c)}" for b, c in COMMANDS])
def test_commands_are_accepted_by_the_parser(block: Block, command: list[str]) -> None:
    """Names of commands, options and choices, and the types of values; nothing is run."""
    group = typer.main.get_command(app)
    arguments = command[1:]
    if arguments[0].startswith("-"):
        assert arguments[0] in {option for parameter in group.params for option in parameter.opts}
        return
    with group.context_class(group, info_name="morecl") as context:
        name, subcommand, rest = group.resolve_command(context, arguments)  # type: ignore[attr-defined]
        subcommand.make_context(name, rest, parent=context)


def test_the_parser_check_notices_a_wrong_option() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_commands_are_accepted_by_the_parser(Block("", 0, "sh", ""), ["morecl", "run", "--sed", "1"])
    with pytest.raises(Exception, match="No such command"):
        test_commands_are_accepted_by_the_parser(Block("", 0, "sh", ""), ["morecl", "rum"])


def test_recipes_and_methods_in_commands_exist() -> None:
    from morecl.catalogue import METHODS
    from morecl.data import recipe_names

    for block, command in COMMANDS:
        if "--method" in command:
            method = command[command.index("--method") + 1]
            assert method in METHODS, f"{block.page}:{block.line}: {method}"
        if command[1] in ("run", "tune"):
            name = command[2]
            assert name in recipe_names() or name.startswith("folder:") or name.endswith(".toml"), name
