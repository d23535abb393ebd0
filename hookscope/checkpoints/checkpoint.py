"""Read the weights out of a file without running anything that comes with it, unless it is trusted."""

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hookscope.checkpoints.class_names import stored_classes
from hookscope.checkpoints.deepspeed import model_parallel_remark
from hookscope.checkpoints.fileformat import config_in, safetensors_metadata
from hookscope.checkpoints.locate_state_dict import weights_in
from hookscope.checkpoints.reading import (
    RESAVE_REMEDY,
    ReadingRules,
    ScanResult,
    TrustedReader,
    read_content,
    read_verified,
)
from hookscope.checkpoints.stand_ins import skipped_objects
from hookscope.checkpoints.training_entries import TrainingEntries, training_entries
from hookscope.checkpoints.unpickler import StandIn
from hookscope.checkpoints.weight_sets import listed
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import CheckpointError
from hookscope.parameters import arg
from hookscope.text import counted, printable, some_of

_LISTED_NAMES = 3  # names that a sentence lists

# Keys of timm's and PyTorch's training scripts, timm's configurations and metadata, and scripts of many others.
_ARCHITECTURE_KEYS = ("architecture", "arch", "model_name", "backbone", "model", "net", "network")
_AROUND = ("pretrained_cfg", "args", "config", "cfg", "hyper_parameters", "hparams", "model_config", "meta", "opt")

_ARCHITECTURE_NAME = re.compile(r"(timm:|torchvision:|timm/)?(?P<name>[A-Za-z]\w{1,79})(\.\w{1,80})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How weights are read out of a file and put into a network.

    With `trust` the file may run code while it is read; None if the caller has no such option. `key` is the place of
    the weights in the file, "ema.state_dict"; None to find them. `allow_missing` are globs over the network's names
    that the file may lack, `allow_unexpected` over the file's names that the network may lack. `allowed_globals` are as
    for `checkpoints.reading.ReadingRules`.
    """

    trust: bool | None = False
    key: str | None = None
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    allowed_globals: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights in a file.

    Attributes:
        name: The file's, without its folder, safe to show.
        state: Tensors by name, perhaps of the mapped file itself; of a quantised network also tuples of tensors and
            dtypes. Carries torch's `_metadata` when the file does.
        sha256: Hex digest of the file; of several files, of the text "DIGEST  NAME" of each, a line each.
        warnings: Sentences a reader must see, such as which tensors are not used.
        notes: Sentences about where in the file the weights are, and what else it holds.
        module: The pickled Module that holds these weights, if the file is trusted; else None.
        pickled_class: The class of a pickled Module, whose code runs only with trust; else "".
        requires_grad: Flags of what a single file holds as Parameters, by name; other tensors have none.
        categories: Class names by index from the file; one of its tensors has as many rows.
        training: The entries other than the weights; None if they were not read.
        architectures: Names of networks that the file has beside its weights.
        is_refused_by_torch: Whether a file names more than torch's safe reader knows.
        files: The files; None for a state dict that is in no file.
    """

    name: str
    state: "OrderedDict[str, Any]"
    sha256: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    module: nn.Module | None = None
    pickled_class: str = ""
    requires_grad: Mapping[str, bool] = field(default_factory=dict)
    categories: tuple[str, ...] = ()
    training: TrainingEntries | None = None
    architectures: tuple[str, ...] = ()
    is_refused_by_torch: bool = False
    files: WeightsFiles | None = None


def read_weights(files: WeightsFiles, options: FileOptions, read_trusted: TrustedReader | None = None) -> Checkpoint:
    """Return the weights of a file, or of the shards that an `index.json` lists. The content decides how it is read.

    The file is first read in a separate process; if that passes, this one maps it. `read_trusted` is as for
    `ReadingRules`; in a file that it reads, a Module's own state dict is read too. Raises CheckpointError if the file
    cannot be read, is damaged, or holds no state dict; UntrustedFileError if reading it would run code; UsageError if
    it holds several state dicts, and `options` names none; NothingMatchedError if there is none at the key of
    `options`.
    """
    path, name, has_option = files.path, files.name, options.trust is not None
    gate = "" if options.allowed_globals is None else arg("allow_global")
    trusting = f", or give {arg('trust')} if you trust its author" if has_option else ""
    rules = ReadingRules(RESAVE_REMEDY + trusting, read_trusted, options.allowed_globals, gate)
    key = None if files.listed else options.key  # each shard is a state dict
    reads = read_verified(files, partial(weights_in, key=key), rules)
    past = [remark for file, read in reads.items() for remark in _read_past(read, printable(str(file)))]
    content, surplus = _joined(files, reads) if files.listed else (reads[path].content, ())
    weights = weights_in(content, name, options.key, may_trust=has_option)
    # safetensors holds nothing but tensors and texts.
    texts = safetensors_metadata(path) if files.kind == "safetensors" else None
    categories, notes = _named_classes(content if texts is None else _parsed(texts), weights.state, name)
    settings = {**config_in(path if files.kind == "distributed" else path.parent), **(texts or {})}
    parallel = model_parallel_remark(content)
    remarks = [files.shard_remark(), parallel and f"{printable(path.name)}: {parallel}."]
    return Checkpoint(
        printable(path.name),
        weights.state,
        files.sha256(),
        (*surplus, *past, *filter(None, remarks)),
        (*weights.notes, *notes),
        weights.module,
        weights.pickled_class if has_option else "",
        weights.requires_grad,
        categories,
        training_entries(content, weights, options.key),
        stored_architectures(content if texts is None else None, settings),
        any(read.how == "past unknown" for read in reads.values()),
        files,
    )


def read_again(read: Checkpoint, options: FileOptions) -> Checkpoint:
    """Return weights that `read_weights` has read, without another process going through a single file first.

    Raises CheckpointError if a file has changed since.
    """
    files = read.files
    if files is None or files.current_versions() != files.versions:
        raise CheckpointError(f"{read.name} was changed while the others were read; run the command again.")
    if files.listed:
        return read_weights(files, options)
    content = read_content(files.path, files.kind, "past unknown" if read.is_refused_by_torch else "torch")
    return replace(read, state=weights_in(content, files.name, options.key).state, training=None)


def _named_classes(content: object, state: Mapping[str, Any], name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    where, names = stored_classes(content)
    shapes = (value.shape for value in state.values() if isinstance(value, Tensor))
    if not names or not any(shape[:1] == (len(names),) for shape in shapes):
        return (), ()
    return names, (f"{name}: {counted(len(names), 'class name')} taken from its key '{where}'.",)


def stored_architectures(content: object, metadata: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return names of networks in what a file holds and in its metadata, without the tags of weights, each once."""
    names = dict.fromkeys(name for held in (metadata, content) for name in _architectures_in(held))
    return tuple(names)


def _architectures_in(settings: object) -> Iterator[str]:
    if not isinstance(settings, dict):
        return
    for place in (settings, *(_entries_of(dict.get(settings, key)) for key in _AROUND)):
        for key in _ARCHITECTURE_KEYS:
            value = dict.get(place, key)
            if isinstance(value, str) and (match := _ARCHITECTURE_NAME.fullmatch(value)):
                yield match["name"].lower()


def _entries_of(value: object) -> dict[Any, Any]:
    entries = value.state if isinstance(value, StandIn) else value
    return entries if isinstance(entries, dict) else {}


def _read_past(read: ScanResult, name: str) -> tuple[str, ...]:
    if read.how != "past unknown":
        return ()
    held = f"; skipped: {skipped}" if (skipped := skipped_objects(read.content)) else ""
    named = some_of([printable(symbol, 80) for symbol in read.names], _LISTED_NAMES)
    reason = f"names {named}" if named else "is a bare pickle, or has pickle instructions that torch lacks"
    return (f"{name}: `torch.load(weights_only=True)` refuses this file, which {reason}; nothing was imported{held}.",)


def _parsed(texts: Mapping[str, Any]) -> dict[str, Any]:
    parsed = {}
    for key, text in texts.items():
        with suppress(ValueError, RecursionError):
            parsed[key] = json.loads(text) if isinstance(text, str) else None
    return parsed


def _joined(files: WeightsFiles, reads: Mapping[Path, ScanResult]) -> tuple["OrderedDict[str, Any]", tuple[str, ...]]:
    states = {shard: weights_in(read.content, printable(str(shard))).state for shard, read in reads.items()}
    surplus = [tensor for more in files.surplus(states).values() for tensor in more]
    state = OrderedDict((tensor, states[shard][tensor]) for shard, names in files.listed.items() for tensor in names)
    shown = listed([printable(tensor, 80) for tensor in surplus], _LISTED_NAMES)
    note = f"{files.name}: not in the index and not used: {counted(len(surplus), 'tensor')} of its files ({shown})."
    return state, (note,) * bool(surplus)
