"""What runs of `inspect` and `inspect_gradients` share: preparation, gathering and reporting."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hookscope.errors import LayerNotFoundError
from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.callers import have_own_operations, stands_for_torchs
from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.observed import Observation
from hookscope.hooks.operations import EVERYTHING, OperationChoice
from hookscope.hooks.patterns import ACTIVATIONS, exact_operation, is_operation_pattern, parse_operation_pattern
from hookscope.hooks.selection import module_index, select_from
from hookscope.inputs.batches import Batch
from hookscope.inspection.edit_placement import PlacedEdits, place_edits
from hookscope.inspection.edits import Edit
from hookscope.inspection.execution import calls_in_operators, calls_of_forward, execution_order
from hookscope.inspection.failures import failure_message, locate, reraise_internal
from hookscope.inspection.network import BatchQueue, InspectedNetwork
from hookscope.inspection.rows import Recorder, Rows, merge_observations, predictions
from hookscope.inspection.state.preservation import Mode, Preserved
from hookscope.inspection.verification import Outcome, verification_warnings, verify_outcome
from hookscope.models.torchscript import ScriptLayer
from hookscope.results.activations import NO_ROWS, NOT_SEEN, UncalledLayer, Verification
from hookscope.results.comparison import Prediction
from hookscope.results.inputs import InputRecord
from hookscope.results.network import Failure
from hookscope.statistics import native
from hookscope.statistics.channel_axis import AxisReader
from hookscope.statistics.library import missing_because
from hookscope.statistics.reducer import Measured, Reducer, prepare_kernel
from hookscope.text import an, printable, some_of

_WITHOUT_KERNEL = (
    "This installation lacks the compiled kernel ({}), so NumPy computes the statistics, several times slower. Wheels "
    "for Linux and macOS have the kernel."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionOptions:
    """What a run observes, and how it runs.

    Attributes:
        layers: Patterns as for `--layer`; none means modules that own parameters, and leaves: see `select_layers`.
        hooked: Names of the modules to observe; None for the modules that `layers` selects.
        ops: Whether all operations are observed.
        with_activations: Without `layers`, also observe the activation functions that the network's own code calls.
        for_rules: Also observe operations that rules are about; the result's `hidden` names the rows that are only
            for them.
        edits: As for `--edit`.
        seed: Of the random numbers that the passes may draw.
        output_key: Which of several outputs holds the class scores; None for the only one.
        verify: Run the first batch once more without hooks, and compare the outputs bit for bit; not with edits.
        distributions: Count how values are distributed, for quantiles, histograms and the verdict
            `saturated-activation`, which takes more time.
        keeps_values: Keep values of every tensor, so that the run can be compared with others.
        grids_for: Of how many inputs, from the first, to keep maps.
        max_channels: How many channels of each map; None for all.
    """

    layers: Sequence[str] = ()
    hooked: Collection[str] | None = None
    ops: bool = False
    with_activations: bool = False
    for_rules: bool = False
    edits: Sequence[str | Edit] = ()
    seed: int = 0
    output_key: str | None = None
    verify: bool = False
    distributions: bool = False
    keeps_values: bool = False
    grids_for: int = 0
    max_channels: int | None = None

    def reducer(self, network: nn.Module) -> Reducer:
        """Return what measures tensors of a network as these options want."""
        prepare_kernel(network)
        return Reducer(distributions=self.distributions, keeps_values=self.keeps_values)


class Chosen(NamedTuple):
    """What `capture` is to observe and to change: layers by name, operations, and edits."""

    layers: dict[str, nn.Module]
    operations: OperationChoice | None
    edits: PlacedEdits


@dataclass(frozen=True, slots=True)
class Break:
    """How a batch failed.

    Attributes:
        failure: Where; None if no module raised.
        overwritten: Whether a tensor was overwritten that the backward pass needed.
        count: Adds what was seen of the batch to the run.
    """

    message: str
    failure: Failure | None = None
    error: BaseException | None = None
    overwritten: bool = False
    count: Callable[[], None] = lambda: None

    @property
    def raised(self) -> bool:
        """Whether the model or its loss raised an error of its own."""
        return self.error is not None and not self.overwritten


@dataclass(slots=True, kw_only=True)
class Run:
    """One run: its options, and what has been gathered so far.

    Attributes:
        state: A point in the run to go back to.
        captured: What the hooks have seen in the latest pass.
        broadcast_inputs: As in the batches that ran, see `Batch`.
        best: The best classes of the inputs that ran.
        is_broken: Whether the network raised on every input.
        silent: Why layers that ran in the first batch have no row.
        made: Modules that the network has made in the first batch.
        verification: How the comparison ended; None before it, or without one.
    """

    options: InspectionOptions
    inspected: InspectedNetwork
    queue: BatchQueue
    chosen: Chosen
    recorder: Recorder
    state: Preserved
    captured: Capture[Measured]
    rows: Rows = field(default_factory=Rows)
    records: list[InputRecord] = field(default_factory=list)
    broadcast_inputs: frozenset[str] = frozenset()
    best: list[Prediction] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    made: dict[str, nn.Module] = field(default_factory=dict)
    is_broken: bool = False
    unnamed: str = ""  # why predictions have no names, once an output shows it
    verification: Verification | None = None

    @property
    def verifies(self) -> bool:
        """Whether the first batch is to be compared to a pass without hooks."""
        return self.options.verify and not self.options.edits

    def broken(self, raised: BaseException) -> Break:
        """Describe what the model raised in its forward pass; hookscope's own errors are raised again."""
        error = reraise_internal(raised)
        failure = locate(self.inspected.modules, error)
        return Break(failure_message(self.inspected.info.name, failure, error), failure, error)

    def find_silent(self, batch: Batch) -> None:
        """Find out which modules this batch, the first, has made, and why those that did not run are silent."""
        network, before = self.inspected.network, {*map(id, self.inspected.modules.values()), id(None)}
        held = [child for module in self.inspected.modules.values() for child in module._modules.values()]
        if not before.issuperset(map(id, held)):
            self.made = {name: module for name, module in module_index(network)[0].items() if id(module) not in before}
        called = self.captured.called
        silent = {name: layer for name, layer in self.chosen.layers.items() if name not in called}
        if not silent:
            return
        with self.captured.detached(), self.chosen.edits.uncounted():
            if self.captured.traced:
                for name, place in calls_in_operators(network, silent, batch).items():
                    self.silent[name] = f"it runs inside {place}, which torch traces without hooks"
            for name, line in calls_of_forward(self.inspected.modules, silent, batch).items():
                where = line and f" at {line}"
                reason = f"called as {name}.forward(…){where}, which skips hooks: call {name}(…) instead"
                self.silent.setdefault(name, reason)

    def predicted(self, output: object, places: Sequence[int]) -> list[Prediction]:
        """Return the best classes of a batch whose inputs have these positions in the run."""
        inspected, key = self.inspected, self.options.output_key
        best, unnamed = predictions(output, inspected.info.categories, places, key, multi_label=inspected.multi_label)
        self.unnamed = self.unnamed or unnamed
        return best

    def count(self, batch: Batch, observations: Sequence[Observation[Measured]]) -> None:
        """Count the inputs of a batch that is not left out, and what the hooks have seen of it."""
        merge_observations(self.rows, observations, len(batch.records))
        self.records.extend(batch.records)
        self.broadcast_inputs |= batch.broadcast_inputs

    def repeated_arguments(self) -> tuple[str, ...]:
        """Return the arguments of which several inputs share one row."""
        return tuple(sorted(self.broadcast_inputs)) if len(self.records) > 1 else ()

    def notes(self) -> tuple[str, ...]:
        """Return notes, which need no action: about inputs, the network, what hooks miss in it, and what is slower."""
        notes, count = [*self.inspected.notes], len(self.records)
        if arguments := self.repeated_arguments():
            # Each is a path such as "['meta'][0]", or in the other quotation marks.
            names = some_of([*dict.fromkeys(path[2:].partition(f"{path[1]}]")[0] for path in arguments)], 3)
            seen = f"layers computed from {names} alone have seen 1 input, not {count:,}"
            notes.insert(0, f"All {count:,} inputs share the same {names}: {seen}.")
        if places := some_of([*self.captured.traced], 3):
            notes.append(f"{NO_ROWS} layers and operations inside {places}: torch traces what runs there.")
        if self.made:
            made = [printable(f"{name} ({type(module).__name__})", 80) for name, module in self.made.items()]
            notes.append(f"{NO_ROWS} modules that are made in the forward pass: {some_of(made, 3)}.")
        if self.captured.copies:
            copies = some_of([printable(name, 80) or "(model)" for name in self.captured.copies], 3)
            notes.append(f"{NO_ROWS} copies of modules that the network makes in its forward pass: {copies}.")
        if self.inspected.placed[0] == "cpu" and native.load_kernel() is None:
            notes.append(_WITHOUT_KERNEL.format(missing_because()))
        if self.chosen.operations is not None or self.options.for_rules:
            operations = [seen.operation for seen in self.rows.seen.values() if seen.operation is not None]
            shown = {operation.owner for operation in operations if ACTIVATIONS.matches("", operation.name)}
            notes += (*unseen_in_scripts(self.inspected.modules), *unseen_activations(self.inspected.modules, shown))
        return tuple(notes)

    def end(self, broken: Break | None) -> None:
        """Raise LayerNotFoundError if a pattern of operations has selected nothing in a run that was not broken."""
        self.is_broken = broken is not None
        operations = self.chosen.operations
        if broken is None and operations is not None and (missing := operations.missing()):
            raise LayerNotFoundError(" ".join([missing, *unseen_in_scripts(self.inspected.modules)]))

    def uncalled(self, failure: Failure | None, mode: Mode = "eval") -> tuple[UncalledLayer, ...]:
        """List the selected modules that never ran, and why; `failure` is where the forward pass raised, if it did."""
        result = []
        called = self.captured.called | ({failure.layer} if failure else set())
        traced = some_of([*self.captured.traced], 3)
        for name, module in self.chosen.layers.items():
            if name in called:
                continue
            kind, parent = type(module).__name__, self.inspected.modules[name.rpartition(".")[0]]
            if name in self.silent:
                reason = self.silent[name]
            elif isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
                reason = f"{an(kind)} is not called itself, its items are"
            elif isinstance(parent, nn.MultiheadAttention):
                reason = f"{type(parent).__name__} uses its weight directly; select that module instead"
            elif failure is not None:
                reason = "the forward pass raised before it"
            else:
                outside = traced and f" outside {traced}"
                used = ", or used its weight directly" if self.inspected.parameter_counts[name] else ""
                reason = f"the forward pass did not call it in {mode} mode{outside}{used}"
            result.append(UncalledLayer(name, kind, self.inspected.parameter_counts[name], reason))
        return tuple(result)

    def warnings(self, extra: Iterable[str] = ()) -> tuple[str, ...]:
        """Return what a reader must see, each sentence once, with `extra` after those about the network."""
        verification = verification_warnings(self.verification, self.inspected.info.name)
        everything = [*self.inspected.warnings, *extra, *verification, *self.chosen.edits.warnings()]
        everything += () if self.is_broken else self.queue.remarks
        return tuple(dict.fromkeys(filter(None, [*everything, self.unnamed])))


def run_batches(
    queue: BatchQueue,
    run: Callable[[Batch], Break | None],
    records: Sequence[InputRecord],
    finished: Callable[[int], None] | None,
    undo: Callable[[], None],
    *,
    takes_apart: bool = True,
) -> Break | None:
    """Run all batches; with an `on_error`, leave out the inputs that the model raises on.

    Args:
        queue: The batches.
        run: Runs one batch, and returns how it failed.
        records: The inputs that ran; `run` adds to them.
        finished: Called after each batch with the number of these.
        undo: Undoes what a batch that is left out has changed.
        takes_apart: Whether the inputs of a larger batch are run again, one by one.

    Returns:
        None if the run reached its end and did not leave out every input. Else how the batch failed that ended it, or
        the first one that was left out; what was seen of that batch has been counted.
    """
    first: Break | None = None
    for batch in queue:
        broken = run(batch)
        if broken is not None:
            if queue.on_error is None or broken.error is None or broken.overwritten:
                broken.count()
                return broken
            is_left_out = queue.set_aside(batch, broken.message, broken.error, takes_apart=takes_apart)
            if is_left_out and not records and first is None:
                first = broken
                if queue.peek() is None:  # no other input ran, so nothing needs undoing
                    break
            undo()
        if finished is not None:
            finished(len(records))
    if records or first is None:
        return None
    first.count()
    return first


def unseen_activations(modules: Mapping[str, nn.Module], shown: Container[str | None] = ()) -> Iterator[str]:
    """Yield a note on torch's layers whose activation is a function, unless that function has a row."""
    kinds = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    layers = [name for name, module in modules.items() if isinstance(module, kinds) and name not in shown]
    calling = [name for name in layers if not isinstance(attribute_of(modules[name], "activation"), nn.Module)]
    if unseen := [printable(name, 80) or "(model)" for name in calling]:
        remedy = "Build the layers with a module (activation=torch.nn.ReLU()); the same weights fit."
        yield f"Activation functions inside torch's own layers are {NOT_SEEN} {some_of(unseen, 3)}. {remedy}"


def unseen_in_scripts(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return a note that names the modules of TorchScript, whose operations are not seen; none if there are none.

    Modules inside a named one, and layers of torch's, are left out. `modules` lists outer modules first.
    """
    scripts: list[str] = []
    for name in _scripts(modules):
        if not any(not outer or name.startswith(f"{outer}.") for outer in scripts):
            scripts.append(name)
    shown = some_of([printable(name, 80) or "(model)" for name in scripts], 3)
    return (f"Operations inside TorchScript are {NOT_SEEN} {shown}.",) if scripts else ()


def _scripts(modules: Mapping[str, nn.Module]) -> list[str]:
    kinds = ScriptLayer | torch.jit.ScriptModule
    return [name for name, module in modules.items() if isinstance(module, kinds) and not stands_for_torchs(module)]


def choose(inspected: InspectedNetwork, queue: BatchQueue, options: InspectionOptions, axes: AxisReader) -> Chosen:
    """Return the layers that patterns select, the operations, and the edits ready for `capture`.

    Patterns of operations alone select no layers. Whether they select an operation is known after the run: see
    `OperationChoice.missing`. Patterns that choose by position need the inputs in the `queue`. Operations that verdicts
    are about are left out where neither the network's own code nor TorchScript can call any.

    Raises:
        LayerNotFoundError: If a pattern or an edit selects nothing.
        UsageError: If a pattern or an edit is malformed.
    """
    modules, order = inspected.modules, partial(execution_order, inspected.network, queue)
    others, operations = split_patterns(options.layers, modules, ops=options.ops)
    if options.with_activations and not options.layers and not options.ops:
        operations = OperationChoice([ACTIVATIONS])
    if options.hooked is not None:
        layers = {name: module for name, module in modules.items() if name in options.hooked}
    else:
        layers = {} if others is None else select_from(modules, inspected.aliases, others, order)
    placed = place_edits(options.edits, inspected.network, order, axes, lambda: queue.indices)
    judged = options.for_rules and (have_own_operations(modules.values()) or bool(_scripts(modules)))
    if operations is not None or placed.of_operations or judged:
        operations = operations or OperationChoice(())
        operations.edits, operations.for_rules, operations.modules = placed.of_operations, judged, modules
    return Chosen(layers, operations, placed)


def split_patterns(
    layers: Sequence[str], modules: Iterable[str], *, ops: bool
) -> tuple[list[str] | None, OperationChoice | None]:
    """Return the patterns of layers, None if no layer is meant, and the choice of operations, None if none is meant.

    Args:
        layers: Patterns as for `--layer`.
        modules: Names of the network's modules: one with a colon in it may be meant.
        ops: Whether all operations are meant, but those that patterns exclude.

    Raises:
        UsageError: If a pattern of operations is malformed.
    """
    with_colon = [name for name in modules if ":" in name]
    of_operations = [
        text
        for text in layers
        if is_operation_pattern(text) and not any(text.removeprefix("!") in name for name in with_colon)
    ]
    of_layers = [text for text in layers if text not in of_operations]
    chosen = [parse_operation_pattern(text) for text in of_operations]
    only_operations = not of_layers and not ops and any(not pattern.exclude for pattern in chosen)
    if ops:
        chosen.insert(0, parse_operation_pattern(EVERYTHING))
    return None if only_operations else of_layers, OperationChoice(chosen, only_operations) if chosen else None


def verified(
    run: Run,
    hooked: Outcome,
    began: Preserved,
    forward: Callable[[], Outcome],
    **watched: Any,
) -> Verification:
    """Compare the outcome of the first batch to that without hooks; the run's state is unchanged by it.

    `began` leads back to where the batch began, and `forward` runs it, with hooks on some of the layers and operations
    to find out whose make a difference; `watched` has arguments for `capture` about gradients.
    """
    run.state.mark()  # to go on from here
    layers = [*dict.fromkeys(seen.layer for seen in run.captured.observations)]

    def with_hooks(chosen: Sequence[str]) -> Outcome:
        began.rewind()
        modules = {layer: run.inspected.modules[layer] for layer in chosen if layer in run.inspected.modules}
        patterns = [exact_operation(layer) for layer in chosen if layer not in modules]
        operations = OperationChoice(patterns) if patterns else None
        network, ignore = run.inspected.network, lambda *_: None
        with run.captured.detached(), capture(network, modules, ignore, operations=operations, **watched):
            return forward()

    try:
        return verify_outcome(hooked, layers, with_hooks)
    finally:
        run.state.rewind()
