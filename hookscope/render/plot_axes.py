"""What all plots share: matplotlib without pyplot and in one style, logarithmic axes, marks, names as they are."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from textwrap import wrap

import matplotlib as mpl
import numpy as np
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font
from matplotlib.ticker import FixedLocator, NullLocator
from numpy.typing import NDArray

from hookscope.render.overviews import charts, sheet
from hookscope.results.activations import LayerRow
from hookscope.results.gradients import GradientRow, GradientStatus
from hookscope.text import figure, safe_text


def _hex(colour: sheet.Colour) -> str:
    return f"#{bytes(colour).hex()}"


# As in the overviews, whose dark slate suits white and black pages.
BLUE, ORANGE, VERMILION, GREY = map(_hex, (charts.BLUE, charts.ORANGE, charts.VERMILION, charts.GREY))
_INK, _DIM, _PAPER, _LINE = map(_hex, (sheet.INK, sheet.DIM, sheet.PAPER, sheet.LINE))

_STYLE: Mapping[str, object] = {
    "figure.facecolor": _PAPER,
    "axes.facecolor": _PAPER,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _DIM,
    "ytick.color": _DIM,
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _hex(charts.GRID_LINE),
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 8.0,
}
_DPI = 120  # at 10 inches, 1200 pixels: sharp on a page, small as a file

_WIDEST_TITLE = 110  # characters

# Names that fit well under an axis of ten inches, those that fit without touching, and their greatest length.
_MOST_NAMES = 32
_NARROWEST = 75
_LONGEST_NAME = 26

# Where marks stand, as shares of the height of the axes.
FOOT, TOP = 0.03, 0.97

# Marks at the foot of a logarithmic axis for gradients that have no place on it.
_MARKS: Mapping[GradientStatus, tuple[str, str]] = {
    "zero": ("v", VERMILION),
    "no gradient path": ("x", GREY),
    "not reached": ("+", GREY),
}


def our_style() -> AbstractContextManager[None]:
    """Draw in matplotlib's default style with our changes: a user's file could ask for LaTeX or white on white."""
    return style.context(["default", dict(_STYLE)])


class _ShownFigure(Figure):
    """A figure that shows itself where it ends a notebook's cell."""

    def _repr_png_(self) -> bytes:
        return figure_png(self)


def figure_png(figure: Figure) -> bytes:
    """Return a figure as a PNG file; the same figure gives the same bytes."""
    file = io.BytesIO()
    with our_style():
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def titled_figure(parts: Sequence[str], height: float) -> Figure:
    """Return an empty figure, ten inches wide, under a title of several parts."""
    figure = _ShownFigure(figsize=(10, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    title = "\n".join(wrap(plain(" · ".join(parts), 2 * _WIDEST_TITLE - 20), _WIDEST_TITLE))
    figure.suptitle(title, x=0.012, horizontalalignment="left", fontsize=11, fontweight="bold")
    return figure


def panels(parts: Sequence[str], count: int, across: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels for histograms, without a vertical scale, and its panels."""
    down = max(1, math.ceil(count / across))
    figure = titled_figure(parts, 0.9 + 1.75 * down)
    grid = figure.subplots(down, across, squeeze=False).ravel()
    for axes in grid:
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(NullLocator())
        axes.spines.left.set_visible(False)
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, list(grid)


def name_panel(axes: Axes, row: LayerRow | GradientRow, remarks: Sequence[str]) -> None:
    """Write the row's name above a panel, with a remark."""
    axes.set_title(f"{plain(row.label, 28)}\n{' · '.join(remarks)}", fontsize=8)


def log_axis(axes: Axes, values: NDArray[np.float64]) -> None:
    """Make the vertical axis logarithmic, with room below for marks and above for stars."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.1, 1.0)
    bottom, top = math.log10(low), math.log10(high)
    room = max(0.12 * (top - bottom), 0.35)
    # The smallest float must not fall to zero, nor the largest rise to infinity; nor must matplotlib's own guesses.
    bottom, top = max(bottom - room, -307.0), min(top + room / 2, 307.0)
    axes.set_ylim(10**bottom, 10**top)
    axes.set_yscale("log")
    exponents = range(math.floor(bottom), math.ceil(top))
    if len(exponents) <= 3:
        ticks = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
        axes.yaxis.set_major_formatter(lambda value, _: figure(value, 3))
    else:
        ticks = [10.0**exponent for exponent in exponents if exponent % math.ceil(len(exponents) / 7) == 0]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if 10**bottom <= tick <= 10**top]))
    axes.yaxis.set_minor_locator(NullLocator())


def mark_missing(axes: Axes, statuses: Sequence[GradientStatus]) -> None:
    """Put a mark at the foot of the axis wherever there is no gradient, or one of exactly zero."""
    for status, look in _MARKS.items():
        places = [place for place, each in enumerate(statuses) if each == status]
        add_marks(axes, places, FOOT, look, "gradient is 0" if status == "zero" else status)


def mark_failing(axes: Axes, names: Sequence[str], failing: Mapping[str, str]) -> None:
    """Lay a red ground under what a failing verdict names, and write the rule beside it."""
    half = max(0.5, len(names) / 250)
    for place, name in enumerate(names):
        if name in failing:
            axes.axvspan(place - half, place + half, color=VERMILION, alpha=0.22, linewidth=0, label="failing verdict")
            side = 1 if place < len(names) / 2 else -1
            axes.annotate(
                failing[name],
                (place + side * half, 0.93),
                (3 * side, 0),
                xycoords=axes.get_xaxis_transform(),
                textcoords="offset points",
                color=VERMILION,
                fontsize=8,
                bbox={"facecolor": _PAPER, "alpha": 0.8, "edgecolor": "none", "pad": 1.0},
                verticalalignment="top",
                horizontalalignment="left" if side > 0 else "right",
            )


def name_places(axes: Axes, names: Sequence[str]) -> None:
    """Write names under the horizontal axis: all of them, or where a block of layers begins, or evenly spread."""
    places = _named_places(names)
    labels = [plain(name, _LONGEST_NAME) for name in places.values()]
    upright = len(labels) > 12
    axes.set_xticks(
        [*places],
        labels,
        rotation=90 if upright else 35,
        rotation_mode="anchor",
        horizontalalignment="right",
        verticalalignment="center" if upright else "top",
    )
    margin = max(0.6, len(names) / 100)
    axes.set_xlim(-margin, len(names) - 1 + margin)


def _named_places(names: Sequence[str]) -> dict[int, str]:
    """Return which positions get which name: of many, those where a block of layers begins, the outermost first.

    Where a block holds most layers, its first part has its place: "_blocks.0" instead of "_blocks".
    """
    if len(names) <= _MOST_NAMES:
        return dict(enumerate(names))
    taken: dict[int, str] = {}
    long: set[int] = set()
    for depth in range(1, 2 + max(name.count(".") for name in names)):
        blocks = [".".join(name.split(".")[:depth]) for name in names]
        starts = [place for place, block in enumerate(blocks) if not place or blocks[place - 1] != block]
        lengths = dict(zip(starts, np.diff([*starts, len(names)]).tolist(), strict=True))
        outermost = depth == 1 and len(starts) <= _MOST_NAMES
        apart = len(names) / (_NARROWEST if outermost else _MOST_NAMES)
        if len(taken) > _MOST_NAMES / 2:
            break
        taken = {place: blocks[place] if place in long else name for place, name in taken.items()}
        for place in sorted(starts, key=lambda start: (-lengths[start], start)) if outermost else starts:
            if all(abs(place - other) >= apart for other in taken):
                taken[place] = blocks[place]
        long = {place for place in starts if lengths[place] > len(names) / 2}
    return dict(sorted(taken.items()))


def add_legend(figure: Figure, all_axes: Iterable[Axes]) -> None:
    """Put a legend below the axes that shows each kind once."""
    entries: dict[str, Artist] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4)


def add_marks(axes: Axes, places: Sequence[int], height: float, look: tuple[str, str], label: str) -> None:
    """Draw marks at a share of the height of the axes, whatever their scale."""
    if places:
        marker, colour = look
        axes.plot(
            places,
            [height] * len(places),
            marker=marker,
            color=colour,
            markersize=8 if marker == "*" else 4.5 if len(places) <= 60 else 2.5,
            linestyle="none",
            transform=axes.get_xaxis_transform(),
            label=label,
            zorder=4,
        )


def say(axes: Axes, sentence: str) -> None:
    """Write a sentence in an empty plot."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, sentence, horizontalalignment="center", verticalalignment="center", transform=axes.transAxes)


def plain(text: str, longest: int) -> str:
    """Return `text` so that matplotlib draws it as it stands: no mathematics, no control codes, no missing glyphs.

    If it is longer than `longest`, "…" stands for the middle, because the end of a dotted name is the most specific.
    """
    known = _glyphs()
    shown = "".join(
        each if ord(each) in known else each.encode("unicode_escape").decode("ascii") for each in safe_text(text)
    )
    if len(shown) > longest:
        head = (longest - 1) // 3
        shown = f"{shown[:head]}…{shown[len(shown) - (longest - 1 - head) :]}"
    return shown.replace("$", r"\$")


@lru_cache(maxsize=1)
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(str(Path(mpl.get_data_path(), "fonts/ttf/DejaVuSans.ttf"))).get_charmap())
