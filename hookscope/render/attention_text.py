"""What attention looks at, in words: the census, a finding, and a table of the blocks or of every head."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rich.console import Group, RenderableType

from hookscope.render.columns import Drawn, draw, fold_name, number_column, number_text, safe_line
from hookscope.render.terminal import note_lines, title_lines
from hookscope.results.attention import Attention, AttentionBlock, HeadRow
from hookscope.results.concentration import concentration
from hookscope.text import counted

_MOST_ROWS = 60


def attention_summary(result: Attention, *, width: int, full: bool = False) -> Iterator[RenderableType]:
    """Yield what the command prints: census, title, finding, table."""
    yield safe_line(f"{result.census}.", style="bold yellow" if result.unseen else "bold", overflow="fold")
    yield note_lines(result.notes)
    yield from title_lines(result)
    if finding := finding_of(result):
        yield safe_line(finding, overflow="fold")
    yield _table_of_heads(result, width) if full and result.rows else _table_of_blocks(result, width)
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
    rows = {block.label: [each for each in result.rows if each.block == block.label] for block in result.blocks}
    shown = result.blocks[:_MOST_ROWS]
    columns = [
        Drawn("#", [safe_line(str(place)) for place in range(len(shown))], 12),
        Drawn("block", [safe_line(fold_name(each.label, 44)) for each in shown], 0, words=True),
        Drawn("heads", [safe_line(str(each.heads)) for each in shown], 5),
        Drawn("queries x keys", [safe_line(_sizes(each)) for each in shown], 7),
        Drawn("entropy", [safe_line(_range(rows[each.label], "entropy")) for each in shown], 1),
        Drawn("distance", [safe_line(_range(rows[each.label], "distance")) for each in shown], 2),
        Drawn("class %", [safe_line(_range(rows[each.label], "class_share", 100)) for each in shown], 3),
        Drawn("registers %", [safe_line(_range(rows[each.label], "register_share", 100)) for each in shown], 4),
        Drawn("remarks", [safe_line(_flagged(rows[each.label])) for each in shown], 6, words=True),
    ]
    table = draw(_with_values(columns), width)
    if len(shown) == len(result.blocks):
        return table
    more = safe_line(f"… {len(result.blocks) - len(shown):,} more blocks, --full shows every head", style="dim")
    return Group(table, more)


def _table_of_heads(result: Attention, width: int) -> RenderableType:
    rows = result.rows
    columns = [
        Drawn("block", [safe_line(fold_name(each.block, 44)) for each in rows], 0, words=True),
        Drawn("head", [safe_line(str(each.head)) for each in rows], 1),
        number_column("entropy", [each.entropy for each in rows], 2),
        number_column("distance", [each.distance for each in rows], 3),
        number_column("class", [each.class_share for each in rows], 4),
        number_column("registers", [each.register_share for each in rows], 5),
        number_column("largest", [each.top_share for each in rows], 6),
        Drawn("remarks", [safe_line("one token" if each.is_one_token else "") for each in rows], 7, words=True),
    ]
    return draw(_with_values(columns), width)


def _with_values(columns: Sequence[Drawn]) -> list[Drawn]:
    """Leave out columns without values; the last one, of remarks, stays."""
    return [each for each in columns[:-1] if any(cell.plain not in ("", "-") for cell in each.cells)] + [columns[-1]]


def _sizes(block: AttentionBlock) -> str:
    windows = f", {block.windows} windows" if block.windows > 1 else ""
    return f"{block.queries} x {block.keys}{windows}"


def _range(rows: Sequence[HeadRow], name: str, times: int = 1) -> str:
    """Return the least and the greatest value over heads."""
    values = [each * times for each in (getattr(row, name) for row in rows) if each is not None]
    if not values:
        return "-"
    low, high = number_text(min(values), 3), number_text(max(values), 3)
    return low if low == high else f"{low} to {high}"


def _flagged(rows: Sequence[HeadRow]) -> str:
    flagged = [str(each.head) for each in rows if each.is_one_token]
    return f"one token: head {', '.join(flagged)}" if flagged else ""
