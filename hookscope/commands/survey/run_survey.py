"""Survey a data set: measure the chunks of this process, wait for those of others, and merge all in their order.

Files are the protocol. Processes that torchrun has started, or shards of a cluster's array, measure different chunks
and write them into one folder. Merging reads them in order, so the result is the same bit for bit however many
processes there were.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from hookscope import options
from hookscope.commands.survey.chunk_files import Sidecar, damage, digest_of, read_chunk, read_sidecar, write_chunk
from hookscope.commands.survey.failures import SecondPass
from hookscope.commands.survey.feature_files import FeatureTarget
from hookscope.commands.survey.features import FeatureSpool
from hookscope.commands.survey.heartbeat import Heartbeat
from hookscope.commands.survey.judged_inputs import InputJudge
from hookscope.commands.survey.measure_chunk import MeasuredChunk, MeasureOptions, measure_chunk
from hookscope.commands.survey.merge import Merging
from hookscope.commands.survey.plan import FORMAT, ChunkFolder, PlacedField, Plan, Share, cut, in_order
from hookscope.commands.survey.signature import common_signature, differing, inputs_signature, names_digest
from hookscope.commands.survey.supports import InputSupports
from hookscope.errors import InputError, OutputError, UsageError
from hookscope.hooks.pytree import tensors_in
from hookscope.inputs.labelled_files import LabelledFiles, find_labelled
from hookscope.inputs.named import named_batch
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inspection.cost import Call, receptive_fields
from hookscope.inspection.forward import ForwardOptions
from hookscope.inspection.network import inspected_network
from hookscope.inspection.session import OnProgress, Session, package_versions
from hookscope.parameters import arg
from hookscope.results.survey import Survey
from hookscope.text import counted, exception_line, safe_text, some_of

# Inputs whose means are kept to find duplicate channels.
SAMPLE = 512

_BETWEEN_LOOKS = 0.2  # seconds, while other processes work
_LONGEST_BARRIER = 1800.0


@dataclass(frozen=True, slots=True)
class SurveyPlace:
    """Where chunks and features go, and which inputs are measured.

    Attributes:
        labelled: Files with their classes; None without classes.
        features: Where features go; None without them.
        share: That of this process; None for all, or for torchrun's.
    """

    folder: ChunkFolder
    labelled: LabelledFiles | None = None
    features: FeatureTarget | None = None
    share: Share | None = None


@dataclass(slots=True)
class _Work:
    """A survey under way in this process.

    Attributes:
        heartbeat: Of this process among several; None for a single one.
        resumed: Chunks that were there already.
    """

    session: Session
    option: options.Survey
    place: SurveyPlace
    plan: Plan
    parts: list[InputPipeline]
    on_progress: OnProgress | None
    heartbeat: Heartbeat | None = None
    is_begun: bool = False
    resumed: set[int] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def signature(self, index: int) -> dict[str, str]:
        """Return the signature of a chunk."""
        part = self.parts[index]
        return {**self.plan.signature, "inputs": inputs_signature(part.files, part.batch)}

    def progress(self, finished: int) -> None:
        """Report how many inputs are finished by this process, and with it those of others.

        Raises:
            InputError: If another process has ended before it was done.
        """
        if self.heartbeat is not None:
            self.heartbeat.finished = finished
            finished = self.heartbeat.listen()
        if self.on_progress is not None:
            share = self.place.share or Share()
            self.on_progress(finished, sum(self.plan.chunk_sizes[index] for index in _chunks_of(self, share)))


def labelled_inputs(images: object) -> LabelledFiles:
    """Return the files of a folder of class folders, or of a CSV file, with their classes.

    Raises:
        UsageError: If more than one source is given.
        InputError: As `find_labelled`.
    """
    sources = images if isinstance(images, list | tuple) else [images]
    if len(sources) != 1 or not isinstance(sources[0], str | Path):
        raise UsageError(
            f"{arg('by_class')} takes one folder with a folder for each class in it, or one CSV of paths and labels."
        )
    try:
        return find_labelled(Path(sources[0]))
    except InputError as error:
        raise InputError(str(error).replace(arg("data"), arg("by_class"))) from error


def place_on_own_device(device: str) -> str:
    """Return the accelerator of this process where torchrun started several; else what is given."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = os.environ.get("LOCAL_RANK", "")
    if _launched() is None or device not in ("auto", "cuda") or not count or not local.isdecimal():
        return device
    return f"cuda:{int(local) % count}"


def run_survey(
    session: Session, option: options.Survey, place: SurveyPlace, on_progress: OnProgress | None = None
) -> Survey | None:
    """Survey the inputs of a session.

    Returns:
        The survey; None for a process that measures a part of it and does not merge.

    Raises:
        UsageError: If options contradict each other, or an unfinished survey is there and `resume` is not set.
        OutputError: If a chunk cannot be written.
        ForwardError: If the network raised on every input of a chunk, at first.
    """
    began = time.perf_counter()
    share = place.share or Share()
    is_launched = place.share is None and _launched() is not None
    if is_launched:
        share = _launched() or share
    work = _begun(session, option, place, on_progress)
    done = [index for index in _chunks_of(work, place.share or Share()) if place.folder.files(index).sidecar.exists()]
    if done and not option.resume:
        raise OutputError(
            f"'{safe_text(str(place.folder.path))}' holds {counted(len(done), 'finished chunk')} of an unfinished "
            f"survey. Go on with {arg('resume')}, or delete it to begin anew."
        )
    if is_launched:
        _barrier(place.folder, share)
    place.folder.make()
    place.folder.write_plan(work.plan)
    work.heartbeat = Heartbeat(place.folder, share) if is_launched else None
    with nullcontext() if work.heartbeat is None else work.heartbeat.beating():
        for index in _chunks_of(work, share):
            if not (option.resume and _is_finished(work, index)):
                _measure(work, index, share)
        if place.share is not None:
            return None
        if is_launched and share.index:
            place.folder.mark_done(share)
            return None
        if is_launched:
            _wait_for_others(work, share)
    work.heartbeat = None
    merged = _merged(work)
    timings = {"load": session.load_seconds, "survey": time.perf_counter() - began}
    return replace(merged, timings=timings)


def merge_survey(folder: ChunkFolder) -> Survey:
    """Merge the finished chunks of shards, and write the features where the shards were told to.

    Raises:
        InputError: If a chunk is missing, damaged, or was made with another signature.
    """
    plan = folder.read_plan()
    missing = [index for index in range(len(plan.chunk_sizes)) if read_sidecar(folder.files(index)) is None]
    if missing:
        chunks = some_of(missing, 3)
        raise InputError(
            f"Cannot merge '{safe_text(str(folder.path))}': of {counted(len(plan.chunk_sizes), 'chunk')} these "
            f"are missing or damaged: {chunks}. Run their shards with {arg('resume')}."
        )
    target = FeatureTarget(Path(plan.features), plan.pool, plan.feature_dtype) if plan.features else None
    merging = Merging(plan, target)
    for index in range(len(plan.chunk_sizes)):
        files = folder.files(index)
        sidecar = read_sidecar(files)
        reason = "it is missing" if sidecar is None else _foreign(sidecar, plan.signature) or damage(files, sidecar)
        chunk = None if reason or sidecar is None else read_chunk(files, sidecar)
        if chunk is None or sidecar is None:
            where = safe_text(str(folder.path))
            raise InputError(f"Cannot merge chunk {index} of '{where}': {reason}. Run its shard with {arg('resume')}.")
        merging.add(chunk, files, sidecar)
    return merging.result()


def _begun(session: Session, option: options.Survey, place: SurveyPlace, on_progress: OnProgress | None) -> _Work:
    inputs = session.inputs
    if inputs.named and not (inputs.files or inputs.batch or inputs.noise):  # all arguments, by name
        inputs = replace(inputs, batch=named_batch(inputs.named), named=())
    if inputs.named or inputs.noise:
        raise UsageError("A survey takes files, pictures or tensors: give a folder or a glob.")
    if inputs.preprocessing.kind == "flow":
        raise UsageError(
            "This network compares each frame with the next: a survey, which takes inputs one by one, cannot."
        )
    inputs = replace(inputs, files=in_order(inputs.files))
    parts = cut(inputs, option.chunk_size)
    plan = _plan(session, option, place, parts)
    return _Work(session, option, place, plan, parts, on_progress)


def _plan(session: Session, option: options.Survey, place: SurveyPlace, parts: Sequence[InputPipeline]) -> Plan:
    loaded, inputs = session.loaded, session.inputs
    subject = inspected_network(loaded)
    labelled, features = place.labelled, place.features
    classes = () if labelled is None else tuple(sorted({label for (label,) in labelled.labels.values()}))
    settings = {
        "layers": " ".join(option.layer),
        "operations": option.ops,
        "batch size": option.batch_size,
        "chunk size": option.chunk_size,
        "chunks": len(parts),
        "top": option.top,
        "classes": names_digest(classes),
        "class names": names_digest(loaded.info.categories) if classes else "",
        "features": "" if features is None else f"{features.pool} {features.dtype}",
        "seed": session.seed,
        "dtype": str(inputs.dtype),
    }
    device, dtype = subject.placed
    fields, spatial = _fields(session, parts[0])
    return Plan(
        format=FORMAT,
        signature=common_signature(subject.network, inputs.device, inputs.preprocessing, settings),
        model=loaded.info,
        preprocessing=inputs.preprocessing,
        chunk_sizes=tuple(len(part.files) or len(part.batch.indices if part.batch else ()) for part in parts),
        chunk_size=option.chunk_size,
        batch_size=option.batch_size,
        patterns=tuple(option.layer),
        classes=classes,
        features="" if features is None else str(features.path.absolute()),
        pool="avg" if features is None else features.pool,
        feature_dtype="float32" if features is None else features.dtype,
        seed=session.seed,
        device=device.partition(":")[0],
        dtype=dtype,
        versions=package_versions(),
        threads=torch.get_num_threads(),
        fields=fields,
        spatial=spatial,
        labels_source="" if labelled is None else labelled.source,
    )


def _fields(session: Session, first: InputPipeline) -> tuple[tuple[PlacedField, ...], tuple[int, ...]]:
    """Return the receptive fields of calls, found with the first input that can be read."""
    batch = next(iter(replace(first, pictures={}).batches(1, lambda _error: None)), None)
    if batch is None:
        return (), ()
    pictures = [tensor for _, tensor in tensors_in(batch.args) if tensor.is_floating_point()]
    spatial = tuple(pictures[0].shape[2:]) if len(pictures) == 1 else ()
    network = inspected_network(session.loaded).network
    fields, _ = receptive_fields(Call(network, batch.args, batch.kwargs))
    return tuple(
        PlacedField(layer, call, receptive_field) for (layer, call), receptive_field in fields.items()
    ), spatial


def _chunks_of(work: _Work, share: Share) -> list[int]:
    return [index for index in range(len(work.parts)) if share.holds(index)]


def _is_finished(work: _Work, index: int) -> bool:
    """Tell whether a chunk is there, whole, and made as it would be made now."""
    files = work.place.folder.files(index)
    sidecar = read_sidecar(files)
    if sidecar is None:
        return False
    different = differing(sidecar.signature, work.signature(index))
    reason = f"made with other {some_of(different, 3)}" if different else damage(files, sidecar)
    reason = reason or ("" if _has_same_inputs(sidecar, work.parts[index]) else "its inputs have changed")
    if reason:
        work.reasons.append(f"Chunk {index} was measured again: {reason}.")
        return False
    work.resumed.add(index)
    return True


def _foreign(sidecar: Sidecar, signature: Mapping[str, str]) -> str:
    recorded = {name: value for name, value in sidecar.signature.items() if name != "inputs"}
    different = differing(recorded, signature)
    return f"it was made with other {some_of(different, 3)}" if different else ""


def _has_same_inputs(sidecar: Sidecar, part: InputPipeline) -> bool:
    """Tell whether files that were measured are there as they were."""
    recorded = {record.sha256 for record in sidecar.inputs if record.sha256 is not None}
    if not all(isinstance(file, Path) for file in part.files):  # the signature has pictures in memory; clips by name
        return True
    current: set[str] = set()
    for path in part.files:
        with suppress(OSError):
            current.add(digest_of(Path(str(path))))
    return recorded <= current


def _measure(work: _Work, index: int, share: Share) -> None:
    """Measure a chunk of a share, and write it."""
    option, place, session = work.option, work.place, work.session
    labelled = place.labelled
    numbers = {name: number for number, name in enumerate(work.plan.classes)}
    chunks = len(work.parts)
    per_chunk = max(1, SAMPLE // chunks)
    features = place.features
    measuring = MeasureOptions(
        observed=ForwardOptions(
            layers=option.layer, ops=option.ops, with_activations=True, seed=session.seed, distributions=True
        ),
        batch_size=option.batch_size,
        top=option.top,
        sample=per_chunk,
        sample_step=max(1, option.chunk_size // per_chunk)
        if chunks > 1
        else max(1, work.plan.chunk_sizes[0] // SAMPLE),
        class_of=None if labelled is None else lambda name: numbers[labelled.labels_of(name)[0]],
        new_features=None if features is None else partial(FeatureSpool, features.pool, features.dtype),
        new_judge=None
        if labelled is None
        else partial(
            InputJudge, labelled, work.plan.classes, session.loaded.info.categories, session.inputs.preprocessing
        ),
    )
    before = _finished_of(work, share, index)
    chunk = measure_chunk(
        session.loaded,
        replace(work.parts[index], pictures={}),
        measuring,
        is_first=not work.is_begun,
        verify=option.verify and index == 0,
        on_batch=lambda finished: work.progress(before + finished),
    )
    work.is_begun = True
    write_chunk(place.folder.files(index), chunk, work.signature(index))


def _finished_of(work: _Work, share: Share, current: int | None = None) -> int:
    """Return the inputs of the chunks of a share that are finished, but for the current one."""
    done = (
        chunk
        for chunk in _chunks_of(work, share)
        if chunk != current and work.place.folder.files(chunk).sidecar.exists()
    )
    return sum(work.plan.chunk_sizes[chunk] for chunk in done)


def _merged(work: _Work) -> Survey:
    """Merge all chunks; one that is missing or damaged is measured again."""
    merging = Merging(work.plan, work.place.features)
    for index in range(len(work.parts)):
        loaded = _whole_chunk(work, index)
        if loaded is None:
            _measure(work, index, Share())
            loaded = _whole_chunk(work, index)
        if loaded is None:
            where = safe_text(str(work.place.folder.path))
            raise OutputError(f"Chunk {index} in '{where}' was damaged as soon as it was written. Check the disk.")
        merging.add(loaded[0], work.place.folder.files(index), loaded[1])
    work.progress(sum(work.plan.chunk_sizes))
    session, option = work.session, work.option
    second_pass = SecondPass(session, option.layer, option.ops, option.batch_size)
    merged = merging.result(replace(session.inputs, files=in_order(session.inputs.files)), second_pass)
    notes = (*session.loaded.notes, *merged.notes)
    again = work.reasons[:1] + (
        [f"So were {counted(len(work.reasons) - 1, 'more chunk')}."] if work.reasons[1:] else []
    )
    warnings = tuple(dict.fromkeys((*merged.warnings, *again)))
    merged = replace(merged, supports=InputSupports(session))
    return replace(merged, resumed_count=len(work.resumed), notes=tuple(dict.fromkeys(notes)), warnings=warnings)


def _whole_chunk(work: _Work, index: int) -> tuple[MeasuredChunk, Sidecar] | None:
    files = work.place.folder.files(index)
    sidecar = read_sidecar(files)
    if sidecar is None or differing(sidecar.signature, work.signature(index)):
        return None
    chunk = read_chunk(files, sidecar)
    return None if chunk is None or damage(files, sidecar) else (chunk, sidecar)


def _launched() -> Share | None:
    """Return the share of a process that torchrun has started; None for another, or a single one."""
    rank, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and count.isdecimal() and "TORCHELASTIC_RUN_ID" in os.environ):
        return None
    return Share(int(rank), int(count)) if int(count) > 1 else None


def _barrier(folder: ChunkFolder, share: Share) -> None:
    """Wait until all processes that torchrun has started have looked at the folder, and forget who was done before."""
    from datetime import timedelta  # noqa: PLC0415 - for several processes alone

    import torch.distributed as dist  # noqa: PLC0415

    if share.index == 0:
        folder.forget_done()
    if dist.is_initialized():
        dist.barrier()
        return
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_LONGEST_BARRIER))
        try:
            dist.barrier()
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:  # DistError and gloo's
        raise InputError(
            f"The {share.count} processes could not connect: {exception_line(error, 160)}. "
            "One of them has ended, or cannot be reached."
        ) from error


def _wait_for_others(work: _Work, share: Share) -> None:
    """Wait until the other processes are done; InputError if one of them has ended before."""
    while not all(work.place.folder.is_done(replace(share, index=index)) for index in range(1, share.count)):
        work.progress(_finished_of(work, share))
        time.sleep(_BETWEEN_LOOKS)
