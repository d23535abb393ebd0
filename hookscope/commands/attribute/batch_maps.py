"""Make the maps of one batch by any method: of layers, or of the picture itself."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hookscope.commands.attribute.cams import CAMS
from hookscope.commands.attribute.forward_backward import (
    ForwardBackward,
    model_errors,
    run_and_differentiate,
    run_output,
)
from hookscope.commands.attribute.layer_choice import LayerOutputs, MapLayer
from hookscope.commands.attribute.map_layers import MapLayers
from hookscope.commands.attribute.pixels import PIXEL_METHODS, Pixels, ScoredBatch, map_of
from hookscope.commands.attribute.scores import BatchTarget
from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.patterns import exact_operation
from hookscope.hooks.selection import module_index
from hookscope.inputs.batches import Batch
from hookscope.inspection.losses.formulas import real
from hookscope.results.attributions import Method
from hookscope.results.concentration import Extent
from hookscope.statistics.token_layout import TokenLayout


@dataclass(frozen=True, slots=True)
class Explained:
    """The maps of one batch.

    Attributes:
        layers: The layers; () for methods that look at the picture itself.
        maps: By target, then by layer, (N, *grid), float32 on the CPU; one map where there is no layer.
        pixels: By target, for methods that look at the picture itself, float32 on the CPU; () for others.
    """

    targets: Sequence[BatchTarget]
    layers: Sequence[MapLayer]
    maps: Sequence[Sequence[Tensor]]
    pixels: Sequence[Pixels] = ()

    @property
    def extents(self) -> Sequence[tuple[str, Sequence[Extent]]]:
        """The label of each layer, and the area of each input that its map covers; "" for the picture itself."""
        if self.layers:
            return [(layer.label, layer.extents) for layer in self.layers]
        count, *size = self.maps[0][0].shape
        return [("", [(0.0,) * len(size) + (1.0,) * len(size)] * count)]


def explain(map_layers: MapLayers, batch: Batch, method: Method) -> Explained:
    """Make the maps of a batch.

    Raises:
        NotReachedError: If no layer has a gradient for all its inputs.
        UsageError: If the network, a layer or a target does not go with the method.
    """
    passes = map_layers.passes
    if method in CAMS:
        targets, layers = map_layers.run(batch)
        return _layer_maps(method, layers, targets)
    # With a graph, which shows whether the scores are logits.
    targets = passes.targets_of(run_output(passes, batch, track=True), batch)
    return _pixel_maps(passes, passes.inspected.network, batch, method, targets)


def _layer_maps(method: Method, layers: Sequence[MapLayer], targets: Sequence[BatchTarget]) -> Explained:
    maps = []
    with torch.no_grad():
        for at in range(len(targets)):
            pairs = [(real(layer.values), real(layer.gradients[at])) for layer in layers]
            maps.append([CAMS[method](*pair).float().cpu() for pair in pairs])
    return Explained(targets, layers, maps)


def _pixel_maps(
    passes: ForwardBackward, network: nn.Module, batch: Batch, method: Method, targets: Sequence[BatchTarget]
) -> Explained:
    """Make maps of the picture itself; `network` is the run's, or a copy."""
    with model_errors(passes.inspected, "backward"):
        parts = [PIXEL_METHODS[method](ScoredBatch(network, batch, target.score)) for target in targets]
    pixels = [replace(part, values=part.values.float().cpu()) for part in parts]
    return Explained(targets, (), [[map_of(method, part.values)] for part in pixels], pixels)


def explain_again(
    passes: ForwardBackward,
    network: nn.Module,
    batch: Batch,
    layers: Sequence[MapLayer],
    method: Method,
    target: BatchTarget,
) -> Sequence[Tensor]:
    """Return the maps of a target by layer, made by a copy of the network that has no other hooks.

    A gradient that does not arrive counts as zero.
    """
    if method not in CAMS:
        return _pixel_maps(passes, network, batch, method, [target]).maps[0]
    modules, _ = module_index(network)
    names = dict.fromkeys(layer.place[0] for layer in layers)
    operations = [exact_operation(name) for name in names if name not in modules]
    outputs = LayerOutputs(TokenLayout(network, passes.outputs.token_layout.stated))
    with ExitStack() as hooks:
        other = replace(
            passes,
            inspected=replace(passes.inspected, network=network, modules=modules),
            targets_of=lambda _output, _batch: [target],
            outputs=outputs,
            capturing=hooks.enter_context(capture(network, modules, outputs.observe)),
        )
        watched = {name: modules[name] for name in names if name in modules}
        watch = other.watch(watched, OperationChoice(operations) if operations else None)
        _, captured = run_and_differentiate(other, hooks.enter_context(watch), batch)
    blank = (layer._replace(gradients=[torch.zeros_like(layer.values)]) for layer in layers)
    again = [captured.get(layer.place, layer) for layer in blank]
    return _layer_maps(method, again, [target]).maps[0]
