"""`morecl serve` as a command: it serves, it stops, and bad input ends with a message and exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from serving import make_model

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "MORECL_TOKEN"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(sys.path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "animals"
    make_model(path)
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "morecl", "serve", *map(str, arguments)]


Message = Callable[..., str]


@pytest.fixture
def message(commands: Path) -> Message:
    """What ``morecl serve ARGUMENTS`` says on stderr; it must end with code 2."""

    def message(*arguments: object, addresses: int = 0, **changes: str) -> str:
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "src")} | changes
        command = [commands / "morecl", "serve", *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr and len(done.stdout.splitlines()) == addresses
        return " ".join(done.stderr.split())

    return message


def test_it_serves_until_it_is_stopped(model: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(model, "--port", 0, "--device", "cpu"),
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path), "MORECL_TOKEN": "correct-horse"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        assert process.stdout.readline() == "ready: version 2, 2 classes; stop with ctrl-C\n"
        request = urllib.request.Request(f"{address}/info", headers={"Authorization": "Bearer correct-horse"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.loads(answer.read())["model"] == "animals"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{address}/info", timeout=30)
        with urllib.request.urlopen(urllib.request.Request(f"{address}/health", method="HEAD"), timeout=30) as answer:
            assert answer.status == 200 and answer.read() == b""
        assert [path.name[:13] for path in tmp_path.iterdir()] == ["morecl-serve-"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None and process.stderr.read() == ""
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def test_bad_input_is_told_what_is_wrong(message: Message, model: Path, tmp_path: Path) -> None:
    assert "there is no model in" in message(tmp_path / "none")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert "holds no model" in message(tmp_path / "other")
    assert "a token is needed" in message(model, "--host", "0.0.0.0")
    assert "a token is needed" in message(model, "--name", "example.com")
    assert "give a host's name alone" in message(model, "--name", "https://example.com", "--token", "correct-horse")
    assert "at least 8 characters" in message(model, "--host", "0.0.0.0", MORECL_TOKEN="short")
    assert "no such address" in message(model, "--host", "no.such.host.invalid", "--token", "correct-horse")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another with --port" in message(model, "--port", taken.getsockname()[1])


def test_a_damaged_model_ends_the_server(message: Message, model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "animals"))
    held = copy / "versions" / "2" / "held.safetensors"
    data = held.read_bytes()
    held.unlink()
    held.write_bytes(data[:-1])
    assert "damaged" in message(copy, "--port", 0, addresses=1)


def test_without_the_extra_it_says_what_to_install(model: Path) -> None:
    hide = (
        "import importlib.util as u, sys; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'fastapi' else find(name, *rest); "
        f"sys.argv = ['morecl', 'serve', {str(model)!r}]; from morecl.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", hide], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "pip install 'morecl[serve]'" in " ".join(done.stderr.split())


def test_help_is_quick() -> None:
    code = (
        "import sys; sys.argv = ['morecl', 'serve', '--help']; from morecl.cli import main\n"
        "try: main()\nexcept SystemExit: print(sorted({'torch', 'fastapi', 'uvicorn', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert "MORECL_TOKEN" in done.stdout and done.stdout.splitlines()[-1] == "[]"
