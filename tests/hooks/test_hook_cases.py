"""The textbook demonstrations of PyTorch hooks, with every number known, through the public Python API.

Cases are named as in the collection they come from: A are tensors without a module, B small networks computed by hand,
C real ones.
"""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import hookscope
from hookscope.hooks.forward_hooks import ModuleCall
from hookscope.hooks.tensor_gradients import TensorGradients
from tests.inspections import inspect, inspect_gradients
from tests.networks import TwoLayers, Written


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


def test_b1_gradients_of_outputs_and_inputs_of_two_layers() -> None:
    def flat(*seen: Any) -> list[float]:
        return seen[-1].flatten().tolist()

    model, x = TwoLayers(), torch.ones(1, 3, requires_grad=True)
    layers = dict(model.named_children())
    with hookscope.capture(model, layers, flat, gradients=flat, with_inputs=True) as captured:
        model(x).backward()
    seen = {(site.layer, site.role): site.value for site in captured.gradients}
    assert seen == {
        ("fc1", "output"): [1, 0, 3, 0],
        ("fc1", "input"): [22, 26, 30],
        ("relu1", "output"): [1, 2, 3, 4],
        ("relu1", "input"): [1, 0, 3, 0],
        ("fc2", "output"): [1],
        ("fc2", "input"): [1, 2, 3, 4],
    }
    in_order = sorted(captured.gradients, key=lambda site: -1 if site.arrival is None else site.arrival)
    assert [f"{site.layer} {site.role}" for site in in_order] == [
        "fc2 output",
        "fc2 input",
        "relu1 output",
        "relu1 input",
        "fc1 output",
        "fc1 input",
    ]


def test_b1_statistics_of_two_layers() -> None:
    inspection = inspect(TwoLayers(), torch.ones(1, 3))
    fc1, relu1, fc2 = (row.activation for row in inspection.rows)
    assert [row.layer for row in inspection.rows] == ["fc1", "relu1", "fc2"]
    # 7 - 13 + 27 - 29 = -8; squares 49 + 169 + 729 + 841 = 1788; deviations from -2: 9, -11, 29, -27.
    assert (fc1.mean, fc1.min, fc1.max, fc1.mean_abs) == (-2, -29, 27, 19)
    assert fc1.l2 == pytest.approx(1788**0.5, rel=1e-6)
    assert fc1.std == pytest.approx(((81 + 121 + 841 + 729) / 4) ** 0.5, rel=1e-6)
    assert fc1.zero_fraction == 0
    assert (relu1.mean, relu1.zero_fraction) == (8.5, 0.5)
    assert (relu1.channel_count, relu1.dead_channel_count) == (4, 2)
    assert (fc2.mean, fc2.std, fc2.min, fc2.max) == (89, 0, 89, 89)


def test_b2_editing_the_gradients_of_a_layer_and_of_parameters() -> None:
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 10, 2, stride=2), "relu": nn.ReLU(), "fc1": nn.Linear(160, 5)}
    model, x = Written(lambda net, x: net.fc1(net.relu(net.conv(x)).flatten(1)), **parts), torch.randn(1, 3, 8, 8)
    plain, clamped, zeroed = (
        hookscope.grads(model, x, loss="sum", edit=edit, save_tensors=True).tensors
        for edit in ((), "relu:grad:clamp(min=0)", "fc*bias:grad:zero")
    )
    for layer in ("relu", "conv"):
        assert plain[f"{layer} grad_output"].min() < 0
        assert torch.equal(clamped[f"{layer} grad_output"], plain[f"{layer} grad_output"].clamp(min=0))
    assert torch.equal(clamped["fc1 grad_output"], plain["fc1 grad_output"])
    assert (plain["fc1.bias grad"].tolist(), zeroed["fc1.bias grad"].tolist()) == ([1] * 5, [0] * 5)
    assert all(torch.equal(zeroed[label], plain[label]) for label in plain if label != "fc1.bias grad")
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_b3_leaves_are_seen_in_execution_order_without_their_container() -> None:
    # Declared in another order than they run in.
    parts = {"seq": nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), "fc1": nn.Linear(160, 5), "relu": nn.ReLU()}
    parts["conv"] = nn.Conv2d(3, 10, 2, stride=2)
    model = Written(lambda net, x: net.seq(net.fc1(net.relu(net.conv(x)).flatten(1))), **parts)
    rows = inspect(model, torch.ones(1, 3, 8, 8)).rows
    assert [(row.layer, row.kind) for row in rows] == [
        ("conv", "Conv2d"),
        ("relu", "ReLU"),
        ("fc1", "Linear"),
        ("seq.0", "Linear"),
        ("seq.1", "Linear"),
    ]
    linear: list[Any] = [model.get_submodule(row.layer) for row in rows[2:]]
    assert [(module.in_features, module.out_features) for module in linear] == [(160, 5), (5, 3), (3, 2)]
    assert [row.activation.shape for row in rows] == [(1, 10, 4, 4), (1, 10, 4, 4), (1, 5), (1, 3), (1, 2)]


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


@pytest.fixture(scope="module")
def resnet34() -> nn.Module:
    return torchvision.models.resnet34()


C1_SHAPES = {0: (1, 64, 112, 112), 15: (1, 128, 28, 28), 30: (1, 512, 7, 7)}


def test_c1_the_36_convolutions_of_resnet34(resnet34: nn.Module) -> None:
    inspection = inspect(resnet34, torch.rand(1, 3, 224, 224), ["conv"], grids_for=1, max_channels=64)
    assert len(inspection.rows) == 36
    assert {row.kind for row in inspection.rows} == {"Conv2d"}
    assert not inspection.uncalled
    for position, shape in C1_SHAPES.items():
        assert inspection.rows[position].activation.shape == shape
    assert [maps.row for maps in inspection.feature_maps] == list(range(36))
    for position, shape in C1_SHAPES.items():
        maps = inspection.feature_maps[position]
        assert (maps.arrangement, maps.values.shape) == ("maps", (64, *shape[2:]))
        assert maps.channel_count == shape[1]


def test_c1_convolutions_of_resnet34_by_their_positions(resnet34: nn.Module) -> None:
    rows = inspect(resnet34, torch.rand(1, 3, 224, 224), [f"conv@{position}" for position in C1_SHAPES]).rows
    assert [row.activation.shape for row in rows] == [*C1_SHAPES.values()]


@pytest.mark.exhaustive
def test_c2_the_output_of_a_stage_of_resnet50_and_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    image, target = torch.rand(1, 3, 224, 224, generator=generator), torch.rand(1, 1000, generator=generator)
    model = torchvision.models.resnet50()
    inspection = inspect_gradients(model, image, "mse", ["/^layer3$/"], target=target, include_inputs=True)
    (row,) = inspection.rows
    assert (row.layer, row.kind) == ("layer3", "Sequential")
    assert row.activation.shape == (1, 1024, 14, 14)
    assert {gradient.role: (gradient.status, gradient.gradient.shape) for gradient in inspection.gradients} == {
        "output": ("gradient", (1, 1024, 14, 14)),
        "input": ("gradient", (1, 512, 28, 28)),
    }
    with torch.no_grad():
        expected = (model.eval()(image) - target).square().mean().item()
    assert inspection.loss.value == pytest.approx(expected, rel=1e-5)
