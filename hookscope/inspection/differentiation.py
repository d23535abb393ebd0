"""Run one batch forward and backward, repeated until every gradient is seen."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookscope.errors import HookscopeError, UsageError, is_out_of_memory
from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.autograd import graph_leaves, graph_nodes, strided_copy
from hookscope.hooks.interrupts import finished
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import SiteKey
from hookscope.hooks.pytree import tensors_in, with_tensors
from hookscope.hooks.step_gradients import STEPPED
from hookscope.inputs.batches import Batch
from hookscope.inspection.failures import failure_message, locate, reraise_internal, reraise_of_own_loss
from hookscope.inspection.gradient_rows import (
    Gradient,
    GradientRecorder,
    Steps,
    merge_gradients,
    merge_steps,
    named_parameters,
)
from hookscope.inspection.losses.formulas import LossValue, differentiable
from hookscope.inspection.overwriting import find_overwriting, overwriting_message
from hookscope.inspection.run import Break, InspectionOptions, Run, verified
from hookscope.inspection.state.preservation import Mode, Preserved
from hookscope.inspection.verification import Outcome, asks_for_identity, outcome_of
from hookscope.results.comparison import Prediction
from hookscope.results.network import Failure
from hookscope.statistics.reducer import Measured, Pending
from hookscope.statistics.storage import gathered
from hookscope.text import exception_line

LossFunction = Callable[[object, Batch], LossValue | Tensor]
"""Given the model's output and the batch, returns the loss: a 0-d tensor, or one with its description."""

# Relative deviation of the loss from which a pass with copies counts as a different computation: kernels
# that add in varying order stay far below.
_SAME_LOSS = 1e-3

_NO_ALIASES = "{} if its inputs are replaced by aliases"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOptions(InspectionOptions):
    """What `inspect_gradients` observes, and how it runs.

    Attributes:
        include_inputs: Report the gradient of each layer's inputs too, along the way through that layer alone. If all
            parameters are trainable, the network's own floating inputs get one as well. Gradients of parameters may
            then differ in the last bits, because parts are added in another order.
        mode: "eval", or "train" for batch statistics and dropout as in training; a network that is in train mode
            already keeps the parts that its owner has put in eval mode.
        autocast: The dtype of autocast; None for none.
    """

    include_inputs: bool = False
    mode: Mode = "eval"
    autocast: torch.dtype | None = None


@dataclass(slots=True, kw_only=True)
class GradientRun(Run):
    """A run that differentiates.

    Attributes:
        track_inputs: Whether the network's floating inputs require a gradient.
        ends_at_parameters: Whether parameters require one.
        parameter_ids: The ids of the parameters that the network came with.
        differentiated: The loss of the latest batch, with its graph; None before there is one.
        gradients_before: Copies of the parameters' gradients from before it, where it may be left out.
    """

    options: GradientOptions
    loss: LossFunction
    track_inputs: bool
    ends_at_parameters: bool
    gradient_recorder: GradientRecorder
    parameter_ids: set[int]
    gradients: dict[SiteKey, Gradient] = field(default_factory=dict)
    steps: Steps = field(default_factory=dict)
    losses: list[tuple[LossValue, float]] = field(default_factory=list)
    differentiated: Tensor | None = None
    loss_warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    gradients_before: dict[nn.Parameter, Tensor] = field(default_factory=dict)


class _Pass(NamedTuple):
    output: object
    value: LossValue | None  # None if the forward pass raised
    amount: float  # the loss as a number; NaN without one
    broken: Break | None


def run_batch(run: GradientRun, batch: Batch) -> Break | None:
    """Run one batch forward and backward; return how it failed, if it did."""
    if run.losses:  # before the first batch, nothing has moved since the state was seeded
        run.state.mark()
        parameters = run.inspected.parameters() if run.queue.on_error is not None else []
        kept = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        run.gradients_before = {leaf: grad if missing_memory(grad) else grad.clone() for leaf, grad in kept.items()}
        done = _differentiated(run, batch)
    else:
        done = _first_pass(run, batch)
    run.gradient_recorder.release()
    best: list[Prediction] = []
    if done.value is not None:
        with torch.no_grad():
            best = run.predicted(done.output, run.recorder.indices)
    watch, gradients = run.captured.watch, run.captured.gradients
    steps = [] if watch.steps is None else [*watch.steps.gradients]
    observations = run.captured.restart()

    def count() -> None:
        if done.value is not None:
            run.losses.append((done.value, done.amount))
            run.loss_warnings.extend(done.value.warnings)
        run.best.extend(best)
        merge_gradients(run.gradients, gradients, len(run.losses), len(batch.records))
        merge_steps(run.steps, steps)
        run.count(batch, observations)

    if done.broken is not None:
        return replace(done.broken, count=count)
    count()
    return None


def _first_pass(run: GradientRun, batch: Batch) -> _Pass:
    """Run the first batch; run it without hooks, too, if the outcomes are to be compared."""
    began = copy.copy(run.state)
    done, watch = _differentiated(run, batch), run.captured.watch
    raised = done.broken is not None and done.broken.raised
    gave_aliases = watch.gave_aliases or not STEPPED.isdisjoint(map(type, run.chosen.layers.values()))
    if raised and gave_aliases and not _fails_without_hooks(run, batch):
        watch.give_up_aliases(_NO_ALIASES.format("torch cannot differentiate the network"))
        watch.steps = None  # a checkpoint may repeat a recurrent layer without the alias of its input
        done = _run_again(run, batch, began)
    if done.broken is None and (run.verifies or _aliases_may_matter(run)):
        _verify(run, batch, done, began)
        for _ in ("tracked inputs", "aliases"):
            differs = run.verification is not None and run.verification.status == "differs"
            if done.broken is None and differs and _give_up(run):
                done = _run_again(run, batch, began)
                if done.broken is None:
                    _verify(run, batch, done, began)
    if done.broken is None:
        run.find_silent(batch)
    return done


def undo_batch(run: GradientRun) -> None:
    """Undo what a batch that is left out has changed."""
    run.gradient_recorder.maps.forget()
    run.state.rewind()
    for parameter in run.inspected.parameters():
        parameter.grad = run.gradients_before.get(parameter)


def _aliases_may_matter(run: GradientRun) -> bool:
    watch = run.captured.watch
    if run.chosen.edits.by_name or not watch.gave_aliases:
        return False
    return run.options.include_inputs or watch.aliases_meet or asks_for_identity(run.inspected.modules.values())


def _fails_without_hooks(run: GradientRun, batch: Batch) -> bool:
    """Tell whether the network raises without hooks, forward or backward; then go back to the mark."""
    run.state.rewind()
    try:
        with warnings.catch_warnings(action="ignore"), run.captured.detached():
            return _fails_backward(_output_and_loss(run, batch, tracks=run.track_inputs)[1].value)
    except (Exception, SystemExit):  # noqa: BLE001 - the model's code may raise anything
        return True
    finally:
        run.state.rewind()


def _give_up(run: GradientRun) -> bool:
    """Give up what may change results, tracked inputs before aliases; return whether there was any of it."""
    if run.track_inputs and run.ends_at_parameters:  # parameters inside an operator may get another gradient
        run.track_inputs = False
        return True
    gave_aliases = run.captured.watch.gave_aliases
    if gave_aliases:
        run.captured.watch.give_up_aliases(_NO_ALIASES.format("the network computes a different result"))
    return gave_aliases


def _run_again(run: GradientRun, batch: Batch, began: Preserved) -> _Pass:
    run.gradient_recorder.waiting = None
    run.state = copy.copy(began)  # which stays where it is when the state is marked
    run.state.rewind()
    _forget_batch(run)
    return _differentiated(run, batch)


def _differentiated(run: GradientRun, batch: Batch) -> _Pass:
    run.captured.watch.listening = False  # a model or a loss may differentiate on its way
    run.differentiated = None
    run.gradient_recorder.nodes.clear()
    began = time.perf_counter()
    output, value, broken = _forward(run, batch)
    # Reading the loss waits for an accelerator, so that the time below is that of the pass.
    amount = math.nan if value is None else _loss_number(value)
    run.seconds["forward"] += time.perf_counter() - began
    run.gradient_recorder.axes = {seen.place: _axis(seen.value) for seen in run.captured.observations}
    if value is None:
        return _Pass(output, None, amount, broken)
    if not run.losses and (_aliases_may_matter(run) or (run.verifies and run.captured.watch.gave_aliases)):
        run.gradient_recorder.waiting = []
    run.differentiated = value.value
    began = time.perf_counter()
    broken = _backward(run, value.value)
    _loss_number(value)  # waits, as above
    run.seconds["backward"] += time.perf_counter() - began
    if broken is not None and broken.overwritten:
        broken = _protected(run, batch, broken)
    return _Pass(output, replace(value, value=value.value.detach()), amount, broken)


def _verify(run: GradientRun, batch: Batch, done: _Pass, began: Preserved) -> None:
    """Compare the output, the loss and the gradients of parameters of the first batch to those without hooks.

    Whether aliases matter shows in the output: without `verify` there is no backward pass.
    """
    is_exact = run.inspected.placed[0] == "cpu"

    def forward() -> Outcome:
        with warnings.catch_warnings(action="ignore"):
            output, loss = _output_and_loss(run, batch, tracks=run.track_inputs and not run.ends_at_parameters)
            outcome = outcome_of(output, _loss_number(loss))
            if not run.verifies:
                return outcome
            broken = _backward(run, loss.value)
            if broken is not None and broken.error is not None:
                raise broken.error
            return outcome._replace(gradients=_gradients(run), is_exact=is_exact)

    hooked = outcome_of(done.output, done.amount)
    if run.verifies:
        hooked = hooked._replace(
            gradients=_gradients(run), is_exact=is_exact and not run.captured.watch.replaced_tensors
        )
    watched = {"gradients": lambda *_: None, "with_inputs": run.options.include_inputs}
    run.verification = verified(run, hooked, began, forward, **watched)


def _gradients(run: GradientRun) -> dict[str, Tensor | None]:
    with torch._C.DisableTorchFunction():
        return {parameter.names[0]: parameter.gradient for parameter in named_parameters(run.inspected.network)}


def _protected(run: GradientRun, batch: Batch, broken: Break) -> Break:
    """Name the layers that saved and overwrote a tensor, and take the gradients as if it had not been overwritten."""
    if run.losses:  # the earlier batches were differentiated, so the gradients of parameters are partly theirs
        return broken

    run.state.rewind()  # before other hooks are put on: it takes away those that came since the mark
    with warnings.catch_warnings(action="ignore"), run.captured.detached():
        write = find_overwriting(
            run.inspected.modules, lambda: _output_and_loss(run, batch, tracks=run.track_inputs)[1].value
        )
    _forget_batch(run)
    run.state.rewind()
    with warnings.catch_warnings(action="ignore"), torch.autograd.graph.allow_mutation_on_saved_tensors():
        _, value, again = _forward(run, batch)
        if value is not None and again is None:
            _backward(run, value.value)
    if write is None or broken.failure is None:
        return broken
    failure = replace(broken.failure, layer=write.saved_by, kind=type(run.inspected.modules[write.saved_by]).__name__)
    message = overwriting_message(run.inspected.info.name, run.inspected.modules, write)
    return replace(broken, message=message, failure=failure)


def _forget_batch(run: GradientRun) -> None:
    for parameter in run.inspected.parameters():
        parameter.grad = None
    run.captured.restart()
    run.gradient_recorder.maps.kept.clear()


def _axis(measured: Measured | None) -> int | None:
    return measured.header.channel_axis if isinstance(measured, Pending) else measured and measured.channel_axis


def _output_and_loss(run: GradientRun, batch: Batch, *, tracks: bool) -> tuple[object, LossValue]:
    with _autocast(run):
        args, kwargs = _leaf_copies(batch, tracks=tracks)
        output = run.inspected.network(*args, **kwargs)
        return output, _loss_of(run.loss, output, batch)


def _forward(run: GradientRun, batch: Batch) -> tuple[object, LossValue | None, Break | None]:
    expected = math.nan  # the loss of the pass before, if there was one
    places = tuple(range(len(run.records), len(run.records) + len(batch.records)))
    while True:
        run.recorder.start(places, pictures=batch.pictures)
        run.gradient_recorder.maps.start(places)
        try:
            with _autocast(run):
                args, kwargs = _leaf_copies(batch, tracks=run.track_inputs)
                output = run.inspected.network(*args, **kwargs)  # called here: see `reraise_internal`
                del args, kwargs
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
            return None, None, run.broken(raised)
        try:
            with _autocast(run):
                value = _loss_of(run.loss, output, batch)
        except HookscopeError:
            raise
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - so may a user's loss
            reraise_of_own_loss(raised, output)
            remedy = "ran out of memory: give fewer inputs at a time (a smaller batch)."
            problem = f"{remedy if is_out_of_memory(raised) else 'raised'} {exception_line(raised)}"
            return output, None, Break(f"The loss of {run.inspected.info.name} {problem}", None, raised)
        if not math.isnan(expected) and not math.isclose(expected, _loss_number(value), rel_tol=_SAME_LOSS):
            # The copies have changed what the network computes.
            run.captured.watch.give_up_copies()
            expected = math.nan
        elif not run.captured.must_repeat(value.value) or _fails_backward(value.value):
            return output, value, None
        else:
            expected = _loss_number(value)
        del output, value
        run.captured.restart()
        run.state.rewind()


def _fails_backward(loss: Tensor) -> bool:
    """Tell whether the backward pass raises: a copy could hide the model's own error."""
    try:
        torch.autograd.grad(loss, graph_leaves(graph_nodes(loss)), retain_graph=True, allow_unused=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the model may bring its own derivatives
        error.__traceback__ = None  # if the same exception is raised again, its traceback begins there
        return True
    return False


def _loss_number(loss: LossValue) -> float:
    return float(gathered(loss.value.detach()))


def _autocast(run: GradientRun) -> AbstractContextManager[object]:
    dtype = run.options.autocast
    return torch.autocast(torch.device(run.inspected.placed[0]).type, dtype=dtype) if dtype else nullcontext()


def _leaf_copies(batch: Batch, *, tracks: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the arguments. With `tracks` the floating ones require a gradient, else those that required one before."""
    arguments = (batch.args, dict(batch.kwargs))
    copies: dict[int, Tensor] = {}
    tensors = tensors_in(arguments)
    for _, tensor in tensors:
        source = tensor.clone() if tensor.is_inference() else tensor.detach()
        if tensor.requires_grad or (tracks and differentiable(tensor)):
            source.requires_grad_()  # the clone is no leaf: the model may overwrite it
        copies[id(tensor)] = strided_copy(source)
    try:
        return with_tensors(arguments, {path: copies[id(tensor)] for path, tensor in tensors})  # type: ignore[return-value]
    except TypeError:  # a container that cannot be rebuilt is given as it is
        return arguments


def _loss_of(loss: LossFunction, output: object, batch: Batch) -> LossValue:
    value = loss(output, batch)
    if isinstance(value, Tensor):
        value = LossValue(value, name=attribute_of(loss, "__name__", "loss"))
    if not isinstance(value, LossValue) or not isinstance(value.value, Tensor):
        raise UsageError(f"The loss returned {type(value).__name__} instead of a tensor with one number.")
    if value.value.numel() != 1:
        shape = tuple(value.value.shape)
        raise UsageError(f"The loss has shape {shape} instead of being one number: reduce it, for instance by .mean().")
    if value.value.is_complex():
        raise UsageError("The loss is a complex number, which has no gradient to descend: take .real or .abs().")
    return replace(value, value=value.value.reshape(()))


def _backward(run: GradientRun, loss: Tensor) -> Break | None:
    name = run.inspected.info.name
    if not loss.requires_grad:
        return Break(
            f"The loss of {name} has no gradient: the forward pass or the loss runs under no_grad, detaches or returns "
            "integers. Only activations can be inspected."
        )
    nodes = graph_nodes(loss)
    keep = not run.state.kept_nodes.isdisjoint(nodes)
    leaves = [leaf for leaf in graph_leaves(nodes) if id(leaf) not in run.parameter_ids]
    del nodes
    if leaves:  # the forward pass may have registered parameters
        registered = {id(parameter) for parameter in run.inspected.network.parameters()}
        leaves = [leaf for leaf in leaves if id(leaf) not in registered]
    with _gradients_kept(leaves):
        run.captured.watch.listening = True
        try:
            loss.backward(retain_graph=keep)  # type: ignore[no-untyped-call]
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model may bring its own derivatives
            error = reraise_internal(raised)
            failure = locate(run.inspected.modules, error)
            # A forward pass that checkpointing repeats has its modules in the traceback. For other errors, name the
            # layer whose gradient arrived last.
            if not failure.layer:
                failure = _after_the_last_gradient(run, error)
            overwritten = isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)
            return Break(failure_message(name, failure, error, "backward"), failure, error, overwritten)
        finally:
            run.captured.watch.listening = False
    return None


@contextmanager
def _gradients_kept(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Empty the `.grad` of tensors outside the network for the block, and restore it afterwards."""
    kept = [leaf.grad for leaf in leaves]

    def give(gradients: Iterable[Tensor | None]) -> None:
        for leaf, gradient in zip(leaves, gradients, strict=False):
            leaf.grad = gradient

    try:
        give(repeat(None))
        yield
    finally:
        finished(partial(give, kept))


def _after_the_last_gradient(run: GradientRun, error: BaseException) -> Failure:
    arrived = [site for site in run.captured.gradients if site.arrival is not None]
    latest = max(arrived, key=lambda site: site.arrival or 0, default=None)
    layer, module = ("", run.inspected.network) if latest is None else (latest.layer, latest.module)
    return Failure(layer, type(module).__name__, (), exception_line(error))
