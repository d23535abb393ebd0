"""The input that a network expects, inferred from its first layer, and how to rebuild it for other channels."""

from dataclasses import replace
from typing import Any

from torch import nn

from hookscope.errors import UsageError
from hookscope.models.network_table import COLOURS
from hookscope.results.inputs import Preprocessing

# Our choices where the first layer leaves them open: torchvision's usual image, its 3-D ResNets' clip, any signal.
_IMAGE_PIXELS = 224
_CLIP_FRAMES = 16
_CLIP_PIXELS = 112
_SIGNAL_LENGTH = 224

_Layer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear

# First layers whose input's shape, or whose place in the network, does not follow from their own.
_OPAQUE = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def infer_channels(module: nn.Module) -> int | None:
    """Return C of the first convolution over images or clips; None if there is none."""
    first = _first_layer(module)
    return first.in_channels if isinstance(first, nn.Conv2d | nn.Conv3d) else None


def infer_input_shape(module: nn.Module) -> tuple[int, ...] | None:
    """Return an input shape with N = 1 that the first layer takes; None if it cannot be inferred.

    (1, C, 224, 224) for Conv2d, (1, C, 16, 112, 112) for Conv3d, (1, C, 224) for Conv1d, (1, features) for Linear.
    First is meant in the order of definition, which need not be the order of execution.
    """
    match _first_layer(module):
        case nn.Conv2d(in_channels=channels):
            return (1, channels, _IMAGE_PIXELS, _IMAGE_PIXELS)
        case nn.Conv3d(in_channels=channels):
            return (1, channels, _CLIP_FRAMES, _CLIP_PIXELS, _CLIP_PIXELS)
        case nn.Conv1d(in_channels=channels):
            return (1, channels, _SIGNAL_LENGTH)
        case nn.Linear(in_features=features):
            return (1, features)
    return None


def default_preprocessing(module: nn.Module) -> Preprocessing:
    """Return the preprocessing for a network that comes without any: ImageNet's, in as many channels as it takes.

    A network that starts with Conv3d gets clips. One for neither 1 nor 3 channels gets 3, as pictures have;
    `infer_channels` tells.
    """
    defaults = Preprocessing()
    if infer_channels(module) == 1:
        defaults = with_channels(defaults, 1)
    if isinstance(_first_layer(module), nn.Conv3d):
        crop = (_CLIP_PIXELS, _CLIP_PIXELS)
        defaults = replace(defaults, kind="video", frames=_CLIP_FRAMES, resize=_CLIP_PIXELS, crop=crop)
    return defaults


def with_channels(preprocessing: Preprocessing, channels: int) -> Preprocessing:
    """Return the preprocessing for another number of channels.

    Each is normalised by the average mean and std of the former ones: 0.449 and 0.226 for ImageNet's (our choice).
    """
    if channels == preprocessing.channels:
        return preprocessing
    mean, std = (
        (round(sum(values) / len(values), 6),) * channels if values else ()
        for values in (preprocessing.mean, preprocessing.std)
    )
    return replace(preprocessing, channels=channels, mean=mean, std=std)


def set_input_channels(module: nn.Module, channels: int) -> None:
    """Rebuild, in place, every convolution over three channels as the same over another number.

    In torchvision's networks these are the ones that see the picture: the first one, and RAFT's two. Raises UsageError
    if there is none, as in int8 networks.
    """
    seeing = [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Conv3d) and layer.in_channels == COLOURS
    ]
    if not seeing:
        raise UsageError(f"{type(module).__name__} has no convolution over 3 channels to rebuild for {channels}.")
    for name, layer in seeing:
        convolution: Any = type(layer)  # each class is typed for its own number of axes
        kept = ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
        settings = {setting: getattr(layer, setting) for setting in kept}
        rebuilt = convolution(channels, **settings, bias=layer.bias is not None, device=layer.weight.device)
        rebuilt.train(layer.training).requires_grad_(layer.weight.requires_grad)
        module.set_submodule(name, rebuilt)
    normalising = getattr(module, "transform", None)  # torchvision's detectors do so by themselves
    for values in ("image_mean", "image_std"):
        if before := getattr(normalising, values, None):
            setattr(normalising, values, [sum(before) / len(before)] * channels)


def _first_layer(module: nn.Module) -> _Layer | None:
    """Return the first layer, if its type and size say what the input looks like."""
    for child in module.modules():
        if isinstance(child, _Layer):
            size = child.in_features if isinstance(child, nn.Linear) else child.in_channels
            return child if size else None  # a lazy layer has 0 until it sees an input
        if isinstance(child, _OPAQUE):
            return None
    return None


def example_shape(module: nn.Module, preprocessing: Preprocessing) -> tuple[int, ...] | None:
    """Return the shape of one input, N = 1, as the preprocessing would make it of a square picture.

    (1, C, H, W), (1, C, T, H, W) for clips, or, where nothing but defaults is known, what the first layer takes; None
    if it does not tell.
    """
    if preprocessing.source == Preprocessing().source:
        return infer_input_shape(module)
    size = preprocessing.crop or preprocessing.resize or _IMAGE_PIXELS
    height, width = (size, size) if isinstance(size, int) else size
    clip = (preprocessing.frames,) if preprocessing.kind == "video" else ()
    return (1, preprocessing.channels, *clip, height, width)
