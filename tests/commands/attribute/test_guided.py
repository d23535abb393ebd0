"""Guided backpropagation against arithmetic, a rule written by hand, and other libraries."""

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchlens.attribution
import torchvision
from captum.attr import GuidedBackprop
from torch import Tensor, nn

from hookscope.commands.attribute.pixels import PIXEL_METHODS, Pixels, ScoredBatch, guided_backprop
from hookscope.errors import ModelError, UsageError
from hookscope.models.spec import load_model
from tests.networks import batch_of


def of_class(index: int) -> Callable[[Any], Tensor]:
    return lambda output: output[:, index]


def explained(network: nn.Module, pictures: Tensor, target: int = 0) -> Pixels:
    return guided_backprop(ScoredBatch(network.eval(), batch_of(pictures, count=len(pictures)), of_class(target)))


class Written(nn.Module):
    """A network whose forward is written in a test: two convolutions and a function of them."""

    def __init__(self, body: Callable[["Written", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(6, 4)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(self, x).mean((2, 3)))
        return output


class RuleByHand(torch.autograd.Function):
    """ReLU, or ReLU6, whose backward is guided: the oracle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, top: float) -> Tensor:
        ctx.passed = (x > 0) & (x < top)
        return x.clamp(0, top)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (gradient > 0) * ctx.passed, None


def ways() -> dict[str, tuple[Callable[[Tensor], Tensor], float]]:
    """Every way to call an exact ReLU, with its upper limit."""
    return {
        "torch.relu": (torch.relu, torch.inf),
        "F.relu": (F.relu, torch.inf),
        "F.relu in place": (lambda x: F.relu(x, inplace=True), torch.inf),
        "F.relu in place by position": (lambda x: F.relu(x, True), torch.inf),
        "Tensor.relu": (lambda x: x.relu(), torch.inf),
        "Tensor.relu_": (lambda x: x.relu_(), torch.inf),
        "nn.ReLU": (nn.ReLU(), torch.inf),
        "nn.ReLU in place": (nn.ReLU(inplace=True), torch.inf),
        "clamp(min=0)": (lambda x: x.clamp(min=0), torch.inf),
        "clamp_min_": (lambda x: x.clamp_min_(0.0), torch.inf),
        "clip(0)": (lambda x: x.clip(0), torch.inf),
        "aten.relu": (torch.ops.aten.relu.default, torch.inf),
        "F.relu6": (F.relu6, 6),
        "nn.ReLU6": (nn.ReLU6(), 6),
        "nn.ReLU6 in place": (nn.ReLU6(inplace=True), 6),
        "hardtanh(0, 6)": (lambda x: F.hardtanh(x, 0, 6), 6),
        "hardtanh_(0, 6)": (lambda x: F.hardtanh_(x, 0.0, 6.0), 6),
        "clamp(0, 6)": (lambda x: x.clamp(0, 6), 6),
        "nn.Hardtanh(0, 6) in place": (nn.Hardtanh(0, 6, inplace=True), 6),
    }


def bodies() -> dict[str, Callable[[Callable[[Tensor], Tensor], Written, Tensor], Tensor]]:
    """Where an activation can stand, each as a function of the activation."""

    def second_consumer(act: Callable[[Tensor], Tensor], net: Written, x: Tensor) -> Tensor:
        x = net.first(x)
        beside = 0.7 * x
        return net.second(act(x) - beside)

    def part_of_a_tensor(act: Callable[[Tensor], Tensor], net: Written, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.second(torch.cat([act(x[:, :3]), x[:, 3:]], 1))

    def several_times(act: Callable[[Tensor], Tensor], net: Written, x: Tensor) -> Tensor:
        return act(net.second(act(net.first(x))))

    return {case.__name__: case for case in (second_consumer, part_of_a_tensor, several_times)}


@pytest.mark.parametrize(
    ("way", "body"),
    [
        *((way, "second_consumer") for way in ways()),
        ("F.relu in place", "part_of_a_tensor"),
        ("nn.ReLU6", "several_times"),
    ],
)
def test_every_exact_relu_is_ruled_as_by_hand(way: str, body: str) -> None:
    act, top = ways()[way]
    forward = bodies()[body]
    pictures = 4 * torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(1))
    actual = explained(Written(partial(forward, act)), pictures)
    oracle = Written(partial(forward, lambda x: RuleByHand.apply(x, top)))
    pixels = pictures.clone().requires_grad_()
    expected = torch.autograd.grad(oracle(pixels)[:, 0].sum(), pixels)[0]
    torch.testing.assert_close(actual.values, expected)
    assert expected.abs().min() < expected.abs().max()
    assert actual.unchanged == {}


def overwriting(act: Callable[[Tensor], Tensor]) -> Callable[[Written, Tensor], Tensor]:
    """Return a forward that overwrites part of a tensor and goes on with the whole, without what the call returned."""

    def body(net: Written, x: Tensor) -> Tensor:
        x = net.first(x)
        act(x[:, :4])
        return net.second(x)

    return body


@pytest.mark.parametrize("way", [way for way in ways() if "in place" in way or way.endswith("_")])
def test_a_relu_that_overwrites_part_of_a_tensor_is_ruled_and_overwrites_it(way: str) -> None:
    act, top = ways()[way]
    pictures = 4 * torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    actual = explained(Written(overwriting(act)), pictures)

    def beside(net: Written, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.second(torch.cat([RuleByHand.apply(x[:, :4], top), x[:, 4:]], 1))

    pixels = pictures.clone().requires_grad_()
    expected = torch.autograd.grad(Written(beside)(pixels)[:, 0].sum(), pixels)[0]
    torch.testing.assert_close(actual.values, expected)


def test_b1_guided_backpropagation_of_the_textbook_network() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    first, last = network[0], network[2]
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 2, 3], [-4, -5, -6], [7, 8, 9], [-10, -11, -12]]))
        first.bias.copy_(torch.tensor([1.0, 2, 3, 4]))
        last.weight.copy_(torch.tensor([[1.0, 2, 3, 4]]))
        last.bias.fill_(1)
    on_pictures = nn.Sequential(nn.Flatten(), network)
    ones = torch.ones(1, 3, 1, 1)
    # fc2's row 1 2 3 4 is positive; the ReLU was open at 7 and 27: 1·(1, 2, 3) + 3·(7, 8, 9).
    assert explained(on_pictures, ones).values.flatten().tolist() == [22, 26, 30]
    with torch.no_grad():
        last.weight.copy_(torch.tensor([[1.0, 2, -3, 4]]))
    # Now what arrives at the third is negative: 1·(1, 2, 3) alone.
    assert explained(on_pictures, ones).values.flatten().tolist() == [1, 2, 3]
    assert PIXEL_METHODS["gradient"](
        ScoredBatch(on_pictures, batch_of(ones), of_class(0))
    ).values.flatten().tolist() == [
        -20,
        -22,
        -24,
    ]


def test_b2_no_negative_gradient_reaches_the_convolution() -> None:
    torch.manual_seed(0)
    conv, head = nn.Conv2d(3, 10, 2, stride=2), nn.Linear(160, 5)
    network = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), head)
    picture = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        arrives = head.weight[2].view(1, 10, 4, 4).clamp(min=0) * (conv(picture) > 0)
        expected = F.conv_transpose2d(arrives, conv.weight, stride=2)
    torch.testing.assert_close(explained(network, picture, target=2).values, expected)


class Functional(nn.Module):
    """A residual network that calls functions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        x = torch.relu(x + self.b(x).relu_())
        output: Tensor = self.c(x.mean((2, 3)))
        return output


def of_modules() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "of functions": Functional,
    "resnet18": lambda: torchvision.models.resnet18(num_classes=5),
    "googlenet with F.relu": lambda: torchvision.models.GoogLeNet(5, aux_logits=False, init_weights=False),
    "shufflenet": lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=5),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_maps_equal_torchlens_on_relu_networks(name: str) -> None:
    torch.manual_seed(7)
    network, picture = NETWORKS[name]().eval(), torch.randn(1, 3, 64, 64)
    expected = torchlens.attribution.guided_backprop(network, picture, target=3).values
    expected = expected[0] if isinstance(expected, tuple) else expected
    actual = explained(network, picture, target=3).values
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert actual.abs().max() > 0


def test_maps_equal_captum_where_all_relus_are_modules() -> None:
    network, pictures = of_modules().eval(), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # captum says that it sets hooks
        expected = GuidedBackprop(network).attribute(pictures.clone().requires_grad_(), target=1).detach()
    torch.testing.assert_close(explained(network, pictures, target=1).values, expected)


def test_activations_that_are_no_relu_are_named_by_place_and_line() -> None:
    def body(net: Written, x: Tensor) -> Tensor:
        x = F.leaky_relu(net.first(x), 0.1)
        return F.hardswish(torch.relu(net.second(x))) * x.mean().sigmoid() + x.mean().clamp(-1, 1)

    network = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ELU(), Written(body))
    unchanged = explained(network, torch.randn(1, 3, 9, 9)).unchanged
    assert list(unchanged) == ["1", "2:leaky_relu", "2:hardswish", "2:sigmoid", "2:clamp"]
    assert unchanged["1"] == "ELU: no ReLU, so its gradient is kept"
    assert unchanged["2:leaky_relu"].startswith("LeakyReLU, test_guided.py:")


@pytest.mark.parametrize(
    ("gate", "name"),
    [
        (F.gelu, "GELU"),
        (F.silu, "SiLU"),
        (nn.Mish(), "Mish"),
        (lambda x: x * torch.sigmoid(x), "SiLU"),
        (lambda x: x * torch.tanh(F.softplus(x)), "Mish"),
    ],
)
def test_smooth_gates_are_refused_in_one_line(gate: Callable[[Tensor], Tensor], name: str) -> None:
    network = Written(lambda net, x: gate(net.second(F.relu(net.first(x)))))
    with pytest.raises(
        UsageError, match=f"^guided-backprop is defined for ReLU, and .* is {name} .*Use --method gradient"
    ) as e:
        explained(network, torch.randn(1, 3, 9, 9))
    assert "\n" not in str(e.value)
    assert not any(parameter.grad is not None for parameter in network.parameters())


def test_a_gate_on_another_tensor_is_no_swish() -> None:
    network = Written(lambda net, x: (y := F.relu(net.first(x))) * net.second(F.pad(y, (1, 1, 1, 1))).sigmoid())
    assert list(explained(network, torch.randn(1, 3, 9, 9)).unchanged) == ["(model):sigmoid"]


def test_a_network_without_relu_is_refused() -> None:
    with pytest.raises(UsageError, match="no ReLU or ReLU6 leads to the score"):
        explained(Written(lambda net, x: torch.tanh(net.first(x))), torch.randn(1, 3, 9, 9))


def shifted(x: Tensor) -> Tensor:
    return torch.relu(x + 1)


@pytest.mark.parametrize("is_function", [False, True])
def test_torchscript_is_refused_before_it_hides_its_relus(is_function: bool) -> None:
    picture = torch.randn(1, 3, 32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that TorchScript is old
        if is_function:
            script = torch.jit.script(shifted)
            network: nn.Module = Written(lambda net, x: F.relu(script(net.first(x))))
            network(picture)  # from the second run on, its ReLU is hidden
        else:
            network = torch.jit.trace(of_modules().eval(), picture)
    with pytest.raises(UsageError, match="inside TorchScript"):
        explained(network, picture)


def test_a_custom_autograd_function_is_named() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    network = Written(lambda net, x: Doubled.apply(F.relu(net.first(x))))
    (reason,) = explained(network, torch.randn(1, 3, 9, 9)).unchanged.values()
    assert reason.startswith("custom autograd Doubled function, whose inside is not seen")


def test_relus_in_another_thread_are_ruled() -> None:
    def body(net: Written, x: Tensor) -> Tensor:
        x, results = net.first(x), []

        def work() -> None:
            with torch.enable_grad():
                results.append(F.relu(x))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return net.second(results[0])

    pictures = torch.randn(1, 3, 9, 9)
    plain = Written(lambda net, x: net.second(F.relu(net.first(x))))
    assert torch.equal(explained(Written(body), pictures).values, explained(plain, pictures).values)


def test_relus_inside_torchs_own_transformer_layers_are_ruled() -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
    network = nn.Sequential(nn.Conv2d(3, 12, 4, 4), nn.Flatten(2), Rows(), nn.TransformerEncoder(layer, 2), Mean())
    picture = torch.randn(1, 3, 16, 16)
    actual = explained(network, picture).values
    for module in network.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation = lambda x: RuleByHand.apply(x, torch.inf)
    pixels = picture.clone().requires_grad_()
    torch.testing.assert_close(actual, torch.autograd.grad(network(pixels)[0, 0], pixels)[0])


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_an_exported_program_gives_what_its_network_gives() -> None:
    network, picture = of_modules().eval(), torch.randn(1, 3, 32, 32)
    exported = torch.export.export(network, (picture,)).module()
    batch = batch_of(picture)
    actual = guided_backprop(ScoredBatch(exported, batch, of_class(1))).values
    torch.testing.assert_close(actual, explained(network, picture, target=1).values)


def test_a_network_that_is_never_the_same_is_refused() -> None:
    calls = iter(range(9))
    network = Written(lambda net, x: F.relu(net.first(x)) + next(calls))
    with pytest.raises(ModelError, match="gives different results in two passes: the outputs differ by up to"):
        explained(network, torch.randn(1, 3, 9, 9))


def test_a_network_that_draws_random_numbers_is_not_refused() -> None:
    network = Written(lambda net, x: F.dropout(F.relu(net.first(x)), training=True))
    assert explained(network, torch.randn(1, 3, 9, 9)).values.abs().max() > 0


def test_the_demo_network_is_ruled_throughout() -> None:
    network = load_model("demo").module.eval()
    picture = torch.randn(1, 3, 96, 96)
    actual = explained(network, picture, target=285)
    assert actual.unchanged == {}
    plain = PIXEL_METHODS["gradient"](ScoredBatch(network, batch_of(picture), of_class(285))).values
    for module in network.modules():
        if isinstance(module, nn.ReLU6):
            module.forward = lambda x: RuleByHand.apply(x, 6)  # type: ignore[method-assign]
    pixels = picture.clone().requires_grad_()
    expected = torch.autograd.grad(network(pixels)[0, 285], pixels)[0]
    torch.testing.assert_close(actual.values, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert not torch.allclose(expected, plain, rtol=0.1)
