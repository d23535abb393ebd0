import io
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from hookscope.render.plot_axes import figure_png, plain
from hookscope.render.plots import PLOTS, gradient_flow, gradient_histograms, parameter_ratios
from hookscope.results.distribution import distribution_of
from hookscope.results.gradients import GradientRow, Gradients, ParameterRow
from tests.render.checked import anything
from tests.render.conftest import (
    GRADIENT_ROWS,
    GRADIENTS,
    NO_GRADIENT,
    PARAMETER_ROWS,
    gradient_statistics,
)

PLAIN = GRADIENT_ROWS[3]


def with_gradients(*rows: GradientRow) -> Gradients:
    return replace(GRADIENTS, gradients=rows, verdicts=())


def with_parameters(*rows: ParameterRow) -> Gradients:
    return replace(GRADIENTS, parameters=rows, verdicts=())


def layers(names: list[str]) -> list[GradientRow]:
    return [replace(PLAIN, layer=name, call=0) for name in names]


def drawn(figure: Figure, panel: int, label: str) -> dict[float, float]:
    """Return what a line or the marks of a label show, height by place."""
    for line in figure.axes[panel].get_lines():
        if line.get_label() == label:
            return dict(zip(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist(), strict=True))
    return {}


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def names_below(figure: Figure, panel: int) -> dict[float, str]:
    axes = figure.axes[panel]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    return dict(zip(axes.get_xticks().tolist(), labels, strict=True))


@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.sample("parameter-ratios")
def test_every_plot_says_what_was_run_and_is_a_picture_the_same_one_again(name: str) -> None:
    figures = [PLOTS[name](GRADIENTS) for _ in range(2)]
    title = figures[0].get_suptitle()
    assert title.endswith("resnet34 · train mode · loss mse · ResNet34_Weights.IMAGENET1K_V1")
    first, again = map(figure_png, figures)
    assert first == again
    image = Image.open(io.BytesIO(first))
    assert (image.format, image.width) == ("PNG", 1200)
    assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 20


def test_a_long_title_and_a_legend_of_all_kinds_of_marks_are_inside_the_picture() -> None:
    model = replace(GRADIENTS.model, weights="weights " * 12)
    figure = gradient_flow(replace(GRADIENTS, model=model))
    figure_png(figure)
    (legend,) = figure.legends
    assert len(legend.get_texts()) >= 6
    (title,) = (text for text in figure.findobj(Text) if text.get_text() == figure.get_suptitle())
    assert "weights" in title.get_text().splitlines()[1]
    for drawn in (legend, title):
        box = drawn.get_window_extent()
        assert (box.x0 >= 0, box.x1 <= figure.bbox.x1) == (True, True)


@pytest.mark.parametrize("name", PLOTS)
def test_nothing_to_draw_is_said_in_words(name: str) -> None:
    empty = replace(GRADIENTS, gradients=(), parameters=(), loss=None)
    figure = PLOTS[name](empty)
    assert any(text.endswith(".") for text in texts(figure))
    figure_png(figure)


# Gradient flow


def test_the_flow_shows_mean_and_greatest_magnitude_in_forward_order() -> None:
    figure = gradient_flow(GRADIENTS)
    means, greatest = drawn(figure, 0, "mean |gradient|"), drawn(figure, 0, "max |gradient|")
    outputs = [row for row in GRADIENT_ROWS if row.role == "output"]
    assert len(means) == len(outputs) == 11
    for place, row in enumerate(outputs):
        if row.gradient.mean_abs:
            assert means[place] == row.gradient.mean_abs
            assert greatest[place] == abs(row.gradient.min or 0)  # the minimum is twice as far from zero
        else:
            assert math.isnan(means[place])
    assert figure.axes[0].get_yscale() == "log"


def test_weights_make_the_line_of_parameters_and_biases_stand_beside_it() -> None:
    figure = gradient_flow(GRADIENTS)
    assert list(drawn(figure, 1, "mean |gradient|")) == [0, 3, 4, 5, 6, 7, 8]
    assert list(drawn(figure, 1, "mean |gradient| of biases and scales")) == [1, 2]


def test_what_a_logarithm_cannot_show_is_marked_each_in_its_way() -> None:
    figure = gradient_flow(GRADIENTS)
    assert list(drawn(figure, 0, "gradient is 0")) == [4]
    assert list(drawn(figure, 0, "NaN or Inf")) == [5]
    assert list(drawn(figure, 0, "no gradient path")) == [6]
    assert list(drawn(figure, 0, "not reached")) == [7]
    assert list(drawn(figure, 1, "not reached")) == [5]
    markers = {
        line.get_marker(): line.get_label() for line in figure.axes[0].get_lines() if line.get_linestyle() == "None"
    }
    assert len(markers) == 4  # told apart without colour


def test_what_a_failing_verdict_names_is_marked_with_the_rule() -> None:
    figure = gradient_flow(GRADIENTS)
    spans = [[patch for patch in axes.patches if patch.get_label() == "failing verdict"] for axes in figure.axes]
    assert [len(each) for each in spans] == [2, 1]
    assert {"non-finite-gradient", "dead-gradient", "vanishing-gradient"} <= set(texts(figure))
    assert "unused-parameter" not in texts(figure)  # a warning


def test_a_flow_of_zeros_only_can_be_drawn() -> None:
    row = replace(PLAIN, status="zero", gradient=gradient_statistics((1, 4), **NO_GRADIENT))
    figure = gradient_flow(with_gradients(row, row))
    assert list(drawn(figure, 0, "gradient is 0")) == [0, 1]
    figure_png(figure)


@pytest.mark.parametrize("scale", [1e-300, 1e-40, 1e300])
@pytest.mark.sample("1e-300")
def test_any_size_of_gradient_can_be_drawn(scale: float) -> None:
    small = replace(
        PLAIN, gradient=gradient_statistics((1, 4), scale, distribution=distribution_of(np.array([scale, -scale])))
    )
    inspection = with_gradients(small, PLAIN)
    for name in ("gradient-flow", "gradient-histograms"):
        figure_png(PLOTS[name](inspection))


# Names


def test_few_layers_are_all_named() -> None:
    names = [f"block{number}.conv" for number in range(32)]
    figure = gradient_flow(with_gradients(*layers(names)))
    assert list(names_below(figure, 0).values()) == names


def test_of_many_layers_blocks_are_named_where_they_begin() -> None:
    names = ["stem", *(f"layer{n}.{m}.{part}" for n in range(4) for m in range(30) for part in ("conv", "bn")), "fc"]
    figure = gradient_flow(with_gradients(*layers(names)))
    named = names_below(figure, 0)
    assert len(named) <= 40
    assert [named[1 + 60 * block] for block in range(4)] == ["layer0", "layer1", "layer2", "layer3"]
    assert all(names[int(place)].startswith(name) for place, name in named.items())


def test_a_block_of_most_layers_is_named_by_its_parts() -> None:
    names = ["stem", *(f"blocks.{n}.{part}" for n in range(16) for part in ("conv", "bn", "relu")), "head"]
    named = names_below(gradient_flow(with_gradients(*layers(names))), 0)
    assert named[1] == "blocks.0"
    assert "blocks" not in named.values()


def test_four_hundred_layers_without_blocks_get_evenly_spread_names() -> None:
    figure = gradient_flow(with_gradients(*layers([str(number) for number in range(468)])))
    places = [*names_below(figure, 0)]
    assert 20 <= len(places) <= 33
    assert {int(each) for each in np.diff(places)} == {15}


def test_names_below_an_axis_do_not_overlap() -> None:
    names = [
        "conv1",
        "bn1",
        "relu",
        "pool",
        *(f"layer{n}.{m}.conv" for n in range(4) for m in range(20)),
        "pool2",
        "fc",
    ]
    figure = gradient_flow(with_gradients(*layers(names)))
    figure_png(figure)
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert len(boxes) > 8
    assert all(left.x1 <= right.x0 + 1 for left, right in pairwise(boxes))


@given(anything)
def test_plain_text_is_short_and_never_mathematics(text: str) -> None:
    from matplotlib.cbook import is_math_text

    shown = plain(text, 12)
    assert not is_math_text(shown)
    assert len(shown.replace(r"\$", "$")) <= 12


def test_a_long_name_keeps_both_ends() -> None:
    assert plain("encoder.layers.11.mlp.fc2", 11) == "enc…mlp.fc2"
    assert plain("short", 5) == "short"
    assert plain("網網網", 13) == r"\u7d…b2\u7db2"


# Histograms


def test_at_most_twelve_panels_are_spread_over_depth() -> None:
    figure = gradient_histograms(with_gradients(*layers([f"l{number}" for number in range(100)])))
    titles = [axes.get_title(loc="left").split("\n")[0] for axes in figure.axes]
    assert titles == [f"l{number}" for number in (0, 9, 18, 27, 36, 45, 54, 63, 72, 81, 90, 99)]
    assert "12 of 100 layers" in figure.get_suptitle()


def test_named_layers_are_drawn() -> None:
    inspection = with_gradients(*layers(["a", "b", "c"]))
    figure = gradient_histograms(inspection, ["c"])
    assert [axes.get_title(loc="left").split("\n")[0] for axes in figure.axes] == ["c", ""]


def bars(row: GradientRow) -> tuple[np.ndarray, np.ndarray]:
    axes = gradient_histograms(with_gradients(row)).axes[0]
    (patch,) = axes.patches
    return patch.get_data().values, patch.get_data().edges  # type: ignore[attr-defined]


def test_bars_hold_the_shares_of_the_values_other_than_zero() -> None:
    values = np.repeat([0.0, -1.0, 0.02], [100, 25, 75])
    distribution = distribution_of(values)
    row = replace(PLAIN, gradient=gradient_statistics((1, 4), distribution=distribution, zero_fraction=0.5))
    shares, edges = bars(row)
    assert shares.sum() == pytest.approx(1)
    assert (edges[0], edges[-1]) == (-1, 1)
    assert shares[0] == pytest.approx(0.25)
    assert shares[(edges[:-1] <= 0.02) & (edges[1:] > 0.02)] == pytest.approx([0.75])
    title = gradient_histograms(with_gradients(row)).axes[0].get_title(loc="left")
    assert "50% zero" in title


@pytest.mark.parametrize(("tail", "scale"), [(25.0, "linear"), (100.0, "asinh")])
def test_long_tails_get_a_logarithmic_axis_which_says_so(tail: float, scale: str) -> None:
    distribution = distribution_of(np.array([*[1.0, -1.0] * 50, tail]))
    row = replace(PLAIN, gradient=gradient_statistics((1, 4), distribution=distribution))
    axes = gradient_histograms(with_gradients(row)).axes[0]
    assert axes.get_xscale() == scale
    assert ("log axis" in axes.get_title(loc="left")) == (scale == "asinh")


def test_counts_of_nan_and_inf_stand_in_the_title() -> None:
    row = replace(PLAIN, gradient=gradient_statistics((1, 4), nan_count=3, inf_count=1))
    assert "3 NaN · 1 Inf" in gradient_histograms(with_gradients(row)).axes[0].get_title(loc="left")


# Ratios


def test_ratios_stand_in_the_order_of_the_network_weights_apart() -> None:
    figure = parameter_ratios(GRADIENTS)
    weights = drawn(figure, 0, "weights")
    assert (weights[0], weights[4], weights[7], weights[8]) == (1.8e-6, 1.25, 1.8, 180.0)
    assert math.isnan(weights[3])  # zero
    assert drawn(figure, 0, "biases and scales")[1] == 0.5625
    assert list(drawn(figure, 0, "gradient is 0")) == [3]
    assert list(drawn(figure, 0, "parameter is 0")) == [2]
    assert list(drawn(figure, 0, "no gradient path")) == [6]


def test_the_median_of_the_weights_is_drawn_and_told() -> None:
    # Of 1.8e-6, 1.25, 1.8 and 180.
    assert "median of weights, 1.5" in texts(parameter_ratios(GRADIENTS))


def test_ratios_of_biases_only_have_no_median() -> None:
    figure = parameter_ratios(with_parameters(PARAMETER_ROWS[1]))
    assert not any("median" in text for text in texts(figure))
    figure_png(figure)


# Good manners


@pytest.mark.exhaustive
def test_drawing_touches_neither_pyplot_nor_the_users_settings() -> None:
    script = (
        "import sys, matplotlib\n"
        "matplotlib.rcParams['text.usetex'] = True\n"
        "matplotlib.rcParams['lines.linewidth'] = 33\n"
        "from tests.render.conftest import GRADIENTS\n"
        "from hookscope.render.plot_axes import figure_png\n"
        "from hookscope.render.plots import PLOTS\n"
        "for draw in PLOTS.values(): figure_png(draw(GRADIENTS))\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules\n"
        "assert matplotlib.rcParams['text.usetex'] is True and matplotlib.rcParams['lines.linewidth'] == 33\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
