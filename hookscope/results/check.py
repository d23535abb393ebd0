"""The measurements and verdicts of `hookscope check`, as frozen dataclasses; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hookscope.errors import EXIT_CHECK_FAILED, EXIT_DONE, most_severe
from hookscope.results.accuracy import Accuracy, LabelledResult
from hookscope.results.activations import Activations, LayerRow, MapSummary
from hookscope.results.comparison import Prediction
from hookscope.results.findings import Finding
from hookscope.results.gradients import Gradients
from hookscope.results.inputs import InputRecord
from hookscope.results.json_form import SCHEMA_VERSION, UNSTORED, in_json, json_form
from hookscope.results.network import ModelInfo
from hookscope.results.renderers import RenderedResult
from hookscope.results.survey import Survey
from hookscope.results.training_state import CopyValues, OptimiserValues, ScalerValues
from hookscope.text import safe_text, strict_json


@dataclass(frozen=True, slots=True)
class ConstantRun:
    """A run of one value in the memory of a weight, the longest there is.

    Attributes:
        length: Values in it.
        chance: Expected length of the longest run if the value were spread at random, as often as elsewhere in the
            weight's rows and columns: log(n) / -log(share); Inf where nothing else is there.
    """

    length: int
    value: float
    chance: float


@dataclass(frozen=True, slots=True)
class Float8Values:
    """The values of a weight that is, or was, stored in float8.

    Attributes:
        dtype: torch's name without the prefix: "float8_e4m3fn".
        saturated_count: Values at the greatest magnitude of that dtype.
        rms: Root mean square of the finite values.
    """

    dtype: str
    saturated_count: int
    rms: float


@dataclass(frozen=True, slots=True)
class StoredValues:
    """One parameter or buffer of the loaded network. Statistics are over the finite values.

    Attributes:
        kind: Class name of the module that owns it.
        dtype: torch's name without the prefix: "float32".
        min: Smallest finite value; None without one, and for what has no order. The same holds for `max` and `max_abs`.
        fp16_zero_count: Elements other than zero that become zero in float16: at most 2**-25 in magnitude.
        float8_zero_count: The same for float8_e4m3fn: at most 2**-10 in magnitude.
        float8_overflow_count: Finite elements beyond its greatest, 448, that are not rounded to it: above 464.
        zero_filters: Of a weight with at least two axes, the output channels whose weights are all exactly zero, by
            index; empty for everything else.
        filter_count: Output channels of such a weight; None for everything else.
        twin_of: The first parameter before it of equal dtype, shape and values, if this one does not share its memory
            (it is not tied), and is a weight with at least two axes longer than 1 that is not constant; "" for none.
        aliases: Other names of the same (tied) tensor.
        means_without_variance: Of a BatchNorm's running variance, the channels where it is zero or subnormal though the
            running mean is not, by index; empty for everything else.
        outlier_ratio: Greatest magnitude over the 99.9% quantile of magnitudes other than zero, or over the second
            greatest; None where the greatest is at most 1, or there are fewer than 16, and for what is not
            floating-point.
        repeated_filters: Of a weight with output channels, those that equal one before them, by index.
        constant_run: Of such a weight, the longest run of one value, once filters and columns that are dead (below a
            hundredth of the greatest magnitude) are taken out; None below 32 values.
        spread_beyond_chance: Of such a weight, how much more its rows, columns and kernel places differ among
            themselves than those of independent values do, in standard errors; None for fewer than 2,048 values
            other than zero.
        is_whole: It is floating-point and has output channels, and every value is a whole number of up to 16 bits, at
            least one of them beyond 1.
        float8: Of a weight with at least two axes longer than 1, what it holds if it is of float8, or if float8 holds
            every one of its values; None for everything else.
    """

    name: str
    kind: str
    role: Literal["parameter", "buffer"]
    shape: tuple[int, ...]
    dtype: str
    element_count: int
    nan_count: int
    inf_count: int
    zero_count: int
    min: float | None
    max: float | None
    max_abs: float | None
    fp16_zero_count: int
    float8_zero_count: int = 0
    float8_overflow_count: int = 0
    zero_filters: tuple[int, ...] = ()
    filter_count: int | None = None
    twin_of: str = ""
    aliases: tuple[str, ...] = ()
    means_without_variance: tuple[int, ...] = ()
    outlier_ratio: float | None = None
    repeated_filters: tuple[int, ...] = ()
    constant_run: ConstantRun | None = None
    spread_beyond_chance: float | None = None
    is_whole: bool = False
    float8: Float8Values | None = None


@dataclass(frozen=True, slots=True)
class NonFiniteOrigin:
    """The first module in execution order that makes NaN or Inf out of finite inputs.

    Attributes:
        layer: Label of the call: "layer1.0.conv1", "(model)" for code in the forward of the whole network.
        element_count: Values in its output; if `between`, this and the counts of NaN and Inf may be of what
            it hands to a module inside it.
        parameters: Its own parameters and buffers that are not finite, and those of modules inside it that it uses
            without calling them, as MultiheadAttention does with `out_proj`.
        between: The module is a container whose own code makes them, between or after the modules inside it.
        operation: Of the module's own code, the first operation to make them, by its label: "(model):softmax"; "" if it
            is not known. -Inf that a softmax takes up, or that is filled in, as masks are, is not counted.
        source: The line that calls the operation, "net.py:14".
        inputs: Position of each input of the batch that makes the module do so, run alone, and its name; "" for none.
        input_count: Inputs in that batch.
        position: Where in the module's output they are for the first of those inputs, without its batch axis: None for
            an axis along which all values are; () if it is not known, or if all are.
    """

    layer: str
    kind: str
    nan_count: int
    inf_count: int
    element_count: int
    parameters: tuple[str, ...] = ()
    between: bool = False
    operation: str = ""
    source: str = ""
    inputs: tuple[tuple[int, str], ...] = ()
    input_count: int = 0
    position: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchNormInput:
    """Statistics of one BatchNorm's input over all inputs and calls, and those it stores; arrays are (C,) float64.

    Attributes:
        layer: Its dotted name.
        value_count: Values in each channel.
        eps: What the layer adds to a variance.
        mean: Of its input, as `variance`, which is that of the values seen (divided by their count).
        start_share: Share of the initial values in the stored statistics, 0-1: (1 - momentum)**batches. 0 where it is
            not known.
    """

    layer: str
    value_count: int
    eps: float
    running_mean: NDArray[np.float64]
    running_var: NDArray[np.float64]
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    start_share: float = 0.0


@dataclass(frozen=True, slots=True)
class OutputSignature:
    """A signature that differs between outputs with equal statistics, over all inputs.

    Attributes:
        quantiles: At `QUANTILE_LEVELS`, exact ones of each input's finite values by itself, averaged over the inputs
            (all values of a batch together where axis 0 does not count its inputs); None if no value is finite.
        values: Up to 256 of each input at fixed places, (N, K), see `hookscope.statistics.kept_values`.
        channels: Mean and standard deviation of each channel over all inputs, (2, C); None where no axis counts
            channels.
    """

    quantiles: tuple[float, ...] | None
    values: NDArray[np.floating] | None
    channels: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class OutputValues:
    """One tensor that the network returned, over several forward passes.

    Differences are the greatest absolute difference between two tensors over the greatest magnitude in either; NaN
    where NaN meets a number; Inf where shapes differ or Inf meets a number; None where there was nothing to compare
    (see `CheckMeasurements.unmeasured`).

    Attributes:
        label: "(model)", "(model)['logits']", "(model)[0]['boxes']".
        shape: In the pass over the first batch; its axis 0 counts inputs if `batched`.
        batched: Whether axis 0 counts inputs.
        max_abs: Greatest finite magnitude; None without one.
        repeat_difference: Between two passes over the same batch.
        alone_difference: Between an input in a batch and the same input alone, the greatest over the inputs compared.
        input_difference: Between the first input and another one, the greatest over all inputs: how much the output
            differs for different inputs. Results that come as a list, one for each input, share it.
        input_count: Inputs in the first batch.
    """

    label: str
    shape: tuple[int, ...]
    dtype: str
    batched: bool
    max_abs: float | None
    repeat_difference: float | None = None
    alone_difference: float | None = None
    input_difference: float | None = None
    input_count: int = 0


@dataclass(frozen=True, slots=True)
class CheckMeasurements:
    """Everything that rules can look at: what was measured of one checkpoint, or in one run of `hookscope grads`.

    Attributes:
        stored: Parameters and buffers of the state dict, in its order; a tied one once.
        forward: The forward passes over all inputs, every module hooked; `failure` is set where one raised.
        optimisers, scalers: States of optimisers and GradScalers in the file.
        copies: Averaged copies of the weights in the same file.
        idle_adapters: Of a file of low-rank adapters, the tensors that are zero, if each adapter has one: together they
            change nothing.
        origin: Where NaN or Inf begins in the forward pass; None if all is finite but for -Inf that the network takes
            up again, as attention masks are, or if it follows from an input that is not finite (see `unmeasured`).
        channel_peaks: For each output of a smooth activation function (GELU, SiLU, Mish…) by label, the greatest
            magnitude of each channel over all inputs, (C,) float32.
        batch_norms: The input of each BatchNorm with stored statistics, in execution order; empty if no rule wanted it,
            or it cannot be judged (see `unmeasured`).
        labelled: The accuracy on labelled pictures; None without any, or if no rule wanted it.
        gradients: Forward and backward; None if no rule wanted it, or it was not possible (see `unmeasured`).
        origin_searched: Whether `origin` was looked for where NaN or Inf showed; `hookscope grads` does not.
        unmeasured: By rule, why its measurements could not be made, in a sentence.
        no_network: Why a weights file was measured without a network, so that only `stored` is filled; "" otherwise.
        seconds: Time by phase: "load", "stored", "forward", "again", "data", "gradients".
        signatures: Of the modules' outputs by label, and of the network's input under "", for a baseline; empty if none
            is compared or written.
        survey: Over a data set, of this network; None without one.
        weights_precision: The narrowest floating dtype that holds all parameters exactly: "bfloat16"; "" if there are
            no signatures.
    """

    model: ModelInfo
    stored: tuple[StoredValues, ...]
    forward: Activations | None
    origin: NonFiniteOrigin | None = None
    channel_peaks: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    batch_norms: tuple[BatchNormInput, ...] = ()
    outputs: tuple[OutputValues, ...] = ()
    labelled: LabelledResult | None = None
    gradients: Gradients | None = None
    origin_searched: bool = True
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    no_network: str = ""
    optimisers: tuple[OptimiserValues, ...] = ()
    scalers: tuple[ScalerValues, ...] = ()
    copies: tuple[CopyValues, ...] = ()
    idle_adapters: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    signatures: Mapping[str, OutputSignature] = field(default_factory=dict)
    weights_precision: str = ""
    survey: Survey | None = None


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """The result of one rule for one checkpoint.

    Attributes:
        status: The most severe level of its findings, or "pass", "off" or "skipped".
        findings: Failures first, then in execution order; empty unless the status is "fail" or "warn".
        reason: Why it was skipped, in a sentence; "" otherwise.
    """

    rule: str
    status: Literal["pass", "warn", "fail", "off", "skipped"]
    findings: tuple[Finding, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OverviewParts:
    """The parts of a check's overview that are not in its report.

    Attributes:
        rows: Of the forward pass, as far as it came.
        failing: Those that findings of level "fail" are about.
        summaries: Of those rows for one input, as far as they have maps; empty if no evidence was kept.
        pictures: Of `Accuracy.worst`, as the network got them, (H, W, 3) or (H, W) uint8; None for one that cannot be
            shown. Empty if no evidence was kept.
        predictions: Best classes for each picture, of a classifier.
    """

    rows: tuple[LayerRow, ...] = ()
    failing: tuple[LayerRow, ...] = ()
    summaries: tuple[MapSummary, ...] = ()
    pictures: tuple[NDArray[np.uint8] | None, ...] = ()
    predictions: tuple[Prediction, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(RenderedResult):
    """The result of checking one checkpoint.

    Attributes:
        checkpoint: Name of the checkpoint, as the user gave it or as found in a folder.
        outcomes: One per rule, in the order of `checks.RULES`.
        model: The network; None if it could not be loaded.
        error: Why the check could not be finished, in one line; "" if it was finished.
        error_code: Exit code of `error`; 0 without an error.
        seconds: Time by phase, and "total".
        evidence: Folder with the evidence of failures; "" if there is none.
        accuracy: Accuracy on labelled pictures; None without such pictures, or if no rule needed it.
        unmatched: Patterns of [[layers]] that match nothing in it, each with a sentence; empty if a pass raised.
        looks_untrained: Whether the weights look random, or BatchNorm is as it starts and no weight looks trained.
        overview_parts: Data of the run for the overview picture; None if the checkpoint could not be measured.
    """

    checkpoint: str
    outcomes: tuple[RuleOutcome, ...]
    model: ModelInfo | None = None
    inputs: tuple[InputRecord, ...] = ()
    error: str = ""
    error_code: int = EXIT_DONE
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    accuracy: Accuracy | None = None
    unmatched: Mapping[str, str] = field(default_factory=dict, metadata=UNSTORED)
    looks_untrained: bool = field(default=False, metadata=UNSTORED)
    overview_parts: OverviewParts | None = field(default=None, compare=False, metadata=UNSTORED)

    def __repr__(self) -> str:
        return f"<CheckReport of {self.checkpoint}: {'passed' if self.passed else 'failed'}>"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, failures first, then in the order of the rules."""
        findings = [finding for outcome in self.outcomes for finding in outcome.findings]
        return tuple(sorted(findings, key=lambda finding: finding.level != "fail"))

    @property
    @in_json
    def passed(self) -> bool:
        """Whether it was checked to the end and no rule failed; warnings do not count."""
        return self.exit_code == EXIT_DONE

    @property
    @in_json
    def exit_code(self) -> int:
        """The error's exit code, else 1 if a rule failed, else 0."""
        if self.error_code:
            return self.error_code
        return EXIT_CHECK_FAILED if any(outcome.status == "fail" for outcome in self.outcomes) else EXIT_DONE

    def raise_for_failure(self) -> None:
        """Raise unless it passed: one line for a test, whose message has every failure.

        Raises:
            AssertionError: With the error, and every finding of level "fail".
        """
        __tracebackhide__ = True  # pytest then shows the test's own line
        if self.passed:
            return
        failures = (finding for finding in self.findings if finding.level == "fail" and finding.message != self.error)
        lines = (
            f"{self.checkpoint} did not pass.",
            self.error,
            *(f"{' '.join(filter(None, (failure.rule, failure.where)))}: {failure.message}" for failure in failures),
        )
        raise AssertionError("\n".join(map(safe_text, filter(None, lines))))


def checks_to_dict(reports: Sequence[CheckReport]) -> dict[str, Any]:
    """Return reports as one JSON document, in their order, with the exit code of the command."""
    code = most_severe(report.exit_code for report in reports)
    return {"schema_version": SCHEMA_VERSION, "exit_code": code, "checkpoints": [*map(json_form, reports)]}


def checks_to_json(reports: Sequence[CheckReport]) -> str:
    """Return reports as strict JSON, one checkpoint a line: see `checks_to_dict`."""
    return strict_json(checks_to_dict(reports))
