"""Compare two networks over batches of inputs, and leave both unchanged."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import groupby
from operator import attrgetter

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from hookscope import options
from hookscope.commands.diff.alignment import Call, Pairing, align, containers_of, is_inside, match_names
from hookscope.commands.diff.compare_gradients import GradientComparison
from hookscope.commands.diff.compare_outputs import Outputs
from hookscope.commands.diff.difference_maps import KeptMaps
from hookscope.commands.diff.first_differences import with_origins
from hookscope.commands.diff.hooked_network import (
    HookedNetwork,
    coarsest_precision,
    layers_to_hook,
    parameter_shapes,
    traced,
)
from hookscope.commands.diff.passes import Passes
from hookscope.commands.diff.row_pairs import difference_rows, unmatched
from hookscope.commands.diff.tolerances import exceeded, parse_condition
from hookscope.commands.diff.torch_compile import Compiled, compile_in_blocks
from hookscope.commands.diff.values import A, B
from hookscope.errors import LayerNotFoundError, ModelError, NothingMatchedError, UsageError
from hookscope.hooks.selection import default_layers
from hookscope.inputs.batches import Batch
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inspection.differentiation import GradientOptions
from hookscope.inspection.edit_placement import ParameterEdits, edit_parameters, split_edits
from hookscope.inspection.edits import Edit
from hookscope.inspection.losses.choosing import Loss
from hookscope.inspection.network import BatchQueue, InspectedNetwork, inspected_network, queued
from hookscope.inspection.rows import Recorder
from hookscope.inspection.run import choose
from hookscope.inspection.session import OnError, OnProgress, Session, batch_progress, provenance_of, reporter
from hookscope.inspection.state.preservation import Mode
from hookscope.models.construction import LoadedModel, copied
from hookscope.parameters import arg
from hookscope.results.differences import DifferenceRow, Differences, Match, Side
from hookscope.statistics.token_layout import TokenLayout
from hookscope.text import counted, exception_line, printable, some_of

# Modules of torch that compute something else in training mode.
_WITH_MODES = (_NormBase, _DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.RReLU)


@dataclass(frozen=True, slots=True)
class _BatchPair(Batch):
    """A batch of A and its partner for B; `records` has both records, so that errors name both."""

    of_a: Batch | None = None
    of_b: Batch | None = None


def _paired_inputs(a: InputPipeline, b: InputPipeline, report: OnError | None) -> Iterator[_BatchPair]:
    """Yield A's inputs one by one, each with B's; pairs with an unusable input are left out and reported."""
    count, count_b = a.input_count(), b.input_count()
    if count != count_b:
        raise UsageError(
            f"A is given {counted(count, 'input')}, and B {count_b} by {arg('input_b')}: give one for each, in the "
            "same order."
        )
    position = attrgetter("indices")
    for _, group in groupby(merge(a.batches(1, report), b.batches(1, report), key=position), key=position):
        pair = [*group]
        if len(pair) == 2:
            fields = {name: getattr(pair[0], name) for name in Batch.__slots__}
            records = (*pair[0].records, *pair[1].records)
            yield _BatchPair(**fields | {"records": records}, of_a=pair[0], of_b=pair[1])


def compare_networks(
    session: Session,
    other: LoadedModel,
    option: options.Diff,
    *,
    inputs_b: InputPipeline | None,
    loss: Loss | None,
    on_progress: OnProgress | None,
    on_error: OnError | None,
) -> Differences:
    """Run the network of the session, A, and the network `other`, B, over all inputs.

    With a `loss`, gradients are compared too. With `inputs_b`, one for each input of A, inputs run one by one.

    Raises:
        UsageError: If options contradict each other, or the outputs of the networks cannot be compared.
        NothingMatchedError: If no layer of A has a partner in B.
        ModelError: If a network raised; with `on_error`, if one raised on every input.
    """
    conditions = [parse_condition(text) for text in option.fail_over]
    report = reporter(session.unusable, on_error)
    if inputs_b is None:
        queue = queued(session.inputs, option.batch_size, report)
    else:
        queue = BatchQueue(_paired_inputs(session.inputs, inputs_b, report), report)
    networks, made = _hooked_networks(session, other, option, queue, same_inputs=inputs_b is None)
    began = time.perf_counter()
    pairing, compiled = _pair_and_compile(networks, queue.peek(), option)
    precisions = {network.title: coarsest_precision(network) for network in networks[:2]}
    eps, _ = max(precisions.values())
    passes = Passes(
        networks,
        Outputs(networks, may_differ=bool(option.layer), output_key=option.output_key),
        KeptMaps(eps),
        compiled,
        None if loss is None else GradientComparison(networks, compiled.whole if compiled else None, loss, pairing),
        shadow=option.shadow,
    )
    passes.run(queue, batch_progress(session, on_progress))
    if not passes.records and session.unusable:
        raise session.unusable[0]
    outputs, sizes = passes.outputs.results(), compiled.sizes if compiled else {}
    paired = difference_rows(networks, passes.rows, pairing)
    every_row, first_differences = with_origins(paired, eps, sizes, outputs, same_inputs=inputs_b is None)
    rows = _selected_rows(every_row, networks)
    gradients: tuple[DifferenceRow, ...] = ()
    first_gradient = ""
    if passes.gradients is not None:
        gradients, first_gradient = passes.gradients.result(every_row, eps, networks[A].has_row)
    a, b = networks[A].inspected, networks[B].inspected
    warnings = [
        *(f"A: {text}" for text in a.warnings),
        *(f"B: {text}" for text in b.warnings),
        *_preprocessing_warnings(session.loaded, other),
        *filter(None, [passes.outputs.remark]),
        *(compiled.warnings(every_row, outputs, eps) if compiled else ()),
        *(passes.gradients.notes if passes.gradients else ()),
        # Edits of gradients are only applied in a backward pass.
        *(networks[B].edits.warnings() if loss is None else ()),
        *made.warnings,
        *queue.remarks,
    ]
    notes = [
        *a.notes,
        *b.notes,
        *_training_notes(a, b, option.mode_b),
        *_compiled_notes(session.loaded, other, compiles=option.compile_b),
        *([compiled.note()] if compiled else []),
        *networks[B].edits.notes(),
        *made.notes,
        *(
            f"{title} multiplies in TF32, with 10 bits of mantissa, as torch does on CUDA unless told not to."
            for title, (_, name) in precisions.items()
            if name == "TF32"
        ),
    ]
    return Differences(
        a=Side(a.info, *a.placed),
        b=Side(b.info, *b.placed, (*_ways_of_b(option), *["other inputs"] * (inputs_b is not None))),
        way="networks",
        inputs=tuple(passes.records),
        inputs_b=() if inputs_b is None else tuple(passes.records_b),
        rows=rows,
        gradients=gradients,
        unmatched=tuple(unmatched(networks, passes.rows, pairing, with_b=not option.layer)),
        outputs=outputs,
        first_differences=first_differences,
        first_gradient_difference=first_gradient,
        maps=passes.maps.drawn(rows, first_differences),
        exceeded=exceeded(conditions, (*rows, *gradients), outputs),
        reference="A's weights in float64" if option.reference else "",
        warnings=tuple(dict.fromkeys(warnings)),
        notes=tuple(dict.fromkeys(notes)),
        seed=session.seed,
        timings={"load": session.load_seconds, "compare": time.perf_counter() - began},
        provenance=provenance_of(
            session, option.layer, {"ops": option.ops, "map": [*option.map], "shadow": option.shadow}
        ),
    )


def _ways_of_b(option: options.Diff) -> list[str]:
    texts = [] if option.autocast_b is None else [f"autocast to {option.autocast_b}"]
    texts += ["train mode"] * (option.mode_b == "train")
    texts += [] if option.threads_b is None else [f"threads: {option.threads_b}"]
    texts += [f"edit {edit}" for edit in option.edit_b]
    return texts + ["compiled"] * option.compile_b


def _hooked_networks(
    session: Session, other: LoadedModel, option: options.Diff, queue: BatchQueue, *, same_inputs: bool
) -> tuple[list[HookedNetwork], ParameterEdits]:
    """Return A, B and the optional reference, A in float64; and the edits of B's parameters."""
    values, edits = split_edits(option.edit_b)
    modules_a = {id(module) for module in session.loaded.module.modules()}
    if values or any(id(module) in modules_a for module in other.module.modules()):
        other = copied(other)
    made = edit_parameters(other.module, values) if values else ParameterEdits(())
    a, b = inspected_network(session.loaded), inspected_network(other)
    of_a = GradientOptions(layers=option.layer, ops=option.ops, seed=session.seed, include_inputs=True)
    networks = [_hooked_network("A", a, of_a, queue)]
    has_operations = networks[A].operations is not None
    _refuse(option, edits, same_inputs=same_inputs, has_operations=has_operations)
    autocast = getattr(torch, option.autocast_b) if option.autocast_b else None
    # Patterns are over A's names: which operations of B are partners follows from the pairing.
    of_b = replace(of_a, layers=(), ops=has_operations, edits=edits, mode=option.mode_b, autocast=autocast)
    networks.append(_hooked_network("B", b, of_b, queue))
    networks[B].cpu_threads = option.threads_b
    if option.reference:
        networks.append(_hooked_network("The reference", _in_float64(session.loaded, a), of_a, queue))
    if not same_inputs:
        networks[A].own_inputs, networks[B].own_inputs = attrgetter("of_a"), attrgetter("of_b")
    return networks, made


def _selected_rows(every_row: Sequence[DifferenceRow], networks: Sequence[HookedNetwork]) -> tuple[DifferenceRow, ...]:
    """Return the rows of layers that are selected in A; raise an error if there are none, or a pattern selects none."""
    operations = networks[A].operations
    if operations is not None and (missing := operations.missing()):
        raise LayerNotFoundError(missing)
    selected = [row for row in every_row if networks[A].has_row(row.layer, row.label)]
    if not selected:
        a, b = (
            f"{side.inspected.info.name}, {counted(len(side.inspected.modules) - 1, 'module')}" for side in networks[:2]
        )
        raise NothingMatchedError(
            f"No row is in both: no layer of A ({a}) that changes its input has a partner in B ({b}). Pair layers of "
            f"different networks with {arg('map')} 'a.*=b.*'."
        )
    return tuple(selected)


def _refuse(option: options.Diff, edits: Sequence[str | Edit], *, same_inputs: bool, has_operations: bool) -> None:
    if option.reference and not same_inputs:
        raise UsageError(f"{arg('reference')} runs on A's inputs, so B needs the same: leave out {arg('input_b')}.")
    if option.shadow and option.mode_b == "train":
        raise UsageError(
            f"{arg('shadow')} runs layers of B twice, which is only possible in eval mode: leave out "
            f"{arg('mode_b')} train."
        )
    operations = arg("ops") if option.ops else f"An operation in {arg('layer')}"
    inside = [operations] * has_operations + [arg("edit_b")] * bool(edits)
    if option.compile_b and inside:
        raise UsageError(
            f"{inside[0]} needs hooks inside of B, which compiled code does not run: leave out {arg('compile_b')}."
        )


def _hooked_network(
    side: str, inspected: InspectedNetwork, options: GradientOptions, queue: BatchQueue
) -> HookedNetwork:
    recorder = Recorder(0, None, None)
    recorder.token_layout = TokenLayout(inspected.network) if side == "A" else None  # maps have A's layout
    selected, operations, placed = choose(inspected, queue, options, recorder.axes)
    return HookedNetwork(
        title=f"{side} ({inspected.info.name})",
        inspected=inspected,
        selected=selected,
        hooked=layers_to_hook(inspected, selected, chosen=bool(options.layers) or options.ops),
        operations=operations,
        edits=placed,
        recorder=recorder,
        options=options,
    )


def _pair_and_compile(
    networks: Sequence[HookedNetwork], batch: Batch | None, option: options.Diff
) -> tuple[Pairing, Compiled | None]:
    """Pair the layers by the first batch, set the partners of the networks, and compile B with `compile_b`."""
    if batch is None:
        return Pairing({}), None
    chosen = bool(option.layer)
    compiled = compile_in_blocks(networks, batch, option.map, chosen=chosen) if option.compile_b else None
    pairing = _pairing(networks, batch, option.map, chosen=chosen)
    backwards = pairing.inverse()
    for network in networks:
        network.partner = lambda key: key if pairing.partner(key) is not None else None
    networks[B].partner = lambda key: None if (pair := backwards.partner(key)) is None else pair[0]
    return pairing, compiled


def _pairing(networks: Sequence[HookedNetwork], batch: Batch, maps: Sequence[str], *, chosen: bool) -> Pairing:
    """Pair layers by name, and the rest by order, type and shapes, which needs a forward pass of both networks."""
    a, b = networks[:2]
    owned_a, owned_b = ({name: parameter_shapes(module) for name, module in side.hooked.items()} for side in (a, b))
    named = match_names(owned_a, owned_b, maps)
    # Parametrisations have no rows, but the operations that they call do.
    rest_a, rest_b = ([name for name in side.inspected.modules if name not in side.hooked] for side in (a, b))
    named = match_names(dict.fromkeys(rest_a, ()), dict.fromkeys(rest_b, ())) | named
    wrapped_a, wrapped_b = _wrappers(a, b, named, chosen=chosen)
    for network in networks:
        wrapped = wrapped_b if network is b else wrapped_a
        network.selected = {**network.selected, **{name: network.hooked[name] for name in wrapped}}
    taken = {partner for partner, _ in named.values()}
    if all(name in named for name in a.selected) and all(name in taken for name in b.selected):
        return Pairing(named)
    # Containers that --layer selects in A may pair with containers of B.
    has_blocks = bool(a.selected.keys() - wrapped_a - default_layers(a.inspected.modules))
    traced_a, traced_b = (traced(side, batch) for side in (a, b))
    calls_a = _alignable(traced_a, a.selected, wrapped_a, named)
    calls_b = _alignable(traced_b, b.hooked if has_blocks else b.selected, wrapped_b, taken)
    return Pairing(named, align(calls_a, calls_b, named))


def _wrappers(
    a: HookedNetwork, b: HookedNetwork, named: Mapping[str, tuple[str, Match]], *, chosen: bool
) -> tuple[set[str], set[str]]:
    """Return the modules of A, and of B, that have parts and are paired by name with a single layer.

    Such a module is compared with that layer. If layers were `chosen`, A's modules are among them.
    """
    around_a, around_b = (containers_of(side.hooked) & side.hooked.keys() for side in (a, b))
    wrapped_a = {
        name for name in around_a if name in named and named[name][0] in b.selected and named[name][0] not in around_b
    }
    wrapped_b = {named[name][0] for name in a.selected if name in named and name not in around_a}
    return wrapped_a & a.selected.keys() if chosen else wrapped_a, wrapped_b & around_b


def _alignable(calls: Sequence[Call], layers: Collection[str], wrapped: set[str], named: Collection[str]) -> list[Call]:
    """Return the calls of layers and operations; inside a `wrapped` module that runs, only of layers in `named`."""
    running = wrapped & {call.key[0] for call in calls}

    def is_alignable(layer: str) -> bool:
        is_chosen = layer in layers or ":" in layer
        return is_chosen and (layer in named or not any(is_inside(layer, module) for module in running))

    return [call for call in calls if is_alignable(call.key[0])]


def _in_float64(loaded: LoadedModel, inspected: InspectedNetwork) -> InspectedNetwork:
    try:
        module = copied(replace(loaded, module=inspected.network)).module.double()
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"{inspected.info.name} cannot run in float64 on {inspected.placed[0]}: {exception_line(error)}. "
            f"Leave out {arg('reference')}, or give {arg('device')} cpu."
        ) from error
    return replace(inspected_network(module), info=inspected.info)


def _preprocessing_warnings(loaded: LoadedModel, other: LoadedModel) -> list[str]:
    first, two = loaded.preprocessing, other.preprocessing
    names = f"A ({loaded.info.name})", f"B ({other.info.name})"
    if first.kind != two.kind:
        raise UsageError(f"{names[0]} takes inputs of kind '{first.kind}', {names[1]} of kind '{two.kind}'.")
    if first.mean != two.mean or first.std != two.std or first.crop != two.crop or first.resize != two.resize:
        return [f"{names[1]} expects different preprocessing: both get A's."]
    return []


def _compiled_notes(loaded: LoadedModel, other: LoadedModel, *, compiles: bool) -> list[str]:
    return [
        f"{letter} is compiled, and runs uncompiled here: {arg('compile_b')} compares what is compiled."
        for letter, model in (("A", loaded), *([] if compiles else [("B", other)]))
        if "_orig_mod" in model.module._modules
    ]


def _training_notes(a: InspectedNetwork, b: InspectedNetwork, mode_b: Mode) -> list[str]:
    """Return notes about modules that were in training mode and run in eval mode.

    There are none if both networks were entirely in training mode, the default until `eval` is called.
    """
    notes: list[str] = []
    modes = [{name: module.training for name, module in side.modules.items()} for side in (a, b)]
    if all(flag for training in modes for flag in training.values()):
        return notes
    for letter, side, mode, training in zip("AB", (a, b), ("eval", mode_b), modes, strict=True):
        trained = [name for name in side.modules if training[name] and mode != "train"]
        names = [name for name in trained if any(map(_may_have_modes, side.modules[name].modules()))]
        if not names:
            continue
        # A module with all parts in training mode is named in their place; any other is named for its own code.
        whole = [name for name in names if all(training[part] for part in training if is_inside(part, name))]
        shown = [name for name in names if not any(is_inside(name, module) for module in whole)]
        at = [printable(name, 80) or "(model)" for name in shown]
        where = "" if "" in whole else f" at {some_of(at, 3)}"
        option = f", unless {arg('mode_b')} train is given" if letter == "B" else ""
        notes.append(f"{letter} was in training mode{where}, and runs in eval mode here{option}.")
    return notes


def _may_have_modes(module: nn.Module) -> bool:
    """Tell whether a module may compute something else in training mode; few of torch's modules do."""
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return not is_torchs or isinstance(module, _WITH_MODES)
