"""Choose the layer to look at: the last layer whose output is a map of the picture."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from hookscope.commands.attribute.input_places import place_axes, word_counts
from hookscope.commands.attribute.scores import BatchTarget
from hookscope.hooks.observed import ModuleCall, RowKey
from hookscope.inputs.batches import Batch
from hookscope.parameters import arg
from hookscope.results.concentration import Extent
from hookscope.results.inputs import PICTURE_AXES
from hookscope.results.network import row_label
from hookscope.statistics.channel_axis import AxisReader
from hookscope.statistics.layouts import Layout
from hookscope.statistics.storage import has_memory
from hookscope.statistics.token_layout import TokenLayout

# What runs inside an attention layer is per head, or queries and keys: no features of a place.
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
# Layers whose outputs, where they are maps, are never heads of an attention: tokens are placed on these maps' grids.
_KEEP_PLACES = ("Conv1d", "Conv2d", "Conv3d", "LayerNorm", "LayerNorm2d")
# Layers that may return their input: the layer before them is explained instead.
_PASSING = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    *(nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
# The name, in torchvision's detectors, of the part that sees the whole picture.
_BACKBONE = "backbone"
_SEQUENCE_AXES = 3  # (N, T, D)
# How many layers at a time are differentiated, the last first: usually it has a gradient.
_AT_A_TIME = (1, 4, 16)


class LayerOutput(NamedTuple):
    """One output of one call.

    Attributes:
        kind: Class name of the module, or the operation.
        layout: Where the picture lies in it, or in words why it has no place there.
        edge: Where the gradient of the output, as returned, arrives in the graph; None without a graph.
        values: The output itself, which may be overwritten later: its `version` then differs.
    """

    kind: str
    shape: tuple[int, ...]
    layout: Layout | str
    edge: GradientEdge | None = None
    values: Tensor | None = None
    version: int = 0

    @property
    def is_overwritten(self) -> bool:
        """Whether something has been written to it since it was returned."""
        return self.values is None or self.values._version != self.version


@dataclass(slots=True)
class LayerOutputs:
    """What every layer returned in one forward pass, in the order in which they finished.

    Attributes:
        count: Inputs in the batch.
        axes: Axes of place that the input has.
        keeps: Whether to keep the outputs, and where their gradients arrive.
        score_map: Label of the output that was found to hold the scores themselves; "" without one.
    """

    token_layout: TokenLayout
    count: int = 1
    axes: int = 2
    keeps: bool = False
    by_place: dict[RowKey, LayerOutput] = field(default_factory=dict)
    score_map: str = ""
    _axes: AxisReader = field(default_factory=AxisReader)
    _grids: list[tuple[int, ...]] = field(default_factory=list)
    _word_counts: Collection[int] = ()

    def start(self, batch: Batch, *, keeps: bool) -> None:
        """Begin a forward pass."""
        self.count, self.axes, self._word_counts = len(batch.indices), place_axes(batch), word_counts(batch)
        self.token_layout.restart(batch.pictures)
        self.keeps, self.score_map, self.by_place, self._axes, self._grids = keeps, "", {}, AxisReader(), []

    def forget(self) -> None:
        """Let go of outputs and graphs."""
        self.by_place = {place: output._replace(edge=None, values=None) for place, output in self.by_place.items()}

    def observe(self, call: ModuleCall, slot: str, tensor: Tensor) -> None:
        """Note an output, for `hookscope.hooks.forward_hooks.capture`."""
        place = (call.layer, call.call, slot)
        shape = tuple(tensor.shape) if not tensor.is_nested else ()
        layout: Layout | str = f"holds {str(tensor.dtype).removeprefix('torch.')} values, not floating point"
        if not (tensor.is_nested or has_memory(tensor)):
            layout = "is sparse or without memory"
        elif tensor.is_floating_point():
            axis = self._axes.channel_axis(call.maker, shape)
            self.token_layout.note_patches(call.maker, tensor)
            layout = self.token_layout.layout(place, tensor, self.count, axis, self._grids, axes=self.axes)
            is_guess = isinstance(layout, str) or self.token_layout.stated is None
            if self.axes > 1 and is_guess and _embeds_words(call, shape, self._word_counts):
                layout = Layout((shape[1],), 2, 0)
        kind = call.maker if isinstance(call.maker, str) else type(call.maker).__name__
        if (
            isinstance(layout, Layout)
            and layout.prefix is None
            and len(layout.grid) == self.axes
            and kind.endswith(_KEEP_PLACES)
            and not _ATTENTION.search(call.layer)
        ):
            self._grids.append(layout.grid)
        output = LayerOutput(kind, shape, layout)
        if self.keeps and isinstance(layout, Layout) and tensor.requires_grad:
            # Later writes raise the version of the tensor; the edge leads to the gradient of what it holds now.
            output = output._replace(
                edge=torch.autograd.graph.get_gradient_edge(tensor), values=tensor.detach(), version=tensor._version
            )
        self.by_place[place] = output


def _embeds_words(call: ModuleCall, shape: tuple[int, ...], word_counts: Collection[int]) -> bool:
    """Tell whether a layer embeds whole numbers, (N, T): its steps are then words, not places of a grid."""
    tensors = [tensor for _, tensor in call.inputs]
    if len(shape) != _SEQUENCE_AXES or shape[1] not in word_counts or any(map(Tensor.is_floating_point, tensors)):
        return False
    return any(tuple(tensor.shape) == shape[:2] for tensor in tensors)


class MapLayer(NamedTuple):
    """What one layer returned for a batch, (N, C, *grid), and the gradient of each target with respect to it.

    Attributes:
        reason: Why it was chosen, in a few words.
        extents: The area that the map covers, of each input.
        leads_to_input: Whether a gradient leads from it to the input that maps are drawn over.
    """

    place: RowKey
    output: LayerOutput
    reason: str
    values: Tensor
    gradients: Sequence[Tensor]
    extents: Sequence[Extent] = ()
    leads_to_input: bool = True

    @property
    def label(self) -> str:
        """As rows have it."""
        return row_label(*self.place)

    @property
    def grid(self) -> tuple[int, ...]:
        """Cells of the map along each axis: (l,), (h, w) or (d, h, w)."""
        return tuple(self.values.shape[2:])


def choose_layer(
    outputs: LayerOutputs,
    modules: Mapping[str, nn.Module],
    targets: Sequence[BatchTarget],
    scores: Sequence[Tensor],
    *,
    before: str | None = None,
) -> MapLayer | None:
    """Return the last spatial output that the gradient of every target reaches; None without one.

    An output that holds the scores themselves at each place is passed over: its map would be the score. A container
    returns the output of its last layer; the less nested name counts. If no layer is reached for all inputs, the last
    one that is reached for some of them counts. `outputs` must be kept. `scores`, (N,) for each target, have their
    graph. With `before`, only layers that finished before that layer count.
    """
    for_some: MapLayer | None = None
    remarks: dict[str, str] = {}
    candidates = _candidates(outputs, modules, before)
    kind = "last spatial output"
    if any(target.is_box for target in targets) and _BACKBONE in modules:  # behind it are small parts of the picture
        kind = f"{kind} of the {_BACKBONE}"
        candidates = [candidate for candidate in candidates if f"{candidate[0][0]}.".startswith(f"{_BACKBONE}.")]
    for group in _in_groups(candidates):
        edges = [edge for _, output in group if (edge := output.edge) is not None]
        by_target = [
            torch.autograd.grad(sum_of(score, target), edges, retain_graph=True, allow_unused=True)
            for score, target in zip(scores, targets, strict=True)
        ]
        for (place, output), *gradients in zip(group, *by_target, strict=True):
            layout, values = output.layout, output.values
            if not isinstance(layout, Layout) or values is None or any(gradient is None for gradient in gradients):
                continue
            maps = [layout.maps(gradient) for gradient in gradients]
            reached = reaches(maps, targets)
            if not bool(reached.any()):
                if layout.others and any(bool(gradient.any()) for gradient in gradients):
                    remarks["tokens"] = f"after it only {layout.others} does"
                continue
            if all(_holds_scores(grads, target) for grads, target in zip(maps, targets, strict=True)):
                outputs.score_map = outputs.score_map or row_label(*place)
                remarks["scores"] = f"{outputs.score_map} holds the scores themselves"
                continue
            unplaced = "" if any(target.is_box for target in targets) else _unplaced_after(place, outputs, modules)
            if unplaced:
                remarks["unplaced"] = (
                    f"{unplaced}, after it, returns tokens whose grid is not known: see {arg('tokens')}"
                )
            reason = "; ".join([f"{kind} that reaches the target", *remarks.values()])
            choice = MapLayer(place, output, reason, layout.maps(values), maps)
            if bool(reached.all()):
                return choice
            for_some = for_some or choice
    return for_some


def _unplaced_after(place: RowKey, outputs: LayerOutputs, modules: Mapping[str, nn.Module]) -> str:
    """Return the last layer after a place that returns tokens whose grid is not known; "" without one."""
    places = [*outputs.by_place]
    for other in reversed(places[places.index(place) + 1 :]):
        if arg("tokens") in str(outputs.by_place[other].layout) and other[0] and not _in_attention(other[0], modules):
            return row_label(*other)
    return ""


def reaches(gradients: Sequence[Tensor], targets: Sequence[BatchTarget]) -> Tensor:
    """Tell where gradients, each (N, C, h, w), are nonzero anywhere, (targets, N); True for inputs without a target."""
    without = torch.tensor([[label is None for label in target.targets] for target in targets], device="cpu")
    return torch.stack([(gradient != 0).flatten(1).any(1).cpu() for gradient in gradients]) | without


def sum_of(score: Tensor, target: BatchTarget) -> Tensor:
    """Return the sum of the scores of the inputs that have the target."""
    terms = zip(score, target.targets, strict=True)
    return torch.stack([term if label is not None else term * 0 for term, label in terms]).sum()


def _holds_scores(gradient: Tensor, target: BatchTarget) -> bool:
    """Tell whether a map holds class scores at each place: then only the target's channels have a gradient."""
    if target.class_count is None:  # a user's function: its channel alone has a gradient
        return gradient.shape[1] > 1 and int((gradient != 0).any(0).flatten(1).any(1).sum()) == 1
    if gradient.shape[1] != target.class_count:
        return False
    channels = (gradient != 0).flatten(2).any(2).cpu().tolist()  # by input
    active = [{index for index, reached in enumerate(channel) if reached} for channel in channels]
    return target.is_dense or all(indices <= other for indices, other in zip(active, target.classes, strict=True))


def _candidates(
    outputs: LayerOutputs, modules: Mapping[str, nn.Module], before: str | None
) -> list[tuple[RowKey, LayerOutput]]:
    """Return spatial outputs, the last first; outputs that share a tensor come once, under the least nested name."""
    places = [*outputs.by_place]
    if before is not None:
        end = next((at for at, place in enumerate(places) if place[0] == before), len(places))
        places = places[:end]
    alike: dict[tuple[int, ...], list[RowKey]] = {}
    for at in reversed(range(len(places))):
        place, output = places[at], outputs.by_place[places[at]]
        layout = output.layout
        has_input_axes = not isinstance(layout, Layout) or len(layout.grid) >= min(outputs.axes, PICTURE_AXES)
        if place[0] and output.edge is not None and has_input_axes and not _in_attention(place[0], modules):
            if isinstance(modules.get(place[0]), _PASSING):
                output = _earlier_copy(output, [outputs.by_place[other] for other in reversed(places[:at])])
            alike.setdefault(_storage_key(output), []).append(place)
    order = {place: at for at, place in enumerate(places)}

    def rank(place: RowKey) -> tuple[bool, int, int]:
        return isinstance(modules.get(place[0]), _PASSING), place[0].count("."), order[place]

    best = [min(group, key=rank) for group in alike.values()]
    return [(place, outputs.by_place[place]) for place in best]


def _storage_key(output: LayerOutput) -> tuple[int, ...]:
    """Return a key that is equal for outputs that are one tensor, or views of it in another order."""
    values = output.values
    if values is None:
        return ()
    return values.untyped_storage()._cdata, int(values.storage_offset()), values.numel(), output.version


def _earlier_copy(output: LayerOutput, earlier: Sequence[LayerOutput]) -> LayerOutput:
    """Return the latest earlier output of the same shape if its values are equal, else the output itself.

    An adaptive pooling to the size of its input, for example, copies it.
    """
    other = next((prior for prior in earlier if prior.shape == output.shape and not prior.is_overwritten), None)
    if other is None or other.values is None or output.values is None or output.is_overwritten:
        return output
    return other if torch.equal(other.values, output.values) else output


def _in_attention(name: str, modules: Mapping[str, nn.Module]) -> bool:
    owners = [*accumulate(name.split("."), "{}.{}".format)][:-1]
    kinds = [type(modules[owner]).__name__ for owner in owners if owner in modules]
    return any(map(_ATTENTION.search, (*owners, *kinds)))


def _in_groups(candidates: Sequence[tuple[RowKey, LayerOutput]]) -> Iterator[Sequence[tuple[RowKey, LayerOutput]]]:
    rest = iter(candidates)
    for size in chain(_AT_A_TIME, repeat(_AT_A_TIME[-1])):
        if not (group := [*islice(rest, size)]):
            return
        yield group
