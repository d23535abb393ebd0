"""One checkpoint, from its file to the verdict, and the evidence of a failure: rows and pictures of failing layers."""

import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from hookscope.commands.check.measuring.file_alone import STATE_DICT, measure_read, read_alone
from hookscope.commands.check.measuring.network_passes import measure, measure_layers
from hookscope.commands.check.measuring.preparing import Prepared, prepare
from hookscope.errors import (
    EXIT_CHECK_FAILED,
    CheckpointError,
    HookscopeError,
    InputError,
    MisfitError,
    ModelError,
    ModelNotFoundError,
    NetworkNeededError,
    UnmergedError,
    UsageError,
    is_out_of_memory,
    nearest,
)
from hookscope.hooks.patterns import parse_pattern
from hookscope.inputs.loading import load_input
from hookscope.inputs.preprocessing import thumbnails
from hookscope.inspection.device import full_float32
from hookscope.models.construction import LoadedModel
from hookscope.parameters import arg, listing
from hookscope.results.accuracy import Accuracy
from hookscope.results.check import CheckMeasurements, CheckReport, OverviewParts, checks_to_json
from hookscope.results.grids import Grid
from hookscope.results.json_form import json_form
from hookscope.results.runs.directory import OVERVIEW, new_run
from hookscope.results.runs.record import RunRecord
from hookscope.rules import RULES
from hookscope.rules.baseline import Baseline
from hookscope.rules.judging import NEED_NO_PASS, judge, refused
from hookscope.rules.rule import stored_in
from hookscope.rules.settings import NO_NETWORK, CheckSettings
from hookscope.text import printable

_MOST_DRAWN = 12  # failing layers, the first in execution order


def check_checkpoint(
    model: str | nn.Module | LoadedModel | Mapping[str, Any],
    settings: CheckSettings,
    wanted: AbstractSet[str],
    *,
    trust: bool | None = False,
    device: torch.device | None = None,
    baseline: Baseline | None = None,
    evidence: Path | None = None,
    on_measured: Callable[[CheckMeasurements], None] | None = None,
) -> CheckReport:
    """Load a checkpoint, run it, judge it; keep evidence if it fails.

    Without a network (`settings.arch` "none", a state dict, adapters alone, a file that no network fits) only the rules
    on stored values run. What a user can put right is an `error` in the report; exceptions are bugs.

    Args:
        model: A weights file or any other form of MODEL, a network, or a state dict.
        settings: Inputs, levels and limits.
        wanted: Identifiers of rules, as `wanted_rules` returns them.
        trust: Whether a weights file may run code while it is read; None where nobody can ask for that.
        device: Where to run; None for the CPU, or where a given network is.
        baseline: A baseline to compare with.
        evidence: Folder for the evidence of a failure; an earlier one is replaced.
        on_measured: Called with the measurements, if the forward pass came to its end.
    """
    began = time.perf_counter()
    name = _name_of(model)
    prepared, measured = None, None
    try:
        if isinstance(model, Mapping) or settings.arch == NO_NETWORK:
            reason = f"{arg('arch')} none" if isinstance(model, str) else "a state dict is checked without one"
            report = _judged_alone(model, name, settings, wanted, reason, trust=trust)
        else:
            prepared = prepare(model, settings, trust=trust, device=device)
            # Baselines and evidence need a forward pass, whatever rules are wanted; the rule `drift` makes sure of one.
            measures = wanted | (set() if evidence is None else {"drift"})
            measures |= set() if on_measured is None else {"drift", "accuracy"}
            compared = on_measured is not None or (baseline is not None and "drift" in wanted)
            with full_float32():  # the limits are those of float32
                measured = measure(prepared, settings, measures, with_signatures=compared)
            needs_pass = on_measured is not None or any(RULES[rule].needs not in NEED_NO_PASS for rule in wanted)
            judged = measured if needs_pass else replace(measured, forward=None)  # evidence changes no verdict
            _refuse_lack_of_memory(name, judged)
            report = judge(name, judged, settings, wanted, baseline)
            report = replace(report, unmatched=_unmatched_patterns(judged, settings, wanted, baseline))
    except HookscopeError as error:
        measured = None
        lacks_memory = isinstance(error, ModelError) and is_out_of_memory(str(error))  # raised while it was built
        refusal, alone = _lack_of_memory(name) if lacks_memory else error, None
        unfit = (ModelNotFoundError, MisfitError, NetworkNeededError, UnmergedError)
        if prepared is None and isinstance(error, unfit) and not isinstance(model, Mapping):
            is_adapter = isinstance(error, NetworkNeededError | UnmergedError)
            unnamed = settings.arch is not None and isinstance(error, ModelNotFoundError)
            reason = f"{arg('arch')} names none" if unnamed else "none fits the weights"
            reason = str(error).removesuffix(".") if is_adapter else reason
            try:
                alone = _judged_alone(model, name, settings, wanted, reason, trust=trust)
            except CheckpointError as cause:  # nothing can be read, which is why no network fits
                refusal = cause
            except HookscopeError:  # the first error is the one to report
                pass
        is_whole = alone is not None and isinstance(refusal, NetworkNeededError)  # a file of adapters
        report = alone if alone is not None and is_whole else refused(name, refusal, wanted, alone)
    if measured is not None:
        report = replace(report, overview_parts=_overview_parts(report, measured))
        if on_measured is not None and measured.forward is not None and measured.forward.failure is None:
            on_measured(measured)
    report = replace(report, seconds={**report.seconds, "total": time.perf_counter() - began})
    if evidence is not None and not report.passed:
        report = _with_evidence(report, evidence, prepared, settings)
    return report


def _name_of(model: str | nn.Module | LoadedModel | Mapping[str, Any]) -> str:
    if isinstance(model, Mapping):
        return STATE_DICT
    name = model.info.name if isinstance(model, LoadedModel) else model
    return name if isinstance(name, str) else type(name).__name__


def _judged_alone(
    model: str | nn.Module | LoadedModel | Mapping[str, Any],
    name: str,
    settings: CheckSettings,
    wanted: AbstractSet[str],
    reason: str,
    *,
    trust: bool | None,
) -> CheckReport:
    if not isinstance(model, str | Mapping):
        raise UsageError(f"{arg('arch')} none needs a weights file; {name} is already a network.")
    began = time.perf_counter()
    read = read_alone(model, settings, trust=trust)
    return judge(name, measure_read(read, f"there is no network: {reason}", began), settings, wanted)


def _refuse_lack_of_memory(name: str, measured: CheckMeasurements) -> None:
    """Raise InputError if a pass ran out of memory, which is no fault of the network."""
    for run in filter(None, (measured.forward, measured.gradients)):
        if run.failure is not None and is_out_of_memory(run.failure.error):
            raise _lack_of_memory(name, f", in {run.failure.layer or '(model)'}")


def _unmatched_patterns(
    measured: CheckMeasurements, settings: CheckSettings, wanted: AbstractSet[str], baseline: Baseline | None
) -> dict[str, str]:
    """Return an error for each pattern that matches nothing in file, baseline and passes; none if a pass raised."""
    passes = [run for run in (measured.forward, measured.gradients) if run is not None]
    if any(run.failure is not None for run in passes):
        return {}
    names = {(name, target.kind) for target in map(stored_in, measured.stored) for name in target.names}
    names |= {(row.label.partition("[")[0], row.kind) for row in (baseline.rows if baseline else ())}
    names |= {(name, row.kind) for run in passes for row in run.rows for name in (row.layer, *row.aliases)}
    names |= {(layer.layer, layer.kind) for run in passes for layer in run.uncalled}
    names |= {(state.key, "") for state in measured.optimisers} | {(copy.key, "") for copy in measured.copies}
    names |= {(state.key, "") for state in measured.scalers}
    unmatched = {}
    for layer in settings.layers:
        pattern = parse_pattern(layer.pattern)
        if wanted & layer.rules.keys() and not any(pattern.matches(*name) for name in names):
            close = nearest(layer.pattern.strip("!/*"), sorted({*chain(*names)}))
            where = f"pattern '{printable(layer.pattern)}' in [[layers]] of {settings.source}"
            unmatched[layer.pattern] = f"{where} matches no layer.{close} List them with {listing()}."
    return unmatched


def _lack_of_memory(name: str, where: str = "") -> InputError:
    lack = f"it needs more memory than allowed{where}. Give it more, or smaller inputs."
    return InputError(f"{name} could not be checked: {lack}")


def _with_evidence(
    report: CheckReport, folder: Path, prepared: Prepared | None, settings: CheckSettings
) -> CheckReport:
    """Write an overview, `report.json`, and `rows.csv` and `grids/` of the failing layers; all or nothing.

    Grids show the first input, from another forward pass; `pictures/` has the wrong pictures as the network got them.
    The returned report has the parts of the overview, or the error if the folder could not be written.
    """
    from hookscope.commands.check.describe import describe_check, wrong_pictures  # noqa: PLC0415 (most checkpoints pass)
    from hookscope.commands.grid_files import write_grids  # noqa: PLC0415 (likewise)
    from hookscope.reporting.grids import encode_png  # noqa: PLC0415 (likewise)
    from hookscope.reporting.layer_columns import layer_columns  # noqa: PLC0415 (likewise)
    from hookscope.reporting.overviews.document import draw_document  # noqa: PLC0415 (likewise)
    from hookscope.reporting.tables import csv_text  # noqa: PLC0415 (likewise)

    updated = replace(report, evidence=str(folder))
    parts = updated.overview_parts or OverviewParts()
    rows = parts.failing
    grids: Sequence[Grid] = ()
    try:
        with new_run(folder, arg("evidence")) as run:
            seen = measure_layers(prepared, settings, rows[:_MOST_DRAWN]) if rows and prepared is not None else None
            if prepared is not None and updated.accuracy is not None:
                parts = replace(parts, pictures=_wrong_pictures(prepared, updated.accuracy))
            maps = () if seen is None else seen.map_summaries
            labels = {row.label for row in rows}
            first = tuple(summary for summary in maps if summary.label in labels and summary.input_index == 0)
            updated = replace(updated, overview_parts=replace(parts, summaries=first))
            overview = draw_document(describe_check(updated), wrong_pictures(updated))
            overview.save(run.path / OVERVIEW, compress_level=6)
            (run.path / "report.json").write_text(checks_to_json([updated]), encoding="utf-8")
            if seen is not None:
                (run.path / "rows.csv").write_text(csv_text(layer_columns(rows), rows), encoding="utf-8")
                drawn = {row.label for row in rows[:_MOST_DRAWN]}
                shown = [layer_maps for layer_maps in seen.feature_maps if layer_maps.label in drawn]
                grids = write_grids(run.path, shown, len(seen.rows), seen.inputs)
            if parts.pictures:
                (run.path / "pictures").mkdir()
            for index, pixels in enumerate(parts.pictures):
                if pixels is not None:
                    (run.path / f"pictures/{index}.png").write_bytes(encode_png(Image.fromarray(pixels)))
            run.finish(json_form(RunRecord(verb="check", overview=OVERVIEW, grids=tuple(grids))))
    except InputError as error:  # an input may have gone since it was measured
        worse = report.error_code in (0, EXIT_CHECK_FAILED)
        return replace(report, error=str(error), error_code=error.exit_code) if worse else report
    return updated


def _wrong_pictures(prepared: Prepared, accuracy: Accuracy) -> tuple[NDArray[np.uint8] | None, ...]:
    """Return the wrong pictures as the network got them; None for tensor files, and for files that have gone."""
    pictures: list[NDArray[np.uint8] | None] = []
    for wrong in accuracy.worst:
        shown: list[NDArray[np.uint8]] = []
        with suppress(HookscopeError):  # it has been read before, but files may go
            tensor, _ = load_input(Path(wrong.name), prepared.preprocessing)
            shown = thumbnails(tensor[None].numpy(), prepared.preprocessing)
        pictures.append(shown[0] if shown else None)
    return tuple(pictures)


def _overview_parts(report: CheckReport, measured: CheckMeasurements) -> OverviewParts:
    """Return all rows, and the rows of layers with a finding of level "fail" about their outputs or parameters."""
    if (forward := measured.forward) is None:
        return OverviewParts()
    rows = forward.rows
    names = {row.label for row in rows} | {row.layer for row in rows}
    failures = (finding for finding in report.findings if finding.level == "fail")
    places = {place for finding in failures for place in finding.places if place}
    # "layer1.0.conv1.weight" is about layer1.0.conv1, "weight" about the whole model.
    parameters = {values.name for values in measured.stored} - names
    about = (places & names) | {place.rpartition(".")[0] or "(model)" for place in places & parameters}
    failing = tuple(row for row in rows if row.label in about or (row.layer or "(model)") in about)
    return OverviewParts(rows, failing, predictions=forward.predictions)
