"""How long a new process takes until it has made a training step: imports, backbone, compilation, the step itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from morecl import cuda_start

PROGRAM = "from morecl.bench.start import main; main()"
DONE = "stepped"


def first_step(settings: Mapping[str, Any]) -> float:
    """Seconds from the start of a process to the end of its first training step with MORE."""
    started = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, json.dumps(dict(settings))]
    with (
        tempfile.TemporaryFile("w+") as errors,  # no pipe: nobody reads it meanwhile
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == DONE:
                return time.perf_counter() - started
        errors.seek(0)
        raise RuntimeError(f"a process that should make one training step ended without:\n{errors.read()}")


def main() -> None:
    """One step of one batch; the settings are the argument."""
    settings = json.loads(sys.argv[1])
    cuda_start.begin(settings.get("device", "auto"))  # as `morecl run`
    from morecl.bench.common import CLASSES_PER_TASK, made_up_images
    from morecl.methods.more import More

    learner = More(More.Config.parse(settings))
    count = learner.config.batch_size

    def stop(event: object) -> None:
        print(DONE, flush=True)
        os._exit(0)

    learner.learn_task(made_up_images(count), [i % CLASSES_PER_TASK for i in range(count)], stop)
