"""What all plots share: matplotlib without pyplot and in one style, names as they are."""

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from textwrap import wrap

import matplotlib as mpl
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font
from matplotlib.ticker import NullLocator

from hookscope.render.overviews import charts, sheet
from hookscope.results.activations import LayerRow
from hookscope.text import safe_text


def _hex(colour: sheet.Colour) -> str:
    return f"#{bytes(colour).hex()}"


# As in the overviews, whose dark slate suits white and black pages.
BLUE = _hex(charts.BLUE)
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


def name_panel(axes: Axes, row: LayerRow, remarks: Sequence[str]) -> None:
    """Write the row's name above a panel, with a remark."""
    axes.set_title(f"{plain(row.label, 28)}\n{' · '.join(remarks)}", fontsize=8)


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
