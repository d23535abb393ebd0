"""What modules cost, as columns and lines for people, and the part that takes most of the time in a sentence."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from hookscope.reporting.columns import Column
from hookscope.results.activations import LayerRow
from hookscope.results.cost import CostSums, ModuleCost, NetworkCost, ReceptiveField
from hookscope.results.costs_of_rows import dearest_part
from hookscope.text import counted, printable, scaled_text, shape_text, some_of, three_digits

_FEW = 6  # operations that a line lists


def seconds_text(seconds: float) -> str:
    """Return three digits: "1.24 s", "35.1 ms", "0.42 ms"; below 0.005 ms two, "3.1 µs"."""
    if seconds >= 0.9995:
        return f"{three_digits(seconds)} s"
    return f"{seconds * 1e6:.1f} µs" if 0 < seconds < 5e-6 else f"{three_digits(seconds * 1000)} ms"


def field_text(field: ReceptiveField | None) -> str:
    """Return size and stride of a receptive field: "435x435 /32", "≥851x851 /32" for a lower bound."""
    if field is None:
        return "-"
    size = "x".join(f"{side:.4g}" for side in field.size)
    strides = dict.fromkeys(field.stride) if len({*field.stride}) == 1 else field.stride
    return f"{'≥' * field.at_least}{size} /{'x'.join(f'{stride:.4g}' for stride in strides)}"


def trainable_text(sums: CostSums) -> str:
    """Return whether parameters are trainable: "yes", "no", "in part"; "" without any."""
    if not sums.parameter_count:
        return ""
    if sums.trainable_count == sums.parameter_count:
        return "yes"
    return "in part" if sums.trainable_count else "no"


_bytes = partial(scaled_text, unit="B")


def _cells(name: str) -> Callable[[ModuleCost], str | None]:
    part = Column("", value=lambda seen: "x".join(f"{number:g}" for number in getattr(seen, name)))
    return part.on(attrgetter("receptive_field")).read


def _total(key: str, title: str, meaning: str, rank: int, text: Callable[[float], str] | None = None) -> Column:
    return Column(key, title, meaning, rank, text, attrgetter(f"total.{key}"))


_FIELD = Column("receptive_field", "rec. field", "receptive field /stride, in pixels", 6, usual="-")
COSTS = (
    *(Column(f"{of}_parameter_count", value=attrgetter(f"{of}.parameter_count")) for of in ("total", "own")),
    replace(
        _total("trainable_count", "trainable", "whether they require a gradient", 8),
        shown=lambda cost: trainable_text(cost.total),
        usual="yes",
    ),
    _total("parameter_bytes", "param. bytes", "bytes of its parameters", 9, _bytes),
    Column("own_parameter_bytes", value=attrgetter("own.parameter_bytes")),
    _total("multiply_adds", "mult-adds", "multiply-adds, all calls", 1, scaled_text),
    Column("own_multiply_adds", value=attrgetter("own.multiply_adds")),
    Column("output_bytes", "out bytes", "bytes of its output, all calls", 7, _bytes),
    _total("saved_bytes", "saved", "bytes saved for the backward pass", 5, _bytes),
    Column("own_saved_bytes", value=attrgetter("own.saved_bytes")),
    replace(_FIELD, value=_cells("size"), shown=lambda cost: field_text(cost.receptive_field)),
    Column("receptive_field_stride", value=_cells("stride")),
    Column("receptive_field_centre", value=_cells("centre")),
    Column("at_least").on(attrgetter("receptive_field"), key="receptive_field_at_least"),
    Column("seconds", "time", "of a pass on the machine of the run, all calls", 2, seconds_text, usual="-"),
)
"""Costs of a module with its submodules; rows are `ModuleCost`."""
_FIELD_WORDS = "7x7 /2 means that a value depends on 7x7 pixels of the input, and the next value on those 2 further"
COST_LEGENDS = {_FIELD.title: f"{_FIELD.title}: {_FIELD_WORDS}"}


def cost_lines(cost: NetworkCost) -> list[str]:
    """Return lines on the whole network: totals, how they add up, how times were taken, what is missing."""
    whole = cost.whole
    passes = f"median of {cost.pass_count} passes"
    threads = f", {counted(cost.thread_count, 'thread')}" if cost.device == "cpu" else ""
    parts = [*_sums_words(whole.total), f"{scaled_text(whole.output_bytes, 'B')} of output"]
    if whole.seconds is not None:
        parts.append(f"{seconds_text(whole.seconds)} on this machine ({cost.device}{threads}, {passes})")
    lines = [f"A pass of {_input_words(cost)}: {' · '.join(parts)}"]
    if cost.outside != CostSums():
        split = (("leaf modules", cost.leaves), ("other modules", cost.outside))
        lines.append("; ".join(f"{where}: {', '.join(_sums_words(sums))}" for where, sums in split))
    if whole.seconds is not None:
        lines.append(
            "times do not add up: a module's time includes its children's, and the overhead of Python and timing"
        )
    if cost.uncounted:
        named = [
            f"{printable(uncounted.name, 60)} ({counted(uncounted.call_count, 'call')})" for uncounted in cost.uncounted
        ]
        lines.append(f"not counted, as its multiply-adds are not known: {some_of(named, _FEW)}")
    return lines + [f"note: {note}" for note in cost.notes]


def cost_sentences(cost: NetworkCost, rows: Sequence[LayerRow]) -> Iterator[str]:
    """Yield what a pass costs, and with times the part that takes most of them, with its dead channels."""
    time = "" if cost.whole.seconds is None else f" and {seconds_text(cost.whole.seconds)} on this machine"
    yield f"A pass of {_input_words(cost)} takes {scaled_text(cost.whole.total.multiply_adds)} multiply-adds{time}."
    if part := dearest_part(cost, rows):
        yield f"{part[0].upper()}{part[1:]}."


def _input_words(cost: NetworkCost) -> str:
    return " and ".join(map(shape_text, cost.input_shapes)) or "the network"


def _sums_words(sums: CostSums) -> list[str]:
    trainable = "" if sums.trainable_count == sums.parameter_count else f", {sums.trainable_count:,} trainable"
    return [
        f"{scaled_text(sums.multiply_adds)} multiply-adds",
        f"{counted(sums.parameter_count, 'parameter')} ({scaled_text(sums.parameter_bytes, 'B')}{trainable})",
        f"{scaled_text(sums.saved_bytes, 'B')} saved for backward",
    ]
