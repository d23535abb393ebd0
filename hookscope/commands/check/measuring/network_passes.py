"""One hooked pass over all inputs, and the further passes that the wanted rules need."""

import re
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookscope.commands.check.measuring.batch_norm import BatchNormInputs, with_statistics
from hookscope.commands.check.measuring.consistency import FirstPass
from hookscope.commands.check.measuring.labelled_pictures import measure_labelled
from hookscope.commands.check.measuring.nonfinite_origin import locate_origin
from hookscope.commands.check.measuring.outputs import class_scores, returned_tensors
from hookscope.commands.check.measuring.preparing import Prepared
from hookscope.commands.check.measuring.signatures import OutputSignatures, weights_precision
from hookscope.commands.check.measuring.stored import stored_tensors
from hookscope.commands.check.measuring.training_state import copy_values, optimiser_values, scaler_values
from hookscope.errors import UsageError
from hookscope.inputs.batches import Batch
from hookscope.inputs.find_files import TENSOR_SUFFIXES
from hookscope.inputs.loading import read_tensor
from hookscope.inspection.backward import PassError, inspect_gradients
from hookscope.inspection.detection import default_targets_text, with_default_targets
from hookscope.inspection.differentiation import GradientOptions
from hookscope.inspection.forward import ForwardError, ForwardOptions, inspect
from hookscope.inspection.losses.choosing import Loss, choose_loss
from hookscope.inspection.network import InspectedNetwork, inspected_network, model_digest
from hookscope.inspection.rows import OnCall, OnTensor, top_classes
from hookscope.models.user_code import load_function
from hookscope.parameters import arg
from hookscope.results.accuracy import mapping_words
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.check import CheckMeasurements, NonFiniteOrigin, OutputValues, StoredValues
from hookscope.results.comparison import Prediction
from hookscope.results.gradients import Gradients
from hookscope.results.network import row_label
from hookscope.results.runs.reading import read_run, refusal
from hookscope.results.survey import Survey
from hookscope.rules import RULES
from hookscope.rules.rule import Needs, module_of, of_modules
from hookscope.rules.settings import CheckSettings
from hookscope.rules.weights import statistics_are_new
from hookscope.text import counted, safe_text

# Rules with these needs look at the forward pass; `inspect_gradients` makes its own.
_NEED_FORWARD: frozenset[Needs] = frozenset({"forward", "outputs", "expectations", "labels", "baseline"})
_FEWEST_CLASSES = 5
_FIT_ALL = ("projection", "sum")  # losses for every output that can be differentiated

# Functions that approach zero for negative inputs without reaching it: x·Φ(x), x/(1+e^-x), x·tanh(log(1+e^x)) and
# log(1+e^x), by their names in torch, torchvision, timm and transformers. Not Hardswish, which is exactly zero below -3
# as a ReLU is; nor ELU, CELU and SELU, which approach a constant other than zero.
SMOOTH = frozenset(
    {
        *("GELU", "GELUTanh", "QuickGELU", "PytorchGELUTanh"),
        *("GELUActivation", "NewGELUActivation", "QuickGELUActivation", "FastGELUActivation"),
        *("SiLU", "SiLUActivation", "Swish", "Mish", "MishActivation", "Softplus"),
    }
)
_SMOOTH_OPERATIONS = frozenset({":gelu", ":silu", ":mish", ":softplus"})  # how their labels end


def _note_peaks(
    peaks: dict[str, Tensor], smooth: AbstractSet[str], label: str, tensor: Tensor, channel_axis: int | None
) -> None:
    """Update the greatest magnitude of each channel, (C,), if a smooth layer or operation made the output."""
    layer = label.partition("#")[0]
    if smooth.isdisjoint((layer, "".join(layer.rpartition(":")[1:]))) or channel_axis is None:
        return
    if not tensor.is_floating_point() or tensor.layout != torch.strided or not tensor.numel():
        return
    others = [axis for axis in range(tensor.dim()) if axis != channel_axis]
    peak = torch.maximum(tensor.amax(others), -tensor.amin(others))
    earlier = peaks.get(label)
    peaks[label] = torch.maximum(earlier, peak) if earlier is not None and earlier.shape == peak.shape else peak


def measure(
    prepared: Prepared, settings: CheckSettings, wanted: AbstractSet[str], *, with_signatures: bool = False
) -> CheckMeasurements:
    """Measure what the wanted rules look at; if the forward pass raises, `forward.failure` says why.

    The network runs over all inputs once with every module hooked, and again only as far as rules need it. It is
    left as it was. Signatures of the outputs are for a baseline.

    Raises:
        InputError: If an input, or the survey of the settings, cannot be read.
        UsageError: If the settings name an output, a loss or a target that does not exist, or another survey.
    """
    measuring, loaded = _Measuring(prepared, settings, wanted), prepared.loaded
    subject = inspected_network(loaded)
    survey = None if settings.survey is None else _read_survey_of(settings.survey, subject)
    norms = BatchNormInputs(with_statistics(subject.modules) if "batchnorm-statistics" in wanted else {})
    with measuring.timed("stored"):
        stored = measuring.read_stored(subject)
        optimisers = optimiser_values(loaded.training) if "optimizer-state" in wanted else ()
        scalers = scaler_values(loaded.training) if "scaler-state" in wanted else ()
        copies = tuple(copy_values(loaded.training)) if "averaged-weights" in wanted else ()
    by_label = {row_label(name, 0, ""): type(module).__name__ for name, module in subject.modules.items()}
    smooth = {label for label, kind in by_label.items() if kind in SMOOTH} | _SMOOTH_OPERATIONS
    peaks: dict[str, Tensor] = {}
    signatures = OutputSignatures() if with_signatures else None
    forward = None
    if measuring.needing(*_NEED_FORWARD):
        with measuring.timed("forward"):
            forward, outputs = measuring.run_forward(
                subject,
                partial(_note_peaks, peaks, smooth if "quiet-channels" in wanted else frozenset()),
                norms.add if norms.norms and not prepared.is_noise else None,
                signatures,
            )
        is_new = statistics_are_new(stored)
        if reason := norms.reason_to_skip(prepared.input_count, is_noise=prepared.is_noise, is_new=is_new):
            measuring.leave_out(wanted & {"batchnorm-statistics"}, reason)
        with measuring.timed("again"):
            measuring.run_again(subject, forward, outputs)
    labelled = None
    if measuring.needing("labels") and forward is not None and forward.failure is None:
        with measuring.timed("data"):
            labelled = measure_labelled(prepared, settings, subject)
    if measuring.needing("gradients") and (forward is None or forward.failure is None):
        with measuring.timed("gradients"):
            measuring.take_gradients()
    if survey is not None and settings.survey is not None and forward is not None:
        measuring.warnings.append(_survey_words(settings.survey, survey, forward.rows))
    if labelled is not None:
        measuring.warnings.append(mapping_words(labelled.accuracy))
    return CheckMeasurements(
        loaded.info,
        stored,
        forward,
        measuring.origin,
        {label: peak.float().cpu().numpy() for label, peak in peaks.items()},
        norms.results(),
        measuring.outputs,
        labelled,
        measuring.gradients,
        unmeasured=measuring.unmeasured,
        optimisers=optimisers,
        scalers=scalers,
        copies=copies,
        warnings=measuring.every_warning(forward),
        seconds={"load": prepared.load_seconds, **measuring.seconds},
        signatures=signatures.results() if signatures else {},
        weights_precision=weights_precision(subject.network) if signatures else "",
        survey=survey,
    )


def measure_layers(prepared: Prepared, settings: CheckSettings, rows: Sequence[LayerRow]) -> Activations:
    """Run the inputs again and keep feature maps of the first input for these rows, as evidence.

    Raises ImageError if an input cannot be read.
    """
    options = ForwardOptions(layers=[*map(_pattern_of, rows)], **_options(settings), grids_for=1, summaries=True)
    try:
        return inspect(prepared.loaded, prepared.batches(), options)
    except ForwardError as error:
        return error.inspection


def _options(settings: CheckSettings) -> dict[str, Any]:
    return {"seed": settings.seed, "output_key": settings.output_key}


def _pattern_of(row: LayerRow) -> str:
    if row.owner is not None and row.kind.isidentifier() and re.fullmatch(r"[\w.]*", row.owner):
        return f"{row.owner or '(model)'}:{row.kind}"
    return rf"name:/\A{re.escape(module_of(row))}\Z/"


@dataclass(slots=True)
class _Measuring:
    """The wanted rules, and the measurements so far, named as in `CheckMeasurements`."""

    prepared: Prepared
    settings: CheckSettings
    wanted: AbstractSet[str]
    origin: NonFiniteOrigin | None = None
    outputs: tuple[OutputValues, ...] = ()
    gradients: Gradients | None = None
    unmeasured: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - began

    def needing(self, *needs: Needs) -> set[str]:
        return {rule for rule in self.wanted if RULES[rule].needs in needs}

    def leave_out(self, rules: AbstractSet[str], reason: str) -> None:
        """Record why rules could not be measured; an earlier reason stays."""
        self.unmeasured = dict.fromkeys(sorted(rules), reason) | self.unmeasured

    def read_stored(self, subject: InspectedNetwork) -> tuple[StoredValues, ...]:
        """Measure parameters and buffers; unreadable ones become warnings."""
        stored, unread = stored_tensors(subject.network)
        self.warnings += unread
        if unread and not any(tensor.nan_count or tensor.inf_count for tensor in stored):
            self.leave_out(self.wanted & {"non-finite-parameter"}, " ".join(unread))
        return stored

    def every_warning(self, forward: Activations | None) -> tuple[str, ...]:
        """Return notes and warnings of the network, its passes and the measurements, without repeats."""
        passes = [taken for taken in (forward, self.gradients) if taken is not None]
        of_passes = [text for taken in passes for text in (*taken.notes, *taken.warnings)]
        loaded = self.prepared.loaded
        return tuple(dict.fromkeys([*loaded.notes, *loaded.warnings, *of_passes, *self.warnings]))

    def run_forward(
        self,
        subject: InspectedNetwork,
        on_tensor: OnTensor,
        on_call: OnCall | None,
        signatures: OutputSignatures | None,
    ) -> tuple[Activations, FirstPass]:
        """Run the network over all inputs with every module hooked; return the rows, and the first pass's outputs."""
        loaded, settings = self.prepared.loaded, self.settings
        expecting = "expectation" in self.wanted and bool(settings.expectations)
        outputs = FirstPass(subject, self.wanted, settings.seed)
        predictions: list[Prediction] = []

        def on_output(batch: Batch, output: object) -> None:
            returned = returned_tensors(output)
            outputs.add(batch, returned)
            if not expecting and self.prepared.is_noise:
                return
            count = max([_FEWEST_CLASSES, *(expectation.k for expectation in settings.expectations)])
            scores = class_scores(returned, len(batch.indices), settings.output_key)
            if not isinstance(scores, str):
                names = loaded.info.categories if len(loaded.info.categories) == scores.shape[1] else ()
                predictions.extend(top_classes(scores, names, batch.indices, count, multi_label=loaded.multi_label))
            elif expecting:
                self.unmeasured["expectation"] = scores

        batches = self.prepared.batches()
        if signatures is not None:
            batches = signatures.numbered(batches)
            on_call, on_tensor = signatures.after(on_call, on_tensor)
        try:
            options = ForwardOptions(
                layers=["*"],
                for_rules=True,
                keep_rule_outputs=True,
                **_options(settings),
                distributions=True,
                tokens="massive-activation" in self.wanted,
            )
            observer = on_output if expecting or self.needing("outputs") else None
            seen = inspect(loaded, batches, options, on_tensor=on_tensor, on_call=on_call, on_output=observer)
        except ForwardError as error:
            return error.inspection, outputs
        return replace(seen, predictions=tuple(predictions)) if predictions else seen, outputs

    def run_again(self, subject: InspectedNetwork, forward: Activations, outputs: FirstPass) -> None:
        is_broken = any(row.activation.nan_count or row.activation.inf_count for row in of_modules(forward.rows))
        if "non-finite-activation" in self.wanted and is_broken:
            self.origin, broken = locate_origin(subject, self.prepared.batches(), self.settings.seed)
            if broken:
                sentence = f"Input {broken} has NaN or Inf itself"
                sentence += ", so no module is to blame." if self.origin is None else "."
                self.warnings.append(sentence)
                if self.origin is None:
                    self.leave_out({"non-finite-activation"}, sentence)
        if forward.failure is None and self.needing("outputs"):
            self.outputs = outputs.compare()
            self.unmeasured |= outputs.unmeasured
            self.warnings += outputs.warnings

    def take_gradients(self) -> None:
        """Run the network forward and backward over all inputs; detectors in train mode get targets."""
        module, batches, loss = self.prepared.loaded.module, self.prepared.batches(), self._loss()
        if self.settings.mode == "train" and default_targets_text(module):
            batches = (with_default_targets(module, batch) for batch in batches)
        rules = self.needing("gradients")
        try:
            options = GradientOptions(for_rules=True, mode=self.settings.mode, **_options(self.settings))
            self.gradients = inspect_gradients(self.prepared.loaded, batches, loss, options)
        except PassError as error:
            self.gradients = error.inspection
            self.leave_out(rules - {"non-finite-loss"} if error.inspection.loss is not None else rules, str(error))
        except UsageError as error:
            if self.settings.loss not in _FIT_ALL or self.settings.output_key is not None:
                raise
            self.leave_out(rules, str(error))

    def _loss(self) -> Loss:
        """Return the loss of the settings: a name, or FILE.py:FUNCTION; the target may be a tensor file."""
        source, _, name = self.settings.loss.rpartition(":")
        target, loaded = self.settings.target, self.prepared.loaded
        file = Path(target) if target is not None and target.lower().endswith(tuple(TENSOR_SUFFIXES)) else None
        return choose_loss(
            load_function(Path(source), name) if source.endswith(".py") else self.settings.loss,
            target=target if file is None else read_tensor(file),
            target_name="" if file is None else file.name,
            categories=loaded.info.categories,
            **_options(self.settings),
            input_count=self.prepared.input_count,
        )


def _read_survey_of(folder: Path, subject: InspectedNetwork) -> Survey:
    survey = read_run(folder).result
    if not isinstance(survey, Survey):
        raise refusal(folder, "it is not a run of `hookscope survey`", "Give the folder of one.")
    unfit, dtype = f"{arg('survey')} '{safe_text(str(folder))}' does not fit", subject.placed[1]
    if survey.dtype != dtype:
        raise UsageError(f"{unfit}: the network ran in {survey.dtype}, and here it is {dtype}.")
    if survey.model_digest != model_digest(subject.network):
        other = f"different network or different weights ({survey.model.name}, {survey.model.weights})"
        raise UsageError(f"{unfit}: it was made with a {safe_text(other)}. Survey this one first.")
    return survey


def _survey_words(folder: Path, survey: Survey, rows: Sequence[LayerRow]) -> str:
    surveyed = survey.by_label()
    covered = sum(row.label in surveyed for row in rows)
    others = "" if covered == len(rows) else ", and at the others over the inputs given"
    return (
        f"Rules about activations look at {covered:,} of {counted(len(rows), 'output')} in the survey "
        f"'{safe_text(str(folder))}' of {counted(survey.input_count, 'input')}{others}."
    )
