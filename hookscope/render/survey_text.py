"""A survey in words: the finding, what else deserves a look, and a table of the layers."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.text import Text

from hookscope.render.columns import draw_table, number_text, percent_bound, percent_text, safe_line, share_in_words
from hookscope.render.survey_columns import FLOAT16, LAYERS, remarks_of
from hookscope.render.survey_failures import (
    failure_heading,
    failure_reasons,
    method_words,
    neighbour_words,
    wrong_title,
)
from hookscope.render.terminal import model_lines, note_lines, uncalled_lines, verification_line
from hookscope.results.accuracy import accuracy_words, lowest_words
from hookscope.results.headroom import FORMATS
from hookscope.results.survey import NONFINITE_OUTPUT, Survey, SurveyRow, channel_counts
from hookscope.results.table_rows import TableRows
from hookscope.text import are, counted, figure, printable, some_of

_MOST_NAMES = 3
_MOST_UNUSABLE = 8
_MOST_FAILED = 4
_MOST_NAME = 60
_MOST_TABLES = 5

_TIGHT = 10.0
"""A headroom below this factor is pointed at. Ours."""


def survey_summary(result: Survey, *, width: int, full: bool = False) -> Iterator[RenderableType]:
    """Yield what the command prints: the finding, further sentences, the table, what was left out."""
    first, *rest = answer(result)
    yield safe_line(first, style="bold", overflow="fold")
    yield Group(*(safe_line(each, overflow="fold") for each in rest))
    yield note_lines(result.notes)
    yield from model_lines(result.model, inputs_text(result), result.dtype, result.device)
    yield survey_table(result, width=width, full=full)
    yield from _failure_lines(result, full=full)
    yield uncalled_lines(result.uncalled, full=full)
    yield from _unusable_lines(result, full=full)
    if result.verification is not None:
        yield verification_line(result.verification, with_loss=False)


def answer(result: Survey) -> list[str]:
    """Return the answer in sentences, the one that matters most first."""
    found = [*_nonfinite(result), *_overflowing(result), *_dead(result), *_accuracy(result)]
    if not any(row.channels for row in result.rows):
        found.append(f"None of {counted(len(result.rows), 'output')} has channels.")
    elif not result.dead_count:
        found.append(f"None of {counted(channel_counts(result.rows), 'channel')} is dead on {inputs_text(result)}.")
    return [
        *found,
        *rows_used(result.tables, f"on {inputs_text(result)}"),
        *_massive(result),
        *_tight(result),
        *_selective(result),
        *_duplicates(result),
    ]


def inputs_text(result: Survey) -> str:
    """Return how many inputs were measured: "5,000 inputs"."""
    return counted(result.input_count, "input")


def level_of(result: Survey) -> str:
    """Return what the answer begins with: "fail", "warn", "good", or "" for inputs that are classified wrong."""
    if any(True for _ in (*_nonfinite(result), *_overflowing(result))):
        return "fail"
    if result.dead_count:
        return "warn"
    return "good" if result.accuracy is None or result.accuracy.right == result.accuracy.count else ""


def _nonfinite(result: Survey) -> Iterator[str]:
    if broken := result.nonfinite_inputs:
        names = some_of([printable(PurePath(each).name, _MOST_NAME) for each in broken], _MOST_NAMES)
        held = f"{len(broken):,} of {inputs_text(result)} {'holds' if len(broken) == 1 else 'hold'}"
        yield f"{held} NaN or Inf before any layer: {names}."
    labels = [_name(row) for row in result.rows if row.activation.nan_count or row.activation.inf_count]
    if labels:
        yield f"NaN or Inf in {some_of(labels, _MOST_NAMES)}."
    elif any(each.startswith(NONFINITE_OUTPUT) for each in result.warnings):
        yield "NaN or Inf in what the network returns."


def rows_used(given: Sequence[TableRows], when: str) -> Iterator[str]:
    """Yield a sentence for each embedding and codebook, those of which least is used first."""
    tables = sorted(given, key=lambda each: each.used_count / max(1, each.row_count))
    for each in tables[:_MOST_TABLES]:
        rows = counted(each.row_count, "row")
        yield f"{each.used_count:,} of {rows} of {printable(each.name, _MOST_NAME)} used {when}."
    if len(tables) > _MOST_TABLES:
        yield f"{counted(len(tables) - _MOST_TABLES, 'more embedding')} used a greater share of their rows."


def _overflowing(result: Survey) -> Iterator[str]:
    rows = [row for row in result.rows if any(each.format == FLOAT16 and each.overflowing for each in row.headroom)]
    if rows:
        worst = max(rows, key=lambda row: row.activation.max_abs or 0.0)
        more = f" So do values of {counted(len(rows) - 1, 'other output')}." if len(rows) > 1 else ""
        yield (
            f"{_name(worst)} reaches {number_text(worst.activation.max_abs, 3)}, above float16's greatest number, "
            f"{FORMATS[FLOAT16].greatest:,.0f}.{more}"
        )


def _dead(result: Survey) -> Iterator[str]:
    if not result.dead_count:
        return
    rows = sorted((row for row in result.rows if row.dead_channels), key=lambda row: -len(row.dead_channels))
    named = [f"{_name(row)} ({len(row.dead_channels)} of {len(row.channels)})" for row in rows]
    of_all = f"{counted(channel_counts(result.rows), 'channel')} in {counted(len(result.rows), 'output')}"
    dead = f"{result.dead_count:,} of {of_all} {are(result.dead_count)} dead on {inputs_text(result)}"
    most = percent_bound(result.dead_bound)
    yield (
        f"{dead}, most in {some_of(named, 2)}. A dead channel fires on fewer than {most} of such inputs, with 95% "
        "confidence."
    )


def _accuracy(result: Survey) -> Iterator[str]:
    if result.accuracy is not None:
        yield f"{accuracy_words(result.accuracy)}.{lowest_words(result.accuracy)}"


def _massive(result: Survey) -> Iterator[str]:
    rows = [row for row in result.rows if row.massive]
    if rows:
        named = [f"{_name(row)} (channel {some_of(row.massive, 2)})" for row in rows]
        yield f"Massive activations, above 100 and 1,000 times the median, in {some_of(named, 2)}."


def _tight(result: Survey) -> Iterator[str]:
    known = [(row, each.factor) for row in result.rows for each in row.headroom if each.format == FLOAT16]
    factors = [(row, factor) for row, factor in known if factor is not None]
    if factors:
        row, least = min(factors, key=lambda each: each[1])
        if least >= 1:
            factor = f"{'only ' if least < _TIGHT else ''}{figure(least, 3)} times"
            yield f"All values of these outputs fit float16: its limit is {factor} the largest, in {_name(row)}."


def _selective(result: Survey) -> Iterator[str]:
    found = [(row.selectivity, row) for row in result.rows if row.selectivity is not None]
    if found:
        (share, channel), row = max(found, key=lambda each: each[0])
        best = printable(row.channels[channel].best_class, _MOST_NAME)
        explained = share_in_words(percent_text(max(0.0, share)))
        yield (
            f"The most selective channel is {channel} of {_name(row)}: the class explains {explained} of how it varies "
            f"between inputs; it is greatest for {best}."
        )


def _duplicates(result: Survey) -> Iterator[str]:
    rows = [(len(row.duplicates), row) for row in result.rows if row.duplicates]
    if rows:
        count, row = max(rows, key=lambda each: each[0])
        verb = "copies" if count == 1 else "copy"
        yield (
            f"{counted(count, 'channel')} in the output of {_name(row)} almost {verb} another channel "
            "(|r| of 0.99 or more)."
        )


def _name(row: SurveyRow) -> str:
    """Return the row's label, and that it is a layer where it is only a number, as in nn.Sequential."""
    name = printable(row.label or "(model)", _MOST_NAME)
    return name if any(map(str.isalpha, name)) else f"layer {name}"


def _failure_lines(result: Survey, *, full: bool) -> Iterator[RenderableType]:
    failures = result.failures
    if failures is None or not failures.inputs:
        return
    yield safe_line(wrong_title(failures), style="bold")
    shown = failures.inputs if full else failures.inputs[:_MOST_FAILED]
    for each in shown:
        yield safe_line(f"  {failure_heading(each)}", overflow="fold")
        if words := " ".join(filter(None, [*failure_reasons(each, failures), neighbour_words(each, failures)])):
            yield safe_line(f"    {words}", style="dim", overflow="fold")
    if len(shown) < len(failures.inputs):
        more = len(failures.inputs) - len(shown)
        yield safe_line(f"  … {more} more, --full lists all", style="dim italic")
    yield Group(*(safe_line(each, style="dim", overflow="fold") for each in method_words(failures)))


def _unusable_lines(result: Survey, *, full: bool) -> Iterator[Text]:
    if not result.unusable:
        return
    yield safe_line(f"Left out: {counted(len(result.unusable), 'input')}", style="yellow")
    shown = result.unusable if full else result.unusable[:_MOST_UNUSABLE]
    for each in shown:
        yield safe_line(f"  {each.message}", overflow="fold")
    if len(shown) < len(result.unusable):
        yield safe_line(f"  … {len(result.unusable) - len(shown):,} more, --full names all", style="dim italic")


def survey_table(result: Survey, *, width: int, full: bool = False) -> RenderableType:
    """Return a table of the layers, fitted to `width`."""
    if not result.rows:
        return safe_line("No layer finished.")
    styles = [
        "red" if "NaN" in remark or "float16" in remark else "yellow" if row.massive or _is_mostly_dead(row) else ""
        for row, remark in ((row, remarks_of(row)) for row in result.rows)
    ]
    return draw_table(LAYERS, result.rows, width, styles, full=full)


def _is_mostly_dead(row: SurveyRow) -> bool:
    """Tell whether as many channels are dead as make a flag in other results."""
    return any(each in ("dead channels", "all zero") for each in row.flags)
