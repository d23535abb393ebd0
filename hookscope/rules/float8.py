"""Rules about float8: weights that are stored in it, and whether others could be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hookscope.rules.rule import RuleFinding, RuleTerms, limit, rule, stored_in
from hookscope.rules.stored import is_weight
from hookscope.text import are, counted, figure

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements, StoredValues


class _Format(NamedTuple):
    """The greatest number of a dtype, and the step between those next to zero."""

    greatest: float
    step: float


# OCP 8-bit Floating Point Specification, 2023; those in "fnuz" after Noune et al. 2022.
_FORMATS: Mapping[str, _Format] = {
    "float8_e4m3fn": _Format(448.0, 2.0**-9),
    "float8_e5m2": _Format(57344.0, 2.0**-16),
    "float8_e4m3fnuz": _Format(240.0, 2.0**-10),
    "float8_e5m2fnuz": _Format(57344.0, 2.0**-17),
}

# Scaled by rows, one value of each row is the greatest of float8: of shorter rows they are many.
_SHORTEST_ROW = 8

_FITTED = "EfficientNet-Lite0 to 2 rounded to it by tensors, rows, or blocks of 128 and 32 have up to"


@rule("float8-weight", "warn", "stored", followers="weight")
@limit(
    "max_saturated_fraction",
    0.5,
    "share of a weight's values that may be the greatest number of its float8 type, 0-1",
    "EfficientNet-Lite0 to 2, scaled by tensor, by row, or by blocks of 128 and 32, have up to 0.22",
)
@limit(
    "max_rounding_error",
    0.1,
    "rounding error of values near zero, in units of the weight's root mean square",
    "step / (sqrt(12) * RMS), as for any uniform rounding; EfficientNet-Lite0 to 2, scaled by tensor, by row, or by "
    "blocks of 128 and 32, have up to 2e-5, and 0.012 without a scale",
)
def float8_weight(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A weight in float8 lacks its scale, or was rounded or cut off too far.

    Eight bits hold a weight well only if the weight is first scaled to reach the greatest number of the type (448 in
    float8_e4m3fn, 57344 in float8_e5m2), and the scale is stored with it. The rule finds three mistakes. A weight that
    reaches this number without anything called "scale" in the same module is used hundreds of times too large. If half
    of the values are that number, the scale was applied twice, or belongs to a different weight. A weight without a
    scale that is about as small as the steps of float8 (2**-9 in float8_e4m3fn) has lost most of its precision.

    The rule judges weights in float8, and wider ones whose values are all float8 numbers, as after loading a float8
    file into a float32 network. An overflow becomes NaN, which non-finite-parameter reports. Convert the network again,
    from the file with the full weights.
    """
    scaled = {_owner(tensor.name) for tensor in measured.stored if "scale" in tensor.name.rpartition(".")[2].lower()}
    for values in measured.stored:
        float8 = values.float8
        if float8 is None or (fmt := _FORMATS.get(float8.dtype)) is None:
            continue
        target, about = stored_in(values), f"'{values.name}' ({values.kind})"
        share = float8.saturated_count / values.element_count
        long_enough = math.prod(values.shape[1:]) >= _SHORTEST_ROW
        error = fmt.step / (math.sqrt(12) * float8.rms)
        if long_enough and share > (most := terms.limit("max_saturated_fraction", target)):
            cut = f"{share:.1%} of its values are ±{fmt.greatest:g}, the greatest of {float8.dtype}"
            yield RuleFinding(target, f"{about}: {cut} (limit {most:.0%}).")
        elif float8.saturated_count and not {_owner(values.name), values.name} & scaled:
            reaches = f"reaches {fmt.greatest:g}, the greatest of {float8.dtype}, as weights that are scaled for it do"
            yield RuleFinding(target, f"{about} {reaches}, and no scale is stored beside it.")
        elif error > (most := terms.limit("max_rounding_error", target)):
            coarse = f"steps of {float8.dtype} next to zero, {figure(fmt.step, 3)}, round it by about {error:.1%}"
            of = f"of its root mean square, {figure(float8.rms, 3)} (limit {most:.0%})"
            yield RuleFinding(target, f"{about}: {coarse} {of}.")


@rule("float8-range", "off", "stored")
@limit(
    "max_overflowing_fraction",
    0.0,
    "share of a weight's values that may lie beyond 448, the greatest of float8_e4m3fn, 0-1",
    "OCP 8-bit Floating Point Specification, 2023",
)
@limit(
    "max_vanishing_fraction",
    0.2,
    "share of a weight's non-zero values that may become zero in float8_e4m3fn (those of at most 2**-10), 0-1",
    "the same; the weights of EfficientNet-Lite0 to 2 have up to 0.0996",
)
def float8_range(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A weight does not fit into float8_e4m3fn as it is.

    float8_e4m3fn has no numbers beyond 448: greater values are cut off, or become NaN. Values of at most 2**-10 become
    zero. The rule names the worst weight of either kind, with its share. Such a weight needs a scale (for a tensor, a
    row or a block), or a different type: float8_e5m2 reaches 57344 and 2**-17 with two bits of precision, and is meant
    for gradients. The rule judges weights with at least two axes longer than 1 as they are, without a scale. Off until
    --select or the configuration turns it on, because few networks are meant for float8.
    """
    weights = [tensor for tensor in measured.stored if is_weight(tensor) and "float" in tensor.dtype]
    nonzero = [(weight, weight.element_count - weight.zero_count) for weight in weights]
    yield from _worst(
        terms,
        "max_overflowing_fraction",
        [(weight.float8_overflow_count / weight.element_count, weight) for weight in weights if weight.element_count],
        "its values lie beyond 448, the greatest of float8_e4m3fn",
    )
    yield from _worst(
        terms,
        "max_vanishing_fraction",
        [(values.float8_zero_count / count, values) for values, count in nonzero if count],
        "its values other than 0 become 0 in float8_e4m3fn",
    )


def _worst(
    terms: RuleTerms, name: str, shares: Sequence[tuple[float, StoredValues]], flaw: str
) -> Iterator[RuleFinding]:
    """Object to the weight with the greatest share above a limit, with the number of such weights."""
    judged = [(share, values) for share, values in shares if terms.is_on(stored_in(values))]
    broken = [(share, values) for share, values in judged if share > terms.limit(name, stored_in(values))]
    if broken:
        share, worst = max(broken, key=lambda pair: pair[0])
        limit = terms.limit(name, stored_in(worst))
        above = f"{len(broken)} of {counted(len(judged), 'weight')} {are(len(broken))} above it"
        message = f"'{worst.name}' ({worst.kind}): {share:.1%} of {flaw} (limit {limit:.0%}); {above}."
        yield RuleFinding(stored_in(worst), message)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
