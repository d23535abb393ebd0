"""Run a network and leave it as it was: modes, parameters, buffers, attributes, hooks, gradients, random states."""

import copy
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from hookscope.errors import ModelError
from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.interrupts import finished, interrupts_between_blocks
from hookscope.inspection.state.object_states import Problem
from hookscope.inspection.state.snapshot import Snapshot
from hookscope.models.construction import seed_generators
from hookscope.text import exception_line, printable

Mode = Literal["eval", "train"]


class RandomStates:
    """A snapshot of the random generators of torch (CPU and CUDA), Python and NumPy."""

    def __init__(self) -> None:
        """Save the current states."""
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def has_drawn(self, before: "RandomStates") -> bool:
        """Tell whether numbers were drawn since."""
        states = zip((self._torch, *self._cuda), (before._torch, *before._cuda), strict=False)
        return (
            not all(torch.equal(*state) for state in states)
            or self._python != before._python
            or not all(map(np.array_equal, self._numpy, before._numpy))
        )


@dataclass(slots=True)
class Preserved:
    """A point in a run to go back to: at first, its beginning.

    Attributes:
        kept_nodes: Last nodes of graphs whose tensors the network came with: its owner may still differentiate them.
    """

    kept_nodes: frozenset[object]
    _network: nn.Module
    _modules: Sequence[nn.Module]
    _snapshot: Snapshot
    _differentiates: bool
    _generators: RandomStates

    def mark(self) -> None:
        """Remember the network and random states as they are now, for `rewind`."""
        _reshard(self._modules)
        if self._snapshot.changed():
            self._snapshot = Snapshot(self._modules, differentiates=self._differentiates)
        self._generators = RandomStates()

    def mark_hooks(self) -> None:
        """Remember hooks that have been registered, and gradients that have been cleared, since the block began."""
        self._snapshot.note()

    def changed(self) -> bool:
        """Tell whether the network is not as it was at the mark."""
        return self._snapshot.changed()

    def rewind(self) -> None:
        """Go back to the mark: what runs next finds the same network and draws the same random numbers.

        Raises:
            ModelError: If something of the network cannot be put back.
        """
        _reshard(self._modules)
        problems = self._snapshot.put_back()
        if problems:
            raise _not_restored(self._network, problems)
        self._generators.enter()


@contextmanager
def preserved(
    network: nn.Module,
    seed: int,
    mode: Mode = "eval",
    modules: Iterable[nn.Module] | None = None,
    *,
    differentiates: bool = True,
) -> Iterator[Preserved]:
    """Put the network in a mode and seed random numbers for the block, and restore everything after it.

    Restored are, to the last bit and whatever the block raises:

    - each module's mode (not only the root's: a BatchNorm frozen in eval stays so). Modules that do more when their
      mode changes, as a layer that merges its LoRA adapter into its weight, are switched by their own `train` and
      `eval`;
    - which modules, parameters, buffers, hooks and attributes each module has, and the attributes of its class;
    - what buffers hold; in attributes, what tensors, NumPy arrays and random generators hold, and dicts, lists, sets
      and deques; attributes of objects that are dataclasses or optimisers, or of the package of a module's class;
    - parameters' `requires_grad`, `.grad` and values: of a network with its own code all values up to 8 MiB, else
      those that its code is seen to write to (`hookscope.inspection.state.own_code`);
    - the states of the random generators of torch, NumPy and Python, and whether gradients are enabled.

    Ctrl-C is held while this happens.

    Not restored are global variables and the inner state of other objects: iterators, files, locks, compiled code. If
    parameters take more than 8 MiB, those are not copied that the network's code is not seen to write to: a write to
    one is an error, and one through `.data` goes unnoticed. The same holds for large tensors and NumPy
    arrays in attributes.

    With mode "train" a network whose root is in train mode already stays as it is, with whatever parts its owner has
    frozen in eval mode. `modules` are all of the network's, once each, from a caller that has listed them already.
    `differentiates` is False for a block without a backward pass, which leaves less to compare.

    Raises:
        ModelError: If the network refuses the mode, or something could not be put back; everything else has been.
    """
    modules = [*(network.modules() if modules is None else modules)]
    modes = [attribute_of(module, "training") for module in modules]
    switches = not network.training if mode == "train" else any(modes)
    own_ways = switches and _have_own_ways(modules)
    random_states = RandomStates()
    start: Snapshot | None = None
    problems: list[Problem] = []
    raised: BaseException | None = None
    # An interrupt may come while an observer has switched the grad mode off without a `with` statement.
    with interrupts_between_blocks(), torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            if switches and not own_ways:
                network.train(mode == "train")
            _reshard(modules)
            start = Snapshot(modules, differentiates=differentiates)
            seed_generators(seed)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.manual_seed_all(seed)
            nodes = frozenset(node for _, node, _ in start.histories)
            state = Preserved(nodes, network, modules, copy.copy(start), differentiates, RandomStates())
            try:
                if own_ways:
                    _switch(network, mode, modules)
                    state.mark()
                yield state
            finally:
                if own_ways:
                    problems += finished(partial(_switch_back, modules, modes))
        except BaseException as error:
            raised = error
            raise
        finally:
            problems += finished(partial(_restored, modules, modes, start, random_states))
            if problems and raised is None:
                raise _not_restored(network, problems)
            if problems and raised is not None:
                raised.add_note(str(_not_restored(network, problems)))


def _restored(
    modules: Sequence[nn.Module], modes: Sequence[bool | None], start: Snapshot | None, random_states: RandomStates
) -> list[Problem]:
    random_states.enter()
    _reshard(modules)
    problems = start.put_back() if start else []
    for module, training in zip(modules, modes, strict=True):
        if training is not None and module.training != training:
            module.training = training
    return problems


def _reshard(modules: Sequence[nn.Module]) -> None:
    """Let modules of FSDP2 put their sharded parameters back in place of those gathered for a pass."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds: set[Any] = {*map(type, modules)} if fsdp is not None else set()
    if any(issubclass(kind, fsdp.FSDPModule) for kind in kinds):
        for module in modules:
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def _have_own_ways(modules: Sequence[nn.Module]) -> bool:
    """Tell whether a module does more than setting a flag when its mode changes."""
    kinds: set[type[nn.Module]] = {*map(type, modules)}
    return any(kind.train is not nn.Module.train or kind.eval is not nn.Module.eval for kind in kinds) or any(
        "train" in vars(module) or "eval" in vars(module) for module in modules
    )


@contextmanager
def _fixed_modes_left(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave the modes of exported programs as they are, in the block: a change of mode would raise there."""
    refusals = [
        (vars(module), name, vars(module)[name])
        for module in modules
        for name in ("train", "eval")
        if attribute_of(vars(module).get(name), "__module__") == "torch.export.exported_program"
    ]
    for attributes, name, _ in refusals:
        del attributes[name]
    try:
        yield
    finally:
        for attributes, name, refusal in refusals:
            attributes[name] = refusal


def _switch(network: nn.Module, mode: Mode, modules: Sequence[nn.Module]) -> None:
    try:
        with _fixed_modes_left(modules):
            network.train() if mode == "train" else network.eval()
    except Exception as error:
        kind = type(network).__name__
        raise ModelError(f"{kind} cannot be put into {mode} mode: {exception_line(error)}") from error


def _switch_back(modules: Sequence[nn.Module], modes: Sequence[bool | None]) -> list[Problem]:
    problems: list[Problem] = []
    with _fixed_modes_left(modules):
        for module, training in zip(modules, modes, strict=True):
            if training is not None and attribute_of(module, "training") != training:
                try:
                    module.train(training)
                except Exception as error:  # noqa: BLE001 - the model's code may raise anything
                    problems.append((module, f"its change of mode raised {exception_line(error)}"))
    return problems


def _not_restored(network: nn.Module, problems: Sequence[Problem]) -> ModelError:
    thing, reason = problems[0]
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    line = printable(reason.strip().partition("\n")[0]).rstrip(".")
    problem = f"{_name_of(network, thing)}: {line}{more}"
    return ModelError(f"The model could not be restored: {problem}. Rebuild it before using it.")


def _name_of(network: nn.Module, thing: object) -> str:
    """Return the dotted name of a part of the network or of a module's attribute; of other objects the class."""
    for name, module in network.named_modules():
        if module is thing:
            return repr(name) if name else "the model"
        for held in (module._parameters, module._buffers, vars(module)):
            for attribute, value in held.items():
                if value is thing:
                    return repr(f"{name}.{attribute}" if name else attribute)
    return f"an object of class {type(thing).__name__}"
