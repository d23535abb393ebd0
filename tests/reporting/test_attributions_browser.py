"""The page of `attribute` in a real browser, without a network."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hookscope.commands.attribute.describe import describe_attributions
from hookscope.reporting.html.document import document_html
from hookscope.results.attributions import Attributions, Target
from hookscope.results.runs.reading import read_run
from tests.reporting.attributed import RESULT
from tests.reporting.chromium import Opened, Scheme, needs_chromium
from tests.reporting.stored import HOSTILE_NAMES

pytestmark = needs_chromium

Open = Callable[..., Opened]


@pytest.fixture
def open_page(open_html: Open, tmp_path: Path) -> Open:
    def save_and_open(result: Attributions, **options: object) -> Opened:
        return open_html(
            document_html(describe_attributions(result), read_run(result.save(tmp_path / "run"))), **options
        )

    return save_and_open


SHOWN = """[...document.querySelectorAll('.look')].map(look => {
  const maps = [...look.querySelectorAll('svg image:not(.ground)')];
  return maps.map(map => getComputedStyle(map).display === 'none' ? 'none' : map.getAttribute('opacity'));
})"""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.exhaustive
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(open_page: Open, width: int, scheme: Scheme) -> None:
    opened = open_page(RESULT, width=width, scheme=scheme)
    opened.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert opened.axe_violations() == []
    assert opened.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.exhaustive
def test_keys_choose_the_map_and_its_opacity(open_page: Open) -> None:
    page = open_page(RESULT).page
    assert page.evaluate(SHOWN) == [["1", "none"]] * 3
    page.locator(".opacity").nth(1).focus()
    for _ in range(30):
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(SHOWN) == [["1", "none"], ["none", "0.7"], ["1", "none"]]
    assert page.locator(".look").nth(1).locator(".about-map:visible dd").first.inner_text() == "-0.5000"
    page.locator(".opacity").nth(1).focus()
    page.keyboard.press("Home")
    assert page.evaluate("getComputedStyle(document.querySelectorAll('.ground')[1]).filter") == "none"


def test_the_map_lies_on_the_part_that_the_network_saw(open_page: Open) -> None:
    page = open_page(RESULT).page
    assert page.locator(".photograph").first.get_attribute("viewBox") == "0 0 100 60"
    assert page.locator(".unseen").first.get_attribute("d") == "M0 0H100V60H0zM20.0 0.0H80.0V60.0H20.0z"
    # The upper left cell of 4 x 4 over columns 20 to 80 reaches from 20 to 35 and from 0 to 15, its colour less far.
    most_opaque = page.evaluate(
        """async () => {
          const map = document.querySelector('image.layer');
          const picture = new Image(); picture.src = map.getAttribute('href'); await picture.decode();
          const canvas = document.createElement('canvas');
          canvas.width = picture.width; canvas.height = picture.height;
          const pen = canvas.getContext('2d'); pen.drawImage(picture, 0, 0);
          const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
          let x = 0, y = 0, all = 0;
          for (let i = 3; i < data.length; i += 4) {
            const at = (i - 3) / 4, opacity = data[i] > 200 ? 1 : 0;
            x += opacity * (at % canvas.width + .5);
            y += opacity * (Math.floor(at / canvas.width) + .5);
            all += opacity;
          }
          return [x / all / canvas.width * 100, y / all / canvas.height * 60];
        }"""
    )
    assert most_opaque == pytest.approx([23.75, 3.75], abs=4)


@pytest.mark.exhaustive
def test_the_checks_say_what_they_mean(open_page: Open) -> None:
    page = open_page(RESULT).page
    rows = page.locator("#belief tbody tr")
    assert [rows.nth(number).locator("td").last.inner_text() for number in range(3)] == ["ok", "failed", "ok"]
    assert "probability 0.41 → 0.06\trandom places 0.38" in rows.nth(2).inner_text()
    assert "runner-up class" in page.locator(".warning").nth(1).inner_text()


@pytest.mark.exhaustive
def test_hostile_names_stay_text(open_page: Open) -> None:
    targets = [Target(name, 1.0, None, 0.5) for name in HOSTILE_NAMES]
    maps = tuple(replace(RESULT.maps[0], target=target, layer=target.label) for target in targets)
    record = replace(RESULT.inputs[0], name=HOSTILE_NAMES[0], steps=HOSTILE_NAMES)
    layers = (replace(RESULT.layers[0], label=HOSTILE_NAMES[1], reason=HOSTILE_NAMES[2]),)
    model = replace(RESULT.model, name=HOSTILE_NAMES[3])
    hostile = replace(RESULT, model=model, inputs=(record,), maps=maps, layers=layers, warnings=HOSTILE_NAMES)
    page = open_page(hostile).page
    assert page.evaluate("window.pwned") is None
    assert page.locator("fieldset label").count() == len(targets)
    assert str(page.locator("fieldset label").first.text_content()).strip().startswith(HOSTILE_NAMES[0])
