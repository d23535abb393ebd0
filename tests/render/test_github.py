from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookscope.render.github import annotations, escaped_data, escaped_property
from hookscope.results.check import CheckReport, Finding, RuleOutcome
from hookscope.text import printable, safe_text
from tests.render.checked import (
    CORRUPT,
    CORRUPT_TEXT,
    EVERY,
    FAILED,
    HOSTILE,
    HOSTILE_NAMES,
    KILLED,
    LONG_NAME,
    MANY,
    PASSING,
    RAISED,
    SKIPPING,
    UNTRUSTED,
    WARNED,
    hostile,
    outcome,
)
from tests.render.runner import Command, commands, read_data, read_property

anything = st.text(st.characters(exclude_categories=[]), max_size=60) | st.text("%0DA25:3C2,\r\n=", max_size=30)


@given(anything)
def test_the_runner_reads_data_as_it_was(text: str) -> None:
    escaped = escaped_data(text)
    assert not set(escaped) & set("\r\n")
    assert read_data(escaped) == text


@given(anything)
def test_the_runner_reads_a_property_as_it_was(text: str) -> None:
    escaped = escaped_property(text)
    assert not set(escaped) & set("\r\n:,")
    assert read_property(escaped) == text


def test_a_percent_sign_that_looks_like_an_escape_stays_one() -> None:
    assert escaped_data("100%0A") == "100%250A"
    assert escaped_property("a:b,c%\r\n") == "a%3Ab%2Cc%25%0D%0A"


def test_nothing_is_said_of_what_passes_quietly() -> None:
    assert annotations([PASSING, SKIPPING]) == ""
    assert annotations([]) == ""


def test_each_rule_that_objects_is_an_annotation_with_its_findings_line_by_line() -> None:
    assert commands(annotations([FAILED])) == [
        Command(
            "error",
            {"title": "hookscope · models/broken.pt · batchnorm-variance"},
            "layer1.0.bn1.running_var: 3 of 64 variances are below zero: -0.5.\n"
            "bn1.running_var: 1 of 64 variances is zero (limit: above 0).",
        ),
        Command(
            "error",
            {"title": "hookscope · models/broken.pt · dead-channels"},
            "layer1.0.relu: 64 of 64 channels are zero over 2 inputs (limit 50%).",
        ),
        Command(
            "warning",
            {"title": "hookscope · models/broken.pt · dead-channels"},
            f"{LONG_NAME}: 9 of 64 channels are zero over 2 inputs (limit 5%).",
        ),
    ]


def test_what_a_reader_must_see_is_a_warning() -> None:
    assert [each.data for each in commands(annotations([WARNED]))] == [
        "layer2.0.relu#1: 12 of 128 channels are zero over 2 inputs (limit 5%).",
        "Only 2 inputs were given.",
    ]


def test_what_could_not_be_checked_is_an_error_that_is_said_once() -> None:
    (killed,) = commands(annotations([KILLED]))
    title = {"title": "hookscope · models/huge.pt · could not be checked"}
    assert killed == Command("error", title, KILLED.error)
    (corrupt,) = commands(annotations([CORRUPT]))
    assert corrupt == Command("error", {"title": "hookscope · models/corrupt.pt · integrity"}, CORRUPT_TEXT)


def test_errors_come_before_warnings_and_the_gravest_of_every_checkpoint_before_the_second_of_any() -> None:
    found = commands(annotations([WARNED, MANY, FAILED, RAISED, KILLED, UNTRUSTED]))
    assert [each.name for each in found] == ["error"] * 6 + ["warning"] * 3 + ["notice"]
    assert [each.properties["title"].removeprefix("hookscope · ") for each in found] == [
        "models/pickle.pt · integrity",
        "models/huge.pt · could not be checked",
        "net.py:build · could not be checked",
        "models/many.pt · dead-filter",
        "models/broken.pt · batchnorm-variance",
        "models/broken.pt · dead-channels",
        "models/many.pt · dead-filter",
        "models/broken.pt · dead-channels",
        "models/warned.pt · dead-channels",
        "models/warned.pt · note",
    ]


def test_ten_broken_checkpoints_all_have_one_of_the_ten_errors_that_github_shows() -> None:
    broken = [replace(FAILED, checkpoint=f"models/{n}.pt") for n in range(10)]
    shown = [each.properties["title"] for each in commands(annotations(broken)) if each.name == "error"][:10]
    assert {title.split(" · ")[1] for title in shown} == {report.checkpoint for report in broken}


def test_of_many_findings_ten_are_said_and_the_others_counted() -> None:
    error, warning = commands(annotations([MANY]))
    assert error.data.splitlines()[0] == "blocks.1.weight: 1 of 2000 filters are zero."
    for each in (error, warning):
        assert len(each.data.splitlines()) == 11
        assert each.data.endswith("\n… and 490 more")


def test_a_message_is_no_longer_than_the_runner_takes() -> None:
    findings = [Finding("forward", "fail", "x" * 5000, "y" * 5000) for _ in range(9)]
    (error,) = commands(annotations([replace(PASSING, outcomes=(outcome("forward", *findings),))]))
    *said, more = error.data.splitlines()
    assert len(error.data) <= 4096
    assert 1 <= len(said) < 9
    assert more == f"… and {9 - len(said)} more"


def test_a_title_is_no_longer_than_github_takes() -> None:
    for each in commands(annotations([replace(report, checkpoint="x" * 5000) for report in EVERY])):
        assert len(each.properties["title"]) <= 255


def test_a_file_in_the_repository_is_named_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repository" / "models").mkdir(parents=True)
    inside, outside = tmp_path / "repository" / "models" / "a, b:50%.pt", tmp_path / "outside.pt"
    inside.touch()
    outside.touch()
    monkeypatch.chdir(tmp_path / "repository")

    def files(*checkpoints: object) -> list[str | None]:
        reports = [replace(KILLED, checkpoint=str(checkpoint)) for checkpoint in checkpoints]
        return [each.properties.get("file") for each in commands(annotations(reports))]

    assert files("models/a, b:50%.pt", "models/../models/a, b:50%.pt", inside) == ["models/a, b:50%.pt"] * 3
    assert files(outside, "models", "models/none.pt", "resnet18", "x" * 5000, "a\0b") == [None] * 6
    monkeypatch.chdir(tmp_path)
    (elsewhere,) = commands(
        annotations([replace(KILLED, checkpoint="repository/models/a, b:50%.pt")], repository=tmp_path / "repository")
    )
    assert elsewhere.properties["file"] == "models/a, b:50%.pt"


def test_a_link_in_the_repository_is_named_and_not_what_it_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "store").touch()
    (tmp_path / "repository" / "latest.pt").symlink_to(tmp_path / "store")
    monkeypatch.chdir(tmp_path / "repository")
    (error,) = commands(annotations([replace(KILLED, checkpoint="latest.pt")]))
    assert error.properties["file"] == "latest.pt"


def test_a_file_whose_name_cannot_be_shown_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a\n::error::b").touch()
    (error,) = commands(annotations([replace(KILLED, checkpoint="a\n::error::b")]))
    assert set(error.properties) == {"title"}


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_are_read_as_text_and_stay_readable(name: str) -> None:
    text = annotations([hostile(name)])
    found = commands(text)
    assert len(found) == len(text.splitlines()) == 4  # could not be checked; failure; warning; notes
    assert [each.name for each in found] == ["error", "error", "warning", "notice"]
    titles = [
        f"hookscope · {printable(name)} · {what}" for what in ("could not be checked", "forward", "forward", "note")
    ]
    assert [each.properties for each in found] == [{"title": title.strip()} for title in titles]
    shown = safe_text(name)
    said = safe_text(f"It says: {name}.")
    assert found[1].data == f"{shown}: {said}"
    assert found[3].data == f"{shown}\n{safe_text(f'Warning: {name}')}"


def test_a_name_with_colons_needs_no_escape_but_where_a_line_could_start_with_it() -> None:
    (error, _failure, *_rest) = commands(annotations([hostile("aten::relu")]))
    assert error.data == "Error: aten::relu"
    (error, failure, *_rest) = commands(annotations([hostile("x\n::error::pwned")]))
    assert failure.data == r"x\n::error::pwned: It says: x\n::error::pwned."


def test_all_hostile_reports_together_make_no_command_but_ours() -> None:
    found = commands(annotations(HOSTILE))
    assert len(found) == 4 * len(HOSTILE)
    assert {each.name for each in found} == {"error", "warning", "notice"}
    assert all(each.properties["title"].startswith("hookscope · ") for each in found)


@given(name=anything, message=anything)
def test_any_text_at_all_makes_one_command_a_line(name: str, message: str) -> None:
    rule = RuleOutcome("forward", "fail", (Finding("forward", "fail", name, message),))
    (error,) = commands(annotations([CheckReport(name, (rule,))]))
    assert error.data == ": ".join(filter(None, (safe_text(name), safe_text(message))))
