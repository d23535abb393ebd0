"""Write the figures of docs/benchmarks.md from all results on the CPU: `python -m benchmarks.documentation`."""

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import fill

from benchmarks.findings import Machine, Measurement, Report, Section, Work, from_json, shown

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"


def performance(reports: Iterable[Report]) -> str:
    """Return the sections' text in Markdown, machine by machine, without the markers."""
    origins: dict[str, str] = {}
    return "\n\n".join(part for report in reports for part in _parts(report, origins))


def _parts(report: Report, origins: dict[str, str]) -> Iterator[str]:
    """Yield headings, notes and tables; a note that `origins` has from another processor is only referred to."""
    processor = report.machine.processor
    yield f"### On {processor}"
    yield _wrapped(_origin(report.machine))
    for name, section in report.sections.items():
        yield f"#### {section.title}"
        yield f"`python -m benchmarks --only {shlex.quote(name)}`, {section.date}."
        origin = origins.setdefault(section.note, processor)
        yield _wrapped(section.note) if origin == processor else f"As on {origin}."
        yield _by_way(section)


def _wrapped(text: str) -> str:
    return fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _origin(machine: Machine) -> str:
    place = machine.accelerator or f"{machine.processor}, {machine.core_count} cores"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return f"{place}, {machine.thread_count} threads, {machine.system}, Python {machine.python}, {versions}."


def _by_way(section: Section) -> str:
    """Return a table of subjects and ways; there is a row for each of those that are more."""
    subjects = list(dict.fromkeys(measurement.subject for measurement in section.measurements))
    ways = list(dict.fromkeys(measurement.way for measurement in section.measurements))
    cells = {(measurement.way, measurement.subject): _cell(measurement) for measurement in section.measurements}
    if len(subjects) > len(ways):
        return _table(
            ["case", *ways], ([subject, *(cells.get((way, subject), "") for way in ways)] for subject in subjects)
        )
    return _table(
        ["with", *subjects], ([way, *(cells.get((way, subject), "") for subject in subjects)] for way in ways)
    )


def _cell(measurement: Measurement) -> str:
    """Return the figure, its limit, and what is wrong with the work behind it."""
    work = measurement.work or Work("same")
    if work.verdict == "does not run":
        return "does not run"
    notes = []
    if measurement.at_most is not None:
        limit = f"limit {shown(measurement.at_most, measurement.unit)}"
        notes.append(f"**{limit}, missed**" if measurement.missed else limit)
    if work.verdict == "shapes only":
        notes.append("shapes only")
    wrong = [f"{count} {subject}" for count, subject in ((work.wrong, "wrong"), (work.missing, "missing")) if count]
    if wrong:
        notes.append(f"{', '.join(wrong)} of {work.wanted}")
    if measurement.figure is None:
        return ", ".join(notes) or f"all {work.wanted} right"
    figure = shown(measurement.figure, measurement.unit)
    return f"{figure} ({', '.join(notes)})" if notes else figure


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rewritten(page: str, reports: Iterable[Report]) -> str:
    """Return the page with its figures made anew.

    Raises:
        ValueError: If the two markers are not there, once each and in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"{PAGE.name} needs one line {BEGIN} and, below it, one line {END}.")
    return f"{before}{BEGIN}\n{performance(reports)}\n{END}{after}"


def measured() -> list[Report]:
    """Return the results on the CPU, by date."""
    return [from_json(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*-cpu-*.json"))]


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), measured()), encoding="utf-8")


if __name__ == "__main__":
    main()
