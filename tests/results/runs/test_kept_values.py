"""The values that a run keeps of every row, in its directory."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import hookscope
from hookscope.errors import InputError
from hookscope.results.runs.reading import read_run
from hookscope.results.runs.store import ARRAYS
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
    rows = read_run(result.save(tmp_path / "run")).result.rows
    assert len(rows) == len(result.rows) == 5
    for row in rows:
        expected = kept_values(result.tensors[row.label], row.statistics.channel_axis, 3)
        np.testing.assert_array_equal(row.activation.kept_values, expected)
        assert row.activation.kept_values.shape == (3, 256)


def test_the_batch_size_does_not_matter(tmp_path: Path) -> None:
    for number in range(3):
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (24, 24, 3), np.uint8)).save(
            tmp_path / f"{number}.png"
        )
    options = {"resize": "none", "crop": "none"}
    one, all_at_once = (
        hookscope.activations(network(), str(tmp_path), batch_size=case, **options)  # type: ignore[arg-type]
        for case in (2, 3)
    )
    for row, other in zip(one.rows, all_at_once.rows, strict=True):
        assert row.activation.kept_values is not None
        np.testing.assert_allclose(row.activation.kept_values, other.activation.kept_values, rtol=1e-5, atol=1e-6)


def test_values_that_are_not_finite_are_kept_too(tmp_path: Path) -> None:
    module = network()
    with torch.no_grad():
        module[1].weight[3] = math.nan
    rows = read_run(hookscope.activations(module, inputs()).save(tmp_path / "run")).result.rows
    missing = [float(np.isnan(row.activation.kept_values).mean()) for row in rows]
    assert missing == [0, 1 / 16, 1 / 16, 1, 1]


def test_a_run_with_other_arrays_is_refused_in_a_line(tmp_path: Path) -> None:
    run = hookscope.activations(network(), inputs()).save(tmp_path / "run")
    whole = load_file(run / ARRAYS)

    def refused() -> str:
        with pytest.raises(InputError) as caught:
            read_run(run)
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    kept = "rows.1.activation.kept_values"
    keys, counts = (f"rows.1.activation.distribution.{name}" for name in ("keys", "counts"))
    others = (
        {kept: whole[kept][0]},
        {keys: whole[keys][::-1].copy()},
        {keys: whole[keys].astype(np.int64)},
        {counts: whole[counts] + 1},
        {counts: whole[counts][1:].copy()},
    )
    for other in others:
        save_file({**whole, **other}, run / ARRAYS)
        assert f"its {ARRAYS} does not fit 'conv" in refused() or "does not fit '1'" in refused()
    save_file(whole, run / ARRAYS)
    text = (run / "result.json").read_text()
    result = json.loads(text)
    for low, high in (("-Infinity", 1.0), (0.0, "NaN"), (1.0, 0.0)):
        result["rows"][1]["activation"]["distribution"].update(low=low, high=high)
        (run / "result.json").write_text(json.dumps(result))
        assert f"its {ARRAYS} does not fit '1'" in refused()
    (run / "result.json").write_text(text)
    save_file({name: values for name, values in whole.items() if name != kept}, run / ARRAYS)
    assert f"its result.json is not as hookscope writes it: {kept}: " in refused()
    (run / ARRAYS).write_bytes(b"\xff" * 40)
    assert f"its {ARRAYS} is cut short or damaged" in refused()
    (run / ARRAYS).unlink()
    assert "its result.json is not as hookscope writes it: rows.0.activation." in refused()


def test_values_that_are_not_those_of_their_range_are_refused(tmp_path: Path) -> None:
    run = hookscope.activations(nn.Linear(4, 3), torch.randn(2, 4)).save(tmp_path / "run")
    whole, name = load_file(run / ARRAYS), "rows.0.activation.distribution.values"
    for values in (whole[name][::-1].copy(), np.nextafter(whole[name], np.inf)):
        save_file({**whole, name: values}, run / ARRAYS)
        with pytest.raises(InputError, match=rf"its {ARRAYS} does not fit"):
            read_run(run)
