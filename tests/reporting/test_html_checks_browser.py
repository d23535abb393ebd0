"""The page about checkpoints in a real browser, without a network."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hookscope.commands.check.page import checks_html
from hookscope.results.check import CheckReport, Finding
from tests.reporting.checked import EVERY, FAILED, MANY, PASSING, hostile, outcome
from tests.reporting.checked import HOSTILE_NAMES as HOSTILE_TEXTS
from tests.reporting.chromium import Opened, Scheme, needs_chromium
from tests.reporting.stored import HOSTILE_NAMES, drawn, maps, picture_png

pytestmark = needs_chromium

Open = Callable[..., Opened]


@pytest.fixture
def open_page(open_html: Open) -> Open:
    return lambda *reports, **options: open_html(checks_html(reports), **options)


@pytest.fixture
def failed(tmp_path: Path) -> CheckReport:
    """A checkpoint with every status there is, and with evidence."""
    folder = tmp_path / "evidence"
    png, grid = drawn(maps())
    grids = [replace(grid, path=f"grids/{name}.png", label=name) for name in ("layer1.0.relu", "fc")]
    (folder / "grids").mkdir(parents=True)
    for each, content in zip(grids, (png, picture_png()), strict=True):
        (folder / each.path).write_bytes(content)
    record = json.dumps({"verb": "check", "grids": [asdict(grid) for grid in grids], "files": []})
    (folder / "run.json").write_text(record, encoding="utf-8")
    warned = outcome("dead-filter", Finding("dead-filter", "warn", "fc.weight", "3 of 10 filters are zero."))
    outcomes = (*FAILED.outcomes, warned, PASSING.outcomes[-1])
    return replace(FAILED, evidence=str(folder), outcomes=outcomes, warnings=("Only 2 inputs were given.",))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.exhaustive
def test_axe_finds_nothing(open_page: Open, failed: CheckReport, width: int, scheme: Scheme) -> None:
    for reports in ([failed], [*EVERY[:-1], failed]):
        opened = open_page(*reports, width=width, scheme=scheme)
        opened.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        assert opened.axe_violations() == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.sample("390")
def test_nothing_is_wider_than_the_window(open_page: Open, failed: CheckReport, width: int) -> None:
    long = replace(failed, checkpoint="x" * 400)
    page = open_page(*EVERY[:-1], failed, long, hostile("y" * 400), width=width).page
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_links_lead_from_the_verdicts_to_a_checkpoint_and_its_picture(open_page: Open, failed: CheckReport) -> None:
    page = open_page(PASSING, failed).page
    page.click("#verdicts >> text=models/broken.pt")
    assert page.evaluate("decodeURIComponent(location.hash)") == "#document-1"
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = false")
    page.evaluate("document.querySelector('.inner .more:has(.findings)').open = true")
    page.click(".findings a.name")
    assert page.get_attribute(":target", "aria-label") == "layer1.0.relu of models/broken.pt, picture"
    assert page.locator(":target").is_visible()
    assert page.evaluate("document.querySelector(':target img').decode().then(() => true)")


@pytest.mark.exhaustive
def test_it_prints_with_its_pictures_and_the_rules_that_are_folded_on_the_screen(
    open_page: Open, failed: CheckReport
) -> None:
    page = open_page(PASSING, MANY, failed).page
    row = page.locator("#document-3 td >> text=integrity")
    assert not row.is_visible()
    page.emulate_media(media="print")
    assert row.is_visible()
    assert len(re.findall(rb"/Subtype\s*/Image\b", page.pdf(format="A4"))) >= 2


@pytest.mark.exhaustive
def test_hostile_names_run_nothing(open_page: Open) -> None:
    opened = open_page(*(hostile(name) for name in dict.fromkeys((*HOSTILE_NAMES, *HOSTILE_TEXTS))))
    page = opened.page
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.querySelectorAll('main script, img, main svg, b').length") == 0
    assert opened.axe_violations() == []
