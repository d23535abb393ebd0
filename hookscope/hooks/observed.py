"""What hooks show: calls of modules, their outputs, and where gradients pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

Role = Literal["output", "input"]

SiteKey = tuple[str, int, str, Role]
"""(layer, call, slot, role)."""


class ModuleCall(NamedTuple):
    """One call of one module.

    Attributes:
        layer: The name it was given to `capture` under.
        call: 0 for its first call since the block began or `Capture.restart`, 1 for the second.
        inputs: Tensors it was called with, (path, tensor): "[0]" the first argument, "['mask']" a keyword. An in-place
            module has overwritten them by now.
    """

    layer: str
    module: nn.Module
    call: int
    inputs: Sequence[tuple[str, Tensor]]


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
    """

    layer: str
    call: int
    slot: str
    value: T | None
    passed_through: bool
    in_place: bool
    repeats: tuple[str, int, str] | None


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

    @property
    def key(self) -> SiteKey:
        """What names the site within one pass."""
        return (self.layer, self.call, self.slot, self.role)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; that of a nested one is (parts, -1)."""
    return (tensor.size(0), -1) if tensor.is_nested else tensor.shape
