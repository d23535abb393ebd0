"""The page about checkpoints, read as a parser reads it; `test_html_checks_browser.py` opens it."""

import base64
import io
import itertools
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hookscope.checks.rules import RULES
from hookscope.render.grids import draw_for_run, encode_png
from hookscope.render.html import checks
from hookscope.render.html.checks import read_evidence
from hookscope.results.activations import FeatureMaps
from hookscope.results.check import CheckReport, Finding, RuleOutcome
from hookscope.results.runs.reports import MARK
from tests.render import checked
from tests.render.checked import CORRUPT, CORRUPT_TEXT, EVERY, FAILED, LABELLED, MANY, PASSING, SKIPPING, WARNED
from tests.render.html_page import Page
from tests.render.stored import drawn, maps, picture_png

MEANINGS = {name: rule.meaning for name, rule in RULES.items()}
HOLDS = {name: rule.holds for name, rule in RULES.items()}
ROOM = 10**7

checks_html = partial(checks.checks_html, meanings=MEANINGS, holds=HOLDS)


PNG, GRID = drawn(maps())


def grid_of(path: str) -> dict[str, Any]:
    """Return what `run.json` says of a grid: the file has the layer's label for a name."""
    return asdict(replace(GRID, path=path, label=path.removeprefix("grids/")))


@pytest.fixture
def kept(tmp_path: Path) -> Callable[..., Path]:
    """Write the evidence of a checkpoint by hand."""

    def write(files: dict[str, bytes] | None = None, **record: Any) -> Path:
        folder = tmp_path / "evidence" / "broken.pt"
        pictures = files or {"grids/layer1.0.relu": PNG, "grids/layer1.0.bn1": picture_png()}
        for name, content in pictures.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        known = {
            "schema_version": 1,
            "tool": "hookscope",
            "verb": "check",
            "checkpoint": "broken.pt",
            "grids": [grid_of(name) for name in pictures if name.startswith("grids/")],
            "files": [*pictures, "report.json", "rows.csv"],
        }
        (folder / "run.json").write_text(json.dumps(known | record), encoding="utf-8")
        return folder

    return write


# What it says


def test_a_rule_that_passes_says_what_holds_and_another_what_it_looks_for() -> None:
    by_rule = dict(zip(RULES, itertools.cycle(("pass", "fail", "warn", "skipped", "off")), strict=False))
    outcomes = [
        RuleOutcome(rule, status, (Finding(rule, status, "", "It is so."),) if status in ("fail", "warn") else ())
        for rule, status in by_rule.items()
    ]
    page = Page(checks_html([replace(PASSING, outcomes=tuple(outcomes))]))
    for rule, status in by_rule.items():
        row = page.named(f"rule={rule}")
        assert (HOLDS[rule] in row) == (status == "pass")
        assert (MEANINGS[rule] in row) == (status != "pass")


def test_a_page_begins_as_every_report_does_and_allows_its_style_and_pictures_only(kept: Callable[..., Path]) -> None:
    page = checks_html([*EVERY, replace(FAILED, evidence=str(kept()))])
    assert page.startswith(MARK)
    assert "<script" not in page
    assert not re.findall(r"https?://|url\(|@import", page)
    Page(page).assert_self_contained()


def test_each_wrong_picture_stands_beside_what_it_is_taken_for(kept: Callable[..., Path]) -> None:
    first = picture_png()
    folder = kept({"overview.png": picture_png(), "pictures/0.png": first}, overview="overview.png")
    page = Page(checks_html([replace(LABELLED, evidence=str(folder))]))
    (shown,) = (each.attributes for each in page.all("img"))
    assert base64.b64decode((shown["src"] or "").partition(",")[2]) == first
    name = LABELLED.accuracy.worst[0].name if LABELLED.accuracy else ""
    assert shown["alt"] == f"{name}, as the network got it"
    (worst,) = [each for each in page.said("li") if each.startswith(name)]
    assert "is lynx, taken for cat" in worst


def test_a_single_checkpoint_has_its_verdict_model_inputs_and_every_rule_with_its_meaning() -> None:
    page = Page(checks_html([FAILED], seconds=2.25))
    assert page.said("h1") == ["1 checkpoint: 1 failed"]
    assert page.said("p", **{"class": "summary"}) == ["3 failures, 1 warning · 2.2 s"]
    assert page.said("h2") == ["models/broken.pt failed"]
    words = page.named("checkpoint=models-broken.pt")
    for expected in ("resnet18 (ResNet, width=2)", "11,689,512", "2 inputs, 3x224x224", "640 × 480 pixels", "cat.jpg"):
        assert expected in words
    for outcome in FAILED.outcomes:
        row = page.named(f"rule={outcome.rule}")
        words = (HOLDS if outcome.status == "pass" else MEANINGS)[outcome.rule]
        assert row.startswith(f"{outcome.status}{outcome.rule}{words}")
    assert page.named("rule=drift").endswith("No baseline was given.")
    assert page.named("rule=dead-channels").endswith("1 failure, 1 warning")


def test_findings_stand_before_the_rules_failures_first() -> None:
    text = checks_html([FAILED])
    page = Page(text)
    assert [each.partition(" ")[0] for each in page.said("li")] == ["fail", "fail", "fail", "warn"]
    assert "64 of 64 channels are zero over 2 inputs (limit 50%)." in page.named("rule=dead-channels&finding=1")
    assert text.index('<li class="warn"') < text.index('<tr role="row" id="rule=integrity"')


def test_skipped_and_switched_off_rules_say_so() -> None:
    page = Page(checks_html([SKIPPING]))
    assert page.named("rule=expectation").startswith("skipped")
    assert page.named("rule=expectation").endswith("No expectation is configured.")
    assert page.named("rule=zero-gradient").startswith("off")
    assert "No rule objects to it." in page.said("p")
    assert page.said("summary")[:2] == ["1 passed", "2 skipped, 1 off"]
    assert not [each for each in Page(checks_html([checked.KILLED])).said("summary") if "passed" in each]


def test_rules_stand_in_the_order_of_their_severity_and_those_without_a_verdict_apart() -> None:
    report = replace(FAILED, outcomes=(*SKIPPING.outcomes, *WARNED.outcomes[1:], *FAILED.outcomes[1:2]))
    page = Page(checks_html([report]))
    statuses = [each.text for each in page.all("td") if "class" in each.attributes]
    assert statuses == ["fail", "warn", "pass", "skipped", "skipped", "off"]
    [judged], [others] = (page.said("details", **{"class": name}) for name in ("rules judged", "rules"))
    assert judged.startswith("1 failed, 1 warned, 1 passed")
    assert others.startswith("2 skipped, 1 off")


def test_the_listing_does_not_say_the_name_of_a_checkpoint_twice() -> None:
    assert FAILED.model is not None
    named = replace(FAILED, model=replace(FAILED.model, name="broken.pt (resnet18)"))
    listing = Page(checks_html([PASSING, named])).said("table")[0]
    assert "models/broken.pt (resnet18)" in listing
    assert listing.count("broken.pt") == 1


def test_an_error_is_told_once_and_random_weights_call_for_a_look() -> None:
    assert " ".join(Page(checks_html([CORRUPT])).said("section")).count(CORRUPT_TEXT) == 1
    told = Page(checks_html([checked.KILLED])).said("p", **{"class": "warning fail"})
    assert told == [f"error {checked.KILLED.error}"]
    assert PASSING.model is not None
    random = replace(PASSING, model=replace(PASSING.model, random=True, weights="random, seed 0"))
    assert Page(checks_html([random])).said("dd", **{"class": "notable"}) == ["random, seed 0"]
    assert Page(checks_html([PASSING])).said("dd", **{"class": "notable"}) == []
    assert Page(checks_html([WARNED])).said("p", **{"class": "remark"}) == ["note Only 2 inputs were given."]


def test_of_several_checkpoints_the_most_severe_comes_first_and_the_table_leads_to_each() -> None:
    page = Page(checks_html([PASSING, WARNED, CORRUPT, FAILED]))
    order = ["models/corrupt.pt", "models/broken.pt", "models/warned.pt", "models/good.pt"]
    assert [each.split()[0] for each in page.said("h2")[1:]] == order
    assert page.said("a", **{"class": "name"})[:4] == order
    assert page.said("h1") == ["4 checkpoints: 2 failed, 2 passed"]


def test_no_checkpoint_at_all_is_a_page_too() -> None:
    page = Page(checks_html([]))
    assert (page.said("h1"), page.said("p", **{"class": "summary"})) == (["0 checkpoints"], ["0.0 s"])


def test_many_findings_are_all_there_most_of_them_folded() -> None:
    text = checks_html([MANY])
    page = Page(text)
    assert len(page.said("li")) == 1000
    assert "980 more findings" in page.said("summary")
    assert text[: text.index("<summary>")].count("<li class=") == 20


@pytest.mark.parametrize("reports", [EVERY, checked.HOSTILE, [FAILED], [FAILED] * 3])
def test_every_identifier_is_unique_and_every_link_leads_somewhere(reports: list[CheckReport]) -> None:
    page = Page(checks_html(reports))
    ids = page.ids()
    assert len(ids) == len(set(ids))
    assert not any(re.search(r"\s", each) for each in ids)
    links = [each.attributes["href"] or "" for each in page.all("a")]
    assert {link[1:] for link in links} <= set(ids)
    assert all(link.startswith("#") for link in links)


def test_links_name_the_checkpoint_where_there_are_several() -> None:
    ids = Page(checks_html([PASSING, FAILED, FAILED])).ids()
    for name in ("models-broken.pt", "models-broken.pt-2"):
        assert {f"checkpoint={name}", f"checkpoint={name}&rule=dead-channels&finding=2"} <= set(ids)


def test_a_rule_of_another_version_is_shown_without_its_meaning() -> None:
    report = replace(PASSING, outcomes=(RuleOutcome("<b>new", "warn", (Finding("<b>new", "warn", "", "It is new."),)),))
    assert Page(checks_html([report])).named("rule=<b>new") == "warn<b>new 1 warning"


# Evidence


def test_evidence_is_embedded_byte_for_byte_with_words_and_findings_lead_there(kept: Callable[..., Path]) -> None:
    folder = kept()
    page = Page(checks_html([replace(FAILED, evidence=str(folder))]))
    first, second = (picture.attributes for picture in page.all("img"))
    for attributes, name in ((first, "grids/layer1.0.relu"), (second, "grids/layer1.0.bn1")):
        content = (folder / name).read_bytes()
        kind, _, encoded = (attributes["src"] or "").partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(encoded) == content
        with Image.open(io.BytesIO(content)) as picture:
            assert (attributes["width"], attributes["height"]) == tuple(map(str, picture.size))
    assert (first["alt"] or "").startswith("Feature maps of layer1.0.relu")
    assert page.named("picture=1") == "Feature maps of layer1.0.relu"
    assert page.said("a", href="#picture=1") == ["layer1.0.relu"]


def test_the_overview_stays_in_the_folder(kept: Callable[..., Path]) -> None:
    folder = kept({"overview.png": picture_png(), "grids/layer1.0.relu": PNG}, overview="overview.png")
    page = Page(checks_html([replace(FAILED, evidence=str(folder))]))
    (grid,) = (picture.attributes for picture in page.all("img"))
    assert (grid["alt"] or "").startswith("Feature maps of layer1.0.relu")


def test_a_finding_about_a_parameter_leads_to_its_layer(kept: Callable[..., Path]) -> None:
    folder = kept({"grids/layer1.0.bn1": PNG})
    page = Page(checks_html([replace(FAILED, evidence=str(folder))]))
    assert page.said("a", href="#picture=1") == ["layer1.0.bn1.running_var"]


def test_the_alternative_text_holds_what_the_grid_says_of_itself(kept: Callable[..., Path]) -> None:
    values = maps(2, 3, 4).astype(np.float32)  # (C, H, W)
    shown = FeatureMaps(0, "a b/c", "ReLU", 0, "maps", values, None, 2, (2, 3, 4))
    picture, grid = draw_for_run(shown, "grids/000-a-b-c.png", input_name="cat.jpg")
    evidence = read_evidence(kept({grid.path: encode_png(picture)}, grids=[asdict(grid)]), ROOM)
    [picture] = evidence.pictures
    assert picture.layer == "a b/c"
    for words in ("Feature maps of a b/c: ", "cat.jpg", "2 channels"):
        assert words in picture.alternative


def test_what_is_gone_or_damaged_is_counted_and_the_rest_is_shown(kept: Callable[..., Path]) -> None:
    names = [f"grids/{name}" for name in ("gone", "cut", "text", "good")]
    folder = kept(dict(zip(names, (PNG, PNG[: len(PNG) // 2], b"<svg onload=alert(1)>", PNG), strict=True)))
    (folder / names[0]).unlink()
    evidence = read_evidence(folder, ROOM)
    assert [each.layer for each in evidence.pictures] == ["good"]
    assert evidence.remarks == ("3 pictures of the folder cannot be read any more.",)
    assert evidence.byte_count == len(PNG)


@pytest.mark.parametrize("name", ["grids/../../secret.png", "../secret.png", "/secret.png", "grids/\\0.png", ""])
def test_only_files_inside_the_folder_are_read(kept: Callable[..., Path], name: str) -> None:
    folder = kept({"grids/good": picture_png()}, grids=[grid_of(name), grid_of("grids/good")])
    (folder.parent / "secret.png").write_bytes(PNG)
    evidence = read_evidence(folder, ROOM)
    assert [each.layer for each in evidence.pictures] == ["good"]
    assert evidence.remarks == ("1 picture of the folder cannot be read any more.",)


def test_links_are_not_followed(kept: Callable[..., Path], tmp_path: Path) -> None:
    folder = kept({"grids/a": PNG, "pictures/b": PNG}, grids=[grid_of("grids/a"), grid_of("pictures/b")])
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a").write_bytes(PNG)
    (folder / "pictures" / "b").unlink()
    (folder / "pictures" / "b").symlink_to(tmp_path / "outside" / "a")
    (folder / "grids" / "a").unlink()
    (folder / "grids").rmdir()
    (folder / "grids").symlink_to(tmp_path / "outside")
    evidence = read_evidence(folder, ROOM)
    assert evidence.pictures == []
    assert evidence.remarks == ("2 pictures of the folder cannot be read any more.",)


def test_a_folder_that_has_become_a_link_or_holds_a_pipe_for_a_record_is_not_read(
    kept: Callable[..., Path], tmp_path: Path
) -> None:
    folder = kept()
    assert len(read_evidence(folder, ROOM).pictures) == 2
    link = tmp_path / "link"
    link.symlink_to(folder)
    evidence = read_evidence(link, ROOM)
    assert evidence.pictures == ()
    assert "has become a link" in evidence.remarks[0]
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    assert read_evidence(folder, ROOM).pictures == ()


UNFIT = [f'{{"verb": "check", "{name}": {value}}}' for name in ("files", "grids") for value in (3, [3])]


@pytest.mark.parametrize("record", ["", "[]", "3", "{}", *UNFIT])
def test_a_folder_without_a_sound_record_leaves_a_remark(kept: Callable[..., Path], record: str) -> None:
    folder = kept()
    (folder / "run.json").write_text(record, encoding="utf-8")
    page = Page(checks_html([replace(FAILED, evidence=str(folder))]))
    assert not page.all("img")
    assert any(each.startswith("Its pictures are not shown.") for each in page.said("p", **{"class": "dim"}))


def test_pictures_beyond_the_room_stay_in_the_folder(
    kept: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kept({"grids/a": PNG, "grids/b": PNG})
    evidence = read_evidence(folder, 2 * len(PNG) - 1)
    assert [each.layer for each in evidence.pictures] == ["a"]
    assert evidence.remarks == ("1 picture did not fit here and are in the folder only.",)
    # All checkpoints of a page share it.
    monkeypatch.setattr("hookscope.render.html.checks.BUDGET", 3 * len(PNG))
    failed = replace(FAILED, evidence=str(folder))
    page = checks_html([failed, replace(failed, checkpoint="other.pt")])
    assert page.count("<img ") == 3
    assert read_evidence(folder, 0).pictures == []
