"""What input a network expects, as far as its first layer tells."""

from dataclasses import replace

from torch import nn

from hookscope.results import Preprocessing

# ImageNet's mean and std averaged over the three channels (our choice for grey pictures).
_GREY_MEAN = 0.449
_GREY_STD = 0.226

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
    """Return an input shape with N = 1 that the first layer takes; None if it does not tell.

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
        defaults = replace(defaults, channels=1, mean=(_GREY_MEAN,), std=(_GREY_STD,))
    if isinstance(_first_layer(module), nn.Conv3d):
        crop = (_CLIP_PIXELS, _CLIP_PIXELS)
        defaults = replace(defaults, kind="video", frames=_CLIP_FRAMES, resize=_CLIP_PIXELS, crop=crop)
    return defaults


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

    Args:
        module: Asked for its first layer where nothing but defaults is known of the preprocessing.
        preprocessing: The network's.

    Returns:
        (1, C, H, W), (1, C, T, H, W) for clips, or what the first layer takes; None if it does not tell.
    """
    if preprocessing.source == Preprocessing().source:
        return infer_input_shape(module)
    size = preprocessing.crop or preprocessing.resize or _IMAGE_PIXELS
    height, width = (size, size) if isinstance(size, int) else size
    clip = (preprocessing.frames,) if preprocessing.kind == "video" else ()
    return (1, preprocessing.channels, *clip, height, width)
