"""The folder of a run: where it is by default, the names of its files, what may be overwritten and what is removed."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from morecl.errors import InputError
from morecl.locking import belongs_to_claim

RUN = "run.json"
RESULT = "result.json"
PROGRESS = "progress.json"
MODEL = "model"
RESCORED = "rescored-"
SHARED = "MORECL_SHARED"  # set in the environment of a run that shares its card or cores with other runs

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"\.(run\.json|result\.json|checkpoint-\d+|model)\..*(tmp|old)")


def default_folder(root: Path, benchmark: str, method: str, order: str, seed: int, variant: str | None = None) -> Path:
    """``ROOT/BENCHMARK/METHOD[-VARIANT]/order-K-seed-S``.

    Args:
        benchmark: the recipe's name. Characters that are awkward in a path become ``_``.
    """
    place = re.sub(r"[^\w.-]+", "_", benchmark)
    name = f"{method}-{variant}" if variant else method
    return root / place / name / f"order-{order}-seed-{seed}"


def checkpoint_folder(out: Path, tasks: int) -> Path:
    """Where the checkpoint after ``tasks`` tasks goes."""
    return out / f"checkpoint-{tasks}"


def rescored_folder(out: Path, variant: str) -> Path:
    """Where the record and the model of the run's networks with another rule go."""
    return out / f"{RESCORED}{variant}"


def checkpoints(out: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [(int(match[1]), path) for path in out.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def refuse_taken(out: Path, overwrite: bool) -> None:
    """Raise :class:`InputError` if ``out`` holds other files, or a run that may not be overwritten."""
    if dangling := next((path for path in (out, *out.parents) if path.is_symlink() and not path.exists()), None):
        raise InputError(f"{dangling} is a link that leads nowhere; remove it, or choose another folder")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; a run needs a folder")
    if not out.exists() or all(belongs_to_claim(path) or _LEFTOVER.fullmatch(path.name) for path in out.iterdir()):
        return
    if not (out / RUN).is_file():
        raise InputError(f"{out} is not empty and holds no run; choose another folder")
    if not overwrite and (out / RESULT).is_file():
        raise InputError(f"{out} holds a finished run: --overwrite replaces it, --out names another folder")
    if not overwrite:
        command = f"morecl resume {shlex.quote(str(out))}"
        raise InputError(f"{out} already holds a run: `{command}` continues it, --overwrite starts over")


def clear(out: Path) -> None:
    """Remove the files of an earlier run, and nothing else.

    The record first, so that no report counts it any longer, and last what says that this is a run's folder: who is
    killed here can begin again.
    """
    remove_leftovers(out)
    (out / RESULT).unlink(missing_ok=True)
    for path in out.iterdir():
        if path.is_dir() and (path.name == MODEL or path.name.startswith(RESCORED) or _CHECKPOINT.fullmatch(path.name)):
            shutil.rmtree(path)
    (out / RUN).unlink(missing_ok=True)


def remove_checkpoints(out: Path) -> None:
    for path in checkpoints(out):
        shutil.rmtree(path)


def remove_leftovers(out: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in [path for path in out.iterdir() if _LEFTOVER.fullmatch(path.name)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
