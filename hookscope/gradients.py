"""Run a model forward and backward and gather the gradients: the pipeline behind `hookscope grads`."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.editing import place_edits
from hookscope.edits import Edit
from hookscope.errors import HookscopeError, ModelError, UsageError
from hookscope.failures import broke_off, error_line, is_out_of_memory, locate, the_models_own
from hookscope.gradient_rows import Gradient, absorb_gradients, gradient_rows, loss_record, parameter_rows
from hookscope.gradient_watch import GradientSite, SiteKey, strided_copy
from hookscope.hooks import Capture, capture
from hookscope.inputs import Batch
from hookscope.inspection import execution_order
from hookscope.layers import select_from
from hookscope.losses import LossValue, choose_loss
from hookscope.measure import Measured, Reducer, Reduction
from hookscope.models import LoadedModel
from hookscope.nested import tensors_in, with_tensors
from hookscope.preservation import Mode, Preserved, preserved
from hookscope.recording import (
    Key,
    Recorder,
    Row,
    absorb,
    feature_maps,
    layer_rows,
    predictions,
    uncalled,
)
from hookscope.results import (
    Failure,
    GradientInspection,
    GradientRow,
    InputRecord,
    LayerRow,
    Prediction,
    row_label,
)
from hookscope.subject import Subject, as_batches, subject_of

LossFunction = Callable[[object, Batch], LossValue | Tensor]
"""Given the model's output and the batch, returns the loss: a 0-d tensor, or one with its description."""

# Relative deviation of the loss from which a pass with copies counts as another computation. Our choice: kernels that
# add in varying order stay far below.
_SAME_LOSS = 1e-3


class PassError(ModelError):
    """The model raised in its forward or its backward pass, or its loss has no gradient.

    Attributes:
        inspection: What was seen until then; its `failure` says where it broke off, if it did.
    """

    def __init__(self, message: str, inspection: GradientInspection) -> None:
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
    state: Preserved
    captured: Capture[Measured]
    recorder: Recorder
    drawn: Recorder
    output_key: str | None
    parameter_ids: set[int]
    rows: dict[Key, Row] = field(default_factory=dict)
    gradients: dict[SiteKey, Gradient] = field(default_factory=dict)
    records: list[InputRecord] = field(default_factory=list)
    best: list[Prediction] = field(default_factory=list)
    losses: list[tuple[LossValue, float]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})


@dataclass(frozen=True, slots=True)
class _Failed:
    """How a batch broke off.

    Attributes:
        message: For the user.
        failure: Where; None if nothing raised.
        error: What was raised.
    """

    message: str
    failure: Failure | None = None
    error: BaseException | None = None


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
    distributions: bool = False,
    on_tensor: Callable[[str, Tensor], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> GradientInspection:
    """Run a model forward and backward, and report on the gradients of its layers and parameters.

    The loss and the gradients of parameters are those the model has by itself, to the last bit. It comes out as it went
    in: `.grad`, modes, buffers, hooks and random states are restored, also after an exception; no parameter is changed.
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
        layers: Patterns as for `--layer`; none means every leaf.
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
        distributions: Count how values are distributed, for quantiles, histograms and the verdict
            `saturated-activation`, at some more time.
        on_tensor: Called in the hook with "LABEL grad_output" or "LABEL grad_input" and each gradient, and at the end
            with "NAME grad" for each parameter; clone what must outlive the call.
        on_batch: Called after each batch with the number of inputs finished.

    Returns:
        What was seen, without verdicts.

    Raises:
        LayerNotFoundError: If a pattern or an edit selects nothing.
        PassError: If the model raised, ran out of memory, or has no gradient at all; carries what was seen until then.
        UsageError: If a pattern or an edit is malformed, or the loss does not fit the output or is not one real number.
    """
    subject = subject_of(model)
    network = subject.network
    if isinstance(loss, str):
        categories = subject.info.categories
        loss = choose_loss(loss, target=target, seed=seed, categories=categories, output_key=output_key)
    batches = iter(as_batches(inputs))
    first = next(batches, None)

    def order() -> list[str]:
        return [] if first is None else execution_order(network, first.args)

    selected = select_from(subject.modules, subject.aliases, layers, order)
    recorder = Recorder(0, None, None, Reducer(distributions=distributions))
    drawn = Recorder(grids_for, max_channels, None, recorder.reducer)
    placed = place_edits(edits, network, order, recorder)
    with ExitStack() as block:
        block.enter_context(torch.inference_mode(False))
        block.enter_context(torch.enable_grad())
        state = block.enter_context(preserved(network, seed, mode, subject.modules.values()))
        parameters = subject.parameters()
        trainable = [parameter.requires_grad for parameter in parameters]
        track_inputs = not any(trainable) or (include_inputs and all(trainable))
        track_outputs = not any(trainable) and not (first and any(map(_differentiable, _tensors(first.args))))
        for parameter in parameters:
            parameter.grad = None
        axes: dict[Key, int | None] = {}
        captured = block.enter_context(
            capture(
                network,
                selected,
                recorder.observe,
                gradients=_observer(drawn, axes, on_tensor),
                with_inputs=include_inputs,
                track=track_outputs,
                edits=placed.by_name,
            )
        )
        ids = {*map(id, parameters)}
        run = _Run(
            subject, loss, include_inputs, track_inputs, autocast, state, captured, recorder, drawn, output_key, ids
        )
        failed, batch = None, first
        while batch is not None and failed is None:
            failed = _run_batch(run, batch, axes)
            if failed is None and on_batch is not None:
                on_batch(len(run.records))
            batch = next(batches, None) if failed is None else None

        def finished() -> tuple[tuple[LayerRow, ...], tuple[GradientRow, ...]]:
            block.close()
            _absorb(run)
            return layer_rows(subject, run.rows), gradient_rows(subject, run.gradients)

        by_parameter, (results, gradients) = parameter_rows(network, parameters, on_tensor, recorder.reducer, finished)

    device, dtype = subject.placed
    broke = failed is not None and failed.failure is not None
    inspection = GradientInspection(
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
                    *_remarks(run, trainable, track_outputs=track_outputs),
                    *placed.warnings(),
                )
            )
        ),
        failure=failed.failure if failed is not None else None,
        mode=mode,
        seed=seed,
        device=device,
        dtype=dtype,
        timings=run.seconds,
    )
    if failed is not None:
        raise PassError(failed.message, inspection) from failed.error
    return inspection


def _tensors(value: object) -> list[Tensor]:
    return [tensor for _, tensor in tensors_in(value)]


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _observer(
    drawn: Recorder, axes: Mapping[Key, int | None], on_tensor: Callable[[str, Tensor], None] | None
) -> Callable[[GradientSite[Measured], Tensor], Measured]:
    """Return what is called in the hook with each gradient."""

    def observe(site: GradientSite[Measured], gradient: Tensor) -> Measured:
        key = (site.layer, site.call, site.slot)
        if on_tensor is not None:
            on_tensor(f"{row_label(*key)} grad_{site.role}", gradient)
        if site.role == "output":
            axis = axes.get(key)
            if drawn.grids_for:
                drawn.keep(key, gradient, axis)
        else:
            axis = None if gradient.is_nested else drawn.axes.channel_axis(site.module, tuple(gradient.shape))
        return drawn.reducer.reduce(gradient, axis)

    return observe


def _run_batch(run: _Run, batch: Batch, axes: dict[Key, int | None]) -> _Failed | None:
    """Run one batch forward and backward."""
    _absorb(run)
    run.records.extend(batch.records)
    run.captured.listen(on=False)  # a model or a loss may differentiate on its way
    began = time.perf_counter()
    value, failed = _forward(run, batch)
    amount = math.nan if value is None else float(value.value.detach())  # an accelerator has finished then
    run.recorder.reducer.settle()
    run.seconds["forward"] += time.perf_counter() - began
    axes.clear()
    axes |= {(seen.layer, seen.call, seen.slot): _axis(seen.value) for seen in run.captured.observations}
    if value is not None:
        run.losses.append((replace(value, value=value.value.detach()), amount))  # without its graph
        run.warnings.extend(value.warnings)
        began = time.perf_counter()
        failed = _backward(run, value.value)
        run.recorder.reducer.settle()
        value.value.item()  # as above
        run.seconds["backward"] += time.perf_counter() - began
    return failed


def _absorb(run: _Run) -> None:
    """Absorb what the latest batch showed: for the last one there is time while the parameters are read."""
    absorb_gradients(run.gradients, run.captured.gradients, len(run.losses))
    absorb(run.rows, run.captured.restart())


def _axis(measured: Measured | None) -> int | None:
    """Return the channel axis that an output was measured with."""
    if measured is None:
        return None
    return measured.channel_axis if isinstance(measured, Reduction) else measured.known.channel_axis


def _forward(run: _Run, batch: Batch) -> tuple[LossValue | None, _Failed | None]:
    """Run the model and its loss, as often as it takes to see every gradient."""
    if run.losses:  # else nothing has moved since the state was seeded
        run.state.mark()
    looking_ahead = run.with_inputs and not run.losses  # shows which inputs are overwritten; needs no graph
    expected: float | None = None
    while True:
        run.recorder.start(batch.indices)
        run.drawn.start(batch.indices)
        run.drawn.axes = run.recorder.axes
        try:
            quiet = _hushed() if looking_ahead else nullcontext()
            with torch.set_grad_enabled(not looking_ahead), _autocast(run), quiet:
                output = run.subject.network(*_given(batch.args, track=run.track_inputs))
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
            error = the_models_own(raised)
            failure = locate(run.subject.modules, error)
            return None, _Failed(broke_off(run.subject.info.name, failure, error), failure, error)
        again = run.captured.must_repeat() or looking_ahead
        if not looking_ahead:
            try:
                with _autocast(run):
                    value = _loss_of(run.loss, output, batch)
            except HookscopeError:
                raise
            except (Exception, SystemExit) as raised:  # noqa: BLE001 - so may a user's loss
                return None, _Failed(_loss_failed(raised), None, raised)
            if expected is not None and not _same(expected, float(value.value.detach())):
                run.captured.give_up_copies()
                expected, again = None, True
            elif again:
                expected = float(value.value.detach())
            if not again:
                break
            del value
        del output
        looking_ahead = False
        run.captured.restart()
        run.state.rewind()
    with torch.no_grad():
        run.best.extend(predictions(output, run.subject.info.categories, batch.indices, run.output_key))
    return value, None


def _same(first: float, second: float) -> bool:
    if first == second or math.isnan(first):
        return True
    return abs(first - second) <= _SAME_LOSS * max(abs(first), abs(second))


def _autocast(run: _Run) -> AbstractContextManager[object]:
    if run.autocast is None:
        return nullcontext()
    return torch.autocast(torch.device(run.subject.placed[0]).type, dtype=run.autocast)


@contextmanager
def _hushed() -> Iterator[None]:
    """Leave a pass's warnings to the one that follows: some are about having no gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _given(args: tuple[object, ...], *, track: bool) -> Sequence[object]:
    """Return copies of the arguments; those that require a gradient, or all floating ones, lead to a leaf of ours."""
    copies: dict[int, Tensor] = {}
    found = tensors_in(args)
    for _, tensor in found:
        source = tensor.clone() if tensor.is_inference() else tensor.detach()
        if tensor.requires_grad or (track and _differentiable(tensor)):
            source.requires_grad_()  # the clone is no leaf: the model may overwrite it
        copies[id(tensor)] = strided_copy(source)
    try:
        return with_tensors(args, {path: copies[id(tensor)] for path, tensor in found})  # type: ignore[return-value]
    except TypeError:  # a container that cannot be rebuilt is given as it is
        return args


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
        return f"The loss ran out of memory: give fewer inputs at a time (a smaller batch). {error_line(error)}"
    return f"The loss raised {error_line(error)}"


def _backward(run: _Run, loss: Tensor) -> _Failed | None:
    """Run the backward pass with hooks listening."""
    name = run.subject.info.name
    if not loss.requires_grad:
        return _Failed(
            f"Nothing that requires a gradient leads to the loss of {name}: its forward pass runs under no_grad, "
            f"detaches its output or returns integers, and only its activations can be inspected."
        )
    leaves = [leaf for leaf in _leaves(loss) if id(leaf) not in run.parameter_ids]
    if leaves:  # the forward pass may have registered parameters
        known = {id(parameter) for parameter in run.subject.network.parameters()}
        leaves = [leaf for leaf in leaves if id(leaf) not in known]
    foreign = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in foreign:
        leaf.grad = None
    run.captured.listen(on=True)
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model may bring its own derivatives
        error = the_models_own(raised)
        failure = locate(run.subject.modules, error)
        if not failure.layer:  # not in a forward that checkpointing repeats: after the gradient that came last
            failure = _after_the_last_gradient(run, error)
        return _Failed(broke_off(name, failure, error, "backward"), failure, error)
    finally:
        run.captured.listen(on=False)
        for leaf, gradient in foreign:
            leaf.grad = gradient
    return None


def _leaves(loss: Tensor) -> list[Tensor]:
    """List the leaves that a backward pass would give a gradient to."""
    leaves: list[Tensor] = []
    seen: set[object] = {loss.grad_fn}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        following = node.next_functions
        if not following and (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        for each, _ in following:
            if each is not None and each not in seen:
                seen.add(each)
                waiting.append(each)
    return leaves


def _after_the_last_gradient(run: _Run, error: BaseException) -> Failure:
    arrived = [site for site in run.captured.gradients if site.arrival is not None]
    latest = max(arrived, key=lambda site: site.arrival or 0, default=None)
    if latest is None:
        return Failure("", type(run.subject.network).__name__, (), error_line(error))
    return Failure(latest.layer, type(latest.module).__name__, (), error_line(error))


def _remarks(run: _Run, trainable: Sequence[bool], *, track_outputs: bool) -> list[str]:
    remarks = []
    if len(run.losses) > 1:
        remarks.append(
            f"The loss and the gradients of parameters are sums over {len(run.losses)} batches, as training "
            f"accumulates them."
        )
    if not any(trainable):
        end = "first floating tensors that layers return" if track_outputs else "input of the network"
        remarks.append(f"No parameter is trainable: gradients are taken down to the {end}.")
    return remarks
