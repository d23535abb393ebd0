"""Which parts of a network have a drawing of their data flow, by the names of rows and where their inputs came from.

A block is a module whose code joins tensors, as a residual block does in its sum; the network itself also is one. Other
modules only pass a tensor from layer to layer, and what is inside them belongs to the block around them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hookscope.render.html.layers import MOST_LEVELS, row_numbers
from hookscope.results.activations import LayerRow

# Operations that take a list of tensors, of which there may be one, as in the first layer of a dense block.
_JOINING = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"})


@dataclass(frozen=True, slots=True)
class Blocks:
    """The rows of a run in their blocks.

    Attributes:
        rows: Those of the run.
        sources: For each row, what it takes: rows before it, by number, and inputs of the network, by name.
        held: For each row, names of the parameters and buffers that it takes.
        around: For each row, the modules that it is inside, from the network inwards.
        inside: For each block, the rows inside it, at any depth, in execution order.
        outer: Each block's next one outwards, outer ones first; that of the network, "", is itself.
        homes: For each row, the innermost block that it is inside.
    """

    rows: Sequence[LayerRow]
    sources: Sequence[Sequence[int | str]]
    held: Sequence[Sequence[str]]
    around: Sequence[Sequence[str]]
    inside: Mapping[str, Sequence[int]]
    outer: Mapping[str, str]
    homes: Sequence[str]

    def next_inwards(self, number: int, block: str) -> str:
        """Return the block directly inside another one that a row belongs to; "" if it belongs to that other one."""
        row = self.rows[number]
        inner = row.layer if row.owner is None and row.layer in self.outer else self.homes[number]
        while inner != block and self.outer[inner] != block:
            inner = self.outer[inner]
        return "" if inner == block else inner

    def outwards(self, number: int, block: str) -> str:
        """Return the outermost block that a row is inside and another block is not in; "" if there is none."""
        while block and block not in self.around[number]:
            block = self.outer[block]
        return self.next_inwards(number, block)


def blocks_of(rows: Sequence[LayerRow]) -> Blocks:
    """Find the blocks of a run.

    A module's row that no other takes a tensor from is left out where there are rows inside the module: the tensor is
    that of one of them.
    """
    numbers = row_numbers(rows)
    sources: list[list[int | str]] = []
    held: list[list[str]] = []
    for number, row in enumerate(rows):
        names = [*dict.fromkeys(filter(None, row.inputs))]
        before = dict.fromkeys(numbers[name] for name in names if name in numbers and numbers[name] < number)
        sources.append([*before, *(name for name in names if name not in numbers and _is_network_input(name))])
        held.append([name for name in names if name not in numbers and not _is_network_input(name)])
    around = [_modules_around(row) for row in rows]
    modules = {module for names in around for module in names}
    taken = {source for each in sources for source in each}
    shown = [row.owner is not None or row.layer not in modules or n in taken for n, row in enumerate(rows)]
    homes, outer = _choose(rows, around, sources, shown)
    inside: dict[str, list[int]] = {block: [] for block in outer}
    for number, names in enumerate(around):
        for block in outer.keys() & names if shown[number] else ():
            inside[block].append(number)
    return Blocks(rows, sources, held, around, inside, outer, homes)


def _choose(
    rows: Sequence[LayerRow],
    around: Sequence[Sequence[str]],
    sources: Sequence[Sequence[int | str]],
    shown: Sequence[bool],
) -> tuple[list[str], dict[str, str]]:
    """Return the innermost block of each row, and each block's next one outwards, outer ones first."""
    depths = {module: depth for names in around for depth, module in enumerate(names)}
    parents = {module: names[depth - 1] for names in around for depth, module in enumerate(names) if depth}
    places: dict[str, list[int]] = defaultdict(list)  # rows in a module, but in no block inside it
    for number, names in enumerate(around):
        places[names[-1] if names else ""].append(number)
    inner = dict.fromkeys(("", *depths), 0)  # blocks in a module, but in no other inside it
    homes = [""] * len(rows)
    blocks: dict[str, None] = {}
    for module in sorted(parents, key=lambda each: -depths[each]):
        here = [n for n in places[module] if shown[n] and (rows[n].owner is not None or rows[n].layer not in blocks)]
        if len(here) + inner[module] > 1 and any(_joins(rows[n], sources[n], module, around) for n in here):
            blocks[module] = None
            inner[parents[module]] += 1
            for number in places[module]:
                homes[number] = module
        else:
            places[parents[module]] += places[module]
            inner[parents[module]] += inner[module]
    outer = {"": ""}
    for module in sorted(blocks, key=lambda each: depths[each]):
        at = parents[module]
        while at not in outer:
            at = parents[at]
        outer[module] = at
    return homes, outer


def _joins(row: LayerRow, sources: Sequence[int | str], module: str, around: Sequence[Sequence[str]]) -> bool:
    """Tell whether tensors meet in a row because of a module's code: in its operation, or coming from inside it."""
    if row.owner is not None:
        return len(sources) > (0 if row.kind in _JOINING else 1)
    return len(sources) > 1 and any(isinstance(each, int) and module in around[each] for each in sources)


def _modules_around(row: LayerRow) -> list[str]:
    if row.owner is None and not row.layer:
        return []
    module = row.layer.rpartition(".")[0] if row.owner is None else row.owner
    parts = module.split(".")[: MOST_LEVELS - 1]
    return [*dict.fromkeys(["", *(".".join(parts[: depth + 1]) for depth in range(len(parts)))])]


def _is_network_input(name: str) -> bool:
    return name == "input" or name.startswith("input[")
