"""Rules about activation functions: channels that are dead or quiet over all inputs, outputs at their bounds."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hookscope.checks.context import Terms, output_of
from hookscope.checks.verdicts.activations import dead_channel_shares, has_enough_values, saturated_shares
from hookscope.checks.verdicts.reading import counted
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.check import Examination, Finding


def dead_channels(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to rectifiers with too many channels that are zero at every position of every input."""
    forward = _forward(examination)
    for share, row in dead_channel_shares(forward.rows):
        what = f"channels are 0 over {_inputs(forward)}"
        yield from _above(terms, share, row, f"of its {row.activation.channel_count} {what}")


def quiet_channels(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to smooth activation functions with too many channels that stay next to zero."""
    forward = _forward(examination)
    for row in forward.rows:
        peaks = examination.channel_peaks.get(row.label)
        if peaks is None or not peaks.size or not has_enough_values(row.activation):
            continue
        below = terms.limit("below", output_of(row))
        what = f"channels stay below {below:g} in magnitude over {_inputs(forward)}"
        yield from _above(terms, _quiet_share(peaks, row, below), row, f"of its {peaks.size} {what}")


def saturated_activation(examination: Examination, terms: Terms) -> Iterator[Finding]:
    """Object to bounded activation functions with too many outputs where the slope is nearly gone."""
    forward = _forward(examination)
    for share, row in saturated_shares(forward.rows):
        yield from _above(terms, share, row, f"of its outputs are saturated over {_inputs(forward)}")


def _quiet_share(peaks: NDArray[np.float32], row: LayerRow, below: float) -> float:
    """Return the share of channels that are closed.

    In a layer that is small as a whole, the function is linear, and half of its outputs are positive. Closed outputs
    are all negative: so a layer without positive ones is held to `below` itself, others to this share of its peak.
    """
    greatest = float(peaks.max())
    all_negative = row.activation.max is not None and row.activation.max <= 0
    scale = 1.0 if all_negative else min(1.0, greatest)
    return float(np.mean(peaks < below * scale))


def _above(terms: Terms, share: float, row: LayerRow, what: str) -> Iterator[Finding]:
    subject = output_of(row)
    limit = terms.limit("max_fraction", subject)
    if share > limit:
        yield from terms.object_to(subject, f"'{row.label}' ({row.kind}): {share:.1%} {what} (limit {limit:.0%}).")


def _inputs(forward: Activations) -> str:
    return f"all {counted(len(forward.inputs), 'input')}" if len(forward.inputs) > 1 else "the only input"


def _forward(examination: Examination) -> Activations:
    assert examination.forward is not None  # noqa: S101 - judging skips these rules without one
    return examination.forward
