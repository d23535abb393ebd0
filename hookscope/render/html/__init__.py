"""A run as one HTML page that holds everything it shows: styles, script and pictures."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from markupsafe import Markup

from hookscope.render.columns import NUMBERS, STATISTICS, number_text, probability_text, quantile_text
from hookscope.render.cost_text import dearest_sentence, whole_words
from hookscope.render.document import DepthChart, Series
from hookscope.render.grids import colour_marks
from hookscope.render.html.figures import FRAME, Figure, bars, distributions, over_depth
from hookscope.render.html.layers import Layer, columns_of, findings_of, layers_of, tree_of
from hookscope.render.html.page import making_facts, render_page
from hookscope.render.html.pictures import BUDGET, Picture, first_maps, shrink_all, thumbnail_uri
from hookscope.render.html.token_norms import token_maps, token_norms
from hookscope.render.run_facts import making_of, model_facts
from hookscope.render.terminal import no_findings
from hookscope.results.activations import Activations, Verification
from hookscope.results.comparison import Prediction
from hookscope.results.distribution import EXACT_LIMIT, QUANTILE_ERROR
from hookscope.results.gradients import Gradients, parameter_owner
from hookscope.results.runs.reading import InspectionRun
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics
from hookscope.text import counted, input_shape_text, some_of

# Inputs that are shown as pictures; a run of thousands lists the others by name.
_MOST_THUMBNAILS = 32

# A row's text takes this much room of the pictures', which keep the last of these.
_ROW_BYTES, _LEAST = 2_000, 1_000_000

# Shown before the tables: so many layers, so many channels of each. A map's longer side in pixels: one of several
# channels, and a single map (tokens).
_STRIPS, _STRIP_CHANNELS, _STRIP_SIDE, _LONE_MAP_SIDE = 5, 8, 112, 336

# Inputs in sight; the others are folded, for what the layers do comes below.
_FEW_INPUTS = 4
# Rows above which the table lays out only those near the window.
_MANY_ROWS = 200


def report_html(run: InspectionRun) -> str:
    """Return the page of a run; raise an InputError if a picture is missing, or differs from the run's record."""
    layers = layers_of(run)
    has_cost = isinstance(run.result, Activations) and run.result.cost is not None
    pictures, fidelity = shrink_all(run.record.grids, run.read_picture, max(BUDGET - _ROW_BYTES * len(layers), _LEAST))
    drawn = zip(pictures, run.record.grids, strict=True)
    left_out = sum(picture is None and grid.tiles is not None for picture, grid in drawn)
    remarks = [fidelity.sentence] if fidelity.sentence else []
    if left_out:
        remarks.append(f"{counted(left_out, 'grid')} did not fit and are in the run's folder only.")
    columns = columns_of(layers, has_gradients=bool(run.gradients), has_cost=has_cost)
    inputs = _inputs(run)
    layers_shown = [] if run.record.patterns else [("Layers", "those that own parameters, and leaves")]
    return render_page(
        "report.html",
        {
            "at_level": quantile_text,
            "bars": bars,
            "base64": _base64,
            "basis": _basis,
            "own_name": lambda each: each.name.removeprefix(f"{parameter_owner(each.name, each.kind)}."),
            "quantiles": _quantiles,
        },
        scripts=("fragment.js", "plots.js", "over_photograph.js", "report.js"),
        style="".join(f"#table.no-{column.name} .c-{column.name} {{ display: none; }}\n" for column in columns),
        record=run.record,
        result=run.result,
        title=_title(run),
        facts=_facts(run),
        making=making_facts(run.record, [*layers_shown, *making_of(run.result)]),
        remarks=remarks,
        strips=_strips(run, layers),
        tokens=token_norms(run),
        has_high_tokens=any(each.high for each in token_maps(run)),
        verdict=_verdict(run),
        findings=findings_of(run, layers),
        flagged=[layer for layer in layers if layer.flagged],
        inputs=inputs,
        listed_inputs=_listed(inputs),
        few=_FEW_INPUTS,
        many=_MANY_ROWS,
        figures=_figures(run, layers),
        frame=FRAME,
        columns=columns,
        layers=layers,
        kinds=sorted({layer.row.kind for layer in layers}),
        tree=tree_of(layers),
        pictures=pictures,
        statistics=[STATISTICS[key] for key in NUMBERS if not key.endswith("_count")],
        nothing=TensorStatistics((), "", 0),
    )


@dataclass(frozen=True, slots=True)
class Strip:
    """The first channels of one layer's maps, side by side.

    Attributes:
        width: Of the picture on the page, in pixels.
        marks: What its colours for NaN, Inf and channels of zeros mean, as far as they are there.
    """

    layer: Layer
    count: int
    uri: str
    width: int
    marks: tuple[str, ...]


def _strips(run: InspectionRun, layers: Sequence[Layer]) -> list[Strip]:
    """Return a few layers over depth with maps of the first input: the last layer of each size, from large to small."""
    drawn = [
        (layer, grid)
        for layer in layers
        if "pad" not in layer.row.kind.lower()
        for grid in (run.record.grids[position] for position in layer.grids)
        if grid.input_index == 0 and grid.tiles is not None and min(grid.tiles.height, grid.tiles.width) > 1
    ]
    last = {(grid.tiles.height, grid.tiles.width): place for place, (_, grid) in enumerate(drawn) if grid.tiles}
    places = sorted(last.values())
    chosen = [places[round(at * (len(places) - 1) / (_STRIPS - 1))] for at in range(_STRIPS)] if places else []
    strips = []
    for layer, grid in (drawn[place] for place in dict.fromkeys(chosen)):
        side = _LONE_MAP_SIDE if grid.tiles and grid.tiles.count == 1 else _STRIP_SIDE
        uri, count, width = first_maps(run.read_picture(grid.path), grid, _STRIP_CHANNELS, side)
        strips.append(Strip(layer, count, uri, width, colour_marks(grid)))
    return strips


def _verdict(run: InspectionRun) -> tuple[str, str]:
    """Return the answer in one sentence, and how it reads: "good", "warn" or "fail"."""
    levels = [verdict.level for verdict in run.result.verdicts]
    if run.result.failure is not None:
        where = run.result.failure.layer or "the network"
        return f"The forward pass raised in {where}: {run.result.failure.error}", "fail"
    if levels:
        return counted(len(levels), "finding"), "fail" if "fail" in levels else "warn"
    if run.gradients:
        return "No rule objects to the gradients.", "good"
    return no_findings(run.result.inputs), "good"


def _quantiles(statistics: TensorStatistics) -> list[tuple[str, float]]:
    """Return each quantile under a title: "5th percentile"."""
    titles = {0.01: "1st percentile", 0.5: "median"}
    named = zip(QUANTILE_LEVELS, statistics.quantiles or (), strict=False)
    return [(titles.get(level, f"{level * 100:.0f}th percentile"), value) for level, value in named]


def _basis(statistics: TensorStatistics) -> str:
    values = counted(statistics.element_count, "value")
    if statistics.quantiles is None or statistics.element_count <= EXACT_LIMIT:
        return values
    return f"{values}; quantiles within {QUANTILE_ERROR:.0%} of the value or 0.5% of its rank"


def _base64(picture: Picture) -> Markup:
    return Markup(base64.b64encode(picture.png).decode("ascii"))  # noqa: S704 - letters, digits, + / =


def _title(run: InspectionRun) -> str:
    names = [PurePath(each.name).name or each.name for each in run.result.inputs]
    what = {"grads": "gradients", "activations": "activations"}.get(run.record.verb, run.record.verb)
    return " · ".join([run.result.model.name, what, *([some_of([*dict.fromkeys(names)], 1)] if names else [])])


def _facts(run: InspectionRun) -> list[tuple[str, str, bool]]:
    result = run.result
    backward = result if isinstance(result, Gradients) else None
    seconds = sum(result.timings.values())
    phases = ", ".join(f"{name} {spent:.2f}" for name, spent in result.timings.items())
    facts = [
        *model_facts(result.model),
        ("Device", f"{result.device}, {result.dtype}{f', {backward.mode} mode' if backward else ''}", False),
        ("Rows", f"{counted(len(result.rows), 'output')}, {counted(len(run.record.grids), 'grid')}", False),
        ("Time", f"{seconds:.2f} s ({phases})", False),
    ]
    if backward and (loss := backward.loss):
        target = f" to {loss.target}" if loss.target else ""
        facts.insert(3, ("Loss", f"{loss.name}{target} = {number_text(loss.value)}", not math.isfinite(loss.value)))
    if isinstance(result, Activations) and result.cost is not None:
        facts.append(("Cost", whole_words(result.cost), False))
        facts += [("Dearest part", sentence, False) for sentence in [dearest_sentence(result)] if sentence]
    if result.verification is not None:
        facts.append(_verified(result.verification))
    if run.record.edits:
        facts.append(("Edits", "; ".join(run.record.edits), True))
    return facts


def _verified(verification: Verification) -> tuple[str, str, bool]:
    words = {
        "same": "the same output as without hooks",
        "not repeatable": f"not verified: two passes without hooks differ as well ({verification.difference})",
    }
    other = f"not the same as without hooks: {verification.difference}"
    return "Verified", words.get(verification.status, other), verification.status == "differs"


def _inputs(run: InspectionRun) -> list[dict[str, Any]]:
    best = {prediction.input_index: prediction for prediction in run.result.predictions}
    paths = [*run.record.thumbnails, *[None] * len(run.result.inputs)]
    given = []
    for number, each in enumerate(run.result.inputs):
        path = paths[number] if number < _MOST_THUMBNAILS else None
        uri = thumbnail_uri(run.read_picture(path), path) if path is not None else ""
        before = f"{' × '.join(map(str, each.size))} pixels, " if each.size else ""
        size = f"{before}to the network as {input_shape_text(each.shape)}"
        prediction = best.get(number)
        shown = {"number": number, "name": each.name, "steps": each.steps, "size": size, "uri": uri}
        reading = "" if prediction is None else prediction.reading
        given.append({**shown, "classes": _classes(prediction), "reading": reading})
    return given


def _listed(inputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return inputs for the page's list: those that follow each other and would read the same, such as noise, once."""
    listed: list[dict[str, Any]] = []
    for each in inputs:
        words = each | {"number": None, "count": None}
        if listed and not each["uri"] and words == listed[-1] | {"number": None, "count": None}:
            listed[-1]["count"] += 1
        else:
            listed.append({**each, "count": 1})
    return listed


def _classes(prediction: Prediction | None) -> list[tuple[str, str, float]]:
    if prediction is None:
        return []
    shares = ((name, share if math.isfinite(share) else 0.0) for name, share in prediction.classes)
    return [(name, probability_text(share), share) for name, share in shares]


def _figures(run: InspectionRun, layers: Sequence[Layer]) -> list[Figure]:
    labels = [layer.label for layer in layers]
    activations = [layer.row.activation for layer in layers]
    figures = [distributions(labels, activations, [layer.flagged for layer in layers])]
    if run.gradients:
        gradients = [layer.gradient.gradient if layer.gradient else None for layer in layers]
        means = [None if gradient is None else gradient.mean_abs for gradient in gradients]
        greatest = [None if gradient is None else gradient.max_abs for gradient in gradients]
        without = [layer.gradient is not None and layer.gradient.status != "gradient" for layer in layers]
        chart = DepthChart(
            title="Gradients of outputs",
            labels=labels,
            series=(Series("max |gradient|", greatest, "orange"), Series("mean |gradient|", means)),
            marks=[("zero or none", "fail", without)],
        )
        figures.append(over_depth(chart))
    if run.parameters:
        owners = {layer.row.layer: layer.label for layer in reversed(layers)}
        names = [parameter.name for parameter in run.parameters]
        places = [owners.get(parameter_owner(parameter.name, parameter.kind), "") for parameter in run.parameters]
        still = [parameter.status != "gradient" for parameter in run.parameters]
        chart = DepthChart(
            title="Gradient over weight, ‖g‖ / ‖w‖",
            labels=names,
            series=[Series("‖g‖ / ‖w‖", [parameter.ratio for parameter in run.parameters])],
            marks=[("zero or none", "fail", still)],
        )
        figures.append(over_depth(chart, places))
    return [figure for figure in figures if figure is not None]
