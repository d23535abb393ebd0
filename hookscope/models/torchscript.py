# ruff: noqa: SLF001 - graphs and handles of scripts are private to torch; `hookable` survives their absence
"""TorchScript as a tree of ordinary modules on which hooks fire.

torch refuses hooks on script modules, and a script runs without asking Python. So each call of a layer in the graphs of
a freshly loaded script is replaced by an operator of ours, which calls a module of the layer's name and class instead.
That module runs its hooks like any other, and in between the layer's own compiled method. Parameters, buffers and mode
are the script's own.

Operations inside a script are not seen. The graph interface is private to torch: where it is missing, and where the
graphs have no calls left (frozen, optimised), the network runs as it is, and only its output and its parameters can be
seen.
"""

import re
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from hookscope.models.module_stubs import MODAL, always_training, layer_class, set_sizes, some_layers

# A traced module has one method per call: forward, forward1, forward2; an overloaded one forward__0, forward__1.
_FORWARD = re.compile(r"forward(__)?\d*\Z")

# Types that come back from Python unchanged. Objects of scripted classes, futures and the like do not.
_PLAIN = {
    *("TensorType", "IntType", "FloatType", "ComplexType", "NumberType", "BoolType", "StringType", "NoneType"),
    *("DeviceObjType", "OptionalType", "UnionType", "ListType", "DictType", "TupleType"),
}

# How torch's schema language writes them. What is not here is returned as Any, and its type found by looking at it.
_WRITTEN = {
    "TensorType": "Tensor",
    "IntType": "int",
    "FloatType": "float",
    "BoolType": "bool",
    "StringType": "str",
    "OptionalType": "{}?",
    "ListType": "{}[]",
    "DictType": "Dict({}, {})",
}

_ATTENTION = "aten::_native_multi_head_attention"


class _Tensors(UserDict[str, Tensor]):
    """A live view of a script module's parameters or buffers: either side sees what the other assigns."""

    def __init__(self, view: Any) -> None:
        self.data = view  # torch's own attribute, which lacks methods of a dictionary

    def __iter__(self) -> Iterator[str]:
        return iter(self.data.keys())


class ScriptLayer(nn.Module):
    """Stands for one module of a script: hooks fire on it, and its forward is the script's."""

    def __init__(self, script: Any, taken: dict[int, tuple[Any, nn.Parameter]]) -> None:
        """Take over the tensors of a script module; `taken` has them by identity, so that tied ones stay tied."""
        handle = script._c
        self.__dict__["_script"] = handle
        self.__dict__["_method"] = "forward"
        mode = self.training
        nn.Module.__init__(self)  # not super's: a borrowed class would make parameters of its own
        self.training = mode
        for name, tensor in script._parameters.items():
            made = taken.setdefault(id(tensor), (tensor, nn.Parameter(tensor.detach(), tensor.requires_grad)))
            handle.setattr(name, made[1])
        self.__dict__["_parameters"] = _Tensors(script._parameters)
        self.__dict__["_buffers"] = _Tensors(script._buffers)

    @property
    def training(self) -> bool:
        """The script's own mode. A frozen one has none, and evaluates."""
        handle = self.__dict__["_script"]
        return bool(handle.hasattr("training") and handle.getattr("training"))

    @training.setter
    def training(self, mode: bool) -> None:
        handle = self.__dict__["_script"]
        if handle.hasattr("training"):
            handle.setattr("training", mode)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the script's method, as written: torch would fuse and rearrange it after the first runs."""
        method = self.__dict__["_script"]._get_method(self.__dict__["_method"])
        try:
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined] # documented all the same
                return method(*args, **kwargs)
        except BaseException as error:
            if not _raised and isinstance(error, RuntimeError | torch.jit.Error):
                raise RuntimeError(_cause_of(error)) from error
            if not _raised:
                raise
        raise _raised.pop()  # here, where the interpreter's report does not become its context


_layers: WeakValueDictionary[Any, ScriptLayer] = WeakValueDictionary()
"""Layers by the handles of their script modules, whose hash and equality are those of the object."""

_raised: list[BaseException] = []
"""The exception of Python code called by a running script; the interpreter of scripts would turn it into text."""

_operator_numbers = count()  # one operator for each way of returning


def hookable(load: Callable[[], Any]) -> tuple[nn.Module, tuple[str, ...]]:
    """Return modules that stand for those of a script and run it with their hooks, and warnings.

    A list or dictionary that a layer takes or returns is copied on the way; where a layer changes one it was given, the
    call is left alone. `load` loads the script, a `RecursiveScriptModule` that has not run yet: its graphs are changed.
    It is called again if the graphs cannot be changed, or if inspecting them would freeze them.
    """
    script = load()
    try:
        plan = _plan_for(script, cache(load))
        for call in plan.calls:
            _reroute(*call, _operator(call[2]))
        for graph, node in plan.attentions:
            _define_weights(graph, node)
        limit = "" if plan.calls or _is_one_layer(script) else "its code does not say where its layers are called"
    except (AttributeError, RuntimeError, TypeError):  # this torch has other graphs, and some may be half changed
        script, plan, limit = load(), _Plan(), "this version of torch does not let hooks in"
    root = _layer(script, {}, {})
    remarks = []
    if limit:
        remarks.append(f"only the output of the whole network and its parameters can be seen: {limit}.")
    names = [name for name, _ in script.named_modules()]
    if skipped := [name for name in names if name in plan.skipped]:
        reason = "what they take or return cannot pass through Python."
        remarks.append(f"no hook can reach {some_layers(skipped)}: {reason}")
    if passed := [name for name in names if name in plan.traced_away]:
        remarks.append(
            f"tracing kept nothing of {some_layers(passed)}: most likely they return their inputs unchanged."
        )
    if plan.forced:
        remarks.append(always_training(plan.forced))
    return root, tuple(remarks)


@cache
def _library() -> torch.library.Library:
    return torch.library.Library("hookscope", "FRAGMENT")  # type: ignore[no-untyped-call]


@cache
def _operator(returns: tuple[str, ...]) -> str:
    name = f"call_{next(_operator_numbers)}"
    written = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    # Conservative: it may do anything, so torch neither drops nor moves nor merges it.
    schema = f"{name}(Any layer, str method, Any arguments) -> {written}"
    _library().define(schema, alias_analysis="CONSERVATIVE")  # type: ignore[no-untyped-call]
    _library().impl(name, _call, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    return f"hookscope::{name}"


def _call(handle: Any, method: str, arguments: tuple[object, ...]) -> object:
    layer = _layers[handle]
    layer.__dict__["_method"] = method
    try:
        return layer(*arguments)
    except BaseException as error:
        _raised[:] = [error]
        raise
    finally:
        layer.__dict__["_method"] = "forward"


def _layer(script: Any, cached: dict[Any, ScriptLayer], taken: dict[int, tuple[Any, nn.Parameter]]) -> ScriptLayer:
    handle = script._c
    if handle not in cached:
        made: Any = layer_class(ScriptLayer, _python_name(script))(script, taken)
        cached[handle] = _layers[handle] = made
        for name, child in script._modules.items():
            made._modules[name] = _layer(child, cached, taken)
        set_sizes(made, _groups(script), _permutation(script))
    return cached[handle]


def _python_name(script: Any) -> str:
    """Return the dotted name of the class: "__torch__.torch.nn.modules.conv.___torch_mangle_3.Conv2d" without marks."""
    parts = script._c._type().qualified_name().split(".")
    return ".".join(part for part in parts if part != "__torch__" and not part.startswith("___torch_mangle_"))


def _cause_of(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    starts = [index for index, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception): ", line)]
    if not starts:
        return str(error)
    return "\n".join([lines[starts[-1]].partition(": ")[2], *lines[starts[-1] + 1 :]]).strip()


def _is_one_layer(script: Any) -> bool:
    """Tell whether a script is a single layer. A frozen script has no layers inside either, but lacks `training`."""
    return not len(script._modules) and bool(script._c.hasattr("training"))


@dataclass(slots=True)
class _Plan:
    """The changes to the graphs of a script, and the calls that stay as they are.

    `calls` will go through Python: (graph, node, types that the operator in its place returns, in the schema language,
    one for each item of a longer tuple). `skipped` are the names of modules with a call that cannot, `traced_away` of
    modules whose call tracing has emptied. `forced` counts operators in training mode; `attentions` are fused.
    """

    calls: list[tuple[Any, Any, tuple[str, ...]]] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    traced_away: set[str] = field(default_factory=set)
    forced: int = 0
    attentions: list[tuple[Any, Any]] = field(default_factory=list)


def _plan_for(script: Any, twin: Callable[[], Any]) -> _Plan:
    owners: dict[str, list[tuple[str, Any]]] = {}
    for name, module in script.named_modules():
        owners.setdefault(module._c._type().qualified_name(), []).append((name, module._c))
    plan = _Plan()
    for instances in owners.values():
        handle = instances[0][1]
        for graph in [handle._get_method(method).graph for method in handle._method_names()]:
            plan.forced += sum(map(_is_forced, graph.findAllNodes("prim::Constant", True)))
            plan.attentions += [(graph, node) for node in graph.findAllNodes(_ATTENTION, True)]
            for node in graph.findAllNodes("prim::CallMethod", True):
                if not _FORWARD.match(node.s("name")) or node.inputsAt(0).unique() == next(graph.inputs()).unique():
                    continue
                if _does_nothing(node):
                    plan.traced_away.update(_submodule_names(node.inputsAt(0), instances))
                elif _can_run_in_python(node, owners, twin):
                    plan.calls.append((graph, node, _return_types(node.output().type())))
                else:
                    plan.skipped.update(_submodule_names(node.inputsAt(0), instances))
            for node in graph.findAllNodes("prim::fork", True):  # runs what it is given in a separate thread
                for value in node.inputs():
                    plan.skipped.update(_submodule_names(value, instances))
    return plan


def _does_nothing(call: Any) -> bool:
    """Tell whether a call takes and returns nothing: tracing leaves this for a layer that returns its input."""
    return len(list(call.inputs())) == 1 and call.output().type().kind() == "NoneType"


def _submodule_names(value: Any, instances: list[tuple[str, Any]]) -> list[str]:
    path: list[str] = []
    while value.node().kind() == "prim::GetAttr" and value.type().kind() in ("ClassType", "InterfaceType"):
        path.insert(0, value.node().s("name"))
        value = value.node().inputsAt(0)
    if not path or value.node().kind() != "prim::Param":
        return []
    return [".".join([name, *path] if name else path) for name, _ in instances]


def _is_forced(constant: Any) -> bool:
    if constant.output().toIValue() is not True:
        return False
    return any(MODAL.get(use.user.kind().removeprefix("aten::")) == use.offset for use in constant.output().uses())


def _can_run_in_python(call: Any, owners: dict[str, list[tuple[str, Any]]], twin: Callable[[], Any]) -> bool:
    receiver, *arguments = call.inputs()
    result = call.output().type()
    if not all(_is_plain(value.type()) for value in (*arguments, call.output())):
        return False
    if "Any" in _return_types(result) and _holds_container(result):  # an empty one does not show its type
        return False
    if not any(_holds_container(value.type()) for value in arguments):
        return True
    instances = owners.get(receiver.type().qualified_name()) if receiver.type().kind() == "ClassType" else None
    if instances is None:  # a module interface: what runs is not known
        return False
    graph = dict(twin().named_modules())[instances[0][0]]._c._get_method(call.s("name")).graph
    torch._C._jit_pass_inline(graph)  # makes torch keep the graphs of what it inlines, hence the twin
    return not _overwrites_containers(graph)


def _overwrites_containers(graph: Any) -> bool:
    """Tell whether a graph changes a list or dictionary among its arguments: through Python it would get a copy."""
    aliases = graph.alias_db()
    _, *arguments = graph.inputs()
    containers = [value for value in arguments if _holds_container(value.type())]
    changed = [value for value in _values(graph) if _is_container(value.type()) and aliases.has_writers(value)]
    nested = [value for value in containers if any(map(_holds_container, value.type().containedTypes()))]
    return any(aliases.has_writers(value) for value in containers) or any(
        aliases.may_contain_alias(value, other) for value in nested for other in changed
    )


def _values(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield from node.outputs()
        for inner in node.blocks():
            yield from _values(inner)


def _is_container(kind: Any) -> bool:
    return kind.kind() in ("ListType", "DictType")


def _holds_container(kind: Any) -> bool:
    return _is_container(kind) or any(map(_holds_container, kind.containedTypes()))


def _is_plain(kind: Any) -> bool:
    return kind.kind() in _PLAIN and all(map(_is_plain, kind.containedTypes()))


def _return_types(kind: Any) -> tuple[str, ...]:
    """Return the schema types of an operator's returns: a call's tuple of several items becomes several returns."""
    items = kind.containedTypes() if kind.kind() == "TupleType" else []
    return tuple(map(_written_type, items)) if len(items) > 1 else (_written_type(kind),)


def _written_type(kind: Any) -> str:
    inner = [_written_type(part) for part in kind.containedTypes()]
    if kind.kind() == "TupleType" and len(inner) > 1:
        pattern: str | None = f"({', '.join(['{}'] * len(inner))})"
    else:
        pattern = _WRITTEN.get(kind.kind())
    return "Any" if pattern is None or "Any" in inner else pattern.format(*inner)


def _reroute(graph: Any, node: Any, returns: tuple[str, ...], operator: str) -> None:
    """Replace a call by an operator that takes module, method and arguments; `returns` are as in `_Plan.calls`."""

    def insert(kind: str, inputs: list[Any], count: int = 1) -> Any:
        made = graph.create(kind, inputs, count)
        made.copyMetadata(node)
        made.insertBefore(node)
        return made

    receiver, *arguments = node.inputs()
    method = insert("prim::Constant", [])
    method.s_("value", node.s("name"))
    method.output().setType(torch._C.StringType.get())
    packed = insert("prim::TupleConstruct", arguments)
    packed.output().setType(torch._C.TupleType([value.type() for value in arguments]))
    kind = node.output().type()
    items = kind.containedTypes() if len(returns) > 1 else [kind]
    routed = insert(operator, [receiver, method.output(), packed.output()], len(items))
    values = []
    for value, item, written in zip(routed.outputs(), items, returns, strict=True):
        if written == "Any":
            value.setType(torch._C.AnyType.get())
            cast = insert("prim::unchecked_cast", [value]).output()
        else:
            cast = value
        cast.setType(item)
        values.append(cast)
    (result,) = values if len(values) == 1 else [insert("prim::TupleConstruct", values).output()]
    result.setType(kind)
    node.output().replaceAllUsesWith(result)
    node.destroy()


def _define_weights(graph: Any, node: Any) -> None:
    """Let fused attention return None in place of weights that the script does not ask for.

    The weights are then an undefined tensor, which cannot pass to Python. (Without a script, Python gets None.)
    """
    weights, wanted = node.outputsAt(1), node.inputsAt(10)
    choice = graph.create("prim::If", [wanted], 1)
    choice.insertAfter(node)
    choice.addBlock().registerOutput(weights)
    otherwise = choice.addBlock()
    nothing = otherwise.addNode("prim::Constant", []).output()
    nothing.setType(torch._C.NoneType.get())
    otherwise.registerOutput(nothing)
    choice.output().setType(torch._C.OptionalType(weights.type()))
    weights.replaceAllUsesAfterNodeWith(choice, choice.output())
    for use in choice.output().uses():
        if use.user.kind() == "prim::TupleConstruct":
            use.user.output().setType(torch._C.TupleType([value.type() for value in use.user.inputs()]))


def _groups(script: Any) -> int | None:
    """Return the group count of a convolution: an attribute if it was scripted, a constant in its graph if traced."""
    count = getattr(script, "groups", None)
    if count is None:
        count = next((node.inputsAt(8).toIValue() for node in _forward_nodes(script, "aten::_convolution")), None)
    return count if isinstance(count, int) else None


def _permutation(script: Any) -> list[int] | None:
    """Return the order of axes of a permuting layer: an attribute if it was scripted, else from its graph."""
    order = getattr(script, "dims", None)
    for node in _forward_nodes(script, "aten::permute") if order is None else ():
        order = [value.toIValue() for value in node.inputsAt(1).node().inputs()]
    return order if isinstance(order, list) and all(isinstance(axis, int) for axis in order) else None


def _forward_nodes(script: Any, kind: str) -> list[Any]:
    has_forward = script._c._has_method("forward")
    return script._c._get_method("forward").graph.findAllNodes(kind, True) if has_forward else []
