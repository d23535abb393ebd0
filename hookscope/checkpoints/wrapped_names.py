"""Names in a state dict without the prefixes of wrappers that the network was saved inside."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

# Prefixes of DistributedDataParallel and AveragedModel, compile, Lightning, Fabric and FSDP, and usual names in
# training code of the attribute that holds the network.
_WRAPPERS = (
    *("module.", "_orig_mod.", "model.", "_forward_module.", "_fsdp_wrapped_module.", "backbone.", "net.", "network."),
    *("encoder.", "base_model.", "base_encoder.", "encoder_q.", "ema_model.", "ema.", "student.", "teacher."),
    "classifier.",
)

_FEWEST_TWINS = 3  # fewer names may be the same by chance, where no wrapper tells copies from parts of one network

# Wrappers that are also used inside a network.
_INNER_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

# Bounds against files made to have many readings.
_WRAPPERS_DEEP = 4
_FORMS_LIMIT = 24


def stripped_forms(names: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the ways to read the names of a file, whose network may have been wrapped in others when it was saved.

    Each is (prefix removed, {name in the file: name}), most conservative first: as they are, then without wrapping
    prefixes, then without wrappers inside names. Names outside a prefix are not in its mapping.
    """
    forms: list[tuple[str, dict[str, str]]] = [("", {name: name for name in names})]
    for removed, mapping in forms:  # grows while it is walked: breadth first
        if len(forms) >= _FORMS_LIMIT or removed.count(".") >= _WRAPPERS_DEEP:
            break
        for prefix in _wrappers(mapping.values()):
            inner = {name: rest.removeprefix(prefix) for name, rest in mapping.items() if rest.startswith(prefix)}
            _add(forms, removed + prefix, inner)
    for removed, mapping in forms:  # a name may have wrappers of several kinds
        for wrapper in _INNER_WRAPPERS if len(forms) < 2 * _FORMS_LIMIT - len(_INNER_WRAPPERS) else ():
            inner = {name: f".{rest}".replace(f".{wrapper}", ".")[1:] for name, rest in mapping.items()}
            _add(forms, removed + wrapper, inner)
    return forms


def _wrappers(names: Iterable[str]) -> list[str]:
    firsts = Counter(f"{head}." for head, dot, rest in (name.partition(".") for name in names) if dot and rest)
    half = firsts.total() / 2
    prefixes = [prefix for prefix in _WRAPPERS if prefix in firsts]
    return prefixes + [prefix for prefix, count in firsts.items() if count >= half and prefix not in prefixes]


def _add(forms: list[tuple[str, dict[str, str]]], removed: str, mapping: dict[str, str]) -> None:
    distinct = len(set(mapping.values())) == len(mapping)
    if mapping and distinct and all(mapping != other for _, other in forms):
        forms.append((removed, mapping))


class Twins(NamedTuple):
    """Names that are in a file twice: `pairs` of them, with `prefixes` in front ("" for none)."""

    prefixes: tuple[str, str]
    pairs: Sequence[tuple[str, str]]


def twin_names(shapes: Mapping[str, object]) -> Twins | None:
    """Return the largest set of names that is in a file twice, with different prefixes and equal shapes, or None.

    Either a network and a wrapped copy of it, "fc.weight" and "module.fc.weight", where at least half of the wrapped
    names have a twin (fewer may be chance); or two wrapped copies with equal names.
    """
    forms = stripped_forms(shapes)
    behind = {removed: mapping for removed, mapping in forms if all(name.startswith(removed) for name in mapping)}
    candidates = [*_beside_wrapped(behind), *_in_two_wrappers(behind), *_wrapped_inside(shapes)]
    alike = [twins for twins in candidates if all(shapes[first] == shapes[other] for first, other in twins.pairs)]
    return max(alike, key=lambda twins: len(twins.pairs), default=None)


def _beside_wrapped(behind: Mapping[str, Mapping[str, str]]) -> Iterator[Twins]:
    plain = behind[""]
    for removed, mapping in behind.items():
        pairs = [(inner, name) for name, inner in mapping.items() if inner in plain] if removed else []
        if len(pairs) >= max(1 if _is_wrapper(removed) else _FEWEST_TWINS, len(mapping) / 2):
            yield Twins(("", removed), pairs)


def _in_two_wrappers(behind: Mapping[str, Mapping[str, str]]) -> Iterator[Twins]:
    by_inner: dict[frozenset[str], list[str]] = {}
    for removed, mapping in behind.items():
        if _is_wrapper(removed) and len(mapping) >= _FEWEST_TWINS:
            by_inner.setdefault(frozenset(mapping.values()), []).append(removed)
    for inner, (first, *others) in by_inner.items():
        for other in others:
            yield Twins((first, other), [(first + name, other + name) for name in sorted(inner)])


def _wrapped_inside(names: Collection[str]) -> Iterator[Twins]:
    for wrapper in _INNER_WRAPPERS:
        plain = {name: f".{name}".replace(f".{wrapper}", ".")[1:] for name in names}
        pairs = [(inner, name) for name, inner in plain.items() if inner != name and inner in names]
        if pairs:
            yield Twins(("", wrapper), pairs)


def _is_wrapper(prefix: str) -> bool:
    return f"{prefix.rstrip('.').rpartition('.')[2]}." in _WRAPPERS
