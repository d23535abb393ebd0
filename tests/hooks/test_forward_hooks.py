"""Hooks: what they see, and that they leave."""

import inspect
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookscope
from hookscope.errors import UsageError
from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.interventions import Intervention
from hookscope.hooks.observed import GradientSite, ModuleCall, Observation
from tests.networks import Apply, ModelOutput, Written

HOOKS = [name for name in vars(nn.Linear(1, 1)) if "hook" in name and name != "_is_full_backward_hook"]


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules())


def hooks_of(model: nn.Module) -> dict[str, list[dict[int, Any]]]:
    return {layer: [dict(getattr(module, name)) for name in HOOKS] for layer, module in model.named_modules()}


def clone(_call: ModuleCall, _slot: str, tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def observed(model: nn.Module, *args: Any, **kwargs: Any) -> dict[tuple[str, int, str], Observation[Tensor]]:
    """Run the model with every module hooked; return the observations by (layer, call, slot)."""
    with torch.no_grad(), capture(model, modules_of(model), clone) as captured:
        model(*args, **kwargs)
    seen = {(item.layer, item.call, item.slot): item for item in captured.observations}
    assert len(seen) == len(captured.observations)
    return seen


def value(seen: dict[tuple[str, int, str], Observation[Tensor]], layer: str, call: int = 0, slot: str = "") -> Any:
    tensor = seen[layer, call, slot].value
    return tensor.tolist()


def scale(factor: float) -> nn.Module:
    """Return a leaf whose every number is known."""
    return Apply(lambda x: x * factor)


# --- what is seen ---


def test_only_the_given_layers_are_seen_once_each_under_their_first_name() -> None:
    model = nn.Sequential(scale(2), scale(3))
    with capture(model, {"first": model[1], "second": model[1]}, clone) as captured:
        model(torch.ones(1))
    assert [item.layer for item in captured.observations] == ["first"]
    assert captured.called == {"first"}


def test_the_observer_is_told_the_module_its_call_and_its_inputs() -> None:
    calls: list[tuple[ModuleCall, str, Tensor]] = []

    def observe(call: ModuleCall, slot: str, tensor: Tensor) -> None:
        calls.append((call, slot, tensor))

    model = Apply(lambda x, scale, *, mask, nothing: x * mask * scale if nothing is None else x)
    x, mask = torch.ones(2, 3), torch.zeros(2, 3)
    with capture(model, {"": model}, observe):
        output = model(x, 2.0, mask=mask, nothing=None)
    ((call, slot, tensor),) = calls
    assert (call.layer, call.module, call.call, slot) == ("", model, 0, "")
    assert [path for path, _ in call.inputs] == ["[0]", "['mask']"]
    assert call.inputs[0][1] is x
    assert call.inputs[1][1] is mask
    assert tensor is output


def test_the_output_is_handed_on_as_it_is() -> None:
    model, x = Written(lambda net, x: {"y": net.inner({"x": x})["x"]}, inner=nn.Identity()), torch.ones(1)
    with capture(model, modules_of(model), clone):
        result = model(x)
    assert result["y"] is x


def test_a_meta_tensor_is_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 3, device="meta"))
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, capture(model, modules_of(model), lambda _call, _slot, tensor: tuple(tensor.shape)) as captured:
            model(torch.empty(5, 2, device="meta"))
        assert [item.value for item in captured.observations] == [(5, 3), (5, 3)]


# --- marks ---


@pytest.mark.parametrize(
    ("function", "in_place", "passed_through"),
    [
        (lambda x, y: x + y, False, False),
        (lambda x, **_: x, False, True),
        (lambda x, y: x.add_(y), True, False),
        (lambda x, y: x.add_(y) * 0, True, False),
        (lambda x, **_: x.view(-1), False, False),
        (lambda x, **_: x[:1].zero_(), True, False),
    ],
)
def test_in_place_and_pass_through_outputs_are_marked(
    function: Callable[[Tensor, Tensor], object], in_place: bool, passed_through: bool
) -> None:
    (item,) = observed(Apply(function), torch.ones(2), y=torch.ones(2)).values()
    assert (item.in_place, item.passed_through) == (in_place, passed_through)


def test_inference_tensors_are_seen_but_not_marked() -> None:
    layers = nn.Sequential(scale(-2), nn.ReLU(inplace=True), nn.Identity())
    model = Written(torch.inference_mode()(lambda net, x: net.layers(x)), layers=layers)
    seen = observed(model, torch.tensor([1.0, -1.0]))
    assert value(seen, "layers.0") == [-2, 2]
    assert value(seen, "layers.1") == [0, 2]
    assert value(seen, "") == [0, 2]
    # They keep no version: that its input was overwritten is told only of what always does so.
    assert [layer for (layer, *_), item in seen.items() if item.in_place] == ["layers.1"]
    assert not any(item.passed_through for item in seen.values())


# --- nested outputs ---


def test_every_tensor_of_a_nested_output_is_seen_under_its_path() -> None:
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    output = ModelOutput(first, (second, first), {"aux": [None, second]})
    seen = observed(Apply(lambda _: output), torch.ones(1))
    slots = {".logits": [1], ".hidden_states[0]": [2], ".hidden_states[1]": [1], ".loss['aux'][1]": [2]}
    assert {slot: value(seen, "", slot=slot) for _, _, slot in seen} == slots


@pytest.mark.parametrize("output", [None, {}, {"boxes": []}], ids=str)
def test_an_output_without_tensors_is_seen_as_such(output: object) -> None:
    seen = observed(Apply(lambda _: output), torch.ones(1))
    assert list(seen) == [("", 0, "")]
    assert seen["", 0, ""].value is None


# --- removal ---


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
def test_hooks_are_removed_whatever_interrupts_the_forward_pass(error: BaseException) -> None:
    def raises(_x: Tensor) -> Tensor:
        raise error

    model = nn.Sequential(scale(2), nn.Sequential(Apply(raises)), scale(3))
    before = hooks_of(model)
    with pytest.raises(type(error)) as caught, capture(model, modules_of(model), clone) as captured:
        model(torch.ones(1))
    assert caught.value is error
    assert hooks_of(model) == before
    assert [item.layer for item in captured.observations] == ["0"]
    assert captured.called == {"", "0", "1", "1.0"}


OVERWRITING = [
    kind
    for kind in vars(nn).values()
    if isinstance(kind, type)
    and kind.__module__ == "torch.nn.modules.activation"
    and "inplace" in inspect.signature(kind).parameters
]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", OVERWRITING)
def test_torchs_activations_overwrite_their_input_whenever_they_are_told_to(kind: Any, training: bool) -> None:
    options = {"threshold": 0.1, "value": 20.0} if kind is nn.Threshold else {}
    for inplace in (False, True):
        module = kind(**options, inplace=inplace).train(training)
        for values in ([0.5, -0.5], [3.0, 4.0], []):
            x = torch.tensor(values)
            seen = observed(module, x)
            assert seen["", 0, ""].in_place == inplace == (x._version > 0)
            assert not seen["", 0, ""].passed_through


def test_hooks_are_removed_when_hooking_fails_half_way() -> None:
    model = nn.Sequential(scale(2), nn.ReLU())
    before = hooks_of(model)
    layers: Any = {**modules_of(model), "no module": "text"}
    with pytest.raises(TypeError, match="must have __dict__"), capture(model, layers, clone):
        pass
    assert hooks_of(model) == before


# --- calls inside calls, and calls that fail ---


def test_a_module_that_calls_itself_keeps_its_calls_apart() -> None:
    class Countdown(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            inner: Tensor = self(x * 2, depth - 1) if depth else x
            return inner + 1

    finished: list[tuple[int, float]] = []

    def observe(call: ModuleCall, _slot: str, tensor: Tensor) -> float:
        finished.append((call.call, call.inputs[0][1].item()))
        return tensor.item()

    model = Countdown()
    with capture(model, {"": model}, observe) as captured:
        model(torch.ones(1), 2)
    assert finished == [(2, 4), (1, 2), (0, 1)]
    assert [(item.call, item.value) for item in captured.observations] == [(2, 5), (1, 6), (0, 7)]


@pytest.mark.parametrize("keyword", [False, True])
def test_a_module_that_catches_its_own_failing_call_is_not_taken_for_it(keyword: bool) -> None:
    class Retry(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.item() > 1:
                raise ValueError("too large")
            try:
                self(x=x * 2) if keyword else self(x * 2)
            except ValueError:
                return x + 10
            raise AssertionError

    model = Retry()
    inputs: list[float] = []

    def observe(call: ModuleCall, _slot: str, tensor: Tensor) -> float:
        inputs.append(call.inputs[0][1].item())
        return tensor.item()

    with capture(model, {"": model}, observe) as captured:
        model(x=torch.ones(1)) if keyword else model(torch.ones(1))
    assert inputs == [1]
    assert [(item.call, item.value) for item in captured.observations] == [(0, 11)]


# --- checkpointing ---


def checkpointed(use_reentrant: bool) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(checkpoint(net.block, x, use_reentrant=use_reentrant))

    return Written(forward, block=nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), head=nn.Linear(3, 1))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_is_seen_once(use_reentrant: bool) -> None:
    model = checkpointed(use_reentrant)
    runs: list[int] = []
    model.block[0].register_forward_hook(lambda *_: runs.append(1))
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert len(runs) == 2  # torch itself runs it twice
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with capture(model, modules_of(model), clone) as captured:
        model(x).sum().backward()
    assert len(runs) == 4
    assert [(item.layer, item.call) for item in captured.observations] == [
        ("block.0", 0),
        ("block.1", 0),
        ("block.2", 0),
        ("block", 0),
        ("head", 0),
        ("", 0),
    ]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM, nn.MultiheadAttention])
@pytest.mark.parametrize(
    ("use_reentrant", "first"), [(False, nn.Identity()), (False, nn.Tanh()), (True, nn.Linear(4, 4))]
)
def test_steps_of_a_checkpointed_layer_have_autograds_gradients(
    kind: Any, use_reentrant: bool, first: nn.Module
) -> None:
    layer = kind(4, 2, batch_first=True)

    def outputs_of(values: Tensor) -> Tensor:
        outputs: Tensor = layer(*[values] * (3 if kind is nn.MultiheadAttention else 1))[0]
        return outputs

    def run(net: Any, x: Tensor) -> Tensor:
        outputs: Tensor = checkpoint(outputs_of, net.first(x), use_reentrant=use_reentrant)
        return outputs

    x = torch.randn(2, 3, 4)
    result = hookscope.grads(Written(run, first=first, layer=layer), x, loss=lambda output: output.square().sum())
    inputs = first(x).detach().requires_grad_()
    of_inputs, *of_weights = torch.autograd.grad(outputs_of(inputs).square().sum(), [inputs, *layer.parameters()])
    assert result.over_time[0].largest == pytest.approx(of_inputs.abs().amax((0, 2)).tolist(), rel=1e-5)
    weights = [row.gradient.l2 for row in result.parameters if row.name.startswith("layer")]
    assert weights == pytest.approx([weight.norm().item() for weight in of_weights], rel=1e-5)


# --- torch.compile ---


class CompiledFunction(nn.Module):
    """Keeps its submodules in a function that is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = scale(2)
        self.run = torch.compile(lambda x: self.scale(x) + 1, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("way", "compiled_before"), [("function", True), ("method", False), ("part", True), ("closure", False)]
)
def test_compiled_networks_are_seen(way: str, compiled_before: bool) -> None:
    model: nn.Module = nn.Sequential(scale(2), nn.Sequential(scale(3)))
    call: Callable[[Tensor], Tensor] = model
    expected = {"0": [2.0], "1.0": [6.0], "1": [6.0], "": [6.0]}
    if way == "function":
        call = torch.compile(model, backend="eager")
    elif way == "method":
        model.compile(backend="eager")
    elif way == "part":
        assert isinstance(model, nn.Sequential)
        model[1].compile(backend="eager")
    else:
        call = model = CompiledFunction()
        expected = {"scale": [2.0], "": [3.0]}
    x = torch.ones(1)
    with torch.no_grad():  # what was compiled for one grad mode is compiled anew, hooks and all, for the other
        plain = call(x) if compiled_before else None
        with capture(model, modules_of(model), clone) as captured:
            output = call(x)
    assert {item.layer: item.value.tolist() for item in captured.observations if item.value is not None} == expected
    assert plain is None or torch.equal(plain, output)
    with torch.no_grad():
        assert torch.equal(call(x), output)
    assert len(captured.observations) == len(expected)


# --- gradients ---


def gradient_of(_site: GradientSite[Tensor], gradient: Tensor) -> Tensor:
    return gradient.clone()


def watched(
    model: nn.Module, run: Callable[[], Tensor], **options: Any
) -> tuple[Tensor, dict[tuple[str, int, str, str], GradientSite[Tensor]], int]:
    """Run forward and backward with every module watched; return the loss, the sites, and how many passes it took."""
    with capture(model, modules_of(model), clone, gradients=gradient_of, **options) as captured:
        passes = 1
        loss = run()
        while captured.must_repeat(loss):
            captured.restart()
            loss = run()
            passes += 1
        loss.backward()
        return loss.detach(), {site.key: site for site in captured.gradients}, passes


def arrived(site: GradientSite[Tensor]) -> Any:
    return site.value.tolist()


def overwritten_alone(net: Any, x: Tensor) -> Tensor:
    return torch.relu_(net.layer(x)) * 5


def also_used_before(net: Any, x: Tensor) -> Tensor:
    out = net.layer(x)
    before = out * 7
    return torch.relu_(out) * 5 + before


def overwritten_twice(net: Any, x: Tensor) -> Tensor:
    out = net.layer(x)
    out.mul_(5)
    out.add_(1)
    return out


def partly_overwritten(net: Any, x: Tensor) -> Tensor:
    out = net.layer(x)
    out[:1] *= 3
    return out * 5


ONLY_USE = Apply(lambda x: (x * 1).view(-1))  # a view that is its base's only use


@pytest.mark.parametrize("layer", [ONLY_USE, nn.Identity()])
@pytest.mark.parametrize(
    ("forward", "gradient"),
    [
        (overwritten_alone, [5, 0]),
        (also_used_before, [12, 7]),
        (overwritten_twice, [5, 5]),
        (partly_overwritten, [15, 5]),
    ],
)
def test_a_view_that_is_overwritten_is_seen_in_the_same_pass(
    forward: Callable[[Any, Tensor], Tensor], gradient: list[float], layer: nn.Module
) -> None:
    model = Written(forward, layer=layer)
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    _, sites, passes = watched(model, lambda: model(x * 1).sum())
    assert passes == 1
    assert arrived(sites["layer", 0, "", "output"]) == gradient


def test_a_slice_that_is_overwritten_shows_its_part_of_the_base() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        base = x * 1
        net.right(base).mul_(torch.tensor([[2.0, 3.0], [5.0, 7.0]]))
        return base

    model = Written(forward, right=Apply(lambda x: x[:, 1:].T))
    x = torch.ones(2, 3, requires_grad=True)
    weights = torch.tensor([[1.0, 10.0, 100.0], [1000.0, 10000.0, 100000.0]])
    _, sites, passes = watched(model, lambda: torch.sum(model(x) * weights))
    assert passes == 1
    # (0, 1), (1, 1); (0, 2), (1, 2) of the base, each times its factor.
    assert arrived(sites["right", 0, "", "output"]) == [[20, 30000], [500, 700000]]


def test_a_view_whose_base_is_overwritten_is_seen_in_a_second_pass() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        base = x * 1
        flat = net.flat(base)
        base.mul_(3)
        return flat * 5

    model = Written(forward, flat=nn.Flatten(0))
    x = torch.tensor([[1.0, -1.0]], requires_grad=True)
    _, _, passes = watched(model, lambda: model(x).sum())
    assert passes == 2


def test_counting_versions_of_a_view_holds_none_of_its_memory() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 1))
    with capture(model, modules_of(model), clone, gradients=gradient_of) as captured:
        model(torch.ones(1, 2, 3, requires_grad=True) * 1)
        (view,) = captured.watch._views
        assert view.counter.untyped_storage().nbytes() == 0


def test_a_parameter_that_a_module_returns_keeps_no_hook() -> None:
    inputs = Written(lambda net: net.weight, weight=nn.Parameter(torch.ones(2)))
    model: Any = Written(lambda net, x: x * net.given() + net.given.weight * 10, given=inputs)
    _, sites, _ = watched(model, lambda: model(torch.full((2,), 3.0)).sum())
    assert arrived(sites["given", 0, "", "output"]) == [3, 3]
    assert not model.given.weight._backward_hooks
    assert model.given.weight.grad.tolist() == [13, 13]


def test_an_output_container_that_cannot_be_copied_shows_all_uses() -> None:
    model = Apply(lambda x: MappingProxyType({"first": (first := x * 2), "second": first * 10}))
    x = torch.ones(1, requires_grad=True)
    _, sites, _ = watched(model, lambda: sum(model(x).values(), torch.zeros(1)).sum())
    assert arrived(sites["", 0, "['first']", "output"]) == [11]


def test_gradients_are_not_observed_while_nobody_listens() -> None:
    model, x = nn.Sequential(scale(2)), torch.ones(1, requires_grad=True)
    with capture(model, modules_of(model), clone, gradients=gradient_of) as captured:
        captured.watch.listening = False
        output = model(x)
        torch.autograd.grad(output.sum(), x, retain_graph=True)
        assert [site.arrival for site in captured.gradients] == [None, None]
        captured.watch.listening = True
        output.sum().backward()
    assert [site.arrival for site in captured.gradients] == [0, 1]
    assert not output._backward_hooks


def test_interventions_come_before_what_is_observed() -> None:
    model = nn.Sequential(scale(2), scale(3))
    x = torch.ones(1, requires_grad=True)
    edits = {
        "0": [Intervention("input", lambda _module, tensor: tensor + 1)],
        "1": [
            Intervention("output", lambda _module, tensor: tensor * 10),
            Intervention("grad", lambda _module, gradient: gradient + 4),
            Intervention("grad", lambda _module, gradient: gradient * 20),
        ],
    }
    with capture(model, modules_of(model), clone, gradients=gradient_of, edits=edits) as captured:
        model(x).sum().backward()
    seen = {item.layer: item.value.item() for item in captured.observations if item.value is not None}
    assert seen == {"0": 4, "1": 120, "": 120}
    assert {site.layer: arrived(site) for site in captured.gradients} == {"0": [3000], "1": [100], "": [1]}
    assert x.grad.tolist() == [6000]
    assert not any(hooks for layer in hooks_of(model).values() for hooks in layer)


def test_an_intervention_in_what_cannot_be_copied_is_refused() -> None:
    model = Apply(lambda x, **_: MappingProxyType({"out": x * 2}))
    edits = {"": [Intervention("output", lambda _module, tensor: tensor * 2)]}
    with (
        pytest.raises(UsageError, match="An edit cannot reach the inputs or outputs of Apply"),
        capture(model, {"": model}, clone, edits=edits),
    ):
        model(torch.ones(1), y=torch.ones(1))
    assert not any(hooks for layer in hooks_of(model).values() for hooks in layer)
