"""Go through a pickle without importing or calling anything: what would it import, which storages does it claim?"""

import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # what Python 2's modules are called today
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Self

import torch
from torch._weights_only_unpickler import _get_allowed_globals  # the list that `weights_only` goes by

# Bytes per element, by the storage class in which torch.save names a storage's dtype.
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in torch.storage._dtype_to_storage_type_map().items()}  # noqa: SLF001
_ITEM_BYTES["UntypedStorage"] = 1

# Names in a message. Our choice.
_NAMES_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class PickleSurvey:
    """What a pickle would do.

    Attributes:
        imports: Dotted names it would import that no plain checkpoint needs, in order, each once.
        storages: Bytes that it claims for each storage, by the key of the storage.
        protocol: Pickle protocol; torch writes and safely reads 2.
        malformed: Whether it cannot be unpickled, or makes something as torch.save never does.
        content: What it holds, as far as that is Python's own literals and containers.
    """

    imports: tuple[str, ...]
    storages: dict[str, int]
    protocol: int
    truncated: bool = False
    malformed: bool = False
    content: object = None


class _Inert:
    """Stands in for whatever a pickle imports or makes: takes every call and every state, and does nothing."""

    __slots__ = ()
    dotted = ""  # what it stands in for
    note_call: Callable[[tuple[object, ...]], None] = staticmethod(lambda _arguments: None)

    def __new__(cls, *arguments: object, **_: object) -> Self:
        cls.note_call(arguments)
        return object.__new__(cls)

    def __call__(self, *_: object, **__: object) -> "_Inert":
        return _Inert()

    def __setitem__(self, _: object, __: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...

    append = extend = add = __setstate__


class _Storage(_Inert):
    """Stands in for a storage of the file."""

    __slots__ = ()


def _any(*_: object) -> bool:
    return True


# What torch.save writes of all the calls that torch allows. Others could make tensors of memory that nothing was
# written to, or take any memory or time: torch.FloatTensor(4), bytearray(2**33), slow codecs.
_WRITTEN_CALLS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter", "builtins.set", "builtins.complex"), _any),
    **dict.fromkeys(("torch.Size", "torch.device", "torch.serialization._get_layout"), _any),
    "builtins.bytearray": lambda *given: not any(isinstance(each, int) for each in given),
    "_codecs.encode": lambda _text, codec="", *_: codec == "latin1",
    **dict.fromkeys(
        (f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "qtensor")),
        lambda storage, *_: isinstance(storage, _Storage),
    ),
    **dict.fromkeys((f"torch._utils._rebuild_{kind}" for kind in ("sparse_tensor", "meta_tensor_no_storage")), _any),
    **dict.fromkeys((f"torch._utils._rebuild_{kind}" for kind in ("parameter", "parameter_with_state")), _any),
}


class _Surveyor(pickle.Unpickler):
    """Unpickles nothing but Python's own literals and containers, and writes down the rest."""

    def __init__(self, file: BinaryIO, protocol: int) -> None:
        super().__init__(file, encoding="latin1")
        self.protocol = protocol
        self.imports: dict[str, type[_Inert]] = {}
        self.storages: dict[str, int] = {}
        self.malformed = False

    def find_class(self, module: str, name: str) -> Any:
        if self.protocol < 3:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        dotted = f"{module}.{name}"
        if dotted not in self.imports and len(self.imports) < _NAMES_LIMIT:
            inside = {"__slots__": (), "dotted": dotted, "note_call": staticmethod(partial(self.note_call, dotted))}
            self.imports[dotted] = type("_Import", (_Inert,), inside)
        return self.imports.get(dotted, _Inert)

    def note_call(self, dotted: str, arguments: tuple[object, ...]) -> None:
        if dotted == "torch._tensor._rebuild_from_type_v2":  # calls its first argument, with its third
            function, nested = arguments[0], arguments[2]
            arguments = nested if isinstance(nested, tuple) else ()
            dotted = function.dotted if isinstance(function, type) and issubclass(function, _Inert) else ""
        is_written = _WRITTEN_CALLS.get(dotted)
        if dotted in _get_allowed_globals():
            self.malformed |= is_written is None or not is_written(*arguments)

    def persistent_load(self, pid: Any) -> Any:
        self.malformed |= not self._note_storage(pid)
        return _Storage()

    def _note_storage(self, pid: object) -> bool:
        """Write down a storage; say whether it is named as torch.save does: ("storage", type, key, location, numel)."""
        # Legacy files append the view that a storage is of another.
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            return False
        _, kind, key, _, count = pid[:5]
        is_named = isinstance(kind, type) and issubclass(kind, _Inert)
        size = _ITEM_BYTES.get(kind.dotted.rpartition(".")[2]) if is_named else None
        if size is None or type(key) is not str or not key.isascii() or type(count) is not int or count < 0:
            return False
        self.storages[key] = max(size * count, self.storages.get(key, 0))
        return True


def survey_pickle(file: BinaryIO) -> PickleSurvey:
    """Say what unpickling would import and claim; `file` then stands behind the pickle. Never raises for its content.

    A pickle can be made to take any time and memory, so this belongs into a process with limits. `file` is buffered,
    and at the start of a pickle.
    """
    start = file.read(2)
    file.seek(-len(start), 1)
    protocol = start[1] if start[:1] == b"\x80" and len(start) > 1 else 0
    surveyor = _Surveyor(file, protocol)
    truncated, malformed, content = False, False, None
    try:
        content = surveyor.load()
    except EOFError:
        truncated = True
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a broken pickle raises whatever its instructions run into
        truncated = "truncated" in str(error)
        malformed = not truncated
    allowed = _get_allowed_globals()
    imports = tuple(name for name in surveyor.imports if name not in allowed)
    return PickleSurvey(imports, surveyor.storages, protocol, truncated, malformed or surveyor.malformed, content)
