"""Two small maps of each activation, taken in the hook: the mean over channels, and one channel, the strongest."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hookscope.hooks.observed import Place
from hookscope.results.activations import LayerRow, MapSummary
from hookscope.statistics.channel_axis import token_grid

SUMMARISED_INPUTS = 3
"""How many inputs, from the first, have their maps summarised: as many as an overview shows. Our choice."""

_LONGEST_SIDE = 160  # of a summary; larger maps are averaged over blocks. Our choice: an overview draws none larger.


@dataclass(frozen=True, slots=True)
class SavedSummary:
    """The summary of some inputs' activations, on their device; see `MapSummary`.

    Attributes:
        means: (n, h, w), over channels.
        strongest: (n, h, w), of one channel each.
        channels: Which they are, (n,).
        size: (H, W) before averaging.
        first: Position of the first input.
    """

    key: Place
    means: Tensor
    strongest: Tensor
    channels: Tensor
    channel_count: int
    size: tuple[int, int]
    first: int


def summarise_maps(
    key: Place, tensor: Tensor, channel_axis: int, grids: Sequence[tuple[int, ...]], indices: Sequence[int]
) -> SavedSummary | None:
    """Summarise the first inputs' maps in one output; None if it has none, or no axis that counts inputs.

    Args:
        key: Of the row.
        tensor: The output, the batch on axis 0.
        channel_axis: As `AxisReader.channel_axis` gave it.
        grids: Spatial sizes seen in this forward pass, which tokens may lie on; none for words.
        indices: Positions in the run of the batch's inputs.
    """
    count = min(len(indices), SUMMARISED_INPUTS - indices[0])
    maps = _maps(tensor, channel_axis, grids, len(indices), count)
    if maps is None:
        return None
    channel_count, *size = maps.shape[1:]
    # A norm of 1 takes ten times as long as that of 2.
    wide = torch.promote_types(maps.dtype, torch.float32)
    strength = torch.linalg.vector_norm(maps, 2, (2, 3), dtype=wide)  # (n, C)
    channels = strength.nan_to_num(nan=math.inf).argmax(1)  # NaN before Inf, which becomes the greatest finite number
    # All of them for each input, of which there are few: a fifth of the time of taking them one by one.
    strongest = maps.index_select(1, channels).diagonal(0, 0, 1).movedim(-1, 0)  # (n, H, W)
    means, strongest = maps.mean(1, dtype=wide).float(), strongest.float()
    step = -(-max(size) // _LONGEST_SIDE)
    if step > 1:
        means, strongest = (functional.avg_pool2d(each, step, ceil_mode=True) for each in (means, strongest))
    return SavedSummary(key, means, strongest, channels, channel_count, (size[0], size[1]), indices[0])


def map_summaries(rows: Iterable[LayerRow], saved: Sequence[SavedSummary]) -> tuple[MapSummary, ...]:
    """Return summaries by row and input."""
    if not saved:
        return ()
    by_key = {(row.layer, row.call, row.slot): row for row in rows}
    result = []
    fetched = [_fetched([getattr(each, name) for each in saved]) for name in ("means", "strongest", "channels")]
    for each, *found in zip(saved, *fetched, strict=True):
        row = by_key[each.key]
        means, strongest, channels = (tensor.numpy() for tensor in found)
        for place, channel in enumerate(channels.tolist()):
            result.append(
                MapSummary(
                    row.index,
                    row.label,
                    row.kind,
                    each.first + place,
                    means[place],
                    strongest[place],
                    channel,
                    each.channel_count,
                    each.size,
                )
            )
    return tuple(sorted(result, key=lambda summary: (summary.row, summary.input_index)))


def _maps(
    tensor: Tensor, channel_axis: int, grids: Sequence[tuple[int, ...]], input_count: int, count: int
) -> Tensor | None:
    """Return the maps of the first inputs, (n, C, H, W), of a clip the frame in the middle."""
    if not 3 <= tensor.dim() <= 5 or tensor.layout != torch.strided or not tensor.numel():
        return None
    if tensor.shape[0] != input_count:
        if tensor.dim() != 3 or tensor.shape[1] != input_count:
            return None
        tensor = tensor.transpose(0, 1)  # (T, N, D)
    tensor = tensor[:count]
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.abs() if tensor.is_complex() else tensor if tensor.is_floating_point() else tensor.float()
    maps = tensor.movedim(channel_axis, 1)
    if maps.dim() == 3:
        grid = token_grid(maps.shape[2], grids) if channel_axis == 2 and grids else None
        if grid is None:
            return None
        maps = maps[:, :, maps.shape[2] - math.prod(grid) :].reshape(*maps.shape[:2], *grid)
    elif grids and tuple(maps.shape[2:]) not in grids:  # heads of attention, or windows
        return None
    if maps.dim() == 5:
        maps = maps[:, :, maps.shape[2] // 2]
    return maps if min(maps.shape[2:]) > 1 else None


def _fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU: those of one shape in one transfer."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for place, each in enumerate(tensors):
        by_shape.setdefault(tuple(each.shape), []).append(place)
    result = list(tensors)
    for places in by_shape.values():
        if tensors[places[0]].device.type != "cpu":
            together = torch.stack([tensors[place] for place in places]).cpu()
            for place, each in zip(places, together, strict=True):
                result[place] = each
    return result
