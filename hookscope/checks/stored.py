"""Rules about what is stored: parameters and buffers, as they were loaded."""

from collections.abc import Iterator

from hookscope.checks.context import Terms, stored_in
from hookscope.checks.verdicts.reading import counted
from hookscope.results.check import Examination, Finding, StoredValues


def non_finite_parameter(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to NaN and Inf, but for buffers of zeros and infinities: those are masks."""
    for values in examination.stored:
        if (values.nan_count or values.inf_count) and not _is_mask(values):
            message = (
                f"'{values.name}' ({values.kind}) holds {values.nan_count:,} NaN and {values.inf_count:,} Inf in"
                f" {counted(values.element_count, 'value')} (limit 0)."
            )
            yield from terms.object_to(stored_in(values), message)


def zero_parameter(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to weights that are zero everywhere."""
    for values in examination.stored:
        if is_weight(values) and is_zero(values):
            message = f"'{values.name}' ({values.kind}) is 0 in all of its {values.element_count:,} values."
            yield from terms.object_to(stored_in(values), message)


def constant_parameter(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to weights of one value, other than zero."""
    for values in examination.stored:
        finite = not (values.nan_count or values.inf_count)
        if is_weight(values) and finite and values.min == values.max and values.min not in (None, 0):
            message = (
                f"'{values.name}' ({values.kind}) is {values.min:.6g} in all of its {values.element_count:,} values."
            )
            yield from terms.object_to(stored_in(values), message)


def duplicate_parameter(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to weights that equal another one, without being tied to it."""
    for values in examination.stored:
        if values.twin_of:
            message = (
                f"'{values.name}' ({values.kind}) equals '{values.twin_of}' in all of its"
                f" {values.element_count:,} values, though the two are not tied."
            )
            yield from terms.object_to(stored_in(values), message)


def batchnorm_variance(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to running variances that are negative, or zero in more channels than can have died in training.

    Of a channel that dies, mean and variance decay towards zero together; while all means are exactly zero, no training
    explains a variance of zero.
    """
    untrained = {_module_of(each) for each in examination.stored if _is_called(each, "running_mean") and is_zero(each)}
    for values in examination.stored:
        if not _is_called(values, "running_var") or values.min is None:
            continue
        subject = stored_in(values)
        limit = 0.0 if _module_of(values) in untrained else terms.limit("max_zero_fraction", subject)
        share = values.zero_count / values.element_count
        if values.min < 0:
            message = f"'{values.name}' ({values.kind}) goes down to {values.min:.3g} (limit 0)."
            yield from terms.object_to(subject, message)
        elif values.means_without_variance:
            message = (
                f"'{values.name}' ({values.kind}) is 0 (limit: above 0) in"
                f" {counted(len(values.means_without_variance), 'channel')} whose running mean is not:"
                f" {_numbers(values.means_without_variance)}."
            )
            yield from terms.object_to(subject, message)
        elif share > limit:
            channels = counted(values.element_count, "channel")
            message = (
                f"'{values.name}' ({values.kind}) is 0 in {values.zero_count:,} of {channels}, {share:.1%} (limit"
                f" {limit:.0%})."
            )
            yield from terms.object_to(subject, message)


def dead_filter(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to output channels without weights, where others have some."""
    for values in examination.stored:
        # A row of an embedding is no filter: that of the padding is zero by design.
        if not values.zero_filters or not values.filter_count or is_zero(values) or "Embedding" in values.kind:
            continue
        subject = stored_in(values)
        limit = terms.limit("max_fraction", subject)
        share = len(values.zero_filters) / values.filter_count
        if share > limit:
            message = (
                f"'{values.name}' ({values.kind}): {len(values.zero_filters)} of"
                f" {counted(values.filter_count, 'output channel')} have no weight but 0, {share:.1%} (limit"
                f" {limit:.0%}): {_numbers(values.zero_filters)}."
            )
            yield from terms.object_to(subject, message)


def is_weight(values: StoredValues) -> bool:
    """Tell learnt matrices and kernels from biases, scales and buffers: at least two axes are longer than 1."""
    return values.role == "parameter" and sum(size > 1 for size in values.shape) >= 2


def is_zero(values: StoredValues) -> bool:
    """Tell whether there are values, all of them zero."""
    return 0 < values.element_count == values.zero_count


def batch_norm_is_untrained(examination: Examination) -> bool:
    """Tell whether there is BatchNorm, all of whose statistics are as they start: mean 0, variance 1."""
    starts = {"running_mean": 0.0, "running_var": 1.0}
    running = [(values, starts.get(values.name.rpartition(".")[2])) for values in examination.stored]
    known = [(values, start) for values, start in running if start is not None]
    return bool(known) and all(values.min == values.max == start for values, start in known)


def _is_called(values: StoredValues, name: str) -> bool:
    return values.name.rpartition(".")[2] == name


def _module_of(values: StoredValues) -> str:
    return values.name.rpartition(".")[0]


def _is_mask(values: StoredValues) -> bool:
    """Tell whether a buffer holds nothing but zeros and infinities."""
    finite = values.element_count - values.inf_count
    return values.role == "buffer" and not values.nan_count and finite == values.zero_count > 0


def _numbers(indices: tuple[int, ...], shown: int = 8) -> str:
    more = f" and {len(indices) - shown} more" if len(indices) > shown else ""
    return ", ".join(map(str, indices[:shown])) + more
