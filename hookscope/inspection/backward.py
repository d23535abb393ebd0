"""Run a model forward and backward and gather the gradients: the pipeline behind `hookscope grads`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from hookscope.errors import ModelError
from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.pytree import tensors_given
from hookscope.hooks.step_gradients import StepWatch
from hookscope.inputs.batches import Batch
from hookscope.inspection.differentiation import GradientOptions, GradientRun, LossFunction, run_batch, undo_batch
from hookscope.inspection.gradient_rows import (
    GradientRecorder,
    NamedParameter,
    gradient_rows,
    loss_record,
    named_parameters,
    parameter_rows,
    step_rows,
)
from hookscope.inspection.losses.formulas import differentiable
from hookscope.inspection.network import InspectedNetwork, inspected_network, queue_of
from hookscope.inspection.rows import OnTensor, Recorder, feature_maps, hidden_labels, layer_rows
from hookscope.inspection.run import Break, choose, run_batches
from hookscope.inspection.state.preservation import preserved
from hookscope.models.construction import LoadedModel
from hookscope.results.gradients import Gradients
from hookscope.statistics.token_layout import TokenLayout

_NO_STEPS = "Gradients over time are missing: torch cannot differentiate the network if they are measured."
_CHECKPOINTED = (
    "No parameter is trainable and no input has a gradient, so hookscope lets the first outputs of layers have one, "
    "which a checkpoint loses: switch activation checkpointing off, or make a parameter before it trainable."
)


class PassError(ModelError):
    """The model raised in its forward or its backward pass, or its loss has no gradient.

    Attributes:
        inspection: What was seen until then; its `failure` is where the model raised, if it did.
    """

    def __init__(self, message: str, inspection: Gradients) -> None:
        """Store the partial inspection with the message."""
        super().__init__(message)
        self.inspection = inspection


def inspect_gradients(
    model: nn.Module | LoadedModel | InspectedNetwork,
    inputs: Tensor | Batch | Iterable[Batch],
    loss: LossFunction,
    options: GradientOptions,
    *,
    on_tensor: OnTensor | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Gradients:
    """Run a model forward and backward, and report on the gradients of its layers and parameters.

    The loss is the one the model has by itself, to the last bit, and so are the gradients of parameters; only where the
    output of a module that returns its input is used several times may their sums be added in another order. The model
    comes out as it went in: `.grad`, modes, buffers, hooks and random states are restored, also after an exception.
    With several batches each loss is differentiated by itself; the loss and the gradients of parameters are then sums
    over batches, as training accumulates them, and statistics of activations and their gradients are over all inputs.

    A network without a trainable parameter is differentiated with respect to its floating inputs or, if it has none, to
    the first floating tensors that its layers return.

    Args:
        model: As for `inspect`.
        inputs: As for `inspect`; copied, so that a model which overwrites its input leaves them alone. In train mode
            the whole batch is left out that the model raised on.
        loss: What to differentiate: a function of the output and the batch that returns a 0-d tensor; see
            `choose_loss`.
        options: What is observed, and how.
        on_tensor: Called in the hook with "LABEL grad_output" or "LABEL grad_input", each gradient and the axis that
            counts its channels, and at the end with "NAME grad" for each parameter; clone what must outlive the call.
        on_batch: As for `inspect`.

    Returns:
        What was seen, without verdicts.

    Raises:
        LayerNotFoundError: If a pattern or an edit selects nothing.
        PassError: If the model raised or ran out of memory on an input, or on every input that may be left out, or has
            no gradient at all; carries what was seen until then.
        UsageError: If a pattern or an edit is malformed, or the loss does not fit the output or is not one real number.
    """
    inspected, queue = inspected_network(model), queue_of(inputs)
    network, modules = inspected.network, inspected.modules
    recorder = Recorder(0, None, None, options.reducer(inspected.network))
    chosen = choose(inspected, queue, options, recorder.axes)
    maps = Recorder(options.grids_for, options.max_channels, None, recorder.reducer, recorder.axes, chosen.operations)
    recorder.token_layout = maps.token_layout = TokenLayout(network) if options.grids_for else None
    gradient_recorder = GradientRecorder(maps, on_tensor)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        preserved(network, options.seed, options.mode, modules.values()) as state,
    ):
        parameters = inspected.parameters()
        trainable = [parameter.requires_grad for parameter in parameters if differentiable(parameter)]
        first = queue.peek()
        inputs_of_first = () if first is None else tensors_given(first.args, first.kwargs)
        ends_at_outputs = not any(trainable) and not any(differentiable(tensor) for _, tensor in inputs_of_first)
        for parameter in parameters:
            parameter.grad = None
        with capture(
            network,
            chosen.layers,
            recorder.observe,
            gradients=gradient_recorder.observe,
            with_inputs=options.include_inputs,
            track=ends_at_outputs,
            edits=chosen.edits.by_name,
            operations=chosen.operations,
        ) as captured:
            captured.watch.steps = StepWatch()
            state.mark_hooks()
            run = GradientRun(
                options=options,
                inspected=inspected,
                queue=queue,
                chosen=chosen,
                recorder=recorder,
                state=state,
                captured=captured,
                loss=loss,
                track_inputs=not any(trainable) or (options.include_inputs and all(trainable)),
                ends_at_parameters=any(trainable),
                gradient_recorder=gradient_recorder,
                parameter_ids={*map(id, parameters)},
            )
            run_one, undo = partial(run_batch, run), partial(undo_batch, run)
            broken = run_batches(queue, run_one, run.records, on_batch, undo, takes_apart=options.mode == "eval")
            with torch._C.DisableTorchFunction():  # it would see that `.grad` is read
                named = named_parameters(network)
    run.end(broken)
    if captured.watch.steps is None:
        run.loss_warnings.append(_NO_STEPS)
    if broken is not None and ends_at_outputs and isinstance(broken.error, CheckpointError):
        broken = replace(broken, message=f"{broken.message.rstrip('.')}. {_CHECKPOINTED}")
    if not any(trainable):
        end = "the first floating-point outputs of layers" if ends_at_outputs else "the network's input"
        run.loss_warnings.append(f"No parameter is trainable: gradients are taken with respect to {end}.")
    if not options.verify:  # aliases may have needed it
        run.verification = None
    inspection = _result(run, broken, named)
    if broken is not None:
        raise PassError(broken.message, inspection) from broken.error
    return inspection


def _result(run: GradientRun, broken: Break | None, named: Sequence[NamedParameter]) -> Gradients:
    inspected, recorder, mode = run.inspected, run.gradient_recorder, run.options.mode
    layers, operations, _ = run.chosen
    raised, failure = (False, None) if broken is None else (broken.raised, broken.failure)
    rows = layer_rows(inspected, run.rows)
    gradients = gradient_rows(inspected, run.gradients, rows, run.differentiated, recorder.nodes, raised=raised)
    maps = feature_maps((row for row in gradients if row.role == "output"), recorder.maps.kept)
    losses = run.losses
    sums = f"Loss and gradients of parameters are sums over {len(losses)} batches, as training accumulates them."
    device, dtype = inspected.placed
    return Gradients(
        model=inspected.info,
        inputs=tuple(run.records),
        loss=loss_record(losses),
        rows=rows,
        gradients=gradients,
        parameters=parameter_rows(named, recorder.on_tensor, run.recorder.reducer, raised=raised),
        uncalled=run.uncalled(failure if run.differentiated is None else None, mode),
        gradient_maps=tuple(
            replace(kept, note="; ".join(filter(None, ("gradient of the loss", kept.note)))) for kept in maps
        ),
        predictions=tuple(run.best),
        warnings=run.warnings(run.loss_warnings),
        notes=(*run.notes(), *([sums] if len(losses) > 1 else [])),
        failure=failure,
        over_time=step_rows(run.steps),
        mode=mode,
        seed=run.options.seed,
        device=device,
        dtype=dtype,
        timings=run.seconds,
        verification=run.verification,
        hidden=hidden_labels(rows, layers, operations),
        broadcast_inputs=run.repeated_arguments(),
    )
