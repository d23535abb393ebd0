"""timm's networks, their weights without unpickling, and their preprocessing."""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hookscope.checkpoints.checkpoint import Checkpoint
from hookscope.errors import CheckpointError, ModelNotFoundError, UsageError
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.construction import LoadedModel
from hookscope.models.download import DownloadError, download_remedy, fetch, is_cached, unreachable, with_deletion
from hookscope.models.input_spec import picture_size
from hookscope.models.names import import_timm, published
from hookscope.models.weight_choice import (
    IMAGENET_CLASSES,
    BuildOptions,
    ChosenWeights,
    Description,
    building,
    load_named,
)
from hookscope.parameters import arg
from hookscope.results.inputs import Preprocessing
from hookscope.text import exception_line

# hookscope gives these itself, or they would be a way around --weights.
_RESERVED_ARGUMENTS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}


def names_in(layers: str | tuple[str, ...] | list[str] | None) -> tuple[str, ...]:
    """Return the layers that timm's configuration names: none, one or several."""
    return (layers,) if isinstance(layers, str) else tuple(layers or ())


def build_timm(name: str, arguments: Mapping[str, Any], *, input_channels: int | None = None) -> nn.Module:
    """Build an untrained network of timm's, by its name with or without a tag; raises as `build_torchvision`."""
    published(name)
    kwargs = dict(arguments) if input_channels is None else dict(arguments) | {"in_chans": input_channels}
    create: Callable[..., nn.Module] = import_timm().create_model
    with building(f"timm:{name}", kwargs):
        return create(name, pretrained=False, **kwargs)


def load_timm(name: str, options: BuildOptions) -> LoadedModel:
    """Build a network of timm's, by its name with or without the tag of its weights: "convnext_tiny.fb_in22k".

    `options.weights` may be such a tag. Raises as `load_torchvision`, UsageError if timm is missing, and
    ModelNotFoundError if it has no such network.
    """
    if reserved := _RESERVED_ARGUMENTS & options.arguments.keys():
        raise UsageError(f"{arg('model_arg')} {min(reserved)} is not for timm's networks; use {arg('weights')}.")
    config = published(name)
    options = replace(options, input_channels=options.arguments.get("in_chans", options.input_channels))
    trained = partial(_trained_weights, on_meta=options.on_meta)
    if options.weights_name:
        name = f"{name.partition('.')[0]}.{options.weights_name}"
        try:
            chosen = trained(published(name))
        except ModelNotFoundError as error:
            raise UsageError(f"{error} Or give auto, none or a file.") from error
    else:
        chosen = options.usual_weights(f"timm:{name}", partial(trained, config))
    if chosen.checkpoint and chosen.published:
        build = partial(_build_trained, name, chosen.checkpoint, options)
    else:
        build = partial(build_timm, name, options.arguments, input_channels=options.input_channels)
    count = options.arguments.get("num_classes", config.num_classes)
    has_names = chosen.published is not None or (chosen.is_file and count == IMAGENET_CLASSES)
    return load_named(f"timm:{name}", chosen, options, build, partial(_describe, name, has_names))


def _trained_weights(config: Any, *, on_meta: bool) -> ChosenWeights:
    if on_meta:  # timm builds the same network with all of its weights
        return ChosenWeights("not loaded")
    path = _weights_file(config)
    origin = f"timm {config.architecture}.{config.tag}" if config.tag else f"timm {config.architecture}"
    try:
        return ChosenWeights(origin, config, read_checkpoint(path))
    except CheckpointError as error:
        raise with_deletion(error, origin) from error


def _weights_file(config: Any) -> Path:
    """Return the file of trained weights, downloaded here because timm may unpickle its own downloads."""
    url = config.url if isinstance(config.url, str) and not config.url.endswith(".npz") else None
    if not config.hf_hub_id:
        if not url:
            raise DownloadError(f"timm publishes no weights of {config.architecture} that hookscope reads.")
        return fetch(url)
    from huggingface_hub import hf_hub_download, hf_hub_url, try_to_load_from_cache  # noqa: PLC0415 (timm's own need)
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError  # noqa: PLC0415

    repository, _, revision = config.hf_hub_id.partition("@")
    asked = config.hf_hub_filename or "pytorch_model.bin"
    safe = "model.safetensors" if asked == "pytorch_model.bin" else str(Path(asked).with_suffix(".safetensors"))
    for name in (safe, asked):
        cached = try_to_load_from_cache(repository, name, revision=revision or None)
        if isinstance(cached, str):
            return Path(cached)
    if url and is_cached(url):
        return fetch(url)
    address = hf_hub_url(repository, safe, revision=revision or None)
    if reason := unreachable(address):
        raise DownloadError(f"{address} cannot be downloaded: {reason}. {download_remedy()}")
    try:
        try:
            return Path(hf_hub_download(repository, safe, revision=revision or None))
        except LocalEntryNotFoundError:  # an EntryNotFoundError that means no connection
            raise
        except EntryNotFoundError:
            return Path(hf_hub_download(repository, asked, revision=revision or None))
    except Exception as error:  # several libraries: no connection, no such file, no room on the disk
        raise DownloadError(f"{address} cannot be downloaded: {exception_line(error)}. {download_remedy()}") from error


def _build_trained(name: str, checkpoint: Checkpoint, options: BuildOptions) -> nn.Module:
    """Let timm load weights, as it renames keys and drops background classes, but not read their file."""
    config, arguments = published(name), options.arguments
    if options.input_channels is not None or arguments.get("num_classes", config.num_classes) != config.num_classes:
        raise UsageError(f"timm's weights of {name} are for {config.num_classes} classes and 3 input channels.")
    overlay = {"state_dict": dict(checkpoint.state)}
    create: Callable[..., nn.Module] = import_timm().create_model
    with building(f"timm:{name}", arguments, f"timm's weights of {name} do not fit it"):
        module = create(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
    getattr(module, "pretrained_cfg", {}).pop("state_dict", None)  # it would hold the weights a second time
    return module


def _categories(module: nn.Module) -> tuple[str, ...]:
    data = importlib.import_module("timm.data")
    subset = data.infer_imagenet_subset(module)
    if not subset:
        return ()
    info = data.ImageNetInfo(subset)
    return tuple(info.index_to_description(index) for index in range(info.num_classes()))


def _describe(name: str, has_names: bool, module: nn.Module) -> Description:
    config = importlib.import_module("timm.data").resolve_model_data_config(module)
    height, width = picture_size(module) or config["input_size"][1:]
    scaled = tuple(math.floor(side / config["crop_pct"]) for side in (height, width))
    squashed = config["crop_mode"] == "squash"
    border = f"timm:{name}: timm pads pictures to a square; hookscope takes the centre instead."
    preprocessing = Preprocessing(
        # timm scales so that both sides are covered; the longer one covers them for any picture.
        resize=(scaled[0], scaled[1]) if squashed else max(scaled),
        crop=(height, width),
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        source=f"timm's configuration of {name}",
    )
    warnings = (border,) if config["crop_mode"] == "border" else ()
    return preprocessing, _categories(module) if has_names else (), warnings
