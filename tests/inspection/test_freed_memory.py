"""Networks that free or shrink the memory of their own tensors: a row that says so, no foreign memory, no crash."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.errors import HookscopeError, ModelError, UsageError
from tests.networks import Apply, Written

MISSING = "its memory was freed or shrunk"


def losing_inside(lose: Callable[[Tensor], object]) -> nn.Module:
    """Return a network of which a part passes its input on, and loses some of the memory of what it has computed."""

    def passes_on(net: Any, values: Tensor) -> tuple[Tensor, Tensor]:
        lost = net.inner(values) * 2
        lose(lost)
        return values + 1, lost

    parts = {"first": nn.Conv2d(3, 4, 1), "loses": Written(passes_on, inner=nn.Conv2d(4, 8, 1))}
    parts["last"] = nn.Linear(4 * 6 * 6, 5)
    return Written(lambda net, values: net.last(net.loses(net.first(values))[0].flatten(1)), **parts).eval()


def losing_its_output(lose: Callable[[Tensor], object]) -> nn.Module:
    def forward(net: Any, values: Tensor) -> Tensor:
        output = net.inner(values)
        lose(output)
        return output

    return Written(forward, inner=nn.Linear(3, 5)).eval()


def shrink(tensor: Tensor, left: float) -> None:
    storage = tensor.untyped_storage()
    storage.resize_(int(storage.nbytes() * left))


LOSSES: dict[str, Callable[[Tensor], object]] = {
    "freed": lambda tensor: shrink(tensor, 0),
    "shrunk": lambda tensor: shrink(tensor, 0.5),
    "by one byte": lambda tensor: tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1),
}


@pytest.fixture(params=[LOSSES["freed"], LOSSES["by one byte"]], ids=["freed", "by one byte"])
def network(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return losing_inside(request.param)


@pytest.fixture
def image() -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options",
    [{}, {"ops": True}, {"save_tensors": True}, {"grids_for": 2}],
    ids=["plain", "operations", "saved tensors", "grids"],
)
def test_activations_have_a_row_that_says_so(network: nn.Module, image: Tensor, options: dict[str, Any]) -> None:
    run = hookscope.activations(network, image, layer="*", **options)
    lost = run["loses[1]"]
    assert lost.activation.shape == (2, 8, 6, 6)
    assert (lost.activation.unmeasured or "").startswith(MISSING)
    assert "unmeasured" in lost.flags
    assert (lost.mean, lost.l2, lost.activation.quantiles, lost.activation.kept_values) == (None, None, None, None)
    expected = network.first(image).detach().double()
    assert run["first"].l2 == pytest.approx(float(expected.norm()), rel=1e-6)
    assert run["loses[0]"].mean == pytest.approx(float(expected.mean()) + 1, rel=1e-6)
    assert run.verification.status == "same"
    assert "loses[1]" not in run.tensors
    assert all(maps.label != "loses[1]" for maps in (*run.feature_maps, *run.map_summaries))


@pytest.mark.parametrize(
    "options",
    [{}, {"ops": True}, {"save_tensors": True}, {"inputs": True}],
    ids=["plain", "operations", "saved tensors", "inputs"],
)
def test_gradients_are_those_of_torch(network: nn.Module, image: Tensor, options: dict[str, Any]) -> None:
    run = hookscope.grads(network, image, loss="sum", layer="*", **options)
    [lost] = [row for row in run.rows if row.label == "loses[1]"]
    assert (lost.activation.unmeasured or "").startswith(MISSING)
    assert run["loses[1]"].status == "not reached"
    network(image).sum().backward()
    for name, parameter in network.named_parameters():
        row = run[name]
        if parameter.grad is None:
            assert row.gradient.l2 is None
        else:
            assert row.gradient.l2 == pytest.approx(float(parameter.grad.double().norm()), rel=1e-5)


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_an_output_that_is_lost_was_measured_where_it_was_computed(lose: Callable[[Tensor], object]) -> None:
    network, values = losing_its_output(lose), torch.randn(4, 3)
    run = hookscope.activations(network, values, layer="*")
    assert run["inner"].l2 == pytest.approx(float(network.inner(values).detach().double().norm()), rel=1e-6)
    assert (run["(model)"].activation.unmeasured or "").startswith(MISSING)
    assert run.verification.status == "same"
    assert run.predictions == ()
    with pytest.raises(ModelError, match=MISSING):
        hookscope.grads(network, values)


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_what_is_lost_cannot_be_edited(lose: Callable[[Tensor], object]) -> None:
    with pytest.raises(UsageError, match=MISSING):
        hookscope.activations(losing_its_output(lose), torch.randn(4, 3), layer="*", edit="type:written:output:zero")


class Ignores(torch.autograd.Function):
    """Doubles; its gradient is ones, whatever it is given: torch reads no gradient that is lost."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return torch.ones(gradient.shape)


def losing_its_gradient(left: float) -> nn.Module:
    def forward(values: Tensor) -> Tensor:
        output = Ignores.apply(values)
        output.register_hook(lambda gradient: shrink(gradient, left))
        return output

    return Apply(forward)


@pytest.mark.parametrize("left", [0, 0.5])
@pytest.mark.parametrize("save_tensors", [False, True])
def test_a_gradient_that_is_lost_has_a_row_that_says_so(left: float, save_tensors: bool) -> None:
    network, values = nn.Sequential(nn.Linear(3, 4), losing_its_gradient(left), nn.Linear(4, 5)), torch.randn(6, 3)
    run = hookscope.grads(network, values, loss="sum", save_tensors=save_tensors)
    assert (run["1"].gradient.unmeasured or "").startswith(MISSING)
    assert run["1"].gradient.l2 is None
    assert "1 grad_output" not in run.tensors
    assert run["0"].gradient.l2 == pytest.approx(24**0.5)  # ones
    assert run["0.bias"].gradient.l2 == pytest.approx(12.0)  # 6 each, of 4


class LosesWhatItHolds(nn.Module):
    """Frees or shrinks, in each pass or before any, the memory of a tensor that it holds and does not compute with."""

    def __init__(self, place: str, lose: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)
        self.parameter = nn.Parameter(torch.randn(3, 5))
        self.register_buffer("buffer", torch.randn(64))
        self.attribute, self.several = torch.randn(64), [torch.randn(64)]
        self.place, self.lose = place, lose

    def lose_it(self) -> None:
        if self.place == "gradient":
            self.parameter.grad = torch.ones(3, 5)
            self.lose(self.parameter.grad)
        elif self.place == "parameter":
            self.lose(self.parameter.data)
        else:
            self.lose(self.several[0] if self.place == "list" else getattr(self, self.place))

    def forward(self, values: Tensor) -> Tensor:
        self.lose_it()
        return self.head(self.conv(values).mean((2, 3)))


def unharmed() -> nn.Module:
    return LosesWhatItHolds("buffer", lambda _: None).eval()


HELD = ("parameter", "buffer", "attribute", "list", "gradient")
RUNS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "activations": lambda network, image: hookscope.activations(network, image, save_tensors=True, ops=True),
    "grads": lambda network, image: hookscope.grads(network, image, loss="sum", inputs=True),
    "train mode": lambda network, image: hookscope.grads(
        network, image, loss="sum", mode="train", batch_size=1, on_error=lambda _error: None
    ),
    "check": lambda network, image: hookscope.check(network, images=image),
    "attribute": lambda network, image: hookscope.attribute(network, image, target=0),
    "diff": lambda network, image: hookscope.diff(network, unharmed(), image, grads=True),
    "weights": lambda network, _image: hookscope.diff(network, unharmed()),
    "layers": lambda network, _image: hookscope.layers(network, input_shape=(1, 3, 6, 6)),
}


@pytest.mark.parametrize(
    ("lose", "place", "run"),
    [
        *(("freed", "parameter", run) for run in RUNS),
        *(("freed", place, run) for place in HELD[1:] for run in ("train mode", "check")),
        *(("by one byte", place, "activations") for place in HELD),
    ],
)
@pytest.mark.sample("freed-parameter-grads", "by one byte-buffer-activations", "freed-parameter-attribute")
def test_what_a_network_holds_and_frees_is_not_read(run: str, place: str, lose: str, image: Tensor) -> None:
    for at_first in (False, True):
        network = LosesWhatItHolds(place, LOSSES[lose]).eval()
        expected = network.state_dict()["conv.weight"].clone()
        if at_first:
            network.lose_it()
        message = ""
        try:
            RUNS[run](network, image)
        except HookscopeError as error:
            message = str(error)
        assert not message or MISSING in message
        assert torch.equal(network.conv.weight, expected)


@pytest.mark.parametrize("place", ["parameter", "buffer", "attribute", "list"])
def test_what_a_pass_has_freed_is_put_back(place: str, image: Tensor) -> None:
    network = LosesWhatItHolds(place, LOSSES["freed"]).eval()
    held = network.several[0] if place == "list" else getattr(network, place)
    expected = held.detach().clone()
    hookscope.activations(network, image)
    assert torch.equal(held, expected)
    hookscope.grads(network, image)
    assert torch.equal(held, expected)


def test_a_tensor_that_was_measured_can_still_be_resized(image: Tensor) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(144, 5)).eval()
    hookscope.activations(network, image, save_tensors=True, ops=True, grids_for=1)
    hookscope.check(network, images=image)
    for tensor in (image, *network.parameters()):
        assert tensor.untyped_storage().resizable()


@pytest.mark.parametrize("output", ["text", torch.empty(2, 0)], ids=["no tensor", "empty"])
def test_without_a_value_there_is_nothing_to_judge(output: object) -> None:
    run = hookscope.activations(Apply(lambda _: output), torch.ones(2, 4))
    assert str(run).startswith("There is nothing to judge.")


def test_without_a_gradient_no_gradient_was_checked() -> None:
    model = Written(lambda net, x: x + net.shift, shift=torch.ones(()), spare=nn.ReLU())
    run = hookscope.grads(model, torch.ones(2, 4), layer="spare")
    assert "\nGradients were not checked: none arrived.\n" in str(run)


@pytest.mark.parametrize(
    ("device", "answer"), [("meta", "There is nothing to judge."), ("cpu", "No problems found in what was seen: ")]
)
def test_what_has_no_values_is_not_said_to_be_without_problems(device: str, answer: str) -> None:
    network = nn.Sequential(nn.Linear(4, 3, device=device), Apply(lambda x: x.to("meta")))
    x = torch.ones(2, 4, device=device)
    assert str(hookscope.activations(network, x)).startswith(answer)
    with pytest.raises(ModelError, match=r"^There is no loss of \(model\): a meta tensor holds no data\.$"):
        hookscope.grads(network, x)
