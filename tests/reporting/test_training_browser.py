"""The page of a watched training in a real browser."""

from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page

from hookscope.reporting.document import DetailedRow, Document, HeatMaps, Section
from hookscope.reporting.html.document import document_html
from hookscope.reporting.steps import heat_map
from hookscope.results.training import TrainingLog
from tests.reporting.chromium import Opened, needs_chromium, until
from tests.reporting.conftest import HOSTILE_NAME
from tests.reporting.trained import START, long_training, name_of, train, training_page, verdict, with_verdicts

pytestmark = [needs_chromium, pytest.mark.exhaustive]

Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def log() -> TrainingLog:
    rules = [
        verdict(41, "loss-spike", ""),
        verdict(42, "loss-spike", "", state="ended"),
        verdict(50, "exploding-gradient", "2.weight", level="fail"),
        verdict(50, "exploding-gradient", "4.weight", level="fail"),
    ]
    log = with_verdicts(train(80, broken_at=71), rules)
    return replace(log, steps=tuple(replace(step, skipped=step.step in (3, 4)) for step in log.steps))


@pytest.fixture
def open_page(open_html: Open, log: TrainingLog) -> Open:
    def open_report(*options: Any, **named: Any) -> Opened:
        opened = open_html(training_page(log), *options, **named)
        opened.page.wait_for_selector("html.ready")
        return opened

    return open_report


def rows(page: Page, key: str) -> list[str]:
    names: list[str] = page.eval_on_selector_all(
        f"table[data-key={key}] tbody tr:not([hidden]) th", "cells => cells.map(cell => cell.textContent)"
    )
    return names


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing_and_nothing_is_too_wide(open_page: Open, width: int, scheme: str) -> None:
    opened = open_page(width=width, scheme=scheme)
    page = opened.page
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert opened.axe_violations() == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.evaluate("location.hash = '#layer=2.weight'")
    page.wait_for_selector("#panel[open] svg.plot")
    page.set_viewport_size({"width": width, "height": 3000})
    assert opened.axe_violations() == []
    assert page.evaluate("document.getElementById('body').scrollWidth <= document.getElementById('body').clientWidth")


def test_rows_are_sorted_by_what_was_measured_and_filtered_by_name(open_page: Open, log: TrainingLog) -> None:
    page = open_page().page
    names = [row.name for row in log.watched[0].parameters]
    assert rows(page, "gradient-norm") == names
    page.click("table[data-key=gradient-norm] button[data-sort=largest]")
    finite = {
        name: [
            row.gradient_norm for watched_step in log.watched[:7] for row in watched_step.parameters if row.name == name
        ]
        for name in names
    }
    largest = {name: max(norms) for name, norms in finite.items() if None not in norms}  # type: ignore[type-var]
    falling = sorted(largest, key=lambda name: -(largest[name] or 0))
    assert rows(page, "gradient-norm") == [*falling, "0.bias"]  # frozen: without a norm, so last
    assert rows(page, "update-ratio") == [name for name in names if name != "0.bias"]
    page.click("table[data-key=gradient-norm] button[data-sort=largest]")
    assert rows(page, "gradient-norm") == [*reversed(falling), "0.bias"]
    page.fill("#q", "weight 2")
    assert rows(page, "gradient-norm") == ["2.weight"]
    assert page.inner_text("#matched").startswith("1 of ")
    until(page, "location.hash.includes('q=weight%202') && location.hash.includes('sort=gradient-norm%3Alargest')")
    address = page.evaluate("location.hash")
    page.fill("#q", "no such row")
    assert page.is_visible("#none")
    until(page, "location.hash.includes('no%20such')")
    page.evaluate(f"location.hash = {address!r}")
    until(page, "document.getElementById('q').value === 'weight 2'")
    assert rows(page, "gradient-norm") == ["2.weight"]


def test_a_link_opens_a_row_with_its_verdicts_and_its_numbers(open_page: Open, log: TrainingLog) -> None:
    page = open_page("#layer=4.weight").page
    page.wait_for_selector("#panel[open]")
    assert page.inner_text("#panel-title") == "4.weight"
    assert "exploding-gradient" in page.inner_text("#body .findings")
    assert page.locator("#body figure.depth").count() == 2
    labels = page.eval_on_selector_all("#body figure.depth:first-child", "all => JSON.parse(all[0].dataset.labels)")
    norms = [
        row.gradient_norm or 0
        for watched_step in log.watched
        for row in watched_step.parameters
        if row.name == "4.weight"
    ]
    steps = [watched_step.step for watched_step in log.watched]
    assert steps == [10, 20, 30, 40, 50, 60, 70, 71, 80]
    for label, step, norm in zip(labels[:7], steps, norms, strict=False):
        name, _, number = label.partition(": ")
        assert name == f"step {step}"
        assert float(number) == pytest.approx(norm, rel=1e-3)
    assert labels[7:] == ["step 71: NaN or Inf", "step 80: NaN or Inf"]
    page.click("#back")
    until(page, "document.getElementById('panel-title').textContent === '2.bias'")
    page.keyboard.press("Escape")
    page.wait_for_selector("#panel", state="hidden")
    assert "layer=" not in page.evaluate("location.hash")
    page.go_back()
    page.wait_for_selector("#panel[open]")


def test_a_layer_without_a_row_leads_to_its_first_parameter(open_html: Open) -> None:
    log = train(20)
    log = replace(log, watched=tuple(replace(watched_step, layers=()) for watched_step in log.watched))
    page = open_html(training_page(log), "#layer=2").page
    page.wait_for_selector("#panel[open]")
    assert page.inner_text("#panel-title") == "2.weight"


def test_the_pointer_reads_a_curve_and_a_colour(open_page: Open, log: TrainingLog) -> None:
    page = open_page().page
    plot = page.locator("#steps figure svg.plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    page.mouse.move(box["x"] + 4, box["y"] + 50)  # the first step
    words = page.inner_text("#steps figure output")
    assert words.startswith("step 1: loss ")
    assert float(words.split()[-1]) == pytest.approx(log.steps[0].loss, rel=1e-3)
    strip = page.locator("table[data-key=gradient-norm] tbody tr:first-child svg.cells")
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 1.5 / 9, box["y"] + 5)  # the second of nine
    words = page.inner_text(".heat output >> nth=0")
    assert words.startswith("0.weight, step 20: ")
    assert float(words.split()[-1]) == pytest.approx(log.watched[1].parameters[0].gradient_norm, rel=1e-3)
    page.mouse.click(box["x"] + 5, box["y"] + 5)
    page.wait_for_selector("#panel[open]")


def test_the_pointer_reads_100_percent_only_where_that_is_exact(open_html: Open) -> None:
    shares = [1.0, 1 - 1e-12, 0.987, 0.5, 1e-5, 0.0]
    drawn = heat_map("dead", "Dead channels", {"0": shares}, range(1, 7), (9, 9), {"0"}, share=True)
    assert drawn is not None
    part = HeatMaps(
        maps=lambda _rows, _columns: [drawn],
        details=lambda name: DetailedRow(name=name, kind="ReLU"),
        legend="",
        empty="",
        all_in="",
    )
    section = Section("rows", "Rows", [part])
    page = open_html(
        document_html(Document(title="a", page_title="a", answer=["a"], level="", sections=[section], main="rows"))
    ).page
    page.wait_for_selector("html.ready")
    box = page.locator("svg.cells").bounding_box()
    assert box
    words = []
    for step in range(6):
        page.mouse.move(box["x"] + box["width"] * (step + 0.5) / 6, box["y"] + 5)
        words.append(page.inner_text(".heat output").rpartition(": ")[2])
    assert words == ["100%", ">99.9%", "98.7%", "50.0%", "<0.1%", "0%"]


def test_every_row_shows_its_own_line_of_the_picture(open_page: Open) -> None:
    page = open_page().page
    broken = page.locator("table[data-key=gradient-norm] tbody tr:first-child svg.cells")
    frozen = page.locator("table[data-key=gradient-norm] tbody tr:nth-child(2) svg.cells")

    def right_end(strip: Any) -> tuple[int, ...]:
        strip.scroll_into_view_if_needed()
        picture = Image.open(BytesIO(strip.screenshot())).convert("RGB")
        pixel = picture.getpixel((picture.width - 4, picture.height // 2))
        assert isinstance(pixel, tuple)
        return pixel

    assert right_end(broken) == (255, 0, 255)
    assert right_end(frozen) == (246, 247, 248)  # the ground of the page: nothing was measured


def test_without_steps_or_rows_nothing_goes_wrong(open_html: Open) -> None:
    for log in (TrainingLog((START,), (), (), (), ()), train(5)):
        page = open_html(training_page(log), "#layer=nothing").page
        page.wait_for_selector("html.ready")
        assert not page.is_visible("#panel")


def test_hostile_names_run_nothing(open_html: Open) -> None:
    log = train(20)
    names = {"0.weight": HOSTILE_NAME, "2.weight": "<img src=x onerror=pwned=1>", "4.weight": "</script><b>&amp;"}
    watched = tuple(
        replace(
            watched_step,
            parameters=tuple(replace(row, name=names.get(row.name, row.name)) for row in watched_step.parameters),
        )
        for watched_step in log.watched
    )
    page = open_html(training_page(replace(log, watched=watched))).page
    page.wait_for_selector("html.ready")
    for number in (1, 3, 5):
        page.click(f"table[data-key=gradient-norm] tbody tr:nth-child({number}) a")
        page.wait_for_selector("#panel[open]")
        page.keyboard.press("Escape")
        page.wait_for_selector("#panel", state="hidden")
    assert page.evaluate("window.pwned") is None
    assert page.locator("img[src=x]").count() == 0


def test_the_largest_page_opens_and_sorts(open_html: Open) -> None:
    page = open_html(training_page(long_training(60_000, parameters=1000, every=1000, spikes={}))).page
    page.wait_for_selector("html.ready")
    page.click("table[data-key=gradient-norm] button[data-sort=last]")
    assert rows(page, "gradient-norm")[0] == name_of(999)
    page.evaluate(f"location.hash = '#layer={name_of(999)}'")
    page.wait_for_selector("#panel[open]")
