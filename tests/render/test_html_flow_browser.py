"""The drawings of data flow in a real browser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hookscope.render.html import report_html
from hookscope.render.html.flow_lines import ROW_HEIGHT
from hookscope.results.runs.reading import read_run
from tests.render.chromium import Opened, Scheme, needs_chromium, until
from tests.render.stored import hostile_rows, operation, row, write_run

pytestmark = needs_chromium

Open = Callable[..., Opened]
BOX = "const box = each.getBoundingClientRect();"
LONG = "encoder.stages.a_rather_long_name_of_a_stage.blocks"


@pytest.fixture
def open_page(open_html: Open, tmp_path: Path) -> Open:
    """Open a run of three residual blocks, the last with many inputs."""
    rows = [row(0, "stem", inputs=["input"])]
    for block in range(2):
        before = rows[-1]["layer"]
        rows.append(row(len(rows), f"{LONG}.{block}.conv", inputs=[before], flags=["dead channels"] if block else []))
        rows.append(operation(len(rows), f"{LONG}.{block}", "add", inputs=[before, f"{LONG}.{block}.conv"]))
    rows += [row(len(rows) + number, f"{LONG}.2.conv{number}", inputs=["stem"]) for number in range(40)]
    arms = [each["layer"] for each in rows[-40:]]
    rows.append(operation(len(rows), f"{LONG}.2", "add", inputs=arms))
    run = write_run(tmp_path / "run", rows)

    def open_report(*options: Any, **named: Any) -> Opened:
        opened = open_html(report_html(read_run(run)), *options, **named)
        opened.page.wait_for_selector("html.ready")
        return opened

    return open_report


def is_in_sight(figure: str) -> str:
    return (
        f"(box => box.top >= 0 && box.top < innerHeight)(document.getElementById('{figure}').getBoundingClientRect())"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.exhaustive
def test_axe_finds_nothing_and_nothing_is_too_wide(open_page: Open, width: int, scheme: Scheme) -> None:
    opened = open_page(width=width, scheme=scheme)
    page = opened.page
    page.evaluate("for (const each of document.querySelectorAll('.tree details')) each.open = true")
    assert page.locator("figure.flow:visible").count() == 4
    assert opened.axe_violations() == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.click(f"#table a >> text={LONG}.2:add")
    page.wait_for_selector("#body figure.flow")
    page.set_viewport_size({"width": width, "height": 5000})  # axe takes links out of sight for ones that skip
    assert opened.axe_violations() == []
    assert page.evaluate("document.getElementById('body').scrollWidth <= document.getElementById('body').clientWidth")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.exhaustive
def test_each_name_stands_beside_its_mark(open_page: Open, width: int) -> None:
    page = open_page("#flow-3", width=width).page
    top, height = page.eval_on_selector("#flow-3 svg", f"each => {{ {BOX} return [box.top, box.height]; }}")
    tops = page.eval_on_selector_all("#flow-3 li", f"all => all.map(each => {{ {BOX} return box.top; }})")
    assert tops == pytest.approx([top + ROW_HEIGHT * place for place in range(42)], abs=0.1)
    assert height == pytest.approx(ROW_HEIGHT * 42, abs=0.1)


def test_a_block_leads_to_its_drawing_and_a_row_to_its_page(open_page: Open) -> None:
    page = open_page().page
    page.focus(f"#flow-0 a >> text={LONG}.1")
    page.keyboard.press("Enter")
    until(page, is_in_sight("flow-2"))
    assert page.evaluate("document.activeElement.id") == "flow-2"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#panel")
    assert page.inner_text("#panel-title") == f"{LONG}.1.conv"
    assert page.inner_text("#body figure.flow [aria-current]") == "conv"
    assert page.locator("[id=flow-2]").count() == 1


@pytest.mark.exhaustive
def test_the_focus_stays_where_the_reader_has_moved_it(open_page: Open) -> None:
    page = open_page("#flow-2").page
    until(page, "document.activeElement.id === 'flow-2'")
    page.keyboard.press("Tab")
    inside = page.evaluate("document.activeElement.textContent")
    page.evaluate("dispatchEvent(new HashChangeEvent('hashchange'))")  # which may come later than the key
    assert page.evaluate("document.activeElement.textContent") == inside
    assert page.evaluate("document.activeElement.id") != "flow-2"


@pytest.mark.exhaustive
def test_a_block_leads_from_a_page_to_the_tree_and_going_back_opens_it_again(open_page: Open) -> None:
    page = open_page(f"#layer={LONG}.0.conv").page
    page.click("#body figure.flow .output a")
    page.wait_for_selector("#panel", state="hidden")
    until(page, is_in_sight("flow-2"))
    until(page, "document.activeElement.id === 'flow-2'")
    assert page.evaluate("location.hash") == "#flow-2"
    page.go_back()
    page.wait_for_selector("#panel")
    assert page.inner_text("#panel-title") == f"{LONG}.0.conv"


@pytest.mark.exhaustive
def test_a_link_opens_on_a_drawing(open_page: Open) -> None:
    page = open_page("#flow-3").page
    until(page, is_in_sight("flow-3"))
    assert not page.is_visible("#panel")


@pytest.mark.exhaustive
def test_hostile_names_run_nothing(open_html: Open, tmp_path: Path) -> None:
    page = open_html(report_html(read_run(write_run(tmp_path / "run", hostile_rows())))).page
    page.wait_for_selector("html.ready")
    for number in range(1, page.locator("figure.flow").count()):
        page.click(f"#flow-0 a[href='#flow-{number}']")
        until(page, f"document.activeElement.id === 'flow-{number}'")
        page.click(f"#flow-{number} li.module a >> nth=0")
        page.wait_for_selector("#body figure.flow")
        page.keyboard.press("Escape")
        page.wait_for_selector("#panel", state="hidden")
    assert page.evaluate("window.pwned") is None
