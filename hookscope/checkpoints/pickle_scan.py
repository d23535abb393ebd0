"""Find what a pickle would import and which storages it claims, without importing or calling anything."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch._weights_only_unpickler import _get_allowed_globals  # the list that `weights_only` goes by

from hookscope.checkpoints.unpickler import (
    ABSENT,
    PLAIN_INSTRUCTIONS,
    Global,
    InertUnpickler,
    Reference,
    StandIn,
    TruncatedPickleError,
    UnreadablePickleError,
)

# Bytes per element, by the storage class in which torch.save names a storage's dtype.
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in torch.storage._dtype_to_storage_type_map().items()}  # noqa: SLF001
_ITEM_BYTES["UntypedStorage"] = 1

_TORCHS_INSTRUCTIONS = PLAIN_INSTRUCTIONS | {pickle.NEWOBJ, pickle.EMPTY_SET, pickle.SHORT_BINSTRING}

_NAMES_LIMIT = 1000  # a pickled network with its training script's objects names a hundred


@dataclass(frozen=True, slots=True)
class PickleSurvey:
    """What a pickle would do.

    `imports` are the dotted names that it would import and no plain checkpoint needs, in order; `storages` the bytes
    that it claims for each storage, by key. It is `malformed` if it cannot be unpickled, or makes something as
    torch.save never does. `is_known_to_torch`: torch's safe reader has all of its instructions. `content` has stand-ins
    for what is not Python's own; it is None if it cannot be read. `wrapper` is the class of a tensor that wraps others,
    such as a DTensor.
    """

    imports: tuple[str, ...]
    storages: dict[str, int]
    is_known_to_torch: bool = True
    truncated: bool = False
    malformed: bool = False
    content: object = None
    wrapper: str = ""


# The calls that torch.save writes, of all that torch allows, with a check of their arguments, None for any. Other calls
# could make tensors of memory that nothing was written to, or take any memory or time: torch.FloatTensor(4),
# bytearray(2**33), slow codecs.
_WRITTEN_CALLS: dict[str, Callable[..., bool] | None] = {
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter", "builtins.set", "builtins.complex")),
    **dict.fromkeys(("torch.Size", "torch.device", "torch.serialization._get_layout")),
    "builtins.bytearray": lambda *arguments: not any(isinstance(argument, int) for argument in arguments),
    "_codecs.encode": lambda *arguments: arguments[1:2] == ("latin1",),
    **dict.fromkeys(
        (f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "qtensor")),
        lambda *arguments: bool(arguments) and isinstance(arguments[0], Reference),
    ),
    **dict.fromkeys(f"torch._utils._rebuild_{kind}" for kind in ("sparse_tensor", "meta_tensor_no_storage")),
    **dict.fromkeys(f"torch._utils._rebuild_{kind}" for kind in ("parameter", "parameter_with_state")),
}


def survey_pickle(file: BinaryIO) -> PickleSurvey:
    """Return what unpickling would import and claim; `file` is then behind the pickle. Never raises for its content.

    A pickle can be made to take any time and memory, so this belongs in a process with limits. `file` is at the start
    of a pickle, and can seek.
    """
    unpickler = InertUnpickler(file)
    truncated, malformed, content = False, False, None
    try:
        content = unpickler.load()
    except TruncatedPickleError:
        truncated = True
    except UnreadablePickleError:
        malformed = True
    allowed = _get_allowed_globals()
    imports = tuple(name for name in unpickler.globals if name not in allowed)
    storages: dict[str, int] = {}
    for reference in unpickler.references:
        malformed |= not _note_storage(reference.identifier, storages)
    malformed |= len(imports) > _NAMES_LIMIT or not all(map(_is_written, unpickler.calls))
    wrapper = next(filter(None, map(_wrapper_class, unpickler.calls)), "")
    is_known = unpickler.instructions <= _TORCHS_INSTRUCTIONS
    return PickleSurvey(imports, storages, is_known, truncated, malformed, content, wrapper)


def _wrapper_class(call: StandIn) -> str:
    match call.arguments:
        case (Global(name="torch._utils._rebuild_wrapper_subclass"), Global(name=kind), *_):
            return kind
    return ""


def _is_written(call: StandIn) -> bool:
    name, arguments = call.name, call.arguments
    if name in _get_allowed_globals() and call.state is not ABSENT:  # a state can replace a tensor's storage
        return False
    if name == "torch._tensor._rebuild_from_type_v2":  # calls its first argument, with its third
        function, nested = (arguments[0], arguments[2]) if len(arguments) > 2 else (None, ())
        arguments = nested if isinstance(nested, tuple) else ()
        name = function.name if isinstance(function, Global) else ""
    if name not in _WRITTEN_CALLS:
        return name not in _get_allowed_globals()
    check = _WRITTEN_CALLS[name]
    return check is None or check(*arguments)


def _note_storage(identifier: object, storages: dict[str, int]) -> bool:
    """Note a storage's bytes; False unless it is as torch.save names it: ("storage", type, key, location, numel)."""
    # Legacy files append the view, if a storage is a view of another one.
    if not isinstance(identifier, tuple) or len(identifier) not in (5, 6) or identifier[0] != "storage":
        return False
    _, kind, key, _, count = identifier[:5]
    size = _ITEM_BYTES.get(kind.name.rpartition(".")[2]) if isinstance(kind, Global) else None
    if size is None or type(key) is not str or not key.isascii() or type(count) is not int or count < 0:
        return False
    storages[key] = max(size * count, storages.get(key, 0))
    return True
