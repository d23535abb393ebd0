"""What layers make of an input as a document: the verdicts, maps of a few layers, figures over depth, tables."""

from collections.abc import Iterator, Sequence
from functools import partial

from hookscope.hooks.patterns import FILLING, NOT_JUDGED
from hookscope.reporting.columns import SPARKLINE_MEANING, number_text
from hookscope.reporting.cost_text import COST_LEGENDS, cost_lines, cost_sentences
from hookscope.reporting.depth_charts import depth_charts
from hookscope.reporting.document import (
    MAP_LEGEND,
    Document,
    InputMap,
    Level,
    MappedInput,
    Maps,
    Part,
    PhotographMaps,
    Section,
    Table,
    Text,
)
from hookscope.reporting.inspected import (
    NOTABLE_FLAGS,
    describe_inspection,
    detailed_layers,
    folded_words,
    headline_of,
    uncalled_layers,
)
from hookscope.reporting.layer_columns import HIST, TOKENS, kinds_text, layer_table_of
from hookscope.reporting.overviews.maps import chosen_maps, is_strip
from hookscope.reporting.run_facts import input_names, subject_of
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.findings import Finding
from hookscope.results.inputs import Photograph
from hookscope.results.runs.record import RunRecord
from hookscope.results.token_norms import DEVIATIONS, LEAST_RATIO, TokenMap
from hookscope.text import counted, layer_words, some_of

_LETTERS = "ABCDE"
_MOST_HIGH = 8  # tokens that are named of a map
_FEW = 3  # layers that a sentence about a flag names
_VOLUME_AXES = 5  # N, C, D or T, H, W


def describe_activations(result: Activations, record: RunRecord | None = None) -> Document:
    """Describe the outputs of layers; `record` names the pictures of the run."""
    answer, level = _answer(result)
    if result.cost is not None:
        answer += cost_sentences(result.cost, result.rows)
    shown = sorted({summary.input_index for summary in result.map_summaries}) or [0]
    chosen = chosen_maps([summary for summary in result.map_summaries if summary.input_index == shown[0]])
    letters = dict(zip([summary.row for summary in chosen], _LETTERS, strict=False))
    cost = [] if result.cost is None else cost_lines(result.cost)
    maps = [_maps(result, index, letters, is_last=index == shown[-1]) for index in shown]
    layers = detailed_layers(result, record, [_layers(result)])
    words = Text([*folded_words(result.rows), *token_sentences(result), *cost])
    return describe_inspection(
        result,
        record,
        f"What the layers of {result.model.name} see in",
        "activations",
        f"{counted(len(result.rows), 'output')} of layers",
        (answer, level),
        [
            Section("tokens", "Norms of tokens", [*_token_norms(result)]),
            Section("depth", "Over depth", [*maps, *depth_charts(result.rows, letters=letters)]),
            Section("layers", "Layers", [layers, words, uncalled_layers(result.uncalled)]),
        ],
    )


def _answer(result: Activations) -> tuple[list[str], Level]:
    """Return the first finding or that there is none, a sentence on each flag that calls for a look, and the level."""
    flags = flag_sentences(result.rows, result.verdicts)
    if result.failure is not None:
        where = layer_words(result.failure.layer) if result.failure.layer else "the network"
        return [f"The forward pass raised in {where}.", *flags], "fail"
    if result.verdicts:
        headline, level = headline_of(result.verdicts)
        return [headline, *flags], level
    if all(row.activation.unmeasured is not None or not row.activation.element_count for row in result.rows):
        return ["There is nothing to judge.", *flags], "warn"
    return [*no_findings(result), *flags], "good"


def no_findings(result: Activations) -> list[str]:
    """Return two sentences: what the rules did not find, and which share of zero channels makes a ReLU dead.

    The share is higher on noise. Inf that no later output holds, such as a mask's, and dead channels of a convolution
    are no findings.
    """
    flags = {flag for row in result.rows for flag in row.flags}
    constant = "" if {"constant", "all zero"} & flags else "no constant outputs, "
    share = "88% (noise)" if all(record.is_noise for record in result.inputs) else "80%"
    kinds = kinds_text(result.rows)
    return [
        f"No problems found{result.where_judged}: no NaN, no Inf that spreads, {constant}no dead ReLUs.",
        f"Looked at the layers shown{kinds} and at operations; a ReLU is dead if {share} of its channels are 0.",
    ]


def flag_sentences(rows: Sequence[LayerRow], verdicts: Sequence[Finding]) -> list[str]:
    """Return a sentence on each flag that calls for a look, with the first layers that have it and no verdict.

    Constants, masks and mere views that the network's code makes are left out unless they hold NaN.
    """
    judged = {place for verdict in verdicts for place in verdict.places}
    meant = {row.label for row in rows if row.owner is not None and row.kind in NOT_JUDGED | FILLING}
    meant -= {row.label for row in rows if row.activation.nan_count}
    labels = {
        words: [layer_words(row.label) for row in rows if flag in row.flags and row.label not in judged | meant]
        for flag, (_, words) in NOTABLE_FLAGS.items()
    }
    return [f"{words} {some_of(flagged, _FEW)}." for words, flagged in labels.items() if flagged]


def _maps(result: Activations, index: int, letters: dict[int, str], *, is_last: bool) -> Maps:
    """Return the maps of an input in a few layers, with their strongest channels if it is the only input."""
    summaries = [summary for summary in result.map_summaries if summary.input_index == index and summary.row in letters]
    legend = [f"{input_names(result.inputs)[index]}."] if len(result.inputs) > 1 else []
    if is_last:
        legend.append(MAP_LEGEND)
        if any(row.index in letters and len(row.shape or ()) == _VOLUME_AXES for row in result.rows):
            legend.append("Of volumes and clips, the plane or frame in the middle is shown.")
        if any(is_strip(summary.size) for summary in summaries):
            legend.append("A strip runs over the steps of a sequence, from left to right, and shows magnitudes.")
        if index + 1 < len(result.inputs):
            legend.append(f"{counted(len(result.inputs) - index - 1, 'more input')}: the charts are over all of them.")
    return Maps(maps=summaries, legend=" ".join(legend), letters=letters, with_strongest=len(result.inputs) == 1)


def _layers(result: Activations) -> Table:
    columns, rows = layer_table_of(result)
    levels: list[Level] = [
        next((level for flag, (level, _) in NOTABLE_FLAGS.items() if flag in row.flags), "") for row in result.rows
    ]
    norms = f"{TOKENS}: median to maximum norm of the tokens"
    legends = {HIST: SPARKLINE_MEANING, TOKENS: norms, **COST_LEGENDS}
    return Table(title="Layers", columns=columns, rows=rows, levels=levels, legends=legends, all_in="layers.csv")


def token_sentences(result: Activations) -> Iterator[str]:
    """Yield a line on tokens of high norm and one on massive activations, with the row that has the greatest."""
    rows = [(row, row.tokens) for row in result.rows if row.tokens is not None]
    names = [f" of {name}" if len(result.inputs) > 1 else "" for name in input_names(result.inputs)]
    high = [(row, tokens) for row, tokens in rows if tokens.high]
    if high:
        row, tokens = max(high, key=lambda pair: pair[1].high[0].norm / pair[1].median if pair[1].median else 0)
        first = tokens.high[0]
        words = f"high-norm tokens in {counted(len(high), 'row')}, most in {layer_words(row.label)}: "
        words += f"{counted(tokens.high_count, 'token')}, above all {tokens.place(first.token)}"
        words += names[first.input_index]
        yield f"{words} (norm {number_text(first.norm)}, median {number_text(tokens.median)})"
    massive = [(row, tokens) for row, tokens in rows if tokens.massive]
    if massive:
        row, tokens = massive[0]
        largest = tokens.massive[0]
        words = f"massive activations in {counted(len(massive), 'row')}, first in {layer_words(row.label)}: "
        words += f"{number_text(largest.value)} in channel {largest.channel} of {tokens.place(largest.token)}"
        yield f"{words}{names[largest.input_index]}, median magnitude {number_text(largest.median)}"


def describe_token_norms(result: Activations, photographs: Sequence[Photograph]) -> Document:
    """Describe the norms of tokens over the photographs of the first inputs."""
    title = f"Token norms of {result.model.name}"
    return Document(
        title=title,
        subtitle="L2 norm over channels; each map has its own scale, from 0.",
        about=subject_of(result),
        answer=[_high_words(result)],
        sections=[Section("tokens", title, [*_token_norms(result, photographs)])],
    )


def _high_words(result: Activations) -> str:
    mapped = {token_map.row for token_map in result.token_maps}
    are_high = any(row.tokens.high_count for row in result.rows if row.tokens is not None and row.index in mapped)
    where = "in layers with high tokens" if are_high else "in the last block"
    limit = f"{LEAST_RATIO:.0f} times the median and {DEVIATIONS:.0f} robust standard deviations above it"
    return f"The L2 norm of each token, {where}. High is beyond {limit}."


def _token_norms(result: Activations, photographs: Sequence[Photograph] = ()) -> Iterator[Part]:
    """Yield the maps of the tokens of each input that has any, over the photographs if they are given."""
    if not result.token_maps:
        return
    yield Text([_high_words(result)], is_extra=True)
    maps: dict[int, list[InputMap]] = {}
    for number, token_map in enumerate(result.token_maps):
        maps.setdefault(token_map.input_index, []).append(_token_map(number, token_map))
    yield PhotographMaps(
        [
            MappedInput(
                number=index,
                record=result.inputs[index],
                maps=partial(list, of_input),
                photograph=photographs[index] if photographs else None,
            )
            for index, of_input in sorted(maps.items())
        ]
    )


def _token_map(number: int, token_map: TokenMap) -> InputMap:
    high, count = token_map.high, len(token_map.norms)
    in_front = zip(token_map.prefix, token_map.norms, strict=False)
    named = "; ".join(high[:_MOST_HIGH]) + (f"; {len(high) - _MOST_HIGH} more" if len(high) > _MOST_HIGH else "")
    return InputMap(
        title=token_map.label or "(model)",
        where="",
        facts=[
            *((name, number_text(norm) + ", high" * (norm > token_map.limit)) for name, norm in in_front),
            ("median", number_text(token_map.median)),
            ("limit", number_text(token_map.limit)),
            ("high", f"{len(high)} of {count}{': ' * bool(high)}{named}"),
        ],
        map=token_map,
        number=number,
    )
