"""Inputs that hold NaN or Inf themselves are named, before the layers that follow from them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.commands.survey.describe import answer
from hookscope.results.json_form import to_document
from hookscope.results.runs.reading import read_run
from hookscope.results.survey import NONFINITE_OUTPUT


def files(folder: Path, broken: dict[int, float]) -> Path:
    random = np.random.default_rng(0)
    for at in range(6):
        values = random.random((3, 6, 6), np.float32)
        if at in broken:
            values[1, 2, 3] = broken[at]
        np.save(folder / f"{at}.npy", values)
    return folder


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())


@pytest.mark.parametrize("chunk_size", [2, 6])
def test_files_with_nan_or_inf_are_named(tmp_path: Path, chunk_size: int) -> None:
    data = tmp_path / "data"
    data.mkdir()
    files(data, {1: np.nan, 4: -np.inf})
    result = hookscope.survey(network(), data, chunk_size=chunk_size)
    assert result.nonfinite_inputs == (str(data / "1.npy"), str(data / "4.npy"))
    first, second, *_ = answer(result)
    assert first == "2 of 6 inputs hold NaN or Inf before any layer: 1.npy, 4.npy."
    assert second == "NaN or Inf in layer 0, layer 1."
    assert to_document(result)["nonfinite_inputs"] == [*result.nonfinite_inputs]
    result.save(tmp_path / "run")
    assert read_run(tmp_path / "run").result.nonfinite_inputs == result.nonfinite_inputs


def test_an_input_in_memory_is_named_by_its_number(tmp_path: Path) -> None:
    inputs = torch.rand(5, 3, 6, 6)
    inputs[3, 0, 0, 0] = torch.nan
    torch.save(inputs, tmp_path / "x.pth")
    assert hookscope.survey(network(), tmp_path / "x.pth").nonfinite_inputs == (f"{tmp_path / 'x.pth'}[3]",)


def ragged(rows: Tensor) -> Tensor:
    return torch.nested.nested_tensor([row.expand(at + 1, -1) for at, row in enumerate(rows)])


class Reads(nn.Module):
    """A linear layer over inputs of any form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([part.mean(0) for part in x.unbind()]) if x.is_nested else x.to_dense()
        return self.layer(rows.real if rows.is_complex() else rows)


@pytest.mark.parametrize(
    "form", [Tensor.to_sparse, Tensor.to_sparse_csr, ragged, lambda rows: torch.complex(torch.ones_like(rows), rows)]
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
def test_sparse_ragged_and_complex_inputs_are_named_too(form: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    rows = torch.rand(5, 6)
    rows[3, 2] = torch.nan
    survey = hookscope.survey(Reads(), form(rows), batch_size=2, chunk_size=4)
    assert survey.nonfinite_inputs == ("tensor[3]",)
    survey.save(tmp_path / "run")  # for which inputs are read again, to draw them


class Returns(nn.Module):
    """A linear layer, then a function without a module."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, 4), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x))


def freed(values: Tensor) -> Tensor:
    copy = values.clone()
    copy.untyped_storage().resize_(0)
    return copy


@pytest.mark.parametrize(
    ("last", "is_broken"),
    [
        (lambda x: torch.fft.fft(x) / 0, True),
        (lambda x: (x / 0).to_sparse(), True),
        (lambda x: torch.nested.nested_tensor([*(x / 0)]), True),
        (lambda x: x.to(torch.float8_e4m3fn), False),
        (freed, False),
        (lambda x: x.to("meta"), False),
    ],
    ids=["complex", "sparse", "nested", "float8", "freed", "meta"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_a_network_returns_is_looked_at_in_any_form(last: Callable[[Tensor], Tensor], is_broken: bool) -> None:
    survey = hookscope.survey(Returns(last), torch.rand(3, 6), verify=False)
    assert any(warning.startswith(NONFINITE_OUTPUT) for warning in survey.warnings) == is_broken


def test_an_input_without_a_finite_value_is_no_input_of_mean_zero(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = random.normal(50, 1, (80, 4)).astype(np.float32)  # zeros among them would correlate all channels
    values[:40, 0] -= 3
    values[::4, :2] = np.nan
    values[:40, 2] = np.nan  # known of one class alone
    values[:, 3] = np.nan
    for at, row in enumerate(values):
        path = tmp_path / "ab"[at // 40] / f"{at:02}.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, row)
    survey = hookscope.survey(nn.Sequential(nn.Identity()), tmp_path, by_class=True, chunk_size=7)
    assert survey.rows[0].duplicate_channels == ()
    first, second = (half[np.isfinite(half)].astype(np.float64) for half in (values[:40, 0], values[40:, 0]))
    both = np.concatenate([first, second])
    whole = ((both - both.mean()) ** 2).sum()
    within = ((first - first.mean()) ** 2).sum() + ((second - second.mean()) ** 2).sum()
    channels = survey.rows[0].channels
    assert channels[0].selectivity == pytest.approx((whole - within - within / (60 - 2)) / whole)
    assert (channels[0].best_class, channels[0].firing_inputs) == ("b", 1.0)
    assert [(channel.selectivity, channel.best_class) for channel in channels[2:]] == [(None, "")] * 2


def test_a_selectivity_of_zero_is_exactly_zero(tmp_path: Path) -> None:
    """Of the first channel the sum of squares is 4 between classes and 12 over all: (4 - (12 - 4) / 2) / 12 = 0."""
    for name, channels in {"a/0": (4, 4), "a/1": (4, 3), "b/0": (0, 0), "b/1": (4, 4 - 0.5)}.items():
        path = tmp_path / f"{name}.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.array([*channels, 1000 + channels[0]], np.float32))
    channels = hookscope.survey(nn.Sequential(nn.Identity()), tmp_path, by_class=True, chunk_size=3).rows[0].channels
    first, second = np.array([4, 3]), np.array([0, 3.5])
    within = ((first - first.mean()) ** 2).sum() + ((second - second.mean()) ** 2).sum()
    whole = ((np.concatenate([first, second]) - 2.625) ** 2).sum()
    assert [channel.selectivity for channel in channels] == [
        0,
        pytest.approx((whole - within - within / 2) / whole),
        0,
    ]


def test_a_layer_that_makes_nan_blames_no_input(tmp_path: Path) -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - 2).sqrt()

    result = hookscope.survey(nn.Sequential(Root()), files(tmp_path, {}))
    assert result.nonfinite_inputs == ()
    assert answer(result)[0] == "NaN or Inf in layer 0."


def test_an_output_with_inf_is_not_counted_among_those_that_fit_into_float16(tmp_path: Path) -> None:
    class Tenth(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0.1, x, torch.inf)

    sentences = answer(hookscope.survey(nn.Sequential(nn.Identity(), Tenth()), files(tmp_path, {})))
    assert sentences[0] == "NaN or Inf in layer 1."
    assert any(text.startswith("None of these outputs without NaN or Inf overflows float16: ") for text in sentences)
