"""From a model's folder to a running server."""

from __future__ import annotations

import logging
import socket
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from morecl.errors import InputError
from morecl.serve.app import create_app
from morecl.serve.security import check_names, check_token, is_local
from morecl.serve.service import Service

Say = Callable[[str], None]


def serve(
    model: Path,
    *,
    host: str,
    port: int,
    token: str | None = None,
    names: Sequence[str] = (),
    device: str | None = None,
    say: Say = print,
) -> None:
    """Serve ``model`` until the process is interrupted.

    Args:
        port: 0 takes a free one.
        names: under which others reach it, such as that of a proxy.
        say: told the address, and when the model is loaded.

    Raises:
        InputError: no such model, a bad address, name or token, or the model cannot be loaded.
    """
    check_names(names)
    check_token(host, token, names)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of uploads: large, or with odd metadata
    service = Service(model, device=device)
    try:
        service.folder.versions()  # refuses a folder that holds no model before a port is taken
        listening = _listen(host, port)
        app = create_app(service, token=token, local=is_local(host), names=names)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", ws="none", server_header=False, timeout_graceful_shutdown=5)
        )
        for name in ("uvicorn.error", "python_multipart"):  # the latter warns of each bad form
            logging.getLogger(name).setLevel(logging.ERROR)
        loader = _Loader(service, server, say)
        shown = f"[{host}]" if ":" in host else host
        say(f"http://{shown}:{listening.getsockname()[1]}")
        loader.start()
        with listening:
            server.run(sockets=[listening])
        if loader.error is not None:
            raise loader.error
    finally:
        service.close()


class _Loader(threading.Thread):
    """Loads the model while the server already answers /health; stops the server if that fails."""

    def __init__(self, service: Service, server: uvicorn.Server, say: Say):
        super().__init__(name="loader", daemon=True)
        self._service, self._server, self._say = service, server, say
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._service.load()
        except Exception as error:
            self.error = error
            self._server.should_exit = True
            return
        version = self._service.current.version
        self._say(f"ready: version {version.number}, {version.classes} classes; stop with ctrl-C")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host}: no such address ({error})") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        raise InputError(f"cannot listen on {host}, port {port} ({error}); choose another with --port") from error
    return listening
