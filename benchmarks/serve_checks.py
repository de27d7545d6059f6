"""Checks `morecl serve` the hard way: load while it learns, kill -9 at random moments, fuzzed uploads and models.

    python benchmarks/serve_checks.py --out results/own-images/serve.json

About half an hour on two cores. Smaller: --requests 50 --kills 4 --uploads 500 --folders 50. It needs the extra `serve`
and Linux (it reads /proc). The record's `failures` must be empty; the exit code says so as well.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import morecl
from morecl.catalogue import SHIPPED
from morecl.classifier import Classifier, ModelFolder
from morecl.errors import InputError
from morecl.files import write_json

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SMALL = {"image_size": 8, "bottleneck": 4, "projection": 40, "device": "cpu"}
SLOWEST = 5.0  # seconds
Part = tuple[str, str, bytes]  # field, file name or "", content


# ---- models and images ----------------------------------------------------------------------------------------


def digits() -> dict[str, list[np.ndarray[Any, Any]]]:
    """The images of each digit, 32 x 32."""
    from sklearn.datasets import load_digits

    found = load_digits()
    large = np.kron((found.images * 255 / 16).astype(np.uint8), np.ones((1, 4, 4), np.uint8))
    images = np.repeat(large[..., None], 3, -1)
    return {name: list(images[found.target == number]) for number, name in enumerate(NAMES)}


def make_model(path: Path, classes: list[str], minutes: float, **settings: Any) -> None:
    """A model that knows these digits, 40 images of each."""
    known = digits()
    classifier = Classifier.create(backbone=SHIPPED, **settings)
    images = [image for name in classes for image in known[name][:40]]
    classifier.learn(np.stack(images), [name for name in classes for _ in range(40)], minutes=minutes)
    folder = ModelFolder(path)
    with folder.changing():
        folder.commit(classifier, "learn", ", ".join(classes))


def encoded(image: np.ndarray[Any, Any], kind: str = "PNG") -> bytes:
    target = io.BytesIO()
    Image.fromarray(image).save(target, kind)
    return target.getvalue()


# ---- the server -----------------------------------------------------------------------------------------------


class Server:
    """`morecl serve` as a process."""

    def __init__(self, model: Path):
        command = [sys.executable, "-m", "morecl", "serve", str(model), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.port = int(self.address.rpartition(":")[2])
        assert self.process.stdout.readline().startswith("ready")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return json.loads(answer.read())

    def post(self, path: str, parts: list[Part], connection: http.client.HTTPConnection | None = None) -> Any:
        """Status and body."""
        body, kind = form(parts)
        return self.send(path, body, kind, connection)

    def send(
        self, path: str, body: bytes, kind: str, connection: http.client.HTTPConnection | None = None
    ) -> tuple[int, bytes]:
        own = connection or self.connect()
        try:
            own.request("POST", path, body, {"Content-Type": kind})
            answer = own.getresponse()
            return answer.status, answer.read()
        finally:
            if connection is None:
                own.close()

    def teach(self, name: str, images: list[np.ndarray[Any, Any]]) -> str:
        parts: list[Part] = [("name", "", name.encode()), *(("files", "x.png", encoded(image)) for image in images)]
        status, body = self.post("/teach", parts)
        assert status == 202, body
        return str(json.loads(body)["id"])

    def teacher(self) -> int | None:
        """The process that learns now."""
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == self.process.pid and state != "Z":
                    return int(folder.name)
        return None

    def peak(self) -> float:
        """The most memory it has had so far, in MB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


@contextmanager
def serving(model: Path) -> Iterator[Server]:
    server = Server(model)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def form(parts: list[Part]) -> tuple[bytes, str]:
    """multipart/form-data and its content type. Names are written as they are, however strange."""
    boundary = os.urandom(12).hex().encode()
    lines = []
    for field, name, content in parts:
        named = f'; filename="{name}"' if name else ""
        head = f'Content-Disposition: form-data; name="{field}"{named}'.encode("utf-8", "replace")
        lines.append(b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + content + b"\r\n")
    return b"".join(lines) + b"--" + boundary + b"--\r\n", f"multipart/form-data; boundary={boundary.decode()}"


# ---- load -----------------------------------------------------------------------------------------------------


def check_load(work: Path, requests: int, failures: list[str]) -> dict[str, Any]:
    """``requests`` predictions at once, again and again while it learns."""
    model = work / "load"
    make_model(model, NAMES[:5], minutes=0.5)
    known = digits()
    files = [encoded(image) for name in NAMES[:7] for image in known[name][40:100]]
    rounds = []
    with serving(model) as server:
        job = server.teach("nine", known["nine"][:100])  # some minutes
        while server.get(f"/jobs/{job}")["share"] == 0:
            time.sleep(0.1)

        def ask(index: int) -> tuple[int, float, int]:
            started = time.monotonic()
            status, body = server.post("/predict", [("files", "x.png", files[index % len(files)])])
            version = json.loads(body)["answers"][0]["version"] if status == 200 else 0
            return status, time.monotonic() - started, version

        with ThreadPoolExecutor(requests) as pool:
            while len(rounds) < 5:
                state = server.get(f"/jobs/{job}")["state"]
                found = list(pool.map(ask, range(requests)))
                seconds = sorted(time_ for _, time_, _ in found)
                bad = sum(status != 200 for status, _, _ in found)
                learning = state == server.get(f"/jobs/{job}")["state"] == "running"
                rounds.append(
                    {"learning": learning, "failed": bad, "slowest": seconds[-1], "median": seconds[requests // 2]}
                )
                if bad:
                    failures.append(f"load: {bad} of {requests} predictions failed")
                if seconds[-1] > SLOWEST:
                    failures.append(f"load: a prediction took {seconds[-1]:.1f} s")
        text = urllib.request.urlopen(server.address + "/metrics", timeout=60).read().decode()
        batches = next(
            float(line.split()[1]) for line in text.splitlines() if line.startswith("morecl_batch_images_count")
        )
        server.send(f"/jobs/{job}/cancel", b"", "text/plain")
        peak = server.peak()
    if not any(one["learning"] for one in rounds):
        failures.append("load: the lesson was over before the predictions began")
    return {"requests": requests, "rounds": rounds, "batches": batches, "memory_mb": peak}


# ---- kill -9 --------------------------------------------------------------------------------------------------


def answers(model: Path, probes: np.ndarray[Any, Any]) -> tuple[list[str], list[Any]]:
    classifier = ModelFolder(model).load(device="cpu")
    return classifier.classes, [(a.label, a.ood_score) for a in classifier.predict(probes)]


def check_kills(work: Path, kills: int, failures: list[str], rng: random.Random) -> dict[str, Any]:
    """kill -9 of the teaching process and of the server, in turn; then the model must load and answer."""
    model = work / "kill"
    make_model(model, NAMES[:3], minutes=0.05, **SMALL)
    known = digits()
    probes = np.stack([image for name in NAMES[:5] for image in known[name][-3:]])
    before = answers(model, probes)
    outcomes: Counter[str] = Counter()
    server = Server(model)
    job = server.teach("nine", known["nine"][:40])
    while server.get(f"/jobs/{job}")["state"] != "done":
        time.sleep(0.05)
    after = answers(model, probes)
    server.send("/undo", b"", "text/plain")
    for number in range(kills):
        whom = ("teacher", "server")[number % 2]
        job = server.teach("nine", known["nine"][:40])
        # Half of the moments are spread over the lesson, half fall where the new version is written and loaded.
        share, more = (rng.uniform(0, 0.9), 0.0) if number % 4 < 2 else (0.95, rng.uniform(0, 2))
        while (shown := server.get(f"/jobs/{job}"))["share"] < share and shown["state"] in ("queued", "running"):
            time.sleep(0.02)
        time.sleep(more)
        teacher = server.teacher()
        if whom == "server":
            server.stop(signal.SIGKILL)
        elif teacher is not None:
            os.kill(teacher, signal.SIGKILL)
            while server.get(f"/jobs/{job}")["state"] == "running":
                time.sleep(0.05)
        if teacher is not None:
            until = time.monotonic() + 20
            while is_alive(teacher) and time.monotonic() < until:
                time.sleep(0.05)
            if is_alive(teacher):
                failures.append(f"kill {number}: the teaching process goes on without its server")
        try:
            found = answers(model, probes)
        except Exception as error:
            failures.append(f"kill {number} ({whom}): the model cannot be loaded: {error!r}")
            break
        outcome = "as before" if found == before else "as after" if found[0] == after[0] else "neither"
        outcomes[f"{whom}, {outcome}"] += 1
        print(f"kill {number + 1}: {whom} at {share:.2f} + {more:.1f} s: {outcome}", file=sys.stderr, flush=True)
        if outcome == "neither":
            failures.append(f"kill {number} ({whom}): it answers neither as before nor as after")
        if whom == "server":
            server = Server(model)
        while any(one["state"] in ("queued", "running") for one in server.get("/jobs")["jobs"]):
            time.sleep(0.1)
        if len(server.get("/info")["versions"]) > 1:
            server.send("/undo", b"", "text/plain")
    server.stop()
    return {"kills": sum(outcomes.values()), "outcomes": dict(outcomes)}


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- fuzzed uploads -------------------------------------------------------------------------------------------


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, bits: int = 8, colour: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


class Fuzzer:
    """Makes bad files and bad requests."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        picture = np.random.default_rng(0).integers(0, 256, (48, 64, 3)).astype(np.uint8)
        self.good = [encoded(picture, kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF")]
        self.bombs = [png(side, side, zlib.compress(bytes((1 + 3 * side) * side), 9)) for side in (7000, 7100, 12_000)]
        self.other = [b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"PK\x03\x04" + b"\0" * 60]
        self.other += [
            b"\x80\x04\x95cos\nsystem\n(S'false'\ntR.",
            b"<svg xmlns='x'><script/></svg>",
            b"\x93NUMPY\x01\0",
        ]

    def file(self) -> tuple[str, bytes]:
        """Which kind, and the content."""
        rng, good = self.rng, self.rng.choice(self.good)
        kind = rng.choices(
            ["truncated", "flipped", "huge", "bomb", "wrong type", "random", "spliced"], [25, 35, 12, 0.7, 8, 10, 10]
        )[0]
        if kind == "truncated":
            return kind, good[: rng.randrange(len(good))]
        if kind == "flipped":
            data = bytearray(good)
            for _ in range(rng.choice((1, 2, 5, 50))):
                data[rng.randrange(min(len(data), rng.choice((64, len(data)))))] = rng.randrange(256)
            return kind, bytes(data)
        if kind == "huge":
            sides = [rng.choice((0, 1, 2**15, 2**16, 10**6, 2**31 - 1, 2**32 - 1)) for _ in range(2)]
            return kind, png(
                *sides, zlib.compress(bytes(1000)), rng.choice((1, 8, 16, 77)), rng.choice((0, 2, 3, 6, 9))
            )
        if kind == "bomb":
            return kind, rng.choice(self.bombs)
        if kind == "wrong type":
            return kind, rng.choice(self.other)
        if kind == "random":
            return kind, rng.randbytes(rng.randrange(3000))
        cut, other = rng.randrange(len(good)), rng.choice(self.good)
        return kind, good[:cut] + other[rng.randrange(len(other)) :]

    def name(self) -> str:
        names = ["x.png", "../../../etc/passwd", "..", "a\0b.png", "/etc/shadow", "C:\\x.png", 'q"uote.png', "\r\nX: y"]
        return self.rng.choice([*names, "ü\u202e🙂.jpg", "x" * 5000, "", "con", "%2e%2e%2f", "{{7*7}}"])

    def request(self) -> tuple[str, str, bytes, str]:
        """Which kind, path, body and content type."""
        kind, data = self.file()
        path = self.rng.choices(["/predict", "/predict?nearest=3&top=2", "/teach"], [6, 3, 1])[0]
        parts: list[Part] = [("files", self.name(), data)]
        if path == "/teach":  # never a lesson: its names or images are bad
            parts = [("name", "", self.rng.choice([b"unknown", b"", b"\0", b"x" * 500, b"zero"])), *parts]
        body, content_type = form(parts)
        if self.rng.random() < 0.08:  # and the form itself
            kind, cut = "bad form", self.rng.randrange(len(body))
            body = self.rng.choice([body[:cut], body[cut:], body.replace(b"\r\n", b"\n"), self.rng.randbytes(300)])
            content_type = self.rng.choice([content_type, "multipart/form-data", "application/json", "text/plain", ""])
        return kind, path, body, content_type


def check_uploads(work: Path, uploads: int, failures: list[str], seed: int) -> dict[str, Any]:
    """Bad uploads from four clients at once, and good ones in between that must be answered rightly."""
    model = work / "uploads"
    make_model(model, NAMES[:3], minutes=0.05, **SMALL)
    statuses: Counter[str] = Counter()
    lock = threading.Lock()
    good = encoded(digits()["zero"][50])
    with serving(model) as server:
        right = json.loads(server.post("/predict", [("files", "x.png", good)])[1])["answers"]
        first = server.peak()

        def client(number: int) -> None:
            fuzzer = Fuzzer(random.Random(seed * 100 + number))
            connection = server.connect()
            for index in range(uploads // 4):
                kind, path, body, content_type = fuzzer.request()
                try:
                    status, answer = server.send(path, body, content_type, connection)
                except (OSError, http.client.HTTPException) as error:  # it may hang up on a request it has refused
                    connection.close()
                    status, answer = 0, repr(error).encode()
                with lock:
                    statuses[f"{kind}: {status}"] += 1
                    if status >= 500 or status == 0:
                        failures.append(f"upload: {kind} to {path} gave {status}: {answer[:200]!r}")
                    elif status != 200 and not json.loads(answer)["error"]:
                        failures.append(f"upload: {kind} gave {status} without a reason")
                if index % 50 == 0:
                    again = json.loads(server.post("/predict", [("files", "x.png", good)])[1])["answers"]
                    if again[0]["top"][0]["label"] != right[0]["top"][0]["label"]:
                        failures.append("upload: a good image is answered differently")
            connection.close()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(client, range(4)))
        if server.process.poll() is not None:
            failures.append(f"upload: the server ended with {server.process.returncode}")
        peak, jobs = server.peak(), server.get("/jobs")["jobs"]
        if jobs:
            failures.append(f"upload: {len(jobs)} lessons were accepted")
    return {"uploads": uploads // 4 * 4, "statuses": dict(sorted(statuses.items())), "memory_mb": [first, peak]}


# ---- fuzzed model folders -------------------------------------------------------------------------------------


def check_folders(work: Path, folders: int, failures: list[str], rng: random.Random) -> dict[str, Any]:
    """A damaged model is refused with a message, or it loads; nothing else may happen."""
    model, copy = work / "folders", work / "damaged"
    make_model(model, NAMES[:2], minutes=0.05, **SMALL)
    outcomes: Counter[str] = Counter()
    for number in range(folders):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(model, copy)
        file = rng.choice([path for path in sorted(copy.rglob("*")) if path.is_file() and path.name != ".lock"])
        kind = rng.choice(["flipped", "truncated", "removed", "emptied", "folder", "swapped", "JSON"])
        damage(file, kind, rng, copy)
        try:
            ModelFolder(copy).load(device="cpu").predict(np.zeros((1, 8, 8, 3), np.uint8))
            outcomes[f"{kind}: loads"] += 1
        except InputError:
            outcomes[f"{kind}: refused"] += 1
        except Exception as error:
            outcomes[f"{kind}: {type(error).__name__}"] += 1
            failures.append(f"folder {number}: {kind} {file.name}: {error!r:.300}")
    return {"folders": folders, "outcomes": dict(sorted(outcomes.items()))}


def damage(file: Path, kind: str, rng: random.Random, model: Path) -> None:
    data = bytearray(file.read_bytes())
    file.unlink()  # it may be shared between versions by a hard link
    if kind == "flipped":
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(min(len(data), rng.choice((100, len(data)))))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    elif kind == "truncated":
        file.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "emptied":
        file.touch()
    elif kind == "folder":
        file.mkdir()
    elif kind == "swapped":
        others = [path for path in sorted(model.rglob("*")) if path.is_file() and path.stat().st_size]
        file.write_bytes(rng.choice(others).read_bytes())
    elif kind == "JSON":
        values = [
            "null",
            "[]",
            "{}",
            '{"format": 1}',
            "[" * 5000,
            '{"versions": [{"number": 1e999}]}',
            "NaN",
            '"\ud800"',
        ]
        file.write_bytes(rng.choice(values).encode("utf-8", "surrogatepass"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--uploads", type=int, default=9000)
    parser.add_argument("--folders", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["load", "kills", "uploads", "folders"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    failures: list[str] = []
    record: dict[str, Any] = {"morecl": morecl.__version__, "cores": os.cpu_count(), "seed": given.seed}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        checks = {
            "load": lambda: check_load(work, given.requests, failures),
            "kills": lambda: check_kills(work, given.kills, failures, random.Random(given.seed)),
            "uploads": lambda: check_uploads(work, given.uploads, failures, given.seed),
            "folders": lambda: check_folders(work, given.folders, failures, random.Random(given.seed)),
        }
        for name, check in checks.items():
            if given.only in (None, name):
                started = time.monotonic()
                busy = os.getloadavg()[0]
                record[name] = {**check(), "seconds": time.monotonic() - started, "load_before": busy}
                print(name, json.dumps(record[name], indent=2), flush=True)
    record["failures"] = failures
    print(f"{len(failures)} failures", *failures[:20], sep="\n")
    if given.out:
        write_json(given.out, record)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
