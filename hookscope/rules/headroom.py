"""Rules about values that are too large or too small for the format of their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hookscope.rules.activations import forward_of
from hookscope.rules.rule import RuleFinding, RuleTerms, limit, named, of_modules, output_of, rule, stored_in
from hookscope.rules.stored import is_untrained, is_weight, untrained_remark
from hookscope.text import are, counted, figure

if TYPE_CHECKING:
    from hookscope.results.activations import LayerRow
    from hookscope.results.check import CheckMeasurements

_FP16_MAX = 65504.0
_BF16_MAX = (2 - 2**-7) * 2.0**127

# Dtypes with float32's range of exponents, and their greatest numbers, which mask attention.
_MASKED = {"float32": (2 - 2**-23) * 2.0**127, "bfloat16": _BF16_MAX}


@rule("fp16-headroom", "warn", "forward")
@limit(
    "max_fraction_of_range",
    0.5,
    "greatest magnitude of activations and weights, in units of 65504, the greatest of float16",
    "IEEE 754 binary16; half of it, because another picture may double a value",
)
@limit(
    "max_vanishing_fraction",
    0.1,
    "share of a weight's non-zero values that may become zero in float16 (those of at most 2**-25), 0-1",
    "IEEE 754 binary16; seeded networks of torchvision stay below 0.001, the largest of 60 of timm is 0.025",
)
def fp16_headroom(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Values come near float16's largest, or become zero in it.

    Values above 65504 become Inf in float16, and weights of at most 2**-25 become zero. All activations and weights are
    judged on the inputs given; mixed precision, which keeps sums in float32, may do better. Use bfloat16, keep such
    layers in float32, or ignore this rule if float16 is never used.
    """
    yield from _headroom(measured, terms, "float16", _FP16_MAX)
    vanishing = [
        (values.fp16_zero_count / non_zero, values)
        for values in measured.stored
        if is_weight(values) and (non_zero := values.element_count - values.zero_count)
    ]
    broken = [
        (share, values)
        for share, values in vanishing
        if terms.is_on(stored_in(values)) and share > terms.limit("max_vanishing_fraction", stored_in(values))
    ]
    if broken:
        share, worst = max(broken, key=lambda pair: pair[0])
        limit = terms.limit("max_vanishing_fraction", stored_in(worst))
        message = (
            f"'{worst.name}' ({worst.kind}): {share:.1%} of its values other than 0 become 0 in float16"
            f" (limit {limit:.0%}); {len(broken)} of {counted(len(vanishing), 'weight')} {are(len(broken))} above it."
        )
        yield RuleFinding(stored_in(worst), message)


@rule("overflowing-activation", "fail", "forward")
@limit(
    "max_magnitude",
    1.8e19,
    "greatest magnitude of activations of float32 and bfloat16",
    "the root of 3.4e38, the greatest of float32 (IEEE 754 binary32)",
)
def overflowing_activation(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """The square of an activation overflows float32.

    The square of a number above 1.8e19 is beyond float32, so the next norm, variance or product of two such numbers is
    Inf. A trained network never comes near this. Causes: a flipped bit in the exponent of a weight, wrong units,
    missing normalisation. The first such layer is named: look at its weights and at its input. It is a warning while
    weights are random or BatchNorm is untrained.
    """
    rows = of_modules(forward_of(measured).rows)
    magnitudes = [(row.activation.max_abs or 0.0, row) for row in rows if row.activation.dtype in _MASKED]
    beyond = [
        (magnitude, row)
        for magnitude, row in magnitudes
        if terms.is_on(output_of(row))
        and terms.limit("max_magnitude", output_of(row)) < magnitude < _MASKED[row.activation.dtype]
    ]
    if beyond:
        magnitude, first = beyond[0]
        message = (
            f"{named(first)} reaches {figure(magnitude, 3)}, whose square overflows float32"
            f" (limit {figure(terms.limit('max_magnitude', output_of(first)), 3)});"
            f" {len(beyond)} of {counted(len(magnitudes), 'output')} {are(len(beyond))} above it."
        )
        yield RuleFinding(output_of(first), message, "warn" if is_untrained(measured) else "fail")


@rule("bf16-headroom", "warn", "forward")
@limit(
    "max_fraction_of_range",
    0.5,
    "greatest magnitude of activations and weights, in units of 3.39e38, the greatest of bfloat16",
    "(2 - 2**-7) * 2**127; half of it, as for fp16-headroom",
)
def bf16_headroom(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Values come near bfloat16's largest.

    bfloat16 has nearly the range of float32, so values this large soon overflow float32 too; the rule warns before they
    become Inf. Normalise the input, or look for weights that diverged. The precision of bfloat16, 8 bits, is not
    judged.
    """
    yield from _headroom(measured, terms, "bfloat16", _BF16_MAX)


def _headroom(measured: CheckMeasurements, terms: RuleTerms, dtype: str, top: float) -> Iterator[RuleFinding]:
    rows = of_modules(forward_of(measured).rows) if measured.forward else []
    magnitudes = [(_magnitude(row, dtype), output_of(row)) for row in rows if "float" in row.activation.dtype]
    magnitudes += [
        (values.max_abs or 0.0, stored_in(values))
        for values in measured.stored
        if "float" in values.dtype and not values.kind.endswith("Observer")  # which count values, for quantisation
    ]
    on = [(magnitude, target) for magnitude, target in magnitudes if terms.is_on(target)]
    broken = [pair for pair in on if pair[0] > terms.limit("max_fraction_of_range", pair[1]) * top]
    if broken:
        magnitude, worst = max(broken, key=lambda pair: pair[0])
        limit = terms.limit("max_fraction_of_range", worst)
        beyond = f"{len(broken)} of {len(on):,} outputs, parameters and buffers {are(len(broken))} above it"
        message = (
            f"'{worst.where}' ({worst.kind}) reaches {figure(magnitude, 3)},"
            f" {figure(magnitude / top, 3)} times the greatest of {dtype} (limit {limit:g}); {beyond}."
            f"{untrained_remark(measured)}"
        )
        yield RuleFinding(worst, message)


def _magnitude(row: LayerRow, dtype: str) -> float:
    """Return the greatest magnitude of an output; Inf where its dtype itself has overflowed."""
    statistics = row.activation
    if statistics.dtype == dtype and statistics.inf_count:
        return float("inf")
    return statistics.max_abs or 0.0
