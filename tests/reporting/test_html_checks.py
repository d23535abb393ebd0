"""The page about checkpoints, read as a parser reads it; `test_html_checks_browser.py` opens it."""

import base64
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hookscope.commands.check.page import checks_html, read_evidence
from hookscope.reporting.grids import draw_for_run, encode_png
from hookscope.results.activations import FeatureMaps
from hookscope.results.check import CheckReport, Finding, RuleOutcome
from hookscope.results.runs.reports import MARK
from hookscope.rules import RULES
from tests.reporting import checked
from tests.reporting.checked import CORRUPT, CORRUPT_TEXT, EVERY, FAILED, LABELLED, MANY, PASSING, SKIPPING, WARNED
from tests.reporting.html_page import Page
from tests.reporting.stored import drawn, maps, picture_png

MEANINGS = {name: rule.meaning for name, rule in RULES.items()}
ROOM = 10**7


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
        expected = {
            "schema_version": 1,
            "tool": "hookscope",
            "verb": "check",
            "checkpoint": "broken.pt",
            "grids": [grid_of(name) for name in pictures if name.startswith("grids/")],
            "files": [*pictures, "report.json", "rows.csv"],
        }
        (folder / "run.json").write_text(json.dumps(expected | record), encoding="utf-8")
        return folder

    return write


# What it says


def rules_of(page: Page) -> dict[str, list[str]]:
    """Return the cells of the last table by rule."""
    return {row[1]: row for row in page.tables()[-1]}


def test_every_rule_says_what_it_looks_for() -> None:
    by_rule = dict(zip(RULES, itertools.cycle(("pass", "fail", "warn", "skipped", "off")), strict=False))
    outcomes = [
        RuleOutcome(rule, status, (Finding(rule, status, "", "It is so."),) if status in ("fail", "warn") else ())
        for rule, status in by_rule.items()
    ]
    rows = rules_of(Page(checks_html([replace(PASSING, outcomes=tuple(outcomes))])))
    assert all(meaning in rows[rule] for rule, meaning in MEANINGS.items())


def test_a_page_begins_as_every_report_does_and_loads_nothing(kept: Callable[..., Path]) -> None:
    page = checks_html([*EVERY, replace(FAILED, evidence=str(kept()))])
    assert page.startswith(MARK)
    assert not re.findall(r"https?://(?!www\.w3\.org/)|url\(|@import", page)
    Page(page).assert_self_contained()
    Page(checks_html([FAILED])).assert_self_contained()


def test_each_wrong_picture_stands_beside_what_it_is_taken_for(kept: Callable[..., Path]) -> None:
    first = picture_png()
    folder = kept({"overview.png": picture_png(), "pictures/0.png": first}, overview="overview.png")
    page = Page(checks_html([replace(LABELLED, evidence=str(folder))]))
    (shown,) = (element.attributes for element in page.all("img"))
    assert base64.b64decode((shown["src"] or "").partition(",")[2]) == first
    name = LABELLED.accuracy.worst[0].name if LABELLED.accuracy else ""
    assert shown["alt"] == f"{name}, as the network got it"
    (worst,) = [text for text in page.said("details") if text.startswith(name)]
    assert "labelled lynx (probability 0.02) taken for cat (probability 0.96)" in worst


def test_a_single_checkpoint_has_its_verdict_model_inputs_and_every_rule_with_its_meaning() -> None:
    page = Page(checks_html([FAILED]))
    assert page.said("h1") == ["models/broken.pt · check"]
    assert page.said("h2")[0] == "models/broken.pt: failed · 3 failures, 1 warning · resnet18 · 2 inputs · 1.5 s"
    words = page.said("main")[0]
    for expected in ("resnet18 (ResNet, width=2)", "11,689,512", "2 inputs, 3x224x224", "640 × 480 pixels", "cat.jpg"):
        assert expected in words
    rows = rules_of(page)
    for outcome in FAILED.outcomes:
        assert rows[outcome.rule][0] == outcome.status
        assert MEANINGS[outcome.rule] in rows[outcome.rule]
    assert rows["drift"][-1] == "No baseline was given."
    assert "1 failure, 1 warning" in rows["dead-channels"]


def test_rules_stand_in_the_order_of_their_severity() -> None:
    report = replace(FAILED, outcomes=(*SKIPPING.outcomes, *WARNED.outcomes[1:], *FAILED.outcomes[1:2]))
    page = Page(checks_html([report]))
    assert [row[0] for row in page.tables()[-1][1:]] == ["fail", "warn", "pass", "skipped", "skipped", "off"]
    assert "1 failed, 1 warned, 1 passed, 2 skipped, 1 off" in page.said("h3")


def test_the_verdicts_do_not_say_the_name_of_a_checkpoint_twice() -> None:
    assert FAILED.model is not None
    named = replace(FAILED, model=replace(FAILED.model, name="broken.pt (resnet18)"))
    verdicts = Page(checks_html([PASSING, named])).tables()[0]
    findings = "3 failures, 1 warning: batchnorm-variance, dead-channels"
    assert verdicts[1] == ["failed", "models/broken.pt", "resnet18", findings]


def test_an_error_is_told_once_and_random_weights_call_for_a_look() -> None:
    assert " ".join(Page(checks_html([CORRUPT])).said("section")).count(CORRUPT_TEXT) == 1
    message = Page(checks_html([checked.KILLED])).said("p", **{"class": "warning fail"})
    assert message == [f"error: {checked.KILLED.error}"]
    assert PASSING.model is not None
    random = replace(PASSING, model=replace(PASSING.model, random=True, weights="random, seed 0"))
    assert Page(checks_html([random])).said("dd", **{"class": "notable"}) == ["random, seed 0"]
    assert Page(checks_html([PASSING])).said("dd", **{"class": "notable"}) == []
    assert Page(checks_html([WARNED])).said("p", **{"class": "remark"}) == ["note Only 2 inputs were given."]


def test_of_several_checkpoints_the_most_severe_comes_first_and_the_table_leads_to_each() -> None:
    page = Page(checks_html([PASSING, WARNED, CORRUPT, FAILED]))
    order = ["models/corrupt.pt", "models/broken.pt", "models/warned.pt", "models/good.pt"]
    headings = [text.partition(":")[0] for text in page.said("h2")]
    assert [heading for heading in headings if heading.startswith("models")] == order
    assert page.said("a", **{"class": "name"})[:4] == order
    assert headings[0] == "4 checkpoints"


def test_no_checkpoint_at_all_is_a_page_too() -> None:
    page = Page(checks_html([]))
    assert (page.said("h1"), page.said("h2")[0]) == (["0 checkpoints · check"], "0 checkpoints · 0.0 s")


def test_of_many_findings_the_first_are_seen_and_the_others_folded_or_counted() -> None:
    page = Page(checks_html([MANY]))
    assert len([element for element in page.all("li") if "class" in element.attributes]) == 200
    assert "188 more findings" in page.said("summary")
    assert "800 more findings in --format json only." in page.said("p", **{"class": "dim"})


@pytest.mark.parametrize("reports", [EVERY, checked.HOSTILE, [FAILED], [FAILED] * 3])
def test_every_identifier_is_unique_and_every_link_leads_somewhere(reports: list[CheckReport]) -> None:
    page = Page(checks_html(reports))
    ids = page.ids()
    assert len(ids) == len(set(ids))
    assert not any(re.search(r"\s", each) for each in ids)
    links = [element.attributes["href"] or "" for element in page.all("a")]
    assert {link[1:] for link in links} <= set(ids)
    assert all(link.startswith("#") for link in links)


def test_a_rule_of_another_version_is_shown_without_its_meaning() -> None:
    report = replace(PASSING, outcomes=(RuleOutcome("<b>new", "warn", (Finding("<b>new", "warn", "", "It is new."),)),))
    assert rules_of(Page(checks_html([report])))["<b>new"] == ["warn", "<b>new", "1 warning", ""]


# Evidence


def test_evidence_is_embedded_byte_for_byte_with_words_and_findings_lead_there(kept: Callable[..., Path]) -> None:
    folder = kept()
    page = Page(checks_html([PASSING, replace(FAILED, evidence=str(folder))]))
    first, second = (picture.attributes for picture in page.all("img"))
    for attributes, name in ((first, "grids/layer1.0.relu"), (second, "grids/layer1.0.bn1")):
        kind, _, encoded = (attributes["src"] or "").partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(encoded) == (folder / name).read_bytes()
    assert (first["alt"] or "").startswith("Feature maps of layer1.0.relu")
    links = {link.text: link.attributes["href"] for link in page.all("a", **{"class": "name"})}
    # What is about a parameter leads to its layer.
    for name, layer in (("layer1.0.relu", "layer1.0.relu"), ("layer1.0.bn1.running_var", "layer1.0.bn1")):
        [place] = [
            element
            for element in page.all("div")
            if element.attributes.get("aria-label") == f"{layer} of models/broken.pt, picture"
        ]
        assert links[name] == f"#{place.attributes['id']}"


def test_the_alternative_text_holds_what_the_grid_says_of_itself(kept: Callable[..., Path]) -> None:
    values = maps(2, 3, 4).astype(np.float32)  # (C, H, W)
    shown = FeatureMaps(0, "a b/c", "ReLU", 0, "maps", values, None, 2, (2, 3, 4))
    picture, grid = draw_for_run(shown, "grids/000-a-b-c.png", input_name="cat.jpg")
    folder = kept({grid.path: encode_png(picture)}, grids=[asdict(grid)])
    [shown_picture] = Page(checks_html([replace(FAILED, evidence=str(folder))])).all("img")
    for words in ("Feature maps of a b/c: ", "cat.jpg", "2 channels"):
        assert words in (shown_picture.attributes["alt"] or "")


def test_what_is_gone_or_damaged_is_counted_and_the_rest_is_shown(kept: Callable[..., Path]) -> None:
    names = [f"grids/{name}" for name in ("gone", "cut", "text", "good")]
    folder = kept(dict(zip(names, (PNG, PNG[: len(PNG) // 2], b"<svg onload=alert(1)>", PNG), strict=True)))
    (folder / names[0]).unlink()
    evidence = read_evidence(folder, ROOM)
    assert [grid.label for grid in evidence.grids] == ["good"]
    assert evidence.remarks == ["3 pictures of the folder cannot be read any more."]
    assert evidence.byte_count == len(PNG)


@pytest.mark.parametrize("name", ["grids/../../secret.png", "../secret.png", "/secret.png", "grids/\\0.png", ""])
def test_only_files_inside_the_folder_are_read(kept: Callable[..., Path], name: str) -> None:
    folder = kept({"grids/good": picture_png()}, grids=[grid_of(name), grid_of("grids/good")])
    (folder.parent / "secret.png").write_bytes(PNG)
    evidence = read_evidence(folder, ROOM)
    assert [grid.label for grid in evidence.grids] == ["good"]
    assert evidence.remarks == ["1 picture of the folder cannot be read any more."]


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
    assert evidence.pictures == {}
    assert evidence.remarks == ["2 pictures of the folder cannot be read any more."]


def test_a_folder_that_has_become_a_link_or_holds_a_pipe_for_a_record_is_not_read(
    kept: Callable[..., Path], tmp_path: Path
) -> None:
    folder = kept()
    assert len(read_evidence(folder, ROOM).pictures) == 2
    link = tmp_path / "link"
    link.symlink_to(folder)
    evidence = read_evidence(link, ROOM)
    assert evidence.pictures == {}
    assert "is now a symbolic link" in evidence.remarks[0]
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    assert read_evidence(folder, ROOM).pictures == {}


UNFIT = [f'{{"verb": "check", "{name}": {value}}}' for name in ("files", "grids") for value in (3, [3])]


@pytest.mark.parametrize("record", ["", "[]", "3", "{}", *UNFIT])
def test_a_folder_without_a_sound_record_leaves_a_remark(kept: Callable[..., Path], record: str) -> None:
    folder = kept()
    (folder / "run.json").write_text(record, encoding="utf-8")
    page = Page(checks_html([replace(FAILED, evidence=str(folder))]))
    assert not page.all("img")
    assert any(text.startswith("Its pictures are not shown.") for text in page.said("p"))


def test_pictures_beyond_the_room_stay_in_the_folder(
    kept: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kept({"grids/a": PNG, "grids/b": PNG})
    evidence = read_evidence(folder, 2 * len(PNG) - 1)
    assert [grid.label for grid in evidence.grids] == ["a"]
    assert evidence.remarks == ["1 picture did not fit here: see the folder."]
    # All checkpoints of a page share it.
    monkeypatch.setattr("hookscope.commands.check.page.BUDGET", 3 * len(PNG))
    failed = replace(FAILED, evidence=str(folder))
    other = shutil.copytree(folder, folder.with_name("other.pt"))
    page = checks_html([failed, replace(failed, checkpoint="other.pt", evidence=str(other))])
    assert page.count("<img ") == 3
    assert read_evidence(folder, 0).pictures == {}
