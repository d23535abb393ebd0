"""Read a pickle without importing or calling anything that it names.

Python's unpickler imports what a pickle names, calls it, and hands it a state. This one knows the same instructions and
does none of that: a name becomes a `Global`, a call a `StandIn` that remembers the name and the arguments, a reference
to a storage a `Reference`. `docs/security.md` has a table of what each instruction may do; keep it up to date. No torch
is needed. Reading can take any time and memory, so it belongs in a process with limits.
"""

import pickle
import struct
import warnings
from _codecs import escape_decode
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # Python 2's module names to Python 3's
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

ABSENT: Final = object()
"""The state of a `StandIn` that no BUILD has given one."""

PLAIN_INSTRUCTIONS = frozenset(
    {
        *(pickle.PROTO, pickle.GLOBAL, pickle.REDUCE, pickle.BUILD, pickle.BINPERSID),
        *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.MARK),
        *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
        *(pickle.NEWFALSE, pickle.NEWTRUE, pickle.NONE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
        *(pickle.BINFLOAT, pickle.BINUNICODE),
    }
)
"""The instructions of the pickles that torch.save writes of plain values; torch's safe reader knows all of them."""

# No dict of a checkpoint has a longer key, or numbers of more digits.
_KEY_LENGTH_LIMIT = 16
_DIGITS_LIMIT = 4300
_INTEGER_BYTES_LIMIT = 1700

_SCALARS = (str, int, float, bool, bytes, type(None))


@dataclass(eq=False, repr=False, slots=True)
class Global:
    """A class or function that a pickle names: its dotted name, and nothing else."""

    name: str


@dataclass(eq=False, repr=False, slots=True)
class StandIn:
    """Stands for the result of a call that the pickle asks for and nobody makes: its name, its arguments, its changes.

    If a result is called itself, "()" follows the name. `keywords` are those of NEWOBJ_EX, `state` is the argument of
    BUILD, `entries` are those of SETITEM, `elements` those of APPEND and ADDITEMS.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    state: Any = ABSENT
    entries: list[tuple[Any, Any]] = field(default_factory=list)
    elements: list[Any] = field(default_factory=list)


@dataclass(eq=False, repr=False, slots=True)
class Reference:
    """A persistent identifier: in torch's files the name of a storage."""

    identifier: Any


class UnreadablePickleError(Exception):
    """A pickle is damaged, or does what no program writes."""


class TruncatedPickleError(EOFError):
    """A pickle ends before its STOP instruction."""


class InertUnpickler:
    """Reads one pickle from a file that can seek: its `globals` by dotted name, `calls` and `references`, in order."""

    def __init__(self, file: BinaryIO) -> None:
        """Begin at the file's position. Afterwards the file stands behind the pickle."""
        self._file = file
        begin = file.tell()
        self._end = file.seek(0, 2)
        file.seek(begin)
        self.globals: dict[str, Global] = {}
        self.calls: list[StandIn] = []
        self.references: list[Reference] = []
        self.instructions: set[bytes] = set()
        self.protocol = 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Return what the pickle holds: Python's own values and containers, and stand-ins.

        Raises TruncatedPickleError, UnreadablePickleError, MemoryError.
        """
        read, seen, handlers = self._file.read, self.instructions, _HANDLERS
        try:
            while (opcode := read(1)) != pickle.STOP:
                if not opcode:
                    raise TruncatedPickleError
                seen.add(opcode)
                handlers[opcode](self)
            return self._stack.pop()
        except (KeyError, IndexError, ValueError, struct.error) as error:
            raise UnreadablePickleError(type(error).__name__) from error

    # ------------------------------------------------------------------------------------------------------- the bytes

    def _read(self, count: int) -> bytes:
        if count < 0 or count > self._end - self._file.tell():
            raise TruncatedPickleError
        return self._file.read(count)

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._read(struct.calcsize(layout)))[0]

    def _counted(self, layout: str) -> bytes:
        return self._read(self._number(layout))

    def _line(self) -> bytes:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise TruncatedPickleError
        return line[:-1]

    # ------------------------------------------------------------------------------------------------------- the stack

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _pop(self) -> None:
        if not self._stack:  # Python's unpicklers do the same
            self._since_mark()
        else:
            self._stack.pop()

    def _popped(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise UnreadablePickleError("too few values")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _remember(self, index: int) -> None:
        if index < 0:
            raise UnreadablePickleError("a negative index")
        self._memo[index] = self._stack[-1]

    # ------------------------------------------------------------------------------------------------------ containers

    def _extend(self, kind: type, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is StandIn:
            target.elements += items
        elif kind is list and type(target) is list:
            target += items
        elif kind is set and type(target) is set:
            target.update(map(_hashable, items))
        else:
            raise UnreadablePickleError(f"elements for a {type(target).__name__}")

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise UnreadablePickleError("a key without a value")
        pairs = [*zip(map(_hashable, items[::2]), items[1::2], strict=True)]
        if type(target) is dict:
            target.update(pairs)
        elif type(target) is OrderedDict:
            for key, value in pairs:
                OrderedDict.__setitem__(target, key, value)
        elif type(target) is StandIn:
            target.entries += pairs
        else:
            raise UnreadablePickleError(f"entries for a {type(target).__name__}")

    def _dict(self) -> None:
        items = self._since_mark()
        self._push({})
        self._set(items)

    # ------------------------------------------------------------------------------------- what a pickle names or calls

    def _global(self, module: object, name: object) -> Global:
        if type(module) is not str or type(name) is not str:
            raise UnreadablePickleError("a name that is no text")
        if self.protocol < 3:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return self.globals.setdefault(f"{module}.{name}", Global(f"{module}.{name}"))

    def _named(self) -> Global:
        return self._global(self._line().decode(), self._line().decode())

    def _called(self, function: object, arguments: object, keywords: object = None) -> Any:
        if type(function) is Global:
            name = function.name
        elif type(function) is StandIn:
            name = f"{function.name.removesuffix('()')}()"
        else:
            raise UnreadablePickleError(f"a call of a {type(function).__name__}")
        if type(arguments) is not tuple or (keywords is not None and type(keywords) is not dict):
            raise UnreadablePickleError("arguments that are no tuple")
        call = StandIn(name, arguments, keywords or {})
        make = _PLAIN_CALLS.get(name)
        made = call if make is None or keywords else make(call)
        if made is call:
            self.calls.append(call)
        return made

    def _object(self) -> Any:
        function, *arguments = self._since_mark()
        return self._called(function, tuple(arguments))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is StandIn and target.state is ABSENT:
            target.state = state
        elif type(target) is OrderedDict and type(state) is dict:
            versions = state.get("_metadata")  # torch keeps a dict there; anything else could hide a method
            if isinstance(versions, dict):
                vars(target)["_metadata"] = versions
        else:
            raise UnreadablePickleError(f"a state for a {type(target).__name__}")

    def _referred(self, identifier: Any) -> Any:
        match identifier:
            case ("module", Global() as kind, _, _):  # in torch's old format
                return kind
        self.references.append(Reference(identifier))
        return self.references[-1]

    def _set_protocol(self) -> None:
        self.protocol = self._read(1)[0]
        if self.protocol > pickle.HIGHEST_PROTOCOL:
            raise UnreadablePickleError(f"protocol {self.protocol}")


def _hashable(key: Any) -> Any:
    """Return a key; raise UnreadablePickleError if its hash could run code, or take any time."""
    kind = type(key)
    if kind in _SCALARS or kind is StandIn or kind is Global:
        return key
    flat = kind is tuple and len(key) <= _KEY_LENGTH_LIMIT and all(type(item) in _SCALARS for item in key)
    if not flat:
        raise UnreadablePickleError(f"a {kind.__name__} as a key")
    return key


def _ordered_dict(call: StandIn) -> Any:
    if not call.arguments:
        return OrderedDict()
    (pairs,) = call.arguments if len(call.arguments) == 1 else (None,)
    if type(pairs) is not list or any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in pairs):
        return call
    return OrderedDict((_hashable(key), value) for key, value in pairs)


def _set_of(kind: type[set[Any]] | type[frozenset[Any]]) -> Callable[[StandIn], Any]:
    def made(call: StandIn) -> Any:
        items = call.arguments[0] if len(call.arguments) == 1 else [] if not call.arguments else None
        return kind(map(_hashable, items)) if type(items) in (list, tuple) else call  # type: ignore[arg-type]

    return made


def _bytearray(call: StandIn) -> Any:
    match call.arguments:
        case ():
            return bytearray()
        case (data,) if type(data) is bytes:
            return bytearray(data)
        case (str(text), "latin-1" | "latin1"):
            return bytearray(text, "latin-1")
    return call


def _complex(call: StandIn) -> Any:
    is_plain = len(call.arguments) == 2 and all(type(argument) in (int, float) for argument in call.arguments)
    try:
        return complex(*call.arguments) if is_plain else call
    except OverflowError:
        return call


def _encoded(call: StandIn) -> Any:
    match call.arguments:
        case (str(text), "latin1"):
            return text.encode("latin-1")
    return call


# The calls that make Python's own values, which protocol 2 has no instructions for. Code of ours makes them.
_PLAIN_CALLS: dict[str, Callable[[StandIn], Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "builtins.set": _set_of(set),
    "builtins.frozenset": _set_of(frozenset),
    "builtins.bytes": lambda call: call if call.arguments else b"",
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "_codecs.encode": _encoded,
}


def _text_int(line: bytes) -> int | bool:
    if line in (b"00", b"01"):  # how protocol 0 writes False and True
        return line == b"01"
    return _decimal(line)


def _decimal(line: bytes) -> int:
    if len(line) > _DIGITS_LIMIT:
        raise UnreadablePickleError("a number of too many digits")
    return int(line)


def _quoted(line: bytes) -> str:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise UnreadablePickleError("a text without quotes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes that mean nothing
        content, _ = escape_decode(line[1:-1])
    return content.decode("latin-1")


def _integer(content: bytes) -> int:
    if len(content) > _INTEGER_BYTES_LIMIT:  # near the 4,300 digits that Python refuses to print
        raise UnreadablePickleError("a number of too many digits")
    return int.from_bytes(content, "little", signed=True)


def _utf8(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


_M = InertUnpickler
_Handler = Callable[[InertUnpickler], object]


def _pushing(make: Callable[[InertUnpickler], Any]) -> _Handler:
    return lambda machine: machine._push(make(machine))


# ruff: noqa: SLF001 - the handlers are the machine's own, in a table so that they can be counted against the documents.
_HANDLERS: dict[bytes, _Handler] = {
    # The frame of the pickle, which is only a hint of how much to read ahead.
    pickle.PROTO: _M._set_protocol,
    pickle.FRAME: lambda m: m._number("<Q"),
    # Values
    pickle.NONE: _pushing(lambda _: None),
    pickle.NEWTRUE: _pushing(lambda _: True),
    pickle.NEWFALSE: _pushing(lambda _: False),
    pickle.INT: _pushing(lambda m: _text_int(m._line())),
    pickle.LONG: _pushing(lambda m: _decimal(m._line().removesuffix(b"L"))),
    pickle.BININT: _pushing(lambda m: m._number("<i")),
    pickle.BININT1: _pushing(lambda m: m._number("<B")),
    pickle.BININT2: _pushing(lambda m: m._number("<H")),
    pickle.LONG1: _pushing(lambda m: _integer(m._counted("<B"))),
    pickle.LONG4: _pushing(lambda m: _integer(m._counted("<i"))),
    pickle.FLOAT: _pushing(lambda m: float(m._line())),
    pickle.BINFLOAT: _pushing(lambda m: m._number(">d")),
    pickle.STRING: _pushing(lambda m: _quoted(m._line())),
    pickle.BINSTRING: _pushing(lambda m: m._counted("<i").decode("latin-1")),
    pickle.SHORT_BINSTRING: _pushing(lambda m: m._counted("<B").decode("latin-1")),
    pickle.UNICODE: _pushing(lambda m: m._line().decode("raw-unicode-escape")),
    pickle.BINUNICODE: _pushing(lambda m: _utf8(m._counted("<I"))),
    pickle.SHORT_BINUNICODE: _pushing(lambda m: _utf8(m._counted("<B"))),
    pickle.BINUNICODE8: _pushing(lambda m: _utf8(m._counted("<Q"))),
    pickle.BINBYTES: _pushing(lambda m: m._counted("<I")),
    pickle.SHORT_BINBYTES: _pushing(lambda m: m._counted("<B")),
    pickle.BINBYTES8: _pushing(lambda m: m._counted("<Q")),
    pickle.BYTEARRAY8: _pushing(lambda m: bytearray(m._counted("<Q"))),
    # Containers
    pickle.EMPTY_TUPLE: _pushing(lambda _: ()),
    pickle.TUPLE1: _pushing(lambda m: tuple(m._popped(1))),
    pickle.TUPLE2: _pushing(lambda m: tuple(m._popped(2))),
    pickle.TUPLE3: _pushing(lambda m: tuple(m._popped(3))),
    pickle.TUPLE: _pushing(lambda m: tuple(m._since_mark())),
    pickle.EMPTY_LIST: _pushing(lambda _: []),
    pickle.LIST: _pushing(_M._since_mark),
    pickle.APPEND: lambda m: m._extend(list, m._popped(1)),
    pickle.APPENDS: lambda m: m._extend(list, m._since_mark()),
    pickle.EMPTY_DICT: _pushing(lambda _: {}),
    pickle.DICT: _M._dict,
    pickle.SETITEM: lambda m: m._set(m._popped(2)),
    pickle.SETITEMS: lambda m: m._set(m._since_mark()),
    pickle.EMPTY_SET: _pushing(lambda _: set()),
    pickle.ADDITEMS: lambda m: m._extend(set, m._since_mark()),
    pickle.FROZENSET: _pushing(lambda m: frozenset(map(_hashable, m._since_mark()))),
    # The stack and the memo
    pickle.MARK: _M._mark,
    pickle.POP: _M._pop,
    pickle.POP_MARK: _M._since_mark,
    pickle.DUP: lambda m: m._push(m._stack[-1]),
    pickle.PUT: lambda m: m._remember(_decimal(m._line())),
    pickle.BINPUT: lambda m: m._remember(m._number("<B")),
    pickle.LONG_BINPUT: lambda m: m._remember(m._number("<I")),
    pickle.MEMOIZE: lambda m: m._remember(len(m._memo)),
    pickle.GET: lambda m: m._push(m._memo[_decimal(m._line())]),
    pickle.BINGET: lambda m: m._push(m._memo[m._number("<B")]),
    pickle.LONG_BINGET: lambda m: m._push(m._memo[m._number("<I")]),
    # Names, calls and states: remembered, and nothing more
    pickle.GLOBAL: _pushing(_M._named),
    pickle.STACK_GLOBAL: _pushing(lambda m: m._global(*m._popped(2))),
    pickle.REDUCE: _pushing(lambda m: m._called(*m._popped(2))),
    pickle.NEWOBJ: _pushing(lambda m: m._called(*m._popped(2))),
    pickle.NEWOBJ_EX: _pushing(lambda m: m._called(*m._popped(3))),
    pickle.INST: _pushing(lambda m: m._called(m._named(), tuple(m._since_mark()))),
    pickle.OBJ: _pushing(_M._object),
    pickle.BUILD: _M._build,
    pickle.PERSID: _pushing(lambda m: m._referred(m._line().decode("ascii"))),
    pickle.BINPERSID: _pushing(lambda m: m._referred(m._stack.pop())),
    # EXT1, EXT2 and EXT4 name classes by numbers of a registry, NEXT_BUFFER and READONLY_BUFFER memory that is
    # not in the file: no checkpoint has any.
}
