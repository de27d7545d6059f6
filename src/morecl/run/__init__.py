"""One run: a method on a benchmark, from the first task to ``result.json``. It can be resumed after every task.

Read in this order: ``request`` (what the user asked for, and the same with paths, recipe and settings resolved),
``launch`` (start and resume), ``loop`` (learn a task, evaluate, checkpoint), ``record`` (the result).

Files of a run's folder (see ``folder``):

- ``run.json``: the request and the directory it was made in; written first.
- ``.lock`` and ``.claim``: held by the process that works in the folder. The first stays when it is released, the
  second stays only when the process is killed (see :mod:`morecl.locking`).
- ``checkpoint-K/``: the saved learner after K tasks, and ``progress.json`` with everything measured so far. A new
  checkpoint is written under a temporary name and renamed, then the previous one is deleted (unless
  ``keep_checkpoints`` is set). A killed run resumes from the newest.
- ``model/``: the learner after the last task.
- ``result.json``: the record; written last.
- ``rescored-RULE/``: record and model of the same networks with another rule (``rescore``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from morecl.late import late_names
from morecl.run.folder import RESULT, RUN, SHARED, default_folder
from morecl.run.request import ResolvedRun, RunRequest, preset_notes, rate_notes, read_request
from morecl.run.watcher import Watcher

if TYPE_CHECKING:  # torch takes seconds to import
    from morecl.run.launch import resume, start
    from morecl.run.rescoring import rescore

__all__ = [
    "RESULT",
    "RUN",
    "SHARED",
    "ResolvedRun",
    "RunRequest",
    "Watcher",
    "default_folder",
    "preset_notes",
    "rate_notes",
    "read_request",
    "rescore",
    "resume",
    "start",
]

__getattr__ = late_names(__name__, {"launch": ("resume", "start"), "rescoring": ("rescore",)})
