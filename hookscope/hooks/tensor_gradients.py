"""Record and edit the gradients of given tensors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hookscope.errors import UsageError


@dataclass(frozen=True, slots=True)
class TensorGradients:
    """Gradients of named tensors.

    Attributes:
        arrived: (name, gradient) in order of arrival, each a copy after all of its edits.
        edits: The hook of each edit by name: `edits["c"].remove()` removes one before the backward pass.
    """

    arrived: list[tuple[str, Tensor]]
    edits: dict[str, RemovableHandle]

    def __getitem__(self, name: str) -> Tensor:
        """Return the latest gradient of a tensor; raise KeyError if none has arrived."""
        return dict(self.arrived)[name]


@contextmanager
def tensor_gradients(
    tensors: Mapping[str, Tensor], edits: Mapping[str, Callable[[Tensor], Tensor | None]] | None = None
) -> Iterator[TensorGradients]:
    """Record, and optionally edit, the gradients of given tensors while the block runs a backward pass.

        with hookscope.tensor_gradients({"b": b, "c": c}, edits={"c": lambda gradient: gradient * 2}) as gradients:
            loss.backward()
        gradients["b"]

    Args:
        tensors: Tensors by any names; all must require a gradient, but need not be leaves.
        edits: By the same names, functions of the gradient that return its replacement, or None to keep it.

    Yields:
        The gradients as they arrive. All hooks are removed at the end of the block.

    Raises:
        UsageError: If a tensor requires no gradient, or an edit has a name that `tensors` lacks.
    """
    edits = edits or {}
    unknown = next((name for name in edits if name not in tensors), None)
    if unknown is not None:
        raise UsageError(f"The edit {unknown!r} names no tensor. Tensors: {', '.join(tensors) or 'none'}.")
    without = next((name for name, tensor in tensors.items() if not tensor.requires_grad), None)
    if without is not None:
        raise UsageError(f"Tensor {without!r} requires no gradient: call requires_grad_() before computing with it.")
    gradients = TensorGradients([], {})
    handles: list[RemovableHandle] = []

    def record(name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # None if only another output of the operation received one
            gradients.arrived.append((name, gradient.detach().clone()))

    try:
        for name, edit in edits.items():  # before all records: two names may mean one tensor
            gradients.edits[name] = tensors[name].register_hook(edit)  # type: ignore[no-untyped-call]
        for name, tensor in tensors.items():
            handles.append(tensor.register_hook(partial(record, name)))  # type: ignore[no-untyped-call]
        yield gradients
    finally:
        for handle in (*gradients.edits.values(), *handles):
            handle.remove()
