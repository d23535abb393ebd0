"""Survey a data set: measure the chunks of this process, wait for other processes, and merge all chunks in order.

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
from typing import TYPE_CHECKING

import torch
from PIL.Image import Image

from hookscope import options
from hookscope.commands.opening import open_inputs
from hookscope.commands.survey.chunk_files import ChunkFiles, read_chunk, read_sidecar, write_chunk
from hookscope.commands.survey.failures import second_pass
from hookscope.commands.survey.feature_files import FeatureParts, FeatureTarget
from hookscope.commands.survey.features import FeatureSpool
from hookscope.commands.survey.heartbeat import Heartbeat
from hookscope.commands.survey.judged_inputs import InputJudge
from hookscope.commands.survey.measure_chunk import ChannelRecorder, MeasuredInput, measure_chunk
from hookscope.commands.survey.merge import Merging
from hookscope.commands.survey.plan import FORMAT, HEARTBEATS, ChunkFolder, Plan, Share, cut, in_order, parse_share
from hookscope.commands.survey.signature import common_signature, inputs_signature, names_digest
from hookscope.commands.survey.supports import input_supports
from hookscope.errors import HookscopeError, InputError, OutputError, UsageError
from hookscope.hooks.embedding_rows import RowsUsed, looks_up_rows
from hookscope.inputs.clips import Clip, digest_of
from hookscope.inputs.labelled_files import LabelledFiles, find_labelled, or_several
from hookscope.inputs.named import named_batch
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inspection.cost import Call, receptive_fields
from hookscope.inspection.forward import ForwardOptions
from hookscope.inspection.given_inputs import Images
from hookscope.inspection.network import inspected_network
from hookscope.inspection.session import OnProgress, Session, package_versions
from hookscope.parameters import arg
from hookscope.results.cost import ReceptiveField
from hookscope.results.runs.atomic import check_writable, refusal
from hookscope.results.survey import Survey
from hookscope.text import counted, exception_line, plain, safe_text, some_of

if TYPE_CHECKING:
    from hookscope.commands.opening import Model

# Inputs whose means are kept to find duplicate channels.
SAMPLE = 512

_BETWEEN_LOOKS = 0.2  # seconds, while other processes work
_LONGEST_BARRIER = 1800.0


@dataclass(slots=True)
class _Work:
    """A survey under way in this process; `resumed` chunks stay, `reasons` say why others were measured again."""

    session: Session
    option: options.Survey
    folder: ChunkFolder
    labelled: LabelledFiles | None
    target: FeatureTarget | None
    share: Share
    plan: Plan
    parts: list[InputPipeline]
    on_progress: OnProgress | None
    heartbeat: Heartbeat | None = None
    is_begun: bool = False
    resumed: set[int] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)

    def signature(self, index: int) -> dict[str, str]:
        part, labels = self.parts[index], {} if self.labelled is None else self.labelled.labels
        names = [name for path in part.files for name in labels.get(str(path), ())]
        return {**self.plan.signature, "inputs": inputs_signature(part.files, part.batch) + names_digest(names)}

    def chunks(self, share: Share) -> range:
        return range(share.index, len(self.parts), share.count)

    def finished_inputs(self, current: int | None = None) -> int:
        """Return the inputs of this process's chunks that are finished, but for the current one."""
        done = (index for index in self.chunks(self.share) if self.folder.files(index).sidecar.exists())
        return sum(self.plan.chunk_sizes[index] for index in done if index != current)

    def progress(self, finished: int) -> None:
        """Report how many inputs this process has finished; with a heartbeat, all processes together.

        Raises:
            InputError: If another process has ended before it was done.
        """
        reported = self.share
        if self.heartbeat is not None:
            self.heartbeat.finished = finished
            finished, reported = self.heartbeat.listen(), Share()
        if self.on_progress is not None:
            self.on_progress(finished, sum(self.plan.chunk_sizes[index] for index in self.chunks(reported)))


def _labelled_inputs(images: object) -> LabelledFiles:
    sources = images if isinstance(images, list | tuple) else [images]
    if len(sources) != 1 or not isinstance(sources[0], str | Path):
        forms = "one folder with a folder for each class in it, or one CSV of paths and labels"
        raise UsageError(f"{arg('by_class')} takes {forms}.")
    try:
        return find_labelled(Path(sources[0]))
    except InputError as error:
        message = str(error).replace(arg("data"), arg("by_class"))
        raise InputError(message.replace(or_several(), "")) from error


def _own_device(device: str) -> str:
    """Return the accelerator of this process where torchrun started several; else `device`."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = os.environ.get("LOCAL_RANK", "")
    if _launched() is None or device not in ("auto", "cuda") or not count or not local.isdecimal():
        return device
    return f"cuda:{int(local) % count}"


def run_survey(
    model: "Model", images: Images, option: options.Survey, folder: ChunkFolder, on_progress: OnProgress | None
) -> Survey | None:
    """Do as `survey` in run.py; finished chunks wait in the folder."""
    check_writable(folder.path, kind="folder")
    target = None
    if option.features is not None:
        target = FeatureTarget(Path(option.features), option.pool, option.features_dtype)
        target.check(arg("features"))
    labelled = _labelled_inputs(images) if option.by_class else None
    shard = None if option.shard is None else parse_share(option.shard)
    option = replace(option, device=_own_device(option.device))
    session = open_inputs(model, [*labelled.labels] if labelled else images, option)
    began = time.perf_counter()
    session = replace(session, inputs=_checked_inputs(replace(session.inputs, readers=option.workers)))
    launched = _launched() if shard is None else None
    share = shard or launched or Share()
    parts = cut(session.inputs, option.chunk_size)
    plan = _plan(session, option, labelled, target, parts)
    work = _Work(session, option, folder, labelled, target, share, plan, parts, on_progress)
    done = [index for index in work.chunks(Share() if launched else share) if folder.files(index).sidecar.exists()]
    if folder.is_foreign:
        raise refusal(folder.path, "its plan.json or chunk files are not those of a survey", kind="folder")
    if done and not option.resume:
        raise OutputError(
            f"'{safe_text(str(folder.path))}' holds {counted(len(done), 'finished chunk')} of an unfinished "
            f"survey. Go on with {arg('resume')}, or delete it to begin anew."
        )
    if launched:
        _barrier(folder, share)
        work.heartbeat = Heartbeat(folder, share)
    folder.write_plan(plan)
    with nullcontext() if work.heartbeat is None else work.heartbeat.beating():
        for index in work.chunks(share):
            if not (option.resume and _is_finished(work, index)):
                _measure(work, index)
        if shard is not None or share.index:
            return None
        while work.heartbeat is not None and not work.heartbeat.others_are_done:
            work.progress(work.finished_inputs())
            time.sleep(_BETWEEN_LOOKS)
    work.heartbeat, work.share = None, Share()
    merged = _merged(work)
    return replace(merged, timings={"load": session.load_seconds, "survey": time.perf_counter() - began})


def merge_survey(folder: ChunkFolder) -> Survey:
    """Merge the finished chunks of shards, and write the features to the path that the shards were given.

    Raises:
        InputError: If a chunk is missing, damaged, or was made with another signature.
    """
    plan, where = folder.read_plan(), safe_text(str(folder.path))
    count = len(plan.chunk_sizes)
    missing = [index for index in range(count) if read_sidecar(folder.files(index)) is None]
    if missing:
        raise InputError(
            f"Cannot merge '{where}': of {counted(count, 'chunk')} these are missing or damaged: "
            f"{some_of(missing, 3)}. Run their shards with {arg('resume')}."
        )
    target = FeatureTarget(Path(plan.features), plan.pool, plan.feature_dtype) if plan.features else None
    if target is not None:
        target.check(arg("features"))
    merging = Merging(plan, FeatureParts(target) if target else None)
    for index in range(count):
        if reason := _merge_chunk(merging, folder.files(index), plan.signature):
            raise InputError(f"Cannot merge chunk {index} of '{where}': {reason}. Run its shard with {arg('resume')}.")
    return merging.result()


def _merge_chunk(merging: Merging, files: ChunkFiles, signature: Mapping[str, str]) -> str:
    """Merge a finished chunk; return why it cannot be merged, "" if it was."""
    sidecar = read_sidecar(files)
    if sidecar is None:
        return "it is missing or damaged"
    # Shards are merged without their inputs: the sidecar's digest of them counts.
    if reason := sidecar.stale(files, {"inputs": sidecar.signature.get("inputs", ""), **signature}):
        return reason
    chunk = read_chunk(files, len(merging.plan.classes))
    if chunk is None:
        return f"{files.sidecar.name} is damaged"
    if merging.features is not None and not sidecar.fits_features(files, merging.plan.feature_dtype):
        return f"{files.features.name} is damaged"
    merging.add(chunk, files, sidecar)
    return ""


def _checked_inputs(inputs: InputPipeline) -> InputPipeline:
    if inputs.named and not (inputs.files or inputs.batch):  # all arguments, by name
        inputs = replace(inputs, batch=named_batch(inputs.named), named=())
    if inputs.named or not (inputs.files or inputs.batch):
        raise UsageError("A survey takes files, pictures or tensors: give a folder or a glob.")
    if inputs.preprocessing.kind == "flow":
        raise UsageError(
            "This network compares each frame with the next: a survey, which takes inputs one by one, cannot."
        )
    return replace(inputs, files=in_order(inputs.files))


def _plan(
    session: Session,
    option: options.Survey,
    labelled: LabelledFiles | None,
    target: FeatureTarget | None,
    parts: Sequence[InputPipeline],
) -> Plan:
    loaded, inputs = session.loaded, session.inputs
    subject = inspected_network(loaded)
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
        "features": "" if target is None else f"{target.pool} {target.dtype}",
        "seed": session.seed,
        "dtype": str(inputs.dtype),
    }
    device, dtype = subject.placed
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
        features="" if target is None else str(target.path.absolute()),
        pool=option.pool,
        feature_dtype=option.features_dtype,
        seed=session.seed,
        device=device.partition(":")[0],
        dtype=dtype,
        versions=package_versions(),
        threads=torch.get_num_threads(),
        fields=_fields(session),
        labels_source="" if labelled is None else labelled.source,
        categories=loaded.info.categories if classes else (),
    )


def _fields(session: Session) -> tuple[tuple[str, int, ReceptiveField], ...]:
    """Return the receptive fields by layer and call, found with the first input that can be read."""
    batch = next(iter(replace(session.inputs, pictures={}).batches(1, lambda _error: None)), None)
    if batch is None:
        return ()
    fields, _ = receptive_fields(Call(inspected_network(session.loaded).network, batch.args, batch.kwargs))
    return tuple((layer, call, receptive_field) for (layer, call), receptive_field in fields.items())


def _is_finished(work: _Work, index: int) -> bool:
    """Tell whether a chunk is there, whole, and made as it would be made now."""
    files = work.folder.files(index)
    sidecar = read_sidecar(files)
    if sidecar is None:
        return False
    reason = sidecar.stale(files, work.signature(index))
    # Pictures in memory are in the signature.
    if not reason and sidecar.files != _digests(work.parts[index]):
        reason = "its inputs have changed"
    if reason:
        work.reasons.append(f"Chunk {index} was measured again: {reason}.")
        return False
    work.resumed.add(index)
    return True


def _digests(part: InputPipeline, inputs: Sequence[MeasuredInput] = ()) -> dict[str, str]:
    """Return the digests of a chunk's files by name; those of measured `inputs` are known, and not read again."""
    whole = {plain(record.name): record.sha256 for record in inputs}
    read = {name.rpartition("[")[0]: digest for name, digest in whole.items()} | whole  # a file may hold several
    files = [file for file in part.files if not isinstance(file, Image)]
    named = {plain(str(file.folder if isinstance(file, Clip) else file)): file for file in files}
    return {name: read.get(name) or _digest(file) for name, file in named.items()}


def _digest(file: Clip | Path) -> str:
    with suppress(OSError):
        return digest_of(file)
    return ""


def _measure(work: _Work, index: int) -> None:
    option, session = work.option, work.session
    before = work.finished_inputs(index)
    try:
        chunk = measure_chunk(
            session.loaded,
            replace(work.parts[index], pictures={}),
            option.batch_size,
            _recorder(work),
            ForwardOptions(
                layers=option.layer,
                ops=option.ops,
                with_activations=True,
                seed=session.seed,
                distributions=True,
                verify=option.verify and index == 0,
            ),
            is_first=not work.is_begun,
            on_batch=lambda finished: work.progress(before + finished),
        )
    except HookscopeError:
        if work.share.count == 1 and not work.finished_inputs():
            work.folder.remove()  # it holds nothing to go on from
        raise
    work.is_begun = True
    digests = _digests(work.parts[index], chunk.inputs)
    write_chunk(work.folder.files(index), chunk, work.signature(index), digests)


def _recorder(work: _Work) -> ChannelRecorder:
    option, loaded = work.option, work.session.loaded
    recorder = ChannelRecorder(
        top=option.top,
        sample=max(1, SAMPLE // len(work.parts)),
        features=None if work.target is None else FeatureSpool(work.target.pool, work.target.dtype),
        rows_used=RowsUsed(loaded.module) if looks_up_rows(loaded.module) else None,
    )
    if work.labelled is not None:
        labels_of, classes = work.labelled.labels_of, work.plan.classes
        numbers = {label: number for number, label in enumerate(classes)}
        recorder.class_of = lambda name: numbers[labels_of(name)[0]]
        recorder.judge = InputJudge(work.labelled, classes, loaded.info.categories, work.session.inputs.preprocessing)
    return recorder


def _merged(work: _Work) -> Survey:
    merging = Merging(work.plan, FeatureParts(work.target) if work.target else None)
    for index in range(len(work.parts)):
        files, signature = work.folder.files(index), work.signature(index)
        if _merge_chunk(merging, files, signature):
            _measure(work, index)
            if _merge_chunk(merging, files, signature):
                where = safe_text(str(work.folder.path))
                raise OutputError(f"Chunk {index} in '{where}' was damaged as soon as it was written. Check the disk.")
    work.progress(sum(work.plan.chunk_sizes))
    if not merging.input_count:
        work.folder.remove()  # the chunks hold no input
    merged = merging.result(work.session.inputs, partial(second_pass, work.session, work.option))
    label_notes = () if work.labelled is None else work.labelled.notes
    warnings = work.reasons[:1]
    if more := work.reasons[1:]:
        warnings.append(f"So {'was' if len(more) == 1 else 'were'} {counted(len(more), 'more chunk')}.")
    return replace(
        merged,
        supports=partial(input_supports, work.session),
        resumed_count=len(work.resumed),
        notes=tuple(dict.fromkeys((*work.session.loaded.notes, *label_notes, *merged.notes))),
        warnings=tuple(dict.fromkeys((*merged.warnings, *warnings))),
    )


def _launched() -> Share | None:
    """Return the share of a process that torchrun has started; None for other or single processes."""
    rank, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and count.isdecimal() and "TORCHELASTIC_RUN_ID" in os.environ):
        return None
    return Share(int(rank), int(count)) if int(count) > 1 else None


def _barrier(folder: ChunkFolder, share: Share) -> None:
    """Wait until all processes of torchrun have looked at the folder; the first process deletes old heartbeats."""
    from datetime import timedelta  # noqa: PLC0415 - for several processes alone

    import torch.distributed as dist  # noqa: PLC0415

    if share.index == 0:
        for heartbeat in folder.path.glob(HEARTBEATS):
            heartbeat.unlink(missing_ok=True)
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
