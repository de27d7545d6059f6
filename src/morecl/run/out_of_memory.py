"""A run that does not fit into memory: a clear message, and no folder that could only fail again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from morecl.errors import InputError, first_line
from morecl.nn.device import is_out_of_memory
from morecl.run.folder import RUN

_SIZES = ("image_size", "batch_size", "eval_batch_size")  # settings of any method
_FOLDER_SIZE = "folder_size"  # of a recipe; it replaces the image size for a user's folder


@contextmanager
def out_of_memory_explained(settings: Mapping[str, Any], out: Path) -> Iterator[None]:
    """Turn an out-of-memory error of the run in ``out`` into an :class:`InputError` that names the sizes to lower.

    Args:
        settings: of the method, and the ``folder_size`` of the recipe if it has one.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        sizes = [*_SIZES, _FOLDER_SIZE] if settings.get(_FOLDER_SIZE) else _SIZES
        now = ", ".join(f"{name}={settings[name]}" for name in sizes if settings.get(name) is not None)
        advice = f"lower {', '.join(sizes[:-1])} or {sizes[-1]}{f' (now {now})' if now else ''}"
        if (out / RUN).is_file():
            command = f"morecl resume {shlex.quote(str(out))}"
            advice = f"free some and `{command}`, or {advice} and start over with --overwrite"
        raise InputError(f"not enough memory: {advice}. The error was: {first_line(error)}") from error
