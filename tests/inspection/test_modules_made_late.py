"""Modules that a network makes while it runs have no rows; a note names them."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hookscope
from tests.networks import Written

X = torch.linspace(-1, 1, 8).view(2, 4)


class Late(nn.Module):
    def __init__(self, copied: Callable[[nn.Module], nn.Module] = copy.deepcopy) -> None:
        super().__init__()
        self.first, self.block, self.copied = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), copied

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        return self.copied(self.block)(self.late(self.first(x)))


LATE = "No rows for modules that are made in the forward pass: late (Sequential), late.0 (Linear), late.1 (Tanh)."
COPIES = "No rows for copies of modules that the network makes in its forward pass: block.0, block.1."


@pytest.mark.parametrize(
    ("copied", "ops"), [(copy.deepcopy, True), (lambda module: pickle.loads(pickle.dumps(module)), False)]
)
def test_modules_made_during_the_pass_are_named(copied: Callable[[nn.Module], nn.Module], ops: bool) -> None:
    runs = [
        hookscope.activations(Late(copied), X.clone(), ops=ops),
        hookscope.grads(Late(copied), X.clone(), loss="sum", ops=ops),
        hookscope.grads(Late(copied), X.clone(), loss="sum", ops=ops, inputs=True),
    ]
    for run in runs:
        assert run.notes[:2] == (LATE, COPIES)
        assert "late" not in {row.layer for row in run.rows}


def test_a_module_that_is_there_before_has_rows_and_no_note() -> None:
    network = Late(lambda module: module)
    network(X)
    run = hookscope.activations(network, X.clone(), layer="*")
    assert {"late", "late.0", "late.1", "block.0"} <= {row.layer for row in run.rows}
    assert run.notes == ()


def test_a_copy_that_does_not_run_is_no_news() -> None:
    quiet = Written(lambda net, x: (copy.deepcopy(net.first), net.first(x))[1], first=nn.Linear(4, 4))
    assert hookscope.activations(quiet, X.clone()).notes == ()
