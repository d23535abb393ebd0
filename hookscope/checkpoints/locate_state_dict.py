"""Take the weights out of what a file holds: a bare state dict, or one inside a larger training checkpoint.

Everything here comes from a stranger, as in `weight_sets`.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hookscope.checkpoints.deepspeed import part_of_zero
from hookscope.checkpoints.fileformat import holds_inputs
from hookscope.checkpoints.lit_ema import DotlessCopy, dotless_copy
from hookscope.checkpoints.reading import claims_too_much
from hookscope.checkpoints.stand_ins import ModuleState, kind_of
from hookscope.checkpoints.weight_sets import (
    Keys,
    dotted,
    entries_at,
    is_optimiser,
    listed,
    place_of_weights,
    shown_key,
    summary_of,
    tensors_of,
)
from hookscope.errors import CheckpointError, ModelError
from hookscope.parameters import arg
from hookscope.text import an, exception_line, printable


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
    keys, prefix, copies = place_of_weights(content, key, name)
    stored, others = entries_at(content, keys, prefix)
    around, _ = entries_at(content, keys, "")
    where = ".".join(filter(None, [dotted(keys), printable(prefix.rstrip("."), 80)]))
    module = stored if isinstance(stored, nn.Module) else None
    holds = f"{name} has at '{where}'" if where else f"{name} holds"
    state = _checked_state(_state_dict(module, name) if module else stored, holds)
    state, copy = _without_dotless_copy(around, prefix, state)
    rest = f"; other entries: {listed(others)}" if others else ""
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


def _without_dotless_copy(
    around: object, prefix: str, state: "OrderedDict[str, Any]"
) -> tuple["OrderedDict[str, Any]", DotlessCopy | None]:
    """Return weights without LitEma's averaged copy, and the copy; or the copy as weights if `prefix` is its own."""
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
