"""Keep maps of A-B of the first input: where differences may begin, and the largest in each part of the depth."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hookscope.commands.diff.first_differences import exceeds, rounding_limit
from hookscope.commands.diff.hooked_network import PairedOutput
from hookscope.inspection.rows import Recorder, SavedActivation, arranged
from hookscope.results.activations import FeatureMaps
from hookscope.results.differences import DifferenceRow, FirstDifference, spread

MOST_MAPS = 12
"""Most rows whose difference is drawn."""

_PARTS = 2 * MOST_MAPS

# Bytes of all kept maps, and of the first channels that are kept of one row. 4 MiB are 64 channels of 128 x 128.
_MOST_BYTES = 16 * 2**20
_MOST_BYTES_OF_ONE = 4 * 2**20

# The first rows beyond rounding are kept however small their difference is: it begins in one of them.
_MOST_FIRST = 2
_MOST_ADDING = 4


class _Held(NamedTuple):
    label: str
    rank: float
    saved: SavedActivation


@dataclass(slots=True)
class KeptMaps:
    """Maps of A-B, of the first input of one batch.

    Attributes:
        eps: As for `rounding_limit`.
        rows: Number of rows; the largest of each of `_PARTS` parts is kept.
    """

    eps: float
    rows: int = 0
    _held: dict[str | int, _Held] = field(default_factory=dict)  # by label where a difference may begin, else by part
    _seen: int = 0
    _first: int = 0
    _adding: int = 0

    def offer(
        self, label: str, a: PairedOutput, b: Tensor, relative_l2: float, added: float | None, count: int
    ) -> None:
        """Keep the map of a row if it may be drawn; rows are offered once, in the order of running.

        Args:
            label: Of the row.
            a: The output of A; a nested output has no map.
            b: The output of B, of the same shape.
            relative_l2: Of A-B.
            added: Relative L2 that B's layer adds by itself; None if it is not known.
            count: Number of inputs in the batch.
        """
        if b.is_nested:
            return
        part = _PARTS * self._seen // max(self.rows, self._seen + 1)
        self._seen += 1
        is_first = self._first < _MOST_FIRST and exceeds(relative_l2, rounding_limit(self.eps, self._seen))
        adds = added is not None and self._adding < _MOST_ADDING and exceeds(added, rounding_limit(self.eps, 1))
        self._first += is_first
        self._adding += adds
        rank = math.inf if math.isnan(relative_l2) else relative_l2  # NaN on one side ranks first
        is_larger = rank > (self._held[part].rank if part in self._held else 0.0)
        saved = _saved(a, b, count) if is_first or adds or is_larger else None
        if saved is None:
            return
        self._held[label if is_first or adds else part] = _Held(label, rank, saved)
        parts = sorted((at for at in self._held if isinstance(at, int)), key=lambda at: -self._held[at].rank)
        while parts and sum(held.saved.values.nbytes for held in self._held.values()) > _MOST_BYTES:
            del self._held[parts.pop()]

    def drawn(
        self, rows: Iterable[DifferenceRow], first_differences: Sequence[FirstDifference]
    ) -> tuple[FeatureMaps, ...]:
        """Return the maps to draw, in the order of the rows."""
        begins, by_label = {first.row for first in first_differences}, {row.label: row for row in rows}
        pairs = [(by_label[held.label], held) for held in self._held.values() if held.label in by_label]
        pairs.sort(key=lambda pair: pair[0].index)
        chosen = spread(pairs, MOST_MAPS, lambda pair: pair[0].label in begins, lambda pair: pair[1].rank)
        return tuple(arranged(held.saved, row.index, row.label, row.kind) for row, held in chosen)


def _saved(a: PairedOutput, b: Tensor, count: int) -> SavedActivation | None:
    """Return A-B of the first input, limited to its first channels if it is large; None if one channel is too large."""
    difference = _difference(_of_first(a.value.read(), count), _of_first(b, count))
    keeping = Recorder(1, None, None, indices=(0,))
    keeping.axes.grids += a.grids
    if a.channel_axis is not None and difference.numel():
        channels = difference.shape[a.channel_axis]
        keeping.max_channels = max(1, _MOST_BYTES_OF_ONE * channels // difference.nbytes)
    saved = next(keeping.slices((*a.call, ""), difference, a.channel_axis), None)
    if saved is None or saved.values.nbytes > _MOST_BYTES_OF_ONE:
        return None
    is_part = saved.values.numel() < difference.numel()  # a copy, so that the rest is freed
    return replace(saved, values=saved.values.clone()) if is_part else saved


def _of_first(tensor: Tensor, count: int) -> Tensor:
    """Return the part of the first input, with its batch axis; all of a tensor without a batch axis."""
    if tensor.dim() and tensor.shape[0] == count:
        return tensor[:1]
    return tensor[:, :1] if tensor.dim() == 3 and tensor.shape[1] == count else tensor


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return A-B in float32; 0 where A and B are equal, also if both are NaN or infinite."""
    a, b = (tensor.detach().dequantize() if tensor.is_quantized else tensor.detach() for tensor in (a, b))
    if a.device != b.device or a.device.type == "mps":
        a, b = a.cpu(), b.cpu()
    if a.dtype == b.dtype == torch.float32:
        difference = a - b
        if difference.sum().isfinite():
            return difference.cpu()
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros((), dtype=wide, device=a.device), a - b)
    return (difference.abs() if difference.is_complex() else difference).float().cpu()
