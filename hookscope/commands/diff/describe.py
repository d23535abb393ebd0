"""Differences as a document: where they begin, how they grow, their effect on the output; then the rows."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import PurePath

import numpy as np

from hookscope.commands.diff.columns import WEIGHTS, difference_columns, nonfinite_text
from hookscope.reporting.columns import number_text, prediction_text
from hookscope.reporting.document import (
    MAP_LEGEND,
    DepthChart,
    Document,
    Findings,
    Listing,
    Maps,
    Picture,
    Pictures,
    Section,
    Series,
    Table,
    line_of,
)
from hookscope.reporting.grids import block_means
from hookscope.reporting.overlays import input_picture
from hookscope.reporting.overviews.maps import MOST_STAGES
from hookscope.reporting.run_facts import input_names, short_name
from hookscope.reporting.terminal import model_words
from hookscope.results.activations import FeatureMaps, MapSummary
from hookscope.results.check import CheckReport, RuleOutcome
from hookscope.results.differences import (
    PARTS_ALONE,
    DifferenceRow,
    Differences,
    FirstDifference,
    NonFinite,
    OutputDifference,
    Side,
    WeightDifference,
    spread,
)
from hookscope.results.inputs import InputRecord
from hookscope.results.runs.record import RunRecord
from hookscope.text import are, counted, layer_words, percent_text, printable, shape_text, some_of

_MOST_FIRST = 5  # differences that the answer names
_FEW_INPUTS = 3
_FEW_CLASSES = 3
_FEW_ALONE = 3
_MOST_OF_A_WAY = 60
_MOST_DIGESTS = 8
_MARKS = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")  # a layer may be called 1, and A is a network
_LEGENDS = {
    "input": "input: relative L2 of the layer's inputs",
    "ulps": "ulps: max |Δ| in units in the last place; a few are rounding, millions are other values",
}

_LONGEST_SIDE = 160  # pixels of a map, as in `MapSummary`

_MAPS_LEGEND = (
    "A-B for the first input. Above, the mean of |A-B| over channels; below, A-B in the channel where it is largest. "
    + MAP_LEGEND
)
_SEQUENCES_LEGEND = "Of a sequence, each row is a channel and each column a step or a token."


def describe_differences(result: Differences, record: RunRecord | None = None) -> Document:
    """Describe a comparison; `record` is of its run, whose grids the page shows."""
    maps = _shown_maps(result, _first_rows(result))
    letters = dict(zip([drawn.row for drawn in maps], _MARKS, strict=False))
    sides = (("A", result.a, result.inputs), ("B", result.b, result.inputs_b))
    random = [letter for letter, side, _ in sides if side.model.random]
    untrained = [f"Random weights: nothing in {' and '.join(random)} was learned."] if random else []
    full = result.way != "weights"
    facts = [(letter, _side_text(side, inputs, full=full), side.model.random) for letter, side, inputs in sides]
    reference = [("Reference", result.reference, False)] if result.reference else []
    return Document(
        title=f"What differs: {sides_text(result)}",
        page_title=f"{sides_text(result)} · what differs",
        about=[(f"{letter}: {_side_text(side, inputs, full=False)}", "") for letter, side, inputs in sides],
        answer=answer(result),
        level="fail" if result.exceeded else "",
        input=partial(input_picture, result, 0) if result.inputs else None,
        warnings=[*result.warnings, *untrained],
        notes=result.notes,
        facts=[*facts, *reference],
        sections=[
            Section("beyond", "Beyond the limits", [Findings(findings=[*map(line_of, result.exceeded)])]),
            Section("classes", "Predictions", [_best_classes(result)]),
            Section("depth", "Over depth", [_chart(result, letters)]),
            Section("maps", "Where it differs", [_maps(result, maps, letters), _pictures(result, record)]),
            Section("rows", "Every row", [*_tables(result), _unmatched(result)]),
        ],
        making=_making(result),
        main="rows",
    )


def _side_text(side: Side, inputs: Sequence[InputRecord], *, full: bool) -> str:
    """Return a side's model, weights, ways and inputs in words; the usual device and dtype only in full."""
    placed = [name for name in (side.device, side.dtype) if full or name not in ("cpu", "float32")]
    run = [f"the run {side.run}"] if side.run else []
    names = some_of([*dict.fromkeys(map(short_name, inputs))], _FEW_INPUTS)
    count = f"{len(inputs)} inputs: " if len(inputs) > 1 else ""
    name = model_words(side.model) if full else side.model.name
    parts = (name, f"weights: {side.model.weights}", *placed, *side.ways, *run, f"{count}{names}")
    return " · ".join(dict.fromkeys(part for part in parts if part))


def _making(result: Differences) -> list[tuple[str, str]]:
    made = []
    for letter, side in (("A", result.a), ("B", result.b)):
        made.append((f"Weights of {letter}", side.model.weights))
        made += [(f"SHA-256 of {letter}", side.model.sha256)] if side.model.sha256 else []
    named = [*zip(input_names(result.inputs), result.inputs, strict=True)][:_MOST_DIGESTS]
    made += [(f"SHA-256 of {name}", record.sha256) for name, record in named if record.sha256]
    return [*made, ("Seed", str(result.seed))]


def _best_classes(result: Differences) -> Listing:
    """Return the best classes of inputs whose best class changes, or of the first input if none does."""
    all_pairs = [pair for output in result.outputs for pair in zip(*output.predictions, strict=True)]
    pairs = [(a, b) for a, b in all_pairs if not (a.is_nan and b.is_nan)]
    changed = [(a, b) for a, b in pairs if a.is_nan or b.is_nan or a.class_indices[:1] != b.class_indices[:1]]
    names = input_names(result.inputs)
    lines = [
        f"{names[a.input_index]}: {prediction_text(a, _FEW_CLASSES)} → {prediction_text(b, _FEW_CLASSES)}"
        for a, b in changed or pairs[:1]
    ]
    return Listing(title="Best classes, A → B", lines=lines)


def _chart(result: Differences, letters: dict[int, str]) -> DepthChart:
    """Return a chart over depth of the relative L2 norm of A-B, differences that layers add, and errors if measured."""
    rows, begins = result.rows, _first_rows(result)
    norms = [row.relative_l2 for row in result.weights or rows]
    broken = [norm is not None and not math.isfinite(norm) for norm in norms]
    return DepthChart(
        title="Relative L2 norm of A-B, " + ("tensor by tensor" if result.weights else "layer by layer"),
        labels=[row.label or "(model)" for row in result.weights or rows],
        series=[
            Series("added by the layer", [row.added.relative_l2 if row.added else None for row in rows], "red", "dots"),
            Series("error of B", [row.error_b for row in rows], "orange", "dots"),
            Series("error of A", [row.error for row in rows], "grey", "dots"),
            Series("A-B", norms),
        ],
        marks=[
            ("equal", "dim", [norm == 0 for norm in norms]),
            ("NaN or Inf on one side", "fail", broken),
            ("cannot be compared", "fail", [norm is None for norm in norms]),
        ],
        ground=(first_mark(result), [row.index in begins for row in rows]),
        letters=[(letters[row.index], place) for place, row in enumerate(rows) if row.index in letters],
    )


def _labelled_norms(rows: Iterable[DifferenceRow | WeightDifference]) -> list[tuple[float, str]]:
    return [(row.relative_l2, row.label) for row in rows if row.relative_l2 is not None]


def _without_nan(amounts: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    return [pair for pair in amounts if not math.isnan(pair[0])]


def _at_most(amount: float, label: str) -> str:
    return f"at most {number_text(amount, 3)}, at {layer_words(label)}"


def _first_rows(result: Differences) -> set[int]:
    labels = {first.row for first in result.first_differences}
    return {row.index for row in result.rows if row.label in labels}


def _maps(result: Differences, shown: list[FeatureMaps], letters: dict[int, str]) -> Maps:
    begins, mark = _first_rows(result), first_mark(result)
    more = sum(bool(row.relative_l2) for row in result.rows) - len(shown)
    legend = [_MAPS_LEGEND, *[_SEQUENCES_LEGEND] * any(drawn.is_sequence for drawn in shown)]
    legend += [f"{counted(more, 'more row')} {'differs' if more == 1 else 'differ'}."] if more > 0 else []
    return Maps(
        maps=[summarised(drawn, f"{drawn.kind}: {mark}" if drawn.row in begins else drawn.kind) for drawn in shown],
        legend=" ".join(legend),
        letters=letters,
        names=("mean of |A-B|", "A-B in channel {}"),
        sequences={drawn.row for drawn in shown if drawn.is_sequence},
    )


def summarised(maps: FeatureMaps, kind: str) -> MapSummary:
    """Reduce A-B, (C, H, W) or (C, T, H, W) of a clip, to the mean of |A-B| and A-B in its largest channel."""
    values = maps.values[:, maps.values.shape[1] // 2] if maps.arrangement == "frames" else maps.values
    with np.errstate(invalid="ignore", over="ignore"):
        strength = np.square(values, dtype=np.float64).sum(axis=(1, 2))
        mean = np.abs(values).mean(axis=0, dtype=np.float64)
    channel = int(np.nan_to_num(strength, nan=math.inf).argmax())
    step = -(-max(mean.shape) // _LONGEST_SIDE)
    height, width = mean.shape
    return MapSummary(
        maps.row,
        maps.label,
        kind,
        maps.input_index,
        block_means(mean, step),
        block_means(values[channel], step),
        channel,
        maps.channel_count,
        (height, width),
    )


def _shown_maps(result: Differences, begins: Collection[int]) -> list[FeatureMaps]:
    """Return maps in the order of running: of the rows `begins`, and of the largest differences over the depth."""
    drawable = [maps for maps in result.maps if maps.arrangement != "vector" and min(maps.values.shape[-2:]) > 1]
    amounts = {row.index: row.relative_l2 or 0.0 for row in result.rows}
    sizes = {index: math.inf if math.isnan(amount) else amount for index, amount in amounts.items()}
    return spread(drawable, MOST_STAGES, lambda maps: maps.row in begins, lambda maps: sizes.get(maps.row, 0.0))


def _pictures(result: Differences, record: RunRecord | None) -> Pictures:
    grids = record.grids if record is not None else ()
    labels, begins = {row.index: row.label for row in result.rows}, _first_rows(result)
    pictures = [
        Picture(
            name=labels[grid.row] or "(model)",
            remark=first_mark(result) if grid.row in begins else "",
            caption=", ".join(grid.caption),
            file=grid.path,
            is_open=grid.row in begins or (grid is grids[0] and not begins),
        )
        for grid in grids
    ]
    legend = "A-B of the first input, channel by channel, where the difference begins and where it is largest."
    return Pictures("Where it differs", legend, pictures)


def _tables(result: Differences) -> list[Table]:
    begins, first, columns = _first_rows(result), result.first_gradient_difference, difference_columns(result)
    alike = any(row.measures is None and row.shape == row.shape_b for row in result.weights)  # their values are unknown
    return [
        Table(
            title="Layers",
            columns=columns,
            rows=result.rows,
            levels=["fail" if row.index in begins else "" for row in result.rows],
            legends=_LEGENDS,
            all_in="diff.csv",
        ),
        Table(
            title="Gradients",
            columns=columns,
            rows=result.gradients,
            levels=["fail" if row.label == first else "" for row in result.gradients],
            remark=gradients_answer(result),
            all_in="gradients.csv",
        ),
        Table(
            title=f"Tensors that differ{' or cannot be compared' * alike}",
            columns=WEIGHTS,
            rows=result.weights,
            kept=[*map(_differs, result.weights)],
            all_in="diff.csv",
        ),
    ]


def _unmatched(result: Differences) -> Listing:
    lines = [
        f"only in {row.side}: {row.label} ({row.kind}, {shape_text(row.shape)}): {row.reason}"
        for row in result.unmatched
    ]
    title = f"{counted(len(lines), 'tensor' if result.way == 'weights' else 'row')} without a partner"
    return Listing(title=title, lines=lines)


def answer(result: Differences) -> list[str]:
    """Return in sentences where the difference begins, how it grows, and its effect on the output."""
    if result.way == "weights":
        return [*_weights_answer(result)]
    begins = [first for first in result.first_differences if not first.gone_at]
    gone = [first for first in result.first_differences if first.gone_at]
    sentences = [*_different_networks(result)]
    sentences += [_origin_text(first, result, is_first=not at) for at, first in enumerate(begins[:_MOST_FIRST])]
    if len(begins) > _MOST_FIRST:
        sentences.append(f"Differences also begin in {counted(len(begins) - _MOST_FIRST, 'more layer')}.")
    if begins:
        sentences += [*_growth(result), *_gradients_text(result)]
    sentences += [_origin_text(first, result, is_first=False) for first in gone[:_MOST_FIRST]]
    if len(gone) > _MOST_FIRST:
        sentences.append(f"Differences in {counted(len(gone) - _MOST_FIRST, 'more layer')} disappear again.")
    if gone and not begins:
        sentences.append("The rows before and after differ no more than rounding explains.")
        sentences += [*_not_compared(result.rows, "row"), *_gradients_text(result)]
    elif not begins:
        sentences += [*_gradients_text(result), *([*_different_inputs(result)] or _rounding_or_equal(result))]
    sentences += _first_unequal(result)
    sentences += map(_output_text, result.outputs)
    return [*sentences, *_errors_of_outputs(result)] or ["No row was compared."]


def _gradients_text(result: Differences) -> Iterator[str]:
    """Yield which gradient is the first to differ; or how far gradients differ, if activations do."""
    moved = _labelled_norms(row for row in result.gradients if (row.relative_l2 or 0.0) > row.limit)
    if result.first_gradient_difference:
        row = next(gradient for gradient in result.gradients if gradient.label == result.first_gradient_difference)
        amount = row.note or _amount_text(row.relative_l2, row.nonfinite)
        yield (
            f"The first gradient to differ in the backward pass is {layer_words(row.label)} ({row.kind}): {amount}; "
            "the activations agree."
        )
    elif result.first_differences and result.way == "networks" and moved:
        yield f"The gradients follow: relative L2 {_at_most(*max(moved))}."
    elif not result.first_differences and result.way != "networks" and any(map(_differs, result.gradients)):
        yield gradients_answer(result)


def sides_text(result: Differences) -> str:
    """Return what was compared, in a few words: both names, or one name and how the sides differ."""
    a, b = result.a, result.b
    if a.model.name != b.model.name:
        return f"{a.model.name} and {b.model.name}"
    runs = PurePath(a.run).name, PurePath(b.run).name
    for first, other in ((_ways_text(a, b), _ways_text(b, a)), (a.model.weights, b.model.weights), runs):
        if first != other:
            return f"{a.model.name}, {first or 'as it is'} and {other or 'as it is'}"
    return f"{a.model.name} and itself"


def _ways_text(side: Side, other: Side) -> str:
    """Return the dtype, device and ways of a side that the other side does not share."""
    placed = [setting for setting, two in ((side.dtype, other.dtype), (side.device, other.device)) if setting != two]
    return printable(", ".join([*placed, *(way for way in side.ways if way not in other.ways)]), _MOST_OF_A_WAY)


def _origin_text(first: FirstDifference, result: Differences, *, is_first: bool) -> str:
    name = layer_words(first.layer)
    row = next((other for other in result.rows if other.label == first.row), None)
    kind = (
        f" ({', '.join(filter(None, (row.kind, row.source)))})" if row is not None and row.layer == first.layer else ""
    )
    later = [other.nonfinite for other in result.rows if row and other.measures and other.index > row.index]
    amount = _amount_text(first.relative_l2, row.nonfinite if row else None, later)
    if first.relative_l2 is None:
        shapes = "" if row is None else f", {shape_text(row.shape)} in A and {shape_text(row.shape_b)} in B"
        amount = f"shapes differ{shapes}"
    if first.gone_at:
        gone = "the difference is gone at" if result.way == "networks" else "the rows agree again at"
        return f"{name}{kind} differs, {amount}, but {gone} {layer_words(first.gone_at)}."
    if result.way != "networks":  # runs do not store the inputs of layers
        around = _called_on_one_side(_callers(first.layer)[0], result) + _not_compared_parts(result) * is_first
        return f"The difference first shows at {name}{kind}: {amount}.{around}"
    begins = "First difference in" if is_first else "Another difference in"
    if first.in_own_code:
        is_own = first.row in ("", "(model)", first.layer) or (row is not None and row.layer == first.layer)
        line = f" ({row.source})" if row is not None and row.source else ""
        shows = f"{'its output' if is_own else f'{layer_words(first.row)}{line}'} is the first to show it, {amount}"
        alone = _called_on_one_side(first.layer, result)
        is_edited = any(way.startswith("edit ") for side in (result.a, result.b) for way in side.ways)
        code = f"in its own code between the layers that it calls{', or by an edit' * is_edited}"
        return f"{begins} {name}{kind}, {code}: {shows}.{alone}"
    inputs = "" if row is None else _inputs_text(row) if is_first else f", {row.arguments}" if row.arguments else ""
    channel = f", mostly in channel {row.channel.channel} of {row.channel.channel_count}" if row and row.channel else ""
    return f"{begins} {name}{kind}: {amount}{inputs}{channel}."


def _amount_text(relative_l2: float | None, nonfinite: NonFinite | None, later: Sequence[NonFinite | None] = ()) -> str:
    """Return how far a row differs; NaN as `nonfinite_text` has it, if the row is known."""
    if nonfinite is not None:
        return nonfinite_text(nonfinite, later)
    is_nan = relative_l2 is not None and math.isnan(relative_l2)
    return "NaN or Inf on one side only" if is_nan else f"relative L2 {number_text(relative_l2, 3)}"


def _inputs_text(row: DifferenceRow) -> str:
    """Return how far the inputs of a layer differ, and which constants or tensors of modules do; "" if not known."""
    if row.arguments:
        others = row.arriving_relative_l2
        return f", {row.arguments}" + (f", its other inputs differ by {number_text(others, 3)}" if others else "")
    before = row.input_relative_l2
    if before == 0:
        return ", its inputs are equal"
    if before is None:
        return ""
    return f", its inputs differ by {number_text(before, 3)}" if math.isfinite(before) else ", its inputs differ"


def _called_on_one_side(layer: str, result: Differences) -> str:
    """Return which layers a module calls on one side alone: they may cause the difference."""
    alone = [row for row in result.unmatched if row.is_called_alone and layer in _callers(row.label)]
    labels = {side: [row.label for row in alone if row.side == side] for side in ("A", "B")}
    parts = [
        f"only {side} calls {', '.join(names[:_FEW_ALONE])}{', …' if len(names) > _FEW_ALONE else ''}"
        for side, names in labels.items()
        if names
    ]
    sentence = ", and ".join(parts)
    return f" {sentence[0].upper()}{sentence[1:]} there." if parts else ""


def _not_compared_parts(result: Differences) -> str:
    """Return which layers were not compared, because one run only has rows of their parts."""
    left_out = [row for row in result.unmatched if row.reason.endswith(PARTS_ALONE)]
    names = some_of([row.label for row in left_out], _FEW_ALONE)
    return f" {names} {are(len(left_out))} not compared: {left_out[0].reason}." if left_out else ""


def _callers(label: str) -> tuple[str, ...]:
    """Return the modules that may call a layer or an operation: a list of modules is not called itself."""
    owner, _, name = re.split(r"[#\[]", label, maxsplit=1)[0].rpartition(".")
    return (owner, owner.rpartition(".")[0]) if name.isdigit() else (owner,)


def first_mark(result: Differences) -> str:
    """Return the mark in pictures of a row where a difference begins."""
    return "begins here" if result.way == "networks" else "the first to show it"


def _different_inputs(result: Differences) -> Iterator[str]:
    """Yield how far layers differ on different inputs; nothing if they agree."""
    norms = _labelled_norms(result.rows)
    if not result.inputs_b or all(row.measures and row.measures.relative_l2 <= row.limit for row in result.rows):
        return
    sentence = "A and B get different inputs, so the difference begins there"
    if finite := _without_nan(norms):
        ends = [f"{number_text(amount, 3)} at {layer_words(label)}" for amount, label in (finite[0], max(finite))]
        sentence += f": relative L2 {ends[0]}, at most {ends[1]}"
    sentences = [f"{sentence}{'' if norms else '; no row has the same shape in both'}."]
    if broken := sum(row.nonfinite is not None for row in result.rows):
        sentences.append(f"{_hold_nan(broken, 'row')}.")
    if 0 < len(norms) < len(result.rows):
        have = "has" if len(norms) == 1 else "have"
        sentences.append(f"Of {len(result.rows):,} rows {len(norms):,} {have} the same shape.")
    yield " ".join(sentences)


def _rounding_or_equal(result: Differences) -> Iterator[str]:
    """Yield how far rows differ that rounding explains, and how many rows cannot be compared."""
    norms = _labelled_norms(result.rows)
    amount, label = max(norms, key=itemgetter(0), default=(0.0, ""))
    if amount:
        yield f"A and B differ no more than rounding explains: relative L2 {_at_most(amount, label)}."
    elif norms:
        partly = any(row.measures and row.measures.value_count is not None for row in result.rows)
        sure = ", in their statistics and up to 256 values per input," if partly else ""
        yield f"A and B are equal{sure} in {counted(len(norms), 'row')}."
    yield from _not_compared(result.rows, "row")


def _not_compared(rows: Sequence[DifferenceRow], unit: str) -> Iterator[str]:
    if alone := [row for row in rows if row.measures is None]:
        example = f"{'as ' if len(alone) > 1 else ''}at {layer_words(alone[0].label)}: {alone[0].note}"
        yield f"{_share_of(alone, rows, unit)} cannot be compared, {example}."


def _share_of(part: Sequence[object], whole: Sequence[object], unit: str, verb: str = "") -> str:
    """Return "2 of 3 rows differ", "1 of 3 rows differs", or "The only row differs"."""
    subject = f"{len(part):,} of {counted(len(whole), unit)}" if len(whole) > 1 else f"The only {unit}"
    return f"{subject} {verb}{'s' if verb and len(part) == 1 else ''}".rstrip()


def _first_unequal(result: Differences) -> Iterator[str]:
    """Yield the first row that is not equal, if rounding may explain it.

    Nothing is yielded if the sides have different dtypes or inputs: then every row differs.
    """
    at = next((at for at, row in enumerate(result.rows) if _differs(row)), None)
    if at is None or result.inputs_b:
        return
    row = result.rows[at]
    before, same_dtype = row.input_relative_l2, row.dtype == row.dtype_b
    if row.measures is None or not row.measures.relative_l2 <= row.limit or not same_dtype or (before and not at):
        return
    partly = row.measures.value_count is not None
    sure = "equal in its statistics and up to 256 values per input" if partly else "equal"
    amount, limit = number_text(row.measures.relative_l2, 3), number_text(row.limit, 3)
    yield (
        f"The first row that is not {sure} is {layer_words(row.label)} ({row.kind}): relative L2 {amount}"
        f"{_inputs_text(row)}. Rounding may explain up to {limit} there."
    )


def _growth(result: Differences) -> Iterator[str]:
    first = result.first_differences[0]
    rows = [row for row in result.rows if row.measures is not None]
    rows = rows[next((at for at, row in enumerate(rows) if row.label == first.row), 0) :]
    later = _labelled_norms(rows)
    if len(later) < 2:
        return
    if first.relative_l2 is not None and all(label != first.row for _, label in later):
        later.insert(0, (first.relative_l2, first.row or "(model)"))  # a container has no row
    finite = _without_nan(later)
    sentences = []
    if finite and max(finite)[0]:
        most, last = max(finite), finite[-1]
        grown = f"It is largest at {layer_words(most[1])} ({number_text(most[0], 3)})"
        is_last = last == later[-1] and most != last
        sentences.append(
            f"{grown}, and {number_text(last[0], 3)} at the last row, {layer_words(last[1])}."
            if is_last
            else f"{grown}."
        )
    broken = [(row.label, row.nonfinite) for row in rows if row.nonfinite]
    if len(finite) < len(later) and (not broken or broken[0][0] != first.row):
        where = f": at {layer_words(broken[0][0])} {nonfinite_text(broken[0][1])}" if broken else ""
        sentences.append(f"{_hold_nan(len(later) - len(finite), 'row')}{where}.")
    if sentences:
        yield " ".join(sentences)


def _hold_nan(count: int, unit: str) -> str:
    return f"{counted(count, unit)} {'holds' if count == 1 else 'hold'} NaN or Inf on one side only"


def _output_text(output: OutputDifference) -> str:
    name = f"Output {output.slot}" if output.slot else "Output"
    if output.measures is None and output.top1 is None:
        return f"{name}: it cannot be compared."
    parts = []
    both_nan = sum(a.is_nan and b.is_nan for a, b in zip(*output.predictions, strict=True))
    if both_nan and both_nan == output.input_count:
        return f"{name}: the probabilities of A and of B are NaN, so neither has a best class."
    if output.measures is not None:
        parts.append(_amount_text(output.relative_l2, output.nonfinite))
    if output.measures is not None and output.measures.max_abs:
        others = " elsewhere" if output.nonfinite else ""
        parts.append(f"max |Δ| {number_text(output.measures.max_abs, 3)}{others}")
    if output.kl is not None and not math.isnan(output.kl):
        parts.append(f"KL {number_text(max(output.kl, 0.0), 3)} nats")
    if both_nan:
        parts.append(f"probabilities are NaN in A and in B for {both_nan} of {output.input_count} inputs")
    classes = [] if output.top1 is None else [_top1_text(output.top1, output.input_count)]
    if output.top5 is not None and not math.isnan(output.top5):
        classes.append(f"top-5 overlap {percent_text(output.top5, 0)}")
    return f"{name}: {'; '.join(filter(None, [*classes, ', '.join(parts)]))}."


def _top1_text(same: int, count: int) -> str:
    if count == 1:
        return "top-1 unchanged" if same else "top-1 changed"
    return f"top-1 unchanged on {same}/{count} inputs"


def _errors_of_outputs(result: Differences) -> Iterator[str]:
    if not result.reference:
        return
    for output in result.outputs:
        if output.error is not None and output.error_b is not None:
            different = "B is different, not worse" if output.relative_l2 else "B is no worse"
            is_broken = math.isnan(output.error_b) and not math.isnan(output.error)
            worse = "B is worse" if is_broken or output.error_b > output.error else different
            errors = f"relative L2 {number_text(output.error_b, 3)}, and A's {number_text(output.error, 3)}"
            yield f"{worse}: compared with {result.reference}, the error of B's output is {errors}."


def _weights_answer(result: Differences) -> Iterator[str]:
    rows = result.weights
    comparable = [row for row in rows if row.measures is not None or row.shape != row.shape_b]
    changed = [row for row in comparable if _differs(row)]
    yield from _different_networks(result)
    if not comparable:
        yield "No pair of tensors can be compared."
    elif not changed:
        yield f"A and B hold the same values in {counted(len(comparable), 'tensor')}."
    else:
        finite = _without_nan(_labelled_norms(changed))
        amount = f": ‖Δ‖/‖w‖ {_at_most(*max(finite))}" if finite else ""
        yield f"{_share_of(changed, rows, 'tensor', 'differ')}{amount}."
        if broken := sum(row.nonfinite is not None for row in changed):
            yield f"{_hold_nan(broken, 'tensor')}."
    flips = [(row.sign_flips, row.name) for row in changed if row.sign_flips]
    if flips:
        most, name = max(flips)
        yield f"Signs are opposite in {counted(len(flips), 'tensor')}, most in {name}: {percent_text(most, 2)}."
    dtypes = Counter(f"{row.dtype} in A, {row.dtype_b} in B" for row in rows if row.dtype != row.dtype_b)
    for form, count in dtypes.most_common(3):
        yield f"{counted(count, 'tensor')} {are(count)} {form}."
    alone = sorted(Counter(tensor.side for tensor in result.unmatched).items())
    if alone:
        yield f"Without a partner: {', '.join(f'{count:,} of {side}' for side, count in alone)}."


def _different_networks(result: Differences) -> Iterator[str]:
    """Yield a sentence if fewer than half of the rows of the smaller network have a partner."""
    unit = "tensor" if result.way == "weights" else "row"
    pairs = result.weights if result.way == "weights" else result.rows
    of_a, of_b = (len(pairs) + sum(entry.side == side for entry in result.unmatched) for side in ("A", "B"))
    if 2 * len(pairs) < min(of_a, of_b):
        by_order = sum(row.matched == "order" for row in pairs)
        alone = f", {by_order:,} of them by order and shapes alone" if by_order else ""
        pairing = f"{counted(of_a, unit)} in A and {of_b:,} in B make {counted(len(pairs), 'pair')}{alone}"
        yield f"A and B are different networks: {pairing}."


def _differs(row: WeightDifference | DifferenceRow) -> bool:
    """Tell whether the values differ or cannot be compared."""
    return row.relative_l2 != 0


def gradients_answer(result: Differences) -> str:
    """Return in sentences how many gradients differ, and which differs most."""
    measured = _labelled_norms(result.gradients)
    broken = [label for value, label in measured if math.isnan(value)]
    changed = [pair for pair in _without_nan(measured) if pair[0]]
    sentences = []
    if measured and not changed and not broken:
        sentences.append(f"No difference shows in {counted(len(measured), 'gradient')}.")
    sentences += _not_compared(result.gradients, "gradient")
    if changed:
        many = _share_of(changed, result.gradients, "gradient", "differ")
        sentences.append(f"{many}: relative L2 {_at_most(*max(changed))}.")
    if broken:
        hold = _share_of(broken, result.gradients, "gradient", "hold")
        sentences.append(f"{hold} NaN or Inf on one side only, {layer_words(broken[0])} among them.")
    errors = _without_nan((row.error_b, row.label) for row in result.gradients if row.error_b)
    if result.reference and errors:
        error, label = max(errors)
        of_a = next(row.error for row in result.gradients if row.label == label)
        largest = f"B's largest error is relative L2 {number_text(error, 3)}, at {layer_words(label)}"
        sentences.append(f"Compared with {result.reference}, {largest}; A's error there is {number_text(of_a, 3)}.")
    return " ".join(sentences)


def differences_as_check(result: Differences, conditions: tuple[str, ...]) -> CheckReport:
    """Return the conditions of `--fail-over` as a report of `check`, for its renderers: one rule for each condition."""
    findings = {rule: tuple([finding for finding in result.exceeded if finding.rule == rule]) for rule in conditions}
    return CheckReport(
        checkpoint=sides_text(result),
        outcomes=tuple([RuleOutcome(rule, "fail" if its else "pass", its) for rule, its in findings.items()]),
        model=result.a.model,
        inputs=result.inputs,
        warnings=result.warnings,
        seconds={**result.timings, "total": sum(result.timings.values())},
    )
