"""Figures of layers over the depth of a network, drawn without Matplotlib: importing it takes longer than a run."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw

from hookscope.render.lettering import font, line_height
from hookscope.render.overviews.sheet import DIM, INK, INNER, MARGIN, NAME, PAPER, SMALL, TEXT, Block, Colour, in_font
from hookscope.text import figure

# Okabe and Ito 2008, "Color Universal Design".
BLUE, ORANGE, VERMILION, GREY = (86, 180, 233), (230, 159, 0), (213, 94, 0), (160, 160, 160)
PALE_BLUE = (44, 88, 120)

# Pixels.
_PLOT_HEIGHT = 150
_AXIS = 64  # left of the plot, for its numbers
_SMOOTH = 3  # drawn so many times larger, then averaged: lines and dots without steps
_GRID_LINE = (66, 72, 80)
_GROUND = (92, 50, 38)  # behind what is pointed at
_MOST_DOTS = 80  # of more layers, lines have no dots

_MOST_TICKS = 5
_LONGEST_BLOCK = 0.45  # of the depth: names under the axis go deeper as long as some block is longer.
_LONGEST_NAME = 18  # characters of two parts of a name; of a longer one the last part stands alone
_LEAST, _GREATEST = 1e-300, 1e300  # what an axis reaches

_WHOLE = ("", "(model)")  # names of the network itself

Shape = Literal["line", "area", "dots"]
Mark = Literal["cross", "triangle"]
Axis = Literal["log", "percent", "linear"]


@dataclass(frozen=True, slots=True)
class Series:
    """Values by layer; None where there is none."""

    name: str
    values: Sequence[float | None]
    colour: Colour
    shape: Shape = "line"


@dataclass(frozen=True, slots=True)
class Marks:
    """Layers to be marked at the foot of a chart."""

    name: str
    places: Sequence[int]
    colour: Colour
    mark: Mark = "cross"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Values over the depth of a network or over steps: on a logarithmic axis, a linear one, or from 0 to 100%.

    Attributes:
        title: Stands above it, with a key to the colours.
        series: A value for each layer; what a logarithmic axis cannot show is left out.
        count: Of layers.
        axis: "percent" for shares, 0-1.
        marks: What stands at the foot.
        ground: Positions of layers with a tinted ground; `ground_name` is their meaning.
        letters: Layers with a dotted line and a letter above it.
        names: Of the layers, to stand below where blocks of them begin; none for a chart with another below it.
    """

    title: str
    series: Sequence[Series]
    count: int
    axis: Axis = "log"
    marks: Sequence[Marks] = ()
    ground: Sequence[int] = ()
    ground_name: str = "fails"
    letters: Sequence[tuple[str, int]] = ()
    names: Sequence[str] = ()

    @property
    def block(self) -> Block:
        """The chart as a block of the sheet."""
        below = line_height(SMALL) + 8 if self.names else 0
        return Block(self._head + _PLOT_HEIGHT + 8 + below, self._draw)

    @property
    def _head(self) -> int:
        return line_height(NAME) + 10 + line_height(SMALL) * bool(self.letters)

    @property
    def _step(self) -> float:
        return (INNER - _AXIS) / self.count

    def _x(self, place: float) -> float:
        return _AXIS + (place + 0.5) * self._step

    def _draw(self, image: Image.Image, top: int) -> None:
        low, high = _range(self.series, self.axis)
        ticks = _ticks(low, high, self.axis)
        heights = [_height(tick, low, high, self.axis) for tick in ticks]
        plot = Image.new("RGB", (INNER * _SMOOTH, (_PLOT_HEIGHT + 8) * _SMOOTH), PAPER)
        pen = _Pen(ImageDraw.Draw(plot))
        self._draw_ground(pen, heights)
        for each in self.series:
            points = [
                (self._x(place), _height(value, low, high, self.axis))
                if value is not None and _shown(value, self.axis)
                else None
                for place, value in enumerate(each.values)
            ]
            _draw_series(pen, points, each, dots=self.count <= _MOST_DOTS, step=self._step)
        for mark in self.marks:
            for place in mark.places:
                pen.mark(self._x(place), _PLOT_HEIGHT - 8, mark.mark, mark.colour)
        image.paste(plot.resize((INNER, _PLOT_HEIGHT + 8), Image.Resampling.BOX), (MARGIN, top + self._head))
        self._write_head(image, top)
        words = [f"{tick:.0%}" if self.axis == "percent" else figure(tick, 3) for tick in ticks]
        self._write_axes(image, top + self._head, zip(words, heights, strict=True))

    def _draw_ground(self, pen: "_Pen", heights: Sequence[float]) -> None:
        half = max(3.0, self._step / 2)
        for place in self.ground:
            pen.box(self._x(place) - half, 0, self._x(place) + half, _PLOT_HEIGHT, _GROUND)
        for height in heights:
            pen.line([(_AXIS, height), (INNER, height)], _GRID_LINE, 1)
        for _, place in self.letters:
            for dash in range(0, _PLOT_HEIGHT, 8):
                pen.line([(self._x(place), dash), (self._x(place), dash + 3)], GREY, 1)

    def _write_head(self, image: Image.Image, top: int) -> None:
        pen, drawn = ImageDraw.Draw(image), font(TEXT)
        pen.text((MARGIN, top), in_font(self.title), INK, font(NAME))
        key: list[tuple[str, Colour, Shape | Mark]] = [(each.name, each.colour, each.shape) for each in self.series]
        key += [(mark.name, mark.colour, mark.mark) for mark in self.marks if mark.places]
        key += [(self.ground_name, _GROUND, "area")] if self.ground else []
        left = MARGIN + INNER - sum(28 + drawn.getlength(name) + 18 for name, _, _ in key) + 18
        for name, colour, shape in key:
            image.paste(_swatch(colour, shape), (round(left), top + 3))
            pen.text((left + 28, top + 3), name, INK, drawn)
            left += 28 + drawn.getlength(name) + 18

    def _write_axes(self, image: Image.Image, top: int, ticks: Iterable[tuple[str, float]]) -> None:
        pen, drawn = ImageDraw.Draw(image), font(SMALL)
        for words, height in ticks:
            pen.text((MARGIN + _AXIS - 8 - drawn.getlength(words), top + height - 5), words, DIM, drawn)
        left = 0.0
        for letter, place in self.letters:
            left = max(left + drawn.getlength(letter) + 5, MARGIN + self._x(place) - drawn.getlength(letter) / 2)
            pen.text((left, top - line_height(SMALL) + 1), letter, INK, drawn)
        taken: list[tuple[float, float]] = []
        top += _PLOT_HEIGHT + 8
        for place, name in _blocks(self.names) if self.names else ():
            words = in_font(name, 24)
            drawn = font(SMALL, words)
            tick, wide = MARGIN + self._x(place), drawn.getlength(words)
            left = tick if tick + wide <= MARGIN + INNER else tick - wide
            right = left + wide
            if left >= MARGIN and all(right + 10 < other[0] or left > other[1] + 10 for other in taken):
                taken.append((left, right))
                pen.line([(tick, top), (tick, top + 5)], DIM)
                pen.text((left, top + 6), words, DIM, drawn)


def _blocks(names: Sequence[str]) -> list[tuple[int, str]]:
    """Return where blocks of layers begin, with their names: the outermost blocks first, longer ones before shorter.

    Where a block is so long that the names of its parts are needed, the first of them has its place.

    A block that all layers are in has no name here: its first part has.
    """
    result: dict[int, str] = {}
    split: set[int] = set()
    names = within_blocks(names)
    longest = _LONGEST_BLOCK * len(names)
    for depth in range(1, 2 + max(name.count(".") for name in names)):
        blocks = [".".join(name.split(".")[:depth]) for name in names]
        if len(names) > 1 and len({*blocks}) == 1:
            continue
        starts = [place for place, block in enumerate(blocks) if not place or blocks[place - 1] != block]
        lengths = {start: end - start for start, end in zip(starts, [*starts[1:], len(names)], strict=True)}
        for start in sorted(starts, key=lambda each: (-lengths[each], each)):
            if start in split or start not in result:
                result[start] = tail_of(blocks[start])
        split = {start for start, length in lengths.items() if length > longest}
        if not split:
            break
    return list(result.items())


def within_blocks(labels: Sequence[str]) -> list[str]:
    """Return the names of layers alone: of an operation its module, or, in the network's own code, the layer before.

    Operations keep their names where all rows are of the network's own code.
    """
    names: list[str] = []
    parts = [label.partition(":") for label in labels]
    if len(parts) > 1 and all(layer in _WHOLE for layer, _, _ in parts):
        return [operation or layer for layer, _, operation in parts]
    for label, (layer, _, operation) in zip(labels, parts, strict=True):
        names.append(names[-1] if operation and layer in _WHOLE and names else layer or label)
    return names


def tail_of(block: str) -> str:
    """Return the last two parts of a name, or one if two are long."""
    parts = block.split(".")
    two = ".".join(parts[-2:])
    return two if len(two) <= _LONGEST_NAME else parts[-1]


class _Pen:
    """Draws on the larger canvas in pixels of the smaller one."""

    def __init__(self, pen: ImageDraw.ImageDraw) -> None:
        """Draw with this pen."""
        self._pen = pen

    def line(self, points: Sequence[tuple[float, float]], colour: Colour, width: float) -> None:
        scaled = [(x * _SMOOTH, (y + 4) * _SMOOTH) for x, y in points]
        self._pen.line(scaled, colour, round(width * _SMOOTH), joint="curve")

    def box(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        self._pen.rectangle([left * _SMOOTH, (top + 4) * _SMOOTH, right * _SMOOTH, (bottom + 4) * _SMOOTH], colour)

    def area(self, points: Sequence[tuple[float, float]], colour: Colour) -> None:
        self._pen.polygon([(x * _SMOOTH, (y + 4) * _SMOOTH) for x, y in points], colour)

    def dot(self, x: float, y: float, radius: float, colour: Colour) -> None:
        box = [(x - radius) * _SMOOTH, (y + 4 - radius) * _SMOOTH, (x + radius) * _SMOOTH, (y + 4 + radius) * _SMOOTH]
        self._pen.ellipse(box, colour)

    def mark(self, x: float, y: float, mark: Shape | Mark, colour: Colour) -> None:
        if mark == "triangle":
            self.area([(x - 6, y - 5), (x + 6, y - 5), (x, y + 6)], colour)
        else:
            self.line([(x - 5, y - 5), (x + 5, y + 5)], colour, 2.5)
            self.line([(x - 5, y + 5), (x + 5, y - 5)], colour, 2.5)


def _draw_series(
    pen: _Pen, points: Sequence[tuple[float, float] | None], series: Series, *, dots: bool, step: float
) -> None:
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    for run in runs:
        if series.shape == "area":
            for x, y in run:
                pen.box(x - step / 2, y, x + step / 2, _PLOT_HEIGHT, series.colour)
        elif series.shape == "line" and len(run) > 1:
            pen.line(run, series.colour, 2)
        if series.shape == "dots" or (series.shape == "line" and (dots or len(run) == 1)):
            for x, y in run:
                pen.dot(x, y, 3.2 if series.shape == "line" or dots else 2.2, series.colour)


def _swatch(colour: Colour, shape: Shape | Mark) -> Image.Image:
    swatch = Image.new("RGB", (22 * _SMOOTH, 20 * _SMOOTH), PAPER)
    pen = _Pen(ImageDraw.Draw(swatch))
    if shape in ("cross", "triangle"):
        pen.mark(11, 6, shape, colour)
    elif shape == "area":
        pen.box(2, 0, 20, 12, colour)
    else:
        if shape == "line":
            pen.line([(0, 6), (22, 6)], colour, 2)
        pen.dot(11, 6, 3.2, colour)
    return swatch.resize((22, 20), Image.Resampling.BOX)


def _shown(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (axis != "log" or _LEAST < value < _GREATEST)


def _height(value: float, low: float, high: float, axis: Axis) -> float:
    """Return how many pixels below the top of the plot a value lies."""
    place = math.log10(value) if axis == "log" else value
    return _PLOT_HEIGHT * (1 - (place - low) / (high - low))


def _range(series: Sequence[Series], axis: Axis) -> tuple[float, float]:
    """Return the ends of an axis: exponents of a logarithmic one."""
    if axis == "percent":
        return 0.0, 1.0
    shown = [value for each in series for value in each.values if value is not None and _shown(value, axis)]
    if not shown:
        return -1.0, 1.0
    low, high = (math.log10(each) if axis == "log" else each for each in (min(shown), max(shown)))
    room = max(0.12 * (high - low), 0.15 if axis == "log" else 0.05 * abs(high) or 0.1)
    return low - room, high + room / 2


def _ticks(low: float, high: float, axis: Axis) -> list[float]:
    if axis == "percent":
        return [0.0, 0.5, 1.0]
    if axis == "log":
        return log_ticks(low, high)
    return _even_ticks(low, high)


def _even_ticks(low: float, high: float) -> list[float]:
    wanted = (high - low) / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(wanted))
    by = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted)
    return [number * by for number in range(math.ceil(low / by), math.floor(high / by) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return at most about five round numbers between two exponents."""
    low, high = max(low, math.log10(_LEAST)), min(high, math.log10(_GREATEST))
    if low >= high:
        return []
    exponents = range(math.ceil(low), math.floor(high) + 1)
    if len(exponents) >= 2:
        step = math.ceil(len(exponents) / _MOST_TICKS)
        return [10.0**exponent for exponent in exponents if exponent % step == 0]
    around = range(math.floor(low), math.ceil(high) + 1)
    ticks = [digit * 10.0**exponent for exponent in around for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    return ticks if len(ticks) >= 2 else _even_ticks(10.0**low, 10.0**high)
