"""What a weights file holds, as Rich renderables for people and as JSON for machines."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hookscope.render.columns import REMARK_WIDTH, Column, counted, draw_table, fitted, kept_positions
from hookscope.results import CheckpointContents, StoredEntry, StoredTensor
from hookscope.text import safe_text, shape_text, strict_json

SCHEMA_VERSION = 1

# Our choices: what a screen has room for beside the tensors.
_MOST_ENTRIES = 20
_LONGEST_TEXT = 200


def contents_to_json(contents: CheckpointContents) -> str:
    """Return all of `contents` as strict JSON, one tensor a line. Names are those of `CheckpointContents`."""
    document = asdict(contents) | {"nonfinite_count": contents.nonfinite_count}
    return strict_json({"schema_version": SCHEMA_VERSION} | document)


def contents_report(contents: CheckpointContents, *, width: int, full: bool = False) -> RenderableType:
    """Return what a weights file holds: what it is, what lies beside the weights, every tensor, and a summary.

    Args:
        contents: What to show.
        width: Columns of the terminal.
        full: Show every tensor of a long list instead of folding it, and every entry.
    """
    parts: list[RenderableType] = [_facts(contents)]
    if contents.entries:
        parts += [Text("\nIn the file", style="bold"), _entries(contents.entries, full=full)]
    parts += [Text(), _tensors(contents.tensors, width=width, full=full), _summary(contents)]
    return Group(*parts)


def _facts(contents: CheckpointContents) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    facts = {
        "file": f"{contents.name} · {bytes_text(contents.byte_count)}",
        "kind": f"{contents.kind} · {contents.producer}" if contents.producer else contents.kind,
        "weights at": contents.weights_key,
        "prefix": contents.prefix,
        **{f"metadata {_cut(key)}": value for key, value in contents.metadata.items()},
    }
    for name, value in facts.items():
        if value:
            grid.add_row(Text(safe_text(name), style="bold"), Text(_cut(value)))
    fitting = contents.architectures or ("none that hookscope knows",)
    for position, text in enumerate(fitting):
        grid.add_row(Text("" if position else "fits", style="bold"), Text(safe_text(text)))
    return grid


def _entries(entries: Sequence[StoredEntry], *, full: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    shown = entries if full else entries[:_MOST_ENTRIES]
    for entry in shown:
        grid.add_row(Text(f"  {_cut(entry.key)}"), Text(safe_text(entry.kind), style="cyan"), Text(_cut(entry.summary)))
    hidden = len(entries) - len(shown)
    return Group(grid, Text(f"  … {hidden} more entries, --full shows all", style="dim")) if hidden else grid


def _tensors(tensors: Sequence[StoredTensor], *, width: int, full: bool) -> RenderableType:
    if not tensors:
        return Text("No tensors.")
    remarks = [_remark(tensor) for tensor in tensors]
    columns = [
        Column("tensor", [Text(safe_text(tensor.key)) for tensor in tensors], 0, words=True),
        Column("shape", [Text(shape_text(tensor.shape)) for tensor in tensors], 1),
        Column("dtype", [Text(safe_text(tensor.dtype)) for tensor in tensors], 3, words=True),
        Column("size", [Text(bytes_text(tensor.byte_count)) for tensor in tensors], 2),
        Column("remarks", remarks, 4, words=True, max_width=REMARK_WIDTH),
    ]
    styles = ["bold red" if _oddity(tensor) else "" for tensor in tensors]
    kept = kept_positions([bool(style) for style in styles], full=full)
    return draw_table(fitted(columns, remarks, width), styles, kept, width)


def _remark(tensor: StoredTensor) -> Text:
    tied = f"shares storage with {safe_text(tensor.tied_to)}" if tensor.tied_to else ""
    return Text("; ".join(filter(None, (_oddity(tensor), tied))), style="bold red" if _oddity(tensor) else "cyan")


def _oddity(tensor: StoredTensor) -> str:
    """Return what is wrong with a tensor's values, in words; "" for nothing."""
    if tensor.nan_count is None or tensor.inf_count is None:
        return "not counted"
    counts = ((tensor.nan_count, "NaN"), (tensor.inf_count, "Inf"))
    return ", ".join(f"{count} {what}" for count, what in counts if count)


def _summary(contents: CheckpointContents) -> Text:
    tensors = contents.tensors
    storages: dict[str, int] = {}
    for tensor in tensors:  # of those that share storage, the first need not be the largest
        owner = tensor.tied_to or tensor.key
        storages[owner] = max(storages.get(owner, 0), tensor.byte_count)
    total = sum(storages.values())
    dtypes = sorted({tensor.dtype for tensor in tensors})
    uncounted = sum(tensor.nan_count is None for tensor in tensors)
    bad = contents.nonfinite_count
    finite = [f"NaN or Inf: {counted(bad, 'value')}"] * bool(bad)
    finite += [f"values of {counted(uncounted, 'tensor')} not counted"] * bool(uncounted)
    parts = (counted(len(tensors), "tensor"), bytes_text(total), ", ".join(map(safe_text, dtypes)))
    return Text(" · ".join((*parts, "; ".join(finite) or "all values are finite")), style="bold red" if bad else "bold")


def bytes_text(count: int) -> str:
    """Return a number of bytes for people, in powers of 1024: "97.8 MiB"."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{count:,} bytes" if units[0] == "bytes" else f"{size:,.1f} {units[0]}"


def _cut(text: str) -> str:
    return safe_text(text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…")
