"""Draw findings: one panel per section with ratios, one per line."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.findings import Fit, Report, Section

_COLUMNS = 2
_PANEL_INCHES = (7.5, 4.0)
_MARKERS = "osD^vP*X"


def draw(report: Report, path: Path) -> None:
    """Write the plot as PNG."""
    compared = [section for section in report.sections.values() if _ratios(section) and not section.fits]
    fits = [fit for section in report.sections.values() for fit in section.fits]
    count = max(1, len(compared) + len(fits))
    rows = -(-count // _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * _PANEL_INCHES[0], rows * _PANEL_INCHES[1]), layout="constrained")
    panels = [figure.add_subplot(rows, _COLUMNS, index + 1) for index in range(count)]
    for axes, section in zip(panels, compared, strict=False):
        _draw_ratios(axes, section)
    for axes, fit in zip(panels[len(compared) :], fits, strict=False):
        _draw_fit(axes, fit)
    machine = report.machine
    figure.suptitle(
        f"{report.date} · {machine.accelerator or machine.processor} · {machine.thread_count} threads · "
        f"torch {machine.versions.get('torch', '')}"
    )
    figure.savefig(path, dpi=110)


def _ratios(section: Section) -> bool:
    return any(each.unit == "×" for each in section.measurements)


def _draw_ratios(axes: Axes, section: Section) -> None:
    """Draw a dot for each subject and way, hollow where the values are not those of the others."""
    ways = list(dict.fromkeys(each.way for each in section.measurements))
    subjects = list(dict.fromkeys(each.subject for each in section.measurements))
    for number, subject in enumerate(subjects):
        colour, marker = f"C{number}", _MARKERS[number % len(_MARKERS)]
        for each in section.measurements:
            if each.subject == subject and each.figure is not None:
                right = each.work is None or each.work.verdict == "same"
                position = ways.index(each.way) + (number - (len(subjects) - 1) / 2) * 0.1
                face = colour if right else "none"
                axes.plot(each.figure, position, marker, color=colour, markerfacecolor=face)
        axes.plot([], [], marker, color=colour, label=subject)
    figures = [each.figure for each in section.measurements if each.figure]
    if max(figures) > 3 * min(figures):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_plain)
        axes.xaxis.set_minor_formatter(_plain)
    axes.set_yticks(range(len(ways)), ways)
    axes.set_ylim(len(ways) - 0.5, -0.5)
    axes.grid(visible=True, axis="x", which="both", alpha=0.3)
    axes.set_xlabel("times the first way; hollow: other values, or shapes only")
    axes.set_title(section.title, fontsize=10)
    axes.legend(fontsize=8)


def _plain(value: float, _position: float | None) -> str:
    """Label 1, 2 and 5 of each decade."""
    return f"{value:g}" if f"{value:.0e}"[0] in "125" else ""


def _draw_fit(axes: Axes, fit: Fit) -> None:
    axes.plot(fit.xs, fit.ys, "o")
    axes.plot(fit.xs, [fit.slope * x + fit.intercept for x in fit.xs], "-", alpha=0.6)
    axes.set_ylim(bottom=min(0.0, *fit.ys))
    axes.set_xlabel(fit.x)
    axes.set_ylabel(fit.y)
    axes.set_title(f"{fit.subject}: {fit.slope:.3g} {fit.y} per {fit.x}, R² {fit.r_squared:.3f}", fontsize=10)
    axes.grid(visible=True, alpha=0.3)
