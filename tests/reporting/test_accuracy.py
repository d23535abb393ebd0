"""What every rendering of a report says of labelled pictures."""

import json
from dataclasses import asdict, replace
from xml.etree import ElementTree as ET

import pytest

from hookscope.commands.check.page import checks_html
from hookscope.reporting.github import checks_to_markdown
from hookscope.reporting.junit import checks_to_junit
from hookscope.results.accuracy import Accuracy, ClassAccuracy, accuracy_words, lowest_words
from hookscope.results.check import Finding, checks_to_json
from tests.reporting.checked import LABELLED, PASSING, outcome
from tests.reporting.html_page import Page

# 50.9% to 91.3% is Clopper and Pearson's interval for 15 of 20.
WORDS = (
    "15 of 20 labelled pictures (75.0%) are classified right, and of all such pictures 50.9% to 91.3% (95% confidence)."
    " Lowest: 'lynx' 3 of 8 (4 taken for 'cat')."
)


def test_text_markdown_and_junit_have_the_same_sentence() -> None:
    assert WORDS in " ".join(str(LABELLED).split())
    assert f"- data: {WORDS}" in checks_to_markdown([LABELLED]).replace("`", "")
    (output,) = ET.fromstring(checks_to_junit([LABELLED]).partition("\n")[2]).iter("system-out")
    assert f"data: {WORDS}" in (output.text or "")
    assert "labelled pictures" not in checks_to_markdown([PASSING])


def of_labels(*rows: tuple[str, int, int, str, int]) -> Accuracy:
    """Return the accuracy of (label, pictures, right, mistaken for, how many for that)."""
    classes = tuple(
        ClassAccuracy(label, (at,), count, right, other, often)
        for at, (label, count, right, other, often) in enumerate(rows)
    )
    count, right = sum(class_name.count for class_name in classes), sum(class_name.right for class_name in classes)
    return Accuracy("val", "labels are names of classes", len(rows), count, right, classes)


def test_labels_that_are_taken_for_one_another_are_named() -> None:
    two = of_labels(("a", 12, 0, "b", 12), ("b", 12, 2, "a", 7), ("c", 12, 1, "a", 9), ("d", 12, 12, "", 0))
    assert lowest_words(two) == (
        " Lowest: 'a' 0 of 12 (12 taken for 'b'). 2 labels are mostly taken for one another ('a' for 'b', 'b' for 'a'):"
        " are the classes in the order of the labels? --classes names them."
    )
    names = ["1", "10", "2", "3", "4"]  # sorted as texts, where the network has 1, 2, 3, 4, 10
    shifted = of_labels(
        ("1", 9, 9, "", 0),
        *((name, 9, 0, other, 9) for name, other in zip(names[1:], ["2", "3", "4", "10"], strict=True)),
    )
    asked = " 4 labels are mostly taken for one another ('10' for '2', '2' for '3', '3' for '4' and 1 more)"
    assert asked in lowest_words(shifted)


def test_labels_in_another_spelling_than_the_classes_are_named_too() -> None:
    rows = (("tiger_cat", 12, 0, "Egyptian cat", 12), ("egyptian_cat", 12, 0, "tiger cat", 12))
    asked = "2 labels are mostly taken for one another ('tiger_cat' for 'egyptian_cat', 'egyptian_cat' for 'tiger_cat')"
    assert asked in lowest_words(of_labels(*rows))


@pytest.mark.parametrize(
    "rows",
    [
        [("a", 12, 0, "b", 12), ("b", 12, 12, "", 0)],  # all is taken for one
        [("a", 12, 0, "b", 12), ("b", 12, 0, "c", 12), ("c", 12, 12, "", 0)],
        [("a", 12, 6, "b", 6), ("b", 12, 0, "a", 12)],  # half
        [("a", 4, 0, "b", 4), ("b", 4, 0, "a", 4)],  # few
    ],
)
def test_other_mistakes_ask_nothing_about_the_order(rows: list[tuple[str, int, int, str, int]]) -> None:
    assert "order" not in lowest_words(of_labels(*rows))


def test_it_is_not_said_twice_where_a_finding_says_it() -> None:
    message = replace(LABELLED, outcomes=(outcome("accuracy", Finding("accuracy", "fail", "", WORDS)),))
    said = checks_to_markdown([message])
    assert (said.count("labelled pictures"), "- data:" in said) == (1, False)


def test_json_has_every_number() -> None:
    accuracy = json.loads(checks_to_json([LABELLED]))["checkpoints"][0]["accuracy"]
    assert accuracy.pop("interval") == pytest.approx({"low": 0.5090, "high": 0.9134}, abs=5e-5)
    assert (accuracy.pop("share"), accuracy.pop("macro_f1")) == (15 / 20, None)
    assert accuracy == json.loads(json.dumps(asdict(LABELLED.accuracy)))
    assert json.loads(checks_to_json([PASSING]))["checkpoints"][0]["accuracy"] is None


def test_the_page_lists_classes_and_wrong_pictures_in_words() -> None:
    page = Page(checks_html([LABELLED]))
    [labels, _] = page.tables()
    assert labels[1:] == [
        ["lynx", "3", "8", "37.5%", "8.5% to 75.5%", "cat (4)"],
        ["cat", "12", "12", "100%", "73.5% to 100%", ""],
    ]
    said = page.said("p")
    assert WORDS in said
    assert said.index("labelled lynx (probability 0.02)") + 1 == said.index("taken for cat (probability 0.96)")
    assert "scores with NaN" in said


@pytest.mark.parametrize(
    ("right", "share", "bounds"),
    [
        (10_000, "100%", ">99.9% to 100%"),  # the lower end is 0.025 ** (1 / 10000) = 0.99963
        (9_999, ">99.9%", ">99.9% to >99.9%"),
        (1, "<0.1%", "<0.1% to <0.1%"),
        (0, "0%", "0% to <0.1%"),
    ],
)
def test_a_percentage_is_0_or_100_only_where_that_is_exact(right: int, share: str, bounds: str) -> None:
    accuracy = Accuracy("val", "labels are names of classes", 2, 10_000, right, ())
    right_words = f"({share}) {'is' if right == 1 else 'are'} classified right"
    assert accuracy_words(accuracy).endswith(f"{right_words}, and of all such pictures {bounds} (95% confidence)")
