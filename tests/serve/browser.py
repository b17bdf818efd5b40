"""Chromium without a window, driven over its pipe for developers' tools."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """A page. `complaints` are errors that its console showed, `requests` the addresses that it asked for."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._numbers = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{name}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command; record the events that arrive meanwhile."""
        self._numbers += 1
        command = {"id": self._numbers, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._numbers:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def open(self, url: str, width: int, height: int = 800) -> None:
        """Show a page in a window of some size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        response = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in response, response["exceptionDetails"]
        return response["result"].get("value")

    def until(self, expression: str) -> None:
        """Ask again until an expression is true."""
        while not self.value(f"!!({expression})"):
            time.sleep(0.02)

    def picture(self, file: Path) -> None:
        """Return the visible page as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._from, 2**16)
            assert more, "the browser has ended"
            self._buffer += more
        message, self._buffer = self._buffer.split(b"\0", 1)
        event: dict[str, Any] = json.loads(message)
        return event

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif message["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def browsing(profile: Path) -> Iterator[Tab]:
    """Yield a browser with one page."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}",
    ]  # fmt: skip
    to_browser, from_browser = os.pipe(), os.pipe()
    # The browser reads descriptor 3 and writes descriptor 4; those of the pipes may be 3 and 4 themselves.
    shell = f'exec 5<&{to_browser[0]} 6>&{from_browser[1]}; exec 3<&5 4>&6; exec "$@"'
    running = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Tab(to_browser[1], from_browser[0])
    finally:
        running.terminate()
        running.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
