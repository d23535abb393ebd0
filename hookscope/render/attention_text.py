"""What attention looks at, in words: the census, a finding, and a table of the blocks or of every head."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePath

from rich.console import Group, RenderableType

from hookscope.render.columns import Column, draw_table, machine_columns, number_text, safe_line
from hookscope.render.run_facts import subject_of
from hookscope.render.terminal import about_lines, note_lines
from hookscope.results.attention import Attention, AttentionBlock, HeadRow
from hookscope.results.concentration import concentration
from hookscope.text import counted

_MOST_ROWS = 60


def attention_summary(result: Attention, *, width: int, full: bool = False) -> Iterator[RenderableType]:
    """Yield what the command prints: census, title, finding, table."""
    yield safe_line(f"{result.census}.", style="bold yellow" if result.unseen else "bold", overflow="fold")
    yield note_lines(result.notes)
    yield from about_lines(subject_of(result))
    if finding := finding_of(result):
        yield safe_line(finding, overflow="fold")
    yield draw_table(HEADS, result.rows, width) if full and result.rows else _table_of_blocks(result, width)
    flagged = [each for each in result.rows if each.is_one_token]
    if flagged:
        shown = ", ".join(f"{each.block} head {each.head}" for each in flagged[:6])
        more = f" and {len(flagged) - 6} more" if len(flagged) > 6 else ""
        yield safe_line(
            f"{counted(len(flagged), 'head')} with more than 90% of the weight on one token: {shown}{more}",
            style="yellow",
            overflow="fold",
        )


def finding_of(result: Attention) -> str:
    """Return where the first map lies, in one sentence; "" without maps."""
    if not result.maps:
        return ""
    first = result.maps[0]
    record = result.inputs[first.input_index]
    name = PurePath(record.name).name or record.name
    heads = "" if first.head is None else f" head {first.head}"
    rest = f", {first.elsewhere:.0%} is on tokens other than patches" if first.elsewhere >= 0.005 else ""
    box = concentration(first, record)
    if box is None:
        return f"{name}, {first.query} at {first.block}{heads}: nothing on the picture{rest}."
    share = f"{box.share:.0%}" if box.share >= 0.01 else "less than 1%"
    words = "spread out" if box.words == "spread out" else f"at: {box.words}"
    return f"{name}, {first.query} at {first.block}{heads}: half of it lies in {share} of the picture, {words}{rest}."


def _table_of_blocks(result: Attention, width: int) -> RenderableType:
    shown = result.blocks[:_MOST_ROWS]
    table = draw_table(block_columns(result), shown, width)
    if len(shown) == len(result.blocks):
        return table
    more = safe_line(f"… {len(result.blocks) - len(shown):,} more blocks, --full shows every head", style="dim")
    return Group(table, more)


_OVER_HEADS = (
    *(("entropy", "entropy", 1), ("distance", "distance", 1)),
    *(("class_share", "class %", 100), ("register_share", "registers %", 100)),
)


def block_columns(result: Attention) -> tuple[Column, ...]:
    """Return the columns of `result.blocks`; those of heads have the least and the greatest value."""
    rows = {block.label: [each for each in result.rows if each.block == block.label] for block in result.blocks}
    places = {block.label: place for place, block in enumerate(result.blocks)}

    return (
        Column("", "#", "position in execution order", 12, str, lambda block: places[block.label]),
        Column("label", "block", "module that computes attention", 0, words=True, fold=44),
        Column("heads", "heads", "number of heads", 5, str),
        Column("", "queries x keys", "tokens that ask, and that are looked at", 7, shown=_sizes),
        *(
            Column(
                "", title, "least and greatest of its heads", rank, shown=partial(_range, rows, key, times), usual="-"
            )
            for rank, (key, title, times) in enumerate(_OVER_HEADS, 1)
        ),
        Column("", "remarks", "heads on one token", 6, shown=lambda block: _flagged(rows[block.label]), words=True),
    )


HEADS = (
    Column("block", "block", "module that computes attention", 0, words=True, fold=44),
    Column("index"),
    Column("head", "head", "number of the head", 1, str),
    Column("entropy", "entropy", "entropy of a query's weights", 2, unit="nats", usual="-"),
    Column("distance", "distance", "distance to what a query looks at", 3, unit="patches", usual="-"),
    Column("class_share", "on class", "share of the weight on the class token", 4, usual="-"),
    Column("register_share", "on registers", "share of the weight on registers", 5, usual="-"),
    Column("top_share", "on one token", "largest share of the weight on a single token", 6, usual="-"),
    *machine_columns("top_token", "is_one_token"),
    Column("", "remarks", "what is unusual", 7, shown=lambda row: "one token" * row.is_one_token, words=True),
)


def _sizes(block: AttentionBlock) -> str:
    windows = f", {block.windows} windows" if block.windows > 1 else ""
    return f"{block.queries} x {block.keys}{windows}"


def _range(rows: Mapping[str, Sequence[HeadRow]], name: str, times: int, block: AttentionBlock) -> str:
    """Return the least and the greatest value over heads."""
    values = [each * times for each in (getattr(row, name) for row in rows[block.label]) if each is not None]
    if not values:
        return "-"
    low, high = number_text(min(values), 3), number_text(max(values), 3)
    return low if low == high else f"{low} to {high}"


def _flagged(rows: Sequence[HeadRow]) -> str:
    flagged = [str(each.head) for each in rows if each.is_one_token]
    return f"one token: head {', '.join(flagged)}" if flagged else ""
