"""Write the figures of docs/benchmarks.md from a results file: `python -m benchmarks.documentation RESULTS`."""

import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from benchmarks.findings import Machine, Measurement, Report, Section, from_json, shown

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"

# Sections that the page shows way by way. Of the others it has the budgets.
_SHOWN_WHOLE = (
    *("activations", "grads", "attribute, diff and check", "activations, malloc as it is", "grads, malloc as it is"),
    *("capture", "gradients", "gradients of timm", "whole commands", "memory", "survey"),
)


def performance(report: Report) -> str:
    """Return the section's text in Markdown, without the markers."""
    parts = [_wrapped(_origin(report)), _budgets(report)]
    for name, section in report.sections.items():
        if name in _SHOWN_WHOLE or section.fits:
            parts.append(_wrapped(f"**{section.title}.** {section.note}"))
            parts.append("\n".join(f"- {fit.text}" for fit in section.fits) or _by_way(section))
    parts.append("All ways of every section, with their spreads: `benchmarks/results` in the repository.")
    return "\n\n".join(parts)


def _wrapped(text: str) -> str:
    return fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _origin(report: Report) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"Measured on {report.date} by `{report.command}` (extra `bench`): {_place(machine)}, "
        f"{machine.thread_count} threads, {machine.system}, Python {machine.python}, {versions}."
    )


def _place(machine: Machine) -> str:
    return machine.accelerator or f"{machine.processor}, {machine.core_count} cores"


def _budgets(report: Report) -> str:
    lines = ["| what | measured | at most | aim | verdict |", "|---|---|---|---|---|"]
    for section in report.sections.values():
        for each in section.measurements:
            if each.at_most is not None:
                figures = (shown(value, each.unit) for value in (each.figure, each.at_most, each.aim))
                lines.append(f"| {section.title}: {each.what} | {' | '.join(figures)} | {each.verdict} |")
    return "\n".join(lines)


def _by_way(section: Section) -> str:
    """Return a table of subjects and ways; there is a row for each of those that are more."""
    subjects = list(dict.fromkeys(each.subject for each in section.measurements))
    ways = list(dict.fromkeys(each.way for each in section.measurements))
    cells = {(each.way, each.subject): _cell(each) for each in section.measurements}
    if len(subjects) > len(ways):
        return _table(["network", *ways], ([what, *(cells.get((way, what), "") for way in ways)] for what in subjects))
    return _table(["way", *subjects], ([way, *(cells.get((way, what), "") for what in subjects)] for way in ways))


def _cell(measurement: Measurement) -> str:
    """Return the figure, and what is wrong with the work behind it."""
    work = measurement.work
    figure = shown(measurement.figure, measurement.unit)
    if work is None or work.verdict == "same":
        return figure
    if work.verdict == "does not run":
        return "does not run"
    if work.verdict == "shapes only":
        return f"{figure} (shapes only)"
    counts = ((work.wrong, "wrong"), (work.missing, "missing"))
    return f"{figure} ({', '.join(f'{count} {what}' for count, what in counts if count)} of {work.wanted})"


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rewritten(page: str, report: Report) -> str:
    """Return the page with its figures made anew.

    Raises:
        ValueError: If the two markers are not there, once each and in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"{PAGE.name} needs one line {BEGIN} and, below it, one line {END}.")
    return f"{before}{BEGIN}\n{performance(report)}\n{END}{after}"


def newest(folder: Path) -> Path | None:
    """Return the newest results of a whole run on the CPU, by the date they are named with; None without any."""
    return max(folder.glob("*-cpu-*.json"), key=lambda path: path.name, default=None)


def main() -> int:
    """Rewrite the page; return the exit code."""
    if len(sys.argv) != 2:
        print(f"usage: {(__doc__ or '').partition('`')[2].partition('`')[0]}", file=sys.stderr)
        return 2
    report = from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
