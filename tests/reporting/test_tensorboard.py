from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from hookscope.errors import OutputError
from hookscope.reporting.tensorboard import write_run
from hookscope.results.activations import Activations
from hookscope.results.distribution import distribution_of
from tests.inspections import inspect


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


@pytest.fixture(scope="module")
def forward() -> Activations:
    return inspect(network(), torch.randn(2, 3, 8, 8), ["@0", "@1", "@-1"], grids_for=1, distributions=True)


def read(folder: Path) -> EventAccumulator:
    """Return everything in a folder, nothing sampled away."""
    everything = dict.fromkeys(("scalars", "histograms", "images", "tensors", "compressedHistograms"), 0)
    accumulator = EventAccumulator(str(folder), size_guidance=everything)
    accumulator.Reload()
    return accumulator


def test_histograms_count_every_value(forward: Activations, tmp_path: Path) -> None:
    write_run(tmp_path, replace(forward, feature_maps=()), [])
    accumulator = read(tmp_path)
    assert accumulator.Tags()["histograms"] == [f"activation/{row.label}" for row in forward.rows]
    for row in forward.rows:
        distribution = row.activation.distribution
        assert distribution is not None
        assert distribution.values is not None
        values = distribution.values
        [event] = accumulator.Histograms(f"activation/{row.label}")
        actual = event.histogram_value
        assert actual.num == sum(actual.bucket) == values.size == row.activation.element_count
        assert (actual.min, actual.max) == (values.min(), values.max())
        assert actual.sum == pytest.approx(values.sum(), abs=1e-5)
        assert actual.sum_squares == pytest.approx(np.square(values).sum())
        below = [np.count_nonzero(values < limit) for limit in actual.bucket_limit[:-1]]
        assert np.cumsum(actual.bucket)[:-1].tolist() == below


@pytest.mark.parametrize(
    ("values", "count"),
    [
        (np.zeros(9000), 9000),
        (np.array([1.0, np.nextafter(1.0, 2.0)]), 2),
        (np.repeat([-1.0, 0.0, 5e-324], 1000), 3000),
        (np.array([-1.7e308, 1.7e308]), None),
        (np.zeros(0), None),
    ],
)
def test_odd_values_are_counted_or_left_out(
    forward: Activations, tmp_path: Path, values: np.ndarray, count: int | None
) -> None:
    row = forward.rows[0]
    row = replace(row, activation=replace(row.activation, distribution=distribution_of(values)))
    write_run(tmp_path, replace(forward, rows=(row,), feature_maps=()), [])
    accumulator = read(tmp_path)
    actual = [accumulator.Histograms(tag)[0].histogram_value for tag in accumulator.Tags()["histograms"]]
    assert [(each.num, sum(each.bucket)) for each in actual] == ([] if count is None else [(count, count)])


def test_a_number_beyond_float32_is_left_out_and_inf_stays(forward: Activations, tmp_path: Path) -> None:
    values = replace(forward.rows[0].activation, mean=-1e200, std=3e38, max=float("inf"))
    write_run(tmp_path, replace(forward, rows=(replace(forward.rows[0], activation=values),), feature_maps=()), [])
    accumulator = read(tmp_path)
    scalars = {tag.partition("/")[0]: accumulator.Scalars(tag)[0].value for tag in accumulator.Tags()["scalars"]}
    assert "activation mean" not in scalars
    assert (scalars["activation std"], scalars["activation max"]) == (pytest.approx(3e38), float("inf"))


def test_hostile_names_stay_apart_in_one_group_on_one_line(forward: Activations, tmp_path: Path) -> None:
    names = ["../../etc", "a/b", "a\nb", "\x1b[31m", "x" * 300 + "1", "x" * 300 + "2", "relu#1", "relu", "\ud800"]
    rows = tuple(replace(forward.rows[0], layer=name) for name in names)
    rows = (*rows, replace(forward.rows[0], layer="relu", call=1))  # its label is another layer's name
    write_run(tmp_path, replace(forward, rows=rows, feature_maps=()), [])
    tags = [tag for tag in read(tmp_path).Tags()["scalars"] if tag.startswith("activation mean/")]
    assert len(set(tags)) == len(names) + 1
    for tag in tags:
        assert tag.count("/") == 1
        assert tag.isprintable()
        assert len(tag) < 230
    assert "activation mean/relu#1 (2)" in tags


def test_what_breaks_off_leaves_nothing_and_another_run_leaves_the_first(forward: Activations, tmp_path: Path) -> None:
    missing = [tmp_path / "missing.png"] * len(forward.feature_maps)
    with pytest.raises(OutputError):
        write_run(tmp_path / "logs", forward, missing)
    assert list((tmp_path / "logs").iterdir()) == []
    for count in (1, 2):
        write_run(tmp_path / "logs", replace(forward, feature_maps=()), [])
        names = [path.name for path in (tmp_path / "logs").iterdir()]
        assert len(names) == count
        assert all(name.startswith("events.out.tfevents.") for name in names)
