"""Two small maps of an activation, taken in the hook: all channels combined, and the strongest channel."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import RowKey, version_of
from hookscope.results.activations import LayerRow, MapSummary, OverChannels
from hookscope.statistics.layouts import token_grid

SUMMARISED_INPUTS = 3
"""How many inputs, from the first, have their maps summarised: as many as an overview shows."""

_LONGEST_SIDE = 160  # of a summary; larger maps are averaged over blocks, as an overview draws none larger.

# Every row is summarised where no more are hooked.
FEW_ROWS = 32
# Before the last row of one size, the 16th, 32nd, 64th and so on are summarised: a transformer has one
# size, and an overview shows five of its rows.
_FIRST_BETWEEN = 16

# Only the first of several outputs can be a sequence: others are states of recurrent layers or weights of attention.
_FIRST_SLOTS = ("", "[0]")

# A mean over channels is drawn as 0 where it is no more than this share of the values' root mean square: float32
# rounds to 6e-8 of a value, and LayerNorm's outputs have a mean of 0 up to that.
_ROUNDING = 2.0**-20


@dataclass(frozen=True, slots=True)
class SavedSummary:
    """The summary of some inputs' activations, on their device; see `MapSummary`.

    Attributes:
        combined: (n, h, w), all channels as one.
        strongest: (n, h, w), of one channel each.
        channels: Their indices, (n,).
        size: (H, W) before averaging.
        first: Position of the first input.
    """

    key: RowKey
    combined: Tensor
    over_channels: OverChannels
    strongest: Tensor
    channels: Tensor
    channel_count: int
    size: tuple[int, int]
    first: int


class _Row(NamedTuple):
    """An output, which may be held until the next one shows whether it is the last of its size."""

    key: RowKey
    tensor: Tensor
    version: int
    channel_axis: int
    spatial: tuple[int, ...]
    is_saved: bool


@dataclass(slots=True)
class MapRecorder:
    """Summarises maps of the first inputs: of every row, or only of rows that an overview may show.

    An overview shows the last row of each size, and where sizes are few others too: see `chosen_maps`. Only the next
    row tells whether a row is the last of its size, so the latest output is held until then. A network may overwrite
    it before: from then on each row is summarised at once.
    """

    every_row: bool = False
    saved: list[SavedSummary] = field(default_factory=list)
    _indices: tuple[int, ...] = ()
    _counts: dict[tuple[int, ...], int] = field(default_factory=dict)
    _latest: _Row | None = None

    def start(self, indices: tuple[int, ...]) -> None:
        """Begin a forward pass over the inputs at `indices`."""
        self._indices = indices
        self._counts.clear()
        self._latest = None

    def forget(self) -> None:
        """Drop the summaries of the latest forward pass."""
        first = min(self._indices, default=0)
        self.saved = [summary for summary in self.saved if summary.first < first]
        self._latest = None

    def see(self, key: RowKey, tensor: Tensor, channel_axis: int, grids: Sequence[tuple[int, ...]]) -> None:
        """Summarise an output now or later if it has maps.

        Args:
            key: Of the row.
            tensor: The output, the batch on axis 0.
            channel_axis: As `AxisReader.channel_axis` gave it.
            grids: Spatial sizes (H, W) seen in this pass, on which tokens may lie; empty for signals and words.
        """
        if not self._indices or self._indices[0] >= SUMMARISED_INPUTS or tensor.layout != torch.strided:
            return
        spatial = _spatial(tuple(tensor.shape), channel_axis, grids, len(self._indices))
        if spatial is None or (spatial[0] == 1 and key[2] not in _FIRST_SLOTS):
            return
        latest, version = self._latest, version_of(tensor)
        if latest is not None:
            if latest.tensor is tensor and latest.version == version:  # a container returns what its last child did
                return
            if latest.spatial != spatial:
                self._save_latest()
        count = self._counts.get(spatial, 0)
        self._counts[spatial] = count + 1
        is_between = count >= _FIRST_BETWEEN and not count & (count - 1)
        at_once = self.every_row or is_between or len(self._counts) == 1 > count
        row = _Row(key, tensor, version, channel_axis, spatial, at_once)
        if at_once:
            self._save(row)
        self._latest = None if self.every_row else row

    def finish(self) -> None:
        """End a forward pass: the latest output is the last of its size."""
        self._save_latest()
        self._latest = None

    def _save_latest(self) -> None:
        latest = self._latest
        if latest is None or latest.is_saved:
            return
        if latest.version == version_of(latest.tensor) >= 0 and not missing_memory(latest.tensor):
            self._save(latest)
        else:
            self.every_row = True

    def _save(self, row: _Row) -> None:
        maps = _maps(row.tensor, row.channel_axis, row.spatial, len(self._indices))
        count = min(len(self._indices), SUMMARISED_INPUTS - self._indices[0])
        # Tokens, and maps with channels last (Swin), come from LayerNorm, after which their mean is 0.
        is_tokens = row.tensor.dim() == 3 or row.channel_axis == row.tensor.dim() - 1
        over_channels: OverChannels = "RMS" if is_tokens else "mean"
        self.saved.append(_summarised(row.key, maps[:count], over_channels, self._indices[0]))


def _summarised(key: RowKey, maps: Tensor, over_channels: OverChannels, first: int) -> SavedSummary:
    channel_count, *size = maps.shape[1:]
    wide = torch.promote_types(maps.dtype, torch.float32)
    strength = torch.linalg.vector_norm(maps, 2, (2, 3), dtype=wide)  # (n, C)
    if maps.is_cpu and torch.linalg.vector_norm(strength).isinf():  # float32 does not hold the squares
        wide = torch.float64
        strength = torch.linalg.vector_norm(maps, 2, (2, 3), dtype=wide)
    channels = strength.nan_to_num(nan=math.inf).argmax(1)  # NaN before Inf, which becomes the greatest finite number
    typical = torch.linalg.vector_norm(strength, 2, 1) / math.sqrt(channel_count * math.prod(size))  # (n,)
    rounding = (_ROUNDING * typical).nan_to_num(posinf=0)[:, None, None]
    step = -(-max(size) // _LONGEST_SIDE)
    is_signal = size[0] == 1  # taken part by part: the maps of a long recording may be its largest tensors
    planes: list[tuple[Tensor, ...]] = []
    for part in torch.split(maps, step * max(4, _LONGEST_SIDE // step), 3) if is_signal else (maps,):
        strongest = torch.cat([sample.index_select(0, channels[at : at + 1]) for at, sample in enumerate(part)])
        if over_channels == "RMS":
            combined = torch.linalg.vector_norm(part, 2, 1, dtype=wide) / math.sqrt(channel_count)
        else:
            combined = part.mean(1, dtype=wide)
            combined = combined.masked_fill_(combined.abs() <= rounding, 0)
        # Means of blocks of steps would cancel where a signal swings.
        both: tuple[Tensor, ...] = combined, (strongest.abs() if is_signal else strongest).to(wide)
        if step > 1:
            both = tuple(functional.avg_pool2d(plane, step, ceil_mode=True) for plane in both)
        planes.append(tuple(plane.float() for plane in both))
    combined, strongest = (torch.cat(parts, 2) for parts in zip(*planes, strict=True))
    return SavedSummary(key, combined, over_channels, strongest, channels, channel_count, (size[0], size[1]), first)


def map_summaries(rows: Iterable[LayerRow], saved: Sequence[SavedSummary]) -> tuple[MapSummary, ...]:
    """Return summaries by row and input."""
    by_key = {(row.layer, row.call, row.slot): row for row in rows}
    result = []
    fetched = [_fetched([getattr(chunk, name) for chunk in saved]) for name in ("combined", "strongest", "channels")]
    for entry, combined, strongest, channels in zip(saved, *fetched, strict=True):
        row = by_key[entry.key]
        for place, channel in enumerate(channels.tolist()):
            result.append(
                MapSummary(
                    row.index,
                    row.label,
                    row.kind,
                    entry.first + place,
                    combined[place].numpy(),
                    strongest[place].numpy(),
                    channel,
                    entry.channel_count,
                    entry.size,
                    entry.over_channels,
                )
            )
    return tuple(sorted(result, key=lambda summary: (summary.row, summary.input_index)))


def _spatial(
    shape: tuple[int, ...], channel_axis: int, grids: Sequence[tuple[int, ...]], input_count: int
) -> tuple[int, ...] | None:
    """Return the size of an output's maps, (H, W), (T, H, W) of a clip, or (1, L) of a sequence.

    None for an output without maps, or without an axis that counts inputs.
    """
    if not 3 <= len(shape) <= 5 or 0 in shape:
        return None
    if shape[0] != input_count:
        if len(shape) != 3 or shape[1] != input_count:
            return None
        shape = (shape[1], shape[0], shape[2])  # (T, N, D)
    sizes = shape[1:channel_axis] + shape[channel_axis + 1 :]
    if len(shape) == 3 and not grids:
        return (1, *sizes) if sizes[0] > 1 else None
    if len(shape) == 3:
        spatial = token_grid(shape[1], grids) if channel_axis == 2 else None
    else:
        spatial = sizes if not grids or sizes in grids else None  # heads of attention, or windows
    return spatial if spatial is not None and min(spatial[-2:]) > 1 else None


def _maps(tensor: Tensor, channel_axis: int, spatial: tuple[int, ...], input_count: int) -> Tensor:
    """Return the maps of the inputs, (N, C, H, W); of a clip, its middle frame."""
    tensor = tensor.detach()
    if tensor.shape[0] != input_count:  # (T, N, D)
        tensor = tensor.transpose(0, 1)
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.abs() if tensor.is_complex() else tensor
    tensor = tensor if tensor.is_floating_point() and tensor.itemsize > 1 else tensor.float()
    maps = tensor if channel_axis == 1 else tensor.movedim(channel_axis, 1)
    if maps.dim() == 3:  # drops class and register tokens
        maps = maps[:, :, maps.shape[2] - math.prod(spatial) :].reshape(*maps.shape[:2], *spatial)
    return maps[:, :, maps.shape[2] // 2] if maps.dim() == 5 else maps


def _fetched(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy tensors of one dtype to the CPU, with one transfer."""
    if all(tensor.is_cpu for tensor in tensors):
        return tensors
    flat = torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
