"""The values that a run keeps of every row, in its directory."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import hookscope
from hookscope.errors import InputError
from hookscope.results.runs.kept_values import FILE, read_kept_values
from hookscope.results.runs.reading import read_run
from hookscope.statistics.kept_values import kept_values


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 24, 3), nn.Flatten()
    )


def inputs(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(1))


def test_a_run_keeps_values_of_every_activation(tmp_path: Path) -> None:
    result = hookscope.activations(network(), inputs(), save_tensors=True)
    stored = read_kept_values(read_run(result.save(tmp_path / "run")))
    assert len(stored) == len(result.rows) == 5
    for index, row in enumerate(result.rows):
        expected = kept_values(result.tensors[row.label], row.statistics.channel_axis, 3)
        np.testing.assert_array_equal(stored[f"rows.{index}"], expected)
        assert stored[f"rows.{index}"].shape == (3, 256)


@pytest.mark.exhaustive
def test_a_run_keeps_values_of_every_gradient(tmp_path: Path) -> None:
    result = hookscope.grads(network(), inputs(), loss="sum", save_tensors=True, inputs=True)
    run = read_run(result.save(tmp_path / "run"))
    stored = read_kept_values(run)
    labels = {f"gradients.{at}": (f"{row.label} grad_{row.role}", row) for at, row in enumerate(run.gradients)}
    labels |= {f"parameters.{at}": (f"{row.name} grad", row) for at, row in enumerate(run.parameters)}
    for name, (label, row) in labels.items():
        if label in result.tensors:
            is_parameter = name.startswith("parameters")
            expected = kept_values(result.tensors[label], row.statistics.channel_axis, 1 if is_parameter else 3)
            np.testing.assert_array_equal(stored[name], expected)
        else:  # the network's own input, which gets no gradient
            assert name not in stored


@pytest.mark.parametrize("size", [1, 2])
def test_the_batch_size_does_not_matter(tmp_path: Path, size: int) -> None:
    for number in range(3):
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (24, 24, 3), np.uint8)).save(
            tmp_path / f"{number}.png"
        )
    options = {"resize": "none", "crop": "none"}
    one, all_at_once = (
        hookscope.activations(network(), str(tmp_path), batch_size=each, **options)  # type: ignore[arg-type]
        for each in (size, 3)
    )
    for row, other in zip(one.rows, all_at_once.rows, strict=True):
        assert row.activation.kept_values is not None
        np.testing.assert_allclose(row.activation.kept_values, other.activation.kept_values, rtol=1e-5, atol=1e-6)


def test_values_that_are_not_finite_are_kept_too(tmp_path: Path) -> None:
    module = network()
    with torch.no_grad():
        module[1].weight[3] = math.nan
    stored = read_kept_values(read_run(hookscope.activations(module, inputs()).save(tmp_path / "run")))
    missing = [float(np.isnan(stored[f"rows.{index}"]).mean()) for index in range(5)]
    assert missing == [0, 1 / 16, 1 / 16, 1, 1]


def test_a_run_of_an_earlier_version_or_with_other_values_is_refused_in_a_line(tmp_path: Path) -> None:
    run = read_run(hookscope.activations(network(), inputs()).save(tmp_path / "run"))
    whole = load_file(run.folder / FILE)

    def refused() -> str:
        with pytest.raises(InputError) as caught:
            read_kept_values(run)
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    values: NDArray[np.floating] = whole["rows.1"]
    for other in ({"rows.5": values}, {"rows.1": values[0]}, {"rows.1": values.astype(np.int32)}, {"more": values}):
        save_file({**whole, **other}, run.folder / FILE)
        assert f"its {FILE} does not fit its rows" in refused()
    (run.folder / FILE).write_bytes(b"\xff" * 40)
    assert f"its {FILE} is cut short or damaged" in refused()
    (run.folder / FILE).write_bytes(bytes(10**6))
    assert f"its file '{FILE}' is not a regular file, or too large" in refused()
    (run.folder / FILE).unlink()
    (run.folder / "sketches.safetensors").write_bytes(b"")
    assert f"it has no {FILE}, so an earlier version of hookscope made it" in refused()
