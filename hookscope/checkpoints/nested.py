"""What files hold: tensors, those of torch or stand-ins, in nested dicts, lists and tuples. No torch is needed."""

from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Bytes of an element, by torch's name of the dtype.
ITEM_BYTES = {
    "complex128": 16,
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys((f"float8_{name}" for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")), 1),
    "float4_e2m1fn_x2": 1,
}


class TensorLike(ABC):
    """A tensor in what a file holds: torch's, recognised by its name so that torch is not imported, or a stand-in."""

    __slots__ = ()

    shape: Any
    dtype: Any

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return (cls is TensorLike and _descends(kind, "torch.Tensor")) or NotImplemented


class ModuleLike(ABC):  # noqa: B024 - nothing is called
    """A Module in what a trusted file holds."""

    __slots__ = ()

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return (cls is ModuleLike and _descends(kind, "torch.nn.modules.module.Module")) or NotImplemented


def _descends(kind: type, name: str) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" == name for base in kind.__mro__)


def is_floating_point(tensor: TensorLike) -> bool:
    """Return whether the elements of a tensor are floating-point numbers."""
    return "float" in str(tensor.dtype)


def values_in(part: object) -> Iterable[object]:
    """Return what a dict, list or tuple holds directly; nothing for anything else."""
    return dict.values(part) if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()


def parts_in(content: object, inside: Callable[[object], Iterable[object]] = values_in) -> Iterator[object]:
    """Yield content and everything in its dicts, lists and tuples, no container twice, in the file's order."""
    seen: dict[int, object] = {}
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        if held := [*inside(part)]:
            seen[id(part)] = part
            waiting += reversed(held)
        yield part


def tensors_in(content: object) -> Iterator[TensorLike]:
    """Yield the tensors in nested dicts, lists and tuples, no container twice, in the file's order."""
    return (part for part in parts_in(content) if isinstance(part, TensorLike))
