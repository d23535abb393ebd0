"""Operations over whole networks, held against graphs of torch.fx, traces of torchlens, and autograd."""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
from torch import Tensor, fx, nn

import hookscope
from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.hooks.callers import have_own_operations
from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.patterns import parse_operation_pattern
from hookscope.hooks.pytree import tensors_in
from hookscope.models.spec import load_model
from tests.commands.attention.small_networks import FlexAttention
from tests.inspections import inspect, inspect_gradients
from tests.networks import TORCHVISION, vision

EVERYTHING = (parse_operation_pattern("op:*"),)


# Python's operators, exchanged and in place too, under torch's names.
OPERATORS = {"iadd": "add", "radd": "add", "isub": "sub", "rsub": "sub", "imul": "mul", "rmul": "mul"}
OPERATORS |= {"truediv": "div", "itruediv": "div"}


class Traced(NamedTuple):
    """An operation of a graph: the module whose forward calls it, its name, and what it returned."""

    owner: str
    name: str
    tensors: Sequence[Tensor]


class Recorder(fx.Interpreter):
    """Runs a traced graph and keeps what its functions and methods return."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.seen: list[Traced] = []
        self.differentiable: list[Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op not in ("call_function", "call_method") or n.target is getattr:
            return result
        source = self.env.get(n.args[0]) if n.args and isinstance(n.args[0], fx.Node) else None
        if n.target is operator.getitem and not isinstance(source, Tensor):
            return result
        returned = source if n.target is operator.setitem else result
        if not isinstance(returned, Tensor | tuple | list):
            return result
        tensors = [tensor for _, tensor in tensors_in(returned)]
        if tensors:
            stack = n.meta.get("nn_module_stack")
            owner = list(stack.values())[-1][0] if stack else ""
            name = (n.target if isinstance(n.target, str) else n.target.__name__).strip("_")
            self.seen.append(Traced(owner, OPERATORS.get(name, name), [tensor.detach().clone() for tensor in tensors]))
        return result


def rows_of(network: nn.Module, x: Tensor) -> tuple[Any, list[Traced]]:
    with capture(network, {}, lambda _call, _slot, t: t.clone(), operations=OperationChoice(EVERYTHING)) as captured:
        output = network(x)
    calls: dict[tuple[str, int], Traced] = {}
    for seen in captured.observations:
        new = Traced(seen.operation.owner, seen.operation.name, [])
        calls.setdefault((seen.layer, seen.call), new).tensors.append(seen.value)
    return output, [*calls.values()]


# What torch.fx traces without changing what is called: it keeps fx-wrapped functions of torchvision as one call, and
# computes at once what depends on no input, as the attention masks of Swin do.
FX_TORCHVISION = ("resnet18", "densenet121", "googlenet", "shufflenet_v2_x0_5", "vit")
FX_TIMM = {"coat_lite_tiny": 224, "halonet26t": 256, "xcit_nano_12_p16_224": 224}
BUILDERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{name: (TORCHVISION[name].build, 112 if name == "vit" else 96) for name in FX_TORCHVISION},
    **{f"timm {name}": (lambda name=name: timm.create_model(name), size) for name, size in FX_TIMM.items()},
}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.sample("resnet18", "densenet121", "googlenet", "shufflenet_v2_x0_5", "vit")
def test_operations_are_those_of_the_traced_graph_in_order_with_the_same_values(name: str) -> None:
    build, size = BUILDERS[name]
    torch.manual_seed(0)
    network, x = build().eval(), torch.rand(1, 3, size, size)
    with torch.no_grad():
        expected = network(x)
        output, actual = rows_of(network, x)
        graph = Recorder(fx.symbolic_trace(network))
        graph.run(x)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tensors_in(output), tensors_in(expected), strict=True))
    assert [each[:2] for each in actual] == [each[:2] for each in graph.seen]
    for ours, theirs in zip(actual, graph.seen, strict=True):
        assert len(ours.tensors) == len(theirs.tensors), ours.owner
        assert all(torch.equal(a, b) for a, b in zip(ours.tensors, theirs.tensors, strict=True)), ours[:2]


def small_vit_config(**others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    return {**sizes, "intermediate_size": 32, **others}


def hugging_face(name: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        package = import_module("transformers")
        return getattr(package, f"{name}Model")(getattr(package, f"{name}Config")(**config))

    return build


# What torch.fx cannot trace, or traces otherwise: torchlens wraps torch's functions, and sees each call.
WRAPPED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "swin": (TORCHVISION["swin"].build, 64),
    "timm mobilevit_xxs": (lambda: timm.create_model("mobilevit_xxs"), 64),
    "transformers Beit": (hugging_face("Beit", **small_vit_config()), 32),
}


@contextmanager
def torchlens_unwrapped() -> Iterator[Any]:
    """Give `torchlens.trace`, and put back torch's functions, which it leaves wrapped."""
    trace = import_module("torchlens").trace
    try:
        yield trace
    finally:
        import_module("torchlens.backends.torch.wrappers").unwrap_torch()


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.exhaustive
def test_operations_are_those_that_wrapping_torchs_functions_shows(name: str) -> None:
    build, size = WRAPPED[name]
    torch.manual_seed(0)
    network, x = build().eval(), torch.rand(1, 3, size, size)
    with torch.no_grad():
        _, actual = rows_of(network, x)
        ours = [(each.owner, each.name, tensor) for each in actual for tensor in each.tensors]
        with torchlens_unwrapped() as trace:
            theirs = [
                (owner, OPERATORS.get(bare, bare), layer.out)
                for layer in trace(network, [x])
                if (bare := (layer.func_name or "none").strip("_")) not in ("none", "identity")  # its own marks
                if have_own_operations([network.get_submodule(owner := owner_of(layer.modules))])
            ]
    assert [our[:2] for our in ours] == [their[:2] for their in theirs]
    for (owner, operation, tensor), (_, _, other) in zip(ours, theirs, strict=True):
        assert torch.equal(tensor, other), (owner, operation)


def owner_of(modules: Sequence[str]) -> str:
    """Return the name of the innermost module, of addresses like "layer1.0:1"."""
    name = modules[-1].rpartition(":")[0] if modules else ""
    return "" if name == "self" else name


# --- gradients ---

TRAINED_IN_FLOAT64 = ("densenet121", "mobilenet_v2", "swin", "vit")


@pytest.mark.parametrize("name", TRAINED_IN_FLOAT64)
def test_gradients_are_those_that_autograd_gives_at_the_edge_of_each_operation(name: str) -> None:
    """An edge of autograd's graph is taken as soon as an operation returns, so that later writes do not move it."""
    torch.manual_seed(0)
    network, (x,) = TORCHVISION[name].build().eval().double(), TORCHVISION[name].args()
    seen: dict[tuple[str, int, str], Tensor] = {}
    edges: dict[tuple[str, int, str], Any] = {}

    def at_once(call: Any, slot: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            edges[call.layer, call.call, slot] = torch.autograd.graph.get_gradient_edge(tensor)

    def arrived(site: Any, gradient: Tensor) -> None:
        seen[site.layer, site.call, site.slot] = gradient.clone()

    with capture(network, {}, at_once, gradients=arrived, operations=OperationChoice(EVERYTHING)) as captured:
        loss = network(x.double()).square().sum()
        assert not captured.must_repeat(loss)
        passed = {
            (observation.layer, observation.call, observation.slot)
            for observation in captured.observations
            if observation.passed_through
        }
        captured.watch.listening = False
        expected = torch.autograd.grad(loss, [*edges.values()], retain_graph=True, allow_unused=True)
        captured.watch.listening = True
        loss.backward()
        unseen = {(site.layer, site.call, site.slot): site.untracked for site in captured.gradients}
    compared = 0
    for place, gradient in zip(edges, expected, strict=True):
        if place in passed:  # the uses of one object are told apart, which the graph by itself does not do
            continue
        if gradient is not None:  # else the loss does not depend on it, or only through what is written into its base
            assert place in seen or unseen[place], place
        if gradient is not None and place in seen:
            torch.testing.assert_close(seen[place], gradient, rtol=1e-12, atol=0)
            compared += 1
    assert compared > 3
    assert sum(bool(unseen[place]) for place in edges) <= len(edges) // 10  # what is overwritten through another view


# --- exported programs ---


@pytest.mark.exhaustive
def test_an_exported_program_shows_the_operations_of_the_network_with_their_lines(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, x = vision("resnet18")().eval(), torch.rand(1, 3, 64, 64)
    torch.export.save(torch.export.export(network, (x,)), tmp_path / "net.pt2")
    loaded = load_model(str(tmp_path / "net.pt2"), options=FileOptions(trust=True))
    eager, exported = (
        [
            (row.label, row.source, row.inputs, row.activation.mean)
            for row in inspect(case, x, ops=True).rows
            if row.owner is not None
        ]
        for case in (network, loaded)
    )
    assert len(eager) == 9
    assert [(each[0], each[2]) for each in exported] == [(each[0], each[2]) for each in eager]
    assert [each[1] for each in exported][:8] == [each[1] for each in eager][:8]
    assert exported[8][1].startswith("resnet.py:")  # the line in `forward`, which calls what calls flatten
    assert [each[3] for each in exported] == pytest.approx([each[3] for each in eager], rel=1e-5)


class Mixed(nn.Module):
    """Calls one module by its `forward`, one as a module, and one never."""

    def __init__(self, calls: Callable[["Mixed", Tensor], Tensor]) -> None:
        super().__init__()
        self.ffn, self.called, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        return self.calls(self, self.called(x))

    def of_one(self, x: Tensor) -> Tensor:
        return x + self.ffn.forward(x)

    def of_a_list(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def under_no_grad(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.ffn.forward(x)
        return x + shift


def line_of(method: Callable[..., object], line: int) -> str:
    return f"test_operations.py:{method.__code__.co_firstlineno + line}"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("calls", "layers", "line"),
    [
        (Mixed.of_one, ["ffn"], line_of(Mixed.of_one, 1)),
        (Mixed.under_no_grad, ["ffn"], line_of(Mixed.under_no_grad, 2)),
        (Mixed.of_a_list, ["layers.0", "layers.1"], line_of(Mixed.of_a_list, 2)),
    ],
)
def test_a_module_that_is_called_by_its_forward_is_said_to_be_with_the_line(
    calls: Callable[[Mixed, Tensor], Tensor], layers: list[str], line: str, backward: bool
) -> None:
    network, inputs = Mixed(calls), torch.ones(2, 4)
    seen = (inspect_gradients if backward else inspect)(network, inputs, layers=["*"])
    reasons = {row.layer: row.reason for row in seen.uncalled}
    assert {name for name, reason in reasons.items() if "forward(…)" in reason} == {*layers}
    for name in layers:
        assert reasons[name] == f"called as {name}.forward(…) at {line}, which skips hooks: call {name}(…) instead"
    assert reasons["spare"] == "the forward pass did not call it in eval mode, or used its weight directly"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@pytest.mark.exhaustive  # torch traces it
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_network_that_calls_flex_attention_runs_and_has_its_rows() -> None:
    network, tokens = nn.Sequential(FlexAttention()), torch.randn(1, 16, 8)
    run = hookscope.activations(network, tokens, ops=True)
    assert run.warnings == ()
    assert run["0"].mean == pytest.approx(float(network(tokens).mean()), abs=1e-6)
    assert run["0:flatten"].shape == (1, 16, 8)
