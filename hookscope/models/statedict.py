"""Load a state dict into a network, strictly, without wrapping prefixes of its names."""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.checkpoints.stand_ins import kind_of
from hookscope.checkpoints.weight_sets import COUNTER, is_averaged, listed
from hookscope.checkpoints.wrapped_names import stripped_forms
from hookscope.errors import MisfitError
from hookscope.parameters import arg
from hookscope.text import counted, printable

_LISTED = 3  # names in a message


def named_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by name, detached; tensors that int8 modules pack into a tuple as "name[0]"."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield name, value.detach()
        elif isinstance(value, tuple | list):
            yield from ((f"{name}[{at}]", part.detach()) for at, part in enumerate(value) if isinstance(part, Tensor))


def fits(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether `state` has exactly the names and shapes that `module` has, wrapping prefixes aside."""
    expected = {name: _shape_or_type(value) for name, value in module.state_dict().items()}
    actual = {name: _shape_or_type(value) for name, value in state.items()}
    return any(expected == {new: actual[old] for old, new in mapping.items()} for _, mapping in stripped_forms(actual))


def load_into(
    module: nn.Module,
    state: Mapping[str, Any],
    origin: str,
    options: FileOptions = FileOptions(),  # noqa: B008 - frozen
    *,
    name: str = "",
) -> tuple[list[str], list[str]]:
    """Copy `state`, called `origin`, into `module`, called `name` or by its class, strictly: names and shapes must fit.

    A wrapping prefix is removed, or one of the network's put in front, when that makes the names fit. Names may be
    missing for a BatchNorm's `num_batches_tracked`, for tensors in the memory of loaded tensors (tied weights, views),
    and where `options` allows it; a name of another shape must match both of its patterns.

    Returns warnings about what is unused, missing, not needed, or given twice, and notes about a prefix and dtypes.
    Raises MisfitError if names or shapes do not fit, or fit in several ways; the module is then overwritten in part.
    """
    target = module.state_dict()
    network = name or type(module).__name__
    misfit = f"{origin} does not fit {network}"
    state = _without_transient(module, target, state)
    memory = _SharedMemory(target)
    is_complete = partial(_is_complete, target, memory, options)
    removed, mapping = _best_reading(target, state, options, misfit, is_complete)
    added = ""
    if not set(mapping.values()) <= target.keys() and (prefixed := _with_prefix(target, state, is_complete)):
        removed, added, mapping = prefixed
    original = {new: old for old, new in mapping.items()}
    named = {new: state[old] for new, old in original.items()}
    # A lazy parameter takes the shape it is given.
    formed = {key: value for key, value in target.items() if not nn.parameter.is_lazy(value)}
    reshaped = {key: value for key, value in named.items() if key in formed and not copyable(value, target[key], key)}
    fitting = OrderedDict((key, value) for key, value in named.items() if key not in reshaped)
    # A state dict without module versions, such as one from safetensors, is loaded as one of torch's first versions,
    # which BatchNorm and others convert. It gets the versions of the network instead.
    vars(fitting)["_metadata"] = _versions(state, removed, added) or getattr(target, "_metadata", None)
    absent, surplus = [key for key in target if key not in fitting], [key for key in fitting if key not in target]
    failure: Exception | None = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")  # only the fit is checked
            absent, surplus = module.load_state_dict(fitting, strict=False)
    except Exception as error:  # noqa: BLE001 - torch raises RuntimeError, ValueError and more for what it cannot copy
        failure = error
    not_given = [key for key in absent if key not in reshaped and not key.endswith(COUNTER)]
    filled = memory.filled(not_given, fitting.keys() - set(surplus))
    unexpected = [original.get(key, key) for key in surplus]
    shapes = {
        key: f"{printable(key, 80)}: file {_shown_form(value, target[key])}, network {_shown_form(target[key], value)}"
        for key, value in reshaped.items()
    }
    stripped = f" without the prefix '{printable(removed, 80)}'" if removed else ""
    unfit = unfit_names(
        (origin, f"{origin}{stripped} does not fit {network}"),
        [key for key in not_given if key not in filled],
        unexpected,
        shapes,
        options,
        original=original,
        # `n_averaged` counts the steps of torch's AveragedModel.
        unread=[key for key in state if key not in mapping and key != "n_averaged"],
    )
    if failure is not None:  # though all names and shapes fit
        raise MisfitError(f"{misfit}: {type(failure).__name__}.") from failure
    notes = [f"{origin}: the prefix '{printable(removed, 80)}' was removed from its names."] if removed else []
    notes += [f"{origin}: its names fit with the prefix '{printable(added, 80)}' in front."] if added else []
    own = [key for key, value in formed.items() if isinstance(value, Tensor) and not key.endswith(COUNTER)]
    loaded = [(original.get(key, key), fitting[key], formed[key].dtype) for key in own if key in fitting]
    notes += converted(origin, ((stored.dtype, dtype) for _, stored, dtype in loaded))
    beyond = [key for key, stored, dtype in loaded if _exceeds(stored, dtype)]
    overflown = _sentence(origin, "of its tensors overflowed in the network's dtype", beyond)
    warned = [*unfit, *filter(None, [overflown]), *_twice_given(memory, fitting, original, origin)]
    warned += _unneeded(options.allow_missing, [*not_given, *reshaped], arg("allow_missing"), "no name that is missing")
    nothing, there = "no name that the network does not know", unexpected + [original[key] for key in reshaped]
    warned += _unneeded(options.allow_unexpected, there, arg("allow_unexpected"), nothing)
    return warned, notes


def unfit_names(
    names: tuple[str, str],
    missing: Iterable[str],
    unexpected: Sequence[str],
    reshaped: Mapping[str, str],
    options: FileOptions,
    *,
    original: Mapping[str, str] | None = None,
    unread: Sequence[str] = (),
) -> list[str]:
    """Return sentences about names that do not fit; raise MisfitError unless the options allow for all of them.

    `names` are the name of the weights and the beginning of the error. `reshaped` has a phrase for each tensor of
    another shape, `original` these tensors' names in the file, `unread` further names in the file.
    """
    origin, misfit = names
    missing = [key for key in missing if not key.endswith(COUNTER)]
    absent = [key for key in missing if _matches(key, options.allow_missing)]
    unused = [key for key in unexpected if _matches(key, options.allow_unexpected)]
    in_file = {key: (original or {}).get(key, key) for key in reshaped}
    both = [key for key in reshaped if _matches(key, options.allow_missing)]
    both = [key for key in both if _matches(in_file[key], options.allow_unexpected)]
    unknown = [key for key in unexpected if key not in unused]
    groups = [
        _group("missing", [printable(key, 80) for key in missing if key not in absent]),
        _group("of another shape or type", [difference for key, difference in reshaped.items() if key not in both]),
        _group("unknown to the network", [printable(key, 80) for key in unknown]),
    ]
    if any(groups):
        hint = foreign_names(unknown) or "Is it another network's?"
        raise MisfitError(f"{misfit}: {', '.join(filter(None, groups))}. {hint}")
    unused += [*unread, *(in_file[key] for key in both)]
    kept = "of the network's tensors are not in it and keep their initial values"
    remarks = _sentence(origin, "of its tensors are not used", unused), _sentence(origin, kept, absent + both)
    return [*filter(None, remarks)]


def converted(origin: str, dtypes: Iterable[tuple[torch.dtype, torch.dtype]]) -> list[str]:
    """Return a sentence about the tensors whose dtype in the file is not the network's; [] if there are none."""
    counts = Counter((stored, own) for stored, own in dtypes if stored != own)
    parts = [f"{counted(count, 'tensor')} from {stored} to {own}" for (stored, own), count in counts.items()]
    return [f"{origin}: loading converted {', '.join(parts)}.".replace("torch.", "")] if parts else []


def _exceeds(stored: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether finite values of a tensor are not finite in another dtype."""
    if not (stored.is_floating_point() and dtype.is_floating_point and stored.layout == torch.strided):
        return False
    if stored.is_meta or torch.finfo(stored.dtype).max <= torch.finfo(dtype).max:
        return False
    return bool((stored.isfinite() & ~stored.to(dtype).double().isfinite()).any())


def _without_transient(module: nn.Module, target: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out the network's non-persistent buffers, which TorchScript stores nevertheless."""
    transient = {name for name, _ in module.named_buffers() if name not in target} & state.keys()
    if not transient:
        return state
    kept = OrderedDict((name, value) for name, value in state.items() if name not in transient)
    vars(kept)["_metadata"] = getattr(state, "_metadata", None)
    return kept


class _SharedMemory:
    """The tensors of a state dict that share a storage: tied weights, and views of weights."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        by_storage: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if (storage := _storage_id(value)) is not None:
                by_storage.setdefault(storage, {})[name] = value
        self._neighbours = {name: held for held in by_storage.values() if len(held) > 1 for name in held}

    def filled(self, names: Iterable[str], loaded: AbstractSet[str]) -> set[str]:
        """Return the names of tensors that lie wholly in the memory of loaded tensors."""

        def is_filled(name: str) -> bool:
            group = self._neighbours.get(name, {})
            others = [tensor for neighbour, tensor in group.items() if neighbour in loaded]
            return bool(others) and bool(_shared_bytes(group[name], others).all())

        return {*filter(is_filled, names)}

    def overwritten(self, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield each name whose value is not in memory any more, with the last name that overwrote it."""
        relevant = {name: group for name, group in self._neighbours.items() if name in values}
        kept = [name for name, group in relevant.items() if _holds(group[name], values[name])]
        for name in (name for name in relevant if name not in kept):
            group = relevant[name]
            others = (other for other in reversed(kept) if other in group)
            for winner in (other for other in others if _shared_bytes(group[name], [group[other]]).any()):
                yield name, winner
                break


def _storage_id(value: object) -> int | None:
    if not (isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter)):  # others may have no storage
        return None
    if value.layout is not torch.strided or value.is_quantized or value.is_nested or not value.numel():
        return None
    return int(value.untyped_storage()._cdata)  # noqa: SLF001 - on the meta device all addresses are 0


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _shared_bytes(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return for each byte of a tensor whether another tensor has it too; a single True for an equal layout."""
    if any(_place(other) == _place(tensor) for other in others):
        return torch.ones(1, dtype=torch.bool, device="cpu")
    taken = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.bool, device="cpu")
    for other in others:
        _bytes_of(other, taken).fill_(True)
    return _bytes_of(tensor, taken)


def _bytes_of(tensor: Tensor, taken: Tensor) -> Tensor:
    item = tensor.element_size()
    # An expanded axis has one element in memory.
    sizes = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [stride * item for stride in tensor.stride()]
    return taken.as_strided([*sizes, item], [*strides, 1], tensor.storage_offset() * item)


def _holds(tensor: Tensor, values: object) -> bool:
    """Tell whether a tensor has the bits of `values` in its own dtype; True if either has no data."""
    if tensor.is_meta or not isinstance(values, Tensor) or values.is_meta:
        return True
    pair = (tensor.detach(), torch.empty_like(tensor).copy_(values))
    return torch.equal(*(side.contiguous().view(-1).view(torch.uint8) for side in pair))


def _is_complete(
    target: Mapping[str, Any], memory: _SharedMemory, options: FileOptions, names: AbstractSet[str]
) -> bool:
    lacking = [key for key in target if key not in names and not key.endswith(COUNTER)]
    lacking = [key for key in lacking if not _matches(key, options.allow_missing)]
    return not lacking or len(memory.filled(lacking, names)) == len(lacking)


def _twice_given(
    memory: _SharedMemory, fitting: Mapping[str, Any], original: Mapping[str, str], origin: str
) -> Iterator[str]:
    for lost, winner in memory.overwritten(fitting):
        names = [f"'{printable(original[name], 80)}'" for name in (lost, winner)]
        yield (
            f"{origin}: {names[0]} and {names[1]} share memory in the network, but differ in the file; the network "
            f"has the values of {names[1]}."
        )


def _best_reading(
    target: Mapping[str, Any],
    state: Mapping[str, Any],
    options: FileOptions,
    misfit: str,
    is_complete: Callable[[AbstractSet[str]], bool],
) -> tuple[str, dict[str, str]]:
    """Return the first reading of the file's names that fits, else the reading by which most names fit."""
    forms = stripped_forms(state)
    used = [{new: old for old, new in mapping.items() if new in target} for _, mapping in forms]

    def is_fitting(number: int) -> bool:
        surplus = (old for old, new in forms[number][1].items() if new not in target)
        return is_complete(used[number].keys()) and all(_matches(old, options.allow_unexpected) for old in surplus)

    best = next(filter(is_fitting, range(len(forms))), None)
    if best is None:
        return max(forms, key=lambda form: sum(new in target for new in form[1].values()))
    rivals = {
        prefix: form
        for form, (prefix, _) in enumerate(forms)
        if best and is_complete(used[form].keys()) and len(used[form]) >= len(used[best]) and used[form] != used[best]
    }
    is_copy = is_averaged(options.key or "")  # asked for; else averaged copies, as of AveragedModel, are no rivals
    if raw := [form for form in (best, *rivals.values()) if is_averaged(forms[form][0]) == is_copy] if rivals else []:
        best = raw[0]
        rivals = {prefix: form for prefix, form in rivals.items() if form in raw[1:] and used[form] != used[best]}
    if rivals:
        places = [f"under '{printable(prefix, 40)}'" if prefix else "as they are" for prefix in rivals]
        chosen = printable(forms[best][0], 40)
        raise MisfitError(
            f"{misfit}: it has its names more than once, under '{chosen}' and {', '.join(places[:3])}; choose "
            f"with {arg('key')}, such as {arg('key')} {chosen.rstrip('.')}."
        )
    return forms[best]


def _with_prefix(
    target: Mapping[str, Any], state: Mapping[str, Any], is_complete: Callable[[AbstractSet[str]], bool]
) -> tuple[str, str, dict[str, str]] | None:
    """Return the removed prefix, the added prefix, and new names by those in the file; None if not all of them fit.

    A network that holds another, such as a classifier its backbone, puts the attribute's name before the inner names.
    """
    for removed, forms in stripped_forms(state):
        longest = max(forms.values(), key=len)  # the fewest names of the network end with it
        prefixes = [key.removesuffix(longest) for key in target if key.endswith(f".{longest}")]
        matches = []
        for prefix in prefixes:
            mapping = {old: prefix + new for old, new in forms.items()}
            names = set(mapping.values())
            alike = len(forms) == len(state) and names <= target.keys() and is_complete(names)
            if alike and all(_shape_or_type(state[old]) == _shape_or_type(target[new]) for old, new in mapping.items()):
                matches.append((removed, prefix, mapping))
        if len(matches) == 1:
            return matches[0]
    return None


def _versions(state: Mapping[str, Any], removed: str, added: str) -> dict[str, Any] | None:
    metadata = getattr(state, "_metadata", None)
    if not (removed or added) or not isinstance(metadata, dict):
        return metadata
    inner = {f"{key}.".removeprefix(removed): value for key, value in metadata.items() if f"{key}.".startswith(removed)}
    return {f"{added}{key}".strip("."): value for key, value in inner.items()} or None


def foreign_names(names: Iterable[str]) -> str:
    """Return a sentence naming the framework if the names are another framework's; else ""."""
    for name in names:
        leaf = name.replace("/", ".").rpartition(".")[2]
        if leaf in ("kernel", "embedding") or leaf.endswith(":0") or "/" in name:
            return f"Names like '{printable(name, 80)}' are those of Keras, TensorFlow or JAX; convert it to PyTorch."
    return ""


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _sentence(origin: str, phrase: str, names: list[str]) -> str:
    if len(names) == 1:
        phrase = phrase.replace(" are ", " is ").replace(" keep their ", " keeps its ")
    return f"{origin}: {_group(phrase, [printable(name, 80) for name in names])}." if names else ""


def _unneeded(patterns: Sequence[str], names: Sequence[str], option: str, nothing: str) -> list[str]:
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    return [f"{option} '{printable(pattern)}' matches {nothing}." for pattern in idle]


def copyable(value: object, target: object, name: str) -> bool:
    """Return whether a value can take a tensor's place: of its shape and layout, losing nothing but precision."""
    if _shape_or_type(value) != _shape_or_type(target):
        return False
    if not (isinstance(value, Tensor) and isinstance(target, Tensor)) or name.endswith(COUNTER):
        return True
    loses_phase = value.is_complex() and not target.is_complex()
    loses_fraction = value.is_floating_point() and not (target.is_floating_point() or target.is_complex())
    loses_scale = value.is_quantized and not target.is_quantized
    return value.layout is target.layout and not (loses_phase or loses_fraction or loses_scale)


def _shown_form(value: object, other: object) -> str:
    if _shape_or_type(value) != _shape_or_type(other) or not (isinstance(value, Tensor) and isinstance(other, Tensor)):
        return _shape_or_type(value)
    return str(value.dtype if value.layout is other.layout else value.layout).removeprefix("torch.")


def _shape_or_type(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else kind_of(value)


def _group(phrase: str, members: Sequence[str]) -> str:
    return f"{len(members)} {phrase} ({listed(members, _LISTED)})" if members else ""
