"""A headless Chromium over the DevTools protocol, spoken through a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_LAUNCH = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads from 3 and writes to 4; the pipes are put there in a process of its own."""


class Browser:
    """One page. What it logs as an error, and every exception, is kept."""

    def __init__(self, program: str, profile: Path, *, timeout: float = 60) -> None:
        self._deadline = time.monotonic() + timeout
        ours, theirs = os.pipe(), os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--hide-scrollbars",
        ]
        options += ["--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"]
        command = [program, *options, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(ours[0]), str(theirs[1]), *command],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (ours[0], theirs[1]):
            os.close(end)
        self._write, self._read = ours[1], theirs[0]
        self._rest, self._number = b"", 0
        self.session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        """What the page asked for, by URL."""
        self._loaded = False
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        [target] = [each for each in targets if each["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method, and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, self._deadline - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        said = json.loads(message)
        self._note(said.get("method"), said.get("params"))
        return said

    def _note(self, method: str | None, params: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
            self.errors.append(json.dumps(params["args"])[:2000])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, file: Path) -> None:
        """Open a file, and wait until it is loaded."""
        self._loaded = False
        self.call("Page.navigate", url=file.as_uri())
        while not self._loaded:
            self._next()

    def size(self, width: int, height: int, *, dark: bool) -> None:
        """The window's size in CSS pixels, and what the system prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def eval(self, script: str) -> Any:
        """What an expression gives, promises awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def click(self, place: str, done: str) -> bool:
        """Click on the middle of what an expression gives as a rectangle, until another one is true.

        Charts notice clicks only where they have noticed the mouse before, which takes them a while on a slow machine.
        """
        return any(self._clicked(place, done) for _ in range(10))

    def _clicked(self, place: str, done: str) -> bool:
        x, y = self.eval(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({place})")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 1, y=y)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.eval("new Promise((done) => setTimeout(done, 200))")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        return bool(
            self.eval(
                f"new Promise((done) => {{ let times = 0; const look = () => {{ if ({done}) done(true);"
                " else if (times++ > 20) done(false); else setTimeout(look, 50); }; look(); })"
            )
        )

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key where the focus is."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more
            )

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        """Write a PNG, of the whole page or of what is seen."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def print(self, file: Path) -> None:
        """Write a PDF."""
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))
