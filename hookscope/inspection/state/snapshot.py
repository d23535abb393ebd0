"""The state of a network at one moment, to compare with later and to go back to."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookscope.hooks.autograd import history_is_lost, is_leaf
from hookscope.hooks.memory import missing_memory
from hookscope.inspection.state.held_values import HeldValues
from hookscope.inspection.state.object_states import Contents, Problem, attempt, identical
from hookscope.inspection.state.own_code import has_own_code
from hookscope.inspection.state.parameter_writes import overwritten
from hookscope.inspection.state.reachable import reachable

# Parameters of networks with their own code, and tensors in plain attributes, are copied up to this many bytes in all;
# beyond that only those that code is seen to write to. Copying and comparing this much takes some two
# milliseconds.
_COPIED_BYTES = 2**23


class Snapshot:
    """What a network refers to and holds at one moment.

    Attributes:
        owners: Its modules, and objects that their attributes lead to.
        tensors: What may be written to, each once.
        leaves: Parameters, and other tensors that may have a gradient.
        histories: Those of the tensors that have a graph, with its last node and a copy that has it too.
        values: What the tensors hold.
    """

    def __init__(self, modules: Sequence[nn.Module], *, differentiates: bool = True) -> None:
        """Take a snapshot of a network.

        Args:
            modules: All of it, each once.
            differentiates: Whether a backward pass may run before the network is compared with the snapshot.
        """
        own_code = has_own_code(modules)
        self._found = reached = reachable(modules, closely=own_code)
        self._with_hooks = own_code  # those of modules are among what was found
        written = overwritten(reached.modules, own_code=own_code)
        stepped = [group for owner in reached.owners if isinstance(owner, Optimizer) for group in owner.param_groups]
        expected = written.tensors | {id(parameter) for group in stepped for parameter in group["params"]}
        # torch's own layers write to no parameters but the expected ones; code of the network's own may write to any.
        parameters = [parameter for parameter in reached.parameters.values() if own_code or id(parameter) in expected]
        self.tensors = tensors = [*reached.buffers.values(), *reached.tensors.values(), *parameters]
        self.owners: list[Any] = reached.owners + tensors if own_code else reached.owners
        with torch._C.DisableTorchFunction():
            self.leaves = [tensor for tensor in reached.tensors.values() if tensor.requires_grad and is_leaf(tensor)]
            # A forward pass of torch's layers changes nothing of a parameter that is noted of leaves. A backward pass
            # may, and so may code of the network's own.
            self.leaves += reached.parameters.values() if own_code or differentiates else ()
            self._attributes = [vars(owner) for owner in self.owners]
            self.histories = [*_histories(tensors)]
            self.note()
            copied = {*reached.buffers, *expected}
            # A module that casts itself in its forward pass, and back, casts its gradients too: they are held as well.
            gradients = {id(gradient): gradient for gradient in self._gradients if own_code and gradient is not None}
            if written.gradients:
                copied |= gradients.keys()
            tensors = [*({id(tensor): tensor for tensor in tensors} | gradients).values()]
            copied |= _affordable([tensor for tensor in tensors if id(tensor) not in copied])
        self.values = HeldValues(tensors, copied, gradients.keys() - copied if differentiates else frozenset())

    def note(self) -> None:
        """Keep what everything refers to now, as if the snapshot had been taken now; what tensors hold stays."""
        self._kinds = [*map(type, self.owners)]
        self._filled = [*filter(None, self._found.registers)]
        alike: defaultdict[type, list[Any]] = defaultdict(list)
        alike[dict] += self._attributes
        for register in self._filled:
            alike[type(register)].append(register)
        for kind, container in self._found.containers:
            alike[kind].append(container)
        with torch._C.DisableTorchFunction():
            self._required = [*map(attrgetter("requires_grad"), chain(self.tensors, self.leaves))]
            self._gradients = [*map(attrgetter("grad"), self.leaves)]
            self._functions = [*map(attrgetter("_backward_hooks"), self.leaves)]
            for hooks in filter(None, self._functions):
                alike[type(hooks)].append(hooks)
        self._contents = [Contents(kind, containers).note() for kind, containers in alike.items()]

    def note_hooks(self) -> None:
        """Do what `note` does where only hooks and gradients may have changed."""
        with torch._C.DisableTorchFunction():
            gradients, functions = [[*map(attrgetter(name), self.leaves)] for name in ("grad", "_backward_hooks")]
        if self._with_hooks or any(functions):
            self.note()
        else:
            self._gradients, self._functions = gradients, functions

    def changed(self) -> bool:
        """Tell whether anything is not as it was."""
        return (
            self._refers_to_others()
            or any(state.changed() for state in self._found.states)
            or self._changed_leaves()
            or self.values.changed()
        )

    def put_back(self) -> list[Problem]:
        """Put everything back; return what that failed with."""
        problems: list[Problem] = []
        if self._refers_to_others():
            problems += self._put_back_references()
        for state in self._found.states:
            problems += state.put_back()
        problems += self.values.put_back()
        problems += self._put_back_leaves() if self._changed_leaves() else ()
        return problems

    def _refers_to_others(self) -> bool:
        return (
            [*map(type, self.owners)] != self._kinds
            or not identical([*map(vars, self.owners)], self._attributes)
            or not identical([*filter(None, self._found.registers)], self._filled)
            or any(content.changed() for content in self._contents)
        )

    def _put_back_references(self) -> list[Problem]:
        problems: list[Problem] = []
        ids = {*self._found.parameters, *map(id, self.leaves)}
        for owner, kind, attributes in zip(self.owners, self._kinds, self._attributes, strict=True):
            if isinstance(owner, nn.Module):  # it may have registered parameters, which have got gradients
                for parameter in owner._parameters.values():
                    if parameter is not None and id(parameter) not in ids:
                        parameter.grad = None
            if type(owner) is not kind:
                problems += attempt(owner, partial(object.__setattr__, owner, "__class__", kind))
            if vars(owner) is not attributes:
                problems += attempt(owner, partial(object.__setattr__, owner, "__dict__", attributes))
        filled = {*map(id, self._filled)}
        for register in filter(None, self._found.registers):
            if id(register) not in filled:
                register.clear()
        for content in self._contents:
            problems += content.put_back()
        return problems

    def _changed_leaves(self) -> bool:
        with torch._C.DisableTorchFunction():
            return (
                [*map(attrgetter("requires_grad"), chain(self.tensors, self.leaves))] != self._required
                or not identical([*map(attrgetter("grad"), self.leaves)], self._gradients)
                or not identical([*map(attrgetter("_backward_hooks"), self.leaves)], self._functions)
                or any(history_is_lost(tensor) or tensor.grad_fn is not node for tensor, node, _ in self.histories)
            )

    def _put_back_leaves(self) -> Iterator[Problem]:
        with torch._C.DisableTorchFunction():
            for tensor, required in zip(chain(self.tensors, self.leaves), self._required, strict=True):
                if tensor.requires_grad != required:
                    yield from _require(tensor, required)
            for leaf, gradient, functions in zip(self.leaves, self._gradients, self._functions, strict=True):
                if leaf.grad is not gradient:
                    yield from _set_gradient(leaf, gradient)
                if leaf._backward_hooks is not functions:
                    yield from attempt(leaf, partial(setattr, leaf, "_backward_hooks", functions))
            for index, (tensor, node, copied) in enumerate(self.histories):
                if history_is_lost(tensor) or tensor.grad_fn is not node:
                    yield from _become(tensor, copied)
                    self.histories[index : index + 1] = _histories([tensor])  # `copied` is used up


def _require(tensor: Tensor, required: bool) -> list[Problem]:
    if is_leaf(tensor):
        return attempt(tensor, partial(tensor.requires_grad_, required))
    if tensor._base is None:  # it was written to with values that require a gradient
        return attempt(tensor, tensor.detach_)
    # A view cannot be detached.
    return attempt(tensor, tensor._base.detach_) or _become(tensor, tensor.data)


def _set_gradient(leaf: Tensor, gradient: Tensor | None) -> list[Problem]:
    problems = attempt(leaf, partial(setattr, leaf, "grad", gradient))
    if not problems or gradient is None:
        return problems
    # Autograd gives sparse parameters dense gradients, an assignment does not.
    return attempt(leaf, partial(setattr, leaf, "grad", None)) or attempt(
        leaf, partial(torch.autograd.backward, leaf, gradient)
    )


def _become(tensor: Tensor, other: Tensor) -> list[Problem]:
    """Give a tensor the graph of another one, or none, but leave it its memory."""
    return attempt(tensor, partial(setattr, other, "data", tensor.data)) or attempt(
        tensor, partial(torch.utils.swap_tensors, tensor, other)
    )


def _histories(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Any, Tensor]]:
    tensors = [tensor for tensor in tensors if tensor.requires_grad]  # what has a graph requires a gradient
    with torch.inference_mode(False), torch.enable_grad():
        for tensor in tensors:
            if not is_leaf(tensor) and not missing_memory(tensor):
                with suppress(Exception):  # a subclass may raise anything
                    yield tensor, tensor.grad_fn, tensor.clone()


def _affordable(tensors: Sequence[Tensor]) -> set[int]:
    """Return the ids of the tensors to copy although no code is seen to write to them.

    That is all of them, or if they are too large as many as fit that are no parameters, the smallest first.
    """
    if sum(map(_byte_count, tensors)) > _COPIED_BYTES:
        tensors = sorted((tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)), key=_byte_count)
    totals = accumulate(map(_byte_count, tensors))
    return {id(tensor) for tensor, total in zip(tensors, totals, strict=True) if total <= _COPIED_BYTES}


def _byte_count(tensor: Tensor) -> int:
    try:
        return tensor.nbytes
    except Exception:  # noqa: BLE001 - of nested tensors and some subclasses it is not known
        return 0
