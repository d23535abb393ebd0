"""Compare two networks on the same inputs: batches in, differences out, and nothing of either network changed."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from hookscope import options
from hookscope.commands.diff.alignment import Call, CallKey, Pairing, align, around, inside_any, match_names
from hookscope.commands.diff.compare_gradients import Differentiated, GradientComparison, GradientDifferences
from hookscope.commands.diff.compare_outputs import Outputs
from hookscope.commands.diff.compared import REFERENCE, A, B
from hookscope.commands.diff.compared_networks import (
    compiled_notes,
    different_inputs,
    in_float64,
    separate,
    training_notes,
)
from hookscope.commands.diff.difference_maps import KeptMaps
from hookscope.commands.diff.first_differences import with_origins
from hookscope.commands.diff.hooked_network import (
    HookedNetwork,
    coarsest_eps,
    layers_to_hook,
    parameter_shapes,
    precision_notes,
    traced,
)
from hookscope.commands.diff.paired_rows import paired_rows, rows_by_place, unmatched
from hookscope.commands.diff.passes import Passes
from hookscope.commands.diff.tolerances import exceeded, parse_condition
from hookscope.commands.diff.torch_compile import Compiled, compile_in_blocks
from hookscope.errors import ModelError, NothingMatchedError, UsageError
from hookscope.hooks.selection import default_layers
from hookscope.hooks.tracing import eager
from hookscope.inputs import Batch
from hookscope.inputs.batches import copy_of, to_device
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inspection.backward import PassError
from hookscope.inspection.device import placement
from hookscope.inspection.differentiation import GradientOptions
from hookscope.inspection.edits import Edit
from hookscope.inspection.losses import Loss
from hookscope.inspection.network import BatchQueue, InspectedNetwork, inspected_network
from hookscope.inspection.parameter_edits import ParameterEdits, edit_parameters, split_edits
from hookscope.inspection.rows import Recorder
from hookscope.inspection.run import Break, choose, run_batches
from hookscope.inspection.session import OnError, OnProgress, Session, batch_progress, provenance_of, session_batches
from hookscope.inspection.state.preservation import Mode
from hookscope.models import LoadedModel
from hookscope.models.construction import copied
from hookscope.parameters import arg
from hookscope.results.differences import DifferenceRow, Differences, Match, Side
from hookscope.results.inputs import InputRecord
from hookscope.statistics.token_layout import TokenLayout
from hookscope.text import counted


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a network is run.

    Attributes:
        threads: Number of CPU threads; None for torch's default.
        compiles: Whether it runs through torch.compile.
        texts: How it differs from the other network, for display: "train mode".
    """

    mode: Mode = "eval"
    autocast: str | None = None
    threads: int | None = None
    edits: Sequence[str | Edit] = ()
    compiles: bool = False
    texts: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """Networks that are compared, and what is known so far.

    Attributes:
        networks: A, B and, if there is one, the reference.
        maps: As for `--map`.
        records: Of the inputs that every network ran on.
        compiled: B, if it runs through torch.compile.
    """

    networks: Sequence[HookedNetwork]
    queue: BatchQueue
    outputs: Outputs
    maps: Sequence[str]
    records: list[InputRecord] = field(default_factory=list)
    pairing: Pairing = field(default_factory=lambda: Pairing({}))
    compiled: Compiled | None = None

    def pair(self, *, compiles: bool, chosen: bool) -> None:
        """Pair the layers; `chosen` is whether `--layer` chose those of A."""
        first = self.queue.peek()
        if first is not None:
            if compiles:
                brought = [_placed_for(network, first) for network in self.networks[:2]]
                self.compiled = compile_in_blocks(self.networks, brought, self.maps, chosen=chosen)
            self.pairing = _pairing(self.networks, first, self.maps, chosen=chosen)
            _set_partners(self.networks, self.pairing)

    def run(self, finished: Callable[[int], None], *, shadow: bool, gradients: GradientComparison | None) -> Passes:
        """Run the networks over all batches; `finished` is called after each with the number of inputs that have run.

        Raises:
            ModelError: If a network raised, with an `on_error` of the queue on every input.
        """
        whole = None if self.compiled is None else self.compiled.whole
        passes = Passes(self.networks, KeptMaps(coarsest_eps(self.networks)), shadow, whole)

        def run_batch(batch: Batch) -> Break | None:
            count, first_input = len(batch.indices), len(self.records)
            ends = passes.run(partial(_placed_for, batch=batch), first_input, count)
            if self.compiled is not None:
                self.compiled.check(ends)
            failed = next((end for end in ends if end.message), None)
            if failed is not None:
                return Break(failed.message, error=failed.error)
            returned = self.outputs.chosen([end.output for end in ends])
            if gradients is not None:
                try:
                    gradients.add(batch, first_input)
                except PassError as error:
                    passes.rewind()
                    return Break(str(error), error=error.__cause__)
            self.outputs.add(returned, first_input, count)
            passes.keep()
            self.records.extend(batch.records)
            return None

        with ExitStack() as block:
            if self.compiled is not None:
                block.enter_context(self.compiled.forwards())
            block.enter_context(eager())
            for network in (*self.networks, *([] if whole is None else [whole])):
                block.enter_context(network.prepared())
            ended = run_batches(
                self.queue, run_batch, self.records, finished, keep=lambda _batch: None, undo=lambda: None
            )
        if ended is not None:
            raise ModelError(ended[0].message) from ended[0].error
        return passes


@dataclass(slots=True)
class _OtherInputs:
    """Inputs that B is given in place of A's, one for each, batch by batch.

    Attributes:
        records: Of those that were handed out, by index.
    """

    batches: Iterator[Batch]
    records: dict[int, InputRecord] = field(default_factory=dict)
    _latest: Batch | None = None

    def instead_of(self, batch: Batch) -> Batch:
        """Return B's batch for one of A's, of one input; A's come in order, the first several times."""
        index = batch.indices[0]
        while self._latest is None or self._latest.indices[0] < index:
            self._latest = next(self.batches)
        self.records[index] = self._latest.records[0]
        return self._latest


def _other_inputs(a: InputPipeline, b: InputPipeline) -> _OtherInputs:
    """Pair inputs; raise a UsageError unless there are as many of B's as of A's."""
    count, count_b = a.input_count(), b.input_count()
    if count != count_b:
        raise UsageError(
            f"A is given {counted(count, 'input')}, and B {count_b} by {arg('input_b')}: give one for each, in "
            "the same order."
        )
    return _OtherInputs(b.batches(1))


def compare_networks(
    session: Session,
    other: LoadedModel,
    option: options.Diff,
    options_b: RunOptions,
    *,
    inputs_b: InputPipeline | None,
    loss: Loss | None,
    on_progress: OnProgress | None,
    on_error: OnError | None,
) -> Differences:
    """Run the network of the session, A, and another one, B, over all inputs.

    With a `loss` their gradients are compared too. B may have `inputs_b`, as many; they then run one by one.

    Raises:
        UsageError: If an option cannot be right, or the networks return what cannot be compared.
        NothingMatchedError: If no layer of A has a partner in B.
        ModelError: If a network raised, with `on_error` on every input.
    """
    layers, shadow = option.layer, option.shadow
    conditions = [parse_condition(text) for text in option.fail_over]
    values, edits = split_edits(options_b.edits)
    options_b = replace(options_b, edits=edits)
    _refuse(options_b, shadow=shadow, ops=option.ops)
    apart = copied(other) if values else separate(session.loaded, other)
    made = edit_parameters(apart.module, values) if values else ParameterEdits(())
    others = None if inputs_b is None else _other_inputs(session.inputs, inputs_b)
    batch_size = option.batch_size if others is None else 1
    queue = session_batches(session, batch_size, on_error)
    networks = _hooked_networks(session, apart, option, options_b, queue)
    if others is not None:
        networks[B].own_inputs = others.instead_of
    outputs = Outputs([side.inspected for side in networks], may_differ=bool(layers), output_key=option.output_key)
    comparison = _Comparison(networks=networks, queue=queue, outputs=outputs, maps=option.map)
    finished = batch_progress(session, on_progress)
    began = time.perf_counter()
    comparison.pair(compiles=options_b.compiles, chosen=bool(layers))
    compared = None
    if loss is not None:
        sides, whole = _differentiated(session, apart, comparison)
        compared = GradientComparison(sides, whole, loss, comparison.pairing)
    passes = comparison.run(finished, shadow=shadow, gradients=compared)
    if not comparison.records and session.unusable:
        raise session.unusable[0]
    compiled, eps = comparison.compiled, coarsest_eps(networks)
    paired = paired_rows(networks, passes.rows, comparison.pairing)
    every_row, first_differences = with_origins(
        paired, eps, compiled.sizes if compiled else {}, same_inputs=others is None
    )
    rows = _rows_of_a(every_row, networks)
    results = outputs.results()
    gradients = GradientDifferences()
    if compared is not None:
        gradients = compared.result(every_row, eps, networks[A].has_rows)
    about_compiling = compiled.warnings(every_row, results, eps, differs=bool(first_differences)) if compiled else ()
    # An edit of a gradient is applied in the backward pass alone.
    about_edits = networks[B].edits.warnings() if loss is None else ()
    warnings = _warnings(session, other, comparison, *about_compiling, *gradients.notes, *about_edits, *made.warnings)
    a, b = networks[A].inspected, networks[B].inspected
    return Differences(
        a=Side(a.info, *a.placed),
        b=Side(b.info, *b.placed, options_b.texts),
        way="networks",
        inputs=tuple(comparison.records),
        inputs_b=() if others is None else tuple(others.records.values())[: len(comparison.records)],
        rows=rows,
        gradients=gradients.rows,
        unmatched=unmatched(networks, passes.rows, comparison.pairing, with_b=not layers),
        outputs=results,
        first_differences=first_differences,
        first_gradient_difference=gradients.first,
        maps=passes.maps.drawn(rows_by_place(rows, networks[A]), first_differences),
        exceeded=exceeded(conditions, (*rows, *gradients.rows), results),
        reference="A's weights in float64" if option.reference else "",
        warnings=warnings,
        notes=_notes(session, other, comparison, options_b, made.notes),
        seed=session.seed,
        timings={"load": session.load_seconds, "compare": time.perf_counter() - began},
        provenance=provenance_of(session, layers, {"ops": option.ops, "map": [*option.map], "shadow": shadow}),
    )


def _hooked_networks(
    session: Session, other: LoadedModel, option: options.Diff, options_b: RunOptions, queue: BatchQueue
) -> list[HookedNetwork]:
    """Return A, B and, if it is asked for, the reference: A's weights in float64."""
    a, b = inspected_network(session.loaded), inspected_network(other)
    hooked = partial(_hooked_network, queue=queue, seed=session.seed, ops=option.ops)
    networks = [
        hooked("A", a, RunOptions(), layers=option.layer, keeps="inputs" if option.shadow else ""),
        hooked("B", b, options_b, keeps="states" if option.shadow else ""),
    ]
    if option.reference:
        networks.append(hooked("The reference", in_float64(session.loaded, a), RunOptions(), layers=option.layer))
    return networks


def _rows_of_a(every_row: Sequence[DifferenceRow], networks: Sequence[HookedNetwork]) -> tuple[DifferenceRow, ...]:
    """Return the rows of the layers that were selected in A; raise a NothingMatchedError if there are none."""
    selected = [row for row in every_row if networks[A].has_rows(row.layer)]
    if not selected:
        a, b = (
            f"{side.inspected.info.name}, {counted(len(side.inspected.modules) - 1, 'module')}" for side in networks[:2]
        )
        raise NothingMatchedError(
            f"A and B are different networks: no layer of A ({a}) has a partner in B ({b}). Pair layers with "
            f"{arg('map')} 'a.*=b.*'."
        )
    return tuple(selected)


def _warnings(session: Session, other: LoadedModel, comparison: _Comparison, *measured: str) -> tuple[str, ...]:
    """Return the warnings about the networks, about what was `measured`, and about inputs, in this order."""
    a, b = (network.inspected for network in comparison.networks[:2])
    texts = [
        *(f"A: {text}" for text in a.warnings),
        *(f"B: {text}" for text in b.warnings),
        *different_inputs(session.loaded, other),
        *filter(None, [comparison.outputs.remark]),
        *measured,
        *comparison.queue.remarks,
    ]
    return tuple(dict.fromkeys(texts))


def _notes(
    session: Session, other: LoadedModel, comparison: _Comparison, options_b: RunOptions, about_edits: Sequence[str]
) -> tuple[str, ...]:
    a, b = (network.inspected for network in comparison.networks[:2])
    compiled = comparison.compiled
    texts = [
        *a.notes,
        *b.notes,
        *training_notes(a, b, options_b.mode),
        *compiled_notes(session.loaded, other, compiles=options_b.compiles),
        *([compiled.note()] if compiled else []),
        *comparison.networks[B].edits.notes(),
        *about_edits,
        *precision_notes(comparison.networks),
    ]
    return tuple(dict.fromkeys(texts))


def _refuse(options_b: RunOptions, *, shadow: bool, ops: bool) -> None:
    if shadow and options_b.mode == "train":
        raise UsageError(
            f"{arg('shadow')} runs layers of B twice, which is only possible in eval mode: leave out "
            f"{arg('mode_b')} train."
        )
    inside = {arg("ops"): ops, arg("edit_b"): bool(options_b.edits)}
    if options_b.compiles and any(inside.values()):
        option = next(name for name, enabled in inside.items() if enabled)
        raise UsageError(
            f"{option} needs hooks inside of B, which compiled code does not run: leave out {arg('compile_b')}."
        )


def _differentiated(
    session: Session, other: LoadedModel, comparison: _Comparison
) -> tuple[list[Differentiated], Differentiated | None]:
    """Return how each network is differentiated, and the whole of B if B is compiled in blocks."""
    networks, compiled = comparison.networks, comparison.compiled
    loaded = [session.loaded, other]
    if len(networks) > len(loaded):
        loaded.append(replace(session.loaded, module=networks[REFERENCE].inspected.network))
    differentiated = []
    for model, network in zip(loaded, networks, strict=True):
        options = replace(network.options, hooked=frozenset(network.hooked))
        differentiated.append(Differentiated(model, partial(_placed_for, network), options, network.cpu_threads))
    if compiled is None:
        return differentiated, None
    b = differentiated[B]
    loaded_whole = replace(other, module=compiled.whole.inspected.network)
    return differentiated, replace(b, loaded=loaded_whole, options=replace(b.options, hooked=()))


def _hooked_network(
    side: str,
    inspected: InspectedNetwork,
    options: RunOptions,
    *,
    queue: BatchQueue,
    seed: int,
    layers: Sequence[str] = (),
    ops: bool,
    keeps: Literal["inputs", "states", ""] = "",
) -> HookedNetwork:
    recorder = Recorder(0, None, None)
    recorder.token_layout = TokenLayout(inspected.network) if side == "A" else None  # maps lie as in A
    observed = GradientOptions(
        layers=layers,
        ops=ops,
        edits=options.edits,
        seed=seed,
        include_inputs=True,
        mode=options.mode,
        autocast=getattr(torch, options.autocast) if options.autocast else None,
    )
    selected, operations, placed = choose(inspected, queue, observed, recorder.axes)
    return HookedNetwork(
        title=f"{side} ({inspected.info.name})",
        inspected=inspected,
        selected=selected,
        hooked=layers_to_hook(inspected, selected, chosen=bool(layers) or ops),
        operations=operations,
        edits=placed,
        recorder=recorder,
        options=observed,
        cpu_threads=options.threads,
        keeps=keeps,
    )


def _pairing(networks: Sequence[HookedNetwork], batch: Batch, maps: Sequence[str], *, chosen: bool) -> Pairing:
    """Pair the layers by name, and the rest by order, type and shapes, which takes a forward pass of each network."""
    a, b = networks[:2]
    owned_a, owned_b = ({name: parameter_shapes(module) for name, module in side.hooked.items()} for side in (a, b))
    named = match_names(owned_a, owned_b, maps)
    # Parametrisations have no rows, but the operations that they call do.
    rest_a, rest_b = ([name for name in side.inspected.modules if name not in side.hooked] for side in (a, b))
    named = match_names(dict.fromkeys(rest_a, ()), dict.fromkeys(rest_b, ())) | named
    wrapped_a, wrapped_b = _wrapped(a, b, named, chosen=chosen)
    for network in networks:
        wrapped = wrapped_b if network is b else wrapped_a
        network.selected = {**network.selected, **{name: network.hooked[name] for name in wrapped}}
    taken = {partner for partner, _ in named.values()}
    if all(name in named for name in a.selected) and all(name in taken for name in b.selected):
        return Pairing(named)
    # Containers that --layer selects in A may pair with containers of B.
    has_blocks = bool(a.selected.keys() - wrapped_a - default_layers(a.inspected.modules))
    traced_a, traced_b = (traced(side, _placed_for(side, batch)) for side in (a, b))
    calls_a = _to_align(traced_a, a.selected, wrapped_a, named)
    calls_b = _to_align(traced_b, b.hooked if has_blocks else b.selected, wrapped_b, taken)
    aligned, matched = align(calls_a, calls_b, named)
    unselected = frozenset(name for name in named if name not in a.selected)
    return Pairing(named, aligned, frozenset(matched | aligned.keys()), unselected)


def _wrapped(
    a: HookedNetwork, b: HookedNetwork, named: Mapping[str, tuple[str, Match]], *, chosen: bool
) -> tuple[set[str], set[str]]:
    """Return the modules of A, and those of B, that have parts where the other network has one layer of that name.

    They are compared with that layer, whatever is inside. Where layers of A were chosen, A's are those among them.
    """
    around_a, around_b = (around(side.hooked) & side.hooked.keys() for side in (a, b))
    wrapped_a = {
        name for name in around_a if name in named and named[name][0] in b.selected and named[name][0] not in around_b
    }
    wrapped_b = {named[name][0] for name in a.selected if name in named and name not in around_a}
    return wrapped_a & a.selected.keys() if chosen else wrapped_a, wrapped_b & around_b


def _to_align(calls: Sequence[Call], layers: Collection[str], wrapped: set[str], named: Collection[str]) -> list[Call]:
    """Return the calls of layers and operations; parts of a `wrapped` module that runs have a partner by name alone."""
    running = wrapped & {call.key[0] for call in calls}
    return [
        call
        for call in calls
        if (call.key[0] in layers or ":" in call.key[0]) and (call.key[0] in named or not inside_any(call, running))
    ]


def _set_partners(networks: Sequence[HookedNetwork], pairing: Pairing) -> None:
    backwards = pairing.inverse()

    def of_a(key: CallKey) -> CallKey | None:
        return key if pairing.partner(key) is not None else None

    def of_b(key: CallKey) -> CallKey | None:
        pair = backwards.partner(key)
        return None if pair is None else pair[0]

    for network, partner in zip(networks, (of_a, of_b, of_a), strict=False):
        network.partner = partner


def _placed_for(network: HookedNetwork, batch: Batch) -> Batch:
    """Return a copy of a batch, or of the network's own, on the device and in the dtype of a network."""
    inspected = network.inspected
    return to_device(copy_of(network.own_inputs(batch)), *placement(inspected.network))
