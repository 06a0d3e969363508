"""A headless Chromium over its debugging pipe: no driver, no network, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE_S = 120.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--window-size=1200,1600", "--remote-debugging-pipe",
)  # fmt: skip


def find() -> str | None:
    """The browser's program, None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def _pipe() -> list[int]:
    """A pipe whose ends are not the descriptors that the browser wants its own to be."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved


class Browser:
    """The process, for as many pages as are wanted, one after the other: it takes longer to start than they take.

    Args:
        profile: The folder that it may write to.
    """

    def __init__(self, profile: Path) -> None:
        to_browser, self._write = _pipe()
        self._read, from_browser = _pipe()
        command = [str(find()), *FLAGS, f"--user-data-dir={profile}"]
        # The browser reads commands from descriptor 3 and answers on 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"', "bash", *command],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number = b"", 0

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def send(self, method: str, session: str, arguments: dict[str, Any]) -> int:
        """Sends a command of the DevTools protocol, to the browser itself if the session is empty; its number."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if session:
            command["sessionId"] = session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        return self._number

    def next(self, deadline: float) -> dict[str, Any]:
        """The next answer or event."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            if not data:
                raise AssertionError("Chromium does not answer")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


class Page:
    """One page, driven as a user would: opened, clicked, looked at.

    Attributes:
        requests: Addresses the page asked for.
        problems: What it complained about.
        received: What has come over its web sockets, in binary frames.
    """

    def __init__(self, browser: Browser, address: str) -> None:
        self._browser, self._session = browser, ""
        self._deadline = time.monotonic() + PATIENCE_S
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.received = b""
        self._events: list[str] = []
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self._events:
            self._take(browser.next(self._deadline))

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._session = ""
            self.call("Target.closeTarget", targetId=self._target)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; its result."""
        number = self._browser.send(method, self._session, arguments)
        while True:
            message = self._browser.next(self._deadline)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._take(message)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """A click at that place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """A key that writes a character."""
        self.call("Input.dispatchKeyEvent", type="char", text=key)

    def until_received(self, *texts: bytes) -> None:
        """Waits until one of them has come over a web socket."""
        while not any(text in self.received for text in texts):
            self._take(self._browser.next(self._deadline))

    def screenshot(self) -> bytes:
        """A PNG of the window."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("sessionId") != self._session:  # of a page before
            return
        method = message.get("method", "")
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif method == "Network.webSocketFrameReceived" and message["params"]["response"]["opcode"] == 2:
            self.received += base64.b64decode(message["params"]["response"]["payloadData"])
        elif method in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(message["params"]))
