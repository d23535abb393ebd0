"""The stand-ins in what a pickle holds: what to put in their place, and which remain."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from hookscope.checkpoints.nested import parts_in, values_in
from hookscope.checkpoints.unpickler import ABSENT, Global, Reference, StandIn, UnreadablePickleError
from hookscope.text import counted, printable

_MODULE_KEYS = ("_parameters", "_buffers", "_modules")  # what a pickled module keeps its tensors and its parts in

# No network nests deeper, or has more parts than this.
_NESTED_MODULES_LIMIT = 200
_MODULES_LIMIT = 100_000

# What torch calls to make a tensor out of a storage.
_TENSOR_CALLS = frozenset(
    f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "qtensor", "sparse_tensor")
)

_LISTED_KINDS = 5  # kinds of skipped objects that a sentence lists
_TUPLES_LIMIT = 100  # quantised layers pack their tensors two tuples deep


def replace_stand_ins(content: Any, replacement: Callable[[StandIn], Any]) -> Any:
    """Return content with `replacement` of each stand-in in its place; dicts and lists are changed themselves.

    What a replacement holds is gone through as well. Keys and the members of sets stay as they are. Raises what
    `replacement` does; UnreadablePickleError for tuples in tuples without end.
    """
    replaced: dict[int, tuple[Any, Any]] = {}  # by id; the objects are kept, so no id is used twice
    seen: dict[int, Any] = {}
    waiting: list[Any] = []

    def noted(value: Any) -> Any:
        if isinstance(value, dict | list) and id(value) not in seen:
            seen[id(value)] = value
            waiting.append(value)
        return value

    def replaced_by(value: Any, depth: int = 0) -> Any:
        if not isinstance(value, StandIn | tuple):
            return noted(value)
        if id(value) not in replaced:
            if depth > _TUPLES_LIMIT:
                raise UnreadablePickleError("tuples in tuples without end")
            if isinstance(value, StandIn):
                new = noted(replacement(value))
            else:
                new = tuple([replaced_by(item, depth + 1) for item in value])
            replaced[id(value)] = value, new
        return replaced[id(value)][1]

    content = replaced_by(content)
    while waiting:
        part = waiting.pop()
        kind: Any = dict if isinstance(part, dict) else list
        for key, value in [*dict.items(part)] if kind is dict else enumerate(part):
            kind.__setitem__(part, key, replaced_by(value))
    return content


def is_bare(call: StandIn) -> bool:
    """Return whether a stand-in is nothing but a call: it has no state, entries, elements or keywords."""
    return call.state is ABSENT and not (call.entries or call.elements or call.keywords)


def is_empty_hooks(value: object) -> bool:
    """Return whether a value is what torch writes for the backward hooks of a tensor: an empty OrderedDict, or None."""
    return value is None or (type(value) is OrderedDict and not value)


class ModuleState(OrderedDict[str, Any]):
    """The state dict of a pickled module, whose class was not imported; `class_name` is its dotted name."""

    __slots__ = ("class_name",)

    class_name: str


def module_state(call: StandIn) -> ModuleState | None:
    """Return what `state_dict()` of a pickled module would, stand-ins for its tensors included; None for other objects.

    In the module's order: its parameters, its persistent buffers, and those of its parts. Raises UnreadablePickleError
    for modules in modules without end.
    """
    if not _is_module(call):
        return None
    state = ModuleState()
    state.class_name = class_of(call)
    waiting: list[tuple[str, StandIn, int]] = [("", call, 0)]
    count = 0
    while waiting:
        prefix, module, depth = waiting.pop()
        count += 1
        if depth > _NESTED_MODULES_LIMIT or count > _MODULES_LIMIT:
            raise UnreadablePickleError("modules in modules without end")
        parameters, buffers, parts = (
            {name: value for name, value in dict.items(module.state[key]) if type(name) is str and value is not None}
            for key in _MODULE_KEYS
        )
        transient = module.state.get("_non_persistent_buffers_set")
        kept = {name: value for name, value in buffers.items() if not (type(transient) is set and name in transient)}
        others = ((name, value) for name, value in dict.items(module.state) if isinstance(value, StandIn))
        packed = {name: value for name, value in others if value.name == "torch.ScriptObject"}  # of int8 layers
        state.update((prefix + name, value) for held in (parameters, kept, packed) for name, value in held.items())
        inner = [(f"{prefix}{name}.", part, depth + 1) for name, part in parts.items() if _is_module(part)]
        waiting += reversed(inner)
    return state


def _is_module(value: object) -> bool:
    state = value.state if isinstance(value, StandIn) else None
    return type(state) is dict and all(isinstance(state.get(key), dict) for key in _MODULE_KEYS)


def class_of(call: StandIn) -> str:
    """Return the dotted name of an object's class, as far as a call tells."""
    match call:
        case StandIn(name="torch._tensor._rebuild_from_type_v2", arguments=(_, Global(name=name), *_)):
            return name
        case StandIn(arguments=(Global(name=name), *_)) if call.name.startswith("copyreg."):
            return name
    return call.name


def kind_of(value: object) -> str:
    """Return the class of a value for a message; for stand-ins and pickled modules, the class that the file names."""
    match value:
        case ModuleState(class_name=name) | Global(name=name):
            return printable(name, 80)
    return printable(class_of(value) if isinstance(value, StandIn) else type(value).__name__, 80)


def skipped_objects(content: object) -> str:
    """Return "3 objects of argparse.Namespace, 1 of …": the stand-ins in dicts, lists and tuples; "" for none."""
    kinds: Counter[str] = Counter()
    objects: dict[int, StandIn] = {}
    for part in parts_in(content):
        if isinstance(part, StandIn) and id(part) not in objects:
            objects[id(part)] = part
            kinds[class_of(part)] += 1
        elif isinstance(part, Global | Reference):
            kinds[part.name if isinstance(part, Global) else "a storage"] += 1
    if not kinds:
        return ""
    inside = parts_in([*objects.values()], _held_by)  # what objects share is gone through once
    tensors = sum(isinstance(part, StandIn) and part.name in _TENSOR_CALLS for part in inside)
    (first, count), *others = kinds.most_common(_LISTED_KINDS)
    text = f"{counted(count, 'object')} of {printable(first, 80)}"
    text += "".join(f", {count} of {printable(name, 80)}" for name, count in others)
    more = len(kinds) - _LISTED_KINDS
    text += f" and others of {counted(more, 'kind')}" if more > 0 else ""
    return f"{text}; {counted(tensors, 'tensor')} inside {'it' if kinds.total() == 1 else 'them'}" if tensors else text


def _held_by(part: object) -> Iterable[object]:
    if isinstance(part, StandIn):
        return part.arguments, part.keywords, part.state, part.entries, part.elements
    return values_in(part)
