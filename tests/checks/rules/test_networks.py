"""The rules over whole networks, through the engine: silent on sound ones, right on broken ones."""

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope.checks.judging import judge_gradients
from hookscope.inspection.backward import inspect_gradients


def judged(network: nn.Module, inputs: Tensor, **options: object) -> list[tuple[str, str, str]]:
    """Return the verdicts as (level, rule, where)."""
    inspection = inspect_gradients(network, inputs, distributions=True, **options)  # type: ignore[arg-type]
    return [(verdict.level, verdict.rule, verdict.where) for verdict in judge_gradients(inspection)]


def layers(depth: int, activation: Callable[[], nn.Module], width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), activation())))


class Root(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.sqrt()


class Probabilities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.body(values).relu()).softmax(-1)


def small_transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 12, 3, 48, 96, num_classes=10)


SOUND: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=10),
    "resnet34": lambda: torchvision.models.resnet34(num_classes=10),
    "vgg16_bn": lambda: torchvision.models.vgg16_bn(num_classes=10),
    "mobilenet_v2": lambda: torchvision.models.mobilenet_v2(num_classes=10),
    "mobilenet_v3_small": lambda: torchvision.models.mobilenet_v3_small(num_classes=10),
    "efficientnet_b0": lambda: torchvision.models.efficientnet_b0(num_classes=10),
    "shufflenet_v2_x0_5": lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=10),
    "densenet121": lambda: torchvision.models.densenet121(num_classes=10),
}


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", SOUND)
def test_sound_networks_get_no_verdict(name: str, mode: str) -> None:
    torch.manual_seed(0)
    network = SOUND[name]()
    assert judged(network, torch.randn(4, 3, 64, 64), mode=mode) == []


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_transformer_whose_head_starts_at_zero_is_told_so_and_sound_without_it(mode: str) -> None:
    torch.manual_seed(0)
    network, inputs = small_transformer(), torch.randn(4, 3, 32, 32)
    assert judged(network, inputs, mode=mode) == [("warn", "dead-gradient", "heads.head.weight")]
    nn.init.normal_(network.heads.head.weight, std=0.02)  # type: ignore[union-attr,arg-type]
    assert judged(network, inputs, mode=mode) == []


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_thirty_sigmoid_layers_vanish_whatever_the_loss_is_scaled_by(scale: float) -> None:
    def loss(output: Tensor, _batch: object) -> Tensor:
        return output.square().mean() * scale

    assert judged(layers(30, nn.Sigmoid), torch.randn(8, 32), loss=loss) == [("fail", "vanishing-gradient", "0.weight")]


def test_thirty_orthogonal_layers_are_sound() -> None:
    network = layers(30, nn.Identity)
    for each in network.modules():
        if isinstance(each, nn.Linear):
            nn.init.orthogonal_(each.weight)
    assert judged(network, torch.randn(8, 32)) == []


@pytest.mark.parametrize("include_inputs", [False, True])
def test_a_root_of_zero_is_named_and_what_passes_its_gradient_on_is_not(include_inputs: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), Root(), nn.Linear(8, 4))
    verdicts = judged(network, torch.randn(4, 8), include_inputs=include_inputs)
    assert verdicts == [("fail", "non-finite-gradient", "4")]


def test_a_logarithm_of_zero_is_named_forward() -> None:
    class Logarithm(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values.log()

    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Logarithm(), nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        network[0].bias.fill_(-10.0)  # type: ignore[union-attr]
    assert ("fail", "non-finite-activation", "2") in judged(network, torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("network", "where"),
    [
        (Probabilities, ""),
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 32), nn.LayerNorm(32)), "3"),
    ],
    ids=["softmax", "layer norm"],
)
def test_a_sum_that_cannot_change_is_told_from_a_loss_that_can(network: Callable[[], nn.Module], where: str) -> None:
    torch.manual_seed(0)
    model, inputs = network(), torch.randn(4, 8)
    ((_, rule, place),) = judged(model, inputs, loss="sum")  # a failure if rounding happens to cancel
    assert (rule, place) == ("zero-gradient", where)
    assert judged(model, inputs) == []


def test_an_unrolled_cell_vanishes_over_time() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.RNNCell(4, 16), nn.Linear(16, 2)

        def forward(self, values: Tensor) -> Tensor:
            state = values.new_zeros(values.shape[0], 16)
            for step in range(values.shape[1]):
                state = self.cell(values[:, step], state)
            return self.out(state)

    torch.manual_seed(0)
    assert judged(Recurrent(), torch.randn(2, 60, 4)) == [("fail", "vanishing-gradient", "cell")]
    assert judged(Recurrent(), torch.randn(2, 8, 4)) == []
