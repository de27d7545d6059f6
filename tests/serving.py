"""A small model to serve, images as files, and lessons that take no time."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import tiny
from morecl.catalogue import SHIPPED
from morecl.classifier import Classifier, ModelFolder, plan

CLASSES = ("red fox", "blue/jay")  # a name may hold anything that can be printed
NEW = 5  # a kind of picture that the model was not taught
EACH = 50

# What teaches in these tests: the real thing with one epoch, and programs that only pretend.
QUICK = (
    "import sys; import morecl.classifier.plan as plan; plan.FEWEST_EPOCHS = plan.MOST_EPOCHS = 1; "
    "from morecl.serve.teaching import main; sys.exit(main())"
)
SLOW = """
import sys, time
sys.stdin.readline()
for epoch in range(1, 601):
    print('{"step": "epoch %d", "share": %f, "left": 3}' % (epoch, epoch / 600), flush=True)
    time.sleep(0.1)
"""
FAILS = 'import sys; sys.stdin.readline(); print(\'{"error": "no luck"}\')'
DIES = "import os, signal, sys; sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)"


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def make_model(path: Path) -> None:
    """A model with two versions: two classes in one task each."""
    before = plan.FEWEST_EPOCHS, plan.MOST_EPOCHS
    plan.FEWEST_EPOCHS = plan.MOST_EPOCHS = 1
    try:
        classifier = Classifier(tiny.create("morerp", eval_batch_size=64, backbone=SHIPPED))
        folder = ModelFolder(path)
        with folder.changing():
            for kind, name in enumerate(CLASSES):
                classifier.learn(tiny.pictures(kind, EACH), [name] * EACH)
                folder.commit(classifier, "learn", name)
    finally:
        plan.FEWEST_EPOCHS, plan.MOST_EPOCHS = before


def png(image: np.ndarray[Any, Any], kind: str = "PNG") -> bytes:
    target = io.BytesIO()
    Image.fromarray(image).save(target, kind)
    return target.getvalue()


def pictures(kind: int, count: int, draw: int = 9) -> list[bytes]:
    """PNG files of one kind, none of which :func:`make_model` has used."""
    return [png(image) for image in tiny.pictures(kind, count, draw=draw)]


def parts(files: list[bytes], name: str = "x.png") -> list[tuple[str, tuple[str, bytes]]]:
    """For ``client.post(..., files=...)``."""
    return [("files", (name, data)) for data in files]


class Below:
    """What a proxy does that has the server below a path: the path is taken off; all else is somebody else's."""

    def __init__(self, app: ASGIApp, path: str):
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(f"{self._path}/"):
            await self._app({**scope, "path": scope["path"].removeprefix(self._path)}, receive, send)
        else:
            await Response(status_code=404)(scope, receive, send)
