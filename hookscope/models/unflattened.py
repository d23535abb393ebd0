# ruff: noqa: SLF001 - what torch lays out is completed through the attributes it is made of
"""Exported programs as a tree of ordinary modules on which hooks fire.

torch can lay the flat graph of an exported program out into modules of the original names. But there each further call
of a layer is another module (`relu@1`), all classes are called InterpreterModule, and constant tensors stay behind when
the network moves to another device. Here these become calls of one module again, each with the graph that was recorded
for it.
"""

import copy
import importlib
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.unflatten import InterpreterModule, InterpreterModuleDispatcher, UnflattenedModule
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from hookscope.models.construction import replaced, seeded
from hookscope.models.module_stubs import MODAL, always_training, layer_class, set_sizes, some_layers

# A module, since torch.export has a function of the same name.
_torchs_own = importlib.import_module("torch.export.unflatten")

# Modules with a graph: layers, and blocks that ran under autocast or no_grad (GraphModules, without layers).
_CALLED = (InterpreterModule, InterpreterModuleDispatcher, torch.fx.GraphModule)


class ProgramLayer(InterpreterModule):
    """Stands for one layer of an exported program, whichever of its calls is being made."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph of the call at hand."""
        body: Any = self.__dict__.get("_body", self)
        return InterpreterModule.forward(body, *args, **kwargs)  # type: ignore[no-untyped-call] # torch's


class ProgramRoot(UnflattenedModule):
    """Stands for the whole program."""

    def process_forward_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments against the export's; discard what torch prints about another structure."""
        try:
            with redirect_stdout(io.StringIO()):
                return super().process_forward_inputs(*args, **kwargs)  # type: ignore[no-untyped-call] # torch's
        except TypeError as error:
            spec = self.module_call_graph[0].signature.in_spec
            shown = tree_unflatten(["…"] * spec.num_leaves, spec)
            raise TypeError(f"the program was exported for the arguments and keywords {shown}") from error


class _Call:
    """A further call of a layer, with its own graph; hooks see the layer."""

    def __init__(self, layer: nn.Module, body: nn.Module) -> None:
        self._layer, self._body = layer, body

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._layer.__dict__["_body"] = self._body
        try:
            return self._layer(*args, **kwargs)
        finally:
            del self._layer.__dict__["_body"]


def unflattened(
    program: ExportedProgram,
) -> tuple[nn.Module, tuple[str, ...], tuple[tuple[int, ...], bool] | None]:
    """Return modules that stand for the layers of an exported program, in eval mode, warnings, and its only input.

    The input is its shape, and whether the first size may vary; other variable sizes are as at the export. It is None
    if there are others.

    Layers that left no operator in the graph are there, without ever being called.
    """
    remarks = []
    root = _laid_out(program)
    if root is not None and _agrees(root, program):
        for module in list(root.modules()):
            _name_and_size(module)
        if absent := _absent(root):
            remarks.append(f"absent from the exported graph: {some_layers(absent)}.")
    else:
        root = program.module()
        for switch in ("train", "eval"):  # its mode is switched without complaint: it changes nothing
            vars(root).pop(switch, None)
        remarks.append(
            "only the output of the whole network and its parameters can be seen: torch cannot lay its layers out such "
            "that they compute the same."
        )
    if forced := sum(map(_is_forced, program.graph.nodes)):
        remarks.append(always_training(forced))
    root.eval()
    return root, tuple(remarks), _only_input(program)


def _only_input(program: ExportedProgram) -> tuple[tuple[int, ...], bool] | None:
    names = program.graph_signature.user_inputs
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    is_plain = program.call_spec.in_spec == tree_structure(((0,), {}))  # not in a dict or a list, nor by its name
    if not is_plain or len(values) != 1 or not isinstance(values[0], Tensor):
        return None
    sizes: tuple[Any, ...] = tuple(values[0].shape)
    shape = tuple(size if isinstance(size, int) else int(size.node.hint) for size in sizes)
    return shape, bool(sizes) and not isinstance(sizes[0], int)


def _laid_out(program: ExportedProgram) -> nn.Module | None:
    try:
        with _repeats_kept():
            root = torch.export.unflatten(program)
    except Exception:  # noqa: BLE001 - it asserts much about graphs, which people rewrite
        return None
    vars(root).pop("process_forward_inputs", None)  # an attribute of the object, before the one of `ProgramRoot`
    _keep_constants(root)
    _join_calls([root])
    return root


@contextmanager
def _repeats_kept() -> Iterator[None]:
    """Keep the graphs of all calls of a layer: torch 2.15 merges two that differ only in the calls inside them."""
    patchable = hasattr(_torchs_own, "_deduplicate_modules")
    with replaced(_torchs_own, "_deduplicate_modules", lambda _: {}) if patchable else nullcontext():
        yield


def _keep_constants(root: nn.Module) -> None:
    """Turn constant tensors into buffers: plain attributes would not move with the network."""
    for module in list(root.modules()):
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)


def _join_calls(bodies: Sequence[nn.Module]) -> None:
    """Merge the children of all calls of a layer (`bodies`) that stand for one layer, recursively."""
    calls: dict[str, dict[int, nn.Module]] = {}
    for body in bodies:
        for name, child in body._modules.items():
            layer, call = _layer_and_call(name)
            if child is not None:
                calls.setdefault(layer, {}).setdefault(call, child)
    children = {layer: _joined(layer, by_call, bodies) for layer, by_call in calls.items()}
    for body in bodies:
        vars(body)["_modules"] = children


def _joined(layer: str, by_call: Mapping[int, nn.Module], bodies: Sequence[nn.Module]) -> nn.Module:
    ordered = [by_call[call] for call in sorted(by_call)]
    kept = next((child for child in ordered if isinstance(child, InterpreterModule)), ordered[0])
    if isinstance(kept, InterpreterModule):
        kept.__class__ = ProgramLayer
    for call, child in by_call.items():
        if child is not kept:
            _share_tensors(kept, child)
        if call:
            runs = isinstance(kept, ProgramLayer) and isinstance(child, InterpreterModule)
            for body in bodies:
                vars(body)[f"{layer}@{call}"] = _Call(kept, child) if runs else kept
    together = dict.fromkeys([kept, *ordered])
    dispatched = [child._call_modules for child in together if isinstance(child, InterpreterModuleDispatcher)]
    _join_calls([*together, *itertools.chain.from_iterable(dispatched)])
    return kept


def _layer_and_call(name: str) -> tuple[str, int]:
    """Return ("relu", 1) for "relu@1", the second call of "relu"."""
    base, mark, call = name.rpartition("@")
    return (base, int(call)) if mark and call.isdigit() else (name, 0)


def _share_tensors(kept: nn.Module, other: nn.Module) -> None:
    for part in ("_parameters", "_buffers"):
        tensors = vars(kept)[part]
        tensors.update({name: tensor for name, tensor in vars(other)[part].items() if name not in tensors})
        vars(other)[part] = tensors
    vars(kept)["_non_persistent_buffers_set"] |= vars(other)["_non_persistent_buffers_set"]


def _agrees(root: nn.Module, program: ExportedProgram) -> bool:
    if program.example_inputs is None:
        return True
    args, kwargs = program.example_inputs
    before = {name: buffer.clone() for name, buffer in root.named_buffers()}
    results = []
    for network in (program.module(), root):
        with seeded(0), torch.no_grad():
            try:
                copied = copy.deepcopy((args, kwargs))
                results.append(tree_leaves(network(*copied[0], **copied[1])))
            except Exception:  # noqa: BLE001 - whatever it is: the program's own failure shows when it is run
                return network is not root
    with torch.no_grad():
        for name, buffer in root.named_buffers():
            buffer.copy_(before[name])
    return len(results[0]) == len(results[1]) and all(map(_equal, *results))


def _equal(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and torch.allclose(first, second, equal_nan=True)
    return type(first) is type(second)


def _name_and_size(module: nn.Module) -> None:
    written_as = vars(module).get("_ty")
    if not isinstance(written_as, str):
        return
    behaviour: Any = ProgramRoot if isinstance(module, UnflattenedModule) else type(module)
    first_call = module._call_modules[0] if isinstance(module, InterpreterModuleDispatcher) else module
    nodes = vars(first_call)["graph"].nodes
    # torch calls a container that has no graph, such as a ModuleList, by the class of what is in it.
    module.__class__ = layer_class(behaviour, written_as if nodes else "torch.nn.modules.module.Module")
    operators = {name: node for node in nodes if (name := _operator(node))}
    groups = None
    for name, node in operators.items():
        if name.startswith("conv"):
            position = 8 if name == "convolution" else 6
            groups = node.args[position] if len(node.args) > position else node.kwargs.get("groups", 1)
    permute = operators.get("permute")
    set_sizes(module, groups, None if permute is None else permute.args[1])


def _operator(node: Any) -> str:
    return str(node.target._schema.name).removeprefix("aten::") if hasattr(node.target, "_schema") else ""


def _is_forced(node: Any) -> bool:
    position = MODAL.get(_operator(node), len(node.args))
    return len(node.args) > position and node.args[position] is True


def _absent(root: nn.Module) -> list[str]:
    absent: list[str] = []
    for name, module in root.named_modules():
        alive = any(isinstance(part, _CALLED) for part in module.modules())
        if name and not alive and not any(name.startswith(f"{outer}.") for outer in absent):
            absent.append(name)
    return absent
