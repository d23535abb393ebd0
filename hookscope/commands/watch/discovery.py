"""Find what a script trains: optimisers and networks among the living objects, and the parameters of a loss."""

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookscope.commands.watch.gradients import inner_optimizer, parameters_of
from hookscope.commands.watch.networks import GraphLeaves, setting_text
from hookscope.commands.watch.torch_calls import nodes_of
from hookscope.hooks.selection import unwrap
from hookscope.text import counted, in_words


def living() -> tuple[list[nn.Module], list[Optimizer]]:
    """Return the living modules and optimisers, the oldest first.

    Only `type` is used: on objects such as proxies, `isinstance` runs their code.
    """
    kinds: dict[type, int] = {}
    groups: tuple[list[nn.Module], list[Optimizer]] = ([], [])
    for obj in gc.get_objects():
        kind = type(obj)
        slot = kinds.get(kind)
        if slot is None:
            slot = kinds[kind] = 0 if issubclass(kind, nn.Module) else 1 if issubclass(kind, Optimizer) else 2
        if slot < 2 and ("_modules" if slot == 0 else "param_groups") in obj.__dict__:  # `__init__` of torch has run
            groups[slot].append(obj)
    return groups


def optimizers_among(living_optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimisers that have parameters, once each, without wrappers of optimisers."""
    inner = {id(optimizer): optimizer for optimizer in map(inner_optimizer, living_optimizers)}
    return [
        optimizer for optimizer in inner.values() if parameters_of(optimizer) and not isinstance(optimizer, GraphLeaves)
    ]


def networks_of(parameters: Iterable[Tensor], modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the smallest set of networks that holds the parameters; parameters outside modules are ignored.

    A network is a module that no other module contains: for a trained head, it is the network around the head. Of
    several that hold the same wanted parameters, the one with the fewest others is returned.
    """
    wanted = {id(parameter) for parameter in parameters}
    held = _held_by(wanted, modules)
    inside = {id(part) for module in modules for part in module._modules.values()}
    roots = [key for key in held if key not in inside]
    # A traced or compiled version of a network holds its parameters too: it comes last.
    roots.sort(key=lambda key: isinstance(held[key].module, torch.fx.GraphModule))
    networks: list[nn.Module] = []
    while wanted and roots:
        most = max(len(held[root].wanted & wanted) for root in roots)
        if not most:
            break
        best = [root for root in roots if len(held[root].wanted & wanted) == most]
        fewest = min(held[key].parameter_count for key in best)
        best = [key for key in best if held[key].parameter_count == fewest]
        owner = held[best[0]] if len(best) == 1 else _shared_by(best, held)
        networks.append(owner.module)
        wanted -= owner.wanted
    order = {id(module): position for position, module in enumerate(modules)}
    return sorted(networks, key=lambda network: order[id(network)])


@dataclass(frozen=True, slots=True)
class _Held:
    module: nn.Module
    wanted: frozenset[int]
    parameter_count: int


def _held_by(wanted: set[int], modules: Sequence[nn.Module]) -> dict[int, _Held]:
    above: dict[int, list[nn.Module]] = {}
    todo = []
    for module in modules:
        for child in module._modules.values():
            above.setdefault(id(child), []).append(module)
        if any(id(parameter) in wanted for parameter in module._parameters.values()):
            todo.append(module)
    held: dict[int, _Held] = {}
    while todo:
        module = todo.pop()
        if id(module) not in held:
            parameters = {id(parameter) for parameter in module.parameters()}
            held[id(module)] = _Held(module, frozenset(parameters & wanted), len(parameters))
            todo += above.get(id(module), ())
    return held


def _shared_by(roots: Sequence[int], held: Mapping[int, _Held]) -> _Held:
    """Return the network that several modules wrap, or the first of the modules if they share none."""
    parts = [{id(part) for part in held[root].module.modules()} for root in roots]
    for part in held[roots[0]].module.modules():
        owner = held.get(id(part))
        if owner is not None and owner.wanted == held[roots[0]].wanted and all(id(part) in inside for inside in parts):
            return owner
    return held[roots[0]]


def graph_of(loss: Tensor) -> tuple[list[Tensor], bool]:
    """Return the leaves of a loss's graph, only parameters if there are any, and whether compiled code uses a leaf.

    Where only the loss is compiled, the layers run as written.
    """
    leaves: list[Tensor] = []
    is_compiled = False
    for node in nodes_of(loss.grad_fn):
        if "CompiledFunction" in node.name():
            is_compiled |= any(hasattr(below, "variable") for below, _ in node.next_functions)
        leaf = getattr(node, "variable", None)
        leaves += [leaf] if isinstance(leaf, Tensor) else []
    parameters: list[Tensor] = [tensor for tensor in leaves if isinstance(tensor, nn.Parameter)]
    return parameters or leaves, is_compiled


def found_text(networks: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> str:
    """Return what was found: "ResNet (SGD, lr 0.1) and Discriminator (Adam, lr 0.0002)"."""
    groups: dict[str, list[str]] = {}
    rest = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    for network in networks:
        mine = {id(parameter) for parameter in network.parameters()}
        rest -= mine
        theirs = [
            optimizer
            for optimizer in optimizers
            if any(id(parameter) in mine for parameter in parameters_of(optimizer))
        ]
        groups.setdefault(_optimizers_text(theirs), []).append(type(unwrap(network)).__name__)
    if rest and not networks:
        groups[_optimizers_text(optimizers)] = [counted(len(rest), "parameter")]
    return in_words([f"{in_words(names)} ({theirs})" for theirs, names in groups.items()])


def _optimizers_text(optimizers: Sequence[Optimizer]) -> str:
    """Return the optimisers with their learning rates; equal ones are counted: "8 × SGD, lr 0.05"."""
    without = "no optimizer: loss and gradients only"
    counts = Counter(without if isinstance(one, GraphLeaves) else setting_text(one, "lr") for one in optimizers)
    return "; ".join(f"{count} × {text}" if count > 1 else text for text, count in counts.items())
