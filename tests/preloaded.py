"""The command ``morecl`` without the seconds that its imports take: every call is a fork of a process that has them.

    with preloaded(folder, environment) as path:   # put ``path`` before the others in PATH

A call is a process of its own with the caller's files, folder and environment, as if it had been started anew. Use it
where many commands follow each other; that the installed command itself starts is tested elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
LARGEST = 1 << 20  # bytes of a call: arguments, folder, environment

CLIENT = """#!{python} -SE
import json, os, socket, sys
line = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [line[:1000]], [0, 1, 2])
    server.sendall(line[1000:] + b"\\n")
    code = server.recv(8)
sys.exit(int(code) if code else 137)
"""


@contextmanager
def preloaded(folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """A folder with a command ``morecl``, for as long as the block runs. ``environment``: what the imports see."""
    address = folder / "socket"
    (folder / "bin").mkdir(parents=True)
    command = folder / "bin" / "morecl"
    command.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    command.chmod(0o755)
    code = f"import sys; sys.path.append({str(HERE)!r}); import preloaded; preloaded.serve({str(address)!r})"
    server = subprocess.Popen([sys.executable, "-c", code], env=dict(environment), stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not address.exists():
            assert server.poll() is None and time.monotonic() < until, "the preloaded command did not start"
            time.sleep(0.02)
        yield command.parent
    finally:
        server.kill()
        server.wait()


def serve(address: str) -> None:
    """Fork for every call, until killed."""
    import morecl.classifier
    import morecl.export
    import morecl.report.page
    import morecl.run.launch  # noqa: F401
    from morecl.methods import method_class

    for name in ("more", "morerp"):
        method_class(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.new")
        listening.listen()
        os.rename(f"{address}.new", address)
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Carry out one call in this process, and end it."""
    data, files, _, _ = socket.recv_fds(connection, LARGEST, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(LARGEST)
    arguments, folder, environment = json.loads(data)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (open(n, "rw"[n > 0], closefd=False) for n in range(3))  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["morecl", *arguments]
    from morecl import cli

    code: object = 1
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        connection.sendall(str(code if isinstance(code, int) else 1).encode())
        os._exit(0)
