"""Run a network once with all its modules hooked: in which order they finish, and the shapes they take and return."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType

import torch
from torch import Tensor, nn

from hookscope.hooks.callers import code_of, operator_around, source_line, whose_code
from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.observed import ModuleCall, Operation, physical_shape, shape_of
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.selection import module_index
from hookscope.inputs.batches import Batch, copied, copy_of
from hookscope.inspection.failures import locate, reraise_internal
from hookscope.inspection.network import BatchQueue
from hookscope.inspection.state.preservation import preserved
from hookscope.results.network import Failure


@dataclass(slots=True)
class FirstCall:
    """Shapes of the first call of a module or an operation, and how often it was called; `operation` as observed."""

    operation: Operation | None
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: list[tuple[int, ...]]
    call_count: int


def execution_order(network: nn.Module, queue: BatchQueue) -> list[str]:
    """Return the names of all modules that run, in the order in which they first finish.

    The next batch is tried; if the model raises and inputs may be left out, so are those after it. If it raises on all,
    the longest order is returned. No batch leaves the queue.
    """
    longest: list[str] = []
    ahead = 0
    while (batch := queue.peek(ahead)) is not None:
        calls, failure = first_calls(network, batch.args, batch.kwargs)
        if failure is None or queue.on_error is None:
            return list(calls)
        longest = max(longest, list(calls), key=len)
        ahead += 1
    return longest


def first_calls(
    network: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], operations: OperationChoice | None = None
) -> tuple[dict[str, FirstCall], Failure | None]:
    """Run the network once; return the shapes its modules took and returned, in the order in which they first finished.

    Operations are among them, if some are chosen. If the network raises, the calls are those that had finished, and the
    failure has the place.
    """

    def shapes(call: ModuleCall, _slot: str, tensor: Tensor) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        return tuple(tuple(physical_shape(argument)) for _, argument in call.inputs), tuple(shape_of(tensor))

    failure = None
    modules, _ = module_index(network)
    with preserved(network, seed=0), capture(network, modules, shapes, operations=operations) as captured:
        try:
            with torch.no_grad():
                network(*copied(tuple(args)), **copied(dict(kwargs)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's code may raise anything
            reraise_internal(error)
            failure = locate(modules, error)
    calls: dict[str, FirstCall] = {}
    for seen in captured.observations:
        inputs, output = seen.value or ((), ())
        first_call = calls.setdefault(seen.layer, FirstCall(seen.operation, inputs, [], 0))
        first_call.call_count = max(first_call.call_count, seen.call + 1)
        if seen.call == 0 and seen.value is not None:
            first_call.output_shapes.append(output)
    return calls, failure


def calls_in_operators(network: nn.Module, modules: Mapping[str, nn.Module], batch: Batch) -> dict[str, str]:
    """Find modules that run inside operators that torch traces; return these by module, such as "cond at net.py:14".

    It takes a pass without gradients, in which the operators run as written.
    """
    places: dict[str, str] = {}

    def note(call: ModuleCall, _slot: str, _tensor: Tensor) -> None:
        operator = operator_around(sys._getframe(1))
        if operator is not None:
            places.setdefault(call.layer, operator.place)

    with preserved(network, seed=0), capture(network, modules, note):
        _run_again(network, batch)
    return places


def calls_of_forward(modules: Mapping[str, nn.Module], silent: Mapping[str, nn.Module], batch: Batch) -> dict[str, str]:
    """Find `silent` modules that the network calls as `.forward(…)`, which skips their hooks; return lines by module.

    A line is "net.py:14", "" if it is unknown. It takes a pass without hooks, if code of the network names `forward`.
    """
    kinds = {*map(type, modules.values())}
    if not any(map(_names_forward, {base for kind in kinds for base in kind.__mro__})):
        return {}
    names = {id(module): name for name, module in silent.items()}
    codes = {code for layer in silent.values() if (code := code_of(layer.forward)) is not None}
    lines: dict[str, str] = {}

    def look(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or frame.f_code not in codes:
            return
        name, caller = names.get(id(frame.f_locals.get("self"))), frame.f_back
        if name is not None and caller is not None and whose_code(caller.f_code) == "network":
            lines.setdefault(name, source_line(caller))

    before = sys.getprofile()
    with preserved(modules[""], seed=0):
        sys.setprofile(look)
        try:
            _run_again(modules[""], batch)
        finally:
            sys.setprofile(before)
    return lines


def _run_again(network: nn.Module, batch: Batch) -> None:
    """Repeat a pass that has run; if it raises this time, its findings up to there are used."""
    again = copy_of(batch)
    with torch.no_grad(), suppress(Exception):
        network(*again.args, **again.kwargs)


@lru_cache(maxsize=4096)
def _names_forward(base: type) -> bool:
    """Tell whether a method that a class defines, not torch's own, uses the name `forward`."""
    codes = filter(None, map(code_of, vars(base).values()))
    return any("forward" in code.co_names and whose_code(code) == "network" for code in codes)
