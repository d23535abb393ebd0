"""Where the cells of a map lie on the picture, in closed form from the kernels, strides and padding before it.

Cell i along an axis sees a window of the input that is centred at `start + i * step`, in pixels counted from 0 (Araujo,
Norris and Sim, Computing Receptive Fields of Convolutional Neural Networks, Distill 2019, section 3). The middle of a
kernel is the centre of mass of its squared weights: with uneven padding, kernels learn to look to one side (Alsallakh
et al., Mind the Pad, ICLR 2021). Where branches with other centres meet, their mean counts, which is our choice. An
even stretch of the map over the picture may put the cell elsewhere: behind five even 3x3 kernels of stride 2 with
padding 1 it lies at pixel 32 i, a stretch puts it at 32 i + 15.5.

What lies before a tensor is read from autograd's graph, where functions stand like modules.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookscope.results.attributions import Extent

# Functions that leave each value where it is, and add none of other places.
_IN_PLACE = re.compile(
    r"(Relu\w*|Gelu|Silu|Elu|Celu|Mish|Hardtanh|Hardswish|Hardsigmoid|Softplus|Threshold|Prelu\w*|RreluWithNoise|"
    r"Sigmoid|LogSigmoid|Tanh|Clamp\w*|Maximum|Minimum|Add|Sub|Rsub|Mul|Div|Neg|Pow|Exp|Log|Sqrt|Rsqrt|Abs|Lerp|"
    r"Cat|Where|MaskedFill|\w*BatchNorm|NativeGroupNorm|NativeDropout|FusedDropout|NativeLayerNorm|Clone|ToCopy|"
    r"AsStrided|Alias|Identity|Unsqueeze|Squeeze|Expand|Detach)Backward\d*|CopySlices"
)
_PICTURE_AXES = 4  # (N, C, H, W)


class _Line(NamedTuple):
    """Places along one axis of the picture: cell i lies at pixel `start + i * step`."""

    start: float = 0.0
    step: float = 1.0

    def through(self, shift: float, stride: float) -> "_Line":
        """Return the places of cells that lie at `shift + i * stride` of these."""
        return _Line(self.start + shift * self.step, self.step * stride)


@dataclass(frozen=True, slots=True)
class ReceptiveField:
    """Where the cells of a tensor lie; `axes` are those of rows and columns, counted from the end."""

    lines: tuple[_Line, _Line] = (_Line(), _Line())
    axes: tuple[int, int] = (-2, -1)

    def extent(self, grid: Sequence[int], size: Sequence[int]) -> Extent:
        """Return the area that the cells of a grid (h, w) fill, each around its place, on an input of a size (H, W)."""
        edges = []
        for line, cells, length in zip(self.lines, grid, size, strict=True):
            begin = line.start + 0.5 - line.step / 2
            edges.append((begin / length, (begin + cells * line.step) / length))
        return edges[0][0], edges[1][0], edges[0][1], edges[1][1]


def receptive_field(node: Any) -> ReceptiveField | None:
    """Return where the output of a node of autograd's graph lies on the picture, the only input with four axes.

    None where it cannot be told: behind functions that move values, or that look at places which depend on them.
    """
    found: dict[Any, ReceptiveField | None] = {}
    waiting = [node]
    while waiting:  # no recursion: graphs are deep
        current = waiting[-1]
        before = [each for each, _ in current.next_functions if each is not None]
        missing = [each for each in before if each not in found]
        if missing:
            waiting += missing
        else:
            waiting.pop()
            if current not in found:
                found[current] = _of(current, [(each, found[each]) for each in before])
    return found[node]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node._input_metadata[0].shape) if node._input_metadata else ()


def _of(node: Any, before: Sequence[tuple[Any, ReceptiveField | None]]) -> ReceptiveField | None:
    if not before:
        variable = getattr(node, "variable", None)
        return ReceptiveField() if variable is not None and variable.dim() == _PICTURE_AXES else None
    known = [(_shape(each), field) for each, field in before if field is not None]
    known = [(shape, field) for shape, field in known if _has_places(shape, field)]
    name = node.name().rpartition("::")[2]
    moving = _MOVING.get(re.sub(r"(Backward\d*|WithIndices)", "", name))
    if known and moving is not None:
        try:
            return moving(node, *known[0])
        # Of another version of torch, not in two axes, or a graph that the network itself has differentiated.
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None
    return _mean(_shape(node), known) if known and _IN_PLACE.fullmatch(name) else None


def _mean(shape: Sequence[int], known: Sequence[tuple[Sequence[int], ReceptiveField]]) -> ReceptiveField | None:
    """Return the mean of branches, None where they are of different sizes or steps."""
    first = known[0][1]
    sizes = {tuple(each[axis] for axis in first.axes) for each in (shape, *(other for other, _ in known))}
    forms = {(field.axes, *(line.step for line in field.lines)) for _, field in known}
    if len(sizes) > 1 or len(forms) > 1:
        return None
    rows, columns = (
        ways[0]._replace(start=sum(each.start for each in ways) / len(ways))
        for ways in zip(*(field.lines for _, field in known), strict=True)
    )
    return replace(first, lines=(rows, columns))


def _has_places(shape: Sequence[int], field: ReceptiveField) -> bool:
    """Tell whether a tensor has more than one place: a factor for each channel, of a gate, has one."""
    return len(shape) >= _PICTURE_AXES and shape[field.axes[0]] * shape[field.axes[1]] > 1


def _moved(field: ReceptiveField, shifts: Iterable[float], strides: Iterable[float]) -> ReceptiveField:
    """Return the field of cells that lie at `shift + i * stride` of these, on the last two axes."""
    if field.axes != (-2, -1):
        raise ValueError("not on the last axes")
    rows, columns = (
        line.through(shift, stride) for line, shift, stride in zip(field.lines, shifts, strides, strict=True)
    )
    return replace(field, lines=(rows, columns))


def _middles(sizes: Sequence[int], pads: Sequence[int], dilations: Sequence[int] = (1, 1)) -> list[float]:
    """Return the middle of a window's first position, in places of what it slides over."""
    return [(size - 1) * step / 2 - pad for size, pad, step in zip(sizes, pads, dilations, strict=True)]


def _convolution(node: Any, _before: Sequence[int], field: ReceptiveField) -> ReceptiveField:
    strides, pads = node._saved_stride, node._saved_padding
    middles = [
        middle * step - pad
        for middle, pad, step in zip(_kernel_middles(node._saved_weight), pads, node._saved_dilation, strict=True)
    ]
    if not node._saved_transposed:
        return _moved(field, middles, strides)
    # Place o is written by (o + padding - k * dilation) / stride, of which this is the mean over k.
    shifts = [-middle / stride for middle, stride in zip(middles, strides, strict=True)]
    return _moved(field, shifts, [1 / stride for stride in strides])


def _kernel_middles(weight: Tensor) -> list[float]:
    """Return where the squared weights of kernels (O, I, h, w) have their centre of mass: where they look."""
    energy = weight.detach().float().square().sum((0, 1))
    total = float(energy.sum())
    if not math.isfinite(total) or not total:
        return [(size - 1) / 2 for size in energy.shape]
    rows, columns = (energy.sum(axis) @ torch.arange(energy.shape[1 - axis]).to(energy) for axis in (1, 0))
    return [float(rows) / total, float(columns) / total]


def _pool(node: Any, _before: Sequence[int], field: ReceptiveField) -> ReceptiveField:
    sizes = node._saved_kernel_size
    middles = _middles(sizes, node._saved_padding, getattr(node, "_saved_dilation", (1, 1)))
    return _moved(field, middles, node._saved_stride or sizes)


def _adaptive_pool(node: Any, before: Sequence[int], field: ReceptiveField) -> ReceptiveField:
    after = _shape(node)[-2:]
    if any(size % cells for size, cells in zip(before[-2:], after, strict=True)):
        raise ValueError("windows of several sizes")
    sizes = [size // cells for size, cells in zip(before[-2:], after, strict=True)]
    return _moved(field, _middles(sizes, (0, 0)), sizes)


def _pad(node: Any, _before: Sequence[int], field: ReceptiveField) -> ReceptiveField:
    pads = node._saved_pad if hasattr(node, "_saved_pad") else node._saved_padding  # the last axis comes first
    lines = []
    for line, axis in zip(field.lines, field.axes, strict=True):
        at = 2 * (-axis - 1)
        lines.append(line.through(-pads[at] if at < len(pads) else 0, 1))
    return replace(field, lines=(lines[0], lines[1]))


def _slice(node: Any, before: Sequence[int], field: ReceptiveField) -> ReceptiveField:
    axis = node._saved_dim % len(before) - len(before)
    if axis not in field.axes:
        return field
    start = node._saved_start
    if start >= 2**63:  # counted from the end
        start += before[axis] - 2**64
    lines = [
        line.through(start, node._saved_step) if each == axis else line
        for line, each in zip(field.lines, field.axes, strict=True)
    ]
    return replace(field, lines=(lines[0], lines[1]))


def _split(node: Any, before: Sequence[int], field: ReceptiveField) -> ReceptiveField:
    if node._saved_dim % len(before) - len(before) in field.axes:
        raise ValueError("a graph's node does not say which part")
    return field


def _upsampled(node: Any, before: Sequence[int], field: ReceptiveField) -> ReceptiveField:
    pairs = [*zip(before[-2:], _shape(node)[-2:], strict=True)]
    if getattr(node, "_saved_align_corners", False):
        return _moved(field, (0, 0), [(old - 1) / (new - 1) for old, new in pairs])
    return _moved(field, [old / new / 2 - 0.5 for old, new in pairs], [old / new for old, new in pairs])


def _permuted(node: Any, before: Sequence[int], field: ReceptiveField) -> ReceptiveField:
    count = len(before)
    order = [*range(count)]
    if hasattr(node, "_saved_dims"):
        order = [axis % count for axis in node._saved_dims]
    else:
        one, other = node._saved_dim0 % count, node._saved_dim1 % count
        order[one], order[other] = other, one
    rows, columns = (order.index(axis % count) - count for axis in field.axes)
    return replace(field, axes=(rows, columns))


def _viewed(node: Any, before: Sequence[int], field: ReceptiveField) -> ReceptiveField:
    """Allow views that take only axes before the rows apart or together."""
    if field.axes[1] != field.axes[0] + 1 or before[field.axes[0] :] != _shape(node)[field.axes[0] :]:
        raise ValueError("places are mixed")
    return field


_MOVING: Mapping[str, Callable[[Any, Sequence[int], ReceptiveField], ReceptiveField]] = {
    "Convolution": _convolution,
    **dict.fromkeys(("MaxPool2D", "AvgPool2D"), _pool),
    "AdaptiveAvgPool2D": _adaptive_pool,
    **dict.fromkeys(("ConstantPadNd", "ReflectionPad2D", "ReplicationPad2D"), _pad),
    "Slice": _slice,
    "Split": _split,
    **dict.fromkeys(("UpsampleNearest2D", "UpsampleBilinear2D", "UpsampleBicubic2D"), _upsampled),
    **dict.fromkeys(("Permute", "Transpose"), _permuted),
    **dict.fromkeys(("View", "UnsafeView", "ReshapeAlias"), _viewed),
}
