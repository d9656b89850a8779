"""The browser that pages are tested in, and what drives it."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

PACKAGES = ("chromium", "chromium-driver")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser, installed where this may be done; else the tests ask for it."""
    names = ("chromium", "chromium-browser", "google-chrome")
    there = any(map(shutil.which, names)) and shutil.which("chromedriver")
    if not there and hasattr(os, "geteuid") and os.geteuid() == 0:
        for words in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            try:
                subprocess.run(
                    ["apt-get", "-q", *words], capture_output=True, check=False, timeout=240
                )
            except (FileNotFoundError, subprocess.TimeoutExpired):
                break
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium here and none could be installed (Debian package `chromium`)")
    return found


@pytest.fixture(scope="session")
def chromedriver(chromium) -> str:
    """ChromeDriver, which comes with the browser where that had to be installed."""
    found = shutil.which("chromedriver")
    if found is None:
        pytest.skip("no ChromeDriver here (Debian package `chromium-driver`)")
    return found
