"""Run a model over its inputs and gather what its layers did: the pipeline behind `hookscope activations`."""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hookscope.errors import ModelError, UnfitInputError
from hookscope.hooks.forward_hooks import Capture, ModuleCall, Observation, capture
from hookscope.hooks.selection import module_index, select_from, unwrap
from hookscope.inputs import Batch, copy_of
from hookscope.inspection.edit_placement import place_edits
from hookscope.inspection.edits import Edit
from hookscope.inspection.failures import failure_message, locate, reraise_internal
from hookscope.inspection.network import BatchQueue, InspectedNetwork, count_parameters, inspected_network, queue_of
from hookscope.inspection.rows import (
    Key,
    Recorder,
    Row,
    fast_path_warning,
    feature_maps,
    layer_rows,
    merge_observations,
    predictions,
    uncalled,
)
from hookscope.inspection.state.preservation import Preserved, preserved
from hookscope.inspection.verification import Outcome, outcome_of, verification_warnings, verify_outcome
from hookscope.models import LoadedModel
from hookscope.results.activations import Activations, Failure, Prediction, Verification
from hookscope.results.inputs import InputRecord
from hookscope.results.network import ModuleRow
from hookscope.statistics import Measured, Reducer


class ForwardError(ModelError):
    """The model raised in its forward pass.

    Attributes:
        inspection: What was seen until then; its `failure` says where it broke off.
    """

    def __init__(self, message: str, inspection: Activations) -> None:
        """Carry the partial inspection with the message."""
        super().__init__(message)
        self.inspection = inspection


def inspect(  # noqa: PLR0913 - a run is described by its options
    model: nn.Module | LoadedModel,
    inputs: Tensor | Batch | Iterable[Batch],
    layers: Sequence[str] = (),
    *,
    grids_for: int = 0,
    max_channels: int | None = None,
    seed: int = 0,
    edits: Sequence[str | Edit] = (),
    output_key: str | None = None,
    verify: bool = False,
    distributions: bool = False,
    on_tensor: Callable[[str, Tensor, int | None], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
    on_error: Callable[[UnfitInputError], None] | None = None,
) -> Activations:
    """Run a model over its inputs in eval mode, without gradients, and report on the outputs of its layers.

    The model comes out as it went in, also after an exception: `preserved` in `hookscope.inspection.state` says what is
    restored. Statistics are taken at the moment a layer returns, before an in-place layer can overwrite its output.

    Args:
        model: The network, on its device, or what `load_model` returned.
        inputs: A tensor with the batch on axis 0, one batch, or any number of batches; on the model's device.
        layers: Patterns as for `--layer`; none means modules that own parameters, and leaves: see `select_layers`.
        grids_for: Keep feature maps for drawing, for this many inputs from the first.
        max_channels: Keep at most this many channels of each, the first ones; None keeps all.
        seed: Seeds the random numbers the forward pass may draw.
        edits: Changes to inputs or outputs: "layer3:output:zero(channels=3,7)".
        output_key: Which of several outputs holds the class scores: "logits", "[0]".
        verify: Run the first batch once more without hooks, and compare the outputs bit for bit; not with edits.
        distributions: Count how values are distributed, for quantiles and histograms, at some more time.
        on_tensor: Called in the hook with each output's label, the output itself, and the axis that counts its channels
            (None without one); clone what must outlive the call.
        on_batch: Called after each batch with the number of inputs finished, which one that the model raised on leaves
            as it was.
        on_error: Called for an input that the model raised on, which is then left out; the other inputs of its batch
            are run again, one by one. Without it the error is raised.

    Returns:
        What was seen.

    Raises:
        LayerNotFoundError: If a pattern selects nothing.
        ForwardError: If the model raised, with `on_error` on every input; carries what was seen until then.
        UsageError: If a pattern is malformed.
    """
    inspected = inspected_network(model)
    network = inspected.network
    queue = queue_of(inputs, on_error)

    def order() -> list[str]:
        return execution_order(network, queue)

    selected = select_from(inspected.modules, inspected.aliases, layers, order)
    recorder = Recorder(grids_for, max_channels, on_tensor, Reducer(distributions=distributions))
    placed = place_edits(edits, network, order, recorder)
    began = time.perf_counter()
    with (
        preserved(network, seed, modules=inspected.modules.values()) as state,
        capture(network, selected, recorder.observe, edits=placed.by_name) as captured,
    ):
        state.mark_hooks()
        run = _Run(inspected, captured, recorder, state, output_key, verify=verify and not edits)
        broken = _run_batches(run, queue, on_batch or (lambda _count: None))
    seconds = time.perf_counter() - began

    if broken is not None:
        merge_observations(run.rows, broken.seen)
        run.records.extend(broken.records)
    results = layer_rows(inspected, run.rows)
    device, dtype = inspected.placed
    inspection = Activations(
        model=inspected.info,
        inputs=tuple(run.records),
        rows=results,
        uncalled=uncalled(
            inspected,
            selected,
            captured.called if broken is None else captured.called | {broken.failure.layer},
            broke_off=broken is not None,
        ),
        feature_maps=feature_maps(results, recorder.kept),
        predictions=tuple(run.best),
        warnings=(
            *inspected.warnings,
            *fast_path_warning(inspected.modules, selected),
            *verification_warnings(run.verification, inspected.info.name),
            *placed.warnings(),
            *queue.remarks,
        ),
        notes=inspected.notes,
        failure=None if broken is None else broken.failure,
        seed=seed,
        device=device,
        dtype=dtype,
        timings={"forward": seconds},
        verification=run.verification,
    )
    if broken is not None:
        raise ForwardError(broken.message, inspection) from broken.error
    return inspection


class _Broken(NamedTuple):
    """A batch that the model raised on: what was seen of it until then, and where it broke off."""

    records: Sequence[InputRecord]
    seen: Sequence[Observation[Measured]]
    error: BaseException
    failure: Failure
    message: str


@dataclass(slots=True)
class _Run:
    """One run: what is fixed, and what has been gathered so far."""

    inspected: InspectedNetwork
    captured: Capture[Measured]
    recorder: Recorder
    state: Preserved
    output_key: str | None
    verify: bool
    rows: dict[Key, Row] = field(default_factory=dict)
    records: list[InputRecord] = field(default_factory=list)
    best: list[Prediction] = field(default_factory=list)
    verification: Verification | None = None


def _run_batches(run: _Run, queue: BatchQueue, finished: Callable[[int], None]) -> _Broken | None:
    """Run all batches; return the one that the run broke off at, if it did.

    With an `on_error`, inputs that the model raises on are left out. If nothing is left then, the first of them counts.
    """
    first_broken: _Broken | None = None
    for batch in queue:
        if run.records and queue.on_error is not None:
            run.state.mark()
        places = tuple(range(len(run.records), len(run.records) + len(batch.indices)))
        run.recorder.start(places)
        to_verify = run.verify and not run.records
        # The network may overwrite what it is given, and the batch may have to be given again.
        again = to_verify or (queue.on_error is not None and len(places) > 1)
        output, error = _outcome(run.inspected.network, copy_of(batch) if again else batch)
        run.recorder.settle()
        seen = run.captured.restart()
        if error is None:
            merge_observations(run.rows, seen)
            if to_verify:
                run.verification = _verified(run, batch, output, seen)
            run.records.extend(batch.records)
            run.best.extend(predictions(output, run.inspected.info.categories, places, run.output_key))
        else:
            failure = locate(run.inspected.modules, error)
            message = failure_message(run.inspected.info.name, failure, error)
            if queue.on_error is None:
                return _Broken(batch.records, seen, error, failure, message)
            if queue.set_aside(batch, message, error):
                first_broken = first_broken or _Broken(batch.records, seen, error, failure, message)
            run.recorder.forget()
            run.state.rewind()
        finished(len(run.records))
    return None if run.records else first_broken


def _outcome(network: nn.Module, batch: Batch) -> tuple[object, BaseException | None]:
    """Return what the network makes of a batch, or what it raises."""
    try:
        with torch.no_grad():
            return network(*batch.args, **batch.kwargs), None
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
        return None, reraise_internal(raised)


def _verified(run: _Run, batch: Batch, output: object, observations: Sequence[Observation[Measured]]) -> Verification:
    """Compare the output of the first batch to that without hooks."""
    network = run.inspected.network
    began = copy.copy(run.state)
    run.state.mark()  # to go on from here

    def with_hooks(layers: Sequence[str] = ()) -> Outcome:
        began.rewind()
        modules = {layer: run.inspected.modules[layer] for layer in layers}
        given = copy_of(batch)
        with torch.no_grad(), run.captured.detached(), capture(network, modules, lambda *_: None):
            return outcome_of(network(*given.args, **given.kwargs))

    try:
        layers = [*dict.fromkeys(seen.layer for seen in observations)]
        return verify_outcome(outcome_of(output), with_hooks, layers, with_hooks)
    finally:
        run.state.rewind()


def list_modules(
    model: nn.Module, args: Sequence[object] | None, layers: Sequence[str] = ()
) -> tuple[tuple[ModuleRow, ...], Failure | None]:
    """List every module with its parameters and the shapes that one forward pass gives it.

    Args:
        model: The network; on the meta device the pass costs next to nothing and computes shapes alone.
        args: Positional arguments of its forward, on the same device; None lists without shapes.
        layers: Patterns as for `--layer`, to mark what they select.

    Returns:
        One row per module in the order of `named_modules()`, and where the pass broke off if it did: rows then hold
        the shapes of what was reached.

    Raises:
        LayerNotFoundError: If a pattern selects nothing.
        UsageError: If a pattern is malformed.
    """
    network = unwrap(model)
    modules, aliases = module_index(network)
    counts, _ = count_parameters(modules)
    passes, failure = _passes(network, args, {}) if args is not None else ({}, None)
    selected = select_from(modules, aliases, layers, lambda: list(passes))
    rows = []
    for name, module in modules.items():
        seen = passes.get(name)
        rows.append(
            ModuleRow(
                name,
                type(module).__name__,
                counts[name],
                sum(parameter.numel() for parameter in module.parameters()),
                seen.call_count if seen else 0,
                seen.input_shapes if seen else (),
                tuple(seen.output_shapes) if seen else (),
                name in selected,
                f"also {', '.join(aliases[name])}" if name in aliases else "",
            )
        )
    return tuple(rows), failure


@dataclass(slots=True)
class _FirstCall:
    """Shapes of a module's first call, and how often it was called."""

    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: list[tuple[int, ...]]
    call_count: int


def execution_order(network: nn.Module, queue: BatchQueue) -> list[str]:
    """Return the names of all modules that run, in the order in which they first finish.

    The next batch is tried, and where the model raises and inputs may be left out, those after it. If it raises on all,
    the longest order counts. No batch is handed out.
    """
    longest: list[str] = []
    for ahead in count():
        batch = queue.peek(ahead)
        if batch is None:
            return longest
        passes, failure = _passes(network, batch.args, batch.kwargs)
        if failure is None or queue.on_error is None:
            return list(passes)
        longest = max(longest, list(passes), key=len)
    raise AssertionError


def _passes(
    network: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[dict[str, _FirstCall], Failure | None]:
    """Run the network once; return what its modules took and gave, in the order in which they first finished."""

    def shapes(call: ModuleCall, _slot: str, tensor: Tensor) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        return tuple(tuple(given.shape) for _, given in call.inputs), tuple(tensor.shape)

    failure = None
    with preserved(network, seed=0), capture(network, dict(network.named_modules()), shapes) as captured:
        try:
            with torch.no_grad():
                copies = tree_map_only(Tensor, _copy, (tuple(args), dict(kwargs)))  # it may overwrite what it is given
                network(*copies[0], **copies[1])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's code may raise anything
            reraise_internal(error)
            failure = locate(dict(network.named_modules()), error)
    passes: dict[str, _FirstCall] = {}
    for seen in captured.observations:
        inputs, output = seen.value or ((), ())
        known = passes.setdefault(seen.layer, _FirstCall(inputs, [], 0))
        known.call_count = max(known.call_count, seen.call + 1)
        if seen.call == 0 and seen.value is not None:
            known.output_shapes.append(output)
    return passes, failure


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
