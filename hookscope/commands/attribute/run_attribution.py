"""Run `attribute`: batches in, maps out; the network is left as it was."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product, zip_longest
from typing import cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hookscope import options
from hookscope.commands.attribute.batch_maps import Explained, explain
from hookscope.commands.attribute.cams import CAMS
from hookscope.commands.attribute.forward_backward import ForwardBackward, frozen, run_model
from hookscope.commands.attribute.input_places import input_size, main_input, places_of
from hookscope.commands.attribute.layer_choice import LayerOutputs
from hookscope.commands.attribute.map_layers import MapLayers, NotReachedError, given_layers
from hookscope.commands.attribute.sanity import Checking
from hookscope.commands.attribute.scores import NoBoxError, batch_targets
from hookscope.commands.attribute.targets import read_targets
from hookscope.errors import UnfitInputError, UsageError, nearest
from hookscope.hooks.forward_hooks import capture
from hookscope.inputs.batches import Batch, part_of
from hookscope.inspection.execution import execution_order
from hookscope.inspection.network import BatchQueue, InspectedNetwork, inspected_network
from hookscope.inspection.session import OnError, OnProgress, Session, batch_progress, run_fields, session_batches
from hookscope.inspection.state.preservation import preserved
from hookscope.parameters import arg
from hookscope.reporting.run_facts import input_names
from hookscope.results.attributions import AttributionMap, Attributions, LayerChoice, Method
from hookscope.results.inputs import PICTURE_AXES, SHOWN_INPUTS, InputRecord
from hookscope.statistics.layouts import parse_tokens
from hookscope.statistics.token_layout import TokenLayout
from hookscope.text import figure, layer_words, safe_text

# Classes of torch.ao.nn.quantized that compute in floating point, before quantisation.
_FLOATING = ("FloatFunctional", "FXFloatFunctional")


@dataclass(slots=True)
class _Gathered:
    """The results of a run so far; `without` has the inputs, by position, in which a detector found no such box."""

    network: nn.Module
    method: Method
    checking: Checking
    asked: Sequence[str]  # targets in the words of the user; [] for the best ones
    records: list[InputRecord] = field(default_factory=list)
    maps: list[AttributionMap] = field(default_factory=list)
    layers: dict[str, LayerChoice] = field(default_factory=dict)
    unchanged: dict[str, str] = field(default_factory=dict)
    without: dict[tuple[int, str], None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    input_values: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    no_box: NoBoxError | None = None

    def add(self, batch: Batch, explained: Explained) -> None:
        """Add the maps of a batch, by input, then by target, then by layer."""
        first, targets = len(self.records), explained.targets
        self.records.extend(batch.records)
        remarks = [note for part in explained.pixels for note in part.notes]
        remarks += [target.remark for target in targets if target.remark]
        if self.method == "grad-cam" and any(target.is_box for target in targets):
            remarks.append(
                "grad-cam averages gradients over the whole picture, so that boxes of one class look alike: "
                "hires-cam and layer-cam keep to the box."
            )
        self.notes |= dict.fromkeys(remarks)
        for part in explained.pixels:
            self.unchanged |= part.unchanged
        for layer in explained.layers:
            choice = LayerChoice(layer.label, layer.output.kind, layer.output.shape, layer.grid, layer.reason)
            self.layers.setdefault(layer.label, choice)
        axes, size = explained.maps[0][0].dim() - 1, input_size(self.network, batch)
        if axes != PICTURE_AXES and len(size) == axes:
            self.input_values |= _first_inputs(self.network, batch, first)
        for place in range(len(batch.records)):
            for at, (target, by_layer, pixels) in enumerate(zip_longest(targets, explained.maps, explained.pixels)):
                wanted = target.targets[place]
                if wanted is None:
                    if self.asked or not at:  # of the best boxes, an input may have fewer
                        self.without[first + place, self.asked[at] if self.asked else "box"] = None
                    continue
                is_shown = pixels is not None and first + place < SHOWN_INPUTS
                for (label, extents), maps in zip(explained.extents, by_layer, strict=True):
                    values = maps[place].numpy().copy()  # not a part of the batch's
                    kept = pixels.values[place].numpy().copy() if is_shown else None
                    positions = values.shape if values.ndim == 1 < len(size) else size  # a position for each word
                    placed = AttributionMap(first + place, wanted, label, values, extents[place], kept, positions)
                    self.maps.append(placed)

    def warnings(self) -> list[str]:
        """Return sentences about inputs without a target, and about maps that show nothing."""
        names = [*map(safe_text, input_names(tuple(self.records)))]
        lacking = [
            f"The network found no {words} in {names[index]}, so there is no such map." for index, words in self.without
        ]
        suspicious = (_suspicious(shown, names[shown.input_index], self.method) for shown in self.maps)
        return [*lacking, *filter(None, suspicious)]


def run_attribution(
    session: Session, option: options.Attribute, on_progress: OnProgress | None, on_error: OnError | None
) -> Attributions:
    """Explain the targets of all inputs."""
    targets, layers = [str(target) for target in cast("Sequence[str | int]", option.target)], option.layer
    _check_options(option, targets)
    inspected = inspected_network(session.loaded)
    _refuse_quantised(inspected)
    wanted = read_targets(targets, inspected.info.categories)
    tokens = None if option.tokens is None else parse_tokens(option.tokens)
    outputs = LayerOutputs(TokenLayout(inspected.network, tokens))
    queue = session_batches(session, option.batch_size, on_error)
    groups = given_layers(inspected, layers, lambda: execution_order(inspected.network, queue))
    checking = Checking(sanity=option.sanity, method=option.method, output_key=option.output_key, seed=session.seed)
    asked = [f"'{safe_text(query.text)}'" for query in wanted]
    gathered = _Gathered(inspected.network, option.method, checking, asked)
    finished = batch_progress(session, on_progress)
    targets_of = partial(
        batch_targets,
        wanted=wanted,
        top=option.top,
        categories=inspected.info.categories,
        output_key=option.output_key,
        multi_label=inspected.multi_label,
    )
    began = time.perf_counter()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        preserved(inspected.network, session.seed, modules=inspected.modules.values()) as state,
        frozen(inspected.modules),  # a graph from the first layer on would triple the time of a map
        capture(inspected.network, inspected.modules if option.method in CAMS else {}, outputs.observe) as capturing,
        ExitStack() as hooks,
    ):
        passes = ForwardBackward(
            inspected=inspected, targets_of=targets_of, state=state, outputs=outputs, capturing=capturing
        )
        map_layers = MapLayers(passes=passes, groups=groups, hooks=hooks)
        explain_batch = partial(_explain, queue=queue, map_layers=map_layers, gathered=gathered)
        run_model(queue, state, explain_batch, gathered.records, finished)
    if not gathered.records and session.unusable:
        raise session.unusable[0]
    if gathered.no_box is not None and not gathered.maps:
        raise gathered.no_box
    seconds = time.perf_counter() - began
    further = {name: getattr(option, name) for name in ("top", "tokens", "sanity")}
    checks = checking.judged()
    failed = [f"The sanity check '{check.name}' failed. {check.meaning}" for check in checks if check.passed is False]
    unclear = [f"The check '{check.name}' is inconclusive. {check.meaning}" for check in checks if check.passed is None]
    return Attributions(
        inputs=tuple(gathered.records),
        method=option.method,
        layers=tuple(gathered.layers.values()),
        maps=tuple(gathered.maps),
        warnings=tuple(dict.fromkeys((*inspected.warnings, *failed, *gathered.warnings(), *queue.remarks))),
        sanity=checks,
        input_values=gathered.input_values,
        unchanged=gathered.unchanged,
        notes=(*inspected.notes, *map_layers.notes, *gathered.notes, *checking.notes, *unclear),
        timings={"load": session.load_seconds, "maps": seconds - checking.seconds, "sanity": checking.seconds},
        **run_fields(session, inspected, layers, {"method": option.method, "targets": targets, **further}),
    )


def _check_options(option: options.Attribute, targets: Sequence[str]) -> None:
    method, methods = str(option.method), get_args(Method)
    if method not in methods:
        names = nearest(method, methods) or f" There are: {', '.join(methods)}."
        raise UsageError(f"There is no method '{safe_text(method)}'.{names}")
    if targets and option.top is not None:
        raise UsageError(
            f"{arg('target')} and {arg('top')} are both given: give either targets or how many of the best."
        )
    if option.layer and option.method not in CAMS:
        raise UsageError(f"{arg('method')} {option.method} looks at the input itself: leave out {arg('layer')}.")


def _refuse_quantised(inspected: InspectedNetwork) -> None:
    for name, module in inspected.modules.items():
        kind = type(module)
        is_quantised = kind.__module__.startswith("torch.ao.nn") and ".quantized" in kind.__module__
        if is_quantised and kind.__name__ not in _FLOATING:
            raise UsageError(
                f"{inspected.info.name} is quantised: {name or '(model)'} ({kind.__name__}) computes in whole numbers, "
                "which have no gradient. Explain the network as it was before quantisation."
            )


def _explain(batch: Batch, queue: BatchQueue, map_layers: MapLayers, gathered: _Gathered) -> None:
    """Add the maps of a batch; if no layer is reached for all of its inputs, run each input by itself."""
    try:
        explained = explain(map_layers, batch, gathered.method)
    except NoBoxError as error:  # other batches may have the target
        first = len(gathered.records)
        gathered.records.extend(batch.records)
        lacking = product(range(first, len(gathered.records)), gathered.asked or ["box"])
        gathered.without |= dict.fromkeys(lacking)
        gathered.no_box = gathered.no_box or error
        return
    except NotReachedError as error:
        count = len(batch.indices)
        if count == 1:
            names = [safe_text(record.name) for record in batch.records]
            queue.leave_out(UnfitInputError(names, f"{error}.", batch.indices))
            return
        for place in range(count):
            map_layers.passes.state.rewind()
            _explain(part_of(batch, place), queue, map_layers, gathered)
        return
    gathered.add(batch, explained)
    gathered.checking.add(map_layers.passes, batch, explained)


def _first_inputs(network: nn.Module, batch: Batch, first: int) -> dict[int, NDArray[np.float32]]:
    """Return the first inputs of a run as the network got them, (C, *size), by position in the run."""
    tensor = main_input(batch)
    if tensor is None:
        return {}
    values = places_of(network, tensor).by_channel(tensor.detach())
    count = min(len(values), SHOWN_INPUTS - first)
    return {first + place: values[place].to("cpu", torch.float32, copy=True).numpy() for place in range(count)}


def _suspicious(heat_map: AttributionMap, name: str, method: Method) -> str:
    """Return a warning if a map of the input `name` is flat, or its values or its score are not finite; else ""."""
    values, score, label = heat_map.values, heat_map.target.score, safe_text(heat_map.target.label)
    subject = f"The map of '{label}'{f' at {layer_words(heat_map.layer)}' if heat_map.layer else ''} for {name}"
    if not np.isfinite(values).all():
        return f"{subject} holds NaN or infinite values: look at `hookscope grads`."
    if not np.isfinite(score):
        return f"The score of '{label}' for {name} is {figure(score)}: look at `hookscope activations`."
    if values.max() == values.min():
        if values.max() != 0:
            return f"{subject} is the same everywhere."
        if method == "hires-cam":
            return (
                f"{subject} is 0 everywhere but for rounding: at each place, activations times gradients add up to 0, "
                f"as before a LayerNorm. Give {arg('layer')} of a layer after it, or take {arg('method')} grad-cam."
            )
        return f"{subject} is 0 everywhere: nothing there speaks for it."
    return ""
