"""The conditions of `--fail-over`."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hookscope.errors import LayerNotFoundError, UsageError
from hookscope.hooks.patterns import Pattern, parse_pattern
from hookscope.parameters import arg
from hookscope.reporting.columns import number_text
from hookscope.results.differences import DifferenceRow, Measures, OutputDifference, ToleranceFinding, WeightDifference
from hookscope.text import layer_words, number_in, safe_text

_FORM = re.compile(r"(?:(?P<pattern>.+):)?(?P<measure>\w+)\s*(?P<sign>[<>])\s*(?P<limit>[^<>]+)")

# Names the output of the network in place of a pattern.
_OUTPUT = "output"

_MEASURES: dict[str, Callable[[Measures], float | None]] = {
    "rel": lambda measures: measures.relative_l2,
    "cosine": lambda measures: measures.cosine,
    "sqnr": lambda measures: measures.sqnr_db,
    "max": lambda measures: measures.max_abs,
    "ulps": lambda measures: measures.ulps,
}
_OF_ROWS: dict[str, Callable[[Any], float | None]] = {
    # Rows that are compared have a note only if B's layer raised on A's input.
    "added": lambda row: row.added.relative_l2 if row.added else math.nan if row.measures and row.note else None,
    "input": lambda row: row.input_relative_l2,
    "error": lambda row: row.error_b,
}
_OF_OUTPUTS: dict[str, Callable[[Any], float | None]] = {
    "kl": lambda output: output.kl,
    "top1": lambda output: None if output.top1 is None else output.top1 / output.input_count,
    "top5": lambda output: output.top5,
    "error": lambda output: output.error_b,
}
_MEASURES_BY_TYPE = {DifferenceRow: _OF_ROWS, WeightDifference: {}, OutputDifference: _OF_OUTPUTS}
# Measures that need an option.
_NEEDS = {"added": "shadow", "error": "reference"}


@dataclass(frozen=True, slots=True)
class Condition:
    """One `--fail-over`: a measure and its limit. `pattern` is None for every row and the output."""

    text: str
    pattern: Pattern | None
    of_output: bool
    measure: str
    is_above: bool
    limit: float

    def holds(self, value: float) -> bool:
        """Tell whether a value is beyond the limit; NaN is."""
        return math.isnan(value) or (value > self.limit if self.is_above else value < self.limit)


def parse_condition(text: str) -> Condition:
    """Parse a condition: "rel>1e-3", "layer4*:cosine<0.99", "output:kl>0.01".

    Raises:
        UsageError: If it is malformed.
    """
    match, option = _FORM.fullmatch(text.strip()), f"{arg('fail_over')} {safe_text(text)!r}"
    names = [*_MEASURES, *_OF_ROWS, *_OF_OUTPUTS]
    if match is None:
        raise UsageError(f"{option} is no condition: write 'rel>1e-3' or 'layer4*:cosine<0.99'.")
    measure, pattern = match["measure"], match["pattern"]
    if measure not in names:
        measures = ", ".join(dict.fromkeys(names))
        raise UsageError(f"{option}: there is no measure {measure!r}; give {measures}.")
    try:
        limit = number_in(match["limit"], float)
    except ValueError:
        limit = math.nan
    if math.isnan(limit):  # no value exceeds it
        raise UsageError(f"{option}: {match['limit']!r} is not a number.")
    of_output = pattern == _OUTPUT or measure in ("kl", "top1", "top5")
    if pattern not in (None, _OUTPUT) and measure not in {**_MEASURES, **_OF_ROWS}:
        raise UsageError(f"{option}: {measure} is a measure of the output; leave out {pattern!r}.")
    if pattern == _OUTPUT and measure not in {**_MEASURES, **_OF_OUTPUTS}:
        raise UsageError(f"{option}: {measure} is a measure of layers; leave out {pattern!r}.")
    parsed = None if pattern is None or of_output else parse_pattern(pattern)
    if parsed is not None and parsed.position is not None:
        raise UsageError(f"{option} chooses a row by its position: give its name.")
    return Condition(text, parsed, of_output, measure, match["sign"] == ">", limit)


def exceeded(
    conditions: Sequence[Condition],
    rows: Sequence[DifferenceRow] | Sequence[WeightDifference],
    outputs: Sequence[OutputDifference] = (),
) -> tuple[ToleranceFinding, ...]:
    """Return the rows, or weights, and outputs that exceed a condition.

    Raises:
        LayerNotFoundError: If the pattern of a condition matches no row.
        UsageError: If a condition's measure was not taken.
    """
    findings = []
    for condition in conditions:
        option, measure = f"{arg('fail_over')} {safe_text(condition.text)!r}", condition.measure
        meant = [] if condition.of_output else [row for row in rows if _is_meant(row, condition.pattern)]
        if condition.pattern is not None and not meant:
            raise LayerNotFoundError(f"{option} matches no row that was compared.")
        judged = [(row.label, row.measures, _value(row, measure)) for row in meant]
        if condition.pattern is None:
            judged += [("", output.measures, _value(output, measure)) for output in outputs]
        if all(value is None for *_, value in judged):
            needed = f" It needs {arg(_NEEDS[measure])}." if measure in _NEEDS else ""
            raise UsageError(f"{option}: {measure} is not known here.{needed}")
        for label, measures, value in judged:
            if value is not None and condition.holds(value):
                amount = number_text(value)
                if math.isnan(value) and (measures is None or measures.nonfinite is None):
                    amount = "it cannot be compared" if measures is None else "it cannot be measured"
                message = f"{layer_words(label) if label else 'The output'} is beyond '{condition.text}': {amount}."
                findings.append(ToleranceFinding(condition.text, "fail", label, message, value=value))
    return tuple(findings)


def _is_meant(row: DifferenceRow | WeightDifference, pattern: Pattern | None) -> bool:
    names = (row.name, row.dtype) if isinstance(row, WeightDifference) else (row.layer, row.kind)
    return pattern is None or pattern.matches(*names) != pattern.exclude


def _value(judged: DifferenceRow | WeightDifference | OutputDifference, measure: str) -> float | None:
    """Return a measure of a row or an output; None if it was not taken.

    NaN, which exceeds every limit, if a value is not finite on one side only, if A and B cannot be compared, or if they
    differ and have no such measure, as a tensor of zeros has no cosine.
    """
    if measure in _MEASURES_BY_TYPE[type(judged)]:
        return _MEASURES_BY_TYPE[type(judged)][measure](judged)
    measures = judged.measures
    if measure not in _MEASURES:
        return None
    if measures is None:  # two runs may have classes without a row of the output
        return None if isinstance(judged, OutputDifference) and judged.top1 is not None else math.nan
    value = _MEASURES[measure](measures)
    return math.nan if measures.nonfinite is not None or (value is None and measures.relative_l2) else value
