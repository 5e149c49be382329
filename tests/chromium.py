"""Headless Chromium for tests of pages: `with open_page(path) as page:`.

Debian's chromium and chromium-driver; `chromium_or_skip` installs them if this process is root.
Chromium is started once per process and closed at its end; each page gets a tab of its own.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
)
DESKTOP, PHONE = (1200, 900), (390, 844)


@cache
def missing() -> str | None:
    """Install what is missing, if possible; return why there is no Chromium, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "no selenium: pip install selenium"
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return None
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "no chromium and chromedriver, and no apt-get as root to install them"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = ["chromium", "chromium-driver", "fonts-dejavu-core"]
    for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "-q", *words], env=environment, capture_output=True, text=True, check=False
        )
    return None if done.returncode == 0 else f"apt-get: {done.stderr.strip()[-300:]}"


def chromium_or_skip() -> Any:
    """Return the WebDriver of this process, started at the first call."""
    why = missing()
    if why is not None:
        pytest.skip(why)
    return _driver()


@cache
def _driver() -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    profile = tempfile.mkdtemp(prefix="selftask-chromium-")
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))

    def close() -> None:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)

    atexit.register(close)
    return driver


class Page:
    """A page in the browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url
        self.requests: list[str] = []  # addresses asked for so far, that of the page left out

    def find(self, css: str) -> Any:
        """Return the first element that matches a CSS selector."""
        return self.driver.find_element("css selector", css)

    def find_all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def run(self, script: str, *args: Any) -> Any:
        """Return the result of JavaScript, such as ``return document.title``."""
        return self.driver.execute_script(script, *args)

    def console(self) -> list[str]:
        """Return messages of the console since the last call; a good page has none."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def network(self) -> list[str]:
        """Return the addresses that the page asked for, but for itself and data: addresses."""

        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        own = self.url.partition("#")[0]
        return [
            address
            for address in self.requests
            if address.partition("#")[0] != own
            and not address.startswith(("data:", "blob:", "chrome:"))
        ]

    def dark(self, on: bool = True) -> None:
        """Set prefers-color-scheme."""
        value = "dark" if on else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def size(self, width: int, height: int) -> None:
        """Set the size of the visible part, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than the window: more than 0 scrolls sideways."""
        return int(
            self.run("return document.documentElement.scrollWidth - document.body.clientWidth")
        )

    def shot(self, path: str | Path, *, whole: bool = True) -> None:
        """Save a screenshot as PNG, of the whole page or its visible part."""

        shown = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": whole}
        )
        Path(path).write_bytes(base64.b64decode(shown["data"]))


@contextmanager
def open_page(
    page: str | Path, *, size: tuple[int, int] = DESKTOP, dark: bool = False
) -> Iterator[Page]:
    """Context manager that opens a file or an address; skips the test without Chromium."""
    driver = chromium_or_skip()
    url = page if isinstance(page, str) and "://" in page else Path(page).resolve().as_uri()
    driver.get_log("browser")
    driver.get_log("performance")
    before = driver.current_window_handle
    driver.switch_to.new_window("tab")
    opened = Page(driver, url)
    try:
        opened.size(*size)
        opened.dark(dark)
        driver.get(url)
        yield opened
    finally:
        driver.close()
        driver.switch_to.window(before)
