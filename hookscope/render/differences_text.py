"""How two networks differ, in words: where it begins, how it grows, what it does to the output; then the rows."""

import math
import re
from collections.abc import Iterator
from pathlib import PurePath

from rich.console import RenderableType
from rich.text import Text

from hookscope.render.columns import draw_table, number_text, prediction_text, safe_line
from hookscope.render.difference_columns import difference_columns, nonfinite_text
from hookscope.render.terminal import note_lines
from hookscope.render.weights_text import (
    different_networks,
    gradients_answer,
    weights_answer,
    weights_table,
    without_gradients,
)
from hookscope.results.check import CheckReport, RuleOutcome
from hookscope.results.comparison import Prediction
from hookscope.results.differences import (
    PARTS_ALONE,
    DifferenceRow,
    Differences,
    Exceeded,
    FirstDifference,
    OutputDifference,
    Side,
)
from hookscope.results.findings import Finding
from hookscope.text import counted, printable, shape_text, some_of

# What a screen has room for.
_MOST_FIRST = 5
_MOST_UNMATCHED = 10
_MOST_EXCEEDED = 10
_MOST_INPUTS = 5
_FEW_CLASSES = 3
_FEW_ALONE = 3
_MOST_OF_A_WAY = 60


def differences_summary(result: Differences, *, width: int, full: bool = False) -> Iterator[RenderableType]:
    """Yield what the command prints: the answer, the rows, and what has no partner."""
    for sentence in answer(result) if result.way != "weights" else weights_answer(result):
        yield safe_line(sentence, overflow="fold")
    yield from _title(result)
    yield from _predictions(result, full=full)
    yield note_lines(result.notes)
    if result.rows:
        yield _table(result, width, full=full)
    if (weights := weights_table(result, width, full=full)) is not None:
        yield weights
    if result.gradients:
        yield safe_line(gradients_answer(result), style="bold", overflow="fold")
        yield _table(without_gradients(result), width, full=full)
    yield from _unmatched(result, full=full)
    yield from _exceeded(result, full=full)


def answer(result: Differences) -> list[str]:
    """Return in sentences where the difference begins, how it grows, and what it does to the output."""
    begins = [each for each in result.first_differences if not each.gone_at]
    gone = [each for each in result.first_differences if each.gone_at]
    sentences = [*different_networks(result)]
    sentences += [_begins(each, result, is_first=not at) for at, each in enumerate(begins[:_MOST_FIRST])]
    if len(begins) > _MOST_FIRST:
        sentences.append(f"Differences also begin in {counted(len(begins) - _MOST_FIRST, 'more layer')}.")
    if begins:
        sentences += [*([growth] if (growth := _growth(result)) else []), *_gradients(result)]
    sentences += [_begins(each, result, is_first=False) for each in gone[:_MOST_FIRST]]
    if len(gone) > _MOST_FIRST:
        sentences.append(f"Differences in {counted(len(gone) - _MOST_FIRST, 'more layer')} disappear again.")
    if gone and not begins:
        sentences += ["All other rows differ no more than rounding explains.", *_gradients(result)]
    elif not begins:
        sentences += [*_gradients(result), _of_inputs(result) or _small(result)]
    sentences += _first_unequal(result)
    sentences += map(_output, result.outputs)
    return [*sentences, *_worse(result)]


def _gradients(result: Differences) -> Iterator[str]:
    """Yield which gradient is the first to differ, or how far gradients differ where activations do."""
    moved = [
        (row.measures.relative_l2, row.label)
        for row in result.gradients
        if row.measures is not None and row.measures.relative_l2 > row.limit
    ]
    if result.first_gradient_difference:
        row = next(each for each in result.gradients if each.label == result.first_gradient_difference)
        amount = row.note or f"relative L2 {number_text(row.measures.relative_l2 if row.measures else None, 3)}"
        yield (
            f"The first gradient to differ in the backward pass is {row.label} ({row.kind}): {amount}; "
            "the activations agree."
        )
    elif result.first_differences and result.way == "networks" and moved:
        yield f"The gradients follow: relative L2 at most {number_text(max(moved)[0], 3)}, at {max(moved)[1]}."


def sides_text(result: Differences) -> str:
    """Return what was compared, in a few words: both names, or one name and how the sides differ."""
    a, b = result.a, result.b
    if a.model.name != b.model.name:
        return f"{a.model.name} and {b.model.name}"
    for one, other in ((_way(a, b), _way(b, a)), (a.model.weights, b.model.weights), (_run_name(a), _run_name(b))):
        if one != other:
            return f"{a.model.name}, {one or 'as it is'} and {other or 'as it is'}"
    return f"{a.model.name} and itself"


def _way(side: Side, other: Side) -> str:
    """Return how a side ran, where the other ran differently."""
    placed = [one for one, two in ((side.dtype, other.dtype), (side.device, other.device)) if one != two]
    return printable(", ".join([*placed, *(each for each in side.ways if each not in other.ways)]), _MOST_OF_A_WAY)


def _run_name(side: Side) -> str:
    return PurePath(side.run).name


def _title(result: Differences) -> Iterator[Text]:
    for letter, side, records in (("A", result.a, result.inputs), ("B", result.b, result.inputs_b)):
        parts = [f"{letter}: {side.model.name}", f"weights: {side.model.weights}", *_placed(side), *side.ways]
        if records:
            parts.append(PurePath(records[0].name).name if len(records) == 1 else f"{len(records)} inputs")
        yield safe_line(" · ".join(dict.fromkeys(parts)), style="bold", overflow="fold")


def _placed(side: Side) -> list[str]:
    return [name for name, usual in ((side.dtype, "float32"), (side.device, "cpu")) if name != usual]


def _begins(first: FirstDifference, result: Differences, *, is_first: bool) -> str:
    name = first.layer or "(model)"
    row = next((each for each in result.rows if each.label == first.row), None)
    kind = (
        f" ({', '.join(filter(None, (row.kind, row.source)))})" if row is not None and row.layer == first.layer else ""
    )
    amount = f"relative L2 {number_text(first.relative_l2, 3)}"
    if first.relative_l2 is None and row is not None:
        amount = f"shapes differ, {shape_text(row.shape)} in A and {shape_text(row.shape_b)} in B"
    elif row is not None and row.measures is not None and row.measures.nonfinite is not None:
        later = [each for each in result.rows if each.measures is not None and each.index > row.index]
        from_here = later and all(each.measures and each.measures.nonfinite for each in later)
        amount = nonfinite_text(row.measures.nonfinite, " from there on" if from_here else "")
    if first.gone_at:
        return f"{name}{kind} differs, {amount}, but the difference is gone at {first.gone_at}."
    if result.way != "networks":  # what a layer was given is not known
        around = f"{_called_alone(_owner(first.layer), result)}{_of_parts_alone(result) if is_first else ''}"
        return f"The difference first shows at {name}{kind}: {amount}.{around}"
    begins = "First difference in" if is_first else "Another difference in"
    if first.in_own_code:
        is_own = first.row in ("", name) or (row is not None and row.layer == first.layer)
        line = f" ({row.source})" if row is not None and row.source else ""
        shows = f"{'its output' if is_own else f'{first.row}{line}'} is the first to show it, {amount}"
        alone = _called_alone(first.layer, result)
        return f"{begins} {name}{kind}, in its own code between the layers that it calls: {shows}.{alone}"
    inputs = "" if row is None else _inputs(row) if is_first else f", {row.given}" if row.given else ""
    channel = f", mostly in channel {row.channel.channel} of {row.channel.channel_count}" if row and row.channel else ""
    return f"{begins} {name}{kind}: {amount}{inputs}{channel}."


def _inputs(row: DifferenceRow) -> str:
    """Return how far the inputs of a layer differ, if that is known, and what else it is given that differs."""
    if row.given:
        others = row.arriving_relative_l2
        return f", {row.given}" + (f", its other inputs differ by {number_text(others, 3)}" if others else "")
    before = row.input_relative_l2
    if before == 0:
        return ", its inputs are equal"
    return "" if before is None else f", its inputs differ by {number_text(before, 3)}"


def _called_alone(layer: str, result: Differences) -> str:
    """Return the layers that a module calls on one side alone: one of them may cause the difference."""
    alone = [each for each in result.unmatched if each.is_called_alone and _owner(each.label) == layer]
    labels = {side: [each.label for each in alone if each.side == side] for side in ("A", "B")}
    parts = [
        f"only {side} calls {', '.join(names[:_FEW_ALONE])}{', …' if len(names) > _FEW_ALONE else ''}"
        for side, names in labels.items()
        if names
    ]
    sentence = ", and ".join(parts)
    return f" {sentence[0].upper()}{sentence[1:]} there." if parts else ""


def _of_parts_alone(result: Differences) -> str:
    """Return which layers were not compared, though both runs have them."""
    left_out = [each for each in result.unmatched if each.reason.endswith(PARTS_ALONE)]
    return (
        f" {some_of([each.label for each in left_out], _FEW_ALONE)} not compared: {left_out[0].reason}."
        if left_out
        else ""
    )


def _owner(label: str) -> str:
    """Return the layer around the one in a label."""
    return re.split(r"[#\[]", label, maxsplit=1)[0].rpartition(".")[0]


def first_mark(result: Differences) -> str:
    """Return the mark of a row in pictures where a difference begins."""
    return "begins here" if result.way == "networks" else "the first to show it"


def _of_inputs(result: Differences) -> str:
    """Return how far layers differ where the sides are given other inputs; "" if they are given the same, or agree."""
    known = [(row.measures.relative_l2, row.label) for row in result.rows if row.measures is not None]
    agree = len(known) == len(result.rows) and all(
        row.measures and row.measures.relative_l2 <= row.limit for row in result.rows
    )
    if not result.inputs_b or agree:
        return ""
    text = "A and B get different inputs, so the difference begins there"
    if not known:
        return f"{text}; no row has the same shape in both."
    ends = [f"{number_text(amount, 3)} at {label}" for amount, label in (known[0], max(known))]
    other = (
        "" if len(known) == len(result.rows) else f" Of {len(result.rows):,} rows {len(known):,} have the same shape."
    )
    return f"{text}: relative L2 {ends[0]}, at most {ends[1]}.{other}"


def _small(result: Differences) -> str:
    rows = [row for row in result.rows if row.measures is not None]
    worst = max(rows, key=lambda row: row.measures.relative_l2 if row.measures else 0.0, default=None)
    if worst is None or worst.measures is None:
        return "No row could be compared."
    if not worst.measures.relative_l2:
        partly = any(row.measures and row.measures.value_count is not None for row in rows)
        sure = "in their statistics and up to 256 values per input" if partly else "bit for bit"
        return f"A and B are equal, {sure}, in {counted(len(rows), 'row')}."
    amount = number_text(worst.measures.relative_l2, 3)
    return f"A and B differ no more than rounding explains: relative L2 at most {amount}, at {worst.label}."


def _first_unequal(result: Differences) -> Iterator[str]:
    """Yield which row is the first that is not equal, where rounding may explain it and all before it is equal.

    Not where the sides compute in other dtypes, or on other values from the start: then every row differs.
    """
    at = next((at for at, row in enumerate(result.rows) if row.measures is None or row.measures.relative_l2), None)
    if at is None or result.inputs_b:
        return
    row = result.rows[at]
    before, same_dtype = row.input_relative_l2, row.dtype == row.dtype_b
    if row.measures is None or not row.measures.relative_l2 <= row.limit or not same_dtype or (before and not at):
        return
    partly = row.measures.value_count is not None
    sure = "equal in its statistics and up to 256 values per input" if partly else "equal bit for bit"
    amount, limit = number_text(row.measures.relative_l2, 3), number_text(row.limit, 3)
    yield (
        f"The first row that is not {sure} is {row.label} ({row.kind}): relative L2 {amount}{_inputs(row)}. "
        f"Rounding may explain up to {limit} there."
    )


def _growth(result: Differences) -> str:
    """Return how the difference develops from where it begins."""
    rows = [row for row in result.rows if row.measures is not None]
    start = next((at for at, row in enumerate(rows) if row.label == result.first_differences[0].row), 0)
    later = [(row.measures.relative_l2, row.label) for row in rows[start:] if row.measures]
    if len(later) < 2:
        return ""
    first = result.first_differences[0]
    if first.relative_l2 is not None and all(label != first.row for _, label in later):
        later.insert(0, (first.relative_l2, first.row or "(model)"))  # a container, which has no row
    known = [each for each in later if not math.isnan(each[0])]
    sentences = []
    if known and max(known)[0]:
        most, last = max(known), known[-1]
        grown = f"It is largest at {most[1]} ({number_text(most[0], 3)})"
        is_last = last == later[-1] and most != last
        sentences.append(
            f"{grown}, and {number_text(last[0], 3)} at the last row, {last[1]}." if is_last else f"{grown}."
        )
    broken = [row for row in rows[start:] if row.measures and row.measures.nonfinite]
    if len(known) < len(later) and (not broken or broken[0].label != first.row):
        where = f": at {broken[0].label} {_nonfinite(broken[0])}" if broken else ""
        sentences.append(f"{counted(len(later) - len(known), 'row')} hold NaN or Inf on one side only{where}.")
    return " ".join(sentences)


def _nonfinite(row: DifferenceRow) -> str:
    return nonfinite_text(row.measures.nonfinite) if row.measures and row.measures.nonfinite else ""


def _output(output: OutputDifference) -> str:
    name = f"Output {output.slot}" if output.slot else "Output"
    if output.measures is None and output.top1 is None:
        return f"{name}: it cannot be compared."
    parts = []
    both_nan = sum(all(map(_is_nan, pair)) for pair in zip(*output.predictions, strict=True))
    if both_nan and both_nan == output.input_count:
        return f"{name}: A and B are NaN, so neither has a best class."
    if output.measures is not None and output.measures.nonfinite is not None:
        parts.append(nonfinite_text(output.measures.nonfinite))
    elif output.measures is not None:
        parts.append(f"relative L2 {number_text(output.measures.relative_l2, 3)}")
    if output.measures is not None and output.measures.max_abs:
        others = " elsewhere" if output.measures.nonfinite else ""
        parts.append(f"max |Δ| {number_text(output.measures.max_abs, 3)}{others}")
    if output.top1 is not None:
        parts.insert(0, _best_classes(output.top1, output.input_count))
    if output.top5 is not None:
        parts.insert(1, f"{output.top5:.0%} of the five best in common")
    if output.kl is not None and not math.isnan(output.kl):
        parts.append(f"KL {number_text(max(output.kl, 0.0), 3)} nats")
    if both_nan:
        parts.append(f"NaN in A and in B for {both_nan} of {output.input_count} inputs")
    return f"{name}: {', '.join(parts)}."


def _best_classes(same: int, count: int) -> str:
    if count == 1:
        return "the same best class" if same else "another best class"
    return f"the same best class for {same} of {count} inputs"


def _worse(result: Differences) -> Iterator[str]:
    if not result.reference:
        return
    for output in result.outputs:
        if output.error is not None and output.error_b is not None:
            worse = "B is worse" if output.error_b > output.error else "B is different, not worse"
            errors = f"relative L2 {number_text(output.error_b, 3)}, and A's {number_text(output.error, 3)}"
            yield f"{worse}: compared with {result.reference}, the error of B's output is {errors}."


def _predictions(result: Differences, *, full: bool) -> Iterator[RenderableType]:
    for output in result.outputs:
        pairs = list(zip(*output.predictions, strict=True))
        changed = [pair for pair in pairs if pair[0].class_indices[:1] != pair[1].class_indices[:1]]
        for one, other in changed if full else changed[:_MOST_INPUTS]:
            name = PurePath(result.inputs[one.input_index].name).name
            before, after = (scores_text(each) for each in (one, other))
            yield safe_line(f"{name}: {before} → {after}", overflow="fold")


def _is_nan(prediction: Prediction) -> bool:
    return any(map(math.isnan, prediction.probabilities))


def scores_text(prediction: Prediction) -> str:
    """Return the best classes of an input with their probabilities."""
    if _is_nan(prediction):
        return "scores that are NaN"
    return prediction_text(prediction, _FEW_CLASSES)


def _table(result: Differences, width: int, *, full: bool) -> RenderableType:
    labels = {*(first.row for first in result.first_differences), result.first_gradient_difference}
    notable = [row.label in labels for row in result.rows]
    styles = ["bold red" if each else "" for each in notable]
    return draw_table(difference_columns(result), result.rows, width, styles, notable, full=full)


def _unmatched(result: Differences, *, full: bool) -> Iterator[RenderableType]:
    shown = result.unmatched if full else result.unmatched[:_MOST_UNMATCHED]
    for each in shown:
        about = f"only in {each.side}: {each.label} ({each.kind}, {shape_text(each.shape)}): {each.reason}"
        yield safe_line(about, style="dim", overflow="fold")
    if len(shown) < len(result.unmatched):
        more = len(result.unmatched) - len(shown)
        yield safe_line(f"… {more:,} more without a partner, --full shows all", style="dim")


def _exceeded(result: Differences, *, full: bool) -> Iterator[RenderableType]:
    shown = result.exceeded if full else result.exceeded[:_MOST_EXCEEDED]
    for each in shown:
        where = each.label or "the output"
        line = f"beyond {each.condition}: {where}, {number_text(each.value)}"
        yield safe_line(line, style="bold red", overflow="fold")
    if len(shown) < len(result.exceeded):
        yield safe_line(f"… {len(result.exceeded) - len(shown):,} more, --full shows all", style="dim")


def differences_as_check(result: Differences, conditions: tuple[str, ...]) -> CheckReport:
    """Return the conditions of `--fail-over` as a report of `check`, for its renderers: one rule for each condition."""
    return CheckReport(
        checkpoint=sides_text(result),
        outcomes=tuple(_outcomes(result, conditions)),
        model=result.a.model,
        inputs=result.inputs,
        warnings=result.warnings,
        seconds={**result.timings, "total": sum(result.timings.values())},
    )


def _outcomes(result: Differences, conditions: tuple[str, ...]) -> Iterator[RuleOutcome]:
    for condition in dict.fromkeys(conditions):
        findings = tuple(_finding(each) for each in result.exceeded if each.condition == condition)
        yield RuleOutcome(condition, "fail" if findings else "pass", findings)


def _finding(each: Exceeded) -> Finding:
    where = each.label or "The output"
    message = f"{where} is beyond '{each.condition}': {number_text(each.value)}."
    return Finding(each.condition, "fail", each.label, message)
