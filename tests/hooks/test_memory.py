"""A tensor lacks memory where its storage is smaller than its shape, strides and offset say, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hookscope.hooks.memory import missing_memory


def quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 0, torch.qint8)


STRIDED: dict[str, Callable[[], Tensor]] = {
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a view behind an offset": lambda: torch.randn(40)[8:24].view(4, 4),
    "gaps": lambda: torch.randn(6, 8)[:, ::3],
    "expanded": lambda: torch.randn(4, 1).expand(4, 9),
    "a number": lambda: torch.tensor(3.0),
    "complex": lambda: torch.randn(5, 3, dtype=torch.complex64),
    "a subclass": lambda: torch.randn(4, 4).as_subclass(type("Other", (Tensor,), {})),
    "quantised": quantised,
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0, 5),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "without memory": lambda: torch._efficientzerotensor((3, 4)),
    "mkldnn": lambda: torch.randn(3, 4).to_mkldnn(),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "CSR": lambda: torch.eye(4).to_sparse_csr(),
    "CSC": lambda: torch.eye(4).to_sparse_csc(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:Sparse", "ignore:torch.quantize_per"
)


@pytest.mark.parametrize("make", [*STRIDED.values(), *OTHERS.values()], ids=[*STRIDED, *OTHERS])
def test_a_tensor_of_any_kind_has_its_memory(make: Callable[[], Tensor]) -> None:
    assert missing_memory(make()) == ""


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_the_last_byte_that_a_tensor_needs_is_missed(make: Callable[[], Tensor]) -> None:
    tensor = make()
    plain = tensor.detach().as_subclass(Tensor)
    last = plain.storage_offset() + sum(
        (size - 1) * step for size, step in zip(plain.shape, plain.stride(), strict=True)
    )
    needed = (last + 1) * plain.itemsize
    plain.untyped_storage().resize_(needed)
    assert missing_memory(tensor) == ""
    plain.untyped_storage().resize_(needed - 1)
    assert missing_memory(tensor) == f"its memory was freed or shrunk: {needed - 1} bytes are left of {needed}"
    plain.untyped_storage().resize_(0)
    assert missing_memory(tensor) == f"its memory was freed or shrunk: 0 bytes are left of {needed}"


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (OTHERS["sparse"], lambda tensor: tensor._values()),
        (OTHERS["sparse"], lambda tensor: tensor._indices()),
        (OTHERS["CSR"], lambda tensor: tensor.values()),
        (OTHERS["CSR"], lambda tensor: tensor.crow_indices()),
        (OTHERS["CSC"], lambda tensor: tensor.row_indices()),
        (OTHERS["nested"], lambda tensor: tensor.values()),
        (OTHERS["jagged"], lambda tensor: tensor.values()),
        (OTHERS["jagged"], lambda tensor: tensor.offsets()),
    ],
)
def test_what_a_tensor_is_made_of_is_looked_at(make: Callable[[], Tensor], part: Callable[[Tensor], Tensor]) -> None:
    tensor = make()
    part(tensor).untyped_storage().resize_(0)
    assert "0 bytes are left" in missing_memory(tensor)


def test_values_inside_a_transform_have_no_storage_that_could_lack() -> None:
    actual: list[str] = []

    def function(values: Tensor) -> Any:
        actual.append(missing_memory(values))
        return values.sum()

    torch.vmap(function)(torch.randn(3, 4))
    torch.func.grad(function)(torch.randn(4))
    assert actual == ["", ""]
