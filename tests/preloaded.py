"""The commands ``morecl`` and ``python`` without the seconds that imports take: a call forks a process that has them.

    with preloaded(folder, environment) as path:   # put ``path`` before the others in PATH

A call is a process of its own with the caller's files, folder and environment, as if it had been started anew. With
another PYTHONPATH than that of ``environment`` it imports morecl anew. It ends when the command is killed, a moment
later. That the installed command itself starts is tested elsewhere.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

LARGEST = 1 << 20  # bytes of a call: command, arguments, folder, environment

CLIENT = """#!{python} -SE
import json, os, socket, sys
arguments = sys.argv[1:]
if {name!r} == "python" and arguments[0] not in ("-", "-c") and not arguments[0].endswith(".py"):
    os.execv({python!r}, [{python!r}, *arguments])
line = json.dumps([{name!r}, arguments, os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [line[:1000]], [0, 1, 2])
    server.sendall(line[1000:] + b"\\n")
    code = int(server.recv(8) or -9)
sys.exit(code if code >= 0 else 128 - code)  # ended by a signal: as a shell says it
"""


@contextmanager
def preloaded(folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """A folder with the commands, for as long as the block runs. ``environment``: what the imports see."""
    address = folder / "socket"
    (folder / "bin").mkdir(parents=True)
    for name in ("morecl", "python"):
        command = folder / "bin" / name
        command.write_text(CLIENT.format(python=sys.executable, name=name, address=str(address)))
        command.chmod(0o755)
    program = [sys.executable, __file__, str(address)]
    server = subprocess.Popen(program, env=dict(environment), stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not address.exists():
            assert server.poll() is None and time.monotonic() < until, "the preloaded commands did not start"
            time.sleep(0.02)
        yield folder / "bin"
    finally:
        server.kill()
        server.wait()


def serve(address: str) -> None:
    """Fork for every call and tell the caller how it ended, until killed."""
    import morecl.classifier
    import morecl.cli
    import morecl.export
    import morecl.report.page
    import morecl.run.launch  # noqa: F401
    from morecl.methods import method_class

    for name in ("more", "morerp"):
        method_class(name)
    gc.collect()
    gc.freeze()  # or collections would copy all memory into every fork
    running: dict[socket.socket, int] = {}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.new")
        listening.listen()
        os.rename(f"{address}.new", address)
        while True:
            for ready in select.select([listening, *running], [], [], 0.01 if running else None)[0]:
                if ready is not listening:  # the caller is gone
                    os.kill(running[ready], signal.SIGKILL)
                    continue
                connection, _ = listening.accept()
                data, files, _, _ = socket.recv_fds(connection, LARGEST, 3)
                while not data.endswith(b"\n"):
                    data += connection.recv(LARGEST)
                child = os.fork()
                if child == 0:
                    for other in (listening, connection, *running):
                        other.close()
                    _answer(data, files)
                running[connection] = child
                for file in files:
                    os.close(file)
            for connection, child in list(running.items()):
                if (ended := os.waitpid(child, os.WNOHANG))[0]:
                    with suppress(OSError):
                        connection.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())
                    connection.close()
                    del running[connection]


def _answer(data: bytes, files: list[int]) -> None:
    """Carry out one call in this process, and end it."""
    name, arguments, folder, environment = json.loads(data)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (open(n, "rw"[n > 0], closefd=False) for n in range(3))  # noqa: SIM115
    os.chdir(folder)
    before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(environment)
    code: object = 0
    try:
        _import_from(environment.get("PYTHONPATH", ""), before)
        _carry_out(name, arguments)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 1)  # tidying up torch takes seconds


def _import_from(paths: str, before: str) -> None:
    """Import from ``paths`` instead of those ``before``, and morecl anew if they differ."""
    new, old = paths.split(os.pathsep), before.split(os.pathsep)
    sys.path[:] = [*filter(None, new), *(path for path in sys.path[1:] if path not in old)]  # [0]: this file's folder
    if new != old:
        for module in [module for module in sys.modules if module.partition(".")[0] == "morecl"]:
            del sys.modules[module]


def _carry_out(name: str, arguments: list[str]) -> None:
    if name == "morecl":
        from morecl import cli

        sys.argv = ["morecl", *arguments]
        cli.main()
    elif arguments[0].endswith(".py"):
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        code = arguments.pop(1) if arguments[0] == "-c" else sys.stdin.read()
        sys.argv = arguments
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(code, "<string>" if arguments[0] == "-c" else "<stdin>", "exec"), main.__dict__)


if __name__ == "__main__":
    serve(sys.argv[1])
