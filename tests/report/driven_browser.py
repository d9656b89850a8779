"""Chromium driven like a person drives it, over ChromeDriver's W3C WebDriver protocol."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 1300, 1000


class DrivenBrowser:
    """One window; close it at the end.

    Args:
        driver: ChromeDriver's path.
        browser: Chromium's path.
        folder: For its profile and its log.
    """

    def __init__(self, driver: str, browser: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            started = re.search(r"started successfully on port (\d+)", line)
            if started:
                break
        else:
            raise RuntimeError(f"{driver} did not start")
        self._address = f"http://127.0.0.1:{started[1]}/session"
        options = {
            "binary": browser,
            "args": [
                "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={folder / 'driven'}", f"--window-size={WIDTH},{HEIGHT}",
            ],
        }  # fmt: skip
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/{made['sessionId']}"

    def close(self) -> None:
        """End browser and driver."""
        try:
            self._call("DELETE", "")
        finally:
            self._process.terminate()
            self._process.wait(20)

    def open(self, page: Path) -> None:
        """Show a file; returns when it has been loaded."""
        self._call("POST", "/url", {"url": page.as_uri()})

    def ask(self, expression: str) -> Any:
        """Value of a JavaScript expression."""
        return self._call("POST", "/execute/sync", {"script": f"return {expression}", "args": []})

    def wait(self, expression: str, holds: Callable[[Any], bool] = bool) -> Any:
        """The expression's value, once it holds."""
        deadline = time.monotonic() + 30.0
        while True:
            value = self.ask(expression)
            if holds(value):
                return value
            assert time.monotonic() < deadline, f"{expression} stayed {value}"
            time.sleep(0.1)

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element that is scrolled into the window's middle."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{found} !== null")
        self.ask(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.ask(f"{found}.getBoundingClientRect().toJSON()")
        return box["x"], box["y"], box["width"], box["height"]

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer there, in pixels of the window."""
        self._act([self._move(x - 3, y), self._move(x, y)])

    def click(self, selector: str) -> None:
        """Click into an element's middle."""
        x, y, width, height = self.place(selector)
        self._act([self._move(x + width / 2, y + height / 2), *self._press()])

    def double_click(self, x: float, y: float) -> None:
        """Click twice."""
        self._act([self._move(x, y), *self._press(), *self._press()])

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press, move, let go."""
        down, up = self._press()
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        self._act([self._move(*start), down, self._move(*middle), self._move(*end), up])

    def console(self) -> list[str]:
        """What the console said since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def _act(self, actions: list[dict[str, Any]]) -> None:
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
        self._call("POST", "/actions", {"actions": [{**pointer, "actions": actions}]})

    @staticmethod
    def _move(x: float, y: float) -> dict[str, Any]:
        return {"type": "pointerMove", "duration": 60, "x": round(x), "y": round(y)}

    @staticmethod
    def _press() -> list[dict[str, Any]]:
        return [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]

    def _call(self, method: str, path: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self._address + path, data, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
