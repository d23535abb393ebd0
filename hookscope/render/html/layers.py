"""A run's layers as a page shows them: one entry for each row of the table, with its details."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from urllib.parse import quote

from hookscope.render.columns import integer_text, number_text, percent_text, token_norms_text
from hookscope.render.cost_text import field_text, scaled_text, seconds_text
from hookscope.render.html.figures import Bars, bars
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.cost import ModuleCost
from hookscope.results.costs_of_rows import costs_of_rows
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, ParameterRow, parameter_owner
from hookscope.results.runs.reading import InspectionRun
from hookscope.results.statistics import TensorStatistics
from hookscope.text import safe_text, shape_text

# Calls of one module that the page of each lists: with all of them, pages would grow with their square.
_MOST_CALLS = 32
# Flags that call for a look; the others say how a layer works.
_NOTABLE = frozenset({"non-finite", "constant", "all zero", "dead channels", "massive activations", "unmeasured"})

# Only a name made to break a page nests deeper.
_MOST_LEVELS = 24


@dataclass(frozen=True, slots=True)
class LayerColumn:
    """A column of the table of layers."""

    key: str  # short and unique: class of its cells, and its name in the page's address
    title: str
    meaning: str
    shown: bool = True  # at first
    gradient: bool = False
    words: bool = False  # not numbers
    cost: bool = False  # only where costs were taken


COLUMNS = (
    LayerColumn("kind", "type", "class of the module", words=True),
    LayerColumn("params", "parameters", "elements in its own parameters", shown=False),
    LayerColumn("shape", "shape", "of the output", words=True),
    LayerColumn("hist", "distribution", "of the values, 1st to 99th percentile, heights as square roots", words=True),
    LayerColumn("gabs", "mean |g|", "mean absolute gradient of the output", gradient=True),
    LayerColumn("gl2", "L2 of g", "root of the sum of squares of the gradient", gradient=True),
    LayerColumn("gzeros", "zeros of g", "share of exact zeros in the gradient", shown=False, gradient=True),
    LayerColumn("gstate", "gradient", "status of the gradient", gradient=True, words=True),
    LayerColumn("mean", "mean", "of the values"),
    LayerColumn("std", "std", "standard deviation"),
    LayerColumn("min", "min", "smallest value"),
    LayerColumn("max", "max", "largest value"),
    LayerColumn("abs", "mean |x|", "mean absolute value", shown=False),
    LayerColumn("l2", "L2", "root of the sum of squares", shown=False),
    LayerColumn("zeros", "zeros", "share of exact zeros"),
    LayerColumn("dead", "dead", "channels that are zero everywhere"),
    LayerColumn("tokens", "token L2", "median and greatest norm of the tokens, and how many are high", shown=False),
    LayerColumn("bad", "NaN, Inf", "values that are not finite"),
    LayerColumn("madds", "mult-adds", "multiply-adds of the module, all calls", cost=True),
    LayerColumn("outbytes", "out bytes", "bytes of the module's output, all calls", shown=False, cost=True),
    LayerColumn("saved", "saved", "bytes saved for the backward pass", cost=True),
    LayerColumn("field", "rec. field", "receptive field /stride, in pixels", words=True, cost=True),
    LayerColumn("time", "time", "of the module on the machine of the run, all calls", cost=True),
    LayerColumn("flags", "flags", "remarks", words=True),
)


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

    @property
    def cells(self) -> dict[str, tuple[str, float | str | None]]:
        """The text of each cell and its sort value, by the column's key."""
        row, values = self.row, self.row.activation
        gradient = self.gradient.gradient if self.gradient else TensorStatistics((), "", 0)
        state = self.gradient.status if self.gradient else "-"
        dead = values.dead_channel_count
        bad = None if values.nan_count is None else values.nan_count + (values.inf_count or 0)
        numbers = {name: getattr(values, name) for name in ("mean", "std", "min", "max", "l2")}
        numbers |= {"abs": values.mean_abs, "gabs": gradient.mean_abs, "gl2": gradient.l2}
        return {
            "kind": (row.kind, row.kind),
            "params": (f"{row.parameter_count:,}", row.parameter_count),
            "shape": ("-" if "not a tensor" in row.flags else shape_text(values.shape), values.element_count),
            "gstate": (state, state),
            "gzeros": (percent_text(gradient.zero_fraction), gradient.zero_fraction),
            "zeros": (percent_text(values.zero_fraction), values.zero_fraction),
            "dead": (integer_text(dead) if values.channel_count else "-", dead),
            "bad": (integer_text(bad), bad),
            "tokens": (token_norms_text(row.tokens), None if row.tokens is None else row.tokens.max),
            **{key: (number_text(number), number) for key, number in numbers.items()},
            **self._cost_cells,
        }

    @property
    def _cost_cells(self) -> dict[str, tuple[str, float | str | None]]:
        if self.cost is None:
            return dict.fromkeys(("madds", "outbytes", "saved", "field", "time"), ("", None))
        total, field, seconds = self.cost.total, self.cost.receptive_field, self.cost.seconds
        size = None if field is None else math.prod(field.size)
        return {
            "madds": (scaled_text(total.multiply_adds), total.multiply_adds),
            "outbytes": (scaled_text(self.cost.output_bytes, "B"), self.cost.output_bytes),
            "saved": (scaled_text(total.saved_bytes, "B"), total.saved_bytes),
            "field": (field_text(field), size),
            "time": (seconds_text(seconds), seconds),
        }


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
