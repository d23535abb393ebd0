"""The lines of a data-flow drawing: which are straight, and in which lanes the others run."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookscope.render.html.flow_lines import ROW_HEIGHT, Wiring, wired

edges = st.lists(st.sets(st.integers(0, 30), max_size=6), max_size=30).map(
    lambda each: [sorted(source for source in taken if source < place) for place, taken in enumerate(each)]
)


@given(edges)
def test_every_edge_is_drawn_once_and_straight_between_neighbours_alone(sources: list[list[int]]) -> None:
    lines = wired(sources)
    straight = [(source, source + 1) for source in lines.straight]
    branches = [(wire.source, taker) for wire in lines.wires for taker in wire.takers]
    assert sorted(straight + branches) == sorted(
        (source, place) for place, taken in enumerate(sources) for source in taken
    )
    assert all(taker - source > 1 for source, taker in branches)
    assert len({wire.source for wire in lines.wires}) == len(lines.wires)


@given(edges)
def test_no_two_wires_overlap_in_a_lane_and_the_inner_ones_are_nearer(sources: list[list[int]]) -> None:
    for one, other in itertools.permutations(wired(sources).wires, 2):
        if one.source < other.takers[-1] and other.source < one.takers[-1]:
            assert one.lane != other.lane
        if other.source <= one.source and one.takers[-1] <= other.takers[-1]:
            assert one.lane < other.lane


def ends(path: str) -> tuple[tuple[float, float], list[tuple[float, float]]]:
    """Return the point where a wire's path begins, and those where its arrows point."""
    begin = re.match(r"M([\d.]+) ([\d.]+)H", path)
    assert begin is not None
    arrows = re.findall(r"M[\d.]+ ([\d.]+)q0 5 5 5H([\d.]+)", path)
    return (float(begin[1]), float(begin[2])), [(float(x), float(turn) + 5) for turn, x in arrows]


@given(edges)
def test_lines_begin_and_end_beside_their_places_inside_the_picture(sources: list[list[int]]) -> None:
    lines = wired(sources)
    for wire, (lane, path) in zip(lines.wires, lines.wire_paths, strict=True):
        begin, arrows = ends(path)
        assert lane == wire.lane
        assert begin == (lines.column - 5, ROW_HEIGHT * (wire.source + 0.5) + 3)
        assert arrows == [(lines.column - 5, ROW_HEIGHT * (taker + 0.5) - 3) for taker in wire.takers]
        assert all(0 <= float(x) <= lines.width for x in re.findall(r"[MH]([\d.]+)", path))
    upright = re.findall(r"M[\d.]+ (\d+)V(\d+)", lines.straight_path)
    assert [(int(top), int(bottom)) for top, bottom in upright] == [
        (ROW_HEIGHT * place + 17, ROW_HEIGHT * place + 31) for place in lines.straight
    ]


def lanes_apart(lines: Wiring) -> list[float]:
    across = sorted({float(x) for _, path in lines.wire_paths for x in re.findall(r"M([\d.]+) [\d.]+q", path)})
    return [right - left for left, right in itertools.pairwise(across)]


@pytest.mark.parametrize(("count", "width"), [(3, 50), (30, 150), (200, 430)])
def test_many_lanes_move_together_and_stay_apart(count: int, width: int) -> None:
    lines = wired([[], *(range(end) for end in range(1, count))])
    assert lines.lane_count == count - 2
    assert lines.width < width
    assert all(gap > 1.5 for gap in lanes_apart(lines))
