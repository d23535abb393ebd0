"""The largest report there shall be, in a real browser: resnet152 with the grids of all its convolutions."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from hookscope.cli.app import run
from tests.reporting.chromium import Opened, chromium, needs_chromium, open_file, until

CAT = Path(__file__).parents[2] / "sample_images" / "cat.jpg"

# Every layer, and the four stages, but neither the blocks in them nor the network itself.
LAYERS = ("*", "!type:Bottleneck", "!*downsample", "!type:ResNet")

_NEXT_FRAME = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"

# The first row of which half or more is below the head of the table, and how far below it.
_ROW_AT_THE_TOP = """() => {
  const under = document.querySelector("#table thead").getBoundingClientRect().bottom;
  const rows = [...document.querySelectorAll("#table tbody tr:not([hidden])")];
  const row = rows.find((row) => row.getBoundingClientRect().bottom > under + 14);
  return [row.cells[1].textContent, Math.round(row.getBoundingClientRect().top - under)];
}"""

pytestmark = [pytest.mark.exhaustive, needs_chromium]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resnet152")
    patterns = [part for pattern in LAYERS for part in ("--layer", pattern)]
    command = ["activations", "resnet152", str(CAT), "--weights", "none", "--quiet", *patterns]
    assert run([*command, "--out", str(folder / "run")]) == 0
    assert run(["report", str(folder / "run"), "--quiet"]) == 0
    return folder / "run.html"


@pytest.fixture(scope="module")
def opened(report: Path) -> Iterator[Opened]:
    """Open the report once for all; in the end nothing may have gone wrong in it."""
    with chromium() as browser:
        opened = open_file(browser, report)
        opened.page.wait_for_selector("html.ready")
        yield opened
        opened.page.close()
    assert opened.wrong == []


@pytest.fixture
def page(opened: Opened) -> Page:
    """Return to where the report begins."""
    opened.page.evaluate("location.hash = ''")
    opened.page.select_option("#type", "")
    until(opened.page, "!document.getElementById('panel').open && document.getElementById('q').value === ''")
    return opened.page


def test_it_fits_its_file(report: Path) -> None:
    assert report.stat().st_size < 9_000_000  # 468 rows of text are half of it


def test_every_row_and_the_grid_of_every_convolution_are_there(opened: Opened, page: Page) -> None:
    assert len(opened.visible()) == 468
    page.select_option("#type", "Conv2d")
    assert len(opened.visible()) == 155
    drawn = page.evaluate(
        """() => [...document.querySelectorAll("template.part[data-kind='Conv2d']")].filter((part) => {
          return part.content.querySelector("figure.maps image").getAttribute("href").length > 100;
        }).length"""
    )
    assert drawn == 155


def test_it_sorts_and_filters(opened: Opened, page: Page) -> None:
    page.fill("#q", "layer3.35 conv")
    assert opened.visible() == ["layer3.35.conv1", "layer3.35.conv2", "layer3.35.conv3"]
    page.fill("#q", "")
    page.get_by_role("button", name="std", exact=True).click()
    values = page.eval_on_selector_all("#table tbody td.c-std", "cells => cells.map(cell => Number(cell.dataset.v))")
    assert len(values) == 468
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(("word", "scrolled"), [("bn", 700), ("conv1", 715), ("bn", 1_000_000)])
def test_the_row_at_the_top_stays_there_where_the_filter_is_cleared(page: Page, word: str, scrolled: int) -> None:
    page.fill("#q", word)
    page.eval_on_selector(".tall", "(region, by) => region.scrollTo(0, by)", scrolled)
    page.evaluate(_NEXT_FRAME)
    held = page.evaluate(_ROW_AT_THE_TOP)
    assert page.eval_on_selector(".tall", "(region) => region.scrollTop > 0")
    page.fill("#q", "")
    page.evaluate(_NEXT_FRAME)
    assert page.evaluate(_ROW_AT_THE_TOP) == held


def test_a_layer_opens_and_a_map_is_enlarged(page: Page) -> None:
    page.fill("#q", "layer4.2.conv3")
    page.click("#table tbody tr:not([hidden]) a")
    page.wait_for_selector("#panel .tiles svg")
    assert page.inner_text("#panel-title") == "layer4.2.conv3"
    before = page.get_attribute("svg.map", "viewBox")
    page.click(".tiles svg >> nth=3")
    assert page.input_value("input.pick") == "3"
    assert page.get_attribute("svg.map", "viewBox") != before
    assert page.eval_on_selector("svg.map", "map => map.clientWidth > 200")


def test_a_link_opens_on_its_layer_with_its_filter(report: Path, opened: Opened) -> None:
    browser = opened.page.context.browser
    assert browser is not None
    linked = open_file(browser, report, "#layer=layer3.20.conv2&q=layer3.20")
    linked.page.wait_for_selector("#panel .tiles svg")
    assert linked.page.inner_text("#panel-title") == "layer3.20.conv2"
    assert len(linked.visible()) == 9
    assert linked.wrong == []
    linked.page.close()
