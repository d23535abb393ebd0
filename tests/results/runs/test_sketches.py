"""The sketches that a run keeps: one of every row, which tell how far the tensors of two runs are from each other."""

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
from hookscope.results.runs.reading import StoredRun, read_run
from hookscope.results.runs.sketches import FILE, read_sketches
from hookscope.results.sketches import NORM_ERROR, estimated_distance


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 24, 3), nn.Flatten()
    )


def inputs(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(1))


def shaken(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return module


def of_rows(run: StoredRun) -> dict[str, NDArray[np.float32]]:
    return {row.label: sketch for row, sketch in zip(run.result.rows, read_sketches(run)["rows"], strict=True)}


def test_two_runs_tell_how_far_their_activations_are(tmp_path: Path) -> None:
    a = hookscope.activations(network(), inputs(), save_tensors=True)
    b = hookscope.activations(shaken(network()), inputs(), save_tensors=True)
    first, second = (of_rows(read_run(each.save(tmp_path / name))) for name, each in (("a", a), ("b", b)))
    assert len(first) == 5
    for label, sketch in first.items():
        exact = float((a.tensors[label] - b.tensors[label]).norm())
        assert exact > 0
        assert estimated_distance(sketch, second[label]) == pytest.approx(exact, rel=4 * NORM_ERROR)


@pytest.mark.exhaustive
def test_two_runs_tell_how_far_their_gradients_are(tmp_path: Path) -> None:
    results = [
        hookscope.grads(each, inputs(), loss="sum", save_tensors=True, inputs=True)
        for each in (network(), shaken(network()))
    ]
    a, b = (read_run(each.save(tmp_path / name)) for name, each in zip("ab", results, strict=True))
    first, second = read_sketches(a), read_sketches(b)
    tensors, others = (each.tensors for each in results)
    labels = [f"{row.label} grad_{row.role}" for row in a.gradients]
    for table, names in (("gradients", labels), ("parameters", [f"{row.name} grad" for row in a.parameters])):
        assert len(first[table]) == len(names) > 0
        for name, sketch, other in zip(names, first[table], second[table], strict=True):
            if name in tensors:
                exact = float((tensors[name] - others[name]).norm())
                assert estimated_distance(sketch, other) == pytest.approx(exact, rel=4 * NORM_ERROR)
            else:  # the network's own input, which gets no gradient
                assert np.isnan(sketch).all()


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
        assert row.activation.sketch is not None
        assert other.activation.sketch is not None
        assert estimated_distance(row.activation.sketch, other.activation.sketch) <= 1e-5 * (row.l2 or 0)


def test_a_row_that_is_not_finite_has_no_sketch(tmp_path: Path) -> None:
    module = network()
    with torch.no_grad():
        module[1].weight[3] = math.nan
    sketches = of_rows(read_run(hookscope.activations(module, inputs()).save(tmp_path / "run")))
    assert {label: bool(np.isnan(sketch).all()) for label, sketch in sketches.items()} == {
        "0": False,
        "1": True,
        "2": True,
        "3": True,
        "4": True,
    }


def test_a_run_without_sketches_or_with_others_is_refused_in_a_line(tmp_path: Path) -> None:
    run = read_run(hookscope.activations(network(), inputs()).save(tmp_path / "run"))
    whole = load_file(run.folder / FILE)

    def refused() -> str:
        with pytest.raises(InputError) as caught:
            read_sketches(run)
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    for other in (
        {"rows": whole["rows"][1:]},
        {"rows": whole["rows"].astype(np.float64)},
        {"rows": whole["rows"][:, :128]},
        {**whole, "more": np.zeros(3)},
        {},
    ):
        save_file(other, run.folder / FILE)
        assert f"its {FILE} does not fit its rows" in refused()
    (run.folder / FILE).write_bytes(b"\xff" * 40)
    assert f"its {FILE} is cut short or damaged" in refused()
    (run.folder / FILE).unlink()
    assert f"its file '{FILE}' is missing" in refused()
