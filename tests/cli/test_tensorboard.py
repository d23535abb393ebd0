from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import hookscope
from hookscope.cli.tensorboard import write_run
from hookscope.errors import OutputError
from hookscope.inspection.losses import choose_loss
from hookscope.results.activations import Activations, FeatureMaps
from hookscope.results.distribution import distribution_of
from hookscope.results.gradients import Gradients
from hookscope.results.statistics import TensorStatistics
from tests.inspections import inspect, inspect_gradients

METRICS = ("mean", "std", "min", "max", "mean_abs", "l2", "zero_fraction", "dead_channel_fraction", "nan_count")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


@pytest.fixture(scope="module")
def forward() -> Activations:
    return inspect(network(), torch.randn(2, 3, 8, 8), ["@0", "@1", "@-1"], grids_for=1, distributions=True)


@pytest.fixture(scope="module")
def backward() -> Gradients:
    return inspect_gradients(network(), torch.randn(2, 3, 8, 8), choose_loss("sum"), include_inputs=True)


def read(folder: Path) -> EventAccumulator:
    """Return everything in a folder, nothing sampled away."""
    everything = dict.fromkeys(("scalars", "histograms", "images", "tensors", "compressedHistograms"), 0)
    accumulator = EventAccumulator(str(folder), size_guidance=everything)
    accumulator.Reload()
    return accumulator


def scalars(accumulator: EventAccumulator) -> dict[str, float]:
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        [event] = accumulator.Scalars(tag)
        assert event.step == 0
        found[tag] = event.value
    return found


def expected(what: str, rows: Iterator[tuple[str, TensorStatistics]]) -> dict[str, float]:
    """Return tags and values, rounded to the 32 bits of TensorBoard's format."""
    return {
        f"{what} {metric}/{label}": float(np.float32(getattr(statistics, metric)))
        for label, statistics in rows
        for metric in (*METRICS, "inf_count")
        if getattr(statistics, metric) is not None
    }


def drawn(maps: tuple[FeatureMaps, ...], folder: Path) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(len(maps))]
    for each, path in zip(maps, paths, strict=True):
        hookscope.draw_grid(each).save(path)
    return paths


def test_gradients_have_loss_norms_and_ratios(backward: Gradients, tmp_path: Path) -> None:
    write_run(tmp_path, backward, [])
    assert backward.loss is not None
    wanted = {"loss": float(np.float32(backward.loss.value))}
    wanted |= expected("activation", ((row.label, row.activation) for row in backward.rows))
    for what, role in (("gradient", "output"), ("input gradient", "input")):
        wanted |= expected(what, ((row.label, row.gradient) for row in backward.gradients if row.role == role))
    wanted |= expected("parameter gradient", ((row.name, row.gradient) for row in backward.parameters))
    for row in backward.parameters:
        wanted[f"parameter weight_l2/{row.name}"] = float(np.float32(row.weight_l2))
        wanted[f"parameter ratio/{row.name}"] = float(np.float32(row.ratio))
    found = scalars(read(tmp_path))
    assert found == wanted
    assert found["gradient l2/3"] == pytest.approx(np.sqrt(10))  # the sum's gradient is 1 for each of 2 x 5 outputs
    assert found["parameter gradient mean/3.bias"] == 2


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
        found = event.histogram_value
        assert found.num == sum(found.bucket) == values.size == row.activation.element_count
        assert (found.min, found.max) == (values.min(), values.max())
        assert found.sum == pytest.approx(values.sum(), abs=1e-5)
        assert found.sum_squares == pytest.approx(np.square(values).sum())
        below = [np.count_nonzero(values < limit) for limit in found.bucket_limit[:-1]]
        assert np.cumsum(found.bucket)[:-1].tolist() == below


@pytest.mark.parametrize(
    ("values", "count"),
    [
        (np.zeros(9), 9),
        (np.zeros(9000), 9000),
        (np.array([1.0, np.nextafter(1.0, 2.0)]), 2),
        (np.repeat([-1.0, 0.0, 5e-324], 1000), 3000),
        (np.array([-1e149, 1e149]), 2),
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
    found = [accumulator.Histograms(tag)[0].histogram_value for tag in accumulator.Tags()["histograms"]]
    assert [(each.num, sum(each.bucket)) for each in found] == ([] if count is None else [(count, count)])


def test_grids_are_the_runs_own_pictures(forward: Activations, tmp_path: Path) -> None:
    paths = drawn(forward.feature_maps, tmp_path)
    write_run(tmp_path / "logs", forward, paths)
    accumulator = read(tmp_path / "logs")
    assert accumulator.Tags()["images"] == [
        f"activation grids/{each.label} input {each.input_index}" for each in forward.feature_maps
    ]
    for tag, path in zip(accumulator.Tags()["images"], paths, strict=True):
        [event] = accumulator.Images(tag)
        (tmp_path / "read.png").write_bytes(event.encoded_image_string)
        with Image.open(tmp_path / "read.png") as found, Image.open(path) as wanted:
            assert np.array_equal(np.asarray(found.convert("RGB")), np.asarray(wanted.convert("RGB")))


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


def test_a_loss_that_is_not_finite_is_written_as_it_is(backward: Gradients, tmp_path: Path) -> None:
    assert backward.loss is not None
    write_run(tmp_path, replace(backward, loss=replace(backward.loss, value=float("nan"))), [])
    assert np.isnan(scalars(read(tmp_path))["loss"])


def test_a_folder_that_cannot_be_written_is_one_line(forward: Activations, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match=r"^Cannot write '.*--tensorboard\.$"):
            write_run(folder, forward, [])
    assert (tmp_path / "file").read_text() == "mine"


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
