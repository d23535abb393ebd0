"""Place the tokens of a network on its input, along a forward pass: prefix, grid, windows, and tokens without a place.

This is the only such module: norms of tokens, grids, maps of overviews, `attribute` and `attention` use it.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.observed import RowKey
from hookscope.hooks.running import ModuleInput, running_modules
from hookscope.parameters import arg
from hookscope.statistics.layouts import (
    Layout,
    known_prefix,
    layout_of,
    square_patches,
    unknown_grid,
    windows_of,
)
from hookscope.statistics.non_patch_tokens import LAYERS_OUT, NonPatchTokens
from hookscope.statistics.storage import has_memory
from hookscope.statistics.windows import cuts_windows, map_size, padded_to, pair

# Differences of mean cosines: enough to place a single extra token behind the patches; enough to decide at all. Ours.
_CLEARLY, _SOMEWHAT = 0.2, 0.02
_SWAPPED = "may have channels where tokens are: there are as many of both"
_PADDED = "has {} tokens in windows that reach beyond the picture"
_OUT_OF_ORDER = "has tokens in the order of windows, not of the picture's rows"


def _behind(count: int) -> str:
    return (
        f"has {count} tokens, and those of the picture may not be the last of them; for patches in front give "
        f"{arg('tokens')} grid=HEIGHTxWIDTH,suffix=N"
    )


@dataclass
class TokenLayout:
    """Finds the layout of tokens along one forward pass.

    Attributes:
        network: The network; its attributes may show the prefix, and whether it keeps tokens by windows.
        stated: The layout from the user's `--tokens`; None without it.
        pictures: Number, height and width of the input pictures; None for other inputs.
    """

    network: nn.Module
    stated: Layout | None = None
    pictures: tuple[int, int, int] | None = None
    _non_patches: NonPatchTokens = field(init=False)
    _widths: dict[int, int] = field(default_factory=dict)
    _patches: Tensor | None = None
    _guessed: list[tuple[int, int]] = field(default_factory=list)
    _has_others_behind: dict[int, bool] = field(default_factory=dict)
    _layouts: dict[RowKey, tuple[tuple[tuple[int, ...], int, int], Layout | str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start without findings; the network is examined at its first tokens."""
        self._non_patches = NonPatchTokens(self.network)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(module): name for name, module in self.network.named_modules()}

    @cached_property
    def _blocks(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self.network.named_modules() if cuts_windows(module)}

    @cached_property
    def _prefix(self) -> int | None:
        return known_prefix(self.network)

    @cached_property
    def halvings(self) -> int:
        """How often the network halves the grid until its tokens lie in rows; 0 if they always do."""
        for module in self.network.modules():  # Hiera's: timm has a module for it, transformers a method
            schedule = attribute_of(module, "unroll_schedule")
            if schedule is None and type(module).__name__ == "Unroll":
                schedule = attribute_of(module, "schedule")
            if isinstance(schedule, list | tuple):
                return len(schedule)
        return 0

    @cached_property
    def _stride(self) -> tuple[int, int] | None:
        """The size of patches that the first convolution cuts pictures into; None if it cuts none."""
        first = next((module for module in self.network.modules() if isinstance(module, nn.Conv2d)), None)
        return pair(attribute_of(first, "stride")) if first is not None and _cuts_patches(first) else None

    def restart(self, pictures: tuple[int, int, int] | None = None) -> None:
        """Begin another forward pass; findings are kept if the pictures have the same size."""
        is_alike = pictures is not None and self.pictures is not None and pictures[1:] == self.pictures[1:]
        self._non_patches.restart(keeps_counts=is_alike)
        if not is_alike:
            self._widths.clear()
            self._layouts.clear()
            self._has_others_behind.clear()
            self._guessed = []
        self.pictures, self._patches = pictures, None

    def note_patches(self, maker: nn.Module | str, maps: Tensor) -> None:
        """Remember the output, (N, D, *grid), of the first convolution that cuts the input into patches."""
        if self._patches is None and isinstance(maker, nn.Conv2d | nn.Conv3d) and _cuts_patches(maker):
            self._patches = maps.detach()

    def layout(
        self,
        place: RowKey,
        values: Tensor,
        count: int,
        channel_axis: int | None,
        grids: Sequence[tuple[int, ...]],
        *,
        axes: int = 2,
    ) -> Layout | str:
        """Return the input's layout in an output, or the reason why it has none, in words.

        Call it when the output is returned, because it examines the inputs of the modules that still run.

        Args:
            place: The layer, or "MODULE:OPERATION", its call and the slot of the output.
            values: The output.
            count: Inputs in the batch.
            channel_axis: As `statistics.channel_axis.AxisReader` gave it.
            grids: Sizes of maps that convolutions returned in the same pass, later sizes preferred.
            axes: Axes of place of the input: 1 for signals, 2 for pictures, 3 for volumes and clips.
        """
        key = (tuple(values.shape), count, len(grids))
        cached = self._layouts.get(place)
        if cached is not None and cached[0] == key:
            return cached[1]
        layout = self._layout(place[0], values, count, channel_axis, grids, axes)
        self._layouts[place] = key, layout
        return layout

    def layout_at(self, place: RowKey) -> Layout | None:
        """Return the layout that `layout` found for an output; None if it found none, or was not called."""
        cached = self._layouts.get(place)
        return cached[1] if cached is not None and isinstance(cached[1], Layout) else None

    def grids_at(self, place: RowKey, grids: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Return the grids of an output: its tokens' grid; () if `layout` found none; all for maps, or if unknown."""
        if place not in self._layouts:
            return tuple(grids)
        layout = self.layout_at(place)
        if layout is None:
            return ()
        return tuple(grids) if layout.prefix is None else (layout.grid,)

    def _layout(
        self,
        layer: str,
        values: Tensor,
        count: int,
        channel_axis: int | None,
        grids: Sequence[tuple[int, ...]],
        axes: int,
    ) -> Layout | str:
        shape = tuple(values.shape)
        windows = windows_of(self._blocks, layer, shape, count, channel_axis, grids or self._cut_grids())
        if windows is not None:
            return windows
        running: Sequence[ModuleInput] = ()
        reason = ""
        if axes > 1 and len(shape) == 3 and channel_axis == 2 and shape[0] == count and self.stated is None:
            running = running_modules(sys._getframe(), self._names)  # noqa: SLF001
            reason = self._non_patches.reason(running, shape[1], grids)
            grids = grids or self._cut_grids(0 if reason else shape[1])
        size = None if self.pictures is None else self.pictures[1:]
        layout = layout_of(
            shape, count, channel_axis, grids, axes=axes, prefix=self._prefix, tokens=self.stated, size=size
        )
        if isinstance(layout, str) or not running:
            return layout
        return (f"holds {reason}" if reason else self._out_of_place(layout, values, grids, running)) or layout

    def _out_of_place(
        self, layout: Layout, values: Tensor, grids: Sequence[tuple[int, ...]], running: Sequence[ModuleInput]
    ) -> str:
        """Return why tokens do not lie on a grid although their number fits; "" if they do."""
        tokens, width = values.shape[1:]
        if any(_are_padded(call, tokens) for call in running[:LAYERS_OUT]):
            return _PADDED.format(tokens)
        if not self._is_merged(layout, tokens, width, grids, running):
            return unknown_grid(tokens)
        if self._are_others_behind(layout, values):
            return _behind(tokens)
        if any(_has_swapped(call, tokens) for call in running[:LAYERS_OUT]):
            return _SWAPPED
        self._widths.setdefault(tokens, width)
        if self.halvings and layout.grid not in {tuple(size >> self.halvings for size in grid) for grid in grids[:1]}:
            return _OUT_OF_ORDER
        return ""

    def of_attention(
        self,
        running: Sequence[ModuleInput],
        queries: int,
        keys: int,
        grids: Sequence[tuple[int, ...]],
        patches: Tensor | None,
    ) -> tuple[Layout | str, Layout | str]:
        """Return the layouts of queries and keys on a picture, or the reasons why they have none, in words."""
        self._patches = patches
        reasons = self._non_patches.of_attention(running, queries, keys, grids) if self.stated is None else ("", "")
        grids = grids or self._cut_grids(0 if reasons[1] else keys)
        both = zip((queries, keys), reasons, strict=True)
        layouts = [self._of_attention(running, count, reason, grids) for count, reason in both]
        for tensor in _sequences(running):
            self._widths.setdefault(tensor.shape[1], tensor.shape[2])
        return layouts[0], layouts[1]

    def _cut_grids(self, tokens: int = 0) -> Sequence[tuple[int, ...]]:
        """Return a list with the grid of patches if no convolution was observed; an empty list if it is unknown.

        The stride of the network's first convolution gives the grid. Without one, the first `tokens` count as square
        patches that fill the picture, with or without a class token; 0 stands for tokens that are no patches.
        """
        if self.pictures is None:
            return ()
        *_, high, wide = self.pictures
        if self._stride is not None:
            return [(high // self._stride[0], wide // self._stride[1])]
        if not self._guessed and self._prefix is None and tokens:
            cut = [square_patches(tokens - extra, (high, wide)) for extra in (0, 1)]
            self._guessed = [grid for grid in cut if grid is not None and min(grid) > 1][:1]
        return self._guessed

    def are_words_in_front(self, running: Sequence[ModuleInput], prefix: int) -> bool:
        """Tell whether the `prefix` tokens in front of the grid may hold words, and so have no names."""
        return self._non_patches.are_words_in_front(running, prefix)

    def _of_attention(
        self, running: Sequence[ModuleInput], count: int, reason: str, grids: Sequence[tuple[int, ...]]
    ) -> Layout | str:
        if reason:
            return reason
        size = None if self.pictures is None else self.pictures[1:]
        shape = (1, count, 1)
        layout = layout_of(shape, 1, 2, grids, prefix=self._prefix, tokens=self.stated, size=size)
        if isinstance(layout, str) and self._prefix:  # a block without class token, or with keys on a different grid
            layout = layout_of(shape, 1, 2, grids, prefix=0, tokens=self.stated, size=size)
        if isinstance(layout, str) or self.stated is not None:
            return layout
        if any(_are_padded(call, count) for call in running[:LAYERS_OUT]):
            return _PADDED.format(count)
        width = max((tensor.shape[2] for tensor in _sequences(running) if tensor.shape[1] == count), default=0)
        if not self._is_merged(layout, count, width, grids, running):
            return unknown_grid(count)
        tokens = next((tensor for tensor in reversed(_sequences(running)) if tensor.shape[1] == count), None)
        return _behind(count) if self._are_others_behind(layout, tokens) else layout

    def _are_others_behind(self, layout: Layout, values: Tensor | None) -> bool:
        """Tell whether other tokens may lie behind the grid's; decided once for each token count.

        If the network's attributes do not show the prefix, values decide: first tokens resemble the patches that a
        convolution has cut. A single other token is assumed to be in front unless the evidence is strong.
        """
        if self._prefix is not None or not layout.prefix or self.stated is not None:
            return False
        count = layout.prefix + math.prod(layout.grid)
        if count not in self._has_others_behind:
            likeness = None if values is None or self._patches is None else _likeness(values, self._patches, layout)
            if likeness is None:
                self._has_others_behind[count] = layout.prefix > 1
            elif layout.prefix == 1:
                self._has_others_behind[count] = likeness[0] > likeness[1] + _CLEARLY
            else:
                self._has_others_behind[count] = max(likeness) > likeness[-1]
        return self._has_others_behind[count]

    def _is_merged(
        self, layout: Layout, tokens: int, width: int, grids: Sequence[tuple[int, ...]], running: Iterable[ModuleInput]
    ) -> bool:
        """Tell whether tokens lie on an earlier grid, or on a grid of merged neighbours.

        Signs of merging are more channels, a module that is given the size of the map, and a stride. Without them, a
        network may have averaged tokens in order of rows, dropped some, or attended to them with other tokens.
        """
        if layout.grid in grids or not grids:
            return True
        larger = [held for count, held in self._widths.items() if count > tokens]
        if larger and width > max(larger):
            return True
        if not larger and self.pictures is not None and self._prefix is not None and layout.prefix == self._prefix:
            # A network may cut patches from the output of convolutions: together they fill the picture.
            return layout.grid == square_patches(tokens - self._prefix, self.pictures[1:])
        return any(_is_given_size(call, layout.grid) for call in running) or any(map(_has_stride, [*running][:1]))


def _likeness(tokens: Tensor, patches: Tensor, layout: Layout) -> list[float] | None:
    """Return how much tokens resemble patches, for 0, 1, … tokens in front; None if that cannot be measured.

    The measure is the mean cosine between a token and its patch, after subtracting the mean over places.
    """
    area, extra = math.prod(layout.grid), layout.prefix or 0
    if patches.dim() < 4 or patches.shape[2:] != layout.grid or len(patches) != len(tokens):
        return None
    if patches.shape[1] != tokens.shape[2] or patches.device != tokens.device or not has_memory(tokens):
        return None
    with torch.no_grad():
        expected = _centred(patches.detach().flatten(2).transpose(1, 2))
        cosines = [
            float((_centred(tokens.detach()[:, front : front + area]) * expected).sum(-1).mean())
            for front in range(extra + 1)
        ]
    return cosines if all(map(math.isfinite, cosines)) and max(cosines) - min(cosines) > _SOMEWHAT else None


def _centred(tokens: Tensor) -> Tensor:
    tokens = tokens.float()
    return torch.nn.functional.normalize(tokens - tokens.mean(1, keepdim=True), dim=-1)


def _cuts_patches(convolution: nn.Module) -> bool:
    """Tell whether a convolution's kernel and stride are equal and larger than one pixel."""
    size, stride = attribute_of(convolution, "kernel_size"), attribute_of(convolution, "stride")
    return isinstance(stride, tuple) and size == stride and max(stride) > 1


def _sequences(running: Sequence[ModuleInput]) -> list[Tensor]:
    """Return the tokens (N, T, D) that the innermost two modules were given."""
    arguments = [argument for module in running[:2] for argument in (*module.args, *module.kwargs.values())]
    return [
        value for value in arguments if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3
    ]


def _is_given_size(call: ModuleInput, grid: tuple[int, ...]) -> bool:
    """Tell whether a module was given a map of this size, the size itself, or the size before merging."""
    high, wide = grid[-2:]
    before = ((high, wide), (2 * high, 2 * wide), (2 * high - 1, 2 * wide - 1))
    for argument in (*call.args, *call.kwargs.values()):
        if isinstance(argument, Tensor) and not argument.is_nested:
            is_map = argument.is_floating_point() and argument.dim() == 4
            if is_map and (high, wide) in (argument.shape[1:3], argument.shape[2:4]):
                return True
        elif isinstance(argument, tuple | list) and pair(argument) in before:
            return True
    return False


def _has_swapped(call: ModuleInput, tokens: int) -> bool:
    """Tell whether a module was given a square (tokens, channels) with the two axes swapped (MLP-Mixer)."""
    for _, argument in call.tensors:
        if argument.dim() == 3 and argument.shape[1:] == (tokens, tokens):
            base = None if argument.is_inference() else argument._base  # noqa: SLF001
            if base is not None and base.dim() == 3 and argument.stride(1) < argument.stride(2):
                return True
    return False


def _are_padded(call: ModuleInput, tokens: int) -> bool:
    """Tell whether a module pads its map until windows fill it, to `tokens` tokens in all."""
    window = pair(attribute_of(call.module, "window_size"))
    size = map_size((*call.args, *call.kwargs.values())) if window is not None and all(window) else None
    if window is None or size is None:
        return False
    return tokens == math.prod(padded_to(size, window)) != math.prod(size)


def _has_stride(call: ModuleInput) -> bool:
    """Tell whether a module or a child of it has stride 2, as in LeViT."""
    return any(pair(attribute_of(module, "stride")) == (2, 2) for module in (call.module, *call.module.children()))
