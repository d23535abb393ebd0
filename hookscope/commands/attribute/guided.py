"""Guided backpropagation: ReLUs pass no negative gradient on its way back to the picture.

The rule is applied to autograd's graph: every ReLU and ReLU6 leaves a node there, whether a module or a function calls
it, in any thread, or in an exported program. A hook on the node changes the gradient of that very call; other uses of
its input are left alone, and the forward pass runs as it always does. A ReLU inside TorchScript or a custom autograd
function cannot be seen: TorchScript is refused, custom functions are reported.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from hookscope.errors import UsageError
from hookscope.hooks.autograd import graph_nodes
from hookscope.hooks.callers import caller_of, operation_name, source_line
from hookscope.hooks.running import running_modules
from hookscope.parameters import arg
from hookscope.text import counted

# Names in labels, by the name of autograd's node without "Backward0". A smooth gate lets part of every negative value
# through, for which the rule is not defined.
_SMOOTH = {"Gelu": "GELU", "Silu": "SiLU", "Mish": "Mish"}
_OTHER = {"Celu": "CELU", "Elu": "ELU", "Glu": "GLU", "LeakyRelu": "LeakyReLU", "PreluKernel": "PReLU"}
_OTHER |= {"RreluWithNoise": "RReLU", "Hardshrink": "Hardshrink", "Hardsigmoid": "Hardsigmoid", "Tanh": "Tanh"}
_OTHER |= {"Hardswish": "Hardswish", "LogSigmoid": "LogSigmoid", "Sigmoid": "Sigmoid", "Softplus": "Softplus"}
_OTHER |= {"Softshrink": "Softshrink", "Threshold": "Threshold"}
# Limits that a node has saved: (lower, upper).
_LIMITS = {
    "Clamp": ("_saved_min", "_saved_max"),
    "ClampMin": ("_saved_min", ""),
    "Hardtanh": ("_saved_min_val", "_saved_max_val"),
}
# Operations that may overwrite what they are given, and are activations.
_IN_PLACE = frozenset(
    {"relu", "relu6", "clamp", "clip", "clamp_min", "hardtanh", "threshold", "sigmoid", "tanh", "elu", "selu", "celu"}
    | {"leaky_relu", "rrelu", "silu", "mish", "hardswish", "hardsigmoid", "gelu"}
)


def advice() -> str:
    """Return what to do where the rule cannot be used."""
    return f"Use {arg('method')} gradient, input-x-gradient or integrated-gradients."


_IN_SCRIPT = "guided-backprop cannot change a ReLU inside TorchScript."


class ActivationCalls(TorchFunctionMode):
    """Notes which module or operation made each node of autograd that belongs to an activation.

    An activation that overwrites a view has no node that the rule could be put on: autograd hides it in a node for
    the whole tensor. It is computed in a new tensor instead and copied into the view; the values are the same.
    """

    def __init__(self, network: nn.Module) -> None:
        """Name activations by the modules of a network; raise a UsageError if one is TorchScript."""
        super().__init__()
        if any(isinstance(module, torch.jit.ScriptModule) for module in network.modules()):
            raise UsageError(f"{_IN_SCRIPT} {advice()}")
        self.places: dict[Node, tuple[str, str]] = {}
        self._names = {id(module): name for name, module in network.named_modules()}

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and note where it was called if it is an activation."""
        kwargs = kwargs or {}
        is_view = _overwrites_a_view(func, args, kwargs)
        result = func(args[0].clone(), *args[1:], **kwargs) if is_view else func(*args, **kwargs)
        self._note(result, func)
        return args[0].copy_(result) if is_view else result

    def _note(self, result: object, func: Callable[..., Any]) -> None:
        node = result.grad_fn if isinstance(result, Tensor) else None
        if node is None or node in self.places or not _activation(node):
            return
        frame = sys._getframe(2)
        caller, running = caller_of(frame), running_modules(frame, self._names)
        name = running[0].name if running and running[0].name else "(model)"
        label = name if caller is None else f"{name}:{operation_name(func)}"
        self.places[node] = label, "" if caller is None else source_line(caller)


def _overwrites_a_view(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    name = operation_name(func)
    if name not in _IN_PLACE or not args or not isinstance(args[0], Tensor):
        return False
    written = getattr(func, "__name__", "").partition(".")[0].endswith("_") or kwargs.get("inplace") is True
    return (written or any(argument is True for argument in args[1:])) and args[0].requires_grad and args[0]._is_view()


@contextmanager
def ruled(score: Tensor, calls: ActivationCalls) -> Iterator[Mapping[str, str]]:
    """Apply the rule to every exact ReLU and ReLU6 that leads to a score; `calls` was active in the forward pass.

    With y = ReLU(x), R the gradient that arrives at y and f the derivative of the ReLU as torch has it, the ReLU passes
    on max(R, 0) · f(x) (Springenberg et al. 2015, Striving for simplicity, figure 1).

    Exact ReLUs are `relu`, `relu6`, `clamp(min=0)`, `clamp(0, 6)` and `hardtanh(0, 6)`, in place or not. One that is
    written with `maximum`, `where`, `threshold` or a product is not recognised.

    Yields:
        The other activations on the way from the score to the picture by label, "blocks.0.se:sigmoid", each with the
        reason why the rule left it alone.

    Raises:
        UsageError: If there is a GELU, SiLU (Swish) or Mish, on which the rule is another method; if there is no ReLU
            at all, or some code cannot be looked into.
    """
    nodes = sorted(graph_nodes(score), key=lambda node: node._sequence_nr())  # in the order of calls
    names = {node: _activation(node) or _written_out(node) for node in nodes}
    for node, name in names.items():
        if name in _SMOOTH.values():
            count = sum(other == name for other in names.values())
            raise UsageError(
                f"guided-backprop is defined for ReLU, and {calls.places.get(node, ('the network',))[0]!r} is {name} "
                f"({counted(count, 'call')} in all): its gate is smooth, so this would be another method. {advice()}"
            )
        if name == _SCRIPT:
            raise UsageError(f"{_IN_SCRIPT} {advice()}")
    relus = [node for node, name in names.items() if name in {"ReLU", "ReLU6"}]
    if not relus:
        raise UsageError(
            f"guided-backprop would be the plain gradient: no ReLU or ReLU6 leads to the score. {advice()}"
        )
    unchanged: dict[str, str] = {}
    for node, name in names.items():
        if name and name not in {"ReLU", "ReLU6"}:
            label, line = calls.places.get(node, (name, ""))
            inside = " function, whose inside is not seen" if isinstance(node, BackwardCFunction) else ""
            unchanged.setdefault(
                label, f"{name}{inside}{f', {line}' if line else ''}: no ReLU, so its gradient is kept"
            )
    handles: list[RemovableHandle] = []
    try:
        handles += [node.register_hook(_guided) for node in relus]
        yield unchanged
    finally:
        for handle in handles:
            handle.remove()


def _guided(grad_inputs: tuple[Tensor | None, ...], _outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    first = grad_inputs[0]
    return (None if first is None else first.clamp(min=0), *grad_inputs[1:])


_SCRIPT = "TorchScript"


def _activation(node: Node) -> str:
    if isinstance(node, BackwardCFunction):
        name = type(node).__name__.removesuffix("Backward")
        smooth = re.search("gelu|silu|swish|mish", name, re.IGNORECASE)
        kind = {"swish": "Silu"}.get(smooth[0].lower(), smooth[0].capitalize()) if smooth else ""
        return _SMOOTH.get(kind, f"custom autograd {name}")
    if "DifferentiableGraph" in node.name():
        return _SCRIPT
    name = re.sub(r"Backward\d*$", "", node.name())
    if name == "Relu":
        return "ReLU"
    if name in _LIMITS:
        lower, upper = (getattr(node, limit, None) for limit in _LIMITS[name])
        names: dict[tuple[object, object], str] = {(0, None): "ReLU", (0, 6): "ReLU6"}
        fixed = not isinstance(lower, Tensor) and not isinstance(upper, Tensor)
        return names.get((lower, upper), name) if fixed else name
    return _SMOOTH.get(name) or _OTHER.get(name, "")


def _written_out(node: Node) -> str:
    """Return "SiLU" for x · sigmoid(x), "Mish" for x · tanh(softplus(x)), and "" for others."""
    if not node.name().startswith("MulBackward"):
        return ""
    first, second = (node.next_functions + ((None, 0),) * 2)[:2]
    for gate, gated in ((first, second), (second, first)):
        names, below = [], gate
        while below[0] is not None and below[0].name().startswith(("Sigmoid", "Tanh", "Softplus")):
            names.append(below[0].name().partition("Backward")[0])
            below = below[0].next_functions[0]
        if names and below == gated and gated[0] is not None:
            return {("Sigmoid",): "SiLU", ("Tanh", "Softplus"): "Mish"}.get(tuple(names), "")
    return ""
