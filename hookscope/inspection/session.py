"""Run a network over files, pictures or tensors: shared by the commands and the Python functions."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from platform import python_version
from typing import Any, TypeVar

import torch
from torch import Tensor

from hookscope import options
from hookscope.errors import HookscopeError, ModelError, UnfitInputError, UsageError
from hookscope.hooks.selection import unwrap
from hookscope.inputs.loading import read_tensor
from hookscope.inputs.named import named_inputs, without_named_frame
from hookscope.inputs.noise import noise_and_named, noise_batch
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inputs.preprocessing_options import assumed_preparation, preprocessing_from_options
from hookscope.inspection.backward import PassError, inspect_gradients
from hookscope.inspection.cost import Call, network_cost
from hookscope.inspection.detection import default_targets_text, with_default_targets
from hookscope.inspection.device import placement
from hookscope.inspection.differentiation import GradientOptions
from hookscope.inspection.edit_placement import ParameterEdits, edited_parameters, split_edits
from hookscope.inspection.forward import ForwardError, ForwardOptions, inspect
from hookscope.inspection.given_inputs import Images, arguments_in_file, by_position_and_name, sources_of
from hookscope.inspection.losses.choosing import Loss, choose_loss
from hookscope.inspection.network import BatchQueue, InspectedNetwork, queued
from hookscope.inspection.run import InspectionOptions
from hookscope.inspection.saved_tensors import TensorCollector
from hookscope.models.construction import LoadedModel
from hookscope.models.input_spec import example_shape, shape_option, time_first_warning
from hookscope.models.noise_arguments import noise_arguments
from hookscope.models.user_code import load_function
from hookscope.parameters import arg
from hookscope.results.activations import Activations
from hookscope.results.comparison import Change, Comparison
from hookscope.results.findings import Finding
from hookscope.results.gradients import Gradients, InputGradients
from hookscope.results.inputs import Preprocessing, Provenance
from hookscope.results.noise_shapes import NoiseShape, noise_beside_pictures, noise_note, parse_noise_shapes
from hookscope.results.repeats import Key, reduced, repeated
from hookscope.results.statistics import TensorStatistics
from hookscope.text import safe_text

_TENSOR_SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")

OnError = Callable[[HookscopeError], None]
OnProgress = Callable[[int, int], None]
Run = TypeVar("Run", Activations, Gradients)


@dataclass(frozen=True, slots=True)
class Session:
    """A network on its device and the inputs to run it over; `unusable` is filled while it runs."""

    loaded: LoadedModel
    inputs: InputPipeline
    seed: int
    load_seconds: float
    unusable: list[HookscopeError] = field(default_factory=list)


def open_session(
    loaded: LoadedModel,
    images: Images,
    option: options.PictureOptions,
    *,
    began: float,
    seed: int,
    noise: int = 0,
) -> Session:
    """Find the inputs for a network that is on its device already.

    Loading `began` at that `time.perf_counter`; where there are no inputs there are `noise` of the network's own shape,
    or as many as an exported program takes.

    Raises:
        UsageError: If an option cannot be right, there is no input, or it is not known what the network takes.
        NothingMatchedError: If a folder or a glob holds no input.
        ImageError: If an input by name cannot be read.
    """
    notes: list[str] = []
    input_shape = option.input_shape if isinstance(option, options.NoiseOption) else None
    images, named = by_position_and_name(images, option.input if isinstance(option, options.NamedInputs) else ())
    images, in_file = arguments_in_file(images)
    preprocessing = preprocessing_from_options(loaded.preprocessing, option)
    files, batch = sources_of(images, preprocessing, notes)
    if loaded.info.sha256:  # weights of a file, which were trained on something
        notes += assumed_preparation(loaded.preprocessing, files, option)
    warnings = (*loaded.warnings, *time_first_warning(loaded.module))
    by_name = (*in_file, *named_inputs(named, preprocessing))
    preprocessing = without_named_frame(preprocessing, by_name)
    positional = bool(files) or batch is not None
    shapes = () if input_shape is None else parse_noise_shapes(input_shape)
    if positional and any(not shape.name for shape in shapes):
        raise UsageError(noise_beside_pictures())
    if noise and not positional and not shapes and all(entry.record is None for entry in by_name):
        shapes = (_example(loaded, preprocessing, noise),)
    if not positional and not by_name and not shapes:
        raise UsageError(
            f"There is no input: give a picture, a tensor, a file or a folder, or {arg('input_shape')} for noise."
        )
    others = len(batch.args) if batch is not None else bool(files)
    shapes = noise_arguments(shapes, loaded.module, named=[entry.name for entry in by_name], others=others)
    notes += noise_note(shapes) if input_shape is not None else ()
    shapes, by_name = noise_and_named(shapes, by_name, seed, with_others=positional)
    batch = noise_batch(shapes, seed, preprocessing.kind) if shapes else batch
    pipeline = InputPipeline(files, preprocessing, *placement(loaded.module), batch, shapes, by_name)
    loaded = replace(loaded, notes=(*notes, *loaded.notes), warnings=warnings)
    return Session(loaded, pipeline, seed, time.perf_counter() - began)


def _example(loaded: LoadedModel, preprocessing: Preprocessing, count: int) -> NoiseShape:
    shape = loaded.example_shape or example_shape(unwrap(loaded.module), preprocessing)
    if shape is None:
        raise UsageError(
            f"{loaded.info.name} has an unknown input shape: give pictures or tensor files to run on, or noise with "
            f"{shape_option(loaded.module)}."
        )
    return NoiseShape((max(count, shape[0]), *shape[1:]))


def run_forward(
    session: Session,
    option: options.Activations,
    judge: Callable[[Activations], tuple[Finding, ...]],
    on_progress: OnProgress | None,
    on_error: OnError | None,
) -> Activations:
    """Run the network forward over all inputs, without edits first if there are any.

    `judge` returns the verdicts on what is reported; it sees further operations, which are not reported.

    Raises:
        ForwardError: If the model raised; carries what was seen until then.
    """
    base = ForwardOptions(summaries=True, tokens=True, seed=session.seed)
    run, collector = partial(inspect, session.loaded), TensorCollector(input_count(session.inputs), on_progress)
    inspection = _measured(session, option, run, base, judge, collector, reporter(session.unusable, on_error))
    inspection = replace(
        inspection,
        tensors=collector.joined(row.label for row in inspection.rows),
        provenance=provenance_of(session, option.layer, {"edits": [*option.edit]} if inspection.comparison else {}),
    )
    return _with_cost(inspection, session) if option.cost else inspection


def _with_cost(inspection: Activations, session: Session) -> Activations:
    """Measure what the network costs for the first input that ran; warn with the reason if it raises alone."""
    batches = session.inputs.batches(1, _ignore_error)
    batch = next((batch for batch in batches if batch.records[0] == inspection.inputs[0]), None)
    if batch is None:
        return replace(inspection, warnings=(*inspection.warnings, "No cost: the first input has changed since."))
    try:
        cost = network_cost(Call(session.loaded.module, batch.args, batch.kwargs))
    except ModelError as error:
        return replace(inspection, warnings=(*inspection.warnings, f"No cost: {error}"))
    return replace(inspection, cost=cost)


def run_backward(
    session: Session,
    loss: Loss,
    option: options.Grads,
    judge: Callable[[Gradients], tuple[Finding, ...]],
    settings: Mapping[str, Any],
    on_progress: OnProgress | None,
    on_error: OnError | None,
) -> Gradients:
    """Run the network forward and backward over all inputs, without edits first, and over each input alone if asked.

    `judge` is as for `run_forward`; `settings` go into `run.json`.

    Raises:
        PassError: If the model raised; carries what was seen until then.
    """
    loaded = session.loaded
    if option.mode == "train" and (targets := default_targets_text(loaded.module)):
        warning = f"{loaded.info.name} needs targets in train mode: each input is given {targets}."
        inputs = replace(session.inputs, finish=partial(with_default_targets, loaded.module))
        session = replace(session, loaded=replace(loaded, warnings=(*loaded.warnings, warning)), inputs=inputs)
    dtype: torch.dtype | None = getattr(torch, option.autocast) if option.autocast else None
    alone = GradientOptions(layers=option.layer, seed=session.seed, mode=option.mode, autocast=dtype)
    base = replace(alone, include_inputs=option.inputs)
    run = partial(inspect_gradients, session.loaded, loss=loss)
    collector, report = TensorCollector(input_count(session.inputs), on_progress), reporter(session.unusable, on_error)
    inspection = _measured(session, option, run, base, judge, collector, report)
    collector.end()  # gradients of parameters come last
    if option.per_image and inspection.inputs:
        values, others = split_edits(option.edit)
        with edited_parameters(session.loaded.module, values):
            run = partial(run, options=replace(alone, edits=others))
            inspection = _with_inputs_alone(session, inspection, run, report)
    outputs = (f"{row.label} grad_{row.role}" for row in inspection.gradients)
    labels = chain(outputs, (f"{row.name} grad" for row in inspection.parameters))
    settings = {"edits": [*option.edit], **settings, "autocast": option.autocast}
    provenance = provenance_of(session, option.layer, settings)
    return replace(inspection, tensors=collector.joined(labels), provenance=provenance)


def _measured(
    session: Session,
    option: options.Activations | options.Grads,
    run: Callable[..., Run],
    base: InspectionOptions,
    judge: Callable[[Run], tuple[Finding, ...]],
    collector: TensorCollector,
    report: OnError | None,
) -> Run:
    """Run over all inputs, first without edits if there are any; judge the run with edits, and compare both.

    `base` has the options of the run that `activations` and `grads` do not share.
    """
    reported = replace(
        base,
        layers=option.layer,
        ops=option.ops,
        for_rules=True,
        output_key=option.output_key,
        verify=option.verify,
        distributions=True,
        keeps_values=True,
        grids_for=option.grids_for,
        max_channels=option.max_channels,
    )
    values, others = split_edits(option.edit)
    on_tensor = collector.collect if option.save_tensors else None
    made: ParameterEdits
    plain: Run | None = None
    try:
        if option.edit:
            compared = replace(reported, for_rules=False, keeps_values=False, grids_for=0)
            plain = run(inputs=queued(session.inputs, option.batch_size, _ignore_error), options=compared)
        with edited_parameters(session.loaded.module, values) as made:
            inputs, reported = queued(session.inputs, option.batch_size, report), replace(reported, edits=others)
            edited: Run = run(inputs=inputs, options=reported, on_tensor=on_tensor, on_batch=collector.end_batch)
    except (ForwardError, PassError) as error:
        seen: Any = error.inspection
        shown = _shown(seen, repeats=option.repeats)
        error.inspection = replace(shown, timings={"load": session.load_seconds, **shown.timings})
        raise
    notes, module = [*edited.notes, *made.notes], session.loaded.module
    has_parts = next(module.children(), None) is not None or type(module).__module__.startswith("torch.")
    if not option.ops and not has_parts:  # only its output has a row
        notes.append(f"{type(module).__name__} has no modules inside: {arg('ops')} shows its operations.")
    edited = replace(edited, warnings=(*edited.warnings, *made.warnings), notes=tuple(notes))
    result = _compared(plain, edited, option.edit, repeats=option.repeats)
    return replace(result, verdicts=judge(edited), timings={"load": session.load_seconds, **result.timings})


def choose_session_loss(
    session: Session,
    loss: str | Callable[..., object],
    target: str | int | Sequence[int | str] | Path | Tensor | None,
    output_key: str | None,
) -> Loss:
    """Return the loss that `--loss`, `--target` and `--output-key` choose.

    Raises:
        UsageError: If there is no such loss, or target and loss do not fit.
        InputError: If a file cannot be read.
    """
    if isinstance(target, Sequence) and not isinstance(target, str):
        target = ",".join(map(str, target))
    source, _, name = loss.rpartition(":") if isinstance(loss, str) else ("", "", "")
    is_file = isinstance(target, str | Path) and str(target).lower().endswith(_TENSOR_SUFFIXES)
    several = is_file or isinstance(target, Tensor) or (isinstance(target, str) and "," in target)
    return choose_loss(
        load_function(Path(source), name) if source.endswith(".py") else loss,
        target=read_tensor(Path(str(target))) if is_file else str(target) if isinstance(target, Path) else target,
        target_name=Path(str(target)).name if is_file else "",
        seed=session.seed,
        categories=session.loaded.info.categories,
        output_key=output_key,
        # Only targets given per input need it.
        input_count=session.inputs.input_count() if several else None,
    )


def _with_inputs_alone(
    session: Session, inspection: Gradients, run: Callable[..., Gradients], report: OnError | None
) -> Gradients:
    """Differentiate each input alone: norms of the rows that are shown."""
    used, alone = set(inspection.inputs), []
    shown = {row.label for row in inspection.gradients if row.role == "output"}
    for batch in session.inputs.batches(1, _ignore_error):
        record = batch.records[0]
        try:
            gradients = run(inputs=[batch])
        except PassError as error:  # batch normalisation needs several values
            failure = UnfitInputError([safe_text(record.name)], f"alone, for {arg('per_image')}: {error}")
            if record in used and report is None:
                raise failure from error
            if record in used and report is not None:
                report(failure)
            continue
        norms = [row.gradient.l2 for row in gradients.parameters if row.gradient.l2 is not None]
        rows = {row.label: row.gradient.l2 for row in gradients.gradients if row.role == "output"}
        rows = {label: norm for label, norm in rows.items() if label in shown}
        loss = math.nan if gradients.loss is None else gradients.loss.value
        alone.append(InputGradients(record.name, loss, math.hypot(*norms) if norms else None, rows))
    return replace(inspection, inputs_alone=tuple(alone))


def _compared(plain: Run | None, edited: Run, edits: Sequence[Any], *, repeats: bool) -> Run:
    """Fold repeated rows, and compare with the run without edits if both ran over the same inputs.

    The verification shown is that of the run without edits.
    """
    shown: Run = _shown(edited, repeats=repeats)
    if plain is None:
        return shown
    shown = replace(shown, verification=plain.verification)
    if plain.inputs != edited.inputs:
        sentence = "There is no comparison: the model raised on other inputs with the edits than without."
        return replace(shown, warnings=(*shown.warnings, sentence))
    listed = reduced(edited, edited.hidden)
    left_out = () if repeats else repeated(listed.rows, getattr(listed, "gradients", ()))
    return replace(shown, comparison=compare(plain, listed, edits, left_out))


def compare(
    before: Activations | Gradients,
    after: Activations | Gradients,
    edits: Sequence[str],
    left_out: Collection[Key] = (),
) -> Comparison:
    """Compare a run without edits to the same run with them, but for the outputs left out.

    Rows whose statistics differ are in the order of `after`; those that only `before` has come last.
    """
    old, new = dict(_statistics_by_label(before, left_out)), dict(_statistics_by_label(after, left_out))
    keys = [*new, *(key for key in old if key not in new)]
    changes = tuple(
        Change(label, kind, _without_arrays(old.get((kind, label))), _without_arrays(new.get((kind, label))))
        for kind, label in keys
        if old.get((kind, label)) != new.get((kind, label))
    )
    losses = None
    if isinstance(before, Gradients) and isinstance(after, Gradients) and before.loss and after.loss:
        losses = before.loss.value, after.loss.value
    return Comparison(tuple(edits), losses, (before.predictions, after.predictions), changes, len(keys))


def _without_arrays(statistics: TensorStatistics | None) -> TensorStatistics | None:
    return statistics and replace(statistics, distribution=None, kept_values=None)


def _statistics_by_label(
    run: Activations | Gradients, left_out: Collection[Key]
) -> Iterator[tuple[tuple[str, str], TensorStatistics]]:
    """Return ((kind, label), statistics) of each row."""
    calls = {key[:2] for key in left_out}
    for row in run.rows:
        if (row.layer, row.call, row.slot) not in left_out:
            yield ("activation", row.label), row.activation
    if isinstance(run, Gradients):
        for gradient in run.gradients:
            key = (gradient.layer, gradient.call, gradient.slot)
            if key[:2] not in calls if gradient.role == "input" else key not in left_out:
                yield (f"grad_{gradient.role}", gradient.label), gradient.gradient
        for parameter in run.parameters:
            yield ("gradient", parameter.name), parameter.gradient


def _shown(run: Run, *, repeats: bool) -> Run:
    """Leave out rows measured for verdicts alone and, without `repeats`, rows that repeat others."""
    return replace(reduced(run, run.hidden, folds=not repeats, numbers=True), hidden=())


def _ignore_error(_error: HookscopeError) -> None:
    """Ignore an unusable input: the reported run names it."""


def input_count(inputs: InputPipeline) -> int:
    """Return how many inputs there are, unreadable ones among them."""
    return len(inputs.files) or inputs.input_count()


def reporter(unusable: list[HookscopeError], on_error: OnError | None) -> OnError | None:
    """Return an `on_error` that also adds to the errors of unusable inputs; None for None."""
    if on_error is None:
        return None

    def report(error: HookscopeError) -> None:
        unusable.append(error)
        on_error(error)

    return report


def session_batches(session: Session, batch_size: int, on_error: OnError | None) -> BatchQueue:
    """Return the inputs of a session as a queue of batches; its `on_error` is that of `reporter`."""
    return queued(session.inputs, batch_size, reporter(session.unusable, on_error))


def batch_progress(session: Session, on_progress: OnProgress | None) -> Callable[[int], None]:
    """Return what to call after each batch with the number of inputs finished: it adds their total."""
    if on_progress is None:
        return lambda _finished: None
    total = input_count(session.inputs)
    return lambda finished: on_progress(finished, total)


def run_fields(
    session: Session, inspected: InspectedNetwork, patterns: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a result that have the network, where it ran and how; arguments as for `provenance_of`."""
    device, dtype = inspected.placed
    provenance = provenance_of(session, patterns, settings)
    return {"model": inspected.info, "seed": session.seed, "device": device, "dtype": dtype, "provenance": provenance}


def provenance_of(session: Session, patterns: Sequence[str], settings: Mapping[str, Any]) -> Provenance:
    """Return the provenance of a run of the session; `patterns` are those of layers."""
    named = {entry.name: asdict(entry.record) if entry.record else entry.value for entry in session.inputs.named}
    return Provenance(
        tuple(patterns),
        session.inputs.preprocessing,
        named,
        tuple(text for error in session.unusable for text in _one_by_one(error)),
        settings,
        package_versions(),
        torch.get_num_threads(),
        session.inputs.pictures,
        replace(session.inputs, finish=None).photograph,
    )


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    packages = ("hookscope", "torch", "torchvision", "numpy", "pillow")
    return {"python": python_version(), **{name: _version(name) for name in packages}}


_version = cache(version)  # to read them takes as long as a small network


def _one_by_one(error: HookscopeError) -> list[str]:
    if isinstance(error, UnfitInputError) and error.names:
        return [f"{name}: {error.reason}" for name in error.names]
    return [str(error)]
