"""A real browser without a window, driven over its own pipe (Chrome DevTools Protocol): no driver, no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
    "--no-first-run", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
DEADLINE_SECONDS = 90.0


def find_browser() -> str | None:
    """A Chromium of this host."""
    return next((path for name in _PROGRAMS if (path := shutil.which(name))), None)


class Page:
    """A page, and what it has logged as errors."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.process, self._to, self._back = process, to, back
        self._number, self._session, self._data = 0, "", b""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol; returns its result."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._to, json.dumps(request).encode() + b"\0")
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            message = self._read(end)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message)
                return dict(message["result"])
            self._note(message)

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._back, 1 << 20)
            assert data, "the browser has ended"
            self._data += data
        text, _, self._data = self._data.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif message.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "assert"}:
            self.errors.append(json.dumps([each.get("value", each.get("description")) for each in parameters["args"]]))
        elif message.get("method") == "Network.loadingFailed" and parameters["errorText"] != "net::ERR_ABORTED":
            # what is under way when a page is left is aborted
            self.errors.append(f"{parameters['type']} did not load: {parameters['errorText']}")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = DEADLINE_SECONDS) -> Any:
        """Waits until an expression is true; returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, (expression, self.evaluate("document.body.innerText"), self.errors)
            select.select([], [], [], 0.02)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def set_dark(self, is_dark: bool) -> None:
        value = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, "/": 191}[key]
        text = {"text": {"Enter": "\r"}.get(key, key)} if key in {"Enter", "/"} else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def screenshot(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def accessible_names(self, role: str) -> list[str]:
        """Names of the elements with a role, as screen readers get them."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [n.get("name", {}).get("value", "") for n in nodes if n.get("role", {}).get("value") == role]


@contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own, which ends with the block."""
    program = find_browser()
    assert program is not None
    their_in, to = os.pipe()
    back, their_out = os.pipe()
    # the protocol wants descriptors 3 and 4
    script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
    command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", str(their_in), str(their_out), *command],
        pass_fds=(their_in, their_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Page(process, to, back)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(DEADLINE_SECONDS)
        os.close(to)
        os.close(back)
