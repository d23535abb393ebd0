"""What hooks show: calls of modules and operations, their outputs, and where gradients pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

Role = Literal["output", "input"]

SiteKey = tuple[str, int, str, Role]
"""(layer, call, slot, role)."""


Place = tuple[str, int, str]
"""(layer, call, slot)."""


class Operation(NamedTuple):
    """A torch function, tensor method or operator that a module's own forward code calls.

    Attributes:
        name: torch's, without the marks of operators and of writing in place: "add" for `+`, `+=` and `add_`.
        owner: Dotted name of the module whose forward calls it.
        source: The line that calls it, "net.py:14"; "" if no Python code of the network does.
    """

    name: str
    owner: str
    source: str


class ModuleCall(NamedTuple):
    """One call of one module, or of one operation.

    Attributes:
        layer: The name it was given to `capture` under; of an operation "MODULE:NAME".
        module: The module; of an operation the one whose forward calls it.
        call: 0 for its first call since the block began or `Capture.restart`, 1 for the second.
        inputs: Tensors it was called with, (path, tensor): "[0]" the first argument, "['mask']" a keyword. An in-place
            module has overwritten them by now.
        operation: What is called; None for the module itself.
    """

    layer: str
    module: nn.Module
    call: int
    inputs: Sequence[tuple[str, Tensor]]
    operation: Operation | None = None

    @property
    def maker(self) -> nn.Module | str:
        """What computed the output: the module, or the operation's name."""
        return self.module if self.operation is None else self.operation.name


class Observation(NamedTuple, Generic[T]):
    """What was observed of one output tensor.

    Attributes:
        call: As `ModuleCall.call`.
        slot: Path inside a nested output; "" for a plain tensor.
        value: What `observe` returned; None if the module returned no tensor at all.
        passed_through: The output is an input, unchanged. Not known of inference tensors.
        in_place: The module overwrote one of its inputs. Of inference tensors known only for torch's own activations.
        repeats: Where the tensor was observed first, (layer, call, slot), if it is passed through and was observed
            before in this forward pass, and nothing has written to it since; else None.
        operation: What was called; None for a module.
        sources: Where the input tensors came from, in order, if operations are observed: the place that showed the
            tensor, the name of a parameter or buffer, "input" for the network's own, "" for anything else.
    """

    layer: str
    call: int
    slot: str
    value: T | None
    passed_through: bool
    in_place: bool
    repeats: Place | None
    operation: Operation | None = None
    sources: tuple[Place | str, ...] = ()


@dataclass(slots=True)
class GradientSite(Generic[T]):
    """One output, or one input, of one call of one module, and what became of its gradient.

    Attributes:
        call: 0 for its first call in the forward pass, 1 for its second.
        slot: Path inside a nested output, "" for a plain tensor; inside the arguments, "[0]" for the first.
        role: "output" for grad_output, "input" for grad_input.
        shape: The tensor's; -1 for a ragged axis; () if there is none.
        dtype: The tensor's; None if there is none.
        untracked: Why autograd does not track the tensor; "" if it does.
        arrival: Position in the order in which gradients arrived, from 0; None if none has.
        value: What the observer returned for the gradient; None if none has arrived.
        operation: What returned the tensor; None for the module.
    """

    layer: str
    module: nn.Module
    call: int
    slot: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    untracked: str
    arrival: int | None = None
    value: T | None = None
    operation: Operation | None = None

    @property
    def maker(self) -> nn.Module | str:
        """As `ModuleCall.maker`."""
        return self.module if self.operation is None else self.operation.name

    @property
    def key(self) -> SiteKey:
        """What names the site within one pass."""
        return (self.layer, self.call, self.slot, self.role)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; that of a nested one is (parts, -1)."""
    return (tensor.size(0), -1) if tensor.is_nested else tensor.shape
