"""Look at layers, batch after batch: the user's choice, or the last whose output is a map of the picture."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from hookscope.commands.attribute.forward_backward import (
    ForwardBackward,
    MapCapture,
    ModelRaisedError,
    run_and_choose,
    run_and_differentiate,
    run_output,
)
from hookscope.commands.attribute.input_places import (
    alike_inputs,
    check_token_axes,
    input_size,
    main_input,
    padded_extents,
    place_axes,
    places_of,
)
from hookscope.commands.attribute.layer_choice import LayerOutput, MapLayer, reaches
from hookscope.commands.attribute.scores import BatchTarget
from hookscope.errors import LayerNotFoundError, UsageError
from hookscope.hooks.observed import RowKey
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.selection import select_from
from hookscope.inputs.batches import Batch, part_of
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.receptive_fields import ReceptiveField, ReceptiveFields
from hookscope.inspection.run import split_patterns
from hookscope.parameters import arg, listing
from hookscope.results.attributions import input_word
from hookscope.results.concentration import Extent
from hookscope.results.network import row_label
from hookscope.statistics.layouts import Layout
from hookscope.text import layer_words, safe_text, shape_text, some_of

# A row's label: name, call, path in a nested output.
_LABEL = re.compile(r"(?P<layer>.*?)(?:(?:#(?P<call>\d+))?(?P<slot>\[.*)?|(?:#(?P<of>\d+)|\(\))(?P<attribute>\..*))")
# Layers that a note names.
_NAMED = 5
_SEQUENCE_AXES = 3  # (N, C, L) or (N, T, D)


class NotReachedError(Exception):
    """A target's gradient is zero at a layer that is looked at, for some inputs at least, or no layer has a map."""

    def __init__(self, targets: Sequence[BatchTarget], labels: Sequence[str]) -> None:
        """Name the targets and the layers."""
        zero = f"the gradient of {_names(targets)} is zero everywhere at {', '.join(map(layer_words, labels))}"
        super().__init__(zero if labels else f"no layer that {arg('layer')} selects returns a map of it")


class LayerGroup(NamedTuple):
    """What one `--layer` means, or several patterns together: modules by name, or operations."""

    text: str
    layers: Mapping[str, nn.Module]
    call: int | None = None
    slot: str | None = None
    operations: OperationChoice | None = None

    def means(self, place: RowKey) -> bool:
        """Tell whether an output is one of them."""
        layer, call, slot = place
        owner, _, name = layer.rpartition(":")
        if self.operations is not None and owner and self.operations.lists(owner, name, call):
            return True
        return layer in self.layers and self.call in (None, call) and self.slot in (None, slot)


def given_layers(
    inspected: InspectedNetwork, patterns: Sequence[str], order: Callable[[], Sequence[str]]
) -> list[LayerGroup]:
    """Read `--layer`: a name means that layer alone, "layer4", "head#1"; anything else is a pattern.

    Raises:
        LayerNotFoundError: If a pattern selects nothing.
        UsageError: If one is malformed.
    """
    names = {other: name for name, others in inspected.aliases.items() for other in others}
    names |= {name: name for name in inspected.modules}
    groups: list[LayerGroup] = []
    others: list[str] = []
    for text in patterns:
        match = _LABEL.fullmatch(text)
        name = None if match is None else names.get(match["layer"])
        if match is None or not name:
            others.append(text)
            continue
        number, slot = match["call"] or match["of"], match["slot"] or match["attribute"]
        call = None if number is None else int(number)
        groups.append(LayerGroup(text, {name: inspected.modules[name]}, call, slot))
    if others:
        of_layers, operations = split_patterns(others, inspected.modules, ops=False)
        selected = {} if of_layers is None else select_from(inspected.modules, inspected.aliases, of_layers, order)
        groups.append(LayerGroup(", ".join(others), selected, operations=operations))
    return groups


@dataclass(slots=True, kw_only=True)
class MapLayers:
    """How layers are looked at in a run.

    Attributes:
        groups: Layers that the user gave; () to choose one.
        hooks: The hooks on the layers.
        chosen: Layers that were chosen so far, with the reason.
        notes: Sentences about layers.
    """

    passes: ForwardBackward
    groups: Sequence[LayerGroup]
    hooks: ExitStack
    chosen: dict[RowKey, str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    _worked: set[str] = field(default_factory=set)
    _cut_off: set[RowKey] = field(default_factory=set)
    _fields: dict[tuple[RowKey, tuple[int, ...] | None], ReceptiveField | None] = field(default_factory=dict)
    _captured: MapCapture | None = None

    def run(self, batch: Batch) -> tuple[list[BatchTarget], list[MapLayer]]:
        """Return the targets of a batch, and the layers with their gradients.

        Raises:
            NotReachedError: If the gradient is zero for some inputs.
            UsageError: If no layer can be looked at, or a target or the grid of tokens is wrong.
            LayerNotFoundError: If a pattern selects no operation.
        """
        tokens = self.passes.outputs.token_layout.stated
        if tokens is not None and len(tokens.grid) > 1:  # along one axis, they are words
            check_token_axes(tokens, place_axes(batch))
        targets, layers = self._given(batch) if self.groups else self._chosen(batch)
        return targets, [
            layer._replace(extents=self._extents(layer, batch), leads_to_input=layer.place not in self._cut_off)
            for layer in layers
        ]

    # --- Where the cells of a map lie ---

    def _extents(self, layer: MapLayer, batch: Batch) -> Sequence[Extent]:
        shape = _input_shape(batch)
        field = self._fields.get((layer.place, shape))
        if field is not None and len(field.lines) == len(layer.grid):
            size = input_size(self.passes.inspected.network, batch)
            return [field.extent(layer.grid, size)] * len(batch.indices)
        layout = layer.output.layout
        if isinstance(layout, Layout) and layout.prefix is None:  # tokens lie at their patches
            self.notes[
                f"{layer_words(layer.label)}: where its cells lie cannot be computed from the layers before it. Its "
                "map is stretched evenly over the input, and may be off by half a cell."
            ] = None
        return padded_extents(self.passes.inspected.network, batch, layer.grid)

    def _field(self, output: LayerOutput, batch: Batch) -> ReceptiveField | None:
        tensor = main_input(batch)
        if output.edge is None or tensor is None or _input_shape(batch) is None:
            return None
        places = places_of(self.passes.inspected.network, tensor)
        return ReceptiveFields(len(places.size), channel_axis=places.channel_axis).of(output.edge.node)

    def _is_looked_at(self, place: RowKey) -> bool:
        return place in self.chosen or any(group.means(place) for group in self.groups)

    def _find_fields(self, captured: MapCapture, batch: Batch) -> None:
        """Find where the cells of outputs lie: run one input of the first batch of each size, then restore state."""
        passes, shape = self.passes, _input_shape(batch)
        if shape in {size for _, size in self._fields}:
            return
        captured.watch.listening = False
        single = part_of(batch, 0)
        run_output(passes, single, track=True, keeps=True)
        seen = [*passes.outputs.by_place.items()]  # activation checkpointing runs layers again
        drawn_over = main_input(single)
        has_gradient = drawn_over is None or drawn_over.is_floating_point()
        is_tracked = has_gradient and any(output.edge is not None for _, output in seen)
        for place, output in seen:
            if self._is_looked_at(place):
                self._fields[place, shape] = self._field(output, single)
                if is_tracked and output.edge is None and isinstance(output.layout, Layout):
                    self._cut_off.add(place)
                    self.notes[
                        f"{layer_words(row_label(*place))}: no gradient leads from it to the input that maps are "
                        "drawn over. It may show another input, or come after a detach()."
                    ] = None
        passes.outputs.forget()
        captured.restart()
        passes.state.rewind()

    def _watch(self, layers: Mapping[str, nn.Module], operations: OperationChoice | None = None) -> MapCapture:
        self.hooks.close()
        self._captured = self.hooks.enter_context(self.passes.watch(layers, operations))
        self.passes.state.mark_hooks()
        return self._captured

    # --- The layer that is chosen ---

    def _chosen(self, batch: Batch) -> tuple[list[BatchTarget], list[MapLayer]]:
        passes = self.passes
        for is_last in (False, True):
            if self._captured is not None:
                self._find_fields(self._captured, batch)
                targets, outputs = run_and_differentiate(passes, self._captured, batch)
                for place, reason in self.chosen.items():
                    layer = outputs.get(place)
                    if layer is not None and bool(reaches(layer.gradients, targets).all()):
                        return targets, [layer._replace(reason=reason)]
                if is_last:
                    break
                passes.state.rewind()
            targets, choice = run_and_choose(passes, batch)
            if choice is None:
                if self.chosen:
                    break
                raise UsageError(self._nowhere(targets))
            self.chosen.setdefault(choice.place, choice.reason)
            self._fields[choice.place, _input_shape(batch)] = self._field(choice.output, batch)
            modules = passes.inspected.modules
            self._watch({layer: modules[layer] for layer, _, _ in self.chosen})
            if bool(reaches(choice.gradients, targets).all()) and not choice.output.is_overwritten:
                return targets, [choice]
            passes.state.rewind()
        marks = [reaches(outputs[place].gradients, targets) for place in self.chosen if place in outputs]
        raise NotReachedError(_unreached(targets, marks) or targets, [row_label(*place) for place in self.chosen])

    def _nowhere(self, targets: Sequence[BatchTarget]) -> str:
        name, seen = self.passes.inspected.info.name, self.passes.outputs.by_place
        layouts = [output.layout for (layer, _, _), output in seen.items() if layer]
        tokens = [layout for layout in layouts if arg("tokens") in str(layout)]
        if tokens and not any(isinstance(layout, Layout) and layout.prefix is not None for layout in layouts):
            return (
                f"No layer of {name} returns a map of the picture: one {tokens[-1]}. Or take {arg('method')} gradient."
            )
        if score_map := self.passes.outputs.score_map:
            return (
                f"The only maps of {name} that reach {_names(targets)} are the scores themselves: give "
                f"{arg('layer')} {score_map} to look at them, or take {arg('method')} gradient, which looks at "
                "the picture itself."
            )
        if remedy := self._one_at_a_time():
            return remedy
        if any(isinstance(layout, Layout) for layout in layouts):
            return (
                f"The gradient of {_names(targets)} is zero at every layer of {name} that returns maps: a layer behind "
                "them multiplies by zero, or cuts the gradient off. Look at `hookscope grads`."
            )
        return (
            f"No module of {name} returns a map of the {input_word(self.passes.outputs.axes)} with more than one "
            f"place: choose an operation with {arg('layer')} op:NAME ({listing(ops=True)} lists them), or take "
            f"{arg('method')} gradient, which needs no layer."
        )

    def _one_at_a_time(self) -> str:
        """Return advice if the network runs its layers on one input of the batch at a time, else ""."""
        outputs = self.passes.outputs
        shapes = [output.shape for output in outputs.by_place.values()]
        if outputs.count > 1 and any(shape[:1] == (1,) and len(shape) == outputs.axes + 2 for shape in shapes):
            return f"{self.passes.inspected.info.name} runs layers on one input at a time: give {arg('batch_size')} 1."
        return ""

    # --- Layers that are given ---

    def _given(self, batch: Batch) -> tuple[list[BatchTarget], list[MapLayer]]:
        modules = {name: module for group in self.groups for name, module in group.layers.items()}
        operations = self.groups[-1].operations  # the patterns' group comes last
        captured = self._captured or self._watch(modules, operations)
        self._find_fields(captured, batch)
        targets, outputs = run_and_differentiate(self.passes, captured, batch)
        if operations is not None and (missing := operations.missing()):
            raise LayerNotFoundError(missing)
        reached = {place: reaches(outputs[place].gradients, targets) for place in outputs if self._is_looked_at(place)}
        zero = {place: _unreached(targets, [marks]) for place, marks in reached.items() if not bool(marks.all(0).any())}
        layers = [outputs[place] for place in reached if place not in zero]
        for group in self.groups:
            if group.text not in self._worked:
                self._check(group, batch, layers, zero)
        partly = [layer.place for layer in layers if not bool(reached[layer.place].all())]
        if partly or not layers:
            places = partly or [*zero]
            unreached = _unreached(targets, [reached[place] for place in places])
            raise NotReachedError(unreached, [row_label(*place) for place in places])
        for place in zero:
            label = layer_words(row_label(*place))
            self.notes[f"{label}: inputs for which the gradient of a target is zero everywhere have no map."] = None
        return targets, layers

    def _check(
        self,
        group: LayerGroup,
        batch: Batch,
        layers: Sequence[MapLayer],
        unreached: Mapping[RowKey, Sequence[BatchTarget]],
    ) -> None:
        """Raise an error if no layer of a group can be explained; if some can, note those without a place.

        `unreached` maps each layer with a gradient that is zero everywhere to the targets of that gradient.
        """
        seen = {place: output for place, output in self.passes.outputs.by_place.items() if group.means(place)}
        flat = [place for place, output in seen.items() if isinstance(output.layout, str)]
        zero = [place for place in unreached if place in seen]
        if any(layer.place in seen for layer in layers):
            if flat:
                shown = some_of([row_label(*place) for place in flat], _NAMED)
                why = "layers with no place for the picture are left out"
                self.notes[f"{arg('layer')} {group.text}: {why}: {shown}."] = None
            self._worked.add(group.text)
            return
        text = safe_text(group.text)
        if not seen and group.operations is not None and not group.layers:
            called = f"The network's own code called no operation that {arg('layer')} {text} selects."
            raise LayerNotFoundError(f"{called} List them with {listing(ops=True)}.")
        ran = [row_label(*place) for place in self.passes.outputs.by_place if place[0] in group.layers]
        if not seen and ran:
            raise UsageError(f"{arg('layer')} {text} is no output of that layer: it has {some_of(ran, _NAMED)}.")
        if not seen:
            inputs = some_of([safe_text(record.name) for record in batch.records], 1)
            raise UsageError(f"{arg('layer')} {text} did not run for {inputs}: give a layer that runs.")
        place = (zero or flat)[-1]
        label, output = layer_words(row_label(*place)), seen[place]
        if zero:
            others = output.layout.others if isinstance(output.layout, Layout) else ""
            why = f"after it only {others} reaches the target" if others else "nothing leads from there to the target"
            problem = f"The gradient of {_names(unreached[place])} is zero everywhere at {label}: {why}."
        else:
            problem = f"{label} returns {shape_text(output.shape)}, which {output.layout}."
        raise UsageError(f"{problem}{self._nearest(batch, place[0])}")

    def _nearest(self, batch: Batch, layer: str) -> str:
        choice: MapLayer | None = None
        self.hooks.close()
        try:
            for before in (layer, None):
                self.passes.state.rewind()
                if choice is None:
                    targets, choice = run_and_choose(self.passes, batch, before=before)
                    if choice is not None and not bool(reaches(choice.gradients, targets).all(0).any()):
                        choice = None
        except ModelRaisedError:
            return ""
        if choice is None:
            no_layer = f"No layer works. Try {arg('method')} gradient, which needs no layer."
            return f" {self._one_at_a_time() or no_layer}"
        return f" Nearest layer that works: {row_label(*choice.place)}."


def _input_shape(batch: Batch) -> tuple[int, ...] | None:
    """Return the shape of one input; None if another argument with as many axes has other places."""
    tensor = main_input(batch)
    places = {item.shape[2:] if item.dim() > _SEQUENCE_AXES else item.shape[1:] for item in alike_inputs(batch)}
    return tuple(tensor.shape[1:]) if tensor is not None and len(places) == 1 else None


def _unreached(targets: Sequence[BatchTarget], reached: Sequence[Tensor]) -> list[BatchTarget]:
    """Return the targets whose gradient is zero at some layer for some input; `reached` has the marks of each layer."""
    return [target for at, target in enumerate(targets) if not all(bool(marks[at].all()) for marks in reached)]


def _names(targets: Sequence[BatchTarget]) -> str:
    labels = dict.fromkeys(share.label for target in targets for share in target.targets if share is not None)
    return " and ".join([repr(safe_text(label)) for label in labels][:2])
