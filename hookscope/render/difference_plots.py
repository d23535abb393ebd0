"""Plot a difference over depth. Imports matplotlib."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hookscope.render.differences_text import sides_text
from hookscope.render.plot_axes import (
    BLUE,
    FOOT,
    GREY,
    ORANGE,
    TOP,
    VERMILION,
    add_legend,
    add_marks,
    log_axis,
    name_places,
    our_style,
    say,
    titled_figure,
)
from hookscope.results.differences import Differences


def differences_over_depth(result: Differences) -> Figure:
    """Draw the relative L2 norm of A-B over depth, what each layer adds, and the error of each side if known.

    Rows that are equal are marked at the foot, those with NaN or Inf at the top; a vertical line is where
    differences begin.
    """
    rows = result.rows
    with our_style():
        figure = titled_figure((f"Difference over depth: {sides_text(result)}",), 4.6)
        axes = figure.subplots()
        if not rows:
            say(axes, "Nothing was compared.")
            return figure
        differences = [row.measures.relative_l2 if row.measures else None for row in rows]
        added = [row.added.relative_l2 if row.added else None for row in rows]
        lines: dict[str, tuple[Sequence[float | None], str, str]] = {
            "A and B": (differences, BLUE, "o"),
            "added by the layer": (added, VERMILION, "D"),
            "A and reference": ([row.error for row in rows], GREY, "s"),
            "B and reference": ([row.error_b for row in rows], ORANGE, "^"),
        }
        places = np.arange(len(rows))
        drawn = []
        for label, (values, colour, marker) in lines.items():
            if any(value is not None for value in values):
                positive = _positive(values)
                drawn.append(positive)
                style = "-" if label != "added by the layer" else ""
                size = 4 if len(rows) <= 160 else 2
                axes.plot(places, positive, style, marker=marker, markersize=size, color=colour, label=label)
        if not drawn:
            say(axes, "No two outputs have the same shape: there is no difference to draw.")
            return figure
        log_axis(axes, np.concatenate(drawn))
        equal = [place for place, value in enumerate(differences) if value == 0]
        broken = [place for place, value in enumerate(differences) if value is not None and not math.isfinite(value)]
        add_marks(axes, equal, FOOT, ("v", GREY), "equal")
        add_marks(axes, broken, TOP, ("x", VERMILION), "NaN or Inf on one side")
        begins = {first.row for first in result.first_differences}
        for place, row in enumerate(rows):
            if row.label in begins:
                axes.axvline(place, color=VERMILION, linestyle=":", linewidth=1)
        name_places(axes, [row.label for row in rows])
        axes.set_ylabel("relative L2 norm")
        add_legend(figure, [axes])
    return figure


def _positive(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([value if value and math.isfinite(value) else np.nan for value in values], np.float64)
