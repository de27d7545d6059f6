"""The examples for one's own images run as they say."""

from __future__ import annotations

import errno
import json
import os
import re
import runpy
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from PIL import Image

import morecl
from morecl.classifier import Answer
from tiny import pictures

ROOT = Path(__file__).resolve().parents[2]


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(commands: Path) -> Run:
    def run(example: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        command = [commands / "python", ROOT / "examples" / example, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    return run


def test_the_watcher_sorts_what_it_finds(run: Run, tmp_path: Path) -> None:
    classifier = morecl.Classifier.create(
        method="ncm", backbone="vit_mini_patch4_32", image_size=8, device="cpu", eval_batch_size=16
    )
    images = [image for kind in (0, 1) for image in pictures(kind, 60)]
    classifier.learn(images, ["a/b"] * 60 + ["c"] * 60)
    classifier.save(tmp_path / "model")
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    for name, kind in (("one.png", 0), ("two.png", 1), ("three.png", 5)):
        Image.fromarray(pictures(kind, 1, draw=3)[0]).save(inbox / name)
    (inbox / "bad.png").write_bytes(b"bad")
    (inbox / "note.txt").write_text("stays")
    (tmp_path / "sorted" / "c").mkdir(parents=True)
    (tmp_path / "sorted" / "c" / "two.png").write_text("was here before")
    done = run("watch_folder.py", tmp_path / "model", inbox, tmp_path / "sorted", "--once")
    assert done.returncode == 0, done.stderr
    found = {str(p.relative_to(tmp_path / "sorted")) for p in (tmp_path / "sorted").rglob("*") if p.is_file()}
    assert found == {"a_b/one.png", "c/two.png", "c/two-2.png", "unknown/three.png", "unreadable/bad.png"}
    assert [p.name for p in inbox.iterdir()] == ["note.txt"]
    assert (tmp_path / "sorted" / "c" / "two.png").read_text() == "was here before"
    assert "there is no model" in run("watch_folder.py", tmp_path / "none", inbox, tmp_path).stderr


def test_the_watcher_moves_images_to_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)

    monkeypatch.setattr(os, "rename", refuse)
    move = runpy.run_path(str(ROOT / "examples" / "watch_folder.py"))["move"]
    (tmp_path / "x.png").write_bytes(b"image")
    moved = move(tmp_path / "x.png", tmp_path / "sorted")
    assert moved == tmp_path / "sorted" / "x.png" and moved.read_bytes() == b"image"
    assert not (tmp_path / "x.png").exists()


def test_an_image_that_somebody_takes_away_does_not_stop_the_watcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow:
        def predict(self, paths: list[Path], top: int) -> list[Answer]:
            paths[0].unlink()
            return [Answer(str(path), "c", 1.0, 0.0, None, False) for path in paths]

    example = runpy.run_path(str(ROOT / "examples" / "watch_folder.py"))
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"image")
    (tmp_path / "gone.png").symlink_to("nowhere")
    found = example["waiting"](tmp_path)
    assert found == {tmp_path / "a.png": 5, tmp_path / "b.png": 5}
    example["sort"](Slow(), list(found), tmp_path / "sorted")
    assert capsys.readouterr().out == f"b.png -> {tmp_path / 'sorted' / 'c' / 'b.png'}\n"


class Small(BaseHTTPRequestHandler):
    """A server that takes 1000 bytes at once, and would hang up on more."""

    def do_GET(self) -> None:
        self.answer({"limits": {"request_bytes": 1000}})

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        assert size <= 1000 and len(self.rfile.read(size)) == size
        self.answer({"answers": [{"label": "cat", "unknown": False, "confidence": 0.5, "top": []}]})

    def answer(self, value: object, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


def test_the_client_says_what_is_wrong_with_its_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "small.jpg").write_bytes(b"x" * 100)
    (tmp_path / "large.jpg").write_bytes(b"x" * 2000)
    done = run("ask_server.py", tmp_path / "none.jpg")
    assert (done.returncode, done.stderr) == (2, f"{tmp_path / 'none.jpg'}: No such file or directory\n")
    with HTTPServer(("127.0.0.1", 0), Small) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = "--server", f"http://127.0.0.1:{server.server_port}"
        assert "small.jpg: cat, 50% sure" in run("ask_server.py", tmp_path / "small.jpg", *address).stdout
        done = run("ask_server.py", "--teach", "cat", tmp_path / "large.jpg", *address)
        assert done.returncode == 1 and "send fewer at a time" in done.stderr
        server.shutdown()


class Refusing(Small):
    """A server that can read no file and whose lessons fail; some of its refusals are a proxy's."""

    names: ClassVar[list[bytes]] = []

    def do_GET(self) -> None:
        job = {"id": "1", "state": "failed", "error": "too few", "unreadable": ["b.jpg: damaged"], "note": None}
        self.answer(job if self.path == "/jobs/1" else {"limits": {"request_bytes": 1000}})

    def do_POST(self) -> None:
        form = self.rfile.read(int(self.headers["Content-Length"]))
        self.names += re.findall(rb'filename="(.*?)"\r\n', form)
        if self.path == "/teach":
            self.answer({"id": "1", "state": "queued", "share": 0, "step": "waiting", "error": None})
        elif b"proxy" in form:
            self.send_error(502, "Bad Gateway")
        elif b"gateway" in form:
            self.answer({"detail": "nobody there"}, 504)
        else:
            self.answer({"error": "no image", "answers": [{"error": "no image"}] * form.count(b"filename=")}, 422)


def test_the_client_ends_with_1_if_the_server_cannot_help(run: Run, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.jpg" for number in range(10)]
    for file in files:
        file.write_bytes(b"x")
    odd = tmp_path / 'b\u00f6se "1".jpg'
    odd.write_bytes(b"proxy")
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = "--server", f"http://127.0.0.1:{server.server_port}"
        done = run("ask_server.py", *files, *address)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines() == [f"{file}: no image" for file in files]  # of both requests
        assert Refusing.names == [b"%d.jpg" % number for number in range(10)]
        done = run("ask_server.py", odd, *address)
        assert (done.returncode, done.stderr) == (1, "502: Bad Gateway\n")
        assert Refusing.names[-1].decode() == "b\u00f6se %221%22.jpg"
        odd.write_bytes(b"gateway")
        done = run("ask_server.py", odd, *address)
        assert (done.returncode, done.stderr) == (1, "504: Gateway Timeout\n")
        done = run("ask_server.py", "--teach", "cat", files[0], *address)
        assert done.returncode == 1 and done.stderr == "not readable: b.jpg: damaged\nfailed: too few\n"
        server.shutdown()


def test_the_digits_example_runs(run: Run) -> None:
    done = run("digits_classifier.py", "--minutes", 0.02)
    assert done.returncode == 0, done.stderr
    assert "learned 0, 1, 2:" in done.stdout and "5 to 9, never taught:" in done.stdout
