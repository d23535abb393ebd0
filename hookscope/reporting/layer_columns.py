"""The columns of a run's rows: outputs of layers, gradients, parameters."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

from hookscope.reporting.columns import (
    REMARK_WIDTH,
    Column,
    integer_text,
    machine_columns,
    non_finite_text,
    quantile_text,
    sparkline,
    statistics,
    token_norms_text,
)
from hookscope.reporting.cost_text import COSTS
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.costs_of_rows import rows_with_costs
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, InputGradients, ParameterRow
from hookscope.results.inputs import InputRecord
from hookscope.results.network import ModuleRow
from hookscope.results.statistics import QUANTILE_NAMES, TensorStatistics
from hookscope.results.token_norms import HighToken
from hookscope.text import shape_text

HIST, TOKENS = "hist", "token L2"
_MOST_KINDS = 3

_STATISTICS = attrgetter("statistics")
_measured = partial(statistics, of="statistics")
_INDEX = Column("index", "#", "position in forward order", 12, str)
_LABEL = Column("label", "layer", "layer, with its call and its output where there are several", 0, words=True)
KIND = Column("kind", "type", "class of the module, or name of the operation", 10, words=True, fold=18)


def _median_text(row: LayerRow) -> str:
    stats = row.activation
    return quantile_text(stats.quantiles.q50 if stats.quantiles else None, stats.element_count)


_QUANTILES = tuple(Column(key).on(attrgetter("statistics.quantiles")) for key in QUANTILE_NAMES)
_WITH_MEDIAN = tuple(
    replace(column, title="median", meaning="half of the values are below it", rank=18, shown=_median_text)
    if column.key == "q50"
    else column
    for column in _QUANTILES
)


def _if_finite(column: Column) -> Column:
    """Show "-" where some values are NaN or Inf: a number of the finite values alone would mislead."""

    def shown(row: GradientRow | ParameterRow) -> str:
        return "-" if row.gradient.nan_count or row.gradient.inf_count else column.cell(row)

    return replace(column, shown=shown)


_RANKS = {"mean_abs": 2, "max_abs": 3, "l2": 4, "mean": 18, "std": 19, "min": 0, "max": 0}
GRADIENT = (
    *_measured({"shape": 5, "dtype": 17, "element_count": 0}),
    *map(_if_finite, _measured(_RANKS, mean_abs="mean |g|", max_abs="max |g|")),
    *_measured({"zero_fraction": 7, "nan_count": 14, "inf_count": 15}),
)
"""Statistics of a gradient, of an output or a parameter."""


def layer_columns(rows: Sequence[LayerRow] = ()) -> tuple[Column, ...]:
    """Return the columns of outputs; norms of tokens come before others where a token of `rows` stands out."""
    stands_out = any(row.tokens is not None and row.tokens.stands_out for row in rows)
    tokens = attrgetter("tokens")
    return (
        _INDEX,
        _LABEL,
        *machine_columns("layer", "call", "slot"),
        KIND,
        Column("shape", "shape", "shape of the output", 6, str, _shape),
        *_measured({"dtype": 17}),
        Column("parameter_count", "parameters", "elements in its own parameters", 21, integer_text),
        *_measured({"element_count": 0, "mean": 1, "std": 2, "min": 3}),
        *_WITH_MEDIAN,
        *_measured({"max": 4, "mean_abs": 19, "l2": 20}),
        Column(
            "",
            HIST,
            "1st to 99th percentile, heights as square roots",
            16,
            sparkline,
            attrgetter("activation.distribution"),
            usual="-",
        ),
        *_measured({"zero_fraction": 5}),
        *_measured({"channel_axis": 0, "channel_count": 0}),
        _DEAD.on(_STATISTICS),
        *_measured({"dead_channel_fraction": 0}),
        Column("median").on(tokens, key="token_norm_median"),
        Column(
            "max", TOKENS, "median and greatest L2 norm of the tokens", 7 if stands_out else 15, shown=token_norms_text
        ).on(tokens, key="token_norm_max", usual="-"),
        Column("high_count").on(tokens, key="high_norm_tokens"),
        Column("massive_count").on(tokens, key="massive_activations"),
        *_measured({"nan_count": 14, "inf_count": 15}),
        *_measured({"unmeasured": 0}),
        *machine_columns("aliases", "duplicate_of", "duplicates", "source", "inputs"),
        remarks("flags", "what is unusual", _flag_words, key="flags", style="cyan"),
    )


def layer_table_of(inspection: Activations | Gradients) -> tuple[Sequence[Column], Sequence[Any]]:
    """Return the columns of outputs and their rows; with costs, which stand before the last column, rows are pairs."""
    rows, columns = inspection.rows, layer_columns(inspection.rows)
    cost = inspection.cost if isinstance(inspection, Activations) else None
    if cost is None:
        return columns, rows
    return with_costs(columns, COSTS), rows_with_costs(rows, cost)


def with_costs(columns: Sequence[Column], costs: Sequence[Column], at: int = -1) -> list[Column]:
    """Return the columns of pairs of a row and its cost or None; columns of costs stand before column `at`."""
    adapted = [column.on(itemgetter(0)) for column in columns]
    return [*adapted[:at], *(column.on(itemgetter(1), blank="") for column in costs), *adapted[at:]]


def gradient_columns(inspection: Gradients) -> tuple[Column, ...]:
    """Return the columns of gradients of outputs and inputs."""
    return (
        _INDEX,
        Column("backward_index"),
        replace(_LABEL, shown=lambda row: row.label + (" (input)" if row.role == "input" else "")),
        *machine_columns("layer", "call", "slot", "role"),
        KIND,
        *machine_columns("status"),
        *GRADIENT,
        *_QUANTILES,
        *_measured({"unmeasured": 0}),
        *machine_columns("remark", "aliases", "duplicate_of", "duplicates", "source"),
        remarks("remarks", "what is unusual", partial(_gradient_words, inspection)),
    )


def parameter_columns(inspection: Gradients) -> tuple[Column, ...]:
    """Return the columns of gradients of parameters."""
    return (
        replace(_INDEX, meaning="position among the parameters"),
        Column("name", "parameter", "name of the parameter", 0, words=True),
        replace(KIND, meaning="class of the module that owns it", rank=13),
        *machine_columns("trainable", "status"),
        *GRADIENT,
        Column("weight_l2", "‖w‖", "L2 norm of the parameter", 6),
        _if_finite(Column("ratio", "‖g‖/‖w‖", "L2 norm of the gradient over that of the parameter", 1)),
        *_QUANTILES,
        *_measured({"unmeasured": 0}),
        *machine_columns("aliases"),
        remarks("remarks", "what is unusual", partial(_gradient_words, inspection)),
    )


def input_columns(inputs: Sequence[InputGradients]) -> tuple[Column, ...]:
    """Return the columns of gradients of inputs alone; machines get the norm of each layer's output too."""
    labels = dict.fromkeys(label for gradients in inputs for label in gradients.rows_l2)
    return (
        Column("name", "input alone", "input", 0, words=True),
        Column("loss", "loss", "its loss", 1),
        Column("parameters_l2", "‖g‖ of parameters", "L2 norm of the gradients of all parameters", 2),
        *(Column(f"l2 {label}", value=methodcaller("get", label)).on(attrgetter("rows_l2")) for label in labels),
    )


def token_table_of(rows: Sequence[LayerRow], inputs: Sequence[InputRecord]) -> tuple[Sequence[Column], Sequence[Any]]:
    """Return the columns of tokens that stand out, and of each row those of high norm or with a massive activation."""

    def kind(pair: Any) -> str:
        return "high norm" if isinstance(pair[1], HighToken) else "massive activation"

    def value(pair: Any) -> float:
        return pair[1].norm if isinstance(pair[1], HighToken) else pair[1].value

    def number(key: str, meaning: str, text: Callable[[Any], str] | None = None) -> Column:
        return Column(key, key, meaning, 3, text, lambda pair: getattr(pair[1], key, None), usual="-")

    columns = (
        Column("label").on(itemgetter(0)),
        Column("what", "what", "why it stands out", 1, value=kind, words=True),
        Column(
            "input", "input", "input", 2, None, lambda pair: inputs[pair[1].input_index].name, words=True, varies=True
        ),
        Column("token").on(itemgetter(1)),
        Column("place", "token", "where it is", 0, value=lambda pair: pair[0].tokens.place(pair[1].token), words=True),
        number("channel", "channel of the value", str),
        Column("value", "value", "norm of the token, or the activation", 2, value=value),
        number("limit", "norm beyond which a token is high"),
        number("median", "median magnitude of the input's values"),
    )
    return columns, [(row, token) for row in rows if row.tokens for token in (*row.tokens.high, *row.tokens.massive)]


def _shape(row: LayerRow) -> str | None:
    return None if "not a tensor" in row.flags else shape_text(row.activation.shape)


def _dead_channels(stats: TensorStatistics) -> str:
    if stats.dead_channel_count is None or stats.channel_count is None:
        return "-"
    return f"{stats.dead_channel_count}/{stats.channel_count}"


_DEAD = Column("dead_channel_count", "dead", "channels that are 0 everywhere", 13, shown=_dead_channels, usual="-")


def remarks(
    title: str, meaning: str, words: Callable[[Any], str], key: str = "", style: str = "", rank: int = 11
) -> Column:
    """Return a column of remarks; in full, also which rows a row repeats or stands for."""

    def in_full(row: Any) -> str:
        more = _repeats_words(row) if isinstance(row, LayerRow | GradientRow) else []
        return "; ".join(filter(None, [words(row), *more]))

    column = Column(key, title, meaning, rank, shown=words, words=True, max_width=REMARK_WIDTH, style=style)
    return replace(column, in_full=in_full)


def _flag_words(row: LayerRow) -> str:
    stats = row.activation
    details = {
        "non-finite": f": {non_finite_text(stats)}",
        "dead channels": f" {_dead_channels(stats)}",
        "unmeasured": f": {stats.unmeasured}" if stats.unmeasured else "",
    }
    flags = [flag + details.get(flag, "") for flag in row.flags]
    return "; ".join([*([row.source] if row.source else ()), *flags])


def _gradient_words(inspection: Gradients, row: GradientRow | ParameterRow) -> str:
    stats = row.gradient
    words = [
        row.source if isinstance(row, GradientRow) else "",
        *(verdict.rule for verdict in verdicts_on(inspection, row)),
        row.status if row.status not in ("gradient", "unknown") else "",
        "frozen" if isinstance(row, ParameterRow) and not row.trainable else "",
        non_finite_text(stats),
        f"unmeasured: {stats.unmeasured}" if stats.unmeasured else "",
    ]
    words += [row.remark] if isinstance(row, GradientRow) else []
    return "; ".join(filter(None, words))


def kinds_text(rows: Sequence[LayerRow] | Sequence[ModuleRow]) -> str:
    """Return how many rows have each type: " (33 Conv2d, 16 MBConv)"; "" for many types."""
    counts = Counter(row.kind for row in rows)
    words = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
    return f" ({words})" if words and len(counts) <= _MOST_KINDS else ""


def verdicts_on(inspection: Gradients, row: GradientRow | ParameterRow) -> list[Finding]:
    """Return the verdicts on a row; verdicts on the whole network belong to no row, and inputs have none."""
    is_input = isinstance(row, GradientRow) and row.role == "input"
    return [] if is_input else [verdict for verdict in inspection.verdicts if row.label and row.label in verdict.places]


def _repeats_words(row: LayerRow | GradientRow) -> list[str]:
    words = [f"repeats {row.duplicate_of}"] if row.duplicate_of else []
    return [*words, f"also {', '.join(row.duplicates)}"] if row.duplicates else words
