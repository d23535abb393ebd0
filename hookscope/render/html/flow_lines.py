"""Lines of a data-flow drawing: places in one column, straight lines between neighbours, wires beside it for the rest.

A wire is a tensor: one line that leaves the column where the tensor is made, runs down in a lane, and has a branch into
each place that takes it further down. Wires in one lane never overlap; short ones are nearest to the column.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

ROW_HEIGHT = 24  # px, as in the style

# Distance of lanes where there are few, width of all where there are many, and least distance.
_LANE_PIXELS = 9.0
_LANES_PIXELS = 108.0
_LEAST_LANE_PIXELS = 2.0

_MARK = 5  # half the size of a place's mark
_APART = 3  # from a place's middle up to where wires come in, and down to where they leave
_CORNER = 5


@dataclass(frozen=True, slots=True)
class Wire:
    """The line of a tensor beside the column.

    Attributes:
        source: The place where it leaves the column.
        takers: Places where it comes back, from the top; none is the one below the source.
        lane: 0 is next to the column.
    """

    source: int
    takers: tuple[int, ...]
    lane: int


@dataclass(frozen=True, slots=True)
class Wiring:
    """Every line of a drawing.

    Attributes:
        count: Places in the column.
        straight: Places from which a line leads to the next one.
        wires: The others, by source.
    """

    count: int
    straight: tuple[int, ...]
    wires: tuple[Wire, ...]

    @property
    def lane_count(self) -> int:
        """Lanes beside the column."""
        return max((wire.lane + 1 for wire in self.wires), default=0)

    @property
    def width(self) -> float:
        """Px, from the outermost lane to the right edge of the marks."""
        return round(self.column + _MARK + 3, 1)

    @property
    def height(self) -> int:
        """Px."""
        return self.count * ROW_HEIGHT

    @property
    def column(self) -> float:
        """Px from the left to the middle of the column."""
        return round(_MARK + 3 + (self.lane_count * self._pitch + _CORNER + 2 if self.wires else 0), 1)

    @property
    def straight_path(self) -> str:
        """The straight lines, as an SVG path."""
        ends = ((middle(place) + _MARK, middle(place + 1) - _MARK) for place in self.straight)
        return "".join(f"M{self.column:g} {top}V{bottom}" for top, bottom in ends)

    @property
    def wire_paths(self) -> list[tuple[int, str]]:
        """Lane and SVG path of each wire, an arrowhead at each place where it comes back."""
        return [(wire.lane, self._path(wire)) for wire in self.wires]

    @property
    def _pitch(self) -> float:
        return max(_LEAST_LANE_PIXELS, min(_LANE_PIXELS, _LANES_PIXELS / (self.lane_count or 1)))

    def _path(self, wire: Wire) -> str:
        across = round(self.column - _MARK - _CORNER - 2 - (wire.lane + 0.5) * self._pitch, 1)
        arrow = self.column - _MARK
        turns = [middle(taker) - _APART - _CORNER for taker in wire.takers]
        c = _CORNER
        parts = [f"M{arrow:g} {middle(wire.source) + _APART}H{across + c:g}q-{c} 0-{c} {c}V{turns[-1]}"]
        parts += [f"M{across:g} {turn}q0 {c} {c} {c}H{arrow:g}m-3-3l3 3-3 3" for turn in turns]
        return "".join(parts)


def middle(place: int) -> int:
    """Return the px from the top to the middle of a place."""
    return ROW_HEIGHT * place + ROW_HEIGHT // 2


def wired(sources: Sequence[Sequence[int]]) -> Wiring:
    """Lay the lines of a drawing.

    Args:
        sources: For each place of the column, from the top, the places above it that it takes tensors from.

    Returns:
        A straight line for each edge between neighbours, and each other edge as a branch of its source's wire.
    """
    takers: dict[int, list[int]] = {}
    straight = []
    for place, taken in enumerate(sources):
        for source in sorted(set(taken)):
            if source == place - 1:
                straight.append(source)
            else:
                takers.setdefault(source, []).append(place)
    lanes: list[list[tuple[int, int]]] = []
    wires = []
    for source in sorted(takers, key=lambda each: (takers[each][-1] - each, each)):
        last = takers[source][-1]
        lane = next((number for number, taken in enumerate(lanes) if _is_free(taken, source, last)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        insort(lanes[lane], (source, last))
        wires.append(Wire(source, tuple(takers[source]), lane))
    return Wiring(len(sources), tuple(straight), tuple(sorted(wires, key=lambda wire: wire.source)))


def _is_free(taken: Sequence[tuple[int, int]], first: int, last: int) -> bool:
    """Tell whether a lane has room from one place to another; wires in one lane may meet at a place."""
    at = bisect_left(taken, (first, last))
    return (at == 0 or taken[at - 1][1] <= first) and (at == len(taken) or last <= taken[at][0])
