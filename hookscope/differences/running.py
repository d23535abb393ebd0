"""Compare two networks on the same inputs: batches in, differences out, and nothing of either network changed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from hookscope.differences.alignment import CallKey, Pairing, align, match_names
from hookscope.differences.births import with_origins
from hookscope.differences.gradients import Differentiated, compare_gradients
from hookscope.differences.lockstep import strands
from hookscope.differences.maps import KeptMaps
from hookscope.differences.meeting import Meeting
from hookscope.differences.outputs import Outputs
from hookscope.differences.party import Finished, Party, looked_at, parameter_shapes, traced
from hookscope.differences.table import listed, not_matched, paired_rows, rows_by_place
from hookscope.differences.tolerances import exceeded, parse_condition
from hookscope.errors import HookscopeError, ModelError, NothingMatchedError, UnfitInputError, UsageError
from hookscope.hooks.forward_hooks import eager
from hookscope.inputs import Batch, copy_of, to_device
from hookscope.inspection.device import floating_dtype
from hookscope.inspection.losses import Loss
from hookscope.inspection.network import BatchQueue, InspectedNetwork, inspected_network, queue_of
from hookscope.inspection.rows import Recorder
from hookscope.inspection.run import choose
from hookscope.inspection.session import OnError, OnProgress, Session, provenance_of, reporter
from hookscope.inspection.state.preservation import Mode
from hookscope.models import LoadedModel
from hookscope.models.construction import copied
from hookscope.results.differences import DifferenceRow, Differences, Side
from hookscope.results.inputs import InputRecord
from hookscope.text import exception_line


@dataclass(frozen=True, slots=True)
class Ways:
    """How a network is run.

    Attributes:
        threads: Of the CPU; None for as many as torch takes.
        texts: What of it is not as in the other one, for people: "train mode".
    """

    mode: Mode = "eval"
    autocast: str | None = None
    threads: int | None = None
    edits: Sequence[str] = ()
    texts: tuple[str, ...] = ()


@dataclass(slots=True)
class _Ran:
    """What a run has come to so far."""

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
) -> Differences:
    """Run the network of the session, A, and another one, B, side by side over all inputs.

    With a `loss` both are differentiated after that too.

    Arguments are those of `hookscope.diff`.

    Raises:
        UsageError: If an option cannot be right, or the networks return what cannot be compared.
        NothingMatchedError: If no layer of A has a partner in B.
        ModelError: If a network raised, with `on_error` on every input.
    """
    conditions = [parse_condition(text) for text in fail_over]
    if shadow and ways_b.mode == "train":
        raise UsageError("--shadow runs layers of B twice, which eval mode alone allows: leave out --mode-b train.")
    separate = _separate(session.loaded, other)
    a, b = inspected_network(session.loaded), inspected_network(separate)
    warnings = [*_warnings("A", a), *_warnings("B", b), *_different_inputs(session.loaded, other)]
    report = reporter(session, on_error)
    queue = queue_of(session.inputs.batches(batch_size, report), report)
    parties = [
        _party("A", a, queue, session.seed, Ways(), layers=layers, ops=ops, keeps="inputs" if shadow else ""),
        _party("B", b, queue, session.seed, ways_b, ops=ops, keeps="autocast" if shadow else ""),
    ]
    if reference:
        parties.append(
            _party("The reference", _in_float64(session.loaded, a), queue, session.seed, Ways(), layers=layers, ops=ops)
        )
    outputs = Outputs([each.inspected for each in parties], may_differ=bool(layers))
    began = time.perf_counter()
    ran = _Ran()
    count = len(session.inputs.files) or session.inputs.input_count()
    first = queue.peek()
    if first is not None:
        ran.pairing = _pairing(parties, first, maps)
        _tell_partners(parties, ran.pairing)
    with eager(), _threads_kept(), strands([each.run for each in parties]) as running:
        meeting = Meeting(parties, running, KeptMaps(_eps(parties)), shadow, _share_threads(parties))
        for batch in queue:
            _run_batch(batch, queue, meeting, outputs, ran)
            if on_progress is not None:
                on_progress(len(ran.records), count)
        for each in running:
            each.finish()
    if not ran.records and (errors := [*filter(None, [ran.first_error]), *session.unusable]):
        raise errors[0]
    rows, births = with_origins(paired_rows(parties, meeting, ran.pairing), _eps(parties))
    shown = listed(rows, parties)
    if not shown:
        raise NothingMatchedError(
            f"No layer of A ({a.info.name}) has a partner in B ({b.info.name}): pair them with --map 'a.*=b.*'."
        )
    if outputs.remark:
        warnings.append(outputs.remark)
    found = outputs.results()
    gradients, remarks = _gradients(
        session,
        separate,
        parties,
        ways_b,
        loss,
        layers=layers,
        maps=maps,
        ops=ops,
        batch_size=batch_size,
        report=report,
    )
    return Differences(
        a=Side(a.info, *a.placed),
        b=Side(b.info, *b.placed, ways_b.texts),
        way="lockstep",
        inputs=tuple(ran.records),
        rows=shown,
        gradients=gradients,
        unmatched=not_matched(parties, meeting, ran.pairing, with_b=not layers),
        outputs=found,
        births=births,
        maps=meeting.maps.drawn(rows_by_place(shown, parties[0]), births),
        exceeded=exceeded(conditions, (*shown, *gradients), found),
        reference="A's weights in float64" if reference else "",
        warnings=tuple(dict.fromkeys((*warnings, *remarks, *parties[1].edits.warnings(), *queue.remarks))),
        notes=tuple(dict.fromkeys((*a.notes, *b.notes, *_precision_notes(parties)))),
        seed=session.seed,
        timings={"load": session.load_seconds, "compare": time.perf_counter() - began},
        provenance=provenance_of(session, layers, {"ops": ops, "map": [*maps], "shadow": shadow}),
    )


def _gradients(
    session: Session,
    other: LoadedModel,
    parties: Sequence[Party],
    ways_b: Ways,
    loss: Loss | None,
    *,
    layers: Sequence[str],
    maps: Sequence[str],
    ops: bool,
    batch_size: int,
    report: OnError | None,
) -> tuple[tuple[DifferenceRow, ...], tuple[str, ...]]:
    """Compare the gradients of A and B, once the passes without gradients are over; without a loss there are none."""
    if loss is None:
        return (), ()
    known = {_input_of(error) for error in session.unusable}

    def told(error: HookscopeError) -> None:
        if report is not None and _input_of(error) not in known:
            report(error)

    on_error = None if report is None else told
    queue = queue_of(session.inputs.batches(batch_size, on_error), on_error)
    sides = [
        Differentiated(loaded, partial(_for, party), options, threads)
        for loaded, party, options, threads in zip(
            (session.loaded, other),
            parties,
            ({"layers": layers}, {"edits": ways_b.edits}),
            (None, ways_b.threads),
            strict=False,
        )
    ]
    for side, party in zip(sides, parties, strict=False):
        side.options.update(ops=ops, mode=party.mode, autocast=party.autocast, seed=session.seed)
    return compare_gradients(sides[0], sides[1], queue, loss, maps)


def _input_of(error: HookscopeError) -> object:
    """Return what tells which input cannot be used: the other passes may give another reason."""
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
    keeps: Literal["inputs", "autocast", ""] = "",
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


def _separate(loaded: LoadedModel, other: LoadedModel) -> LoadedModel:
    """Return the other network, as a copy if it has modules of the first."""
    own = {id(module) for module in loaded.module.modules()}
    return copied(other) if any(id(module) in own for module in other.module.modules()) else other


def _in_float64(loaded: LoadedModel, inspected: InspectedNetwork) -> InspectedNetwork:
    """Return a copy of a network with its weights in float64."""
    try:
        module = copied(replace(loaded, module=inspected.network)).module.double()
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"{inspected.info.name} cannot run in float64 on {inspected.placed[0]}: {exception_line(error)}. "
            "Leave out --reference, or give --device cpu."
        ) from error
    return replace(inspected_network(module), info=inspected.info)


def _different_inputs(loaded: LoadedModel, other: LoadedModel) -> list[str]:
    """Return a warning if both networks want pictures prepared in different ways.

    Raises:
        UsageError: If they take inputs of different kinds.
    """
    one, two = loaded.preprocessing, other.preprocessing
    names = f"A ({loaded.info.name})", f"B ({other.info.name})"
    if one.kind != two.kind:
        raise UsageError(f"{names[0]} takes inputs of kind '{one.kind}', {names[1]} of kind '{two.kind}'.")
    if one.mean != two.mean or one.std != two.std or one.crop != two.crop or one.resize != two.resize:
        return [f"{names[1]} was made for inputs prepared in another way: both are given A's."]
    return []


def _warnings(side: str, inspected: InspectedNetwork) -> list[str]:
    return [f"{side}: {text}" for text in inspected.warnings]


def _pairing(parties: Sequence[Party], batch: Batch, maps: Sequence[str]) -> Pairing:
    """Pair the layers by name, and if that leaves some, by order, type and shapes, which takes a pass of each."""
    a, b = parties[:2]
    owned_a, owned_b = ({name: parameter_shapes(each) for name, each in side.hooked.items()} for side in (a, b))
    named = match_names(owned_a, owned_b, maps)
    taken = {partner for partner, _ in named.values()}
    if all(name in named for name in a.selected) and all(name in taken for name in b.selected):
        return Pairing(named)
    calls_a, calls_b = (
        [call for call in traced(side, _for(side, batch)) if call.key[0] in side.selected or ":" in call.key[0]]
        for side in (a, b)
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


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Restore the count of threads after the block, which threads that begin later take over."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _share_threads(parties: Sequence[Party]) -> int | None:
    """Give each party its share of the CPU's threads, to run at the same time; return how many there are.

    None if they are to take turns: they run elsewhere, or so many threads are asked for.

    Parties that took turns would have a team of OpenMP threads each, of which one spins while the other one works.
    """
    threads = torch.get_num_threads()
    if threads == 1 or any(party.threads is not None or party.inspected.placed[0] != "cpu" for party in parties):
        return None
    share = max(1, threads // len(parties))
    for party in parties:
        party.threads = share
    torch.set_num_threads(share)  # of this thread, which compares what they have
    return threads


def _take_turns(meeting: Meeting) -> None:
    """Let parties that ran at the same time go back to before the batch, and take turns, each with all threads."""
    threads, meeting.shared_threads = meeting.shared_threads, None
    if threads is None:
        return
    torch.set_num_threads(threads)
    for party, strand in zip(meeting.parties, meeting.strands, strict=True):
        strand.call(partial(torch.set_num_threads, threads))
        party.rewinds = True


def _run_batch(batch: Batch, queue: BatchQueue, meeting: Meeting, outputs: Outputs, ran: _Ran) -> None:
    """Run one batch; one that a network raises on is taken apart or left out, if there is an `on_error`."""
    finished = None
    while finished is None:
        for party in meeting.parties:
            party.batch = _for(party, batch)
        finished = meeting.run(len(ran.records), len(batch.indices))
        if finished is None:
            _take_turns(meeting)
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
    """Return a copy of a batch, where and in which dtype the party's network takes it."""
    network = party.inspected.network
    return to_device(copy_of(batch), party.inspected.placed[0], floating_dtype(network))


def _eps(parties: Sequence[Party]) -> float:
    """Return the machine epsilon of the coarsest dtype that A and B compute in."""
    return max(_epsilons(party)[0] for party in parties[:2])


def _epsilons(party: Party) -> tuple[float, str]:
    device, dtype = party.inspected.placed
    kinds = [getattr(torch, dtype)] if dtype != "none" else [torch.float32]
    kinds += [party.autocast] if party.autocast else []
    known = [(torch.finfo(kind).eps, str(kind).removeprefix("torch.")) for kind in kinds]
    if device.startswith("cuda") and torch.float32 in kinds and torch.backends.cudnn.allow_tf32:
        known.append((2.0**-10, "TF32"))  # its mantissa has 10 bits
    return max(known)


def _precision_notes(parties: Sequence[Party]) -> list[str]:
    return [
        f"{party.title} multiplies in TF32, with 10 bits of mantissa, as torch does on CUDA unless told not to."
        for party in parties[:2]
        if _epsilons(party)[1] == "TF32"
    ]
