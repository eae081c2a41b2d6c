"""Debian's chromium, headless: a page is opened, asked, and looked at, by the DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

_PATIENCE_S = 120.0  # on a machine with much other work
CHROMIUM = shutil.which("chromium")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
]


class Browser:
    """One page of a browser without network; ``console`` collects what the page writes there, and its errors."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, from_write = os.pipe()
        # The browser reads commands at descriptor 3 and writes answers at 4.
        script = f'exec "$@" 3<&{to_read} 4>&{from_write}'
        flags = [*_FLAGS, f"--user-data-dir={self._profile.name}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", CHROMIUM, *flags, "about:blank"],
            pass_fds=(to_read, from_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self.console: list[str] = []
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)  # the browser ends with its pipe
        os.close(self._from)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, is_dark: bool = False, has_script: bool = True
    ) -> None:
        """Open a file and wait until it has loaded."""
        self.console.clear()
        self._events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setScriptExecutionDisabled", value=not has_script)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read()

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def requested(self) -> list[str]:
        """Return every address that the page has asked for."""
        return [e["params"]["request"]["url"] for e in self._events if e["method"] == "Network.requestWillBeSent"]

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Send "Moved", "Pressed" or "Released" with the left button."""
        button = "none" if kind == "Moved" else "left"
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button=button, clickCount=1)

    def screenshot(self, path: Path, *, is_whole: bool = True) -> None:
        """Write a PNG of the page, to its end or as far as it is in view."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=is_whole)["data"]
        path.write_bytes(base64.b64decode(picture))

    def _read(self) -> dict[str, Any]:
        """Return the next message; what is written to the console is collected on the way."""
        while b"\0" not in self._buffer:
            is_there, _, _ = select.select([self._from], [], [], _PATIENCE_S)
            received = os.read(self._from, 1 << 16) if is_there else b""
            assert received, "the browser does not answer" if not is_there else "the browser has ended"
            self._buffer += received
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(message["params"]["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.console.append(json.dumps(message["params"]["args"]))
            case "Log.entryAdded":
                self.console.append(message["params"]["entry"]["text"])
            case str():
                self._events.append(message)
        return message
