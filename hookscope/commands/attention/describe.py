"""What attention looks at as a document: the census, a finding, maps over the inputs, numbers of blocks and heads."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from hookscope.reporting.columns import Column, machine_columns, number_text
from hookscope.reporting.document import (
    Document,
    InputMap,
    MappedInput,
    MapRow,
    Part,
    PhotographMaps,
    Section,
    SmallMaps,
    StepChart,
    StepCharts,
    Table,
)
from hookscope.reporting.run_facts import all_facts, first_name, input_names, making_of, subject_of, where_words
from hookscope.reporting.steps import as_floats
from hookscope.results.attention import ROLLOUT, Attention, AttentionBlock, AttentionMap, HeadMaps, HeadRow
from hookscope.results.concentration import concentration
from hookscope.results.inputs import Photograph
from hookscope.text import counted, layer_words, percent_text, shape_text, some_of

_MOST_FLAGGED = 6
_MOST_REASONS = 2  # notes that explain why an input has no map
_share = partial(percent_text, decimals=2)
_OF_HEADS = (("least of the heads", np.min), ("greatest of the heads", np.max), ("mean of the heads", np.mean))
_LEAST_WEIGHT = 0.001  # on places of the picture: a head with less is drawn as 0, not by its own scale


def describe_attention(result: Attention, only: int | None = None, photograph: Photograph | None = None) -> Document:
    """Describe what attention looks at in all inputs, or in the one at the index `only` with its photograph."""
    shown = range(len(result.inputs)) if only is None else [only]
    inputs = [_mapped_input(index, result, photograph) for index in shown]
    place = "The inputs" if all(mapped.remark for mapped in inputs) else "Over the photograph"
    maps = [heat_map for heat_map in result.maps if heat_map.input_index in shown]
    answer = [*(finding_of(heat_map, result) for heat_map in maps[:1]), f"{result.census}."]
    return Document(
        title=f"What the attention of {result.model.name} looks at",
        subtitle="Colours show the weight of a cell; each map has its own scale, from 0.",
        page_title=f"{result.model.name} · what its attention looks at · {first_name(result)}",
        about=subject_of(result),
        answer=[*(reversed(answer) if result.unseen else answer), *_flagged_heads(result)],
        level="warn" if result.unseen else "",
        warnings=result.warnings,
        notes=result.notes,
        facts=all_facts(result, ("Blocks", result.census, bool(result.unseen))),
        sections=[
            Section("maps", place, [PhotographMaps(inputs)]),
            Section("heads", "Blocks and heads", [*_numbers(result, shown)]),
        ],
        making=making_of(result),
        main="maps",
    )


def finding_of(first: AttentionMap, result: Attention) -> str:
    """Return where a map lies, in one sentence."""
    record = result.inputs[first.input_index]
    heads = "" if first.head is None else f" head {first.head}"
    rest = f"; {percent_text(first.elsewhere)} is on tokens other than patches" if first.elsewhere >= 0.005 else ""
    box = concentration(first, record)
    subject = f"{input_names(result.inputs)[first.input_index]}, {first.query} at {layer_words(first.block)}{heads}: "
    if box is None:
        has_nan = not np.isfinite(first.values).all()
        return f"{subject}{'its weights are NaN' if has_nan else f'nothing on the picture{rest}'}."
    return f"{subject}half of the attention to patches is {where_words(box, record)}{rest}."


def _flagged_heads(result: Attention) -> Iterator[str]:
    flagged = [f"{layer_words(row.block)} head {row.head}" for row in result.rows if row.is_one_token]
    if flagged:
        heads = counted(len(flagged), "head")
        yield f"{heads} with more than 90% of the weight on one token: {some_of(flagged, _MOST_FLAGGED)}."


def _mapped_input(index: int, result: Attention, photograph: Photograph | None) -> MappedInput:
    maps = [_map(place, heat_map) for place, heat_map in enumerate(result.maps) if heat_map.input_index == index]
    patches = [patch for patch in result.patches if patch.input_index == index]
    return MappedInput(
        number=index,
        record=result.inputs[index],
        maps=lambda: maps,
        photograph=photograph,
        patches=patches,
        remark="" if maps or patches else " ".join(("It has no map.", *result.notes[-_MOST_REASONS:])),
    )


def _map(number: int, heat_map: AttentionMap) -> InputMap:
    heads = "mean over heads" if heat_map.head is None else f"head {heat_map.head}"
    return InputMap(
        title=heat_map.query,
        where=f"{heat_map.block}, {'through all blocks' if heat_map.block == ROLLOUT else heads}",
        facts=[
            ("cells", shape_text(heat_map.values.shape)),
            ("on tokens without a place", percent_text(heat_map.elsewhere)),
        ],
        map=heat_map,
        number=number,
    )


def _numbers(result: Attention, shown: Sequence[int]) -> Iterator[Part]:
    head_maps = [head_map for head_map in result.head_maps if head_map.input_index in shown]
    for query in dict.fromkeys(head_map.query for head_map in head_maps):
        yield _every_head([head_map for head_map in head_maps if head_map.query == query], result)
    if len(result.blocks) > 1 and result.rows:
        yield _over_blocks(result)
    spread = "from the lowest head of a block to the highest"
    legends = {"entropy": f"entropy: in nats, {spread}", "distance": f"distance: in patches, {spread}"}
    yield Table(title="Blocks", columns=block_columns(result), rows=result.blocks, legends=legends)
    yield Table(title="Every head", columns=HEADS, rows=result.rows, is_extra=True)


def _every_head(maps: Sequence[HeadMaps], result: Attention) -> SmallMaps:
    flagged = {(row.index, row.head) for row in result.rows if row.is_one_token}
    count = len({part.index for part in maps})
    some = "every block" if count == len(result.blocks) else f"{count} of {len(result.blocks)} blocks"
    marks = " Red: one token has more than 90% of the weight, whatever the query." if flagged else ""
    return SmallMaps(
        title=f"Every head of {some}: {maps[0].query}",
        legend=f"Each map goes from 0, the darkest colour, to its largest weight on a patch, printed below it.{marks}",
        rows=[
            MapRow(
                name=f"block {part.index}",
                where=_short(result.blocks[part.index].label),
                maps=[values if np.nansum(values) > _LEAST_WEIGHT else np.zeros_like(values) for values in part.values],
                marked=[(part.index, head) in flagged for head in range(len(part.values))],
            )
            for part in maps
        ],
    )


def _short(label: str) -> str:
    """Return the last parts of a name, which tell blocks apart: "encoder_layer_3.self_attention"."""
    parts = label.split(".")
    numbered = [place for place, part in enumerate(parts) if any(map(str.isdigit, part))]
    return ".".join(parts[numbered[-1] if numbered else 0 :])


def _over_blocks(result: Attention) -> StepCharts:
    """Return a chart for each number: the least, the mean and the greatest of the heads of a block."""
    blocks = [[row for row in result.rows if row.index == index] for index in range(len(result.blocks))]
    one_token = np.array([any(row.is_one_token for row in rows) for rows in blocks])
    charts = []
    for column in _OVER_HEADS:
        values = [[value for row in rows if (value := column.read(row)) is not None] for rows in blocks]
        if any(values):
            lines = [(name, as_floats(of(heads) if heads else None for heads in values)) for name, of in _OF_HEADS]
            title = f"{column.meaning}, {column.unit}".removesuffix(", ")
            charts.append(StepChart(title=title, lines=lines, marks=[("a head on one token", one_token)]))
    return StepCharts(np.arange(len(blocks)), 0, len(blocks) - 1, charts, unit="block")


def block_columns(result: Attention) -> tuple[Column, ...]:
    """Return the columns of `result.blocks`; numbers of heads are shown as the least and the greatest."""
    rows = {block.label: [row for row in result.rows if row.block == block.label] for block in result.blocks}
    places = {block.label: place for place, block in enumerate(result.blocks)}

    return (
        Column("", "#", "position in execution order", 12, str, lambda block: places[block.label]),
        Column("label", "block", "module that computes attention", 0, words=True, fold=44),
        Column("heads", "heads", "number of heads", 5, str),
        Column("", "queries x keys", "tokens that ask, and that are looked at", 7, shown=_sizes),
        *(
            Column("", head.title, "least and greatest of heads", rank, shown=partial(_range, rows, head), usual="-")
            for rank, head in enumerate(_OVER_HEADS, 1)
        ),
        Column("", "remarks", "heads on one token", 6, shown=lambda block: _flagged(rows[block.label]), words=True),
    )


HEADS = (
    Column("block", "block", "module that computes attention", 0, words=True, fold=44),
    Column("index"),
    Column("head", "head", "number of the head", 1, str),
    Column("entropy", "entropy", "entropy of a query's weights", 2, unit="nats", usual="-"),
    Column("distance", "distance", "distance to what a query looks at", 3, unit="patches", usual="-"),
    Column("class_share", "on class", "share of the weight on the class token", 4, _share, usual="-"),
    Column("register_share", "on registers", "share of the weight on registers", 5, _share, usual="-"),
    Column("top_share", "on one token", "largest share of the weight on a single token", 6, _share, usual="-"),
    *machine_columns("top_token", "is_one_token"),
    Column("", "remarks", "what is unusual", 7, shown=lambda row: "one token" * row.is_one_token, words=True),
)


_OVER_HEADS = HEADS[3:7]  # numbers of which a block shows the least and the greatest


def _sizes(block: AttentionBlock) -> str:
    windows = f", {block.windows} windows" if block.windows > 1 else ""
    return f"{block.queries} x {block.keys}{windows}"


def _range(rows: Mapping[str, Sequence[HeadRow]], column: Column, block: AttentionBlock) -> str:
    values = [number for number in map(column.read, rows[block.label]) if number is not None]
    text = column.text or partial(number_text, digits=3)
    return " to ".join(dict.fromkeys((text(float(np.min(values))), text(float(np.max(values)))))) if values else "-"


def _flagged(rows: Sequence[HeadRow]) -> str:
    flagged = [str(row.head) for row in rows if row.is_one_token]
    return f"one token: head {', '.join(flagged)}" if flagged else ""
