import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from jsonschema import Draft4Validator

from hookscope.reporting.sarif import RuleText, checks_to_sarif
from hookscope.results.check import CheckReport, Finding
from tests.reporting.checked import (
    CORRUPT,
    CORRUPT_TEXT,
    EVERY,
    FAILED,
    HOSTILE,
    KILLED,
    LABELLED,
    LONG_NAME,
    PASSING,
    SKIPPING,
    WARNED,
    anything,
    hostile,
    outcome,
)

SCHEMA = Draft4Validator(json.loads(Path(__file__).with_name("sarif-schema-2.1.0.json").read_text(encoding="utf-8")))

RULES = (
    RuleText("integrity", "fail", "The file is complete.", "integrity\nRead to its end."),
    RuleText("dead-channels", "warn", "Channels are dead.", "dead-channels\nSee why."),
    RuleText("unused-parameter", "off", "No gradient arrives.", "unused-parameter\nSee why."),
    RuleText("batchnorm-variance", "fail", "A variance is not positive.", "batchnorm-variance\nSee why."),
)


def sarif(*reports: CheckReport, **options: Any) -> dict[str, Any]:
    """Return the one run of the log, which keeps to the schema."""
    document = json.loads(checks_to_sarif(reports, RULES, version="0.1.0", **options))
    SCHEMA.validate(document)
    [run] = document["runs"]
    return run  # type: ignore[no-any-return]


def places(run: dict[str, Any]) -> list[str]:
    """Return the file of each result that has one."""
    locations = [each for result in run["results"] for each in result.get("locations", ())]
    actual = [location["physicalLocation"] for location in locations if "physicalLocation" in location]
    assert all(each["artifactLocation"]["uriBaseId"] == "%SRCROOT%" for each in actual)
    return [each["artifactLocation"]["uri"] for each in actual]


def fingerprints(run: dict[str, Any]) -> list[str]:
    return [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]


@pytest.mark.parametrize("reports", [(), EVERY, HOSTILE], ids=["none", "every kind", "hostile"])
def test_every_log_keeps_to_the_schema_of_oasis(reports: Sequence[CheckReport]) -> None:
    run = sarif(*reports, instead="hookscope.toml")
    # What GitHub's code scanning asks for above the schema.
    for rule in run["tool"]["driver"]["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["fullDescription"]["text"]
        assert rule["help"]["text"]
    for result in run["results"]:
        assert result["message"]["text"].strip()
        [location] = result["locations"]
        assert location["physicalLocation"]["region"].keys() == {"startLine", "startColumn", "endLine", "endColumn"}


@given(anything)
def test_whatever_a_name_holds_the_log_keeps_to_the_schema(name: str) -> None:
    run = sarif(hostile(name))
    assert all(text.isprintable() for result in run["results"] for text in [result["message"]["text"]])


def test_rules_are_those_of_the_registry_and_results_point_at_them() -> None:
    run = sarif(FAILED)
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [*(rule.identifier for rule in RULES), "examination"]
    assert [rule["help"]["text"] for rule in rules[:-1]] == [rule.help for rule in RULES]
    assert [rule["defaultConfiguration"] for rule in rules] == [
        {"level": "error"},
        {"level": "warning"},
        {"level": "error", "enabled": False},
        {"level": "error"},
        {"level": "error"},
    ]
    assert [rules[result["ruleIndex"]]["id"] for result in run["results"]] == [r["ruleId"] for r in run["results"]]


def test_each_finding_is_a_result_with_level_message_and_layer_failures_first() -> None:
    results = sarif(WARNED, FAILED, instead="hookscope.toml")["results"]
    assert [(result["ruleId"], result["level"]) for result in results] == [
        ("batchnorm-variance", "error"),
        ("batchnorm-variance", "error"),
        ("dead-channels", "error"),
        ("dead-channels", "warning"),
        ("dead-channels", "warning"),
    ]
    layers = [result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] for result in results]
    assert layers[-1] == LONG_NAME
    assert layers[2] == "layer1.0.relu"
    assert results[2]["message"]["text"] == (
        "models/broken.pt: layer1.0.relu: 64 of 64 channels are zero over 2 inputs (limit 50%)."
    )


def test_a_result_lies_in_the_checkpoint_if_that_is_a_file_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    (repository / "my models").mkdir(parents=True)
    inside, outside = repository / "my models" / "ä b.pt", tmp_path / "elsewhere.pt"
    inside.touch()
    outside.touch()
    (repository / "net.py").touch()
    monkeypatch.chdir(repository)
    places_of = {
        "my models/ä b.pt": "my models/ä b.pt",
        str(inside): "my models/ä b.pt",
        "net.py:build": "net.py",
        **dict.fromkeys((str(outside), "../elsewhere.pt", "resnet18", "missing.pt"), "ci.toml"),
    }
    for name, place in places_of.items():
        run = sarif(replace(FAILED, checkpoint=name), instead="ci.toml")
        assert {unquote(uri) for uri in places(run)} == {place}
        message = run["results"][0]["message"]["text"]
        assert message.startswith(f"{name}: ") == (place == "ci.toml")  # else the place says it
    for uri in places(sarif(replace(FAILED, checkpoint="my models/ä b.pt"))):
        assert uri.isascii()
        assert not urlsplit(uri).scheme
        assert not uri.startswith("/")
    assert places(sarif(FAILED, repository=repository)) == []  # no file, and nothing to put in its place


def test_fingerprints_stay_while_numbers_in_messages_change_and_no_two_are_equal() -> None:
    def failing(message: str, checkpoint: str = "/tmp/x/a.pt") -> CheckReport:
        findings = [Finding("dead-channels", "fail", where, message) for where in ("relu", "conv", "conv")]
        return replace(FAILED, checkpoint=checkpoint, outcomes=(outcome("dead-channels", *findings),))

    first = fingerprints(sarif(failing("3 of 64 channels are zero.")))
    assert len(set(first)) == 3
    assert fingerprints(sarif(failing("4 of 64 channels are zero."))) == first
    assert fingerprints(sarif(PASSING, failing("3 of 64 channels are zero."))) == first
    assert fingerprints(sarif(failing("3 of 64.", checkpoint="/tmp/y/a.pt"))) == first
    assert not set(fingerprints(sarif(failing("3 of 64.", checkpoint="b.pt")))) & set(first)


def test_a_clean_run_says_so() -> None:
    run = sarif(PASSING, SKIPPING)
    [invocation] = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (True, 0)
    assert run["results"] == []
    assert [
        toolexecutionnotification["message"]["text"]
        for toolexecutionnotification in invocation["toolExecutionNotifications"]
    ] == [
        "models/skipping.pt: skipped expectation: No expectation is configured.",
        "models/skipping.pt: skipped drift: No baseline was given.",
    ]


def test_what_became_of_labelled_pictures_is_a_note() -> None:
    [note] = sarif(LABELLED)["invocations"][0]["toolExecutionNotifications"]
    assert note["level"] == "note"
    words = "15 of 20 labelled pictures (75.0%) are classified right"
    assert note["message"]["text"].startswith(f"{LABELLED.checkpoint}: data: {words}")


def test_what_could_not_be_checked_is_an_unsuccessful_run_with_a_result() -> None:
    run = sarif(PASSING, KILLED)
    [invocation] = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 3)
    [error] = [
        toolexecutionnotification
        for toolexecutionnotification in invocation["toolExecutionNotifications"]
        if toolexecutionnotification["level"] == "error"
    ]
    assert error["message"]["text"] == f"models/huge.pt: {KILLED.error}"
    [result] = run["results"]
    assert (result["ruleId"], result["level"]) == ("examination", "error")
    [corrupt] = sarif(CORRUPT)["results"]  # a finding says it already
    assert (corrupt["ruleId"], corrupt["message"]["text"]) == ("integrity", f"models/corrupt.pt: {CORRUPT_TEXT}")


def test_a_run_without_checkpoints_is_not_clean() -> None:
    assert not sarif()["invocations"][0]["executionSuccessful"]
    run = sarif(error="No file matches 'x/*.pt'.", exit_code=5, instead="hookscope.toml")
    [invocation] = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 5)
    assert [
        toolexecutionnotification["message"]["text"]
        for toolexecutionnotification in invocation["toolExecutionNotifications"]
    ] == ["No file matches 'x/*.pt'."]
    [result] = run["results"]
    assert result["message"]["text"] == "No file matches 'x/*.pt'."
    assert places(run) == ["hookscope.toml"]


def test_a_message_holds_neither_placeholders_nor_links() -> None:
    finding = Finding("dead-channels", "fail", "", "A {0} and [a link](https://example.com) and [2].")
    [result] = sarif(replace(FAILED, checkpoint="a.pt", outcomes=(outcome("dead-channels", finding),)))["results"]
    assert result["message"]["text"] == r"a.pt: A {{0}} and [a link]\x28https://example.com) and [2]."


@pytest.mark.exhaustive
def test_no_more_results_than_github_takes_warnings_left_out_first() -> None:
    findings = [Finding("dead-channels", "warn" if n % 2 else "fail", f"{n}", "Dead.") for n in range(50_010)]
    text = checks_to_sarif([replace(FAILED, outcomes=(outcome("dead-channels", *findings),))], RULES, version="0.1.0")
    [run] = json.loads(text)["runs"]
    assert {result["level"] for result in run["results"]} == {"error"}
    assert len(run["results"]) == 25_000
    [message] = [
        toolexecutionnotification
        for toolexecutionnotification in run["invocations"][0]["toolExecutionNotifications"]
        if toolexecutionnotification["level"] == "warning"
    ]
    assert (
        message["message"]["text"]
        == "25,010 more results are left out: GitHub takes 25,000 at most. --format json lists all."
    )
