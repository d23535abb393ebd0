"""Rules about half precision: whether activations and weights fit into float16 and bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hookscope.checks.rules.reading import are
from hookscope.checks.rules.rule import Limit, Objection, RuleTerms, output_of, rule, stored_in
from hookscope.checks.rules.stored import batch_norm_is_untrained, is_weight
from hookscope.text import counted

if TYPE_CHECKING:
    from hookscope.results.activations import LayerRow
    from hookscope.results.check import CheckMeasurements

_FP16_MAX = 65504.0
_BF16_MAX = (2 - 2**-7) * 2.0**127


@rule(
    "fp16-headroom",
    "warn",
    "forward",
    max_fraction_of_range=Limit(
        0.5,
        "greatest magnitude of activations and weights, in units of 65504, the greatest of float16",
        "IEEE 754 binary16; the half is our choice: another picture may double a value",
    ),
    max_vanishing_fraction=Limit(
        0.1,
        "share of a weight's non-zero values that may become zero in float16, at most 2**-25 as they are, 0-1",
        "IEEE 754 binary16; the tenth is our choice: seeded networks of torchvision stay below 0.001",
    ),
)
def fp16_headroom(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """Values come near the greatest of float16, or vanish in it.

    Greater values than 65504 become Inf in float16, and weights of at most 2**-25 become zero. Judged are all
    activations and weights as they are, on the inputs given: mixed precision, where sums are kept in float32, may do
    better. Of no consequence if float16 is never used.
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
        yield Objection(stored_in(worst), message)


@rule(
    "bf16-headroom",
    "warn",
    "forward",
    max_fraction_of_range=Limit(
        0.5,
        "greatest magnitude of activations and weights, in units of 3.39e38, the greatest of bfloat16",
        "(2 - 2**-7) * 2**127; the half is our choice, as for fp16-headroom",
    ),
)
def bf16_headroom(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """Values come near the greatest of bfloat16.

    bfloat16 has the range of float32, so this only breaks shortly before float32 does, but earlier than Inf. The
    precision of bfloat16, 8 bits, is not judged.
    """
    yield from _headroom(measured, terms, "bfloat16", _BF16_MAX)


def _headroom(measured: CheckMeasurements, terms: RuleTerms, dtype: str, top: float) -> Iterator[Objection]:
    """Name the worst of all outputs and weights whose magnitude is above the limit."""
    rows = measured.forward.rows if measured.forward else ()
    known = [(_magnitude(row, dtype), output_of(row)) for row in rows if "float" in row.activation.dtype]
    known += [(each.max_abs or 0.0, stored_in(each)) for each in measured.stored if "float" in each.dtype]
    on = [(magnitude, target) for magnitude, target in known if terms.is_on(target)]
    broken = [each for each in on if each[0] > terms.limit("max_fraction_of_range", each[1]) * top]
    if broken:
        magnitude, worst = max(broken, key=lambda each: each[0])
        limit = terms.limit("max_fraction_of_range", worst)
        remark = " BatchNorm does not normalise yet, being untrained." if batch_norm_is_untrained(measured) else ""
        message = (
            f"'{worst.where}' ({worst.kind}) reaches {magnitude:.3g},"
            f" {magnitude / top:.3g} times the greatest of {dtype} (limit {limit:g});"
            f" {len(broken)} of {len(on):,} outputs, parameters and buffers {are(len(broken))} above it.{remark}"
        )
        yield Objection(worst, message)


def _magnitude(row: LayerRow, dtype: str) -> float:
    """Return the greatest magnitude of an output; Inf where its dtype itself has overflowed."""
    statistics = row.activation
    if statistics.dtype == dtype and statistics.inf_count:
        return float("inf")
    return max(abs(statistics.min or 0.0), abs(statistics.max or 0.0))
