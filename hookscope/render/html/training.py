"""A watched training as one HTML page: the answer, verdicts on a time line, curves, and layers over steps."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from hookscope.render.columns import number_text, percent_text
from hookscope.render.html.figures import FRAME, Figure, StepAxis, over_steps
from hookscope.render.html.page import render_page
from hookscope.render.palettes import ALL_ZERO, BACKGROUND, LEVEL_COUNT, NON_FINITE, grid_palette
from hookscope.render.training_steps import HeatMap, as_floats, heat_maps
from hookscope.render.training_text import (
    CLOSED,
    PROCESS_ENDED,
    Objection,
    answer,
    decisive,
    first_step,
    last_step,
    objections,
    steps_in_order,
)
from hookscope.results.training import TrainingLog, TrainingStep, TrainingVerdict, WatchedLayer, WatchedParameter
from hookscope.text import counted, safe_text, some_of

# A page of at most 6 MB: rows of each heat map, columns of all, and numbers in them together.
_MOST_ROWS = 800
_MOST_COLUMNS = 300
_LEAST_COLUMNS = 60
_MOST_CELLS = 300_000

_MOST_OBJECTIONS = 200
_MOST_PLACES = 400  # that an objection lists
_FEW_OBJECTIONS = 12  # that are seen at once
_BEFORE = 10  # steps that the page shows before the first verdict
_MOST_SKIPPED = 500
_FEW_JUMPS = 6

_PALETTE = "viridis"


@dataclass(frozen=True, slots=True)
class ShownObjection:
    """A verdict with its place on the time line.

    Attributes:
        places: Name and link of each place, "" for none, and when it was over, in words.
        bar: Where it begins on the time line and how long it is, of 1,000.
    """

    objection: Objection
    when: str
    places: Sequence[tuple[str, str, str]]
    left_out: int
    bar: tuple[float, float]


@dataclass(slots=True)
class Part:
    """A parameter or a layer's output, with what was last seen of it."""

    name: str
    number: int
    parameter: WatchedParameter | None = None
    layer: WatchedLayer | None = None
    verdicts: list[tuple[TrainingVerdict, str]] = field(default_factory=list)  # with when it held, in words

    @property
    def href(self) -> str:
        """Its place on the page."""
        return f"#layer={quote(safe_text(self.name), safe='')}"

    @property
    def status(self) -> str:
        """Whether a parameter got a gradient; "" for an output."""
        return self.parameter.status if self.parameter else ""

    @property
    def kind(self) -> str:
        """What it is, in words."""
        words = [f"output of {self.layer.kind}"] if self.layer else []
        return ", ".join([*words, *(["parameter"] if self.parameter else [])])

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What was last seen of it: term and words."""
        facts: list[tuple[str, str]] = []
        if (row := self.parameter) is not None:
            facts += [
                ("status", row.status),
                ("‖w‖", number_text(row.weight_norm)),
                ("‖g‖", number_text(row.gradient_norm)),
                ("max |g|", number_text(row.gradient_max)),
                ("exact zeros of g", percent_text(row.gradient_zero_fraction)),
                ("‖Δw‖", number_text(row.update_norm)),
            ]
        if (out := self.layer) is not None:
            facts += [
                ("mean", number_text(out.mean)),
                ("std", number_text(out.std)),
                ("min", number_text(out.min)),
                ("max", number_text(out.max)),
                ("exact zeros", percent_text(out.zero_fraction)),
                ("dead channels", percent_text(out.dead_channel_fraction)),
                ("saturated", percent_text(out.saturated_fraction)),
            ]
        return facts


@dataclass(frozen=True, slots=True)
class ShownMap:
    """A heat map with its picture.

    Attributes:
        picture: A data URI of a PNG file with a pixel for each value.
        numbers: The values as 32-bit floats, little-endian, in base64; NaN for none, Inf for NaN and Inf.
        scale: A data URI of the colours from low to high, and the words at both ends; None without a scale.
        remarks: What was left out or thinned.
    """

    map: HeatMap
    picture: str
    numbers: Markup
    scale: tuple[str, str, str] | None
    remarks: Sequence[str]

    @property
    def steps(self) -> str:
        """The first and last step of each column: "1-1 100-199"."""
        return " ".join(f"{first}-{last}" for first, last in self.map.columns)

    @property
    def names(self) -> list[str]:
        """The names of the columns, safe to show; none for steps."""
        return [*map(safe_text, self.map.column_names)]

    @property
    def ends(self) -> str:
        """What the columns are: "steps 1 to 900"."""
        if self.map.column_names:
            return f"{self.map.column_names[0]} to {self.map.column_names[-1]}"
        return f"steps {self.map.columns[0][0]:,} to {self.map.columns[-1][1]:,}"

    def cells(self, row: int, status: str = "") -> list[tuple[str, str, str | float]]:
        """Return key, text and sort value of each cell of a row; "" sorts last. A `status` is for a row of nothing."""
        text = percent_text if self.map.share else number_text
        last, (largest, step) = float(self.map.last[row]), self.map.largest[row]
        words = "NaN or Inf" if np.isinf(last) else text(last)
        if np.isnan(last):
            words = status or "-"
        broken = self.map.nonfinite_counts[row]
        at = self.map.column_names[step - 1] if step and self.map.column_names else f"{step:,}"
        return [
            ("last", words, last if np.isfinite(last) else ""),
            ("largest", text(largest) if step else "-", largest if step else ""),
            ("at", at if step else "-", step or ""),
            ("broken", f"{broken:,}", broken),
        ]


def training_html(log: TrainingLog) -> str:
    """Return the page of a watched training."""
    found = objections(log)
    axis = StepAxis(first_step(log), max(first_step(log), last_step(log)))
    named = {place for each in found for place in each.places}
    maps = heat_maps(log, _columns_that_fit(log), _MOST_ROWS, named)
    parts = _parts(log, maps, found)
    steps = steps_in_order(log)
    return render_page(
        "training.html",
        {"part_href": lambda name: parts[name].href if name in parts else "", "thousands": "{:,}".format},
        scripts=("fragment.js", "plots.js", "training.js"),
        title=_title(log),
        sentences=answer(log),
        level=first.level if (first := decisive(found)) else "",
        facts=_facts(log, steps),
        objections=[_shown(each, axis, parts) for each in found[:_MOST_OBJECTIONS]],
        few=_FEW_OBJECTIONS,
        objections_left_out=max(0, len(found) - _MOST_OBJECTIONS),
        axis=axis,
        before=_before(steps, first.began) if first else [],
        decisive=first,
        figures=_figures(steps, axis),
        thinned=len(steps) > axis.places,
        frame=FRAME,
        empty=Figure("", "", [], [], [], [], []),
        maps=[shown_map(each) for each in maps],
        parts=parts,
        watched_count=len(log.watched),
        skipped=[each.step for each in steps if each.skipped],
        most_skipped=_MOST_SKIPPED,
        making=_making(log),
    )


def _title(log: TrainingLog) -> str:
    names = dict.fromkeys(name for start in log.starts for name in start.networks)
    return f"{some_of(list(names), 3) or 'a network'} · training"


def _facts(log: TrainingLog, steps: Sequence[TrainingStep]) -> list[tuple[str, str, bool]]:
    """Return what was watched: term, words, and whether they call for a look."""
    optimizers = list(dict.fromkeys(name for start in log.starts for name in start.optimizers))
    facts = [("Optimiser", "; ".join(optimizers), False)] if optimizers else []
    jumps = [each for each in sorted(log.watched, key=lambda each: each.step) if each.reason != "every"]
    facts.append(("Steps", f"{len(steps):,}, {len(log.watched):,} of them watched in full", False))
    if jumps:
        words = some_of([f"{each.step:,} ({each.reason})" for each in jumps], _FEW_JUMPS)
        facts.append(("Watched after a jump", words, True))
    losses = [(each.step, each.loss) for each in steps if each.loss is not None]
    if losses:
        words = f"{number_text(losses[0][1])} at step {losses[0][0]:,}, {number_text(losses[-1][1])} at the end"
        facts.append(("Loss", words, not np.isfinite(losses[-1][1])))
    norms = [(each.gradient_norm, each.step) for each in steps if _is_finite(each.gradient_norm)]
    if norms:
        norm, step = max(norms, key=lambda each: each[0] or 0.0)
        facts.append(("Largest gradient norm", f"{number_text(norm)} at step {step:,}, as the optimiser got it", False))
    clipped = [(each.norm_before_clipping, each.step) for each in steps if _is_finite(each.norm_before_clipping)]
    if clipped:
        norm, step = max(clipped, key=lambda each: each[0] or 0.0)
        words = (
            f"in {counted(len(clipped), 'step')}; before it the norm was up to {number_text(norm)}, at step {step:,}"
        )
        facts.append(("Clipping", words, False))
    skipped = sum(each.skipped for each in steps)
    if skipped:
        facts.append(("Skipped", counted(skipped, "step"), True))
    ended = log.ends[-1].reason if log.ends and len(log.ends) >= len(log.starts) else ""
    if ended:
        facts.append(("Ended", ended, ended not in (CLOSED, PROCESS_ENDED)))
    return facts


def _is_finite(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))


def _when(began: int, over: int | None) -> str:
    return f"from step {began:,} on" if over is None else f"from step {began:,} to {over:,}"


def _shown(objection: Objection, axis: StepAxis, parts: Mapping[str, Part]) -> ShownObjection:
    span = axis.high - axis.low + 1
    end = axis.high + 1 if objection.over is None else objection.over
    left = (objection.began - axis.low) / span * 1000
    places = [
        (place, _href_of(place, parts), f"to {objection.ended[place]:,}" if place in objection.ended else "")
        for place in objection.places
        if place
    ]
    return ShownObjection(
        objection,
        _when(objection.began, objection.over),
        places[:_MOST_PLACES],
        max(0, len(places) - _MOST_PLACES),
        (round(left, 1), round(max(4.0, (end - objection.began) / span * 1000), 1)),
    )


def _href_of(place: str, parts: Mapping[str, Part]) -> str:
    """Return the link to a place: itself, or the first parameter of a layer whose output was not watched."""
    if place in parts:
        return parts[place].href
    return next((part.href for name, part in parts.items() if place and name.startswith(f"{place}.")), "")


def _before(steps: Sequence[TrainingStep], step: int) -> list[TrainingStep]:
    return [each for each in steps if each.step <= step][-_BEFORE - 1 :]


def _figures(steps: Sequence[TrainingStep], axis: StepAxis) -> list[Figure]:
    if not steps:
        return []
    numbers = np.array([each.step for each in steps], np.int64)
    nothing = np.zeros(len(steps), np.bool_)
    skipped = np.array([each.skipped for each in steps], np.bool_)
    loss = as_floats(each.loss for each in steps)
    norm, before = (
        as_floats(getattr(each, name) for each in steps) for name in ("gradient_norm", "norm_before_clipping")
    )
    lines = [("line", "as the optimiser got it", norm)]
    if not np.isnan(before).all():
        lines.insert(0, ("line other", "before clipping", before))
    drawn = [
        over_steps("Loss", axis, numbers, [("line", "loss", loss)], nothing),
        over_steps("Gradient norm", axis, numbers, lines, skipped, "skipped"),
        over_steps("Learning rate", axis, numbers, _rate_lines(steps), nothing),
    ]
    return [each for each in drawn if each is not None]


def _rate_lines(steps: Sequence[TrainingStep]) -> list[tuple[str, str, NDArray[np.float64]]]:
    """Return the learning rate of each group; of more than two different ones the largest and the smallest."""
    count = max((len(each.learning_rates) for each in steps), default=0)
    groups = [
        as_floats(each.learning_rates[group] if group < len(each.learning_rates) else None for each in steps)
        for group in range(count)
    ]
    different = {each.tobytes(): each for each in groups}
    if len(different) == 1:
        return [("line", "all groups" if count > 1 else "learning rate", groups[0])]
    if len(different) == 2:
        return [
            (style, name, each)
            for style, name, each in zip(("line", "line other"), ("first", "second"), different.values(), strict=True)
        ]
    if not different:
        return [("line", "learning rate", np.full(len(steps), np.nan))]
    together = np.stack(list(different.values()))
    ends = [("line other", "largest", np.fmax.reduce(together)), ("line", "smallest", np.fmin.reduce(together))]
    return [(style, f"{name} of {count} groups", values) for style, name, values in ends]


def _columns_that_fit(log: TrainingLog) -> int:
    parameters = {row.name for each in log.watched for row in each.parameters}
    layers = {row.label for each in log.watched for row in each.layers}
    rows = 2 * min(len(parameters), _MOST_ROWS) + 2 * min(len(layers), _MOST_ROWS)
    return max(_LEAST_COLUMNS, min(_MOST_COLUMNS, _MOST_CELLS // max(1, rows)))


def _parts(log: TrainingLog, maps: Sequence[HeatMap], found: Sequence[Objection]) -> dict[str, Part]:
    """Return what the heat maps have rows of, by name, in the order of the network."""
    names = dict.fromkeys(name for each in maps for name in each.names)
    parts = {name: Part(name, number) for number, name in enumerate(names)}
    for step in sorted(log.watched, key=lambda each: each.step):
        for parameter in step.parameters:
            if parameter.name in parts:
                parts[parameter.name].parameter = parameter
        for layer in step.layers:
            if layer.label in parts:
                parts[layer.label].layer = layer
    for objection in found:
        for verdict in objection.verdicts:
            if verdict.where in parts:
                parts[verdict.where].verdicts.append((verdict, _when(verdict.step, objection.ended.get(verdict.where))))
    return parts


def shown_map(heat: HeatMap) -> ShownMap:
    """Return a heat map with its picture."""
    shares = heat.shares()
    levels = np.full(shares.shape, BACKGROUND, np.uint8)
    levels[~np.isnan(shares)] = (shares[~np.isnan(shares)] * (LEVEL_COUNT - 1) + 0.5).astype(np.uint8)
    levels[np.isinf(heat.values)] = NON_FINITE
    if not heat.share:
        levels[heat.values == 0] = ALL_ZERO
    remarks = []
    if heat.watched_count > len(heat.columns):
        remarks.append(
            f"{heat.watched_count:,} watched steps in {len(heat.columns)} columns: each shows the value furthest from "
            "the row's median; the columns of numbers count all of them."
        )
    if heat.left_out:
        remarks.append(
            f"{counted(heat.left_out, 'row')} left out: those with verdicts or NaN are kept, the others are spread "
            "over the network. watch.jsonl has all."
        )
    text = percent_text if heat.share else number_text
    scale = None
    if heat.scale is not None:
        bar = np.arange(LEVEL_COUNT, dtype=np.uint8)[None]
        scale = (_png_uri(bar), text(heat.scale[0]), text(heat.scale[1]))
    largest = float(np.finfo(np.float32).max)
    in_range = np.where(np.isfinite(heat.values), np.clip(heat.values, -largest, largest), heat.values)
    numbers = base64.b64encode(in_range.astype("<f4").tobytes()).decode("ascii")
    return ShownMap(heat, _png_uri(levels), Markup(numbers), scale, remarks)  # noqa: S704 - letters, digits, + / =


def _png_uri(levels: NDArray[np.uint8]) -> str:
    colours, _, _ = grid_palette(_PALETTE)
    image = Image.fromarray(levels, "P")
    image.putpalette(colours)
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True, transparency=BACKGROUND)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"


def _making(log: TrainingLog) -> list[tuple[str, str]]:
    made = []
    for start in log.starts:
        layers = f", layers {' '.join(start.patterns)}" if start.patterns else ""
        words = f"at step {start.step:,}, every {start.every:,} steps in full{layers}"
        made.append(("Started", f"{start.started} {words}"))
    if log.starts:
        versions = ", ".join(f"{name} {number}" for name, number in log.starts[-1].versions.items())
        made.append(("Versions", versions))
    made += [(f"Ended at step {end.step:,}", end.reason) for end in log.ends]
    return made
