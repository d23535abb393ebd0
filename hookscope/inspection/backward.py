"""Run a model forward and backward and gather the gradients: the pipeline behind `hookscope grads`."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import HookscopeError, ModelError, UnfitInputError, UsageError, is_out_of_memory
from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.gradient_hooks import GradientSite, SiteKey, graph_leaves, graph_nodes, strided_copy
from hookscope.hooks.pytree import tensors_given, tensors_in, with_tensors
from hookscope.hooks.selection import select_from
from hookscope.inputs import Batch
from hookscope.inspection.edit_placement import place_edits
from hookscope.inspection.edits import Edit
from hookscope.inspection.failures import failure_message, locate, reraise_internal
from hookscope.inspection.forward import execution_order
from hookscope.inspection.gradient_rows import (
    Gradient,
    Graph,
    absorb_gradients,
    gradient_rows,
    loss_record,
    parameter_rows,
)
from hookscope.inspection.network import BatchQueue, Subject, queue_of, subject_of
from hookscope.inspection.overwriting import Overwriting, find_overwriting
from hookscope.inspection.rows import (
    Key,
    Recorder,
    Row,
    feature_maps,
    layer_rows,
    merge_observations,
    predictions,
    uncalled,
)
from hookscope.inspection.state.preservation import Mode, Preserved, preserved
from hookscope.inspection.verification import (
    Outcome,
    asks_for_identity,
    outcome_of,
    verification_warnings,
    verify_outcome,
)
from hookscope.losses import LossValue, choose_loss
from hookscope.models import LoadedModel
from hookscope.results.activations import Failure, LayerRow, Prediction, Verification, row_label
from hookscope.results.gradients import GradientRow, Gradients
from hookscope.results.inputs import InputRecord
from hookscope.statistics import Measured, Reducer, Reduction
from hookscope.text import exception_line

LossFunction = Callable[[object, Batch], LossValue | Tensor]
"""Given the model's output and the batch, returns the loss: a 0-d tensor, or one with its description."""

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Relative deviation of the loss from which a pass with copies counts as another computation. Our choice: kernels that
# add in varying order stay far below.
_SAME_LOSS = 1e-3


class PassError(ModelError):
    """The model raised in its forward or its backward pass, or its loss has no gradient.

    Attributes:
        inspection: What was seen until then; its `failure` says where it broke off, if it did.
    """

    def __init__(self, message: str, inspection: Gradients) -> None:
        """Carry the partial inspection with the message."""
        super().__init__(message)
        self.inspection = inspection


@dataclass(slots=True)
class _Run:
    """One run: what is fixed, and what has been gathered so far."""

    subject: Subject
    loss: LossFunction
    with_inputs: bool
    track_inputs: bool
    autocast: torch.dtype | None
    verify: bool
    edited: bool
    state: Preserved
    captured: Capture[Measured]
    recorder: Recorder
    drawn: Recorder
    told: "_Told"
    output_key: str | None
    parameter_ids: set[int]
    graph: Graph
    rows: dict[Key, Row] = field(default_factory=dict)
    gradients: dict[SiteKey, Gradient] = field(default_factory=dict)
    records: list[InputRecord] = field(default_factory=list)
    best: list[Prediction] = field(default_factory=list)
    losses: list[tuple[LossValue, float]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    verification: Verification | None = None


@dataclass(frozen=True, slots=True)
class _Failed:
    """How a batch broke off.

    Attributes:
        message: For the user.
        failure: Where; None if nothing raised.
        error: What was raised.
        overwritten: Whether a tensor was overwritten that the backward pass needed.
    """

    message: str
    failure: Failure | None = None
    error: BaseException | None = None
    overwritten: bool = False


def inspect_gradients(  # noqa: PLR0913 - a run is described by its options
    model: nn.Module | LoadedModel,
    inputs: Tensor | Batch | Iterable[Batch],
    loss: str | LossFunction = "projection",
    layers: Sequence[str] = (),
    *,
    target: str | int | Tensor | None = None,
    include_inputs: bool = False,
    mode: Mode = "eval",
    grids_for: int = 0,
    max_channels: int | None = None,
    seed: int = 0,
    edits: Sequence[str | Edit] = (),
    output_key: str | None = None,
    autocast: torch.dtype | None = None,
    verify: bool = False,
    distributions: bool = False,
    on_tensor: Callable[[str, Tensor], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
    on_error: Callable[[UnfitInputError], None] | None = None,
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
        model: The network, on its device, or what `load_model` returned.
        inputs: A tensor with the batch on axis 0, one batch, or any number of batches; on the model's device. They are
            copied, so that a model which overwrites its input leaves them alone.
        loss: What to differentiate: a name in `hookscope.losses.LOSSES`, what `choose_loss` returns, or a function of
            the output and the batch that returns a 0-d tensor.
        target: For a loss given by name: what the output is compared with, as `choose_loss` takes it.
        layers: Patterns as for `--layer`; none means modules that own parameters, and leaves: see `select_layers`.
        include_inputs: Report the gradient of each layer's inputs too, along the way through that layer alone. If all
            parameters are trainable, the network's own floating inputs get one as well. Gradients of parameters may
            then differ in the last bits, because parts are added in another order.
        mode: "eval", or "train" for batch statistics and dropout as in training; a network that is in train mode
            already keeps the parts that its owner has put in eval mode.
        grids_for: Keep gradient maps for drawing, for this many inputs from the first.
        max_channels: Keep at most this many channels of each, the first ones; None keeps all.
        seed: Seeds the random numbers the passes may draw, and the loss if it is given by name.
        edits: Changes to inputs, outputs or gradients: "relu:grad:clamp(min=0)".
        output_key: Which of several outputs holds the class scores, and is differentiated if `loss` is a name.
        autocast: Run the forward pass and the loss under autocast to this dtype.
        verify: Run the first batch forward once more without hooks, and compare outputs and loss bit for bit; not with
            edits.
        distributions: Count how values are distributed, for quantiles, histograms and the verdict
            `saturated-activation`, at some more time.
        on_tensor: Called in the hook with "LABEL grad_output" or "LABEL grad_input" and each gradient, and at the end
            with "NAME grad" for each parameter; clone what must outlive the call.
        on_batch: Called after each batch with the number of inputs finished, which one that the model raised on leaves
            as it was.
        on_error: Called for an input that the model raised on, which is then left out; in eval mode the other inputs of
            its batch are run again, one by one, in train mode the whole batch is left out. Without it the error is
            raised.

    Returns:
        What was seen, without verdicts.

    Raises:
        LayerNotFoundError: If a pattern or an edit selects nothing.
        PassError: If the model raised or ran out of memory, with `on_error` on every input, or has no gradient at all;
            carries what was seen until then.
        UsageError: If a pattern or an edit is malformed, or the loss does not fit the output or is not one real number.
    """
    subject = subject_of(model)
    network = subject.network
    if isinstance(loss, str):
        categories = subject.info.categories
        loss = choose_loss(loss, target=target, seed=seed, categories=categories, output_key=output_key)
    queue = queue_of(inputs, on_error)
    first = queue.peek()

    def order() -> list[str]:
        return execution_order(network, queue)

    selected = select_from(subject.modules, subject.aliases, layers, order)
    recorder = Recorder(0, None, None, Reducer(distributions=distributions))
    drawn = Recorder(grids_for, max_channels, None, recorder.reducer)
    told = _Told(on_tensor)
    placed = place_edits(edits, network, order, recorder)
    with ExitStack() as block:
        block.enter_context(torch.inference_mode(False))
        block.enter_context(torch.enable_grad())
        state = block.enter_context(preserved(network, seed, mode, subject.modules.values()))
        parameters = subject.parameters()
        trainable = [parameter.requires_grad for parameter in parameters if _differentiable(parameter)]
        track_inputs = not any(trainable) or (include_inputs and all(trainable))
        track_outputs = not any(trainable) and not (first and any(map(_differentiable, _tensors(first))))
        for parameter in parameters:
            parameter.grad = None
        axes: dict[Key, int | None] = {}
        graph = Graph()
        captured = block.enter_context(
            capture(
                network,
                selected,
                recorder.observe,
                gradients=_observer(drawn, axes, graph, told),
                with_inputs=include_inputs,
                track=track_outputs,
                edits=placed.by_name,
            )
        )
        state.mark_hooks()
        ids = {*map(id, parameters)}
        run = _Run(
            subject,
            loss,
            include_inputs,
            track_inputs,
            autocast,
            verify and not edits,
            bool(edits),
            state,
            captured,
            recorder,
            drawn,
            told,
            output_key,
            ids,
            graph,
        )
        del first
        failed = _run_batches(run, queue, axes, takes_apart=mode == "eval", finished=on_batch or (lambda _count: None))

        def finished() -> tuple[tuple[LayerRow, ...], tuple[GradientRow, ...]]:
            block.close()
            _absorb(run)
            rows = layer_rows(subject, run.rows)
            return rows, gradient_rows(subject, run.gradients, rows, graph)

        by_parameter, (results, gradients) = parameter_rows(network, parameters, on_tensor, recorder.reducer, finished)

    verification = run.verification if verify else None
    device, dtype = subject.placed
    broke = failed is not None and failed.failure is not None
    inspection = Gradients(
        model=subject.info,
        inputs=tuple(run.records),
        loss=loss_record(run.losses),
        rows=results,
        gradients=gradients,
        parameters=by_parameter,
        uncalled=uncalled(subject, selected, captured.called, broke_off=broke, mode=mode),
        gradient_maps=tuple(
            replace(maps, note="; ".join(filter(None, ("gradient of the loss", maps.note))))
            for maps in feature_maps((row for row in gradients if row.role == "output"), drawn.kept)
        ),
        predictions=tuple(run.best),
        warnings=tuple(
            dict.fromkeys(
                (
                    *subject.warnings,
                    *run.warnings,
                    *_frozen_warning(trainable, track_outputs=track_outputs),
                    *verification_warnings(verification, subject.info.name),
                    *placed.warnings(),
                    *queue.remarks,
                )
            )
        ),
        notes=(*subject.notes, *_sum_note(len(run.losses))),
        failure=failed.failure if failed is not None else None,
        mode=mode,
        seed=seed,
        device=device,
        dtype=dtype,
        timings=run.seconds,
        verification=verification,
    )
    if failed is not None:
        raise PassError(failed.message, inspection) from failed.error
    return inspection


def _tensors(batch: Batch) -> list[Tensor]:
    return [tensor for _, tensor in tensors_given(batch.args, batch.kwargs)]


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass(slots=True)
class _Told:
    """The caller's `on_tensor`, and gradients held back from it until the pass is known to count.

    Attributes:
        on_tensor: Called with label and gradient; None for nobody.
        waiting: Copies for it; None while nothing has to wait.
    """

    on_tensor: Callable[[str, Tensor], None] | None
    waiting: list[tuple[str, Tensor]] | None = None

    def tell(self, label: str, gradient: Tensor) -> None:
        """Pass a gradient on, or keep a copy for `release`."""
        if self.waiting is not None:
            self.waiting.append((label, gradient.detach().clone()))
        elif self.on_tensor is not None:
            self.on_tensor(label, gradient)

    def release(self) -> None:
        """Pass on what waits."""
        waiting, self.waiting = self.waiting or (), None
        for label, gradient in waiting:
            self.tell(label, gradient)


def _observer(
    drawn: Recorder, axes: Mapping[Key, int | None], graph: Graph, told: _Told
) -> Callable[[GradientSite[Measured], Tensor], Measured]:
    """Return what is called in the hook with each gradient."""

    def observe(site: GradientSite[Measured], gradient: Tensor) -> Measured:
        key = (site.layer, site.call, site.slot)
        graph.nodes[site.key] = torch._C._current_autograd_node()
        if told.on_tensor is not None:
            told.tell(f"{row_label(*key)} grad_{site.role}", gradient)
        if site.role == "output":
            axis = axes.get(key)
            if drawn.grids_for:
                drawn.keep(key, gradient, axis)
        else:
            axis = None if gradient.is_nested else drawn.axes.channel_axis(site.module, tuple(gradient.shape))
        return drawn.reducer.reduce(gradient, axis)

    return observe


def _run_batches(
    run: _Run, queue: BatchQueue, axes: dict[Key, int | None], *, takes_apart: bool, finished: Callable[[int], None]
) -> _Failed | None:
    """Run all batches; return how the run broke off, if it did.

    With an `on_error`, batches that the model raises on are set aside and leave no trace: so the gradients of
    parameters are copied before every batch but the first. If nothing is left then, the first of them counts.
    """
    first_failed: tuple[_Failed, _Run] | None = None
    for batch in queue:
        _absorb(run)
        before = replace(run, records=[*run.records], best=[*run.best], losses=[*run.losses], warnings=[*run.warnings])
        held = _held_gradients(run) if queue.on_error is not None and run.losses else {}
        failed = _run_batch(run, batch, axes)
        if failed is not None:
            if queue.on_error is None or failed.error is None or failed.overwritten:
                return failed
            is_left_out = queue.set_aside(batch, failed.message, failed.error, takes_apart=takes_apart)
            if is_left_out and not before.records and first_failed is None:
                if queue.peek() is None:  # there was nothing else
                    return failed
                _absorb(run)
                first_failed = failed, replace(run)
                run.rows, run.gradients = {}, {}
            _undo(run, before, held)
        finished(len(run.records))
    if first_failed is None or run.records:
        return None
    failed, seen = first_failed
    run.rows, run.gradients, run.records = seen.rows, seen.gradients, seen.records
    run.best, run.losses, run.warnings = seen.best, seen.losses, seen.warnings
    return failed


def _held_gradients(run: _Run) -> dict[nn.Parameter, Tensor]:
    parameters = run.subject.parameters()
    return {each: each.grad.clone() for each in parameters if each.grad is not None}


def _undo(run: _Run, before: _Run, held: Mapping[nn.Parameter, Tensor]) -> None:
    """Go back to what was before a batch that the model raised on."""
    run.captured.restart()
    run.recorder.forget()
    run.drawn.forget()
    run.state.rewind()
    run.records, run.best, run.losses, run.warnings = before.records, before.best, before.losses, before.warnings
    for parameter in run.subject.parameters():
        parameter.grad = held.get(parameter)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What came of running a batch.

    Attributes:
        output: Of the model.
        value: The loss, without its graph; None if the forward pass broke off.
        amount: The loss as a number; NaN without one.
        failed: How it broke off; None if it did not.
    """

    output: object
    value: LossValue | None
    amount: float
    failed: _Failed | None


def _run_batch(run: _Run, batch: Batch, axes: dict[Key, int | None]) -> _Failed | None:
    """Run one batch forward and backward, and the first without hooks as well if that is to be compared."""
    first = not run.losses
    if not first:  # else nothing has moved since the state was seeded
        run.state.mark()
    run.records.extend(batch.records)
    began = copy.copy(run.state)
    done = _differentiated(run, batch, axes)
    if first and done.failed is None and (run.verify or _aliases_may_matter(run)):
        run.verification = _verified(run, batch, done, began)
        if run.verification.status == "differs" and run.captured.gave_aliases:
            _begin_again(run, began)
            done = _differentiated(run, batch, axes)
            if done.failed is None:
                run.verification = _verified(run, batch, done, began)
    run.told.release()
    if done.value is not None:
        run.losses.append((done.value, done.amount))
        run.warnings.extend(done.value.warnings)
        with torch.no_grad():
            run.best.extend(predictions(done.output, run.subject.info.categories, _places(run, batch), run.output_key))
    return done.failed


def _aliases_may_matter(run: _Run) -> bool:
    """Tell whether the network may compute something else because tensors were replaced by aliases."""
    captured = run.captured
    if run.edited or not captured.gave_aliases:
        return False
    return run.with_inputs or captured.aliases_meet or asks_for_identity(run.subject.modules.values())


def _differentiated(run: _Run, batch: Batch, axes: dict[Key, int | None]) -> _Pass:
    """Run a batch forward and backward."""
    run.captured.listen(on=False)  # a model or a loss may differentiate on its way
    run.graph.forget()
    began = time.perf_counter()
    output, value, failed = _forward(run, batch)
    amount = math.nan if value is None else float(value.value.detach())  # an accelerator has finished then
    run.recorder.settle()
    run.seconds["forward"] += time.perf_counter() - began
    axes.clear()
    axes |= {(seen.layer, seen.call, seen.slot): _axis(seen.value) for seen in run.captured.observations}
    if value is None:
        return _Pass(output, None, amount, failed)
    if not run.losses and _aliases_may_matter(run):
        run.told.waiting = []
    run.graph.loss = value.value
    began = time.perf_counter()
    failed = _backward(run, value.value)
    run.recorder.settle()
    value.value.detach().item()  # as above
    run.seconds["backward"] += time.perf_counter() - began
    if failed is not None and failed.overwritten:
        failed = _protected(run, batch, failed)
    return _Pass(output, replace(value, value=value.value.detach()), amount, failed)


def _verified(run: _Run, batch: Batch, done: _Pass, began: Preserved) -> Verification:
    """Compare the output and the loss of the first batch to those without hooks.

    Args:
        run: Its hooks are taken off meanwhile.
        batch: The first.
        done: What came of it with hooks.
        began: Leads back to where it began.
    """
    network, modules = run.subject.network, run.subject.modules
    run.state.mark()  # to go on from here
    layers = [*dict.fromkeys(seen.layer for seen in run.captured.observations)]

    def pass_(layers: Sequence[str] = ()) -> Outcome:
        began.rewind()
        hooked_layers = {layer: modules[layer] for layer in layers}
        with (
            _quietly(),
            run.captured.detached(),
            capture(
                network,
                hooked_layers,
                lambda *_: None,
                gradients=lambda *_: None,
                with_inputs=run.with_inputs,
            ),
            _autocast(run),
        ):
            output = _output_of(run, batch)
            loss = _loss_of(run.loss, output, batch).value
            return outcome_of(output, float(loss.detach()))

    try:
        return verify_outcome(outcome_of(done.output, done.amount), pass_, layers, pass_)
    finally:
        run.state.rewind()


def _protected(run: _Run, batch: Batch, failed: _Failed) -> _Failed:
    """Name the layers behind an overwritten saved tensor, and take the gradients that there would be without it."""
    if run.losses:  # the earlier batches were differentiated, so the gradients of parameters are partly theirs
        return failed

    def loss() -> Tensor:
        run.state.rewind()
        with _autocast(run):
            output = _output_of(run, batch)
            return _loss_of(run.loss, output, batch).value

    with _quietly(), run.captured.detached():
        found = find_overwriting(run.subject.modules, loss)
    for parameter in run.subject.parameters():
        parameter.grad = None
    run.captured.restart()
    run.drawn.kept.clear()
    run.state.rewind()
    with _quietly(), torch.autograd.graph.allow_mutation_on_saved_tensors():
        _, value, again = _forward(run, batch)
        if value is not None and again is None:
            _backward(run, value.value)
    run.recorder.settle()
    if found is None or failed.failure is None:
        return failed
    failure = replace(failed.failure, layer=found.saved_by, kind=type(run.subject.modules[found.saved_by]).__name__)
    return replace(failed, message=_overwriting_text(run, found), failure=failure)


def _overwriting_text(run: _Run, found: Overwriting) -> str:
    def called(layer: str) -> str:
        return f"{layer or '(model)'} ({type(run.subject.modules[layer]).__name__})"

    by = "an operation" if found.overwritten_by is None else f"{found.operation} in {called(found.overwritten_by)}"
    return (
        f"{run.subject.info.name} cannot be differentiated, with or without hookscope: {by} overwrites in place what "
        f"{called(found.saved_by)} saved for its backward pass ({found.node}). Let it work on a copy "
        f"(inplace=False). The gradients shown are what they would be then."
    )


def _begin_again(run: _Run, began: Preserved) -> None:
    """Forget what the first batch showed, and go back to where it began; no tensor is replaced by an alias any more."""
    run.captured.give_up_aliases()
    run.captured.restart()
    run.drawn.kept.clear()
    run.told.waiting = None
    run.state = began
    run.state.rewind()
    for parameter in run.subject.parameters():
        parameter.grad = None


def _absorb(run: _Run) -> None:
    """Absorb what the latest batch showed: for the last one there is time while the parameters are read."""
    absorb_gradients(run.gradients, run.captured.gradients, len(run.losses))
    merge_observations(run.rows, run.captured.restart())


def _axis(measured: Measured | None) -> int | None:
    """Return the channel axis that an output was measured with."""
    if measured is None:
        return None
    return measured.channel_axis if isinstance(measured, Reduction) else measured.known.channel_axis


def _places(run: _Run, batch: Batch) -> tuple[int, ...]:
    """Return the positions of a batch's inputs among those of the run; it is the latest."""
    return tuple(range(len(run.records) - len(batch.records), len(run.records)))


def _output_of(run: _Run, batch: Batch) -> object:
    given = _given((batch.args, dict(batch.kwargs)), track=run.track_inputs)
    return run.subject.network(*given[0], **given[1])


def _forward(run: _Run, batch: Batch) -> tuple[object, LossValue | None, _Failed | None]:
    """Run the model and its loss, as often as it takes to see every gradient."""
    expected: float | None = None
    places = _places(run, batch)
    while True:
        run.recorder.start(places)
        run.drawn.start(places)
        run.drawn.axes = run.recorder.axes
        try:
            with _autocast(run):
                given = _given((batch.args, dict(batch.kwargs)), track=run.track_inputs)
                output = run.subject.network(*given[0], **given[1])
                del given
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
            error = reraise_internal(raised)
            failure = locate(run.subject.modules, error)
            return None, None, _Failed(failure_message(run.subject.info.name, failure, error), failure, error)
        try:
            with _autocast(run):
                value = _loss_of(run.loss, output, batch)
        except HookscopeError:
            raise
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - so may a user's loss
            return output, None, _Failed(_loss_failed(raised), None, raised)
        if expected is not None and not _same(expected, float(value.value.detach())):
            run.captured.give_up_copies()
            expected = None
        elif not run.captured.must_repeat(value.value) or _fails_backward(value.value):
            return output, value, None
        else:
            expected = float(value.value.detach())
        del output, value
        run.captured.restart()
        run.state.rewind()


def _fails_backward(loss: Tensor) -> bool:
    """Tell whether the backward pass raises: a copy could mend what the model does wrong by itself."""
    try:
        torch.autograd.grad(loss, graph_leaves(graph_nodes(loss)), retain_graph=True, allow_unused=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the model may bring its own derivatives
        error.__traceback__ = None  # it may be raised again: then it is from there
        return True
    return False


def _same(first: float, second: float) -> bool:
    if first == second or math.isnan(first):
        return True
    return abs(first - second) <= _SAME_LOSS * max(abs(first), abs(second))


def _autocast(run: _Run) -> AbstractContextManager[object]:
    if run.autocast is None:
        return nullcontext()
    return torch.autocast(torch.device(run.subject.placed[0]).type, dtype=run.autocast)


@contextmanager
def _quietly() -> Iterator[None]:
    """Leave a pass's warnings to the one that is reported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _given(given: _Arguments, *, track: bool) -> _Arguments:
    """Return copies of the arguments; those that require a gradient, or all floating ones, lead to a leaf of ours."""
    copies: dict[int, Tensor] = {}
    found = tensors_in(given)
    for _, tensor in found:
        source = tensor.clone() if tensor.is_inference() else tensor.detach()
        if tensor.requires_grad or (track and _differentiable(tensor)):
            source.requires_grad_()  # the clone is no leaf: the model may overwrite it
        copies[id(tensor)] = strided_copy(source)
    try:
        return with_tensors(given, {path: copies[id(tensor)] for path, tensor in found})  # type: ignore[return-value]
    except TypeError:  # a container that cannot be rebuilt is given as it is
        return given


def _loss_of(loss: LossFunction, output: object, batch: Batch) -> LossValue:
    """Compute the loss, and see to it that it is one number."""
    value = loss(output, batch)
    if isinstance(value, Tensor):
        value = LossValue(value, getattr(loss, "__name__", "loss"), "", ())
    if not isinstance(value, LossValue) or not isinstance(value.value, Tensor):
        raise UsageError(f"The loss returned {type(value).__name__} instead of a tensor with one number.")
    if value.value.numel() != 1:
        shape = tuple(value.value.shape)
        raise UsageError(f"The loss has shape {shape} instead of being one number: reduce it, for instance by .mean().")
    if value.value.is_complex():
        raise UsageError("The loss is a complex number, which has no gradient to descend: take .real or .abs().")
    return replace(value, value=value.value.reshape(()))


def _loss_failed(error: BaseException) -> str:
    if is_out_of_memory(error):
        return f"The loss ran out of memory: give fewer inputs at a time (a smaller batch). {exception_line(error)}"
    return f"The loss raised {exception_line(error)}"


def _backward(run: _Run, loss: Tensor) -> _Failed | None:
    """Run the backward pass with hooks listening."""
    name = run.subject.info.name
    if not loss.requires_grad:
        return _Failed(
            f"Nothing that requires a gradient leads to the loss of {name}: its forward pass runs under no_grad, "
            f"detaches its output or returns integers, and only its activations can be inspected."
        )
    nodes = graph_nodes(loss)
    keep = not run.state.kept_nodes.isdisjoint(nodes)
    leaves = [leaf for leaf in graph_leaves(nodes) if id(leaf) not in run.parameter_ids]
    del nodes
    if leaves:  # the forward pass may have registered parameters
        known = {id(parameter) for parameter in run.subject.network.parameters()}
        leaves = [leaf for leaf in leaves if id(leaf) not in known]
    foreign = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in foreign:
        leaf.grad = None
    run.captured.listen(on=True)
    try:
        loss.backward(retain_graph=keep)  # type: ignore[no-untyped-call]
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model may bring its own derivatives
        error = reraise_internal(raised)
        failure = locate(run.subject.modules, error)
        if not failure.layer:  # not in a forward that checkpointing repeats: after the gradient that came last
            failure = _after_the_last_gradient(run, error)
        overwritten = isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)
        return _Failed(failure_message(name, failure, error, "backward"), failure, error, overwritten)
    finally:
        run.captured.listen(on=False)
        for leaf, gradient in foreign:
            leaf.grad = gradient
    return None


def _after_the_last_gradient(run: _Run, error: BaseException) -> Failure:
    arrived = [site for site in run.captured.gradients if site.arrival is not None]
    latest = max(arrived, key=lambda site: site.arrival or 0, default=None)
    if latest is None:
        return Failure("", type(run.subject.network).__name__, (), exception_line(error))
    return Failure(latest.layer, type(latest.module).__name__, (), exception_line(error))


def _frozen_warning(trainable: Sequence[bool], *, track_outputs: bool) -> tuple[str, ...]:
    if any(trainable):
        return ()
    end = "first floating tensors that layers return" if track_outputs else "input of the network"
    return (f"No parameter is trainable: gradients are taken down to the {end}.",)


def _sum_note(batch_count: int) -> tuple[str, ...]:
    if batch_count < 2:
        return ()
    return (
        f"The loss and the gradients of parameters are sums over {batch_count} batches, as training accumulates them.",
    )
