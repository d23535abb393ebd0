"""Sums of squares of many tensors, held against float64 sums of torch."""

import math

import pytest
import torch
from torch import Tensor

from hookscope.statistics import native
from hookscope.statistics.library import kernel_of
from hookscope.statistics.native import load_kernel, square_sums
from tests.statistics.test_native import on_threads, variants

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="installed without the compiled library")

TENSORS = {
    "many sizes": lambda: [torch.randn(size) for size in (1, 7, 15, 16, 17, 31, 32, 33, 1000, 100_003)],
    "scalar and empty": lambda: [torch.tensor(-3.0), torch.empty(0), torch.empty(0, 4)],
    "channels last": lambda: [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 4).T],
    "tiny and huge": lambda: [torch.full((40,), 1e-30), torch.full((40,), 3e38), torch.full((3,), 1e-44)],
    "not finite": lambda: [torch.tensor([1.0, math.inf]), torch.tensor([math.nan, 1.0])],
    "none": list,
}


def expected(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
def test_sums_are_those_of_float64(tensors: object, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load_kernel", lambda: kernel_of(variant))
    inputs = tensors()
    sums = square_sums(inputs)
    reference = [own if total is None else total for own, total in zip(map(expected, inputs), sums, strict=True)]
    assert reference == pytest.approx([*map(expected, inputs)], rel=1e-12, nan_ok=True)
    assert [total is None for total in sums] == [not tensor.numel() for tensor in inputs]


@pytest.mark.parametrize("threads", [1, 2])
def test_every_tensor_is_summed_once(threads: int) -> None:
    inputs = [torch.full((1 + at % 50,), float(at)) for at in range(500)]
    with on_threads(threads):
        assert square_sums(inputs) == [float(at**2 * (1 + at % 50)) for at in range(500)]


def test_other_tensors_are_left_out() -> None:
    others = [torch.ones(4, dtype=torch.float64), torch.ones(4, 4)[:, :2], torch.ones(3, device="meta")]
    others.append(torch.ones(2, 2).to_sparse())
    assert square_sums([*others, torch.ones(2)]) == [None] * len(others) + [2.0]
