"""The measurements and verdicts of `hookscope check`, as frozen dataclasses; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hookscope.errors import EXIT_CHECK_FAILED, EXIT_DONE, most_severe
from hookscope.results.accuracy import Accuracy, LabelledResult
from hookscope.results.activations import LayerRow, MapSummary, Run
from hookscope.results.comparison import Prediction
from hookscope.results.findings import Finding, raise_failures
from hookscope.results.gradients import Gradients
from hookscope.results.inputs import InputRecord
from hookscope.results.json_form import SCHEMA_VERSION, UNSTORED, in_json, json_form
from hookscope.results.network import ModelInfo
from hookscope.results.renderers import RenderedResult
from hookscope.results.survey import Survey
from hookscope.results.training_state import CopyValues, OptimiserValues, ScalerValues
from hookscope.text import strict_json


@dataclass(frozen=True, slots=True)
class ConstantRun:
    """The longest run of one value in the memory of a weight.

    Attributes:
        length: Number of values in the run.
        chance: Expected length of the longest run if the value were spread at random, as often as elsewhere in the
            weight's rows and columns: log(n) / -log(share); Inf if no other value is there.
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
        min: Smallest finite value; None without one, and for complex or boolean ones. Likewise `max`, `max_abs`.
        fp16_zero_count: Elements other than zero that become zero in float16: at most 2**-25 in magnitude.
        float8_zero_count: The same for float8_e4m3fn: at most 2**-10 in magnitude.
        float8_overflow_count: Finite elements that float8_e4m3fn does not round to its greatest number, 448: above 464.
        zero_filters: For a weight with at least two axes, indices of output channels whose weights are all exactly
            zero; empty for everything else.
        filter_count: Output channels of such a weight; None for everything else.
        twin_of: The first earlier parameter with the same dtype, shape and values but memory of its own (not tied), for
            weights that are not constant and have at least two axes longer than 1; "" for none.
        aliases: Other names of the same (tied) tensor.
        means_without_variance: For a BatchNorm's running variance, indices of channels where it is zero or subnormal
            but the running mean is not; empty for everything else.
        outlier_ratio: Greatest magnitude over the 99.9% quantile of magnitudes other than zero, or over the second
            greatest; None if the greatest is at most 1, if there are fewer than 16, and for dtypes that are not
            floating-point.
        repeated_filters: For a weight with output channels, indices of channels that equal an earlier channel.
        constant_run: For such a weight, the longest run of one value, without dead filters and columns (below a
            hundredth of the greatest magnitude); None below 32 values.
        spread_beyond_chance: For such a weight, how much more its rows, columns and kernel places differ from each
            other than rows, columns and places of independent values, in standard errors; None for fewer than 2,048
            values other than zero.
        is_whole: Whether it is a floating-point kernel or matrix, all its values are whole numbers of up to 16 bits,
            and at least one is beyond 1.
        float8: Float8 statistics of a weight with at least two axes longer than 1 that is stored in float8, or whose
            values all fit float8; None for everything else.
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
        element_count: Values in its output; if `between`, this and the counts of NaN and Inf may describe an input of a
            module inside it.
        parameters: Its own parameters and buffers that are not finite, and those of modules inside it that it uses
            without calling them, as MultiheadAttention does with `out_proj`.
        between: Whether the module is a container whose own code makes them, between or after the modules inside it.
        operation: Label of the first operation in the module's own code that makes them: "(model):softmax"; "" if it
            is not known. -Inf is not counted if a softmax takes it up, or if it is filled in, as in masks.
        source: The line that calls the operation, "net.py:14".
        inputs: Position and name ("" for none) of each input of the batch that, run alone, gives NaN or Inf here.
        input_count: Inputs in that batch.
        position: Index of NaN or Inf in the module's output for the first of `inputs`, without batch axis; None for an
            axis along which all values are NaN or Inf; () if it is not known, or if all values are.
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
    """Measured and stored statistics of one BatchNorm's input, over all inputs and calls; arrays are (C,) float64.

    Attributes:
        layer: The layer's dotted name.
        value_count: Values in each channel.
        eps: The layer adds it to a variance.
        mean: Measured mean of the input. `variance` is the population variance (divided by the number of values).
        start_share: Share of the initial values in the stored statistics, 0-1: (1 - momentum)**batches. 0 if it is not
            known.
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
        quantiles: Exact quantiles of each input's finite values at `QUANTILE_LEVELS`, averaged over the inputs (or over
            batches, if axis 0 does not count inputs); None if no value is finite.
        values: Up to 256 of each input at fixed places, (N, K), see `hookscope.statistics.kept_values`.
        channels: Mean and standard deviation of each channel over all inputs, (2, C); None without a channel axis.
    """

    quantiles: tuple[float, ...] | None
    values: NDArray[np.floating] | None
    channels: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class OutputValues:
    """One tensor that the network returned, over several forward passes.

    Differences are the greatest absolute difference between two tensors over the greatest magnitude in either; NaN if
    NaN meets a number; Inf if shapes differ or Inf meets a number; None if there was nothing to compare (see
    `CheckMeasurements.unmeasured`).

    Attributes:
        label: "(model)", "(model)['logits']", "(model)[0]['boxes']".
        shape: In the pass over the first batch; its axis 0 counts inputs if `batched`.
        batched: Whether axis 0 counts inputs.
        max_abs: Greatest finite magnitude; None without one.
        repeat_difference: Between two passes over the same batch.
        alone_difference: Between an input in a batch and the same input alone, the greatest over the inputs compared.
        input_difference: Between the first input and another one, the greatest over all inputs. Outputs that are a
            list, one for each input, share it.
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
    """Everything that rules judge: the measurements of one checkpoint, or of one run of `activations` or `grads`.

    Attributes:
        stored: Parameters and buffers of the state dict, in its order; a tied one once.
        forward: The forward passes over all inputs, every module hooked; `failure` is set where one raised.
        optimisers, scalers: States of optimisers and GradScalers in the file.
        copies: Averaged copies of the weights in the same file.
        idle_adapters: Zero tensors of a file of low-rank adapters, if every adapter has one and so changes nothing.
        origin: Where NaN or Inf begins in the forward pass; None if all values are finite, apart from -Inf that the
            network takes up again (attention masks), or if an input is not finite (see `unmeasured`).
        channel_peaks: For each output of a smooth activation function (GELU, SiLU, Mish…) by label, the greatest
            magnitude of each channel over all inputs, (C,) float32.
        batch_norms: The input of each BatchNorm with stored statistics, in execution order; empty if no rule needs it,
            or it cannot be judged (see `unmeasured`).
        labelled: The accuracy on labelled pictures; None without any, or if no rule needs it.
        gradients: Forward and backward; None if no rule needs it, or it was not possible (see `unmeasured`).
        origin_searched: Whether NaN and Inf were traced to an `origin`; `activations` and `grads` do not.
        unmeasured: For each rule that could not be judged, a sentence with the reason.
        no_network: Why a weights file was measured without a network, so that only `stored` is filled; "" otherwise.
        seconds: Time by phase: "load", "stored", "forward", "again", "data", "gradients".
        signatures: Signatures of modules' outputs by label, and of the network's input under ""; empty if no baseline
            is compared or written.
        survey: A survey of this network over a data set; None without one.
        weights_precision: The narrowest floating dtype that holds all parameters exactly: "bfloat16"; "" if there are
            no signatures.
    """

    model: ModelInfo
    stored: tuple[StoredValues, ...]
    forward: Run[Any] | None
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
        rows: Rows of the forward pass, up to a failure.
        failing: Rows with findings of level "fail".
        summaries: Map summaries of failing rows for one input; empty if no evidence was kept.
        pictures: The pictures of `Accuracy.worst` as the network got them, (H, W, 3) or (H, W) uint8; None for a
            picture that cannot be shown. Empty if no evidence was kept.
        predictions: A classifier's best classes for each picture.
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
        outcomes: One per rule, in the order of `rules.RULES`.
        model: The network; None if it could not be loaded.
        error: Why the check could not be finished, in one line; "" if it was finished.
        error_code: Exit code of `error`; 0 without an error.
        seconds: Time by phase, and "total".
        evidence: Folder with the evidence of failures; "" if there is none.
        accuracy: Accuracy on labelled pictures; None without such pictures, or if no rule needed it.
        unmatched: Patterns of [[layers]] that match nothing, each with a sentence; empty if a pass raised.
        looks_untrained: Whether the weights look random, or no weight looks trained and BatchNorm is untouched.
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
        """Raise AssertionError with every failure unless the check passed: for a test.

        Raises:
            AssertionError: With the error, and every finding of level "fail".
        """
        __tracebackhide__ = True
        failures = (finding for finding in self.findings if finding.level == "fail" and finding.message != self.error)
        lines = (f"{' '.join(filter(None, (failure.rule, failure.where)))}: {failure.message}" for failure in failures)
        if not self.passed:
            raise_failures((f"{self.checkpoint} did not pass.", self.error, *lines))


def checks_to_dict(reports: Sequence[CheckReport]) -> dict[str, Any]:
    """Return reports as one JSON document, in their order, with the exit code of the command."""
    code = most_severe(report.exit_code for report in reports)
    return {"schema_version": SCHEMA_VERSION, "exit_code": code, "checkpoints": [*map(json_form, reports)]}


def checks_to_json(reports: Sequence[CheckReport]) -> str:
    """Return reports as strict JSON, one checkpoint a line: see `checks_to_dict`."""
    return strict_json(checks_to_dict(reports))
