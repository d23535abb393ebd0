"""The textbook demonstrations of PyTorch hooks, with every number known, through the public Python API.

Cases are named as in the collection they come from: A are tensors without a module, B small networks computed by hand.
"""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.hooks.forward_hooks import ModuleCall
from hookscope.hooks.tensor_gradients import TensorGradients
from tests.networks import TwoLayers


def scalar(value: float) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def arrived(gradients: TensorGradients) -> list[tuple[str, Any]]:
    return [(name, gradient.tolist()) for name, gradient in gradients.arrived]


def test_a1_the_gradient_of_an_intermediate_tensor_is_seen_before_that_of_the_leaf() -> None:
    a = torch.ones(5, requires_grad=True)
    b = 2 * a
    c = b.mean()
    with hookscope.tensor_gradients({"a": a, "b": b}) as gradients:
        c.backward()
    assert [name for name, _ in gradients.arrived] == ["b", "a"]
    assert torch.equal(gradients["b"], torch.full((5,), 0.2))
    assert torch.equal(gradients["a"], torch.full((5,), 0.4))
    assert torch.equal(a.grad, torch.full((5,), 0.4))


def rebind(gradient: Tensor) -> None:
    """Double the name only, which changes nothing."""
    gradient = gradient * 2


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (None, {"x": 4, "y": 4, "w": 5, "z": 4, "o": 1}),
        (rebind, {"x": 4, "y": 4, "w": 5, "z": 4, "o": 1}),
        (lambda gradient: 2 * gradient, {"x": 8, "y": 8, "w": 5, "z": 8, "o": 1}),
    ],
)
def test_a2_a_hook_that_doubles_a_gradient_doubles_those_before_it(edit: Any, expected: dict[str, float]) -> None:
    x, y, w = scalar(2.0), scalar(3.0), scalar(4.0)
    z = x + y
    o = w * z
    tensors = {"x": x, "y": y, "w": w, "z": z, "o": o}
    with hookscope.tensor_gradients(tensors, edits={"z": edit} if edit else {}) as gradients:
        o.backward()
    assert {name: gradients[name].item() for name in tensors} == expected
    assert [parameter.grad.item() for parameter in (x, y, w) if parameter.grad is not None] == [
        expected[name] for name in "xyw"
    ]


@pytest.mark.parametrize(("edits", "expected"), [({}, [13, 7, 1]), ({"c": lambda g: g + 2}, [39, 21, 3])])
def test_a3_a_hook_that_adds_to_the_gradient_of_a_product(edits: Any, expected: list[float]) -> None:
    a, b = scalar(7.0), scalar(13.0)
    c = a * b
    with hookscope.tensor_gradients({"a": a, "b": b, "c": c}, edits=edits) as gradients:
        c.backward()
    assert [gradients[name].item() for name in "abc"] == expected


@pytest.mark.parametrize("removed", ["never", "before", "after"])
def test_a4_edits_come_before_the_recording_and_can_be_removed(removed: str) -> None:
    a, b, d = scalar(2.0), scalar(3.0), scalar(4.0)
    c = a * b
    e = c * d
    first: list[float] = []

    def plus_two(gradient: Tensor) -> Tensor:
        first.append(gradient.item())
        return gradient + 2

    tensors = {"a": a, "b": b, "c": c, "d": d, "e": e}
    edits = {"c": plus_two, "d": lambda g: g + 100, "e": lambda g: g * 2}
    with hookscope.tensor_gradients(tensors, edits) as gradients:
        if removed == "before":
            gradients.edits["c"].remove()
        e.backward()
        if removed == "after":
            gradients.edits["c"].remove()
    assert gradients.arrived[0][0] == "e"
    seen = dict(arrived(gradients))
    assert (seen["e"], seen["d"]) == (2, 112)
    if removed == "before":
        assert first == []
        assert (seen["c"], seen["a"], seen["b"]) == (8, 24, 16)
    else:
        assert first == [8]
        assert (seen["c"], seen["a"], seen["b"]) == (10, 30, 20)
    assert a.grad.item() == seen["a"]
    assert not any(tensor._backward_hooks for tensor in tensors.values())


def test_b1_inputs_and_outputs_of_two_layers() -> None:
    def observe(call: ModuleCall, _slot: str, output: Tensor) -> tuple[list[float], list[float]]:
        ((_, inputs),) = call.inputs
        return inputs.flatten().tolist(), output.flatten().tolist()

    model = TwoLayers()
    with hookscope.capture(model, dict(model.named_children()), observe) as captured:
        model(torch.ones(1, 3, requires_grad=True))
    assert {seen.layer: seen.value for seen in captured.observations} == {
        "fc1": ([1, 1, 1], [7, -13, 27, -29]),
        "relu1": ([7, -13, 27, -29], [7, 0, 27, 0]),
        "fc2": ([7, 0, 27, 0], [89]),
    }


def test_b4_output_and_input_shape_of_one_layer() -> None:
    parts = {"conv": nn.Conv2d(3, 8, 2), "relu": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(4), "flatten": nn.Flatten()}
    model = nn.Sequential(OrderedDict(parts, fc=nn.Linear(128, 1)))

    def shapes(call: ModuleCall, _slot: str, output: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(call.inputs[0][1].shape), tuple(output.shape)

    with hookscope.capture(model, hookscope.select_layers(model, ["pool"]), shapes) as captured:
        model(torch.ones(1, 3, 10, 10))
    (seen,) = captured.observations
    assert seen.layer == "pool"
    assert seen.value == ((1, 8, 9, 9), (1, 8, 4, 4))
