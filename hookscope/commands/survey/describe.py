"""A survey as a document: the answer, what else deserves a look, layers over depth, channels by search."""

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import PurePath

from hookscope.commands.survey.columns import CHANNELS, LAYERS, TIGHT
from hookscope.commands.survey.describe_failures import describe_failures
from hookscope.reporting.columns import number_text
from hookscope.reporting.depth_charts import size_chart
from hookscope.reporting.document import (
    Bars,
    ChannelSearch,
    DepthChart,
    Document,
    Facts,
    Level,
    Listing,
    Section,
    Series,
    Table,
    Text,
)
from hookscope.reporting.inspected import uncalled_layers
from hookscope.reporting.run_facts import all_facts, subject_of
from hookscope.results.accuracy import accuracy_words, lowest_words
from hookscope.results.headroom import FLOAT16, FORMATS
from hookscope.results.runs.record import RunRecord
from hookscope.results.survey import NONFINITE_OUTPUT, CropSheet, Survey, SurveyRow, WrongStrip, channel_counts
from hookscope.results.table_rows import TableRows
from hookscope.text import are, counted, figure, in_words, layer_words, percent_text, printable, share_in_words, some_of

_MOST_NAMES = 3
_MOST_CLASSES = 8
_MOST_NAME = 60
_MOST_TABLES = 5
_MOST_BARS = 10


def describe_survey(
    result: Survey,
    record: RunRecord | None = None,
    *,
    crops: Sequence[CropSheet] = (),
    wrong: Sequence[WrongStrip] = (),
) -> Document:
    """Describe a survey. The run's `record` lists the pictures; `crops` and `wrong` do so before it exists."""
    crops, wrong = (record.crops, record.wrong) if record is not None else (crops, wrong)
    channels = f"{counted(channel_counts(result.rows), 'channel')} of {counted(len(result.rows), 'output')}"
    search = ChannelSearch(
        rows=result.rows, columns=CHANNELS, sheets=crops, has_classes=bool(result.classes), all_in="channels.csv"
    )
    messages = [left_out.message for left_out in result.unusable]
    unusable = Listing(title=f"{counted(len(messages), 'input')} left out", lines=messages)
    levels = [*map(_level_of_row, result.rows)]
    layers = Table(title="Layers", columns=LAYERS, rows=result.rows, levels=levels)
    return Document(
        title=f"{result.model.name} over {inputs_text(result)}",
        subtitle=channels,
        page_title=f"{result.model.name} · survey",
        about=subject_of(result),
        answer=answer(result),
        level=_level(result),
        warnings=result.warnings,
        notes=result.notes,
        facts=_facts(result),
        sections=[
            describe_failures(result.failures, wrong),
            Section("depth", "Over depth", [*_charts(result)]),
            Section("layers", "Layers", [layers if result.rows else Text(["No layer finished."])]),
            Section("channels", "Channels", [search]),
            Section("left-out", "Left out", [uncalled_layers(result.uncalled), unusable]),
        ],
        making=_making(result),
        main="channels",
    )


def _facts(result: Survey) -> Facts:
    left_out = f", {counted(len(result.unusable), 'other')} left out" if result.unusable else ""
    named = ", ".join(f"{name} {count:,}" for name, count in [*result.classes.items()][:_MOST_CLASSES])
    return all_facts(
        result,
        ("Inputs", f"{result.input_count:,}{left_out}", bool(result.unusable)),
        ("Outputs", f"{len(result.rows):,} with {counted(channel_counts(result.rows), 'channel')}", False),
        *([("Classes", f"{len(result.classes):,}: {named}", False)] if named else []),
    )


def _making(result: Survey) -> list[tuple[str, str]]:
    digest = [("Weights SHA-256", result.model.sha256)] if result.model.sha256 else []
    cut = f"{result.chunk_count:,} of {counted(result.chunk_size, 'file')} at most"
    return [*digest, ("Batch size", str(result.batch_size)), ("Chunks", cut), ("Seed", str(result.seed))]


def _charts(result: Survey) -> Iterator[DepthChart | Bars]:
    rows, labels = result.rows, [row.label or "(model)" for row in result.rows]
    dead = [len(row.dead_channels) / len(row.channels) if row.dead_channels else None for row in rows]
    zeros = [row.activation.zero_fraction for row in rows]
    if any(dead) or any(zeros):
        firing = [None if share is None else 1 - share for share in zeros]
        yield DepthChart(
            title="How often values are not zero, and channels that never fire",
            labels=labels,
            series=[
                Series("values that are not zero", firing, shape="area"),
                Series("0 on every input, share of channels", dead, "red", "dots"),
            ],
            axis="percent",
        )
    bars = _nearest_to_limit(result)
    has_nan = any(row.activation.nan_count or row.activation.inf_count for row in rows)
    limit = Series("float16's limit", [FORMATS[FLOAT16].greatest] * len(rows), "red")
    yield size_chart("Range of the values", rows, limit, is_extra=bool(bars.bars) and not has_nan)
    yield bars


def _nearest_to_limit(result: Survey) -> Bars:
    limit = FORMATS[FLOAT16].greatest
    peaks = [(peak, layer_words(row.label)) for row in result.rows if (peak := row.activation.max_abs)]

    def bar(peak: float, name: str) -> tuple[str, Level, float, str]:
        level: Level = "fail" if peak > limit else "warn" if peak > limit / TIGHT else "good"
        words = "above it" if peak > limit else f"{figure(limit / peak, 3)}\N{MULTIPLICATION SIGN} below it"
        share = min(math.log(max(peak, 1.0)) / math.log(limit), 1.0)
        return name, level, share, f"{number_text(peak, 3)}, {words}"

    legend = f"Largest magnitude of each output, on a logarithmic scale from 1 to the limit, {limit:,.0f}."
    largest = sorted(peaks, key=itemgetter(0), reverse=True)[:_MOST_BARS]
    return Bars("Nearest to float16's limit", legend, [bar(*peak) for peak in largest])


def _level_of_row(row: SurveyRow) -> Level:
    if row.activation.nan_count or row.activation.inf_count or (row.float16 and row.float16.overflowing):
        return "fail"
    return "warn" if row.massive or any(flag in ("dead channels", "all zero") for flag in row.flags) else ""


def answer(result: Survey) -> list[str]:
    """Return the answer in sentences, the one that matters most first."""
    of_all = result.accuracy
    return [
        *_nonfinite(result),
        *_overflowing(result),
        *_dead(result),
        *([] if of_all is None else [f"{accuracy_words(of_all)}.{lowest_words(of_all)}"]),
        *_too_few(result),
        *_none_dead(result),
        *rows_used(result.tables, f"on {inputs_text(result)}"),
        *_massive(result),
        *_tight(result),
        *_selective(result),
        *_duplicates(result),
    ]


def inputs_text(result: Survey) -> str:
    """Return how many inputs were measured: "5,000 inputs"."""
    return counted(result.input_count, "input")


def _level(result: Survey) -> Level:
    """Return the level of the answer: "" without channels, with wrong inputs, or too few to call channels dead."""
    if [*_nonfinite(result), *_overflowing(result)]:
        return "fail"
    if [*_dead(result)]:
        return "warn"
    is_right = result.accuracy is None or result.accuracy.right == result.accuracy.count
    return "good" if is_right and channel_counts(result.rows) and not result.dead_count else ""


def _nonfinite(result: Survey) -> Iterator[str]:
    if broken := result.nonfinite_inputs:
        names = some_of([printable(PurePath(path).name, _MOST_NAME) for path in broken], _MOST_NAMES)
        held = f"{len(broken):,} of {inputs_text(result)} {'holds' if len(broken) == 1 else 'hold'}"
        yield f"{held} NaN or Inf before any layer: {names}."
    labels = [layer_words(row.label) for row in result.rows if row.activation.nan_count or row.activation.inf_count]
    if labels:
        yield f"NaN or Inf in {some_of(labels, _MOST_NAMES)}."
    elif any(warning.startswith(NONFINITE_OUTPUT) for warning in result.warnings):
        yield "NaN or Inf in what the network returns."


def rows_used(table_rows: Sequence[TableRows], when: str) -> Iterator[str]:
    """Yield a sentence for each embedding and codebook, the least used first."""
    tables = sorted(table_rows, key=lambda entry: entry.used_count / max(1, entry.row_count))
    for table in tables[:_MOST_TABLES]:
        rows = f"{counted(table.row_count, 'row')} of {layer_words(table.name)}"
        yield f"{table.used_count:,} of {rows} {are(table.used_count)} used {when}."
    if len(tables) > _MOST_TABLES:
        yield f"{counted(len(tables) - _MOST_TABLES, 'more embedding')} used a greater share of their rows."


def _overflowing(result: Survey) -> Iterator[str]:
    rows = [row for row in result.rows if row.float16 and row.float16.overflowing]
    if rows:
        worst = max(rows, key=lambda row: row.activation.max_abs or 0.0)
        more = f" So do values of {counted(len(rows) - 1, 'other output')}." if len(rows) > 1 else ""
        yield (
            f"{layer_words(worst.label)} reaches {number_text(worst.activation.max_abs, 3)}, above float16's greatest "
            f"number, {FORMATS[FLOAT16].greatest:,.0f}.{more}"
        )


def _dead(result: Survey) -> Iterator[str]:
    if not result.dead_count or not result.can_call_dead:
        return
    rows = sorted((row for row in result.rows if row.dead_channels), key=lambda row: -len(row.dead_channels))
    named = [f"{layer_words(row.label)} ({len(row.dead_channels)} of {len(row.channels)})" for row in rows]
    of_all = f"{counted(channel_counts(result.rows), 'channel')} in {counted(len(result.rows), 'output')}"
    dead = f"{result.dead_count:,} of {of_all} {are(result.dead_count)} dead on {inputs_text(result)}"
    most = percent_text(result.dead_bound).removeprefix("<")
    where = f"most in {some_of(named, 2)}" if len(named) > 2 else f"in {in_words(named)}"
    subject = "It" if result.dead_count == 1 else "Each"
    yield f"{dead}, {where}. {subject} fires on fewer than {most} of such inputs (95% confidence)."


def _none_dead(result: Survey) -> Iterator[str]:
    """Yield the sentence of a survey without dead channels; a channel with NaN or Inf on an input is not judged."""
    arrays = [row.channels.arrays for row in result.rows if row.channels.arrays is not None]
    judged = sum(int((of_row.nonfinite_count == 0).sum()) for of_row in arrays)
    if not arrays:
        yield "No output has channels."
    elif not judged:
        yield "Dead channels were not looked for: every channel has NaN or Inf on some input."
    elif not result.dead_count:
        without = " without NaN or Inf" if judged < channel_counts(result.rows) else ""
        yield f"None of {counted(judged, 'channel')}{without} is dead on {inputs_text(result)}."


def _too_few(result: Survey) -> Iterator[str]:
    if result.dead_count and not result.can_call_dead:
        of_all = counted(channel_counts(result.rows), "channel")
        silent = f"{result.dead_count:,} of {of_all} {are(result.dead_count)} 0 on {inputs_text(result)}"
        yield f"{silent}, too few inputs to call a channel dead."


def _massive(result: Survey) -> Iterator[str]:
    rows = [row for row in result.rows if row.massive]
    if rows:
        named = [f"{layer_words(row.label)} (channel {some_of(row.massive, 2)})" for row in rows]
        yield f"Massive activations (above 100, and above 1,000 times the median) in {some_of(named, 2)}."


def _tight(result: Survey) -> Iterator[str]:
    finite = [row for row in result.rows if not (row.activation.nan_count or row.activation.inf_count)]
    factors = [(row.float16.factor, row) for row in finite if row.float16 and row.float16.factor]
    least, row = min(factors, key=itemgetter(0), default=(0.0, None))
    if row is not None and least >= 1:
        which = "" if len(finite) == len(result.rows) else " without NaN or Inf"
        close, fits = f"These outputs{which} are close to the limit of", f"None of these outputs{which} overflows"
        peak = f"the peak, in {layer_words(row.label)}, is {figure(least, 3)}\N{MULTIPLICATION SIGN} below the limit"
        yield f"{close if least < TIGHT else fits} float16: {peak}."


def _selective(result: Survey) -> Iterator[str]:
    scored = [(row.selectivity, row) for row in result.rows if row.selectivity is not None]
    if scored:
        (share, channel), row = max(scored, key=lambda pair: pair[0])
        best = printable(row.channels[channel].best_class, _MOST_NAME)
        explained = share_in_words(percent_text(max(0.0, share)))
        yield (
            f"The most selective channel is {channel} of {layer_words(row.label)}: the class explains {explained} of "
            f"how it varies between inputs; it is greatest for {best}."
        )


def _duplicates(result: Survey) -> Iterator[str]:
    rows = [(len(row.duplicate_channels), row) for row in result.rows if row.duplicate_channels]
    if rows:
        count, row = max(rows, key=lambda pair: pair[0])
        verb = "copies" if count == 1 else "copy"
        yield (
            f"{counted(count, 'channel')} in the output of {layer_words(row.label)} almost {verb} another channel "
            "(|r| of 0.99 or more)."
        )
