"""A report in a real browser: Debian's Chromium, driven by Playwright, without a network."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python import sync_playwright as axe
from playwright import sync_api
from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

Scheme = Literal["light", "dark"]


@dataclass
class Opened:
    """A page in the browser, and what it did that it must not."""

    page: Page
    wrong: list[str] = field(default_factory=list)

    def visible(self) -> list[str]:
        names: list[str] = self.page.eval_on_selector_all(
            "#table tbody tr:not([hidden]) th", "cells => cells.map(cell => cell.textContent)"
        )
        return names

    def axe_violations(self) -> list[str]:
        actual = axe.Axe().run(self.page).response["violations"]
        return [f"{each['id']}: {[node['html'][:200] for node in each['nodes']]}" for each in actual]


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_api.sync_playwright() as driver:
        # Containers seldom let Chromium make a sandbox of its own; the pages are ours.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_file(browser: Browser, path: Path, fragment: str = "", width: int = 1280, scheme: Scheme = "light") -> Opened:
    """Open a report, and note whatever it says on the console and every request that leaves it."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(60_000)
    opened = Opened(page)
    address = path.as_uri()
    page.on("console", lambda message: opened.wrong.append(message.text))
    page.on("pageerror", lambda error: opened.wrong.append(str(error)))
    page.on("dialog", lambda dialog: opened.wrong.append(dialog.message))
    page.on("request", lambda request: opened.wrong.extend(leaving(request.url, address)))
    page.goto(f"{address}{fragment}")
    return opened


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_html(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Open a page; afterwards nothing may have gone wrong in it."""
    opened: list[Opened] = []

    def write_and_open(html: str, fragment: str = "", width: int = 1280, scheme: Scheme = "light") -> Opened:
        path = tmp_path / "report.html"
        path.write_text(html, encoding="utf-8")
        opened.append(open_file(browser, path, fragment, width, scheme))
        return opened[-1]

    yield write_and_open
    for each in opened:
        each.page.close()
        assert each.wrong == []


def leaving(url: str, address: str) -> list[str]:
    """Return a request's address if it is neither the page's own nor inside the page."""
    return [] if url.startswith(("data:", address)) else [url]


def until(page: Page, expression: str) -> None:
    """Wait for a condition. Playwright's own way evaluates text inside the page, which its policy forbids."""
    for _ in range(500):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(expression)
