"""The networks that a file's names and shapes are held against, built without any weights as far as they may fit."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torchvision.models
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hookscope.models.construction import skipped_initialisation
from hookscope.models.names import DEMO
from hookscope.models.statedict import state_shapes, stripped_forms
from hookscope.models.torchvision_digests import Shapes
from hookscope.models.zoo import build_demo, build_torchvision

# Our choices: a network is given up on after so many parameters of shapes the file does not have, or so many more than
# it does. Those that may differ are the first layer, the heads (they follow the class count: 12 in SSD, more in timm)
# and what detectors build and drop (6 of VGG), which come last.
_STRANGE_LIMIT = 24
_STRANGE_EXCESS = 4

Built = tuple[nn.Module, Shapes]  # with the shapes of its state dict


@dataclass(frozen=True, slots=True)
class KnownNetwork:
    """A network that may be the one.

    `build` takes the builder's arguments and, by keyword, `input_channels`; `builder` is its library's function or
    class, for its signature, and `size_argument` that one's argument for the side of the picture. `class_count` is None
    if it is not known, 0 without a classifier; `heads` are the names of the classifiers that a class count of 0 takes
    away. Files of `int8` networks hold int8 weights: these are built in floating point, which has the same names.
    """

    model: str
    build: Callable[..., nn.Module]
    builder: Callable[..., Any]
    class_count: int | None
    size_argument: str = "image_size"
    heads: tuple[str, ...] = ()
    int8: bool = False


def readings(shapes: Shapes) -> list[Shapes]:
    """Return the shapes by the names in the file, and by those without each prefix of a wrapper."""
    return [{new: shapes[old] for old, new in names.items()} for _, names in stripped_forms(shapes)]


def known_network(model: str) -> KnownNetwork | None:
    """Return the network of that name: torchvision's, "timm:NAME" or "demo"; None for another."""
    if model.startswith("timm:"):
        return _timm_network(model.removeprefix("timm:"))
    name = model.removeprefix("torchvision:").lower()
    return next((network for network in torchvision_networks() if network.model == name), None)


def torchvision_networks() -> Iterator[KnownNetwork]:
    """Yield torchvision's networks, and `demo` if its package is there."""
    for name in torchvision.models.list_models():
        categories = torchvision.models.get_model_weights(name).DEFAULT.meta.get("categories")
        build, builder = partial(build_torchvision, name), torchvision.models.get_model_builder(name)
        yield KnownNetwork(name, build, builder, categories and len(categories), int8=name.startswith("quantized_"))
    if find_spec("efficientnet_lite_pytorch"):
        yield KnownNetwork(DEMO, build_demo, build_demo, 1000)


def _timm_network(name: str) -> KnownNetwork:
    from hookscope.models import timm_zoo  # noqa: PLC0415 (an optional package, slow to import)

    published = timm_zoo.published(name)
    build, heads = partial(timm_zoo.build_timm, name), timm_zoo.names_in(published.classifier)
    return KnownNetwork(f"timm:{name}", build, timm_zoo.build_timm, published.num_classes, "img_size", heads)


def timm_networks(forms: Sequence[Shapes]) -> list[KnownNetwork]:
    """Return those of timm's networks that take the picture with a layer of a name that the file has."""
    from hookscope.models import timm_zoo  # noqa: PLC0415 (an optional package, slow to import)

    known = set().union(*forms)
    return [
        _timm_network(name)
        for name in timm_zoo.timm_names()
        if all(f"{first}.weight" in known for first in timm_zoo.names_in(timm_zoo.published(name).first_conv))
    ]


def until(deadline: float, networks: list[KnownNetwork]) -> Iterator[KnownNetwork]:
    """Take networks out of the list, one by one, until `deadline` (of `time.monotonic`)."""
    while networks and time.monotonic() < deadline:
        yield networks.pop(0)


class _MismatchError(BaseException):
    """The network being built is not the one; a BaseException, since builders are asked to report other exceptions."""


# By network, the shapes of its parameters in the order in which it was built as published, up to where it was given up:
# what cannot fit the next file is not built again.
_parameters: dict[str, list[tuple[int, ...]]] = {}


def built_for(network: KnownNetwork, arguments: Mapping[str, Any], channels: int | None, given: Shapes) -> Built | None:
    """Build a network on the meta device, where it can; None if it cannot be built or is soon seen not to fit."""
    own = {"quantize": False} if network.int8 else {}
    # Fusing and packing have changed the shapes of an int8 file.
    is_published = not (network.int8 or arguments or channels)
    if is_published and any(map(_comparison(given), _parameters.get(network.model, ()))):
        return None
    for device in ("meta", "cpu"):  # RegNet computes its widths with tensors
        is_mismatch = _comparison(given)
        seen: list[tuple[int, ...]] = []

        def compare(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
            if parameter is None or nn.parameter.is_lazy(parameter):
                return
            seen.append(tuple(parameter.shape))  # noqa: B023 - called in this turn only
            if is_mismatch(seen[-1]):  # noqa: B023
                raise _MismatchError

        watching = nullcontext() if network.int8 else register_module_parameter_registration_hook(compare)
        try:
            with watching, torch.device(device), skipped_initialisation():
                module = network.build(own | dict(arguments), input_channels=channels)
            return module, state_shapes(module.state_dict(keep_vars=True))
        except _MismatchError:
            return None
        except Exception:  # noqa: BLE001 - whatever it is, this is not how the network of the file was built
            seen = []
        finally:
            if is_published:
                _parameters[network.model] = max(seen, _parameters.get(network.model, []), key=len)
    return None


def _comparison(given: Shapes) -> Callable[[tuple[int, ...]], bool]:
    """Return what takes shape after shape of a network's parameters and says whether too many are not in `given`."""
    left = Counter(given.values())
    strange = familiar = 0

    def is_mismatch(shape: tuple[int, ...]) -> bool:
        nonlocal strange, familiar
        left[shape] -= 1
        strange += left[shape] < 0
        familiar += left[shape] >= 0
        return strange > min(_STRANGE_LIMIT, familiar + _STRANGE_EXCESS)

    return is_mismatch
