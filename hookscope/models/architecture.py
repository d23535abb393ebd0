"""Which known network do these names and shapes belong to, told without building any weights."""

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torchvision.models
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hookscope.errors import ModelNotFoundError
from hookscope.models.construction import seeded, silenced_known_warnings, skipped_initialisation
from hookscope.models.input_spec import COLOURS
from hookscope.models.statedict import COUNTER, stripped_forms
from hookscope.models.zoo import DEMO, build_demo, build_torchvision

# Our choices: a network is given up on after so many parameters of shapes the file does not have, or so many more than
# it does. Those that may differ are the first layer, the heads (they follow the class count: 12 in SSD, more in timm)
# and what detectors build and drop (6 of VGG), which come last.
_STRANGE_LIMIT = 24
_STRANGE_EXCESS = 4

# Our choice: timm has more than a thousand networks, and importing it has taken seconds already.
TIMM_SECONDS = 20.0

_PACKED = "_packed_params._packed_params"

_Shapes = Mapping[str, tuple[int, ...]]
_Built = tuple[nn.Module, _Shapes]  # with the shapes of its state dict


@dataclass(frozen=True, slots=True)
class Candidate:
    """A network, as MODEL would name it, whose names and shapes are those of a file with these arguments.

    `input_channels` is C of the pictures, if it is not the network's own; `remarks` say how sure this is, and what
    differs from the network as published, for people.
    """

    model: str
    arguments: Mapping[str, Any]
    input_channels: int | None
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Network:
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


def state_shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a state dict by name; those of int8 linear layers, which are packed, included."""
    shapes = {}
    for name, value in state.items():
        tensor = value[0] if isinstance(value, tuple) and value else value
        if isinstance(tensor, Tensor):
            shapes[name] = tuple(tensor.shape)
    return shapes


def recognise(shapes: _Shapes) -> tuple[Candidate, ...]:
    """Return every known network whose names and shapes are these, up to class and input channel count.

    All of torchvision and `demo` are compared; timm's, where it is installed, if none of those fits. Of several ways to
    read wrapped names the most conservative that fits counts. `num_batches_tracked` may be missing. Raises
    ModelNotFoundError if none fits, but the time ran out before all of timm's were compared.
    """
    forms = _forms(shapes)
    with seeded(0), silenced_known_warnings():
        found = _fitting(_torchvision_networks(), forms)
        if found or not find_spec("timm"):
            return _with_ties(found, "torchvision")
        started, networks = time.monotonic(), _timm_networks(forms)
        found = _fitting(_until(started + TIMM_SECONDS, networks), forms)
    left = f"{len(networks)} of timm's networks were not compared, as {TIMM_SECONDS:g} s had passed"
    if networks and not found:
        raise ModelNotFoundError(f"No known network fits, but {left}; name it with --arch.")
    candidates = _with_ties(found, "timm")
    return tuple(replace(c, remarks=(*c.remarks, left)) for c in candidates) if networks else candidates


def adapt(model: str, shapes: _Shapes) -> Candidate | None:
    """Return the named network with the class and input channel count that makes it fit; None if nothing does.

    Its remarks say only what differs from the network as published. `model` is a name of torchvision's, "timm:NAME" or
    "demo"; nothing is known of others.
    """
    network = _named(model)
    if network is None:
        return None
    with seeded(0), silenced_known_warnings():
        found = _fitting([network], _forms(shapes))
    return replace(found[0], remarks=found[0].remarks[1:]) if found else None


def _forms(shapes: _Shapes) -> list[_Shapes]:
    """Return the shapes by the names in the file, and by those without each prefix of a wrapper."""
    return [{new: shapes[old] for old, new in names.items()} for _, names in stripped_forms(shapes)]


def _named(model: str) -> _Network | None:
    if model.startswith("timm:"):
        return _timm_network(model.removeprefix("timm:"))
    name = model.removeprefix("torchvision:").lower()
    return next((network for network in _torchvision_networks() if network.model == name), None)


def _torchvision_networks() -> Iterator[_Network]:
    for name in torchvision.models.list_models():
        categories = torchvision.models.get_model_weights(name).DEFAULT.meta.get("categories")
        build, builder = partial(build_torchvision, name), torchvision.models.get_model_builder(name)
        yield _Network(name, build, builder, categories and len(categories), int8=name.startswith("quantized_"))
    if find_spec("efficientnet_lite_pytorch"):
        yield _Network(DEMO, build_demo, build_demo, 1000)


def _timm_network(name: str) -> _Network:
    from hookscope.models import timm_zoo  # noqa: PLC0415 (an optional package, slow to import)

    published = timm_zoo.published(name)
    build, heads = partial(timm_zoo.build_timm, name), timm_zoo.names_in(published.classifier)
    return _Network(f"timm:{name}", build, timm_zoo.build_timm, published.num_classes, "img_size", heads)


def _timm_networks(forms: Sequence[_Shapes]) -> list[_Network]:
    """Return those of timm's networks that take the picture with a layer of a name that the file has."""
    from hookscope.models import timm_zoo  # noqa: PLC0415 (an optional package, slow to import)

    known = set().union(*forms)
    return [
        _timm_network(name)
        for name in timm_zoo.timm_names()
        if all(f"{first}.weight" in known for first in timm_zoo.names_in(timm_zoo.published(name).first_conv))
    ]


def _until(deadline: float, networks: list[_Network]) -> Iterator[_Network]:
    """Take networks out of the list, one by one, until `deadline` (of `time.monotonic`)."""
    while networks and time.monotonic() < deadline:
        yield networks.pop(0)


def _with_ties(found: list[Candidate], library: str) -> tuple[Candidate, ...]:
    """Return the candidates with a remark each on the others."""
    told = []
    for candidate in found:
        others = [other.model for other in found if other is not candidate]
        alone = f"no other {library} network's do"
        also = f"so do those of {', '.join(others[:3])}{', …' if len(others) > 3 else ''}"
        fits, *rest = candidate.remarks
        told.append(replace(candidate, remarks=(f"{fits}; {also if others else alone}", *rest)))
    return tuple(told)


def _fitting(networks: Iterable[_Network], forms: Sequence[_Shapes]) -> list[Candidate]:
    """Return the networks that fit the first of `forms` that any fits; of those, the ones that need least changing."""
    found: dict[int, list[Candidate]] = {}
    int8 = any(name.endswith(".zero_point") for name in forms[0])
    for network in networks:
        built = _built(network, {}, None, forms[0]) if network.int8 == int8 else None
        for index, shapes in enumerate(forms if built else ()):
            if candidate := _settled(network, built, shapes):
                left_out = len(forms[0]) - len(shapes)
                more = (f"{left_out} other tensors in the file",) if left_out else ()
                found.setdefault(index, []).append(replace(candidate, remarks=candidate.remarks + more))
                break
    best = found[min(found)] if found else []
    changes = [len(candidate.arguments) + bool(candidate.input_channels) for candidate in best]
    return [candidate for candidate, count in zip(best, changes, strict=True) if count == min(changes)]


def _settled(network: _Network, built: _Built | None, given: _Shapes) -> Candidate | None:
    """Return the network with the arguments that make it fit `given` exactly; `built` is it without any."""
    given = _packed_shapes(given) if network.int8 else given
    arguments: dict[str, Any] = {}
    channels: int | None = None
    for _ in range(3):  # heads, then sizes, then nothing is left to change
        if built is None:
            return None
        module, own = built
        own = _float_shapes(own, given) if network.int8 else own
        missing = {name for name in own.keys() - given.keys() if not name.endswith(COUNTER)}
        if not missing and own.items() >= given.items():
            return Candidate(network.model, arguments, channels, _remarks(network, arguments, channels, own, given))
        surplus = given.keys() - own.keys()
        if missing or surplus:
            change = _change_of_heads(network, module, missing, surplus, given)
        else:
            change, channels = _change_of_sizes(network, module, own, given)
            if channels and network.int8:  # its first convolution cannot be rebuilt
                return None
        if not change and not channels:
            return None
        arguments |= change
        built = _built(network, arguments, channels, given)
    return None


def _change_of_heads(
    network: _Network, module: nn.Module, missing: set[str], surplus: set[str], given: _Shapes
) -> dict[str, Any]:
    """Return the arguments that add or take away what only the file, or only the network has; empty if none would."""
    odd = missing | surplus
    if network.heads and all(name.startswith(network.heads) for name in odd):
        return {"num_classes": given.get(f"{network.heads[0]}.weight", (0,))[0]}
    if all("aux" in name.lower() for name in odd):
        return dict.fromkeys(_auxiliary_arguments(network, module), bool(surplus))
    return {}


def _auxiliary_arguments(network: _Network, module: nn.Module) -> list[str]:
    """Return the switch for auxiliary heads, of the builder or else of the class it hands its keywords to."""
    takers: tuple[Any, ...] = (network.builder, *type(module).__mro__)
    for function in takers:
        switches = [p for p in inspect.signature(function).parameters.values() if "aux" in p.name]
        if names := [switch.name for switch in switches if switch.default in (None, True, False)]:
            return names
    return []


def _change_of_sizes(
    network: _Network, module: nn.Module, own: _Shapes, given: _Shapes
) -> tuple[dict[str, Any], int | None]:
    """Return the arguments and the channel count that would explain every tensor of another shape; neither if none."""
    counts: dict[str, set[int]] = {}
    for name, shape in given.items():
        axes = [axis for axis, (a, b) in enumerate(zip(own[name], shape, strict=False)) if a != b]
        if len(shape) != len(own[name]) or len(axes) > 1:
            return {}, None
        if not axes:
            continue
        before, now = own[name][axes[0]], shape[axes[0]]
        if axes == [0]:  # some heads have rows for each anchor and class
            what, count = "num_classes", Fraction(now * (network.class_count or 0), before)
        elif axes == [1] and len(shape) == 3:
            what, count = network.size_argument, Fraction(_image_size(module, before, now))
        else:  # some stems fold pixels into channels
            what, count = "channels", Fraction(now * COLOURS, before)
        if count.denominator > 1 or count < 1:
            return {}, None
        counts.setdefault(what, set()).add(int(count))
    if any(len(values) > 1 for values in counts.values()):
        return {}, None
    change = {what: values.pop() for what, values in counts.items()}
    return change, change.pop("channels", None)


def _image_size(module: nn.Module, before: int, now: int) -> int:
    """Return the side of the pictures that gives a vision transformer `now` tokens instead of `before`; 0 if none."""
    patches = getattr(module, "patch_embed", module)
    patch, size = _side(patches, "patch_size"), _side(patches, "img_size") or _side(patches, "image_size")
    if not patch or not size:
        return 0
    others = before - (size // patch) ** 2  # class token and registers
    return math.isqrt(max(now - others, 0)) * patch


def _side(module: object, name: str) -> int | None:
    side = getattr(module, name, None)
    side = side[0] if isinstance(side, tuple) and side else side
    return side if isinstance(side, int) else None


def _remarks(
    network: _Network, arguments: Mapping[str, Any], channels: int | None, own: _Shapes, given: _Shapes
) -> tuple[str, ...]:
    which = "names and shapes of int8 convolutions and linear layers" if network.int8 else "names and shapes"
    remarks = [f"all {len(given)} {which} fit"]
    for name, value in arguments.items():
        if name == "num_classes":
            classes = f"{value} class{'es' if value > 1 else ''}" if value else "no classifier"
            remarks.append(f"{classes} instead of {network.class_count or 'no classifier'}")
        elif name == network.size_argument:
            remarks.append(f"pictures of {value} pixels")
        else:
            remarks.append("with auxiliary heads" if value else "without auxiliary heads")
    if channels:
        remarks.append(f"{channels} input channel{'s' if channels > 1 else ''} instead of 3")
    if counters := len(own) - len(given):
        remarks.append(f"{counters} {COUNTER} are missing, as in old files and with frozen BatchNorm")
    return tuple(remarks)


def _packed_shapes(given: _Shapes) -> _Shapes:
    """Return what an int8 file has of the floating-point network's shapes: those of convolutions and linear layers."""
    return {name: s for name, s in given.items() if name.endswith(_PACKED) or (name.endswith(".weight") and len(s) > 3)}


def _float_shapes(own: _Shapes, given: _Shapes) -> _Shapes:
    """Return the same of the floating-point network's shapes; linear layers only where the file's are known."""
    packed = any(name.endswith(_PACKED) for name in given)
    shapes = {}
    for name, shape in own.items():
        if len(shape) > 3:
            shapes[name] = shape
        elif len(shape) == 2 and packed:
            shapes[name.removesuffix("weight") + _PACKED] = shape
    return shapes


class _MismatchError(BaseException):
    """The network being built is not the one; a BaseException, since builders are asked to report other exceptions."""


# By network, the shapes of its parameters in the order in which it was built as published, up to where it was given up:
# what cannot fit the next file is not built again.
_parameters: dict[str, list[tuple[int, ...]]] = {}


def _built(network: _Network, arguments: Mapping[str, Any], channels: int | None, given: _Shapes) -> _Built | None:
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


def _comparison(given: _Shapes) -> Callable[[tuple[int, ...]], bool]:
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
