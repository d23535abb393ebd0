"""What files hold: tensors, those of torch or stand-ins, in nested dicts, lists and tuples. No torch is needed."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class TensorLike(ABC):
    """A tensor in what a file holds: torch's, recognised by its name so that torch is not imported, or a stand-in."""

    __slots__ = ()

    shape: Any
    dtype: Any

    @abstractmethod
    def dim(self) -> int:
        """Return how many axes it has."""

    @abstractmethod
    def is_floating_point(self) -> bool:
        """Return whether its elements are."""

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


def tensors_in(content: object) -> Iterator[TensorLike]:
    """Yield the tensors anywhere in nested dicts, lists and tuples, each of these once, in the file's order."""
    seen: set[int] = set()
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if isinstance(part, TensorLike):
            yield part
        elif isinstance(part, dict | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            waiting += reversed([*(dict.values(part) if isinstance(part, dict) else part)])
