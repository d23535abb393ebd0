"""Rules about what the network returns: its shape, and how it changes with the input, the batch and the time."""

import math
from collections.abc import Iterator

from hookscope.checks.context import Subject, Terms
from hookscope.checks.stored import batch_norm_is_untrained, is_weight, is_zero
from hookscope.errors import UsageError
from hookscope.results.check import Examination, Finding, OutputValues
from hookscope.text import printable

# Machine epsilon: float16 has 11 significant bits, bfloat16 has 8 (IEEE 754, and its first half).
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}

# Our choice: rounding of the output's dtype that differences may always have.
_ROUNDINGS = 16


def output_shape(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to an output of another shape or dtype than asked for, or of another number of classes than has names.

    Raises:
        UsageError: If the settings ask about an output and do not say which, or there is no such output.
    """
    settings = terms.settings
    if settings.output_shape is None and settings.output_dtype is None:
        yield from _class_count(examination, terms)
        return
    chosen = _chosen(examination, settings.output_key)
    wanted = settings.output_shape
    if wanted is not None and not _is_of_shape(chosen.shape, wanted, chosen.input_count):
        message = f"The output {_named(chosen)}has shape {_shown(chosen.shape)}, not {_shown(wanted)} as expected."
        yield from terms.object_to(_subject(examination, chosen), message)
    if settings.output_dtype is not None and chosen.dtype != settings.output_dtype:
        message = f"The output {_named(chosen)}is {chosen.dtype}, not {settings.output_dtype} as expected."
        yield from terms.object_to(_subject(examination, chosen), message)


def constant_output(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object when no output differs between inputs; one of several may be constant."""
    measured = [(each.input_difference, each) for each in examination.outputs if each.input_difference is not None]
    if not measured:
        return
    difference, output = max(measured, key=lambda pair: pair[0])
    subject = _subject(examination, output)
    limit = terms.limit("min_difference", subject)
    if not all(each < limit for each, _ in measured):  # NaN is no constant
        return
    if output.max_abs is None:
        yield from terms.object_to(subject, f"The output {_named(output)}is NaN or Inf everywhere, whatever the input.")
        return
    excuse = _excuse(examination)
    message = (
        f"The output {_named(output)}is the same whatever the input: {_difference(difference)} its greatest magnitude"
        f" between inputs (limit: at least {limit:.0e}).{excuse}"
    )
    yield from terms.object_to(subject, message, "warn" if excuse else "fail")


def repeatability(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to outputs that differ between two passes over the same batch."""
    for output in examination.outputs:
        what = "differs between two identical passes"
        yield from _differs(examination, output, output.repeat_difference, terms, what)


def batch_consistency(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to outputs that an input gets in a batch, but not alone."""
    for output in examination.outputs:
        what = "for an input in a batch is another one than for the same input alone"
        yield from _differs(examination, output, output.alone_difference, terms, what)


def _differs(
    examination: Examination, output: OutputValues, difference: float | None, terms: Terms, what: str
) -> Iterator[Finding]:
    if difference is None:
        return
    dtypes = (output.dtype, examination.forward.dtype if examination.forward else "")
    rounding = max(_EPSILON.get(dtype, 0.0) for dtype in dtypes) * _ROUNDINGS
    subject = _subject(examination, output)
    limit = max(terms.limit("max_difference", subject), rounding)
    if not difference <= limit:  # NaN is no agreement
        message = f"The output {_named(output)}{what}: they differ by {_difference(difference)} the greatest magnitude"
        yield from terms.object_to(subject, f"{message} (limit {limit:.1e}).")


def _class_count(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to a single output of class scores whose classes are not as many as their names."""
    names = len(examination.model.categories)
    if not names or len(examination.outputs) != 1:
        return
    (output,) = examination.outputs
    # (N, classes) of a classifier, (N, classes, H, W) of a segmentation network
    if output.batched and len(output.shape) in (2, 4) and output.shape[1] != names:
        message = (
            f"The output has {output.shape[1]} classes (shape {_shown(output.shape)}), but {names} names are known."
        )
        yield from terms.object_to(_subject(examination, output), message)


def _chosen(examination: Examination, key: str | None) -> OutputValues:
    """Return the output that the settings are about."""
    outputs = examination.outputs
    listed = printable(", ".join(each.label for each in outputs)) or "none"
    if key is None:
        if len(outputs) != 1:
            raise UsageError(f"output_shape and output_dtype ask about one output; name it with output_key: {listed}.")
        return outputs[0]
    path = key.removeprefix("(model)")
    for each in outputs:
        if each.label.removeprefix("(model)") in (path, f"[{path!r}]", f".{path}", f"[{path}]"):
            return each
    raise UsageError(f"output_key '{printable(key, 80)}' names no output; there is: {listed}.")


def _is_of_shape(shape: tuple[int, ...], wanted: tuple[int | str, ...], count: int) -> bool:
    sizes = [count if size == "N" else size for size in wanted]
    return len(shape) == len(sizes) and all(want in ("*", size) for size, want in zip(shape, sizes, strict=True))


def _excuse(examination: Examination) -> str:
    """Return what of the network is untrained, so that a constant output is no wonder; "" for nothing."""
    if closed := _zero_head(examination):
        return f" '{closed}' is all 0, as an untrained head may be."
    if batch_norm_is_untrained(examination):
        return " BatchNorm does not normalise yet, being untrained."
    return " Its weights are random." if examination.model.random else ""


def _zero_head(examination: Examination) -> str:
    """Return the name of the last weight if it is zero everywhere; "" if not."""
    weights = [values for values in examination.stored if is_weight(values)]
    return weights[-1].name if weights and is_zero(weights[-1]) else ""


def _subject(examination: Examination, output: OutputValues) -> Subject:
    return Subject(output.label, ("",), examination.model.kind)


def _named(output: OutputValues) -> str:
    return "" if output.label == "(model)" else f"'{output.label}' "


def _difference(difference: float) -> str:
    return "NaN beside" if math.isnan(difference) else f"{difference:.1e} of"


def _shown(shape: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
