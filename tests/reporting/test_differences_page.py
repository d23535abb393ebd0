"""The page of `diff`, from a run that is read back: what it says, whatever stands in the run, and in a real browser."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import hookscope
from hookscope.commands.diff.describe import describe_differences, sides_text
from hookscope.reporting.html.document import document_html
from hookscope.results.comparison import Prediction
from hookscope.results.differences import (
    ChannelShare,
    DifferenceRow,
    Differences,
    FirstDifference,
    Measures,
    OutputDifference,
    Side,
    ToleranceFinding,
    Unmatched,
    WeightDifference,
)
from hookscope.results.inputs import InputRecord, Preprocessing, Provenance
from hookscope.results.network import ModelInfo
from hookscope.results.runs.reading import read_run
from tests.reporting.chromium import Opened, Scheme, needs_chromium
from tests.reporting.html_page import Page
from tests.reporting.stored import HOSTILE_NAMES

MODEL = ModelInfo("net", "Net", "net.pt", random=False, sha256="ab" * 32, parameter_count=12, arguments={"width": 2})
MEASURES = Measures(0.25, 0.875, 0.5, (0, 3, 1), 4.5, 0.75, None)


def row(index: int, label: str, measures: Measures | None, **changes: Any) -> DifferenceRow:
    shape = (1, 4, 5, 5)
    expected = DifferenceRow(
        index, label, label, "Conv2d", label, "Conv2d", "name", shape, shape, "float32", "float32", measures
    )
    return replace(expected, **changes)


def best(*classes: int) -> Prediction:
    return Prediction(
        0,
        classes,
        tuple(f"class {class_name}" for class_name in classes),
        tuple(0.5 / class_name for class_name in classes),
    )


RESULT = Differences(
    a=Side(MODEL),
    b=Side(replace(MODEL, name="other"), dtype="bfloat16", ways=("train mode",), run="runs/b"),
    way="networks",
    inputs=(InputRecord("cat.jpg", "cd" * 32, (60, 40), (3, 8, 8), ("resized",)),),
    rows=(
        row(0, "stem", Measures(0.0, 1.0)),
        row(1, "body", MEASURES, origin="begins", input_relative_l2=0.0, added=MEASURES, error=1e-7, error_b=0.25),
        row(2, "neck", Measures(math.nan), channel=ChannelShare(3, 8, 0.625), note="a note", limit=1e-5),
        row(3, "head", None, shape_b=(1, 7), note="shapes differ"),
        row(4, "tail", Measures(math.inf, value_count=256)),
    ),
    gradients=(row(0, "stem grad_output", MEASURES),),
    unmatched=(Unmatched("B", "more", "ReLU", (1, 4), "A has no such layer"),),
    outputs=(OutputDifference("", (1, 7), MEASURES, 1e-7, 0.25, 1, 0, 0.75, 0.5, ((best(1, 2),), (best(2, 1),))),),
    first_differences=(FirstDifference("body", "body", False, 0.25),),
    exceeded=(ToleranceFinding("rel>0.1", "fail", "body", "body is beyond 'rel>0.1': 0.2500.", value=0.25),),
    reference="A's weights in float64",
    warnings=("Look at this.",),
    notes=("Nothing grave.",),
    timings={"compare": 0.5},
    provenance=Provenance((), Preprocessing(), versions={"torch": "2"}),
)
WEIGHTS = Differences(
    a=Side(MODEL),
    b=Side(MODEL),
    way="weights",
    weights=(
        WeightDifference("a.weight", "b.weight", "order", (4,), (4,), "float32", "float32", MEASURES, 0.25),
        WeightDifference("equal", "equal", "name", (4,), (4,), "float32", "float32", Measures(0.0), 0.0),
        WeightDifference("c", "c", "name", (4,), (5,), "float32", "float16", None),
    ),
    unmatched=(Unmatched("A", "gone", "float32", (2,), "B has no such tensor"),),
    provenance=Provenance((), Preprocessing()),
)


def text_of(page: str) -> str:
    return " ".join("".join(Page(page).words).split())


def page_of(tmp_path: Path, result: Differences) -> str:
    run = read_run(result.save(tmp_path / "run"))
    return document_html(describe_differences(run.result, run.record), run)


def test_the_page_says_where_it_begins_and_shows_every_row(tmp_path: Path) -> None:
    text = text_of(page_of(tmp_path, RESULT))
    assert "First difference in body (Conv2d): relative L2 0.250, its inputs are equal." in text
    for part in ("shapes differ", "a note", "stem grad_output", "Look at this.", "Nothing grave.", "rel>0.1"):
        assert part in text
    assert "only in B: more (ReLU, 1x4): A has no such layer" in text


def test_the_page_of_weights_leaves_out_what_is_equal(tmp_path: Path) -> None:
    text = text_of(page_of(tmp_path, WEIGHTS))
    assert "2 of 3 tensors differ: ‖Δ‖/‖w‖ at most 0.250, at a.weight." in text
    assert "2 of 3 rows; diff.csv has all." in text
    assert "cannot be compared" in text


def test_report_makes_the_page_of_a_run_and_of_a_result(tmp_path: Path) -> None:
    folder = RESULT.save(tmp_path / "run")
    made = hookscope.report(folder, tmp_path / "a.html").read_text(encoding="utf-8")
    assert made == hookscope.report(RESULT, tmp_path / "b.html").read_text(encoding="utf-8")


def test_no_name_becomes_part_of_the_page(tmp_path: Path) -> None:
    name = " ".join(HOSTILE_NAMES)
    side = Side(replace(MODEL, name=name, kind=name, weights=name), ways=(name,), run=name)
    rows = tuple(
        row(at, hostile, MEASURES, layer=hostile, kind=hostile, label_b=f"{hostile}b", note=hostile, dtype=hostile)
        for at, hostile in enumerate(HOSTILE_NAMES)
    )
    hostile = replace(
        RESULT,
        a=side,
        b=side,
        rows=rows,
        gradients=rows,
        unmatched=tuple(Unmatched("A", hostile, hostile, (1,), hostile) for hostile in HOSTILE_NAMES),
        first_differences=tuple(FirstDifference(hostile, hostile, False, 0.5) for hostile in HOSTILE_NAMES),
        exceeded=tuple(ToleranceFinding(hostile, "fail", hostile, hostile, value=0.5) for hostile in HOSTILE_NAMES),
        inputs=(replace(RESULT.inputs[0], name=name),),
        warnings=HOSTILE_NAMES,
        notes=HOSTILE_NAMES,
        reference=name,
    )
    page = Page(page_of(tmp_path, hostile))
    page.assert_self_contained()
    assert len(page.all("script")) == 1
    assert page.all("img") == []
    assert not any(name.startswith("on") for element in page.elements for name in element.attributes)


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.exhaustive
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(
    open_html: Callable[..., Opened], tmp_path: Path, width: int, scheme: Scheme
) -> None:
    for number, result in enumerate((RESULT, WEIGHTS)):
        opened = open_html(page_of(tmp_path / str(number), result), width=width, scheme=scheme)
        assert opened.axe_violations() == []
        assert opened.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ({}, {"model": replace(MODEL, name="other")}, "net and other"),
        ({}, {"dtype": "bfloat16"}, "net, float32 and bfloat16"),
        ({}, {"ways": ("compiled", "threads: 2")}, "net, as it is and compiled, threads: 2"),
        ({"ways": ("edit a:output:zero",)}, {"dtype": "float16"}, "net, float32, edit a:output:zero and float16"),
        ({}, {"model": replace(MODEL, weights="new.pt")}, "net, net.pt and new.pt"),
        ({"run": "runs/old"}, {"run": "runs/new"}, "net, old and new"),
        ({}, {}, "net and itself"),
    ],
)
@pytest.mark.sample("a0-b0-net and other", "a3-b3-net, float32, edit a:output:zero and float16", "a6-b6-net and itself")
def test_titles_say_what_is_not_the_same(a: dict[str, Any], b: dict[str, Any], text: str) -> None:
    assert sides_text(replace(RESULT, a=Side(MODEL, **a), b=Side(**{"model": MODEL, **b}))) == text


def test_a_chart_without_a_finite_value_leaves_no_empty_section() -> None:
    result = replace(RESULT, rows=(row(0, "stem", Measures(0.0)), row(1, "body", Measures(math.nan))))
    assert "depth" not in [section.key for section in describe_differences(result).sections]
    assert "depth" in [section.key for section in describe_differences(RESULT).sections]


def test_a_class_with_nan_on_one_side_is_a_changed_class() -> None:
    nan = replace(best(1, 2), probabilities=(math.nan, math.nan))
    pairs = ((best(1, 2), nan, nan), (best(1, 2), best(1, 2), nan))
    document = describe_differences(replace(RESULT, outputs=(replace(RESULT.outputs[0], predictions=pairs),)))
    (listing,) = (part for section in document.sections if section.key == "classes" for part in section.parts)
    assert listing.lines == ["cat.jpg: probabilities that are NaN → class 1 0.50 · class 2 0.25 (softmax)"]


def test_inputs_of_one_name_are_told_apart_by_their_folders() -> None:
    inputs = tuple(replace(RESULT.inputs[0], name=f"{folder}/cat.jpg") for folder in ("day", "night"))
    later = replace(best(2, 1), input_index=1)
    pairs = ((best(1, 2), replace(best(1, 2), input_index=1)), (best(1, 2), later))
    output = replace(RESULT.outputs[0], predictions=pairs)
    document = describe_differences(replace(RESULT, inputs=inputs, outputs=(output,)))
    (listing,) = (part for section in document.sections if section.key == "classes" for part in section.parts)
    assert [line.partition(":")[0] for line in listing.lines] == ["night/cat.jpg"]
    assert [name for name, _ in document.making if "jpg" in name] == [
        "SHA-256 of day/cat.jpg",
        "SHA-256 of night/cat.jpg",
    ]


@needs_chromium
def test_a_phone_shows_where_the_difference_begins(open_html: Callable[..., Opened], tmp_path: Path) -> None:
    differing = next(row for row in RESULT.rows if row.measures and row.measures.relative_l2 > 0)
    rows = tuple(replace(differing, index=place, label=f"layer{place}") for place in range(30))
    last = replace(differing, index=30, label="last")
    result = replace(RESULT, rows=(*rows, last), first_differences=(FirstDifference("last", "last", False, 0.5),))
    page = open_html(page_of(tmp_path, result), width=390).page
    mark = page.locator("svg.plot path.mark").first.bounding_box()
    assert mark is not None
    assert 300 <= mark["x"] <= 390
    ends = page.eval_on_selector_all(
        "svg.plot text:not(.roomy)",
        "texts => texts.map(each => each.getBoundingClientRect()).map(box => [box.top, box.left, box.right])",
    )
    names = sorted((left, right) for top, left, right in ends if top == max(end[0] for end in ends))
    assert len(names) > 2
    assert all(right < left for (_, right), (left, _) in pairwise(names))
    assert min(left for _, left, _ in ends) >= 0
    assert max(right for _, _, right in ends) <= 390
