"""Chromium, for the tests that look at pages, and what to install where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE = 600_000
"""Milliseconds until a page that does not answer fails its test: a busy machine answers, but late."""


def missing() -> str:
    """What to install before a page can be looked at; "" where all is there."""
    if find_spec("playwright") is None:
        return 'needs Playwright: pip install "lowtide[dev]"'
    if CHROMIUM is None:
        return f"needs Chromium: apt-get install chromium (looked on the path for {', '.join(NAMES)})"
    return ""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE)
        yield found
        found.close()
