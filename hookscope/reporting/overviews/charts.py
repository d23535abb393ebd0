"""Charts over the depth of a network or over steps, drawn without Matplotlib: importing it takes longer than a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw

from hookscope.reporting.axes import placed_names
from hookscope.reporting.document import Level, Series
from hookscope.reporting.lettering import font, line_height, text_width, write_line
from hookscope.reporting.overviews.sheet import (
    AMBER,
    DIM,
    INK,
    INNER,
    MARGIN,
    NAME,
    PAPER,
    SMALL,
    TEXT,
    Block,
    Colour,
    in_font,
)
from hookscope.reporting.plots import Plot

# Okabe and Ito 2008, "Color Universal Design".
BLUE, ORANGE, VERMILION, GREY = (86, 180, 233), (230, 159, 0), (213, 94, 0), (160, 160, 160)
PALE_BLUE = (44, 88, 120)

# Pixels.
_PLOT_HEIGHT = 150
_AXIS = 64  # left of the plot, for its numbers
_SMOOTH = 3  # drawn this many times as large, then averaged, for smooth lines
_GRID_LINE = (66, 72, 80)
_GROUND = (92, 50, 38)  # behind highlighted layers
_MOST_DOTS = 80  # with more layers, lines have no dots

Shape = Literal["line", "area", "dots", "cross", "triangle"]
Points = Sequence[tuple[float, float]]


# By level: colour and shape of a mark.
_MARKS: Mapping[Level, tuple[Colour, Shape]] = {
    "fail": (VERMILION, "cross"),
    "warn": (AMBER, "triangle"),
    "dim": (GREY, "triangle"),
}
_SERIES: Mapping[str, Colour] = {"blue": BLUE, "grey": GREY, "orange": ORANGE, "red": VERMILION}


@dataclass(frozen=True, slots=True)
class Chart:
    """Draws a plot; without names, another plot below it has them."""

    plot: Plot
    has_names: bool = True

    @property
    def block(self) -> Block:
        """The chart as a block of the sheet."""
        below = line_height(SMALL) + 8 if self.has_names else 0
        return Block(self._head + _PLOT_HEIGHT + 8 + below, self._draw)

    @property
    def _head(self) -> int:
        return line_height(NAME) + 10 + line_height(SMALL) * bool(self.plot.letters)

    @property
    def _step(self) -> float:
        return (INNER - _AXIS) / self.plot.count

    def _x(self, place: float) -> float:
        return _AXIS + (place + 0.5) * self._step

    def _draw(self, image: Image.Image, top: int) -> None:
        plot = self.plot
        ticks = [(_PLOT_HEIGHT * (1 - share), words) for share, words in plot.axis.ticks]
        pen = _Pen(INNER, _PLOT_HEIGHT)
        half = max(3.0, self._step / 2)
        pen.draw("area", [(self._x(place), 0) for place in plot.ground[1]], _GROUND, half)
        for height, _ in ticks:
            pen.line([(_AXIS, height), (INNER, height)], _GRID_LINE, 1)
        for _, place in plot.letters:
            for dash in range(0, _PLOT_HEIGHT, 8):
                pen.line([(self._x(place), dash), (self._x(place), dash + 3)], GREY, 1)
        for series, runs in plot.lines:
            for run in runs:
                points = [(self._x(place), _PLOT_HEIGHT * (1 - plot.axis.share(value))) for place, value in run]
                pen.draw(series.shape, points, _colour(series), self._step / 2, with_dots=plot.count <= _MOST_DOTS)
        for _, level, places in plot.marks:
            colour, shape = _MARKS[level]
            feet = sorted({round(self._x(place)) for place in places})
            pen.draw(shape, [(x, _PLOT_HEIGHT - 8) for x in feet], colour)
        image.paste(pen.drawn(), (MARGIN, top + self._head))
        self._write_head(image, top)
        self._write_axes(image, top + self._head, ticks)

    def _write_head(self, image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        write_line(pen, in_font(self.plot.title), NAME, INK, top, MARGIN)
        key: list[tuple[str, Colour, Shape]] = [
            (in_font(series.name), _colour(series), series.shape) for series, _ in self.plot.lines
        ]
        key += [(words, *_MARKS[level]) for words, level, _ in self.plot.marks]
        key += [(self.plot.ground[0], _GROUND, "area")] if self.plot.ground[1] else []
        left: float = MARGIN + INNER - sum(28 + text_width([name], TEXT) + 18 for name, _, _ in key) + 18
        for name, colour, shape in key:
            swatch = _Pen(22, 12)
            if shape == "line":
                swatch.line([(0, 6), (22, 6)], colour, 2)
            swatch.draw(shape, [(11, 0 if shape == "area" else 6)], colour, 9)
            image.paste(swatch.drawn(), (round(left), top + 3))
            left = write_line(pen, name, TEXT, INK, top + 3, left + 28) + 20

    def _write_axes(self, image: Image.Image, top: int, ticks: Sequence[tuple[float, str]]) -> None:
        pen = ImageDraw.Draw(image)
        for height, words in ticks:
            write_line(pen, words, SMALL, DIM, top + height - 5, MARGIN + _AXIS - 8, align=1)
        left = 0.0
        for letter, place in self.plot.letters:
            left = max(left, MARGIN + self._x(place) - _width(letter) / 2)
            left = write_line(pen, letter, SMALL, INK, top - line_height(SMALL) + 1, left) + 5
        top += _PLOT_HEIGHT + 8
        names = [(MARGIN + self._x(place), in_font(name, 24)) for place, name in self.plot.names if self.has_names]
        for tick, left, words in placed_names(names, _width, MARGIN, MARGIN + INNER, 10):
            pen.line([(tick, top), (tick, top + 5)], DIM)
            write_line(pen, words, SMALL, DIM, top + 6, left)


def _width(words: str) -> float:
    return font(SMALL, words).getlength(words)


def _colour(series: Series) -> Colour:
    return PALE_BLUE if series.shape == "area" else _SERIES[series.colour]


class _Pen:
    """Draws on a larger canvas, in pixels of the final picture, which has 4 more above and below `height`."""

    def __init__(self, width: int, height: int) -> None:
        self._height = height
        self._image = Image.new("RGB", (width * _SMOOTH, (height + 8) * _SMOOTH), PAPER)
        self._pen = ImageDraw.Draw(self._image)

    def drawn(self) -> Image.Image:
        return self._image.reduce(_SMOOTH)

    def line(self, points: Points, colour: Colour, width: float) -> None:
        self._pen.line(_scaled(points), colour, round(width * _SMOOTH), joint="curve")

    def draw(self, shape: Shape, points: Points, colour: Colour, half: float = 0, *, with_dots: bool = True) -> None:
        """Draw a line through points, or at each point a bar of half-width `half`, a dot or a mark."""
        if shape == "line" and len(points) > 1:
            self.line(points, colour, 2)
        for x, y in points if shape != "line" or with_dots or len(points) == 1 else ():
            if shape == "area":
                self._pen.rectangle(_scaled([(x - half, y), (x + half, self._height)]), colour)
            elif shape == "triangle":
                self._pen.polygon(_scaled([(x - 6, y - 5), (x + 6, y - 5), (x, y + 6)]), colour)
            elif shape == "cross":
                self.line([(x - 5, y - 5), (x + 5, y + 5)], colour, 2.5)
                self.line([(x - 5, y + 5), (x + 5, y - 5)], colour, 2.5)
            else:
                radius = 3.2 if shape == "line" or with_dots else 2.2
                self._pen.ellipse(_scaled([(x - radius, y - radius), (x + radius, y + radius)]), colour)


def _scaled(points: Points) -> Points:
    return [(x * _SMOOTH, (y + 4) * _SMOOTH) for x, y in points]
