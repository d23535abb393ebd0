"""The page of a watched training: the answer, what the curves and the colours show, and how it is thinned."""

import base64
import io
import json
import math
import random
import re
from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hookscope.commands.watch.describe import describe_training, heat_maps
from hookscope.reporting.document import HeatMaps
from hookscope.reporting.html.figures import FOOT, HEIGHT, LEFT, TOP, WIDTH
from hookscope.reporting.palettes import ALL_ZERO, BACKGROUND, LEVEL_COUNT, NON_FINITE
from hookscope.reporting.steps import columns_of, kept_places, kept_runs, round_steps
from hookscope.results.training import TrainingLog, TrainingStep, WatchedLayer, WatchedParameter, WatchedStep
from hookscope.text import safe_text
from tests.reporting.conftest import HOSTILE_NAME
from tests.reporting.html_page import Page
from tests.reporting.trained import (
    START,
    draw_training,
    long_training,
    name_of,
    train,
    training_page,
    training_summary,
    verdict,
    with_verdicts,
)

exhaustive = pytest.mark.exhaustive


def page_of(log: TrainingLog) -> Page:
    page = Page(training_page(log))
    page.assert_self_contained()
    return page


def strips(page: Page, key: str) -> NDArray[np.uint8]:
    """Return the palette indices of a heat map, (rows, columns)."""
    [image] = page.all("image", id=f"map-{key}")
    return levels_of(image.attributes["href"] or "")


def levels_of(uri: str) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as picture:
        assert picture.mode == "P"
        return np.asarray(picture)


def sentences(page: Page) -> list[str]:
    """Return the sentences below the answer."""
    at = next(
        at for at, element in enumerate(page.elements) if str(element.attributes.get("class")).startswith("answer")
    )
    return [element.text for element in takewhile(lambda element: element.tag == "p", page.elements[at + 1 :])]


def numbers(page: Page, key: str, columns: int) -> NDArray[np.float32]:
    [held] = page.all("script", id=f"values-{key}")
    return np.frombuffer(base64.b64decode(held.text), "<f4").reshape(-1, columns)


def test_the_answer_comes_first_and_names_step_place_and_what_was_measured() -> None:
    log = train(40, broken_at=25)
    page = page_of(log)
    sections = [element.attributes.get("id") for element in page.all("section")]
    assert sections == ["answer", "verdicts", "before", "steps", "layers", "making"]
    assert page.said("h2", **{"class": "answer fail"}) == ["At step 25, 0.weight: its gradient holds NaN (limit 0)."]
    watched = [10, 20, 25, 30, 40]
    shown = strips(page, "gradient-norm")
    assert page.said("th", scope="row")[:6] == [row.name for row in log.watched[0].parameters]
    norms = [[row.gradient_norm for row in watched_step.parameters] for watched_step in log.watched]
    expected = [norm for step in norms[:2] for norm in step if norm]
    low, high = math.log10(min(expected)), math.log10(max(expected))
    for column, step in enumerate(watched):
        for row, norm in enumerate(norms[column]):
            if row == 1:  # its bias is frozen
                assert shown[row, column] == BACKGROUND
            elif step >= 25:
                assert shown[row, column] == NON_FINITE
            else:
                wanted = (math.log10(norm or 0) - low) / (high - low) * (LEVEL_COUNT - 1)
                assert abs(int(shown[row, column]) - wanted) <= 0.5 + 1e-6
    before = page.tables()[0][1:]
    assert [row[0] for row in before] == [str(step) for step in range(15, 26)]
    assert before[-1][1:4] == ["NaN"] * 3
    assert before[-1][-1] == "non-finite-gradient"


@exhaustive
def test_a_healthy_training_says_so_and_how_it_ended() -> None:
    log = train(30)
    page = page_of(log)
    assert page.said("h2", **{"class": "answer good"}) == ["No problems in 30 steps."]
    assert not page.all("section", id="verdicts")
    assert not page.all("section", id="before")
    unjudged, sentence = sentences(page_of(replace(log, ends=(), cut_short=True)))
    assert unjudged == "Not judged: whether the loss falls."
    assert sentence.startswith("The record stops at step 30 without an end: the training still runs, or was killed.")
    assert sentence.endswith(" Its last line is incomplete.")
    raised = replace(log, ends=(replace(log.ends[0], reason="ValueError: no more data"),))
    assert sentences(page_of(raised)) == [unjudged, "It ended after step 30 (ValueError: no more data)."]


def test_a_single_step_is_no_range_of_steps() -> None:
    html = training_page(train(1, every=1))
    assert '<th scope="col">step 1</th>' in html
    assert "Loss over step 1, from" in html
    assert "steps 1" not in html


@exhaustive
@pytest.mark.parametrize("verdicts", [[], [verdict(3, "a-rule", "0.weight")]])
def test_a_record_without_steps_makes_a_page(verdicts: list[object]) -> None:
    for log in (
        TrainingLog((START,), (), (), tuple(verdicts), ()),  # type: ignore[arg-type]
        TrainingLog((START,), (TrainingStep(1, None, None, None, (), ()),), (), (), ()),
        TrainingLog((START,), (TrainingStep(1, math.nan, math.nan, None, (), (0.0,)),), (), (), ()),
        TrainingLog((START,), (), (WatchedStep(1, "every", ()),), (), ()),
    ):
        page_of(log)


@exhaustive
def test_verdicts_are_where_they_belong_on_the_time_line() -> None:
    rules = [
        verdict(101, "loss-spike", ""),
        verdict(151, "loss-spike", "", state="ended"),
        replace(verdict(121, "dead-channels", "1"), followed_by=("3",)),
        verdict(181, "update-ratio", "4.weight", level="fail"),
    ]
    page = page_of(with_verdicts(train(200), rules))
    bars = [
        (element.attributes["x"], element.attributes["width"])
        for element in page.all("rect")
        if "x" in element.attributes
    ]
    # 200 steps on 1,000 units: step 101 begins at 500; one that never ends reaches the end.
    assert bars == [("500.0", "250.0"), ("600.0", "400.0"), ("900.0", "100.0")]
    assert page.said("h2", **{"class": "answer fail"}) == ["At step 181, 4.weight: 0.75 is over its limit (0.5)."]
    assert sentences(page)[0] == "2 other problems: loss-spike, dead-channels."
    links = [element.attributes.get("href") for element in page.all("a", **{"class": "name"})]
    assert links[:3] == ["#layer=1", "#layer=3", "#layer=4.weight"]


@exhaustive
def test_a_verdict_about_a_layer_that_was_not_watched_leads_to_its_parameter() -> None:
    log = with_verdicts(train(20), [verdict(5, "a-rule", "4"), verdict(6, "b-rule", "nowhere")])
    log = replace(log, watched=tuple(replace(watched_step, layers=()) for watched_step in log.watched))
    links = page_of(log).all("a", **{"class": "name"})
    assert [link.attributes["href"] for link in links if link.text == "4"] == ["#layer=4.weight"]
    assert "nowhere" not in [link.text for link in links]


@exhaustive
def test_skipped_steps_are_listed_and_marked() -> None:
    log = train(20)
    log = replace(log, steps=tuple(replace(step, skipped=step.step in (3, 20)) for step in log.steps))
    page = page_of(log)
    assert "The optimiser skipped 2 steps: 3, 20." in sentences(page)
    assert page.named("skipped").endswith("3, 20")
    marks = [element.attributes["d"] or "" for element in page.all("path", **{"class": "mark"})]
    drawn = next(mark for mark in marks if mark.count("v8") == 2)
    wanted = [LEFT + 4 + (step - 1) / 19 * (WIDTH - LEFT - 12) for step in (3, 20)]
    assert [float(x) for x in re.findall(r"M(\d+) ", drawn)] == pytest.approx(wanted, abs=0.6)


def test_steps_are_clipped_where_clipping_lowered_their_norm() -> None:
    norms = [(2.0, 1.0), (0.5, 0.5), (0.3 + 1e-8, 0.3), (9.0, 1.0), (math.inf, 0.0)]
    steps = tuple(TrainingStep(at, 1.0, norm, before, (), (0.1,)) for at, (before, norm) in enumerate(norms, 1))
    clipping = dict(fact[:2] for fact in describe_training(TrainingLog((START,), steps, (), (), ())).facts)["Clipping"]
    assert clipping == "in 2 steps; before it the norm was up to 9.000, at step 4"


def points_of(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


@exhaustive
def test_the_curve_of_the_loss_goes_through_every_step() -> None:
    log = train(50)
    losses = [step.loss or 0 for step in log.steps]
    page = page_of(log)
    points = points_of(page.all("path", **{"class": "line blue"})[1].attributes["d"] or "")  # the first is of the key
    assert [x for x, _ in points] == [round(LEFT + 4 + place / 49 * (WIDTH - LEFT - 12), 1) for place in range(50)]
    heights = [y for _, y in points]
    # Logarithmic: heights are linear in the logarithm of the loss.
    logs = np.log10(losses)
    slope = (heights[int(np.argmax(losses))] - heights[int(np.argmin(losses))]) / (logs.max() - logs.min())
    lowest = heights[int(np.argmin(losses))]
    assert heights == pytest.approx(lowest + slope * (logs - logs.min()), abs=0.11)
    assert TOP <= min(heights) <= max(heights) <= HEIGHT - FOOT


def drawn_by_all(steps: NDArray[np.int64], values: NDArray[np.float64], columns: int) -> list[tuple[float, ...]]:
    """Of each column what a line through all points needs: first, smallest, largest and last."""
    column = (steps - steps[0]) * columns // (steps[-1] - steps[0] + 1)
    parts = [values[column == number] for number in range(columns)]
    return [(part[0], part.min(), part.max(), part[-1]) for part in parts if part.size]


@pytest.mark.parametrize("count", [1, 7, 900, 901, pytest.param(20_011, marks=exhaustive)])
def test_what_is_kept_of_a_column_is_its_first_smallest_largest_and_last_value(count: int) -> None:
    generator = np.random.default_rng(count)
    steps = np.arange(1, count + 1)
    values = generator.standard_normal(count).round(1)  # with ties
    columns = min(900, count)
    kept = kept_places(columns_of(steps, 1, count, columns), values)
    assert drawn_by_all(steps[kept], values[kept], columns) == drawn_by_all(steps, values, columns)
    assert kept.size <= 4 * columns
    assert (np.diff(kept) > 0).all()


@exhaustive
def test_a_line_breaks_at_nan_and_not_where_nothing_was_passed() -> None:
    values = np.array([1.0, math.nan, 2.0, math.inf, 3.0, 4.0])
    runs = kept_runs(np.arange(6), np.arange(10, 16), values)
    assert runs == [[(10, 1.0), (12, 2.0)], [(14, 3.0), (15, 4.0)]]


@exhaustive
@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 2), (1, 10), (1, 3000), (1, 100_000), (987, 1_234_567)])
def test_round_steps_begin_with_the_first_and_are_few(low: int, high: int) -> None:
    steps = round_steps(low, high, 8)
    assert steps[0] == low
    assert steps == sorted({*steps})
    assert len(steps) <= 9
    assert high - low < 2 or len(steps) >= 2


@exhaustive
def test_a_long_training_is_thinned_with_its_extremes_and_says_so() -> None:
    spikes = {33_333: 500.0, 50_000: math.nan, 77_777: 1e-9}
    log = long_training(100_000, parameters=150, every=100, spikes=spikes)
    html = training_page(log)
    assert len(html.encode()) < 6_000_000
    page = Page(html)
    page.assert_self_contained()
    assert "Each of 900 columns shows the first, the smallest, the largest and the last value" in page.named("steps")
    figure = next(each for each in page.all("figure") if each.text.startswith("Loss"))
    held = [element.attributes.get("data-labels") for element in page.all("figure")]
    labels = [label for text in held if text for label in json.loads(text) if "loss" in label]
    assert sum(label.endswith("to 500") for label in labels) == 1
    assert sum(": loss 1e-9 to " in label for label in labels) == 1
    assert sum("NaN or Inf" in label for label in labels) == 1
    assert "NaN or Inf" in figure.text
    [(low, high)] = {
        (min(y for _, y in points), max(y for _, y in points))
        for points in [points_of(page.all("path", **{"class": "line blue"})[1].attributes["d"] or "")]
    }
    assert (low, high) == pytest.approx(
        (TOP + (HEIGHT - FOOT - TOP) * 0.06 / 1.18, TOP + (HEIGHT - FOOT - TOP) * 1.06 / 1.18), abs=0.2
    )
    shown = numbers(page, "gradient-norm", 300)
    assert shown.shape == (150, 300)
    # (k + 1) / step falls: before the median a column keeps its first step, behind it its last.
    steps = np.array_split(np.arange(100, 100_001, 100), 300)
    wanted = [1 / (part[0] if part[0] < 50_000 else part[-1]) for part in steps]
    assert shown[4] == pytest.approx(5 * np.array(wanted), rel=1e-6)
    row = page.tables()[-2][5]
    assert row[2:] == ["5.000e-5", "0.05000", "100", "0"]


@exhaustive
def test_a_network_of_thousands_of_parameters_fits_and_names_what_it_leaves_out() -> None:
    log = long_training(60_000, parameters=3000, every=1000, spikes={})
    last = name_of(2999)
    html = training_page(with_verdicts(log, [verdict(9, "a-rule", name_of(1), level="fail")]))
    assert len(html.encode()) < 6_000_000
    page = Page(html)
    rows = page.said("th", scope="row")
    assert {name_of(0), name_of(1), last} <= {*rows}
    assert len(rows) == 2 * 800
    assert "2,200 rows left out" in page.named("layers")


@exhaustive
def test_zero_nan_and_missing_values_are_told_apart() -> None:
    def row(name: str, norm: float | None, broken: int = 0) -> WatchedParameter:
        return WatchedParameter(name, "frozen" if norm is None else "gradient", 1.0, norm, norm, 0.0, broken)

    def watched(step: int, *norms: float | None) -> WatchedStep:
        return WatchedStep(step, "every", tuple(row(f"p{number}", norm) for number, norm in enumerate(norms)))

    log = TrainingLog(
        (START,), (), (watched(1, 1.0, 0.0, None, math.nan), watched(2, 100.0, 0.0, 10.0, math.inf)), (), ()
    )
    page = page_of(log)
    top = LEVEL_COUNT - 1
    assert strips(page, "gradient-norm").tolist() == [
        [0, top],
        [ALL_ZERO, ALL_ZERO],
        [BACKGROUND, top // 2],
        [NON_FINITE, NON_FINITE],
    ]
    cells = [row[2:] for row in page.tables()[0][1:]]
    assert cells == [
        ["100.0", "100.0", "2", "0"],
        ["0", "0", "1", "0"],
        ["10.00", "10.00", "2", "0"],
        ["NaN or Inf", "-", "-", "2"],
    ]
    broken = replace(log, watched=(WatchedStep(1, "non-finite", (row("p", 3.0, broken=2),)),))
    assert strips(page_of(broken), "gradient-norm").tolist() == [[NON_FINITE]]


@exhaustive
def test_of_more_watched_steps_than_columns_the_value_furthest_from_the_median_is_kept() -> None:
    norms = [1.0] * 40
    norms[13], norms[22], norms[31] = 50.0, 1e-6, math.nan
    watched = tuple(
        WatchedStep(step, "every", (WatchedParameter("p", "gradient", 1.0, norm),)) for step, norm in enumerate(norms)
    )
    [heat] = heat_maps(TrainingLog((START,), (), watched, (), ()), 4, 100)
    assert heat.values.tolist() == [[1.0, 50.0, 1e-6, math.inf]]
    assert heat.columns == ((0, 9), (10, 19), (20, 29), (30, 39))
    assert heat.largest == ((50.0, 13),)
    assert heat.nonfinite_counts == (1,)


@exhaustive
def test_learning_rates_of_groups_are_drawn_as_far_as_they_differ() -> None:
    def keys(*rates: float) -> list[str]:
        log = train(5)
        log = replace(log, steps=tuple(replace(step, learning_rates=rates) for step in log.steps))
        return [each.text for each in page_of(log).all("figcaption") if each.text.startswith("Learning rate")]

    assert keys(0.1) == ["Learning rate learning rate"]
    assert keys(0.1, 0.1) == ["Learning rate all groups"]
    assert keys(0.1, 0.2) == ["Learning rate firstsecond"]
    assert keys(0.1, 0.2, 0.3) == ["Learning rate largest of 3 groupssmallest of 3 groups"]
    assert keys(0.1, 0.1, 0.3) == ["Learning rate largest of 3 groupssmallest of 3 groups"]


@exhaustive
def test_hostile_names_stay_text() -> None:
    log = train(20, broken_at=12)
    rename = {"0.weight": HOSTILE_NAME, "2.weight": "</script><script>pwned=1</script>"}
    watched = tuple(
        replace(
            watched_step,
            parameters=tuple(replace(row, name=rename.get(row.name, row.name)) for row in watched_step.parameters),
        )
        for watched_step in log.watched
    )
    verdicts = tuple(replace(each, where=rename.get(each.where, each.where)) for each in log.verdicts)
    ends = (replace(log.ends[0], reason=HOSTILE_NAME),)
    start = replace(START, networks=(HOSTILE_NAME,), optimizers=(HOSTILE_NAME,), started=HOSTILE_NAME)
    page = page_of(replace(log, starts=(start,), watched=watched, verdicts=verdicts, ends=ends))
    assert safe_text(HOSTILE_NAME) in page.said("th", scope="row")
    assert len([element for element in page.all("script") if not element.attributes]) == 1


ANY_NUMBER = (0.0, -0.0, 5e-324, 1e-300, 1.0, 1e300, 1.7e308, -1.7e308, -5e-324, math.nan, math.inf, -math.inf, None)


@exhaustive
@pytest.mark.parametrize("seed", range(30))
def test_numbers_of_any_size_are_shown(seed: int) -> None:
    rng = random.Random(seed)
    pool = rng.sample(ANY_NUMBER, rng.randint(1, 4))
    apart = rng.choice([1, 7, 1000, 10**9])

    def number() -> float | None:
        return rng.choice(pool)

    def step(at: int) -> TrainingStep:
        rates = tuple(number() or 0.0 for _ in range(rng.randint(0, 3)))
        return TrainingStep(at, number(), number(), number(), (("p", number() or 0.0),), rates, rng.random() < 0.2)

    def watched(at: int) -> WatchedStep:
        numbers = ((number() for _ in range(4)), rng.choice([0, 1, None]), number())
        parameter = WatchedParameter("p", "gradient", *numbers[0], *numbers[1:])
        return WatchedStep(at, "every", (parameter,), (WatchedLayer("l", "X", *(number() for _ in range(7)), 0),))

    places = [1 + place * apart for place in range(rng.choice([1, 2, 5, 30]))]
    ended = replace(verdict(places[-1], "a-rule", "p"), value=number(), limit=number())
    log = TrainingLog((START,), (*map(step, places),), (*map(watched, places),), (ended,), ())
    page_of(log)
    draw_training(log)
    assert training_summary(log, width=80)


@exhaustive
def test_the_last_steps_of_a_watch_make_a_page_though_the_verdict_is_older() -> None:
    log = with_verdicts(train(40), [verdict(5, "a-rule", "0.weight")])
    bars = page_of(replace(log, steps=log.steps[20:], watched=log.watched[2:])).all("rect")
    assert [bar.attributes["x"] for bar in bars if "x" in bar.attributes] == ["0.0"]


def test_the_details_of_a_row_count_its_nan_and_inf() -> None:
    layer = WatchedLayer("fc", "Linear", None, None, None, None, 0.0, None, None, 12)
    parameter = WatchedParameter("fc.weight", "gradient", 1.0, math.nan, math.nan, 0.0, 1234)
    log = TrainingLog((START,), (), (WatchedStep(1, "every", (parameter,), (layer,)),), (), ())
    [maps] = [part for part in describe_training(log).parts if isinstance(part, HeatMaps)]
    assert dict(maps.details("fc").facts)["NaN, Inf"] == "12"
    assert dict(maps.details("fc.weight").facts)["NaN, Inf of g"] == "1,234"
