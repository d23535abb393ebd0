"""Find the known networks that have given names and shapes, by tables of the libraries' networks.

A network that the table lacks is built as published, which needs torch; a file of it with other classes is not
recognised, only called near. Networks in the table are the same in every version, since published weights
must go on fitting.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from hookscope.checkpoints.weight_sets import COUNTER, listed
from hookscope.checkpoints.wrapped_names import stripped_forms
from hookscope.models.names import DEMO, published, timm_names, torchvision_names
from hookscope.models.network_table import (
    COLOURS,
    Free,
    NetworkPattern,
    Shapes,
    Sizes,
    network_pattern,
    network_table,
    state_shapes,
)
from hookscope.text import are, counted, printable, some_of

_LEAST_ALIKE = Fraction(1, 2)  # with less than half of the names in common, a network is not worth suggesting

_PACKED = "_packed_params._packed_params"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A network that, built with these arguments, has the names and shapes of a file; `model` names it as MODEL does.

    `missing_count` counts the buffers that the file lacks, `input_channels` is C of the pictures if it is not the
    network's own. `remarks` say how many names fit, and what differs from the published network.
    """

    model: str
    arguments: Mapping[str, Any]
    input_channels: int | None
    remarks: tuple[str, ...]
    missing_count: int = 0


def recognise(shapes: Shapes) -> tuple[Candidate, ...]:
    """Return every known network with these names and shapes, apart from its numbers of classes and input channels.

    torchvision's networks and `demo` are compared first; if none fits, timm's are, if it is installed. If wrapped names
    can be read in several ways, the most conservative reading that fits counts. `num_batches_tracked` may be missing.
    """
    forms = _readings(shapes)
    fitting = _best_candidates(_torchvision_patterns(), forms)
    if fitting or not find_spec("timm"):
        return _with_ties(fitting, "torchvision")
    return _with_ties(_best_candidates(_timm_patterns(forms), forms), "timm")


def nearest_network(shapes: Shapes) -> str:
    """Return the known network that shares most names and shapes with a file: "demo: 295 of 296 names and shapes; …".

    Returns "" if no network shares more than half of them. timm's networks are compared if no other one is near.
    """
    forms = _readings(shapes)
    near = _nearest(_torchvision_patterns(), forms)
    if not near and find_spec("timm"):
        near = _nearest(_timm_patterns(forms), forms)
    return near


def adapt(model: str, shapes: Shapes) -> Candidate | None:
    """Return the named network with the numbers of classes and input channels that make it fit; None if none do.

    Its remarks say only what differs from the published network. `model` is torchvision's name, "timm:NAME" or "demo";
    any other gives None.
    """
    pattern = _pattern_named(model)
    candidates = _best_candidates([pattern], _readings(shapes)) if pattern else []
    return replace(candidates[0], remarks=candidates[0].remarks[1:]) if candidates else None


def declared_network(names: Sequence[str], candidates: Sequence[Candidate], shapes: Shapes) -> Candidate | None:
    """Return the first network that fits of those that a file names; None if none fits."""
    for name in names:
        fitting = [candidate for candidate in candidates if candidate.model.removeprefix("timm:") == name]
        models = [name]
        models += [f"timm:{name}"] if find_spec("timm") and f"timm:{name}" in network_table("timm").networks else []
        if fitting := fitting or [*filter(None, (adapt(model, shapes) for model in models))]:
            return fitting[0]
    return None


def _readings(shapes: Shapes) -> list[Shapes]:
    return [{new: shapes[old] for old, new in names.items()} for _, names in stripped_forms(shapes)]


def _nearest(patterns: Iterable[NetworkPattern], forms: Sequence[Shapes]) -> str:
    best, sentence = _LEAST_ALIKE, ""
    counts = [Counter(name.partition(".")[0] for name in shapes) for shapes in forms]
    for pattern in patterns:
        close = [shapes for shapes, count in zip(forms, counts, strict=True) if _likeness_bound(pattern, count) > best]
        published = pattern.published_shapes() if close and not pattern.is_int8 else {}
        for form in close if published else ():
            needed = {name: shape for name, shape in published.items() if name in form or not name.endswith(COUNTER)}
            fitting = sum(form.get(name) == shape for name, shape in needed.items())
            surplus = [name for name in form if name not in published]
            alike = Fraction(fitting, len(needed) + len(surplus))
            if alike > best:
                best = alike
                reshaped = [name for name, shape in needed.items() if name in form and form[name] != shape]
                missing = [name for name in needed if name not in form]
                differing = {"missing": missing, "of another shape": reshaped, "unknown to it": surplus}
                quoted = {fault: [f"'{printable(name, 80)}'" for name in names] for fault, names in differing.items()}
                parts = [f"{fault} {some_of(names, 3)}" for fault, names in quoted.items() if names]
                details = "; ".join([f"{fitting} of {len(needed)} names and shapes", *parts])
                sentence = f"{pattern.model}: {details}"
    return sentence


def _likeness_bound(pattern: NetworkPattern, counts: Counter[str]) -> Fraction:
    """Return an upper bound of the share of names that a network and a file share, by the names' first parts."""
    least = max(counts.total(), sum(pattern.counts.values()) - pattern.optional_count)
    return Fraction(sum(min(count, counts[first]) for first, count in pattern.counts.items()), max(least, 1))


def _best_candidates(patterns: Iterable[NetworkPattern], forms: Sequence[Shapes]) -> list[Candidate]:
    """Return the networks with the fewest changes, for the first of `forms` that any network fits."""
    by_form: dict[int, list[Candidate]] = {}
    int8 = any(name.endswith(".zero_point") for name in forms[0])
    for pattern in patterns:
        for index, shapes in enumerate(forms if pattern.is_int8 == int8 else ()):
            if candidate := _candidate_of(pattern, shapes):
                left_out = len(forms[0]) - len(shapes)
                more = (f"{counted(left_out, 'other tensor')} in the file",) if left_out else ()
                by_form.setdefault(index, []).append(replace(candidate, remarks=candidate.remarks + more))
                break
    best = by_form[min(by_form)] if by_form else []
    changes = [(len(fit.arguments) + bool(fit.input_channels), fit.missing_count) for fit in best]
    return [candidate for candidate, count in zip(best, changes, strict=True) if count == min(changes)]


def _candidate_of(pattern: NetworkPattern, shapes: Shapes) -> Candidate | None:
    if pattern.is_int8:
        names = _packed_names(pattern.sizes, shapes)
        # The shapes that an int8 file shares with the floating-point network.
        kept = [name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) > 3]
        shapes = {name: shape for name, shape in shapes.items() if name in kept or name.endswith(_PACKED)}
    elif not 0 <= sum(pattern.counts.values()) - len(shapes) <= pattern.optional_count:
        return None
    else:
        names = {name: name for name in pattern.sizes}
    expected = {new: pattern.sizes[name] for name, new in names.items()}
    if not shapes.keys() <= expected.keys():
        return None
    missing = {name for name in expected.keys() - shapes.keys() if not name.endswith(COUNTER)}
    without = set()
    for group in (pattern.heads, pattern.auxiliary):
        members = {names[name] for name in group if name in names}
        without |= members if members.isdisjoint(shapes) else set()
    counts = None if missing - without else _fitting_counts(pattern, expected, shapes)
    if counts is None:
        return None
    arguments: dict[str, Any] = {}
    has_auxiliary = pattern.auxiliary.isdisjoint(without)
    if pattern.auxiliary and has_auxiliary != pattern.has_auxiliary:
        arguments |= dict.fromkeys(pattern.switches, has_auxiliary)
    if pattern.class_count and pattern.heads and pattern.heads <= without:
        arguments["num_classes"] = 0
    channels = counts.pop("channels", COLOURS)
    if channels != COLOURS and pattern.is_int8:  # its first convolution cannot be rebuilt
        return None
    published = {"classes": pattern.class_count, "side": pattern.grid[1]}
    called = {"classes": "num_classes", "side": pattern.size_argument}
    arguments |= {called[quantity]: count for quantity, count in counts.items() if count != published[quantity]}
    other = channels if channels != COLOURS else None
    counters = sum(name not in without for name in expected) - len(shapes)
    remarks = _remarks(pattern, arguments, other, counters, len(shapes))
    return Candidate(pattern.model, arguments, other, remarks, counters)


def _fitting_counts(pattern: NetworkPattern, expected: Sizes, shapes: Shapes) -> dict[str, int] | None:
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        sizes = expected[name]
        if len(sizes) != len(shape):
            return None
        for size, now in zip(sizes, shape, strict=True):
            if isinstance(size, int):
                if size != now:
                    return None
                continue
            quantity, count = _count_of(pattern, size, now)
            if count < 1 or counts.setdefault(quantity, count) != count:
                return None
    return counts


def _count_of(pattern: NetworkPattern, size: Free, now: int) -> tuple[str, int]:
    if size.of == "patches":
        patches = max(now - size.number, 0)
        along = math.isqrt(patches)
        return "side", along * pattern.grid[0] if along**2 == patches else 0
    return size.of, now // size.number if now % size.number == 0 else 0


def _remarks(
    pattern: NetworkPattern, arguments: Mapping[str, Any], channels: int | None, counters: int, count: int
) -> tuple[str, ...]:
    compared = "names and shapes of int8 convolutions and linear layers" if pattern.is_int8 else "names and shapes"
    remarks = [f"all {count} {compared} fit"]
    for name, value in arguments.items():
        if name == "num_classes":
            classes = f"{value} class{'es' if value > 1 else ''}" if value else "no classifier"
            remarks.append(f"{classes} instead of {pattern.class_count or 'no classifier'}")
        elif name == pattern.size_argument:
            remarks.append(f"pictures of {value} pixels")
        else:
            remarks.append("with auxiliary heads" if value else "without auxiliary heads")
    if channels:
        remarks.append(f"{counted(channels, 'input channel')} instead of {COLOURS}")
    if counters:
        remarks.append(f"{counters} {COUNTER} {are(counters)} missing, as in old files and with frozen BatchNorm")
    return tuple(remarks)


def _with_ties(candidates: Sequence[Candidate], library: str) -> tuple[Candidate, ...]:
    annotated = []
    for candidate in candidates:
        others = [other.model for other in candidates if other is not candidate]
        also = f"so do those of {listed(others, 3)}" if others else f"no other {library} network's do"
        fits, *rest = candidate.remarks
        annotated.append(replace(candidate, remarks=(f"{fits}; {also}", *rest)))
    return tuple(annotated)


def _packed_names(sizes: Sizes, shapes: Shapes) -> dict[str, str]:
    packed = any(name.endswith(_PACKED) for name in shapes)
    names = {}
    for name, shape in sizes.items():
        if len(shape) > 3:
            names[name] = name
        elif len(shape) == 2 and packed:
            names[name] = name.removesuffix("weight") + _PACKED
    return names


def _torchvision_patterns() -> Iterator[NetworkPattern]:
    table = network_table("torchvision")
    same = installed_version("torchvision") == table.version
    for name in (network for network in table.networks if network != DEMO) if same else torchvision_names():
        pattern = table.networks.get(name) or _built(name)
        if pattern is not None:
            yield pattern
    if find_spec("efficientnet_lite_pytorch"):
        yield table.networks[DEMO]


def _timm_patterns(forms: Sequence[Shapes]) -> Iterator[NetworkPattern]:
    """Yield timm's networks in the table, and others whose first weight is named in `forms`."""
    table = network_table("timm")
    if installed_version("timm") == table.version:
        yield from table.networks.values()
        return
    from hookscope.models import timm_zoo  # noqa: PLC0415 (an optional package, slow to import)

    names = set().union(*forms)
    for name in timm_names():
        network = table.networks.get(f"timm:{name}")
        if not network:
            first = timm_zoo.names_in(published(name).first_conv)
            network = _built(f"timm:{name}") if all(f"{layer}.weight" in names for layer in first) else None
        if network:
            yield network


def _pattern_named(model: str) -> NetworkPattern | None:
    if model.startswith("timm:"):
        network = network_table("timm").networks.get(model.partition(".")[0])
        return _tagged(network, model) if network and "." in model else network or _built(model)
    name = model.removeprefix("torchvision:").lower()
    return next((pattern for pattern in _torchvision_patterns() if pattern.model == name), None)


def _tagged(network: NetworkPattern, model: str) -> NetworkPattern:
    classes = published(model.removeprefix("timm:")).num_classes
    return NetworkPattern(model, {**network.facts, "classes": classes}, network.counts, lambda: network.sizes)


@cache
def _built(model: str) -> NetworkPattern | None:
    """Build a network that the table lacks, and return its names and shapes as published; None if that fails."""
    import torch  # noqa: PLC0415 (slow to import, like the libraries)

    from hookscope.models import construction, timm_zoo, zoo  # noqa: PLC0415

    if model.startswith("timm:"):
        build = partial(timm_zoo.build_timm, model.removeprefix("timm:"), {})
    else:  # an int8 network has the same names in floating point; fusing and packing change the shapes
        build = partial(zoo.build_torchvision, model, {"quantize": False} if model.startswith("quantized_") else {})
    for device in ("meta", "cpu"):  # RegNet computes its widths with tensors
        with construction.seeded(0), construction.silenced_known_warnings(), suppress(Exception):
            with torch.device(device), construction.skipped_initialisation():
                network = build()
            return network_pattern(model, {}, state_shapes(network.state_dict(keep_vars=True)))
    return None


def installed_version(package: str) -> str | None:
    """Return a package's version without what its builds add, as in "0.25.0+cpu"; None if it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None
