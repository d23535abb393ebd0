"""Norms of tokens (N, T, D), taken in the hook; outliers are found after each pass, for all layers at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from heapq import nlargest
from itertools import compress
from statistics import median

import torch
from torch import Tensor, nn

from hookscope.hooks.observed import RowKey
from hookscope.results.activations import LayerRow
from hookscope.results.inputs import InputRecord
from hookscope.results.token_norms import (
    DEVIATIONS,
    LEAST_RATIO,
    MASSIVE_RATIO,
    MASSIVE_VALUE,
    HighToken,
    MassiveActivation,
    TokenMap,
    TokenNorms,
)
from hookscope.statistics.layouts import Layout, prefix_names
from hookscope.statistics.reducer import Measured
from hookscope.statistics.reduction import Reduction
from hookscope.statistics.storage import without_float8

# With fewer tokens, comparing one with the median means little.
_FEWEST_TOKENS = 8
# Of normal deviates the standard deviation is this many times the median absolute deviation.
_NORMAL = 1.4826
# High tokens and massive activations that are kept of each row.
_KEPT = 16
# Inputs and rows that maps are drawn of.
_DRAWN_INPUTS, _DRAWN_ROWS = 3, 8
_PICTURE_AXES = 2


@dataclass(slots=True)
class _Row:
    token_count: int
    layout: Layout | None
    medians: list[float] = field(default_factory=list)
    largest: float = 0.0
    high_count: int = 0
    high: list[HighToken] = field(default_factory=list)
    massive_count: int = 0
    massive: list[MassiveActivation] = field(default_factory=list)
    drawn: dict[int, tuple[Tensor, float]] = field(default_factory=dict)  # by input: norms (T,) and the limit


@dataclass(frozen=True, slots=True)
class _Seen:
    """The norms of one output, (N, T), taken once for all rows of the same tensor.

    `largest` has each token's value of largest magnitude, (N, T), that value's channel, (N, T), and each input's median
    magnitude, (N,). It is None where no value can be massive.
    """

    keys: list[RowKey]
    norms: Tensor
    layout: Layout | None
    indices: tuple[int, ...]
    largest: tuple[Tensor, Tensor, Tensor] | None


@dataclass(slots=True)
class TokenRecorder:
    """Measures the tokens of outputs (N, T, D) whose last axis counts channels, and merges them over batches."""

    network: nn.Module
    rows: dict[RowKey, _Row] = field(default_factory=dict)
    _indices: tuple[int, ...] = ()
    _seen: list[_Seen] = field(default_factory=list)
    _latest: Measured | None = None
    _widths: dict[int, int] = field(default_factory=dict)

    def start(self, indices: tuple[int, ...]) -> None:
        """Begin a forward pass over the inputs at `indices`."""
        self._commit()
        self._indices = indices

    def see(self, key: RowKey, tensor: Tensor, layout: Layout | None, measured: Measured) -> None:
        """Measure an output whose axis 2 counts channels, if it is one of tokens.

        An output that is wider than the first one with as many tokens is no hidden state (queries, keys and values
        together, the hidden layer of an MLP) and is left out: they would cost twice as much as all others.

        Args:
            key: Of the row.
            tensor: The output, the batch on axis 0, not without memory.
            layout: Where its tokens lie; None if that is not known.
            measured: Its reduction, the same object where a container returns what its last child did.
        """
        if not _is_of_tokens(tensor, len(self._indices)):
            return
        if self._latest is measured:
            self._seen[-1].keys.append(key)
            return
        token_count, width = tensor.shape[1:]
        if width > self._widths.setdefault(token_count, width):
            return
        values = without_float8(tensor.detach())
        norms = torch.linalg.vector_norm(values, dim=2, dtype=torch.promote_types(values.dtype, torch.float32))
        largest = _largest(values) if _may_be_massive(measured) else None
        self._seen.append(_Seen([key], norms, layout, self._indices, largest))
        self._latest = measured

    def forget(self) -> None:
        """Drop the latest forward pass."""
        self._seen.clear()
        self._latest = None

    def results(self) -> Mapping[RowKey, TokenNorms]:
        """Return the results by row."""
        self._commit()
        return {
            key: TokenNorms(
                row.token_count,
                None if row.layout is None else row.layout.prefix,
                None if row.layout is None else row.layout.grid,
                median(row.medians),
                row.largest,
                row.high_count,
                tuple(row.high),
                row.massive_count,
                tuple(row.massive),
            )
            for key, row in self.rows.items()
            if row.medians
        }

    def maps(self, rows: Sequence[LayerRow], inputs: Sequence[InputRecord]) -> tuple[TokenMap, ...]:
        """Return the norms on their grids, of the first inputs, in rows with high tokens, or in the last block.

        Args:
            rows: Those that may be drawn, in execution order.
            inputs: A map is drawn where the grid divides its input evenly.
        """
        names_of = cache(partial(prefix_names, self.network))
        return tuple(
            TokenMap(
                row.index,
                row.label,
                index,
                names_of(row.tokens.prefix or 0),
                grid,
                tuple(float(f"{norm:.5g}") for norm in norms.tolist()),
                limit,
            )
            for row in _drawn_rows(rows)
            for index, (norms, limit) in self.rows[row.layer, row.call, row.slot].drawn.items()
            if row.tokens is not None and (grid := _picture_grid(row.tokens)) is not None
            if len(shape := inputs[index].shape) > _PICTURE_AXES and not (shape[-2] % grid[0] or shape[-1] % grid[1])
        )

    def _commit(self) -> None:
        """Find the high tokens of the latest pass, and add them to those of earlier passes."""
        by_shape: dict[tuple[torch.Size, torch.dtype, torch.device], list[_Seen]] = {}
        for output in self._seen:
            kind = output.norms.shape, output.norms.dtype, output.norms.device
            by_shape.setdefault(kind, []).append(output)
        for several in by_shape.values():
            self._add(several)
        self._seen.clear()
        self._latest = None

    def _add(self, several: Sequence[_Seen]) -> None:
        norms = torch.stack([output.norms for output in several]).cpu()  # (R, N, T)
        massive = _massive(several)
        usable = norms.isfinite().all(-1)
        ordered = norms.sort(-1).values
        medians = _median_of_sorted(ordered)
        deviations = _median_of_sorted((norms - medians[..., None]).abs().sort(-1).values)
        limits = torch.maximum(LEAST_RATIO * medians, medians + DEVIATIONS * _NORMAL * deviations)
        is_high = (norms > limits[..., None]) & usable[..., None]
        high: dict[int, list[HighToken]] = {}
        for at, place, token in is_high.nonzero().tolist():
            norm, limit = float(norms[at, place, token]), float(limits[at, place])
            high.setdefault(at, []).append(HighToken(several[at].indices[place], token, norm, limit))
        shown = norms[:, [place for place, index in enumerate(self._indices) if index < _DRAWN_INPUTS]]
        numbers = zip(several, usable.tolist(), medians.tolist(), ordered[..., -1].tolist(), strict=True)
        for at, (output, is_usable, its_medians, its_largest) in enumerate(numbers):
            its_massive = massive.get(at, [])
            for key in output.keys:
                row = self.rows.setdefault(key, _Row(norms.shape[-1], output.layout))
                grids = {kept.grid for kept in (row.layout, output.layout) if kept is not None}
                if row.token_count != norms.shape[-1] or len(grids) > 1:  # inputs of other sizes share no grid
                    row.layout = None
                    row.drawn.clear()
                row.medians += compress(its_medians, is_usable)
                row.largest = max(row.largest, *compress(its_largest, is_usable), 0.0)
                row.high_count += len(high.get(at, ()))
                row.high = nlargest(_KEPT, [*row.high, *high.get(at, ())], key=lambda token: token.norm)
                row.massive_count += len(its_massive)
                if row.layout is not None:
                    firsts = zip(output.indices, shown[at], limits[at].tolist(), is_usable, strict=False)
                    row.drawn |= {index: (its_norms, limit) for index, its_norms, limit, use in firsts if use}
                row.massive = nlargest(_KEPT, [*row.massive, *its_massive], key=lambda peak: abs(peak.value))


def _is_of_tokens(tensor: Tensor, count: int) -> bool:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.dim() != 3:
        return False
    inputs, tokens, channels = tensor.shape
    if inputs != count or tokens < _FEWEST_TOKENS or channels < 2 or tokens == channels:  # attention weights
        return False
    return tensor.is_floating_point()


def _may_be_massive(measured: Measured) -> bool:
    """Tell whether a value may be massive; the largest is not known yet on an accelerator."""
    if isinstance(measured, Reduction) and measured.finite_count:
        return max(-measured.min, measured.max) > MASSIVE_VALUE
    return True


def _median_of_sorted(ordered: Tensor) -> Tensor:
    """Return the median of sorted values along the last axis, as NumPy defines it."""
    count = ordered.shape[-1]
    return (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2


def _largest(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of `_Seen.largest`, without waiting for an accelerator."""
    magnitudes = values.abs()
    channels = magnitudes.argmax(2)
    largest = values.gather(2, channels[..., None])[..., 0]
    return largest, channels, _median(magnitudes.reshape(len(values), -1))


def _median(values: Tensor) -> Tensor:
    """Return medians of rows as NumPy defines them; sorting would take eight times as long."""
    lower = values.median(-1, keepdim=True).values
    above = values.masked_fill(values <= lower, torch.inf).amin(-1)
    lower = lower[:, 0]
    has_two = values.shape[1] % 2 == 0
    is_repeated = (values <= lower[:, None]).sum(-1) > values.shape[1] // 2
    return (lower + torch.where(is_repeated, lower, above)) / 2 if has_two else lower


def _massive(several: Sequence[_Seen]) -> dict[int, list[MassiveActivation]]:
    """Return the largest massive activation of each token that has one, by position in `several`."""
    places = [at for at, output in enumerate(several) if output.largest is not None]
    if not places:
        return {}
    parts = zip(*[output.largest for output in several if output.largest is not None], strict=True)
    largest, channels, medians = (torch.stack(part).cpu() for part in parts)  # (P, N, T), (P, N, T), (P, N)
    magnitudes = largest.abs()
    is_massive = (magnitudes > MASSIVE_VALUE) & (magnitudes >= MASSIVE_RATIO * medians[..., None].to(magnitudes.dtype))
    peaks: dict[int, list[MassiveActivation]] = {}
    for row, at, token in (is_massive & magnitudes.isfinite()).nonzero().tolist():
        value, channel = float(largest[row, at, token]), int(channels[row, at, token])
        place = places[row]
        index, median = several[place].indices[at], float(medians[row, at])
        peaks.setdefault(place, []).append(MassiveActivation(index, token, channel, value, median))
    return peaks


def _drawn_rows(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Return the rows to draw, each tensor once: some with high tokens, evenly over depth, or the last block.

    A norm makes all tokens about equally long, so rows with its values are drawn only without high tokens or others.
    """
    placed = [row for row in rows if not row.duplicate_of and row.tokens is not None and _picture_grid(row.tokens)]
    high = [row for row in placed if row.tokens is not None and row.tokens.high_count]
    if high:
        most = min(len(high), _DRAWN_ROWS)
        return [high[at * (len(high) - 1) // max(most - 1, 1)] for at in range(most)]
    parents = {row.layer.rpartition(".")[0] for row in rows}
    norms = {row.activation.l2 for row in placed if "norm" in row.kind.lower()}
    unlike = [row for row in placed if row.activation.l2 not in norms]
    return ([row for row in unlike if row.layer in parents] or unlike or placed)[-1:]


def _picture_grid(tokens: TokenNorms) -> tuple[int, int] | None:
    grid = tokens.grid
    return (grid[0], grid[1]) if grid is not None and len(grid) == _PICTURE_AXES else None
