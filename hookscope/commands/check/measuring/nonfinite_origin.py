"""Find where NaN and Inf begin in a forward pass: which layer makes them, and which pass them on."""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.interventions import Intervention
from hookscope.hooks.observed import ModuleCall, Observation, RowKey
from hookscope.hooks.operations import EVERYTHING, OperationChoice
from hookscope.hooks.patterns import FILLING, parse_operation_pattern
from hookscope.hooks.pytree import tensors_given
from hookscope.inputs.batches import Batch, copy_of, in_batches
from hookscope.inspection.failures import reraise_internal
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.state.preservation import preserved
from hookscope.results.check import NonFiniteOrigin
from hookscope.results.network import row_label
from hookscope.rules.rule import is_within
from hookscope.statistics.storage import as_real_floats, is_dense, stored_values
from hookscope.text import input_text, position_text, printable

# Operations and classes of modules in which -Inf has no effect, because its exponential is 0.
_SOFTMAX = frozenset(
    {"softmax", "log_softmax", "softmin", "gumbel_softmax", "logsumexp", "logcumsumexp", "scaled_dot_product_attention"}
    | {"Softmax", "Softmax2d", "LogSoftmax", "Softmin", "MultiheadAttention"}
)


def locate_origin(subject: InspectedNetwork, batches: Iterable[Batch], seed: int) -> tuple[NonFiniteOrigin | None, str]:
    """Find the first module in execution order that makes NaN or Inf out of finite inputs.

    Returns the origin, or None, and the first input that is not finite itself, in words, or "".

    Batches run again, with a look at the inputs and outputs of all modules, until a batch shows the origin. If a module
    gets NaN or Inf that no earlier module made, the code between modules made it: the origin is then the innermost
    surrounding module whose own inputs are finite. -Inf alone, from a module without parameters, is a mask: it counts
    only if it becomes NaN or +Inf, or if the network returns it.
    """
    broken_input = ""
    for batch in batches:
        broken_input = broken_input or _broken_inputs(batch)
        kept = copy_of(batch)  # networks may overwrite their inputs
        operations = OperationChoice([parse_operation_pattern(EVERYTHING)])
        if (origin := _Search(subject, operations).run(batch, seed)) is not None:
            return _with_inputs(origin, subject, kept, seed), broken_input
    return None, broken_input


def _with_inputs(origin: NonFiniteOrigin, subject: InspectedNetwork, batch: Batch, seed: int) -> NonFiniteOrigin:
    count, guilty, layer = len(batch.indices), [], _layer_of(origin)
    around = {name: part for name, part in subject.modules.items() if is_within(name, layer) or is_within(layer, name)}
    for alone in in_batches(batch, 1) if count > 1 else [batch]:
        seen = origin if count == 1 else _Search(replace(subject, modules=around)).run(alone, seed)
        if seen is not None and seen.layer == origin.layer:
            guilty.append((alone.indices[0], _name_of(batch, alone), seen.position))
    if not guilty:
        return replace(origin, position=())
    named = tuple((index, name) for index, name, _ in guilty)
    return replace(origin, inputs=named, input_count=count, position=guilty[0][2])


def _name_of(batch: Batch, alone: Batch) -> str:
    """Return the name of the only input of `alone`; "" if other inputs of the batch share it, as in a tensor."""
    names = [record.name for record in batch.records]
    name = alone.records[0].name if alone.records else ""
    return printable(name) if names.count(name) == 1 else ""


def _broken_inputs(batch: Batch) -> str:
    """Return the first input of a batch that is not finite, with the place, in words; "" if all are finite."""
    count = len(batch.indices)
    for _, tensor in tensors_given(batch.args, batch.kwargs):
        if _counts(tensor).any:
            parts = tensor if tensor.dim() and tensor.shape[0] == count else [tensor]
            at = next((index for index, part in enumerate(parts) if _counts(part).any), 0)
            name = _name_of(batch, replace(batch, records=batch.records[at : at + 1]))
            position = position_text(_position(parts[at]))
            return f"{input_text(batch.indices[at], name)}{f', at {position},' if position else ''}"
    return ""


def _position(tensor: Tensor) -> tuple[int | None, ...]:
    """Return the index of the first value that is not finite, with None for axes full of them; () if unknown."""
    try:
        broken = ~torch.isfinite(tensor.detach())
        if not is_dense(broken) or not broken.any():
            return ()
        first = broken.flatten().to(torch.uint8).argmax()
        index: list[int | None] = [int(coord) for coord in torch.unravel_index(first, broken.shape)]
    except (RuntimeError, NotImplementedError, TypeError):
        return ()
    for axis in reversed(range(len(index))):
        if not broken[tuple(index[:axis])].all():
            break
        index[axis] = None
    return tuple(index) if index and index[0] is not None else ()


class _Counts(NamedTuple):
    """Counts of values that are not finite; `broken`: NaN or +Inf is among them, for -Inf alone may be a mask."""

    nan: int = 0
    inf: int = 0
    broken: bool = False
    elements: int = 0

    @property
    def any(self) -> bool:
        return self.nan + self.inf > 0


_FINITE = _Counts()


def _counts(tensor: Tensor) -> _Counts:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return _FINITE
    try:
        values, _, implicit_zeros = stored_values(tensor.detach(), () if tensor.is_nested else tuple(tensor.shape))
        if values.is_complex() or values.itemsize < 2:
            values = as_real_floats(values)
        count = values.numel() + implicit_zeros
        if torch.isfinite(values).all():
            return _Counts(elements=count)
        nan, above, inf = (int(where.sum()) for where in (values.isnan(), values == math.inf, values.isinf()))
        return _Counts(nan, inf, nan + above > 0, count)
    except (RuntimeError, NotImplementedError, TypeError):  # torch cannot read values of this kind
        return _FINITE


@dataclass(slots=True)
class _Search:
    """One pass that searches for the first module that makes NaN or Inf.

    The stack holds the calls that have begun. Each has the counts of its first input with NaN or +Inf; without one, of
    its last input with -Inf. Until an origin is found, such values come from the network's own inputs.
    """

    subject: InspectedNetwork
    operations: OperationChoice | None = None
    captured: Capture[_Counts] | None = None
    origin: NonFiniteOrigin | None = None
    mask: NonFiniteOrigin | None = None
    returned_masks: bool = False
    _stack: list[tuple[str, _Counts]] = field(default_factory=list)
    _ended: dict[str, int] = field(default_factory=dict)
    _latest: tuple[tuple[str, int], _Counts] = (("", -1), _FINITE)

    def run(self, batch: Batch, seed: int) -> NonFiniteOrigin | None:
        """Run a batch; return where NaN or Inf begins in it, if it does."""
        network, modules = self.subject.network, self.subject.modules
        edits = {name: [Intervention("input", partial(self._enter, name))] for name in modules}
        watched = capture(network, modules, self._leave, edits=edits, operations=self.operations)
        with preserved(network, seed), watched as self.captured:
            try:
                with torch.no_grad():
                    network(*batch.args, **batch.kwargs)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's code may raise anything
                reraise_internal(error)
        origin = self.origin or (self.mask if self.returned_masks else None)
        if origin is None:
            return None
        operation, source = self._first_operation(_layer_of(origin))
        return replace(origin, parameters=self._broken_parameters(origin), operation=operation, source=source)

    def _enter(self, layer: str, _module: nn.Module | str, tensor: Tensor) -> Tensor:
        counts = _counts(tensor)
        if not self._stack or self._stack[-1][0] != layer:
            self._stack.append((layer, _FINITE))
        if counts.broken and self.origin is None and layer:
            around = self._around(layer)
            incoming = next((values for name, values in reversed(self._stack) if name == around), _FINITE)
            if not incoming.broken:  # the code of the module around makes them, between its modules
                self.origin = self._origin_at(around, self._ended.get(around, 0), counts, tensor)
        if counts.any and not self._stack[-1][1].broken:
            self._stack[-1] = (layer, counts)
        return tensor

    def _leave(self, call: ModuleCall, _slot: str, tensor: Tensor) -> _Counts:
        layer, key, counts = call.layer, (call.layer, call.call), _counts(tensor)
        if call.operation is not None:
            return counts
        if self._latest[0] != key:
            self._latest = (key, self._end(layer))
            self._ended[layer] = call.call + 1
        incoming = self._latest[1]
        if self.origin is not None or not counts.any or incoming.broken:
            return counts
        makes_masks = not counts.broken
        if makes_masks:
            self.returned_masks |= layer == ""
            if incoming.any:
                return counts
        origin = self._origin_at(layer, call.call, counts, tensor)
        if makes_masks and next(call.module.parameters(recurse=False), None) is None:
            self.mask = self.mask or origin
        else:
            self.origin = origin
        return counts

    def _end(self, layer: str) -> _Counts:
        """Take a call off the stack, with inner calls that returned nothing; return the counts of its input."""
        # A call without a floating-point input is not on the stack.
        while any(name == layer for name, _ in self._stack):
            ended, counts = self._stack.pop()
            if ended == layer:
                return counts
        return _FINITE

    def _around(self, layer: str) -> str:
        """Return the innermost running module around a module that has just begun, by the stack or by names."""
        outer = self._stack[-2][0] if len(self._stack) > 1 else ""
        around = layer
        while around and self.captured is not None:
            around = around.rpartition(".")[0]
            if not around or around == outer or not is_within(around, outer):
                break
            if around in self.captured.called and around not in self._ended:
                return around
        return outer

    def _origin_at(self, layer: str, call: int, counts: _Counts, tensor: Tensor) -> NonFiniteOrigin:
        position = _position(tensor)
        module = self.subject.modules[layer]
        return NonFiniteOrigin(
            row_label(layer, call, ""),
            type(module).__name__,
            counts.nan,
            counts.inf,
            counts.elements,
            between=next(module.children(), None) is not None,
            position=position[1:] if tensor.dim() > 1 and tensor.shape[0] == 1 else position,
        )

    def _first_operation(self, owner: str) -> tuple[str, str]:
        """Return the first operation of a module's own code that makes NaN or Inf, and its line; "" for none.

        -Inf counts if it becomes NaN or +Inf outside of a softmax, unless the operation filled it in on purpose.
        """
        seen = self.captured.observations if self.captured is not None else []
        by_place: dict[RowKey | str, _Counts] = {event.place: event.value or _FINITE for event in seen}
        for at, output in enumerate(seen):
            operation, counts = output.operation, output.value or _FINITE
            if operation is None or operation.owner != owner or not counts.any:
                continue
            is_maker = not any(by_place.get(source, _FINITE).any for source in output.sources)
            makes_infinities = is_maker and operation.name not in FILLING and self._harms(seen[at:], by_place)
            if counts.broken or makes_infinities:
                return row_label(*output.place), operation.source
        return "", ""

    def _harms(self, following: Sequence[Observation[_Counts]], by_place: Mapping[RowKey | str, _Counts]) -> bool:
        """Tell whether -Inf in the first observation becomes NaN or +Inf outside of a softmax."""
        carried = {following[0].place}
        for output in following[1:]:
            counts = output.value or _FINITE
            if not (counts.any and carried.intersection(output.sources)):
                continue
            if not counts.broken:
                carried.add(output.place)
            elif not any(by_place[source].broken for source in output.sources if source in by_place):
                name = output.operation.name if output.operation else type(self.subject.modules[output.layer]).__name__
                if name not in _SOFTMAX:
                    return True
        return False

    def _broken_parameters(self, origin: NonFiniteOrigin) -> tuple[str, ...]:
        layer = _layer_of(origin)
        called = self.captured.called if self.captured is not None else set()
        broken = []
        for name, module in self.subject.modules.items():
            if name != layer and (name in called or not is_within(name, layer) or not _is_used_by(name, layer, called)):
                continue
            tensors = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            broken += [f"{name}.{key}" if name else key for key, tensor in tensors if _counts(tensor).any]
        return tuple(broken)


def _layer_of(origin: NonFiniteOrigin) -> str:
    return "" if origin.layer.startswith("(model)") else origin.layer.partition("#")[0]


def _is_used_by(layer: str, ancestor: str, called: AbstractSet[str]) -> bool:
    """Tell whether no module between the two was called; a called module would be the one that uses the layer."""
    while (layer := layer.rpartition(".")[0]) and layer != ancestor:
        if layer in called:
            return False
    return True
