"""Infer which known network names and shapes belong to, without building any weights."""

import inspect
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

from torch import nn

from hookscope.errors import ModelNotFoundError
from hookscope.models.construction import seeded, silenced_known_warnings
from hookscope.models.input_spec import COLOURS
from hookscope.models.known_networks import (
    Built,
    KnownNetwork,
    built_for,
    known_network,
    readings,
    timm_networks,
    torchvision_networks,
    until,
)
from hookscope.models.statedict import state_shapes
from hookscope.models.torchvision_digests import COUNTER, Candidate, Shapes, all_fit, missing_counters, with_ties
from hookscope.text import counted, printable, some_of

# Our choice: with less than half in common, of the names in either, a network is no guess worth making.
_LEAST_ALIKE = Fraction(1, 2)

# Our choice: timm has more than a thousand networks, and importing it has taken seconds already.
TIMM_SECONDS = 20.0

_PACKED = "_packed_params._packed_params"


__all__ = ["Candidate", "adapt", "nearest_network", "recognise", "state_shapes"]


def recognise(shapes: Shapes) -> tuple[Candidate, ...]:
    """Return every known network whose names and shapes are these, up to class and input channel count.

    All of torchvision and `demo` are compared; timm's, where it is installed, if none of those fits. Of several ways to
    read wrapped names the most conservative that fits counts. `num_batches_tracked` may be missing. Raises
    ModelNotFoundError if none fits, but the time ran out before all of timm's were compared.
    """
    forms = readings(shapes)
    with seeded(0), silenced_known_warnings():
        found = _fitting(torchvision_networks(), forms)
        if found or not find_spec("timm"):
            return with_ties(found, "torchvision")
        started, networks = time.monotonic(), timm_networks(forms)
        found = _fitting(until(started + TIMM_SECONDS, networks), forms)
    left = f"{len(networks)} of timm's networks were not compared, as {TIMM_SECONDS:g} s had passed"
    if networks and not found:
        raise ModelNotFoundError(f"No known network fits, but {left}; name it with --arch.")
    candidates = with_ties(found, "timm")
    return tuple(replace(c, remarks=(*c.remarks, left)) for c in candidates) if networks else candidates


def nearest_network(shapes: Shapes) -> str:
    """Say which known network fits most names and shapes of a file, and what differs: "demo: 295 of 296 names …".

    It is "" if less than half of any network's fit. timm's are compared if none of torchvision's and `demo` is near.

    Names are read without wrappers' prefixes. Networks that `recognise` gave up on by their shapes are not looked at.
    """
    forms = readings(shapes)
    with seeded(0), silenced_known_warnings():
        near = _nearest(torchvision_networks(), forms)
        if not near and find_spec("timm"):
            near = _nearest(until(time.monotonic() + TIMM_SECONDS, timm_networks(forms)), forms)
    return near


def _nearest(networks: Iterable[KnownNetwork], forms: Sequence[Shapes]) -> str:
    best, sentence = _LEAST_ALIKE, ""
    for network in networks:
        built = None if network.int8 else built_for(network, {}, None, forms[0])
        own = built[1] if built else {}
        for given in forms if own else ():
            needed = {name: shape for name, shape in own.items() if name in given or not name.endswith(COUNTER)}
            fitting = sum(given.get(name) == shape for name, shape in needed.items())
            surplus = [name for name in given if name not in own]
            alike = Fraction(fitting, len(needed) + len(surplus))
            if alike > best:
                best = alike
                reshaped = [name for name, shape in needed.items() if name in given and given[name] != shape]
                missing = [name for name in needed if name not in given]
                differing = {"missing": missing, "of another shape": reshaped, "unknown to it": surplus}
                parts = [f"{what} {_named_first(names)}" for what, names in differing.items() if names]
                told = "; ".join([f"{fitting} of {len(needed)} names and shapes", *parts])
                sentence = f"{network.model}: {told}"
    return sentence


def _named_first(names: Sequence[str]) -> str:
    return some_of([f"'{printable(name, 80)}'" for name in names], 3)


def adapt(model: str, shapes: Shapes) -> Candidate | None:
    """Return the named network with the class and input channel count that makes it fit; None if nothing does.

    Its remarks say only what differs from the network as published. `model` is a name of torchvision's, "timm:NAME" or
    "demo"; nothing is known of others.
    """
    network = known_network(model)
    if network is None:
        return None
    with seeded(0), silenced_known_warnings():
        found = _fitting([network], readings(shapes))
    return replace(found[0], remarks=found[0].remarks[1:]) if found else None


def _fitting(networks: Iterable[KnownNetwork], forms: Sequence[Shapes]) -> list[Candidate]:
    """Return the networks that fit the first of `forms` that any fits; of those, the ones that need least changing."""
    found: dict[int, list[Candidate]] = {}
    int8 = any(name.endswith(".zero_point") for name in forms[0])
    for network in networks:
        built = built_for(network, {}, None, forms[0]) if network.int8 == int8 else None
        for index, shapes in enumerate(forms if built else ()):
            if candidate := _settled(network, built, shapes):
                left_out = len(forms[0]) - len(shapes)
                more = (f"{left_out} other tensors in the file",) if left_out else ()
                found.setdefault(index, []).append(replace(candidate, remarks=candidate.remarks + more))
                break
    best = found[min(found)] if found else []
    changes = [len(candidate.arguments) + bool(candidate.input_channels) for candidate in best]
    return [candidate for candidate, count in zip(best, changes, strict=True) if count == min(changes)]


def _settled(network: KnownNetwork, built: Built | None, given: Shapes) -> Candidate | None:
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
        built = built_for(network, arguments, channels, given)
    return None


def _change_of_heads(
    network: KnownNetwork, module: nn.Module, missing: set[str], surplus: set[str], given: Shapes
) -> dict[str, Any]:
    """Return the arguments that add or take away what only the file, or only the network has; empty if none would."""
    odd = missing | surplus
    if network.heads and all(name.startswith(network.heads) for name in odd):
        return {"num_classes": given.get(f"{network.heads[0]}.weight", (0,))[0]}
    if all("aux" in name.lower() for name in odd):
        return dict.fromkeys(_auxiliary_arguments(network, module), bool(surplus))
    return {}


def _auxiliary_arguments(network: KnownNetwork, module: nn.Module) -> list[str]:
    """Return the switch for auxiliary heads, of the builder or else of the class it hands its keywords to."""
    takers: tuple[Any, ...] = (network.builder, *type(module).__mro__)
    for function in takers:
        switches = [p for p in inspect.signature(function).parameters.values() if "aux" in p.name]
        if names := [switch.name for switch in switches if switch.default in (None, True, False)]:
            return names
    return []


def _change_of_sizes(
    network: KnownNetwork, module: nn.Module, own: Shapes, given: Shapes
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
    network: KnownNetwork, arguments: Mapping[str, Any], channels: int | None, own: Shapes, given: Shapes
) -> tuple[str, ...]:
    which = "names and shapes of int8 convolutions and linear layers" if network.int8 else "names and shapes"
    remarks = [all_fit(len(given), which)]
    for name, value in arguments.items():
        if name == "num_classes":
            classes = f"{value} class{'es' if value > 1 else ''}" if value else "no classifier"
            remarks.append(f"{classes} instead of {network.class_count or 'no classifier'}")
        elif name == network.size_argument:
            remarks.append(f"pictures of {value} pixels")
        else:
            remarks.append("with auxiliary heads" if value else "without auxiliary heads")
    if channels:
        remarks.append(f"{counted(channels, 'input channel')} instead of 3")
    return (*remarks, *missing_counters(len(own) - len(given)))


def _packed_shapes(given: Shapes) -> Shapes:
    """Return what an int8 file has of the floating-point network's shapes: those of convolutions and linear layers."""
    return {name: s for name, s in given.items() if name.endswith(_PACKED) or (name.endswith(".weight") and len(s) > 3)}


def _float_shapes(own: Shapes, given: Shapes) -> Shapes:
    """Return the same of the floating-point network's shapes; linear layers only where the file's are known."""
    packed = any(name.endswith(_PACKED) for name in given)
    shapes = {}
    for name, shape in own.items():
        if len(shape) > 3:
            shapes[name] = shape
        elif len(shape) == 2 and packed:
            shapes[name.removesuffix("weight") + _PACKED] = shape
    return shapes
