"""Maps of attention on one input of a batch: of a query, of every head, of every patch, and of the rollout.

`place` is the input's place in the batch, and `at` the query's position.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from hookscope.commands.attention.forward_pass import ForwardPass, SeenBlock
from hookscope.commands.attention.queries import Chosen, chosen_in
from hookscope.commands.attention.reductions import map_of, on_grid
from hookscope.results.attention import ROLLOUT, AttentionMap, HeadMaps, PatchWeights
from hookscope.results.concentration import Extent

Extents = Callable[[tuple[int, int]], Sequence[Extent]]
"""Returns the area that a grid (h, w) fills, of each input of the batch."""


def query_maps(seen: ForwardPass, block: SeenBlock, place: int, at: int, extents: Extents) -> Iterator[AttentionMap]:
    """Yield the maps of a query in one block: of the heads that were asked for, or their mean."""
    chosen = block.numbers.chosen[at][place]
    mapped = None if block.keys is None else map_of(block.numbers, block.keys, at, place)
    if block.keys is None or chosen is None or mapped is None:
        return
    grid, (values, elsewhere) = block.keys.grid, mapped
    for head in seen.wanted.heads or (None,):
        head_map = values.mean(0) if head is None else values[head]
        rest = elsewhere.mean() if head is None else elsewhere[head]
        yield AttentionMap(
            seen.first + place,
            block.block.label,
            head,
            chosen.label,
            head_map.reshape(grid).numpy().copy(),
            extents(grid)[place],
            float(rest),
            _box_on_input(chosen, extents(grid)[place]),
        )


def head_maps(seen: ForwardPass, place: int, positions: Mapping[str, int]) -> Iterator[HeadMaps]:
    """Yield the maps of all heads, by query and block; `positions` are those of blocks in the run."""
    for at in range(len(seen.wanted.queries)):
        for block in seen.blocks:
            chosen = block.numbers.chosen[at][place]
            mapped = None if block.keys is None else map_of(block.numbers, block.keys, at, place)
            if block.keys is not None and chosen is not None and mapped is not None:
                values = mapped[0].reshape(-1, *block.keys.grid).numpy()
                yield HeadMaps(seen.first + place, positions[block.block.label], chosen.label, values)


def _box_on_input(chosen: Chosen, extent: Extent) -> tuple[float, float, float, float] | None:
    """Return the box of a patch as shares of the network's input, which the grid may reach beyond."""
    if chosen.box is None:
        return None
    top, left, bottom, right = extent
    across, down = right - left, bottom - top
    from_left, from_top, to_right, to_bottom = chosen.box
    return left + from_left * across, top + from_top * down, left + to_right * across, top + to_bottom * down


def patch_weights(
    seen: ForwardPass, blocks: Sequence[SeenBlock], place: int, extents: Extents
) -> Iterator[PatchWeights]:
    """Yield the rows of every patch, of blocks that kept them."""
    for block in blocks:
        whole, queries, keys = block.numbers.whole, block.queries, block.keys
        if whole is None or keys is None or queries is None:
            continue
        cells = queries.cells[0]
        order = cells.argsort()[int((cells < 0).sum()) :]
        values = on_grid(whole[place][None, order], keys)[0].reshape(-1, *keys.grid).numpy().copy()
        yield PatchWeights(seen.first + place, block.block.label, queries.grid, values, extents(keys.grid)[place])


def rollout_maps(seen: ForwardPass, place: int, at: int, extents: Extents) -> Iterator[AttentionMap]:
    """Yield the map of a query after all blocks."""
    weights, places = seen.rollout, seen.blocks[-1].keys
    if weights is None or places is None:
        return
    query, classes = seen.wanted.queries[at], seen.wanted.arrangement.class_count
    chosen = chosen_in(query, seen.records[place], places, places, weights.size(1), classes)
    if chosen is None:
        return
    row = weights[place].mean(0) if chosen.token is None else weights[place, chosen.token]
    values = row[places.cells[0] >= 0].reshape(places.grid)
    yield AttentionMap(
        seen.first + place,
        ROLLOUT,
        None,
        chosen.label,
        values.numpy().copy(),
        extents(places.grid)[place],
        max(0.0, 1 - float(values.sum())),
        _box_on_input(chosen, extents(places.grid)[place]),
    )
