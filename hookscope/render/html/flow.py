"""The data flow of a network's blocks as a page draws it: which rows take whose tensors, in execution order.

A block inside another one is drawn there as one place, which leads to its own drawing, so that each row has one place
on the page, and a drawing is about as long as the code that it shows.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hookscope.render.columns import fold_name
from hookscope.render.html.blocks import Blocks, blocks_of
from hookscope.render.html.flow_lines import Wiring, middle, wired
from hookscope.render.html.layers import Layer
from hookscope.text import counted, shape_text

# Characters of a name from outside a block, and takers of a result that are named.
_NAME_WIDTH = 36
_MOST_TAKERS = 3

# Around the middle of a place: a ring, a disc, a diamond, a square, an arrowhead.
_MARKS = {
    "input": "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0",
    "module": "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "operation": "m-5 0l5-5 5 5-5 5z",
    "block": "m-4.5-4.5h9v9h-9z",
    "output": "m-4-4l4 5 4-5",
}


class Name(NamedTuple):
    """A name in a drawing, with what it leads to; "" for nothing."""

    text: str
    href: str
    label: str  # in full


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a drawing.

    Attributes:
        role: "input" comes from outside the block; "module" and "operation" are rows; "block" has a drawing elsewhere;
            "output" lists what takes a result outside the block.
        names: One, but of an "output" those of the first rows that take the result.
        sources: Places above it that it takes tensors from.
        about: In small print: what it is.
        shape: Of what it puts out.
        flagged: Rows in it that call for a look.
    """

    role: Literal["input", "module", "operation", "block", "output"]
    names: Sequence[Name]
    sources: Sequence[int] = ()
    about: str = ""
    shape: str = ""
    flagged: int = 0


@dataclass(frozen=True, slots=True)
class Flow:
    """The drawing of a block."""

    number: int
    block: str  # dotted name; "" is the network
    places: Sequence[Place]

    @property
    def title(self) -> str:
        """What it shows."""
        return f"Data flow of {self.block or 'the network'}"

    @property
    def wiring(self) -> Wiring:
        """Its lines."""
        return wired([place.sources for place in self.places])

    @property
    def marks(self) -> list[tuple[str, bool, str]]:
        """Role, whether flagged, and SVG path of the marks of all places that have both in common."""
        column = self.wiring.column
        paths: dict[tuple[str, bool], str] = defaultdict(str)
        for number, place in enumerate(self.places):
            paths[place.role, place.flagged > 0] += f"M{column:g} {middle(number)}{_MARKS[place.role]}"
        return [(*key, path) for key, path in paths.items()]

    @property
    def description(self) -> str:
        """What flows where, in words."""
        texts = [place.names[0].text for place in self.places]
        clauses = []
        for place, text in zip(self.places, texts, strict=True):
            taken = ", ".join(texts[source] for source in place.sources)
            if place.role == "output":
                clauses.append(f"{taken} goes to {', '.join(name.text for name in place.names)} {place.about}".rstrip())
            elif taken:
                clauses.append(f"{text} takes {taken}")
        return f"{'; '.join(clauses)}."


@dataclass(frozen=True, slots=True)
class Flows:
    """All drawings of a page.

    Attributes:
        blocks: By dotted name, outer ones first.
        of_layers: For each layer the drawing in which it is, or of which it is the output; None without one.
    """

    blocks: Mapping[str, Flow]
    of_layers: Sequence[Flow | None]


def flows_of(layers: Sequence[Layer]) -> Flows:
    """Draw the data flow of every block; there is nothing to draw where rows do not say where inputs came from."""
    blocks = blocks_of([layer.row for layer in layers])
    takers: dict[int, list[int]] = defaultdict(list)
    for number in blocks.inside[""]:
        for source in blocks.sources[number]:
            if isinstance(source, int):
                takers[source].append(number)
    run = _Run(layers, blocks, takers, {block: number for number, block in enumerate(blocks.outer)})
    flows = {block: Flow(number, block, _places(run, block)) for block, number in run.numbers.items()}
    flows = {block: flow for block, flow in flows.items() if any(place.sources for place in flow.places)}
    homes = [
        layer.row.layer if layer.row.owner is None and layer.row.layer in flows else home
        for layer, home in zip(layers, blocks.homes, strict=True)
    ]
    return Flows(flows, [flows.get(home) for home in homes])


@dataclass(frozen=True, slots=True)
class _Run:
    layers: Sequence[Layer]
    blocks: Blocks
    takers: Mapping[int, Sequence[int]]  # rows that take a row's tensor
    numbers: Mapping[str, int]  # of each block's drawing


def _places(run: _Run, block: str) -> list[Place]:
    """Return the lines of a block's drawing: inputs, what is in it in execution order, where its results go."""
    blocks = run.blocks
    groups: list[tuple[str, list[int]]] = []  # a block inside it, "" for none, and rows
    for number in blocks.inside[block]:
        inner = blocks.next_inwards(number, block)
        if not inner or not groups or groups[-1][0] != inner:
            groups.append((inner, []))
        groups[-1][1].append(number)
    inside = {number for _, members in groups for number in members}
    given = {source for number in inside for source in blocks.sources[number]} - inside
    inputs = sorted(given, key=lambda each: (isinstance(each, int), each))
    place_of = {each: place for place, each in enumerate(inputs)}
    place_of |= {number: place for place, (_, members) in enumerate(groups, len(inputs)) for number in members}
    places = [Place("input", [_source(run, each, block)]) for each in inputs]
    for inner, members in groups:
        sources = {place_of[source] for number in members for source in blocks.sources[number]} - {len(places)}
        places.append(
            _inner_block(run, inner, members, block, sources) if inner else _row(run, members[0], block, sources)
        )
    # The last result is next to its place, and lines of earlier ones go round it.
    for place, (_, members) in reversed([*enumerate(groups, len(inputs))]):
        leaving = sorted({taker for number in members for taker in run.takers[number]} - inside)
        names = [*dict.fromkeys(_taker(run, taker, block) for taker in leaving if run.layers[taker].row.layer != block)]
        if names:
            more = f"and {counted(len(names) - _MOST_TAKERS, 'other')}" if len(names) > _MOST_TAKERS else ""
            places.append(Place("output", names[:_MOST_TAKERS], [place], more))
    return places


def _row(run: _Run, number: int, block: str, sources: Collection[int]) -> Place:
    layer, row = run.layers[number], run.layers[number].row
    held = [_inside(name, block) for name in run.blocks.held[number]]
    about = [row.kind if row.owner is None else row.source, f"with {', '.join(held)}" if held else ""]
    return Place(
        "module" if row.owner is None else "operation",
        [Name(_inside(layer.label, block), layer.href, layer.label)],
        sorted(sources),
        " · ".join(filter(None, about)),
        "" if "not a tensor" in row.flags else shape_text(row.activation.shape),
        int(layer.flagged),
    )


def _inner_block(run: _Run, inner: str, members: Sequence[int], block: str, sources: Collection[int]) -> Place:
    rows = [run.layers[number] for number in members]
    return Place(
        "block",
        [Name(_inside(inner, block), _href(run, inner), inner)],
        sorted(sources),
        counted(len(rows), "row"),
        shape_text(rows[-1].row.activation.shape),
        sum(layer.flagged for layer in rows),
    )


def _inside(label: str, block: str) -> str:
    return label.removeprefix(f"{block or '(model)'}:").removeprefix(f"{block}." if block else "") or "(no name)"


def _outside(label: str, block: str) -> str:
    """Return a name as it is in the drawing around a block's."""
    around = f"{block}." if block else ""
    return fold_name(label.removeprefix(around), _NAME_WIDTH) or "(no name)"


def _source(run: _Run, source: int | str, block: str) -> Name:
    """Return what a block takes from outside it."""
    if isinstance(source, str):
        return Name(fold_name(source, _NAME_WIDTH), "", source)
    layer = run.layers[source]
    return Name(_outside(layer.label, run.blocks.outer[block]), layer.href, layer.label)


def _taker(run: _Run, taker: int, block: str) -> Name:
    """Return what takes a block's result: another block, if it is a row in one that the first is not in."""
    outer = run.blocks.outer[block]
    other = run.blocks.outwards(taker, outer)
    label = other or run.layers[taker].label
    return Name(_outside(label, outer), _href(run, other) if other else run.layers[taker].href, label)


def _href(run: _Run, block: str) -> str:
    return f"#flow-{run.numbers[block]}"
