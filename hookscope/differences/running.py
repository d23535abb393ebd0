"""Compare two networks on the same inputs: batches in, differences out, and nothing of either network changed."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from hookscope.differences.alignment import CallKey, Pairing, align, match_names
from hookscope.differences.births import with_origins
from hookscope.differences.compiled import Compiled, compile_in_blocks
from hookscope.differences.gradients import Differentiated, Forward, GradientDifferences, compare_gradients
from hookscope.differences.lockstep import strands
from hookscope.differences.maps import KeptMaps
from hookscope.differences.meeting import Meeting
from hookscope.differences.outputs import Outputs
from hookscope.differences.party import Finished, Party, looked_at, parameter_shapes, traced
from hookscope.differences.precision import coarsest_eps, precision_notes
from hookscope.differences.sharing import share_threads, take_turns, threads_kept
from hookscope.differences.sides import compiled_notes, different_inputs, in_float64, separate
from hookscope.differences.table import listed, not_matched, paired_rows, rows_by_place
from hookscope.differences.tolerances import exceeded, parse_condition
from hookscope.errors import HookscopeError, ModelError, NothingMatchedError, UnfitInputError, UsageError
from hookscope.hooks.forward_hooks import eager
from hookscope.hooks.selection import default_layers
from hookscope.inputs import Batch, copy_of, to_device
from hookscope.inspection.device import floating_dtype
from hookscope.inspection.losses import Loss
from hookscope.inspection.network import BatchQueue, InspectedNetwork, inspected_network, queue_of
from hookscope.inspection.rows import Recorder
from hookscope.inspection.run import choose
from hookscope.inspection.session import OnError, OnProgress, Session, provenance_of, reporter
from hookscope.inspection.state.preservation import Mode
from hookscope.models import LoadedModel
from hookscope.results.differences import DifferenceRow, Differences, Side
from hookscope.results.inputs import InputRecord


@dataclass(frozen=True, slots=True)
class Ways:
    """How a network is run.

    Attributes:
        threads: Number of CPU threads; None for torch's default.
        compiles: Whether it runs through torch.compile.
        texts: How it differs from the other network, for display: "train mode".
    """

    mode: Mode = "eval"
    autocast: str | None = None
    threads: int | None = None
    edits: Sequence[str] = ()
    compiles: bool = False
    texts: tuple[str, ...] = ()


@dataclass(slots=True)
class _Ran:
    """The results of a run so far."""

    records: list[InputRecord] = field(default_factory=list)
    first_error: ModelError | None = None
    pairing: Pairing = field(default_factory=lambda: Pairing({}))


def run_diff(
    session: Session,
    other: LoadedModel,
    *,
    ways_b: Ways,
    layers: Sequence[str],
    ops: bool,
    maps: Sequence[str],
    reference: bool,
    shadow: bool,
    fail_over: Sequence[str],
    batch_size: int,
    on_progress: OnProgress | None,
    on_error: OnError | None,
    loss: Loss | None = None,
    output_key: str | None = None,
) -> Differences:
    """Run the network of the session, A, and another one, B, side by side over all inputs.

    With a `loss` their gradients are compared afterwards.

    Arguments are those of `hookscope.diff`.

    Raises:
        UsageError: If an option cannot be right, or the networks return what cannot be compared.
        NothingMatchedError: If no layer of A has a partner in B.
        ModelError: If a network raised, with `on_error` on every input.
    """
    conditions = [parse_condition(text) for text in fail_over]
    _refuse(ways_b, shadow=shadow, ops=ops)
    apart = separate(session.loaded, other)
    a, b = inspected_network(session.loaded), inspected_network(apart)
    warnings = [*_warnings("A", a), *_warnings("B", b), *different_inputs(session.loaded, other)]
    report = reporter(session, on_error)
    queue = queue_of(session.inputs.batches(batch_size, report), report)
    parties = [
        _party("A", a, queue, session.seed, Ways(), layers=layers, ops=ops, keeps="inputs" if shadow else ""),
        _party("B", b, queue, session.seed, ways_b, ops=ops, keeps="states" if shadow else ""),
    ]
    if reference:
        parties.append(
            _party("The reference", in_float64(session.loaded, a), queue, session.seed, Ways(), layers=layers, ops=ops)
        )
    outputs = Outputs([each.inspected for each in parties], may_differ=bool(layers), output_key=output_key)
    began = time.perf_counter()
    ran = _Ran()
    count = len(session.inputs.files) or session.inputs.input_count()

    def advance() -> None:
        if on_progress is not None:
            on_progress(len(ran.records), count)

    meeting, compiled = _run_all(
        parties,
        queue,
        outputs,
        ran,
        maps,
        shadow=shadow,
        compiles=ways_b.compiles,
        chosen=bool(layers),
        advance=advance,
    )
    if not ran.records and (errors := [*filter(None, [ran.first_error]), *session.unusable]):
        raise errors[0]
    sizes = compiled.sizes if compiled else {}
    rows, births = with_origins(paired_rows(parties, meeting, ran.pairing), coarsest_eps(parties), sizes)
    shown = listed(rows, parties)
    if not shown:
        raise NothingMatchedError(
            f"No layer of A ({a.info.name}) has a partner in B ({b.info.name}): pair them with --map 'a.*=b.*'."
        )
    if outputs.remark:
        warnings.append(outputs.remark)
    found = outputs.results()
    if compiled:
        warnings += compiled.warnings(rows, found, coarsest_eps(parties), is_born=bool(births))
    gradients = GradientDifferences()
    if loss is not None:
        gradients = _gradients(
            session,
            apart,
            parties,
            ways_b,
            loss,
            ran.pairing,
            rows,
            compiled,
            layers=layers,
            ops=ops,
            batch_size=batch_size,
            report=report,
        )
    # An edit of a gradient is applied in the backward pass alone.
    edited = parties[1].edits.warnings() if loss is None else ()
    return Differences(
        a=Side(a.info, *a.placed),
        b=Side(b.info, *b.placed, ways_b.texts),
        way="lockstep",
        inputs=tuple(ran.records),
        rows=shown,
        gradients=gradients.rows,
        unmatched=not_matched(parties, meeting, ran.pairing, with_b=not layers),
        outputs=found,
        births=births,
        gradient_births=gradients.births,
        maps=meeting.maps.drawn(rows_by_place(shown, parties[0]), births),
        exceeded=exceeded(conditions, (*shown, *gradients.rows), found),
        reference="A's weights in float64" if reference else "",
        warnings=tuple(dict.fromkeys((*warnings, *gradients.notes, *edited, *queue.remarks))),
        notes=tuple(
            dict.fromkeys(
                (
                    *a.notes,
                    *b.notes,
                    *compiled_notes(session.loaded, other, compiles=ways_b.compiles),
                    *([compiled.note()] if compiled else []),
                    *parties[1].edits.notes(),
                    *precision_notes(parties),
                )
            )
        ),
        seed=session.seed,
        timings={"load": session.load_seconds, "compare": time.perf_counter() - began},
        provenance=provenance_of(session, layers, {"ops": ops, "map": [*maps], "shadow": shadow}),
    )


def _refuse(ways_b: Ways, *, shadow: bool, ops: bool) -> None:
    """Raise a UsageError for options that do not go together."""
    if shadow and ways_b.mode == "train":
        raise UsageError(
            "--shadow runs layers of B twice, which is only possible in eval mode: leave out --mode-b train."
        )
    inside = {"--ops": ops, "--edit-b": bool(ways_b.edits)}
    if ways_b.compiles and any(inside.values()):
        option = next(name for name, given in inside.items() if given)
        raise UsageError(f"{option} needs hooks inside of B, which compiled code does not run: leave out --compile-b.")


def _run_all(
    parties: Sequence[Party],
    queue: BatchQueue,
    outputs: Outputs,
    ran: _Ran,
    maps: Sequence[str],
    *,
    shadow: bool,
    compiles: bool,
    chosen: bool,
    advance: Callable[[], None],
) -> tuple[Meeting, Compiled | None]:
    """Pair the layers, and run the networks side by side over all batches."""
    first = queue.peek()
    compiled: Compiled | None = None
    if first is not None:
        if compiles:
            brought = [_for(each, first) for each in parties[:2]]
            compiled = compile_in_blocks(parties, brought, maps, chosen=chosen)
        ran.pairing = _pairing(parties, first, maps)
        _tell_partners(parties, ran.pairing)
    everyone = [*parties, *([compiled.whole] if compiled else [])]
    with (
        compiled.forwards() if compiled else nullcontext(),
        eager(),
        threads_kept(),
        strands([each.run for each in everyone]) as running,
    ):
        if compiled:
            compiled.strand = running[-1]
        # Dynamo's settings hold for all threads: if one network is compiled, they take turns. So they do if B waits at
        # each output to run its layer on A's inputs.
        threads = None if compiled or shadow else share_threads(parties)
        meeting = Meeting(parties, running[: len(parties)], KeptMaps(coarsest_eps(parties)), shadow, threads)
        for batch in queue:
            _run_batch(batch, queue, meeting, outputs, ran, compiled)
            advance()
        for each in running:
            each.finish()
    return meeting, compiled


def _gradients(
    session: Session,
    other: LoadedModel,
    parties: Sequence[Party],
    ways_b: Ways,
    loss: Loss,
    pairing: Pairing,
    activations: Sequence[DifferenceRow],
    compiled: Compiled | None,
    *,
    layers: Sequence[str],
    ops: bool,
    batch_size: int,
    report: OnError | None,
) -> GradientDifferences:
    """Compare the gradients of A and B after the passes without gradients."""
    known = {_input_of(error) for error in session.unusable}

    def told(error: HookscopeError) -> None:
        if report is not None and _input_of(error) not in known:
            report(error)

    on_error = None if report is None else told
    queue = queue_of(session.inputs.batches(batch_size, on_error), on_error)
    loaded = [session.loaded, other]
    if len(parties) > len(loaded):
        loaded.append(replace(session.loaded, module=parties[2].inspected.network))
    edits: tuple[Sequence[str], ...] = ((), ways_b.edits, ())
    patterns: tuple[Sequence[str], ...] = (layers, (), layers)
    threads = (None, ways_b.threads, None)
    sides = []
    for at, (each, party) in enumerate(zip(loaded, parties, strict=True)):
        options = {"layers": patterns[at], "ops": ops, "hooked": frozenset(party.hooked), "edits": edits[at]}
        options |= {"mode": party.mode, "autocast": party.autocast, "seed": session.seed}
        edited = frozenset(
            name for name, given in party.edits.by_name.items() if any(one.place == "grad" for one in given)
        )
        sides.append(Differentiated(each, partial(_for, party), options, threads[at], edited))
    whole: Differentiated | None = None
    if compiled is not None:
        sides[1] = replace(sides[1], around=compiled.forwards)
        loaded_whole = replace(other, module=compiled.whole.inspected.network)
        whole = replace(sides[1], loaded=loaded_whole, options={**sides[1].options, "hooked": frozenset()})
    forward = Forward(pairing, activations, coarsest_eps(parties), parties[0].lists)
    return compare_gradients(sides, queue, loss, forward, whole)


def _input_of(error: HookscopeError) -> object:
    """Return the identity of an unusable input: other passes may give another reason for it."""
    return error.indices if isinstance(error, UnfitInputError) else str(error)


def _party(
    side: str,
    inspected: InspectedNetwork,
    queue: BatchQueue,
    seed: int,
    ways: Ways,
    *,
    layers: Sequence[str] = (),
    ops: bool = False,
    keeps: Literal["inputs", "states", ""] = "",
) -> Party:
    recorder = Recorder(0, None, None)
    selected, operations, placed = choose(inspected, queue, layers, ways.edits, recorder, ops=ops)
    return Party(
        title=f"{side} ({inspected.info.name})",
        inspected=inspected,
        selected=selected,
        hooked=looked_at(inspected, selected),
        operations=operations,
        edits=placed,
        recorder=recorder,
        seed=seed,
        mode=ways.mode,
        autocast=getattr(torch, ways.autocast) if ways.autocast else None,
        threads=ways.threads,
        keeps=keeps,
    )


def _warnings(side: str, inspected: InspectedNetwork) -> list[str]:
    return [f"{side}: {text}" for text in inspected.warnings]


def _pairing(parties: Sequence[Party], batch: Batch, maps: Sequence[str]) -> Pairing:
    """Pair the layers by name, and the rest by order, type and shapes, which takes a forward pass of each network."""
    a, b = parties[:2]
    owned_a, owned_b = ({name: parameter_shapes(each) for name, each in side.hooked.items()} for side in (a, b))
    named = match_names(owned_a, owned_b, maps)
    # Parametrisations have no rows, but the operations that they call do.
    rest_a, rest_b = ([name for name in side.inspected.modules if name not in side.hooked] for side in (a, b))
    named = match_names(dict.fromkeys(rest_a, ()), dict.fromkeys(rest_b, ())) | named
    taken = {partner for partner, _ in named.values()}
    if all(name in named for name in a.selected) and all(name in taken for name in b.selected):
        return Pairing(named)
    # Containers that --layer selects in A may pair with containers of B.
    has_blocks = bool(a.selected.keys() - default_layers(a.inspected.modules))
    calls_a, calls_b = (
        [call for call in traced(side, _for(side, batch)) if call.key[0] in wanted or ":" in call.key[0]]
        for side, wanted in ((a, a.selected), (b, b.hooked if has_blocks else b.selected))
    )
    aligned, matched = align(calls_a, calls_b, named)
    around = {name for name in named if name not in a.selected}
    return Pairing(named, aligned, frozenset(matched | aligned.keys()), frozenset(around))


def _tell_partners(parties: Sequence[Party], pairing: Pairing) -> None:
    backwards = pairing.inverse()

    def of_a(key: CallKey) -> CallKey | None:
        return key if pairing.partner(key) is not None else None

    def of_b(key: CallKey) -> CallKey | None:
        found = backwards.partner(key)
        return None if found is None else found[0]

    for party, partner in zip(parties, (of_a, of_b, of_a), strict=False):
        party.partner = partner


def _run_batch(
    batch: Batch,
    queue: BatchQueue,
    meeting: Meeting,
    outputs: Outputs,
    ran: _Ran,
    compiled: Compiled | None,
) -> None:
    """Run one batch; with an `on_error`, split or leave out a batch that a network raises on."""
    finished = None
    while finished is None:
        for party in meeting.parties:
            party.batch = _for(party, batch)
        finished = meeting.run(len(ran.records), len(batch.indices))
        if meeting.needs_turns:
            take_turns(meeting)
    if compiled is not None:
        finished = compiled.ended(finished, _for(meeting.parties[1], batch))
    broken = next((each for each in finished if each.message), None)
    if broken is None:
        outputs.add([each.output for each in finished], len(ran.records), len(batch.indices))
        meeting.keep()
        ran.records.extend(batch.records)
        return
    _leave_out(batch, broken, queue, meeting, ran)


def _leave_out(batch: Batch, broken: Finished, queue: BatchQueue, meeting: Meeting, ran: _Ran) -> None:
    error = ModelError(broken.message)
    if queue.on_error is None or broken.error is None:
        raise error from broken.error
    if queue.set_aside(batch, broken.message, broken.error):
        ran.first_error = ran.first_error or error
    for party in meeting.parties:
        party.rewinds = True


def _for(party: Party, batch: Batch) -> Batch:
    """Return a copy of a batch on the device and in the dtype of the party's network."""
    network = party.inspected.network
    return to_device(copy_of(batch), party.inspected.placed[0], floating_dtype(network))
