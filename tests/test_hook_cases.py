"""The textbook demonstrations of PyTorch hooks, with every number known, through the public Python API.

Cases are named as in the collection they come from: B are small networks computed by hand, C are real ones.
"""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import hookscope
from hookscope import ModuleCall


class TwoLayers(nn.Module):
    """Case B1: fc1 = Linear(3, 4), relu1, fc2 = Linear(4, 1), with given weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(4, 1)
        rows = [[1.0, 2, 3], [-4, -5, -6], [7, 8, 9], [-10, -11, -12]]
        self.fc1.weight = nn.Parameter(torch.tensor(rows))
        self.fc1.bias = nn.Parameter(torch.tensor([1.0, 2, 3, 4]))
        self.fc2.weight = nn.Parameter(torch.tensor([[1.0, 2, 3, 4]]))
        self.fc2.bias = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.relu1(self.fc1(x)))
        return out


def test_b1_inputs_and_outputs_of_two_layers() -> None:
    def observe(call: ModuleCall, _slot: str, output: Tensor) -> tuple[list[float], list[float]]:
        ((_, given),) = call.inputs
        return given.flatten().tolist(), output.flatten().tolist()

    model = TwoLayers()
    with hookscope.capture(model, dict(model.named_children()), observe) as captured:
        model(torch.ones(1, 3, requires_grad=True))
    assert {seen.layer: seen.value for seen in captured.observations} == {
        "fc1": ([1, 1, 1], [7, -13, 27, -29]),
        "relu1": ([7, -13, 27, -29], [7, 0, 27, 0]),
        "fc2": ([7, 0, 27, 0], [89]),
    }


def test_b1_statistics_of_two_layers() -> None:
    inspection = hookscope.inspect(TwoLayers(), torch.ones(1, 3))
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


class ConvNetwork(nn.Module):
    """Case B3: a convolution, ReLU, a flattening that is no module, a linear layer, and a container of two."""

    def __init__(self) -> None:
        super().__init__()
        # Declared in another order than they run in.
        self.seq = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
        self.fc1 = nn.Linear(160, 5)
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(3, 10, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.conv(x)).flatten(1)
        out: Tensor = self.seq(self.fc1(hidden))
        return out


def test_b3_leaves_are_seen_in_execution_order_without_their_container() -> None:
    model = ConvNetwork()
    rows = hookscope.inspect(model, torch.ones(1, 3, 8, 8)).rows
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
    model = nn.Sequential(
        OrderedDict(
            [
                ("conv", nn.Conv2d(3, 8, 2)),
                ("relu", nn.ReLU()),
                ("pool", nn.AdaptiveAvgPool2d(4)),
                ("flatten", nn.Flatten()),
                ("fc", nn.Linear(128, 1)),
            ]
        )
    )

    def shapes(call: ModuleCall, _slot: str, output: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(call.inputs[0][1].shape), tuple(output.shape)

    with hookscope.capture(model, hookscope.select_layers(model, ["pool"]), shapes) as captured:
        model(torch.ones(1, 3, 10, 10))
    (seen,) = captured.observations
    assert seen.layer == "pool"
    assert seen.value == ((1, 8, 9, 9), (1, 8, 4, 4))


@pytest.fixture(scope="module")
def resnet34() -> nn.Module:
    model: nn.Module = torchvision.models.resnet34()
    return model


C1_SHAPES = {0: (1, 64, 112, 112), 15: (1, 128, 28, 28), 30: (1, 512, 7, 7)}


def test_c1_the_36_convolutions_of_resnet34(resnet34: nn.Module) -> None:
    inspection = hookscope.inspect(resnet34, torch.rand(1, 3, 224, 224), ["conv"], grids_for=1, max_channels=64)
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


@pytest.mark.parametrize("position", C1_SHAPES)
def test_c1_a_convolution_of_resnet34_by_its_position(resnet34: nn.Module, position: int) -> None:
    (row,) = hookscope.inspect(resnet34, torch.rand(1, 3, 224, 224), [f"conv@{position}"]).rows
    assert row.activation.shape == C1_SHAPES[position]


def test_c2_the_output_of_a_stage_of_resnet50() -> None:
    (row,) = hookscope.inspect(torchvision.models.resnet50(), torch.rand(1, 3, 224, 224), ["/^layer3$/"]).rows
    assert (row.layer, row.kind) == ("layer3", "Sequential")
    assert row.activation.shape == (1, 1024, 14, 14)
