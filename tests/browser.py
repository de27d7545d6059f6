"""A real browser for tests: Chromium, driven through its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe"]


class Browser:
    """One page. ``console``: what scripts logged or threw; ``requested``: addresses that the page asked for."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 900):
        assert CHROMIUM is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        self.requested: list[str] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, wanted: bool) -> None:
        features = {"prefers-color-scheme": "dark" if wanted else "light", "prefers-reduced-motion": "reduce"}
        values = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=values)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, f"{script}: {done.get('exceptionDetails')}"
        return done["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60.0) -> Any:
        """The value of an expression, once it is true."""
        until = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < until, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.1)
        return value

    def choose(self, selector: str, files: Sequence[Path]) -> None:
        """Choose files in a file input, as a user does."""
        found = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")["result"]
        self.call("DOM.setFileInputFiles", files=[str(file) for file in files], objectId=found["objectId"])

    def press_enter(self) -> None:
        self._press("Enter", 13, "\r")

    def press_escape(self) -> None:
        self._press("Escape", 27)

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        file.write_bytes(base64.b64decode(data))

    def _press(self, key: str, number: int, text: str = "") -> None:
        for kind, written in (("keyDown" if text else "rawKeyDown", text), ("keyUp", "")):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, text=written, windowsVirtualKeyCode=number
            )

    def _receive(self, seconds: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], seconds)[0], "the browser does not answer"
            part = os.read(self._read, 2**20)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._hear(message.get("method", ""), message.get("params", {}))
        return message

    def _hear(self, event: str, details: dict[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(part.get("value")) for part in details["args"]))
        elif event == "Runtime.exceptionThrown":
            self.console.append(str(details["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.console.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.requested.append(details["request"]["url"])
