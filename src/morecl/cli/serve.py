"""``morecl serve``: a web page and an API over a model."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from morecl.cli.options import Device, expanded
from morecl.errors import InputError

NEEDED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "python_multipart": "python-multipart"}
NEEDED |= {"prometheus_client": "prometheus-client"}


def serve(
    model: Annotated[Path, typer.Argument(callback=expanded, help="Folder of the model; see `morecl learn`.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. A local one is out of other machines' reach.")] = (
        "127.0.0.1"
    ),
    token: Annotated[
        str | None,
        typer.Option(
            envvar="MORECL_TOKEN",
            help="Answer only requests with `Authorization: Bearer TOKEN`; needed if --host is not local. "
            "Better given as $MORECL_TOKEN: others on this machine can see a command's options.",
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="A host name under which others reach the server, such as a proxy's. May be repeated."),
    ] = None,
    device: Device = None,
) -> None:
    """Serve a model: a page to ask and to teach it, and an API. Needs the extra `serve`."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not installed; install with: pip install 'morecl[serve]'")
    from morecl.classifier.store import ModelFolder
    from morecl.interrupts import sigterm_as_interrupt
    from morecl.serve.security import check_names, check_token

    ModelFolder(model).versions()  # bad input is refused before torch is imported
    names = name or []
    check_names(names)
    check_token(host, token or None, names)
    from morecl.serve.running import serve as run

    with sigterm_as_interrupt(), suppress(KeyboardInterrupt):  # the way to stop a server
        run(
            model,
            host=host,
            port=port,
            token=token or None,
            names=names,
            device=device,
            say=lambda text: print(text, flush=True),
        )
