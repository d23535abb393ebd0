# ruff: noqa: SLF001 - graphs of scripts are private to torch; where they are missing, operations are not seen
"""The operations in the graphs of TorchScript, and a copy of a graph that runs each of them from Python.

An operation becomes a function of TorchScript by itself, a copy of its nodes, so that the same operators run on the
same arguments. The copy of the graph calls those functions through an operator of ours; loops, conditions and
everything else stay with the interpreter of TorchScript.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hookscope.hooks.callers import label_of
from hookscope.models.scriptgraph import FORWARD, does_nothing, is_plain, names_of, returned, substitute, written_type
from hookscope.models.scriptsource import Origin, Origins

# What stands between the nodes of one operation.
_BETWEEN = frozenset(
    {"prim::ListConstruct", "prim::ListUnpack", "prim::NumToTensor", "prim::TupleConstruct", "prim::TupleIndex"}
)
# What is assigned to a subscript is made a tensor first.
_BETWEEN_ASSIGNED = frozenset({"prim::dtype", "prim::device", "aten::tensor"})
_CONSTANT = "prim::Constant"

# Returns that are tensors whatever is given: not those of operators on lists of anything, "t".
_TENSORS = re.compile(r"\(?(?:Tensor(?:\([^)]*\))?(?:\[\])?(?: \w+)?(?:, )?)+\)?")

# ATen's names where torch's functions are called otherwise.
_NAMES = {"numpy_T": "T", "slice": "getitem", "index": "getitem", "index_put_": "setitem"}
_SUBSCRIPTS = frozenset({"aten::select", "aten::slice", "aten::index", "aten::unsqueeze"})
_ASSIGNMENTS = frozenset({"aten::copy_", "aten::fill_", "aten::index_put_"})
# It may return a tensor that does not exist, which cannot pass through Python. `lift_fresh` marks constants.
_LEFT_ALONE = ("aten::_native_multi_head_attention", "aten::lift_fresh")


@dataclass(frozen=True, slots=True)
class ScriptOperation:
    """An operation of a script by itself.

    Attributes:
        name: As in labels.
        source: The line of the network's code that calls it, "net.py:14"; "" if the archive does not say.
        function: Runs it.
    """

    name: str
    source: str
    function: Any

    def __call__(self, *args: object) -> object:
        """Run it; what it raises is without TorchScript's report of where that was."""
        try:
            return self.function(*args)
        except (RuntimeError, torch.jit.Error) as error:
            raise RuntimeError(cause_of(error)) from error


def cause_of(error: Exception) -> str:
    """Return what the operator that failed said, out of TorchScript's report of where that was."""
    lines = str(error).strip().splitlines()
    starts = [index for index, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception): ", line)]
    if not starts:
        return str(error)
    return "\n".join([lines[starts[-1]].partition(": ")[2], *lines[starts[-1] + 1 :]]).strip()


@dataclass(slots=True)
class Observable:
    """Copies of a script's graphs that run their operations from Python, each made when it is first called.

    Attributes:
        origins: Where nodes of the script were written.
        functions: All functions and methods of the script, by qualified name.
        instances: The modules of each type, by its qualified name: (name, handle).
        with_torchs: Whether operations of torch's layers count: where nothing else is left of these.
        operator: Returns the name of the operator that calls an operation, given what that returns.
        operations: Those that have been found. Somebody must keep them.
        unseen: Names of layers, functions and types whose operations cannot be seen.
    """

    origins: Origins
    functions: Mapping[str, Any]
    instances: Mapping[str, list[tuple[str, Any]]]
    with_torchs: bool
    operator: Callable[[tuple[str, ...]], str]
    operations: list[ScriptOperation] = field(default_factory=list)
    unseen: dict[str, None] = field(default_factory=dict)
    _made: dict[tuple[str, str], Any] = field(default_factory=dict)

    def method(self, handle: Any, name: str) -> Any:
        """Return a function of module and arguments that does what a method does; None if there is none."""
        key = handle._type().qualified_name(), name
        if key not in self._made:
            try:
                self._made[key] = self._copy(handle._get_method(name).graph.copy(), self.instances.get(key[0], []))
            except (AttributeError, RuntimeError, TypeError):  # this torch has other graphs
                self._made[key] = None
                self.unseen.update((name or "(model)", None) for name, _ in self.instances.get(key[0], []))
        return self._made[key]

    def _copy(self, graph: Any, instances: list[tuple[str, Any]]) -> Any:
        forks = graph.findAllNodes("prim::fork", True)
        owners = self._inlined(graph)
        if graph.findAllNodes("aten::wait", True):  # what follows may run in any thread
            self.unseen.update((name or "(model)", None) for name, _ in instances)
            self.unseen.update(
                (name, None) for fork in forks for each in fork.inputs() for name in names_of(each, instances)
            )
            return None
        numbers = _numbers(graph)
        for block in list(_blocks(graph)):
            for nodes in _grouped(list(block.nodes()), self.origins):
                self._put(graph, nodes, numbers, owners)
        return torch._C._create_function_from_graph("forward", graph)

    def _inlined(self, graph: Any) -> dict[int, Any]:
        """Put the code of the network's own functions and methods in place of their calls.

        Calls of layers that are left in a graph are those that no hook can reach. Returns their values, by what is
        computed inside them.
        """
        owners: dict[int, Any] = {}
        left: set[Any] = set()
        while calls := [call for call in _calls(graph) if call not in left]:
            for call in calls:
                receiver, *given = call.inputs()
                name = receiver.type().annotation_str
                owner = owners.get(call.output().unique())
                if call.kind() == "prim::CallMethod":
                    if FORWARD.match(call.s("name")) and receiver.unique() != next(graph.inputs()).unique():
                        owner = receiver
                    name, given = f"{name}.{call.s('name')}", [receiver, *given]
                is_torchs = name.startswith("__torch__.torch.") or does_nothing(call)
                function = None if is_torchs else self.functions.get(name)
                if function is None:
                    left.add(call)
                    self.unseen.update({} if is_torchs else {name.removeprefix("__torch__."): None})
                    continue
                first = graph.create(_CONSTANT, []).output().unique()  # values are numbered as they are made
                graph.setInsertPoint(call)
                made = graph.insertGraph(function.graph, given)
                if owner is not None:
                    last = graph.create(_CONSTANT, []).output().unique()
                    owners.update(dict.fromkeys(range(first, last), owner))
                call.output().replaceAllUsesWith(made[0])
                call.destroy()
        return owners

    def _put(
        self, graph: Any, nodes: Sequence[tuple[Any, Origin]], numbers: set[int], owners: Mapping[int, Any]
    ) -> None:
        """Let Python run a group of nodes as one operation, or each that is one by itself."""
        found = [each for each in nodes if _computes(each[0], numbers) and not _is_put_in(*each)]
        if not found or (found[0][1].is_torchs and not self.with_torchs):
            return
        owner = owners.get(found[0][0].outputsAt(0).unique(), next(graph.inputs()))
        if len(found) > 1 and (name := _common_name(nodes)) and _is_closed(nodes):
            self._replace(graph, owner, [node for node, _ in nodes], name, nodes[0][1].source)
            return
        for node, origin in found:
            self._replace(graph, owner, [node], _own_name(node, origin, is_all=len(found) == 1), origin.source)

    def _replace(self, graph: Any, owner: Any, nodes: Sequence[Any], name: str, source: str) -> None:
        label = label_of(name)
        last = nodes[-1]
        if not label:
            return
        piece, arguments = _cut_out(nodes)
        outputs = [value.type() for value in last.outputs()]
        if not all(is_plain(kind) for kind in (*outputs, *(value.type() for value in arguments))):
            self.unseen[f"{label} at {source}" if source else label] = None
            return
        returns = returned(outputs[0]) if len(outputs) == 1 else tuple(map(written_type, outputs))
        self.operations.append(ScriptOperation(label, source, torch._C._create_function_from_graph(label, piece)))
        leading = [owner, len(self.operations) - 1]
        substitute(graph, last, returns, self.operator(returns), leading, arguments)
        for node in reversed(nodes[:-1]):
            node.destroy()


def _blocks(block: Any) -> Iterator[Any]:
    """Yield a graph and all blocks in it."""
    yield block
    for node in block.nodes():
        for inner in node.blocks():
            yield from _blocks(inner)


def _calls(graph: Any) -> list[Any]:
    return [*graph.findAllNodes("prim::CallMethod", True), *graph.findAllNodes("prim::CallFunction", True)]


def _numbers(graph: Any) -> set[int]:
    """Return the tensors that stand for whole numbers: tracing computes sizes in them."""
    found: set[int] = set()
    for block in _blocks(graph):
        for node in block.nodes():
            tensors = [value for value in node.inputs() if value.type().kind() == "TensorType"]
            known = [value.unique() in found for value in tensors if value.node().kind() != _CONSTANT]
            if node.kind() == "prim::NumToTensor" or (known and all(known) and node.kind().startswith("aten::")):
                found.update(value.unique() for value in node.outputs())
    return found


def _computes(node: Any, numbers: set[int]) -> bool:
    """Tell whether a node computes tensors."""
    kind = node.kind()
    outputs = list(node.outputs())
    if kind == "prim::CallFunction":
        name = node.inputsAt(0).type().annotation_str
        return name.startswith("__torch__.torch.") and any(_holds_tensor(value.type()) for value in outputs)
    if kind.startswith(("prim::", "hookscope::")) or kind in _LEFT_ALONE or not outputs:
        return False
    if any(value.unique() in numbers for value in outputs) or any(node.blocks()):
        return False
    if kind == "aten::detach" and node.inputsAt(0).node().kind() in (_CONSTANT, "aten::lift_fresh"):
        return False
    return _TENSORS.fullmatch(node.schema().rpartition(" -> ")[2]) is not None


def _is_put_in(node: Any, origin: Origin) -> bool:
    """Tell whether torch has added a node to the expression around it: what is assigned is made a tensor."""
    return node.kind() == "aten::tensor" and origin.source != "" and not (origin.expression or origin.frames)


def _holds_tensor(kind: Any) -> bool:
    return kind.kind() == "TensorType" or any(map(_holds_tensor, kind.containedTypes()))


def _grouped(nodes: Sequence[Any], origins: Origins) -> Iterator[list[tuple[Any, Origin]]]:
    """Yield nodes that follow each other and may be one operation: inside one function of torch's, or one subscript."""
    group: list[tuple[Any, Origin]] = []
    between: list[tuple[Any, Origin]] = []
    for node in nodes:
        if node.kind() == _CONSTANT:
            continue
        origin = origins.of(node)
        if group and _continues(group, node, origin):
            group += [*between, (node, origin)]
            between = []
        elif group and _may_stand_between(node, origin):
            between.append((node, origin))
        else:
            yield from (each for each in (group, *([pair] for pair in between)) if each)
            group, between = [(node, origin)], []
    yield from (each for each in (group, *([pair] for pair in between)) if each)


def _may_stand_between(node: Any, origin: Origin) -> bool:
    """Tell whether a node may belong to the operation around it: it makes numbers or lists, or torch has put it in."""
    if node.kind() in _BETWEEN_ASSIGNED:
        return not origin.expression
    makes_number = node.kind().startswith("aten::") and all(
        value.type().kind() == "IntType" for value in node.outputs()
    )
    return node.kind() in _BETWEEN or makes_number


def _continues(group: Sequence[tuple[Any, Origin]], node: Any, origin: Origin) -> bool:
    """Tell whether a node belongs to the operation of those before it."""
    first, begun = group[0]
    kinds = (first.kind(), node.kind())
    are_near = (begun.source, begun.is_torchs) == (origin.source, origin.is_torchs)
    if not are_near or not all(kind.startswith("aten::") for kind in kinds):
        return False
    if begun.frames and begun.function:  # another call on the same line begins as the first did
        return begun.function == origin.function and (kinds[0], begun.frames) != (kinds[1], origin.frames)
    last = group[-1][0]
    is_subscript = {kinds[0], last.kind()} <= _SUBSCRIPTS and begun.form in ("subscript", "") and begun.source != ""
    if not is_subscript or origin.function or node.inputsAt(0).node() != last:
        return False
    if kinds[1] in _ASSIGNMENTS:
        return origin.form in ("assignment", "")
    return kinds[1] in _SUBSCRIPTS and begun.expression == origin.expression


def _common_name(nodes: Sequence[tuple[Any, Origin]]) -> str:
    """Return the name of the operation that some nodes are together; "" if there is none."""
    kinds = [node.kind() for node, _ in nodes]
    if nodes[0][1].function:
        return nodes[0][1].function
    if kinds[-1] in _ASSIGNMENTS:
        return "setitem"
    is_subscript = nodes[0][1].form == "subscript" or {*kinds} & _SUBSCRIPTS != {"aten::unsqueeze"}
    return "getitem" if is_subscript else ""


def _own_name(node: Any, origin: Origin, *, is_all: bool) -> str:
    """Return the name of an operation that is one node; `is_all` says that its function does nothing else."""
    kind: str = node.kind().rpartition("::")[2]
    if node.kind() == "prim::CallFunction":
        return str(node.inputsAt(0).type().annotation_str).rpartition(".")[2]
    if origin.function and is_all:
        return origin.function
    if (kind == "select" and origin.form == "") or (kind in ("select", "unsqueeze") and origin.form == "subscript"):
        return "getitem"
    if kind == "_convolution":
        stride, transposed = node.inputsAt(3), node.inputsAt(6).toIValue()
        axes = len(list(stride.node().inputs())) or len(stride.toIValue() or ())
        return f"conv_transpose{axes}d" if transposed else f"conv{axes}d"
    return _NAMES.get(kind, kind)


def _is_closed(nodes: Sequence[tuple[Any, Origin]]) -> bool:
    """Tell whether only what the last of some nodes computes is used after them."""
    inside = [node for node, _ in nodes]
    return all(
        use.user in inside for node in inside[:-1] for value in node.outputs() for use in value.uses()
    ) and _holds_tensor(inside[-1].outputsAt(0).type())


def _cut_out(nodes: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return a graph of copies of some nodes, and the values that it is to be given; constants are inside it."""
    graph: Any = torch._C.Graph()
    known: dict[int, Any] = {}
    given: list[Any] = []

    def copied(value: Any) -> Any:
        if value.unique() not in known:
            if value.node().kind() == _CONSTANT:
                constant = graph.insertNode(graph.createClone(value.node(), copied))
                known[value.unique()] = constant.output()
            else:
                known[value.unique()] = graph.addInput()
                known[value.unique()].setType(value.type())
                given.append(value)
        return known[value.unique()]

    for node in nodes:
        for value in node.inputs():
            copied(value)
        clone = graph.insertNode(graph.createClone(node, copied))
        for value, copy in zip(node.outputs(), clone.outputs(), strict=True):
            known[value.unique()] = copy
    for value in nodes[-1].outputs():
        graph.registerOutput(known[value.unique()])
    if len(list(nodes[-1].outputs())) > 1:
        graph.makeMultiOutputIntoTuple()
    return graph, given
