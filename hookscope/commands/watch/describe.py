"""A watched training as a document: the first verdict and the end, curves over steps, layers over watched steps."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from hookscope.commands.survey.describe import rows_used
from hookscope.commands.watch.closing import Watched, not_judged
from hookscope.reporting.columns import STATISTICS, Column, integer_text, number_text
from hookscope.reporting.document import (
    DetailedRow,
    Document,
    Facts,
    FindingLine,
    Findings,
    HeatMaps,
    Level,
    Section,
    StepChart,
    StepCharts,
    Table,
    Text,
    line_of,
)
from hookscope.reporting.steps import Floats, HeatMap, as_floats, heat_map
from hookscope.results.training import TrainingFinding, TrainingLog, TrainingStep, WatchedLayer, WatchedParameter
from hookscope.text import are, counted, figure, percent_text, some_of

CLOSED = "closed"
PROCESS_ENDED = "the process ended"
"""`TrainingEnd.reason` of a training that was watched to its end."""

# The end of a sentence: in names of layers, no space follows a dot.
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z0-9'])")
_LOWERED = ("The ", "A ", "An ", "All ", "Its ", "No ", "One ")

# Heat maps: shares are of layers, the others of parameters.
_MAPS: Mapping[str, tuple[str, Callable[[Any], float | None]]] = {
    "gradient-norm": ("Gradient norm", lambda row: math.inf if row.gradient_nonfinite_count else row.gradient_norm),
    "update-ratio": ("Update ratio, ‖Δw‖ / ‖w‖", attrgetter("update_ratio")),
    "dead-share": ("Dead channels", attrgetter("dead_channel_fraction")),
    "saturated-share": ("Saturated values", attrgetter("saturated_fraction")),
}

_FEW_STEPS = 5
_FEW_SPANS = 3
_FEW_JUMPS = 6
_BEFORE = 10  # steps before the first verdict that the page shows
_MOST_SKIPPED = 500
_LEAST_CLIPPED = 1.0001  # times the norm after clipping: below this, only rounding changed it


class VerdictSpan(NamedTuple):
    """A verdict, and the step at which it ended; None if it did not."""

    verdict: TrainingFinding
    ended_at: int | None


def findings(log: TrainingLog) -> list[VerdictSpan]:
    """Return the verdicts in order; a verdict that a resumed training begins again is listed once."""
    spans: list[VerdictSpan] = []
    since: dict[tuple[str, str], int] = {}  # positions of open verdicts
    for verdict in log.verdicts:
        place = (verdict.rule, verdict.where)
        if verdict.state == "began" and place not in since:
            since[place] = len(spans)
            spans.append(VerdictSpan(verdict, None))
        elif verdict.state == "ended" and place in since:
            at = since.pop(place)
            spans[at] = VerdictSpan(spans[at].verdict, verdict.step)
    return spans


def last_step(log: TrainingLog) -> int:
    """Return the last step in the log; 0 for none."""
    seen = (log.steps, log.watched, log.verdicts, log.ends)
    return max((entry.step for entries in seen for entry in entries), default=0)


def decisive(raised: Sequence[VerdictSpan]) -> VerdictSpan | None:
    """Return the verdict to look at first: the earliest failure, or else the earliest warning."""
    return min(raised, key=lambda span: (span.verdict.level != "fail", span.verdict.step), default=None)


def _sentences(verdict: TrainingFinding) -> tuple[str, str]:
    """Return the first sentence of a message, with step and place, and the other sentences."""
    message, where = verdict.message, verdict.where
    ends = _SENTENCE_END.search(message)
    first, rest = (message[: ends.end()], message[ends.end() :].strip()) if ends else (message, "")
    if first.startswith(_LOWERED):
        first = first[0].lower() + first[1:]
    place = f" {where}:" if where and where not in message else ""
    return f"At step {verdict.step:,},{place} {first}", rest


def answer(log: TrainingLog) -> list[str]:
    """Return sentences on the first finding, others, skipped steps, rows used, edits, and the end of the training."""
    raised = findings(log)
    first = decisive(raised)
    if first is None:
        sentences = _all_clear(log)
    else:
        sentences = [sentence for sentence in _sentences(first.verdict) if sentence]
        sentences += [] if first.ended_at is None else [f"It cleared at step {first.ended_at:,}."]
    others = [span.verdict for span in raised if span is not first]
    if others:
        rules = some_of(list(dict.fromkeys(verdict.rule for verdict in others)), _FEW_STEPS)
        sentences.append(f"{counted(len(others), 'other problem')}: {rules}.")
    skipped = [step.step for step in log.steps if step.skipped]
    if skipped:
        numbers = some_of([f"{step:,}" for step in skipped], _FEW_STEPS)
        sentences.append(f"The optimiser skipped {counted(len(skipped), 'step')}: {numbers}.")
    return [*sentences, *_rows_used(log), *_edits(log), *_ending(log)]


def _all_clear(log: TrainingLog) -> list[str]:
    if not log.steps:
        return ["No step was recorded."]
    watched = Watched()
    records: list[Any] = [*log.steps, *log.watched]
    for record in records:
        watched.add(record)
    notes = [*dict.fromkeys(note for start in log.starts for note in start.notes)]
    seen = "what was seen of " if notes else ""
    return [f"No problems in {seen}{counted(len(log.steps), 'step')}.", *not_judged(watched), *notes]


def _rows_used(log: TrainingLog) -> Iterator[str]:
    """Yield a sentence for each embedding and codebook of the last step in which any was watched."""
    last = max((step for step in log.watched if step.tables), key=lambda step: step.step, default=None)
    if last is not None:
        yield from rows_used(last.tables, f"at step {last.step:,}")


def _edits(log: TrainingLog) -> list[str]:
    """Return a sentence for every edit, with the steps in which it was in force."""
    spans: dict[str, list[tuple[int, int]]] = {}
    before: AbstractSet[str] = frozenset()
    for step in log.steps:
        for text, _ in step.edits:
            runs = spans.setdefault(text, [])
            if text in before:
                runs[-1] = (runs[-1][0], step.step)
            else:
                runs.append((step.step, step.step))
        before = {text for text, _ in step.edits}
    sentences = []
    for text, ranges in spans.items():
        words = [f"step {low:,}" if low == high else f"steps {low:,} to {high:,}" for low, high in ranges]
        sentences.append(f"Edited by {text} in {some_of(words, _FEW_SPANS)}.")
    left_out = len(sentences) - _FEW_STEPS
    if left_out > 0:
        sentences[_FEW_STEPS:] = [f"{counted(left_out, 'other edit')} {are(left_out)} in watch.jsonl."]
    return sentences


def _ending(log: TrainingLog) -> list[str]:
    last = f"step {last_step(log):,}"
    if len(log.ends) < len(log.starts):
        cut = " Its last line is incomplete." if log.cut_short else ""
        return [f"The record stops at {last} without an end: the training still runs, or was killed.{cut}"]
    if log.ends and log.ends[-1].reason == PROCESS_ENDED:
        return [f"The process ended after {last}."]
    if log.ends and log.ends[-1].reason != CLOSED:
        return [f"It ended after {last} ({log.ends[-1].reason.rstrip('.')})."]
    return []


def describe_training(log: TrainingLog) -> Document:
    """Describe a watched training."""
    verdicts = findings(log)
    first = decisive(verdicts)
    low = min((entry.step for entries in (log.steps, log.watched, log.verdicts) for entry in entries), default=1)
    high = max(low, last_step(log))
    networks = list(dict.fromkeys(name for start in log.starts for name in start.networks))
    named = some_of(networks, 3) or "a network"
    watched = f"{counted(len(log.steps), 'step')}, {len(log.watched):,} measured in full"
    skipped = [f"{step.step:,}" for step in log.steps if step.skipped]
    lines = _findings(verdicts, low, high)
    before = [_steps_before(log.steps, first.verdict)] if first else []
    return Document(
        title=f"Training of {named}",
        subtitle=" · ".join([*_optimizers(log)[:2], watched]),
        page_title=f"{named} · training",
        answer=answer(log),
        level=first.verdict.level if first else "good",
        facts=_facts(log),
        sections=[
            Section("verdicts", "Verdicts on a time line", [lines], "Verdicts"),
            Section("before", "The steps before it", before, "Before it"),
            Section("steps", "Over steps", [_charts(log.steps, low, high)] if log.steps else []),
            Section("skipped", "Skipped steps", [_skipped(skipped)] if skipped else []),
            Section("layers", "Layers over steps", [_maps(log, lines.findings)], "Layers"),
        ],
        making=_making(log),
        main="layers",
    )


def _optimizers(log: TrainingLog) -> list[str]:
    return list(dict.fromkeys(name for start in log.starts for name in start.optimizers))


def _findings(verdicts: Sequence[VerdictSpan], low: int, high: int) -> Findings:
    def line(verdict: TrainingFinding, ended_at: int | None) -> FindingLine:
        unit = 1000 / (high - low + 1)
        width = ((high + 1 if ended_at is None else ended_at) - verdict.step) * unit
        spans = [(round((verdict.step - low) * unit, 1), round(max(4.0, width), 1))]
        when = f"from step {verdict.step:,} {'on' if ended_at is None else f'to {ended_at:,}'}"
        return line_of(verdict, where=verdict.where, when=when, spans=spans)

    ends = (f"step {low:,}", f"{high:,}")
    return Findings(findings=[line(*span) for span in verdicts], ends=ends, all_in="watch.jsonl")


def _steps_before(steps: Sequence[TrainingStep], first: TrainingFinding) -> Table:
    rows = [step for step in steps if step.step <= first.step][-_BEFORE - 1 :]

    def rates(step: TrainingStep) -> str:
        more = ", …" if len(step.learning_rates) > 3 else ""
        return ", ".join(figure(rate, 4) for rate in step.learning_rates[:3]) + more

    def remarks(step: TrainingStep) -> str:
        return ", ".join(["skipped"] * step.skipped + [first.rule] * (step.step == first.step))

    columns = (
        Column("step", "step", rank=0, text=integer_text),
        Column("loss", "loss"),
        Column("gradient_norm", "gradient norm"),
        Column("norm_before_clipping", "before clipping"),
        Column("", "largest gradient", value=lambda step: step.largest[0][0] if step.largest else None, words=True),
        Column("", "its norm", value=lambda step: step.largest[0][1] if step.largest else None),
        Column("", "learning rates", shown=rates),
        Column("", "remarks", shown=remarks, words=True),
    )
    levels: list[Level] = ["fail" if step.step == first.step else "" for step in rows]
    return Table(title="Steps", columns=columns, rows=rows, levels=levels, is_extra=True)


def _charts(steps: Sequence[TrainingStep], low: int, high: int) -> StepCharts:
    loss, norm, before = (
        as_floats(getattr(step, name) for step in steps) for name in ("loss", "gradient_norm", "norm_before_clipping")
    )
    clipped = [("before clipping", before)] if not np.isnan(before).all() else []
    skipped = np.array([step.skipped for step in steps], np.bool_)
    charts = [
        StepChart(title="Loss", lines=[("loss", loss)]),
        StepChart(
            title="Gradient norm", lines=[*clipped, ("as the optimiser got it", norm)], marks=[("skipped", skipped)]
        ),
        StepChart(title="Learning rate", lines=_rate_lines(steps), is_extra=True),
    ]
    numbers = np.array([step.step for step in steps], np.int64)
    return StepCharts(numbers, low, high, charts[bool(np.isnan(loss).all()) :])


def _rate_lines(steps: Sequence[TrainingStep]) -> list[tuple[str, Floats]]:
    """Return the learning rates of all groups; only the largest and the smallest of three or more that differ."""
    count = max(len(step.learning_rates) for step in steps)
    groups = [
        as_floats(step.learning_rates[group] if group < len(step.learning_rates) else None for step in steps)
        for group in range(count)
    ]
    different = [*{rates.tobytes(): rates for rates in groups}.values()]
    if not different:
        return [("learning rate", np.full(len(steps), np.nan))]
    if len(different) == 1:
        return [("all groups" if count > 1 else "learning rate", groups[0])]
    if count == 2:
        return [*zip(("first", "second"), different, strict=True)]
    together = np.stack(different)
    ends = (("largest", np.fmax.reduce(together)), ("smallest", np.fmin.reduce(together)))
    return [(f"{name} of {count} groups", rates) for name, rates in ends]


def _skipped(steps: Sequence[str]) -> Text:
    reason = (
        "The optimiser took no step here: a GradScaler found NaN or Inf in the gradients. A few skipped steps are "
        "usual while it looks for its scale."
    )
    return Text([reason, some_of(steps, _MOST_SKIPPED)], is_extra=True)


def _maps(log: TrainingLog, lines: Sequence[FindingLine]) -> HeatMaps:
    parameters: dict[str, WatchedParameter] = {}
    layers: dict[str, WatchedLayer] = {}
    for step in log.watched:
        parameters |= {row.name: row for row in step.parameters}
        layers |= {row.label: row for row in step.layers}
    findings: dict[str, list[FindingLine]] = {}
    for line in lines:
        for place in line.places:
            findings.setdefault(place, []).append(replace(line, where="", places=(), spans=()))

    def details(name: str) -> DetailedRow:
        parameter, layer = parameters.get(name), layers.get(name)
        seen = ((parameter, _PARAMETER), (layer, _LAYER))
        kinds = [f"output of {layer.kind}"] if layer else []
        return DetailedRow(
            name=name,
            kind=", ".join([*kinds, *(["parameter"] if parameter else [])]),
            status=parameter.status if parameter else "",
            findings=findings.get(name, ()),
            facts_title="At the last step measured in full",
            facts=[(column.title, column.cell(row)) for row, columns in seen if row for column in columns],
        )

    nothing = f"There is nothing to show of {counted(len(log.watched), 'step')} measured in full."
    return HeatMaps(
        maps=lambda most_rows, most_columns: heat_maps(log, most_columns, most_rows, findings.keys()),
        details=details,
        legend="A column for each step measured in full. Magenta: NaN or Inf. Grey: exactly 0. Blank: nothing measured,"
        " as for frozen parameters.",
        empty=nothing if log.watched else "No step was measured in full before the record stops.",
        all_in="watch.jsonl",
        drawn=("gradient-norm", "dead-share"),
    )


def heat_maps(
    log: TrainingLog, most_columns: int, most_rows: int, named: AbstractSet[str] = frozenset()
) -> list[HeatMap]:
    """Return the heat maps of a training, without maps that have no number; see `heat_map`."""
    maps = []
    for key, (title, value_of) in _MAPS.items():
        share = key.endswith("share")
        columns = [
            {row.label: value_of(row) for row in step.layers}
            if share
            else {row.name: value_of(row) for row in step.parameters}
            for step in log.watched
        ]
        rows = {name: [column.get(name) for column in columns] for name in dict.fromkeys(chain.from_iterable(columns))}
        if key != "gradient-norm":  # this map keeps the empty rows of frozen parameters
            rows = {name: row for name, row in rows.items() if any(value is not None for value in row)}
        steps = [step.step for step in log.watched]
        maps.append(heat_map(key, title, rows, steps, (most_rows, most_columns), named, share=share))
    return [drawn for drawn in maps if drawn is not None]


_PARAMETER = (
    Column("status", "status", words=True),
    Column("weight_norm", "‖w‖"),
    Column("gradient_norm", "‖g‖"),
    Column("gradient_max", "max |g|"),
    Column("gradient_zero_fraction", "zeros of g", text=percent_text),
    Column("gradient_nonfinite_count", "NaN, Inf of g", text=integer_text),
    Column("update_norm", "‖Δw‖"),
)
_LAYER = (
    *(STATISTICS[key] for key in ("mean", "std", "min", "max", "zero_fraction", "dead_channel_fraction")),
    Column("saturated_fraction", "saturated", text=percent_text),
    STATISTICS["nonfinite_count"],
)


def _facts(log: TrainingLog) -> Facts:
    steps, optimizers = log.steps, _optimizers(log)
    facts = [("Optimiser", "; ".join(optimizers), False)] if optimizers else []
    facts.append(("Steps", f"{len(steps):,}, {len(log.watched):,} of them measured in full", False))
    if jumps := [f"{step.step:,} ({step.reason})" for step in log.watched if step.reason != "every"]:
        facts.append(("Measured after a jump", some_of(jumps, _FEW_JUMPS), True))
    losses = [(step.step, step.loss) for step in steps if step.loss is not None]
    if losses:
        words = f"{number_text(losses[0][1])} at step {losses[0][0]:,}, {number_text(losses[-1][1])} at the end"
        facts.append(("Loss", words, not np.isfinite(losses[-1][1])))
    if norms := _finite(steps, "gradient_norm"):
        norm, at = max(norms, key=itemgetter(0))
        words = f"{number_text(norm)} at step {steps[at].step:,}, as the optimiser got it"
        facts.append(("Largest gradient norm", words, False))
    if norms := _finite(steps, "norm_before_clipping"):
        clipped = sum(norm > _LEAST_CLIPPED * (steps[at].gradient_norm or 0.0) for norm, at in norms)
        norm, at = max(norms, key=itemgetter(0))
        highest = f"the norm was up to {number_text(norm)}, at step {steps[at].step:,}"
        facts.append(("Clipping", f"in {counted(clipped, 'step')}; before it {highest}", False))
    skipped = sum(step.skipped for step in steps)
    if skipped:
        facts.append(("Skipped", counted(skipped, "step"), True))
    ended = log.ends[-1].reason if log.ends and len(log.ends) >= len(log.starts) else ""
    if ended:
        facts.append(("Ended", ended, ended not in (CLOSED, PROCESS_ENDED)))
    return facts


def _finite(steps: Sequence[TrainingStep], norm: str) -> list[tuple[float, int]]:
    """Return the finite values of a norm, each with the position of its step."""
    values = as_floats(getattr(step, norm) for step in steps)
    return [(float(values[at]), int(at)) for at in np.flatnonzero(np.isfinite(values))]


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
