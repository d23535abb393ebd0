"""Run a model over its inputs and gather what its layers did: the pipeline behind `hookscope activations`."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hookscope.editing import place_edits
from hookscope.edits import Edit
from hookscope.errors import ModelError
from hookscope.failures import broke_off, locate, the_models_own
from hookscope.hooks import ModuleCall, capture
from hookscope.inputs import Batch
from hookscope.layers import module_index, select_from, unwrap
from hookscope.measure import Reducer
from hookscope.models import LoadedModel
from hookscope.preservation import preserved
from hookscope.recording import (
    Key,
    Recorder,
    Row,
    absorb,
    fast_path_warning,
    feature_maps,
    layer_rows,
    predictions,
    uncalled,
)
from hookscope.results import Failure, InputRecord, Inspection, ModuleRow, Prediction
from hookscope.subject import as_batches, count_parameters, subject_of


class ForwardError(ModelError):
    """The model raised in its forward pass.

    Attributes:
        inspection: What was seen until then; its `failure` says where it broke off.
    """

    def __init__(self, message: str, inspection: Inspection) -> None:
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
    distributions: bool = False,
    on_tensor: Callable[[str, Tensor, int | None], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Inspection:
    """Run a model over its inputs in eval mode, without gradients, and report on the outputs of its layers.

    The model comes out as it went in: modes, buffers, hooks, gradients and random states are restored, also after an
    exception. Statistics are taken at the moment a layer returns, before an in-place layer can overwrite its output.

    Args:
        model: The network, on its device, or what `load_model` returned.
        inputs: A tensor with the batch on axis 0, one batch, or any number of batches; on the model's device.
        layers: Patterns as for `--layer`; none means every leaf.
        grids_for: Keep feature maps for drawing, for this many inputs from the first.
        max_channels: Keep at most this many channels of each, the first ones; None keeps all.
        seed: Seeds the random numbers the forward pass may draw.
        edits: Changes to inputs or outputs: "layer3:output:zero(channels=3,7)".
        output_key: Which of several outputs holds the class scores: "logits", "[0]".
        distributions: Count how values are distributed, for quantiles and histograms, at some more time.
        on_tensor: Called in the hook with each output's label, the output itself, and the axis that counts its channels
            (None without one); clone what must outlive the call.
        on_batch: Called after each batch with the number of inputs finished.

    Returns:
        What was seen.

    Raises:
        LayerNotFoundError: If a pattern selects nothing.
        ForwardError: If the model raised; carries what was seen until then.
        UsageError: If a pattern is malformed.
    """
    subject = subject_of(model)
    network = subject.network
    batches = iter(as_batches(inputs))
    first = next(batches, None)

    def order() -> list[str]:
        return [] if first is None else execution_order(network, first.args)

    selected = select_from(subject.modules, subject.aliases, layers, order)
    recorder = Recorder(grids_for, max_channels, on_tensor, Reducer(distributions=distributions))
    placed = place_edits(edits, network, order, recorder)
    rows: dict[Key, Row] = {}
    records: list[InputRecord] = []
    best: list[Prediction] = []
    error: BaseException | None = None
    began = time.perf_counter()
    with (
        preserved(network, seed, modules=subject.modules.values()),
        capture(network, selected, recorder.observe, edits=placed.by_name) as captured,
    ):
        batch = first
        while batch is not None:
            recorder.start(batch.indices)
            records.extend(batch.records)
            try:
                with torch.no_grad():
                    output = network(*batch.args)
            except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
                error = the_models_own(raised)
            recorder.reducer.settle()
            absorb(rows, captured.restart())
            if error is not None:
                break
            best.extend(predictions(output, subject.info.categories, batch.indices, output_key))
            if on_batch is not None:
                on_batch(len(records))
            batch = next(batches, None)
    seconds = time.perf_counter() - began

    failure = None if error is None else locate(subject.modules, error)
    results = layer_rows(subject, rows)
    device, dtype = subject.placed
    inspection = Inspection(
        model=subject.info,
        inputs=tuple(records),
        rows=results,
        uncalled=uncalled(
            subject,
            selected,
            captured.called if failure is None else captured.called | {failure.layer},
            broke_off=failure is not None,
        ),
        feature_maps=feature_maps(results, recorder.kept),
        predictions=tuple(best),
        warnings=(*subject.warnings, *fast_path_warning(subject.modules, selected), *placed.warnings()),
        failure=failure,
        seed=seed,
        device=device,
        dtype=dtype,
        timings={"forward": seconds},
    )
    if failure is not None and error is not None:
        raise ForwardError(broke_off(subject.info.name, failure, error), inspection) from error
    return inspection


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
    passes, failure = _passes(network, args) if args is not None else ({}, None)
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


def execution_order(network: nn.Module, args: Sequence[object]) -> list[str]:
    """Return the names of all modules that run, in the order in which they first finish."""
    return list(_passes(network, args)[0])


def _passes(network: nn.Module, args: Sequence[object]) -> tuple[dict[str, _FirstCall], Failure | None]:
    """Run the network once; return what its modules took and gave, in the order in which they first finished."""

    def shapes(call: ModuleCall, _slot: str, tensor: Tensor) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        return tuple(tuple(given.shape) for _, given in call.inputs), tuple(tensor.shape)

    failure = None
    with preserved(network, seed=0), capture(network, dict(network.named_modules()), shapes) as captured:
        try:
            with torch.no_grad():
                network(*tree_map_only(Tensor, _copy, tuple(args)))  # it may overwrite what it is given
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's code may raise anything
            the_models_own(error)
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
