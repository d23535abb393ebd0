"""A baseline: statistics of a network's outputs for known inputs, as JSON that a reviewer can read in a pull request.

Layers have a line each, sorted by name, with six significant digits, so that a diff shows the changed layers and the
size of each change. Containers without parameters are left out. Labelled pictures follow, a line per class.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby, repeat
from pathlib import Path, PurePath
from typing import Any

from hookscope.errors import UsageError
from hookscope.regular_files import read_bounded
from hookscope.results.accuracy import LabelledResult
from hookscope.results.activations import LayerRow
from hookscope.results.check import CheckMeasurements, OutputSignature
from hookscope.results.gradients import Gradients
from hookscope.results.inputs import InputRecord
from hookscope.results.runs.store import checked
from hookscope.results.statistics import QUANTILE_LEVELS
from hookscope.rules.baseline_values import channels_from_text, channels_text, check_text, values_from_text, values_text
from hookscope.rules.settings import RENEW
from hookscope.text import counted, one_line, printable, safe_text, shape_text, strict_json

SCHEMA_VERSION = 8  # 7 and 6 have different names, 5 has sums of values, 4 shapes of first batches, 3 no channels

# float32 itself holds seven. Rounding to six moves a value by at most 5e-6 of itself: 5e-4 of the spread that drift is
# measured in, a twentieth of the default limit of the rule `drift`.
_SIGNIFICANT_DIGITS = 6

_MOST_BYTES = 64 * 2**20  # ten thousand rows, at about six thousand bytes each

# With a lower share of rows of equal name, type and shape, the network is a different one: resnet18 and resnet34 share
# half of their rows.
_LEAST_ALIKE = 0.75


@dataclass(frozen=True, slots=True)
class BaselineInput:
    """Consecutive equal inputs, and the steps of their preprocessing.

    `name` is for people and has no folder; `sha256` is None without a file; `shape` has no batch axis.
    """

    name: str
    count: int
    sha256: str | None
    shape: tuple[int, ...]
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BaselineGradients:
    """The names of loss and target of the gradients ("" without a target), and the mode, "eval" or "train"."""

    loss: str
    target: str
    mode: str


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """One output of one call of one layer; statistics in six significant digits, as in `TensorStatistics`.

    Counts of NaN and Inf are None if they could not be counted. `dead_fraction` is the share of channels that are zero
    over all inputs, `gradient_l2` the L2 norm of the loss's gradient. `quantiles`, `values` and `channels` come from
    `OutputSignature`; `values_text` and `channels_text` encode the last two.
    """

    label: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    nan_count: int | None
    inf_count: int | None
    mean: float | None
    std: float | None
    dead_fraction: float | None
    gradient_l2: float | None
    quantiles: tuple[float, ...] | None
    values: str | None
    channels: str | None


@dataclass(frozen=True, slots=True)
class BaselineClass:
    """The pictures with the same label or labels.

    `right` and `wrong` are sorted digests; "[2]" marks one of several inputs in a file. `label` is for people.
    """

    label: str
    classes: tuple[int, ...]
    right: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Statistics of a network's outputs for known inputs; names as in `ModelInfo`.

    `kind` is the class name of the root module, `weights_precision` the narrowest dtype that holds all parameters
    exactly; `input_values` has values of all input tensors. There is a row per layer, call and slot.
    """

    model: str
    kind: str
    weights: str
    weights_sha256: str | None
    parameter_count: int
    dtype: str
    weights_precision: str
    gradients: BaselineGradients | None
    input_values: str | None
    inputs: tuple[BaselineInput, ...]
    rows: tuple[BaselineRow, ...]
    labelled: tuple[BaselineClass, ...] = ()
    multi_label: bool = False


def baseline_of(measured: CheckMeasurements) -> Baseline:
    """Return the baseline of measurements; raises UsageError if the forward pass did not run to its end."""
    forward = measured.forward
    if forward is None or forward.failure is not None:
        raise UsageError(
            f"{printable(measured.model.name)} did not run to the end of its forward pass, so there is no baseline "
            f"to write. Correct what the rule 'forward' reports first."
        )
    return Baseline(
        model=safe_text(measured.model.name),
        kind=safe_text(measured.model.kind),
        weights=safe_text(measured.model.weights),
        weights_sha256=measured.model.sha256,
        parameter_count=measured.model.parameter_count,
        dtype=forward.dtype,
        weights_precision=measured.weights_precision,
        gradients=gradients_of(measured.gradients),
        input_values=input_values_of(measured),
        inputs=inputs_of(forward.inputs),
        rows=tuple(sorted((row for _, row in measured_rows(measured)), key=lambda row: _counting_order(row.label))),
        labelled=_labelled_of(measured.labelled),
        multi_label=measured.labelled is not None and measured.labelled.accuracy.multi_label,
    )


def measured_rows(measured: CheckMeasurements) -> tuple[tuple[LayerRow, BaselineRow], ...]:
    """Return the rows that a baseline holds, in execution order, each with its form in the baseline."""
    rows = [row for row in (measured.forward.rows if measured.forward else ()) if row.owner is None]
    containers = {row.layer[: dot.start()] for row in rows for dot in re.finditer(r"\.", row.layer)}
    gradients = measured.gradients.gradients if measured.gradients else ()
    norms = {row.label: row.gradient.l2 for row in gradients if row.role == "output"}
    return tuple(
        (row, _baseline_row(row, norms.get(row.label), measured.signatures.get(row.label, _NO_SIGNATURE)))
        for row in rows
        if row.parameter_count or row.layer not in containers
    )


def _labelled_of(result: LabelledResult | None) -> tuple[BaselineClass, ...]:
    if result is None:
        return ()
    by_index = {index: safe_text(label.label) for label in result.accuracy.classes for index in label.indices}
    classes = []
    for indices, pictures in sorted(result.pictures.items()):
        label = ", ".join(dict.fromkeys(by_index[index] for index in indices)) or "no label"
        right, wrong = ([sha for sha in sorted(pictures) if pictures[sha] is is_right] for is_right in (True, False))
        classes.append(BaselineClass(label, indices, tuple(right), tuple(wrong)))
    return tuple(classes)


def input_values_of(measured: CheckMeasurements) -> str | None:
    """Return values of the network's inputs in the form of a baseline; None if there are none."""
    return values_text(measured.signatures.get("", _NO_SIGNATURE).values)


def gradients_of(gradients: Gradients | None) -> BaselineGradients | None:
    """Return loss, target and mode of a run's gradients; None for a run without gradients."""
    if gradients is None or gradients.loss is None:
        return None
    return BaselineGradients(safe_text(gradients.loss.name), safe_text(gradients.loss.target), gradients.mode)


def inputs_of(records: Iterable[InputRecord]) -> tuple[BaselineInput, ...]:
    """Return the inputs of a run, without warnings of libraries that read files, because they vary by version."""

    def described(record: InputRecord) -> BaselineInput:
        name = safe_text(PurePath(record.name).name or record.name)
        steps = tuple(safe_text(step) for step in record.steps if not step.startswith("warning while reading"))
        return BaselineInput(name, 1, record.sha256, record.shape, steps)

    return tuple(replace(recorded, count=len([*alike])) for recorded, alike in groupby(map(described, records)))


_NO_SIGNATURE = OutputSignature(None, None)


def _baseline_row(row: LayerRow, gradient_l2: float | None, signature: OutputSignature) -> BaselineRow:
    statistics = row.activation
    quantiles = tuple(rounded for value in signature.quantiles or () if (rounded := _rounded(value)) is not None)
    return BaselineRow(
        label=safe_text(row.label),
        kind=safe_text(row.kind),
        shape=statistics.shape,
        dtype=statistics.dtype,
        nan_count=statistics.nan_count,
        inf_count=statistics.inf_count,
        mean=_rounded(statistics.mean),
        std=_rounded(statistics.std),
        dead_fraction=_rounded(statistics.dead_channel_fraction),
        gradient_l2=_rounded(gradient_l2),
        quantiles=quantiles if len(quantiles) == len(QUANTILE_LEVELS) else None,
        values=values_text(signature.values),
        channels=channels_text(signature.channels),
    )


def _rounded(value: float | None) -> float | None:
    """Round a number to six significant digits, -0 to 0; None for NaN and infinities, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}") + 0.0


def _counting_order(label: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"\d{1,18}|\D+", label))


def baseline_text(baseline: Baseline) -> str:
    """Return a baseline as JSON: one line per field, input and layer. Equal baselines give equal bytes."""
    return strict_json({"schema_version": SCHEMA_VERSION, "quantile_levels": QUANTILE_LEVELS, **asdict(baseline)})


def read_baseline(path: Path) -> Baseline:
    """Read a baseline that `baseline_text` wrote. No code is run; NaN and Infinity, which are not JSON, are refused.

    Raises UsageError if the file cannot be read, is too large, or is no baseline of this version.
    """
    name = printable(str(path))
    try:
        content = read_bounded(path, _MOST_BYTES)
    except FileNotFoundError as error:
        raise UsageError(f"There is no baseline {name}. Write one with `hookscope check --update-baseline`.") from error
    except OSError as error:
        raise UsageError(f"Baseline {name} cannot be read: {one_line(error.strerror or error)}.") from error
    if len(content) > _MOST_BYTES:
        raise UsageError(f"Baseline {name} is larger than {_MOST_BYTES // 2**20} MiB, so it is not a baseline. {RENEW}")
    try:
        return _parsed(json.loads(content.decode(), parse_constant=_refuse_constant))
    except UnicodeDecodeError as error:
        raise UsageError(f"Baseline {name} is not UTF-8 at byte {error.start}. {RENEW}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"Baseline {name} is not JSON: line {error.lineno}, {one_line(error.msg)}. {RENEW}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"Baseline {name}: {one_line(error)}. {RENEW}") from error


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _parsed(document: Any) -> Baseline:
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version is None or isinstance(version, bool) or not isinstance(version, int):
        raise ValueError("it has no schema version")
    if version != SCHEMA_VERSION:
        which = "an earlier" if version < SCHEMA_VERSION else "a later"
        raise ValueError(f"{which} hookscope wrote it (schema version {version}, this one reads {SCHEMA_VERSION})")
    if document.get("quantile_levels") != [*QUANTILE_LEVELS]:
        raise ValueError(f"its quantile levels are not {', '.join(map(str, QUANTILE_LEVELS))}")
    try:
        baseline: Baseline = checked(Baseline, document)
    except ValueError as error:
        raise ValueError(": ".join(error.args)) from error
    check_text(values_from_text, baseline.input_values, "'input_values'")
    for row in baseline.rows:
        check_text(values_from_text, row.values, f"'values' of layer {row.label!r}")
        check_text(channels_from_text, row.channels, f"'channels' of layer {row.label!r}")
        quantiles = row.quantiles or QUANTILE_LEVELS
        numbers = filter(None, (row.mean, row.std, row.dead_fraction, row.gradient_l2, *quantiles))
        if len(quantiles) != len(QUANTILE_LEVELS) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"layer {row.label!r} has infinite numbers, or not {len(QUANTILE_LEVELS)} quantiles")
    labels = [row.label for row in baseline.rows]
    if len({*labels}) < len(labels):
        raise ValueError(f"layer {max(labels, key=labels.count)!r} is there twice")
    return baseline


def require_fit(baseline: Baseline, measured: CheckMeasurements) -> None:
    """Raise UsageError for a baseline that cannot be compared with this run.

    The class of network, the inputs and the gradients must be equal, and at least three quarters of the rows.
    """
    was, now = printable(baseline.kind), printable(measured.model.kind)
    names = f"it is of {printable(baseline.model)} ({was}), and this is {printable(measured.model.name)} ({now})"
    difference = (
        ("" if was == now else names)
        or _changed_inputs(baseline, measured)
        or _changed_gradients(baseline, measured)
        or _changed_rows(baseline, measured)
    )
    if difference:
        raise UsageError(f"The baseline does not fit: {difference}. {RENEW}")


def _changed_inputs(baseline: Baseline, measured: CheckMeasurements) -> str:
    now = inputs_of(measured.forward.inputs if measured.forward else ())
    counts = [sum(entry.count for entry in inputs) for inputs in (baseline.inputs, now)]
    if counts[0] != counts[1]:
        return f"it was made with {counted(counts[0], 'input')}, and this run has {counts[1]}"
    one_by_one = (
        chain.from_iterable(repeat(entry, entry.count) for entry in inputs) for inputs in (baseline.inputs, now)
    )
    for index, (was, current) in enumerate(zip(*one_by_one, strict=False), 1):
        if difference := _changed_input(was, current):
            return f"input {index} {difference}"
    return ""


def _changed_input(was: BaselineInput, now: BaselineInput) -> str:
    if was.sha256 != now.sha256:
        return f"was {_described(was)}, and is {_described(now)}"
    if was.shape != now.shape:
        return f"was {shape_text(was.shape)}, and is {shape_text(now.shape)}"
    if was.steps != now.steps:
        differing = {*was.steps} ^ {*now.steps} or {*was.steps}  # their order alone may differ
        before, after = (
            "; ".join(step for step in entry.steps if step in differing) or "nothing" for entry in (was, now)
        )
        return f"was prepared by '{printable(before)}', and now by '{printable(after)}'"
    return ""


def _described(entry: BaselineInput) -> str:
    origin = f"sha256 {printable(entry.sha256)[:12]}…" if entry.sha256 else "no file"
    return f"'{printable(entry.name)}' ({origin})"


def _changed_gradients(baseline: Baseline, measured: CheckMeasurements) -> str:
    if baseline.gradients is None:
        return ""
    if measured.gradients is None:
        if "gradients" in measured.seconds:  # they could not be taken, which the rules about gradients report
            return ""
        return "it has gradients, and this run takes none, because no rule about gradients is on"
    now = gradients_of(measured.gradients)
    if now is None or now == baseline.gradients:
        return ""
    was, current = (
        printable(f"{side.loss}, {side.target or 'no target'}, {side.mode}") for side in (baseline.gradients, now)
    )
    return f"its gradients are of the loss '{was}', and these are of '{current}'"


def _changed_rows(baseline: Baseline, measured: CheckMeasurements) -> str:
    was = {(row.label, row.kind, row.shape) for row in baseline.rows}
    now = {(row.label, row.kind, row.shape) for _, row in measured_rows(measured)}
    alike, count = len(was & now), max(len(was), len(now))
    if alike >= _LEAST_ALIKE * count:
        return ""
    same = f"only {alike} of {count} layers have the same name, type and shape"
    return f"{same}, so it was made with a different network"
