"""Gradients of tensors at hand: what is refused, and that nothing stays."""

import pytest
import torch

from hookscope.errors import UsageError
from hookscope.hooks.tensor_gradients import tensor_gradients


def test_a_tensor_that_requires_no_gradient_is_refused() -> None:
    with pytest.raises(UsageError, match="'x' requires no gradient"), tensor_gradients({"x": torch.ones(2)}):
        pass


def test_an_edit_of_an_unknown_tensor_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(UsageError, match="The edit 'y' names no tensor"), tensor_gradients({"x": x}, {"y": abs}):
        pass


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
def test_hooks_are_removed_after_an_exception(error: BaseException) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def run() -> None:
        with tensor_gradients({"x": x, "y": y}, {"y": lambda gradient: gradient * 2}):
            raise error

    with pytest.raises(type(error)):
        run()
    y.sum().backward()
    assert x.grad.tolist() == [2, 2]
    assert not x._backward_hooks


def test_a_tensor_with_two_names_is_recorded_after_its_edit_under_both() -> None:
    x = torch.ones(2, requires_grad=True)
    with tensor_gradients({"x": x, "same": x}, {"same": lambda gradient: gradient * 2}) as gradients:
        x.sum().backward()
    assert [(name, gradient.tolist()) for name, gradient in gradients.arrived] == [("x", [2, 2]), ("same", [2, 2])]


def test_a_gradient_that_comes_in_several_parts_arrives_once_as_their_sum() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    with tensor_gradients({"y": y}) as gradients:
        (y * 2 + y * 3 + y).sum().backward()
    assert [(name, gradient.tolist()) for name, gradient in gradients.arrived] == [("y", [6, 6])]


def test_recorded_gradients_are_copies() -> None:
    x = torch.ones(2, requires_grad=True)
    with tensor_gradients({"x": x}) as gradients:
        (x * 2).sum().backward()
        (x * 2).sum().backward()  # adds to x.grad in place
    assert [gradient.tolist() for _, gradient in gradients.arrived] == [[2, 2], [2, 2]]
    assert gradients["x"].tolist() == [2, 2]
    with pytest.raises(KeyError):
        gradients["y"]
