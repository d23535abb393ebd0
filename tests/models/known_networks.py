"""The networks that libraries can build: how, and how the sizes of their tensors follow their arguments."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchvision.models
from torch import nn

from hookscope.hooks.attributes import attribute_of
from hookscope.models.construction import seeded, silenced_known_warnings, skipped_initialisation
from hookscope.models.input_spec import picture_size
from hookscope.models.network_table import COLOURS, Free, NetworkPattern, Shapes, Sizes, network_pattern, state_shapes
from hookscope.models.zoo import build_torchvision

# To find the sizes that depend on them, a network is built with these numbers of classes and input channels: primes
# that no published network has, so that a multiple of one is no coincidence.
_CLASSES = 1009
_CHANNELS = 5

Built = tuple[nn.Module, Shapes]  # with the shapes of its state dict


@dataclass(frozen=True, slots=True)
class KnownNetwork:
    """A network that a library builds.

    `build` takes the builder's arguments and, by keyword, `input_channels`; `builder` is its library's function or
    class, for its signature. `heads` are the names of the classifiers that a class count of 0 takes away.
    """

    model: str
    build: Callable[..., nn.Module]
    builder: Callable[..., Any]
    class_count: int | None
    heads: tuple[str, ...] = ()


def torchvision_network(name: str) -> KnownNetwork:
    """Return a network of torchvision's registry."""
    categories = torchvision.models.get_model_weights(name).DEFAULT.meta.get("categories")
    build, builder = partial(build_torchvision, name), torchvision.models.get_model_builder(name)
    return KnownNetwork(name, build, builder, categories and len(categories))


def timm_network(name: str) -> KnownNetwork:
    """Return a network of timm's, by its name with or without the tag of its weights; raises as `published`."""
    from hookscope.models import timm_zoo

    published = timm_zoo.published(name)
    build, heads = partial(timm_zoo.build_timm, name), timm_zoo.names_in(published.classifier)
    return KnownNetwork(f"timm:{name}", build, timm_zoo.build_timm, published.num_classes, heads)


def pattern_of(network: KnownNetwork) -> NetworkPattern | None:
    """Build a network a few times without weights; return its names and sizes, None if it cannot be built."""
    with seeded(0), silenced_known_warnings():
        published = _built(network)
        if published is None:
            return None
        module, shapes = published
        facts: dict[str, Any] = {} if network.class_count is None else {"classes": network.class_count}
        shapes, auxiliary = _with_auxiliary(network, module, shapes)
        facts |= auxiliary
        kwargs = dict.fromkeys(auxiliary.get("switches", ()), True)
        sizes, heads = _with_free_sizes(network, shapes, kwargs)
        if heads:
            facts["heads"] = heads
        grid, argument = _grid(module), network_pattern(network.model, {}, {}).size_argument
        if grid and (resized := _built(network, {**kwargs, argument: 2 * grid[1]})):
            patched = _with_patches(sizes, shapes, resized[1], *grid)
            facts |= {"grid": grid} if patched != sizes else {}
            sizes = patched
    return network_pattern(network.model, facts, sizes)


def _built(
    network: KnownNetwork, arguments: Mapping[str, Any] | None = None, channels: int | None = None
) -> Built | None:
    """Build a network, on the meta device if possible; None if it does not take the arguments.

    Networks of int8 are built in floating point, which has the same names: fusing and packing change the shapes.
    """
    kwargs: dict[str, Any] = {"quantize": False} if network.model.startswith("quantized_") else {}
    for device in ("meta", "cpu"):  # RegNet computes its widths with tensors
        try:
            with torch.device(device), skipped_initialisation():
                module = network.build(kwargs | dict(arguments or {}), input_channels=channels)
            return module, state_shapes(module.state_dict(keep_vars=True))
        except Exception:  # noqa: BLE001 - whatever it is, it takes no such arguments
            continue
    return None


def _with_auxiliary(network: KnownNetwork, module: nn.Module, shapes: Shapes) -> tuple[Shapes, dict[str, Any]]:
    switches = _auxiliary_arguments(network, module)
    with_them = _built(network, dict.fromkeys(switches, True)) if switches else None
    without = _built(network, dict.fromkeys(switches, False)) if switches else None
    names = [] if with_them is None or without is None else [name for name in with_them[1] if name not in without[1]]
    if with_them is None or not names or not all("aux" in name.lower() for name in names):
        return shapes, {}
    is_published = {"has_auxiliary": True} if names[0] in shapes else {}
    return with_them[1], {"switches": switches, "auxiliary": names, **is_published}


def _auxiliary_arguments(network: KnownNetwork, module: nn.Module) -> list[str]:
    takers: tuple[Any, ...] = (network.builder, *type(module).__mro__[:-1])
    for function in takers:
        switches = [p for p in inspect.signature(function).parameters.values() if "aux" in p.name]
        if names := [switch.name for switch in switches if switch.default in (None, True, False)]:
            return names
    return []


def _with_free_sizes(network: KnownNetwork, published: Shapes, kwargs: Mapping[str, Any]) -> tuple[Sizes, list[str]]:
    counted = {**kwargs, "num_classes": _CLASSES} if network.class_count is not None else None
    for arguments, channels in ((counted, _CHANNELS), (counted, None), (kwargs, _CHANNELS)):
        changed = None if arguments is None else _built(network, arguments, channels)
        shapes = {} if changed is None else changed[1]
        heads: list[str] = []
        if network.heads and shapes and arguments is counted:
            bare = _built(network, {**kwargs, "num_classes": 0}) if network.class_count else (None, published)
            heads = [name for name in shapes if bare and name not in bare[1]]
            if not all(name.startswith(network.heads) for name in heads):
                heads = []
        if shapes.keys() - published.keys() <= set(heads) and published.keys() <= shapes.keys():
            sizes = {name: _sizes_of(published.get(name), shape, network.class_count) for name, shape in shapes.items()}
            if all(size is not None for size in sizes.values()):
                return {name: size for name, size in sizes.items() if size is not None}, heads
    return published, []


def _sizes_of(
    published: tuple[int, ...] | None, changed: tuple[int, ...], class_count: int | None
) -> tuple[int | Free, ...] | None:
    """Compare published sizes with those for other counts: `Free` where they follow; None if they differ otherwise."""
    if published is not None and len(published) != len(changed):
        return None
    sizes: list[int | Free] = []
    for at, after in enumerate(changed):
        before = None if published is None else published[at]
        if after == before:
            sizes.append(after)
        elif after % _CLASSES == 0 and before in (None, after // _CLASSES * (class_count or 0)):
            sizes.append(Free("classes", after // _CLASSES))
        elif after % _CHANNELS == 0 and before == after // _CHANNELS * COLOURS:
            sizes.append(Free("channels", after // _CHANNELS))
        elif before is None:
            sizes.append(after)
        else:
            return None
    return tuple(sizes)


def _grid(module: nn.Module) -> tuple[int, int] | None:
    patch, size = attribute_of(attribute_of(module, "patch_embed", module), "patch_size"), picture_size(module)
    patch = patch[0] if isinstance(patch, tuple) and patch else patch
    return (patch, size[0]) if type(patch) is int and size and size[0] >= patch > 0 else None


def _with_patches(sizes: Sizes, shapes: Shapes, resized: Shapes, patch: int, side: int) -> Sizes:
    """Return sizes with the numbers of patches `Free`, by the shapes for pictures of twice the side.

    Only position embeddings, (1, patches and more, D), follow it; if anything else changes, no size is `Free`.
    """
    patches, patches_after = (side // patch) ** 2, (2 * side // patch) ** 2
    patched: dict[str, tuple[int | Free, ...]] = {}
    for name, after in resized.items():
        before = shapes.get(name)
        if before == after:
            continue
        if before is None or len(before) != 3 or (before[0], before[2]) != (after[0], after[2]):
            return sizes
        others = before[1] - patches  # class token and registers
        if others < 0 or after[1] != patches_after + others:
            return sizes
        patched[name] = (sizes[name][0], Free("patches", others), sizes[name][2])
    return {**sizes, **patched} if resized.keys() == shapes.keys() else sizes
