"""Check checkpoints, each in a separate process, whatever ends it; torch is loaded only there."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hookscope.checkpoints.sandbox.jobs import run_jobs
from hookscope.checkpoints.sandbox.worker import Limits, WorkerFailure, usable_cores
from hookscope.errors import HookscopeError, InputError, UsageError
from hookscope.options import Check
from hookscope.results.check import CheckMeasurements, CheckReport
from hookscope.rules.baseline import Baseline, baseline_of, baseline_text
from hookscope.rules.judging import refuse_unmatched, refused
from hookscope.rules.settings import CheckSettings
from hookscope.text import printable

# torchvision builds the networks that are recognised.
_PRELOAD = ("hookscope.commands.check.checkpoint", "torchvision")


@dataclass(frozen=True, slots=True)
class CheckJob:
    """What a worker needs to check a checkpoint: see `check_checkpoint`."""

    checkpoint: str
    settings: CheckSettings
    wanted: frozenset[str]
    option: Check
    baseline: Baseline | None
    evidence: Path | None


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a job: the verdict, the new baseline as text if one was wanted and made, and a bug's traceback."""

    report: CheckReport
    baseline: str = ""
    traceback: str = ""


def check_workers(
    jobs: Sequence[CheckJob], limits: Limits, at_once: int, advance: Callable[[int, int], None]
) -> list[Checked]:
    """Check checkpoints; call `advance` with the number finished and the number of all.

    `at_once` workers share the processor cores, unless OMP_NUM_THREADS limits each.
    """
    shares = at_once > 1 and "OMP_NUM_THREADS" not in os.environ
    environment = {"OMP_NUM_THREADS": str(max(1, usable_cores() // at_once))} if shares else {}
    running = run_jobs(_check, jobs, limits, at_once=at_once, preload=_PRELOAD, environment=environment)
    finished: dict[int, Checked] = {}
    with closing(running):
        for position, outcome in running:
            failed = isinstance(outcome, WorkerFailure)
            finished[position] = (_unfinished if failed else _validated)(jobs[position], outcome)
            advance(len(finished), len(jobs))
    results = [finished[position] for position in range(len(jobs))]
    reports = refuse_unmatched([result.report for result in results], jobs[0].wanted)
    return [
        result if report is result.report else Checked(report) for result, report in zip(results, reports, strict=True)
    ]


def _validated(job: CheckJob, answer: object) -> Checked:
    """Validate a worker's result: a worker that a file has taken over may answer anything."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    adapter = TypeAdapter(tuple[Checked], config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_python((answer,))[0]
    except ValidationError:
        return _unfinished(job, WorkerFailure("killed", "its answer is damaged"))


def _check(job: CheckJob) -> dict[str, Any]:
    from hookscope.commands.check.checkpoint import check_checkpoint
    from hookscope.inspection.device import choose_device

    measured: list[CheckMeasurements] = []
    try:
        device = None if job.option.device == "cpu" else choose_device(job.option.device)
    except UsageError as error:
        return asdict(Checked(refused(job.checkpoint, error, job.wanted)))
    report = check_checkpoint(
        job.checkpoint,
        job.settings,
        job.wanted,
        trust=job.option.trust,
        device=device,
        baseline=job.baseline,
        evidence=job.evidence,
        on_measured=measured.append if job.option.update_baseline else None,
    )
    report = replace(report, overview_parts=None)  # the overview is drawn
    return asdict(Checked(report, baseline_text(baseline_of(measured[0])) if measured else ""))


def _unfinished(job: CheckJob, ending: WorkerFailure) -> Checked:
    remedies = {
        "time": " Give it more with --timeout.",
        "memory": " Give it more with --memory, or run fewer --jobs.",
        "killed": " Check the file, and the memory that is free.",
        "raised": " This is a bug in hookscope; please report it with the traceback on stderr.",
    }
    message = f"{printable(job.checkpoint)} could not be checked: {ending.reason}.{remedies[ending.cause]}"
    error = HookscopeError(message) if ending.cause == "raised" else InputError(message)
    return Checked(refused(job.checkpoint, error, job.wanted), traceback=ending.traceback)
