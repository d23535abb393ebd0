"""Exact quantiles, values at fixed places, and how narrow weights are; expected values by NumPy and by hand."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.commands.check.measuring.signatures import OutputSignatures, weights_precision
from hookscope.inputs.batches import Batch
from hookscope.results.check import OutputSignature
from tests.inspections import inspect
from tests.networks import batch_of


def batches(values: Tensor, *sizes: int) -> Iterator[Batch]:
    first = 0
    for part in values.split(list(sizes)):
        yield batch_of(part, first=first, count=len(part))
        first += len(part)


def signed(network: nn.Module, inputs: Iterator[Batch]) -> dict[str, OutputSignature]:
    signatures = OutputSignatures()
    on_call, on_tensor = signatures.after(None, lambda *_: None)
    inspect(network, signatures.numbered(inputs), ["*"], for_rules=True, on_call=on_call, on_tensor=on_tensor)
    return signatures.results()


def kept(signature: OutputSignature) -> NDArray[np.floating]:
    assert signature.values is not None
    return signature.values


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1), (1, 2)])
def test_a_signature_does_not_depend_on_how_inputs_come_in_batches(sizes: tuple[int, ...]) -> None:
    values = torch.randn(3, 4, 5)
    network = nn.Sequential(nn.Tanh())
    whole, parts = signed(network, batches(values, 3)), signed(network, batches(values, *sizes))
    assert whole.keys() == parts.keys() == {"", "0", "(model)"}
    for label, one in whole.items():
        np.testing.assert_allclose(kept(parts[label]), kept(one), rtol=1e-6, atol=1e-6)
        assert kept(one).shape == (3, 20)
        if label:
            assert parts[label].quantiles == pytest.approx(one.quantiles, rel=1e-6)
            assert one.channels is not None
            np.testing.assert_allclose(parts[label].channels, one.channels, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "shape", "axis"),
    [
        (nn.Conv2d(3, 5, 2), (4, 3, 6, 6), 1),
        (nn.Linear(6, 5), (4, 6), 1),
        (nn.Linear(6, 5), (4, 7, 6), 2),
        (nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last), (4, 3, 6, 6), 1),
        (nn.Conv2d(3, 5, 2).double(), (4, 3, 6, 6), 1),
        (nn.Linear(6, 5).bfloat16(), (4, 6), 1),
    ],
)
def test_each_channel_has_the_mean_and_std_that_numpy_finds(
    layer: nn.Module, shape: tuple[int, ...], axis: int
) -> None:
    inputs = torch.randn(shape).to(next(layer.parameters()).dtype)
    actual = signed(nn.Sequential(layer), batches(inputs, 3, 1))["0"].channels
    values = layer(inputs).detach().double().numpy()
    others = tuple(number for number in range(values.ndim) if number != axis)
    np.testing.assert_allclose(actual, [values.mean(others), values.std(others)], rtol=1e-4, atol=1e-6)


def test_what_has_no_channels_has_no_moments_of_any() -> None:
    whole = signed(nn.Sequential(nn.Flatten(0)), batches(torch.ones(2, 3), 2))
    assert whole["0"].channels is None


def test_quantiles_are_of_each_input_and_their_mean() -> None:
    values = torch.stack([torch.arange(5.0), torch.arange(5.0) * 3])
    quantiles = signed(nn.Sequential(nn.Identity()), batches(values, 2))["0"].quantiles
    assert quantiles is not None
    assert quantiles[3] == (2 + 6) / 2


def test_quantiles_are_of_finite_values_and_all_are_kept() -> None:
    values = torch.tensor([[1.0, math.nan, 3.0, -math.inf]])
    actual = signed(nn.Sequential(nn.Identity()), batches(values, 1))["0"]
    assert actual.quantiles is not None
    assert actual.quantiles[3] == 2
    np.testing.assert_array_equal(kept(actual), values)


class Both(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a.sum(1) + b.sum(1)


def test_values_of_several_input_tensors_are_kept_side_by_side_whatever_the_batches() -> None:
    a, b = torch.arange(6.0).view(3, 2), -torch.arange(9.0).view(3, 3)

    def given(size: int) -> Iterator[Batch]:
        for first in range(0, 3, size):
            part = slice(first, first + size)
            yield batch_of(a[part], b[part], first=first, count=len(a[part]))

    for size in (1, 2, 3):
        np.testing.assert_array_equal(kept(signed(Both(), given(size))[""]), torch.cat([a, b], 1))


@pytest.mark.parametrize("values", [torch.arange(6).view(1, 6), torch.ones(1, 6, dtype=torch.bool), torch.ones(1, 0)])
def test_whole_numbers_and_nothing_at_all_have_signatures_too(values: Tensor) -> None:
    actual = signed(nn.Sequential(nn.Identity()), batches(values, 1))["0"]
    np.testing.assert_array_equal(kept(actual), values)
    assert (actual.quantiles is None) == (values.numel() == 0)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.to_sparse()


def test_a_sparse_output_has_none() -> None:
    assert signed(nn.Sequential(Sparse()), batches(torch.eye(2), 2)).keys() == {""}


def test_a_sparse_parameter_does_not_count_for_the_precision_of_weights() -> None:
    network = nn.Linear(2, 2).double()
    network.register_parameter("mixing", nn.Parameter(torch.eye(2).to_sparse()))
    assert weights_precision(network) == "float64"


def test_an_output_that_is_overwritten_in_place_is_signed_as_it_was() -> None:
    network = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    values = torch.tensor([[-1.0, 2.0]])
    actual = signed(network, batches(values, 1))
    assert [actual[label].quantiles[0] < 0 for label in ("0", "1")] == [True, False]  # type: ignore[index]


@pytest.mark.parametrize(
    ("through", "expected"),
    [
        ((), "float32"),
        ((torch.float16, torch.float32), "float16"),
        ((torch.bfloat16, torch.float32), "bfloat16"),
        ((torch.bfloat16,), "bfloat16"),
        ((torch.float64,), "float64"),
    ],
)
def test_weights_that_were_rounded_once_are_known_by_it(through: tuple[torch.dtype, ...], expected: str) -> None:
    torch.manual_seed(0)
    network: nn.Module = nn.Linear(8, 8)
    for dtype in through:
        network = network.to(dtype)
    if through == (torch.float64,):
        nn.init.normal_(network.weight)  # type: ignore[arg-type]
    assert weights_precision(network) == expected
