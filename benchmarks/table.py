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
    for each in section.measurements:
        if last and each.subject != last:
            table.add_section()
        spread = each.spread
        table.add_row(
            Text("" if each.subject == last else each.subject),
            Text(each.way),
            Text(shown(each.figure, each.unit)),
            Text(spread.text if spread else ""),
            Text(str(spread.rounds) if spread else ""),
            Text(each.work.text if each.work else "", style=_style(each)),
        )
        last = each.subject
    return Group(table, Text(section.note, style="dim"), Text())


def _style(measurement: Measurement) -> str:
    work = measurement.work
    return "red" if work is not None and work.verdict in ("differs", "does not run") else ""


def limit_table(report: Report) -> Table:
    """Return the table of all that has a limit."""
    table = Table("limit", "measured", "at most", "", title="Limits")
    for section in report.sections.values():
        for each in section.measurements:
            if each.at_most is not None:
                what = Text(f"{section.title}: {each.what}")
                figures = (Text(shown(value, each.unit)) for value in (each.figure, each.at_most))
                table.add_row(what, *figures, Text("MISSED", style="bold red") if each.missed else "holds")
    return table
