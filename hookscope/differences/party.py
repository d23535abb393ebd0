"""One of the networks that run in lockstep: its hooks, and where it pauses."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hookscope.differences.alignment import Call, CallKey
from hookscope.differences.lockstep import AbandonedError, RandomStates, Strand
from hookscope.differences.values import Value, Values
from hookscope.hooks.autograd import plain_arithmetic
from hookscope.hooks.calls import Hook
from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.observed import ModuleCall
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.pytree import tensors_given, tensors_in
from hookscope.hooks.selection import default_layers, owned_parameters
from hookscope.inputs import Batch
from hookscope.inspection.edit_placement import PlacedEdits
from hookscope.inspection.failures import failure_message, locate, reraise_internal
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.rows import Recorder
from hookscope.inspection.state.preservation import Mode, Preserved, preserved
from hookscope.inspection.state.snapshot import Snapshot
from hookscope.results.network import row_label

Key = tuple[str, int, int]
"""(layer, call, which of its tensors), in the names of A."""


class Seen(NamedTuple):
    """An output that has a partner.

    Attributes:
        output: Its value; the tensor is always there.
        inputs: The values that the call was given; of a call that overwrote its first input, that one alone.
        channel_axis: The axis of the tensor that counts channels; None if none does.
        grids: The spatial sizes of maps up to here, latest last.
    """

    key: Key
    layer: str
    output: Value
    inputs: tuple[Value, ...] = ()
    channel_axis: int | None = None
    grids: tuple[tuple[int, ...], ...] = ()

    @property
    def tensor(self) -> Tensor:
        """The output itself, or a copy."""
        return cast("Tensor", self.output.tensor)


@dataclass(frozen=True, slots=True)
class Finished:
    """A pause after a batch: the network's output, or its error with a message."""

    output: object = None
    error: BaseException | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """A pause before each batch, and another, with `has_batch`, right before its forward pass."""

    has_batch: bool = False


Stop = Seen | Finished | Ready


@dataclass(frozen=True, slots=True)
class Shown:
    """An output of the first batch."""

    label: str
    layer: str
    kind: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True, kw_only=True)
class Party:
    """A network, how it runs, and its outputs so far.

    Attributes:
        title: Its name in messages: "A (resnet34)".
        selected: The layers that have rows.
        hooked: The selected layers, the default layers, and the modules around them.
        partner: Maps a call of this network to its key in A; None for a call without a partner.
        autocast: The dtype of autocast; None for none.
        threads: Number of CPU threads; None for torch's default.
        keeps: What to keep of each call until it returns: a copy of its inputs from before any hook, or the states of
            autocast and of the random generators.
        copies_all: Whether to copy inputs that were seen before, too, before they are overwritten.
        batch: The next batch; None ends the run.
        shown: Outputs of all batches, in order, by (layer, call, which).
        passed_through: Whether each was an unchanged input in every batch.
    """

    title: str
    inspected: InspectedNetwork
    selected: Mapping[str, nn.Module]
    hooked: Mapping[str, nn.Module]
    operations: OperationChoice | None
    edits: PlacedEdits
    recorder: Recorder
    seed: int
    mode: Mode = "eval"
    autocast: torch.dtype | None = None
    threads: int | None = None
    keeps: Literal["inputs", "states", ""] = ""
    partner: Callable[[CallKey], CallKey | None] = lambda key: key
    copies_all: bool = False
    batch: Batch | None = None
    rewinds: bool = False
    shown: dict[tuple[str, int, int], Shown] = field(default_factory=dict)
    passed_through: dict[tuple[str, int, int], bool] = field(default_factory=dict)
    captured: Capture[int] | None = None
    _given: dict[str, list[Any]] = field(default_factory=dict)
    _counts: Counter[object] = field(default_factory=Counter)
    _values: Values = field(default_factory=Values)
    _overwrote: dict[CallKey, Value] = field(default_factory=dict)
    _is_paused: bool = False

    def run(self, strand: Strand[Stop]) -> None:
        """Run all batches, pausing at the strand."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        with ExitStack() as block:
            self._run(strand, block)

    def _run(self, strand: Strand[Stop], block: ExitStack) -> None:
        network = self.inspected.network
        modules = self.inspected.modules.values()
        state = block.enter_context(preserved(network, self.seed, self.mode, modules))
        self.captured = block.enter_context(
            capture(
                network,
                self.hooked,
                lambda call, slot, tensor: self._observe(strand, call, slot, tensor),
                edits=self.edits.by_name,
                operations=self.operations,
            )
        )
        block.enter_context(self._before_calls())
        state.mark_hooks()
        is_first = True
        while self._next(strand, state, is_first=is_first):
            is_first = False

    def _next(self, strand: Strand[Stop], state: Preserved, *, is_first: bool) -> bool:
        """Run the next batch; tell whether there was one."""
        strand.pause(Ready(), breakable=False)
        batch, self.batch = self.batch, None
        if batch is None or self.captured is None:
            return False
        if self.rewinds:
            state.rewind()
            self.rewinds = False
        elif not is_first:
            state.mark()
        for kept in (self._counts, self._given, self._overwrote):
            kept.clear()
        self._values = Values()
        self.recorder.start(batch.indices)
        strand.pause(Ready(has_batch=True), breakable=False)
        if strand.breaks_off:  # before the forward pass began
            strand.breaks_off = False
            finished = Finished(error=AbandonedError())
        else:
            finished = self._forward(batch, strand)
        del batch
        for seen in self.captured.restart():
            if seen.value is not None:
                key = (seen.layer, seen.call, seen.value)
                self.passed_through[key] = seen.passed_through and self.passed_through.get(key, True)
        strand.pause(finished, breakable=False)
        return True

    def _forward(self, batch: Batch, strand: Strand[Stop]) -> Finished:
        try:
            with torch.no_grad(), self.casting():
                return Finished(self.inspected.network(*batch.args, **batch.kwargs))
        except AbandonedError as abandoned:
            if not strand.breaks_off:
                raise
            strand.breaks_off = False
            return Finished(error=abandoned)
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
            error = reraise_internal(raised)
            failure = locate(self.inspected.modules, error)
            return Finished(error=error, message=failure_message(self.title, failure, error))

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Enable autocast if the network runs with it."""
        if self.autocast is None:
            yield
            return
        device = torch.device(self.inspected.placed[0]).type
        with torch.autocast(device, self.autocast, cache_enabled=False):
            yield

    def lists(self, layer: str) -> bool:
        """Tell whether rows of a layer or operation are shown."""
        return layer in self.selected or layer not in self.hooked  # operations are not hooked modules

    def copied(self, seen: Seen, *, known_too: bool) -> tuple[Seen, int]:
        """Return an output that lasts when the network goes on, and how many bytes were copied for it.

        Inputs that were seen before are left out, unless `known_too`.
        """
        output, taken = self._values.kept(seen.output, known_too=True)
        inputs = []
        for each in seen.inputs:
            value, more = self._values.kept(each, known_too=known_too or self.copies_all)
            inputs.append(value)
            taken += more
        return seen._replace(output=output, inputs=tuple(inputs)), taken

    def kept_of(self, layer: str) -> Any:
        """Pop what was kept of the latest call of a layer; None if nothing was."""
        given = self._given.get(layer)
        return given.pop() if given else None

    def _observe(self, strand: Strand[Stop], call: ModuleCall, slot: str, tensor: Tensor) -> int:
        """Record and show an output in the hook; return its index among the call's tensors."""
        place = (call.layer, call.call)
        which = self._counts[place]
        self._counts[place] += 1
        axis = None if tensor.is_nested else self.recorder.axes.channel_axis(call.maker, tuple(tensor.shape))
        if (*place, which) not in self.shown:
            kind = type(call.module).__name__ if call.operation is None else call.operation.name
            shape = () if tensor.is_nested else tuple(tensor.shape)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.shown[*place, which] = Shown(row_label(call.layer, call.call, slot), call.layer, kind, shape, dtype)
        partner = self.partner(place)
        if partner is not None:
            overwrote = self._overwrote.pop(place, None)
            given = [self._values.of(each) for _, each in call.inputs] if overwrote is None else [overwrote]
            grids = tuple(self.recorder.axes.grids)
            strand.pause(Seen((*partner, which), call.layer, self._values.of(tensor), tuple(given), axis, grids))
        return which

    @contextmanager
    def _before_calls(self) -> Iterator[None]:
        """Add pre-hooks that copy inputs about to be overwritten, and keep what `keeps` says."""
        handles: list[RemovableHandle] = []
        try:
            for name, module in self.hooked.items():
                if self.keeps and name in self.selected:
                    keep = Hook(self._keep_inputs if self.keeps == "inputs" else self._keep_states, name)
                    handles.append(module.register_forward_pre_hook(keep, prepend=True, with_kwargs=True))
                if vars(module).get("inplace") is True and not [*module.children()]:
                    before = Hook(self._before_overwriting, name)
                    handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run_alone(self, layer: str, args: Any, kwargs: Any) -> list[Tensor]:
        """Run one layer while the network is paused, without side effects; return its output tensors.

        It draws the random numbers that it drew in the network, and finds none of the context variables that the
        network has set, by which a pass collects what its layers return. Afterwards the layer holds what it held, and
        the random states are restored.
        """
        module = self.hooked[layer]
        device = torch.device(self.inspected.placed[0])
        call: Any = nn.Module.__call__  # hooks see what it returns, and not what a class adds to it
        now = RandomStates()
        is_cast, dtype, random_states = self.kept_of(layer) or (False, None, now)
        with nullcontext() if self.captured is None else self.captured.detached():
            before = Snapshot([*module.modules()])
            try:
                self._is_paused = True
                random_states.enter()
                with torch.no_grad(), _autocast(device.type, dtype, enabled=is_cast):
                    return [tensor for _, tensor in tensors_in(Context().run(call, module, *args, **kwargs))]
            finally:
                before.put_back()
                now.enter()
                self._is_paused = False

    def _keep_inputs(self, layer: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_paused:
            self._keep(layer, tree_map_only(Tensor, torch.clone, (args, kwargs)))

    def _keep_states(self, layer: str, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if not self._is_paused:
            device = torch.device(self.inspected.placed[0]).type
            casting = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            self._keep(layer, (*casting, RandomStates()))

    def _keep(self, layer: str, what: Any) -> None:
        # Nested calls need several; calls that raised leave extra ones.
        self._given[layer] = [*self._given.get(layer, [])[-3:], what]

    def _before_overwriting(self, layer: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_paused:
            return
        place = (layer, self._counts[layer])
        self._counts[layer] += 1
        given = tensors_given(args, kwargs)
        if given and self.partner(place) is not None:
            with torch._C.DisableTorchFunction(), plain_arithmetic():
                value = self._values.of(given[0][1])
                self._overwrote[place] = self._values.kept(value, known_too=self.copies_all)[0]


def looked_at(inspected: InspectedNetwork, selected: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers to hook: the selected ones, the default ones, and all modules around them."""
    wanted = {*selected, *default_layers(inspected.modules)}
    around = {name.rpartition(".")[0] for name in wanted if name}
    while around - wanted:
        wanted |= around
        around = {name.rpartition(".")[0] for name in around if name}
    held = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    return {name: each for name, each in inspected.modules.items() if name in wanted and not isinstance(each, held)}


def parameter_shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the parameters that a module owns."""
    return tuple(tuple(each.shape) for each in owned_parameters(module))


def run_once(
    party: Party,
    batch: Batch,
    layers: Mapping[str, nn.Module],
    observe: Callable[[ModuleCall, str, Tensor], None] = lambda *_: None,
    operations: OperationChoice | None = None,
) -> Capture[None]:
    """Run a network over a batch, up to its end or its first error, and leave no trace of it; return the capture."""
    network = party.inspected.network
    with (
        preserved(network, party.seed, party.mode, party.inspected.modules.values()),
        capture(network, layers, observe, operations=operations) as captured,
    ):
        try:
            with torch.no_grad(), party.casting():
                network(*batch.args, **batch.kwargs)
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - the pass that counts raises it again
            reraise_internal(raised)
    return captured


def traced(party: Party, batch: Batch) -> list[Call]:
    """Run a network over a batch, to its end or first error; return its calls in the order in which they finish."""
    calls: dict[CallKey, list[Any]] = {}

    def observe(call: ModuleCall, _slot: str, tensor: Tensor) -> None:
        shape = () if tensor.is_nested else tuple(tensor.shape)
        kind = type(call.module).__name__ if call.operation is None else call.operation.name
        owned = parameter_shapes(call.module) if call.operation is None else ()
        calls.setdefault((call.layer, call.call), [kind, [], owned])[1].append(shape)

    chosen = None if party.operations is None else OperationChoice(party.operations.patterns)
    captured = run_once(party, batch, party.hooked, observe, chosen)
    unchanged = {(each.layer, each.call) for each in captured.observations if each.passed_through}
    return [
        Call(key, kind, tuple(shapes), owned) for key, (kind, shapes, owned) in calls.items() if key not in unchanged
    ]


def _autocast(device: str, dtype: torch.dtype | None, *, enabled: bool) -> AbstractContextManager[object]:
    """Return autocast in a given state; a device without autocast is never switched."""
    if not enabled and not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, dtype, enabled=enabled, cache_enabled=False)
