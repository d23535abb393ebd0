"""Weights of eight bits: recognised by their values, counts against torch's own rounding."""

import pytest
import torch
from torch import Tensor, nn

from hookscope.commands.check.measuring.stored import stored_tensors
from hookscope.commands.check.measuring.weight_structure import float8_values

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
NORMAL = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_of_float8_is_counted_in_its_own_type(dtype: torch.dtype) -> None:
    greatest = torch.finfo(dtype).max
    rounded = (NORMAL / NORMAL.abs().max() * 2 * greatest).clamp(-greatest, greatest).to(dtype)
    actual = float8_values(rounded)
    assert actual is not None
    assert actual.dtype == str(dtype).removeprefix("torch.")
    assert actual.saturated_count == sum(abs(value) == greatest for value in rounded.float().flatten().tolist())
    assert actual.rms == pytest.approx(float(rounded.double().pow(2).mean() ** 0.5))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64, torch.bfloat16])
def test_a_wider_weight_is_known_by_its_values(dtype: torch.dtype, wide: torch.dtype) -> None:
    actual = float8_values((NORMAL * 0.1).to(dtype).to(wide))
    assert actual is not None
    assert actual.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    "value",
    [
        NORMAL,
        NORMAL.bfloat16(),
        NORMAL.bfloat16().float(),
        (NORMAL * 64).round().clamp(-128, 127) / 64,  # int8, of whose bits float8 holds four
        NORMAL.sign(),
        NORMAL.round().clamp(-2, 2),
        torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16,
        torch.empty(0, 3),
        torch.full((8, 8), torch.nan).to(torch.float8_e4m3fn),
        torch.arange(64).reshape(8, 8),
    ],
)
def test_other_weights_are_not(value: Tensor) -> None:
    assert float8_values(value) is None


def test_only_weights_are_looked_at() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).requires_grad_(requires_grad=False)
    network[0].weight.copy_(network[0].weight.to(torch.float8_e4m3fn).float())
    network[1].weight.copy_(network[1].weight.to(torch.float8_e4m3fn).float())
    measured = {stored_tensor.name: stored_tensor.float8 for stored_tensor in stored_tensors(network)[0]}
    assert [name for name, actual in measured.items() if actual is not None] == ["0.weight"]


def test_what_float8_turns_to_zero_or_cuts_off_is_counted() -> None:
    # Half of 2**-9, the smallest magnitude of float8_e4m3fn, is rounded to 0, which is even. Next after 448 would be
    # 480: 464 lies halfway, and is rounded to 448, which is even.
    edge = 2.0**-10
    values = torch.tensor([[0.0, edge, -edge, edge * 1.001], [448.0, 464.0, -464.001, 1e30]])
    network = nn.Module()
    network.weight = nn.Parameter(values)
    (actual,), _ = stored_tensors(network)
    assert (actual.float8_zero_count, actual.float8_overflow_count) == (2, 2)
    assert actual.float8_zero_count == int(((values.to(torch.float8_e4m3fn).float() == 0) & (values != 0)).sum())
