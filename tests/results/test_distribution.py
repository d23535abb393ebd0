"""Quantiles and histograms against NumPy, of values of every kind and of every layer of whole networks."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.inputs.batches import load_batches
from hookscope.models.spec import load_model
from hookscope.results.activations import LayerRow
from hookscope.results.distribution import (
    EXACT_LIMIT,
    QUANTILE_ERROR,
    Distribution,
    bin_values,
    distribution_of,
    edges_of,
    merge_distributions,
    quantiles,
)
from hookscope.results.statistics import QUANTILE_LEVELS
from hookscope.statistics.reducer import tensor_statistics
from tests.inspections import inspect, inspect_gradients
from tests.networks import batch_of

CAT = Path(__file__).parents[2] / "sample_images" / "cat.jpg"
RANK_ERROR = 0.005


def is_guaranteed(actual: tuple[float, ...] | None, values: NDArray[np.floating]) -> bool:
    """Tell whether quantiles keep what the documentation says, against `numpy.quantile` of all values."""
    ordered = np.sort(values.reshape(-1).astype(np.float64))
    ordered = ordered[np.isfinite(ordered)]
    if not ordered.size:
        return actual is None
    expected = np.quantile(ordered, QUANTILE_LEVELS)
    if ordered.size <= EXACT_LIMIT:
        return actual == pytest.approx(expected, rel=1e-12, abs=5e-324)  # the smallest number
    near = np.abs(np.array(actual) - expected) <= QUANTILE_ERROR * np.abs(expected) + 5e-324  # the smallest number
    below, up_to = (np.searchsorted(ordered, actual, side=side) / ordered.size for side in ("left", "right"))
    distance = np.maximum(0, np.maximum(below - QUANTILE_LEVELS, QUANTILE_LEVELS - up_to))  # of ranks
    return bool((near | (distance <= RANK_ERROR)).all())


def some(make: Callable[[np.random.Generator], NDArray[np.floating]]) -> NDArray[np.float64]:
    return np.asarray(make(np.random.default_rng(0)), np.float64)


COUNT = 30_000
SYNTHETIC = {
    "normal": some(lambda r: r.normal(size=COUNT)),
    "uniform": some(lambda r: r.uniform(-1, 3, COUNT)),
    "constant": np.full(COUNT, -0.7),
    "bimodal": some(lambda r: r.normal(size=COUNT) / 10 + r.choice([-5, 0.2], COUNT)),
    "half zeros, as after a ReLU": some(lambda r: r.normal(size=COUNT).clip(0)),
    "heavy tails": some(lambda r: r.standard_cauchy(COUNT)),
    "huge": some(lambda r: r.normal(size=COUNT) * 1e30),
    "subnormal in float32": some(lambda r: r.normal(size=COUNT) * 1e-41),
    "few different values": some(lambda r: r.choice([-1.0, 0.1, 0.30000001, 1.0, 6.0], COUNT)),
    "either of two, as many of each": np.tile([-1.0, 1.0], COUNT // 2),
    "far from zero": some(lambda r: r.normal(size=COUNT) + 100),
    "over all magnitudes": some(lambda r: np.exp(r.uniform(-80, 80, COUNT)) * r.choice([-1, 1], COUNT)),
    "as small as a batch of logits": some(lambda r: r.normal(size=1000)),
    "one more than are kept": some(lambda r: r.normal(size=EXACT_LIMIT + 1)),
}


# --- the guarantee ---


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in SYNTHETIC), *(("normal", dtype) for dtype in (torch.float64, torch.bfloat16))],
    ids=str,
)
def test_quantiles_keep_the_guarantee(name: str, dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(SYNTHETIC[name]).to(dtype)
    assert is_guaranteed(tensor_statistics(tensor).quantiles, tensor.double().numpy())


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-1e307, 1e307)),
    st.integers(1, 60),
    st.integers(1, 90),
)
def test_quantiles_of_any_values_at_all_keep_it(values: NDArray[np.float64], times: int, others: int) -> None:
    values = np.concatenate([values.repeat(times), np.linspace(values[0] / 2, values[0], others)])
    distribution = distribution_of(values)
    assert distribution is not None
    assert is_guaranteed(quantiles([distribution], QUANTILE_LEVELS)[0], values)


# --- networks ---

PICTURE = (1, 3, 64, 64)


def wrong(rows: list[tuple[str, tuple[float, ...] | None]], seen: dict[str, NDArray[np.floating]]) -> list[str]:
    return [label for label, actual in rows if not is_guaranteed(actual, seen[label])]


def test_the_quantiles_of_a_trained_network_are_true_and_on_the_right_side_of_zero() -> None:
    model = load_model("demo")
    seen: dict[str, NDArray[np.floating]] = {}

    def keep(label: str, tensor: Tensor, _axis: int | None) -> None:
        seen[label] = tensor.clone().numpy()

    (batch,) = load_batches([CAT], model.preprocessing)
    inspection = inspect(model, batch, ["conv"], distributions=True, on_tensor=keep)
    assert wrong([(row.label, row.activation.quantiles) for row in inspection.rows], seen) == []
    for row in inspection.rows:
        true_quantiles = np.quantile(seen[row.label], QUANTILE_LEVELS)
        for actual, true in zip(row.activation.quantiles or (), true_quantiles, strict=True):
            assert actual * true > 0 or abs(true) < 0.01 * (row.activation.std or 0)
    (expanded,) = [row for row in inspection.rows if row.label == "_blocks.8._expand_conv"]
    assert expanded.activation.quantiles is not None
    assert expanded.activation.quantiles[3] == pytest.approx(
        -0.2353, abs=0.002
    )  # by np.quantile, with torchvision's transforms


# --- independent of how values come ---


def same(first: Distribution | None, second: Distribution | None) -> bool:
    return (first is second is None) or (
        first is not None
        and second is not None
        and (first.low, first.high, first.count) == (second.low, second.high, second.count)
        and (first.values is None) == (second.values is None)
        and all(map(np.array_equal, first.spans(), second.spans()))
    )


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from([*SYNTHETIC]),
    count=st.integers(0, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=8),
    seed=st.integers(0, 2**31),
)
def test_a_distribution_depends_on_the_values_alone(name: str, count: int, cuts: list[int], seed: int) -> None:
    values = SYNTHETIC[name][:count]
    edges = sorted({0, *(cut for cut in cuts if cut < values.size), values.size})
    parts = [distribution_of(values[start:stop]) for start, stop in itertools.pairwise(edges)]
    merged = None
    for index in np.random.default_rng(seed).permutation(len(parts)):
        merged = merge_distributions(merged, parts[index])
    assert same(merged, distribution_of(values))


def rows_of(parts: list[Tensor]) -> tuple[LayerRow, ...]:
    """Return the rows of a network that treats every value alike, over batches."""
    batches = [batch_of(part, count=len(part)) for part in parts]
    return inspect(nn.Sequential(nn.Identity(), nn.ReLU(), nn.Tanh()), batches, distributions=True).rows


@pytest.mark.parametrize("columns", [3, 20_000])
def test_rows_over_batches_in_any_order_are_those_over_all_inputs_at_once(columns: int) -> None:
    values = torch.randn(12, columns, generator=torch.Generator().manual_seed(0))
    values[3] = 0
    expected = rows_of([values])
    for parts in (values.split(1), values.split(5), reversed(values.split(4))):
        for ours, theirs in zip(rows_of(list(parts)), expected, strict=True):
            assert same(ours.activation.distribution, theirs.activation.distribution)
            assert ours.activation.quantiles == theirs.activation.quantiles


def test_a_distribution_is_there_only_if_it_is_asked_for() -> None:
    (row,) = inspect(nn.ReLU(), torch.randn(2, 3000)).rows
    assert (row.activation.quantiles, row.activation.distribution) == (None, None)
    gradients = inspect_gradients(nn.Linear(40, 50), torch.randn(2, 40))
    assert gradients.gradients[0].gradient.quantiles is None
    assert gradients.parameters[0].gradient.quantiles is None


# --- bins ---


def key(value: float) -> int:
    """Return the bin of a value, by the definition."""
    if not value:
        return 0
    exponent = math.frexp(value)[1] - 1
    part = int((Fraction(abs(value)) / Fraction(2) ** exponent - 1) * 32)
    return (1 if value > 0 else -1) * (1 + 32 * (exponent + 1074) + part)


@settings(max_examples=300)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.floats(-1e-300, 1e-300) | st.floats(width=16))
def test_a_bin_is_one_of_32_equal_parts_between_powers_of_two(value: float) -> None:
    if not math.isfinite(value):
        return
    keys, counts = bin_values(np.array([value]))
    assert (keys.tolist(), counts.tolist()) == ([key(value)], [1])
    ((low,), (high,)) = edges_of(keys)
    assert low <= value <= high
    if 1e-300 < abs(value) < 1e308:
        assert high - low <= min(abs(low), abs(high)) / 32


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=20, unique=True),
    st.sampled_from(["normal", "uniform", "half zeros, as after a ReLU", "heavy tails"]),
    st.sampled_from([500, 20_000]),
)
def test_histograms_between_edges_of_bins_are_those_of_numpy(places: list[int], name: str, count: int) -> None:
    values = SYNTHETIC[name][:count]
    distribution = distribution_of(values)
    assert distribution is not None
    edges = np.unique([math.copysign(2.0 ** abs(place), place) if place else 0.0 for place in places])
    if edges.size > 1:
        assert np.array_equal(distribution.histogram(edges), np.histogram(values, edges)[0])


def test_edges_that_divide_a_bin_share_its_values_by_width() -> None:
    distribution = distribution_of(np.linspace(1, 1 + 1 / 32, 3200, endpoint=False))
    assert distribution is not None
    actual = distribution.histogram(1 + np.array([-1, 0.25, 0.5, 2]) / 32)
    assert actual == pytest.approx([800, 800, 1600], abs=1)


@pytest.mark.parametrize("times", [1, 1000])
def test_shares_outside_of_bounds_include_the_bounds(times: int) -> None:
    distribution = distribution_of(np.repeat([-1.0, -0.9, 0.0, 0.5, 1.0], times))
    assert distribution is not None
    assert distribution.share_outside(-1.0, 1.0) == 0.4
    assert distribution.share_outside(-0.95, 1.0) == 0.4
    assert distribution.share_outside(0.0, 1.0) == pytest.approx(0.8)


@pytest.mark.parametrize("times", [1, 1000])
def test_zeros_are_left_out(times: int) -> None:
    for values in ([-2.0, 0.0, 3.0], [0.0, 3.0], [-2.0, 0.0]):
        distribution = distribution_of(np.repeat(values, times))
        assert distribution is not None
        actual = distribution.nonzero()
        assert actual is not None
        assert actual.count == (len(values) - 1) * times
        assert actual.low == pytest.approx(min(filter(None, values)), rel=1 / 32)
        assert actual.high == pytest.approx(max(filter(None, values)), rel=1 / 32)
    only_zeros = distribution_of(np.zeros(3 * times))
    assert only_zeros is not None
    assert only_zeros.nonzero() is None
