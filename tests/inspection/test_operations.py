"""Operations over whole networks, held against graphs that torch.fx traces and against autograd."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import timm
import torch
from torch import Tensor, fx, nn

from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.patterns import parse_operation_pattern
from hookscope.hooks.pytree import tensors_in
from tests.networks import TORCHVISION

EVERYTHING = (parse_operation_pattern("op:*"),)

# Python's operators, which the graph holds as they stand in the code, under torch's names.
OPERATORS: dict[Any, str] = {
    operator.add: "add",
    operator.iadd: "add",
    operator.sub: "sub",
    operator.isub: "sub",
    operator.mul: "mul",
    operator.imul: "mul",
    operator.truediv: "div",
    operator.matmul: "matmul",
    operator.neg: "neg",
    operator.pow: "pow",
    operator.getitem: "getitem",
    operator.setitem: "setitem",
}


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
            name = n.target if isinstance(n.target, str) else OPERATORS.get(n.target) or n.target.__name__
            self.seen.append(Traced(owner, name.strip("_"), [tensor.detach().clone() for tensor in tensors]))
        return result


def rows_of(network: nn.Module, x: Tensor) -> tuple[Any, list[Traced]]:
    with capture(network, {}, lambda _call, _slot, t: t.clone(), operations=OperationChoice(EVERYTHING)) as captured:
        output = network(x)
    calls: dict[tuple[str, int], Traced] = {}
    for seen in captured.observations:
        assert seen.operation is not None
        new = Traced(seen.operation.owner, seen.operation.name, [])
        calls.setdefault((seen.layer, seen.call), new).tensors.append(seen.value)  # type: ignore[attr-defined]
    return output, [*calls.values()]


# What torch.fx traces without changing what is called: it keeps fx-wrapped functions of torchvision as one call, and
# computes at once what depends on no input, as the attention masks of Swin do.
FX_TORCHVISION = ("resnet18", "resnext50_32x4d", "densenet121", "mobilenet_v2", "mobilenet_v3_small", "googlenet")
FX_TORCHVISION += ("shufflenet_v2_x0_5", "squeezenet1_1", "inception_v3", "mnasnet0_5", "regnet_y_400mf", "vit")
FX_TIMM = {
    "cait_xxs24_224": 224,
    "coat_lite_tiny": 224,
    "convnext_atto": 64,
    "dla34": 64,
    "dpn48b": 64,
    "eca_botnext26ts_256": 256,
    "edgenext_xx_small": 64,
    "fastvit_t8": 64,
    "fbnetc_100": 64,
    "ghostnet_050": 64,
    "gmlp_ti16_224": 224,
    "halonet26t": 256,
    "hardcorenas_a": 64,
    "hrnet_w18_small": 64,
    "inception_next_atto": 64,
    "lambda_resnet26t": 256,
    "lcnet_035": 64,
    "mixer_s32_224": 224,
    "mobilenetv3_small_050": 64,
    "pit_ti_224": 224,
    "poolformer_s12": 64,
    "regnetx_002": 64,
    "repvgg_a0": 64,
    "res2net50_14w_8s": 64,
    "resmlp_12_224": 224,
    "resnet10t": 64,
    "resnext26ts": 64,
    "sebotnet33ts_256": 256,
    "selecsls42": 64,
    "tinynet_e": 64,
    "tnt_s_patch16_224": 224,
    "visformer_tiny": 224,
    "vit_tiny_patch16_224": 224,
    "vovnet39a": 64,
    "xcit_nano_12_p16_224": 224,
}
BUILDERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{name: (TORCHVISION[name].build, 112 if name == "vit" else 96) for name in FX_TORCHVISION},
    **{f"timm {name}": (lambda name=name: timm.create_model(name), size) for name, size in FX_TIMM.items()},
}


@pytest.mark.parametrize("name", BUILDERS)
def test_operations_are_those_of_the_traced_graph_in_order_with_the_same_values(name: str) -> None:
    build, size = BUILDERS[name]
    torch.manual_seed(0)
    network, x = build().eval(), torch.rand(1, 3, size, size)
    with torch.no_grad():
        expected = network(x)
        output, found = rows_of(network, x)
        graph = Recorder(fx.symbolic_trace(network))
        graph.run(x)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tensors_in(output), tensors_in(expected), strict=True))
    assert [each[:2] for each in found] == [each[:2] for each in graph.seen]
    for ours, theirs in zip(found, graph.seen, strict=True):
        assert len(ours.tensors) == len(theirs.tensors), ours.owner
        assert all(torch.equal(a, b) for a, b in zip(ours.tensors, theirs.tensors, strict=True)), ours[:2]
