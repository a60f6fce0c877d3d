"""The site that `make docs` writes: built without a warning, with links that lead somewhere, and offline."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

import lowtide
from browsers import PATIENCE, chromium
from once import once
from pages import EXAMPLES, PAGES, ROOT

pytestmark = pytest.mark.slow

pytest.importorskip("sphinx", reason="Sphinx is not installed (the extra dev)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as the Makefile does."""
    recipe = re.search(r"^docs:.*?-m (sphinx .+?) site$", (ROOT / "Makefile").read_text(), re.M | re.S)
    assert recipe is not None
    command = [sys.executable, "-m", *recipe[1].split()]

    def build(out: Path) -> None:
        built = subprocess.run([*command, str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr

    return once(tmp_path_factory, "site", build)


class Found(HTMLParser):
    """The links of a page, what it loads, and its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        for name in ("src", "href"):
            if tag in ("img", "link", "script", "iframe") and given.get(name) not in (None, "#"):
                self.loads.append(str(given[name]))


@cache
def found(page: Path) -> Found:
    return Found(page.read_text(encoding="utf-8"))


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_page_and_example_is_there(site: Path) -> None:
    for source in [*PAGES, *EXAMPLES]:
        assert (site / source.relative_to(ROOT)).with_suffix(".html").exists(), source
    assert (site / "index.html").exists()


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    for page in pages(site):
        for link in found(page).links:
            path, anchor = urldefrag(unquote(link))
            if path.startswith("http"):
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in found(target).ids, f"{page.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in pages(site):
        for load in found(page).loads:
            assert (page.parent / load.partition("?")[0]).exists(), f"{page.name}: {load}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", sheet.read_text(encoding="utf-8")), sheet


def test_every_public_name_is_in_the_api_once(site: Path) -> None:
    ids = [id_ for page in sorted((site / "docs" / "api").glob("*.html")) for id_ in found(page).ids]
    for name in lowtide.__all__:
        known = f"module-lowtide.{name}" if name == "solve" else f"lowtide.{name}"
        assert ids.count(known) == 1, name


@pytest.fixture
def page(site: Path) -> Iterator[Any]:
    """A page in a browser; whatever it asks of a network fails the test."""
    asked: list[str] = []
    with chromium() as browser:
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.set_default_timeout(PATIENCE)
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto((site / "index.html").as_uri())
        opened.wait_for_url("**/README.html")
        yield opened
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


@pytest.mark.browser
def test_the_site_in_a_browser(page: Any) -> None:
    """The front page leads to the others, the search finds a name, and pages fit any screen."""
    assert page.title() == "Lowtide"
    page.fill("input[name=q]", "while_scan")
    page.press("input[name=q]", "Enter")
    page.locator("ul.search a", has_text="while_scan").first.wait_for()
    page.locator(".sidebar-tree a", has_text="Overview").click()
    page.wait_for_url("**/how-it-works.html")
    for width in (390, 800, 1050, 1330, 1560, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.browser
def test_dark_and_light_also_change_the_pictures(page: Any) -> None:
    page.goto(page.url.replace("README.html", "docs/how-it-works.html"))
    image = page.locator("img[src*='keep_all']")
    image.scroll_into_view_if_needed()
    place = image.bounding_box()
    inside = {"x": place["x"] + 20, "y": place["y"] + 20, "width": 200, "height": 100}
    shown = {}
    for theme in ("light", "dark", "auto"):
        page.evaluate("theme => document.body.dataset.theme = theme", theme)
        shown[theme] = page.screenshot(clip=inside)
    assert shown["light"] != shown["dark"]
    assert shown["light"] == shown["auto"]
