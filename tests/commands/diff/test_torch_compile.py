"""A network beside itself through torch.compile."""

import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookscope
from hookscope.commands.diff import torch_compile
from hookscope.errors import HookscopeError, ModelError, UsageError
from tests.commands.diff.test_compare_gradients import scaled

pytestmark = pytest.mark.exhaustive

Lower = Callable[[torch.fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def as_traced(graph: torch.fx.GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
    return graph.forward


def with_wrong_relu(graph: torch.fx.GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile as a compiler would whose ReLU is not one."""
    for node in graph.graph.nodes:
        if node.target in (F.relu, torch.relu):
            node.target, node.kwargs = F.leaky_relu, {}
    graph.recompile()
    return graph.forward


def with_wrong_backward(graph: torch.fx.GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile as a compiler would whose ReLU has a gradient 1.05 times too large."""
    for node in graph.graph.nodes:
        if node.target in (F.relu, torch.relu):
            node.target, node.kwargs = (lambda x: scaled(F.relu(x))), {}
    graph.recompile()
    return graph.forward


def by(lower: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compile, "lower", lower)


class Block(nn.Module):
    def __init__(self, activates: bool) -> None:
        super().__init__()
        self.conv, self.activates = nn.Conv2d(3, 3, 3, padding=1), activates

    def forward(self, x: Tensor) -> Tensor:
        return x + (F.relu(self.conv(x)) if self.activates else self.conv(x))


class Listing(nn.Module):
    """Calls the blocks of a list, and has code between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 3, 1)
        self.blocks = nn.ModuleList(Block(activates) for activates in (False, True, False))
        self.head = nn.Linear(3, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def pictures(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_the_block_that_is_compiled_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    by(with_wrong_relu, monkeypatch)
    network = Listing().eval()
    result = hookscope.diff(network, "same", pictures(), compile_b=True, shadow=True)
    assert [row.layer for row in result.rows] == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [difference.layer for difference in result.first_differences] == ["blocks.1"]
    assert {row.origin for row in result.rows[:2]} == {"equal"}
    assert result.b.ways == ("compiled",)
    assert "its rows are of 5 blocks, each compiled by itself" in result.notes[0]
    with torch.no_grad():
        x = network.stem(pictures())
        for block in network.blocks:
            x = x + (F.leaky_relu(block.conv(x)) if block.activates else block.conv(x))
        wrong, right = network.head(x.mean((2, 3))), network(pictures())
    assert result.outputs[0].measures is not None
    assert result.outputs[0].measures.relative_l2 == pytest.approx(
        float((wrong - right).norm() / right.norm()), rel=1e-5
    )


def test_layer_chooses_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    by(as_traced, monkeypatch)
    network = nn.Sequential(OrderedDict(one=Listing(), two=nn.Identity())).eval()
    result = hookscope.diff(network, "same", pictures(), compile_b=True, layer=["one.blocks.1.conv", "one.blocks.1"])
    assert [row.layer for row in result.rows] == ["one.blocks.1.conv", "one.blocks.1"]
    # The convolution, and what is around it: the stem, two blocks, the head, and the last module.
    assert "its rows are of 6 blocks" in result.notes[0]
    assert {row.origin for row in result.rows} == {"equal"}


def test_what_only_the_whole_does_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_if_large(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        convolutions = [node for node in graph.graph.nodes if "conv" in node.name]
        return (with_wrong_relu if len(convolutions) > 3 else as_traced)(graph, inputs)

    by(wrong_if_large, monkeypatch)
    result = hookscope.diff(Listing().eval(), "same", pictures(), compile_b=True)
    assert {row.origin for row in result.rows} == {"equal"}
    assert result.first_differences == ()
    assert result.outputs[0].measures is not None
    assert result.outputs[0].measures.relative_l2 > 1e-4
    assert "differs beyond rounding, though no block does" in result.warnings[0]


def test_equal_networks_do_not_differ_and_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    by(as_traced, monkeypatch)
    network = nn.Sequential(Listing(), nn.BatchNorm1d(4), nn.Linear(4, 3)).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    result = hookscope.diff(network.eval(), network, pictures(5), compile_b=True, batch_size=2)
    assert {row.origin for row in result.rows} == {"equal"}
    assert result.outputs[0].top1 == 5
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any("forward" in vars(module) or module._forward_hooks for module in network.modules())


def test_dropout_draws_as_it_does_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    by(as_traced, monkeypatch)
    network = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 2), nn.BatchNorm1d(2))
    x = torch.randn(3, 6)
    plain = hookscope.diff(network, "same", x, mode_b="train")
    compiled_too = hookscope.diff(network, "same", x, mode_b="train", compile_b=True)
    assert [row.measures for row in compiled_too.rows] == [row.measures for row in plain.rows]
    assert compiled_too.outputs == plain.outputs


def test_two_networks_are_paired_by_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    by(with_wrong_relu, monkeypatch)
    wrapped = nn.Sequential(OrderedDict(module=Listing())).eval()
    result = hookscope.diff(Listing().eval(), wrapped, pictures(), compile_b=True, reference="float64")
    assert [(row.layer, row.label_b) for row in result.rows][2] == ("blocks.1", "module.blocks.1")
    assert [difference.layer for difference in result.first_differences] == ["blocks.1"]
    assert all(row.error_b > row.error for row in result.rows[2:])


def test_what_is_kept_from_being_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Apart(nn.Linear):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    by(as_traced, monkeypatch)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), Apart(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x) + x)

    result = hookscope.diff(Both().eval(), "same", torch.randn(2, 3), compile_b=True)
    assert "torch.compile compiles nothing of other: these blocks run uncompiled." in result.warnings[0]
    with pytest.raises(UsageError, match=r"torch\.compile compiles nothing of it"):
        hookscope.diff(nn.Sequential(Apart(3, 3), nn.Identity()), "same", torch.randn(2, 3), compile_b=True)


def test_what_cannot_be_compiled_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_graph: torch.fx.GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
        raise NotImplementedError("no such kernel")

    by(refuse, monkeypatch)
    with pytest.raises(ModelError, match=r"^B \(Listing\) cannot be compiled at stem: NotImplementedError: no such"):
        hookscope.diff(Listing().eval(), "same", pictures(), compile_b=True)


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.amax() > 5:
            raise ValueError("too large")
        return self.body(x)


def test_what_the_network_raises_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    by(as_traced, monkeypatch)
    network = nn.Sequential(Picky(), nn.Linear(2, 2)).eval()
    with pytest.raises(ModelError, match=r"^A \(Sequential\) raised in its forward pass at 0 .*too large"):
        hookscope.diff(network, "same", torch.full((1, 4), 9.0), compile_b=True)
    errors: list[HookscopeError] = []
    x = torch.zeros(3, 4)
    x[1] = 9
    result = hookscope.diff(network, "same", x, compile_b=True, on_error=errors.append)
    assert (len(result.inputs), len(errors)) == (2, 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo's own code
def test_gradients_are_compared_and_a_block_whose_backward_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    by(as_traced, monkeypatch)
    network = Listing().eval()
    options = {"compile_b": True, "batch_size": 2, "grads": True, "loss": "sum"}
    result = hookscope.diff(network, "same", pictures(3), **options)
    outputs = ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    parameters = [name for name, _ in network.named_parameters() if not name.startswith("unused")]
    assert [row.label for row in result.gradients] == [
        *(f"{name} grad_output" for name in outputs),
        *(f"{name} grad" for name in parameters),
    ]
    assert all(row.measures is not None and row.measures.relative_l2 < 1e-6 for row in result.gradients)
    assert (result.first_gradient_difference, result.warnings) == ("", ())
    assert all(parameter.grad is None for parameter in network.parameters())
    by(with_wrong_backward, monkeypatch)
    torch.compiler.reset()
    result = hookscope.diff(network, "same", pictures(3), **options)
    assert result.first_gradient_difference.startswith("blocks.1")
    assert result.first_differences == ()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo's own code
def test_gradients_that_only_the_whole_has_wrong_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_if_large(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        convolutions = [node for node in graph.graph.nodes if "conv" in node.name]
        return (with_wrong_backward if len(convolutions) > 3 else as_traced)(graph, inputs)

    by(wrong_if_large, monkeypatch)
    result = hookscope.diff(Listing().eval(), "same", pictures(), compile_b=True, grads=True)
    assert result.first_gradient_difference == ""
    assert "Compiled in one piece, the network has other gradients" in result.warnings[0]


@pytest.mark.parametrize("options", [{"ops": True}, {"layer": "op:relu"}, {"edit_b": "0:output:zero"}])
def test_what_needs_hooks_inside_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="needs hooks inside of B"):
        hookscope.diff(nn.Sequential(nn.Linear(2, 2)), "same", torch.randn(1, 2), compile_b=True, **options)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of inductor's own code
def test_inductor_differs_no_more_than_rounding() -> None:
    network = nn.Sequential(nn.Linear(6, 6), nn.GELU()).eval()
    result = hookscope.diff(network, "same", torch.randn(3, 6), compile_b=True, grads=True)
    assert (result.first_differences, result.first_gradient_difference) == ((), "")
    assert all(row.measures is not None and row.measures.relative_l2 < 1e-5 for row in result.gradients)
    assert {row.origin for row in result.rows} <= {"equal", "rounding"}
    assert result.outputs[0].measures is not None
    assert result.outputs[0].measures.relative_l2 < 1e-6
