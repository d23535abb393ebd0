"""One of the compared networks: its hooks, and one pass of it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookscope.commands.diff.alignment import Call, CallKey, containers_of
from hookscope.commands.diff.values import Value, Versions
from hookscope.hooks.calls import Hook
from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.observed import ModuleCall, RowKey, physical
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.pytree import tensors_given, tensors_in
from hookscope.hooks.selection import default_layers, owned_parameters
from hookscope.inputs.batches import Batch, copy_of, to_device
from hookscope.inspection.device import cpu_threads, placement
from hookscope.inspection.differentiation import GradientOptions
from hookscope.inspection.edit_placement import PlacedEdits
from hookscope.inspection.failures import failure_message, locate, reraise_internal
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.rows import Recorder
from hookscope.inspection.run import Break
from hookscope.inspection.state.preservation import Preserved, RandomStates, preserved
from hookscope.inspection.state.snapshot import Snapshot
from hookscope.results.network import row_label

# Containers that are never called themselves.
NEVER_CALLED = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict


@dataclass(slots=True)
class OutputRow:
    """An output of a network, in its first batch; fields without an entry are those of `LayerRow`.

    Attributes:
        constants: Of an operation, by path, as in `Operation`.
        inputs: For each input of an operation, the name of the parameter, buffer or attribute; "" for any other input,
            None for an input that the operation has overwritten.
        passed_through: Whether the output was an unchanged input in every batch.
    """

    index: int
    layer: str
    kind: str
    call: int
    slot: str
    shape: tuple[int, ...]
    dtype: str
    owner: str | None = None
    source: str = ""
    constants: dict[str, str] = field(default_factory=dict)
    inputs: Sequence[str | None] = ()
    passed_through: bool = True

    @property
    def label(self) -> str:
        """Name for people, see `row_label`."""
        return row_label(self.layer, self.call, self.slot)


class PairedOutput(NamedTuple):
    """An output that has a partner.

    Attributes:
        call: (layer, call) in A.
        place: Its place in its own network.
        slots: Paths of the tensors that the call returns.
        channel_axis: The axis of channels; None without one.
        grids: In A, the spatial sizes of maps so far, latest last.
        inputs: Inputs of the call, with their paths; only the first if the call overwrote it.
    """

    call: CallKey
    place: RowKey
    slots: Sequence[str]
    value: Value
    channel_axis: int | None = None
    grids: tuple[tuple[int, ...], ...] = ()
    inputs: Sequence[tuple[str, Value]] = ()


@dataclass(frozen=True, slots=True)
class Observer:
    """The functions that are called in a pass.

    Attributes:
        versions: The values of tensors in the pass.
        observe: Called in the hook of every output that has a partner.
        overwrites: Called before a call overwrites its first input, with the key of the call in A.
        begins: Called before every call that has a partner, and before all hooks of its module, with the key in A, the
            name of the layer, and its arguments; None if not needed.
    """

    versions: Versions
    observe: Callable[[PairedOutput], object]
    overwrites: Callable[[CallKey, Value], object] = lambda _key, _value: None
    begins: Callable[[CallKey, str, Any, Any], object] | None = None


@dataclass(slots=True, kw_only=True)
class HookedNetwork:
    """A network, how it runs, and its outputs so far.

    Attributes:
        title: The name in messages: "A (resnet34)".
        selected: The layers that have rows.
        hooked: The selected layers, the default layers, and the modules around them.
        partner: Maps a call of this network to its key in A; None for a call without a partner.
        options: How the network runs, forward and backward.
        cpu_threads: Number of CPU threads; None for torch's default.
        own_inputs: Maps a batch, or pair of batches, to the batch that this network runs on.
        rows: Outputs of all batches, in order of execution.
        unlisted: Labels of the rows of operations whose call no pattern selects.
    """

    title: str
    inspected: InspectedNetwork
    selected: Mapping[str, nn.Module]
    hooked: Mapping[str, nn.Module]
    operations: OperationChoice | None
    edits: PlacedEdits
    recorder: Recorder
    options: GradientOptions
    cpu_threads: int | None = None
    partner: Callable[[CallKey], CallKey | None] = lambda key: key
    own_inputs: Callable[[Batch], Batch] = lambda batch: batch
    rows: dict[RowKey, OutputRow] = field(default_factory=dict)
    unlisted: set[str] = field(default_factory=set)
    _state: Preserved = field(init=False)
    _captured: Capture[None] = field(init=False)
    _observer: Observer | None = None
    _overwriting: Counter[str] = field(default_factory=Counter)  # calls of layers that overwrite their input
    _overwrote: dict[CallKey, Value] = field(default_factory=dict)
    _stored: Mapping[int, tuple[Tensor, str, int]] = field(default_factory=dict)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Restore the network after the block, in which it may run."""
        modules = self.inspected.modules
        self._stored = {} if self.operations is None else _stored_tensors(modules)
        with preserved(self.inspected.network, self.options.seed, self.options.mode, modules.values()) as self._state:
            yield

    def trial(self, batch: Batch, layers: Mapping[str, nn.Module]) -> "HookedNetwork":
        """Run a copy of this object without edits, with these layers hooked; return it. The network is restored."""
        operations = None if self.operations is None else OperationChoice(self.operations.patterns)
        no_edits = PlacedEdits({}, (), {})
        trial = replace(self, hooked=layers, operations=operations, edits=no_edits, rows={})
        with trial.prepared():
            trial.run(batch, None)
        return trial

    @property
    def called(self) -> set[str]:
        """Names of the layers that were called in the latest pass."""
        return self._captured.called

    def batch_for(self, batch: Batch) -> Batch:
        """Return a copy of a batch, or of the network's own in a pair, on its device and in its dtype."""
        return to_device(copy_of(self.own_inputs(batch)), *placement(self.inspected.network))

    def run(self, batch: Batch, observer: Observer | None) -> object:
        """Run the network over `batch_for` a batch, inside a block of `prepared`; return its output, or its `Break`.

        Random numbers are drawn from the present states of the generators.
        """
        self._state.mark()
        self._overwriting.clear()
        self._overwrote.clear()
        self._observer, batch = observer, self.batch_for(batch)
        self.recorder.start(batch.indices, pictures=batch.pictures)
        with cpu_threads(self.cpu_threads), self._hooks() as self._captured:
            output = self._forward(batch)
            for seen in self._captured.restart():
                if seen.place in self.rows:
                    self.rows[seen.place].passed_through &= seen.passed_through
        self._observer = None  # frees the values of tensors
        return output

    def rewind(self) -> None:
        """Restore the state of the network from before the latest pass."""
        self._state.rewind()

    @contextmanager
    def _hooks(self) -> Iterator[Capture[None]]:
        """Add the hooks of `capture`, and hooks before calls that see arguments and inputs to be overwritten."""
        edits, network = self.edits.by_name, self.inspected.network
        hooks = capture(network, self.hooked, self._observe, edits=edits, operations=self.operations)
        with hooks as captured, ExitStack() as block:
            for name, module in self.hooked.items():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks before calls
                    continue
                if self._observer is not None and self._observer.begins is not None:
                    before = Hook(self._before_hooks, name)
                    block.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
                if vars(module).get("inplace") is True and not [*module.children()]:
                    before = Hook(self._before_overwriting, name)
                    block.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            yield captured

    def _forward(self, batch: Batch) -> object:
        dtype = self.options.autocast
        device = torch.device(self.inspected.placed[0]).type
        casting = nullcontext() if dtype is None else torch.autocast(device, dtype, cache_enabled=False)
        try:
            with torch.no_grad(), casting:
                return self.inspected.network(*batch.args, **batch.kwargs)
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
            error = reraise_internal(raised)
            failure = locate(self.inspected.modules, error)
            return Break(failure_message(self.title, failure, error), failure, error)

    def has_row(self, layer: str, label: str) -> bool:
        """Tell whether an output of a layer or operation, see `OutputRow.label`, has a row in the result."""
        is_operation = layer not in self.hooked
        return layer in self.selected or (is_operation and label not in self.unlisted)

    def _observe(self, call: ModuleCall, slot: str, tensor: Tensor) -> None:
        place = (call.layer, call.call, slot)
        needs_axis = not tensor.is_nested and (self.recorder.token_layout is not None or self.options.edits)
        axis = self.recorder.axes.channel_axis(call.maker, tensor.shape) if needs_axis else None
        if place not in self.rows:
            self.rows[place] = self._row(call, slot, tensor)
        partner, observer = self.partner(place[:2]), self._observer
        if partner is not None and observer is not None:
            overwrote, version_of = self._overwrote.pop(place[:2], None), observer.versions.of
            inputs = [(path, version_of(physical(source)[0])) for path, source in call.inputs if not overwrote]
            inputs = [("", overwrote)] if overwrote else inputs
            grids = () if self.recorder.token_layout is None else (*self.recorder.grids_of(place, tensor, axis),)
            value = version_of(tensor)
            observer.observe(PairedOutput(partner, place, call.slots or [slot], value, axis, grids, inputs))

    def _row(self, call: ModuleCall, slot: str, tensor: Tensor) -> OutputRow:
        shape, dtype = () if tensor.is_nested else tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        row = OutputRow(len(self.rows), call.layer, type(call.module).__name__, call.call, slot, shape, dtype)
        if call.operation is not None:
            row.kind, row.owner, row.source, constants = call.operation
            row.constants = {path: repr(value) for path, value in constants}
            row.inputs = [self._stored_name(source, tensor) for _, source in call.inputs]
            if self.operations is not None and not self.operations.lists(row.owner, row.kind, row.call):
                self.unlisted.add(row.label)
        return row

    def _stored_name(self, source: Tensor, output: Tensor) -> str | None:
        """Return the name of an input of an operation, as in `OutputRow.inputs`."""
        if source is output:
            return None
        tensor, name, version = self._stored.get(id(source), (None, "", 0))
        return name if tensor is not None and tensor._version == version else ""

    def run_alone(self, layer: str, args: Any, kwargs: Any) -> dict[str, Tensor]:
        """Run one layer before its call in the network, without side effects; return its output tensors by slot.

        The layer has the state and draws the random numbers of that call. It sees no context variables of the network:
        a pass may collect outputs in them.
        """
        module, observer, random_states = self.hooked[layer], self._observer, RandomStates()
        call: Any = nn.Module.__call__  # hooks see its output, before a subclass changes it
        with self._captured.detached():
            before = Snapshot([*module.modules()])
            try:
                self._observer = None
                return dict(tensors_in(Context().run(call, module, *args, **kwargs)))
            finally:
                before.put_back()
                random_states.enter()
                self._observer = observer

    def _before_hooks(self, layer: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._observer is not None and self._observer.begins is not None:
            partner = self.partner((layer, self._captured.counts.get(layer, 0)))
            if partner is not None:
                self._observer.begins(partner, layer, args, kwargs)

    def _before_overwriting(self, layer: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._observer is None:
            return
        place = (layer, self._overwriting[layer])
        self._overwriting[layer] += 1
        inputs, partner = tensors_given(args, kwargs), self.partner(place)
        if inputs and partner is not None:
            with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
                tensor = physical(inputs[0][1])[0]
                self._overwrote[place] = value = self._observer.versions.of(tensor)
                self._observer.overwrites(partner, value)


def _stored_tensors(modules: Mapping[str, nn.Module]) -> dict[int, tuple[Tensor, str, int]]:
    """Return all tensors that modules hold, by `id`, with names and versions."""
    stored: dict[int, tuple[Tensor, str, int]] = {}
    for name, module in modules.items():
        for key, value in {**vars(module), **module._buffers, **module._parameters}.items():
            if isinstance(value, Tensor) and not value.is_inference():
                stored.setdefault(id(value), (value, f"{name}.{key}" if name else key, value._version))
    return stored


def layers_to_hook(
    inspected: InspectedNetwork, selected: Mapping[str, nn.Module], *, chosen: bool
) -> dict[str, nn.Module]:
    """Return the layers to hook: selected layers, default layers if layers were `chosen`, and modules around them."""
    wanted = {*selected, *(default_layers(inspected.modules) if chosen else ())}
    wanted |= containers_of(wanted)
    modules = inspected.modules.items()
    return {name: layer for name, layer in modules if name in wanted and not isinstance(layer, NEVER_CALLED)}


def parameter_shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the parameters that a module owns directly."""
    return tuple([parameter.shape for parameter in owned_parameters(module)])


def coarsest_precision(network: HookedNetwork) -> tuple[float, str]:
    """Return the machine epsilon, and the name, of the coarsest format that a network computes in."""
    device, dtype = network.inspected.placed
    kinds = [getattr(torch, dtype)] if dtype != "none" else [torch.float32]
    kinds += [network.options.autocast] if network.options.autocast else []
    epsilons = [(torch.finfo(kind).eps, str(kind).removeprefix("torch.")) for kind in kinds]
    cudnn: Any = torch.backends.cudnn
    if device.startswith("cuda") and torch.float32 in kinds and cudnn.conv.fp32_precision == "tf32":
        epsilons.append((2.0**-10, "TF32"))  # TF32 has a mantissa of 10 bits
    return max(epsilons)


def traced(network: HookedNetwork, batch: Batch) -> list[Call]:
    """Run a network over a batch until its end or an error; return its calls in the order in which they finish."""
    trial = network.trial(batch, network.hooked)
    calls: dict[CallKey, Call] = {}
    for place, row in trial.rows.items():
        owned = parameter_shapes(trial.hooked[row.layer]) if row.owner is None else ()
        call = calls.get(place[:2], Call(place[:2], row.kind, (), owned))
        is_unchanged = call.is_unchanged or row.passed_through
        calls[call.key] = replace(call, shapes=(*call.shapes, row.shape), is_unchanged=is_unchanged)
    return [*calls.values()]
