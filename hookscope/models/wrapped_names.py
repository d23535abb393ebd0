"""Names in a state dict without the prefixes of wrappers that the network was saved inside."""

from collections import Counter
from collections.abc import Iterable

# Prefixes of DistributedDataParallel and AveragedModel, compile, Lightning, Fabric and FSDP, and usual names in
# training code of the attribute that holds the network.
_WRAPPERS = (
    *("module.", "_orig_mod.", "model.", "_forward_module.", "_fsdp_wrapped_module.", "backbone.", "net.", "network."),
    *("encoder.", "base_model.", "base_encoder.", "encoder_q.", "ema_model.", "ema.", "student.", "teacher."),
    "classifier.",
)

# Wrappers that are also used inside a network.
_INNER_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

# Our choice: bounds against files made to have many readings.
_WRAPPERS_DEEP = 4
_FORMS_LIMIT = 24


def stripped_forms(names: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the ways to read the names of a file, whose network may have been wrapped in others when it was saved.

    Each is (prefix removed, {name in the file: name}), most conservative first: as they are, then without wrapping
    prefixes, then without wrappers inside names. Names outside a prefix are not in its mapping: AveragedModel's
    counter, a metric of Lightning's.
    """
    forms: list[tuple[str, dict[str, str]]] = [("", {name: name for name in names})]
    for removed, mapping in forms:  # grows while it is walked: breadth first
        if len(forms) >= _FORMS_LIMIT or removed.count(".") >= _WRAPPERS_DEEP:
            break
        for prefix in _wrappers(mapping.values()):
            inner = {name: rest.removeprefix(prefix) for name, rest in mapping.items() if rest.startswith(prefix)}
            _add(forms, removed + prefix, inner)
    for removed, mapping in forms[:]:
        for wrapper in _INNER_WRAPPERS:
            inner = {name: f".{rest}".replace(f".{wrapper}", ".")[1:] for name, rest in mapping.items()}
            _add(forms, removed + wrapper, inner)
    return forms


def _wrappers(names: Iterable[str]) -> list[str]:
    """Return the prefixes worth removing: known ones, and whatever at least half of the names start with."""
    firsts = Counter(f"{head}." for head, dot, rest in (name.partition(".") for name in names) if dot and rest)
    half = firsts.total() / 2
    known = [prefix for prefix in _WRAPPERS if prefix in firsts]
    return known + [prefix for prefix, count in firsts.items() if count >= half and prefix not in known]


def _add(forms: list[tuple[str, dict[str, str]]], removed: str, mapping: dict[str, str]) -> None:
    distinct = len(set(mapping.values())) == len(mapping)
    if mapping and distinct and all(mapping != other for _, other in forms):
        forms.append((removed, mapping))
