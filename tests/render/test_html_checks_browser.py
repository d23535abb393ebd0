"""The page about checkpoints in a real browser, without a network."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from hookscope.check_results import CheckReport, Finding
from hookscope.render.html.checks import checks_html
from tests.render.checked import EVERY, FAILED, MANY, PASSING, hostile, outcome
from tests.render.checked import HOSTILE_NAMES as HOSTILE_TEXTS
from tests.render.stored import HOSTILE_NAMES, grid_png, maps, picture_png

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

Scheme = Literal["light", "dark"]
Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with sync_api.sync_playwright() as driver:
        # Containers seldom let Chromium make a sandbox of its own; the pages are ours.
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: "Browser", tmp_path: Path) -> Iterator[Open]:
    """Open the page about checkpoints; afterwards nothing may have gone wrong in it."""
    pages: list[Page] = []
    wrong: list[str] = []

    def open_checks(*reports: CheckReport, fragment: str = "", width: int = 1280, scheme: Scheme = "light") -> "Page":
        path = tmp_path / "report.html"
        path.write_text(checks_html(reports), encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        address = path.as_uri()
        page.on(
            "request", lambda request: None if request.url.startswith(("data:", address)) else wrong.append(request.url)
        )
        page.goto(f"{address}{fragment}")
        return page

    yield open_checks
    for page in pages:
        page.close()
    assert wrong == []


@pytest.fixture
def failed(tmp_path: Path) -> CheckReport:
    """A checkpoint with every status there is, and with evidence."""
    folder = tmp_path / "evidence"
    names = {"grids/000-layer1.0.relu.png": grid_png(maps()), "plots/histograms.png": picture_png()}
    for name, content in names.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(content)
    record = json.dumps({"files": list(names), "layers": ["layer1.0.relu"]})
    (folder / "run.json").write_text(record, encoding="utf-8")
    warned = outcome("dead-filter", Finding("dead-filter", "warn", "fc.weight", "3 of 10 filters are zero."))
    outcomes = (*FAILED.outcomes, warned, PASSING.outcomes[-1])
    return replace(FAILED, evidence=str(folder), outcomes=outcomes, warnings=("Only 2 inputs were given.",))


def violations(page: "Page") -> list[str]:
    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {[node['html'][:200] for node in each['nodes']]}" for each in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(open_page: Open, failed: CheckReport, width: int, scheme: Scheme) -> None:
    for reports in ([failed], [*EVERY[:-1], failed]):
        page = open_page(*reports, width=width, scheme=scheme)
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        assert violations(page) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(open_page: Open, failed: CheckReport, width: int) -> None:
    long = replace(failed, checkpoint="x" * 400)
    page = open_page(*EVERY[:-1], failed, long, hostile("y" * 400), width=width)
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_link_shows_its_finding_even_where_it_is_folded(open_page: Open) -> None:
    # Failures are 1, 3, 5 … of the first thousand: this one is far down.
    page = open_page(MANY, fragment="#rule=dead-filter&finding=901")
    target = page.locator(":target")
    assert "blocks.900.weight" in target.inner_text()
    assert target.is_visible()
    assert page.evaluate("document.querySelector(':target').getBoundingClientRect().top < innerHeight")


def test_links_lead_from_the_verdicts_to_a_checkpoint_its_rule_and_its_picture(
    open_page: Open, failed: CheckReport
) -> None:
    page = open_page(PASSING, failed)
    page.click("#checkpoints >> text=models/broken.pt")
    assert page.evaluate("decodeURIComponent(location.hash)") == "#checkpoint=models-broken.pt"
    page.click(".findings a.name")
    assert "layer1.0.relu" in page.inner_text(":target figcaption")
    assert page.evaluate("document.querySelector(':target img').decode().then(() => true)")
    page.click(".findings >> text=dead-channels >> nth=0")
    assert page.inner_text(":target th") == "dead-channels"
    page.click(":target a")
    assert "64 of 64 channels" in page.inner_text(":target")


def test_it_prints_with_its_pictures_and_the_rules_that_are_folded_on_the_screen(
    open_page: Open, failed: CheckReport
) -> None:
    page = open_page(PASSING, MANY, failed)
    row = page.locator('[id="checkpoint=models-good.pt&rule=integrity"]')
    assert not row.is_visible()
    page.emulate_media(media="print")
    assert row.is_visible()
    assert len(re.findall(rb"/Subtype\s*/Image\b", page.pdf(format="A4"))) >= 2


def test_hostile_names_run_nothing(open_page: Open) -> None:
    page = open_page(*(hostile(name) for name in dict.fromkeys((*HOSTILE_NAMES, *HOSTILE_TEXTS))))
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.querySelectorAll('script, img, svg, b').length") == 0
    assert violations(page) == []
