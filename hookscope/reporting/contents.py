"""What a weights file holds, as a document."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hookscope.parameters import arg
from hookscope.reporting.columns import REMARK_WIDTH, Column, machine_columns, non_finite_text, number_text, statistics
from hookscope.reporting.document import Document, Listing, Part, Section, Table, Text
from hookscope.results.contents import CheckpointContents, StoredPart, StoredTensor
from hookscope.text import counted, percent_text, printable, scaled_text


def describe_contents(contents: CheckpointContents) -> Document:
    """Describe a weights file; a terminal lists tensors outside its weights only if they are unusual."""
    weights = [part for part in contents.parts if part.is_weights]
    facts = [f"{contents.kind} · {contents.producer}" if contents.producer else contents.kind]
    facts += [f"metadata {printable(key)}: {printable(value)}" for key, value in contents.metadata.items() if value]
    entries = [
        f"{printable(entry.key)}: {entry.kind}, {printable(entry.summary)}".removesuffix(", ")
        for entry in contents.entries
    ]
    parts: list[Part] = [
        Listing(title=f"{contents.name} · {scaled_text(contents.byte_count, 'B')}", lines=facts),
        Listing(title="In the file", lines=entries),
    ]
    for part in weights:
        total = [] if len(weights) == 1 else [_total([part])]
        title = f"Weights at {printable(part.key)}" if part.key else "Weights"
        parts += [Listing(title=title, lines=[*total, *_fits(part)]), _tensors(part)]
    parts += [_tensors(part) for part in contents.parts if not part.is_weights]
    return Document(
        title=contents.name,
        answer=[_total(contents.parts)],
        level="fail" if contents.nonfinite_count else "",
        sections=[Section("contents", "Contents", parts)],
    )


def _fits(part: StoredPart) -> list[str]:
    prefix = [f"prefix of every name: {printable(part.prefix)}"] if part.prefix else []
    if part.architectures:
        return [*prefix, *(f"fits {printable(network)}" for network in part.architectures)]
    near = f"; nearest: {printable(part.nearest)}" if part.nearest else ""
    remedy = f"other commands load it into your network with {arg('arch')} net.py:build"
    return [*prefix, f"fits no network known to hookscope{near}; {remedy}"]


def _tensors(part: StoredPart) -> Part:
    tensors = part.tensors
    if not tensors:
        return Text(["No tensors."])
    differ = len({tensor.dtype for tensor in tensors}) > 1  # else the line of totals has it
    return Table(
        title="Tensors" if part.is_weights else "Other tensors",
        columns=[replace(column, rank=3) if column.key == "dtype" and differ else column for column in TENSORS],
        rows=tensors,
        levels=["fail" if _oddity(tensor) else "" for tensor in tensors],
        kept=[] if part.is_weights else [bool(_oddity(tensor)) for tensor in tensors],
        remark="" if part.is_weights else f"{printable(part.key) or 'beside these'}: {_total([part])}",
    )


def _value_text(value: float | None) -> str:
    return str(value) if isinstance(value, int) and abs(value) < 10**9 else number_text(value)


def _zeros_text(tensor: StoredTensor) -> str:
    count = math.prod(tensor.shape)
    return percent_text(tensor.zero_count / count if tensor.zero_count is not None and count else None)


def _remark(tensor: StoredTensor) -> str:
    tied = f"shares storage with {tensor.tied_to}" if tensor.tied_to else ""
    return "; ".join(filter(None, (_oddity(tensor), tied)))


def _oddity(tensor: StoredTensor) -> str:
    return "not counted" if tensor.nan_count is None else non_finite_text(tensor)


def _total(parts: Sequence[StoredPart]) -> str:
    tensors = [(part.key, tensor) for part in parts for tensor in part.tensors]
    names = {_full(where, tensor.key) for where, tensor in tensors}
    storages: dict[str, int] = {}
    for where, tensor in tensors:  # a storage is as large as its largest tensor
        tied = _full(where, tensor.tied_to) if _full(where, tensor.tied_to) in names else tensor.tied_to
        owner = tied if tensor.tied_to else _full(where, tensor.key)
        storages[owner] = max(storages.get(owner, 0), tensor.byte_count)
    dtypes = sorted({tensor.dtype for _, tensor in tensors})
    uncounted = sum(tensor.nan_count is None for _, tensor in tensors)
    bad = sum(part.nonfinite_count for part in parts)
    finite = [f"NaN or Inf: {counted(bad, 'value')}"] * bool(bad)
    finite += [f"values of {counted(uncounted, 'tensor')} not counted"] * bool(uncounted)
    size = scaled_text(sum(storages.values()), "B")
    facts = (counted(len(tensors), "tensor"), size, ", ".join(dtypes))
    return " · ".join((*facts, "; ".join(finite) or "all values are finite"))


def _full(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


TENSORS = (
    Column("key", "tensor", "name of the tensor", 0, words=True),
    *statistics({"shape": 1}),
    Column("dtype", "dtype", "dtype of the tensor", 10, words=True),
    Column("byte_count", "size", "bytes of the tensor", 11, partial(scaled_text, unit="B")),
    *(replace(column, text=_value_text) for column in statistics({"mean": 12, "std": 6, "min": 4, "max": 5})),
    *machine_columns("zero_count", "nan_count", "inf_count", "tied_to"),
    Column("", "zeros", "share of exact zeros", 7, shown=_zeros_text),
    Column("", "remarks", "what is unusual", 2, shown=_remark, words=True, max_width=REMARK_WIDTH, style="cyan"),
)
