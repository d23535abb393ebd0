"""Read one file of a series: its weights, the findings on it, and a network's outputs with these weights."""

import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hookscope.checkpoints.checkpoint import Checkpoint, FileOptions, read_again
from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.commands.check.measuring.file_alone import measure_read, read_alone
from hookscope.commands.check.measuring.training_state import groups_of, moves_by
from hookscope.commands.diff.alignment import match_names
from hookscope.commands.history.drift import norm_of
from hookscope.errors import HookscopeError
from hookscope.models.statedict import named_tensors
from hookscope.parameters import arg
from hookscope.results.activations import LayerRow
from hookscope.results.check import CheckMeasurements, CheckReport, StoredValues
from hookscope.results.findings import Finding
from hookscope.results.history import ActivationPoint, HistoryFile, OptimiserPoint, WeightPoint
from hookscope.results.inputs import InputRecord
from hookscope.results.training_state import OptimiserValues
from hookscope.rules.judging import judge, refused
from hookscope.rules.settings import NO_NETWORK, CheckSettings


@dataclass(slots=True)
class Weights:
    """The weights of a file: `release` frees them, and `tensors` reads them again.

    Attributes:
        renamed: Names in the series by names in the file, where the two differ.
        moves_by: What moves a parameter whose gradient is 0 in the file's only optimiser, such as momentum: by name in
            the series. None where the optimiser's parameters are not known.
    """

    options: FileOptions
    read: Checkpoint
    renamed: Mapping[str, str]
    moves_by: Mapping[str, Sequence[str]] | None = None
    _tensors: dict[str, Tensor] | None = field(default=None, repr=False)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors by name, parameters and buffers.

        Raises:
            HookscopeError: If they were released, and the file has changed since or cannot be read again.
        """
        if self._tensors is None:
            if not self.read.state:
                self.read = read_again(self.read, self.options)
            self._tensors = {self.renamed.get(name, name): tensor for name, tensor in named_tensors(self.read.state)}
        return self._tensors

    @property
    def requires_grad(self) -> dict[str, bool]:
        """`requires_grad` of tensors that the file stores as Parameters, by name in the series."""
        return {self.renamed.get(name, name): flag for name, flag in self.read.requires_grad.items()}

    def release(self) -> None:
        """Free all values."""
        self._tensors = None
        self.read = replace(self.read, state=type(self.read.state)(), training=None)


@dataclass(frozen=True, slots=True)
class MeasuredFile:
    """What one file holds, and the findings on it; drift needs another file."""

    file: HistoryFile
    findings: tuple[Finding, ...] = ()
    rows: tuple[WeightPoint, ...] = ()
    activations: tuple[ActivationPoint, ...] = ()
    inputs: tuple[InputRecord, ...] = ()


def measure_history_file(
    file: HistoryFile,
    settings: CheckSettings,
    wanted: AbstractSet[str],
    *,
    like: Mapping[str, tuple[tuple[int, ...], ...]] | None = None,
    device: torch.device | None = None,
) -> tuple[MeasuredFile, Weights | None]:
    """Read one file; return its measurements and its weights. Failures are recorded as `error` of the file.

    Names get the prefixes of `like`, the shapes in the series' first file: a run resumed with torch.compile, or on
    several processes, saves other prefixes.
    """
    began = time.perf_counter()
    try:
        read = read_alone(file.name, settings, trust=None)
        measured = measure_read(read, f"there is no network: {arg('arch')} names one", began)
        shapes = {name: (tuple(tensor.shape),) for name, tensor in named_tensors(read.state)}
        matched = {} if like is None else match_names(like, shapes)
        renamed = {name: series_name for series_name, (name, how) in matched.items() if how == "prefix"}
        options = FileOptions(None, settings.key, allowed_globals=tuple(settings.allow_global))
        causes = _moved_by(read, measured)
        moved_by = None if causes is None else {renamed.get(name, name): by for name, by in causes.items()}
        weights = Weights(options, read, renamed, moved_by)
        rows = tuple(_points(file.index, measured, weights))
        counters = {} if read.training is None else dict(read.training.counters)
    except HookscopeError as error:
        return _judged(file, refused(file.name, error, wanted), began, status="unreadable"), None
    if settings.arch == NO_NETWORK:
        try:
            report = judge(file.name, measured, settings, wanted)
        except HookscopeError as error:
            report = refused(file.name, error, wanted)
    else:
        report = check_checkpoint(file.name, settings, wanted, trust=None, device=device)
    warnings = [warning for warning in measured.warnings if warning not in read.notes]
    prefixes = f"{file.label}: names have other prefixes than in the first file, and are compared without them."
    notes = [*([prefixes] if renamed else []), *read.notes, *report.warnings]
    outcome = _judged(
        file,
        report,
        began,
        status="read",
        counters=counters,
        sha256=read.sha256,
        optimisers=tuple(map(_optimiser, measured.optimisers)),
        warnings=tuple(warnings),
        notes=tuple(dict.fromkeys(note for note in notes if note not in warnings)),
    )
    findings = [
        replace(finding, where=where, followed_by=tuple(others))
        for finding in outcome.findings
        for where, *others in [[renamed.get(place, place) for place in finding.places]]
    ]
    return replace(outcome, rows=rows, findings=tuple(findings)), weights


def _moved_by(read: Checkpoint, measured: CheckMeasurements) -> dict[str, list[str]] | None:
    """Return what moves the parameters of the file's only optimiser while their gradients are 0, such as momentum.

    None unless there is exactly one optimiser, and its state names its parameters or has as many as the file has, all
    or trainable ones.
    """
    flags = read.requires_grad
    if not flags or read.training is None or len(read.training.optimisers) != 1:
        return None
    groups = groups_of(read.training.optimisers[0][1])
    settings = [moves_by(group) for group in groups]
    listed = [[name for name in _items(group, "param_names") if isinstance(name, str)] for group in groups]
    if any(listed):
        by_name = {name: by for by, names in zip(settings, listed, strict=True) for name in names}
        return by_name if by_name.keys() <= flags.keys() else None
    distinct = [tensor.name for tensor in measured.stored if tensor.name in flags]
    count = sum(len(_items(group, "params")) for group in groups)
    for names in (distinct, [name for name in distinct if flags[name]]):
        if names and count == len(names) and (names is not distinct or settings[1:] == settings[:-1]):
            return dict.fromkeys(names, settings[0])
    return None


def _items(group: Mapping[Any, Any], key: str) -> Sequence[Any]:
    items = group.get(key)
    return items if isinstance(items, list | tuple) else ()


def _judged(file: HistoryFile, report: CheckReport, began: float, **kwargs: Any) -> MeasuredFile:
    judged = tuple(outcome.rule for outcome in report.outcomes if outcome.status in ("pass", "warn", "fail"))
    parts = report.overview_parts
    entry = replace(
        file,
        exit_code=report.exit_code,
        error=report.error,
        judged=judged,
        predictions=parts.predictions if parts else (),
        seconds=time.perf_counter() - began,
        **kwargs,
    )
    rows = parts.rows if parts else ()
    return MeasuredFile(entry, report.findings, activations=tuple(_activations(file.index, rows)), inputs=report.inputs)


def _points(index: int, measured: CheckMeasurements, weights: Weights) -> Iterator[WeightPoint]:
    for values in measured.stored:
        name = weights.renamed.get(values.name, values.name)
        tensor = weights.tensors.get(name)
        dead, channels = _dead_channels(values)
        nonfinite = values.nan_count + values.inf_count
        yield WeightPoint(
            file=index,
            name=name,
            layer=name.rpartition(".")[0],
            role=values.role,
            shape=values.shape,
            dtype=values.dtype,
            element_count=values.element_count,
            norm=None if tensor is None or 0 < nonfinite == values.element_count else norm_of(tensor),
            min=values.min,
            max=values.max,
            nonfinite_count=nonfinite,
            zero_fraction=values.zero_count / values.element_count if values.element_count else 0.0,
            dead_filter_count=dead,
            filter_count=channels,
        )


def _dead_channels(values: StoredValues) -> tuple[int | None, int | None]:
    """Return how many output channels are all 0, and how many there are; a scale has one value for each."""
    if values.role == "parameter" and len(values.shape) == 1 and values.name.rpartition(".")[2] == "weight":
        return values.zero_count, values.element_count
    return (None, None) if values.filter_count is None else (len(values.zero_filters), values.filter_count)


def _optimiser(state: OptimiserValues) -> OptimiserPoint:
    steps = max(state.steps, default=None)
    return OptimiserPoint(state.key, state.tensor_count, steps, state.rates, len(state.non_finite), state.live_count)


def _activations(index: int, rows: tuple[LayerRow, ...]) -> Iterator[ActivationPoint]:
    for row in rows:
        output = row.activation
        nonfinite_count = None if output.nan_count is None else output.nan_count + (output.inf_count or 0)
        shares = output.zero_fraction, output.dead_channel_fraction
        yield ActivationPoint(index, row.label, row.kind, output.mean, output.std, *shares, nonfinite_count)
