"""One checkpoint, from its file to the verdict."""

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hookscope.checks import judge, refused, wanted_rules
from hookscope.checks.baseline import Baseline, read_baseline
from hookscope.checks.configuration import read_settings
from hookscope.checks.examination import Prepared, examine, prepare
from hookscope.checks.settings import CheckSettings
from hookscope.errors import EXIT_CHECK_FAILED, HookscopeError, InputError, ModelError, OutputError, is_out_of_memory
from hookscope.models import LoadedModel
from hookscope.results.check import CheckReport, Examination


def check(
    checkpoint: str | Path | nn.Module | LoadedModel,
    config: str | Path | None = None,
    *,
    arch: str | None = None,
    baseline: str | Path | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    trust: bool = False,
    evidence: str | Path | None = None,
) -> CheckReport:
    """Check one checkpoint in this process, as `hookscope check` does in one of its own.

        >>> import hookscope
        >>> def test_the_checkpoint_is_sound():
        ...     hookscope.check("model.pt").raise_for_failure()

    Args:
        checkpoint: A weights file or any other form of MODEL, which runs on the CPU; or a network, which runs where it
            is, and is left as it was.
        config: The configuration; None for that of the working directory, else the defaults.
        arch: The network that a weights file belongs to; None for the configuration's, or to recognise it.
        baseline: What `--update-baseline` wrote; None for the configuration's, if it names one.
        select: Rules to judge by, as `--select`.
        ignore: Rules to leave out, as `--ignore`.
        trust: Whether a weights file may run code while it is read.
        evidence: A folder for grids, histograms and rows of what failed; None for none.

    Returns:
        The verdict. A checkpoint that cannot be read or run has one too: `error` says why.

    Raises:
        UsageError: If the configuration, the baseline or the name of a rule is wrong.
        OutputError: If the evidence could not be written where it is to go.
    """
    settings = read_settings(None if config is None else Path(config), Path())
    settings = settings if arch is None else replace(settings, arch=arch)
    path = settings.baseline if baseline is None else Path(baseline)
    return check_checkpoint(
        str(checkpoint) if isinstance(checkpoint, Path) else checkpoint,
        settings,
        wanted_rules(settings, select, ignore),
        trust=trust,
        baseline=None if path is None else read_baseline(path),
        evidence=None if evidence is None else Path(evidence),
    )


def check_checkpoint(
    model: str | nn.Module | LoadedModel,
    settings: CheckSettings,
    wanted: AbstractSet[str],
    *,
    trust: bool = False,
    device: torch.device | None = None,
    baseline: Baseline | None = None,
    evidence: Path | None = None,
    on_examined: Callable[[Examination], None] | None = None,
) -> CheckReport:
    """Load a checkpoint, run it, judge it; keep evidence if it fails.

    Args:
        model: A weights file or any other form of MODEL, or a network.
        settings: What to give it, and what to hold it to.
        wanted: Identifiers of rules that are not off.
        trust: Whether a weights file may run code while it is read.
        device: Where to run; None for the CPU, or where a given network is.
        baseline: What to hold its statistics against.
        evidence: Folder to write on failure: nothing yet, or that of an earlier failure, which is replaced.
        on_examined: Is given what was measured, if it could be.

    Returns:
        The verdict. Whatever a user can put right is an `error` in it; other exceptions are bugs, and pass.
    """
    began = time.perf_counter()
    name = model if isinstance(model, str) else _name_of(model)
    prepared, examination = None, None
    try:
        prepared = prepare(model, settings, trust=trust, device=device)
        # A baseline and evidence are made from a forward pass, as the rule `drift` needs it, whatever is wanted.
        keeps_rows = on_examined is not None or evidence is not None
        examination = examine(prepared, settings, wanted | {"drift"} if keeps_rows else wanted)
        _refuse_lack_of_memory(name, examination)
        report = judge(name, examination, settings, wanted, baseline)
    except HookscopeError as error:
        examination = None
        lacks_memory = isinstance(error, ModelError) and is_out_of_memory(str(error))  # it could not even be built
        report = refused(name, _lack_of_memory(name) if lacks_memory else error, wanted)
    if examination is not None and on_examined is not None:
        on_examined(examination)
    if evidence is not None and not report.passed:
        report = _with_evidence(report, evidence, prepared, settings, examination)
    return replace(report, seconds={**report.seconds, "total": time.perf_counter() - began})


def _name_of(model: nn.Module | LoadedModel) -> str:
    return model.info.name if isinstance(model, LoadedModel) else type(model).__name__


def _refuse_lack_of_memory(name: str, examination: Examination) -> None:
    """Tell a network that needs more memory than it may take from one that is wrong.

    Raises:
        InputError: If a forward or backward pass raised for want of memory.
    """
    for inspection in (examination.forward, examination.gradients):
        failure = inspection.failure if inspection is not None else None
        if failure is not None and is_out_of_memory(failure.error):
            raise _lack_of_memory(name, f", in {failure.layer or '(model)'}")


def _lack_of_memory(name: str, where: str = "") -> InputError:
    return InputError(
        f"{name} could not be checked: it needs more memory than it may take{where}. Give it more, or smaller inputs."
    )


def _with_evidence(
    report: CheckReport,
    folder: Path,
    prepared: Prepared | None,
    settings: CheckSettings,
    examination: Examination | None,
) -> CheckReport:
    """Write the evidence; where that fails, the checkpoint could not be checked to the end."""
    from hookscope.checks.evidence import write_evidence  # noqa: PLC0415 (matplotlib; most checkpoints pass)

    told = replace(report, evidence=str(folder))
    try:
        write_evidence(folder, told, prepared, settings, examination)
    except OutputError as error:
        worse = report.error_code in (0, EXIT_CHECK_FAILED)
        return replace(report, error=str(error), error_code=error.exit_code) if worse else report
    return told
