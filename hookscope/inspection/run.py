"""What runs of `inspect` and `inspect_gradients` share: preparation, gathering and reporting."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from hookscope.hooks.callers import have_own_operations, stands_for_torchs
from hookscope.hooks.forward_hooks import Capture
from hookscope.hooks.operations import EVERYTHING, OperationChoice
from hookscope.hooks.patterns import ACTIVATIONS, exact_operation, is_operation_pattern, parse_operation_pattern
from hookscope.hooks.selection import module_index, select_from
from hookscope.inputs import Batch
from hookscope.inspection.edit_placement import PlacedEdits, place_edits
from hookscope.inspection.edits import Edit
from hookscope.inspection.execution import calls_in_operators, calls_of_forward, execution_order, may_call_forward
from hookscope.inspection.failures import failure_message, locate, reraise_internal
from hookscope.inspection.network import BatchQueue, InspectedNetwork
from hookscope.inspection.rows import Recorder, Rows, predictions, unnamed_warning
from hookscope.inspection.state.preservation import Preserved
from hookscope.inspection.verification import Outcome, verification_warnings, verify_outcome
from hookscope.models.torchscript import ScriptLayer
from hookscope.results.activations import Verification
from hookscope.results.comparison import Prediction
from hookscope.results.inputs import InputRecord
from hookscope.results.network import Failure
from hookscope.statistics import native
from hookscope.statistics.library import missing_because
from hookscope.statistics.reducer import Measured
from hookscope.text import printable, some_of

Seen = TypeVar("Seen")

_WITHOUT_KERNEL = (
    "Statistics are computed by NumPy, which takes several times as long as the compiled kernel. This installation "
    "lacks it ({}); wheels for Linux and macOS have it."
)


@dataclass(frozen=True, slots=True)
class Break:
    """How a batch failed.

    Attributes:
        failure: Where; None if no module raised.
        overwritten: Whether a tensor was overwritten that the backward pass needed.
    """

    message: str
    failure: Failure | None = None
    error: BaseException | None = None
    overwritten: bool = False


@dataclass(slots=True, kw_only=True)
class Run:
    """One run: its options, and what has been gathered so far.

    Attributes:
        state: A point in the run to go back to.
        captured: What the hooks have seen in the latest pass.
        output_key: Which of several outputs holds the class scores; None for the only one.
        verify: Whether the first batch is to be compared to a pass without hooks.
        repeated: Of the batches that ran.
        best: The best classes of the inputs that ran.
        is_broken: Whether the network raised on every input.
        silent: Why layers that ran in the first batch have no row.
        made: Modules that the network has made in the first batch.
        verification: How the comparison ended; None before it, or without one.
    """

    inspected: InspectedNetwork
    queue: BatchQueue
    selected: Mapping[str, nn.Module]
    operations: OperationChoice | None
    edits: PlacedEdits
    recorder: Recorder
    state: Preserved
    captured: Capture[Measured]
    output_key: str | None
    verify: bool
    rows: Rows = field(default_factory=Rows)
    records: list[InputRecord] = field(default_factory=list)
    repeated: frozenset[str] = frozenset()
    best: list[Prediction] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    made: dict[str, nn.Module] = field(default_factory=dict)
    is_broken: bool = False
    unnamed: str = ""  # why predictions have no names, once an output shows it
    verification: Verification | None = None

    def broken(self, raised: BaseException) -> Break:
        """Describe what the model raised in its forward pass; hookscope's own errors are raised again."""
        error = reraise_internal(raised)
        failure = locate(self.inspected.modules, error)
        return Break(failure_message(self.inspected.info.name, failure, error), failure, error)

    def find_silent(self, batch: Batch) -> None:
        """Find out which modules this batch, the first, has made, and why those that did not run are silent."""
        before = {*map(id, self.inspected.modules.values())}
        held = [child for each in self.inspected.modules.values() for child in each._modules.values()]
        if not before.issuperset(id(child) for child in held if child is not None):
            modules, _ = module_index(self.inspected.network)
            self.made = {name: each for name, each in modules.items() if id(each) not in before}
        called = self.captured.called
        silent = {name: each for name, each in self.selected.items() if name not in called}
        if not silent:
            return
        with self.captured.detached(), self.edits.uncounted():
            if self.captured.traced:
                for name, place in calls_in_operators(self.inspected.network, silent, batch.args, batch.kwargs).items():
                    self.silent[name] = f"it runs inside {place}, which torch traces without hooks"
            if may_call_forward(self.inspected.modules.values()):
                lines = calls_of_forward(self.inspected.network, silent, batch.args, batch.kwargs)
                for name, line in lines.items():
                    where = line and f" at {line}"
                    reason = f"called as {name}.forward(…){where}, which skips hooks: call {name}(…) instead"
                    self.silent.setdefault(name, reason)

    def predict(self, output: object, places: Sequence[int]) -> None:
        """Note the best classes of a batch whose inputs have these positions in the run."""
        categories = self.inspected.info.categories
        self.best += predictions(output, categories, places, self.output_key, multi_label=self.inspected.multi_label)
        self.unnamed = self.unnamed or unnamed_warning(output, categories, places, self.output_key)

    def finish(self, batch: Batch) -> None:
        """Count the inputs of a batch that went through the network."""
        self.records.extend(batch.records)
        self.repeated |= batch.repeated

    def repeated_arguments(self) -> tuple[str, ...]:
        """Return the arguments of which several inputs share one row."""
        return tuple(sorted(self.repeated)) if len(self.records) > 1 else ()

    def notes(self) -> tuple[str, ...]:
        """Return notes, which need no action: about inputs, the network, what hooks miss in it, and what is slower."""
        known = (*_shared_row(self.repeated_arguments(), len(self.records)), *self.inspected.notes)
        known = (*known, *_traced(self.captured.traced), *_made(self.made, self.captured.copies))
        if self.inspected.placed[0] == "cpu" and native.load_kernel() is None:
            known = (*known, _WITHOUT_KERNEL.format(missing_because()))
        return known if self.operations is None else (*known, *unseen_in_scripts(self.inspected.modules))

    def missing_operations(self) -> str:
        """Return the message for a pattern of operations that selected nothing; "" if all selected something."""
        missing = "" if self.operations is None else self.operations.missing()
        return " ".join([missing, *unseen_in_scripts(self.inspected.modules)]) if missing else ""

    def warnings(self, own: Iterable[str] = ()) -> tuple[str, ...]:
        """Return what a reader must see, each sentence once, with `own` after those about the network."""
        verification = verification_warnings(self.verification, self.inspected.info.name)
        unnamed = [self.unnamed] if self.unnamed else []
        remarks = self.queue.remarks if not self.is_broken else ()
        everything = (*self.inspected.warnings, *own, *verification, *self.edits.warnings(), *remarks)
        return tuple(dict.fromkeys([*everything, *unnamed]))


def run_batches(
    queue: BatchQueue,
    run: Callable[[Batch], Break | None],
    records: Sequence[InputRecord],
    finished: Callable[[int], None],
    *,
    keep: Callable[[Batch], Seen],
    undo: Callable[[], None],
    takes_apart: bool = True,
) -> tuple[Break, Seen] | None:
    """Run all batches; with an `on_error`, leave out the inputs that the model raises on.

    Args:
        queue: The batches.
        run: Runs one batch, and returns how it failed.
        records: The inputs that ran; `run` adds to them.
        finished: Called after each batch with the number of these.
        keep: Returns what the hooks saw of the batch that failed.
        undo: Undoes what the batch that failed has changed.
        takes_apart: Whether the inputs of a larger batch are run again, one by one.

    Returns:
        How the run ended early, or, where every input was left out, how the first one failed, with what `keep`
        returned for that batch; None otherwise.
    """
    first: tuple[Break, Seen] | None = None
    for batch in queue:
        count = len(records)
        broken = run(batch)
        if broken is not None:
            if queue.on_error is None or broken.error is None or broken.overwritten:
                return broken, keep(batch)
            is_left_out = queue.set_aside(batch, broken.message, broken.error, takes_apart=takes_apart)
            if is_left_out and not count and first is None:
                first = broken, keep(batch)
                if queue.peek() is None:  # no other input ran: nothing is to be undone
                    return first
            undo()
        finished(len(records))
    return None if records else first


def _shared_row(arguments: Sequence[str], count: int) -> tuple[str, ...]:
    if not arguments:
        return ()
    names = some_of([*dict.fromkeys(each.split("'")[1] for each in arguments)], 3)
    seen = f"layers that are computed from {names} alone have seen 1 input, not {count:,}"
    return (f"All {count:,} inputs share the same {names}: {seen}.",)


def _traced(operators: Iterable[str]) -> tuple[str, ...]:
    places = some_of([*operators], 3)
    return (f"Layers and operations inside {places} have no rows: torch traces what runs there.",) if places else ()


def _made(modules: Mapping[str, nn.Module], copies: Sequence[str]) -> Iterator[str]:
    if modules:
        names = [printable(f"{name} ({type(each).__name__})", 80) for name, each in modules.items()]
        yield f"Made during the forward pass, and so without a row: {some_of(names, 3)}."
    if copies:
        names = [printable(name, 80) or "(model)" for name in copies]
        yield f"The network runs copies that it makes during the forward pass; these have no rows: {some_of(names, 3)}."


def unseen_in_scripts(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return a note that names the modules of TorchScript, whose operations are not seen; none if there are none.

    Modules inside a named one, and layers of torch's, are left out. `modules` has each after the one that holds it.
    """
    scripts: list[str] = []
    for name, module in modules.items():
        if _is_script(module) and not any(not outer or name.startswith(f"{outer}.") for outer in scripts):
            scripts.append(name)
    if not scripts:
        return ()
    shown = some_of([printable(name, 80) or "(model)" for name in scripts], 3)
    return (f"Operations inside TorchScript are not seen: {shown}.",)


def _is_script(module: nn.Module) -> bool:
    if isinstance(module, ScriptLayer):
        return not stands_for_torchs(module)
    return isinstance(module, torch.jit.ScriptModule)


def choose(
    inspected: InspectedNetwork,
    queue: BatchQueue,
    layers: Sequence[str],
    edits: Sequence[str | Edit],
    recorder: Recorder,
    *,
    ops: bool,
    judged: bool = False,
    with_activations: bool = False,
) -> tuple[dict[str, nn.Module], OperationChoice | None, PlacedEdits]:
    """Return the layers that patterns select, the operations, and the edits ready for `capture`.

    Patterns of operations alone select no layers. Whether they select an operation is known after the run: see
    `OperationChoice.missing`.

    Args:
        inspected: The network.
        queue: Its inputs, for patterns that choose by position.
        layers: Patterns as for `--layer`.
        edits: As for `--edit`.
        recorder: Tells which axis counts channels.
        ops: Whether all operations are selected.
        judged: Whether operations that verdicts are about are also observed, if the network's own code or TorchScript,
            where they are not seen, may call any.
        with_activations: Whether activation functions are selected if `layers` is empty.

    Raises:
        LayerNotFoundError: If a pattern or an edit selects nothing.
        UsageError: If a pattern or an edit is malformed.
    """

    def order() -> list[str]:
        return execution_order(inspected.network, queue)

    others, operations = split_patterns(layers, inspected.modules, ops=ops)
    if with_activations and not layers and not ops:
        operations = OperationChoice([ACTIVATIONS])
    selected = {} if others is None else select_from(inspected.modules, inspected.aliases, others, order)
    placed = place_edits(edits, inspected.network, order, recorder.axes)
    modules = inspected.modules.values()
    judged = judged and (have_own_operations(modules) or any(map(_is_script, modules)))
    if placed.of_operations or judged:
        operations = operations or OperationChoice(())
        operations.edits, operations.judged = placed.of_operations, judged
    return selected, operations, placed


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
    return None if only_operations else of_layers, OperationChoice(chosen) if chosen else None


def verified(
    run: Run,
    hooked: Outcome,
    began: Preserved,
    forward: Callable[[], Outcome],
    hooks: Callable[[Mapping[str, nn.Module], OperationChoice | None], AbstractContextManager[object]],
) -> Verification:
    """Compare the outcome of the first batch to that without hooks; the run's state is unchanged by it.

    `began` leads back to where the batch began, `forward` runs it, and `hooks` puts hooks on some of the layers and
    operations, to find out whose make a difference.
    """
    run.state.mark()  # to go on from here
    layers = [*dict.fromkeys(seen.layer for seen in run.captured.observations)]

    def with_hooks(chosen: Sequence[str]) -> Outcome:
        began.rewind()
        modules = {layer: run.inspected.modules[layer] for layer in chosen if layer in run.inspected.modules}
        patterns = [exact_operation(layer) for layer in chosen if layer not in modules]
        operations = OperationChoice(patterns) if patterns else None
        with run.captured.detached(), hooks(modules, operations):
            return forward()

    try:
        return verify_outcome(hooked, layers, with_hooks)
    finally:
        run.state.rewind()
