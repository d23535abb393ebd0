"""Infer which axis of an activation counts channels, and how to arrange its values for drawing.

A tensor alone does not show whether it is (N, C, H, W) or (N, H, W, C). The module that made it often does. For modules
that ignore axes (activation functions, containers), the axis of the latest tensor of the same shape is used.
"""

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from hookscope.hooks.attributes import attribute_of
from hookscope.statistics.layouts import MAX_HALVINGS, token_grid

Arrangement = Literal["maps", "frames", "tokens", "vector"]

# The attribute with a module's number of channels, and the usual axis of channels: second or last.
_CHANNEL_COUNTS: tuple[tuple[tuple[type[nn.Module], ...], str, Literal["second", "last"]], ...] = (
    ((_ConvNd,), "out_channels", "second"),
    ((_NormBase,), "num_features", "second"),
    ((nn.GroupNorm,), "num_channels", "second"),
    ((nn.Linear,), "out_features", "last"),
    ((nn.LayerNorm, nn.RMSNorm), "normalized_shape", "last"),
    ((nn.Embedding,), "embedding_dim", "last"),
    ((nn.MultiheadAttention,), "embed_dim", "last"),
)


class AxisReader:
    """Infers channel axes along one forward pass, also from earlier shapes of the pass."""

    def __init__(self) -> None:
        """Start without earlier shapes."""
        self._axis_by_shape: dict[tuple[int, ...], int] = {}
        self._habits: dict[type[nn.Module] | str, tuple[str, str]] = {}
        self.grids: list[tuple[int, ...]] = []

    def restart(self) -> None:
        """Begin another forward pass."""
        self._axis_by_shape.clear()
        self.grids.clear()

    def channel_axis(self, maker: nn.Module | str, shape: tuple[int, ...]) -> int | None:
        """Return the axis of `shape` that counts channels.

        Call it once per output, in execution order.

        Args:
            maker: The module that returned the tensor, or the name of the operation.
            shape: The tensor's shape; axis 0 is taken for the batch.

        Returns:
            1 for channels-first, the last axis for channels-last, None below two axes. `grids` collects the spatial
            sizes of maps, latest last: all sizes of convolutions and poolings; for other makers only sizes that follow
            from an earlier size, which leaves out attention's (heads, tokens).
        """
        if len(shape) < 2:
            return None
        kind = maker if isinstance(maker, str) else type(maker)
        habit = self._habits.get(kind)
        if habit is None:
            habit = self._habits[kind] = ("", _side(kind)) if isinstance(kind, str) else _habit(kind)
        attribute, side = habit
        beyond_batch = shape[1:]
        cached = self._axis_by_shape.get(beyond_batch)
        axis: int | None = 1
        if attribute:
            axis = _matching(attribute_of(maker, attribute), shape, side)
        elif side == "last":
            axis = len(shape) - 1
        elif not side:
            axis = None if isinstance(maker, str) else _permuted(maker, shape)
        if axis is None:
            axis = cached or self._axis_after(beyond_batch) or _guessed(shape)
        if axis == cached:
            return axis
        self._axis_by_shape[beyond_batch] = axis
        if 4 <= len(shape) <= 5:  # a tensor with more axes is cut into windows or heads
            grid = shape[2:] if axis == 1 else shape[1:-1]
            self.add_grid(grid, makes_maps=side == "second", may_be_first=_is_outside_torch(kind))
        return axis

    def _axis_after(self, shape: tuple[int, ...]) -> int | None:
        """Return the channel axis that follows from earlier shapes, batch included; shapes are without the batch axis.

        Heads (heads, tokens, D) are cut from tokens with channels last; a map (C, H, W) that is flattened, or reduced
        along one side, becomes (C, L).
        """
        for seen, axis in reversed(self._axis_by_shape.items()):
            if len(shape) == 3 and len(seen) == 2 and axis == 2:
                heads, tokens, width = shape
                if seen[0] == tokens and seen[1] % (heads * width) == 0:
                    return 3
            if len(shape) == 2 and len(seen) == 3 and axis == 1 and shape[0] == seen[0]:
                return 1 if shape[1] in {*seen[1:], seen[1] * seen[2]} else None
        return None

    def channel_axis_in_vmap(self, maker: nn.Module | str, shape: tuple[int, ...], vmapped: int) -> int | None:
        """Return the channel axis, as `channel_axis`, for a shape whose first `vmapped` axes come from `torch.vmap`.

        The last of these is the batch axis, unless the module's own output has a batch axis.
        """
        has_batch = isinstance(maker, nn.Module) and _has_batch(maker, shape[vmapped:])
        before = vmapped if has_batch else vmapped - 1
        axis = self.channel_axis(maker, shape[before:])
        return None if axis is None else before + axis

    def add_grid(self, grid: tuple[int, ...], *, makes_maps: bool, may_be_first: bool = False) -> None:
        """Add a spatial size to `grids` if it comes from a convolution or pooling, or follows from an earlier size."""
        if grid in self.grids:
            return
        if makes_maps or (may_be_first and not self.grids) or any(_follows(grid, prior) for prior in self.grids):
            self.grids.append(grid)


def _has_batch(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Tell whether a module's output begins with a batch axis: some modules also accept a single input without it."""
    if isinstance(module, _ConvNd):
        return len(shape) == len(module.kernel_size) + 2
    if isinstance(module, _NormBase):  # InstanceNorm
        return len(shape) > 1 and shape[1] == module.num_features
    return isinstance(module, nn.GroupNorm)


def _permuted(module: nn.Module, shape: tuple[int, ...]) -> int | None:
    """Return the channel axis of a module's output if it moves channels between axis 1 and the last; else None."""
    dims = vars(module).get("dims")  # torchvision's Permute
    if dims is None or not isinstance(dims, Sequence) or len(dims) != len(shape) or dims[0] != 0:
        return None
    last = len(shape) - 1
    return 1 if dims[1] == last else last if dims[last] == 1 else None


def _is_outside_torch(kind: type[nn.Module] | str) -> bool:
    """Tell whether a module class is not torch's own: its forward may then contain a convolution."""
    return not isinstance(kind, str) and not kind.__module__.startswith("torch.")


def _follows(grid: tuple[int, ...], prior: tuple[int, ...]) -> bool:
    """Tell whether a spatial size is an earlier size with both sides doubled, or halved up to `MAX_HALVINGS` times."""
    if len(grid) != len(prior) or grid[:-2] > prior[:-2]:
        return False
    if all(size == 2 * before for size, before in zip(grid[-2:], prior[-2:], strict=True)):
        return True
    return any(
        all(before >> times <= size <= -(-before >> times) for size, before in zip(grid[-2:], prior[-2:], strict=True))
        for times in range(1, MAX_HALVINGS + 1)
    )


def _habit(kind: type[nn.Module]) -> tuple[str, str]:
    """Return the attribute with the class's channel count, and the usual channel axis; "" if unknown."""
    for classes, attribute, side in _CHANNEL_COUNTS:
        if issubclass(kind, classes):
            return attribute, "second" if kind.__name__.endswith("2d") else side  # LayerNorm2d keeps (N, C, H, W)
    return "", "second" if kind.__module__ == "torch.nn.modules.pooling" else ""


# How names of operations begin that have channels second, or last, like the modules of the same names.
_SECOND = ("conv", "batch_norm", "instance_norm", "group_norm", "max_pool", "avg_pool", "adaptive_", "interpolate")
_LAST = ("linear", "layer_norm", "rms_norm", "embedding", "scaled_dot_product_attention", "multi_head_attention")


def _side(operation: str) -> str:
    return "second" if operation.startswith(_SECOND) else "last" if operation.startswith(_LAST) else ""


def _matching(count: object, shape: tuple[int, ...], side: str) -> int | None:
    """Return the axis whose size is the channel count; the module's usual axis if both axes fit, or neither."""
    if isinstance(count, Sequence) and len(count) == 1:
        (count,) = count
    if not isinstance(count, int):  # normalised over several axes, or a subclass without the attribute
        return None
    last = len(shape) - 1
    second_fits = shape[1] == count
    is_second = second_fits if second_fits != (shape[last] == count) else side == "second"
    return 1 if is_second else last


def _guessed(shape: tuple[int, ...]) -> int:
    """Guess the channel axis from a shape: maps are mostly square, tokens have channels last."""
    last = len(shape) - 1
    if len(shape) == 3:
        return last
    if len(shape) > 3 and shape[last - 1] != shape[last] and shape[last - 2] == shape[last - 1]:
        return last
    return 1


def arrange(
    values: Tensor, channel_axis: int | None, grids: Sequence[tuple[int, ...]]
) -> tuple[Arrangement, Tensor, Tensor | None, str]:
    """Arrange one input's activation for drawing.

    Args:
        values: The activation without the batch axis, any number of axes.
        channel_axis: As `AxisReader.channel_axis` gave it, counted with the batch axis.
        grids: Spatial sizes from the same forward pass, (H, W) or (T, H, W); later sizes are preferred.

    Returns:
        The arrangement; the values as documented for `FeatureMaps`, (C, H, W), (C, T, H, W) or (F,), a view
        where possible; extra tokens (K, C) or None; a remark or "".
    """
    if values.dim() < 2 or channel_axis is None:
        return "vector", values.reshape(-1), None, ""
    by_channel = values.movedim(channel_axis - 1, 0)
    if by_channel.dim() == 3:
        return "maps", by_channel, None, ""
    if by_channel.dim() == 4:
        return "frames", by_channel, None, ""
    if by_channel.dim() == 2:
        grid = token_grid(by_channel.shape[1], grids) if channel_axis == 2 else None
        if grid is None:
            axes = "channel" if channel_axis == 1 else "token sequence without a grid: one channel"
            return "maps", by_channel.unsqueeze(0), None, f"{axes} per row"
        extra = by_channel.shape[1] - math.prod(grid)
        tokens = by_channel[:, extra:].reshape(-1, *grid)
        leading = by_channel[:, :extra].t() if extra else None
        return ("tokens" if len(grid) == 2 else "frames"), tokens, leading, ""
    # With more than two spatial axes, the leading ones are flattened to frames.
    return "frames", by_channel.flatten(1, -3), None, f"axes {tuple(values.shape)} flattened to frames"
