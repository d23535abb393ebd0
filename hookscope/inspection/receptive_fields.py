"""Where the cells of a map lie on the picture and how much of it they see, in closed form from the layers before.

Cell i along an axis sees a window of the input that is centred at `start + i * step`, in pixels counted from 0 (Araujo,
Norris and Sim, Computing Receptive Fields of Convolutional Neural Networks, Distill 2019, section 3). Where branches
meet, the window is the smallest around all windows of the branches (section 4). The same holds for the one axis of a
sequence and the three axes of a clip.

For attribution the middle of a kernel is the centre of mass of its squared weights: with uneven padding, kernels learn
to look to one side (Alsallakh et al., Mind the Pad, ICLR 2021), and where branches with other centres meet, their mean
counts. An even stretch of the map over the picture may put the cell elsewhere: behind five even 3x3 kernels of stride 2
with padding 1 it lies at pixel 32 i, a stretch puts it at 32 i + 15.5.

The layers before a tensor are read from autograd's graph, where each is a function.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookscope.results.concentration import Extent

# Functions that leave each value in its place, and mix in no values of other places.
_IN_PLACE = re.compile(
    r"(Relu\w*|Gelu|Silu|Elu|Celu|Mish|Hardtanh|Hardswish|Hardsigmoid|Softplus|Threshold|Prelu\w*|RreluWithNoise|"
    r"LeakyRelu|Sigmoid|LogSigmoid|Tanh|Clamp\w*|Maximum|Minimum|Add|Sub|Rsub|Mul|Div|Neg|Pow|Exp|Log|Sqrt|Rsqrt|Abs|"
    r"Lerp|Cat|Where|MaskedFill|\w*BatchNorm|NativeGroupNorm|NativeDropout|FusedDropout|NativeLayerNorm|Clone|ToCopy|"
    r"Alias|Identity|Expand|Detach)Backward\d*|CopySlices"
)
_BATCH_AND_CHANNELS = 2  # axes of a picture besides its own


class _Line(NamedTuple):
    """Places along one axis of the picture: cell i lies at pixel `start + i * step`.

    The window of cell 0 goes from pixel `low` to pixel `high`, both included.
    """

    start: float = 0.0
    step: float = 1.0
    low: float = 0.0
    high: float = 0.0

    def through(self, window: "_Window") -> "_Line":
        """Return the places of cells that each see a window of these cells."""
        return _Line(
            self.start + window.looks_at * self.step,
            self.step * window.stride,
            self.low + window.first * self.step,
            self.high + window.last * self.step,
        )


class _Window(NamedTuple):
    """The window of a function's first output along one axis, in cells of its input; they may lie between cells.

    `looks_at` is its middle, or where the weights of a kernel put it.
    """

    first: float
    last: float
    stride: float
    looks_at: float


def _window(first: float, last: float, stride: float) -> _Window:
    return _Window(first, last, stride, (first + last) / 2)


@dataclass(frozen=True, slots=True)
class ReceptiveField:
    """Where the cells of a tensor lie; `axes` are those of the picture's, counted from the end.

    Attributes:
        by_weights: Whether the middle of a kernel depends on its weights.
        at_least: Whether values of other places enter the cells as well: through the factors of a gate, attention, or
            a normalisation over the map. Windows are then lower bounds.
        flattened: The axes of a tensor (..., D) that a linear layer has flattened into one; () otherwise.
    """

    lines: tuple[_Line, ...] = (_Line(), _Line())
    axes: tuple[int, ...] = (-2, -1)
    by_weights: bool = True
    at_least: bool = False
    flattened: tuple[int, ...] = ()

    def extent(self, grid: Sequence[int], size: Sequence[int]) -> Extent:
        """Return the area that the cells of a grid (h, w) fill, each around its place, on an input of a size (H, W)."""
        edges = []
        for line, cells, length in zip(self.lines, grid, size, strict=True):
            begin = line.start + 0.5 - line.step / 2
            edges.append((begin / length, (begin + cells * line.step) / length))
        return (*(begin for begin, _ in edges), *(end for _, end in edges))


class _NodeField(NamedTuple):
    """Where the output of a graph's node lies, None if unknown, and whether the picture enters it at all."""

    field: ReceptiveField | None
    is_of_picture: bool


@dataclass(slots=True)
class ReceptiveFields:
    """The receptive fields of the tensors of one graph.

    Attributes:
        axis_count: Axes of the picture besides batch and channels; it is the only input with that many.
        channel_axis: Of the picture: 1, or the last one, as recurrent layers take it; None if there is none.
        by_weights: As of `ReceptiveField`; without it no weight is read.
    """

    axis_count: int = 2
    by_weights: bool = True
    channel_axis: int | None = 1
    _fields: dict[Any, _NodeField] = field(default_factory=dict)

    def of(self, node: Any) -> ReceptiveField | None:
        """Return where the output of a node lies on the picture.

        None if unknown: behind functions that move values, or whose places depend on values.
        """
        waiting = [node]
        while waiting:  # not recursive, because graphs are deep
            current = waiting[-1]
            before = [parent for parent, _ in current.next_functions if parent is not None]
            missing = [parent for parent in before if parent not in self._fields]
            if missing:
                waiting += missing
            else:
                waiting.pop()
                if current not in self._fields:
                    self._fields[current] = self._field_of(current, before)
        return self._fields[node].field

    def _field_of(self, node: Any, before: Sequence[Any]) -> _NodeField:
        if before:
            seen = [(parent, *self._fields[parent]) for parent in before]
            inputs = [(parent, of_map) for parent, of_map, is_of_picture in seen if is_of_picture]
            return _NodeField(_field_behind(node, inputs), is_of_picture=bool(inputs))
        variable, axis_count = getattr(node, "variable", None), self.axis_count
        axes_of_picture = axis_count + _BATCH_AND_CHANNELS - (self.channel_axis is None)
        if variable is None or isinstance(variable, nn.Parameter) or variable.dim() != axes_of_picture:
            return _NodeField(None, is_of_picture=False)
        after = int(self.channel_axis not in (1, None))  # whether channels are behind the axes of places
        axes = tuple(range(-axis_count - after, -after))
        return _NodeField(ReceptiveField((_Line(),) * axis_count, axes, self.by_weights), is_of_picture=True)


def _signed(number: int) -> int:
    """Return the signed form of a number that a node has saved: -1 is saved as 2^64 - 1."""
    return number - 2**64 if number >= 2**63 else number


def _from_end(axis: int, count: int) -> int:
    """Return an axis that a node has saved, of `count` axes, counted from the end: -1 is the last."""
    return _signed(axis) % count - count


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node._input_metadata[0].shape) if node._input_metadata else ()


def _field_behind(node: Any, inputs: Sequence[tuple[Any, ReceptiveField | None]]) -> ReceptiveField | None:
    """Return the receptive field of a node, given the fields of those inputs that see the picture."""
    if not inputs:
        return None
    name = node.name().rpartition("::")[2]
    kind = re.sub(r"(Backward\d*|WithIndices)", "", name)
    moving = _MOVING.get(kind)
    if moving is not None:
        first, of_map = inputs[0]
        if of_map is None or first is not node.next_functions[_INPUTS.get(kind, 0)][0]:
            return None
        try:
            return replace(moving(node, _shape(first), of_map), at_least=of_map.at_least or len(inputs) > 1)
        # A node of another version of torch, not in these axes, or of a graph that the network has differentiated.
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None
    return _joined(node, inputs) if _IN_PLACE.fullmatch(name) else None


def _joined(node: Any, inputs: Sequence[tuple[Any, ReceptiveField | None]]) -> ReceptiveField | None:
    """Return the field of branches that meet; None if their sizes or steps differ.

    Branches with a single place, such as a gate's factors, count only if there are no others; unknown ones never.
    """
    branches = [(_shape(parent), of_branch) for parent, of_branch in inputs if of_branch is not None]
    with_places = [(shape, of_branch) for shape, of_branch in branches if _has_places(shape, of_branch)]
    branches = with_places or branches
    if not branches:
        return None
    first, shape = branches[0][1], _shape(node)
    if any(of_map.flattened for _, of_map in branches):
        same = len(inputs) == 1 and branches[0][0] == shape
        return first if same and not _normalises(node, first) else None
    sizes = {tuple(dims[axis] for axis in first.axes) for dims in (shape, *(other for other, _ in branches))}
    forms = {(of_map.axes, *(line.step for line in of_map.lines)) for _, of_map in branches}
    if len(sizes) > 1 or len(forms) > 1:
        return None
    lines = []
    for ways in zip(*(of_map.lines for _, of_map in branches), strict=True):
        starts, steps, lows, highs = zip(*ways, strict=True)
        lines.append(_Line(sum(starts) / len(ways), steps[0], min(lows), max(highs)))
    at_least = len(branches) < len(inputs) or any(of_map.at_least for _, of_map in branches) or _normalises(node, first)
    return replace(first, lines=tuple(lines), at_least=at_least)


def _normalises(node: Any, of_map: ReceptiveField) -> bool:
    """Tell whether a function divides by a statistic over places of the map."""
    name = node.name()
    if "LayerNorm" in name:
        return -min(of_map.axes) <= len(node._saved_normalized_shape)
    return "GroupNorm" in name or ("BatchNorm" in name and bool(getattr(node, "_saved_training", False)))


def _has_places(shape: Sequence[int], of_map: ReceptiveField) -> bool:
    """Tell whether a tensor has more than one place: a factor for each channel, of a gate, has one."""
    if of_map.flattened:
        return math.prod(of_map.flattened) > 1
    return len(shape) >= -min(of_map.axes) and math.prod(shape[axis] for axis in of_map.axes) > 1


def _moved(of_map: ReceptiveField, windows: Sequence[_Window] | Mapping[int, _Window]) -> ReceptiveField:
    """Return the field of cells that see these windows, listed for the last axes, or by axis; else LookupError."""
    lines = zip(of_map.lines, of_map.axes, strict=True)
    return replace(of_map, lines=tuple(line.through(windows[axis]) for line, axis in lines))


def _sliding(
    sizes: Sequence[int], pads: Sequence[int], dilations: Sequence[int], strides: Sequence[int]
) -> list[_Window]:
    axes = zip(sizes, pads, dilations, strides, strict=True)
    return [_window(-pad, (size - 1) * dilation - pad, stride) for size, pad, dilation, stride in axes]


def _convolution(node: Any, _before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    weight = node._saved_weight
    strides, pads, dilations = node._saved_stride, node._saved_padding, node._saved_dilation
    windows = _sliding(weight.shape[2:], pads, dilations, strides)
    if of_map.by_weights:
        middles = zip(_kernel_middles(weight), dilations, pads, windows, strict=True)
        windows = [window._replace(looks_at=middle * dilation - pad) for middle, dilation, pad, window in middles]
    if node._saved_transposed:
        each_axis = zip(windows, weight.shape[2:], dilations, strict=True)
        windows = [_transposed(window, size, dilation) for window, size, dilation in each_axis]
    return _moved(of_map, windows)


def _transposed(window: _Window, size: int, dilation: int) -> _Window:
    """Return the window of a transposed convolution, from that of the convolution with the same kernel.

    Place o is written by (o + padding - k * dilation) / stride for those k in the kernel where that is a whole number.
    Its widest window goes over `jumps` steps of the kernel, the most that end on a whole number.
    """
    stride = int(window.stride)
    jump = stride // math.gcd(stride, dilation)
    jumps = (size - 1) // jump * jump
    middle, reach = -(window.first + window.last) / 2 / stride, jumps * dilation / stride
    return _Window(middle - reach / 2, middle + reach / 2, 1 / stride, -window.looks_at / stride)


def _kernel_middles(weight: Tensor) -> list[float]:
    """Return, for each axis, the centre of mass of the kernels' squared weights."""
    energy = weight.detach().float().square().sum((0, 1))
    total = float(energy.sum())
    if not math.isfinite(total) or not total:
        return [(size - 1) / 2 for size in energy.shape]
    middles = []
    for axis, size in enumerate(energy.shape):
        others = [dim for dim in range(energy.dim()) if dim != axis]
        along = energy.sum(others) if others else energy
        middles.append(float(along @ torch.arange(size, device=energy.device).to(energy)) / total)
    return middles


def _pool(node: Any, _before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    sizes = node._saved_kernel_size
    dilations = getattr(node, "_saved_dilation", (1,) * len(sizes))
    return _moved(of_map, _sliding(sizes, node._saved_padding, dilations, node._saved_stride or sizes))


def _adaptive_pool(node: Any, before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    pairs = [*zip(before[_BATCH_AND_CHANNELS:], _shape(node)[_BATCH_AND_CHANNELS:], strict=True)]
    if any(size % cells for size, cells in pairs):
        raise ValueError("windows of several sizes")
    return _moved(of_map, [_window(0, size // cells - 1, size // cells) for size, cells in pairs])


def _pad(node: Any, _before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    pads = node._saved_pad if hasattr(node, "_saved_pad") else node._saved_padding  # the last axis comes first
    starts = {axis: -_signed(pads[-2 * axis - 2]) if -2 * axis - 2 < len(pads) else 0 for axis in of_map.axes}
    return _moved(of_map, {axis: _window(start, start, 1) for axis, start in starts.items()})


def _slice(node: Any, before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    axis, start = _from_end(node._saved_dim, len(before)), _signed(node._saved_start)
    if start < 0:  # counted from the end, at most to the first place
        start = max(start + before[axis], 0)
    windows = dict.fromkeys(of_map.axes, _window(0, 0, 1))
    return _moved(of_map, {**windows, axis: _window(start, start, node._saved_step)})


def _strided(node: Any, before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    """Allow views that autograd makes anew, after a write to one, if they keep the axes of the map in order."""
    strides = [node._saved_stride[axis] for axis in of_map.axes]
    if any(_shape(node)[axis] != before[axis] for axis in of_map.axes) or strides != sorted(strides, reverse=True):
        raise ValueError("places are mixed")
    return of_map


def _split(node: Any, before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    if _from_end(node._saved_dim, len(before)) in of_map.axes:
        raise ValueError("a graph's node does not say which part")
    return of_map


# How many places of its input a resized place depends on, by the kind of interpolation.
_NEIGHBOURS = {"Nearest": 1, "Linear": 2, "Bilinear": 2, "Trilinear": 2, "Bicubic": 4}


def _upsampled(node: Any, before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    count = next(count for name, count in _NEIGHBOURS.items() if f"Upsample{name}" in node.name())
    aligned = getattr(node, "_saved_align_corners", False)
    windows = []
    sizes = zip(before[_BATCH_AND_CHANNELS:], _shape(node)[_BATCH_AND_CHANNELS:], strict=True)
    names = ("scales",) if len(of_map.axes) == 1 else ("scales_d", "scales_h", "scales_w")[-len(of_map.axes) :]
    for (old, new), name in zip(sizes, names, strict=True):
        scale = getattr(node, f"_saved_{name}")  # None if a size was given instead
        step = (old - 1) / (new - 1) if aligned and new > 1 else 1 / scale if scale else old / new
        first = 0.0 if aligned else step / 2 - 0.5
        whole = step.is_integer() and first.is_integer()  # then a place lies on another, and has no neighbours
        reach = 0 if whole else (count - 1) / 2
        windows.append(_window(first - reach, first + reach, step))
    return _moved(of_map, windows)


def _shuffled(node: Any, _before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    if hasattr(node, "_saved_downscale_factor"):
        factor = node._saved_downscale_factor
        return _moved(of_map, [_window(0, factor - 1, factor)] * 2)
    stride = 1 / node._saved_upscale_factor
    middle = (stride - 1) / 2
    return _moved(of_map, [_window(middle, middle, stride)] * 2)


def _permuted(node: Any, before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    count = len(before)
    order = [*range(-count, 0)]  # the old axis that each new one was
    if hasattr(node, "_saved_dims"):
        order = [_from_end(axis, count) for axis in node._saved_dims]
    else:
        first, other = _from_end(node._saved_dim0, count), _from_end(node._saved_dim1, count)
        order[first], order[other] = other, first
    return replace(of_map, axes=tuple(order.index(axis) - count for axis in of_map.axes))


def _viewed(node: Any, before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    """Allow views that split or join only axes before the map's, and views around a linear layer."""
    after, begin = _shape(node), min(of_map.axes)
    if of_map.flattened:
        if after[:-1] == of_map.flattened:
            return replace(of_map, flattened=())
        if after[:-1] == before[:-1]:
            return of_map
    elif [*of_map.axes] == [*range(begin, begin + len(of_map.axes))] and before[begin:] == after[begin:]:
        return of_map
    elif max(of_map.axes) < -1 and after == (math.prod(before[:-1]), before[-1]):
        return replace(of_map, flattened=tuple(before[:-1]))
    raise ValueError("places are mixed")


def _linear(_node: Any, _before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    if not of_map.flattened and max(of_map.axes) == -1:
        raise ValueError("places are mixed")
    return of_map


def _unsqueezed(node: Any, _before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    new = _from_end(node._saved_dim, len(_shape(node)))
    return replace(of_map, axes=tuple(axis - (axis <= new) for axis in of_map.axes))


def _squeezed(node: Any, before: Sequence[int], of_map: ReceptiveField) -> ReceptiveField:
    count = len(before)
    saved = getattr(node, "_saved_dim", range(count))
    listed = saved if isinstance(saved, Sequence) else [saved]
    gone = {axis for axis in (_from_end(dim, count) for dim in listed) if before[axis] == 1}
    if gone & {*of_map.axes}:
        raise ValueError("an axis of the map is gone")
    return replace(of_map, axes=tuple(axis + sum(removed > axis for removed in gone) for axis in of_map.axes))


_MOVING: Mapping[str, Callable[[Any, Sequence[int], ReceptiveField], ReceptiveField]] = {
    "Convolution": _convolution,
    **dict.fromkeys(("MaxPool2D", "AvgPool2D", "MaxPool3D", "AvgPool3D"), _pool),
    **dict.fromkeys(("AdaptiveAvgPool2D", "AdaptiveAvgPool3D"), _adaptive_pool),
    "ConstantPadNd": _pad,
    **{f"{kind}Pad{count}D": _pad for kind in ("Reflection", "Replication") for count in (1, 2, 3)},
    "Slice": _slice,
    "AsStrided": _strided,
    "Split": _split,
    **{f"UpsampleNearest{exact}{count}D": _upsampled for exact in ("", "Exact") for count in (1, 2, 3)},
    **dict.fromkeys(("UpsampleLinear1D", "UpsampleBilinear2D", "UpsampleBicubic2D", "UpsampleTrilinear3D"), _upsampled),
    **dict.fromkeys(("PixelShuffle", "PixelUnshuffle"), _shuffled),
    **dict.fromkeys(("Permute", "Transpose"), _permuted),
    **dict.fromkeys(("View", "UnsafeView", "ReshapeAlias"), _viewed),
    "Unsqueeze": _unsqueezed,
    "Squeeze": _squeezed,
    **dict.fromkeys(("Mm", "Addmm", "Linear"), _linear),
}
_INPUTS = {"Addmm": 1}  # position of the map argument, where it is not the first
