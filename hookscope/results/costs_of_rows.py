"""The cost of every row, and one sentence about the part that takes most of the time."""

from collections.abc import Sequence
from typing import TypeVar

from hookscope.results.activations import LayerRow
from hookscope.results.cost import ModuleCost, NetworkCost
from hookscope.results.network import ModuleRow
from hookscope.text import percent_text, share_in_words

Row = TypeVar("Row", LayerRow, ModuleRow)

# A part that takes this share of the time is a wrapper: its children are compared instead.
_NEARLY_ALL = 0.9


def dearest_part(cost: NetworkCost, rows: Sequence[LayerRow]) -> str:
    """Return which part takes most of the time: "40% of the time in layer3, 62% of its channels dead".

    A child that takes nearly all the time is replaced by its own children. "" if there are no times, or no parts.
    """
    whole = cost.whole.seconds
    if not whole:
        return ""
    timed = [entry for entry in cost.modules[1:] if entry.seconds is not None]
    names = {entry.layer for entry in timed}
    children: dict[str, list[ModuleCost]] = {}
    for child in timed:
        parent = child.layer.rpartition(".")[0]
        while parent and parent not in names:  # a ModuleList: only what it holds is called
            parent = parent.rpartition(".")[0]
        children.setdefault(parent, []).append(child)
    layer, share = "", 1.0
    while share >= _NEARLY_ALL and layer in children:
        part = max(children[layer], key=lambda entry: entry.seconds or 0.0)
        seconds = part.seconds or 0.0
        if layer and seconds < (1 - _NEARLY_ALL) * whole:
            break
        layer, share = part.layer, min(seconds / whole, 1.0)
    if not layer:
        return ""
    modules = ((row.layer if row.owner is None else row.owner, row.activation) for row in rows)
    named = [values for module, values in modules if f"{module}.".startswith(f"{layer}.")]
    inside = [values for values in named if values.has_enough_per_channel and values.dead_channel_count is not None]
    channels = sum(statistics.channel_count or 0 for statistics in inside)
    dead = sum(statistics.dead_channel_count or 0 for statistics in inside)
    words = f"{share_in_words(percent_text(share, 0))} of the time in {layer}"
    if not channels:
        return words
    dead_share = share_in_words(percent_text(dead / channels, 0)) if dead else "none"
    return f"{words}, {dead_share} of its channels dead"


def rows_with_costs(rows: Sequence[Row], cost: NetworkCost | None) -> list[tuple[Row, ModuleCost | None]]:
    """Return each row with its module's cost at the module's first row, as it covers all calls; None at others."""
    costs = {} if cost is None else {module.layer: module for module in cost.modules}
    return [(row, None if row.owner is not None else costs.pop(row.layer, None)) for row in rows]
