"""Run a model over its inputs and gather what its layers did: the pipeline behind `hookscope activations`."""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hookscope.errors import LayerNotFoundError, ModelError
from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.operations import EVERYTHING, OperationChoice
from hookscope.hooks.patterns import parse_operation_pattern
from hookscope.hooks.selection import module_index, select_from, unwrap
from hookscope.inputs.batches import Batch, copy_of
from hookscope.inspection.execution import first_calls
from hookscope.inspection.map_summaries import FEW_ROWS, MapRecorder, map_summaries
from hookscope.inspection.network import count_parameters, inspected_network, queue_of
from hookscope.inspection.rows import (
    OnCall,
    OnTensor,
    Recorder,
    fast_path_warning,
    feature_maps,
    hidden_labels,
    layer_rows,
)
from hookscope.inspection.run import Break, InspectionOptions, Run, choose, run_batches, split_patterns, verified
from hookscope.inspection.state.preservation import preserved
from hookscope.inspection.token_norms import TokenRecorder
from hookscope.inspection.verification import Outcome, outcome_of
from hookscope.models.construction import LoadedModel
from hookscope.results.activations import Activations, Verification
from hookscope.results.network import Failure, ModuleRow
from hookscope.results.repeats import reduced
from hookscope.statistics.reducer import Reducer
from hookscope.statistics.token_layout import TokenLayout


class ForwardError(ModelError):
    """The model raised in its forward pass.

    Attributes:
        inspection: What was seen until then; its `failure` is where the model raised.
    """

    def __init__(self, message: str, inspection: Activations) -> None:
        """Store the partial inspection with the message."""
        super().__init__(message)
        self.inspection = inspection


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions(InspectionOptions):
    """What `inspect` observes, and how it runs.

    Attributes:
        keep_rule_outputs: Also call `on_tensor` with the outputs that are only `for_rules`, and measure them in full.
        summaries: Whether `map_summaries` has the maps of the first inputs, of the rows that an overview may show.
        tokens: Measure the norms of tokens, of outputs (N, T, D).
    """

    keep_rule_outputs: bool = False
    summaries: bool = False
    tokens: bool = False


def inspect(
    model: nn.Module | LoadedModel,
    inputs: Tensor | Batch | Iterable[Batch],
    options: ForwardOptions,
    *,
    on_tensor: OnTensor | None = None,
    on_call: OnCall | None = None,
    on_output: Callable[[Batch, object], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Activations:
    """Run a model over its inputs in eval mode, without gradients, and report on the outputs of its layers.

    The model comes out as it went in, also after an exception: `preserved` in `hookscope.inspection.state` lists what
    is restored. Statistics are taken at the moment a layer returns, before an in-place layer can overwrite its output.

    Args:
        model: The network, on its device, or what `load_model` returned.
        inputs: A tensor with the batch on axis 0, one batch, or any number of batches; on the model's device. If they
            are a `BatchQueue` with an `on_error`, that is called for an input that the model raised on, which is then
            left out; the other inputs of its batch are run again, one by one. Else the error is raised.
        options: What is observed, and how.
        on_tensor: Called in the hook with each output's label, the output itself, and the axis that counts its channels
            (None without one); clone what must outlive the call.
        on_call: Called in the hook with the call, which has the inputs, once for each tensor that it returns.
        on_output: Called after each batch with the batch, which the model has not overwritten, and what the model
            returned for it; clone what must outlive the call.
        on_batch: Called after each batch with the number of inputs finished, which does not count inputs that the model
            raised on.

    Raises:
        LayerNotFoundError: If a pattern selects nothing.
        ForwardError: If the model raised on an input, or on every input that may be left out; carries what was seen
            until then.
        UsageError: If a pattern is malformed.
    """
    inspected, queue = inspected_network(model), queue_of(inputs)
    network, modules = inspected.network, inspected.modules
    recorder = Recorder(
        options.grids_for, options.max_channels, on_tensor, options.reducer(inspected.network), on_call=on_call
    )
    chosen = choose(inspected, queue, options, recorder.axes)
    if options.summaries:
        recorder.maps = MapRecorder(every_row=len(chosen.layers) <= FEW_ROWS)
    recorder.token_layout = TokenLayout(network)
    recorder.tokens = TokenRecorder(network) if options.tokens else None
    recorder.operations = None if options.keep_rule_outputs else chosen.operations
    recorder.rules_reducer = Reducer() if options.for_rules and not options.keep_rule_outputs else None
    observed = chosen.layers
    if options.for_rules and "" not in observed:
        observed = {**observed, "": modules[""]}
        recorder.rules_only = frozenset({""})
    began = time.perf_counter()
    with (
        preserved(network, options.seed, modules=modules.values(), differentiates=False) as state,
        capture(
            network, observed, recorder.observe, edits=chosen.edits.by_name, operations=chosen.operations
        ) as captured,
    ):
        state.mark_hooks()
        run = Run(
            options=options,
            inspected=inspected,
            queue=queue,
            chosen=chosen,
            recorder=recorder,
            state=state,
            captured=captured,
        )
        broken = run_batches(queue, partial(_run_batch, run, on_output), run.records, on_batch, partial(_undo, run))
    seconds = time.perf_counter() - began
    run.end(broken)
    inspection = _result(run, None if broken is None else broken.failure, {"forward": seconds})
    if broken is not None:
        raise ForwardError(broken.message, inspection) from broken.error
    return inspection


def _result(run: Run, failure: Failure | None, timings: Mapping[str, float]) -> Activations:
    """Return what a run has gathered; rows for verdicts alone are left out where no rule will look at them."""
    inspected, recorder, judged = run.inspected, run.recorder, run.options.for_rules
    layers, operations, _ = run.chosen
    tokens, maps = recorder.tokens, recorder.maps
    rows = layer_rows(inspected, run.rows, None if tokens is None else tokens.results())
    left_out = hidden_labels(rows, layers, operations)
    hidden = frozenset(left_out)
    fused = fast_path_warning(inspected.modules, layers, with_operations=operations is not None)
    device, dtype = inspected.placed
    result = Activations(
        model=inspected.info,
        inputs=tuple(run.records),
        rows=rows,
        uncalled=run.uncalled(failure),
        feature_maps=feature_maps(rows, recorder.kept),
        map_summaries=map_summaries(rows, () if maps is None else maps.saved),
        token_maps=()
        if tokens is None or not tokens.rows
        else tokens.maps([row for row in rows if row.label not in hidden], run.records),
        predictions=tuple(run.best),
        warnings=run.warnings(fused),
        notes=run.notes(),
        failure=failure,
        seed=run.options.seed,
        device=device,
        dtype=dtype,
        timings=timings,
        verification=run.verification,
        hidden=left_out if judged else (),
        broadcast_inputs=run.repeated_arguments(),
    )
    return result if judged or not left_out else reduced(result, left_out, numbers=True)


def _run_batch(run: Run, on_output: Callable[[Batch, object], None] | None, batch: Batch) -> Break | None:
    may_leave_out = run.queue.on_error is not None
    if run.records and may_leave_out:
        run.state.mark()
    places = tuple(range(len(run.records), len(run.records) + len(batch.indices)))
    run.recorder.start(places, pictures=batch.pictures)
    to_verify = run.verifies and not run.records
    # The network may overwrite its inputs, which are the caller's, and the batch may have to run again.
    output, broken = _outcome(run, copy_of(batch))
    run.recorder.settle()
    if broken is not None:
        return replace(broken, count=partial(run.count, batch, run.captured.restart()))
    if to_verify:
        run.verification = _verified(run, batch, output)
    if not run.records:
        run.find_silent(batch)
    run.count(batch, run.captured.restart())
    run.best += run.predicted(output, places)
    if on_output is not None:
        on_output(batch, output)
    return None


def _undo(run: Run) -> None:
    run.recorder.forget()
    run.state.rewind()


def _outcome(run: Run, batch: Batch) -> tuple[object, Break | None]:
    try:
        with torch.no_grad():
            return run.inspected.network(*batch.args, **batch.kwargs), None
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
        return None, run.broken(raised)


def _verified(run: Run, batch: Batch, output: object) -> Verification:
    def forward() -> Outcome:
        copied = copy_of(batch)
        with torch.no_grad():
            return outcome_of(run.inspected.network(*copied.args, **copied.kwargs))

    return verified(run, outcome_of(output), copy.copy(run.state), forward)


def list_modules(
    model: nn.Module,
    args: Sequence[object] | None,
    layers: Sequence[str] = (),
    *,
    kwargs: Mapping[str, object] | None = None,
    ops: bool = False,
) -> tuple[tuple[ModuleRow, ...], Failure | None]:
    """List every module with its parameters and the shapes that one forward pass gives it, and operations if asked for.

    On the meta device the pass costs next to nothing and computes shapes alone. The network is called with `args` and
    `kwargs`; None for `args` lists without shapes. Patterns mark what they select; operations that they select are
    listed, with `ops` all that the network's own code calls.

    Returns:
        One row per module in the order of `named_modules()`, each followed by its operations, and where the pass
        raised, if it did: rows then hold the shapes of what was reached.

    Raises:
        LayerNotFoundError: If a pattern selects nothing.
        UsageError: If a pattern is malformed.
    """
    network = unwrap(model)
    modules, aliases = module_index(network)
    counts = count_parameters(modules)
    others, marked = split_patterns(layers, modules, ops=False)
    listed = OperationChoice([parse_operation_pattern(EVERYTHING)]) if ops else marked
    calls, failure = first_calls(network, args, kwargs or {}, listed) if args is not None else ({}, None)
    selected = {} if others is None else select_from(modules, aliases, others, lambda: list(calls))
    of_modules: dict[str, list[ModuleRow]] = {}
    for label, call in calls.items():
        if call.operation is not None:
            name, owner, source, _ = call.operation
            is_selected = marked is None
            if marked is not None and marked.observes(owner, name):
                is_selected = bool([at for at in range(call.call_count) if marked.lists(owner, name, at)])
            shapes = (call.input_shapes, tuple(call.output_shapes))
            row = ModuleRow(label, name, 0, 0, call.call_count, *shapes, is_selected, source, owner)
            of_modules.setdefault(owner, []).append(row)
    if failure is None and calls and marked is not None and (missing := marked.missing()):
        raise LayerNotFoundError(missing)
    rows = []
    for name, module in modules.items():
        seen = calls.get(name)
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
        rows += of_modules.get(name, ())
    return tuple(rows), failure
