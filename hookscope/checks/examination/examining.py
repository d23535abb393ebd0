"""The examination: one hooked pass over all inputs, and as few more as the wanted rules need."""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor

from hookscope.checks.examination.backward import differentiate
from hookscope.checks.examination.consistency import compare_passes, output_values
from hookscope.checks.examination.nonfinite_origin import locate_origin
from hookscope.checks.examination.outputs import FirstPass, Returned
from hookscope.checks.examination.peaks import ChannelPeaks, channel_peaks
from hookscope.checks.examination.predicting import best_classes
from hookscope.checks.examination.preparing import Prepared
from hookscope.checks.examination.stored import stored_tensors
from hookscope.checks.rules import RULES, Needs
from hookscope.checks.settings import CheckSettings
from hookscope.inputs import Batch
from hookscope.inspection.forward import ForwardError, inspect
from hookscope.inspection.network import inspected_network
from hookscope.results.activations import Activations, Prediction
from hookscope.results.check import Examination, NonFiniteOrigin, OutputValues
from hookscope.results.gradients import Gradients
from hookscope.text import printable

# What cannot be had without a forward pass; of gradients, `inspect_gradients` makes its own.
_NEED_FORWARD: frozenset[Needs] = frozenset({"forward", "outputs", "expectations", "baseline"})

_FEWEST_CLASSES = 5


@dataclass(slots=True)
class _Findings:
    """What has been measured so far, by the names of `Examination`."""

    origin: NonFiniteOrigin | None = None
    outputs: tuple[OutputValues, ...] = ()
    gradients: Gradients | None = None
    unmeasured: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def leave_out(self, rules: AbstractSet[str], reason: str) -> None:
        """Say of rules why they could not be measured, where nothing says so yet."""
        for rule in sorted(rules):
            self.unmeasured.setdefault(rule, reason)


def examine(prepared: Prepared, settings: CheckSettings, wanted: AbstractSet[str]) -> Examination:
    """Measure what the wanted rules look at.

    Parameters and buffers are read once. The network runs over all inputs once with every module hooked, then over the
    first batch again and over two of its inputs alone, each only if a rule wants it; where NaN or Inf shows, once more
    to find where it begins; and forward and backward if a rule is about gradients. It comes out as it went in.

    Args:
        prepared: What `prepare` returned.
        settings: The same that it was given.
        wanted: Identifiers of rules that are not off.

    Returns:
        What was measured. A forward pass that raises is in it, as `forward.failure`.

    Raises:
        ImageError: If an input cannot be read.
        UsageError: If the settings name an output, a loss or a target that there is not.
    """
    loaded = prepared.loaded
    found = _Findings(seconds={"load": prepared.load_seconds})
    with _timed(found, "stored"):
        stored, unread = stored_tensors(inspected_network(loaded).network)
    found.warnings += unread
    if unread and not any(each.nan_count or each.inf_count for each in stored):
        found.leave_out(wanted & {"non-finite-parameter"}, " ".join(unread))
    forward = None
    peaks = channel_peaks(inspected_network(loaded).modules if "quiet-channels" in wanted else {})
    if _needing(wanted, *_NEED_FORWARD):
        with _timed(found, "forward"):
            forward, watched = _forward(prepared, settings, wanted, peaks)
        found.unmeasured |= watched.unmeasured
        with _timed(found, "again"):
            _after(prepared, settings, wanted, forward, watched.outputs, found)
    if _needing(wanted, "gradients") and (forward is None or forward.failure is None):
        with _timed(found, "gradients"):
            _gradients(prepared, settings, wanted, found)
    sentences = [
        *loaded.notes,
        *loaded.warnings,
        *(forward.warnings if forward is not None else ()),
        *((*found.gradients.notes, *found.gradients.warnings) if found.gradients is not None else ()),
        *found.warnings,
    ]
    return Examination(
        loaded.info,
        stored,
        forward,
        found.origin,
        peaks.by_label(),
        found.outputs,
        found.gradients,
        found.unmeasured,
        tuple(dict.fromkeys(sentences)),
        found.seconds,
    )


def examine_layers(
    prepared: Prepared, settings: CheckSettings, labels: Sequence[str], *, grids_for: int = 1
) -> Activations:
    """Run the inputs again, with only a few layers hooked, and keep their feature maps: for evidence.

    Args:
        prepared: What `examine` was given.
        settings: Likewise.
        labels: At least one, as `LayerRow.label` has it, or the name of a layer; of a layer with several calls or
            outputs all are kept.
        grids_for: Keep feature maps of this many inputs, from the first.

    Returns:
        What was seen; where the forward pass raises, until then.

    Raises:
        LayerNotFoundError: If a label belongs to no layer.
        ImageError: If an input cannot be read.
    """
    modules = inspected_network(prepared.loaded).modules
    patterns = [rf"name:/\A{re.escape(_layer_of(label, modules))}\Z/" for label in labels]
    try:
        return inspect(
            prepared.loaded,
            prepared.batches(),
            patterns,
            grids_for=grids_for,
            seed=settings.seed,
            output_key=settings.output_key,
        )
    except ForwardError as error:
        return error.inspection


def _layer_of(label: str, layers: Iterable[str]) -> str:
    """Return the name of the layer that a label is about: the longest that it begins with."""
    if label.startswith("(model)"):
        return ""
    fitting = [name for name in layers if name and re.match(rf"{re.escape(name)}(\Z|[#.\[])", label)]
    return max(fitting, key=len, default=label)


@contextmanager
def _timed(found: _Findings, phase: str) -> Iterator[None]:
    """Note how long the block takes."""
    began = time.perf_counter()
    yield
    found.seconds[phase] = time.perf_counter() - began


def _needing(wanted: AbstractSet[str], *needs: Needs) -> set[str]:
    """Return the wanted rules that need one of these."""
    return {rule for rule in wanted if RULES[rule].needs in needs}


@dataclass(slots=True)
class _Watched:
    """What the first pass shows besides statistics.

    Attributes:
        outputs: What the network returned; empty if no rule looks at it.
        predictions: For expectations; None without any.
        unmeasured: By rule, why something could not be measured.
    """

    outputs: FirstPass
    predictions: list[Prediction] | None
    unmeasured: dict[str, str] = field(default_factory=dict)


def _forward(
    prepared: Prepared, settings: CheckSettings, wanted: AbstractSet[str], peaks: ChannelPeaks
) -> tuple[Activations, _Watched]:
    """Run the network over all inputs with every module hooked."""
    expecting = "expectation" in wanted and bool(settings.expectations)
    watched = _Watched(FirstPass(spreads="constant-output" in wanted), [] if expecting else None)
    looked_at = expecting or bool(_needing(wanted, "outputs"))

    def on_tensor(label: str, tensor: Tensor, channel_axis: int | None) -> None:
        peaks.see(label, tensor, channel_axis)
        if looked_at:
            watched.outputs.see(label, tensor)

    def batches() -> Iterator[Batch]:
        for batch in prepared.batches():
            if looked_at:
                watched.outputs.begin(batch)
            yield batch
            if looked_at:  # the network has run over it
                _predict(watched, watched.outputs.finish(), batch, prepared, settings)

    try:
        inspection = inspect(
            prepared.loaded,
            batches(),
            ["*"],
            seed=settings.seed,
            output_key=settings.output_key,
            distributions=True,
            on_tensor=on_tensor,
        )
    except ForwardError as error:
        return error.inspection, watched
    if watched.predictions:
        inspection = replace(inspection, predictions=tuple(watched.predictions))
    return inspection, watched


def _predict(watched: _Watched, returned: Returned, batch: Batch, prepared: Prepared, settings: CheckSettings) -> None:
    """Add the best classes of a batch, as many as the expectations ask about."""
    if watched.predictions is None:
        return
    count = max([_FEWEST_CLASSES, *(expectation.k for expectation in settings.expectations)])
    categories = prepared.loaded.info.categories
    best = best_classes(returned, batch.indices, count, categories, settings.output_key)
    if isinstance(best, str):
        watched.unmeasured["expectation"] = best
    else:
        watched.predictions += best


def _after(
    prepared: Prepared,
    settings: CheckSettings,
    wanted: AbstractSet[str],
    forward: Activations,
    outputs: FirstPass,
    found: _Findings,
) -> None:
    """Run the network again, as far as the first pass and the wanted rules ask for it."""
    subject = inspected_network(prepared.loaded)
    if "non-finite-activation" in wanted and _is_broken(forward):
        located = locate_origin(subject, prepared.batches(), settings.seed)
        found.origin = located.origin
        if located.origin is None and located.broken_input:
            sentence = f"The input {printable(located.broken_input)} holds NaN or Inf itself, so no module is to blame."
            found.warnings.append(sentence)
            found.leave_out({"non-finite-activation"}, sentence)
    if forward.failure is not None:
        rules = _needing(wanted, "outputs", "expectations", "gradients", "baseline")
        found.leave_out(rules, "The forward pass raised.")
    elif _needing(wanted, "outputs"):
        compared = compare_passes(subject, outputs, wanted, settings.seed)
        found.outputs = output_values(outputs, compared)
        found.unmeasured |= compared.unmeasured
        found.warnings += compared.warnings


def _is_broken(forward: Activations) -> bool:
    return any(row.activation.nan_count or row.activation.inf_count for row in forward.rows)


def _gradients(prepared: Prepared, settings: CheckSettings, wanted: AbstractSet[str], found: _Findings) -> None:
    found.gradients, reason = differentiate(prepared, settings)
    if reason:
        rules = _needing(wanted, "gradients")
        if found.gradients is not None and found.gradients.loss is not None:
            rules -= {"non-finite-loss"}
        found.leave_out(rules, reason)
