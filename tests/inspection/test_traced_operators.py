"""Operators that torch traces (`torch.cond`, `map`, `scan`, …): gradients are those of a pass without hookscope."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import hookscope
from hookscope.hooks.forward_hooks import observed

pytestmark = [
    pytest.mark.filterwarnings("ignore:`?torch.jit"),  # of forward-mode derivatives
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec"),
]

X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    """A layer, what `run` does with `taken` or `other`, and a layer."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.first = nn.Linear(4, 4)
        self.taken = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self, self.first(x)))


class Plain(Net):
    """The same without the first layer: what the operator is given needs no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self, x))


def chosen(net: Net, x: Tensor) -> Tensor:
    return torch.cond(x.sum() * 0 > -1, lambda x: net.taken(x).sin(), lambda x: net.other(x).cos(), (x,))


def chosen_with_a_dict(net: Net, x: Tensor) -> Tensor:
    options = {"x": x}
    return torch.cond(
        x.sum() * 0 > -1, lambda d: net.taken(d["x"]).sin(), lambda d: net.other(d["x"]).cos(), (options,)
    )


def chosen_twice(net: Net, x: Tensor) -> Tensor:
    return torch.cond(x.sum() * 0 > -1, lambda x: chosen(net, x), lambda x: net.other(x).cos(), (x,))


def chosen_in_compiled_code(net: Net, x: Tensor) -> Tensor:
    return torch.compile(chosen, backend="eager")(net, x)


def mapped(net: Net, x: Tensor) -> Tensor:
    return map_rows(lambda row: net.taken(row).sin(), x)


def scanned(net: Net, x: Tensor) -> Tensor:
    return scan(lambda carry, row: ((carry + net.taken(row)).tanh(), carry * 1.0), x[0] * 0, x, dim=0)[1]


def scanned_in_a_tree(net: Net, x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a + net.taken(b).tanh(), x, 0, combine_mode="generic")


def looped(net: Net, x: Tensor) -> Tensor:
    return while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, net.taken(x).sin()), (torch.tensor(0), x))[1]


def checkpointed_reentrant(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda x: net.taken(x).sin(), x, use_reentrant=True)


def pushed_forward(net: Net, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda row: net.taken(row).sin(), (x,), (torch.ones_like(x),))[1]


def energy(net: Net, x: Tensor) -> Tensor:
    with torch.enable_grad():
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(chosen(net, place).sum(), place)
    return net.other(x) + force


RUNS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    run.__name__: run
    for run in (
        *(chosen_with_a_dict, chosen_twice, chosen_in_compiled_code, mapped, scanned, scanned_in_a_tree, looped),
        *(checkpointed_reentrant, pushed_forward, energy),
    )
}


def plain_gradients(net: nn.Module) -> dict[str, Tensor | None]:
    net(X.clone()).sum().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def assert_the_gradients_are(run: hookscope.Gradients, expected: Mapping[str, Tensor | None]) -> None:
    for row in run.parameters:
        gradient = expected[row.name]
        if gradient is None:
            assert row.status == "not reached", row.name
        else:
            assert row.gradient.l2 == pytest.approx(gradient.double().norm().item(), rel=1e-5, abs=1e-12), row.name


@pytest.mark.parametrize(
    ("name", "kind", "inputs"),
    [*((name, Net, False) for name in RUNS), ("mapped", Plain, True), ("looped", Plain, True)],
)
@pytest.mark.exhaustive
def test_gradients_are_those_of_the_pass_without_hookscope(name: str, kind: type[Net], inputs: bool) -> None:
    expected = plain_gradients(kind(RUNS[name]))
    run = hookscope.grads(kind(RUNS[name]), X.clone(), loss="sum", layer="*", inputs=inputs)
    assert_the_gradients_are(run, expected)
    assert run.verification == hookscope.results.activations.Verification("same")


@pytest.mark.parametrize(("kind", "inputs"), [(Net, False), (Plain, True)])
def test_a_branch_has_its_gradients_and_what_has_no_row_says_why(kind: type[Net], inputs: bool) -> None:
    net = kind(chosen)
    hidden = net.first(X) if kind is Net else X
    wanted = [*net.taken.parameters(), *net.last.parameters()]
    truth = torch.autograd.grad(net.last(net.taken(hidden).sin()).sum(), wanted)
    run = hookscope.grads(net, X.clone(), loss="sum", layer="*", inputs=inputs, ops=True)
    names = ("taken.weight", "taken.bias", "last.weight", "last.bias")
    for name, gradient in zip(names, truth, strict=True):
        assert run[name].gradient.l2 == pytest.approx(gradient.double().norm().item(), rel=1e-5)
    line = chosen.__code__.co_firstlineno + 1
    place = f"cond at {Path(__file__).name}:{line}"
    reasons = {layer.layer: layer.reason for layer in run.uncalled}
    assert reasons["taken"] == f"it runs inside {place}, which torch traces without hooks"
    assert reasons["other"].startswith(f"the forward pass did not call it in eval mode outside {place}")
    assert run.notes == (f"No rows for layers and operations inside {place}: torch traces what runs there.",)
    branch = net.taken(hidden).sin()
    (gradient,) = torch.autograd.grad(net.last(branch).sum(), branch)
    assert run["(model):cond"].gradient.l2 == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert run.verification.status == "same"


def test_without_gradients_the_layers_of_a_branch_have_rows() -> None:
    net = Net(chosen)
    run = hookscope.activations(net, X.clone(), layer="*")
    with torch.no_grad():
        expected = net.taken(net.first(X))
    assert run["taken"].activation.mean == pytest.approx(expected.mean().item(), rel=1e-5)
    assert [layer.layer for layer in run.uncalled] == ["other"]
    assert run.notes == ()
    traced = hookscope.activations(Net(chosen_with_a_dict), X.clone(), layer="*")  # torch takes a dict only there
    assert traced["last"].activation.mean == pytest.approx(run["last"].activation.mean, rel=1e-5)


def test_an_edit_inside_a_branch_is_never_applied_and_says_so() -> None:
    run = hookscope.grads(Net(chosen), X.clone(), loss="sum", edit=["taken:output:scale(2)"])
    reason = "its layer was not called where hooks see it, got no gradient, or has no floating-point numbers."
    assert f"Edit 'taken:output:scale(2)' was never applied: {reason}" in run.warnings


def test_a_training_traces_a_branch_while_its_layers_are_observed() -> None:
    net = Net(chosen)
    seen: list[str] = []
    layers = {name: layer for name, layer in net.named_modules() if name}
    with observed(layers, lambda call, _slot, _tensor: seen.append(call.layer), lambda: True):
        gradients = plain_gradients(net)
    expected = plain_gradients(Net(chosen))
    assert all(torch.equal(gradients[name], expected[name]) for name in gradients)
    assert seen == ["first", "last"]


def test_a_watched_training_around_it_takes_no_reason_away() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    watch = hookscope.watch(layer, optimizer, every=1, on_line=lambda _: None)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    watch.step(1.0)
    try:
        result = hookscope.grads(Net(chosen), X.clone(), loss="sum", layer="*")
    finally:
        watch.close()
    assert any("runs inside cond" in each.reason for each in result.uncalled)
