"""The columns of a run by its checkpoints: files, layers, tensors, outputs, verdicts."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from statistics import median

from hookscope.reporting.columns import Column, classes_text, machine_columns, number_text, statistics
from hookscope.results.history import History, HistoryFile, HistoryFinding, LayerPoint, WeightPoint, by_layer
from hookscope.text import counted, percent_text, shape_text

OF_OPTIMISERS = ("optimizer-reset", "optimizer-state")  # rules whose places are no layers or tensors

_MOST_COUNTERS = 2
_COUNTERS = attrgetter("counters")
_DEAD = Column("dead_fraction", "dead filters", "their share in the last file", 7, percent_text, usual="0%")
_DRIFT = "L2 norm of the change since the previous file, divided by the norm there"
_DRIFT_FROM_FIRST = _DRIFT.replace("previous", "first")


def file_columns(result: History) -> tuple[Column, ...]:
    """Return the columns of `result.files`."""
    points = [*by_layer(result).values()]
    counters = dict.fromkeys(name for file in result.files for name in file.counters)

    def of_layers(name: str, file: HistoryFile) -> list[float]:
        return [value for files in points if (value := getattr(files.get(file.index), name, None)) is not None]

    def norm(file: HistoryFile) -> float | None:
        norms = of_layers("norm", file)
        return math.hypot(*norms) if norms else None

    def median_drift(file: HistoryFile) -> float | None:
        drifts = of_layers("drift", file)
        return median(drifts) if drifts else None

    def few(rates: Sequence[float]) -> str:
        return ", ".join(number_text(rate, 3) for rate in [*dict.fromkeys(rates)][:2]) or "-"

    return (
        *machine_columns("index", "name"),
        Column("label", "file", "name of the file, without the folders that all share", 0, words=True),
        Column("status"),
        Column("counters", value=lambda file: tuple(f"{name}={count}" for name, count in file.counters.items())),
        *(
            Column("", name, f"`{name}` in the file", rank, _count, methodcaller("get", name)).on(_COUNTERS)
            for rank, name in enumerate([*counters][:_MOST_COUNTERS], 3)
        ),
        Column("norm", "‖w‖", "L2 norm of the parameters", 4, value=norm),
        Column("median_drift", "median ‖Δw‖/‖w‖", f"median over layers of the {_DRIFT}", 2, value=median_drift),
        Column("learning_rates", "lr", "learning rates of the optimiser state", 5, few, rates_of, usual="-"),
        Column("optimiser_steps", "steps", "steps in the optimiser state", 6, None, _steps, _first_steps, usual="-"),
        Column("best_class", "best class", "of the first input", 7, None, _classes, _best, words=True, max_width=30),
        *machine_columns("exit_code", "error", "sha256", "seconds"),
        Column("", "rules", "verdicts on the file", 1, shown=partial(_verdicts_text, result), words=True),
    )


def layer_columns(result: History) -> tuple[Column, ...]:
    """Return the columns of `layer_rows`."""

    def label_of_largest(row: LayerOverFiles) -> str | None:
        at = _largest(row)[1]
        return None if at is None else result.files[at].label

    return (
        Column("layer", "layer", "layer that owns parameters", 0, value=lambda row: row[0] or "(model)", words=True),
        Column("norm", "‖w‖ first", "L2 norm of its parameters in the first file", 6).on(_first, key=""),
        Column("norm", "‖w‖ last", "L2 norm of its parameters in the last file", 4).on(_last, key=""),
        Column("", "largest ‖Δw‖/‖w‖", f"largest {_DRIFT}", 2, value=lambda row: _largest(row)[0]),
        Column("", "in", "file with the largest change", 3, value=label_of_largest, words=True),
        Column("", "since first", _DRIFT_FROM_FIRST, 5, value=lambda row: _last(row).drift_from_first),
        _DEAD.on(_last, key=""),
        Column("", "remarks", "first verdict on the layer", 1, shown=partial(_first_verdict, result), words=True),
    )


def tensor_columns(result: History) -> tuple[Column, ...]:
    """Return the columns of `result.rows`."""

    def dead(row: WeightPoint) -> str:
        return "-" if row.dead_filter_count is None else f"{row.dead_filter_count:,} of {row.filter_count:,}"

    return (
        _file(result),
        *machine_columns("name", "layer", "role"),
        Column("shape", value=lambda row: shape_text(row.shape)),
        *machine_columns("dtype", "element_count"),
        Column("norm", "‖w‖", "L2 norm"),
        Column("drift", "‖Δw‖/‖w‖", _DRIFT),
        Column("drift_from_first", "since first", _DRIFT_FROM_FIRST),
        *statistics({"min": 1, "max": 1, "zero_fraction": 1, "nonfinite_count": 1}),
        Column("dead_filter_count", "dead filters", "output channels that are 0", shown=dead, usual="-"),
        *machine_columns("filter_count", "moved_from"),
    )


def output_columns(result: History) -> tuple[Column, ...]:
    """Return the columns of `result.activations`."""
    return (
        _file(result),
        *machine_columns("label", "kind"),
        *statistics({"mean": 1, "std": 1, "zero_fraction": 1, "dead_channel_fraction": 1, "nonfinite_count": 1}),
    )


def verdict_columns(result: History) -> tuple[Column, ...]:
    """Return the columns of pairs of a verdict and a place."""
    return (
        *(Column(key).on(lambda row: row[0]) for key in ("rule", "level")),
        Column("place", value=lambda row: row[1]),
        Column("first", value=lambda row: result.files[row[0].first].label),
        Column("before", value=lambda row: None if (at := row[0].before) is None else result.files[at].label),
        *(Column(key).on(lambda row: row[0]) for key in ("lasts", "message")),
    )


def _file(result: History) -> Column:
    return Column("file", "file", "name of the file", 0, value=lambda row: result.files[row.file].label, words=True)


LayerOverFiles = tuple[str, Mapping[int, LayerPoint]]
"""A layer's name, and its parameters by index of file."""


def verdicts_on(layer: str, result: History) -> list[HistoryFinding]:
    """Return the verdicts on a layer, or on a tensor of it."""
    return [
        verdict
        for verdict in result.verdicts
        if verdict.rule not in OF_OPTIMISERS
        and any(place and layer in (place, place.rpartition(".")[0]) for place in verdict.places)
    ]


def _first_verdict(result: History, row: LayerOverFiles) -> str:
    verdicts = verdicts_on(row[0], result)
    more = f" and {len(verdicts) - 1} more" if verdicts[1:] else ""
    return "".join(f"{verdict.rule} {result.files[verdict.first].label}{more}" for verdict in verdicts[:1])


def _first(row: LayerOverFiles) -> LayerPoint:
    return row[1][min(row[1])]


def _last(row: LayerOverFiles) -> LayerPoint:
    return row[1][max(row[1])]


def _largest(row: LayerOverFiles) -> tuple[float | None, int | None]:
    drifts = [(point.drift, at) for at, point in sorted(row[1].items()) if point.drift is not None]
    return max(drifts, key=lambda pair: pair[0], default=(None, None))


def _verdicts_text(result: History, file: HistoryFile) -> str:
    if file.status == "skipped":
        return "not read"
    if file.status == "unreadable":
        return "cannot be read"
    levels = [verdict.level for verdict in result.verdicts if file.index in verdict.files]
    fails, warns = levels.count("fail"), levels.count("warn")
    words = [counted(fails, "failure")] * bool(fails) + [counted(warns, "warning")] * bool(warns)
    words += ["not checked to the end"] * bool(file.error)
    return ", ".join(words) or "-"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if math.isfinite(value) else f"{value}"


def rates_of(file: HistoryFile) -> tuple[float, ...]:
    """Return the learning rates of all optimisers in a file."""
    return tuple(rate for point in file.optimisers for rate in point.rates)


def _steps(file: HistoryFile) -> tuple[str, ...]:
    return tuple(f"{point.key}={point.steps}" for point in file.optimisers)


def _first_steps(file: HistoryFile) -> str:
    return _count(next((point.steps for point in file.optimisers), None))


def _classes(file: HistoryFile) -> tuple[str, ...]:
    return tuple(prediction.best for prediction in file.predictions)


def best_class(at: int, file: HistoryFile) -> str | None:
    """Return the best class of an input with its probability; None if it is not known."""
    of_input = (prediction for prediction in file.predictions if prediction.input_index == at)
    return next(("NaN" if best.is_nan else classes_text(best.classes[:1]) for best in of_input), None)


def _best(file: HistoryFile) -> str:
    return best_class(0, file) or ""
