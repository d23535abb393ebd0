"""`hookscope check`: the verdict on checkpoints that a CI job trusts."""

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hookscope import options
from hookscope.cli.ci_output import CiOutput, ci_output, refuse_one_file, sarif_log, write_each, write_sarif
from hookscope.cli.console import consoles, progress_bar, report
from hookscope.cli.exporters import print_page
from hookscope.errors import OutputError, UsageError, most_severe
from hookscope.text import distinct_names, safe_text, slug

if TYPE_CHECKING:
    from rich.console import Console

    from hookscope.checkpoints.sandbox.worker import Limits
    from hookscope.cli.check_workers import Checked
    from hookscope.results.check import CheckReport
    from hookscope.rules.baseline import Baseline

_CONFIG = Path("hookscope.toml")

_SHARE_OF_MEMORY = 0.9  # of all memory, for all workers; the rest is for the system


def check(checkpoints: Sequence[str] = (), *, option: options.Check) -> int:
    """Load and run each CHECKPOINT, and judge it by rules: is it corrupt, non-finite, half-loaded, dead, drifting?

    Options override the configuration. The exit code is 0 if all pass and 1 if a checkpoint fails a rule; other codes
    mean that a checkpoint could not be checked. Each checkpoint runs in a separate process with limits on memory and
    time.

    \b
    hookscope check model.pt
    hookscope check 'checkpoints/*.safetensors' --jobs 2 --junit junit.xml
    hookscope check training.ckpt --key ema --images photos/
    hookscope check model.pt --data val/ --limit accuracy.min-fraction=0.9 --baseline baseline.json
    hookscope check model.pt --survey survey-model --select 'dead-*' --select fp16-headroom
    hookscope check model.pt --arch net.py:build --config configs/strict.toml --evidence evidence
    hookscope check checkpoints --evidence evidence --report report.html
    hookscope check model.pt --baseline baseline.json --update-baseline
    hookscope check --explain dead-channels
    """
    if option.rules or option.explain is not None or option.init:
        return _inform(option)
    from hookscope.checkpoints.find_checkpoints import find_checkpoints
    from hookscope.cli.check_workers import CheckJob, check_workers
    from hookscope.commands.check.configuration.reading import read_settings
    from hookscope.results.runs.reports import check_report_target
    from hookscope.rules.judging import judged_by
    from hookscope.rules.settings import with_options

    config = None if option.config is None else Path(option.config)
    evidence = None if option.evidence is None else Path(option.evidence)
    refuse_one_file(option)
    with sarif_log(option.sarif, config):
        if not checkpoints:
            raise UsageError(
                "Missing CHECKPOINT: name a weights file, a folder or a glob. See `hookscope check --help`."
            )
        began = time.perf_counter()
        settings = with_options(read_settings(option.config, Path()), option)
        paths = find_checkpoints(checkpoints)
        baseline = _baseline_to_compare(settings.baseline, paths, renews=option.update_baseline)
        settings, wanted = judged_by(settings, option, baseline, renews_baseline=option.update_baseline)
        ci = ci_output(option)
        if option.page is not None:
            check_report_target(option.page)
        work = [
            CheckJob(name, settings, wanted, option, baseline, folder)
            for name, folder in zip(paths, _evidence_folders(evidence, paths), strict=True)
        ]
        tables, messages = consoles(json=ci.format in ("json", "markdown"))
        at_once = min(option.jobs, len(paths))
        with progress_bar(messages, shown=messages.is_terminal) as advance:
            results = check_workers(work, _limits(option, at_once), at_once, advance)
        reports = [outcome.report for outcome in results]
        names = filter(None, map(os.environ.get, ("GITHUB_WORKFLOW", "GITHUB_JOB", "CI_JOB_NAME")))
        job = ": ".join(filter(None, (" / ".join(names), " ".join(checkpoints))))  # what is the same in later runs
        seconds = time.perf_counter() - began
        writers = [*ci.writers(reports, seconds=seconds, job=job)]
        if option.page is not None:
            from hookscope.commands.check.page import checks_html
            from hookscope.results.runs.reports import write_report

            writers.append(partial(write_report, option.page, checks_html(reports, seconds=seconds)))
        if option.update_baseline and settings.baseline is not None:
            writers.append(partial(_renew, settings.baseline, results[0]))
        if option.sarif is not None:
            writers.append(partial(write_sarif, option.sarif, reports, config))
        failures = write_each(writers)
    _show(reports, ci, tables, job, time.perf_counter() - began)
    if option.page is not None and not failures:
        print_page(option.page, tables)
    if evidence is not None and all(outcome.passed for outcome in reports):
        path = safe_text(str(evidence))
        typer.echo(f"hookscope: note: nothing is written to {path}: every checkpoint passed.", err=True)
    _show_bugs(results)
    return most_severe([*(outcome.exit_code for outcome in reports), *map(report, failures)])


def _inform(option: options.Check) -> int:
    """Do what `--rules`, `--explain` and `--init` ask for, and ignore the other options."""
    from hookscope.cli.rule_tables import rule_explanation, rules_table
    from hookscope.errors import nearest
    from hookscope.rules import HISTORY_RULES, RULES

    tables, _ = consoles(json=False)
    if option.rules:
        tables.print(rules_table(tables.width), overflow="ignore", crop=False)
    if option.explain is not None:
        if meaning := HISTORY_RULES.get(option.explain):
            tables.print(f"{option.explain}, a rule of `hookscope history`, reports that {meaning}.")
        elif option.explain in RULES:
            tables.print(rule_explanation(RULES[option.explain]))
        else:
            close = nearest(option.explain, (*RULES, *HISTORY_RULES))
            raise UsageError(f"No rule is called {option.explain!r}.{close} List them with --rules.")
    if option.init:
        from hookscope.commands.check.configuration.default_file import default_text

        try:
            with _CONFIG.open("x", encoding="utf-8") as file:
                file.write(default_text())
        except FileExistsError as error:
            raise OutputError(f"{_CONFIG} exists already; delete it first, or edit it.") from error
        except OSError as error:
            raise OutputError(f"Cannot write {_CONFIG}: {error.strerror}. Go to another folder.") from error
        tables.print(f"{_CONFIG} was written; `hookscope check CHECKPOINT` reads it.")
    return 0


def _baseline_to_compare(baseline: Path | None, checkpoints: Sequence[str], *, renews: bool) -> "Baseline | None":
    """Read the baseline to compare with; None without one, and if `--update-baseline` is to write it."""
    from hookscope.results.runs.atomic import check_text_target
    from hookscope.rules.baseline import read_baseline

    if not renews:
        return None if baseline is None else read_baseline(baseline)
    if baseline is None:
        raise UsageError("--update-baseline needs the file to write: give --baseline FILE.")
    if len(checkpoints) != 1:
        raise UsageError(f"--update-baseline takes one checkpoint, not {len(checkpoints)}: name one.")
    check_text_target(baseline, "--baseline", "{")
    return None


def _evidence_folders(evidence: Path | None, checkpoints: Sequence[str]) -> list[Path | None]:
    if evidence is None:
        return [None] * len(checkpoints)
    from hookscope.results.runs.directory import check_target

    folders = [evidence / name for name in distinct_names(map(slug, checkpoints))]
    for folder in folders:
        check_target(folder, "--evidence")
    return [*folders]


def _limits(option: options.Check, at_once: int) -> "Limits":
    """Return the limits of one worker; print a note if `--memory` has no effect here."""
    from hookscope.checkpoints.sandbox.worker import CAN_LIMIT_MEMORY, Limits, machine_memory_bytes

    # An accelerator's driver reserves far more addresses than memory.
    if not CAN_LIMIT_MEMORY or option.device != "cpu":
        if option.memory is not None:
            why = "with an accelerator" if CAN_LIMIT_MEMORY else "on this system"
            typer.echo(f"hookscope: note: --memory has no effect {why}.", err=True)
        return Limits(option.timeout)
    if option.memory is not None:
        return Limits(option.timeout, int(option.memory * 2**30))
    machine = machine_memory_bytes()
    return Limits(option.timeout, None if machine is None else int(_SHARE_OF_MEMORY * machine / at_once))


def _renew(baseline: Path, checked: "Checked") -> None:
    from hookscope.results.runs.atomic import write_whole

    path = safe_text(str(baseline))
    if not checked.baseline:
        raise UsageError(f"{path} is not written: the checkpoint did not run. First correct what the report lists.")
    write_whole(baseline, checked.baseline, "--baseline")
    failed = ", of a checkpoint that fails" if checked.report.exit_code else ""
    typer.echo(f"hookscope: wrote the baseline to {path}{failed}; review the change before you commit it.", err=True)


def _show(reports: "Sequence[CheckReport]", ci: CiOutput, tables: "Console", job: str, seconds: float) -> None:
    if ci.format == "json":
        from hookscope.results.check import checks_to_json

        typer.echo(checks_to_json(reports), nl=False)
    elif ci.format != "markdown":
        from hookscope.commands.check.describe import describe_checks
        from hookscope.reporting.document_text import printed

        text = printed(describe_checks(reports, seconds=seconds), width=tables.width)
        tables.print(text, overflow="ignore", crop=False)  # no name is broken
    ci.print(reports, seconds=seconds, job=job)


def _show_bugs(results: "Sequence[Checked]") -> None:
    tracebacks = dict.fromkeys(result.traceback for result in results if result.traceback)
    for line in (line for traceback in tracebacks for line in traceback.splitlines()):
        typer.echo(safe_text(line), err=True)
    if tracebacks:
        typer.echo("hookscope: this is a bug in hookscope. Please report it with the lines above.", err=True)
