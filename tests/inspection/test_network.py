"""Digests of networks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hookscope.inspection.network import model_digest


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "hold",
    [
        lambda values: values.to_sparse(),
        lambda values: values.reshape(10, -1).to_sparse_csr(),
        lambda values: torch.quantize_per_tensor(values, 1.0, 0, torch.qint32),
        lambda values: torch.nested.nested_tensor([values, values[:3]]),
        lambda values: values,
    ],
    ids=["sparse", "csr", "quantised", "nested", "dense"],
)
def test_networks_that_differ_in_one_value_of_thousands_have_other_digests(hold: Callable[[Tensor], Tensor]) -> None:
    def digest(place: int) -> str:
        module, values = nn.Identity(), torch.ones(5000)
        values[place] = 2
        module.register_buffer("held", hold(values))
        return model_digest(module)

    assert digest(2500) == digest(2500) != digest(2501)  # a printed tensor shows neither
