"""The watched networks, the names of their parameters, and the networks that are refused."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookscope.commands.watch.gradients import inner_optimizer, parameters_of
from hookscope.commands.watch.shards import is_sharded
from hookscope.errors import LayerNotFoundError, UsageError
from hookscope.hooks.selection import select_layers, unwrap
from hookscope.inspection.network import InspectedNetwork, inspected_network

Networks = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = Optimizer | Sequence[Optimizer]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WatchedNetwork:
    """One watched network.

    Attributes:
        prefix: Prefix of the names of its layers and parameters, "generator."; "" for a single network.
        wrapped: The module that was passed, with its wrappers.
        network: The module without the wrappers of `torch.compile` and DistributedDataParallel.
        compiled: Whether the network, or a part of it, runs compiled, where hooks do not fire.
    """

    prefix: str
    wrapped: nn.Module
    network: nn.Module
    patterns: tuple[str, ...]
    compiled: bool

    @property
    def name(self) -> str:
        """Name of the class."""
        return type(self.network).__name__

    def layers(self) -> dict[str, nn.Module]:
        """Return the layers to watch, by name, as the network is now."""
        try:
            return select_layers(self.network, self.patterns)
        except LayerNotFoundError:
            return {}

    def inspected(self) -> InspectedNetwork:
        """Return the modules of the network, as it is now."""
        return inspected_network(self.network)

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return the parameters by name; a tied parameter once."""
        return self.network.named_parameters(self.prefix.removesuffix("."))


def watched_networks(model: Networks, patterns: Sequence[str], *, sharded: bool = False) -> tuple[WatchedNetwork, ...]:
    """Return the networks that were passed, named if there are several; sharded networks need `sharded=True`.

    Raises:
        UsageError: If an argument is not a network, or cannot be watched, or if networks would share a name.
        LayerNotFoundError: If a pattern selects nothing in any of them.
    """
    named = _named(model)
    for network in named.values():
        _refuse(network, sharded=sharded)
    several = len(named) > 1 or isinstance(model, Mapping)
    prefixes = [f"{name}." if several and name else "" for name in named]
    watched = tuple(
        WatchedNetwork(prefix, module, unwrap(module), tuple(patterns), is_compiled(module))
        for prefix, module in zip(prefixes, named.values(), strict=True)
    )
    named_parts: dict[str, object] = {}
    for entry in watched:
        for name, part in chain(entry.network.named_modules(), entry.network.named_parameters()):
            full_name = f"{entry.prefix}{name}"
            if name and named_parts.setdefault(full_name, part) is not part:
                raise UsageError(f"'{full_name}' is a name in two of the networks: give them other keys.")
    if patterns:
        in_any([entry.network for entry in watched], lambda network: select_layers(network, patterns))
    return watched


def in_any(networks: Sequence[nn.Module], select: Callable[[nn.Module], Collection[T]]) -> list[Collection[T]]:
    """Select in each network; raise LayerNotFoundError if no network has a match."""
    selected: list[Collection[T]] = []
    failures = []
    for network in networks:
        try:
            selected.append(select(network))
        except LayerNotFoundError as error:
            selected.append(())
            failures.append(error)
    if failures and len(failures) == len(networks):
        raise failures[0]
    return selected


def is_compiled(network: nn.Module) -> bool:
    """Tell whether a network, or a part of it, runs compiled; TorchScript counts only as a whole network."""
    if isinstance(unwrap(network), ScriptModule):
        return True
    return any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in network.modules())


def watched_optimizers(optimizer: Optimizers, networks: Iterable[WatchedNetwork]) -> tuple[Optimizer, ...]:
    """Return the optimisers that were passed, without wrappers.

    Raises:
        UsageError: If an argument is not an optimiser, or has no parameter of the networks.
    """
    passed = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(passed, Sequence) or not passed or not all(isinstance(item, Optimizer) for item in passed):
        raise UsageError(
            f"optimizer={type(optimizer).__name__} is not a torch.optim.Optimizer: give one, or a list of several."
        )
    ids = {id(parameter) for network in networks for _, parameter in network.parameters()}
    unwrapped = tuple(inner_optimizer(item) for item in passed)
    for opt in unwrapped:
        if not any(id(parameter) in ids for parameter in parameters_of(opt)):
            raise UsageError(
                f"No parameter of the optimizer {type(opt).__name__} belongs to the network: give the network that it "
                "trains, and an optimizer that was made after the network was moved or replaced."
            )
    return unwrapped


def setting_text(optimizer: Optimizer, *names: str) -> str:
    """Return an optimiser with all settings, or `names`: "SGD, lr 0.01 to 0.1, momentum 0.9" if its groups differ."""
    if isinstance(optimizer, GraphLeaves):
        return "no optimizer"
    words = [type(optimizer).__name__]
    for name in names or optimizer.defaults:
        value = optimizer.defaults.get(name)
        # A schedule keeps the rate that it was given as "initial_lr".
        of_groups = [group.get(f"initial_{name}", group[name]) for group in optimizer.param_groups if name in group]
        if isinstance(value, bool):
            words += [name] if any(of_groups) else []
        elif of_groups and all(isinstance(number, int | float | Tensor) for number in of_groups):
            low, high = min(map(float, of_groups)), max(map(float, of_groups))
            words += [f"{name} {low:g}{f' to {high:g}' * (low < high)}"] if low or high or name == "lr" else []
        elif isinstance(value, tuple) and value and all(isinstance(number, int | float) for number in value):
            words.append(f"{name} {' '.join(f'{number:g}' for number in value)}")
    return ", ".join(words)


class GraphLeaves(Optimizer):
    """Replaces the optimiser of a script without one; its parameters are the leaves of the loss's graph."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change nothing; the hooks of the step read the gradients."""


class ParameterNames:
    """The names of all parameters; they are read again when an unknown parameter is asked for."""

    def __init__(self, networks: Sequence[WatchedNetwork], optimizers: Sequence[Optimizer]) -> None:
        """Read the networks."""
        self._networks = networks
        self._optimizers = optimizers
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # parameters of optimisers, alive so that no other tensor gets their `id`
        self.all: dict[str, nn.Parameter] = {}
        self.renew()

    def renew(self) -> None:
        """Read the networks again: parameters may have been added, or replaced."""
        every = [entry for network in self._networks for entry in network.parameters()]
        self._names = {id(parameter): name for name, parameter in reversed(every)}  # the first, if networks share it
        self.all = {name: parameter for name, parameter in every if self._names[id(parameter)] == name}
        self._kept = []
        for number, optimizer in enumerate(self._optimizers):
            prefix = f"optimizers[{number}]" if len(self._optimizers) > 1 else "optimizer"
            for group_number, group in enumerate(optimizer.param_groups):
                for position, parameter in enumerate(group["params"]):
                    name = f"{prefix}.param_groups[{group_number}][{position}]"
                    if isinstance(optimizer, GraphLeaves):
                        name = f"parameter {position}"
                    self._names.setdefault(id(parameter), name)
                    self._kept.append(parameter)

    def of_one(self, parameter: Tensor) -> str:
        """Return the name of a parameter; "" if it belongs to neither the networks nor the optimisers."""
        return self._names.get(id(parameter), "")

    def of(self, parameters: Sequence[Tensor]) -> tuple[str, ...]:
        """Return the names of parameters of the networks or optimisers."""
        try:
            return tuple(map(self._names.__getitem__, map(id, parameters)))
        except KeyError:
            self.renew()
            return tuple(self._names.get(id(parameter), "unknown parameter") for parameter in parameters)

    def in_order(self, names: Sequence[str]) -> list[str]:
        """Return names in the order of the networks; unknown names last."""
        order = {name: position for position, name in enumerate(self.all)}
        return sorted(names, key=lambda name: order.get(name, len(order)))

    def not_optimised(self) -> list[str]:
        """Return the trainable parameters that are in no watched optimiser."""
        held = {id(parameter) for optimizer in self._optimizers for parameter in parameters_of(optimizer)}
        return [name for name, tensor in self.all.items() if tensor.requires_grad and id(tensor) not in held]


def _named(model: Networks) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {type(model).__name__: model}
    if isinstance(model, Mapping):
        named = {str(name): module for name, module in model.items()}
    elif isinstance(model, Sequence) and not isinstance(model, str):
        kinds = [type(module).__name__ for module in model]
        named = {
            kind if kinds.count(kind) == 1 else f"{kind}[{kinds[:number].count(kind)}]": module
            for number, (kind, module) in enumerate(zip(kinds, model, strict=True))
        }
    else:
        named = {}
    if not named or not all(isinstance(module, nn.Module) for module in named.values()):
        raise UsageError(
            f"model={type(model).__name__} is not a network: give a torch.nn.Module, or a list or dict of them."
        )
    return named


def _refuse(network: nn.Module, *, sharded: bool) -> None:
    name = type(network).__name__
    for part in network.modules():
        if isinstance(part, nn.DataParallel):
            raise UsageError(
                f"{name} runs in nn.DataParallel, which copies the network to every device at each step: hooks would "
                "observe only the copies. Use DistributedDataParallel, or one device."
            )
        if type(part).__name__ in {"FullyShardedDataParallel", "DeepSpeedEngine"}:
            raise UsageError(
                f"{name} is sharded ({type(part).__name__}): one process has only a part of each parameter, so its "
                "norms would be wrong. Watch the training on one process."
            )
    for parameter_name, parameter in network.named_parameters():
        if is_lazy(parameter):
            raise UsageError(f"'{parameter_name}' of {name} is lazy: run the network once before watching it.")
        if not sharded and is_sharded([parameter]):
            raise UsageError(
                f"'{parameter_name}' of {name} is a DTensor: one process has only a part of it. Run the script with "
                "`hookscope watch`, which adds up the norms of all processes."
            )
