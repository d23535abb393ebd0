"""The page of a run in a real browser."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page

from hookscope.results.runs.reading import read_run
from hookscope.text import safe_text
from tests.reporting.chromium import Opened, Scheme, needs_chromium, until
from tests.reporting.stored import (
    HOSTILE_NAMES,
    MODEL,
    drawn,
    given,
    gradient,
    maps,
    parameter,
    picture_png,
    report_html,
    row,
    statistics,
    write_run,
)

pytestmark = needs_chromium

Open = Callable[..., Opened]


@pytest.fixture
def open_page(open_html: Open) -> Open:
    def open_report(run: Path, *options: Any, **named: Any) -> Opened:
        opened = open_html(report_html(read_run(run)), *options, **named)
        opened.page.wait_for_selector("html.ready")
        return opened

    return open_report


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run of `grads` with everything in it that a page shows."""
    names = ["stem.conv", "stem.relu", "layer1.0.conv1", "layer1.0.relu", "layer1.0.conv2", "fc"]
    kinds = ["Conv2d", "ReLU", "Conv2d", "ReLU", "Conv2d", "Linear"]
    means = [0.5, -2.0, 1e-9, 30.0, None, 4.0]
    rows = [
        row(i, name, kind, activation=statistics(mean=mean))
        for i, (name, kind, mean) in enumerate(zip(names, kinds, means, strict=True))
    ]
    rows[3]["flags"] = ["dead channels", "in-place"]
    rows.append(row(6, "layer1.0.relu", "ReLU", call=1))
    return write_run(
        tmp_path / "small",
        rows,
        gradients=[gradient(i, name, kind=kind) for i, (name, kind) in enumerate(zip(names, kinds, strict=True))],
        parameters=[parameter(0, "stem.conv.weight"), parameter(1, "fc.weight", ratio=0.001)],
        grids={
            "000-stem.conv.png": drawn(maps(6, 8, 8), 3),
            "002-layer1.0.conv1.png": drawn(maps(4, 3, 5), row=2),
            "005-fc.png": drawn(maps(30, 1, 1), 10, row=5),
        },
        thumbnails=[picture_png()],
        predictions=[{"input_index": 0, "class_indices": [281], "class_names": ["tabby"], "probabilities": [0.25]}],
        verdicts=[{"rule": "dead-gradient", "level": "fail", "where": "fc.weight", "message": "It is 0."}],
        warnings=["Something."],
        loss={"name": "ce", "target": "tabby", "value": 1.5, "outputs": []},
    )


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.sample("1280-light")
def test_axe_finds_nothing_on_the_page_or_in_a_layer(open_page: Open, small: Path, width: int, scheme: Scheme) -> None:
    opened = open_page(small, width=width, scheme=scheme)
    opened.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert opened.axe_violations() == []
    opened.page.click("#table a >> text=stem.conv")
    opened.page.wait_for_selector(".tiles svg")
    assert opened.axe_violations() == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
@pytest.mark.sample("390-light")
def test_the_answer_comes_first_and_maps_of_a_few_layers_before_the_tables(
    open_html: Open, tmp_path: Path, width: int, scheme: Scheme
) -> None:
    sizes = {"pad": 96, "conv1": 96, "conv2": 48, "conv3": 24, "conv4": 12, "conv5": 6, "conv6": 3}
    rows = [row(at, name, "ZeroPad2d" if name == "pad" else "Conv2d") for at, name in enumerate(sizes)]
    grids = {f"{at}.png": drawn(maps(12, size, size), 10, row=at) for at, size in enumerate(sizes.values())}
    model = MODEL | {"weights": "random, seed 0", "random": True}
    verdict = {"level": "fail", "rule": "nan", "where": "conv3", "message": "'conv3' holds NaN.", "followed_by": []}
    run = write_run(tmp_path / "run", rows, grids=grids, model=model, verdicts=[verdict])
    opened = open_html(report_html(read_run(run)), width=width, scheme=scheme)
    page = opened.page
    first = page.locator("main > :first-child")
    assert first.locator("h2").inner_text() == "1 failure: nan at 'conv3'."
    assert "'conv3' holds NaN." in page.locator("main > :nth-child(2)").inner_text()
    assert "RANDOM WEIGHTS: this network is untrained, nothing here was learned" in first.inner_text()
    strips = page.locator(".strip")
    names = [each.inner_text() for each in strips.locator("a").all()]
    assert names == ["conv1", "conv2", "conv3", "conv5", "conv6"]  # no padding; the largest, the smallest, some between
    pictures = strips.locator(":scope > img").all()
    shown = [picture.evaluate("img => [img.naturalWidth, img.naturalHeight]") for picture in pictures]
    drawn_sides = [sizes[name] * (112 // sizes[name]) for name in names]  # whole pixels for each value
    assert shown == [[8 * side + 7 * 3, side] for side in drawn_sides]  # with gaps of 3 pixels
    assert strips.locator(".legend img").count() == len(names)
    # Rows beside the window are drawn too: a screenshot of the whole page shows them.
    assert page.evaluate("getComputedStyle(document.querySelector('#table tbody tr')).contentVisibility") == "visible"
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert opened.axe_violations() == []
    assert opened.wrong == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.sample("390")
def test_nothing_is_wider_than_the_window(open_page: Open, small: Path, width: int) -> None:
    page = open_page(small, "#layer=stem.conv", width=width).page
    for inside in ("document.documentElement", "document.getElementById('body')"):
        assert page.evaluate(f"{inside}.scrollWidth <= {inside}.clientWidth")


def test_a_shadow_shows_where_a_table_goes_on_to_the_right(open_page: Open, small: Path) -> None:
    table = open_page(small, width=390).page.locator(".scroll.tall").first

    def edge() -> list[int]:
        """Return how dark the last pixels of some lines of the table are, beside its border."""
        with Image.open(io.BytesIO(table.screenshot())) as picture:
            line = picture.convert("L").crop((picture.width - 12, 60, picture.width - 2, 61))
        return [*line.tobytes()]

    assert table.evaluate("node => node.scrollWidth > node.clientWidth")
    assert min(edge()) < 225
    table.evaluate("node => { node.scrollLeft = node.scrollWidth; }")
    assert min(edge()) > 225


@pytest.mark.parametrize("width", [390, 460, 700])
@pytest.mark.exhaustive
def test_the_choice_of_columns_fits_a_phone(open_page: Open, small: Path, width: int) -> None:
    page = open_page(small, width=width).page
    page.click("text=columns")
    assert page.is_visible("input[value=mean]")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.exhaustive
def test_filters_answer_by_name_type_and_flags_and_stay_in_the_fragment(open_page: Open, small: Path) -> None:
    opened = open_page(small)
    page = opened.page
    page.fill("#q", "LAYER1 conv")
    assert opened.visible() == ["layer1.0.conv1", "layer1.0.conv2"]
    assert page.inner_text("#matched") == "2 of 7 rows"
    page.fill("#q", "")
    page.select_option("#type", "ReLU")
    assert opened.visible() == ["stem.relu", "layer1.0.relu", "layer1.0.relu#1"]
    page.check("#flagged")
    assert opened.visible() == ["layer1.0.relu"]
    until(page, "location.hash === '#type=ReLU&flagged=1'")
    page.fill("#q", "nothing")
    assert opened.visible() == []
    assert page.is_visible("text=Nothing matches.")
    until(page, "location.hash.includes('q=nothing')")
    page.reload()
    page.wait_for_selector("html.ready")
    assert (page.input_value("#q"), page.input_value("#type"), page.is_checked("#flagged")) == ("nothing", "ReLU", True)
    assert opened.visible() == []


@pytest.mark.exhaustive
def test_columns_sort_both_ways_with_the_unknown_last(open_page: Open, small: Path) -> None:
    opened = open_page(small)
    page = opened.page
    rising = ["stem.relu", "layer1.0.conv1", "stem.conv", "layer1.0.relu#1", "fc", "layer1.0.relu", "layer1.0.conv2"]
    page.get_by_role("button", name="mean", exact=True).click()
    assert opened.visible()[0] == "layer1.0.relu", "the largest first"
    assert opened.visible()[-1] == "layer1.0.conv2"
    header = page.locator("th.c-mean")
    assert header.get_attribute("aria-sort") == "descending"
    until(page, "decodeURIComponent(location.hash) === '#sort=rows:-mean'")
    page.get_by_role("button", name="mean", exact=True).press("Enter")
    assert opened.visible() == rising
    assert header.get_attribute("aria-sort") == "ascending"
    assert page.locator("[aria-sort]").count() == 1
    page.get_by_role("button", name="layer", exact=True).click()
    assert opened.visible() == sorted(rising)


@pytest.mark.exhaustive
def test_columns_can_be_chosen(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    assert page.locator("th.c-mean").is_visible()
    assert not page.locator("th.c-l2").is_visible()
    page.click("text=columns")
    page.uncheck("input[value=mean]")
    page.check("input[value=l2]")
    assert not page.locator("td.c-mean").first.is_visible()
    assert page.locator("td.c-l2").first.is_visible()
    chosen = "decodeURIComponent(location.hash).split(/[=,]/)"  # written a moment after each choice
    until(page, f"{chosen}.includes('l2')")
    page.reload()
    page.wait_for_selector("html.ready")
    assert not page.locator("th.c-mean").is_visible()
    assert page.locator("th.c-l2").is_visible()


@pytest.mark.exhaustive
def test_names_and_the_header_stay_in_sight_while_the_table_scrolls_on_a_phone(open_page: Open, small: Path) -> None:
    page = open_page(small, width=390).page
    page.eval_on_selector("#layers .tall", "each => { each.style.height = '120px'; each.scrollTo(9999, 9999); }")

    def corner(selector: str) -> tuple[float, float]:
        box = page.locator(selector).bounding_box()
        assert box is not None
        return box["x"], box["y"]

    left, top = corner("#layers .tall")
    assert page.eval_on_selector("#layers .tall", "each => each.scrollLeft") > 0
    assert corner("#table tbody th >> nth=6")[0] == pytest.approx(left, abs=2)
    assert corner("#table thead")[1] == pytest.approx(top, abs=2)
    assert corner("#table tbody th >> nth=0")[1] < top


def test_a_link_opens_its_layer_and_going_back_closes_it(open_page: Open, small: Path) -> None:
    page = open_page(small, "#layer=layer1.0.relu#1").page
    assert page.inner_text("#panel-title") == "layer1.0.relu#1"
    page.click("#body >> text=layer1.0.relu")
    until(page, "document.getElementById('panel-title').textContent === 'layer1.0.relu'")
    page.go_back()
    until(page, "document.getElementById('panel-title').textContent === 'layer1.0.relu#1'")
    page.keyboard.press("Escape")
    page.wait_for_selector("#panel", state="hidden")
    until(page, "!location.hash.includes('layer=')")
    page.click(".findings >> text=fc.weight")
    page.wait_for_selector("#panel")
    assert page.inner_text("#panel-title") == "fc"
    page.go_back()
    page.wait_for_selector("#panel", state="hidden")


@pytest.mark.exhaustive
def test_the_keyboard_alone_opens_turns_and_closes(open_page: Open, small: Path) -> None:
    page = open_page(small, "#q=conv").page
    page.focus("#table tbody a >> nth=0")
    page.keyboard.press("Enter")
    page.wait_for_selector("#panel")
    assert page.evaluate("document.activeElement.id") == "panel-title"
    page.keyboard.press("ArrowRight")
    until(page, "document.getElementById('panel-title').textContent === 'layer1.0.conv1'")
    page.keyboard.press("ArrowRight")
    until(page, "document.getElementById('panel-title').textContent === 'layer1.0.conv2'")
    assert page.is_disabled("#next")
    page.click("#back")
    until(page, "document.getElementById('panel-title').textContent === 'layer1.0.conv1'")
    page.keyboard.press("Escape")
    page.wait_for_selector("#panel", state="hidden")
    until(page, "document.activeElement.textContent === 'layer1.0.conv1'")
    until(page, "location.hash === '#q=conv'")


@pytest.mark.exhaustive
def test_the_first_stop_skips_to_the_layers(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the layers"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "layers"


def pixels(page: Page, selector: str, height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a map as it is seen, (H, W), by its red channel, which tells palette entries apart here."""
    page.wait_for_timeout(100)  # until its picture is decoded
    with Image.open(io.BytesIO(page.locator(selector).screenshot())) as picture:
        seen = np.asarray(picture.convert("RGB"))[:, :, 0]
    sides = zip((height, width), seen.shape, strict=True)
    down, across = (((np.arange(count) + 0.5) * size / count).astype(int) for count, size in sides)
    return seen[np.ix_(down, across)]


def red_of(indices: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the red of palette entries: the test palette is 0, 1, 2, 3 … cut into threes."""
    return (indices.astype(np.int64) * 3 % 256).astype(np.uint8)


@pytest.mark.exhaustive
def test_a_single_map_is_enlarged_by_click_number_and_button(open_page: Open, small: Path) -> None:
    drawn = maps(4, 3, 5)
    page = open_page(small, "#layer=layer1.0.conv1").page
    page.wait_for_selector(".tiles svg")
    assert np.array_equal(pixels(page, "svg.map", 3, 5), red_of(drawn[0]))
    page.click("button.next")
    assert np.array_equal(pixels(page, "svg.map", 3, 5), red_of(drawn[1]))
    page.fill("input.pick", "3")
    assert np.array_equal(pixels(page, "svg.map", 3, 5), red_of(drawn[3]))
    assert page.get_attribute("svg.map", "aria-label") == "Channel 3 of 4"
    assert page.is_disabled("button.next")
    page.fill("input.pick", "-7")
    assert page.input_value("input.pick") == "0"
    page.click(".tiles svg >> nth=2")
    assert page.input_value("input.pick") == "2"
    assert np.array_equal(pixels(page, "svg.map", 3, 5), red_of(drawn[2]))


@pytest.mark.exhaustive
def test_the_tiles_show_every_map_pixel(open_page: Open, small: Path) -> None:
    drawn = maps(6, 8, 8)
    page = open_page(small, "#layer=stem.conv").page
    page.wait_for_selector(".tiles svg")
    for channel in range(6):
        page.fill("input.pick", str(5 - channel))  # has the frame
        assert np.array_equal(pixels(page, f".tiles svg >> nth={channel}", 8, 8), red_of(drawn[channel]))


@pytest.mark.exhaustive
def test_a_map_lies_over_the_input_as_lightly_as_wanted(open_page: Open, small: Path) -> None:
    page = open_page(small, "#layer=stem.conv").page
    page.wait_for_selector(".tiles svg")
    assert page.get_attribute("img.under", "src") == page.get_attribute("img[data-file]", "src")
    page.eval_on_selector("input.opacity", "each => { each.value = 40; each.dispatchEvent(new Event('input')); }")
    assert page.eval_on_selector("svg.map", "each => getComputedStyle(each).opacity") == "0.4"


@pytest.mark.parametrize(("height", "width"), [(8, 8), (2, 16), (16, 2)])
@pytest.mark.sample("2-16")
def test_an_input_is_as_large_as_the_map_over_it(open_page: Open, tmp_path: Path, height: int, width: int) -> None:
    grids = {"000-conv.png": drawn(maps(2, height, width))}
    run = write_run(tmp_path / "run", [row(0, "conv")], grids=grids, thumbnails=[picture_png()])
    page = open_page(run, "#layer=conv").page
    page.wait_for_selector(".tiles svg")
    boxes = [page.locator(case).bounding_box() for case in ("img.under", "svg.map")]
    assert boxes[0] == boxes[1]


@pytest.mark.exhaustive
def test_values_without_a_plane_are_cells_and_cannot_be_enlarged(open_page: Open, small: Path) -> None:
    page = open_page(small, "#layer=fc").page
    page.wait_for_selector(".tiles svg")
    assert page.locator("input.pick").count() == 0
    shown = [pixels(page, f".tiles svg >> nth={channel}", 1, 1) for channel in (0, 29)]
    assert np.array_equal(shown, red_of(maps(30, 1, 1)[[0, 29]]))


@pytest.mark.exhaustive
def test_a_plot_names_the_place_under_the_pointer_and_leads_there(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    plot = page.locator("svg.plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 40)
    assert page.inner_text("output.place >> nth=0") == "fc"
    page.mouse.click(box["x"] + 60, box["y"] + 40)
    page.wait_for_selector("#panel")
    assert page.inner_text("#panel-title") == "stem.conv"


@pytest.mark.exhaustive
def test_hostile_names_run_nothing_and_can_be_opened_and_filtered(open_page: Open, tmp_path: Path) -> None:
    rows = [row(i, name, kind=name, aliases=[name], inputs=list(HOSTILE_NAMES)) for i, name in enumerate(HOSTILE_NAMES)]
    names = dict.fromkeys(("name", "kind", "weights"), "".join(HOSTILE_NAMES))
    run = write_run(
        tmp_path / "hostile",
        rows,
        grids={"000-x.png": drawn(maps())},
        model=MODEL | names,
        inputs=[given("".join(HOSTILE_NAMES), steps=list(HOSTILE_NAMES))],
        warnings=list(HOSTILE_NAMES),
    )
    shown = [safe_text(name) for name in HOSTILE_NAMES]
    opened = open_page(run)
    page = opened.page
    assert opened.visible() == shown
    for number, name in enumerate(shown):
        page.locator("#table tbody a").nth(number).click()
        page.wait_for_selector("#panel[open]")
        assert page.text_content("#panel-title") == name
        page.keyboard.press("Escape")
        page.wait_for_selector("#panel", state="hidden")
        page.fill("#q", name)
        assert name in opened.visible() or " " in name
        page.select_option("#type", name)
        assert name in opened.visible() or " " in name
        page.select_option("#type", "")
        page.fill("#q", "")
        page.wait_for_function("document.querySelector('.later') === null")
    assert page.evaluate("window.pwned") is None
    assert opened.axe_violations() == []


@pytest.mark.parametrize(
    "fragment", ["#layer=nowhere", "#layer=%E0%A4%A", "#=&&==&sort=x&columns=<b>&type=<i>", "#q=%00"]
)
@pytest.mark.exhaustive
def test_a_fragment_that_means_nothing_does_no_harm(open_page: Open, small: Path, fragment: str) -> None:
    opened = open_page(small, fragment)
    assert not opened.page.is_visible("#panel")
    assert len(opened.visible()) == (0 if "q=" in fragment else 7)


@pytest.mark.exhaustive
def test_a_picture_of_the_whole_page_has_the_first_rows_of_a_long_table(open_page: Open, tmp_path: Path) -> None:
    rows = [row(i, f"layer.{i}", activation=statistics()) for i in range(300)]
    page = open_page(write_run(tmp_path / "long", rows)).page
    page.evaluate("document.querySelector('h1').style.marginBottom = '300vh'")  # the table is far below the window
    drawn = """() => {
      const frame = document.querySelector(".tall").getBoundingClientRect();
      const rows = [...document.querySelectorAll("#table tbody tr:not([hidden])")];
      const framed = rows.filter((row) => row.getBoundingClientRect().top < frame.bottom);
      const shown = (row) => row.querySelector("a").checkVisibility({ contentVisibilityAuto: true });
      return [framed.length, framed.filter(shown).length, rows.filter(shown).length];
    }"""
    page.wait_for_timeout(100)
    framed, shown, in_all = page.evaluate(drawn)
    assert shown == framed >= 20
    assert in_all < 50  # of the others, a browser draws those near the window only


def test_dark_pages_print_in_light_colours_without_controls(open_page: Open, small: Path) -> None:
    page = open_page(small, scheme="dark").page
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(0, 0, 0)"
    assert not page.locator("input:visible, select:visible, button:visible:not(thead *)").count()


@pytest.mark.exhaustive
def test_a_page_and_a_layer_print(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    whole = page.pdf(format="A4")
    assert whole.startswith(b"%PDF-")
    page.emulate_media(media="print")
    assert not page.is_visible("#q")
    assert page.is_visible("#table")
    page.emulate_media(media="screen")
    page.click("#table a >> text=stem.conv")
    page.wait_for_selector(".tiles svg")
    page.emulate_media(media="print")
    assert page.locator(".tiles svg").first.is_visible()
    assert not page.is_visible("#table")
    layer = page.pdf(format="A4")
    count = re.compile(rb"/Type\s*/Page\b")
    assert 1 <= len(count.findall(layer)) <= 3
