"""One of the networks that run in lockstep: its hooks, and where it pauses."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hookscope.differences.alignment import Call, CallKey
from hookscope.differences.pausable_threads import AbandonedError, PausableThread, RandomStates
from hookscope.differences.tensor_versions import TensorVersion, TensorVersions
from hookscope.hooks.autograd import plain_arithmetic
from hookscope.hooks.calls import Hook
from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.observed import ModuleCall, Operation
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


class PairedOutput(NamedTuple):
    """An output that has a partner.

    Attributes:
        output: Its tensor is always there.
        inputs: Of the call; of a call that overwrote its first input, that one alone.
        channel_axis: The axis of the tensor that counts channels; None if none does.
        grids: The spatial sizes of maps up to here, latest last.
    """

    key: Key
    layer: str
    output: TensorVersion
    inputs: tuple[TensorVersion, ...] = ()
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


Stop = PairedOutput | Finished | Ready


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What is known of an output without its values, from the first batch.

    Attributes:
        operation: The operation; None for a module.
        inputs: For each input of an operation the name of the parameter, buffer or attribute that it is; "" for others,
            None for an input that the operation has overwritten.
    """

    label: str
    layer: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    operation: Operation | None = None
    inputs: tuple[str | None, ...] = ()


@dataclass(slots=True, kw_only=True)
class HookedNetwork:
    """A network, how it runs, and its outputs so far.

    Attributes:
        title: Its name in messages: "A (resnet34)".
        selected: The layers that have rows.
        hooked: The selected layers, the default layers, and the modules around them.
        partner: Maps a call of this network to its key in A; None for a call without a partner.
        autocast: The dtype of autocast; None for none.
        cpu_threads: Number of CPU threads; None for torch's default.
        keeps: What to keep of each call until it returns: a copy of its inputs from before any hook, or the states of
            autocast and of the random generators.
        copies_all: Whether to also copy inputs that were seen before, before they are overwritten.
        own_inputs: Gives the batch to run on in place of one of A's.
        batch: The next batch; None ends the run.
        output_forms: Outputs of all batches, in order, by (layer, call, which).
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
    cpu_threads: int | None = None
    keeps: Literal["inputs", "states", ""] = ""
    partner: Callable[[CallKey], CallKey | None] = lambda key: key
    copies_all: bool = False
    own_inputs: Callable[[Batch], Batch] = lambda batch: batch
    batch: Batch | None = None
    rewinds: bool = False
    output_forms: dict[tuple[str, int, int], OutputForm] = field(default_factory=dict)
    passed_through: dict[tuple[str, int, int], bool] = field(default_factory=dict)
    captured: Capture[int] | None = None
    _given: dict[str, list[Any]] = field(default_factory=dict)
    _counts: Counter[object] = field(default_factory=Counter)
    _versions: TensorVersions = field(default_factory=TensorVersions)
    _overwrote: dict[CallKey, TensorVersion] = field(default_factory=dict)
    _stored: Mapping[int, tuple[Tensor, str, int]] = field(default_factory=dict)
    _is_paused: bool = False

    def run(self, thread: PausableThread[Stop]) -> None:
        """Run all batches in a thread, pausing at each output that has a partner."""
        if self.cpu_threads is not None:
            torch.set_num_threads(self.cpu_threads)
        with ExitStack() as block:
            self._run(thread, block)

    def _run(self, thread: PausableThread[Stop], block: ExitStack) -> None:
        module = self.inspected.network
        modules = self.inspected.modules.values()
        state = block.enter_context(preserved(module, self.seed, self.mode, modules))
        self._stored = {} if self.operations is None else _stored_tensors(self.inspected.modules)
        self.captured = block.enter_context(
            capture(
                module,
                self.hooked,
                lambda call, slot, tensor: self._observe(thread, call, slot, tensor),
                edits=self.edits.by_name,
                operations=self.operations,
            )
        )
        block.enter_context(self._before_calls())
        state.mark_hooks()
        is_first = True
        while self._next(thread, state, is_first=is_first):
            is_first = False

    def _next(self, thread: PausableThread[Stop], state: Preserved, *, is_first: bool) -> bool:
        """Run the next batch; return whether there was one."""
        thread.pause(Ready(), breakable=False)
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
        self._versions = TensorVersions()
        self.recorder.start(batch.indices, pictures=batch.pictures)
        thread.pause(Ready(has_batch=True), breakable=False)
        if thread.breaks_off:  # before the forward pass began
            thread.breaks_off = False
            finished = Finished(error=AbandonedError())
        else:
            finished = self._forward(batch, thread)
        del batch
        for seen in self.captured.restart():
            if seen.value is not None:
                key = (seen.layer, seen.call, seen.value)
                self.passed_through[key] = seen.passed_through and self.passed_through.get(key, True)
        thread.pause(finished, breakable=False)
        return True

    def _forward(self, batch: Batch, thread: PausableThread[Stop]) -> Finished:
        try:
            with torch.no_grad(), self.casting():
                return Finished(self.inspected.network(*batch.args, **batch.kwargs))
        except AbandonedError as abandoned:
            if not thread.breaks_off:
                raise
            thread.breaks_off = False
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

    def has_rows(self, layer: str) -> bool:
        """Return whether a layer or operation has rows in the result."""
        return layer in self.selected or layer not in self.hooked  # operations are not hooked modules

    def copied(self, seen: PairedOutput, *, known_too: bool) -> tuple[PairedOutput, int]:
        """Return an output that lasts when the network goes on, and how many bytes were copied for it.

        Inputs that were seen before are left out, unless `known_too`.
        """
        output, taken = self._versions.kept(seen.output, known_too=True)
        inputs = []
        for each in seen.inputs:
            value, more = self._versions.kept(each, known_too=known_too or self.copies_all)
            inputs.append(value)
            taken += more
        return seen._replace(output=output, inputs=tuple(inputs)), taken

    def kept_of(self, layer: str) -> Any:
        """Pop what was kept of the latest call of a layer; None if nothing was."""
        given = self._given.get(layer)
        return given.pop() if given else None

    def _observe(self, thread: PausableThread[Stop], call: ModuleCall, slot: str, tensor: Tensor) -> int:
        """Record an output in the hook, and pause if it has a partner; return its index among the call's tensors."""
        place = (call.layer, call.call)
        which = self._counts[place]
        self._counts[place] += 1
        axis = None if tensor.is_nested else self.recorder.axes.channel_axis(call.maker, tuple(tensor.shape))
        if (*place, which) not in self.output_forms:
            kind = type(call.module).__name__ if call.operation is None else call.operation.name
            shape = () if tensor.is_nested else tuple(tensor.shape)
            dtype = str(tensor.dtype).removeprefix("torch.")
            inputs = () if call.operation is None else [self._stored_name(each, tensor) for _, each in call.inputs]
            label = row_label(call.layer, call.call, slot)
            self.output_forms[*place, which] = OutputForm(
                label, call.layer, kind, shape, dtype, call.operation, tuple(inputs)
            )
        partner = self.partner(place)
        if partner is not None:
            overwrote = self._overwrote.pop(place, None)
            given = [self._versions.of(each) for _, each in call.inputs] if overwrote is None else [overwrote]
            grids = tuple(self.recorder.grids_of((call.layer, call.call, slot), tensor, axis))
            thread.pause(
                PairedOutput((*partner, which), call.layer, self._versions.of(tensor), tuple(given), axis, grids)
            )
        return which

    def _stored_name(self, given: Tensor, output: Tensor) -> str | None:
        tensor, name, version = self._stored.get(id(given), (given, "", 0))
        return None if given is output else name if tensor._version == version else ""

    @contextmanager
    def _before_calls(self) -> Iterator[None]:
        """Add pre-hooks that copy inputs about to be overwritten, and keep what `keeps` names."""
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
                value = self._versions.of(given[0][1])
                self._overwrote[place] = self._versions.kept(value, known_too=self.copies_all)[0]


def _stored_tensors(modules: Mapping[str, nn.Module]) -> dict[int, tuple[Tensor, str, int]]:
    """Return the parameters, buffers and other tensors that modules hold, by `id`, with names and versions."""
    found: dict[int, tuple[Tensor, str, int]] = {}
    for name, module in modules.items():
        for key, value in {**vars(module), **module._buffers, **module._parameters}.items():
            if isinstance(value, Tensor) and not value.is_inference():
                found.setdefault(id(value), (value, f"{name}.{key}" if name else key, value._version))
    return found


def layers_to_hook(inspected: InspectedNetwork, selected: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers to hook: the selected ones, the default ones, and all modules around them."""
    wanted = {*selected, *default_layers(inspected.modules)}
    around = {name.rpartition(".")[0] for name in wanted if name}
    while around - wanted:
        wanted |= around
        around = {name.rpartition(".")[0] for name in around if name}
    held = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    return {name: each for name, each in inspected.modules.items() if name in wanted and not isinstance(each, held)}


def parameter_shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the parameters that a module owns itself."""
    return tuple(tuple(each.shape) for each in owned_parameters(module))


def coarsest_eps(networks: Sequence[HookedNetwork]) -> float:
    """Return the machine epsilon of the coarsest dtype that A and B compute in."""
    return max(_epsilons(network)[0] for network in networks[:2])


def precision_notes(networks: Sequence[HookedNetwork]) -> list[str]:
    """Return notes about networks that multiply in TF32."""
    return [
        f"{network.title} multiplies in TF32, with 10 bits of mantissa, as torch does on CUDA unless told not to."
        for network in networks[:2]
        if _epsilons(network)[1] == "TF32"
    ]


def _epsilons(network: HookedNetwork) -> tuple[float, str]:
    device, dtype = network.inspected.placed
    kinds = [getattr(torch, dtype)] if dtype != "none" else [torch.float32]
    kinds += [network.autocast] if network.autocast else []
    known = [(torch.finfo(kind).eps, str(kind).removeprefix("torch.")) for kind in kinds]
    cudnn: Any = torch.backends.cudnn
    if device.startswith("cuda") and torch.float32 in kinds and cudnn.conv.fp32_precision == "tf32":
        known.append((2.0**-10, "TF32"))  # its mantissa has 10 bits
    return max(known)


def run_once(
    network: HookedNetwork,
    batch: Batch,
    layers: Mapping[str, nn.Module],
    observe: Callable[[ModuleCall, str, Tensor], None] = lambda *_: None,
    operations: OperationChoice | None = None,
) -> Capture[None]:
    """Run a network over a batch, up to its end or its first error, and leave no trace of it; return the capture."""
    module = network.inspected.network
    with (
        preserved(module, network.seed, network.mode, network.inspected.modules.values()),
        capture(module, layers, observe, operations=operations) as captured,
    ):
        try:
            with torch.no_grad(), network.casting():
                module(*batch.args, **batch.kwargs)
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - the pass that counts raises it again
            reraise_internal(raised)
    return captured


def traced(network: HookedNetwork, batch: Batch) -> list[Call]:
    """Run a network over a batch, to its end or first error; return its calls in the order in which they finish."""
    calls: dict[CallKey, list[Any]] = {}

    def observe(call: ModuleCall, _slot: str, tensor: Tensor) -> None:
        shape = () if tensor.is_nested else tuple(tensor.shape)
        kind = type(call.module).__name__ if call.operation is None else call.operation.name
        owned = parameter_shapes(call.module) if call.operation is None else ()
        calls.setdefault((call.layer, call.call), [kind, [], owned])[1].append(shape)

    chosen = None if network.operations is None else OperationChoice(network.operations.patterns)
    captured = run_once(network, batch, network.hooked, observe, chosen)
    unchanged = {(each.layer, each.call) for each in captured.observations if each.passed_through}
    return [Call(key, kind, tuple(shapes), owned, key in unchanged) for key, (kind, shapes, owned) in calls.items()]


def _autocast(device: str, dtype: torch.dtype | None, *, enabled: bool) -> AbstractContextManager[object]:
    """Return autocast in a given state; a device without autocast is never switched."""
    if not enabled and not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, dtype, enabled=enabled, cache_enabled=False)
