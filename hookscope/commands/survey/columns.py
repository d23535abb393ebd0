"""The columns of a survey: layers, channels, embeddings."""

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from pathlib import PurePath

from hookscope.reporting.columns import Column, integer_text, machine_columns, number_text, statistics
from hookscope.results.headroom import FLOAT16
from hookscope.results.survey import Survey, SurveyChannel, SurveyRow
from hookscope.text import counted, figure, percent_text

TIGHT = 10.0
"""Outputs with a smaller factor of headroom are close to the limit (our choice)."""
_MOST_TOPS = 3  # inputs listed for a channel


def remarks_of(row: SurveyRow) -> str:
    """Return what deserves a look, in a few words; "" for nothing."""
    activation = row.activation
    words = ["NaN or Inf"] if activation.nan_count or activation.inf_count else []
    words += [f"above {FLOAT16}"] if row.float16 and row.float16.overflowing else []
    words += ["massive"] if row.massive else []
    words += [counted(len(row.duplicate_channels), "duplicate")] if row.duplicate_channels else []
    words += [flag for flag in row.flags if flag in ("all zero", "constant", "shape varies", "unmeasured")]
    return ", ".join(words)


def _dead(row: SurveyRow) -> int | None:
    return len(row.dead_channels) if row.channels else None


def _firing(row: SurveyRow) -> float | None:
    zeros = row.activation.zero_fraction
    return None if zeros is None else 1 - zeros


def _followed(channel: SurveyChannel) -> str:
    return "" if channel.duplicate_of is None else f"{channel.duplicate_of} (r {channel.correlation:.3f})"


def _exciting(channel: SurveyChannel) -> str:
    """Return the names of files with their folder, as every folder may have a file of the same name."""
    named = ((PurePath(top.input).parts[-2:], top.value) for top in channel.top[:_MOST_TOPS])
    return "; ".join(f"{'/'.join(name)} {number_text(value, 3)}" for name, value in named)


LAYERS = (
    Column("label", "layer", "layer, with the call and the output if it has several", 0, words=True),
    Column("kind", "kind", "class of the module", 11, words=True, fold=18),
    Column("", "channels", "channels of the output", 8, integer_text, lambda row: len(row.channels) or None),
    Column("", "dead", "channels that are 0 on every input", 1, integer_text, _dead),
    Column("", "fires", "share of values that are not 0", 3, percent_text, _firing),
    *statistics({"mean": 6, "std": 5, "min": 9, "max": 4}, "activation"),
    Column("factor", "to float16", "float16's limit over the largest", 7, lambda ratio: f"×{figure(ratio, 3)}").on(
        attrgetter("float16"), key=""
    ),
    Column("selectivity", "selectivity", "greatest of a channel", 10, lambda pair: number_text(pair[0]), usual="-"),
    Column("", "remarks", "what deserves a look", 2, value=remarks_of, words=True),
)

_CHANNEL = (
    Column("channel", "channel", "number of the channel", text=str),
    Column("firing_inputs", "fires on inputs", "share of inputs on which it is not 0 everywhere", text=percent_text),
    Column("firing_positions", "at positions", "share of values that are not 0", text=percent_text),
    *statistics({"mean": 1, "std": 1, "min": 1, "max": 1}),
    Column("nonfinite_count"),
    Column("best_class", "best class", "class on whose inputs its mean is greatest", words=True),
    Column("selectivity", "selectivity", "share of its variance between inputs that the class explains"),
    *machine_columns("duplicate_of", "correlation"),
    Column("", "follows", "channel that it almost copies, and their correlation", shown=_followed, words=True),
    Column("", "most excited by", "inputs with its greatest values", shown=_exciting, words=True),
    Column("is_dead"),
    Column("top_inputs", value=lambda channel: tuple(top.input for top in channel.top)),
    Column("top_values", value=lambda channel: tuple(top.value for top in channel.top)),
)
CHANNELS = (
    Column("layer", "layer", "layer, as in the table of layers", 0, value=lambda row: row[0].label, words=True),
    Column("kind", value=lambda row: row[0].kind),
    *(column.on(itemgetter(1)) for column in _CHANNEL),
)

EMBEDDINGS = machine_columns("name", "row_count", "used_count")


def channel_rows(result: Survey) -> Sequence[tuple[SurveyRow, SurveyChannel]]:
    """Return every channel with its row."""
    return [(row, channel) for row in result.rows for channel in row.channels]
