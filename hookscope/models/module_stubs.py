"""Modules that stand for the layers of TorchScript and of exported programs: their classes, sizes and warnings.

Such a layer has the name of its original class, but is no instance of it. Layer patterns, channel axes and input
shapes go by class, so a layer of torch's becomes an instance: it borrows the type and the sizes, no behaviour.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from hookscope.checkpoints.weight_sets import listed
from hookscope.text import counted, printable

_BORROWED = (
    *(_ConvNd, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.Linear, nn.Embedding, nn.EmbeddingBag),
    *(nn.RNNBase, nn.MultiheadAttention, nn.Sequential, nn.ModuleList, nn.ModuleDict),
)

MODAL = {"batch_norm": 5, "dropout": 2, "dropout_": 2, "feature_dropout": 2, "feature_dropout_": 2, "alpha_dropout": 2}
"""ATen operators with a flag for training mode, and the flag's position among the arguments."""


@cache
def layer_class(behaviour: type[nn.Module], qualified_name: str) -> type[nn.Module]:
    """Return a subclass of `behaviour`, and of the layer's original class if that is torch's, with the original's name.

    The methods of `behaviour` win over the borrowed class's. `qualified_name` is "torch.nn.modules.conv.Conv2d"; it may
    come from a file, and nothing is imported by it.
    """
    home, _, name = qualified_name.rpartition(".")
    in_torch: Any = getattr(nn, name, None) if home.startswith("torch.nn.modules") else None
    borrowed = isinstance(in_torch, type) and issubclass(in_torch, _BORROWED)
    bases: tuple[type, ...] = (behaviour, in_torch) if borrowed else (behaviour,)
    # The borrowed class's repr, and its way to another device, need attributes that are not there.
    members: dict[str, Any] = {"extra_repr": lambda _module: "", "_apply": nn.Module._apply}  # noqa: SLF001 - torch's
    members["__module__"] = home or behaviour.__module__
    return type(printable(name, 80) or behaviour.__name__, bases, members)


def set_sizes(module: nn.Module, groups: int | None, permutation: Sequence[int] | None) -> None:
    """Set the sizes that layers of torch are known by (`out_channels`, `in_features`, …) from the weight's shape.

    A size that cannot be told is 0, or () where it is a shape. `groups` is a convolution's; `permutation` becomes
    torchvision's `dims` of a layer that permutes axes.
    """
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    for name, size in _sizes(module, shape, groups).items():
        setattr(module, name, size)
    if permutation is not None and type(module).__name__ == "Permute":
        setattr(module, "dims", list(permutation))  # noqa: B010 - modules declare no such attribute


def _sizes(module: nn.Module, shape: tuple[int, ...], groups: int | None) -> dict[str, int | tuple[int, ...]]:
    first, second = (*shape, 0, 0)[:2]
    sizes: dict[str, int | tuple[int, ...]] = {}
    match module:
        case _ConvTransposeNd():  # (C in, C out / groups, …)
            sizes = {"in_channels": first, "out_channels": second * (groups or 0), "kernel_size": shape[2:]}
        case _ConvNd():  # (C out, C in / groups, …)
            sizes = {"in_channels": second * (groups or 0), "out_channels": first, "kernel_size": shape[2:]}
        case nn.Linear():
            sizes = {"in_features": second, "out_features": first}
        case _NormBase():
            mean = getattr(module, "running_mean", None)
            sizes = {"num_features": mean.shape[0] if isinstance(mean, Tensor) else first}
        case nn.GroupNorm():
            sizes = {"num_channels": first}
        case nn.LayerNorm() | nn.RMSNorm():
            sizes = {"normalized_shape": shape}
        case nn.Embedding() | nn.EmbeddingBag():
            sizes = {"num_embeddings": first, "embedding_dim": second}
        case nn.MultiheadAttention():
            inner = getattr(getattr(module, "out_proj", None), "weight", None)
            sizes = {"embed_dim": inner.shape[0] if isinstance(inner, Tensor) else 0}
    return sizes


def some_layers(names: Sequence[str]) -> str:
    """Return "7 layers (a, b, c, …)"."""
    return f"{counted(len(names), 'layer')} ({listed([printable(name, 80) for name in names], 3)})"


def always_training(count: int) -> str:
    """Return the sentence for operators such as dropout whose mode was fixed when the file was made: training."""
    operators = f"{count} batch normalisation or dropout operator{'s stay' if count > 1 else ' stays'}"
    return f"{operators} in training mode: the network was not in eval mode when it was saved."
