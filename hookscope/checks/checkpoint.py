"""One checkpoint, from its file to the verdict."""

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hookscope.checks.baseline import Baseline
from hookscope.checks.judging import judge, refused
from hookscope.checks.measuring import Prepared, measure, prepare
from hookscope.checks.settings import CheckSettings
from hookscope.errors import EXIT_CHECK_FAILED, HookscopeError, InputError, ModelError, OutputError, is_out_of_memory
from hookscope.models import LoadedModel
from hookscope.results.check import CheckMeasurements, CheckReport


def check_checkpoint(
    model: str | nn.Module | LoadedModel,
    settings: CheckSettings,
    wanted: AbstractSet[str],
    *,
    trust: bool = False,
    device: torch.device | None = None,
    baseline: Baseline | None = None,
    evidence: Path | None = None,
    on_measured: Callable[[CheckMeasurements], None] | None = None,
) -> CheckReport:
    """Load a checkpoint, run it, judge it; keep evidence if it fails.

    Whatever a user can put right is an `error` in the report; exceptions are bugs.

    Args:
        model: A weights file or any other form of MODEL, or a network.
        settings: What to give it, and what to hold it to.
        wanted: Identifiers of rules, as `wanted_rules` returns them.
        trust: Whether a weights file may run code while it is read.
        device: Where to run; None for the CPU, or where a given network is.
        baseline: What to hold its statistics against.
        evidence: Folder to write on failure: nothing yet, or that of an earlier failure, which is replaced.
        on_measured: Is given what was measured, if it could be.
    """
    began = time.perf_counter()
    name = model.info.name if isinstance(model, LoadedModel) else model
    name = name if isinstance(name, str) else type(name).__name__
    prepared, measured = None, None
    try:
        prepared = prepare(model, settings, trust=trust, device=device)
        # A baseline and evidence are made from a forward pass, as the rule `drift` needs it, whatever is wanted.
        keeps_rows = on_measured is not None or evidence is not None
        measured = measure(prepared, settings, wanted | {"drift"} if keeps_rows else wanted)
        _refuse_lack_of_memory(name, measured)
        report = judge(name, measured, settings, wanted, baseline)
    except HookscopeError as error:
        measured = None
        lacks_memory = isinstance(error, ModelError) and is_out_of_memory(str(error))  # it could not even be built
        report = refused(name, _lack_of_memory(name) if lacks_memory else error, wanted)
    if measured is not None and on_measured is not None:
        on_measured(measured)
    if evidence is not None and not report.passed:
        report = _with_evidence(report, evidence, prepared, settings, measured)
    return replace(report, seconds={**report.seconds, "total": time.perf_counter() - began})


def _refuse_lack_of_memory(name: str, measured: CheckMeasurements) -> None:
    """Raise InputError if a pass raised for want of memory: that is no fault of the network."""
    for inspection in (measured.forward, measured.gradients):
        failure = inspection.failure if inspection is not None else None
        if failure is not None and is_out_of_memory(failure.error):
            raise _lack_of_memory(name, f", in {failure.layer or '(model)'}")


def _lack_of_memory(name: str, where: str = "") -> InputError:
    return InputError(
        f"{name} could not be checked: it needs more memory than allowed{where}. Give it more, or smaller inputs."
    )


def _with_evidence(
    report: CheckReport,
    folder: Path,
    prepared: Prepared | None,
    settings: CheckSettings,
    measured: CheckMeasurements | None,
) -> CheckReport:
    """Write the evidence; where that fails, the checkpoint could not be checked to the end."""
    from hookscope.checks.evidence import write_evidence  # noqa: PLC0415 (matplotlib; most checkpoints pass)

    told = replace(report, evidence=str(folder))
    try:
        write_evidence(folder, told, prepared, settings, measured)
    except OutputError as error:
        worse = report.error_code in (0, EXIT_CHECK_FAILED)
        return replace(report, error=str(error), error_code=error.exit_code) if worse else report
    return told
