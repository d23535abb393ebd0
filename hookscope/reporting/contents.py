"""What a weights file holds, as Rich renderables for people and as JSON for machines."""

import math
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hookscope.reporting.columns import (
    REMARK_WIDTH,
    Column,
    draw_table,
    machine_columns,
    number_text,
    percent_text,
    safe_line,
    statistics,
)
from hookscope.results.contents import CheckpointContents, StoredEntry, StoredPart, StoredTensor
from hookscope.text import counted

# What a screen has room for beside the tensors.
_MOST_ENTRIES = 20
_LONGEST_TEXT = 200


def contents_report(contents: CheckpointContents, *, width: int, full: bool = False) -> RenderableType:
    """Return what a weights file holds; of what is no set of weights, only tensors that are not finite are listed."""
    weights = [part for part in contents.parts if part.is_weights]
    shown: list[RenderableType] = [_facts(contents, weights)]
    if contents.entries:
        shown += [Text(), safe_line("In the file", style="bold"), _entries(contents.entries, full=full)]
    for part in weights:
        shown += [_about(part), Text()] if len(weights) > 1 else [Text()]
        shown.append(_tensors(part.tensors, width=width, full=full))
    for part in contents.parts:
        if part.is_weights:
            continue
        shown += [Text(), safe_line(f"{_cut(part.key) or 'beside these'}: {_total([part])}", style=_style(part))]
        if listed := [tensor for tensor in part.tensors if full or _oddity(tensor)]:
            shown.append(_tensors(listed, width=width, full=full))
    total = safe_line(_total(contents.parts), style=_style(contents) or "bold")
    return Group(*shown, *([Text()] * (len(contents.parts) > 1)), total)


def _facts(contents: CheckpointContents, weights: Sequence[StoredPart]) -> Table:
    facts = [
        ("file", f"{contents.name} · {bytes_text(contents.byte_count)}"),
        ("kind", f"{contents.kind} · {contents.producer}" if contents.producer else contents.kind),
    ]
    metadata = [(f"metadata {_cut(key)}", value) for key, value in contents.metadata.items()]
    if len(weights) != 1:
        return _grid([*facts, *metadata])
    [part] = weights
    return _grid([*facts, ("weights at", part.key), ("prefix", part.prefix), *metadata], part)


def _about(part: StoredPart) -> RenderableType:
    facts = [("weights at", part.key), ("holds", _total([part])), ("prefix", part.prefix)]
    return Group(Text(), _grid(facts, part))


def _grid(facts: Sequence[tuple[str, str]], part: StoredPart | None = None) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        if value:
            grid.add_row(safe_line(name, style="bold"), safe_line(_cut(value)))
    near = f"; nearest: {part.nearest}" if part is not None and part.nearest else ""
    unknown = (f"none known to hookscope{near}", "other commands load it into your network with --arch net.py:build")
    for position, text in enumerate(part.architectures or unknown if part else ()):
        grid.add_row(safe_line("" if position else "fits", style="bold"), safe_line(text))
    return grid


def _entries(entries: Sequence[StoredEntry], *, full: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    shown = entries if full else entries[:_MOST_ENTRIES]
    for entry in shown:
        kind = safe_line(entry.kind, style="cyan")
        grid.add_row(safe_line(f"  {_cut(entry.key)}"), kind, safe_line(_cut(entry.summary)))
    hidden = len(entries) - len(shown)
    return Group(grid, safe_line(f"  … {hidden} more entries, --full shows all", style="dim")) if hidden else grid


def _tensors(tensors: Sequence[StoredTensor], *, width: int, full: bool) -> RenderableType:
    if not tensors:
        return safe_line("No tensors.")
    styles = ["bold red" if _oddity(tensor) else "" for tensor in tensors]
    differ = len({tensor.dtype for tensor in tensors}) > 1  # else the last line has it
    columns = [replace(column, rank=3) if column.key == "dtype" and differ else column for column in TENSORS]
    return draw_table(columns, tensors, width, styles, full=full)


def _value_text(value: float | None) -> str:
    return str(value) if isinstance(value, int) and abs(value) < 10**9 else number_text(value)


def _zeros_text(tensor: StoredTensor) -> str:
    count = math.prod(tensor.shape)
    return percent_text(tensor.zero_count / count if tensor.zero_count is not None and count else None)


def _remark(tensor: StoredTensor) -> str:
    tied = f"shares storage with {tensor.tied_to}" if tensor.tied_to else ""
    return "; ".join(filter(None, (_oddity(tensor), tied)))


def _oddity(tensor: StoredTensor) -> str:
    if tensor.nan_count is None or tensor.inf_count is None:
        return "not counted"
    counts = ((tensor.nan_count, "NaN"), (tensor.inf_count, "Inf"))
    return ", ".join(f"{count} {kind}" for count, kind in counts if count)


def _total(parts: Sequence[StoredPart]) -> str:
    tensors = [(part.key, tensor) for part in parts for tensor in part.tensors]
    names = {_full(where, tensor.key) for where, tensor in tensors}
    storages: dict[str, int] = {}
    for where, tensor in tensors:  # of those that share storage, the first need not be the largest
        tied = _full(where, tensor.tied_to) if _full(where, tensor.tied_to) in names else tensor.tied_to
        owner = tied if tensor.tied_to else _full(where, tensor.key)
        storages[owner] = max(storages.get(owner, 0), tensor.byte_count)
    dtypes = sorted({tensor.dtype for _, tensor in tensors})
    uncounted = sum(tensor.nan_count is None for _, tensor in tensors)
    bad = sum(part.nonfinite_count for part in parts)
    finite = [f"NaN or Inf: {counted(bad, 'value')}"] * bool(bad)
    finite += [f"values of {counted(uncounted, 'tensor')} not counted"] * bool(uncounted)
    size = bytes_text(sum(storages.values()))
    facts = (counted(len(tensors), "tensor"), size, ", ".join(dtypes))
    return " · ".join((*facts, "; ".join(finite) or "all values are finite"))


def _full(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _style(of: StoredPart | CheckpointContents) -> str:
    return "bold red" if of.nonfinite_count else ""


def bytes_text(count: int) -> str:
    """Return a number of bytes for people, in powers of 1024: "97.8 MiB"."""
    power = min(max(0, count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:,.1f} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if power else f"{count:,} bytes"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


TENSORS = (
    Column("key", "tensor", "name of the tensor", 0, words=True),
    *statistics({"shape": 1}),
    Column("dtype", "dtype", "dtype of the tensor", 10, words=True),
    Column("byte_count", "size", "bytes of the tensor", 11, bytes_text),
    *(replace(column, text=_value_text) for column in statistics({"mean": 12, "std": 6, "min": 4, "max": 5})),
    *machine_columns("zero_count", "nan_count", "inf_count", "tied_to"),
    Column("", "zeros", "share of exact zeros", 7, shown=_zeros_text),
    Column("", "remarks", "what is unusual", 2, shown=_remark, words=True, max_width=REMARK_WIDTH, style="cyan"),
)
