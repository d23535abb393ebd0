"""Show findings in the terminal."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.findings import Measurement, Report, Section, shown


def section_table(section: Section) -> Group:
    """Return one section's table, with its note."""
    table = Table("what", "way", "measured", "median (minimum to maximum)", "rounds", "work", title=section.title)
    table.title_style = "bold"
    last = ""
    for measurement in section.measurements:
        if last and measurement.subject != last:
            table.add_section()
        spread = measurement.spread
        table.add_row(
            Text("" if measurement.subject == last else measurement.subject),
            Text(measurement.way),
            Text(shown(measurement.figure, measurement.unit)),
            Text(spread.text if spread else ""),
            Text(str(spread.rounds) if spread else ""),
            Text(measurement.work.text if measurement.work else "", style=_style(measurement)),
        )
        last = measurement.subject
    return Group(table, Text(section.note, style="dim"), Text())


def _style(measurement: Measurement) -> str:
    work = measurement.work
    return "red" if work is not None and work.verdict in ("differs", "does not run") else ""


def limit_table(report: Report) -> Table:
    """Return the table of all that has a limit."""
    table = Table("limit", "measured", "at most", "", title="Limits")
    for section in report.sections.values():
        for measurement in section.measurements:
            if measurement.at_most is not None:
                subject = Text(f"{section.title}: {measurement.what}")
                figures = (Text(shown(value, measurement.unit)) for value in (measurement.figure, measurement.at_most))
                table.add_row(subject, *figures, Text("MISSED", style="bold red") if measurement.missed else "holds")
    return table
