"""Run batches forward, and backward only as far as the layers that are looked at."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, CheckpointFunction

from hookscope.commands.attribute.input_places import main_input, require_floating_point
from hookscope.commands.attribute.layer_choice import LayerOutputs, MapLayer, choose_layer, sum_of
from hookscope.commands.attribute.scores import BatchTarget
from hookscope.errors import HookscopeError, ModelError, UsageError
from hookscope.hooks.autograd import graph_leaves, graph_nodes, strided_copy
from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.observed import GradientSite, ModuleCall, RowKey, SiteKey
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.pytree import tensors_in, with_tensors
from hookscope.hooks.running import unfused
from hookscope.inputs.batches import Batch, copy_of
from hookscope.inspection.failures import failure_message, locate, reraise_internal
from hookscope.inspection.network import BatchQueue, InspectedNetwork
from hookscope.inspection.run import Break, run_batches
from hookscope.inspection.state.preservation import Preserved
from hookscope.parameters import arg
from hookscope.results.inputs import InputRecord
from hookscope.statistics.layouts import Layout

MapCapture = Capture[Tensor | None]
"""Hooks that copy outputs and gradients, (N, C, *grid); None for those without a place for the picture."""

# An error raised in this folder is not the model's.
_OWN = str(Path(__file__).parent)


class ModelRaisedError(Exception):
    """The model raised on a batch. The message is a sentence for people; the cause is what the model raised."""


@dataclass(slots=True, kw_only=True)
class ForwardBackward:
    """The passes of a run over the layers of a network, with its hooks on.

    Attributes:
        targets_of: Takes what the network returned, and the batch; returns the targets.
        outputs: The outputs of every layer in the latest pass.
        capturing: The hooks that fill `outputs`.
        tracks: Whether the graph begins at the inputs, not at the layers that are looked at. Activation checkpointing
            needs it, because layers that run again must save as many tensors as the first time.
    """

    inspected: InspectedNetwork
    targets_of: Callable[[object, Batch], list[BatchTarget]]
    state: Preserved
    outputs: LayerOutputs
    capturing: Capture[None]
    tracks: bool = False

    def watch(
        self, layers: Mapping[str, nn.Module], operations: OperationChoice | None = None
    ) -> AbstractContextManager[MapCapture]:
        """Return hooks that copy what layers return, and gradients with respect to it, as (N, C, *grid)."""

        def observe(call: ModuleCall, slot: str, tensor: Tensor) -> Tensor | None:
            place = (call.layer, call.call, slot)
            if place not in self.outputs.by_place:
                self.outputs.observe(call, slot, tensor)
            return copied_map(place, tensor)

        def copied_map(place: RowKey, tensor: Tensor) -> Tensor | None:  # autograd may add to a gradient in place
            layout = self.outputs.by_place[place].layout
            return layout.maps(tensor.detach().clone()) if isinstance(layout, Layout) else None

        def arrived(site: GradientSite[Tensor | None], gradient: Tensor) -> Tensor | None:
            return copied_map((site.layer, site.call, site.slot), gradient)

        network = self.inspected.network
        return capture(network, layers, observe, gradients=arrived, track=True, operations=operations)


def run_output(passes: ForwardBackward, batch: Batch, *, track: bool = False, keeps: bool = False) -> object:
    """Run the network over copies of a batch; `track` makes the input that maps are drawn over require a gradient.

    Layers that only other inputs lead to then have no graph, because maps of them would not be maps of that input.
    """
    copied = copy_of(batch)
    arguments = (copied.args, dict(copied.kwargs))
    if track:  # the floating ones with a graph; no leaves, as the model may overwrite them
        main = main_input(copied)
        tensors = [pair for pair in tensors_in(arguments) if pair[1].is_floating_point()]
        leaves = {path: tensor for path, tensor in tensors if main is None or tensor is main}
        arguments = with_tensors(
            arguments, {path: strided_copy(leaf.requires_grad_()) for path, leaf in leaves.items()}
        )  # type: ignore[assignment]
    args, kwargs = arguments
    passes.capturing.restart()
    passes.outputs.start(batch, keeps=keeps)
    with model_errors(passes.inspected, "forward"):
        return passes.inspected.network(*args, **kwargs)


@contextmanager
def model_errors(inspected: InspectedNetwork, phase: str) -> Iterator[None]:
    """Turn what the model raises into one sentence with its place."""
    try:
        yield
    except HookscopeError:
        raise
    except (Exception, SystemExit) as raised:
        if traceback.extract_tb(raised.__traceback__)[-1].filename.startswith(_OWN):
            raise
        error = reraise_internal(raised)
        failure = locate(inspected.modules, error)
        raise ModelRaisedError(failure_message(inspected.info.name, failure, error, phase)) from error


def run_model(
    queue: BatchQueue,
    state: Preserved,
    run: Callable[[Batch], None],
    records: Sequence[InputRecord],
    finished: Callable[[int], None],
) -> None:
    """Run all batches with the arguments of `run_batches`; `run` may raise ModelRaisedError.

    Raises:
        ModelError: If the network raised, with an `on_error` on every input.
    """

    def attempt(batch: Batch) -> Break | None:
        state.mark()
        try:
            run(batch)
        except ModelRaisedError as raised:
            return Break(str(raised), error=raised.__cause__)
        return None

    broken = run_batches(queue, attempt, records, finished, state.rewind)
    if broken is not None:
        raise ModelError(broken.message) from broken.error


def run_and_choose(
    passes: ForwardBackward, batch: Batch, *, before: str | None = None
) -> tuple[list[BatchTarget], MapLayer | None]:
    """Run a batch with a graph from its inputs on, and choose the layer that locates the target best.

    Raises:
        UsageError: If there is no gradient at all.
    """
    require_floating_point(passes.inspected.network, main_input(batch))
    output = run_output(passes, batch, track=True, keeps=True)
    targets = passes.targets_of(output, batch)
    with model_errors(passes.inspected, "backward"):
        scores = [target.score(output) for target in targets]
        if not all(score.requires_grad for score in scores):
            raise UsageError(
                f"No gradient leads from the score of {passes.inspected.info.name} to its input: the forward pass runs "
                "under no_grad, detaches on the way, or computes with whole numbers. Where it detaches, give "
                f"{arg('layer')} of a layer after that."
            )
        choice = choose_layer(passes.outputs, passes.inspected.modules, targets, scores, before=before)
    passes.outputs.forget()
    return targets, choice


def run_and_differentiate(
    passes: ForwardBackward, captured: MapCapture, batch: Batch
) -> tuple[list[BatchTarget], dict[RowKey, MapLayer]]:
    """Run a batch, and differentiate its targets down to the layers that `captured` watches.

    Returns:
        The targets, and by row key the outputs in which the picture has a place, in the order in which layers finished.
        A gradient that does not arrive is zero.
    """
    while True:
        captured.restart()  # a pass that raised has left its calls
        captured.watch.listening = False
        output = run_output(passes, batch, track=passes.tracks)
        targets = passes.targets_of(output, batch)
        with model_errors(passes.inspected, "forward"):
            scores = [target.score(output) for target in targets]
        tracked = [score for score in scores if score.requires_grad]
        if not tracked or not captured.must_repeat(torch.cat(tracked).sum()):
            break
        del output, scores, tracked
        passes.state.rewind()
    by_target: list[Mapping[SiteKey, Tensor | None]] = []
    captured.watch.listening = True
    for score, target in zip(scores, targets, strict=True):
        if score.requires_grad:
            try:
                with model_errors(passes.inspected, "backward"):
                    _backward(sum_of(score, target))
            except ModelRaisedError as error:
                if passes.tracks or not isinstance(error.__cause__, CheckpointError):
                    raise
                passes.tracks = True
                captured.restart()
                passes.state.rewind()
                return run_and_differentiate(passes, captured, batch)
        by_target.append(captured.watch.values_of_pass())
    layers: dict[RowKey, MapLayer] = {}
    for place, values, *_ in captured.restart():
        if values is not None:
            arrived = [of_target.get((*place, "output")) for of_target in by_target]
            gradients = [torch.zeros_like(values) if gradient is None else gradient for gradient in arrived]
            layers[place] = MapLayer(place, passes.outputs.by_place[place], "given", values, gradients)
    return targets, layers


def _backward(score: Tensor) -> None:
    """Differentiate, and restore `grad` of the graph's leaves, which may be the caller's."""
    leaves = [(leaf, leaf.grad) for leaf in graph_leaves(graph_nodes(score))]
    for leaf, _ in leaves:
        leaf.grad = None
    try:
        score.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    finally:
        for leaf, gradient in leaves:
            leaf.grad = gradient


@contextmanager
def frozen(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Make no parameter require a gradient, inside `preserved`, so that the graph begins only where it is asked to.

    Tensors of inference mode, which autograd cannot save for a backward pass, are copied for the block. A
    TransformerEncoder takes no nested tensors in the block: with these, no graph can begin at its layers. Reentrant
    activation checkpointing runs its layers as usual, because it hides them from autograd and refuses `autograd.grad`.
    """
    made: dict[int, Tensor] = {}
    held: list[tuple[dict[str, Any], str, Tensor]] = []
    registers: list[dict[str, Any]] = [module._parameters for module in modules.values()]
    registers += [module._buffers for module in modules.values()]
    try:
        for register in registers:
            for name, tensor in register.items():
                is_parameter = isinstance(tensor, nn.Parameter)
                if tensor is not None and tensor.is_inference():
                    held.append((register, name, tensor))
                    copied = tensor.clone()
                    made[id(tensor)] = nn.Parameter(copied, requires_grad=False) if is_parameter else copied
                elif is_parameter and tensor.requires_grad and tensor.is_leaf:
                    tensor.requires_grad_(False)
        for register, name, tensor in held:
            register[name] = made[id(tensor)]
        CheckpointFunction.apply = lambda function, _preserve, *args: function(*args)
        with unfused():
            yield
    finally:
        with suppress(AttributeError):
            del CheckpointFunction.apply  # uncovers the base class's method
        for register, name, tensor in held:
            register[name] = tensor
