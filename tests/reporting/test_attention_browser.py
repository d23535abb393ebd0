"""The page of `attention` in a real browser, without a network: a patch that is picked has its own map."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hookscope
from hookscope.commands.attention.describe import describe_attention
from hookscope.reporting.html.document import document_html
from hookscope.results.attention import Attention
from hookscope.results.runs.reading import read_run
from tests.commands.attention.small_networks import SmallTransformer, Words
from tests.reporting.chromium import Opened, needs_chromium

pytestmark = [needs_chromium, pytest.mark.exhaustive]

Open = Callable[..., Opened]
CAT = Path(__file__).parents[2] / "sample_images" / "cat.jpg"


@pytest.fixture
def result() -> Attention:
    torch.manual_seed(0)
    return hookscope.attention(SmallTransformer(), CAT, resize="32", crop="32", query=["cls", "200,150"])


def page_of(result: Attention, folder: Path) -> str:
    return document_html(describe_attention(result), read_run(result.save(folder / "run")))


def test_a_click_picks_the_patch_under_it_and_keys_move_on(open_html: Open, result: Attention, tmp_path: Path) -> None:
    opened = open_html(page_of(result, tmp_path))
    page = opened.page
    assert page.locator(".told-patch").is_hidden()
    region = result.inputs[0].region
    assert region is not None
    # The middle of row 2 and column 1 of four.
    x = (region.left + (region.right - region.left) * 1.5 / 4) / region.width
    y = (region.top + (region.bottom - region.top) * 2.5 / 4) / region.height
    svg = page.locator("svg.photograph").first
    box = svg.bounding_box()
    assert box is not None
    # The drawing keeps its shape inside the box.
    scale = min(box["width"] / region.width, box["height"] / region.height)
    wide, tall = region.width * scale, region.height * scale
    left, top = (box["width"] - wide) / 2, (box["height"] - tall) / 2
    svg.click(position={"x": left + x * wide, "y": top + y * tall})
    largest = result.patches[0].values[2 * 4 + 1].max()
    assert (
        page.locator(".told-patch").inner_text()
        == f"row 2, column 1 in layers.1.self_attn: colours from 0 to {largest:.4g}"
    )
    picked = page.locator("svg.layer > svg").get_attribute("viewBox")
    assert picked == "7 13 4 4", "a pixel of its own edge around each map"
    svg.press("ArrowRight")
    largest = result.patches[0].values[2 * 4 + 2].max()
    assert (
        page.locator(".told-patch").inner_text()
        == f"row 2, column 2 in layers.1.self_attn: colours from 0 to {largest:.4g}"
    )
    assert page.locator("svg.layer > svg").get_attribute("viewBox") == "13 13 4 4"
    assert opened.wrong == []


def test_a_picked_patch_shows_which_of_two_blocks_its_map_is_of(open_html: Open, tmp_path: Path) -> None:
    torch.manual_seed(0)
    asked = {"query": ["cls", "mean", "200,150"], "head": [0, 1, 2], "block": [0, 1]}
    result = hookscope.attention(SmallTransformer(), CAT, resize="32", crop="32", **asked)  # type: ignore[arg-type]
    page = open_html(page_of(result, tmp_path)).page
    page.locator("svg.photograph").first.click()
    assert " in layers.0.self_attn: " in page.locator(".told-patch").inner_text()
    radios = page.locator('input[value^="patch-"]')
    in_sight = (
        "radio => { const list = radio.closest('fieldset').getBoundingClientRect(), own = "
        "radio.getBoundingClientRect(); return own.top >= list.top && own.bottom <= list.bottom; }"
    )
    assert radios.first.is_checked()
    assert radios.first.evaluate(in_sight)
    radios.nth(1).check()
    assert " in layers.1.self_attn: " in page.locator(".told-patch").inner_text()


def test_an_input_without_a_map_has_no_controls(open_html: Open, tmp_path: Path) -> None:
    result = hookscope.attention(Words(), input_shape="2,6:int64<50")
    opened = open_html(page_of(result, tmp_path))
    articles = opened.page.locator("article.look")
    assert articles.count() == 2
    assert "It has no map. " in articles.first.inner_text()
    assert opened.page.locator("article svg, article input, fieldset").count() == 0
    assert opened.page.locator("#maps-title").inner_text() == "The inputs"
    titles = opened.page.locator("#heads table").last.locator("thead th").all_inner_texts()
    assert titles == ["block", "head", "entropy, nats", "on one token", "remarks"]
    assert opened.wrong == []


@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(open_html: Open, result: Attention, tmp_path: Path, width: int) -> None:
    opened = open_html(page_of(result, tmp_path), width=width)
    assert opened.axe_violations() == []
    assert opened.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
