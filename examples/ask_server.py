"""Ask a running `morecl serve` about images, or teach it a class. Python's standard library is all it needs.

    python examples/ask_server.py photo.jpg other.jpg
    python examples/ask_server.py --teach "oak leaf" leaves/*.jpg

The server's address: --server, default http://127.0.0.1:8000. Its token, if it has one: the variable MORECL_TOKEN.
The exit code is 1 if a file cannot be read, or if the lesson fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any


def call(address: str, body: bytes | None = None, kind: str = "") -> Any:
    """GET, or POST if there is a body. A refusal ends the program with the server's reason."""
    headers = {"Content-Type": kind} if body else {}
    if token := os.environ.get("MORECL_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            told = dict(json.load(error))
        except (TypeError, ValueError):  # from a proxy, not from the server
            told = {}
        if "answers" in told:  # none of the files can be read
            return told
        sys.exit(f"{error.code}: {told.get('error', error.reason)}")
    except OSError as error:
        sys.exit(f"{address} cannot be reached: {error}")


def send(server: str, path: str, files: list[Path], fields: dict[str, str] | None = None) -> Any:
    """POST the files, unless they are more than the server takes: it would hang up without a word that arrives."""
    body, kind = form(fields or {}, files)
    most = call(f"{server}/info")["limits"]["request_bytes"]
    if len(body) > most:
        have = f"{len(files)} files have {len(body) / 2**20:.0f} MiB; the server takes {most / 2**20:.0f} at once"
        sys.exit(f"{have}: send fewer at a time, and teach a large class in several lessons")
    return call(f"{server}/{path}", body, kind)


def form(fields: dict[str, str], files: list[Path]) -> tuple[bytes, str]:
    """multipart/form-data, and the header that goes with it."""
    boundary = uuid.uuid4().hex
    parts = [f'name="{name}"\r\n\r\n{text}\r\n'.encode() for name, text in fields.items()]
    parts += [b'name="files"; filename="%b"\r\n\r\n%b\r\n' % (quoted(file.name), content(file)) for file in files]
    start = f"--{boundary}\r\nContent-Disposition: form-data; ".encode()
    body = b"".join(start + part for part in parts) + f"--{boundary}--\r\n".encode()
    return body, f"multipart/form-data; boundary={boundary}"


def quoted(name: str) -> bytes:
    """A file's name as browsers send it."""
    for sign, code in (('"', "%22"), ("\r", "%0D"), ("\n", "%0A")):
        name = name.replace(sign, code)
    return name.encode(errors="replace")


def content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        print(f"{file}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def ask(server: str, files: list[Path], at_once: int = 8) -> int:
    """Print an answer for each file. The exit code: 1 if one could not be read."""
    code = 0
    for start in range(0, len(files), at_once):
        chosen = files[start : start + at_once]
        for file, answer in zip(chosen, send(server, "predict", chosen)["answers"], strict=True):
            if "error" in answer:
                print(f"{file}: {answer['error']}", file=sys.stderr)
                code = 1
            elif answer["unknown"]:
                print(f"{file}: unknown, nearest is {answer['top'][0]['label']}")
            else:
                print(f"{file}: {answer['label']}, {answer['confidence']:.0%} sure")
    return code


def teach(server: str, name: str, files: list[Path]) -> int:
    """Start a lesson and wait for its end. Images of a class that it knows are added to it. The exit code: 0 if done.

    The server learns on if this program is stopped.
    """
    job = send(server, "teach", files, {"name": name, "more": "true"})
    while job["state"] in ("queued", "running"):
        print(f"{job['share']:4.0%} {job['step']}", flush=True)
        time.sleep(1)
        job = call(f"{server}/jobs/{job['id']}")
    for problem in job["unreadable"]:
        print(f"not readable: {problem}", file=sys.stderr)
    if job["state"] == "done":
        print("done" if job["note"] is None else f"done: {job['note']}")
        return 0
    print(job["state"] if job["error"] is None else f"{job['state']}: {job['error']}", file=sys.stderr)
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--teach", metavar="NAME", help="teach the server this class instead of asking")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    given = parser.parse_args()
    sys.exit(teach(given.server, given.teach, given.files) if given.teach else ask(given.server, given.files))


if __name__ == "__main__":
    main()
