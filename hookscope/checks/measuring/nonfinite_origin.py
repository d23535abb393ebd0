"""Find where NaN and Inf begin in a forward pass: which layer makes them, and which pass them on."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor, nn

from hookscope.checks.rules.rule import is_within
from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.interventions import Intervention
from hookscope.hooks.observed import ModuleCall
from hookscope.hooks.pytree import tensors_given
from hookscope.inputs import Batch
from hookscope.inspection.failures import reraise_internal
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.state.preservation import preserved
from hookscope.results.check import NonFiniteOrigin
from hookscope.results.network import row_label
from hookscope.statistics.storage import as_real_floats, stored_values


def locate_origin(subject: InspectedNetwork, batches: Iterable[Batch], seed: int) -> tuple[NonFiniteOrigin | None, str]:
    """Find the first module in execution order that makes NaN or Inf out of finite inputs.

    Returns that origin, or None, and the name of an input that is not finite itself, or "".

    Each batch is run again with every module's inputs looked at before it runs, and its outputs after, until one shows
    the origin: a module whose inputs are finite and whose output is not. Where a module is given what is not finite
    though none before it made it, code between modules did: then the origin is the innermost module around it whose own
    inputs are finite, with `between` set and the counts of that input.

    -Inf alone, from a module that has no parameters, is what attention masks are made of: it is nobody's fault as long
    as no NaN or +Inf comes of it and the network's own output is finite. Where NaN comes of it after all, the module
    that makes that is the origin. Where the network returns -Inf, the first module to make some is.

    Named as its parameters are those of the module itself that are not finite, and those of modules inside it that it
    uses without calling them, as MultiheadAttention does with `out_proj`.
    """
    broken_input = ""
    for batch in batches:
        if broken := _broken_inputs(batch):
            broken_input = broken_input or broken
        elif (found := _Search(subject).run(batch, seed)) is not None:
            return found, broken_input
    return None, broken_input


def _broken_inputs(batch: Batch) -> str:
    """Return the name of the first input of a batch that is not finite; "" for none."""
    count = len(batch.indices)
    for _, tensor in tensors_given(batch.args, batch.kwargs):
        if _counts(tensor).any:
            parts = tensor if tensor.dim() and tensor.shape[0] == count else [tensor]
            at = next((index for index, part in enumerate(parts) if _counts(part).any), 0)
            return batch.records[at].name if batch.records else "tensor"
    return ""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Values of a tensor that are not finite."""

    nan: int = 0
    above: int = 0
    below: int = 0
    elements: int = 0

    @property
    def any(self) -> bool:
        return bool(self.nan or self.above or self.below)

    @property
    def broken(self) -> bool:
        """Whether there is NaN or +Inf: -Inf alone may be a mask."""
        return bool(self.nan or self.above)


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
        infinite = values[torch.isinf(values)]
        below = int((infinite < 0).sum())
        return _Counts(int(torch.isnan(values).sum()), infinite.numel() - below, below, count)
    except (RuntimeError, NotImplementedError, TypeError):  # of a kind whose values torch cannot read
        return _FINITE


@dataclass(slots=True)
class _Search:
    """One pass, looking for the first module that makes what is not finite.

    As long as there is no origin, every module that runs was given neither NaN nor +Inf: otherwise what is around it
    would be the origin. On the stack are calls that have begun, each with what it was given that is not finite.
    """

    subject: InspectedNetwork
    captured: Capture[None] | None = None
    origin: NonFiniteOrigin | None = None
    mask: NonFiniteOrigin | None = None
    returned_masks: bool = False
    _stack: list[tuple[str, _Counts]] = field(default_factory=list)
    _ended: dict[str, int] = field(default_factory=dict)
    _latest: tuple[tuple[str, int], _Counts] = (("", -1), _FINITE)

    def run(self, batch: Batch, seed: int) -> NonFiniteOrigin | None:
        """Run a batch; return where NaN or Inf begins in it, if it does."""
        network, modules = self.subject.network, self.subject.modules
        names = {id(module): name for name, module in modules.items()}

        def look(module: nn.Module | str, tensor: Tensor) -> Tensor:
            self._enter(names[id(module)], _counts(tensor))
            return tensor

        edits = {name: [Intervention("input", look)] for name in modules}
        with preserved(network, seed), capture(network, modules, self._leave, edits=edits) as self.captured:
            try:
                with torch.no_grad():
                    network(*batch.args, **batch.kwargs)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's code may raise anything
                reraise_internal(error)
        found = self.origin or (self.mask if self.returned_masks else None)
        return None if found is None else replace(found, parameters=self._broken_parameters(found))

    def _enter(self, layer: str, given: _Counts) -> None:
        if not self._stack or self._stack[-1][0] != layer:
            self._stack.append((layer, _FINITE))
        if given.broken and self.origin is None:
            around = self._around(layer)
            self.origin = self._found(around, self._ended.get(around, 0), given)
        if given.any:
            self._stack[-1] = (layer, given)

    def _leave(self, call: ModuleCall, _slot: str, tensor: Tensor) -> None:
        layer, key, counts = call.layer, (call.layer, call.call), _counts(tensor)
        if self._latest[0] != key:
            self._latest = (key, self._end(layer))
            self._ended[layer] = call.call + 1
        if self.origin is not None or not counts.any:
            return
        makes_masks = not counts.broken
        if makes_masks:
            self.returned_masks |= layer == ""
            if self._latest[1].any:
                return
        found = self._found(layer, call.call, counts)
        if makes_masks and next(call.module.parameters(recurse=False), None) is None:
            self.mask = self.mask or found
        else:
            self.origin = found

    def _end(self, layer: str) -> _Counts:
        """Take a call off the stack, with calls inside it that returned nothing; return what it was given."""
        while any(each == layer for each, _ in self._stack):  # else it was given no floating-point tensor
            ended, given = self._stack.pop()
            if ended == layer:
                return given
        return _FINITE

    def _around(self, layer: str) -> str:
        """Return the innermost module that is running around one that has just begun.

        Modules without a floating-point input, such as an embedding, are not on the stack: they are found by name.
        """
        known = self._stack[-2][0] if len(self._stack) > 1 else ""
        around = layer
        while around and self.captured is not None:
            around = around.rpartition(".")[0]
            if not around or around == known or not is_within(around, known):
                break
            if around in self.captured.called and around not in self._ended:
                return around
        return known

    def _found(self, layer: str, call: int, counts: _Counts) -> NonFiniteOrigin:
        module = self.subject.modules[layer]
        return NonFiniteOrigin(
            row_label(layer, call, ""),
            type(module).__name__,
            counts.nan,
            counts.above + counts.below,
            counts.elements,
            between=next(module.children(), None) is not None,
        )

    def _broken_parameters(self, found: NonFiniteOrigin) -> tuple[str, ...]:
        """Return the parameters and buffers that a module uses itself and that are not finite."""
        layer = "" if found.layer.startswith("(model)") else found.layer.partition("#")[0]
        called = self.captured.called if self.captured is not None else set()
        broken = []
        for name, module in self.subject.modules.items():
            if name != layer and (name in called or not is_within(name, layer) or not _is_used_by(name, layer, called)):
                continue
            own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            broken += [f"{name}.{each}" if name else each for each, tensor in own if _counts(tensor).any]
        return tuple(broken)


def _is_used_by(layer: str, ancestor: str, called: AbstractSet[str]) -> bool:
    """Tell whether no module between the two was called: if one was, that one uses it."""
    while (layer := layer.rpartition(".")[0]) and layer != ancestor:
        if layer in called:
            return False
    return True
