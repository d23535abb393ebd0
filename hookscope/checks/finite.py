"""Rules about the forward pass itself: that it ends, and that what it gives is finite and has room to spare."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hookscope.checks.context import Subject, Terms, output_of, stored_in
from hookscope.checks.stored import batch_norm_is_untrained, is_weight
from hookscope.checks.verdicts.reading import counted, listed, non_finite_count, non_finite_words
from hookscope.results.activations import LayerRow
from hookscope.results.check import Examination, Finding, NonFiniteOrigin
from hookscope.results.network import Failure
from hookscope.text import safe_text

_FP16_MAX = 65504.0
_BF16_MAX = (2 - 2**-7) * 2.0**127


def forward_raises(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to a forward pass that raised."""
    failure = examination.forward.failure if examination.forward else None
    if failure:
        subject = Subject(failure.layer or "(model)", (failure.layer,), failure.kind)
        yield from terms.object_to(subject, raised("forward", failure))


def raised(phase: str, failure: Failure) -> str:
    """Return where and why a pass broke off, in a sentence."""
    given = ", ".join(failure.input_shapes) or "no tensor"
    where = f"'{failure.layer or '(model)'}' ({failure.kind})"
    return safe_text(f"The {phase} pass raised in {where}, given {given}: {failure.error}")


def non_finite_activation(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Name the module that makes NaN or Inf, and count the outputs after it that merely pass them on."""
    rows = examination.forward.rows if examination.forward else ()
    origin = examination.origin
    if origin is None:
        yield from _unexplained(rows, terms)
        return
    made = next((row for row in rows if row.label == origin.layer), None)
    later = sum(bool(non_finite_count(row.activation)) for row in rows if made is not None and row.index > made.index)
    subject = output_of(made) if made else Subject(origin.layer, (origin.layer,), origin.kind)
    yield from terms.object_to(subject, f"{_words(origin)} (limit 0){_parameters(origin)}{_passed_on(later)}.")


def fp16_headroom(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to values near 65504, and to weights of which much would become zero."""
    yield from _headroom(examination, terms, "float16", _FP16_MAX)
    vanishing = [
        (values.fp16_zero_count / non_zero, values)
        for values in examination.stored
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
            f" (limit {limit:.0%}); {len(broken)} of {counted(len(vanishing), 'weight')} {_are(len(broken))} above it."
        )
        yield from terms.object_to(stored_in(worst), message)


def bf16_headroom(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to values near 3.39e38."""
    yield from _headroom(examination, terms, "bfloat16", _BF16_MAX)


@dataclass(frozen=True, slots=True)
class _Greatest:
    """The greatest magnitude of an output, parameter or buffer; Inf where the dtype itself has overflowed."""

    magnitude: float
    subject: Subject


def _headroom(examination: Examination, terms: Terms, dtype: str, top: float) -> Iterator[Finding]:
    """Name the worst of all outputs and weights whose magnitude is above the limit."""
    rows = examination.forward.rows if examination.forward else ()
    measured = [_Greatest(_magnitude(row, dtype), output_of(row)) for row in rows if "float" in row.activation.dtype]
    measured += [
        _Greatest(each.max_abs or 0.0, stored_in(each)) for each in examination.stored if "float" in each.dtype
    ]
    on = [each for each in measured if terms.is_on(each.subject)]
    broken = [each for each in on if each.magnitude > terms.limit("max_fraction_of_range", each.subject) * top]
    if broken:
        worst = max(broken, key=lambda each: each.magnitude)
        limit = terms.limit("max_fraction_of_range", worst.subject)
        remark = " BatchNorm does not normalise yet, being untrained." if batch_norm_is_untrained(examination) else ""
        message = (
            f"'{worst.subject.where}' ({worst.subject.kind}) reaches {worst.magnitude:.3g},"
            f" {worst.magnitude / top:.3g} times the greatest of {dtype} (limit {limit:g});"
            f" {len(broken)} of {len(on):,} outputs, parameters and buffers {_are(len(broken))} above it.{remark}"
        )
        yield from terms.object_to(worst.subject, message)


def _unexplained(rows: Sequence[LayerRow], terms: Terms) -> Iterator[Finding]:
    """Object to NaN, or a result that is not finite, for which no module is to blame; masks of Inf are left alone."""
    broken = next(
        (row for row in rows if row.activation.nan_count or (not row.layer and row.activation.inf_count)), None
    )
    if broken:
        message = (
            f"The output of '{broken.label}' ({broken.kind}) has {non_finite_words(broken.activation)} (limit 0), but"
            " no module makes them out of finite inputs: look at what the network is given."
        )
        yield from terms.object_to(output_of(broken), message)


def _words(origin: NonFiniteOrigin) -> str:
    of = f"in {counted(origin.element_count, 'value')}"
    counts = f"{origin.nan_count:,} NaN and {origin.inf_count:,} Inf {of}"
    if origin.between:
        return f"The code of '{origin.layer}' ({origin.kind}) between its modules makes NaN or Inf first: {counts}"
    return f"'{origin.layer}' ({origin.kind}) is the first to make NaN or Inf out of finite inputs: {counts}"


def _parameters(origin: NonFiniteOrigin) -> str:
    names = origin.parameters
    return f"; its {listed(names)} {_are(len(names))} not finite" if names else ""


def _passed_on(later: int) -> str:
    return (
        f"; {counted(later, 'later output')} {'holds' if later == 1 else 'hold'} some too, passed on" if later else ""
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _magnitude(row: LayerRow, dtype: str) -> float:
    statistics = row.activation
    if statistics.dtype == dtype and statistics.inf_count:
        return float("inf")
    return max(abs(statistics.min or 0.0), abs(statistics.max or 0.0))
