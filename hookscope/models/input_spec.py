"""The input that a network expects, inferred from its first layer, and how to rebuild it for other channels."""

from dataclasses import replace
from itertools import takewhile
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from hookscope.errors import UsageError
from hookscope.hooks.attributes import attribute_of
from hookscope.models.network_table import COLOURS
from hookscope.parameters import arg
from hookscope.results.inputs import Preprocessing, Waveform
from hookscope.text import printable

# Sizes that the first layer leaves open: torchvision's usual image, its 3-D ResNets' clip, any signal.
_IMAGE_PIXELS = 224
_CLIP_FRAMES = 16
_CLIP_PIXELS = 112
_SIGNAL_LENGTH = 224
_SAMPLES = 16_000  # one second of speech

# Layers that, where they come first, tell the shape of the input.
_Layer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear


def infer_channels(module: nn.Module) -> int | None:
    """Return C of the first layer if it convolves images or clips; of the first kernel if no module does; else None."""
    first = _first_layer(module)
    if isinstance(first, nn.Conv2d | nn.Conv3d):
        return first.in_channels
    layers = [*module.modules()]
    if any(issubclass(kind, nn.Conv2d | nn.Conv3d) for kind in {*map(type, layers)}):
        return None
    # Where no module convolves, the network's own functions may, with a kernel (out, C, height, width).
    held = [parameter for layer in layers for parameter in layer._parameters.values() if parameter is not None]  # noqa: SLF001
    channels = next((kernel.shape[1] for kernel in held if not is_lazy(kernel) and kernel.dim() == 4), None)
    return channels if channels in {1, 3} else None


def infer_input_shape(module: nn.Module) -> tuple[int, ...] | None:
    """Return an input shape with N = 1 that the first layer, by definition, takes; None if it cannot be inferred.

    (1, C, H, W) of `picture_size` or (1, C, 224, 224) for Conv2d, (1, C, 16, 112, 112) for Conv3d, (1, C, 224) for
    Conv1d, (1, features) for Linear, unless a module before it has weights of its own, which may embed patches.
    """
    first = _first_layer(module)
    match first:
        case nn.Conv2d(in_channels=channels):
            return (1, channels, *(picture_size(module) or (_IMAGE_PIXELS, _IMAGE_PIXELS)))
        case nn.Conv3d(in_channels=channels):
            return (1, channels, _CLIP_FRAMES, _CLIP_PIXELS, _CLIP_PIXELS)
        case nn.Conv1d(in_channels=channels):
            return (1, channels, _SIGNAL_LENGTH)
        case nn.Linear(in_features=features):
            before = takewhile(lambda layer: layer is not first, module.modules())
            has_weights = any(parameter.dim() > 1 for other in before for parameter in other.parameters(recurse=False))
            return None if has_weights else (1, features)
    return None


def picture_size(module: nn.Module) -> tuple[int, int] | None:
    """Return the height and width that a network is built for, by an attribute; None if no attribute has them.

    Read from the network and the modules before its first convolution: `img_size` or `image_size` (timm, torchvision),
    `image_size` of the configuration (transformers), else `input_size` of timm's `default_cfg`.
    """
    first = _first_layer(module)
    if not isinstance(first, nn.Conv2d):
        return None
    holders = [*takewhile(lambda layer: layer is not first, module.modules())]
    owners = [owner for holder in holders for owner in (holder, attribute_of(holder, "config"))]
    sizes = [attribute_of(owner, name) for owner in owners for name in ("img_size", "image_size")]
    cfgs = [attribute_of(holder, "default_cfg") for holder in holders]
    sizes += [cfg.get("input_size") for cfg in cfgs if isinstance(cfg, dict)]  # (C, H, W)
    for size in sizes:
        sides = (size, size) if isinstance(size, int) else size
        is_size = isinstance(sides, tuple | list) and len(sides) in {2, 3}
        if is_size and all(type(side) is int and side > 0 for side in sides):
            return (sides[-2], sides[-1])
    return None


# How many axes one input of a first layer has, batch axis apart.
_INPUT_AXES: tuple[tuple[tuple[type[nn.Module], ...], int], ...] = (
    ((nn.Conv1d, nn.ConvTranspose1d), 2),
    ((nn.Conv2d, nn.ConvTranspose2d), 3),
    ((nn.Conv3d, nn.ConvTranspose3d), 4),
    ((nn.RNNBase, nn.MultiheadAttention), 2),
    ((nn.Linear, nn.Embedding, nn.EmbeddingBag), 1),
)


def starts_with_embedding(module: nn.Module) -> bool:
    """Tell whether a network's first layer is an embedding, so that its input is of whole numbers."""
    return isinstance(first_layer_with_input(module), nn.Embedding | nn.EmbeddingBag)


def shape_option(module: nn.Module) -> str:
    """Return the option that gives noise to a network whose input shape is not known, with an example for tokens."""
    return f"{arg('input_shape')}, such as 1,16 for tokens" if starts_with_embedding(module) else arg("input_shape")


def embedding_size(module: nn.Module) -> int | None:
    """Return the size of the smallest embedding with several entries; 1 if all have one entry, None without any."""
    sizes = [layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    return min((size for size in sizes if size > 1), default=min(sizes, default=None))


def first_layer_with_input(module: nn.Module) -> nn.Module | None:
    """Return the first layer in the order of definition whose input's axes are known; None without one."""
    return next((part for part in module.modules() if any(isinstance(part, kinds) for kinds, _ in _INPUT_AXES)), None)


# What networks call their sampling rate, themselves or in their configuration.
_RATES = ("sampling_rate", "sample_rate", "samplerate")


def time_first_warning(module: nn.Module) -> tuple[str, ...]:
    """Warn if a network's first layer takes (T, N, D), which is `batch_first=False`; inputs are on axis 0."""
    first = first_layer_with_input(module)
    if not isinstance(first, nn.RNNBase | nn.MultiheadAttention) or first.batch_first:
        return ()
    name = next(name for name, submodule in module.named_modules() if submodule is first)
    layer = printable(f"{name} ({type(first).__name__})" if name else type(first).__name__)
    return (f"{layer} takes time on axis 0, where hookscope puts inputs: build it with batch_first=True.",)


def default_preprocessing(module: nn.Module) -> Preprocessing:
    """Return a network's default preprocessing: ImageNet's in 1 or 3 channels at its own size; clips for Conv3d.

    Recordings become (C, L) for Conv1d and (L,) for Linear. transformers' networks with `input_values` take (L,) and
    add the axis.
    """
    first = first_layer_with_input(module)
    axes = next((count for kinds, count in _INPUT_AXES if isinstance(first, kinds)), None)
    sized = _first_layer(module)
    waveform = None
    if isinstance(first, nn.Linear):
        waveform = Waveform(None, _sampling_rate(module))
    elif isinstance(sized, nn.Conv1d):
        adds_axis = attribute_of(module, "main_input_name") == "input_values"
        waveform = Waveform(None if adds_axis else sized.in_channels, _sampling_rate(module))
        axes = 1 if adds_axis else axes
    defaults = Preprocessing(input_axes=axes, waveform=waveform)
    if infer_channels(module) == 1:
        defaults = with_channels(defaults, 1)
    if size := picture_size(module):
        defaults = replace(defaults, resize=max(size), crop=size)
    if isinstance(sized, nn.Conv3d):
        defaults = replace(defaults, kind="video", frames=_CLIP_FRAMES, resize=_CLIP_PIXELS, crop=(_CLIP_PIXELS,) * 2)
    return defaults


def _sampling_rate(module: nn.Module) -> int | None:
    rates = [attribute_of(holder, name) for holder in (module, attribute_of(module, "config")) for name in _RATES]
    return next((rate for rate in rates if type(rate) is int and rate > 0), None)


def with_channels(preprocessing: Preprocessing, channels: int) -> Preprocessing:
    """Return the preprocessing for other channels, normalised by the average mean and std of the former ones."""
    if channels == preprocessing.channels:
        return preprocessing
    mean, std = (
        (round(sum(values) / len(values), 6),) * channels if values else ()
        for values in (preprocessing.mean, preprocessing.std)
    )
    return replace(preprocessing, channels=channels, mean=mean, std=std)


def set_input_channels(module: nn.Module, channels: int) -> None:
    """Rebuild in place every convolution over three channels, which sees the picture, for other channels.

    Raises UsageError if there is none, as in int8 networks.
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
    normalising = attribute_of(module, "transform")  # torchvision's detectors do so by themselves
    for values in ("image_mean", "image_std"):
        if before := attribute_of(normalising, values):
            setattr(normalising, values, [sum(before) / len(before)] * channels)


def _first_layer(module: nn.Module) -> _Layer | None:
    first = first_layer_with_input(module)
    if not isinstance(first, _Layer):
        return None
    size = attribute_of(first, "in_features" if isinstance(first, nn.Linear) else "in_channels")
    return first if size else None  # a lazy layer has 0 until it sees an input, a subclass may have none


def example_shape(module: nn.Module, preprocessing: Preprocessing) -> tuple[int, ...] | None:
    """Return the shape of one input: (1, C, H, W), (1, C, T, H, W) for clips, (1, L) for waveforms.

    If only defaults are known, it is what the first layer takes; None if that is not known.
    """
    waveform = preprocessing.waveform
    if waveform is not None and waveform.channels is None and isinstance(_first_layer(module), nn.Conv1d):
        return (1, waveform.sampling_rate or _SAMPLES)
    if preprocessing.source == Preprocessing().source:
        return infer_input_shape(module)
    size = preprocessing.crop or preprocessing.resize or _IMAGE_PIXELS
    height, width = (size, size) if isinstance(size, int) else size
    clip = (preprocessing.frames,) if preprocessing.kind == "video" else ()
    return (1, preprocessing.channels, *clip, height, width)
