"""Measure hookscope beside other tools: print tables, and write the figures as JSON.

Each section has a separate process, in which all that it compares takes turns: what other sections' peers leave
behind in a process, memory or changed functions, costs nobody anything. A whole run takes about 45 minutes, on a
machine that does nothing else, and is kept in `benchmarks/results/`. A run of some sections is kept only where
`--output` says; there it replaces these sections and keeps the others.

`--device cuda` measures what runs on a GPU: times are between CUDA events with the work in between finished, TF32 is
off, and what each way finds there is compared with what is found on the CPU.

Exit codes: 0 every limit holds; 1 one is missed; 2 it cannot run, or a section cannot: the others are kept.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.documentation import RESULTS
from benchmarks.findings import Machine, Report, from_json, to_json
from benchmarks.machine import describe
from benchmarks.sections import SECTIONS, THREADS, measure_apart
from benchmarks.table import limit_table, section_table


def main() -> int:
    """Measure, show and write; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="SECTION", action="append", help="measure this section; repeatable")
    parser.add_argument("--device", choices=tuple(SECTIONS), default="cpu", help="default: cpu")
    parser.add_argument("--output", metavar="FILE", type=Path, help="where the JSON goes; other sections in it stay")
    options = parser.parse_args()
    sections = SECTIONS[options.device]
    unknown = [name for name in options.only or () if name not in sections]
    if unknown:
        parser.error(f"no section '{unknown[0]}' on {options.device}; there are: {', '.join(sections)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; run it where there is one, or without --device")

    torch.set_num_threads(THREADS)  # as each section does
    machine, date = describe(options.device), datetime.now(UTC).date().isoformat()
    output = options.output or (None if options.only else RESULTS / f"{file_name(date, machine)}.json")
    kept = Report(machine)
    if output is not None and output.exists():
        kept = from_json(output.read_text(encoding="utf-8"))
        if kept.machine != machine:
            parser.error(f"--output {output}: measured on a different machine or with other versions")

    console = Console(width=None if sys.stdout.isatty() else 180, markup=False, highlight=False)
    measured, failed = {}, []
    for name in options.only or sections:
        try:
            measured[name] = replace(measure_apart(options.device, name), date=date)
        except subprocess.CalledProcessError:  # its traceback is on the terminal
            failed.append(name)
            continue
        console.print(section_table(measured[name]))
        if output is not None:
            actual = {**kept.sections, **measured}
            output.parent.mkdir(parents=True, exist_ok=True)
            report = Report(machine, {section: actual[section] for section in sections if section in actual})
            output.write_text(to_json(report), encoding="utf-8")
    report = Report(machine, measured)
    console.print(limit_table(report))
    if failed:
        console.print(f"Not measured: {', '.join(failed)}. The errors are above.")
    return 2 if failed else int(report.missed)


def file_name(date: str, machine: Machine) -> str:
    """Name results by date and machine: "2026-11-21-cpu-amd-epyc-2-threads"."""
    subject = machine.accelerator or f"{machine.processor} {machine.thread_count} threads"
    return f"{date}-{machine.device}-" + re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
