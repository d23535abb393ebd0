"""Take the weights out of what a file holds: a bare state dict, or one inside a larger training checkpoint.

Everything here comes from a stranger, as in `weight_sets`.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hookscope.checkpoints.fileformat import holds_inputs
from hookscope.checkpoints.reading import claims_too_much
from hookscope.checkpoints.stand_ins import ModuleState, kind_of
from hookscope.errors import CheckpointError, ModelError, UsageError
from hookscope.models.deepspeed import part_of_zero
from hookscope.models.lit_ema import DotlessCopy, dotless_copy
from hookscope.models.weight_sets import (
    Keys,
    dotted,
    entries_at,
    is_averaged,
    is_optimiser,
    listed,
    resolved_key,
    shown_key,
    summary_of,
    tensors_of,
    weight_candidates,
)
from hookscope.parameters import arg
from hookscope.text import an, counted, exception_line, printable


@dataclass(frozen=True, slots=True)
class Weights:
    """Detached tensors and other values by name, and notes; other fields as in `Checkpoint`.

    `keys` is their place in the file, `copy` is LitEma's averaged copy, which may stand among them.
    """

    state: "OrderedDict[str, Any]"
    module: nn.Module | None
    notes: tuple[str, ...]
    pickled_class: str = ""
    requires_grad: Mapping[str, bool] = field(default_factory=dict)
    keys: Keys = ()
    copy: DotlessCopy | None = None


def weights_in(content: object, name: str, key: str | None = None, *, may_trust: bool = True) -> Weights:
    """Return the weights in the content of a file, which messages call `name`.

    `key` is their place: keys joined by dots, which keys may contain themselves; a prefix of all names of the weights
    may follow, or stand alone. If the caller `may_trust` the file, a note on code that was not run names the option.
    Raises CheckpointError if there are no weights, or some without data, or that claim more than their storage has;
    UsageError if there are several and no `key`; NothingMatchedError if there is nothing at `key`; ModelError if a
    trusted Module raises.
    """
    if part := part_of_zero(content):
        raise CheckpointError(f"{name} {part}.")
    if key is None:
        keys, copies = _keys_of_weights(content, name)
        prefix = ""
    else:
        (keys, prefix), copies = resolved_key(content, key, name), []
    stored, ignored = entries_at(content, keys, prefix)
    where = ".".join(filter(None, [dotted(keys), printable(prefix.rstrip("."), 80)]))
    module = stored if isinstance(stored, nn.Module) else None
    holds = f"{name} has at '{where}'" if where else f"{name} holds"
    state = _checked_state(_state_dict(module, name) if module else stored, holds)
    state, copy = _without_dotless_copy(content, keys, prefix, state)
    rest = f"; ignored: {listed(ignored)}" if ignored else ""
    taken = f"{name}: weights taken from its key '{where}'{rest}."
    notes: tuple[str, ...] = (taken,) if where else ()
    for place in (*copies, *([copy.place(dotted(keys))] if copy else [])):
        notes += (f"{name}: the averaged copy at '{place}' is not used; give {arg('key')} {place} for it.",)
    pickled_class = kind_of(stored) if isinstance(stored, ModuleState) else ""
    if pickled_class:
        runs_it = f"; {arg('trust')} runs it" if may_trust else ""
        notes += (f"{name}: weights of a pickled {pickled_class}, whose code was not run{runs_it}.",)
    entries = dict.items(stored) if isinstance(stored, dict) else ()
    flags = {entry: value.requires_grad for entry, value in entries if isinstance(value, nn.Parameter)}
    return Weights(state, module, notes, pickled_class, flags, keys, copy)


def _state_dict(module: nn.Module, name: str) -> object:
    try:
        return module.state_dict()
    except Exception as error:
        kind = type(module).__name__
        raise ModelError(f"{name} holds {an(kind)} without a state dict: {exception_line(error)}") from error


def _keys_of_weights(content: object, name: str) -> tuple[Keys, list[str]]:
    """Return the keys of the only weights that are no averaged copy, () for the whole content, and of the copies."""
    if not isinstance(content, dict):
        return (), []
    if is_optimiser(content):
        raise CheckpointError(f"{name} is an optimiser's state, not a network's; give the file of its state dict.")
    candidates, usual = weight_candidates(content)
    if not usual and (tensors_of(content) or not candidates):
        return (), []
    chosen = [(keys, state) for keys, state in candidates if not usual or keys in usual]
    raw = [(keys, state) for keys, state in chosen if not is_averaged(dotted(keys))] or chosen
    same = {_identity(state) for _, state in raw}
    if len(same) > 1:
        shown = [f"{dotted(keys)} ({_size(state)})" for keys, state in chosen]
        first = dotted(chosen[0][0])
        raise UsageError(
            f"{name} holds several sets of weights: {listed(shown)}; choose with {arg('key')}, such as "
            f"{arg('key')} {first}."
        )
    copies = [dotted(keys) for keys, state in chosen if _identity(state) not in same]
    return raw[0][0], copies


def _without_dotless_copy(
    content: object, keys: Keys, prefix: str, state: "OrderedDict[str, Any]"
) -> tuple["OrderedDict[str, Any]", DotlessCopy | None]:
    """Return weights without LitEma's averaged copy, and the copy; or the copy as weights if `prefix` is its own."""
    around, _ = entries_at(content, keys, "")
    names = [key for key in dict.keys(around) if isinstance(key, str)] if isinstance(around, dict) else []
    copy = dotless_copy(names)
    if copy is None or not isinstance(around, dict) or prefix not in ("", copy.prefix):
        return state, None
    if prefix:
        return _checked_state(copy.taken_from(around), "an averaged copy"), None
    for name in state.keys() - copy.left_out_of(state).keys():
        del state[name]
    return state, copy


def _checked_state(state: object, where: str) -> "OrderedDict[str, Any]":
    """Return a state dict of detached tensors, without the attributes that a file gave it, except module versions."""
    if not isinstance(state, dict):
        sequence = state if isinstance(state, list | tuple) else (state,)
        remedy = f" {holds_inputs()}" if any(isinstance(item, Tensor) for item in sequence) else ""
        raise CheckpointError(f"{where} {an(kind_of(state))}, not a state dict (tensors by name).{remedy}")
    if not tensors_of(state):
        if any(is_optimiser(value) for value in dict.values(state)):
            raise CheckpointError(f"{where} an optimiser's state, but no weights: {summary_of(state)}.")
        raise CheckpointError(f"{where} no tensors by name: {summary_of(state)}.")
    plain: OrderedDict[str, Any] = OrderedDict()
    for key, value in dict.items(state):
        if isinstance(key, str):
            plain[key] = Tensor.detach(value) if isinstance(value, Tensor) else value
        elif isinstance(value, Tensor):
            raise CheckpointError(f"{where} tensors under keys that are not names, such as {shown_key(key)}.")
    for key, tensor in plain.items():
        if isinstance(tensor, Tensor):
            _check_tensor(tensor, f"{where} '{printable(key, 80)}'")
    if isinstance(state, OrderedDict) and (versions := _versions(vars(state).get("_metadata"))):
        vars(plain)["_metadata"] = versions
    return plain


def _check_tensor(tensor: Tensor, label: str) -> None:
    if tensor.is_meta:
        raise CheckpointError(f"{label} without data: a shape only (on the meta device); save it from a real device.")
    if tensor.is_nested and type(tensor) is Tensor:  # the jagged layout is a class of its own
        raise CheckpointError(f"{label}, a nested tensor, which has no shape; save its parts, or the jagged layout.")
    if claims_too_much(tensor):
        sizes = f"{tensor.numel() * tensor.element_size()} bytes of a storage of {tensor.untyped_storage().nbytes()}"
        raise CheckpointError(f"{label}, a tensor that claims {sizes}; save it again after .contiguous().")


def _versions(metadata: object) -> dict[str, dict[str, int]]:
    if not isinstance(metadata, dict):
        return {}
    by_module = {key: value for key, value in dict.items(metadata) if isinstance(key, str) and isinstance(value, dict)}
    return {
        key: {name: number for name, number in dict.items(value) if name == "version" and isinstance(number, int)}
        for key, value in by_module.items()
    }


def _identity(state: object) -> object:
    if not isinstance(state, dict):
        return id(state)
    return frozenset((str(key), id(value)) for key, value in dict.items(state) if isinstance(value, Tensor))


def _size(state: object) -> str:
    return counted(len(tensors_of(state)), "tensor") if isinstance(state, dict) else an(type(state).__name__)
