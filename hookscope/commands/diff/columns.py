"""The columns of two networks that differ: rows of layers, tensors of weights."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from hookscope.reporting.columns import Column, machine_columns, number_text
from hookscope.results.differences import DifferenceRow, Differences, NonFinite, WeightDifference
from hookscope.text import counted, percent_text, shape_text

MATCHES = {"prefix": "without prefix", "order": "by order", "map": "by --map"}
"""How a partner was found, unless by an equal name."""

_short = partial(number_text, digits=3)


def nonfinite_text(nonfinite: NonFinite, later: Sequence[NonFinite | None] = ()) -> str:
    """Return which side is NaN or infinite where the other is not: "B is NaN (3 of 10 values)".

    "from there on" is added for a side if this holds in all `later` rows too.
    """
    parts = []
    for letter, nan, inf in (("A", "nan_a", "inf_a"), ("B", "nan_b", "inf_b")):
        kinds = {field: name for field, name in ((nan, "NaN"), (inf, "infinite")) if getattr(nonfinite, field)}
        if kinds:
            stays = later and all(other and any(getattr(other, field) for field in kinds) for other in later)
            count = sum(getattr(nonfinite, field) for field in kinds)
            share = f"({count:,} of {counted(nonfinite.element_count, 'value')})"
            parts.append(f"{letter} is {' or '.join(kinds.values())}{' from there on' if stays else ''} {share}")
    return " and ".join(parts)


def _nonfinite_remarks(row: DifferenceRow | WeightDifference) -> list[str]:
    if row.measures is None or row.nonfinite is None:
        return []
    left_out = "; measured without them" if row.measures.max_abs is not None else ""
    return [f"{nonfinite_text(row.nonfinite)}{left_out}"]


def _remarks(usual: tuple[str, str], row: DifferenceRow) -> str:
    parts: list[str] = [row.origin] if row.origin in ("begins", "passed on") else []
    if row.label_b != row.label:
        parts.append(f"B: {row.label_b}")
    if row.matched in MATCHES:
        parts.append(MATCHES[row.matched])
    if row.dtype != row.dtype_b and (row.dtype, row.dtype_b) != usual:
        parts.append(f"{row.dtype} / {row.dtype_b}")
    if row.arguments:
        parts.append(row.arguments)
    if row.channel is not None:
        parts.append(f"channel {row.channel.channel}: {percent_text(row.channel.fraction, 0)}")
    return "; ".join([*parts, *_nonfinite_remarks(row), *([row.note] if row.note else [])])


def _weight_remarks(row: WeightDifference) -> str:
    parts = [f"B: {row.name_b}"] if row.name_b != row.name and row.matched != "prefix" else []
    parts += [MATCHES[row.matched]] if row.matched in MATCHES else []
    parts += ["cannot be compared"] if row.measures is None else _nonfinite_remarks(row)
    return "; ".join(parts)


def _columns(key: str, title: str, rank: int, text: Callable[[Any], str] = str, *, words: bool = False) -> list[Column]:
    """Return A's column, whose text adds B's value if it differs, and B's column for machines."""

    def read(name: str) -> Callable[[Any], Any]:
        return lambda row: None if (value := getattr(row, name)) is None else text(value)

    def shown(row: Any) -> str:
        return " / ".join(dict.fromkeys((read(key)(row), read(f"{key}_b")(row))))

    meaning = f"{title} in A, and in B where that differs"
    return [
        Column(key, title, meaning, rank, None, read(key), shown, words=words),
        Column(f"{key}_b", value=read(f"{key}_b")),
    ]


def _input_text(relative_l2: float) -> str:
    return "differs" if relative_l2 == math.inf else _short(relative_l2)  # in shape, or from all zeros


def _decibels(value: float) -> str:
    return "equal" if value == math.inf else f"{value:.1f}" if math.isfinite(value) else number_text(value)


_MEASURES = {
    column.key: column
    for column in (
        Column("relative_l2", "rel. L2", "L2 norm of A-B over that of A", text=_short),
        Column("cosine", "cosine", "cosine of the angle between A and B", text=lambda value: f"{value:.6f}"),
        Column("sqnr_db", "SQNR dB", "signal to quantisation noise, in decibels", text=_decibels),
        Column("max_abs", "max |Δ|", "largest magnitude of A-B", text=_short),
        Column("max_at", "at", "place of max |Δ|", text=lambda at: ",".join(map(str, at)), beside="max |Δ|"),
        Column("ulps", "ulps", "max |Δ| in units of the last place of A's value there", text=_short),
        *machine_columns("unequal_fraction", "value_count"),
        *(Column(key).on(attrgetter("nonfinite")) for key in ("nan_a", "inf_a", "nan_b", "inf_b")),
    )
}


def _measures(ranks: dict[str, int], part: str = "measures", suffix: str = "", **titles: str) -> list[Column]:
    """Return columns of measures, with their ranks; `part` is the attribute of a row that holds the measures."""
    read = attrgetter(part)
    titles = {key: _MEASURES[key].title for key, rank in ranks.items() if rank} | titles
    return [
        _MEASURES[key].on(read, key=f"{key}{suffix}", rank=rank, title=titles.get(key, ""), usual="-")
        for key, rank in ranks.items()
    ]


_MORE = dict.fromkeys(("unequal_fraction", "value_count", "nan_a", "inf_a", "nan_b", "inf_b"), 0)


def difference_columns(result: Differences) -> tuple[Column, ...]:
    """Return the columns of `result.rows`."""
    usual = result.a.dtype, result.b.dtype
    return (
        Column("index", "#", "position in A's order of execution", 12, str),
        Column("layer"),
        Column("label", "layer", "output of a layer of A", 0, words=True),
        Column("label_b"),
        *_columns("kind", "type", 13, words=True),
        Column("matched"),
        *_columns("shape", "shape", 14, shape_text),
        *machine_columns("dtype", "dtype_b", "origin"),
        *_measures({"relative_l2": 2}),
        Column("input_relative_l2", "input", "rel. L2 of the layer's inputs, the largest", 5, _input_text, usual="-"),
        Column("arriving_relative_l2"),
        *_measures({"relative_l2": 3}, "added", "_added", relative_l2="added"),
        Column("error", "error A", "rel. L2 of A and the reference", 4, _short, usual="-"),
        Column("error_b", "error B", "rel. L2 of B and the reference", 4, _short, usual="-"),
        *_measures({"cosine": 15, "sqnr_db": 7, "max_abs": 8, "max_at": 16, "ulps": 11} | _MORE),
        *_measures(dict.fromkeys(("cosine", "sqnr_db", "max_abs", "max_at", "ulps"), 0) | _MORE, "added", "_added"),
        Column("channel").on(attrgetter("channel")),
        Column("fraction").on(attrgetter("channel"), key="channel_fraction"),
        *machine_columns("limit", "source", "arguments", "note"),
        Column("", "remarks", "where it comes from, and its partner", 6, shown=partial(_remarks, usual), words=True),
    )


WEIGHTS = (
    Column("name", "tensor", "name in A", 0, words=True),
    *machine_columns("name_b", "matched"),
    *_columns("shape", "shape", 6, shape_text),
    *_columns("dtype", "dtype", 7),
    *_measures({"relative_l2": 1}, relative_l2="‖Δ‖/‖w‖"),
    Column("sign_flips", "sign flips", "share of opposite signs", 3, partial(percent_text, decimals=2), usual="0%"),
    *_measures({"max_abs": 2, "max_at": 0, "ulps": 5, "cosine": 8, "sqnr_db": 0} | _MORE),
    Column("note", value=lambda row: getattr(row, "note", None)),
    Column("", "remarks", "its partner, and why it is not compared", 4, shown=_weight_remarks, words=True),
)


def with_unmatched(result: Differences) -> list[Any]:
    """Return the pairs, then the unmatched rows or tensors as rows without values, whose `note` has the reason."""
    of_weights = result.way == "weights"
    fields = dict.fromkeys((WeightDifference if of_weights else DifferenceRow).__dataclass_fields__)
    name, kind = ("name", "dtype") if of_weights else ("label", "kind")
    unpaired = []
    for row in result.unmatched:
        side = "" if row.side == "A" else "_b"
        columns = {f"{name}{side}": row.label, f"{kind}{side}": row.kind, f"shape{side}": row.shape, "note": row.reason}
        unpaired.append(SimpleNamespace(**fields | columns))
    return [*(result.weights if of_weights else result.rows), *unpaired]
