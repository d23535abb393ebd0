"""What a network must say about named pictures, and what it must return."""

from dataclasses import replace
from pathlib import Path

import pytest

from hookscope.errors import UsageError
from hookscope.results.activations import Activations
from hookscope.results.check import CheckMeasurements
from hookscope.rules.settings import CheckSettings, Expectation
from tests.commands.check.measurements import (
    FORWARD,
    HEALTHY,
    MODEL,
    OUTPUT,
    PICTURE,
    findings,
    judged,
    with_output,
    with_prediction,
)

SHORTER = with_prediction(class_indices=(0, 1), class_names=("tabby cat", "tiger cat"), probabilities=(0.6, 0.2))
ONLY = frozenset({"expectation", "output-shape"})


def messages(measured: CheckMeasurements = HEALTHY, image: str = PICTURE, **expected: object) -> list[str]:
    """Return what is said of a picture of which this is expected."""
    settings = CheckSettings(expectations=(Expectation(Path(image), **expected),))  # type: ignore[arg-type]
    report = judged(measured, settings, ONLY)
    assert findings(report) == [("expectation", "fail", image)] * len(report.findings)
    return [finding.message for finding in report.findings]


def nameless() -> CheckMeasurements:
    model = replace(MODEL, categories=())
    prediction = replace(FORWARD.predictions[0], class_names=())
    return replace(HEALTHY, model=model, forward=replace(FORWARD, model=model, predictions=(prediction,)))


@pytest.mark.parametrize("top1", ["tabby cat", "Tabby Cat", 0])
def test_a_picture_classified_as_expected_passes(top1: str | int) -> None:
    assert messages(top1=top1, contains=("tiger cat", 3), k=3, min_probability=0.6) == []


def test_another_class_in_front_is_named_with_the_place_of_the_expected_one() -> None:
    (message,) = messages(top1="tram")
    assert message == (
        "'cat.jpg' is classified as 'tabby cat' (0) with probability 0.600 (softmax); expected first is 'tram', which"
        " is in place 3."
    )
    assert "which is not among the first 2." in messages(SHORTER, top1="otter")[0]


def test_a_name_of_two_classes_means_either() -> None:
    for index in (2, 4):
        crane = with_prediction(class_indices=(index, 0, 1, 3, 5))
        assert messages(crane, top1="crane") == []
    assert messages(with_prediction(class_indices=(2, 0, 1, 3, 5)), top1=4) != []


def test_a_class_outside_the_first_k_is_missed() -> None:
    assert messages(contains=("tram",), k=3) == []
    assert messages(contains=("tram", "tiger cat"), k=2) == [
        "'cat.jpg' does not have 'tram' among its first 2 classes: 'tabby cat' (0), 'tiger cat' (1)."
    ]
    assert messages(contains=("tram",), k=1) == [
        "'cat.jpg' does not have 'tram' among its first 1 class: 'tabby cat' (0)."
    ]


def test_too_small_a_probability_of_the_first_class_fails() -> None:
    assert messages(min_probability=0.61) == [
        "'cat.jpg' is classified as 'tabby cat' (0) with probability 0.600 (softmax; limit: at least 0.61)."
    ]
    assert messages(min_probability=0.6) == []


@pytest.mark.parametrize("expected", [{"top1": 0}, {"min_probability": 0.1}, {"contains": ("tram",)}], ids=str)
def test_scores_with_nan_have_no_first_class(expected: dict[str, object]) -> None:
    assert messages(with_prediction(probabilities=(float("nan"),) * 5), **expected) == [
        "'cat.jpg' has NaN among its class scores, so no class is first."
    ]
    assert len(messages(top1="tram", min_probability=0.9)) == 1  # a wrong class is not said twice


def test_indices_do_without_names() -> None:
    assert messages(nameless(), top1=0) == []
    assert (
        "is classified as class 0 with probability 0.600 (softmax); expected first is class 3"
        in messages(nameless(), top1=3)[0]
    )


def test_a_name_needs_names_and_an_unknown_one_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="'tabby cat', but the names of this network's classes are not known"):
        messages(nameless(), top1="tabby cat")
    with pytest.raises(UsageError, match=r"'tabby kat', which the network does not have\. Nearest: 'tabby cat'"):
        messages(contains=("tabby kat",))


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_outside_the_classes_is_refused(index: int) -> None:
    with pytest.raises(UsageError, match=f"class {index}, but the network has 0 to 5"):
        messages(top1=index)


def test_a_picture_that_is_not_among_the_inputs_fails() -> None:
    assert messages(image="elsewhere/cat.jpg", top1=0) == [
        "'elsewhere/cat.jpg' is not among the inputs as a single one: name one picture, or a file of one input."
    ]


def test_a_network_without_class_scores_fails_with_the_reason() -> None:
    without: Activations = replace(FORWARD, predictions=())
    reason = {"expectation": "The network returned no row of class scores per input."}
    assert messages(replace(HEALTHY, forward=without, unmeasured=reason), top1=0) == [
        "'cat.jpg' could not be checked: The network returned no row of class scores per input."
    ]


# What the network returns


def shape_findings(measured: CheckMeasurements, **settings: object) -> list[str]:
    report = judged(measured, CheckSettings(**settings), ONLY)  # type: ignore[arg-type]
    assert {finding.rule for finding in report.findings} <= {"output-shape"}
    return [finding.message for finding in report.findings]


@pytest.mark.parametrize("wanted", [(2, 6), ("N", 6), ("*", "*"), ("N", "*")])
def test_an_output_of_the_shape_asked_for_passes(wanted: tuple[int | str, ...]) -> None:
    assert shape_findings(HEALTHY, output_shape=wanted, output_dtype="float32") == []


@pytest.mark.parametrize("wanted", [(2, 5), (2,), ("N", "N"), ("*", "*", "*")])
def test_an_output_of_another_shape_fails(wanted: tuple[int | str, ...]) -> None:
    (message,) = shape_findings(HEALTHY, output_shape=wanted)
    assert message.startswith("The output has shape (2, 6), not (")


def test_another_dtype_fails_and_n_counts_the_inputs_of_the_first_batch() -> None:
    assert shape_findings(HEALTHY, output_dtype="float16") == ["The output is float32, not float16 as expected."]
    assert shape_findings(with_output(shape=(1, 6), input_count=1), output_shape=("N", 6)) == []
    assert shape_findings(with_output(shape=(2, 6), input_count=1), output_shape=("N", 6)) != []


def test_of_several_outputs_the_key_chooses_one() -> None:
    several = replace(
        HEALTHY,
        outputs=(replace(OUTPUT, label="(model)['out']"), replace(OUTPUT, label="(model)['aux']", shape=(2, 3))),
    )
    for key in ("aux", "['aux']", "(model)['aux']"):
        assert shape_findings(several, output_shape=("N", 3), output_key=key) == []
    assert shape_findings(several, output_shape=("N", 3), output_key="out") == [
        "The output '(model)['out']' has shape (2, 6), not (N, 3) as expected."
    ]
    with pytest.raises(UsageError, match="name it with --output-key"):
        shape_findings(several, output_shape=("N", 3))
    with pytest.raises(UsageError, match="--output-key 'logits' names no output; there is:"):
        shape_findings(several, output_shape=("N", 3), output_key="logits")


def test_without_names_of_classes_any_number_of_them_passes() -> None:
    other = replace(with_output(shape=(2, 5)), model=replace(MODEL, categories=()))
    assert shape_findings(other) == []
    assert shape_findings(with_output(shape=(2, 5))) == [
        "The output has 5 classes (shape (2, 5)), but 6 names are known."
    ]
    assert shape_findings(with_output(shape=(2, 1))) == [
        "The output has 1 class (shape (2, 1)), but 6 names are known."
    ]
