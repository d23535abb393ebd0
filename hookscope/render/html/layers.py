"""A run's layers as a page shows them: one entry for each row of the table, with its details."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any
from urllib.parse import quote

from hookscope.render.columns import Column, telling
from hookscope.render.cost_text import COSTS
from hookscope.render.html.figures import Bars, bars
from hookscope.render.layer_columns import GRADIENT, HIST, layer_columns
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.cost import ModuleCost
from hookscope.results.costs_of_rows import costs_of_rows
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, ParameterRow, parameter_owner
from hookscope.results.runs.reading import InspectionRun
from hookscope.text import safe_text

# Calls of one module that the page of each lists: with all of them, pages would grow with their square.
_MOST_CALLS = 32
# Flags that call for a look; the others say how a layer works.
_NOTABLE = frozenset({"non-finite", "constant", "all zero", "dead channels", "massive activations", "unmeasured"})

# Only a name made to break a page nests deeper.
_MOST_LEVELS = 24


@dataclass(frozen=True, slots=True)
class LayerColumn:
    """A column of the table of layers, with text and sort value of each layer.

    Attributes:
        name: Class of its cells, and its name in the page's address.
        shown: Whether it is shown at first.
    """

    name: str
    column: Column
    shown: bool
    cells: Sequence[str]
    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class ShownFinding(Finding):
    """A finding with what it leads to; "" for nothing."""

    href: str = ""  # the layer's page or picture, unless that is where the finding stands
    anchor: str = ""  # its own identifier: "rule=dead-channels&finding=2"
    rule_href: str = ""  # the rule, further down


@dataclass(frozen=True, slots=True)
class Layer:
    """One row of the table, and its page."""

    row: LayerRow
    number: int
    label: str
    calls: Sequence["Layer"]  # all calls and outputs of the same module
    call_position: int  # its own among them
    gradient: GradientRow | None  # of its output; None without a backward pass
    input_gradients: Sequence[GradientRow]
    parameters: Sequence[ParameterRow]
    findings: Sequence[ShownFinding]  # verdicts that name it or one of its parameters
    grids: Sequence[int]  # positions
    sources: Sequence[tuple[str, str]]  # where its inputs came from, with links; "" for what has no row
    takers: Sequence[tuple[str, str]]  # what takes its output, likewise
    cost: ModuleCost | None = None  # of the module; of its other rows None

    @property
    def flags(self) -> list[tuple[str, bool]]:
        """Each flag, and whether it calls for a look; rules that name the layer among them."""
        named = [(rule, True) for rule in dict.fromkeys(finding.rule for finding in self.findings)]
        return named + [(flag, flag in _NOTABLE) for flag in self.row.flags]

    @property
    def flagged(self) -> bool:
        """Whether anything calls for a look."""
        return any(notable for _, notable in self.flags)

    @property
    def href(self) -> str:
        """Its place on the page."""
        return _href(self.label)

    @property
    def near_calls(self) -> Sequence["Layer"]:
        """Those of `calls` that its page lists: itself and its neighbours."""
        first = min(max(self.call_position - _MOST_CALLS // 2, 0), max(len(self.calls) - _MOST_CALLS, 0))
        return self.calls[first : first + _MOST_CALLS]

    @property
    def bars(self) -> Bars | None:
        """Its histogram."""
        return bars(self.row.activation)


@dataclass(slots=True)
class Node:
    """A part of the network in the tree."""

    name: str  # last part of its dotted name
    layers: list[Layer] = field(default_factory=list)  # of the module itself
    children: dict[str, "Node"] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Rows in and below it."""
        return len(self.layers) + sum(child.count for child in self.children.values())

    @property
    def flagged(self) -> int:
        """Rows in and below it that call for a look."""
        return sum(layer.flagged for layer in self.layers) + sum(child.flagged for child in self.children.values())


def _href(label: str) -> str:
    return f"#layer={quote(safe_text(label), safe='')}"


def findings_of(run: InspectionRun, layers: Sequence[Layer]) -> list[ShownFinding]:
    """Return all findings, each with a link to the first layer that it names."""
    pages: dict[str, str] = {}
    for layer in reversed(layers):
        pages |= dict.fromkeys((layer.label, *(parameter.name for parameter in layer.parameters)), layer.href)
    return [ShownFinding(**asdict(verdict), href=pages.get(verdict.where, "")) for verdict in run.result.verdicts]


def layers_of(run: InspectionRun) -> list[Layer]:
    """Assemble the details of each row."""
    outputs = {gradient.label: gradient for gradient in run.gradients if gradient.role == "output"}
    inputs: dict[tuple[str, int], list[GradientRow]] = defaultdict(list)
    for gradient in run.gradients:
        if gradient.role == "input":
            inputs[gradient.layer, gradient.call].append(gradient)
    owned: dict[str, list[ParameterRow]] = defaultdict(list)
    for parameter in run.parameters:
        owned[parameter_owner(parameter.name, parameter.kind)].append(parameter)
    labels = {row.index: row.label for row in (run.gradients if run.record.verb == "grads" else run.result.rows)}
    grids: dict[str, list[int]] = defaultdict(list)
    for position, grid in enumerate(run.record.grids):
        grids[labels[grid.row]].append(position)
    verdicts: dict[str, list[ShownFinding]] = defaultdict(list)
    for verdict in run.result.verdicts:
        for place in verdict.places:
            verdicts[place].append(ShownFinding(**asdict(verdict)))
    calls: dict[str, list[Layer]] = defaultdict(list)
    shown = {name: row.label for row in run.result.rows for name in (*row.also, row.label)}
    takers: dict[str, dict[str, None]] = defaultdict(dict)
    for row in run.result.rows:
        for source in row.inputs:
            takers[shown.get(source, source)][row.label] = None
    cost = run.result.cost if isinstance(run.result, Activations) else None
    costs = [None] * len(run.result.rows) if cost is None else costs_of_rows(run.result.rows, cost)
    layers = []
    for number, row in enumerate(run.result.rows):
        parameters = owned[row.layer]
        layer = Layer(
            row,
            number,
            row.label,
            calls[row.layer],
            len(calls[row.layer]),
            outputs.get(row.label),
            inputs[row.layer, row.call],
            parameters,
            [*verdicts[row.label], *(each for parameter in parameters for each in verdicts[parameter.name])],
            grids[row.label],
            [(name, _href(shown[name]) if name in shown else "") for name in row.inputs if name],
            [(name, _href(name)) for name in takers[row.label]],
            costs[number],
        )
        calls[row.layer].append(layer)
        layers.append(layer)
    return layers


# Columns that are shown at first have such a rank at most: those of outputs, of gradients, and of costs.
_VALUE_RANK, _GRADIENT_RANK, _COST_RANK = 16, 4, 6
_ROOM_FOR_GRADIENTS = frozenset({"std", "min", "max"})
_SORTED_BY: Mapping[str, Callable[[Layer], Any]] = {
    "shape": lambda layer: layer.row.activation.element_count,
    "receptive_field": lambda layer: layer.cost and (seen := layer.cost.receptive_field) and math.prod(seen.size),
}


def _has_bars(layer: Layer) -> str:
    return "-" if layer.bars is None else "bars"


def columns_of(layers: Sequence[Layer], *, has_gradients: bool, has_cost: bool) -> list[LayerColumn]:
    """Return the columns of the table, but for number and name; those that say nothing are left out."""
    row, gradient, cost = attrgetter("row"), attrgetter("gradient"), attrgetter("cost")
    *values, flags = (each for each in layer_columns([layer.row for layer in layers])[2:] if each.title)
    told: list[tuple[Column, bool]] = []
    drawn = Column(
        "", HIST, "1st to 99th percentile, heights as square roots", value=lambda _: None, shown=_has_bars, usual="-"
    )
    for value in values:
        column = drawn if value.title == HIST else value.on(row)
        told.append((column, value.rank <= _VALUE_RANK and not (has_gradients and value.key in _ROOM_FOR_GRADIENTS)))
    if has_gradients:
        status = Column("status", "gradient", "status", 1, words=True, usual="gradient")
        for each in (*GRADIENT[2:], status):
            title = each.title if "g" in each.title or not each.title else f"{each.title} of g"
            about = f"{each.meaning} of the gradient"
            lifted = each.on(gradient, key=f"gradient_{each.key}", title=title, meaning=about)
            told.append((lifted, each.rank <= _GRADIENT_RANK))
    if has_cost:
        told += [(each.on(cost, blank=""), each.rank <= _COST_RANK) for each in COSTS]
    told.append((flags.on(row), True))
    shown = dict(told)
    return [
        LayerColumn(
            each.key or each.title, each, shown[each], cells, [*map(_SORTED_BY.get(each.key, each.read), layers)]
        )
        for each, cells in telling([*shown], layers)
    ]


def tree_of(layers: Sequence[Layer]) -> Node:
    """Return the network as far as the rows show it."""
    root = Node("")
    for layer in layers:
        node = root
        module = layer.row.layer if layer.row.owner is None else layer.row.owner
        parts = module.split(".", _MOST_LEVELS - 1) if module else []
        parts += [] if layer.row.owner is None else [f":{layer.row.kind}"]
        for part in parts:
            node = node.children.setdefault(part, Node(part))
        node.layers.append(layer)
    return root
